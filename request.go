package sandboxer

import (
	"bytes"
	"encoding/json"
	"time"
)

// CreateRequest asks for a sandbox. Zero fields take the profile's values.
type CreateRequest struct {
	Profile  string            `json:"profile" example:"profile.local" doc:"Also accepted without its prefix: local"`
	Inputs   map[string]string `json:"inputs,omitempty" example:"{\"repo\":\"/src/app\"}" doc:"The profile's key=value arguments"`
	Name     string            `json:"name,omitempty" example:"build" doc:"Unique among the tenant's live sandboxes"`
	TTL      time.Duration     `json:"ttl,omitempty" example:"30m" doc:"How long it lives, or idle: as long as it is used, at most the profile's max_ttl"`
	Idle     time.Duration     `json:"idle,omitempty" example:"10m" doc:"Time without use after which on_idle applies; at most the profile's"`
	OnIdle   ExpiryAction      `json:"on_idle,omitempty" enum:"destroy,pause" doc:"What happens then; pause unless the profile says destroy"`
	OnTTL    ExpiryAction      `json:"on_ttl,omitempty" enum:"destroy,pause" doc:"What happens when it expires; pause unless the profile says destroy"`
	Consumer Consumer          `json:"consumer,omitzero" doc:"Requester, for attribution"`
	Labels   map[string]string `json:"labels,omitempty"`
	Env      map[string]string `json:"env,omitempty" doc:"Environment of the sandbox's processes; never returned"`
	Secrets  map[string]string `json:"secrets,omitempty" doc:"Environment variables whose values are secrets of the tenant: the name of a secret, by variable. The profile lists the secrets that may be used. A sandbox keeps the version that it was created with"`
	Limits   Limits            `json:"limits,omitzero"`
	Network  *NetworkPolicy    `json:"network,omitempty"`
	Command  []string          `json:"command,omitempty" doc:"Main process"`
	Image    string            `json:"image,omitempty"`
	User     string            `json:"user,omitempty" maxLength:"64" doc:"Default user of commands, and owner of the workspace: name or uid[:gid]"`
	Mounts   []Mount           `json:"mounts,omitempty"`
	Host     string            `json:"host,omitempty" doc:"Requested host"`
	MaxCost  Credits           `json:"max_cost,omitempty" example:"0.50" doc:"Refuse when the quote is higher"` // NoCredit when the quote is higher; 0 means no bound
	Thread   Thread            `json:"thread,omitzero" doc:"Gives the sandbox a deterministic ID"`

	// Key is the idempotency key. With NoWaiting the answer comes as soon as the record is committed,
	// while the sandbox is still creating. Over HTTP both are headers: Idempotency-Key, which the
	// client generates if Key is empty, and Prefer: respond-async.
	Key       string `json:"-"`
	NoWaiting bool   `json:"-"`
}

// RestoreRequest asks for a new sandbox from a snapshot. Zero fields take the values of the profile.
// Environment and inputs are the source's, with Env and Inputs added.
type RestoreRequest struct {
	Profile string       `json:"profile,omitempty" example:"profile.local" doc:"Default: the source's. On another extension only a portable snapshot can be restored"`
	Kind    SnapshotKind `json:"kind,omitempty" enum:"native,portable" doc:"Default native where that can be restored"`
	// Inputs and Host replace values of the source. They are for the portable form only, because a
	// native one continues unchanged. An empty input removes that of the source.
	Inputs   map[string]string `json:"inputs,omitempty" doc:"Added to the source's; an empty value removes one of those. Only for the portable form"`
	Host     string            `json:"host,omitempty" doc:"Requested host; only for the portable form"`
	Name     string            `json:"name,omitempty" example:"copy"`
	TTL      time.Duration     `json:"ttl,omitempty" example:"30m" doc:"How long it lives, or idle: as long as it is used, at most the profile's max_ttl"`
	Idle     time.Duration     `json:"idle,omitempty" example:"10m" doc:"Time without use after which on_idle applies; at most the profile's"`
	OnIdle   ExpiryAction      `json:"on_idle,omitempty" enum:"destroy,pause" doc:"What happens then; pause unless the profile says destroy"`
	OnTTL    ExpiryAction      `json:"on_ttl,omitempty" enum:"destroy,pause" doc:"What happens when it expires; pause unless the profile says destroy"`
	Consumer Consumer          `json:"consumer,omitzero"`
	Labels   map[string]string `json:"labels,omitempty"`
	Env      map[string]string `json:"env,omitempty" doc:"Added to the source's; never returned"`
	MaxCost  Credits           `json:"max_cost,omitempty"`

	Key       string `json:"-"` // as in CreateRequest
	NoWaiting bool   `json:"-"` // as in CreateRequest
}

// ForkRequest asks for copies of a running sandbox.
type ForkRequest struct {
	Count   int               `json:"count" minimum:"1" maximum:"100" example:"2"`
	TTL     time.Duration     `json:"ttl,omitempty" example:"30m" doc:"How long each lives, or idle: as long as it is used, at most the profile's max_ttl"`
	Labels  map[string]string `json:"labels,omitempty"`
	Env     map[string]string `json:"env,omitempty" doc:"Added to the source's"`
	MaxCost Credits           `json:"max_cost,omitempty" doc:"Of each"`

	Key string `json:"-"` // as in CreateRequest
}

// SnapshotRequest asks for a snapshot of a running sandbox.
type SnapshotRequest struct {
	Name string        `json:"name,omitempty" example:"base" doc:"Unique among the tenant's snapshots"`
	Kind SnapshotKind  `json:"kind,omitempty" enum:"native,portable,both" doc:"native: the extension's own, fast, perhaps with memory. portable: the workspace's files, restored on any extension. Default native where the extension can, else portable"`
	TTL  time.Duration `json:"ttl,omitempty" example:"24h" doc:"Drop it after so long; default never"`
}

// ExtendRequest moves the expiry. TTL counts from now and may also shorten the life; Add counts from
// the present expiry. Exactly one is given.
type ExtendRequest struct {
	TTL time.Duration `json:"ttl,omitempty" example:"1h" doc:"Lifetime from now"`
	Add time.Duration `json:"add,omitempty" doc:"Added to the present expiry"`
}

// PauseRequest says how to pause.
type PauseRequest struct {
	Depth PauseDepth `json:"depth,omitempty" enum:"freeze,disk,files" doc:"Default: the profile's, else freeze where the extension can, else disk"`
}

// ResumeRequest resumes a paused sandbox. Without a TTL its remaining time continues; if none remained,
// the profile's time to live is granted again.
type ResumeRequest struct {
	TTL time.Duration `json:"ttl,omitempty" example:"30m" doc:"Time to live from now; default: the remaining one continues"`
}

// KeyRequest asks for an API key.
type KeyRequest struct {
	Name   string        `json:"name" example:"ci"`
	Tenant string        `json:"tenant,omitempty" example:"default" doc:"The caller's if empty"`
	Scopes []Scope       `json:"scopes" minItems:"1" nullable:"false" enum:"read,write,admin" example:"[\"read\",\"write\"]"`
	TTL    time.Duration `json:"ttl,omitempty" example:"720h" doc:"Never expires if empty"`
	// MaxSpend is Invalid below zero.
	MaxSpend MaxSpend `json:"max_spend,omitzero" doc:"What the key may spend"`
	Consumer string   `json:"consumer,omitempty" maxLength:"40" example:"agent-7" doc:"Binds the key to a consumer: its requests have this consumer, and no other"`
}

// In the API's JSON, requests write durations and money as text: "30m0s", "0.12". Each request
// lists those fields below, and they hide the fields of the same name; everything else
// is as its tags say.

func (r *CreateRequest) text() any {
	type plain CreateRequest
	return &struct {
		*plain
		TTL     *TTLText      `json:"ttl,omitzero"`
		Idle    *DurationText `json:"idle,omitzero"`
		MaxCost *CreditsText  `json:"max_cost,omitzero"`
	}{(*plain)(r), (*TTLText)(&r.TTL), (*DurationText)(&r.Idle), (*CreditsText)(&r.MaxCost)}
}

func (r *RestoreRequest) text() any {
	type plain RestoreRequest
	return &struct {
		*plain
		TTL     *TTLText      `json:"ttl,omitzero"`
		Idle    *DurationText `json:"idle,omitzero"`
		MaxCost *CreditsText  `json:"max_cost,omitzero"`
	}{(*plain)(r), (*TTLText)(&r.TTL), (*DurationText)(&r.Idle), (*CreditsText)(&r.MaxCost)}
}

func (r *ForkRequest) text() any {
	type plain ForkRequest
	return &struct {
		*plain
		TTL     *TTLText     `json:"ttl,omitzero"`
		MaxCost *CreditsText `json:"max_cost,omitzero"`
	}{(*plain)(r), (*TTLText)(&r.TTL), (*CreditsText)(&r.MaxCost)}
}

func (r *SnapshotRequest) text() any {
	type plain SnapshotRequest
	return &struct {
		*plain
		TTL *DurationText `json:"ttl,omitzero"`
	}{(*plain)(r), (*DurationText)(&r.TTL)}
}

func (r *ExtendRequest) text() any {
	type plain ExtendRequest
	return &struct {
		*plain
		TTL *DurationText `json:"ttl,omitzero"`
		Add *DurationText `json:"add,omitzero"`
	}{(*plain)(r), (*DurationText)(&r.TTL), (*DurationText)(&r.Add)}
}

func (r *ResumeRequest) text() any {
	type plain ResumeRequest
	return &struct {
		*plain
		TTL *DurationText `json:"ttl,omitzero"`
	}{(*plain)(r), (*DurationText)(&r.TTL)}
}

func (r *KeyRequest) text() any {
	type plain KeyRequest
	return &struct {
		*plain
		TTL *DurationText `json:"ttl,omitzero"`
	}{(*plain)(r), (*DurationText)(&r.TTL)}
}

// MarshalJSON writes durations and money as text.
func (r CreateRequest) MarshalJSON() ([]byte, error) { return json.Marshal(r.text()) }

// MarshalJSON writes durations and money as text.
func (r RestoreRequest) MarshalJSON() ([]byte, error) { return json.Marshal(r.text()) }

// MarshalJSON writes durations and money as text.
func (r ForkRequest) MarshalJSON() ([]byte, error) { return json.Marshal(r.text()) }

// MarshalJSON writes durations as text.
func (r SnapshotRequest) MarshalJSON() ([]byte, error) { return json.Marshal(r.text()) }

// MarshalJSON writes durations as text.
func (r ExtendRequest) MarshalJSON() ([]byte, error) { return json.Marshal(r.text()) }

// MarshalJSON writes durations as text.
func (r ResumeRequest) MarshalJSON() ([]byte, error) { return json.Marshal(r.text()) }

// MarshalJSON writes durations as text.
func (r KeyRequest) MarshalJSON() ([]byte, error) { return json.Marshal(r.text()) }

// UnmarshalJSON reads the output of MarshalJSON and refuses unknown names. Kind: Invalid for a wrong
// duration or amount.
func (r *CreateRequest) UnmarshalJSON(b []byte) error { return readText(b, r.text()) }

// UnmarshalJSON reads the output of MarshalJSON and refuses unknown names. Kind: Invalid for a wrong
// duration or amount.
func (r *RestoreRequest) UnmarshalJSON(b []byte) error { return readText(b, r.text()) }

// UnmarshalJSON reads the output of MarshalJSON and refuses unknown names. Kind: Invalid for a wrong
// duration or amount.
func (r *ForkRequest) UnmarshalJSON(b []byte) error { return readText(b, r.text()) }

// UnmarshalJSON reads the output of MarshalJSON and refuses unknown names. Kind: Invalid for a wrong
// duration.
func (r *SnapshotRequest) UnmarshalJSON(b []byte) error { return readText(b, r.text()) }

// UnmarshalJSON reads the output of MarshalJSON and refuses unknown names. Kind: Invalid for a wrong
// duration.
func (r *ExtendRequest) UnmarshalJSON(b []byte) error { return readText(b, r.text()) }

// UnmarshalJSON reads the output of MarshalJSON and refuses unknown names. Kind: Invalid for a wrong
// duration.
func (r *ResumeRequest) UnmarshalJSON(b []byte) error { return readText(b, r.text()) }

// UnmarshalJSON reads the output of MarshalJSON and refuses unknown names. Kind: Invalid for a wrong
// duration.
func (r *KeyRequest) UnmarshalJSON(b []byte) error { return readText(b, r.text()) }

func readText(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields() // which a decoder that is strict does not pass on
	return d.Decode(v)
}

// DurationText is a time.Duration written as a Go duration string.
type DurationText time.Duration

// Std returns d as a time.Duration.
func (d DurationText) Std() time.Duration { return time.Duration(d) }

// String returns d as "1h30m0s".
func (d DurationText) String() string { return time.Duration(d).String() }

// IsZero reports whether d is not set.
func (d DurationText) IsZero() bool { return d == 0 }

// MarshalText writes d as "1h30m0s".
func (d DurationText) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText accepts what time.ParseDuration accepts. Kind: Invalid.
func (d *DurationText) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return E(Invalid, nil, "%q is not a duration", b).
			WithHint(`write a number with a unit: "30m", "1h30m", "90s"`)
	}
	*d = DurationText(v)
	return nil
}

// TTLText is a time to live: a DurationText, or TTLIdleText for TTLIdle.
type TTLText time.Duration

// Std returns d as a time.Duration.
func (d TTLText) Std() time.Duration { return time.Duration(d) }

// String returns d as "1h30m0s", or "idle".
func (d TTLText) String() string {
	if d.Std() == TTLIdle {
		return TTLIdleText
	}
	return d.Std().String()
}

// IsZero reports whether d is not set.
func (d TTLText) IsZero() bool { return d == 0 }

// MarshalText writes d as "1h30m0s", or "idle".
func (d TTLText) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText accepts what time.ParseDuration accepts, and "idle". Kind: Invalid.
func (d *TTLText) UnmarshalText(b []byte) error {
	if string(b) == TTLIdleText {
		*d = TTLText(TTLIdle)
		return nil
	}
	var v DurationText
	if err := v.UnmarshalText(b); err != nil {
		return err
	}
	if v.Std() == TTLIdle {
		return E(Invalid, nil, "a time to live of %s is negative", v)
	}
	*d = TTLText(v)
	return nil
}

// CreditsText is an amount of money, written as an exact decimal string of credits.
type CreditsText Credits

// Std returns c as Credits.
func (c CreditsText) Std() Credits { return Credits(c) }

// String returns c with at least two decimals.
func (c CreditsText) String() string { return Credits(c).String() }

// IsZero reports whether c is not set.
func (c CreditsText) IsZero() bool { return c == 0 }

// MarshalText writes c with at least two decimals.
func (c CreditsText) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText reads a decimal with at most six decimals. Kind: Invalid.
func (c *CreditsText) UnmarshalText(b []byte) error {
	v, err := ParseCredits(string(b))
	if err != nil {
		return err
	}
	*c = CreditsText(v)
	return nil
}

package sandboxer

import (
	"bytes"
	"encoding/json"
	"time"
)

// CreateRequest is what a caller asks for. Zero fields take the profile's values.
type CreateRequest struct {
	Profile  string            `json:"profile" example:"profile.local" doc:"Also accepted without its prefix: local"`
	Inputs   map[string]string `json:"inputs,omitempty" example:"{\"repo\":\"/src/app\"}" doc:"The profile's key=value arguments"`
	Name     string            `json:"name,omitempty" example:"build" doc:"Unique among the tenant's live sandboxes"`
	TTL      time.Duration     `json:"ttl,omitempty" example:"30m" doc:"How long it lives, or idle: as long as it is used, at most the profile's max_ttl"`
	Idle     time.Duration     `json:"idle,omitempty" example:"10m" doc:"Nobody may use it for so long until on_idle is done; at most the profile's"`
	OnIdle   ExpiryAction      `json:"on_idle,omitempty" enum:"destroy,pause" doc:"What happens then; pause unless the profile says destroy"`
	OnTTL    ExpiryAction      `json:"on_ttl,omitempty" enum:"destroy,pause" doc:"What happens when its time to live is over; pause unless the profile says destroy"`
	Consumer Consumer          `json:"consumer,omitzero" doc:"Who asked, for attribution"`
	Labels   map[string]string `json:"labels,omitempty"`
	Env      map[string]string `json:"env,omitempty" doc:"Environment of the sandbox's processes; never returned"`
	Limits   Limits            `json:"limits,omitzero"`
	Network  *NetworkPolicy    `json:"network,omitempty"`
	Command  []string          `json:"command,omitempty" doc:"Main process"`
	Image    string            `json:"image,omitempty"`
	User     string            `json:"user,omitempty" maxLength:"64" doc:"Who runs commands that name nobody, and owns the workspace: name or uid[:gid]"`
	Mounts   []Mount           `json:"mounts,omitempty"`
	Host     string            `json:"host,omitempty" doc:"Asked-for placement"`
	MaxCost  Credits           `json:"max_cost,omitempty" example:"0.50" doc:"Refuse when the quote is higher"` // with NoCredit; 0 means no bound
	Thread   Thread            `json:"thread,omitzero" doc:"Gives the sandbox a deterministic ID"`

	// Key is the idempotency key, and NoWaiting asks for an answer as soon as the record is
	// committed, with the sandbox still creating. Over HTTP both are headers:
	// Idempotency-Key, which the client makes if it is empty, and Prefer: respond-async.
	Key       string `json:"-"`
	NoWaiting bool   `json:"-"`
}

// RestoreRequest asks for a new sandbox from a snapshot. Zero fields take the values of
// the profile; environment and inputs are the source's, with Env and Inputs added.
type RestoreRequest struct {
	Profile string       `json:"profile,omitempty" example:"profile.local" doc:"Default: the source's. On another extension only a portable snapshot can be restored"`
	Kind    SnapshotKind `json:"kind,omitempty" enum:"native,portable" doc:"Default native where that can be restored"`
	// Inputs and Host say otherwise than the source had it, and so only for the portable form:
	// a native one goes on as it was. An empty input takes away that of the source.
	Inputs   map[string]string `json:"inputs,omitempty" doc:"Added to the source's, which an empty value takes away; only for the portable form"`
	Host     string            `json:"host,omitempty" doc:"Asked-for placement; only for the portable form"`
	Name     string            `json:"name,omitempty" example:"copy"`
	TTL      time.Duration     `json:"ttl,omitempty" example:"30m" doc:"How long it lives, or idle: as long as it is used, at most the profile's max_ttl"`
	Idle     time.Duration     `json:"idle,omitempty" example:"10m" doc:"Nobody may use it for so long until on_idle is done; at most the profile's"`
	OnIdle   ExpiryAction      `json:"on_idle,omitempty" enum:"destroy,pause" doc:"What happens then; pause unless the profile says destroy"`
	OnTTL    ExpiryAction      `json:"on_ttl,omitempty" enum:"destroy,pause" doc:"What happens when its time to live is over; pause unless the profile says destroy"`
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

// ExtendRequest moves the expiry: TTL counts from now and may also shorten, Add from the present
// expiry. Exactly one is given.
type ExtendRequest struct {
	TTL time.Duration `json:"ttl,omitempty" example:"1h" doc:"Lifetime from now"`
	Add time.Duration `json:"add,omitempty" doc:"Added to the present expiry"`
}

// PauseRequest says how to pause.
type PauseRequest struct {
	Depth PauseDepth `json:"depth,omitempty" enum:"freeze,disk,files" doc:"Default: the profile's, else freeze where the extension can, else disk"`
}

// ResumeRequest says how to go on. Without a TTL what was left goes on, or, where nothing was,
// the profile's is granted anew.
type ResumeRequest struct {
	TTL time.Duration `json:"ttl,omitempty" example:"30m" doc:"Time to live from now; default: what was left goes on"`
}

// AdoptRequest says what the stamp of a quarantined object does not.
type AdoptRequest struct {
	Tenant  string        `json:"tenant,omitempty" doc:"Whose it becomes; only where it has no stamp"`
	Profile string        `json:"profile,omitempty" doc:"What it was made from; only where it has no stamp"`
	TTL     time.Duration `json:"ttl,omitempty" example:"1h" doc:"How long it lives from now; left out: as long as before"` // what its fuse or its profile says
}

// AdoptSnapshotRequest says what a snapshot that the database does not know does not say of
// itself.
type AdoptSnapshotRequest struct {
	Name    string `json:"name,omitempty" doc:"Unique among the tenant's snapshots"`
	Tenant  string `json:"tenant,omitempty" doc:"Whose it becomes; only where it has no stamp, as portable ones have none"`
	Profile string `json:"profile,omitempty" doc:"What it was made from, where it does not say"`
}

// KeyRequest asks for an API key.
type KeyRequest struct {
	Name   string        `json:"name" example:"ci"`
	Tenant string        `json:"tenant,omitempty" example:"default" doc:"The caller's if empty"`
	Scopes []Scope       `json:"scopes" minItems:"1" nullable:"false" enum:"read,write,admin" example:"[\"read\",\"write\"]"`
	TTL    time.Duration `json:"ttl,omitempty" example:"720h" doc:"Never expires if empty"`
}

// In JSON, as the API has them, requests write durations and money as text: "30m0s", "0.12". Each
// says below which of its fields that are, and they hide those of the same name; everything else
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

func (r *AdoptRequest) text() any {
	type plain AdoptRequest
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
func (r CreateRequest) MarshalJSON() ([]byte, error)   { return json.Marshal(r.text()) }
func (r RestoreRequest) MarshalJSON() ([]byte, error)  { return json.Marshal(r.text()) }
func (r ForkRequest) MarshalJSON() ([]byte, error)     { return json.Marshal(r.text()) }
func (r SnapshotRequest) MarshalJSON() ([]byte, error) { return json.Marshal(r.text()) }
func (r ExtendRequest) MarshalJSON() ([]byte, error)   { return json.Marshal(r.text()) }
func (r ResumeRequest) MarshalJSON() ([]byte, error)   { return json.Marshal(r.text()) }
func (r AdoptRequest) MarshalJSON() ([]byte, error)    { return json.Marshal(r.text()) }
func (r KeyRequest) MarshalJSON() ([]byte, error)      { return json.Marshal(r.text()) }

// UnmarshalJSON reads what MarshalJSON writes, and no other names. Kind: Invalid for a duration or
// an amount that is none.
func (r *CreateRequest) UnmarshalJSON(b []byte) error   { return readText(b, r.text()) }
func (r *RestoreRequest) UnmarshalJSON(b []byte) error  { return readText(b, r.text()) }
func (r *ForkRequest) UnmarshalJSON(b []byte) error     { return readText(b, r.text()) }
func (r *SnapshotRequest) UnmarshalJSON(b []byte) error { return readText(b, r.text()) }
func (r *ExtendRequest) UnmarshalJSON(b []byte) error   { return readText(b, r.text()) }
func (r *ResumeRequest) UnmarshalJSON(b []byte) error   { return readText(b, r.text()) }
func (r *AdoptRequest) UnmarshalJSON(b []byte) error    { return readText(b, r.text()) }
func (r *KeyRequest) UnmarshalJSON(b []byte) error      { return readText(b, r.text()) }

func readText(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields() // which a decoder that is strict does not pass on
	return d.Decode(v)
}

// DurationText is a time.Duration written as a Go duration string.
type DurationText time.Duration

// Std returns d as a time.Duration.
func (d DurationText) Std() time.Duration { return time.Duration(d) }

func (d DurationText) String() string { return time.Duration(d).String() }

// IsZero reports whether d is left out.
func (d DurationText) IsZero() bool { return d == 0 }

// MarshalText writes d as "1h30m0s".
func (d DurationText) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText accepts what time.ParseDuration accepts.
func (d *DurationText) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return E(Invalid, nil, "%q is not a duration", b).
			WithHint(`write a number with a unit: "30m", "1h30m", "90s"`)
	}
	*d = DurationText(v)
	return nil
}

// TTLText is a time to live: as DurationText has it, or TTLIdleText for TTLIdle.
type TTLText time.Duration

// Std returns d as a time.Duration.
func (d TTLText) Std() time.Duration { return time.Duration(d) }

func (d TTLText) String() string {
	if d.Std() == TTLIdle {
		return TTLIdleText
	}
	return d.Std().String()
}

// IsZero reports whether d is left out.
func (d TTLText) IsZero() bool { return d == 0 }

// MarshalText writes d as "1h30m0s", or "idle".
func (d TTLText) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText accepts what time.ParseDuration accepts, and "idle".
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

func (c CreditsText) String() string { return Credits(c).String() }

// IsZero reports whether c is left out.
func (c CreditsText) IsZero() bool { return c == 0 }

// MarshalText writes c with at least two decimals.
func (c CreditsText) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText reads a decimal with at most six decimals.
func (c *CreditsText) UnmarshalText(b []byte) error {
	v, err := ParseCredits(string(b))
	if err != nil {
		return err
	}
	*c = CreditsText(v)
	return nil
}

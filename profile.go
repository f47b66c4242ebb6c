package sandboxer

import (
	"strings"
	"time"
)

// Profile is a named kind of sandbox: what they may ask for, on which extension, with
// which defaults and bounds. Its file form is profiles/profile.<slug>.yaml; package
// internal/catalog reads it.
type Profile struct {
	ID          string            `json:"id"` // "profile.<slug>"
	Title       string            `json:"title,omitempty"`
	Description string            `json:"description,omitempty"`
	Extension   string            `json:"extension"` // "ext.<name>"
	Isolation   Isolation         `json:"isolation,omitempty"`
	Requires    []Capability      `json:"requires,omitempty"`
	Image       string            `json:"image,omitempty"`
	Command     []string          `json:"command,omitempty"`
	Env         map[string]string `json:"env,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Limits      Limits            `json:"limits,omitzero"` // what holds where the request names none
	// MaxLimits are the most that who is no administrator may ask for; of what it leaves
	// out, Limits is, and where that says nothing either, what the extension takes by
	// default (Limiter).
	MaxLimits Limits            `json:"max_limits,omitzero"`
	Network   NetworkPolicy     `json:"network,omitzero"`
	Mounts    []Mount           `json:"mounts,omitempty"`
	Ports     []int             `json:"ports,omitempty"`
	Workspace string            `json:"workspace,omitempty"`
	User      string            `json:"user,omitempty"`
	Inputs    map[string]string `json:"inputs,omitempty"` // defaults; the caller's win
	TTL       time.Duration     `json:"ttl_ns,omitempty"` // lifetime when the caller names none; may be TTLIdle
	MaxTTL    time.Duration     `json:"max_ttl_ns,omitempty"`
	// Idle is how long nobody may use a sandbox until OnIdle is done with it; 0 means for ever.
	Idle   time.Duration `json:"idle_ns,omitempty"`
	OnIdle ExpiryAction  `json:"on_idle,omitempty"`
	// OnTTL says what happens when the time to live is over. A paused sandbox costs
	// nothing and is destroyed after MaxPaused (DefaultMaxPaused if zero). PauseDepth is
	// the depth where nobody names one; empty takes what the extension can: for an
	// expiry disk before freeze, for a request freeze before disk. With AutoResume,
	// using a paused sandbox resumes it.
	OnTTL      ExpiryAction  `json:"on_ttl,omitempty"`
	PauseDepth PauseDepth    `json:"pause_depth,omitempty"`
	MaxPaused  time.Duration `json:"max_paused_ns,omitempty"`
	AutoResume bool          `json:"auto_resume,omitempty"`
	// Max is how many of its sandboxes may take room at once (Sandbox.TakesRoom), not counting
	// those that wait in its pool; 0 means as many as its extension takes. Wait is how long a
	// request waits for room, there or on the extension, before it is Exhausted.
	Max  int           `json:"max,omitempty"`
	Wait time.Duration `json:"wait_ns,omitempty"`
	// Ready is what a sandbox has to answer before its user gets it.
	Ready ReadyCheck `json:"ready,omitzero"`
	Price Price      `json:"price,omitzero"` // what tenants pay where the extension quotes nothing
	Pool  Pool       `json:"pool,omitzero"`
	// Builtin is set for what came with the program and no operator wrote or changed.
	Builtin bool `json:"builtin,omitempty"`
}

// Pool keeps sandboxes of a profile ready, so that a create that asks for nothing
// special is answered with one of them. Nobody pays for those that wait, and one that
// was used never comes back.
type Pool struct {
	Size int `json:"size,omitempty"` // how many wait at a time; 0 means no pool
	// MaxAge is how long one waits before a new one takes its place (DefaultPoolAge if
	// zero). It bounds what a broker that never comes back leaves behind, too.
	MaxAge time.Duration `json:"max_age_ns,omitempty"`
}

// MaxPool bounds the size of one pool.
const MaxPool = 1000

// DefaultPoolAge applies where a profile names no age.
const DefaultPoolAge = time.Hour

// Price is a profile's own tariff.
type Price struct {
	Setup   Credits `json:"setup,omitempty"`
	PerHour Credits `json:"per_hour,omitempty"`
}

// DefaultTTL and DefaultMaxTTL apply where a profile names no lifetime.
const (
	DefaultTTL    = 30 * time.Minute
	DefaultMaxTTL = 24 * time.Hour
)

// TTLIdle, as a time to live, is as long as the sandbox is used: it ends when nobody used it for
// Profile.Idle, or after Profile.MaxTTL. In files, requests and on the command line it is TTLIdleText.
const (
	TTLIdle     time.Duration = -1
	TTLIdleText               = "idle"
)

// Isolation is how strongly a backend separates a sandbox from its neighbours and
// its host.
type Isolation string

// The isolation levels, weakest first.
const (
	IsolationProcess   Isolation = "process"   // own processes and directory on a shared system
	IsolationContainer Isolation = "container" // namespaces and cgroups on a shared kernel
	IsolationGVisor    Isolation = "gvisor"    // a user-space kernel between the guest and the host's
	IsolationVM        Isolation = "vm"        // a virtual machine with its own kernel
)

// Isolations lists every level, weakest first.
func Isolations() []Isolation {
	return []Isolation{IsolationProcess, IsolationContainer, IsolationGVisor, IsolationVM}
}

// PricingModel says who pays for an extension's sandboxes.
type PricingModel string

// The pricing models.
const (
	PricingSelfHosted PricingModel = "self-hosted" // runs on machines the operator has anyway
	PricingMetered    PricingModel = "metered"     // somebody sends a bill for use
)

// PricingModels lists every pricing model.
func PricingModels() []PricingModel { return []PricingModel{PricingSelfHosted, PricingMetered} }

// Input declares one key of a create request's inputs.
type Input struct {
	Name     string `json:"name" doc:"Or *: every name that is not listed may be given"` // or AnyInput
	Help     string `json:"help"`
	Required bool   `json:"required,omitempty"`
	// OneOf groups alternatives: of the inputs with the same OneOf, at least one
	// must be given, unless a host or an image is, which says as well what the sandbox is to be.
	OneOf   string `json:"one_of,omitempty" doc:"A group, one of which must be given unless a host or an image is"`
	Default string `json:"default,omitempty"`
	// Restricted says that the value decides what the broker or a host of ours reaches,
	// reads or runs. An administrator and a profile of this installation may give it;
	// anybody else only what the extension admits (Admitter).
	Restricted bool `json:"restricted,omitempty"`
}

// CheckInputName refuses what cannot be the name of an input: AnyInput, names that stand for other parts of a
// request (RestrictedImage, RestrictedHost, RestrictedMounts), and what is not 1 to MaxInputName visible ASCII characters
// without "=". Kind: Invalid.
func CheckInputName(name string) error {
	switch {
	case name == RestrictedImage || name == RestrictedHost || name == RestrictedMounts:
		return E(Invalid, nil, "%q cannot be the name of an input", name).WithHint("give it by --%s", strings.TrimSuffix(name, "s"))
	case name == "" || name == AnyInput || len(name) > MaxInputName || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '=' }):
		return E(Invalid, nil, "%.40q cannot be the name of an input", name).WithHint("a name is 1 to %d visible ASCII characters without \"=\"", MaxInputName)
	}
	return nil
}

// MaxInputName bounds the name of an input, in bytes.
const MaxInputName = 128

// DeclarationOf returns what of declared holds for the input called name: its own declaration, or that of
// AnyInput, of which only Restricted counts.
func DeclarationOf(declared []Input, name string) (in Input, ok bool) {
	for _, d := range declared {
		if d.Name == name {
			return d, true
		}
		if d.Name == AnyInput {
			in, ok = Input{Name: name, Help: d.Help, Restricted: d.Restricted}, true
		}
	}
	return in, ok
}

// ExtensionInfo describes one configured extension, as its file and its adapter
// declare it.
type ExtensionInfo struct {
	ID           string       `json:"id"` // "ext.<name>"
	Title        string       `json:"title,omitempty"`
	Adapter      string       `json:"adapter"` // the adapter's Kind
	Handler      string       `json:"handler"` // as written in the file
	Isolation    []Isolation  `json:"isolation_levels"`
	Pricing      PricingModel `json:"pricing_model"`
	Capabilities []Capability `json:"capabilities"` // what the opened extension really has
	Inputs       []Input      `json:"inputs"`
	Max          int          `json:"max,omitempty" doc:"How many sandboxes may take room there at once, those in pools too. Absent: as many as it takes"`
	Runtime      string       `json:"runtime,omitempty"` // Adapter.Runtime
	Notices      []string     `json:"notices,omitempty"` // what an operator should know and act upon; for administrators
	Problem      string       `json:"problem,omitempty"` // why it could not be opened here; empty when it was
	RetryAt      time.Time    `json:"retry_at,omitzero"` // when opening it is tried again
}

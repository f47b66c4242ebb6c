package sandboxer

import (
	"strings"
	"time"
)

// Profile is a named kind of sandbox: its extension, its defaults and bounds, and what requests may ask
// for. Its file form is profiles/profile.<slug>.yaml; package internal/catalog reads it.
type Profile struct {
	ID          string `json:"id"` // "profile.<slug>"
	Title       string `json:"title,omitempty"`
	Description string `json:"description,omitempty"`
	Extension   string `json:"extension"` // "ext.<name>"; empty with a Route
	// Route lists several extensions instead of the one. The profile of a spec and of a record never has
	// it: that is the profile as it is on the extension that was chosen (Candidates).
	Route     *Route            `json:"-"`
	Isolation Isolation         `json:"isolation,omitempty"`
	Requires  []Capability      `json:"requires,omitempty"`
	Image     string            `json:"image,omitempty"`
	Command   []string          `json:"command,omitempty"`
	Env       map[string]string `json:"env,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"`
	// Secrets are the names of the tenant's secrets that a request may use; none if empty.
	Secrets []string `json:"secrets,omitempty"`
	Limits  Limits   `json:"limits,omitzero"` // for requests that set none
	// MaxLimits are the most that callers without the admin scope may ask for. Where it has no value,
	// Limits is the bound; where that has none either, the extension's default is (Limiter).
	MaxLimits Limits            `json:"max_limits,omitzero"`
	Network   NetworkPolicy     `json:"network,omitzero"`
	Mounts    []Mount           `json:"mounts,omitempty"`
	Ports     []int             `json:"ports,omitempty"`
	Workspace string            `json:"workspace,omitempty"`
	User      string            `json:"user,omitempty"`
	Inputs    map[string]string `json:"inputs,omitempty"` // defaults; a request's values override them
	TTL       time.Duration     `json:"ttl_ns,omitempty"` // lifetime of a request without one; may be TTLIdle
	MaxTTL    time.Duration     `json:"max_ttl_ns,omitempty"`
	// Idle is the time without use after which OnIdle happens; 0 means never.
	Idle   time.Duration `json:"idle_ns,omitempty"`
	OnIdle ExpiryAction  `json:"on_idle,omitempty"`
	// OnTTL is the action at the end of the time to live. A paused sandbox costs nothing and is
	// destroyed after MaxPaused (DefaultMaxPaused if zero). PauseDepth is the depth of a pause whose
	// request names none. Empty means the first one that the extension can do: disk before freeze at
	// expiry, freeze before disk for a request. With AutoResume, using a paused sandbox resumes it.
	OnTTL      ExpiryAction  `json:"on_ttl,omitempty"`
	PauseDepth PauseDepth    `json:"pause_depth,omitempty"`
	MaxPaused  time.Duration `json:"max_paused_ns,omitempty"`
	AutoResume bool          `json:"auto_resume,omitempty"`
	// OnCost is what happens when the backend's meter reaches what is on hold; empty means CostDestroy.
	OnCost CostAction `json:"on_cost,omitempty"`
	// Max is how many of its sandboxes may take room at the same time (Sandbox.TakesRoom), without
	// those in its pool; 0 means as many as its extension takes. Wait is how long a request waits for
	// room, in the profile or on the extension, before it fails as Exhausted.
	Max  int           `json:"max,omitempty"`
	Wait time.Duration `json:"wait_ns,omitempty"`
	// Ready is a check that a sandbox must pass before the caller gets it.
	Ready ReadyCheck `json:"ready,omitzero"`
	Price Price      `json:"price,omitzero"` // what tenants pay if the extension quotes nothing
	Pool  Pool       `json:"pool,omitzero"`
	// Builtin is set for a profile that came with the program and that no operator changed.
	Builtin bool `json:"builtin,omitempty"`
}

// CostAction is what happens to a sandbox that has cost as much as is on hold for it.
type CostAction string

// The actions. A sandbox of CostExtend for which no more can be put on hold is destroyed: its tenant has no
// credits, or the request's MaxCost allows no more.
const (
	CostDestroy CostAction = "destroy"
	CostPause   CostAction = "pause"  // resuming it puts more on hold
	CostExtend  CostAction = "extend" // as much as was quoted is put on hold once more
)

// CostActions lists every action.
func CostActions() []CostAction { return []CostAction{CostDestroy, CostPause, CostExtend} }

// Pool keeps sandboxes of a profile ready. A create without special wishes gets one of them. Waiting
// sandboxes cost nothing, and a used one never returns to the pool.
type Pool struct {
	Size int `json:"size,omitempty"` // how many wait at the same time; 0 means no pool
	// MaxAge is how long a sandbox waits before a new one replaces it (DefaultPoolAge if zero). If the
	// broker never returns, waiting sandboxes end after this time too.
	MaxAge time.Duration `json:"max_age_ns,omitempty"`
}

// MaxPool bounds the size of one pool.
const MaxPool = 1000

// DefaultPoolAge applies if a profile sets no age.
const DefaultPoolAge = time.Hour

// Price is a profile's own tariff.
type Price struct {
	Setup   Credits `json:"setup,omitempty"`
	PerHour Credits `json:"per_hour,omitempty"`
}

// DefaultTTL and DefaultMaxTTL apply if a profile sets no lifetime.
const (
	DefaultTTL    = 30 * time.Minute
	DefaultMaxTTL = 24 * time.Hour
)

// TTLIdle as a time to live means as long as the sandbox is used: it ends after Profile.Idle without
// use, or after Profile.MaxTTL. Files, requests and the command line write it as TTLIdleText.
const (
	TTLIdle     time.Duration = -1
	TTLIdleText               = "idle"
)

// Isolation is how strongly a backend separates a sandbox from its neighbours and
// its host.
type Isolation string

// The isolation levels, weakest first.
const (
	IsolationProcess   Isolation = "process"   // separate processes and directory on a shared system
	IsolationContainer Isolation = "container" // namespaces and cgroups on a shared kernel
	IsolationGVisor    Isolation = "gvisor"    // a user-space kernel between the guest and the host's kernel
	IsolationVM        Isolation = "vm"        // a virtual machine with its own kernel
)

// Isolations lists every level, weakest first.
func Isolations() []Isolation {
	return []Isolation{IsolationProcess, IsolationContainer, IsolationGVisor, IsolationVM}
}

// PricingModel says how an extension's sandboxes are paid for.
type PricingModel string

// The pricing models.
const (
	PricingSelfHosted PricingModel = "self-hosted" // runs on the operator's own machines
	PricingMetered    PricingModel = "metered"     // a provider charges for use
)

// PricingModels lists every pricing model.
func PricingModels() []PricingModel { return []PricingModel{PricingSelfHosted, PricingMetered} }

// Input declares one key of a create request's inputs.
type Input struct {
	Name     string `json:"name" doc:"Or *: every name that is not listed may be given"` // or AnyInput
	Help     string `json:"help"`
	Required bool   `json:"required,omitempty"`
	// OneOf groups alternatives: at least one input of a group must be given, unless a host or an image
	// is given, which also determines the sandbox.
	OneOf   string `json:"one_of,omitempty" doc:"A group: one of its inputs must be given unless a host or an image is given"`
	Default string `json:"default,omitempty"`
	// Restricted says that the value decides what the broker or one of the operator's hosts reaches,
	// reads or runs. An administrator or a profile of this installation may give it; other callers only
	// values that the extension admits (Admitter).
	Restricted bool `json:"restricted,omitempty"`
}

// CheckInputName refuses an invalid name of an input: AnyInput, names of other parts of a request
// (RestrictedImage, RestrictedHost, RestrictedMounts), and names other than 1 to MaxInputName visible
// ASCII characters without "=". Kind: Invalid.
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

// DeclarationOf returns the declaration in declared for the input name: its own one, or that of
// AnyInput, where only Restricted counts.
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
	Handler      string       `json:"handler"` // as in the file
	Isolation    []Isolation  `json:"isolation_levels"`
	Pricing      PricingModel `json:"pricing_model"`
	Capabilities []Capability `json:"capabilities"` // those of the opened extension
	Inputs       []Input      `json:"inputs"`
	Max          int          `json:"max,omitempty" doc:"How many sandboxes may take room there at the same time, including those in pools. Absent: as many as the backend takes"`
	Runtime      string       `json:"runtime,omitempty"` // Adapter.Runtime
	Notices      []string     `json:"notices,omitempty"` // problems that an operator should solve; for administrators
	Problem      string       `json:"problem,omitempty"` // why it could not be opened; empty when it was
	RetryAt      time.Time    `json:"retry_at,omitzero"` // time of the next attempt to open it
	FailingUntil time.Time    `json:"failing_until,omitzero" doc:"It failed several times in a row, and routes skip it until then"`
}

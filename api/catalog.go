package api

import (
	"cmp"
	"maps"
	"slices"

	"github.com/sand-boxer/sandboxer"
)

// Profile is a named kind of sandbox. Price is what tenants pay if the extension quotes nothing.
type Profile struct {
	ID          string                  `json:"id" example:"profile.local"`
	Title       string                  `json:"title,omitempty"`
	Description string                  `json:"description,omitempty"`
	Extension   string                  `json:"extension,omitempty" example:"ext.local" doc:"Absent if the profile has a route"`
	Route       *Route                  `json:"route,omitempty" doc:"Several extensions that may serve it, instead of the one"`
	Isolation   sandboxer.Isolation     `json:"isolation,omitempty" example:"gvisor"`
	Requires    []sandboxer.Capability  `json:"requires,omitempty"`
	Image       string                  `json:"image,omitempty"`
	Command     []string                `json:"command,omitempty"`
	Env         []string                `json:"env,omitempty" doc:"Names of the environment variables"`
	Labels      map[string]string       `json:"labels,omitempty"`
	Secrets     []string                `json:"secrets,omitempty" doc:"Names of the tenant's secrets that a request may use"`
	Limits      sandboxer.Limits        `json:"limits,omitzero"`
	MaxLimits   sandboxer.Limits        `json:"max_limits,omitzero" doc:"The highest limits that a caller may ask for; missing ones are those of limits, or else the extension's default"`
	Network     sandboxer.NetworkPolicy `json:"network,omitzero"`
	Mounts      []sandboxer.Mount       `json:"mounts,omitempty"`
	Ports       []int                   `json:"ports,omitempty"`
	Workspace   string                  `json:"workspace,omitempty"`
	User        string                  `json:"user,omitempty"`
	Inputs      map[string]string       `json:"inputs,omitempty" doc:"Defaults; the caller's values override them"`
	TTL         TTL                     `json:"ttl,omitempty" example:"30m0s" doc:"Default lifetime. Or idle: as long as it is used, at most max_ttl"`
	MaxTTL      Duration                `json:"max_ttl,omitempty"`
	Idle        Duration                `json:"idle,omitempty" doc:"Time without use after which on_idle applies"`
	OnIdle      sandboxer.ExpiryAction  `json:"on_idle,omitempty" example:"pause" doc:"What happens then: destroy or pause. Absent: destroy"`
	OnTTL       sandboxer.ExpiryAction  `json:"on_ttl,omitempty" example:"pause" doc:"What happens when it expires: destroy or pause. Absent: destroy"`
	OnCost      sandboxer.CostAction    `json:"on_cost,omitempty" example:"extend" doc:"What happens when the backend's meter reaches what is on hold: destroy, pause or extend. Absent: destroy"`
	PauseDepth  sandboxer.PauseDepth    `json:"pause_depth,omitempty" example:"disk" doc:"Default depth of a pause: freeze, disk or files. Absent: the first that the extension supports"`
	MaxPaused   Duration                `json:"max_paused,omitempty" example:"72h0m0s" doc:"A paused sandbox is kept so long, and then destroyed. Absent: 168h"`
	AutoResume  bool                    `json:"auto_resume,omitempty" doc:"Using a paused sandbox resumes it"`
	Max         int                     `json:"max,omitempty" example:"20" doc:"How many of its sandboxes may take room at the same time, without those in its pool. Absent: as many as its extension takes"`
	Wait        Duration                `json:"wait,omitempty" example:"1m0s" doc:"How long a request waits for room before it is refused. Absent: it does not wait"`
	Pool        *ProfilePool            `json:"pool,omitempty" doc:"Sandboxes that are kept ready. Absent if none are"`
	Ready       *ReadyCheck             `json:"ready,omitempty" doc:"Check that a sandbox must pass before its user gets it. Absent: the check of its extension is enough"`
	Price       *Price                  `json:"price,omitempty"`
	Builtin     bool                    `json:"builtin,omitempty" doc:"It came with the program, and no operator wrote or changed it"`
}

// ProfilePool describes the pool of a profile.
type ProfilePool struct {
	Size   int      `json:"size" example:"4" doc:"How many wait"`
	MaxAge Duration `json:"max_age" example:"1h0m0s" doc:"One that waited so long is replaced"`
}

// ReadyCheck is the check of a sandbox before its user gets it: a request, or a command.
type ReadyCheck struct {
	HTTP    *sandboxer.ReadyHTTP `json:"http,omitempty" doc:"A GET request inside, and the status that counts. Without a port: at the sandbox's URL"`
	Command []string             `json:"command,omitempty" doc:"A command that ends with 0 when the sandbox is ready"`
	Timeout Duration             `json:"timeout" example:"30s" doc:"How long that may take; after it the create has failed"`
}

// NewProfile converts p to its public form, with only the names of environment variables.
func NewProfile(p sandboxer.Profile) Profile {
	out := Profile{
		ID: p.ID, Title: p.Title, Description: p.Description, Extension: p.Extension, Isolation: p.Isolation,
		Requires: p.Requires, Image: p.Image, Command: p.Command, Env: slices.Sorted(maps.Keys(p.Env)), Labels: p.Labels, Secrets: p.Secrets, Limits: p.Limits, MaxLimits: p.MaxLimits,
		Network: p.Network, Mounts: p.Mounts, Ports: p.Ports, Workspace: p.Workspace, User: p.User, Inputs: p.Inputs,
		TTL: TTL(p.TTL), MaxTTL: Duration(p.MaxTTL), Idle: Duration(p.Idle), OnIdle: p.OnIdle,
		OnTTL: p.OnTTL, OnCost: p.OnCost, PauseDepth: p.PauseDepth, MaxPaused: Duration(p.MaxPaused), AutoResume: p.AutoResume, Max: p.Max, Wait: Duration(p.Wait), Builtin: p.Builtin,
	}
	if p.Pool.Size > 0 {
		out.Pool = &ProfilePool{Size: p.Pool.Size, MaxAge: Duration(cmp.Or(p.Pool.MaxAge, sandboxer.DefaultPoolAge))}
	}
	if r := p.Ready.WithDefaults(); r.Asks() {
		out.Ready = &ReadyCheck{Command: r.Command, Timeout: Duration(r.Timeout)}
		if r.HTTP != (sandboxer.ReadyHTTP{}) {
			out.Ready.HTTP = &r.HTTP
		}
	}
	if p.Price != (sandboxer.Price{}) {
		out.Price = newPrice(p.Price)
	}
	if p.Route != nil {
		out.Route = &Route{Policy: p.Route.Policy, Prefer: p.Route.Prefer, Candidates: []Candidate{}}
		for _, c := range p.Route.Candidates {
			o := Candidate{Extension: c.Extension, Image: c.Image, Limits: c.Limits, Network: c.Network, Inputs: c.Inputs}
			if c.Price != nil {
				o.Price = newPrice(*c.Price)
			}
			out.Route.Candidates = append(out.Route.Candidates, o)
		}
	}
	return out
}

func newPrice(p sandboxer.Price) *Price {
	return &Price{Setup: Credits(p.Setup), PerHour: Credits(p.PerHour)}
}

// Extensions lists the extensions that may serve the profile, in the order listed.
func (p *Profile) Extensions() []string {
	if p.Route == nil {
		return []string{p.Extension}
	}
	var ids []string
	for _, c := range p.Route.Candidates {
		ids = append(ids, c.Extension)
	}
	return ids
}

// Route has the extensions of a profile that several may serve.
type Route struct {
	Policy     sandboxer.RoutePolicy     `json:"policy" example:"wait" enum:"wait,reject,burst" doc:"What happens to a request for which the candidate has no room"`
	Prefer     sandboxer.RoutePreference `json:"prefer,omitempty" example:"price" doc:"Order of the candidates. Absent: as listed"`
	Candidates []Candidate               `json:"candidates" nullable:"false"`
}

// Candidate is one extension of a route, with what is different there.
type Candidate struct {
	Extension string                   `json:"extension" example:"ext.local"`
	Image     string                   `json:"image,omitempty"`
	Limits    sandboxer.Limits         `json:"limits,omitzero" doc:"The highest limits there"`
	Network   *sandboxer.NetworkPolicy `json:"network,omitempty"`
	Inputs    map[string]string        `json:"inputs,omitempty"`
	Price     *Price                   `json:"price,omitempty"`
}

// Price is a profile's own tariff.
type Price struct {
	Setup   Credits `json:"setup" example:"0.01"`
	PerHour Credits `json:"per_hour" example:"0.10"`
}

// Extension describes one configured extension.
type Extension = sandboxer.ExtensionInfo

// HostCapacity is how many sandboxes an extension can take now.
type HostCapacity = sandboxer.HostCapacity

// Reload is the result of reading the profiles again.
type Reload struct {
	Added     []string `json:"added" nullable:"false" example:"[\"profile.web\"]" doc:"Profiles that were not there before"`
	Changed   []string `json:"changed" nullable:"false" example:"[]" doc:"Profiles that changed"`
	Removed   []string `json:"removed" nullable:"false" example:"[]" doc:"Profiles that are gone"`
	Unchanged int      `json:"unchanged" example:"5" doc:"How many are as before"`
	Restart   []string `json:"restart" nullable:"false" example:"[]" doc:"Extensions whose file or program changed, which needs a restart of the server"`
	Quotas    bool     `json:"quotas,omitempty" example:"false" doc:"The quotas changed"`
}

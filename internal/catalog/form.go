package catalog

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

// extensionForm is the file form of an extension.
type extensionForm struct {
	ID           string           `yaml:"id" required:"true" format:"extension" help:"ext.<name>; a file with the ID of a built-in extension replaces it"`
	Title        string           `yaml:"title" format:"line" help:"One line for people."`
	Handler      string           `yaml:"handler" required:"true" unless:"command,connect" format:"handler" help:"The adapter that opens it, or module:Class of an extension class; required unless command or connect is given."`
	Capabilities capabilitiesForm `yaml:"capabilities" required:"true" help:"Capabilities that profiles may rely on; checked against the adapter."`
	Max          int              `yaml:"max" min:"1" max:"1000000" help:"How many sandboxes may take room on it at the same time, including those in pools; without it as many as the backend takes."`
	Config       yaml.Node        `yaml:"config" help:"Settings of the adapter; their schema is in the registry."`

	Program programForm `yaml:",inline"`
}

type capabilitiesForm struct {
	IsolationLevels []sandboxer.Isolation  `yaml:"isolation_levels" required:"true" nonempty:"true" unique:"true" help:"How strongly its sandboxes can be separated."`
	PricingModel    sandboxer.PricingModel `yaml:"pricing_model" required:"true" help:"Who pays for its sandboxes."`
}

// profileForm is the file form of a profile.
type profileForm struct {
	ID          string                 `yaml:"id" required:"true" format:"profile" help:"profile.<slug>; a file with the ID of a built-in profile replaces it"`
	Title       string                 `yaml:"title" format:"line" help:"One line for people."`
	Description string                 `yaml:"description" help:"A paragraph for people."`
	Extension   string                 `yaml:"extension" required:"true" unless:"route" format:"extension" help:"The extension that makes its sandboxes; required unless route is given."`
	Route       *routeForm             `yaml:"route" nonempty:"true" help:"Several extensions that may make its sandboxes, instead of extension."`
	Isolation   sandboxer.Isolation    `yaml:"isolation" help:"The separation promised to users; one of the extension's levels."`
	Requires    []sandboxer.Capability `yaml:"requires" unique:"true" help:"Capabilities that the extension must have."`
	Image       string                 `yaml:"image" format:"image" help:"Image in the backend's terms; without it the adapter's default."`
	Command     []string               `yaml:"command" text:"any" nonempty:"true" help:"Main process, as a list of arguments; without it the adapter's default."`
	Env         map[string]string      `yaml:"env" keys:"env" text:"any" help:"Environment of everything inside."`
	Labels      map[string]string      `yaml:"labels" keys:"label" text:"any" help:"Labels of every sandbox."`
	Secrets     []string               `yaml:"secrets" format:"secret" unique:"true" help:"Names of the tenant's secrets that a request may use as environment variables; without it none."`
	Limits      limitsForm             `yaml:"limits" help:"Limits of one sandbox; missing ones take the adapter's default."`
	MaxLimits   limitsForm             `yaml:"max_limits" help:"The highest limits that a caller may ask for; missing ones are those of limits, or else the adapter's default. Administrators may ask for more."`
	Network     networkForm            `yaml:"network" short:"none,public" help:"What a sandbox may reach: none (the default), public, or a list."`
	Mounts      []mountForm            `yaml:"mounts" help:"Host paths made visible inside."`
	Ports       []int                  `yaml:"ports" min:"1" max:"65535" unique:"true" help:"Ports to publish."`
	Workspace   string                 `yaml:"workspace" format:"abspath" help:"Path of the workspace inside; without it the adapter's default."`
	User        string                 `yaml:"user" format:"user" text:"any" help:"User of commands: a name, or uid[:gid]."`
	Inputs      map[string]string      `yaml:"inputs" text:"any" help:"Defaults for inputs; the caller's values override them."`
	TTL         lifetime               `yaml:"ttl" min:"1s" help:"Lifetime when the caller names none (30m), or idle: as long as it is used, which needs idle and ends with max_ttl."`
	MaxTTL      time.Duration          `yaml:"max_ttl" min:"1s" help:"Longest lifetime a caller may ask for (24h)."`
	Idle        time.Duration          `yaml:"idle" min:"1s" help:"Time without use after which on_idle happens; without it never."`
	OnIdle      sandboxer.ExpiryAction `yaml:"on_idle" help:"What happens after that time without use: destroy (the default) or pause."`
	OnTTL       sandboxer.ExpiryAction `yaml:"on_ttl" help:"What happens when the sandbox expires: destroy (the default) or pause."`
	OnCost      sandboxer.CostAction   `yaml:"on_cost" help:"What happens when the extension's meter reaches what is on hold: destroy (the default), pause, or extend, which puts more on hold."`
	PauseDepth  sandboxer.PauseDepth   `yaml:"pause_depth" help:"Default depth of a pause: freeze (memory stays), disk (memory and files are saved), files (processes end)."`
	MaxPaused   time.Duration          `yaml:"max_paused" min:"1s" help:"How long a paused sandbox is kept before it is destroyed (7d)."`
	AutoResume  bool                   `yaml:"auto_resume" help:"Whether using a paused sandbox (commands, files, ports) resumes it."`
	Max         int                    `yaml:"max" min:"1" max:"1000000" help:"How many of its sandboxes may take room at the same time, in addition to those in its pool; without it as many as its extension takes."`
	Wait        time.Duration          `yaml:"wait" min:"1s" max:"1h" help:"How long a request waits for room; without it, a request is refused at once if there is none."`
	Ready       readyForm              `yaml:"ready" help:"A check that a sandbox must pass, after its extension reports that it is ready, before its user gets it."`
	Price       priceForm              `yaml:"price" help:"Price that tenants pay, in credits, if the extension quotes none."`
	Pool        poolForm               `yaml:"pool" help:"Sandboxes that are kept ready for later requests."`
}

// lifetime is a duration, or sandboxer.TTLIdle.
type lifetime time.Duration

type poolForm struct {
	Size   int           `yaml:"size" min:"0" max:"1000" help:"How many wait at a time; 0 means none."`
	MaxAge time.Duration `yaml:"max_age" min:"1m" help:"How long one waits before a new one replaces it (1h)."`
}

type limitsForm struct {
	CPUs   int64 `yaml:"cpus" unit:"cpus" min:"0.001" help:"Number of CPUs, such as 1.5."`
	Memory int64 `yaml:"memory" unit:"bytes" min:"1MiB" help:"Memory, such as 512MiB."`
	Disk   int64 `yaml:"disk" unit:"bytes" min:"1MiB" help:"Writable layer and workspace together, such as 2GiB."`
	PIDs   int64 `yaml:"pids" min:"1" help:"Processes and threads."`
	GPUs   int   `yaml:"gpus" min:"0" max:"64" help:"Number of GPUs."`
}

type networkForm struct {
	Mode  sandboxer.NetworkMode `yaml:"mode" help:"none: loopback only. public: the internet, never private addresses. allow: the destinations in the list."`
	Allow []string              `yaml:"allow" format:"peer" unique:"true" nonempty:"true" help:"Domains, *.domains, IP addresses or CIDRs, each with an optional :port."`
}

type mountForm struct {
	Source   string `yaml:"source" required:"true" format:"abspath" help:"Path on the host; it must exist."`
	Target   string `yaml:"target" required:"true" format:"abspath" help:"Path inside."`
	ReadOnly bool   `yaml:"read_only" help:"Whether writing is refused."`
}

type readyForm struct {
	HTTP    *readyHTTPForm `yaml:"http" help:"A GET request; redirects are not followed."`
	Command []string       `yaml:"command" text:"any" nonempty:"true" help:"A command, as a list of arguments, that ends with 0 when it is ready."`
	Timeout time.Duration  `yaml:"timeout" min:"1s" max:"20m" help:"Time to pass the check; a sandbox that takes longer has failed (30s)."`
}

type readyHTTPForm struct {
	Port   int    `yaml:"port" min:"1" max:"65535" help:"Port inside; without it the URL that the extension gives its sandboxes."`
	Path   string `yaml:"path" format:"urlpath" help:"Path with its query (/)."`
	Status int    `yaml:"status" min:"200" max:"599" help:"The only status that counts as ready (200)."`
}

type priceForm struct {
	Setup   sandboxer.Credits `yaml:"setup" help:"Price once per sandbox."`
	PerHour sandboxer.Credits `yaml:"per_hour" help:"Price per hour of life."`
}

// check translates, and reports faults that no single field shows.
func (f readyForm) check(d *decoder) sandboxer.ReadyCheck {
	r := sandboxer.ReadyCheck{Command: f.Command, Timeout: f.Timeout}
	if f.HTTP != nil {
		r.HTTP = sandboxer.ReadyHTTP{Port: f.HTTP.Port, Path: cmp.Or(f.HTTP.Path, "/"), Status: f.HTTP.Status}
	}
	if err := r.Check(); err != nil {
		d.faultKey("ready", "", "%s", sandboxer.Message(err))
	}
	return r.WithDefaults()
}

// policy translates the network policy at path, and reports faults that no single field shows.
func (f networkForm) policy(d *decoder, path string) sandboxer.NetworkPolicy {
	switch {
	case f.Mode == "" && f.Allow != nil:
		f.Mode = sandboxer.NetworkAllow
	case f.Mode == sandboxer.NetworkAllow && f.Allow == nil && d.places[path+".allow"].key == nil:
		d.fault(path+".mode", "", `mode "allow" needs a list of what is allowed`)
	case f.Mode != sandboxer.NetworkAllow && f.Allow != nil:
		d.faultKey(path+".allow", "", "a list has no effect with mode %q: use mode \"allow\"", f.Mode)
	}
	return sandboxer.NetworkPolicy{Mode: f.Mode, Allow: f.Allow}
}

func (f limitsForm) limits() sandboxer.Limits {
	return sandboxer.Limits{MilliCPU: f.CPUs, MemoryBytes: f.Memory, DiskBytes: f.Disk, PIDs: f.PIDs, GPUs: f.GPUs}
}

// profile checks for faults that no single field shows, and translates.
func (f profileForm) profile(d *decoder) sandboxer.Profile {
	if len(f.Command) > 0 && f.Command[0] == "" {
		d.fault("command[0]", "", "the name of a program cannot be empty")
	}
	targets := make(map[string]int)
	p := sandboxer.Profile{
		ID: f.ID, Title: f.Title, Description: f.Description, Extension: f.Extension, Isolation: f.Isolation,
		Requires: f.Requires, Image: f.Image, Command: f.Command, Env: f.Env, Labels: f.Labels, Secrets: f.Secrets,
		Limits: f.Limits.limits(), MaxLimits: f.MaxLimits.limits(),
		Network: f.Network.policy(d, "network"),
		Ports:   f.Ports, Workspace: f.Workspace, User: f.User, Inputs: f.Inputs,
		TTL: time.Duration(f.TTL), MaxTTL: f.MaxTTL, Idle: f.Idle, OnIdle: f.OnIdle,
		OnTTL: f.OnTTL, OnCost: f.OnCost, PauseDepth: f.PauseDepth, MaxPaused: f.MaxPaused, AutoResume: f.AutoResume,
		Max: f.Max, Wait: f.Wait,
		Ready: f.Ready.check(d),
		Price: sandboxer.Price{Setup: f.Price.Setup, PerHour: f.Price.PerHour},
		Pool:  sandboxer.Pool{Size: f.Pool.Size, MaxAge: f.Pool.MaxAge},
	}
	for key, l := range map[string]sandboxer.Limits{"limits": p.Limits, "max_limits": p.MaxLimits} {
		if err := l.Check(); err != nil {
			d.faultKey(key, "", "%s", sandboxer.Message(err))
		}
	}
	if err := p.Limits.Within(p.MaxLimits, "max_limits"); err != nil {
		d.faultKey("max_limits", "", "%s", sandboxer.Message(err))
	}
	if f.OnIdle != "" && f.Idle == 0 && d.places["idle"].key == nil {
		d.fault("on_idle", "", "has no effect without idle")
	}
	p.Route = f.Route.route(d, p)
	if f.Pool.Size == 0 && f.Pool.MaxAge != 0 {
		d.faultKey("pool.max_age", "", "an age has no effect without a size")
	}
	for i, m := range f.Mounts {
		at := fmt.Sprintf("mounts[%d].target", i)
		if m.Target == "/" {
			d.fault(at, "", "a mount cannot replace the root directory")
		}
		if first, ok := targets[m.Target]; ok && m.Target != "" {
			d.fault(at, "", "%s is already the target of mounts[%d]", m.Target, first)
		}
		targets[m.Target] = i
		p.Mounts = append(p.Mounts, sandboxer.Mount(m))
	}
	if f.Workspace == "/" {
		d.fault("workspace", "", "the workspace cannot be the root directory")
	}
	ttl, most := time.Duration(f.TTL), f.MaxTTL
	switch {
	case ttl == sandboxer.TTLIdle && f.Idle == 0 && d.places["idle"].key == nil:
		d.fault("ttl", "", "a ttl of idle needs an idle time: name one (idle)")
	case ttl != 0 && most != 0 && ttl > most:
		d.fault("ttl", "", "longer than max_ttl (%s)", sandboxer.FormatDuration(most))
	case ttl > sandboxer.DefaultMaxTTL && most == 0 && d.places["max_ttl"].key == nil:
		d.fault("ttl", "", "longer than the default max_ttl (%s): name a max_ttl", sandboxer.FormatDuration(sandboxer.DefaultMaxTTL))
	case ttl == 0 && most != 0 && most < sandboxer.DefaultTTL && d.places["ttl"].key == nil:
		d.fault("max_ttl", "", "shorter than the default ttl (%s): name a ttl", sandboxer.FormatDuration(sandboxer.DefaultTTL))
	}
	return p
}

// The prefixes of IDs, which users may leave out.
const (
	extPrefix     = "ext."
	profilePrefix = "profile."
)

// ProfileID completes the name of a profile: "local" and "profile.local" both mean
// "profile.local".
func ProfileID(name string) string { return withPrefix(name, profilePrefix) }

// ExtensionID completes the name of an extension: "local" and "ext.local" both mean
// "ext.local".
func ExtensionID(name string) string { return withPrefix(name, extPrefix) }

func withPrefix(name, prefix string) string {
	if strings.HasPrefix(name, prefix) {
		return name
	}
	return prefix + name
}

// quotasForm is the file form of quotas.yaml.
type quotasForm struct {
	Default quotaForm            `yaml:"default" help:"Quotas of each tenant without an entry below."`
	Tenants map[string]quotaForm `yaml:"tenants" help:"Quotas by tenant; an entry replaces the whole default."`
}

// quotaForm is the quota of one tenant; nil is no bound.
type quotaForm struct {
	Sandboxes     *int64    `yaml:"sandboxes" min:"0" help:"Sandboxes that are not terminated, including paused ones."`
	Disk          *int64    `yaml:"disk" unit:"bytes" help:"Sum of their disk limits, such as 200GiB; with it, each sandbox must have one."`
	Images        *int64    `yaml:"images" min:"0" help:"Different images that requests named, other than those of their profiles."`
	Snapshots     *int64    `yaml:"snapshots" min:"0" help:"Snapshots, including those that pauses and forks keep."`
	SnapshotBytes *int64    `yaml:"snapshot_bytes" unit:"bytes" help:"Size of their content."`
	Execs         *int64    `yaml:"execs" min:"0" help:"Commands at once."`
	Requests      *int64    `yaml:"requests" min:"0" help:"Requests to the API a minute; administrators are not counted."`
	MaxSpend      spendForm `yaml:"max_spend" help:"Credits that are charged in a period, and on hold now."`
}

// spendForm is how much one tenant may spend; nil is no bound.
type spendForm struct {
	Month *sandboxer.Credits `yaml:"month" help:"In a calendar month in UTC."`
	Day   *sandboxer.Credits `yaml:"day" help:"In a day in UTC."`
}

func (f quotasForm) quotas() sandboxer.Quotas {
	q := sandboxer.Quotas{Default: f.Default.quota()}
	for tenant, own := range f.Tenants {
		if q.Tenants == nil {
			q.Tenants = map[string]sandboxer.Quota{}
		}
		q.Tenants[tenant] = own.quota()
	}
	return q
}

func (f quotaForm) quota() sandboxer.Quota {
	q := sandboxer.Quota{}
	for r, most := range map[sandboxer.Resource]*int64{
		sandboxer.QuotaSandboxes: f.Sandboxes, sandboxer.QuotaDisk: f.Disk, sandboxer.QuotaImages: f.Images, sandboxer.QuotaSnapshots: f.Snapshots,
		sandboxer.QuotaSnapshotBytes: f.SnapshotBytes, sandboxer.QuotaExecs: f.Execs, sandboxer.QuotaRequests: f.Requests,
		sandboxer.QuotaSpendMonth: (*int64)(f.MaxSpend.Month), sandboxer.QuotaSpendDay: (*int64)(f.MaxSpend.Day),
	} {
		if most != nil {
			q[r] = *most
		}
	}
	return q
}

// sinksForm is the file form of sinks.yaml.
type sinksForm struct {
	Sinks map[string]sinkForm `yaml:"sinks" keys:"sink" help:"Receivers of usage rows, by name."`
}

// sinkForm is one receiver: an endpoint, or a file.
type sinkForm struct {
	URL  string   `yaml:"url" help:"HTTP endpoint, https unless it is on this machine, that gets batches of events."`
	Keys []string `yaml:"keys" format:"secret" unique:"true" help:"The operator's secrets with which its requests are signed; each makes a signature."`
	File string   `yaml:"file" format:"abspath" help:"In place of url: a file of the server's machine that gets a line for each event."`
}

// sinks returns the receivers by name.
func (f sinksForm) sinks(d *decoder) (all []sandboxer.Sink) {
	if len(f.Sinks) > sandboxer.MaxSinks {
		d.fault("sinks", "", "there are %d sinks: the most is %d", len(f.Sinks), sandboxer.MaxSinks)
	}
	files := map[string]string{} // and the sinks that write them
	for _, name := range slices.Sorted(maps.Keys(f.Sinks)) {
		s, at := f.Sinks[name], "sinks."+name
		for i, key := range s.Keys {
			if strings.HasPrefix(key, "whsec_") {
				key := fmt.Sprintf("%s.keys[%d]", at, i)
				d.src.hideAll(d.places[key].value)
				d.fault(key, "", "this is a key, and not the name of one: set it with sandboxer secret set --operator NAME, and write NAME here")
			}
		}
		switch {
		case (s.URL == "") == (s.File == ""):
			d.faultKey(at, "", "a sink has either url or file")
		case s.File != "" && len(s.Keys) > 0:
			d.faultKey(at+".keys", "", "keys sign requests to url, and are not for a file")
		case s.URL != "" && (len(s.Keys) == 0 || len(s.Keys) > sandboxer.MaxSinkKeys):
			d.faultKey(at, "", "want 1 to %d keys: requests to url are signed", sandboxer.MaxSinkKeys)
		case s.URL != "":
			if err := hosted.CheckURL(s.URL); err != nil {
				if strings.ContainsAny(s.URL, "@?") { // which may contain a password
					d.src.hideAll(d.places[at+".url"].value)
				}
				d.fault(at+".url", "", "%s", errorText(err))
			}
		case files[s.File] != "":
			d.fault(at+".file", "", "the sink %s writes this file, too", files[s.File])
		default:
			files[s.File] = name
		}
		all = append(all, sandboxer.Sink{Name: name, URL: s.URL, File: s.File, Keys: s.Keys})
	}
	return all
}

// pricesForm is the file form of prices.yaml.
type pricesForm struct {
	Prices []priceRowForm `yaml:"prices" required:"true" help:"Rows of the price book; one for each provider and sku."`
}

type priceRowForm struct {
	Provider   string                    `yaml:"provider" required:"true" help:"Who takes the price, such as e2b."`
	SKU        string                    `yaml:"sku" required:"true" help:"What it is for: vcpu, memory, disk."`
	Unit       sandboxer.PriceUnit       `yaml:"unit" required:"true" help:"One unit of it: a second of a vCPU, of a GiB, or one thing."`
	NanoUSD    int64                     `yaml:"nano_usd" required:"true" min:"0" help:"Price of one unit in thousand millionths of a US dollar."`
	Basis      sandboxer.PriceBasis      `yaml:"basis" required:"true" help:"What the provider counts: what was asked for, what was used, or whichever is more."`
	Minimum    time.Duration             `yaml:"minimum" help:"Shortest time that is charged."`
	AsOf       string                    `yaml:"as_of" required:"true" format:"date" help:"Day on which the price was seen."`
	Source     string                    `yaml:"source" required:"true" help:"Where it was seen."`
	Confidence sandboxer.PriceConfidence `yaml:"confidence" required:"true" help:"Whether the provider documents it, or others report it."`
}

// rows returns the price book; a second row for something is a fault.
func (f pricesForm) rows(d *decoder) (rows []sandboxer.PriceRow) {
	seen := map[[2]string]bool{}
	for i, r := range f.Prices {
		key := [2]string{r.Provider, r.SKU}
		if seen[key] {
			d.fault(fmt.Sprintf("prices[%d].sku", i), "", "there is another row for %s of %s", r.SKU, r.Provider)
		}
		seen[key] = true
		rows = append(rows, sandboxer.PriceRow(r))
	}
	return rows
}

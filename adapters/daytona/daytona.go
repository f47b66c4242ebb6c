// Package daytona makes sandboxes at Daytona, by its REST interface v1 and the toolbox of each sandbox. The agent is brought into
// every sandbox: the toolbox mixes the outputs of a command, and the agent does not.
package daytona

import (
	"cmp"
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

// Config is the extension's `config:` block.
type Config struct {
	Key         sandboxer.Secret     `yaml:"key" json:"key,omitempty" help:"API key of the organization, with the rights to write and delete sandboxes and snapshots."`
	Credential  sandboxer.Credential `yaml:"credential" json:"credential,omitzero" help:"The secret that is the key in its place."`
	URL         string               `yaml:"url" json:"url,omitempty" help:"Address of the API, as https://host/path, or http:// with a loopback address."`
	Target      string               `yaml:"target" json:"target,omitempty" format:"line" help:"Region for sandboxes; empty means the organization's."`
	Snapshot    string               `yaml:"snapshot" json:"snapshot,omitempty" format:"line" help:"Snapshot of Daytona for sandboxes without an image; empty means Daytona's default."`
	CPU         int64                `yaml:"cpu" json:"cpu,omitempty" min:"1" max:"1000" help:"Processors of a sandbox from snapshot, for quotes."`
	Memory      int64                `yaml:"memory" json:"memory,omitempty" unit:"bytes" min:"1GiB" help:"Memory of a sandbox from snapshot, for quotes."`
	Disk        int64                `yaml:"disk" json:"disk,omitempty" unit:"bytes" min:"1GiB" help:"Disk of a sandbox from snapshot, for quotes."`
	MaxLifetime time.Duration        `yaml:"max_lifetime" json:"max_lifetime,omitempty" min:"1m" help:"How long a sandbox may live by the rules of the organization; a longer life is refused."`
	Settle      time.Duration        `yaml:"settle" json:"settle,omitempty" min:"0s" max:"5m" help:"How long after a create without an answer Daytona may not show the sandbox yet."`
	Agent       string               `yaml:"agent" json:"agent,omitempty" help:"Path of sandboxer-agent for the platform of the sandboxes; empty means next to the running program."`
}

// Validate implements the check of sandboxer.Typed.
func (c *Config) Validate() error {
	c.URL = strings.TrimRight(c.URL, "/")
	if err := hosted.CheckURL(c.URL); err != nil {
		return sandboxer.E(sandboxer.Invalid, nil, "url: %s", sandboxer.Message(err))
	}
	return nil
}

const (
	inputRepo = "repo"
	gib       = 1 << 30
)

// Adapter is what package adapters lists.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:      "daytona",
	Title:     "Sandboxes at Daytona, a hosted service",
	Help:      "Makes sandboxes at Daytona, with the key of an organization there. Commands, files, ports and processes go through sandboxer-agent, which is brought into each sandbox.",
	Isolation: []sandboxer.Isolation{sandboxer.IsolationProcess, sandboxer.IsolationContainer},
	Pricing:   sandboxer.PricingModels(),
	Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanStats, sandboxer.CanProcesses,
		sandboxer.CanWatch, sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanSnapshot, sandboxer.CanQuote, sandboxer.CanRenew},
	Inputs: []sandboxer.Input{{Name: inputRepo, Restricted: true, Help: "directory of the broker's machine, absolute, that is copied into the workspace"}},
}, Config{URL: "https://app.daytona.io/api", CPU: 1, Memory: gib, Disk: 3 * gib, MaxLifetime: 30 * 24 * time.Hour, Settle: 30 * time.Second}, open)

func open(ctx context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	keys, err := hosted.NeedKeys(ctx, env, cfg.Key, cfg.Credential)
	if err != nil {
		return nil, err
	}
	x := &extension{cfg: cfg, Sandboxes: hosted.Sandboxes{Env: env, Keys: keys, Settle: cfg.Settle}}
	x.List, x.Get, x.Delete = x.list, x.get, x.remove
	x.Capabilities.Open = x.openAgent
	x.client = &hosted.Client{Base: cfg.URL, Keys: keys, Refusals: refusals}
	return x, nil
}

// refusals are the statuses after which nothing was changed. 503 is none: a gateway may say so of a request that it passed on.
var refusals = map[int]sandboxer.Kind{
	http.StatusBadRequest:      sandboxer.Invalid,
	http.StatusNotFound:        sandboxer.NotFound,
	http.StatusConflict:        sandboxer.Unavailable, // another change is under way
	http.StatusTooManyRequests: sandboxer.Exhausted,
}

// An object is a sandbox in the answers of the API.
type object struct {
	ID            string            `json:"id"`
	Labels        map[string]string `json:"labels"`
	State         string            `json:"state"`
	ErrorReason   string            `json:"errorReason"`
	CreatedAt     time.Time         `json:"createdAt"`
	AutoDestroyAt time.Time         `json:"autoDestroyAt"` // zero for a Daytona that knows no lifetimes
	Toolbox       string            `json:"toolboxProxyUrl"`
}

// states are the kinds of what calls into a sandbox get, by its state at Daytona. One that is not here is coming: creating, restoring,
// starting, resuming, pending_build, building_snapshot, pulling_snapshot, unknown.
var states = map[string]sandboxer.Kind{
	"started": "", "resizing": "", "snapshotting": "", "forking": "",
	"pausing": sandboxer.Conflict, "paused": sandboxer.Conflict,
	"stopping": sandboxer.Unavailable, "stopped": sandboxer.Unavailable, "archiving": sandboxer.Unavailable, "archived": sandboxer.Unavailable,
	"destroying": sandboxer.Unavailable, "destroyed": sandboxer.NotFound,
	"error": sandboxer.Failed, "build_failed": sandboxer.Failed,
}

const maxText = 500 // of what Daytona and a sandbox say in an error, in bytes

func (o object) coming() bool { _, known := states[o.State]; return !known }

// why says what is in the way of work in the sandbox; nil if nothing is.
func (o object) why() error {
	kind := states[o.State]
	if kind == "" && !o.coming() {
		return nil
	}
	e := sandboxer.E(cmp.Or(kind, sandboxer.Unavailable), nil, "the sandbox is %s at Daytona", capture.Text(strings.TrimSuffix(o.State+": "+o.ErrorReason, ": "), maxText))
	return e.WithHint("%s", map[sandboxer.Kind]string{sandboxer.Conflict: "resume it there", sandboxer.Unavailable: "try again later"}[e.Kind])
}

func at(ref string) string { return "/sandbox/" + url.PathEscape(ref) }

// look returns the sandbox of a name of Daytona's, or one that we gave it.
func (x *extension) look(ctx context.Context, ref string) (object, error) {
	o, err := hosted.Call[object](ctx, x.client, http.MethodGet, at(ref), nil)
	if err == nil && states[o.State] == sandboxer.NotFound {
		err = o.why()
	}
	return o, cmp.Or(err, o.check())
}

// check refuses an answer without a name, or with an impossible one.
func (o object) check() error {
	if o.ID == "" || len(o.ID) > 200 || o.ID == "." || o.ID == ".." {
		return sandboxer.E(sandboxer.Unavailable, nil, "Daytona answers without the ID of a sandbox").WithHint("check that url leads to Daytona")
	}
	return nil
}

// running waits while a sandbox is coming, and returns it when it runs.
func (x *extension) running(ctx context.Context, ref string) (o object, err error) {
	err = hosted.Poll(ctx, func() (bool, error) {
		o, err = x.look(ctx, ref)
		return !o.coming(), err
	})
	return o, cmp.Or(err, o.why())
}

func (x *extension) get(ctx context.Context, ref string) (hosted.Object, error) {
	o, err := x.look(ctx, ref)
	kind := states[o.State]
	return hosted.Object{Ref: o.ID, Tags: o.Labels, Down: kind == sandboxer.Unavailable || kind == sandboxer.Failed}, err
}

// remove returns once Daytona has destroyed the sandbox, which takes a while; until it begins, the sandbox seems to run.
func (x *extension) remove(ctx context.Context, ref string) error {
	x.agents.Drop(hosted.InAccount(ctx, ref))
	_, err := hosted.Call[struct{}](ctx, x.client, http.MethodDelete, at(ref), nil)
	if err != nil && hosted.Status(err) != http.StatusConflict { // of one that is being destroyed already
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err = hosted.Poll(bounded, func() (bool, error) {
		_, err := x.look(bounded, ref)
		return false, err
	})
	if bounded.Err() != nil && ctx.Err() == nil {
		return sandboxer.E(sandboxer.Unavailable, err, "Daytona has not destroyed the sandbox yet").WithHint("try again later")
	}
	return err
}

// list yields the sandboxes with these labels.
func (x *extension) list(ctx context.Context, tags map[string]string) iter.Seq2[hosted.Object, error] {
	labels, _ := json.Marshal(tags) // strings
	return hosted.Pages(func(next string) (items []hosted.Object, following string, err error) {
		query := url.Values{"labels": {string(labels)}, "limit": {"100"}, "includeErroredDeleted": {"true"}}
		if next != "" {
			query.Set("cursor", next)
		}
		page, err := hosted.Call[struct {
			Items []object `json:"items"`
			Next  string   `json:"nextCursor"`
		}](ctx, x.client, http.MethodGet, "/sandbox?"+query.Encode(), nil)
		for _, o := range page.Items {
			if err == nil && states[o.State] != sandboxer.NotFound {
				items, err = append(items, hosted.Object{Ref: o.ID, Tags: o.Labels}), o.check()
			}
		}
		return items, page.Next, err
	})
}

// A creation is the body of a create.
type creation struct {
	Name     string            `json:"name"` // unique at Daytona, so that a repeated create makes nothing
	Labels   map[string]string `json:"labels"`
	Target   string            `json:"target,omitempty"`
	Snapshot string            `json:"snapshot,omitempty"`
	Build    map[string]string `json:"buildInfo,omitempty"`
	CPU      int64             `json:"cpu,omitempty"`
	Memory   int64             `json:"memory,omitempty"` // GiB
	Disk     int64             `json:"disk,omitempty"`   // GiB

	BlockAll    bool   `json:"networkBlockAll"`
	AllowList   string `json:"networkAllowList,omitempty"`
	DomainAllow string `json:"domainAllowList,omitempty"`
	// Daytona destroys the sandbox after TTL minutes. AutoStop, of a sandbox that nobody uses, and AutoDelete 0, which destroys what
	// was stopped, do the same where an older Daytona does not know TTL.
	TTL        int64 `json:"ttlMinutes"`
	AutoStop   int64 `json:"autoStopInterval"`
	AutoDelete int64 `json:"autoDeleteInterval"`
}

// link checks an address that Daytona named, and to which a key or token goes.
func (x *extension) link(text string) error {
	if err := hosted.CheckURL(text); err != nil || strings.HasPrefix(x.cfg.URL, "https:") && !strings.HasPrefix(text, "https:") {
		return sandboxer.E(sandboxer.Unavailable, err, "Daytona sent an address without https, which gets no key").WithHint("check that url leads to Daytona")
	}
	return nil
}

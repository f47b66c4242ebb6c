// Package daytona makes sandboxes at Daytona, by its REST interface v1 and the toolbox of each sandbox. The agent is brought into
// every sandbox: the toolbox mixes the outputs of a command, and the agent does not.
package daytona

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
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
	if cfg.Key == "" && cfg.Credential == (sandboxer.Credential{}) {
		return nil, sandboxer.E(sandboxer.NotFound, nil, "needs a key: the configuration of %s names none", env.Extension).
			WithHint("write a file for %s with credential in its config", env.Extension)
	}
	keys, err := hosted.OpenKeys(ctx, env, cfg.Key, cfg.Credential)
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

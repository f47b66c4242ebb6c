// Package saasstub makes sandboxes at a stub of a hosted service. No command runs in them: a sandbox has an ID, a lifetime, a
// price and a note. The package shows what an adapter for a hosted service owes, and is the example of CONTRIBUTING.md.
package saasstub

import (
	"cmp"
	"context"
	"net/http"
	"path/filepath"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/saasstub/service"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

// Config is the extension's `config:` block.
type Config struct {
	Setup      sandboxer.Credits    `yaml:"setup" json:"setup,omitempty" help:"Price of the service once per sandbox."`
	PerHour    sandboxer.Credits    `yaml:"per_hour" json:"per_hour,omitempty" help:"Price of the service per hour of life."`
	Bill       bool                 `yaml:"bill" json:"bill,omitempty" help:"Whether tenants pay these prices; otherwise a sandbox costs nothing."`
	Capacity   int                  `yaml:"capacity" json:"capacity,omitempty" min:"1" max:"1000" help:"Maximum number of sandboxes of the service."`
	Seed       int64                `yaml:"seed" json:"seed,omitempty" help:"Chooses names and faults: the same requests in the same order have the same faults."`
	Faults     service.Faults       `yaml:"faults" json:"faults,omitzero" help:"What the service does wrong on purpose."`
	Settle     time.Duration        `yaml:"settle" json:"settle,omitempty" min:"0s" max:"5m" help:"How long after a create without an answer the listing may not show the sandbox yet; at least faults.lag."`
	URL        string               `yaml:"url" json:"url,omitempty" help:"A service that runs elsewhere, as https://host, or http:// with a loopback address. If it is empty, this program starts one."`
	Token      sandboxer.Secret     `yaml:"token" json:"token,omitempty" help:"Bearer token for the service at url."`
	Credential sandboxer.Credential `yaml:"credential" json:"credential,omitzero" help:"The secret that is the bearer token in its place."`
}

// Validate implements the check of sandboxer.Typed.
func (c *Config) Validate() error {
	if c.Faults.Lag > c.Settle {
		return sandboxer.E(sandboxer.Invalid, nil, "settle: want at least faults.lag, %s", c.Faults.Lag)
	}
	if err := hosted.CheckURL(c.URL); c.URL != "" && err != nil {
		return sandboxer.E(sandboxer.Invalid, nil, "url: %s", sandboxer.Message(err))
	}
	return nil
}

const (
	said                  = "a stub of a hosted service, in which no command runs" // in plans, quotes and sandboxes
	inputNote             = "note"
	tagSnapshot, tagOwner = "snapshot", "snapshot-owner" // of a snapshot, in addition to those of its sandbox
)

// Adapter is what package adapters lists.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:         "saas-stub",
	Title:        "A metered stub of a hosted service, in which no command runs",
	Help:         "Makes sandboxes at a stub of a hosted service, in which no command runs. Routes, prices and faults can be tried with it, without an account.",
	Handlers:     []string{"sandboxer.extensions.saas_stub"},
	Isolation:    sandboxer.Isolations(), // nothing runs that could leave it
	Pricing:      sandboxer.PricingModels(),
	Capabilities: []sandboxer.Capability{sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanSnapshot, sandboxer.CanQuote, sandboxer.CanMeter, sandboxer.CanRenew, sandboxer.CanCapacity},
	Inputs:       []sandboxer.Input{{Name: inputNote, Help: "a text of at most 256 bytes; the sandbox contains nothing else"}},
}, Config{PerHour: 100_000, Capacity: 100, Settle: 2 * time.Second}, open)

func open(ctx context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	keys, err := hosted.OpenKeys(ctx, env, cfg.Token, cfg.Credential)
	if err != nil {
		return nil, err
	}
	x := &extension{cfg: cfg, Sandboxes: hosted.Sandboxes{Env: env, Keys: keys, Settle: cfg.Settle}}
	x.List, x.Get, x.Delete = x.list, x.get, x.remove
	x.client = &hosted.Client{Base: cmp.Or(cfg.URL, "http://stub"), Keys: keys, Refusals: refusals, Tries: 1}
	if cfg.URL == "" {
		x.own = &service.Launcher{Dir: filepath.Join(env.Dir, "service")}
		if err := x.own.Configure(service.Settings{Seed: cfg.Seed, Capacity: cfg.Capacity, Faults: cfg.Faults}); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the directory of the stub service cannot be written")
		}
		x.client.Dial = x.own.Dial
	}
	return x, nil
}

// refusals are the kinds of the service's errors.
var refusals = map[int]sandboxer.Kind{
	http.StatusBadRequest:         sandboxer.Invalid,
	http.StatusNotFound:           sandboxer.NotFound,
	http.StatusConflict:           sandboxer.Unavailable, // another change is under way
	http.StatusTooManyRequests:    sandboxer.Exhausted,
	http.StatusServiceUnavailable: sandboxer.Unavailable,
}

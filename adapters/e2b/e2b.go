// Package e2b makes sandboxes at E2B, or at a service with the same API: its control plane by REST, and the daemon in each
// sandbox by the client of our own agent, which speaks the same protocol.
package e2b

import (
	"cmp"
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

// Config is the extension's `config:` block.
type Config struct {
	Key         sandboxer.Secret     `yaml:"key" json:"key,omitempty" help:"Key to the account, which begins with e2b_."`
	Credential  sandboxer.Credential `yaml:"credential" json:"credential,omitzero" help:"The secret that is the key in its place."`
	Domain      string               `yaml:"domain" json:"domain,omitempty" help:"Domain of the service: its API is at api.DOMAIN, and its sandboxes are below DOMAIN."`
	APIURL      string               `yaml:"api_url" json:"api_url,omitempty" help:"URL of the API, if it is elsewhere: https://host, or http:// with a loopback address."`
	SandboxURL  string               `yaml:"sandbox_url" json:"sandbox_url,omitempty" help:"URL that leads to every sandbox by the headers of a request, if it is elsewhere. Empty means sandbox.DOMAIN for e2b.app, and a host of its own for each sandbox of another domain."`
	Template    string               `yaml:"template" json:"template,omitempty" help:"Template of sandboxes whose profile names no image."`
	VCPUs       int                  `yaml:"vcpus" json:"vcpus,omitempty" min:"1" max:"1024" help:"Virtual processors of the templates, for quotes. The service fixes the size with a template."`
	Memory      int64                `yaml:"memory" json:"memory,omitempty" unit:"bytes" min:"1MiB" help:"Memory of the templates, for quotes."`
	MaxLifetime time.Duration        `yaml:"max_lifetime" json:"max_lifetime,omitempty" min:"1m" help:"How long a sandbox may run by the plan of the account; a longer life is refused."`
	Settle      time.Duration        `yaml:"settle" json:"settle,omitempty" min:"0s" max:"5m" help:"How long after a create without an answer the listing may not show the sandbox yet."`
}

const vendorDomain = "e2b.app"

// Validate implements the check of sandboxer.Typed.
func (c *Config) Validate() error {
	for name, url := range map[string]string{"api_url": c.APIURL, "sandbox_url": c.SandboxURL, "domain": "https://" + c.Domain} {
		if err := hosted.CheckURL(url); url != "" && err != nil {
			return sandboxer.E(sandboxer.Invalid, nil, "%s: %s", name, sandboxer.Message(err))
		}
	}
	return nil
}

// Adapter is what package adapters lists.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:      "e2b",
	Title:     "Sandboxes of E2B",
	Help:      "Makes sandboxes at E2B, with a key to an account there, or at a service with the same API. Each is a virtual machine, and is paid by the second.",
	Handlers:  []string{"sandboxer.extensions.e2b"},
	Isolation: []sandboxer.Isolation{sandboxer.IsolationContainer, sandboxer.IsolationVM}, // what the former file says is less than what it is
	Pricing:   sandboxer.PricingModels(),
	Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList,
		sandboxer.CanSnapshot, sandboxer.CanQuote, sandboxer.CanMeter, sandboxer.CanPause, sandboxer.CanRenew, sandboxer.CanStats, sandboxer.CanProcesses, sandboxer.CanWatch},
}, Config{Domain: vendorDomain, Template: "base", VCPUs: 2, Memory: 512 << 20, MaxLifetime: 24 * time.Hour, Settle: 10 * time.Second}, open)

func open(ctx context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	keys, err := hosted.NeedKeys(ctx, env, cfg.Key, cfg.Credential)
	if err != nil {
		return nil, err
	}
	x := &extension{cfg: cfg, memory: true, Sandboxes: hosted.Sandboxes{Env: env, Keys: keys, Settle: cfg.Settle}}
	x.List, x.Get, x.Delete = x.list, x.get, x.remove
	x.Capabilities.Open = x.openAgent
	x.client = &hosted.Client{Base: strings.TrimSuffix(cmp.Or(cfg.APIURL, "https://api."+cfg.Domain), "/"), Keys: keys, Authorize: authorize, Refusals: refusals}
	return x, nil
}

// authorize puts the key into a request.
func authorize(h http.Header, key sandboxer.Secret) {
	h.Set("X-API-Key", string(key))
	h.Set("User-Agent", "sandboxer")
}

// refusals are the kinds of the service's errors.
var refusals = map[int]sandboxer.Kind{
	http.StatusBadRequest:         sandboxer.Invalid,
	http.StatusNotFound:           sandboxer.NotFound,
	http.StatusConflict:           sandboxer.Unavailable, // another change is under way
	http.StatusTooManyRequests:    sandboxer.Exhausted,
	http.StatusServiceUnavailable: sandboxer.Unavailable, // no room, or busy
}

// Package remote makes sandboxes of what exists elsewhere: a URL that exists already, or another
// installation of sandboxer.
//
// There are three kinds of extension. Of kind url, a sandbox is one of the base URLs that the configuration
// names, or one that the caller names where that is allowed: it is lent to one sandbox at a time, and left
// unchanged afterwards. Kind aio is the same for servers with agent-infra's in-sandbox API: a sandbox is ready when that
// API answers, and its users call the API by the URL. The note <id>.g<n> has the lease.
//
// Of kind sandboxer, another installation makes the sandbox, over its API. It is found by its labels, and
// nothing is kept here.
package remote

import (
	"context"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Config is the extension's `config:` block.
type Config struct {
	Kind  string            `yaml:"kind" json:"kind" required:"true" enum:"url,aio,sandboxer" help:"What a sandbox is: url, something that exists and is reached by HTTP; aio, the same with agent-infra's in-sandbox API; sandboxer, a sandbox of another installation."`
	Bases map[string]string `yaml:"bases" json:"bases,omitempty" keys:"label" help:"For url and aio: the bases, by name, as http:// and https:// URLs. Each is one sandbox at a time."`
	Allow []string          `yaml:"allow" json:"allow,omitempty" help:"For url and aio: URLs below which callers can name one (input url)."`
	Wait  time.Duration     `yaml:"wait" json:"wait,omitempty" min:"1s" max:"5m" help:"For url and aio: how long to wait for an answer; kind aio needs 200 to GET /v1/sandbox."`

	URL      string           `yaml:"url" json:"url,omitempty" help:"For sandboxer: address of the other installation, https://host, http://host:port or unix:///path."`
	Token    sandboxer.Secret `yaml:"token" json:"token,omitempty" help:"For sandboxer: API key of the other installation, preferably without the scope admin; not needed for unix://."`
	Profile  string           `yaml:"profile" json:"profile,omitempty" help:"For sandboxer: profile of the other installation that sandboxes are made from."`
	Profiles []string         `yaml:"profiles" json:"profiles,omitempty" help:"For sandboxer: other profiles there that callers can name (input profile)."`

	CA string `yaml:"ca" json:"ca,omitempty" format:"abspath" help:"File with the authorities trusted for https://, in PEM; empty means the system's."`
}

// The kinds of extension.
const (
	kindURL       = "url"
	kindAIO       = "aio"
	kindSandboxer = "sandboxer"
)

// The inputs that do not belong to the other installation.
const (
	inputURL     = "url"
	inputBase    = "base"
	inputProfile = "profile"
)

// Validate implements the check of sandboxer.Typed.
func (c *Config) Validate() error {
	wrong := func(format string, args ...any) error { return sandboxer.E(sandboxer.Invalid, nil, format, args...) }
	switch c.Kind {
	case kindURL, kindAIO:
		if c.URL != "" || c.Token != "" || c.Profile != "" || len(c.Profiles) > 0 {
			return wrong("kind: only sandboxer takes url, token, profile and profiles, %s does not", c.Kind)
		}
		seen := map[string]string{}
		for name, text := range c.Bases {
			u, err := parseURL(text)
			if err != nil {
				return wrong("bases: %s: %s", name, sandboxer.Message(err))
			}
			if other, ok := seen[u.String()]; ok {
				return wrong("bases: %s and %s are the same URL", min(name, other), max(name, other))
			}
			seen[u.String()] = name
		}
		for _, text := range c.Allow {
			if _, err := parseURL(text); err != nil {
				return wrong("allow: %s", sandboxer.Message(err))
			}
		}
	case kindSandboxer:
		if len(c.Bases) > 0 || len(c.Allow) > 0 {
			return wrong("kind: only url and aio take bases and allow, not sandboxer")
		}
		if c.URL == "" || c.Profile == "" {
			return wrong("kind: the settings url and profile are required for sandboxer")
		}
		for i := range c.Profiles {
			if c.Profiles[i] == "" {
				return wrong("profiles: the name of a profile cannot be empty")
			}
		}
	default:
		return wrong("kind: want url, aio or sandboxer")
	}
	return nil
}

// Adapter is what package adapters lists.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:  "remote",
	Title: "What exists elsewhere: a URL, or another sandboxer",
	Help: "Makes each sandbox of something elsewhere: a URL that exists and is not changed, or a sandbox of another installation of sandboxer, " +
		"with everything that its API gives.",
	Isolation: sandboxer.Isolations(),
	Pricing:   sandboxer.PricingModels(),
	Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanProbe, sandboxer.CanDiscover,
		sandboxer.CanList, sandboxer.CanSnapshot, sandboxer.CanQuote, sandboxer.CanMeter, sandboxer.CanPause, sandboxer.CanRenew, sandboxer.CanCapacity, sandboxer.CanStats, sandboxer.CanNetwork,
		sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch, sandboxer.CanNotify},
	Inputs: []sandboxer.Input{
		{Name: inputBase, Help: "kinds url and aio: name of the base to take; without it the first free one"},
		{Name: inputURL, Restricted: true, Help: "kinds url and aio: the URL of the sandbox; everybody can name one below `allow`"},
		{Name: inputProfile, Restricted: true, Help: "kind sandboxer: profile there, in place of the configured one; everybody can name one of `profiles`"},
		{Name: sandboxer.AnyInput, Restricted: true, Help: "kind sandboxer: the inputs of the profile there, by the rules of the other installation"},
	},
}, Config{Wait: 30 * time.Second}, open)

func open(ctx context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	// A nil *site or *peer would be an Extension that is not nil.
	if cfg.Kind == kindSandboxer {
		p, err := openPeer(ctx, env, cfg, maxAnswer)
		if err != nil {
			return nil, err
		}
		return p, nil
	}
	s, err := openSite(ctx, env, cfg)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// refuseInputs refuses the inputs of spec that are not among names.
func refuseInputs(spec sandboxer.Spec, names ...string) error {
	for name := range spec.Inputs {
		if !slices.Contains(names, name) {
			return sandboxer.E(sandboxer.Invalid, nil, "this extension takes no input %q", name)
		}
	}
	return nil
}

// Package docker makes sandboxes that are containers of Docker's or Podman's engines, on this
// machine or on others, by their API.
//
// The agent is the first process of a container. Its program lies in a volume of the engine that
// containers have read-only; it is filled by way of a container that never runs. What is done in a sandbox
// is done by the agent, over an attached command of the engine that leads to the agent's socket:
// no port, no directory that is shared.
//
// What a sandbox is made of is in the labels of its container, by which it is found. What changes
// while it lives is written down below the extension's private directory:
//
//	box/<id>.g<n>.json   whether it was completed, its claim, its fuse
//	agent/               which volume of an engine has a whole agent
//	lock/                one file per sandbox that is being changed, and per engine
//	image/               layers of registries
//	mount/<id>.g<n>/     what a sandbox mounts, while it is made
package docker

import (
	"net/netip"
	"net/url"
	"regexp"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/egress"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// Config is the extension's `config:` block.
type Config struct {
	Engines          map[string]Engine `yaml:"engines" json:"engines,omitempty" keys:"label" help:"The engines, by the name that a host has for callers; empty means Docker's on this machine, as localhost."`
	Image            string            `yaml:"image" json:"image,omitempty" format:"line" help:"Image of sandboxes for which neither profile nor caller names one; empty means that one must be named."`
	Capacity         int               `yaml:"capacity" json:"capacity,omitempty" min:"1" help:"Sandboxes on one engine at once."`
	Memory           int64             `yaml:"memory" json:"memory,omitempty" unit:"bytes" min:"16MiB" help:"Limit of memory for sandboxes that ask for none."`
	PIDs             int64             `yaml:"pids" json:"pids,omitempty" min:"32" help:"Limit of processes and threads for sandboxes that ask for none."`
	Runtime          string            `yaml:"runtime" json:"runtime,omitempty" format:"line" help:"The engines' runtime that sandboxes are run by, runsc for gVisor; empty means the usual one. Engines make no snapshots then."`
	Grants           []string          `yaml:"grants" json:"grants,omitempty" help:"Capabilities that the input grants may give to sandboxes, by name; none without it. With some of them, SYS_ADMIN for one, a sandbox is as good as root on the engine's machine."`
	UnfilteredEgress bool              `yaml:"unfiltered_egress" json:"unfiltered_egress,omitempty" help:"Let sandboxes with the network mode public have the engine's network, unfiltered: they reach what its machine reaches, private addresses included. Without it that mode is filtered on engines of the server's machine, and refused on others."`
	Network          string            `yaml:"network" json:"network,omitempty" format:"line" help:"The engine's network for sandboxes with the mode public, with unfiltered_egress."`
	DNS              []string          `yaml:"dns" json:"dns,omitempty" help:"Resolvers (address or address:port) for sandboxes with a filtered network; empty means those of the server's machine."`
	Never            []string          `yaml:"never" json:"never,omitempty" help:"Addresses and CIDRs that no sandbox with a filtered network reaches, whatever its policy says."`
	Images           Images            `yaml:"images" json:"images,omitzero" help:"Images of registries, which the server fetches and loads into the engines."`
	Mounts           mounts.Settings   `yaml:"mounts" json:"mounts,omitzero" help:"What of this machine sandboxes may have mounted."`
	Agent            string            `yaml:"agent" json:"agent,omitempty" help:"Path of sandboxer-agent for the platform of the engines; empty means beside the running program."`
	Transport        string            `yaml:"transport" json:"transport,omitempty" enum:"auto,openssh,native" help:"How SSH is spoken: by the machine's own ssh, or by this program; auto takes ssh where it is."`
	SSHConfig        string            `yaml:"ssh_config" json:"ssh_config,omitempty" help:"ssh configuration file; empty means the account's and the system's."`
}

// Engine is one engine.
type Engine struct {
	Address  string `yaml:"address" json:"address" format:"line" help:"unix:///path of a socket, tcp://host:port with certificates, or ssh://user@host[:port][/path of the socket there]."`
	CA       string `yaml:"ca" json:"ca,omitempty" format:"abspath" help:"For tcp: file with the certificates that the engine's is signed by, in PEM."`
	Cert     string `yaml:"cert" json:"cert,omitempty" format:"abspath" help:"For tcp: file with the certificate that the server shows, in PEM."`
	Key      string `yaml:"key" json:"key,omitempty" format:"abspath" help:"For tcp: file with the key of cert, in PEM."`
	Capacity int    `yaml:"capacity" json:"capacity,omitempty" min:"1" help:"Sandboxes on this engine at once, in place of the capacity of all."`
}

// Images are the settings for images of registries. They are those of the adapter local.
type Images struct {
	Pull        string              `yaml:"pull" json:"pull,omitempty" enum:"missing,always,never" help:"When a registry is asked what a tag stands for; a digest is asked about only if its image is not here."`
	Registries  []string            `yaml:"registries" json:"registries,omitempty" help:"The only registries to pull from, as host[:port], with the server's credentials for everybody; empty means any, and for who is no administrator public ones without credentials."`
	Insecure    []string            `yaml:"insecure" json:"insecure,omitempty" help:"Registries that may speak plain HTTP, as host[:port]; those on loopback may anyway."`
	Mirrors     map[string][]string `yaml:"mirrors" json:"mirrors,omitempty" help:"By registry: hosts that are asked first."`
	Never       []string            `yaml:"never" json:"never,omitempty" help:"Addresses and CIDRs that are not pulled from at the wish of who is no administrator, beside private ones."`
	Keep        int64               `yaml:"keep" json:"keep,omitempty" unit:"bytes" min:"1MiB" help:"Size of the store of layers, and of what was loaded into one engine, beyond which what is not used is removed."`
	MaxDownload int64               `yaml:"max_download" json:"max_download,omitempty" unit:"bytes" min:"1KiB" help:"Largest image, as it is fetched."`
}

func (i *Images) never() ([]netip.Prefix, error) { return egress.Prefixes("images.never", i.Never) }

func (c *Config) never() ([]netip.Prefix, error) { return egress.Prefixes("never", c.Never) }

// defaultSocket is where Docker's engine listens.
const defaultSocket = "/var/run/docker.sock"

// An address is where an engine listens.
type address struct {
	scheme string // unix, tcp or ssh
	host   string // host:port of tcp, what one types after ssh
	socket string // path of unix and ssh
}

func parseAddress(s string) (address, error) {
	bad := func(why string) (address, error) {
		return address{}, sandboxer.E(sandboxer.Invalid, nil, "engines: %q is not the address of an engine: %s", s, why).
			WithHint("write unix:///path, tcp://host:port or ssh://user@host[:port][/path]")
	}
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return bad("it is no URL")
	case u.RawQuery != "" || u.Fragment != "" || u.Opaque != "":
		return bad("there is more than an address in it")
	}
	switch u.Scheme {
	case "unix":
		if u.Host != "" || u.User != nil || len(u.Path) < 2 {
			return bad("a path follows unix://")
		}
		return address{scheme: "unix", socket: u.Path}, nil
	case "tcp":
		if u.Port() == "" || u.Hostname() == "" || u.User != nil || strings.Trim(u.Path, "/") != "" {
			return bad("a host and a port follow tcp://")
		}
		return address{scheme: "tcp", host: u.Host}, nil
	case "ssh":
		if _, secret := u.User.Password(); u.Hostname() == "" || secret {
			return bad("an account and a host follow ssh://, and no password")
		}
		a := address{scheme: "ssh", host: "ssh://" + u.Host, socket: u.Path}
		if u.User != nil {
			a.host = "ssh://" + u.User.Username() + "@" + u.Host
		}
		if len(a.socket) < 2 {
			a.socket = defaultSocket
		}
		return a, nil
	}
	return bad("it begins with none of them")
}

var networkName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*$`)

// Validate implements the check of sandboxer.Typed.
func (c *Config) Validate() error {
	if err := c.Mounts.Validate(); err != nil {
		return err
	}
	for name, en := range c.Engines {
		a, err := parseAddress(en.Address)
		switch {
		case err != nil:
			return err
		case a.scheme == "tcp" && (en.CA == "" || en.Cert == "" || en.Key == ""):
			return sandboxer.E(sandboxer.Invalid, nil, "engines: %s is reached by TCP, which takes ca, cert and key: whoever reaches an engine without them is as good as root on its machine", name)
		case a.scheme != "tcp" && (en.CA != "" || en.Cert != "" || en.Key != ""):
			return sandboxer.E(sandboxer.Invalid, nil, "engines: %s has certificates, which are for tcp:// alone", name)
		}
	}
	switch {
	case !networkName.MatchString(c.Network), c.Network == "host", c.Network == "none", strings.HasPrefix(c.Network, "container"):
		return sandboxer.E(sandboxer.Invalid, nil, "network: %q is no network that sandboxes could have", c.Network)
	}
	if c.Runtime != "" && !networkName.MatchString(c.Runtime) {
		return sandboxer.E(sandboxer.Invalid, nil, "runtime: %q cannot be the name of a runtime", c.Runtime)
	}
	if _, err := capabilityList("grants", c.Grants); err != nil {
		return err
	}
	dns, err := egress.Resolvers("dns", c.DNS)
	if err != nil {
		return err
	}
	c.DNS = dns
	if _, err := c.never(); err != nil {
		return err
	}
	_, err = c.Images.never()
	return err
}

// Adapter is what package adapters lists.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:  "docker",
	Title: "Containers of Docker and Podman",
	Help: "Makes each sandbox a container of a Docker or Podman engine, on this machine or on others (sockets, TCP with certificates, SSH). " +
		"The agent is the container's first process; capabilities are dropped, and memory and processes are bounded.",
	Isolation: []sandboxer.Isolation{sandboxer.IsolationContainer, sandboxer.IsolationGVisor},
	Pricing:   []sandboxer.PricingModel{sandboxer.PricingSelfHosted},
	Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanProbe,
		sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanSnapshot, sandboxer.CanPause, sandboxer.CanRenew, sandboxer.CanCapacity, sandboxer.CanStats,
		sandboxer.CanNetwork, sandboxer.CanPool, sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch, sandboxer.CanNotify},
	Inputs: []sandboxer.Input{
		{Name: "grants", Restricted: true, Help: "capabilities that root in the sandbox has beyond the usual ones, with commas between them; of those that the extension's grants list"},
		{Name: "repo", Restricted: true, Help: "directory of the broker's machine, absolute, that is copied into the workspace"},
		{Name: "sandbox_id", Help: "the sandbox's ID; a fresh one is made if it is not given"},
	},
}, Config{Capacity: 50, Memory: 2 << 30, PIDs: 2048, Network: "bridge", Transport: "auto", Images: Images{
	Pull: "missing", Keep: 20 << 30, MaxDownload: 16 << 30,
}}, open)

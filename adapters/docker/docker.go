// Package docker makes sandboxes that are containers of Docker's or Podman's engines, on this machine or on
// others, through their API.
//
// The agent is the first process of a container. Its program is in a volume of the engine that containers
// have read-only; a container that never runs is used to fill it. The agent does all work in a sandbox,
// over an attached command of the engine that connects to the agent's socket: there is no port, and no
// shared directory.
//
// The labels of its container describe a sandbox, and identify it. Data that changes during its life is in
// the note <id>.g<n>: whether it was completed, its claim, its fuse. The note with the name of an engine
// says which volume there has a complete agent. Below the extension's private directory:
//
//	image/             layers of registries
//	mount/<id>.g<n>/   a sandbox's mounts, while it is made
package docker

import (
	"net/netip"
	"net/url"
	"regexp"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/egress"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// Config is the extension's `config:` block.
type Config struct {
	Engines          map[string]Engine `yaml:"engines" json:"engines,omitempty" keys:"label" help:"The engines, by the host name that callers use; empty means Docker's on this machine, as localhost."`
	Image            string            `yaml:"image" json:"image,omitempty" format:"line" help:"Image of sandboxes for which neither profile nor caller names one; empty means that they must name one."`
	Capacity         int               `yaml:"capacity" json:"capacity,omitempty" min:"1" help:"Maximum number of sandboxes on one engine."`
	Memory           int64             `yaml:"memory" json:"memory,omitempty" unit:"bytes" min:"16MiB" help:"Memory limit of sandboxes that ask for none."`
	ShmSize          int64             `yaml:"shm_size" json:"shm_size,omitempty" unit:"bytes" min:"1MiB" help:"Size of /dev/shm, which counts as memory; empty means half of the memory limit."`
	PIDs             int64             `yaml:"pids" json:"pids,omitempty" min:"32" help:"Limit of processes and threads for sandboxes that ask for none."`
	Runtime          string            `yaml:"runtime" json:"runtime,omitempty" format:"line" help:"The engines' runtime for sandboxes, such as runsc for gVisor; empty means the engine's default. With a runtime, engines make no snapshots."`
	Grants           []string          `yaml:"grants" json:"grants,omitempty" help:"Capabilities that the input grants can give to sandboxes, by name; empty means none. With some of them, such as SYS_ADMIN, a sandbox is as good as root on the engine's machine."`
	UnfilteredEgress bool              `yaml:"unfiltered_egress" json:"unfiltered_egress,omitempty" help:"Give sandboxes with the network mode public the engine's network, unfiltered: they reach everything that its machine reaches, private addresses included. Without it that mode is filtered on engines of the server's machine, and refused on others."`
	Network          string            `yaml:"network" json:"network,omitempty" format:"line" help:"The engine's network for sandboxes with the mode public, with unfiltered_egress."`
	DNS              []string          `yaml:"dns" json:"dns,omitempty" help:"Resolvers (address or address:port) for sandboxes with a filtered network; empty means those of the server's machine."`
	Never            []string          `yaml:"never" json:"never,omitempty" help:"Addresses and CIDRs that no sandbox with a filtered network reaches, whatever its policy says."`
	Images           Images            `yaml:"images" json:"images,omitzero" help:"Images of registries, which the server fetches and loads into the engines."`
	Mounts           mounts.Settings   `yaml:"mounts" json:"mounts,omitzero" help:"Which directories of this machine sandboxes can mount."`
	Agent            string            `yaml:"agent" json:"agent,omitempty" help:"Path of sandboxer-agent for the platform of the engines; empty means next to the running program."`
	SSHConfig        string            `yaml:"ssh_config" json:"ssh_config,omitempty" help:"ssh configuration file; empty means the account's and the system's."`
}

// Engine is one engine.
type Engine struct {
	Address  string `yaml:"address" json:"address" format:"line" help:"unix:///path of a socket, tcp://host:port with certificates, or ssh://user@host[:port][/path of the socket there]."`
	CA       string `yaml:"ca" json:"ca,omitempty" format:"abspath" help:"For tcp: file with the authorities that sign the engine's certificate, in PEM."`
	Cert     string `yaml:"cert" json:"cert,omitempty" format:"abspath" help:"For tcp: file with the server's client certificate, in PEM."`
	Key      string `yaml:"key" json:"key,omitempty" format:"abspath" help:"For tcp: file with the key of cert, in PEM."`
	Capacity int    `yaml:"capacity" json:"capacity,omitempty" min:"1" help:"Maximum number of sandboxes on this engine, in place of the extension's capacity."`
}

// Images are the settings for images of registries.
type Images struct {
	images.Settings
	Never       []string `yaml:"never" json:"never,omitempty" help:"Addresses and CIDRs, in addition to private ones, from which callers without administrator rights cannot pull."`
	Keep        int64    `yaml:"keep" json:"keep,omitempty" unit:"bytes" min:"1MiB" help:"Maximum size of the store of layers, and of the images loaded into one engine; unused content beyond it is removed."`
	MaxDownload int64    `yaml:"max_download" json:"max_download,omitempty" unit:"bytes" min:"1KiB" help:"Maximum size of an image as it is fetched."`
}

func (i *Images) never() ([]netip.Prefix, error) { return egress.Prefixes("images.never", i.Never) }

func (c *Config) never() ([]netip.Prefix, error) { return egress.Prefixes("never", c.Never) }

// defaultSocket is where Docker's engine listens.
const defaultSocket = "/var/run/docker.sock"

// An address is where an engine listens.
type address struct {
	scheme string // unix, tcp or ssh
	host   string // host:port of tcp, the argument of ssh
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
			return sandboxer.E(sandboxer.Invalid, nil, "engines: %s is reached by TCP, which needs ca, cert and key: any client that can use an engine is as good as root on its machine", name)
		case a.scheme != "tcp" && (en.CA != "" || en.Cert != "" || en.Key != ""):
			return sandboxer.E(sandboxer.Invalid, nil, "engines: %s has certificates, which are for tcp:// alone", name)
		}
	}
	switch {
	case !networkName.MatchString(c.Network), c.Network == "host", c.Network == "none", strings.HasPrefix(c.Network, "container"):
		return sandboxer.E(sandboxer.Invalid, nil, "network: %q is not a network that sandboxes can have", c.Network)
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

// Adapter is this package's entry in package adapters.
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
		{Name: "grants", Restricted: true, Help: "capabilities that root in the sandbox has beyond the usual ones, separated by commas; the extension's grants must list them"},
		{Name: "repo", Restricted: true, Help: "directory of the broker's machine, absolute, that is copied into the workspace"},
		{Name: "sandbox_id", Help: "the sandbox's ID; without it a new one is made"},
	},
}, Config{Capacity: 50, Memory: 2 << 30, PIDs: 2048, Network: "bridge", Images: Images{
	Settings: images.Settings{Pull: "missing"}, Keep: 20 << 30, MaxDownload: 16 << 30,
}}, open)

// Package composessh runs sandboxes that are compose projects on hosts reached over
// SSH: the directory of the input repo is copied to a host, its compose file is checked against
// a policy (package composefile), rewritten and started there. The host needs an
// engine (Docker or Podman) and one of the compose programs; nothing is installed.
//
// On a host everything of one sandbox has its external name, sbx-<owner>-<id>-g<n>,
// as the name of the compose project, as a label, and as a directory:
//
//	<root>/<name>/meta.json      what later processes must know of it
//	<root>/<name>/repo/          the workspace
//	<root>/<name>/compose.yaml   the file written from the model
//	<root>/<name>/files, copies  files for mounts that are not in the workspace
//	<root>/<name>/started, up    how far it came; up has the IDs of the containers
//	<root>/<name>/frozen, beat   while a snapshot or an archive has its containers paused
//	<root>/.cache/<build>        when layers of a build were used last, and of what
//	<root>/.net/<n>              a link to the sandbox that has subnet n
//	<root>/.agent/<digest>/      the agent, which default services have mounted
//
// The directory is made first and removed last: it is the lock, and a sweep finds it.
// The broker knows the host of a sandbox (sandboxer.Placer), and the handle names it. If neither
// does, every host is searched.
package composessh

import (
	"net/netip"
	"os"
	"path"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/egress"
)

// Config is the extension's `config:` block.
type Config struct {
	// Hosts are names of hosts that were added, or what a user would type after ssh; for the
	// latter the key must be in known_hosts.
	Hosts []string `yaml:"hosts" json:"hosts,omitempty" help:"Hosts for sandboxes: names that were added with sandboxer host add, or ssh aliases. Empty means every host that was added."`
	// Host is one more host; it is the form of the first versions of the file.
	Host string `yaml:"host" json:"host,omitempty" help:"One host, in addition to hosts."`
	Root string `yaml:"root" json:"root,omitempty" help:"Directory on the hosts for sandboxes; relative to the account's home unless it is absolute."`
	// ComposeCmd is the compose program; if it is empty, SANDBOXER_COMPOSE_CMD of the environment
	// counts.
	ComposeCmd string `yaml:"compose_cmd" json:"compose_cmd,omitempty" help:"Compose program of the hosts: docker compose, docker-compose or podman-compose. Empty means SANDBOXER_COMPOSE_CMD, or else the first of these that a host has."`
	Engine     string `yaml:"engine" json:"engine,omitempty" help:"Address of the engine on the hosts, as DOCKER_HOST has it, such as unix:///run/user/1000/docker.sock. Empty means the account's default."`
	Capacity   int    `yaml:"capacity" json:"capacity,omitempty" min:"1" help:"Maximum number of sandboxes on one host, where the host's record does not set it."`
	Parallel   int    `yaml:"parallel" json:"parallel,omitempty" min:"1" help:"Number of sandboxes that start on one host at the same time."`
	// MinFree counts only where there is a choice.
	MinFree int64  `yaml:"min_free" json:"min_free,omitempty" unit:"bytes" min:"0" help:"Free disk space that a host needs, where it keeps sandboxes and images, to be chosen among several."`
	Subnets string `yaml:"subnets" json:"subnets,omitempty" help:"Private IPv4 range of the networks of sandboxes, 64 addresses each."`
	// UnfilteredEgress spares sandboxes with the network mode public the gateway.
	UnfilteredEgress bool `yaml:"unfiltered_egress" json:"unfiltered_egress,omitempty" help:"Do not filter the network mode public: sandboxes then reach everything that their host reaches, private addresses included. Without it a gateway filters, which needs Docker and /dev/net/tun on the host."`
	// DNS and Never are as in ext.local.
	DNS   []string `yaml:"dns" json:"dns,omitempty" help:"Resolvers (address or address:port) for sandboxes whose network is filtered; empty means those of the host."`
	Never []string `yaml:"never" json:"never,omitempty" help:"Addresses and CIDRs that no sandbox whose network is filtered reaches, whatever its network policy says. The host's own addresses are always among them."`
	// EgressProgram is for one platform; the programs next to sandboxer are for several.
	EgressProgram string `yaml:"egress_program" json:"egress_program,omitempty" help:"Path of sandboxer-egress, the program that filters, for the platform of the hosts; empty means next to the running program."`
	// Agent is for one platform; the programs next to sandboxer are for several.
	Agent string `yaml:"agent" json:"agent,omitempty" help:"Path of sandboxer-agent for the platform of the hosts; empty means next to the running program. Without an agent, sandboxes have neither processes that outlive their callers nor watches of files."`
	// BuildNetwork is separate from the network of services.
	BuildNetwork bool `yaml:"build_network" json:"build_network,omitempty" help:"Build images with the network of the host's engine, unfiltered, regardless of the network of the services."`
	// HostGateway needs a network: those of sandboxes without one lead nowhere.
	HostGateway bool  `yaml:"host_gateway" json:"host_gateway,omitempty" help:"Let services whose profile gives them a network reach the host by the names that the file maps to host-gateway, such as host.docker.internal."`
	BuildMemory int64 `yaml:"build_memory" json:"build_memory,omitempty" unit:"bytes" min:"64MiB" help:"Memory limit of the steps of a build. BuildKit enforces no such limit and is refused unless this is the default."`
	BuildCPUs   int   `yaml:"build_cpus" json:"build_cpus,omitempty" min:"1" help:"Processor limit of the steps of a build. BuildKit enforces no such limit and is refused unless this is the default."`
	// BuildCache includes the base images.
	BuildCache   int64         `yaml:"build_cache" json:"build_cache,omitempty" unit:"bytes" min:"0" help:"Size of the layers of built images that a host keeps for later builds, for each tenant; 0 keeps none. Their base images count with them. BuildKit keeps layers of its own, within its own bounds."`
	BuildTimeout time.Duration `yaml:"build_timeout" json:"build_timeout,omitempty" min:"1s" help:"Longest time that one image may take to build."`
	SSHConfig    string        `yaml:"ssh_config" json:"ssh_config,omitempty" help:"SSH configuration file; empty means the account's and the system's."`
}

var defaults = Config{Root: ".sandboxer/compose", Capacity: 16, Parallel: 6, Subnets: "10.213.0.0/16",
	BuildMemory: 4 << 30, BuildCPUs: 2, BuildCache: 10 << 30, MinFree: 1 << 30, BuildTimeout: 30 * time.Minute}

// netBits is the size of one network: 61 containers.
const netBits = 26

// Validate implements the check of sandboxer.Typed.
func (c *Config) Validate() error {
	p, err := netip.ParsePrefix(c.Subnets)
	if err != nil || !p.Addr().Is4() || !p.Addr().IsPrivate() || p.Bits() > netBits-2 || p.Masked() != p {
		return sandboxer.E(sandboxer.Invalid, err, "subnets: %q is not a private IPv4 range of at least 256 addresses", c.Subnets)
	}
	if c.Root == "" || path.Clean(c.Root) != c.Root || c.Root == "/" || c.Root == "." || strings.HasPrefix(c.Root, "..") || strings.ContainsAny(c.Root, ":,\\\n") {
		return sandboxer.E(sandboxer.Invalid, nil, "root: %q is not a clean path without colons and commas", c.Root)
	}
	if _, err := egress.Prefixes("never", c.Never); err != nil {
		return err
	}
	if _, err := egress.Resolvers("dns", c.DNS); err != nil {
		return err
	}
	if cmd := c.compose(); len(cmd) > 0 && flavour(cmd) == "" {
		return sandboxer.E(sandboxer.Invalid, nil, "compose_cmd: %q is none of docker compose, docker-compose, podman compose and podman-compose", strings.Join(cmd, " "))
	}
	return nil
}

// compose is the configured compose program, nil for none.
func (c *Config) compose() []string {
	if c.ComposeCmd != "" {
		return strings.Fields(c.ComposeCmd)
	}
	return strings.Fields(os.Getenv("SANDBOXER_COMPOSE_CMD"))
}

// flavour is the engine that goes with a compose program, "" if it is unknown.
func flavour(cmd []string) string {
	switch base := path.Base(cmd[0]); {
	case base == "podman-compose", base == "podman" && len(cmd) == 2 && cmd[1] == "compose":
		return "podman"
	case base == "docker-compose", base == "docker" && len(cmd) == 2 && cmd[1] == "compose":
		return "docker"
	}
	return ""
}

// Adapter is what package adapters lists.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:  "compose-ssh",
	Title: "Compose projects on hosts over SSH",
	Help: "Copies a repository to a host over SSH and starts its compose file there, checked against a policy and rewritten. " +
		"Hosts need Docker or Podman and a compose program.",
	Handlers:  []string{"sandboxer.extensions.compose_ssh"},
	Isolation: []sandboxer.Isolation{sandboxer.IsolationContainer},
	Pricing:   []sandboxer.PricingModel{sandboxer.PricingSelfHosted},
	Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanProbe,
		sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanPause, sandboxer.CanCapacity, sandboxer.CanStats, sandboxer.CanCheckpoint,
		sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch},
	Inputs: []sandboxer.Input{
		{Name: "repo", Restricted: true, Help: "directory of the broker's machine with the compose file, copied to the host", Required: true},
		{Name: "file", Help: "compose file below repo; without it those of COMPOSE_FILE, or the first of compose.yaml, compose.yml, docker-compose.yaml and docker-compose.yml, with its compose.override.yaml"},
		{Name: "service", Help: "service that commands run in and ports belong to; without it the first of the file that is not a one-time job"},
		{Name: "profiles", Help: "compose profiles to enable, separated by commas; without it those of COMPOSE_PROFILES"},
		{Name: "volumes", Help: "named volumes that portable snapshots contain in addition to the workspace, separated by commas, or all"},
		{Name: "quiesce", Help: "yes: the services are paused while a snapshot is read; no: they continue to run. Without it, yes if the snapshot has volumes, otherwise no"},
		{Name: "new_privileges", Restricted: true, Help: "yes: services can gain rights by set-uid programs such as sudo; without it they have no-new-privileges"},
		{Name: "sandbox_id", Help: "the sandbox's ID; without it a new one is made"},
	},
}, defaults, open)

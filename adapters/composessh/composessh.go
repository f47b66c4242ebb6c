// Package composessh runs sandboxes that are compose projects on hosts reached over
// SSH: the directory of the input repo is copied to a host, its compose file is held to
// a policy (package composefile), written anew and started there. The host needs an
// engine (Docker or Podman) and one of the compose programs; nothing is installed.
//
// On a host everything of one sandbox carries its external name, sbx-<owner>-<id>-g<n>,
// as the name of the compose project, as a label, and as a directory:
//
//	<root>/<name>/meta.json      what later processes must know of it
//	<root>/<name>/repo/          the workspace
//	<root>/<name>/compose.yaml   the file written from the model
//	<root>/<name>/files, copies  what is mounted from beside the workspace
//	<root>/<name>/started, up    how far it came; up has the IDs of the containers
//	<root>/<name>/frozen, beat   while its containers stand still for somebody
//	<root>/.cache/<build>        when layers of a build were used last, and of what
//	<root>/.net/<n>              a link to the sandbox that has subnet n
//	<root>/.agent/<digest>/      the agent, which default services have mounted
//
// The directory is made first and removed last: it is the lock, and what a sweep finds.
// Which host a sandbox is on is the broker's to know (sandboxer.Placer), and in the handle. Where
// neither says it, every host is searched.
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
	// Hosts are names of hosts that were added, or what one would type after ssh; of the
	// latter the key must be in known_hosts.
	Hosts []string `yaml:"hosts" json:"hosts,omitempty" help:"Hosts to put sandboxes on: names that were added with sandboxer host add, or ssh aliases. Empty means every host that was added."`
	// Host is one more, as the first versions of the file had it.
	Host string `yaml:"host" json:"host,omitempty" help:"One host, in addition to hosts."`
	Root string `yaml:"root" json:"root,omitempty" help:"Directory on the hosts for sandboxes; relative to the account's home unless it is absolute."`
	// ComposeCmd is the compose program; SANDBOXER_COMPOSE_CMD of the environment counts
	// where it is empty.
	ComposeCmd string `yaml:"compose_cmd" json:"compose_cmd,omitempty" help:"Compose program of the hosts: docker compose, docker-compose or podman-compose. Empty means SANDBOXER_COMPOSE_CMD, or else what a host has, in this order."`
	Engine     string `yaml:"engine" json:"engine,omitempty" help:"Address of the engine on the hosts, as DOCKER_HOST has it, such as unix:///run/user/1000/docker.sock. Empty means the account's default."`
	Capacity   int    `yaml:"capacity" json:"capacity,omitempty" min:"1" help:"Sandboxes on one host at once, where the host's record does not say."`
	Parallel   int    `yaml:"parallel" json:"parallel,omitempty" min:"1" help:"Sandboxes being started on one host at once."`
	// MinFree is looked at only where there is a choice.
	MinFree int64  `yaml:"min_free" json:"min_free,omitempty" unit:"bytes" min:"0" help:"Disk that must be free where a host keeps sandboxes and images for it to be chosen among several."`
	Subnets string `yaml:"subnets" json:"subnets,omitempty" help:"Private IPv4 range that networks of sandboxes are cut from, 64 addresses each."`
	// UnfilteredEgress spares sandboxes with the network mode public the gateway.
	UnfilteredEgress bool `yaml:"unfiltered_egress" json:"unfiltered_egress,omitempty" help:"Do not filter the network mode public: sandboxes then reach whatever their host reaches, private addresses included. Without it a gateway filters, which takes Docker and /dev/net/tun on the host."`
	// DNS and Never are what ext.local has under these names.
	DNS   []string `yaml:"dns" json:"dns,omitempty" help:"Resolvers (address or address:port) for sandboxes whose network is filtered; empty means those of the host."`
	Never []string `yaml:"never" json:"never,omitempty" help:"Addresses and CIDRs that no sandbox whose network is filtered reaches, whatever its network policy says. The host's own addresses are among them without being listed."`
	// EgressProgram is for one platform; the programs beside sandboxer are for several.
	EgressProgram string `yaml:"egress_program" json:"egress_program,omitempty" help:"Path of sandboxer-egress, the program that filters, for the platform of the hosts; empty means beside the running program."`
	// Agent is for one platform; the programs beside sandboxer are for several.
	Agent string `yaml:"agent" json:"agent,omitempty" help:"Path of sandboxer-agent for the platform of the hosts; empty means beside the running program. Where there is none, sandboxes have neither processes that outlive their callers nor watches of files."`
	// BuildNetwork is apart from what services reach.
	BuildNetwork bool `yaml:"build_network" json:"build_network,omitempty" help:"Build images with the network of the host's engine, unfiltered, whatever network the services get."`
	// HostGateway needs a network: those of sandboxes without one lead nowhere.
	HostGateway bool  `yaml:"host_gateway" json:"host_gateway,omitempty" help:"Let services whose profile gives them a network reach the host by the names that the file maps to host-gateway, such as host.docker.internal."`
	BuildMemory int64 `yaml:"build_memory" json:"build_memory,omitempty" unit:"bytes" min:"64MiB" help:"Memory of the steps of a build. BuildKit, which keeps no such limit, is refused where this is not the default."`
	BuildCPUs   int   `yaml:"build_cpus" json:"build_cpus,omitempty" min:"1" help:"Processors of the steps of a build. BuildKit, which keeps no such limit, is refused where this is not the default."`
	// BuildCache counts what an image is based on with it.
	BuildCache   int64         `yaml:"build_cache" json:"build_cache,omitempty" unit:"bytes" min:"0" help:"Layers of built images that a host keeps for later builds, for each tenant; 0 keeps none. What they are based on counts with them. BuildKit keeps its own, within bounds of its own."`
	BuildTimeout time.Duration `yaml:"build_timeout" json:"build_timeout,omitempty" min:"1s" help:"Longest time that one image may take to build."`
	Sync         string        `yaml:"sync" json:"sync,omitempty" enum:"tar,rsync" help:"How the content of files travels."`
	Transport    string        `yaml:"transport" json:"transport,omitempty" enum:"auto,openssh,native" help:"Which SSH is used: the machine's own program, or the one built in."`
	SSHConfig    string        `yaml:"ssh_config" json:"ssh_config,omitempty" help:"SSH configuration file; empty means the account's and the system's."`
}

var defaults = Config{Root: ".sandboxer/compose", Capacity: 16, Parallel: 6, Subnets: "10.213.0.0/16", Sync: "tar", Transport: "auto",
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
	Help: "Copies a repository to a host over SSH and starts its compose file there, held to a policy and written anew. " +
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
		{Name: "service", Help: "service that commands run in and ports belong to; without it the first of the file that is not done once it ended"},
		{Name: "profiles", Help: "compose profiles to enable, separated by commas; without it those of COMPOSE_PROFILES"},
		{Name: "volumes", Help: "named volumes that go into portable snapshots with the workspace, separated by commas, or all"},
		{Name: "quiesce", Help: "yes: the services stand still while a snapshot is read; no: they go on. Without it yes if there are volumes in it, otherwise no"},
		{Name: "new_privileges", Restricted: true, Help: "yes: services may gain rights by set-uid programs such as sudo; without it they have no-new-privileges"},
		{Name: "sandbox_id", Help: "the sandbox's ID; a fresh one is made if it is not given"},
	},
}, defaults, open)

// Package local runs sandboxes on this machine under gVisor, linked in as a
// library: no engine, no image and no account is needed. It is the default.
//
// A sandbox is one gVisor sandbox whose first process becomes the agent when it is
// needed (package pause). Its root is the machine's own /usr with a small generated rest
// (never /root, /home, keys or sockets), or an image; all its writes go to a private layer.
// Commands are started through gVisor's own control socket; terminals and files go through
// the agent.
//
// Everything lives below the extension's private directory, so that a later process
// finds it again:
//
//	run/               gVisor's state files and control sockets
//	box/<name>/        one directory per sandbox: record and bundle
//	layer/             where the private layers are: open files without a name
//	skel/<digest>/     the generated root shared by sandboxes without an image
//	image/             images: layers of registries, and those converted to EROFS
//	locks              a byte of it is locked for each sandbox that is being changed
//	snapshot/<id>/     snapshots: gVisor's files, and other data for restoring
//
// A program that links this package has its main goroutine tied to its first thread
// (docs/design/adr/0013-first-thread.md); work that should be fast belongs on another one.
package local

import (
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/egress"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// Config is the extension's `config:` block.
type Config struct {
	// Paths are further directories of this machine that sandboxes without an image
	// see, read-only, in addition to /usr.
	Paths []string `yaml:"paths" json:"paths,omitempty" help:"Directories of this machine that sandboxes without an image see read-only, in addition to /usr."`
	// Etc are further files and directories of /etc that sandboxes without an image get a
	// copy of, as far as every user may read them. Files that every program needs, and
	// unchanged ones of packages, are copied anyway.
	Etc []string `yaml:"etc" json:"etc,omitempty" help:"Files and directories of /etc that are copied into sandboxes without an image, as far as everybody may read them."`
	// DNS are the resolvers used for sandboxes with network access; empty means
	// those of this machine.
	DNS []string `yaml:"dns" json:"dns,omitempty" help:"Resolvers (address or address:port) for sandboxes with network access; empty means those of this machine."`
	// Never are addresses and CIDRs that no sandbox reaches, whatever its network policy
	// says, such as the operator's public addresses. This machine's are always included.
	Never []string `yaml:"never" json:"never,omitempty" help:"Addresses and CIDRs that no sandbox reaches, whatever its network policy says."`
	// UIDBase and UIDRanges are the host's user and group IDs for sandboxes if the broker is
	// root: UIDRanges ranges of 65,536 each, one for each sandbox at a time.
	UIDBase   int `yaml:"uid_base" json:"uid_base,omitempty" min:"65536" help:"Where the server is root: the first of this machine's user and group IDs that sandboxes use, 65536 each."`
	UIDRanges int `yaml:"uid_ranges" json:"uid_ranges,omitempty" min:"1" max:"65534" help:"Where the server is root: the number of sandboxes with IDs of their own, and so the maximum number of sandboxes."`
	// ShmSize is the size of /dev/shm; 0 means half of the memory limit.
	ShmSize int64 `yaml:"shm_size" json:"shm_size,omitempty" unit:"bytes" min:"1MiB" help:"Size of /dev/shm, which counts as memory; empty means half of the memory limit, and 64MiB without one."`
	// Mounts says which directories of this machine sandboxes may mount.
	Mounts Mounts `yaml:"mounts" json:"mounts,omitzero" help:"Which directories of this machine sandboxes can mount."`
	// Images are settings for images, mainly those of registries.
	Images Images `yaml:"images" json:"images,omitzero" help:"Images, above all those of registries."`
	// Runner and Agent are the helper programs; empty means those next to the running
	// program, or that program itself.
	Runner string `yaml:"runner" json:"runner,omitempty" help:"Path of sandboxer-runner; empty means next to the running program."`
	Agent  string `yaml:"agent" json:"agent,omitempty" help:"Path of sandboxer-agent; empty means next to the running program."`
}

// Mounts are the settings for mounts.
type Mounts = mounts.Settings

// A MountRoot is a directory of this machine. Every caller may mount any part of it.
type MountRoot = mounts.Root

// Images are the settings for images.
type Images struct {
	images.Settings
	Keep        int64 `yaml:"keep" json:"keep,omitempty" unit:"bytes" min:"1MiB" help:"Maximum size of the image store; beyond it, the content that was not used for longest is removed."`
	MaxDownload int64 `yaml:"max_download" json:"max_download,omitempty" unit:"bytes" min:"1KiB" help:"Maximum size of an image as it is fetched."`
	MaxUnpacked int64 `yaml:"max_unpacked" json:"max_unpacked,omitempty" unit:"bytes" min:"1KiB" help:"Maximum size of an unpacked image."`
	MaxEntries  int   `yaml:"max_entries" json:"max_entries,omitempty" min:"1" help:"Maximum number of files, directories and links in all layers of an image."`
}

// neverShown are directories that Paths may not open to sandboxes, including everything
// below them and their parents.
var neverShown = []string{"/", "/root", "/home", "/etc", "/run", "/var/run", "/proc", "/sys", "/dev", "/boot", "/var/lib",
	"/var/backups", "/var/mail", "/var/spool"}

// checkShown refuses the directory real, the target of p, if it must never be shown.
func checkShown(p, real string) error {
	for _, n := range neverShown {
		var why string
		switch {
		case n != "/" && inDir(real, n) || real == n:
			why = "it is in " + n
		case inDir(n, real):
			why = n + " is in it"
		default:
			continue
		}
		if real != p {
			why = "it leads to " + real + ", and " + why
		}
		return sandboxer.E(sandboxer.Invalid, nil, "paths: sandboxes can never see %s (%s)", p, why).
			WithHint("copy what sandboxes need to a directory of its own, or use an image")
	}
	return nil
}

func inDir(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

const (
	// idShift is the host ID of a skeleton's files that sandboxes see as 0. It is also the
	// host ID for ID 0 in sandboxes of builds with one range for all, and if mounts cannot
	// map.
	idShift = mounts.IDShift
	// idCount is how many IDs a range has.
	idCount = mounts.IDCount

	// Defaults of Config.UIDBase and Config.UIDRanges. By convention no ID on a Linux machine
	// is above this: neither those of people, nor their subordinate IDs (subuid(5) begins at
	// 100000), nor those of systemd's containers, which end right before.
	defaultUIDBase   = 0x7000_0000
	defaultUIDRanges = 4000
)

// Validate implements the check of sandboxer.Typed.
func (c *Config) Validate() error {
	for _, p := range c.Paths {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p {
			return sandboxer.E(sandboxer.Invalid, nil, "paths: %q is not a clean absolute path", p)
		}
		if err := checkShown(p, p); err != nil {
			return err
		}
	}
	if err := c.Mounts.Validate(); err != nil {
		return err
	}
	for i, p := range c.Etc {
		name := strings.TrimPrefix(p, "/etc/")
		switch {
		case !filepath.IsLocal(name) || filepath.Clean(name) != name || name == ".":
			return sandboxer.E(sandboxer.Invalid, nil, "etc: %q is not a clean path of a file or directory of /etc", p)
		case reservedEtc(name):
			return sandboxer.E(sandboxer.Invalid, nil, "etc: /etc/%s describes accounts or this machine, and is never copied", name)
		}
		c.Etc[i] = name
	}
	if end := int64(c.UIDBase) + int64(c.UIDRanges)*idCount; end > 1<<32-idCount || c.UIDBase < idShift+idCount && end > idShift {
		return sandboxer.E(sandboxer.Invalid, nil, "uid_base and uid_ranges: sandboxes cannot use all IDs from %d to %d (IDs end before %d, and %d to %d have another use)",
			c.UIDBase, end-1, int64(1<<32-idCount), idShift, idShift+idCount-1)
	}
	dns, err := egress.Resolvers("dns", c.DNS)
	if err != nil {
		return err
	}
	c.DNS = dns
	_, err = c.never()
	return err
}

// reservedEtc reports whether sandboxes get a generated version of the file of /etc, or the
// file is about accounts.
func reservedEtc(name string) bool {
	top, _, _ := strings.Cut(name, "/")
	switch strings.TrimRight(top, "-~") {
	case "passwd", "group", "shadow", "gshadow", "subuid", "subgid", "opasswd", "security", "hosts", "hostname", "resolv.conf", "profile",
		"machine-id", "fstab", "mtab", "sudoers", "sudoers.d":
		return true
	}
	return false
}

func (c *Config) never() ([]netip.Prefix, error) { return egress.Prefixes("never", c.Never) }

// Adapter is what package adapters lists.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:  "local",
	Title: "gVisor on this machine",
	Help: "Runs sandboxes on this machine in gVisor, a kernel in user space that is part of this program. " +
		"Without an image a sandbox sees the machine's own programs, read-only, with a private writable layer.",
	Isolation: []sandboxer.Isolation{sandboxer.IsolationGVisor},
	Pricing:   []sandboxer.PricingModel{sandboxer.PricingSelfHosted},
	Runtime:   runtimeVersion(),
	Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanProbe, sandboxer.CanSnapshot, sandboxer.CanPause,
		sandboxer.CanDiscover, sandboxer.CanList,
		sandboxer.CanRenew, sandboxer.CanCapacity, sandboxer.CanStats, sandboxer.CanNetwork, sandboxer.CanPool,
		sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch, sandboxer.CanNotify},
	Inputs: []sandboxer.Input{
		{Name: "repo", Restricted: true, Help: "directory of this machine, copied into the workspace, or a git URL (https, http, git), cloned inside the sandbox"},
		{Name: "ref", Help: "branch, tag or commit to check out when repo is a git URL"},
		{Name: "sandbox_id", Help: "the sandbox's ID; without it a new one is made"},
	},
}, Config{UIDBase: defaultUIDBase, UIDRanges: defaultUIDRanges, Images: Images{
	Settings: images.Settings{Pull: "missing"}, Keep: 20 << 30, MaxDownload: 16 << 30, MaxUnpacked: 64 << 30, MaxEntries: 1_000_000,
}}, open)

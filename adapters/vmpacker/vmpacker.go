// Package vmpacker puts sandboxes on virtual machines, in one of two ways.
//
// Attached: the sandbox is a workspace, /build/sbx-<id>, on a machine that exists
// already and is reached over SSH, by an alias or through a tunnel. Teardown ends the
// sandbox's processes and removes the workspace; the machine stays. Several sandboxes
// of one machine are apart as its processes and directories are, not more.
//
// Managed: the sandbox is a machine of its own, started with qemu from an image that
// Packer builds when it is missing, and gone with the sandbox. It can be paused, and
// saved with its memory.
//
// What is where, below the extension's private directory:
//
//	box/<id>.g<n>.json   a managed machine, written down before anything is made of it
//	lock/                one file per sandbox, image or snapshot that is being changed
//	vm/<id>.g<n>/        disk, seed and control socket of a managed machine
//	image/<key>.*        images that Packer built, with their records and logs
//	snap/<id>/           saved machines
//	key                  by which the broker enters the machines that it manages
package vmpacker

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"log/slog"
	"net"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// Config is the extension's `config:` block.
type Config struct {
	VMs          map[string]VM    `yaml:"vms" json:"vms,omitempty" keys:"label" help:"Machines to attach to, by alias (the input vm)."`
	Targets      []string         `yaml:"targets" json:"targets,omitempty" help:"Patterns of SSH targets that callers may name besides the machines of vms and those added with host add, such as ci@*.example.org; a pattern without an account stands for the one that the SSH configuration names. Empty means none. Administrators and profiles may name any whose host key is trusted."`
	WorkspaceDir string           `yaml:"workspace_dir" json:"workspace_dir,omitempty" format:"abspath" help:"Directory on the machine in which workspaces are made."`
	Capacity     int              `yaml:"capacity" json:"capacity,omitempty" min:"1" help:"Sandboxes on one machine at once."`
	Tools        []string         `yaml:"tools" json:"tools,omitempty" help:"Commands that a machine must have."`
	MinFree      int64            `yaml:"min_free" json:"min_free,omitempty" unit:"bytes" help:"Room that must be free where workspaces are made."`
	Sync         string           `yaml:"sync" json:"sync,omitempty" enum:"tar,rsync" help:"What carries the repo input: tar streams, or the user's rsync."`
	Images       map[string]Image `yaml:"images" json:"images,omitempty" keys:"label" help:"What machines of their own are started from, by the name that a profile's image gives."`
	MaxVMs       int              `yaml:"max_vms" json:"max_vms,omitempty" min:"1" help:"Machines of their own at once."`
	Accel        string           `yaml:"accel" json:"accel,omitempty" enum:"auto,kvm,tcg" help:"How machines of their own run; auto takes KVM only where a guest really runs in it."`
	Agent        string           `yaml:"agent" json:"agent,omitempty" help:"Path of sandboxer-agent for the platform of the machines; empty means beside the running program. Where there is none, sandboxes have neither processes that outlive their callers nor watches of files."`
	Transport    string           `yaml:"transport" json:"transport,omitempty" enum:"auto,openssh,native" help:"How SSH is spoken: by the machine's own ssh, or by this program; auto takes ssh where it is."`
	SSHConfig    string           `yaml:"ssh_config" json:"ssh_config,omitempty" help:"ssh configuration file; empty means the account's and the system's."`
}

// VM is a machine to attach to.
type VM struct {
	SSHTarget    string   `yaml:"ssh_target" json:"ssh_target,omitempty" format:"line" help:"What one would type after ssh; empty means the alias itself, as ~/.ssh/config knows it."`
	SSHPort      int      `yaml:"ssh_port" json:"ssh_port,omitempty" min:"1" max:"65535"`
	TunnelPort   int      `yaml:"tunnel_port" json:"tunnel_port,omitempty" min:"1" max:"65535" help:"Port of this machine that leads to the other's SSH server."`
	IdentityFile string   `yaml:"identity_file" json:"identity_file,omitempty" format:"abspath" help:"Private key to log in with; empty leaves it to the SSH configuration."`
	HostKeys     []string `yaml:"host_keys" json:"host_keys,omitempty" help:"The machine's public keys, as authorized_keys lines; empty means those of known_hosts."`
	WorkspaceDir string   `yaml:"workspace_dir" json:"workspace_dir,omitempty" format:"abspath"`
	Capacity     int      `yaml:"capacity" json:"capacity,omitempty" min:"1"`
	Tools        []string `yaml:"tools" json:"tools,omitempty"`
}

// names of directories are put into awk and into patterns of the shell.
var plainPath = regexp.MustCompile(`^(/[A-Za-z0-9._-]+)+$`)

func checkBase(dir string) error {
	if !plainPath.MatchString(dir) || filepath.Clean(dir) != dir {
		return sandboxer.E(sandboxer.Invalid, nil, "workspace_dir: %q is not a clean absolute path of letters, digits, dots, dashes and underscores", dir)
	}
	return nil
}

// Validate implements the check of sandboxer.Typed.
func (c *Config) Validate() error {
	if err := checkBase(c.WorkspaceDir); err != nil {
		return err
	}
	for name, vm := range c.VMs {
		if vm.WorkspaceDir != "" {
			if err := checkBase(vm.WorkspaceDir); err != nil {
				return err
			}
		}
		if vm.TunnelPort != 0 && vm.SSHPort != 0 {
			return sandboxer.E(sandboxer.Invalid, nil, "vms: %s has both an ssh_port and a tunnel_port", name)
		}
	}
	for name, img := range c.Images {
		if (img.File == "") == (img.Packer == nil) {
			return sandboxer.E(sandboxer.Invalid, nil, "images: %s needs either a file or packer", name)
		}
		if img.Kernel == "" && (img.Initrd != "" || img.Append != "") {
			return sandboxer.E(sandboxer.Invalid, nil, "images: %s has an initrd or append without a kernel", name)
		}
	}
	for _, p := range c.Targets {
		if _, err := filepath.Match(p, ""); err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "targets: %q is not a pattern", p)
		}
	}
	return nil
}

// Adapter is what package adapters lists.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:  "vm-packer",
	Title: "Virtual machines",
	Help: "Attaches workspaces to virtual machines that exist already and are reached over SSH; when a sandbox ends, its processes " +
		"and its workspace go and the machine stays. Or starts a machine for each sandbox, from an image that Packer builds when it is missing.",
	Handlers:  []string{"sandboxer.extensions.vm_packer:*"},
	Isolation: []sandboxer.Isolation{sandboxer.IsolationProcess, sandboxer.IsolationVM},
	Pricing:   []sandboxer.PricingModel{sandboxer.PricingSelfHosted},
	Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanDial, sandboxer.CanProbe,
		sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanSnapshot, sandboxer.CanPause, sandboxer.CanCapacity, sandboxer.CanStats,
		sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch},
	Inputs: []sandboxer.Input{
		{Name: "vm", Restricted: true, Help: "alias of the machine to attach to: one of the extension's vms, a host added with host add, or an alias of ~/.ssh/config"},
		{Name: "ssh_target", Restricted: true, Help: "the machine to attach to, as one would type it after ssh"},
		{Name: "ssh_port", Restricted: true, Help: "port of the machine's SSH server"},
		{Name: "tunnel_port", Restricted: true, Help: "port of this machine that leads to the SSH server of the machine to attach to"},
		{Name: "workspace_dir", Restricted: true, Help: "directory on the machine in which the workspace is made; /build if nothing else is configured"},
		{Name: "repo", Restricted: true, Help: "directory of this machine, absolute, that is copied into the workspace"},
		{Name: "sandbox_id", Help: "the sandbox's ID; a fresh one is made if it is not given"},
	},
}, Config{WorkspaceDir: "/build", Capacity: 1, MinFree: 64 << 20, Sync: "tar", Transport: "auto", MaxVMs: 4, Accel: "auto"}, open)

// extension is the sandboxer.Extension.
type extension struct {
	// What the agent in a sandbox can do: agent.Capabilities.
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher

	cfg   Config
	env   sandboxer.Env
	log   *slog.Logger
	pool  *sshrun.Pool
	hosts *sshrun.Registry
	accel accel
	packs builds

	mu     sync.Mutex
	busy   map[string]*keyLock
	agents map[string]*agentClient // by key of the place

	programs program.Finder
}

// The compiler checks what the adapter claims.
var _ interface {
	sandboxer.Extension
	sandboxer.Placer
	sandboxer.Forgetter
	sandboxer.Checker
	sandboxer.Admitter
	sandboxer.Limiter
	sandboxer.Execer
	sandboxer.Dialer
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Snapshotter
	sandboxer.Pauser
	sandboxer.CapacityReporter
	sandboxer.StatsReader
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher
	sandboxer.Narrower
} = (*extension)(nil)

func open(ctx context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	e := &extension{cfg: cfg, env: env, log: env.Log, hosts: sshrun.NewRegistry(env.Hosts), busy: map[string]*keyLock{}, agents: map[string]*agentClient{}}
	inside := agent.Capabilities{Open: e.openAgent}
	e.AgentDialer, e.ProcessManager, e.Watcher = inside, inside, inside
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	for _, d := range []string{"box", "lock", "vm", "image", "snap"} {
		if err := os.MkdirAll(e.dir(d), 0o700); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the directory of %s cannot be made", env.Extension)
		}
		if err := wholefile.Sweep(e.dir(d)); err != nil {
			e.log.Warn("what a former server was writing stays", "extension", env.Extension, "err", err)
		}
	}
	transport := cfg.Transport
	if transport == "auto" {
		transport = ""
	}
	var err error
	o := sshrun.Options{Transport: transport, Config: cfg.SSHConfig, Log: e.log}
	if len(cfg.Images) > 0 {
		o.ConnectTimeout = time.Minute // an emulated machine thinks long about keys
	}
	if e.pool, err = sshrun.New(o); err != nil {
		return nil, err
	}
	if len(cfg.Images) > 0 {
		if !managedWorks {
			e.pool.Close()
			return nil, sandboxer.E(sandboxer.Unavailable, nil, "machines are started from images on Linux only").WithHint("take images out of the extension's config")
		}
		e.thawLeftovers(ctx)
	}
	e.collect(ctx)
	return e, nil
}

// Close ends connections; sandboxes go on.
func (e *extension) Close() error {
	e.mu.Lock()
	for _, c := range e.agents {
		c.Close()
	}
	e.mu.Unlock()
	return e.pool.Close()
}

// Without implements sandboxer.Narrower: a machine that is somebody else's is neither
// saved nor paused, and without its program there is no agent.
func (e *extension) Without() (without []sandboxer.Capability) {
	if len(e.cfg.Images) == 0 {
		without = append(without, sandboxer.CanSnapshot, sandboxer.CanPause)
	}
	if !e.hasAgent() {
		without = append(without, sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch)
	}
	return without
}

func (e *extension) dir(parts ...string) string {
	return filepath.Join(append([]string{e.env.Dir}, parts...)...)
}

// Check implements sandboxer.Checker.
func (e *extension) Check(_ context.Context, spec sandboxer.Spec) error {
	_, err := e.resolve(spec)
	return err
}

// resolve is what a spec amounts to, or why it is refused. Nothing is asked of a
// machine.
func (e *extension) resolve(spec sandboxer.Spec) (*place, error) {
	refuse := func(format string, args ...any) (*place, error) {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "%s "+format, append([]any{e.env.Extension}, args...)...)
	}
	if err := errors.Join(checkEnv(spec.Env), checkUser(spec.User)); err != nil {
		return nil, err
	}
	switch {
	case len(spec.Mounts) > 0:
		return refuse("does not mount directories of this machine into a sandbox")
	case len(spec.Command) > 0:
		return refuse("runs no main command; start it with exec once the sandbox is there")
	case spec.Workspace != "":
		return refuse("names workspaces itself; the input workspace_dir says in which directory")
	}
	if repo := spec.Inputs["repo"]; repo != "" {
		if fi, err := os.Stat(repo); err != nil || !fi.IsDir() || !filepath.IsAbs(repo) {
			return nil, sandboxer.E(sandboxer.Invalid, err, "input repo: %q is not a directory of this machine, written from the root", repo)
		}
	}
	if spec.Image != "" && len(e.cfg.Images) > 0 {
		return e.resolveManaged(spec)
	}
	switch {
	case spec.Image != "":
		return nil, sandboxer.E(sandboxer.Invalid, nil, "there is no image %q: %s attaches to machines that exist", spec.Image, e.env.Extension).
			WithHint("leave the image out and name a machine with the input vm or ssh_target")
	case spec.Limits != sandboxer.Limits{}:
		return refuse("cannot enforce limits on a machine that it attaches to")
	case spec.Network.Mode != "" || len(spec.Network.Allow) > 0:
		if err := spec.Network.Check(); err != nil {
			return nil, err
		}
		return refuse("cannot enforce the network policy %q on a machine that it attaches to: a sandbox there reaches what the machine reaches", spec.Network.Mode)
	}
	return e.attachment(spec)
}

// attachment finds out which machine a spec means.
func (e *extension) attachment(spec sandboxer.Spec) (*place, error) {
	in := spec.Inputs
	alias := in["vm"]
	if alias == "" && in["ssh_target"] == "" {
		if alias = spec.Host; alias == "" {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s needs a machine to attach to", e.env.Extension).
				WithHint("add --input vm=ALIAS or --input ssh_target=USER@HOST")
		}
	} else if spec.Host != "" && spec.Host != alias {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the host %q is asked for, and by an input another machine", spec.Host)
	}
	p := &place{V: placeVersion, ID: spec.ID, Generation: spec.Generation, Owner: spec.Owner, Stamp: spec.Stamp, Kind: attached, User: spec.User, Ports: spec.Ports}
	m, err := e.lead(alias, in)
	if err != nil {
		return nil, err
	}
	if m.draining {
		return nil, sshrun.DrainingError(alias)
	}
	if spec.Profile.Isolation == sandboxer.IsolationVM && m.capacity > 1 {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "profile %s promises a machine of its own, and %s puts up to %d sandboxes on one", spec.Profile.ID, e.env.Extension, m.capacity).
			WithHint("set capacity to 1, or the profile's isolation to process")
	}
	p.Host, p.at = cmp.Or(alias, m.target.Addr), e.placeName(alias, in)
	p.Target, p.Base, p.capacity, p.tools = m.target, m.base, m.capacity, m.tools
	if _, err := e.pool.Host(p.Target); err != nil {
		return nil, err
	}
	return p, nil
}

// lead returns the machine that an alias and inputs lead to.
func (e *extension) lead(alias string, in map[string]string) (m machine, err error) {
	m = machine{capacity: e.cfg.Capacity, base: e.cfg.WorkspaceDir, tools: e.cfg.Tools}
	if alias != "" {
		found, err := e.machine(alias)
		switch {
		case err == nil:
			m = found
		case sandboxer.KindOf(err) != sandboxer.NotFound:
			return m, err
		case in["ssh_target"] == "":
			m.target.Addr = alias
		}
	}
	if t := in["ssh_target"]; t != "" && t != m.target.Addr {
		m.target, m.tunnel = sshrun.Target{Addr: t}, false // the key of one machine is no other's
	}
	port := func(name string) (int, error) {
		if in[name] == "" {
			return 0, nil
		}
		n, err := strconv.Atoi(in[name])
		if err != nil || n < 1 || n > 65535 {
			return 0, sandboxer.E(sandboxer.Invalid, nil, "input %s: %q is not a port", name, in[name])
		}
		return n, nil
	}
	ssh, err1 := port("ssh_port")
	tunnel, err2 := port("tunnel_port")
	switch {
	case errors.Join(err1, err2) != nil:
		return m, errors.Join(err1, err2)
	case ssh != 0 && tunnel != 0:
		return m, sandboxer.E(sandboxer.Invalid, nil, "the inputs ssh_port and tunnel_port exclude each other: a tunnel has its own port")
	case ssh != 0:
		m.target.Port = ssh
	case tunnel != 0 && (tunnel != m.target.Port || !m.tunnel):
		m.through(tunnel)
	}
	if dir := in["workspace_dir"]; dir != "" {
		if err := checkBase(dir); err != nil {
			return m, err
		}
		m.base = dir
	}
	m.target = name(m.target)
	return m, nil
}

// name gives a target the name that it has in messages.
func name(t sshrun.Target) sshrun.Target {
	t.Name = t.Addr
	if t.Port != 0 {
		t.Name += ":" + strconv.Itoa(t.Port)
	}
	return t
}

// Admit implements sandboxer.Admitter: what the operator configured may be named by
// everybody, as it is configured.
func (e *extension) Admit(spec sandboxer.Spec, name string) error {
	var m machine
	alias := cmp.Or(spec.Inputs["vm"], spec.Host)
	declared := false
	if alias != "" {
		var err error
		m, err = e.machine(alias)
		declared = err == nil
	}
	value := spec.Inputs[name]
	if declared && spec.Inputs["ssh_target"] != "" && spec.Inputs["ssh_target"] != m.target.Addr {
		m = machine{base: e.cfg.WorkspaceDir} // another machine, of which nothing is configured
	}
	switch name {
	case sandboxer.RestrictedImage:
		return nil // only what images lists is one
	case sandboxer.RestrictedHost, "vm":
		if declared || name == sandboxer.RestrictedHost && spec.Host == "localhost" && spec.Image != "" {
			return nil
		}
		return sandboxer.E(sandboxer.Denied, nil, "%q is not a machine that was configured for %s", alias, e.env.Extension).
			WithHint("an administrator can add it to vms in the extension's config, or with: sandboxer host add %s USER@HOST", cmp.Or(hostName(alias), "NAME"))
	case "ssh_target":
		if value == m.target.Addr || e.listed(value) {
			return nil
		}
	case "ssh_port":
		if m.target.Port != 0 && !m.tunnel && value == strconv.Itoa(m.target.Port) {
			return nil
		}
	case "tunnel_port":
		if m.tunnel && value == strconv.Itoa(m.target.Port) {
			return nil
		}
	case "workspace_dir":
		if value == cmp.Or(m.base, e.cfg.WorkspaceDir) {
			return nil
		}
	case "repo":
		return sandboxer.E(sandboxer.Denied, nil, "the input \"repo\" is a path on the broker's machine, which only an administrator may use").
			WithHint("copy the files in once the sandbox is there, or ask for a profile that names the directory")
	}
	return sandboxer.E(sandboxer.Denied, nil, "%s takes the input %q of callers only as it is configured", e.env.Extension, name).
		WithHint("name a machine that was configured with the input vm, or ask an administrator: for a profile, for vms or targets in the extension's config, or for: sandboxer host add")
}

// hostName is alias if it can be the name of an added host, else "".
func hostName(alias string) string {
	if plainName.MatchString(alias) {
		return alias
	}
	return ""
}

var plainName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,62}$`)

// listed reports whether a pattern of targets matches. One without an account stands for
// that of the SSH configuration and for no other, and a port is matched only as it is
// written.
func (e *extension) listed(target string) bool {
	return slices.ContainsFunc(e.cfg.Targets, func(p string) bool {
		if p == "none" || strings.Contains(target, "@") && !strings.Contains(p, "@") || strings.Contains(target, "://") && p != target {
			return false
		}
		ok, _ := filepath.Match(p, target)
		return ok || p == target
	})
}

// A machine is one to attach to.
type machine struct {
	target   sshrun.Target
	tunnel   bool
	base     string
	capacity int
	tools    []string
	draining bool
}

// through leads to the machine by a port of this one.
func (m *machine) through(port int) {
	user := ""
	if i := strings.LastIndexByte(m.target.Addr, '@'); i >= 0 {
		user = m.target.Addr[:i+1]
	}
	m.target.Addr, m.target.Port, m.target.ProxyJump, m.tunnel = user+"127.0.0.1", port, "", true
}

// machine returns what is configured under an alias. NotFound: nothing is.
func (e *extension) machine(alias string) (machine, error) {
	if vm, ok := e.cfg.VMs[alias]; ok {
		m := machine{
			target: sshrun.Target{Addr: cmp.Or(vm.SSHTarget, alias), Port: vm.SSHPort, IdentityFile: vm.IdentityFile, HostKeys: vm.HostKeys},
			base:   cmp.Or(vm.WorkspaceDir, e.cfg.WorkspaceDir), capacity: cmp.Or(vm.Capacity, e.cfg.Capacity),
			tools: append(slices.Clone(e.cfg.Tools), vm.Tools...),
		}
		if vm.TunnelPort != 0 {
			m.through(vm.TunnelPort)
		}
		return m, nil
	}
	rec, err := e.hosts.Host(alias)
	if err != nil {
		return machine{}, err
	}
	if rec.Only == sshrun.OnlyCompose {
		return machine{}, sandboxer.E(sandboxer.Unsupported, nil, "host %s is only for compose projects", alias).
			WithHint("add it for both: sandboxer host add %s USER@HOST", alias)
	}
	return machine{target: rec.Target(), base: e.cfg.WorkspaceDir, tools: e.cfg.Tools,
		capacity: cmp.Or(rec.Capacity, e.cfg.Capacity), draining: rec.State == sshrun.Draining}, nil
}

// Provision implements sandboxer.Extension. The machine notes that it is complete last.
func (e *extension) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	p, err := e.resolve(spec)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	return e.provision(ctx, p, spec, "")
}

// provision makes the sandbox at p, from a snapshot in the directory from if there is one.
func (e *extension) provision(ctx context.Context, p *place, spec sandboxer.Spec, from string) (sandboxer.Handle, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Handle{}, err
	}
	if spec.Place != "" && spec.Place != p.at {
		return sandboxer.Handle{}, sandboxer.Untouched(sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is placed on %s, and its order leads to %s by now", spec.ID, spec.Place, p.at).
			WithHint("destroy it, and create it anew"))
	}
	unlock, err := e.lock(ctx, p.key())
	if err != nil {
		return sandboxer.Handle{}, err
	}
	defer unlock()
	if old, err := e.recall(p.ID, p.Generation); err == nil {
		if p.Kind == managed && old.Kind == managed && !old.gone() && old.State.Ready {
			return old.handle(), nil
		}
		if old.Kind != p.Kind {
			return sandboxer.Handle{}, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s, not %s", p.ID, old.Kind, p.Kind)
		}
		if p.Kind == attached && (old.Target.Name != p.Target.Name || old.Base != p.Base) {
			// An earlier version placed it by a former configuration: it is found there, or not.
			old.at = p.at
			p = old
		}
		p.Untouched = old.Untouched
	} else if sandboxer.KindOf(err) != sandboxer.NotFound {
		return sandboxer.Handle{}, err
	} else if err := e.reserve(ctx, p); err != nil {
		return sandboxer.Handle{}, err
	}
	if p.Kind == managed {
		err = e.create(ctx, p, spec, from)
	} else {
		err = e.attach(ctx, p, spec)
	}
	return p.handle(), err
}

// reserve writes down a machine of its own, if there is room for it.
func (e *extension) reserve(ctx context.Context, p *place) error {
	if p.Kind != managed { // the broker knows
		return nil
	}
	unlock, err := e.lock(ctx, "reserve")
	if err != nil {
		return err
	}
	defer unlock()
	if n := e.managedCount(); n >= e.cfg.MaxVMs {
		return sandboxer.E(sandboxer.Exhausted, nil, "%s has %d machines, as many as it may", e.env.Extension, n).
			WithHint("wait for one to end, or raise max_vms in the extension's config")
	}
	return e.remember(p)
}

func (e *extension) managedCount() (n int) {
	all, _ := e.noted()
	for _, p := range all {
		if p.Kind == managed {
			n++
		}
	}
	return n
}

// WaitReady implements sandboxer.Extension.
func (e *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	p, err := e.find(ctx, h)
	if err != nil {
		return sandboxer.Reachability{}, err
	}
	if p.Kind == managed {
		return e.machineReady(p)
	}
	return e.attachedReady(ctx, p)
}

// Teardown implements sandboxer.Extension.
func (e *extension) Teardown(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
	if err := ctx.Err(); err != nil {
		return r, err
	}
	places, unasked := e.places(ctx, h)
	for _, p := range places {
		unlock, lerr := e.lock(ctx, p.key())
		if lerr != nil {
			return r, errors.Join(err, lerr)
		}
		e.dropAgent(p)
		var terr error
		if p.Kind == managed {
			if _, serr := os.Stat(e.vmDir(p)); serr == nil || !p.gone() {
				r.Removed = append(r.Removed, "machine "+p.mark())
			}
			terr = e.destroy(ctx, p)
		} else if !p.Untouched {
			terr = e.detach(ctx, p, &r)
		}
		if terr == nil { // also what an earlier version noted
			terr = e.forget(p)
		}
		unlock()
		if p.Kind == managed && terr == nil {
			e.collect(ctx)
		}
		err = errors.Join(err, terr)
	}
	if err = errors.Join(err, unasked); err == nil && len(places) == 0 && h.Host == "" && len(h.Data) == 0 {
		r.Warnings = append(r.Warnings, "where it was is not known; it is on none of the machines that are configured, added, or named by records. One that only its own request named was not asked")
	}
	return r, err
}

// Forget implements sandboxer.Forgetter.
func (e *extension) Forget(_ context.Context, h sandboxer.Handle) (remains []string, err error) {
	places, err := e.unasked(h)
	if err != nil {
		return nil, err
	}
	if len(places) == 0 {
		return []string{"on a machine that is not known, the directory " + workspaceName(h.SandboxID) + " where workspaces are made, and what runs there"}, nil
	}
	for _, p := range places {
		if p.Kind == managed {
			return nil, sandboxer.E(sandboxer.Unsupported, nil, "sandbox %s is a machine on this one, which can be removed", p.ID).
				WithHint("what keeps it from ending is what its destroy says")
		}
	}
	for _, p := range places {
		if !p.Untouched {
			remains = append(remains, "on machine "+p.Host+" ("+p.Target.Name+") the directory "+path.Join(p.Base, workspaceName(p.ID))+", and what runs there")
		}
		if err := e.forget(p); err != nil {
			return nil, err
		}
	}
	return remains, nil
}

// Exec implements sandboxer.Execer.
func (e *extension) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	p, err := e.one(ctx, h)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	if p.Kind == managed {
		if err := e.machineIs(p); err != nil {
			return sandboxer.Exit{}, err
		}
	}
	g, err := e.guest(p)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	return g.exec(ctx, cmd)
}

// Dial implements sandboxer.Dialer. Sandboxes of one machine share its ports: a port is
// the sandbox's if one of its processes listens on it.
func (e *extension) Dial(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
	p, err := e.one(ctx, h)
	if err != nil {
		return nil, err
	}
	if p.Kind == managed {
		if err := e.machineIs(p); err != nil {
			return nil, err
		}
	}
	g, err := e.guest(p)
	if err != nil {
		return nil, err
	}
	return g.dial(ctx, port)
}

// IsAlive implements sandboxer.Prober.
func (e *extension) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Unknown, err
	}
	switch _, err := e.find(ctx, h); {
	case err == nil:
		return sandboxer.Alive, nil
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return sandboxer.Gone, nil
	default:
		return sandboxer.Unknown, err
	}
}

// Discover implements sandboxer.Discoverer. A machine that cannot be reached is an error
// only if nothing was found: what was not found may be there. The stamp is kept with the
// workspace on its machine, and that of a machine of its own here.
func (e *extension) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	var best *place
	var failed error
	for p, err := range e.all(ctx, e.env.Owner) {
		if err != nil {
			failed = errors.Join(failed, err)
		} else if p.ID == id && (best == nil || p.Generation > best.Generation) {
			best = p
		}
	}
	if err := ctx.Err(); err != nil {
		return sandboxer.Found{}, err
	}
	if best == nil && failed != nil {
		return sandboxer.Found{}, failed
	}
	if best == nil {
		return sandboxer.Found{}, missing(id)
	}
	if err := e.complete(ctx, best); err != nil {
		return sandboxer.Found{}, err
	}
	if noted, err := e.recall(best.ID, best.Generation); err == nil {
		best.Stamp = noted.Stamp
	}
	return sandboxer.Found{Handle: best.handle(), Stamp: best.Stamp}, nil
}

func missing(id string) error {
	return sandboxer.E(sandboxer.NotFound, nil, "there is no sandbox %s", id)
}

// ListRunning implements sandboxer.Lister: what is on the configured machines and on
// those that records of sandboxes name. A machine that cannot be reached is an error, after
// everything else was yielded.
func (e *extension) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		var failed error
		for p, err := range e.all(ctx, owner) {
			if err != nil {
				failed = errors.Join(failed, err)
			} else if !yield(p.handle(), nil) {
				return
			}
		}
		if failed != nil {
			yield(sandboxer.Handle{}, failed)
		}
	}
}

// Capacity implements sandboxer.CapacityReporter.
func (e *extension) Capacity(ctx context.Context, host string) (sandboxer.HostCapacity, error) {
	return e.attachedCapacity(ctx, host)
}

// Stats implements sandboxer.StatsReader.
func (e *extension) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	p, err := e.find(ctx, h)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	g, err := e.guest(p)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	if p.Kind == managed {
		return e.machineStats(ctx, p, g)
	}
	return g.stats(ctx)
}

// now is when a figure was measured.
func now() time.Time { return time.Now().UTC().Truncate(time.Millisecond) }

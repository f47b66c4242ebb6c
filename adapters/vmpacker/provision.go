package vmpacker

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// Check implements sandboxer.Checker.
func (e *extension) Check(_ context.Context, spec sandboxer.Spec) error {
	_, err := e.resolve(spec)
	return err
}

// resolve turns a spec into a place, or returns why it is refused. It asks no machine.
func (e *extension) resolve(spec sandboxer.Spec) (*place, error) {
	refuse := func(format string, args ...any) (*place, error) {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "%s "+format, append([]any{e.env.Extension}, args...)...)
	}
	if err := errors.Join(checkEnv(spec.Env), checkUser(spec.User)); err != nil {
		return nil, err
	}
	switch {
	case len(spec.Mounts) > 0:
		return refuse("does not mount directories: a path of the server's machine means nothing on another")
	case len(spec.Command) > 0:
		return refuse("runs no main command; start it with exec once the sandbox is there")
	case spec.Workspace != "":
		return refuse("names workspaces itself; the input workspace_dir says in which directory")
	}
	if err := inside.CheckRepo(spec); err != nil {
		return nil, err
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
		return refuse("cannot enforce the network policy %q on a machine that it attaches to: a sandbox there reaches what the machine reaches", spec.Network.Mode)
	}
	return e.attachment(spec)
}

// fromHere reports whether the spec's host is the one from which its machine is reached.
func fromHere(spec sandboxer.Spec) bool {
	return spec.Host == thisMachine && (spec.Inputs["vm"] != "" || spec.Inputs["ssh_target"] != "" || spec.Inputs["tunnel_port"] != "")
}

// attachment finds the machine that a spec means.
func (e *extension) attachment(spec sandboxer.Spec) (*place, error) {
	in := spec.Inputs
	alias, host := in["vm"], spec.Host
	if fromHere(spec) {
		host = ""
	}
	if alias == "" && in["ssh_target"] == "" {
		switch alias = host; {
		case alias != "":
		case in["tunnel_port"] != "": // of this machine
			in = maps.Clone(in)
			in["ssh_target"] = "127.0.0.1"
		default:
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s needs a machine to attach to", e.env.Extension).
				WithHint("add --input vm=ALIAS, --input ssh_target=USER@HOST or --input tunnel_port=PORT")
		}
	} else if host != "" && host != alias {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the host %q is asked for, and by an input another machine", spec.Host)
	}
	p := &place{V: placeVersion, ID: spec.ID, Generation: spec.Generation, Owner: spec.Owner, Kind: attached, User: spec.User, Ports: spec.Ports}
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

// lead returns the machine that an alias and inputs describe.
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
		m.target, m.tunnel = sshrun.Target{Addr: t}, false // the key of one machine is not valid for another
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

// name gives a target its name in messages.
func name(t sshrun.Target) sshrun.Target {
	t.Name = t.Addr
	if t.Port != 0 {
		t.Name += ":" + strconv.Itoa(t.Port)
	}
	return t
}

// Admit implements sandboxer.Admitter: every caller may name what the operator
// configured, as it is configured.
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
		m = machine{base: e.cfg.WorkspaceDir} // another machine, without a configuration
	}
	switch name {
	case sandboxer.RestrictedImage:
		return nil // only names in images are valid
	case sandboxer.RestrictedMounts:
		return nil // there are none, for any caller
	case sandboxer.RestrictedHost, "vm":
		if declared || name == sandboxer.RestrictedHost && (spec.Host == thisMachine && spec.Image != "" || fromHere(spec)) {
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

// listed reports whether a pattern of targets matches. One without an account means only
// that of the SSH configuration, and a port matches only as it is written.
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

// through makes the machine reached through a port of this one.
func (m *machine) through(port int) {
	user := ""
	if i := strings.LastIndexByte(m.target.Addr, '@'); i >= 0 {
		user = m.target.Addr[:i+1]
	}
	m.target.Addr, m.target.Port, m.target.ProxyJump, m.tunnel = user+"127.0.0.1", port, "", true
}

// machine returns the configuration of an alias. NotFound: there is none.
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

// Provision implements sandboxer.Extension. The machine records last that it is
// complete.
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
			WithHint("destroy it and create it again"))
	}
	unlock, err := e.env.Notes.Lock(ctx, p.key())
	if err != nil {
		return sandboxer.Handle{}, err
	}
	defer unlock()
	if old, err := e.recall(ctx, p.ID, p.Generation); err == nil {
		if p.Kind == managed && old.Kind == managed && !old.gone() && old.State.Ready {
			return old.handle(), nil
		}
		if old.Kind != p.Kind {
			return sandboxer.Handle{}, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s, not %s", p.ID, old.Kind, p.Kind)
		}
		if p.Kind == attached && (old.Target.Name != p.Target.Name || old.Base != p.Base) {
			// An earlier version placed it by an earlier configuration: it may be found there,
			// or not.
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

// reserve records a managed machine, if there is room for it.
func (e *extension) reserve(ctx context.Context, p *place) error {
	if p.Kind != managed { // the broker has its record
		return nil
	}
	unlock, err := e.env.Notes.Lock(ctx, "reserve")
	if err != nil {
		return err
	}
	defer unlock()
	if n := e.managedCount(ctx); n >= e.cfg.MaxVMs {
		return sandboxer.E(sandboxer.Exhausted, nil, "%s has %d machines, the maximum", e.env.Extension, n).
			WithHint("wait for one to end, or raise max_vms in the extension's config")
	}
	return e.remember(ctx, p)
}

func (e *extension) managedCount(ctx context.Context) (n int) {
	all, _ := e.noted(ctx)
	for _, p := range all {
		if p.Kind == managed {
			n++
		}
	}
	return n
}

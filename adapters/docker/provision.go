package docker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/mounts"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

// minMemory is the least limit of memory.
const minMemory = 16 << 20

// markCapability is dropped by the agent's hold for everything inside, so that no process there can trace what the engine starts, which has it.
const markCapability = "BLOCK_SUSPEND"

// Check implements sandboxer.Checker.
func (e *extension) Check(_ context.Context, spec sandboxer.Spec) error {
	return cmp.Or(e.check(spec), e.checkMounts(spec))
}

// DefaultLimits implements sandboxer.Limiter.
func (e *extension) DefaultLimits(sandboxer.Spec) sandboxer.Limits {
	return sandboxer.Limits{MemoryBytes: e.cfg.Memory, PIDs: e.cfg.PIDs}
}

// Admit implements sandboxer.Admitter: an image of a registry reveals nothing of any machine, and hosts are
// those in the configuration. Paths of the server's machine, and images of engines, do.
func (e *extension) Admit(spec sandboxer.Spec, name string) error {
	what := "input " + name + ": a path of the server's machine"
	switch name {
	case "grants":
		what = "input grants: a capability beyond those that every sandbox has"
	case sandboxer.RestrictedHost:
		if _, err := e.host(spec.Host); err == nil {
			return nil
		}
		what = fmt.Sprintf("host %q, which is none of %s,", spec.Host, e.env.Extension)
	case sandboxer.RestrictedMounts:
		return e.opener().Admit(spec)
	case sandboxer.RestrictedImage:
		kind, _, _ := images.Split(spec.Image)
		switch {
		case strings.HasPrefix(spec.Image, "engine:"):
			what = "an image that an engine has"
		case kind == "":
			return nil
		default:
			what = "an image of a path of the server's machine"
		}
	}
	return sandboxer.E(sandboxer.Denied, nil, "%s may be used by an administrator only", what).
		WithHint("ask for a profile that names it")
}

// check refuses impossible specs before anything exists; mounts are checked when they are opened (checkMounts, make).
func (e *extension) check(spec sandboxer.Spec) error {
	unsupported := func(hint, format string, args ...any) error {
		return sandboxer.E(sandboxer.Unsupported, nil, format, args...).WithHint("%s", hint)
	}
	l := spec.Limits
	switch {
	case l.GPUs > 0:
		return unsupported("leave the limit out", "%s gives no GPUs to sandboxes", e.env.Extension)
	case l.DiskBytes != 0 && l.DiskBytes < minDisk:
		return sandboxer.E(sandboxer.Invalid, nil, "a disk limit of %d bytes is too small; the least is %d MiB", l.DiskBytes, minDisk>>20)
	case l.DiskBytes > 0 && e.unfiltered(spec.Network):
		return unsupported("leave the limit out, or ask for another network", "a limit of the disk does not hold with the engine's own network (unfiltered_egress), for which the engine keeps files of its own in the sandbox")
	case l.DiskBytes > 0 && spec.Inputs["grants"] != "":
		return unsupported("leave the limit out, or ask for a profile without grants", "a limit of the disk does not hold for a sandbox that is granted capabilities (input grants)")
	case l.MemoryBytes > 0 && l.MemoryBytes < minMemory:
		return sandboxer.E(sandboxer.Invalid, nil, "a memory limit of %d bytes is too small for the agent; the least is %d MiB", l.MemoryBytes, minMemory>>20)
	case l.MilliCPU > 0 && l.MilliCPU < 10:
		return sandboxer.E(sandboxer.Invalid, nil, "a limit of %d thousandths of a processor is less than engines can keep; the least is 10", l.MilliCPU)
	}
	if err := e.checkNetwork(nil, spec.Network); err != nil {
		return err
	}
	if spec.Host != "" {
		if _, err := e.host(spec.Host); err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "%s has no host %q", e.env.Extension, spec.Host).WithHint("its hosts are %s", strings.Join(e.hosts.Names(), ", "))
		}
	}
	if err := inside.Check(spec); err != nil {
		return err
	}
	if err := inside.CheckRepo(spec); err != nil {
		return err
	}
	if _, err := e.grants(spec); err != nil {
		return err
	}
	if err := e.checkRuntime(spec); err != nil {
		return err
	}
	ref, _, err := e.imageOf(spec)
	if err != nil {
		return err
	}
	return e.checkImage(ref, spec.Vouches(sandboxer.RestrictedImage) || spec.Image == "")
}

// imageOf is the image of a spec, and whether an operator vouches for it.
func (e *extension) imageOf(spec sandboxer.Spec) (ref string, vouched bool, err error) {
	switch {
	case spec.Image != "":
		return spec.Image, spec.Vouches(sandboxer.RestrictedImage), nil
	case e.cfg.Image != "":
		return e.cfg.Image, true, nil
	}
	return "", false, sandboxer.E(sandboxer.Invalid, nil, "%s makes sandboxes of images, and none is named", e.env.Extension).
		WithHint("name one (--image), or have the operator set image in the config of %s", e.env.Extension)
}

// Place implements sandboxer.Placer: it chooses the engine with the most room, of those that answer.
func (e *extension) Place(ctx context.Context, spec sandboxer.Spec, avoid []string) (string, error) {
	at, err := e.where(spec.Host)
	if err != nil {
		return "", err
	}
	at = maps.Clone(at)
	maps.DeleteFunc(at, func(name string, _ *host) bool { return slices.Contains(avoid, name) })
	switch {
	case len(at) == 0:
		return "", sandboxer.E(sandboxer.Unavailable, nil, "%s has no other engine that could make sandbox %s", e.env.Extension, spec.ID)
	case spec.Host != "":
		return spec.Host, nil // Provision reports the error
	}
	rooms, silent := hosts.Ask(at, func(h *host) ([]hosts.Room, error) {
		info, err := h.look(ctx)
		if err == nil {
			err = e.fits(h, info, spec)
		}
		if err == nil && len(spec.Mounts) > 0 {
			err = e.mountable(ctx, h, info)
		}
		if err != nil {
			return nil, err
		}
		return e.room(ctx, h, spec.Limits)
	})
	switch best, ok := hosts.Widest(rooms); {
	case !ok:
		return "", silent.Err()
	case best.Free > 0:
		return best.Host, nil
	}
	return "", sandboxer.E(sandboxer.Exhausted, nil, "the engines of %s have no room for a further sandbox", e.env.Extension).
		WithHint("destroy what is not needed, or have the operator raise capacity in the config of %s", e.env.Extension)
}

// Provision implements sandboxer.Extension. A record is written first and says last that the sandbox was
// completed. If the server dies in between, Teardown finds the remains, or the next Provision removes them and
// makes the sandbox again.
func (e *extension) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	if err := e.check(spec); err != nil {
		return sandboxer.Handle{}, err
	}
	ref, vouched, err := e.imageOf(spec)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	return e.provision(ctx, spec, func(h *host, info engine.Info) (*image, made, error) {
		img, err := e.image(ctx, h, info, ref, vouched)
		if err != nil {
			return nil, made{}, err
		}
		m := made{Workspace: spec.Workspace, User: spec.User, Image: img.pinned}
		if m.User == "" {
			m.User = img.Config.User
		}
		if wd := path.Clean("/" + img.Config.WorkingDir); m.Workspace == "" && wd != "/" && !inside.Reserved(wd) {
			m.Workspace = wd
		}
		if m.Workspace == "" {
			m.Workspace = inside.Workspace
		}
		m.Main, m.MainDir = inside.Image{Entrypoint: img.Config.Entrypoint, Cmd: img.Config.Cmd, WorkingDir: img.Config.WorkingDir}.Main(spec.Command, m.Workspace)
		return img, m, nil
	})
}

// provision is the common part for new and restored sandboxes. of returns what it is made from.
func (e *extension) provision(ctx context.Context, spec sandboxer.Spec, of func(*host, engine.Info) (*image, made, error)) (sandboxer.Handle, error) {
	none := sandboxer.Handle{}
	h, err := e.host(spec.Place)
	if err != nil {
		return none, err
	}
	info, err := h.look(ctx)
	if err != nil {
		return none, untouched(err)
	}
	if err := e.fits(h, info, spec); err != nil {
		return none, err
	}
	if len(spec.Mounts) > 0 {
		if err := e.mountable(ctx, h, info); err != nil {
			return none, err
		}
	}
	k := key(spec.ID, spec.Generation)
	unlock, err := e.env.Notes.Lock(ctx, k)
	if err != nil {
		return none, err
	}
	defer unlock()
	there, err := e.on(ctx, h, spec.ID, spec.Generation)
	if err != nil {
		return none, untouched(err)
	}
	if len(there) > 0 {
		r, err := e.recall(ctx, k)
		if err != nil {
			return none, err
		}
		if b := there[0]; r.Ready && (b.state == "running" || b.state == "paused") {
			return e.handle(b), nil
		}
		if _, err := e.remove(ctx, there); err != nil { // a process died while it made it
			return none, err
		}
	}
	rec := record{Host: h.name}
	if !e.unfiltered(spec.Network) && networked(spec.Network) {
		rec.Network = spec.Network
	}
	if err := e.remember(ctx, k, rec); err != nil {
		return none, err
	}
	b, err := e.make(ctx, h, info, spec, of)
	if err == nil {
		rec.Ready = true
		err = e.remember(ctx, k, rec)
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
		defer cancel()
		left, uerr := e.on(undo, h, spec.ID, spec.Generation)
		if uerr == nil {
			_, uerr = e.remove(undo, left)
		}
		if uerr == nil {
			uerr = e.forget(undo, k)
		}
		e.sweepSoon(h)
		return none, errors.Join(err, uerr)
	}
	return e.handle(b), nil
}

// untouched marks err as one that the engine never saw.
func untouched(err error) error {
	if sandboxer.KindOf(err) == sandboxer.Unavailable {
		return sandboxer.Untouched(err)
	}
	return err
}

// fits refuses a spec that this engine would not enforce.
func (e *extension) fits(h *host, info engine.Info, spec sandboxer.Spec) error {
	cannot := func(what string) error {
		return sandboxer.E(sandboxer.Unsupported, nil, "the engine %s cannot limit %s: its kernel has no control group for that", h.name, what)
	}
	switch {
	case !info.MemoryLimit:
		return cannot("memory")
	case !info.PidsLimit:
		return cannot("processes")
	case spec.Limits.MilliCPU > 0 && !info.CPUCfsQuota:
		return cannot("processors")
	}
	if err := e.hasRuntime(h, info); err != nil {
		return err
	}
	if err := e.checkNetwork(h, spec.Network); err != nil {
		return err
	}
	if spec.Limits.DiskBytes > 0 {
		if err := h.keepsDisk(info); err != nil {
			return err
		}
	}
	_, err := e.agentFor(info)
	return err
}

// make makes a sandbox.
func (e *extension) make(ctx context.Context, h *host, info engine.Info, spec sandboxer.Spec, of func(*host, engine.Info) (*image, made, error)) (*box, error) {
	prog, err := e.agentFor(info)
	if err != nil {
		return nil, err
	}
	// Its image and volume must stay until the container uses them.
	unlock, err := e.env.Notes.RLock(ctx, "host-"+h.name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	img, m, err := of(h, info)
	if err != nil {
		return nil, err
	}
	volume, err := e.bringAgent(ctx, h, prog, img.ID)
	if err != nil {
		return nil, err
	}
	if m.Workspace != spec.Workspace { // it is the image's
		if err := sandboxer.CheckMounts(spec.Mounts, m.Workspace); err != nil {
			return nil, err
		}
	}
	sources, err := e.opener().OpenToShow(spec)
	if err != nil {
		return nil, err
	}
	defer mounts.Close(sources)
	if m, err = e.describe(h, info, spec, img, m); err != nil {
		return nil, err
	}
	storage, err := img.storage(info, m.Disk)
	if err != nil {
		return nil, err
	}
	b := e.newBox(h, spec, img, m)
	config := e.container(b, spec, volume)
	config.HostConfig.StorageOpt = storage
	name := e.name(spec.ID, spec.Generation)
	hide := func() error { return nil }
	if len(sources) > 0 {
		k := b.key()
		hide = func() error { return e.hide(k) }
		defer func() { _ = hide() }() // Teardown finds what stays
		shown, err := e.show(ctx, h, k, name, config, m, sources)
		if err != nil {
			return nil, err
		}
		config.HostConfig.Mounts = append(config.HostConfig.Mounts, shown...)
	}
	if b.container, err = e.create(ctx, h, name, config); err != nil {
		lacks := m.Disk > 0 && strings.Contains(sandboxer.Message(err), volume.Mountpoint) // it is another volume, without etcFiles
		err = h.unseen(h.noQuota(err))
		if lacks {
			err = errors.Join(err, e.noteAgent(ctx, h, ""))
		}
		return nil, err
	}
	if err := h.startable(ctx, b.container, img.ID, len(sources) > 0); err != nil {
		return nil, err
	}
	err = e.start(ctx, b, prog)
	if err == nil && info.Podman && len(sources) > 0 {
		err = e.haveMounts(ctx, b, sources)
	}
	if err != nil {
		return nil, err
	}
	if err := hide(); err != nil { // the container has them
		return nil, sandboxer.E(sandboxer.Unavailable, err, "what sandbox %s mounts is still shown to the engine", spec.ID)
	}
	if networked(spec.Network) && m.Mode == string(sandboxer.NetworkNone) {
		if err := e.plug(ctx, b, spec.Network); err != nil { // before any program of the image runs
			return nil, err
		}
	}
	return b, e.complete(ctx, b, spec)
}

// describe completes the description of a sandbox from its spec.
func (e *extension) describe(h *host, info engine.Info, spec sandboxer.Spec, img *image, m made) (_ made, err error) {
	if m.Grants, err = e.grants(spec); err != nil {
		return m, err
	}
	limits := spec.Limits.Or(e.DefaultLimits(spec))
	m.V, m.Memory, m.Disk, m.Warm, m.Mode, m.Fuse = madeVersion, limits.MemoryBytes, limits.DiskBytes, spec.Warm, string(sandboxer.NetworkNone), spec.Fuse
	if e.unfiltered(spec.Network) {
		m.Mode = string(sandboxer.NetworkPublic)
	}
	m.Ports, m.Mounts = spec.Ports, spec.Mounts
	if m.Ports == nil {
		m.Ports = images.Ports(img.Config.ExposedPorts)
	}
	if !info.SwapLimit {
		m.Changed = "the engine " + h.name + " cannot keep memory from being swapped out"
	}
	return m, nil
}

// newBox is a sandbox without a container.
func (e *extension) newBox(h *host, spec sandboxer.Spec, img *image, m made) *box {
	b := &box{id: spec.ID, generation: spec.Generation, host: h, image: img.ID, state: "running", labels: e.labels(spec.ID, spec.Generation), made: m}
	b.labels[labelMade], b.labels[labelSnapshot] = m.label(), ""
	if !spec.Fuse.IsZero() {
		b.labels[labelExpires] = spec.Fuse.UTC().Format(time.RFC3339)
	}
	return b
}

// container is the engine's configuration of a container, without the sandbox's mounts from this machine.
func (e *extension) container(b *box, spec sandboxer.Spec, volume engine.APIVolume) engine.ContainerConfig {
	m := b.made
	network := e.cfg.Network
	var dns, own []string
	if m.Mode != string(sandboxer.NetworkPublic) {
		network = "none"                       // except its own devices (network.go)
		own = []string{spec.ID + ":127.0.1.1"} // on a network of its own the engine writes it
		if e.filters(b.host) {
			dns = []string{usernet.Gateway.String()}
		}
	}
	fuse := "0"
	if !spec.Fuse.IsZero() {
		fuse = spec.Fuse.UTC().Format(time.RFC3339Nano)
	}
	limits := spec.Limits.Or(e.DefaultLimits(spec))
	config := engine.ContainerConfig{
		Image: b.image, Hostname: spec.ID, User: agentUser, WorkingDir: "/", StopSignal: "SIGTERM", Labels: b.labels,
		Env: []string{"HOSTNAME=" + spec.ID}, // the agent sets all others, and callers that may inspect containers do not see them
		// The agent is the first process for the container's whole life.
		Entrypoint: []string{agentPath}, Cmd: []string{"hold", "init", "--untraced", "--listen=own:" + agentSocket, "--fuse=" + fuse},
		Healthcheck: &engine.Healthcheck{Test: []string{"NONE"}},
		HostConfig: engine.HostConfig{
			Runtime: e.cfg.Runtime, NetworkMode: network, Dns: dns, ExtraHosts: own, Memory: limits.MemoryBytes, MemorySwap: limits.MemoryBytes, NanoCpus: limits.MilliCPU * 1e6, PidsLimit: limits.PIDs,
			CapDrop: []string{"ALL"}, CapAdd: slices.Concat(inside.Capabilities(), []string{markCapability}, m.Grants), SecurityOpt: []string{"no-new-privileges"}, IpcMode: "private", ShmSize: cmp.Or(e.cfg.ShmSize, limits.MemoryBytes/2),
			LogConfig: &engine.LogConfig{Type: "json-file", Config: map[string]string{"max-size": "1m"}},
			Mounts:    []engine.MountConfig{{Type: "volume", Source: volume.Name, Target: agentDir, ReadOnly: true, VolumeOptions: &engine.VolumeOptions{NoCopy: true}}},
		},
	}
	if m.Disk > 0 {
		config.Cmd = slices.Insert(config.Cmd, 1, "--disk")
		config.HostConfig.Mounts = append(config.HostConfig.Mounts, etcMounts(volume, spec.Mounts)...)
	}
	return config
}

// start starts a container. If that fails because the volume is not the filled one, start fills it once more: engines report
// the creation time of a volume only to the second.
func (e *extension) start(ctx context.Context, b *box, prog program.Program) error {
	h := b.host
	err := h.api.ContainerCall(ctx, b.container, "start")
	if err == nil || ctx.Err() != nil || e.hasAgent(ctx, h, b.container, prog.Digest) {
		return err
	}
	if err := e.noteAgent(ctx, h, ""); err != nil {
		return err
	}
	if _, err := e.bringAgent(ctx, h, prog, b.image); err != nil {
		return err
	}
	return h.api.ContainerCall(ctx, b.container, "start")
}

// create makes a container. When it returns, it knows the result, whatever happens to ctx: an engine makes a requested
// container even if no call waits any more. If one of that name is ours, a process died while it made it, and create
// replaces it. Conflict: there is one that is not ours, and it stays.
func (e *extension) create(ctx context.Context, h *host, name string, c engine.ContainerConfig) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	certain, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	id, err := h.api.CreateContainer(certain, name, c)
	if sandboxer.KindOf(err) != sandboxer.Conflict {
		return id, err
	}
	there, ierr := h.api.InspectContainer(certain, name)
	for _, l := range []string{labelPrefix + hosts.LabelOwner, labelPrefix + hosts.LabelExtension, labelID, labelPrefix + hosts.LabelGeneration, labelAgent} {
		if ierr == nil && there.Config.Labels[l] != c.Labels[l] {
			return "", sandboxer.E(sandboxer.Conflict, err, "the engine %s has a container %s that is not ours", h.name, name).
				WithHint("if it is not needed, remove it: docker rm -f %s", name)
		}
	}
	if ierr == nil {
		ierr = h.api.RemoveContainer(certain, there.ID)
	}
	if ierr != nil && sandboxer.KindOf(ierr) != sandboxer.NotFound { // gone meanwhile
		return "", ierr
	}
	return h.api.CreateContainer(certain, name, c)
}

// complete gives a started container the settings of its sandbox.
func (e *extension) complete(ctx context.Context, b *box, spec sandboxer.Spec) error {
	call, err := e.call(ctx, b)
	if err != nil {
		return err
	}
	return call.End(e.fill(call.Ctx, call.Agent, b, spec))
}

func (e *extension) fill(ctx context.Context, c *agent.Client, b *box, spec sandboxer.Spec) error {
	m := b.made
	if err := e.began(ctx, c, b); err != nil {
		return err
	}
	// If a link of the image leads to the agent, root inside could put another program in its place, which the engine then runs to reach
	// the agent. A claimed sandbox was checked when it was made.
	if claimed := m.Warm && !spec.Warm; !claimed {
		switch at, err := c.StatFile(ctx, agentDir); {
		case err != nil:
			return err
		case !at.Mode.IsDir():
			return sandboxer.E(sandboxer.Failed, nil, "%s of the image is a symbolic link, and the agent has to be at a place that stays", agentDir).WithHint("use another image")
		}
	}
	if err := e.isolated(ctx, c, b.host, spec); err != nil {
		return err
	}
	if err := e.resolve(ctx, c, b); err != nil {
		return err
	}
	env, repo := spec.Env, spec.Inputs["repo"]
	if env == nil || spec.Warm {
		env = map[string]string{} // the claim brings it
	}
	if spec.Warm {
		repo = "" // and this
	}
	if err := c.Init(ctx, agent.Settings{Env: env, User: &m.User, Workdir: &m.Workspace}); err != nil { // it refuses an unknown user
		return sandboxer.E(sandboxer.KindOf(err), err, "the sandbox's user %q or environment is not possible: %s", m.User, sandboxer.Message(err))
	}
	skipped, err := inside.Fill(ctx, c.Exec, m.Workspace, m.User, repo)
	if skipped != "" {
		sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: skipped})
	}
	if err != nil || spec.Warm {
		return err
	}
	return inside.Start(ctx, c, sandboxer.ProcessSpec{Args: m.Main, Dir: m.MainDir})
}

// began waits until the agent answers. If it cannot run, the engine's output says why.
func (e *extension) began(ctx context.Context, c *agent.Client, b *box) error {
	err := c.Health(ctx)
	if err == nil || ctx.Err() != nil {
		return err
	}
	d, ierr := b.host.api.InspectContainer(ctx, b.container)
	if ierr != nil || d.State.Running {
		return err
	}
	said, _ := b.host.api.Logs(ctx, b.container)
	return sandboxer.E(sandboxer.Failed, err, "the sandbox ended as it began (code %d): %s", d.State.ExitCode, engine.OneLine(d.State.Error+" "+said))
}

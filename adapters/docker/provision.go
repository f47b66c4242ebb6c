package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/mounts"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

const (
	agentEnvPrefix   = agent.EnvPrefix
	workspaceDefault = "/workspace"
	minMemory        = 16 << 20
	minPIDs          = 32 // the agent's threads, and those of what leads to it
)

// guestCapabilities are what root inside a sandbox may do: those of the adapter local.
var guestCapabilities = []string{"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}

// Check implements sandboxer.Checker.
func (e *extension) Check(_ context.Context, spec sandboxer.Spec) error { return e.check(spec) }

// DefaultLimits implements sandboxer.Limiter.
func (e *extension) DefaultLimits(sandboxer.Spec) sandboxer.Limits {
	return sandboxer.Limits{MemoryBytes: e.cfg.Memory, PIDs: e.cfg.PIDs}
}

// Admit implements sandboxer.Admitter: an image of a registry says nothing of any machine, and hosts are
// those that the configuration names. Paths of the server's machine, and what engines have, do.
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
		kind, _ := splitImage(spec.Image)
		switch kind {
		case "":
			return nil
		case "engine":
			what = "an image that an engine has"
		default:
			what = "an image of a path of the server's machine"
		}
	}
	return sandboxer.E(sandboxer.Denied, nil, "%s may be used by an administrator only", what).
		WithHint("ask for a profile that names it")
}

// check refuses what cannot be done, before anything exists.
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
	case l.PIDs > 0 && l.PIDs < minPIDs:
		return sandboxer.E(sandboxer.Invalid, nil, "a limit of %d processes is too small for the agent; the least is %d", l.PIDs, minPIDs)
	case l.MilliCPU > 0 && l.MilliCPU < 10:
		return sandboxer.E(sandboxer.Invalid, nil, "a limit of %d thousandths of a processor is less than engines can keep; the least is 10", l.MilliCPU)
	}
	if err := e.checkMounts(spec); err != nil {
		return err
	}
	if err := spec.Network.Check(); err != nil {
		return err
	}
	if err := e.checkNetwork(nil, spec.Network); err != nil {
		return err
	}
	if spec.Host != "" {
		if _, err := e.host(spec.Host); err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "%s has no host %q", e.env.Extension, spec.Host).WithHint("its hosts are %s", strings.Join(e.names, ", "))
		}
	}
	for k := range spec.Env {
		if strings.HasPrefix(k, agentEnvPrefix) {
			return sandboxer.E(sandboxer.Invalid, nil, "environment variable %s is the agent's own", k)
		}
	}
	if ws := spec.Workspace; ws != "" && (!path.IsAbs(ws) || path.Clean(ws) != ws || ws == "/" || reserved(ws)) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the workspace: want a clean absolute path outside /dev, /proc, /sys and %s", ws, agentDir)
	}
	if repo := spec.Inputs["repo"]; repo != "" {
		fi, err := os.Stat(repo)
		switch {
		case !filepath.IsAbs(repo):
			return sandboxer.E(sandboxer.Invalid, nil, "input repo: %q is not an absolute directory", repo).
				WithHint("the command line makes a directory absolute; over HTTP give the full path on the server's machine")
		case err != nil || !fi.IsDir():
			return sandboxer.E(sandboxer.Invalid, err, "input repo: %s is no directory that can be read on the server's machine", repo)
		}
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
	return e.images.check(ref, spec.Vouches(sandboxer.RestrictedImage) || spec.Image == "")
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

func reserved(p string) bool {
	for _, r := range []string{"/dev", "/proc", "/sys", agentDir} {
		if p == r || strings.HasPrefix(p, r+"/") {
			return true
		}
	}
	return false
}

// Place implements sandboxer.Placer: the engine with the most room, of those that answer.
func (e *extension) Place(ctx context.Context, spec sandboxer.Spec, avoid []string) (string, error) {
	if err := e.check(spec); err != nil {
		return "", err
	}
	names := e.names
	if spec.Host != "" {
		names = []string{spec.Host}
	}
	var hosts []*host
	for _, n := range names {
		if !slices.Contains(avoid, n) {
			hosts = append(hosts, e.hosts[n])
		}
	}
	if len(hosts) == 0 {
		return "", sandboxer.E(sandboxer.Unavailable, nil, "%s has no other engine that could make sandbox %s", e.env.Extension, spec.ID)
	}
	if len(hosts) == 1 && spec.Host != "" {
		return hosts[0].name, nil // making it says what is wrong there
	}
	free := make(map[string]int, len(hosts))
	type answer struct {
		name string
		free int
	}
	answers := make(chan answer, len(hosts))
	err := each(hosts, func(h *host) error {
		info, err := h.look(ctx)
		if err == nil {
			err = e.fits(h, info, spec)
		}
		if err != nil {
			return err
		}
		c, err := e.room(ctx, h, spec.Limits)
		if err == nil && len(spec.Mounts) > 0 {
			err = e.mountable(ctx, h, info)
		}
		if err == nil {
			answers <- answer{h.name, c}
		}
		return err
	})
	close(answers)
	best := ""
	for a := range answers {
		if free[a.name] = a.free; best == "" || a.free > free[best] || a.free == free[best] && a.name < best {
			best = a.name
		}
	}
	switch {
	case best == "":
		return "", err
	case free[best] <= 0:
		return "", sandboxer.E(sandboxer.Exhausted, nil, "the engines of %s have no room for a further sandbox", e.env.Extension).
			WithHint("destroy what is not needed, or have the operator raise capacity in the config of %s", e.env.Extension)
	}
	return best, nil
}

// Provision implements sandboxer.Extension. A record is written first and says last that the sandbox was
// completed; whatever dies in between is found by Teardown, or removed and made anew by the next
// Provision.
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
		if wd := path.Clean("/" + img.Config.WorkingDir); m.Workspace == "" && wd != "/" && !reserved(wd) {
			m.Workspace = wd
		}
		if m.Workspace == "" {
			m.Workspace = workspaceDefault
		}
		m.Main, m.MainDir = img.main(spec.Command, m.Workspace)
		return img, m, nil
	})
}

// main is what the image runs as its main process: its entry point with command, or, as engines do
// it, with the image's own command if there is none. dir is where.
func (i *image) main(command []string, workspace string) (args []string, dir string) {
	args = slices.Clone(i.Config.Entrypoint)
	if len(command) == 0 {
		args = append(args, i.Config.Cmd...)
	} else if len(args) == 0 {
		return command, workspace // nothing of the image is in it
	} else {
		args = append(args, command...)
	}
	return args, path.Clean("/" + i.Config.WorkingDir)
}

// provision is what is the same for new sandboxes and restored ones. of says what it is made of.
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
	l, err := e.lock(ctx, k, filelock.Exclusive)
	if err != nil {
		return none, err
	}
	defer l.Remove()
	there, err := e.on(ctx, h, spec.ID, spec.Generation)
	if err != nil {
		return none, untouched(err)
	}
	if len(there) > 0 {
		r, err := e.recall(k)
		if err != nil {
			return none, err
		}
		if b := there[0]; r.Ready && (b.state == "running" || b.state == "paused") {
			return e.handle(b), nil
		}
		if _, err := e.remove(ctx, there); err != nil { // somebody died while making it
			return none, err
		}
	}
	rec := record{Host: h.name}
	if !e.unfiltered(spec.Network) && networked(spec.Network) {
		rec.Network = spec.Network
	}
	if err := e.remember(k, rec); err != nil {
		return none, err
	}
	b, err := e.make(ctx, h, info, spec, of)
	if err == nil {
		rec.Ready = true
		err = e.remember(k, rec)
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
		defer cancel()
		left, uerr := e.on(undo, h, spec.ID, spec.Generation)
		if uerr == nil {
			_, uerr = e.remove(undo, left)
		}
		if uerr == nil {
			uerr = e.forget(k)
		}
		e.sweepSoon(h)
		return none, errors.Join(err, uerr)
	}
	return e.handle(b), nil
}

// untouched says that the engine did not hear of it.
func untouched(err error) error {
	var se *sandboxer.Error
	if errors.As(err, &se) && se.Kind == sandboxer.Unavailable {
		again := *se
		again.Untouched = true
		return &again
	}
	return err
}

// fits refuses what this engine does not keep.
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
	// What it is made of stays until it has it.
	shared, err := e.lock(ctx, "host-"+h.name, filelock.Shared)
	if err != nil {
		return nil, err
	}
	defer shared.Release()
	img, m, err := of(h, info)
	if err != nil {
		return nil, err
	}
	volume, err := e.bringAgent(ctx, h, prog, img.ID)
	if err != nil {
		return nil, err
	}
	if err := sandboxer.CheckMounts(spec.Mounts, m.Workspace); err != nil {
		return nil, err
	}
	sources, err := e.openSources(spec)
	if err != nil {
		return nil, err
	}
	defer mounts.Close(sources)
	limits := spec.Limits.Or(e.DefaultLimits(spec))
	if m.Grants, err = e.grants(spec); err != nil {
		return nil, err
	}
	storage, err := img.storage(info, limits.DiskBytes)
	if err != nil {
		return nil, err
	}
	m.V, m.Memory, m.Disk, m.Warm, m.Mode, m.Fuse, m.Stamp = madeVersion, limits.MemoryBytes, limits.DiskBytes, spec.Warm, string(sandboxer.NetworkNone), spec.Fuse, spec.Stamp
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
	b := &box{id: spec.ID, generation: spec.Generation, host: h, image: img.ID, state: "running"}
	b.labels = e.ours()
	maps.Copy(b.labels, map[string]string{labelID: spec.ID, labelGeneration: strconv.Itoa(spec.Generation), labelMade: m.label(), labelSnapshot: ""})
	if !spec.Fuse.IsZero() {
		b.labels[labelExpires] = spec.Fuse.UTC().Format(time.RFC3339)
	}
	name := e.name(spec.ID, spec.Generation)
	network := "none" // but for its own devices (network.go)
	if m.Mode == string(sandboxer.NetworkPublic) {
		network = e.cfg.Network
	}
	var dns []string
	if network == "none" && e.filters(h) {
		dns = []string{usernet.Gateway.String()}
	}
	fuse := "0"
	if !spec.Fuse.IsZero() {
		fuse = spec.Fuse.UTC().Format(time.RFC3339Nano)
	}
	config := engine.ContainerConfig{
		Image: img.ID, Hostname: spec.ID, User: agentUser, WorkingDir: "/", StopSignal: "SIGTERM", Labels: b.labels,
		Env: []string{"HOSTNAME=" + spec.ID}, // all else comes from the agent, and is not told to who may look at containers
		// The rest of its life is the agent's.
		Entrypoint: []string{agentPath}, Cmd: []string{"init", "--listen=own:" + agentSocket, "--fuse=" + fuse},
		Healthcheck: &engine.Healthcheck{Test: []string{"NONE"}},
		HostConfig: engine.HostConfig{
			Runtime: e.cfg.Runtime, NetworkMode: network, Dns: dns, Memory: limits.MemoryBytes, MemorySwap: limits.MemoryBytes, NanoCpus: limits.MilliCPU * 1e6, PidsLimit: limits.PIDs,
			CapDrop: []string{"ALL"}, CapAdd: slices.Concat(guestCapabilities, m.Grants), SecurityOpt: []string{"no-new-privileges"}, IpcMode: "private",
			LogConfig:  &engine.LogConfig{Type: "json-file", Config: map[string]string{"max-size": "1m"}},
			StorageOpt: storage,
			Mounts:     []engine.MountConfig{{Type: "volume", Source: volume.Name, Target: agentDir, ReadOnly: true, VolumeOptions: &engine.VolumeOptions{NoCopy: true}}},
		},
	}
	if limits.DiskBytes > 0 {
		config.Cmd = append([]string{"hold-disk"}, config.Cmd...)
		config.HostConfig.Mounts = append(config.HostConfig.Mounts, etcMounts(volume, spec.Mounts)...)
	}
	hide := func() error { return nil }
	if len(sources) > 0 {
		k := b.key()
		hide = func() error { return e.hide(k) }
		defer func() { _ = hide() }() // what it leaves, Teardown finds
		shown, err := e.show(ctx, h, k, name, config, m, sources)
		if err != nil {
			return nil, err
		}
		config.HostConfig.Mounts = append(config.HostConfig.Mounts, shown...)
	}
	if b.container, err = e.create(ctx, h, name, config); err != nil {
		lacks := limits.DiskBytes > 0 && strings.Contains(sandboxer.Message(err), volume.Mountpoint) // the volume is another one, without etcFiles
		err = h.unseen(h.noQuota(err))
		if lacks {
			err = errors.Join(err, e.forgetAgent(h))
		}
		return nil, err
	}
	if err := h.startable(ctx, b.container, img.ID, len(sources) > 0); err != nil {
		return nil, err
	}
	err = h.api.ContainerCall(ctx, b.container, "start")
	if err != nil && ctx.Err() == nil && !e.hasAgent(ctx, h, b.container, prog.Digest) {
		// The volume is another one than that which was filled: engines tell when one was made to the second.
		if err := e.forgetAgent(h); err != nil {
			return nil, err
		}
		if _, err := e.bringAgent(ctx, h, prog, img.ID); err != nil {
			return nil, err
		}
		err = h.api.ContainerCall(ctx, b.container, "start")
	}
	if err == nil && info.Podman && len(sources) > 0 {
		err = e.haveMounts(ctx, b, sources)
	}
	if err != nil {
		return nil, err
	}
	if err := hide(); err != nil { // it has them
		return nil, sandboxer.E(sandboxer.Unavailable, err, "what sandbox %s mounts is still shown to the engine", spec.ID)
	}
	if networked(spec.Network) && m.Mode == string(sandboxer.NetworkNone) {
		if err := e.plug(ctx, b, spec.Network); err != nil { // before anything of the image runs
			return nil, err
		}
	}
	return b, e.complete(ctx, b, m, spec)
}

// startable refuses, as Failed, a container of which the engine itself would read a file that does not end, or is a device of its machine: it
// looks users up in the files of containers, when it starts one and when it packs what is in it. Waiting at a named pipe there it neither
// starts the container nor ever removes it. What an image has stays as it is, so that one look at it is enough, but for what is mounted over it.
func (h *host) startable(ctx context.Context, container, image string, mounted bool) error {
	h.mu.Lock()
	looked := h.startables[image]
	h.mu.Unlock()
	if looked && !mounted {
		return nil
	}
	switch file, err := h.endless(ctx, container); {
	case err != nil:
		return err
	case file != "":
		return sandboxer.E(sandboxer.Failed, nil, "%s of the image is no file, and the engine %s would read it without an end", file, h.name).WithHint("use another image")
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !mounted {
		if len(h.startables) >= maxStartables || h.startables == nil {
			h.startables = map[string]bool{}
		}
		h.startables[image] = true
	}
	return nil
}

// endless is which of a container's files of users the engine would not come to the end of; empty for none.
func (h *host) endless(ctx context.Context, container string) (string, error) {
	for _, file := range []string{"/etc/passwd", "/etc/group"} {
		mode, err := h.kindOf(ctx, container, file)
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			continue
		}
		if err != nil {
			return "", err
		}
		if !mode.IsRegular() && !mode.IsDir() { // which ends with an error
			return file, nil
		}
	}
	return "", nil
}

// create makes a container. Whether it was made is known when it returns, whatever becomes of ctx: an engine that
// was asked for one makes it also when nobody waits any more. One of that name that is ours is of
// somebody who died while making it. Conflict: there is one that is not ours, and it stays.
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
	for _, label := range []string{labelOwner, labelExtension, labelID, labelGeneration, labelAgent} {
		if ierr == nil && there.Config.Labels[label] != c.Labels[label] {
			return "", sandboxer.E(sandboxer.Conflict, err, "the engine %s has a container %s that is not ours", h.name, name).
				WithHint("remove it, if nobody needs it: docker rm -f %s", name)
		}
	}
	if ierr == nil {
		ierr = h.api.RemoveContainer(certain, there.ID)
	}
	if ierr != nil && sandboxer.KindOf(ierr) != sandboxer.NotFound {
		return "", ierr
	}
	return h.api.CreateContainer(certain, name, c)
}

// complete gives a container that has started what it is a sandbox with.
func (e *extension) complete(ctx context.Context, b *box, m made, spec sandboxer.Spec) error {
	call, err := e.call(ctx, b, m)
	if err != nil {
		return err
	}
	return call.End(e.fill(call.Ctx, call.Agent, b, m, spec))
}

func (e *extension) fill(ctx context.Context, c *agent.Client, b *box, m made, spec sandboxer.Spec) error {
	if err := e.began(ctx, c, b); err != nil {
		return err
	}
	// Where a link of the image leads to the agent, who is root inside could put another program in its place, which the engine then runs
	// to reach the agent. What is claimed was looked at when it was made.
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
	if err := e.resolve(ctx, c, b, m); err != nil {
		return err
	}
	uid, gid, err := numeric(m.User, func(file string) ([][]string, error) {
		r, err := c.ReadFile(ctx, file)
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		defer r.Close()
		return table(r)
	})
	if err != nil {
		return err
	}
	user := strconv.Itoa(uid) + ":" + strconv.Itoa(gid)
	if m.User == "" || !strings.Contains(m.User, ":") {
		user = m.User
	}
	args := []string{agentPath, "untar"}
	if uid != 0 || gid != 0 {
		args = append(args, "--owner", strconv.Itoa(uid)+":"+strconv.Itoa(gid))
	}
	args = append(args, m.Workspace)
	var in io.Reader // with none there is nothing to unpack, and no further connection to be opened for it
	var packed chan error
	if repo := spec.Inputs["repo"]; repo != "" && !spec.Warm {
		r, w := io.Pipe()
		packed = make(chan error, 1)
		go func() {
			err := agent.Tar(w, repo)
			w.CloseWithError(err)
			packed <- err
		}()
		defer r.Close()
		in = r
	}
	err = must(ctx, c, "making the workspace", in, args...)
	if packed != nil {
		in.(*io.PipeReader).Close() // who left early is not waited for
		if perr := <-packed; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
			return sandboxer.E(sandboxer.Invalid, perr, "input repo: %s cannot be read whole: %v", spec.Inputs["repo"], perr)
		}
	}
	if err != nil {
		return err
	}
	env := spec.Env
	if env == nil || spec.Warm {
		env = map[string]string{} // which comes with the claim
	}
	if err := c.Init(ctx, agent.Settings{Env: env, User: &user, Workdir: &m.Workspace}); err != nil {
		return sandboxer.E(failedUnless(err, sandboxer.Unavailable), err, "the sandbox's user %q or environment is not possible: %s", m.User, sandboxer.Message(err))
	}
	if spec.Warm {
		return nil
	}
	return startMain(ctx, c, m)
}

// failedUnless is Failed, but for these kinds.
func failedUnless(err error, kinds ...sandboxer.Kind) sandboxer.Kind {
	if k := sandboxer.KindOf(err); slices.Contains(append(kinds, sandboxer.Canceled, sandboxer.Timeout), k) {
		return k
	}
	return sandboxer.Failed
}

// began waits until the agent answers. Where it cannot run, the engine's output says why.
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

func startMain(ctx context.Context, c *agent.Client, m made) error {
	if len(m.Main) == 0 {
		return nil
	}
	_, err := c.Start(ctx, sandboxer.ProcessSpec{Args: m.Main, Dir: m.MainDir, Tag: agent.MainTag})
	if err != nil {
		return sandboxer.E(failedUnless(err, sandboxer.Unavailable), err, "the sandbox's command %q could not be started: %s", m.Main[0], sandboxer.Message(err))
	}
	return nil
}

// must runs a command as root that has to succeed.
func must(ctx context.Context, c *agent.Client, what string, in io.Reader, args ...string) error {
	var said strings.Builder
	x, err := c.Exec(ctx, sandboxer.Cmd{Args: args, Dir: "/", User: "0", Stdin: in, Stderr: engine.Last(&said)})
	if err == nil && x.Code != 0 {
		text := engine.OneLine(said.String())
		kind := sandboxer.Failed
		if strings.Contains(text, "no space left") || strings.Contains(text, "quota exceeded") {
			kind = sandboxer.Exhausted
		}
		err = sandboxer.E(kind, nil, "%s failed: %s", what, text)
	}
	return err
}

// numeric finds the numbers of a user, name or uid, with a group or without, by what the sandbox's files say,
// which table reads; nothing for one that is not there.
func numeric(user string, table func(file string) ([][]string, error)) (uid, gid int, err error) {
	if user == "" {
		return 0, 0, nil
	}
	name, group, both := strings.Cut(user, ":")
	unknown := func(what string) error {
		return sandboxer.E(sandboxer.Failed, nil, "the sandbox's user %q cannot be found: %s", user, what).WithHint("name another user")
	}
	passwd, err := table("/etc/passwd")
	if err != nil {
		return 0, 0, err
	}
	n, nerr := strconv.ParseUint(name, 10, 31)
	row := slices.IndexFunc(passwd, func(f []string) bool { return len(f) > 3 && (f[0] == name || nerr == nil && f[2] == name) })
	switch {
	case row >= 0:
		u, uerr := strconv.ParseUint(passwd[row][2], 10, 31)
		g, gerr := strconv.ParseUint(passwd[row][3], 10, 31)
		if uerr != nil || gerr != nil {
			return 0, 0, unknown("/etc/passwd says no numbers")
		}
		uid, gid = int(u), int(g)
	case nerr == nil:
		uid, gid = int(n), int(n) // as the agent has it
	default:
		return 0, 0, unknown("/etc/passwd does not have it")
	}
	if !both {
		return uid, gid, nil
	}
	if g, err := strconv.ParseUint(group, 10, 31); err == nil {
		return uid, int(g), nil
	}
	groups, err := table("/etc/group")
	if err != nil {
		return 0, 0, err
	}
	row = slices.IndexFunc(groups, func(f []string) bool { return len(f) > 2 && f[0] == group })
	if row < 0 {
		return 0, 0, unknown("/etc/group does not have the group")
	}
	g, err := strconv.ParseUint(groups[row][2], 10, 31)
	if err != nil {
		return 0, 0, unknown("/etc/group says no number")
	}
	return uid, int(g), nil
}

// table reads a file of lines with colons.
func table(r io.Reader) ([][]string, error) {
	data, err := io.ReadAll(io.LimitReader(r, 1<<20))
	var rows [][]string
	for line := range strings.Lines(string(data)) {
		rows = append(rows, strings.Split(strings.TrimSpace(line), ":"))
	}
	return rows, err
}

// WaitReady implements sandboxer.Extension.
func (e *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	var r sandboxer.Reachability
	b, err := e.find(ctx, h)
	if err != nil {
		return r, err
	}
	l, err := e.lock(ctx, b.key(), filelock.Exclusive) // Provision does not leave it alone until it is complete
	if err != nil {
		return r, err
	}
	defer l.Remove()
	h = e.handle(b)
	if b, err = e.find(ctx, h); err != nil {
		return r, err
	}
	rec, err := e.recall(b.key())
	switch {
	case err != nil:
		return r, err
	case b.state == "paused":
	default:
		if err := e.runs(ctx, b); err != nil {
			return r, err
		}
	}
	if !rec.Ready {
		return r, sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s was not completed; it has to be provisioned again", b.id)
	}
	m, err := readMade(b.labels)
	if err != nil {
		return r, err
	}
	r = sandboxer.Reachability{Host: b.host.name, RemoteDir: m.Workspace, Extra: map[string]string{"container": h.Ref}}
	if m.Image != "" {
		r.Extra["image"] = m.Image
	}
	if m.Changed != "" {
		r.Extra[sandboxer.ExtraChanged] = m.Changed
	}
	r.Ports, err = e.ports(ctx, b, m)
	return r, err
}

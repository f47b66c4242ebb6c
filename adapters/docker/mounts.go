package docker

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// What a sandbox has mounted of this machine is opened by us, and shown to the engine in a directory of
// our own until the container has started. Nobody but root gets there, and no name of the source is used again: what was
// looked at is what is mounted (docs/adr/0029-mounts-of-containers.md).

// opener opens what is mounted.
func (e *extension) opener() *mounts.Opener {
	return &mounts.Opener{Settings: e.cfg.Mounts, Extension: e.env.Extension, Own: append(slices.Clone(e.env.Own), e.env.Dir)}
}

// openSources opens what spec mounts. Kinds: Invalid for what cannot be mounted, Denied for what
// must not be, Unsupported.
func (e *extension) openSources(spec sandboxer.Spec) ([]*mounts.Source, error) {
	if len(spec.Mounts) == 0 {
		return nil, nil
	}
	if err := mounts.Can(e.env.Extension); err != nil {
		return nil, err
	}
	sources, err := e.opener().Open(spec)
	if err == nil {
		err = mounts.Try(sources)
	}
	if err != nil {
		mounts.Close(sources)
		return nil, err
	}
	return sources, nil
}

// checkMounts refuses what no engine of the extension mounts.
func (e *extension) checkMounts(spec sandboxer.Spec) error {
	if len(spec.Mounts) == 0 {
		return nil
	}
	if err := sandboxer.CheckMounts(spec.Mounts, spec.Workspace); err != nil {
		return err
	}
	names := e.names
	if name := spec.Host; name != "" {
		names = []string{name}
	}
	var err error
	for _, n := range names {
		if h := e.hosts[n]; h != nil {
			if err = e.isHere(h); err == nil {
				break
			}
		}
	}
	if err != nil {
		return err
	}
	sources, err := e.openSources(spec)
	mounts.Close(sources)
	return err
}

const copied = "give a directory as the repo input: it is copied"

// isHere refuses an engine of another machine.
func (e *extension) isHere(h *host) error {
	if h.socket == "" {
		return sandboxer.E(sandboxer.Unsupported, nil, "the engine %s may be on another machine, where a path of the server's means nothing: mounts take an engine at a Unix socket", h.name).WithHint(copied)
	}
	return nil
}

// cannotMount is the refusal of what is on the server's machine.
func (h *host) cannotMount(err error, why string) error {
	return sandboxer.E(sandboxer.Unsupported, err, "the engine %s cannot mount what is on the server's machine: %s", h.name, why).WithHint(copied)
}

const apart = "server and engine have mount namespaces of their own, as a service of systemd with PrivateMounts or ProtectSystem has"

// unseen is err, unless that is an engine's which does not see what is shown to it.
func (h *host) unseen(err error) error {
	if err == nil || !strings.Contains(strings.ToLower(sandboxer.Message(err)), "bind source path does not exist") {
		return err
	}
	return h.cannotMount(err, apart)
}

// mountable refuses, as Unsupported, an engine that does not see what the server mounts, or whose containers have other
// owners of files than this machine. One in a mount namespace of its own, behind a socket that systemd listens at, is not known
// before it is to mount something (unseen, haveMounts).
func (e *extension) mountable(ctx context.Context, h *host, info engine.Info) error {
	if err := e.isHere(h); err != nil {
		return err
	}
	cannot := func(why string) error { return h.cannotMount(nil, why) }
	switch {
	case info.Rootless:
		return cannot("it runs without root (rootless)")
	case info.Remaps():
		return cannot("it maps user IDs (userns-remap)")
	}
	space, err := h.space(ctx)
	space.Close()
	return err
}

// space is where the engine sees mounts. Unsupported: it is where the server may not make any.
func (h *host) space(ctx context.Context) (space *mounts.Space, err error) {
	conn, err := (&net.Dialer{Timeout: dialTime}).DialContext(ctx, "unix", h.socket)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the engine %s cannot be reached", h.name)
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := raw.Control(func(fd uintptr) { space, err = mounts.Peer(int(fd)) })
	if errors.Is(err, mounts.ErrApart) {
		return nil, h.cannotMount(err, apart)
	}
	if cerr != nil || err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, errors.Join(cerr, err), "it cannot be told whether the engine %s sees what the server mounts", h.name)
	}
	return space, nil
}

// haveMounts refuses, as Unsupported, a container that has started and does not have what was shown: Podman makes a directory where there
// is no source that it sees, and settings of its own may give containers other owners of files. Nothing of the image has run yet.
func (e *extension) haveMounts(ctx context.Context, b *box, sources []*mounts.Source) error {
	c, err := b.host.api.InspectContainer(ctx, b.container)
	if err != nil {
		return err
	}
	p, err := b.host.here(c)
	if errors.Is(err, errElsewhere) {
		return b.host.cannotMount(err, "its containers' processes are not on this machine")
	}
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "it cannot be told what sandbox %s has mounted", b.id)
	}
	defer p.Close()
	for _, s := range sources {
		has, err := s.In(p.pid)
		if err == nil {
			err = p.alive() // so it was that one's
		}
		if err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "it cannot be told whether sandbox %s has %s mounted", b.id, s.Mount.Source)
		}
		if !has {
			return b.host.cannotMount(nil, apart+"; or it maps user IDs")
		}
	}
	return nil
}

// place is where what a sandbox mounts is shown to the engine while it is made. The caller holds the sandbox's lock.
func (e *extension) place(key string) string { return e.dir("mount", key) }

// hide takes away what is shown of a sandbox.
func (e *extension) hide(key string) error {
	err := mounts.Hide(e.place(key), nil)
	if !errors.Is(err, syscall.EBUSY) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), undoTime) // whoever called may have left
	defer cancel()
	for _, h := range e.hosts {
		if h.socket == "" {
			continue
		}
		space, serr := h.space(ctx)
		if serr == nil {
			serr = mounts.Hide(e.place(key), space)
			space.Close()
		}
		if serr == nil {
			return nil
		}
		err = errors.Join(err, serr)
	}
	return err
}

// hideAll takes away what processes that died were showing to engines.
func (e *extension) hideAll() {
	entries, err := os.ReadDir(e.dir("mount"))
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	for _, d := range entries {
		l, lerr := filelock.Try(e.dir("lock", d.Name()), filelock.Exclusive)
		if lerr != nil {
			continue // somebody is making it
		}
		err = errors.Join(err, e.hide(d.Name()))
		l.Remove()
	}
	if err != nil {
		e.log.Warn("what a former server was mounting stays", "extension", e.env.Extension, "err", err)
	}
}

// show shows the sources to the engine, and returns the container's mounts of them. m says whose user's they are. A
// container that never runs, and which is removed again, is looked into for that, and for whether something of the image is in
// the way.
func (e *extension) show(ctx context.Context, h *host, key, name string, c engine.ContainerConfig, m made, sources []*mounts.Source) ([]engine.MountConfig, error) {
	look, err := e.create(ctx, h, name, c)
	if err != nil {
		return nil, err
	}
	uid, gid, err := func() (int, int, error) {
		if err := h.startable(ctx, look, c.Image, false); err != nil {
			return 0, 0, err
		}
		for _, s := range sources {
			if err := e.targetFits(ctx, h, look, s, sources); err != nil {
				return 0, 0, err
			}
		}
		return numeric(m.User, func(file string) ([][]string, error) { return h.tableOf(ctx, look, file) })
	}()
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if rerr := h.api.RemoveContainer(undo, look); err == nil && rerr != nil && sandboxer.KindOf(rerr) != sandboxer.NotFound {
		err = rerr
	}
	if err != nil {
		return nil, err
	}
	if uid >= mounts.IDCount || gid >= mounts.IDCount {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "the sandbox's user %q is %d:%d, and owners of files are mapped up to %d", m.User, uid, gid, mounts.IDCount-1)
	}
	space, err := h.space(ctx)
	if err != nil {
		return nil, err
	}
	defer space.Close()
	place := e.place(key)
	err = e.hide(key)
	if err == nil {
		err = mounts.Show(place, sources, uint32(uid), uint32(gid), space)
	}
	if errors.Is(err, mounts.ErrApart) {
		err = h.cannotMount(err, apart)
	}
	if err != nil {
		if _, ok := errors.AsType[*sandboxer.Error](err); !ok {
			err = sandboxer.E(sandboxer.Unavailable, err, "what sandbox %s mounts cannot be shown to the engine", key)
		}
		return nil, err
	}
	var list []engine.MountConfig
	for i, s := range sources {
		list = append(list, engine.MountConfig{Type: "bind", Source: mounts.At(place, i), Target: s.Mount.Target, ReadOnly: s.Mount.ReadOnly, BindOptions: &engine.BindOptions{Propagation: "rprivate"}})
	}
	return list, nil
}

// kindOf tells what a file of a container that does not run is, as who runs in it would find it: through a link.
func (h *host) kindOf(ctx context.Context, container, file string) (fs.FileMode, error) {
	mode, target, err := h.api.StatFile(ctx, container, file)
	if err == nil && mode&fs.ModeSymlink != 0 {
		mode, _, err = h.api.StatFile(ctx, container, target)
	}
	return mode, err
}

// tableOf reads a file of lines with colons out of a container that does not run, as who runs in it would: through a link. Nothing for
// one that is not there.
func (h *host) tableOf(ctx context.Context, container, file string) (rows [][]string, err error) {
	defer func() {
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			err = nil
		}
	}()
	mode, target, err := h.api.StatFile(ctx, container, file)
	if err == nil && mode&fs.ModeSymlink != 0 { // of which the archive would have nothing else
		file = target
		mode, _, err = h.api.StatFile(ctx, container, file)
	}
	if err == nil && !mode.IsRegular() {
		err = sandboxer.E(sandboxer.Failed, nil, "who the sandbox's user is cannot be told: %s of the image is no file", file).WithHint("use another image")
	}
	if err != nil {
		return nil, err
	}
	err = h.api.GetArchive(ctx, container, file, func(r io.Reader) error {
		tr := tar.NewReader(r)
		head, err := tr.Next()
		if err == nil && head.Typeflag == tar.TypeReg {
			rows, err = table(tr)
		}
		return err
	})
	return rows, err
}

// targetFits refuses, as Invalid, the target of s where something of the image, or of another source, is in the way.
func (e *extension) targetFits(ctx context.Context, h *host, look string, s *mounts.Source, all []*mounts.Source) error {
	var in *mounts.Source // the nearest that it lies in
	for _, o := range all {
		if _, ok := o.Inside(s.Mount.Target); ok && (in == nil || len(o.Mount.Target) > len(in.Mount.Target)) {
			in = o
		}
	}
	if in != nil {
		rel, _ := in.Inside(s.Mount.Target)
		if err := mounts.Fits(s.Mount, true, in.IsDir, false); err != nil {
			return err
		}
		return in.Holds(rel, s.Mount, s.IsDir)
	}
	target := s.Mount.Target
	var parts []string // of the way there
	for p := target; p != "/"; p = path.Dir(p) {
		parts = append(parts, p)
	}
	for _, p := range slices.Backward(parts) {
		mode, _, err := h.api.StatFile(ctx, look, p)
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			return nil // it is made
		}
		if err == nil {
			err = mounts.Fits(s.Mount, s.IsDir || p != target, mode.IsDir(), mode&fs.ModeSymlink != 0)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

package docker

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// The server opens the sources of a sandbox's mounts on this machine, and shows them to the engine in a directory of its own
// until the container has started. Only root can enter it, and no source is opened by name again: what was checked is what is
// mounted (docs/design/adr/0029-mounts-of-containers.md).

// opener opens sources of mounts.
func (e *extension) opener() *mounts.Opener {
	return &mounts.Opener{Settings: e.cfg.Mounts, Extension: e.env.Extension, Own: append(slices.Clone(e.env.Own), e.env.Dir)}
}

// checkMounts refuses mounts that no engine of the extension supports.
func (e *extension) checkMounts(spec sandboxer.Spec) error {
	if len(spec.Mounts) == 0 {
		return nil
	}
	at, err := e.where(spec.Host)
	for _, n := range at.Names() {
		if err = at[n].isHere(); err == nil {
			break
		}
	}
	if err != nil {
		return err
	}
	sources, err := e.opener().OpenToShow(spec)
	mounts.Close(sources)
	return err
}

const copied = "give a directory as the repo input: it is copied"

// isHere refuses an engine on another machine.
func (h *host) isHere() error {
	if h.socket == "" {
		return sandboxer.E(sandboxer.Unsupported, nil, "the engine %s may be on another machine, where a path of the server's means nothing: mounts take an engine at a Unix socket", h.name).WithHint(copied)
	}
	return nil
}

// cannotMount refuses mounts from the server's machine.
func (h *host) cannotMount(err error, why string) error {
	return sandboxer.E(sandboxer.Unsupported, err, "the engine %s cannot mount what is on the server's machine: %s", h.name, why).WithHint(copied)
}

const apart = "server and engine have mount namespaces of their own, as a service of systemd with PrivateMounts or ProtectSystem has"

// unseen explains err if it comes from an engine that does not see what is shown to it.
func (h *host) unseen(err error) error {
	if err == nil || !strings.Contains(strings.ToLower(sandboxer.Message(err)), "bind source path does not exist") {
		return err
	}
	return h.cannotMount(err, apart)
}

// mountable refuses, as Unsupported, an engine that does not see the server's mounts, or whose containers have other owners of files
// than this machine. An engine in a mount namespace of its own, behind a socket of systemd, is detected only at a mount (unseen,
// haveMounts).
func (e *extension) mountable(ctx context.Context, h *host, info engine.Info) error {
	if err := h.isHere(); err != nil {
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

// space is where the engine sees mounts. Unsupported: the server may not mount there.
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
		return nil, sandboxer.E(sandboxer.Unavailable, errors.Join(cerr, err), "cannot check whether the engine %s sees the server's mounts", h.name)
	}
	return space, nil
}

// haveMounts refuses, as Unsupported, a started container that lacks the mounts: Podman makes a directory if it does not see a source,
// and its settings may give containers other owners of files. No program of the image has run yet.
func (e *extension) haveMounts(ctx context.Context, b *box, sources []*mounts.Source) error {
	c, err := b.host.api.InspectContainer(ctx, b.container)
	if err != nil {
		return err
	}
	p, err := b.host.here(c)
	if errors.Is(err, engine.ErrElsewhere) {
		return b.host.cannotMount(err, "its containers' processes are not on this machine")
	}
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "cannot list the mounts of sandbox %s", b.id)
	}
	defer p.Close()
	for _, s := range sources {
		has, err := s.In(p.PID)
		if err == nil {
			err = p.Alive() // so the mounts were that process's
		}
		if err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "cannot check whether sandbox %s has %s mounted", b.id, s.Mount.Source)
		}
		if !has {
			return b.host.cannotMount(nil, apart+"; or it maps user IDs")
		}
	}
	return nil
}

// place is where a sandbox's mounts are shown to the engine while it is made. The caller holds the sandbox's lock.
func (e *extension) place(key string) string { return e.dir("mount", key) }

// hide removes a sandbox's mounts from there.
func (e *extension) hide(key string) error {
	err := mounts.Hide(e.place(key), nil)
	if !errors.Is(err, syscall.EBUSY) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), undoTime) // the caller may have left
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

// hideAll removes the mounts that dead processes were showing to engines.
func (e *extension) hideAll() {
	entries, err := os.ReadDir(e.dir("mount"))
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	for _, d := range entries {
		unlock, lerr := e.tryLock(d.Name())
		if lerr != nil {
			continue // a call is making it
		}
		err = errors.Join(err, e.hide(d.Name()))
		unlock()
	}
	if err != nil {
		e.log.Warn("unfinished mounts of a former server could not be removed", "extension", e.env.Extension, "err", err)
	}
}

// show shows the sources to the engine, and returns the container's mounts of them. m names their user. show makes a container that
// never runs, and removes it: its files give the user's numbers, and show whether the image has something in the way.
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
		return h.owner(ctx, look, m.User)
	}()
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if err = cmp.Or(err, h.api.RemoveContainer(undo, look)); err != nil {
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

// targetFits refuses, as Invalid, the target of s if a file of the image, or another source, is in the way.
func (e *extension) targetFits(ctx context.Context, h *host, look string, s *mounts.Source, all []*mounts.Source) error {
	var in *mounts.Source // the nearest one that contains it
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
	var parts []string // of the path to it
	for p := target; p != "/"; p = path.Dir(p) {
		parts = append(parts, p)
	}
	for _, p := range slices.Backward(parts) {
		st, err := h.api.StatFile(ctx, look, p)
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			return nil // the runtime makes it
		}
		if err == nil {
			err = mounts.Fits(s.Mount, s.IsDir || p != target, st.Mode.IsDir(), st.Mode&fs.ModeSymlink != 0)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

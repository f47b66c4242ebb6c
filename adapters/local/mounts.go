//go:build linux

package local

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/mounts"
	"github.com/sand-boxer/sandboxer/internal/users"
)

// A sandbox's mounts of directories and files of this machine reach its file server as mounts
// of their own, each at a place that belongs to the sandbox during its creation: not by the
// source's name, which another process could redirect, but the very directory that was
// checked. They map user IDs. In the sandbox they first appear at a fixed place next to the
// agent, whatever its root has, and before any guest process runs the agent moves them to
// their targets.

// mountsDir is where mounts first appear inside: each as a directory or a file.
const mountsDir = agentDir + "/mounts"

// mountAt is where the mount with that number first appears.
func mountAt(i int, isDir bool) string {
	if isDir {
		return fmt.Sprintf("%s/d%d", mountsDir, i)
	}
	return fmt.Sprintf("%s/f%d", mountsDir, i)
}

// A mountSource is an opened source of a mount.
type mountSource struct {
	*mounts.Source
	place string // where the file server finds it
}

// at is where the mount with that number first appears inside.
func (s *mountSource) at(i int) string { return mountAt(i, s.IsDir) }

// openSources opens the sources of spec's mounts. Kinds: Invalid for one that cannot be
// mounted, Denied for one that must not be, Unsupported.
func (e *extension) openSources(spec sandboxer.Spec) (sources []*mountSource, err error) {
	if len(spec.Mounts) == 0 {
		return nil, nil
	}
	switch {
	case !e.asRoot:
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "%s mounts nothing if the server is an ordinary user, because mapping the owners of files needs root", e.env.Extension).
			WithHint("run the server as root, or give a directory as the repo input: it is copied")
	case e.ids == nil || e.ids.why != nil:
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "%s mounts nothing on this machine, because it cannot give each sandbox its own user IDs", e.env.Extension).
			WithHint("the log has the reason, at the start of the server; or give a directory as the repo input: it is copied")
	}
	opened, err := e.opener().Open(spec)
	for _, s := range opened {
		sources = append(sources, &mountSource{Source: s})
	}
	return sources, err
}

// opener opens sources of mounts.
func (e *extension) opener() *mounts.Opener {
	o := &mounts.Opener{Settings: e.cfg.Mounts, Extension: e.env.Extension, Own: slices.Concat(e.env.Own, []string{e.env.Dir, filepath.Dir(e.mounts())})}
	if e.ids != nil {
		o.CanMap = e.ids.canMap
	}
	return o
}

func closeSources(sources []*mountSource) {
	for _, s := range sources {
		mounts.Close([]*mounts.Source{s.Source})
	}
}

// showSources mounts the sources at their places.
func (e *extension) showSources(sources []*mountSource, who users.User, base uint32) error {
	for _, s := range sources {
		if err := e.showSource(s, who, base); err != nil {
			if _, told := errors.AsType[*sandboxer.Error](err); told {
				return err
			}
			return sandboxer.E(sandboxer.Unavailable, err, "mount %s cannot be made", s.Mount.Source)
		}
	}
	return nil
}

func (e *extension) showSource(s *mountSource, who users.User, base uint32) error {
	var err error
	if s.IsDir {
		err = walkable(s.place)
	} else if err = walkable(filepath.Dir(s.place)); err == nil {
		var f *os.File
		if f, err = os.OpenFile(s.place, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600); err == nil {
			err = f.Close()
		}
	}
	if err != nil {
		return err
	}
	fd, err := s.Tree(who.UID, who.GID, base)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return os.NewSyscallError("move_mount", unix.MoveMount(fd, "", unix.AT_FDCWD, s.place, unix.MOVE_MOUNT_F_EMPTY_PATH))
}

// identify returns the user called name, before the sandbox exists.
func identify(name string, skel *skeleton, img *image) (users.User, error) {
	if isRoot(name) {
		return root, nil
	}
	var passwd []byte
	var err error
	if img == nil {
		passwd, err = os.ReadFile(filepath.Join(skel.dir, "etc/passwd"))
	} else {
		passwd, err = img.read("etc/passwd")
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return users.User{}, sandboxer.E(sandboxer.Invalid, err, "the user %q of the sandbox cannot be looked up: /etc/passwd cannot be read", name)
	}
	return users.Find(name, bytes.NewReader(passwd), nil)
}

// read returns the beginning of a file of the image, which must not be a link.
func (i *image) read(name string) ([]byte, error) {
	f, err := os.Open(i.path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fsys, err := erofs.Open(f)
	if err != nil {
		return nil, err
	}
	r, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(io.LimitReader(r, maxSmall))
}

// mountTargets moves the sandbox's mounts to their targets. No guest process has run yet.
func (b *liveSandbox) mountTargets(ctx context.Context, mounts []sandboxer.Mount) error {
	if len(mounts) == 0 {
		return nil
	}
	at := map[string]string{} // target to first place
	for _, m := range b.c.Spec.Mounts {
		var i int
		var kind rune
		if n, _ := fmt.Sscanf(m.Destination, mountsDir+"/%c%d", &kind, &i); n == 2 && i < len(mounts) {
			at[mounts[i].Target] = m.Destination
		}
	}
	args := []string{agentPath, "mount", mountsDir}
	for _, m := range slices.SortedFunc(slices.Values(mounts), func(a, b sandboxer.Mount) int { return cmp.Compare(a.Target, b.Target) }) {
		args = append(args, at[m.Target], m.Target)
	}
	said, err := memoryFile("sandboxer")
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "no memory for the output of the agent")
	}
	defer said.Close()
	ws, err := b.run(ctx, append(slices.Clone(ownCapabilities), "CAP_SYS_ADMIN"), map[int]*os.File{2: said}, args...)
	if err != nil {
		return b.failed(ctx, err, "mounting")
	}
	if code := ws.ExitStatus(); code != 0 {
		text, _ := io.ReadAll(io.NewSectionReader(said, 0, 1024))
		kind := sandboxer.Failed
		if code == 2 {
			kind = sandboxer.Invalid
		}
		return sandboxer.E(kind, nil, "%s", strings.TrimPrefix(strings.TrimSpace(string(text)), "sandboxer-agent: "))
	}
	return nil
}

// sameMounts reports whether two lists mount at the same targets, with the same rights, in the
// same order. The sources may differ: a snapshot contains nothing of them.
func sameMounts(a, b []sandboxer.Mount) bool {
	return slices.EqualFunc(a, b, func(a, b sandboxer.Mount) bool { return a.Target == b.Target && a.ReadOnly == b.ReadOnly })
}

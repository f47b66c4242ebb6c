package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/users"
)

// owner finds the numbers of a user in the passwd and group files of a container that does not run.
func (h *host) owner(ctx context.Context, container, user string) (uid, gid int, err error) {
	if user == "" {
		return 0, 0, nil
	}
	passwd, err := h.tableOf(ctx, container, "/etc/passwd")
	if err != nil {
		return 0, 0, err
	}
	var group []byte
	if users.NamesGroup(user) {
		if group, err = h.tableOf(ctx, container, "/etc/group"); err != nil {
			return 0, 0, err
		}
	}
	u, err := users.Find(user, bytes.NewReader(passwd), bytes.NewReader(group))
	return int(u.UID), int(u.GID), err
}

// maxTable is how much of such a file is read.
const maxTable = 1 << 20

// startable refuses, as Failed, a container with an /etc/passwd or /etc/group that does not end, is a device of the engine's machine, or is larger than maxUsers:
// an engine reads these files itself when it starts a container and when it packs its files. While it waits at a named pipe there it neither starts the container
// nor ever removes it. An image does not change, so one check is enough, except for mounts over these files.
func (h *host) startable(ctx context.Context, container, image string, mounted bool) error {
	h.mu.Lock()
	looked := h.startables[image]
	h.mu.Unlock()
	if looked && !mounted {
		return nil
	}
	switch file, wrong, err := h.unreadable(ctx, container); {
	case err != nil:
		return err
	case wrong != "":
		return sandboxer.E(sandboxer.Failed, nil, "%s of the image is %s, and the engine %s would read all of it", file, wrong, h.name).WithHint("use another image")
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

// maxUsers is the largest size of a container's /etc/passwd and /etc/group. An engine reads them into its own memory, several times their size.
const maxUsers = 1 << 20

// unreadable finds the first of these files that the engine could not read to its end, or that would fill its memory; wrong is empty for none.
func (h *host) unreadable(ctx context.Context, container string) (file, wrong string, err error) {
	for _, file := range []string{"/etc/passwd", "/etc/group"} {
		_, st, err := h.statOf(ctx, container, file)
		switch {
		case sandboxer.KindOf(err) == sandboxer.NotFound:
		case err != nil:
			return file, "", err
		case st.Mode.IsDir(): // reading it fails
		case !st.Mode.IsRegular():
			return file, "no file", nil
		case st.Size > maxUsers:
			return file, fmt.Sprintf("larger than %d MiB", maxUsers>>20), nil
		}
	}
	return "", "", nil
}

// statOf describes a file of a container that does not run as a program in it would see it, through a link. It also
// returns the path at the end of the link.
func (h *host) statOf(ctx context.Context, container, file string) (string, engine.FileStat, error) {
	st, err := h.api.StatFile(ctx, container, file)
	if err == nil && st.Mode&fs.ModeSymlink != 0 {
		file = st.Target
		st, err = h.api.StatFile(ctx, container, file)
	}
	return file, st, err
}

// tableOf reads one of these files from a container that does not run, as a program in it would: through a link. A missing file is
// empty.
func (h *host) tableOf(ctx context.Context, container, file string) (text []byte, err error) {
	defer func() {
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			err = nil
		}
	}()
	file, st, err := h.statOf(ctx, container, file) // the archive of a link contains only the link
	if err == nil && !st.Mode.IsRegular() {
		err = sandboxer.E(sandboxer.Failed, nil, "the sandbox's user cannot be looked up: %s of the image is not a file", file).WithHint("use another image")
	}
	if err != nil {
		return nil, err
	}
	err = h.api.GetArchive(ctx, container, file, func(r io.Reader) error {
		tr := tar.NewReader(r)
		head, err := tr.Next()
		if err == nil && head.Typeflag == tar.TypeReg {
			text, err = io.ReadAll(io.LimitReader(tr, maxTable))
		}
		return err
	})
	return text, err
}

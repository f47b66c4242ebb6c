package agent

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"math"
	"net/http"
	"net/url"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// archiveDir returns the directory of a request, and its user. If it returns false, it has
// already answered.
func (s *server) archiveDir(w http.ResponseWriter, r *http.Request) (string, user, bool) {
	u, ok := s.fileUser(w, r)
	if !ok {
		return "", user{}, false
	}
	dir, err := s.resolve(r.URL.Query().Get("path"), u)
	if err == nil {
		err = kernelPath(filepath.Join(dir, "x"))
	}
	if err != nil {
		writeFailure(w, err)
		return "", user{}, false
	}
	return dir, u, true
}

// serveArchive packs a directory of the sandbox.
func (s *server) serveArchive(w http.ResponseWriter, r *http.Request) {
	dir, _, ok := s.archiveDir(w, r)
	if !ok {
		return
	}
	switch fi, err := os.Stat(dir); {
	case err != nil:
		writeFailure(w, err)
		return
	case !fi.IsDir():
		writeFailure(w, sandboxer.E(sandboxer.Invalid, nil, "path '%s' is not a directory", dir))
		return
	}
	w.Header().Set("Content-Type", "application/x-tar")
	w.Header().Set("Trailer", kindHeader+", "+hintHeader+", "+errorTrailer)
	out := bufio.NewWriterSize(w, 256<<10)
	t := tarrer{named: true, modes: fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky}
	err := t.write(out, dir)
	if err == nil {
		err = out.Flush()
	}
	if err == nil {
		return
	}
	s.log.Warn("packing a directory failed", "dir", dir, "err", err)
	if r.Header.Get("TE") != "trailers" {
		panic(http.ErrAbortHandler) // the status was sent: only a broken connection shows the failure
	}
	err = fileError(err)
	w.Header().Set(kindHeader, string(sandboxer.KindOf(err)))
	setHint(w.Header(), err)
	w.Header().Set(errorTrailer, url.PathEscape(cutText(err.Error(), 800)))
}

func cutText(s string, n int) string {
	if len(s) > n {
		s = s[:n] + "…"
	}
	return s
}

// serveEmpty makes a directory of the sandbox, or removes its content.
func (s *server) serveEmpty(w http.ResponseWriter, r *http.Request) {
	dir, u, ok := s.archiveDir(w, r)
	if !ok {
		return
	}
	err := makeDirs(dir, u)
	if err == nil && dir == "/" {
		err = sandboxer.E(sandboxer.Invalid, nil, "the root of the sandbox cannot be emptied")
	}
	if err == nil {
		err = emptyDir(dir)
	}
	if err != nil {
		writeFailure(w, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// emptyDir removes the content of dir, except mounts.
func emptyDir(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return emptyRoot(root)
}

func emptyRoot(root *os.Root) error {
	in, err := root.Stat(".")
	if err != nil {
		return err
	}
	d, err := root.Open(".")
	if err != nil {
		return err
	}
	all, err := d.ReadDir(-1)
	d.Close()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range all {
		if err := removeIn(root, in, e); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// removeIn removes e from the directory root, which in describes.
func removeIn(root *os.Root, in fs.FileInfo, e fs.DirEntry) error {
	name := e.Name()
	if !e.IsDir() {
		err := root.Remove(name)
		if errors.Is(err, unix.EBUSY) { // mounted
			return nil
		}
		return err
	}
	if fi, err := root.Lstat(name); err != nil || !sameDevice(in, fi) {
		return err
	}
	sub, err := root.OpenRoot(name)
	if err != nil {
		return err
	}
	err = emptyRoot(sub)
	sub.Close()
	if err != nil {
		return err
	}
	err = root.Remove(name)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) { // it is mounted, or contains a mount
		return nil
	}
	return err
}

// serveUnarchive unpacks the body into a directory of the sandbox, for the user.
func (s *server) serveUnarchive(w http.ResponseWriter, r *http.Request) {
	dir, u, ok := s.archiveDir(w, r)
	if !ok {
		return
	}
	err := makeDirs(dir, u)
	if err == nil {
		// The sandbox's disk is the bound: every directory that can be packed can be
		// unpacked.
		o := UntarOptions{Replace: true, Skipped: &Skipped{}, Limits: TarLimits{Entries: math.MaxInt, Bytes: math.MaxInt64, Depth: maxTarDepth}}
		if os.Geteuid() == 0 {
			o.Owner = &[2]int{int(u.uid), int(u.gid)}
		}
		err = Untar(r.Body, dir, o)
	}
	if err != nil {
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) {
			err = sandboxer.E(sandboxer.Denied, err, "%s", sandboxer.Message(err))
		}
		writeFailure(w, err)
		return
	}
	// The padding of a tape's last block.
	_, _ = io.CopyN(io.Discard, r.Body, 1<<20)
	w.WriteHeader(http.StatusNoContent)
}

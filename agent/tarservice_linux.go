package agent

import (
	"net/http"
	"os"
	"path/filepath"

	"github.com/sand-boxer/sandboxer"
)

// serveTar packs a directory of the sandbox.
func (s *server) serveTar(w http.ResponseWriter, r *http.Request) {
	u, ok := s.fileUser(w, r)
	if !ok {
		return
	}
	dir, err := s.resolve(r.URL.Query().Get("path"), u)
	if err != nil {
		writeFailure(w, err)
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
	if err := kernelPath(filepath.Join(dir, "x")); err != nil {
		writeFailure(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/x-tar")
	if err := Tar(w, dir); err != nil {
		s.log.Warn("packing a directory failed", "dir", dir, "err", err)
		panic(http.ErrAbortHandler) // the status is gone: only a cut tells
	}
}

// serveUntar unpacks the body into a directory of the sandbox, for the user.
func (s *server) serveUntar(w http.ResponseWriter, r *http.Request) {
	u, ok := s.fileUser(w, r)
	if !ok {
		return
	}
	q := r.URL.Query()
	dir, err := s.resolve(q.Get("path"), u)
	if err == nil {
		err = makeDirs(dir, u)
	}
	if err == nil {
		o := UntarOptions{Strip: q.Get("strip") == "true", Replace: q.Get("replace") == "true"}
		if os.Geteuid() == 0 {
			o.Owner = &[2]int{int(u.uid), int(u.gid)}
		}
		err = Untar(r.Body, dir, o)
	}
	if err != nil {
		writeFailure(w, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

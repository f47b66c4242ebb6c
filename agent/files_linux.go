package agent

import (
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// mayTransfer checks a request for /files: by token, or by a signed URL.
func (s *server) mayTransfer(w http.ResponseWriter, r *http.Request, operation string) bool {
	if s.hasToken(r) {
		return true
	}
	q := r.URL.Query()
	sig := q.Get("signature")
	if sig == "" {
		writeError(w, http.StatusUnauthorized, "missing signature query parameter or access token")
		return false
	}
	var expires time.Time
	if q.Has("signature_expiration") {
		n, err := strconv.ParseInt(q.Get("signature_expiration"), 10, 64)
		if err != nil {
			writeError(w, http.StatusUnauthorized, "signature_expiration is not a number of seconds")
			return false
		}
		expires = time.Unix(n, 0)
	}
	if !sameSecret(sig, Sign(s.settings().token, operation, q.Get("path"), q.Get("username"), expires)) {
		writeError(w, http.StatusUnauthorized, "invalid signature")
		return false
	}
	if !expires.IsZero() && time.Now().After(expires) {
		writeError(w, http.StatusUnauthorized, "signature is already expired")
		return false
	}
	return true
}

// fileUser is the user of a plain request.
func (s *server) fileUser(w http.ResponseWriter, r *http.Request) (user, bool) {
	u, err := s.userOf(r.URL.Query().Get("username"))
	if err != nil {
		w.Header().Set(kindHeader, string(sandboxer.Invalid))
		writeError(w, http.StatusUnauthorized, "%s", sandboxer.Message(err))
		return user{}, false
	}
	return u, true
}

func (s *server) serveDownload(w http.ResponseWriter, r *http.Request) {
	if !s.mayTransfer(w, r, "read") {
		return
	}
	u, ok := s.fileUser(w, r)
	if !ok {
		return
	}
	path, err := s.resolve(r.URL.Query().Get("path"), u)
	if err != nil {
		writeFailure(w, err)
		return
	}
	f, err := openRegular(path, os.O_RDONLY, 0)
	if err != nil {
		writeFailure(w, err)
		return
	}
	defer f.Close()
	if err := kernelFile(f, path); err != nil {
		writeFailure(w, err)
		return
	}
	fi, err := f.Stat()
	if err != nil {
		writeFailure(w, err)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": filepath.Base(path)}))
	h.Add("Vary", "Accept-Encoding")
	packed, plain := encodings(r.Header.Values("Accept-Encoding"))
	switch {
	case packed && r.Header.Get("Range") == "":
		h.Set("Content-Encoding", "gzip")
		z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
		if _, err := io.Copy(z, f); err != nil || z.Close() != nil {
			panic(http.ErrAbortHandler) // the status was sent: only a broken connection shows the failure
		}
	case !plain:
		h.Del("Content-Disposition")
		writeError(w, http.StatusNotAcceptable, "only gzip and identity encodings are available")
	case fi.Size() == 0: // also files of /proc, which report no size
		if _, err := io.Copy(w, f); err != nil {
			panic(http.ErrAbortHandler)
		}
	default:
		http.ServeContent(w, r, "", fi.ModTime(), f)
	}
}

// kernelFile refuses files of /proc or /sys, by whatever path: a caller that may read files
// must not read environments and memory of processes. It checks the open file, not its name.
func kernelFile(f *os.File, path string) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var st unix.Statfs_t
	if cerr := rc.Control(func(fd uintptr) { err = unix.Fstatfs(int(fd), &st) }); cerr != nil || err != nil {
		return cmp.Or(cerr, err)
	}
	return kernelType(&st, path)
}

func kernelType(st *unix.Statfs_t, path string) error {
	switch st.Type {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC:
		return sandboxer.E(sandboxer.Denied, nil, "path '%s' belongs to the kernel and is not served", path).WithHint("read it with a command: cat")
	}
	return nil
}

// isKernels reports whether a directory is on a file system of the kernel.
func isKernels(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && kernelType(&st, dir) != nil
}

// kernelPath refuses to describe files in /proc or /sys. It checks the file's directory, with
// links followed, and not the file's target.
func kernelPath(path string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &st); err != nil {
		return nil // describing it reports why
	}
	return kernelType(&st, path)
}

// encodings reports which of our content encodings a client accepts.
func encodings(accept []string) (packed, plain bool) {
	plain = true
	for _, line := range accept {
		for item := range strings.SplitSeq(line, ",") {
			name, params, _ := strings.Cut(strings.TrimSpace(item), ";")
			q := strings.TrimSpace(params)
			refused := q == "q=0" || strings.HasPrefix(q, "q=0.0") && strings.Trim(q, "q=0.") == ""
			switch strings.ToLower(strings.TrimSpace(name)) {
			case "gzip":
				packed = !refused
			case "identity", "*":
				plain = !refused
			}
		}
	}
	return packed, plain
}

// openRegular opens a regular file and never blocks, as opening a pipe would.
func openRegular(path string, flag int, mode fs.FileMode) (*os.File, error) {
	f, err := os.OpenFile(path, flag|unix.O_NONBLOCK|unix.O_NOCTTY, mode)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, sandboxer.E(sandboxer.NotFound, err, "path '%s' does not exist", path)
	case errors.Is(err, unix.EISDIR):
		return nil, sandboxer.E(sandboxer.Invalid, err, "path '%s' is a directory", path)
	case errors.Is(err, unix.ENXIO):
		return nil, sandboxer.E(sandboxer.Invalid, err, "path '%s' is not a regular file", path)
	case err != nil:
		return nil, err
	}
	fi, err := f.Stat()
	switch {
	case err != nil:
	case fi.IsDir():
		err = sandboxer.E(sandboxer.Invalid, nil, "path '%s' is a directory", path)
	case !fi.Mode().IsRegular():
		err = sandboxer.E(sandboxer.Invalid, nil, "path '%s' is not a regular file", path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// followed resolves path if it is a symbolic link, even to a missing file.
func followed(path string) (string, error) {
	for range 40 {
		target, err := os.Readlink(path)
		if err != nil {
			return path, nil
		}
		if !filepath.IsAbs(target) {
			target = filepath.Dir(path) + "/" + target
		}
		// Not by filepath.Dir, which treats a link before ".." as a directory.
		at := strings.LastIndexByte(target, '/')
		dir, err := filepath.EvalSymlinks(target[:at] + "/")
		if err != nil {
			return "", err
		}
		path = dir + "/" + target[at+1:]
	}
	return "", sandboxer.E(sandboxer.Invalid, unix.ELOOP, "path '%s' is a link that leads in a circle", path)
}

func bodyFailed(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) { // the file failed, not the body
		return err
	}
	return sandboxer.E(sandboxer.Invalid, err, "the body ended too early: %v", err)
}

func statOf(f *os.File) (st unix.Stat_t, err error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return st, err
	}
	if cerr := rc.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); cerr != nil {
		return st, cerr
	}
	return st, err
}

// A finish is what a file gets besides its content once that is written.
type finish struct {
	mode     fs.FileMode
	uid, gid int
	meta     map[string]string
}

func (a finish) apply(f *os.File) error {
	if a.uid >= 0 {
		if err := f.Chown(a.uid, a.gid); err != nil {
			return err
		}
	}
	if err := f.Chmod(a.mode); err != nil {
		return err
	}
	return setMetadata(f, a.meta)
}

// inPlace gives the file f the content r, of size bytes if that is not negative. With a known size
// it notices a full disk first; any other failure midway loses the old content.
func (a finish) inPlace(f *os.File, r io.Reader, size int64) error {
	if err := reserve(f, size); err != nil {
		return err
	}
	n, err := copyAll(f, r)
	if err == nil {
		err = f.Truncate(n)
	}
	if err != nil {
		return bodyFailed(err)
	}
	// After the content: writing clears set-user-ID and similar bits.
	if err := f.Chmod(a.mode); err != nil && !errors.Is(err, fs.ErrPermission) {
		return err
	}
	return setMetadata(f, a.meta)
}

// reserve allocates size bytes in f, or nothing if that is negative.
func reserve(f *os.File, size int64) error {
	if size <= 0 {
		return f.Truncate(0)
	}
	st, err := statOf(f)
	if err != nil || st.Size >= size {
		return err
	}
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	cerr := rc.Control(func(fd uintptr) { err = unix.Fallocate(int(fd), 0, 0, size) })
	if isFull(err) {
		return errors.Join(&fs.PathError{Op: "fallocate", Path: f.Name(), Err: err}, f.Truncate(st.Size))
	}
	return cerr // a file system that reserves nothing fails during the write
}

// copyAttrs copies the extended attributes of from to to, as far as to can have them.
func copyAttrs(from, to *os.File) {
	rc, err := from.SyscallConn()
	rto, terr := to.SyscallConn()
	if err != nil || terr != nil {
		return
	}
	_ = rc.Control(func(fd uintptr) {
		_ = rto.Control(func(tfd uintptr) {
			for _, name := range attrs("", func(b []byte) (int, error) { return unix.Flistxattr(int(fd), b) }) {
				if !strings.HasPrefix(name, "user.") && name != "system.posix_acl_access" {
					continue
				}
				b := make([]byte, 64<<10)
				if n, err := unix.Fgetxattr(int(fd), name, b); err == nil {
					_ = unix.Fsetxattr(int(tfd), name, b[:n], 0)
				}
			}
		})
	})
}

const (
	metadataHeader = "X-Metadata-"
	metadataAttr   = "user.e2b."
	maxMetadata    = 4096
)

// metadataOf collects a file's metadata from the headers of its upload.
func metadataOf(h http.Header) (map[string]string, error) {
	var meta map[string]string
	size := 0
	for k, v := range h {
		key, ok := strings.CutPrefix(k, metadataHeader)
		if !ok || key == "" || len(v) == 0 {
			continue
		}
		if meta == nil {
			meta = map[string]string{}
		}
		key = strings.ToLower(key)
		meta[key] = v[0]
		size += len(key) + len(v[0])
	}
	if size > maxMetadata {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the metadata takes %d bytes; at most %d are kept", size, maxMetadata)
	}
	return meta, nil
}

// setMetadata replaces the whole set of f's metadata.
func setMetadata(f *os.File, meta map[string]string) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	cerr := rc.Control(func(fd uintptr) {
		for _, name := range attrs(metadataAttr, func(b []byte) (int, error) { return unix.Flistxattr(int(fd), b) }) {
			if _, keep := meta[strings.TrimPrefix(name, metadataAttr)]; !keep {
				_ = unix.Fremovexattr(int(fd), name)
			}
		}
		for k, v := range meta {
			if err = unix.Fsetxattr(int(fd), metadataAttr+k, []byte(v), 0); err != nil {
				err = fmt.Errorf("cannot keep the metadata of '%s': %w", f.Name(), err)
				return
			}
		}
	})
	if err == nil {
		err = cerr
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		return sandboxer.E(sandboxer.Unsupported, err, "the file system of '%s' keeps no metadata", f.Name())
	}
	return err
}

// attrs lists the names of a file's extended attributes that begin with prefix.
func attrs(prefix string, list func([]byte) (int, error)) []string {
	n, err := list(nil)
	if err != nil || n <= 0 {
		return nil
	}
	b := make([]byte, n+256)
	if n, err = list(b); err != nil {
		return nil
	}
	var names []string
	for name := range strings.SplitSeq(string(b[:n]), "\x00") {
		if name != "" && strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	return names
}

// metadata reads the metadata of a file.
func metadata(path string) map[string]string {
	var meta map[string]string
	for _, name := range attrs(metadataAttr, func(b []byte) (int, error) { return unix.Llistxattr(path, b) }) {
		b := make([]byte, maxMetadata)
		n, err := unix.Lgetxattr(path, name, b)
		if err != nil {
			continue
		}
		if meta == nil {
			meta = map[string]string{}
		}
		meta[strings.TrimPrefix(name, metadataAttr)] = string(b[:n])
	}
	return meta
}

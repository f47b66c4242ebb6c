package agent

import (
	"cmp"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
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
			panic(http.ErrAbortHandler) // the status is gone: only a cut tells
		}
	case !plain:
		h.Del("Content-Disposition")
		writeError(w, http.StatusNotAcceptable, "only gzip and identity encodings are available")
	case fi.Size() == 0: // also files of /proc, which do not know their size
		if _, err := io.Copy(w, f); err != nil {
			panic(http.ErrAbortHandler)
		}
	default:
		http.ServeContent(w, r, "", fi.ModTime(), f)
	}
}

// kernelFile refuses what is open in /proc or /sys, by whatever path: environments and
// memory of processes are not for who may read files. It asks the file, not its name.
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
		return sandboxer.E(sandboxer.Denied, nil, "path '%s' is the kernel's, not a file: it is not served", path).WithHint("read it by a command: cat")
	}
	return nil
}

// isKernels reports whether a directory is of a file system of the kernel's.
func isKernels(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && kernelType(&st, dir) != nil
}

// kernelPath refuses to describe what lies in /proc or /sys. What it lies in counts, with
// links followed, and not what it points to.
func kernelPath(path string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &st); err != nil {
		return nil // describing it says why
	}
	return kernelType(&st, path)
}

// encodings says which content encodings a client accepts of those we have.
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

// openRegular opens a regular file and never waits for anybody, as a pipe would.
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

// An uploaded file, as answered to its sender.
type uploaded struct {
	Name     string            `json:"name"`
	Path     string            `json:"path"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

func (s *server) serveUpload(w http.ResponseWriter, r *http.Request) {
	if !s.mayTransfer(w, r, "write") {
		return
	}
	u, ok := s.fileUser(w, r)
	if !ok {
		return
	}
	done, err := s.upload(r, u)
	if err != nil {
		writeFailure(w, err)
		return
	}
	writeJSON(w, done)
}

func (s *server) upload(r *http.Request, u user) ([]uploaded, error) {
	meta, err := metadataOf(r.Header)
	if err != nil {
		return nil, err
	}
	var mode *fs.FileMode
	if m := r.Header.Get(modeHeader); m != "" {
		n, err := strconv.ParseUint(m, 8, 12)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s %q is not an octal file mode", modeHeader, m)
		}
		fm := goMode(uint32(n))
		mode = &fm
	}
	var body io.Reader = r.Body
	switch enc := strings.ToLower(r.Header.Get("Content-Encoding")); enc {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(body)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "the body is not gzip, as Content-Encoding says")
		}
		body = z
	default:
		return nil, sandboxer.E(sandboxer.Invalid, nil, "content encoding %q is not supported", enc)
	}
	target := r.URL.Query().Get("path")
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the content type cannot be read: want multipart/form-data or application/octet-stream")
	}
	switch kind {
	case "application/octet-stream":
		if target == "" {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "the query lacks path, which names the file of a raw body")
		}
		up, err := s.save(target, u, mode, meta, body)
		return []uploaded{up}, err
	case "multipart/form-data":
	default:
		return nil, sandboxer.E(sandboxer.Invalid, nil, "content type %q: want multipart/form-data or application/octet-stream", kind)
	}
	done := []uploaded{}
	seen := map[string]bool{}
	for parts := multipart.NewReader(body, params["boundary"]); ; {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			return done, nil
		}
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "the multipart body cannot be read: %v", err)
		}
		if part.FormName() != "file" {
			continue
		}
		name := target
		if name == "" {
			// Part.FileName would strip the directories.
			_, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			if err != nil || params["filename"] == "" {
				return nil, sandboxer.E(sandboxer.Invalid, err, "a part named file has no filename and the query no path")
			}
			name = params["filename"]
		}
		path, err := s.resolve(name, u)
		if err != nil {
			return nil, err
		}
		if seen[path] {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "path '%s' was uploaded twice in one request", path)
		}
		seen[path] = true
		up, err := s.save(name, u, mode, meta, part)
		if err != nil {
			return nil, err
		}
		done = append(done, up)
	}
}

// copyBuffers serve bulk transfers; the few that run at a time share them.
var copyBuffers = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// copyAll copies through a large buffer, past the small one of io.Copy.
func copyAll(w io.Writer, r io.Reader) (int64, error) {
	b := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(b)
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, *b)
}

// save writes one file for u, with its parents.
func (s *server) save(name string, u user, mode *fs.FileMode, meta map[string]string, r io.Reader) (up uploaded, err error) {
	path, err := s.resolve(name, u)
	if err != nil {
		return up, err
	}
	if strings.HasSuffix(name, "/") {
		return up, sandboxer.E(sandboxer.Invalid, nil, "path '%s' names a directory", name)
	}
	if err := makeDirs(filepath.Dir(path), u); err != nil {
		return up, err
	}
	f, err := openRegular(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return up, err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
	}()
	if mode == nil {
		m := fs.FileMode(0o644)
		mode = &m
	}
	if os.Geteuid() == 0 {
		if err := f.Chown(int(u.uid), int(u.gid)); err != nil {
			return up, err
		}
	}
	if err := f.Chmod(*mode); err != nil && !errors.Is(err, fs.ErrPermission) {
		return up, err
	}
	if err := setMetadata(f, meta); err != nil {
		return up, err
	}
	if _, err := copyAll(f, r); err != nil {
		var pe *fs.PathError
		if !errors.As(err, &pe) { // the body failed, not the file
			err = sandboxer.E(sandboxer.Invalid, err, "the body ended before its time: %v", err)
		}
		return up, err
	}
	if mode.Perm() != *mode { // writing drops set-user-ID and its kin
		if err := f.Chmod(*mode); err != nil {
			return up, err
		}
	}
	return uploaded{Name: filepath.Base(path), Path: path, Type: "file", Metadata: meta}, nil
}

// makeDirs makes dir and its parents; those that were missing belong to u.
func makeDirs(dir string, u user) error {
	switch fi, err := os.Stat(dir); {
	case err == nil && fi.IsDir():
		return nil
	case err == nil:
		return sandboxer.E(sandboxer.Invalid, unix.ENOTDIR, "path '%s' is a file, not a directory", dir)
	case errors.Is(err, unix.ENOTDIR):
		return sandboxer.E(sandboxer.Invalid, err, "path '%s' leads through a file", dir)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := makeDirs(filepath.Dir(dir), u); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		if errors.Is(err, fs.ErrExist) { // somebody else was faster
			return nil
		}
		return err
	}
	if os.Geteuid() == 0 && (u.uid != 0 || u.gid != 0) {
		return os.Lchown(dir, int(u.uid), int(u.gid))
	}
	return nil
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
		for _, name := range attrs(func(b []byte) (int, error) { return unix.Flistxattr(int(fd), b) }) {
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

// attrs lists the names of a file's metadata.
func attrs(list func([]byte) (int, error)) []string {
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
		if strings.HasPrefix(name, metadataAttr) {
			names = append(names, name)
		}
	}
	return names
}

// metadata reads the metadata of a file.
func metadata(path string) map[string]string {
	var meta map[string]string
	for _, name := range attrs(func(b []byte) (int, error) { return unix.Llistxattr(path, b) }) {
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

package agent

import (
	"compress/gzip"
	"crypto/rand"
	"errors"
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

// An uploaded file, as reported to its sender.
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

// copyBuffers serve bulk transfers; few run at a time and share them.
var copyBuffers = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// copyAll copies through a large buffer, instead of the small one of io.Copy.
func copyAll(w io.Writer, r io.Reader) (int64, error) {
	b := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(b)
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, *b)
}

// save writes one file for u, with its parents. It writes the content under a temporary name and
// renames that at the end, so that an interrupted upload changes nothing. An existing file keeps its
// owner and its attributes, and its mode unless another is given.
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
	up = uploaded{Name: filepath.Base(path), Path: path, Type: "file", Metadata: meta}
	real, err := followed(path)
	if err != nil {
		return up, err
	}
	old, err := openRegular(real, os.O_WRONLY, 0)
	if err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
		return up, err
	}
	as := finish{mode: 0o644, uid: -1, gid: -1, meta: meta}
	if os.Geteuid() == 0 {
		as.uid, as.gid = int(u.uid), int(u.gid)
	}
	var was unix.Stat_t
	if old != nil {
		defer old.Close()
		if was, err = statOf(old); err != nil {
			return up, err
		}
		as.mode, as.uid, as.gid = goMode(was.Mode).Perm(), int(was.Uid), int(was.Gid)
	}
	if mode != nil {
		as.mode = *mode
	}
	dir := filepath.Dir(real)
	s.drafts.sweep(dir)
	draft, err := os.OpenFile(filepath.Join(dir, draftPrefix+rand.Text()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if old != nil && (errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS)) {
		return up, as.inPlace(old, r, -1) // the directory accepts no other file
	}
	if err != nil {
		return up, err
	}
	defer func() {
		draft.Close()
		os.Remove(draft.Name())
		var pe *fs.PathError
		var le *os.LinkError
		switch { // the caller does not know the name of the draft
		case errors.As(err, &le):
			err = &fs.PathError{Op: le.Op, Path: path, Err: le.Err}
		case errors.As(err, &pe) && pe.Path == draft.Name():
			pe.Path = path
		}
	}()
	size, err := copyAll(draft, r)
	if err != nil {
		return up, bodyFailed(err)
	}
	if old == nil || was.Nlink == 1 {
		if old != nil {
			copyAttrs(old, draft)
		}
		if err = as.apply(draft); err == nil {
			err = draft.Close()
		}
		if err == nil {
			err = os.Rename(draft.Name(), real)
		}
		if err == nil || old == nil || !errors.Is(err, fs.ErrPermission) && !errors.Is(err, unix.EBUSY) {
			return up, err
		}
	}
	// The file has other names, is a mount, or belongs to another user.
	whole, err := os.Open(draft.Name())
	if err != nil {
		return up, err
	}
	defer whole.Close()
	return up, as.inPlace(old, whole, size)
}

// draftAge is how long a draft must be unwritten before it is removed.
const draftAge = time.Hour

// drafts remembers when directories were last searched for old drafts.
type drafts struct {
	mu   sync.Mutex
	seen map[string]time.Time
}

func (d *drafts) sweep(dir string) {
	d.mu.Lock()
	due := time.Since(d.seen[dir]) > draftAge
	if due {
		if d.seen == nil || len(d.seen) >= 1000 {
			d.seen = map[string]time.Time{}
		}
		d.seen[dir] = time.Now()
	}
	d.mu.Unlock()
	if !due {
		return
	}
	f, err := os.Open(dir)
	if err != nil {
		return
	}
	defer f.Close()
	for {
		names, err := f.Readdirnames(maxPage)
		for _, n := range names {
			if !strings.HasPrefix(n, draftPrefix) {
				continue
			}
			name := filepath.Join(dir, n)
			if fi, err := os.Lstat(name); err == nil && fi.Mode().IsRegular() && time.Since(fi.ModTime()) > draftAge {
				_ = os.Remove(name)
			}
		}
		if err != nil {
			return
		}
	}
}

// makeDirs makes dir and its parents; those that it makes belong to u.
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
		if errors.Is(err, fs.ErrExist) { // another process was faster
			return nil
		}
		return err
	}
	if os.Geteuid() == 0 && (u.uid != 0 || u.gid != 0) {
		return os.Lchown(dir, int(u.uid), int(u.gid))
	}
	return nil
}

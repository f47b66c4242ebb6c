//go:build linux

package local

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/erofs/go-erofs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/usernet"
	"github.com/sand-boxer/sandboxer/internal/users"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// An image is a root file system in one EROFS file that gVisor itself reads: it needs no
// file server, and all sandboxes share its pages. Owners are inside the file, so that an
// ordinary user can make one.
type image struct {
	path   string
	pinned string // the reference with its digest, if it came from a registry
	config v1.Config
	// release lets the store remove the image, unless a record uses it.
	release func()
}

// imageStore makes the images that profiles name, once per content.
type imageStore struct {
	dir   string
	store *images.Store
	// whole are the images whose files were read through since the start, by key: their inode
	// data (*os.FileInfo).
	whole sync.Map
	// overdue says that the store has grown since it was pruned.
	overdue atomic.Bool
}

// newImageStore opens the store in dir. It never removes images that live sandboxes
// use.
func (e *extension) newImageStore(dir string) (*imageStore, error) {
	c := e.cfg.Images
	never, err := e.cfg.never()
	if err != nil {
		return nil, err
	}
	store, err := images.New(dir, images.Options{
		Settings: c.Settings, Keep: c.Keep,
		Limits: images.Limits{Download: c.MaxDownload, Unpacked: c.MaxUnpacked, Entries: c.MaxEntries},
		InUse:  e.imagesInUse, Reach: usernet.Public(never),
	})
	if err != nil {
		return nil, err
	}
	s := &imageStore{dir: dir, store: store}
	if err := os.MkdirAll(s.empty(), 0o755); err != nil {
		return nil, err
	}
	if _, err := store.Prune(); err != nil && e.env.Log != nil {
		e.env.Log.Warn("images could not be pruned", "extension", e.env.Extension, "err", err)
	}
	return s, nil
}

// imagesInUse names the files of images that sandboxes and snapshots need.
func (e *extension) imagesInUse() (map[string]bool, error) {
	boxes, err := os.ReadDir(e.dir("box"))
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, d := range boxes {
		r, err := e.record(d.Name())
		switch {
		case err == nil && r.ImageFile != "":
			out[r.ImageFile] = true
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return nil, err // it may be any of them
		}
	}
	_, saved, err := e.savedRoots()
	for _, file := range saved {
		out[file] = true
	}
	return out, err
}

// empty is the directory that gVisor gets as the root of a sandbox whose real root is an
// image.
func (s *imageStore) empty() string { return filepath.Join(s.dir, "empty") }

// get returns the image for ref; it pulls and converts a new one. The caller must
// release it. For vouched see images.CheckName.
func (s *imageStore) get(ctx context.Context, ref string, vouched bool) (_ *image, err error) {
	if err := s.store.CheckName(ref, vouched); err != nil {
		return nil, err
	}
	defer func() {
		var se *sandboxer.Error
		switch {
		case err == nil, errors.As(err, &se), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
			err = diskError(err, "making image "+ref)
		default:
			err = sandboxer.E(sandboxer.Failed, err, "image %q cannot be used: %v", ref, err)
		}
	}()
	release, err := s.store.Hold(ctx)
	if err != nil {
		return nil, err
	}
	grown := true
	done := func() {
		release()
		if grown {
			s.overdue.Store(true)
		}
		if s.overdue.Swap(false) {
			if done, _ := s.store.Prune(); !done { // the next open reports the error
				s.overdue.Store(true) // for the process that holds it now
			}
		}
	}
	defer func() {
		if err != nil {
			done()
		}
	}()
	access := s.store.Access(vouched)
	src, err := s.store.Open(ctx, ref, access)
	if err != nil {
		return nil, err
	}
	if wd := src.Config.WorkingDir; wd != "" {
		if src.Config.WorkingDir = path.Clean("/" + wd); inside.Reserved(src.Config.WorkingDir) {
			return nil, sandboxer.E(sandboxer.Failed, nil, "image %q: its working directory %s is outside the sandbox's files", ref, wd)
		}
	}
	what := imageFormat + "\x00" + src.ID
	if access != images.Operator {
		what += "\x00public" // a caller that can name its configuration may not be allowed to read it
	}
	sum := sha256.Sum256([]byte(what))
	key := hex.EncodeToString(sum[:])[:32]
	img := &image{path: filepath.Join(s.dir, key+".erofs"), pinned: src.Pinned, config: src.Config, release: done}
	unlock, err := s.store.Lock(ctx, key)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if s.isWhole(key) {
		grown = false
	} else {
		if err := s.convert(ctx, key, ref, src); err != nil {
			return nil, err
		}
	}
	s.touch(key)
	return img, img.settle(ref)
}

// imageFormat changes whenever the conversion of an image does.
const imageFormat = "4"

// settle checks the requirements of the image's configuration, and brings it into the
// form that the rest of this package uses.
func (i *image) settle(ref string) error {
	user, err := i.user()
	if err != nil {
		return sandboxer.E(sandboxer.Failed, err, "image %q: its user %q cannot be found: %v", ref, i.config.User, err).
			WithHint("name another user in the profile")
	}
	i.config.User = user
	return inside.CheckImageEnv(ref, i.config.Env)
}

// user returns the image's user as a name, or as uid:gid if there is also a group,
// looked up in the image.
func (i *image) user() (string, error) {
	name, group, both := strings.Cut(i.config.User, ":")
	if name == "" {
		if both {
			name = "0"
		} else {
			return "", nil
		}
	}
	_, nameErr := strconv.ParseUint(name, 10, 32)
	if nameErr == nil && !users.NamesGroup(i.config.User) {
		return i.config.User, nil
	}
	passwd, err := i.read("etc/passwd")
	if err != nil && nameErr != nil {
		return "", errors.New("the image has no readable /etc/passwd")
	}
	if !both {
		_, err := users.Find(name, bytes.NewReader(passwd), nil)
		return name, err
	}
	groups, err := i.read("etc/group")
	if err != nil && users.NamesGroup(i.config.User) {
		return "", errors.New("the image has no readable /etc/group")
	}
	u, err := users.Find(name+":"+group, bytes.NewReader(passwd), bytes.NewReader(groups))
	return fmt.Sprintf("%d:%d", u.UID, u.GID), err
}

// hasEtc reports whether /etc is a directory of the image, and not a link to one.
func (i *image) hasEtc() (bool, error) {
	f, err := os.Open(i.path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	fsys, err := erofs.Open(f)
	if err != nil {
		return false, err
	}
	all, err := fs.ReadDir(fsys, ".")
	return slices.ContainsFunc(all, func(d fs.DirEntry) bool { return d.Name() == "etc" && d.IsDir() }), err
}

// about is what operators see of the image of a sandbox.
func (i *image) about() map[string]string {
	out := map[string]string{}
	if i.pinned != "" {
		out["image"] = i.pinned
	}
	if len(i.config.Labels) > 0 {
		if data, err := json.Marshal(i.config.Labels); err == nil && len(data) <= maxLabels {
			out["image_labels"] = string(data)
		}
	}
	return out
}

// maxLabels bounds how much of an image's labels is kept for every sandbox.
const maxLabels = 4 << 10

// convert writes the image's file.
func (s *imageStore) convert(ctx context.Context, key, ref string, src *images.Source) error {
	tmp := filepath.Join(s.dir, key+".tmp")
	if err := os.RemoveAll(tmp); err != nil { // of a process that died during a conversion
		return err
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	f, err := os.Create(filepath.Join(tmp, "image"))
	if err != nil {
		return err
	}
	defer f.Close()
	t, err := src.Tree(ctx)
	if err != nil {
		return err
	}
	if err := s.complete(t, src.Config); err != nil {
		return err
	}
	if err := t.Write(ctx, ref, f, tmp); err != nil {
		return err
	}
	if err := errors.Join(f.Chmod(0o444), f.Close()); err != nil {
		return err
	}
	sum, err := sha256File(f.Name())
	if err != nil {
		return err
	}
	if err := writeDurably(s.sumFile(key), sum); err != nil {
		return err
	}
	final := filepath.Join(s.dir, key+".erofs")
	if err := wholefile.Publish(f.Name(), final); err != nil {
		return err
	}
	if fi, err := os.Stat(final); err == nil {
		s.whole.Store(key, fi)
	}
	return nil
}

func (s *imageStore) sumFile(key string) string { return filepath.Join(s.dir, key+images.SumSuffix) }

// touch notes that the image called key is used, in steps of touchedEvery: another server of this
// directory reads the file through for each time that it did not set itself.
func (s *imageStore) touch(key string) {
	const touchedEvery = 10 * time.Minute
	name := filepath.Join(s.dir, key+".erofs")
	fi, err := os.Stat(name)
	if err != nil || time.Since(fi.ModTime()) < touchedEvery {
		return
	}
	now := time.Now()
	if os.Chtimes(name, now, now) == nil {
		if fi, err := os.Stat(name); err == nil {
			s.whole.Store(key, fi)
		}
	}
}

// isWhole reports whether the image called key is complete and unchanged. Its file is read through on
// its first use after a start, and whenever its size or time is not the noted one: a crash of the
// machine may have truncated it, and disks lose data. gVisor would run whatever is in it.
func (s *imageStore) isWhole(key string) bool {
	name := filepath.Join(s.dir, key+".erofs")
	fi, err := os.Stat(name)
	if err != nil {
		return false
	}
	if v, ok := s.whole.Load(key); ok {
		if seen := v.(fs.FileInfo); os.SameFile(seen, fi) && seen.Size() == fi.Size() && seen.ModTime().Equal(fi.ModTime()) {
			return true
		}
	}
	var want string
	if readJSON(s.sumFile(key), &want) != nil {
		return false
	}
	if got, err := sha256File(name); err != nil || got != want {
		return false
	}
	s.whole.Store(key, fi)
	return true
}

func sha256File(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	_, err = io.Copy(sum, f)
	return hex.EncodeToString(sum.Sum(nil)), err
}

// complete adds what every sandbox needs: mount points, name service and the workspace. The
// image's own files stay, except those of the name service.
func (s *imageStore) complete(t *images.Tree, config v1.Config) error {
	for _, d := range []struct {
		name string
		mode fs.FileMode
		own  bool // must be a directory, not a link to one
	}{{"/dev", 0o755, true}, {"/proc", 0o555, true}, {"/sys", 0o555, true}, {agentDir, 0o755, true},
		{"/etc", 0o755, false}, {"/root", 0o700, false}, {"/run", 0o755, false},
		{"/tmp", fs.ModeSticky | 0o777, false}, {workspaceDefault, 0o755, false}} {
		if err := t.Dir(d.name, d.mode, d.own); err != nil {
			return fmt.Errorf("%s: %w", d.name, err)
		}
	}
	if err := t.Dir(config.WorkingDir, 0o755, false); err != nil {
		return fmt.Errorf("its working directory: %w", err)
	}
	for v := range config.Volumes {
		if err := t.Dir(v, 0o755, false); err != nil {
			return fmt.Errorf("its volume %s: %w", v, err)
		}
	}
	passwd, group := "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n", "root:x:0:\nnogroup:x:65534:\n"
	for _, f := range []struct {
		name, content string
		always        bool
	}{
		{"/etc/passwd", passwd, false}, {"/etc/group", group, false}, {tmpKeeper, "", false},
		{"/etc/resolv.conf", "nameserver " + gatewayIP + "\n", true},
		{"/etc/hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost\n", true},
	} {
		if !f.always && t.Has(f.name) {
			continue
		}
		if err := t.File(f.name, 0o644, int64(len(f.content)), func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader([]byte(f.content))), nil
		}); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
	}
	return nil
}

// stopMain gives the main process of an image with a stop signal time to end on its own.
// It ignores errors: the sandbox is about to be removed.
func (e *extension) stopMain(ctx context.Context, name string) {
	rec, err := e.record(name)
	if err != nil || !rec.Ready || rec.StopSignal == "" {
		return
	}
	sig := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(rec.StopSignal), "SIG"))
	if n, err := strconv.Atoi(rec.StopSignal); err == nil && n > 0 && n <= 64 {
		sig = syscall.Signal(n)
	}
	b, err := e.hold(name)
	if err != nil || sig == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, e.stopGrace)
	defer cancel()
	for sent := false; ; sent = true {
		ps, err := b.agent.Processes(ctx)
		i := slices.IndexFunc(ps, func(p sandboxer.Process) bool { return p.Tag == agent.MainTag })
		if err != nil || i < 0 {
			return
		}
		if !sent && b.agent.Signal(ctx, ps[i].PID, int(sig)) != nil {
			return
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return
		}
	}
}

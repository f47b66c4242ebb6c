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
	"net/netip"
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
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/usernet"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// An image is a root file system in one EROFS file, read by gVisor itself: it needs
// no file server, and its pages are shared by all sandboxes. Owners are inside the
// file, so that an ordinary user can make one.
type image struct {
	path   string
	pinned string // the reference with its digest, if it came from a registry
	config v1.Config
	// release lets the store remove the image, unless a record says that it is in use.
	release func()
}

// imageStore makes images of what profiles name, once per content.
//
//	dir:/path                 a root directory
//	oci:/path[:tag]           an OCI image layout
//	tar:/path                 a tar made by "docker save" or of an OCI layout's image
//	registry/name:tag@digest  an image of a registry
type imageStore struct {
	dir   string
	store *images.Store
	// whole are the images whose files were read through since the start, by key: their
	// numbers (*os.FileInfo).
	whole sync.Map
	// overdue says that the store has grown since it was pruned.
	overdue atomic.Bool
}

// newImageStore opens the store in dir. The images that live sandboxes use stay,
// whatever else is removed.
func (e *extension) newImageStore(dir string) (*imageStore, error) {
	c := e.cfg.Images
	store, err := images.New(dir, images.Options{
		Policy: images.Policy(c.Pull), Registries: c.Registries, Insecure: c.Insecure, Mirrors: c.Mirrors,
		Keep:   c.Keep,
		Limits: images.Limits{Download: c.MaxDownload, Unpacked: c.MaxUnpacked, Entries: c.MaxEntries},
		InUse:  e.imagesInUse,
		Reach:  e.reachesForAnybody,
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

// reachesForAnybody reports whether the broker may connect to a at the wish of anybody: what
// a sandbox on the public network could reach, too.
func (e *extension) reachesForAnybody(a netip.Addr) bool {
	never, err := e.cfg.never()
	return err == nil && sandboxer.PublicAddr(a) && !usernet.OwnAddr(a) &&
		!slices.ContainsFunc(never, func(p netip.Prefix) bool { return p.Contains(a) })
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
			return nil, err // it may be any
		}
	}
	_, saved, err := e.savedRoots()
	for _, file := range saved {
		out[file] = true
	}
	return out, err
}

// empty is the directory that gVisor is told to be the root of a sandbox whose real
// root is an image.
func (s *imageStore) empty() string { return filepath.Join(s.dir, "empty") }

// splitImage takes apart a reference. Its kind is dir, oci or tar for what is on this
// machine, and empty for what is in a registry.
func splitImage(ref string) (kind, p, tag string) {
	kind, p, _ = strings.Cut(ref, ":")
	switch kind {
	case "dir", "tar":
		return kind, p, ""
	case "oci":
		if i := strings.LastIndex(p, ":"); i > strings.LastIndex(p, "/") {
			p, tag = p[:i], p[i+1:]
		}
		return kind, p, tag
	}
	return "", ref, ""
}

// check refuses what ref cannot be. vouched says that an administrator or a profile names
// it: else it is what anybody may ask for.
func (s *imageStore) check(ref string, vouched bool) error {
	kind, p, _ := splitImage(ref)
	if kind == "" {
		return s.store.Check(ref, s.store.Access(vouched))
	}
	if !vouched {
		return sandboxer.E(sandboxer.Denied, nil, "image %q is a path on the broker's machine, which only an administrator may use", ref).
			WithHint("use an image of a registry")
	}
	if !filepath.IsAbs(p) || filepath.Clean(p) != p || p == "/" {
		return sandboxer.E(sandboxer.Invalid, nil, "image %q: want a clean absolute path after %s:", ref, kind)
	}
	fi, err := os.Stat(p)
	if errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Invalid, err, "image %q: %s does not exist on this machine", ref, p)
	}
	if err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "image %q: %s cannot be read on this machine", ref, p)
	}
	if fi.IsDir() != (kind != "tar") {
		return sandboxer.E(sandboxer.Invalid, nil, "image %q: %s is not what %s: takes", ref, p, kind)
	}
	return nil
}

// get returns the image for ref, pulling and converting it first if it is new. The
// caller must release it. Of what vouched says, see check.
func (s *imageStore) get(ctx context.Context, ref string, vouched bool) (_ *image, err error) {
	if err := s.check(ref, vouched); err != nil {
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
			if done, _ := s.store.Prune(); !done { // the next open says what fails
				s.overdue.Store(true) // for whoever holds it now
			}
		}
	}
	defer func() {
		if err != nil {
			done()
		}
	}()
	access := s.store.Access(vouched)
	src, err := s.open(ctx, ref, access)
	if err != nil {
		return nil, err
	}
	if wd := src.config.WorkingDir; wd != "" {
		if src.config.WorkingDir = path.Clean("/" + wd); reserved(src.config.WorkingDir) {
			return nil, sandboxer.E(sandboxer.Failed, nil, "image %q: its working directory %s is not one of the sandbox's files", ref, wd)
		}
	}
	what := imageFormat + "\x00" + src.digest
	if access != images.Operator {
		what += "\x00public" // who can name its configuration may not be able to read it
	}
	sum := sha256.Sum256([]byte(what))
	key := hex.EncodeToString(sum[:])[:32]
	img := &image{path: filepath.Join(s.dir, key+".erofs"), pinned: src.pinned, config: src.config, release: done}
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
	now := time.Now()
	_ = os.Chtimes(img.path, now, now)
	return img, img.settle(ref)
}

// imageFormat changes whenever what is made of an image does.
const imageFormat = "4"

// settle checks what the image's configuration asks for, and puts it into the form
// that the rest of this package takes.
func (i *image) settle(ref string) error {
	user, err := i.user()
	if err != nil {
		return sandboxer.E(sandboxer.Failed, err, "image %q: its user %q cannot be found: %v", ref, i.config.User, err).
			WithHint("name another user in the profile")
	}
	i.config.User = user
	for _, kv := range i.config.Env {
		if k, _, ok := strings.Cut(kv, "="); !ok || k == "" || strings.ContainsRune(kv, 0) || strings.HasPrefix(k, agent.EnvPrefix) {
			return sandboxer.E(sandboxer.Failed, nil, "image %q: its environment variable %q is not possible", ref, k)
		}
	}
	return nil
}

// user returns the image's user as a name, or as uid:gid if there is a group too,
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
	_, groupErr := strconv.ParseUint(group, 10, 32)
	if nameErr == nil && (!both || groupErr == nil) {
		return i.config.User, nil
	}
	f, err := os.Open(i.path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	fsys, err := erofs.Open(f)
	if err != nil {
		return "", err
	}
	uid, err := lookUp(fsys, "etc/passwd", name, nameErr == nil)
	if err != nil || !both {
		return name, err
	}
	gid, err := lookUp(fsys, "etc/group", group, groupErr == nil)
	return uid + ":" + gid, err
}

// lookUp returns the number of a user or group.
func lookUp(fsys fs.FS, file, name string, isNumber bool) (string, error) {
	if isNumber {
		return name, nil
	}
	f, err := fsys.Open(file)
	if err != nil {
		return "", fmt.Errorf("the image has no readable /%s", file)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		c := strings.Split(strings.TrimSpace(line), ":")
		if len(c) > 2 && c[0] == name {
			if _, err := strconv.ParseUint(c[2], 10, 32); err == nil {
				return c[2], nil
			}
		}
	}
	return "", fmt.Errorf("%s is not in the image's /%s", name, file)
}

// main is what the image runs as its main process: its entry point with command, or,
// as engines do it, with the image's own command if there is none. dir is where.
func (i *image) main(command []string, workspace string) (args []string, dir string) {
	args = slices.Clone(i.config.Entrypoint)
	if len(command) == 0 {
		args = append(args, i.config.Cmd...)
	} else if len(args) == 0 {
		return command, workspace // nothing of the image is in it
	} else {
		args = append(args, command...)
	}
	dir = i.config.WorkingDir
	if dir == "" {
		dir = "/"
	}
	return args, dir
}

// about is what an operator wants to know of the image a sandbox runs on.
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

// maxLabels bounds what of an image's labels is kept for every sandbox.
const maxLabels = 4 << 10

// convert makes the image's file.
func (s *imageStore) convert(ctx context.Context, key, ref string, src imageSource) error {
	tmp := filepath.Join(s.dir, key+".tmp")
	if err := os.RemoveAll(tmp); err != nil { // of one who died at it
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
	t, err := src.tree(ctx)
	if err != nil {
		return err
	}
	if err := s.complete(t, src.config); err != nil {
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

// isWhole reports whether the image called key is here as it was made. Its file is read
// through on its first use after a start: a crash of the machine may have cut it short, and
// disks forget. gVisor would run whatever is in it.
func (s *imageStore) isWhole(key string) bool {
	name := filepath.Join(s.dir, key+".erofs")
	fi, err := os.Stat(name)
	if err != nil {
		return false
	}
	if seen, ok := s.whole.Load(key); ok && os.SameFile(seen.(fs.FileInfo), fi) && seen.(fs.FileInfo).Size() == fi.Size() {
		return true
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

// imageSource is an opened image: what identifies its content, its configuration,
// and how to read it.
type imageSource struct {
	digest string
	pinned string
	config v1.Config
	tree   func(context.Context) (*images.Tree, error)
}

func (s *imageStore) open(ctx context.Context, ref string, access images.Access) (imageSource, error) {
	kind, p, tag := splitImage(ref)
	limits := s.store.Limits()
	switch kind {
	case "":
		img, err := s.store.Find(ctx, ref, access)
		if err != nil {
			return imageSource{}, err
		}
		return imageSource{digest: img.ConfigID, pinned: img.Pinned(), config: img.Config.Config, tree: func(ctx context.Context) (*images.Tree, error) {
			return s.pull(ctx, ref, img)
		}}, nil
	case "dir":
		digest, err := images.DirDigest(p, limits.Entries)
		return imageSource{digest: digest, tree: func(ctx context.Context) (*images.Tree, error) {
			t := images.NewTree(limits)
			return t, t.AddDir(ctx, p)
		}}, err
	}
	var img v1.Image
	var err error
	if kind == "oci" {
		img, err = images.FromLayout(p, tag)
	} else if img, err = tarball.ImageFromPath(p, nil); err != nil {
		err = fmt.Errorf("not a saved image with exactly one image in it: %w", err)
	}
	if err != nil {
		return imageSource{}, err
	}
	digest, err := img.ConfigName() // covers the layers' content, unlike a tar's name
	if err != nil {
		return imageSource{}, err
	}
	cf, err := img.ConfigFile()
	if err != nil {
		return imageSource{}, err
	}
	return imageSource{digest: digest.String(), config: cf.Config, tree: func(ctx context.Context) (*images.Tree, error) {
		all, err := img.Layers()
		if err != nil {
			return nil, err
		}
		if len(all) != len(cf.RootFS.DiffIDs) {
			return nil, fmt.Errorf("it has %d layers, its configuration says %d", len(all), len(cf.RootFS.DiffIDs))
		}
		layers := make([]images.Layer, len(all))
		for i, l := range all {
			layers[i] = images.Layer{Open: l.Uncompressed, DiffID: cf.RootFS.DiffIDs[i].String()}
		}
		t := images.NewTree(limits)
		return t, t.AddLayers(ctx, ref, layers)
	}}, nil
}

// pull brings an image of a registry here. Should a stored layer have been damaged
// since it was fetched, it is fetched again.
func (s *imageStore) pull(ctx context.Context, ref string, img *images.Image) (*images.Tree, error) {
	for again := false; ; again = true {
		paths, err := s.store.Pull(ctx, img)
		if err != nil {
			return nil, err
		}
		t := images.NewTree(s.store.Limits())
		err = t.AddLayers(ctx, ref, img.Layers(paths))
		if err == nil || again || ctx.Err() != nil {
			return t, err
		}
		if mended, merr := img.Mend(paths); merr != nil || !mended {
			return nil, errors.Join(err, merr)
		}
	}
}

// complete adds what every sandbox needs: mount points, name service and the workspace.
// What the image has is kept, but for the name service.
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

// stopMain gives the main process of an image that names a stop signal the time to
// end by itself. Whatever goes wrong here: the sandbox is about to be removed.
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
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	for sent := false; ; sent = true {
		ps, err := b.agent.Processes(ctx)
		i := slices.IndexFunc(ps, func(p sandboxer.Process) bool { return p.Tag == mainTag })
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

// stopGrace is how long a main process has to end by itself.
const stopGrace = 3 * time.Second

//go:build linux

package local

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/images/registrytest"
)

// openImages opens the extension with settings for images.
func openImages(t testing.TB, dir string, change func(*Images)) *extension {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	ext, err := Adapter.Open(t.Context(), sandboxer.Env{
		Extension: "ext.local", Owner: ours("test"), Dir: dir, Log: slog.New(slog.DiscardHandler),
		Decode: func(v any) error {
			c := v.(*Config)
			c.Runner, c.Agent = filepath.Join(helpers, "sandboxer-runner"), filepath.Join(helpers, "sandboxer-agent")
			if change != nil {
				change(&c.Images)
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	e := ext.(*extension)
	t.Cleanup(func() { e.Close() })
	return e
}

// appImage is an image of busybox with a program as its entry point.
func appImage(t *testing.T, c v1.Config, more ...tar.Header) v1.Image {
	t.Helper()
	path := "/usr/bin/busybox"
	box, err := os.ReadFile(path)
	if err != nil {
		t.Skipf("no busybox to make an image of: %v (install busybox-static)", err)
	}
	entries := []tar.Header{
		{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755},
		{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "etc/group", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "var/sticky/", Typeflag: tar.TypeDir, Mode: 0o1777},
		{Name: "run/", Typeflag: tar.TypeDir, Mode: 0o777},
		{Name: "bin/start", Typeflag: tar.TypeReg, Mode: 0o755},
	}
	for _, n := range []string{"sh", "cat", "id", "stat", "sleep", "pwd", "ls", "dd", "du", "env", "sync", "df"} {
		entries = append(entries, tar.Header{Name: "bin/" + n, Typeflag: tar.TypeSymlink, Linkname: "busybox"})
	}
	content := map[string][]byte{
		"bin/busybox": box,
		"etc/passwd":  []byte("root:x:0:0::/root:/bin/sh\napp:x:70:70::/srv/app:/bin/sh\n"),
		"etc/group":   []byte("root:x:0:\napp:x:70:\nstaff:x:99:\n"),
		"bin/start": []byte("#!/bin/sh\ntrap 'echo stopped >>/run/told; exit 0' USR1\n" +
			"echo \"$0 $* in $(pwd) as $(id -u):$(id -g) $WORD\" >/run/told\nwhile :; do sleep 0.05; done\n"),
	}
	img, err := mutate.AppendLayers(empty.Image, layer(t, append(entries, more...), content))
	if err != nil {
		t.Fatal(err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture, cf.Config = "linux", runtime.GOARCH, c
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	return img
}

// told waits for the output of the image's program.
func told(t *testing.T, e *extension, h sandboxer.Handle) string {
	t.Helper()
	var got string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if got = sh(t, e, h, "cat /run/told 2>/dev/null || true"); got != "" {
			break
		}
	}
	return got
}

func TestImagesOfRegistries(t *testing.T) {
	needsGVisor(t)
	reg := registrytest.New(t)
	config := v1.Config{
		Env: []string{"PATH=/bin", "WORD=from-image", "KEPT=yes"}, User: "app:staff", WorkingDir: "/srv/app/../app",
		Entrypoint: []string{"/bin/start", "entry"}, Cmd: []string{"point"}, StopSignal: "SIGUSR1",
		ExposedPorts: map[string]struct{}{"8080/tcp": {}, "53/udp": {}, "80": {}}, Volumes: map[string]struct{}{"/data/here": {}},
		Labels: map[string]string{"org.example.label": "L"},
	}
	img := appImage(t, config)
	ref := reg.Push(t, "team/app:1", img)
	e := openImages(t, shortDir(t), nil)

	t.Run("its configuration holds", func(t *testing.T) {
		h := up(t, e, sandboxer.Spec{Image: ref})
		if got, want := told(t, e, h), "/bin/start entry point in /srv/app as 70:99 from-image"; got != want {
			t.Errorf("its main process says %q; want %q", got, want)
		}
		if got, want := sh(t, e, h, "pwd; id -u; id -g; echo $WORD $KEPT; stat -c %a /tmp /var/sticky; ls -d /data/here"), "/srv/app\n70\n99\nfrom-image yes\n1777\n1777\n/data/here"; got != want {
			t.Errorf("commands see\n%s\nwant\n%s", got, want)
		}
		r, err := e.WaitReady(t.Context(), h)
		if err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(r.Ports) != "[{80  } {8080  }]" || r.RemoteDir != "/srv/app" || !strings.Contains(r.Extra["image_labels"], "org.example.label") ||
			!strings.HasPrefix(r.Extra["image"], reg.Host+"/team/app@sha256:") {
			t.Errorf("reachability: %+v", r)
		}
	})
	t.Run("the caller wins", func(t *testing.T) {
		h := up(t, e, sandboxer.Spec{Image: ref, User: "root", Workspace: "/work", Env: map[string]string{"WORD": "from-caller"}, Command: []string{"other", "words"}})
		if got, want := told(t, e, h), "/bin/start entry other words in /srv/app as 0:0 from-caller"; got != want {
			t.Errorf("its main process says %q; want %q", got, want)
		}
		if got, want := sh(t, e, h, "pwd; id -u; echo $WORD $KEPT"), "/work\n0\nfrom-caller yes"; got != want {
			t.Errorf("commands see\n%s\nwant\n%s", got, want)
		}
	})
	t.Run("by digest, offline", func(t *testing.T) {
		d, _ := img.Digest()
		reg.Set(func(r *registrytest.Server) {
			r.Reply = func(w http.ResponseWriter, _ *http.Request) bool { http.Error(w, "closed", 500); return true }
		})
		defer reg.Set(func(r *registrytest.Server) { r.Reply = nil })
		reg.Requests()
		for _, r := range []string{reg.Host + "/team/app@" + d.String(), reg.Host + "/team/app:2@" + d.String(), ref} {
			h := up(t, e, sandboxer.Spec{Image: r})
			if got := sh(t, e, h, "id -u"); got != "70" {
				t.Errorf("%s: %q", r, got)
			}
		}
		if got := reg.Requests(); len(got) > 0 {
			t.Errorf("asked %q", got)
		}
	})
	t.Run("stop signal", func(t *testing.T) {
		h := up(t, e, sandboxer.Spec{Image: ref})
		told(t, e, h)
		b, err := e.of(h)
		if err != nil {
			t.Fatal(err)
		}
		e.stopMain(t.Context(), b.name)
		if got := sh(t, e, h, "cat /run/told"); !strings.HasSuffix(got, "stopped") {
			t.Errorf("it was not told to stop: %q", got)
		}
		grace := e.stopGrace
		e.stopGrace = time.Hour // Teardown does not wait for its end
		defer func() { e.stopGrace = grace }()
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Error(err)
		}
	})
	t.Run("all at once", func(t *testing.T) {
		other := reg.Push(t, "team/other:1", appImage(t, v1.Config{Env: []string{"PATH=/bin"}}, tar.Header{Name: "only/here/", Typeflag: tar.TypeDir, Mode: 0o755}))
		second := openImages(t, e.env.Dir, nil)
		reg.Requests()
		var wg sync.WaitGroup
		hs := make([]sandboxer.Handle, 6)
		for i := range hs {
			wg.Go(func() { hs[i] = up(t, []*extension{e, second}[i%2], sandboxer.Spec{Image: other}) })
		}
		wg.Wait()
		layers := 0
		for _, r := range reg.Requests() {
			if strings.Contains(r, "/blobs/") {
				layers++
			}
		}
		if layers > 2*6+1 { // each may ask for the configuration, one for the layer
			t.Errorf("%d requests for blobs", layers)
		}
		made, _ := filepath.Glob(filepath.Join(e.images.dir, "*.erofs"))
		if len(made) != 2 {
			t.Errorf("images: %q", made)
		}
	})
	t.Run("a main process that cannot be started", func(t *testing.T) {
		r := reg.Push(t, "broken:1", appImage(t, v1.Config{Entrypoint: []string{"/no/such/program"}}))
		_, err := e.Provision(t.Context(), sandboxer.Spec{ID: "broken", Generation: 1, Owner: ours("test"), Image: r, Vouched: []string{sandboxer.RestrictedImage}})
		if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), "/no/such/program") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("impossible configurations", func(t *testing.T) {
		for name, c := range map[string]v1.Config{
			"its user":                 {User: "nobody-knows"},
			"its working directory":    {WorkingDir: "/proc/self"},
			"its environment variable": {Env: []string{"SANDBOXER_AGENT_TOKEN=mine"}},
		} {
			r := reg.Push(t, "odd:"+strings.ReplaceAll(name, " ", "-"), appImage(t, c))
			_, err := e.Provision(t.Context(), sandboxer.Spec{ID: "odd", Generation: 1, Owner: ours("test"), Image: r, Vouched: []string{sandboxer.RestrictedImage}})
			if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), name) {
				t.Errorf("%s: got %v", name, err)
			}
		}
	})
}

// Every fault of an image is reported, and nothing of it stays.
func TestHostileImages(t *testing.T) {
	needsGVisor(t)
	reg := registrytest.New(t)
	e := openImages(t, shortDir(t), func(i *Images) { i.MaxEntries, i.MaxUnpacked, i.MaxDownload = 50_000, 64<<20, 32<<20 })
	many := make([]tar.Header, 100_000)
	for i := range many {
		many[i] = tar.Header{Name: fmt.Sprintf("f%d", i), Typeflag: tar.TypeReg}
	}
	for name, c := range map[string]struct {
		headers []tar.Header
		content map[string][]byte
		says    string
	}{
		"path traversal":  {[]tar.Header{{Name: "../../../../tmp/escaped", Typeflag: tar.TypeReg}}, nil, "leads upwards"},
		"symbolic link":   {[]tar.Header{{Name: "a", Typeflag: tar.TypeSymlink, Linkname: "../../../tmp"}, {Name: "a/escaped", Typeflag: tar.TypeReg}}, nil, "lead out of the image"},
		"hard link":       {[]tar.Header{{Name: "a", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"}}, nil, "hard link"},
		"layer bomb":      {[]tar.Header{{Name: "a", Typeflag: tar.TypeReg}}, map[string][]byte{"a": make([]byte, 70<<20)}, "64 MiB"},
		"100,000 entries": {many, nil, "more than 50000 files"},
	} {
		t.Run(name, func(t *testing.T) {
			img, err := mutate.AppendLayers(empty.Image, layer(t, c.headers, c.content))
			if err != nil {
				t.Fatal(err)
			}
			ref := reg.Push(t, "hostile/"+strings.NewReplacer(" ", "-", ",", "").Replace(name)+":1", img)
			_, err = e.Provision(t.Context(), sandboxer.Spec{ID: "hostile", Generation: 1, Owner: ours("test"), Image: ref, Vouched: []string{sandboxer.RestrictedImage}})
			if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), c.says) {
				t.Errorf("got %v; want %q", err, c.says)
			}
			if names, _ := os.ReadDir(e.dir("box")); len(names) > 0 {
				t.Errorf("left: %q", names)
			}
			for _, glob := range []string{"*.tmp", "*.erofs", "partial/*"} {
				if left, _ := filepath.Glob(filepath.Join(e.images.dir, glob)); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			}
		})
	}
	if _, err := os.Stat("/tmp/escaped"); err == nil {
		t.Error("an image wrote a file on this machine")
	}
}

// The writable layer is on disk, within the limit, and is removed with the sandbox.
func TestWritableLayerOfAnImageIsOnDisk(t *testing.T) {
	needsGVisor(t)
	reg := registrytest.New(t)
	ref := reg.Push(t, "x:1", appImage(t, v1.Config{Env: []string{"PATH=/bin"}}))
	e := openImages(t, shortDir(t), nil)
	h := up(t, e, sandboxer.Spec{Image: ref, Limits: sandboxer.Limits{DiskBytes: 64 << 20}})
	if got := sh(t, e, h, "dd if=/dev/zero of=/big bs=1M count=40 2>/dev/null && sync; du -k /big"); !strings.HasPrefix(got, "4") {
		t.Errorf("40 MiB were written: %s", got)
	}
	// It is in a file of the sandbox without a name, which cannot outlive the sandbox.
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	layer := e.layers()
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", b.pid))
	if !slices.ContainsFunc(fds, func(p string) bool {
		to, _ := os.Readlink(p)
		var fi os.FileInfo
		fi, err := os.Stat(p)
		return err == nil && strings.Contains(to, layer) && fi.Size() >= 40<<20
	}) {
		t.Error("no file of the layer's directory holds what was written")
	}
	if entries, _ := os.ReadDir(layer); len(entries) > 0 {
		t.Errorf("the layer's directory has %v", entries)
	}
	var out bytes.Buffer
	x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "dd if=/dev/zero of=/more bs=1M count=64"}, Stderr: &out, Stdout: &out})
	if err != nil || x.Code == 0 || !strings.Contains(out.String(), "No space") {
		t.Errorf("beyond the limit: %v %v %s", x, err, &out)
	}
}

// The image of a sandbox stays, even for a broker that did not make the sandbox.
func TestImagesInUseStay(t *testing.T) {
	needsGVisor(t)
	reg := registrytest.New(t)
	dir := shortDir(t)
	first := openImages(t, dir, func(i *Images) { i.Keep = 1 << 20 })
	h := up(t, first, sandboxer.Spec{Image: reg.Push(t, "one:1", appImage(t, v1.Config{Env: []string{"PATH=/bin"}}))})
	images := func() int {
		all, _ := filepath.Glob(filepath.Join(dir, "image", "*.erofs"))
		return len(all)
	}
	if images() != 1 {
		t.Fatalf("%d images", images())
	}
	e := openImages(t, dir, func(i *Images) { i.Keep = 1 << 20 }) // prunes
	h2 := up(t, e, sandboxer.Spec{Image: reg.Push(t, "two:1", appImage(t, v1.Config{Env: []string{"PATH=/bin", "X=2"}}))})
	if images() != 2 {
		t.Errorf("%d images with two sandboxes", images())
	}
	if _, err := e.Teardown(t.Context(), h2); err != nil {
		t.Fatal(err)
	}
	if _, err := e.images.store.Prune(); err != nil || images() != 1 {
		t.Errorf("%d images with one sandbox, %v", images(), err)
	}
	if got := sh(t, e, h, "echo lives"); got != "lives" {
		t.Errorf("the sandbox says %q", got)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "image", "blobs", "*")); len(left) > 0 {
		t.Errorf("layers beyond the size to keep: %q", left)
	}
}

// An image made while another one is being made is kept beyond the size to keep only until
// that has ended.
func TestPruneIsMadeUpFor(t *testing.T) {
	needsGVisor(t)
	reg := registrytest.New(t)
	dir := shortDir(t)
	e := openImages(t, dir, func(i *Images) { i.Keep = 1 << 20 })
	one := reg.Push(t, "one:1", appImage(t, v1.Config{Env: []string{"PATH=/bin"}}))
	up(t, e, sandboxer.Spec{Image: one})
	images := func() int {
		all, _ := filepath.Glob(filepath.Join(dir, "image", "*.erofs"))
		return len(all)
	}
	release, err := e.images.store.Hold(t.Context()) // as if a call were making one
	if err != nil {
		t.Fatal(err)
	}
	two := reg.Push(t, "two:1", appImage(t, v1.Config{Env: []string{"PATH=/bin", "X=2"}}))
	h2 := up(t, e, sandboxer.Spec{Image: two})
	if _, err := e.Teardown(t.Context(), h2); err != nil {
		t.Fatal(err)
	}
	if images() != 2 {
		t.Fatalf("%d images while the store is held", images())
	}
	release()
	img, err := e.images.get(t.Context(), one, true)
	if err != nil {
		t.Fatal(err)
	}
	img.release()
	if images() != 1 {
		t.Errorf("%d images when it was released", images())
	}
}

// A cancelled create leaves the pull for the next one.
func TestCreateCalledOffWhilePulling(t *testing.T) {
	needsGVisor(t)
	reg := registrytest.New(t)
	ref := reg.Push(t, "x:1", appImage(t, v1.Config{Env: []string{"PATH=/bin"}}))
	reg.Set(func(r *registrytest.Server) { r.Slow = 100 * time.Millisecond })
	e := openImages(t, shortDir(t), nil)
	ctx, cancel := context.WithCancel(t.Context())
	ctx = sandboxer.WithProgress(ctx, func(p sandboxer.Progress) {
		if p.Done > 200<<10 {
			cancel()
		}
	})
	_, err := e.Provision(ctx, sandboxer.Spec{ID: "off", Generation: 1, Owner: ours("test"), Image: ref, Vouched: []string{sandboxer.RestrictedImage}})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if names, _ := os.ReadDir(e.dir("box")); len(names) > 0 {
		t.Errorf("left: %q", names)
	}
	reg.Set(func(r *registrytest.Server) { r.Slow = 0 })
	reg.Requests()
	up(t, e, sandboxer.Spec{Image: ref})
	if got := strings.Join(reg.Requests(), "\n"); !strings.Contains(got, "bytes=") {
		t.Errorf("it began anew: %s", got)
	}
}

// An image that an operator pulled is not available to other callers: neither by its name,
// nor as the file that was made from it.
func TestImagesOfTheOperator(t *testing.T) {
	needsGVisor(t)
	reg := registrytest.New(t)
	img := appImage(t, v1.Config{Env: []string{"WORD=private"}})
	ref := reg.Push(t, "team/private:1", img)
	dir := shortDir(t)
	e := openImages(t, dir, nil)
	told := up(t, e, sandboxer.Spec{Image: ref})
	if got := sh(t, e, told, "echo $WORD"); got != "private" {
		t.Errorf("the operator's sandbox says %q", got)
	}
	for _, image := range []string{ref, "localhost:1/x", "10.1.2.3/x", "169.254.169.254/x", "dir:/usr", "tar:/etc/passwd", "oci:/var"} {
		spec := sandboxer.Spec{ID: sandboxer.NewID(), Generation: 1, Owner: e.env.Owner, Image: image}
		if err := e.Check(t.Context(), spec); sandboxer.KindOf(err) != sandboxer.Denied {
			t.Errorf("%s: Check says %v", image, err)
		}
		if _, err := e.Provision(t.Context(), spec); sandboxer.KindOf(err) != sandboxer.Denied {
			t.Errorf("%s: Provision says %v", image, err)
		}
		if _, err := e.Basis(t.Context(), spec); sandboxer.KindOf(err) != sandboxer.Denied {
			t.Errorf("%s: Basis says %v", image, err)
		}
	}
	// A profile vouches for its own image.
	if err := e.Check(t.Context(), sandboxer.Spec{ID: sandboxer.NewID(), Generation: 1, Owner: e.env.Owner, Image: ref, Profile: sandboxer.Profile{Image: ref}}); err != nil {
		t.Errorf("the profile's own image: %v", err)
	}

	// As if the registry were public, and its image available to every caller.
	store, err := images.New(filepath.Join(dir, "image"), images.Options{
		Settings: images.Settings{Pull: images.Missing, Insecure: []string{"127.0.0.1"}}, Keep: 1 << 30, Limits: images.Limits{Download: 1 << 30, Unpacked: 1 << 30, Entries: 10_000},
		InUse: e.imagesInUse, Reach: func(netip.Addr) bool { return true },
	})
	if err != nil {
		t.Fatal(err)
	}
	e.images.store = store
	theirs, err := e.images.get(t.Context(), ref, true)
	if err != nil {
		t.Fatal(err)
	}
	theirs.release()
	reg.Requests()
	anybodys, err := e.images.get(t.Context(), ref, false)
	if err != nil {
		t.Fatal(err)
	}
	anybodys.release()
	if asked := reg.Requests(); anybodys.path == theirs.path || len(asked) < 3 {
		t.Errorf("anybody gets %s, the operator %s; the registry was asked %q", anybodys.path, theirs.path, asked)
	}
}

// A converted image that a crash or the disk damaged is made again, and so is a removed
// directory.
func TestDamagedImagesAreMadeAgain(t *testing.T) {
	needsGVisor(t)
	reg := registrytest.New(t)
	ref := reg.Push(t, "team/app:1", appImage(t, v1.Config{}))
	dir := shortDir(t)
	e := openImages(t, dir, nil)
	if got := sh(t, e, up(t, e, sandboxer.Spec{Image: ref}), "echo fine"); got != "fine" {
		t.Fatal(got)
	}
	found, err := filepath.Glob(e.dir("image", "*.erofs"))
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	want, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	for what, damage := range map[string]func() error{
		"cut":           func() error { return os.WriteFile(found[0], want[:len(want)/2], 0o444) },
		"flipped":       func() error { b := bytes.Clone(want); b[len(b)/2] ^= 1; return os.WriteFile(found[0], b, 0o444) },
		"without a sum": func() error { return os.Remove(strings.TrimSuffix(found[0], ".erofs") + images.SumSuffix) },
		"no layers":     func() error { return os.RemoveAll(e.layers()) },
	} {
		// Not overwritten: running sandboxes have it mapped.
		if err := errors.Join(os.Rename(found[0], found[0]+".was"), replaceFile(found[0], want), damage()); err != nil {
			t.Fatal(err)
		}
		_ = os.Remove(found[0] + ".was")
		if what != "no layers" {
			e.images.whole.Clear() // a start
		}
		if got := sh(t, e, up(t, e, sandboxer.Spec{Image: ref}), "echo fine"); got != "fine" {
			t.Errorf("%s: %q", what, got)
		}
		is, err := os.ReadFile(found[0])
		if key := strings.TrimSuffix(filepath.Base(found[0]), ".erofs"); err != nil || len(is) != len(want) || !e.images.isWhole(key) {
			t.Errorf("%s: the image has %d bytes, not %d: %v", what, len(is), len(want), err)
		}
	}
	// Also if another process writes to it while the server runs.
	f, err := os.OpenFile(found[0], os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte{want[len(want)-1] ^ 1}, int64(len(want)-1))
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	if e.images.isWhole(strings.TrimSuffix(filepath.Base(found[0]), ".erofs")) {
		t.Error("an image with a flipped bit is taken for whole")
	}
}

// replaceFile replaces a file that is in use.
func replaceFile(name string, data []byte) error { return os.WriteFile(name, data, 0o644) }

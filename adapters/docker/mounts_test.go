package docker

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// TestMountsOfWhoDoesNotOpen: mounts of a dead process are removed even if the next one cannot open.
func TestMountsOfWhoDoesNotOpen(t *testing.T) {
	if err := mounts.Can("ext.docker"); err != nil {
		t.Skip(err)
	}
	en := testEngine{image: "engine:x", address: nothing(t)}
	o := en.options(t, "unopened")
	e := o.opened(t)
	src, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	sources, err := e.opener().OpenToShow(sandboxer.Spec{Vouched: []string{sandboxer.RestrictedMounts}, Mounts: []sandboxer.Mount{{Source: src, Target: "/mnt/d"}}})
	t.Cleanup(func() { mounts.Close(sources) })
	if sandboxer.KindOf(err) == sandboxer.Unsupported {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	for what, config := range map[string]map[string]any{
		"agent":  {"agent": filepath.Join(src, "none")},
		"engine": {"engines": map[string]any{"one": map[string]any{"address": "tcp://127.0.0.1:1", "ca": src + "/ca", "cert": src + "/cert", "key": src + "/key"}}},
	} {
		t.Run(what, func(t *testing.T) {
			place := e.place(key(what, 1))
			t.Cleanup(func() { _ = mounts.Hide(place, nil) })
			if err := mounts.Show(place, sources, 0, 0, nil); err != nil {
				t.Fatal(err)
			}
			bad := o
			bad.config = maps.Clone(o.config)
			maps.Copy(bad.config, config)
			if e, err := bad.open(t.Context(), slog.New(slog.DiscardHandler)); err == nil {
				_ = e.Close()
				t.Fatal("it opens")
			} else {
				t.Log(err)
			}
			if left, err := mounts.Below(o.dir); err != nil || len(left) > 0 {
				t.Errorf("left: %q, %v", left, err)
			}
		})
	}
}

// TestMountsLeaveNothing: mounts shown to the engine are gone once the container has started, and remains of a dead process are
// removed by the next server, or with the sandbox; sources stay, and a teardown names them.
func TestMountsLeaveNothing(t *testing.T) {
	o := engines["docker"](t).options(t, "mounts")
	e := o.opened(t)
	src, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(src, 4711, 4712); err != nil {
		t.Fatal(err)
	}
	nothing := func(e *extension) {
		t.Helper()
		left, err := mounts.Below(e.dir())
		if entries, _ := os.ReadDir(e.dir("mount")); err != nil || len(left) > 0 || len(entries) > 0 {
			t.Errorf("left: %q, %q, %v", left, entries, err)
		}
	}
	dies := func(key string) {
		t.Helper()
		sources, err := e.opener().Open(sandboxer.Spec{Vouched: []string{sandboxer.RestrictedMounts}, Mounts: []sandboxer.Mount{{Source: src, Target: "/mnt/d"}}})
		if err == nil {
			err = mounts.Show(e.place(key), sources, 0, 0, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
		mounts.Close(sources)
	}
	dies(key("mounts", 1))
	h := up(t, e, order("mounts", o, func(s *sandboxer.Spec) {
		s.Vouched = append(s.Vouched, sandboxer.RestrictedMounts)
		s.Mounts = []sandboxer.Mount{{Source: src, Target: "/mnt/d"}}
		s.User = "1000:1001"
	}))
	nothing(e)
	if got := run(t, e, h, "echo g >/mnt/d/g; stat -c '%u %g' /mnt/d/g"); got != "1000 1001" {
		t.Errorf("inside what was written belongs to %s", got)
	}
	fi, err := os.Stat(filepath.Join(src, "g"))
	if err != nil {
		t.Fatal(err)
	}
	if st := fi.Sys().(*syscall.Stat_t); st.Uid != 4711 || st.Gid != 4712 {
		t.Errorf("on this machine what was written belongs to %d:%d", st.Uid, st.Gid)
	}
	dies("other.g1")
	next := o.opened(t)
	nothing(next)
	dies(key("mounts", 1))
	report, err := next.Teardown(t.Context(), h)
	if err != nil || !slices.Equal(report.Kept, []string{src + ", which was mounted"}) {
		t.Errorf("Teardown: %+v, %v", report, err)
	}
	nothing(next)
	if data, err := os.ReadFile(filepath.Join(src, "g")); err != nil || string(data) != "g\n" {
		t.Errorf("the source: %q, %v", data, err)
	}
	data, err := next.hosts["one"].api.ListContainers(t.Context(), next.ours())
	if err != nil || slices.ContainsFunc(data, func(c engine.ContainerSummary) bool { return c.Labels[labelID] == "mounts" }) {
		t.Errorf("left: %+v, %v", data, err)
	}
}

// TestMountsElsewhere: an engine that does not see the server's mounts refuses with a clear error.
func TestMountsElsewhere(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	src := t.TempDir()
	spec := sandboxer.Spec{ID: "x", Generation: 1, Image: "engine:y", Vouched: []string{sandboxer.RestrictedMounts, sandboxer.RestrictedImage}, Mounts: []sandboxer.Mount{{Source: src, Target: "/mnt/x"}}}
	e := &extension{cfg: Config{}, hosts: map[string]*host{"far": {name: "far"}}, images: &images.Store{}}
	e.env.Dir = t.TempDir()
	wantKind(t, e.Check(t.Context(), spec), sandboxer.Unsupported, "far", "another machine", "repo")
	h := &host{name: "here", socket: "/nowhere/engine.sock"}
	for words, info := range map[string]engine.Info{"rootless": {Rootless: true}, "userns-remap": {SecurityOptions: []string{"name=seccomp,profile=builtin", "name=userns"}}} {
		err := e.mountable(t.Context(), h, info)
		wantKind(t, err, sandboxer.Unsupported, words)
		if !strings.Contains(sandboxer.HintOf(err), "repo") {
			t.Errorf("%v has the hint %q", err, sandboxer.HintOf(err))
		}
	}
	wantKind(t, e.mountable(t.Context(), h, engine.Info{}), sandboxer.Unavailable, "here")
}

// TestMountsOfAService: a server with the mount namespace and the capabilities of the shipped unit, and those that docs/how-to/run-as-a-service.md adds for
// mounts, makes mounts that the engine sees; without them it refuses with a clear error.
func TestMountsOfAService(t *testing.T) {
	if dir := os.Getenv("SANDBOXER_TEST_SERVICE"); dir != "" {
		mountsInService(t, dir)
		return
	}
	en := engines["docker"](t)
	for _, p := range []string{"unshare", "setpriv"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skip(err)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	agent := en.options(t, "service").config["agent"].(string)
	for more, refused := range map[string]string{",+setfcap,+sys_chroot,+sys_ptrace": "", ",+setfcap": "the engine one cannot mount what is on the server's machine: server and engine have mount namespaces of their own", "": "the server may not map the owners of files"} {
		dir := t.TempDir()
		cmd := exec.Command("unshare", "--mount", "--propagation", "slave", "sh", "-ec", `
mount --bind "$2" "$2"
mount -o remount,bind,ro /
exec setpriv --bounding-set "$3" "$1" -test.run='^TestMountsOfAService$' -test.v`, "sh", self, dir,
			"-all,+chown,+dac_override,+fowner,+setuid,+setgid,+sys_admin,+net_admin,+net_bind_service"+more)
		cmd.Env = append(os.Environ(), "TMPDIR="+dir, "SANDBOXER_TEST_SERVICE="+dir, "SANDBOXER_TEST_ENGINE="+en.address, "SANDBOXER_TEST_IMAGE="+en.image, "SANDBOXER_TEST_AGENT="+agent, "SANDBOXER_TEST_REFUSED="+refused)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("with %q: %v\n%s", more, err, out)
		}
		if left, err := mounts.Below(dir); err != nil || len(left) > 0 {
			t.Errorf("with %q there is left: %q, %v", more, left, err)
		}
	}
}

// mountsInService is the server of TestMountsOfAService.
func mountsInService(t *testing.T, dir string) {
	o := options{"service", filepath.Join(dir, "data"), map[string]any{"engines": map[string]any{"one": map[string]any{"address": os.Getenv("SANDBOXER_TEST_ENGINE")}},
		"image": os.Getenv("SANDBOXER_TEST_IMAGE"), "agent": os.Getenv("SANDBOXER_TEST_AGENT"), "memory": 256 << 20}}
	src := filepath.Join(dir, "src")
	if err := errors.Join(os.Mkdir(o.dir, 0o700), os.Mkdir(src, 0o700), os.WriteFile(filepath.Join(src, "f"), []byte("outside"), 0o600)); err != nil {
		t.Fatal(err)
	}
	e := o.opened(t)
	spec := order("service", o, func(s *sandboxer.Spec) {
		s.Vouched = append(s.Vouched, sandboxer.RestrictedMounts)
		s.Mounts = []sandboxer.Mount{{Source: src, Target: "/mnt/d"}}
	})
	if refused := os.Getenv("SANDBOXER_TEST_REFUSED"); refused != "" {
		err := e.Check(t.Context(), spec) // the broker's first call
		if err == nil {
			_, err = e.Provision(t.Context(), spec)
		}
		if wantKind(t, err, sandboxer.Unsupported, refused); !strings.Contains(sandboxer.HintOf(err), "repo") {
			t.Errorf("%v has the hint %q", err, sandboxer.HintOf(err))
		}
		return
	}
	h := up(t, e, spec)
	if got := run(t, e, h, "cat /mnt/d/f; echo inside >/mnt/d/g"); got != "outside" {
		t.Errorf("inside: %q", got)
	}
	if data, err := os.ReadFile(filepath.Join(src, "g")); err != nil || string(data) != "inside\n" {
		t.Errorf("outside: %q, %v", data, err)
	}
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Error(err)
	}
	nothingLeft(t, o)
}

// TestMountsByOthers: engines whose containers have other owners of files than this machine are detected before anything is made.
func TestMountsByOthers(t *testing.T) {
	for name, tt := range map[string]struct {
		start func(testing.TB) string
		words string
	}{
		"userns-remap": {enginetest.Remapping, "it maps user IDs (userns-remap)"}, "rootless": {enginetest.Rootless, "it runs without root (rootless)"},
		"rootless podman": {enginetest.RootlessPodman, "it runs without root (rootless)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := testEngine{tt.start(t), "engine:none"}.options(t, "others")
			e := o.opened(t)
			spec := order("others", o, func(s *sandboxer.Spec) {
				s.Vouched = append(s.Vouched, sandboxer.RestrictedMounts)
				s.Mounts = []sandboxer.Mount{{Source: t.TempDir(), Target: "/mnt/d"}}
			})
			h := e.hosts["one"]
			info, err := h.look(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			err = e.mountable(t.Context(), h, info)
			wantKind(t, err, sandboxer.Unsupported, "one", tt.words)
			if !strings.Contains(sandboxer.HintOf(err), "repo") {
				t.Errorf("%v has the hint %q", err, sandboxer.HintOf(err))
			}
			if !info.MemoryLimit || !info.PidsLimit { // like one without rights
				tt.words = "cannot limit"
			}
			_, err = e.Place(t.Context(), spec, nil)
			wantKind(t, err, sandboxer.Unsupported, "one", tt.words)
			_, err = e.Provision(t.Context(), spec)
			wantKind(t, err, sandboxer.Unsupported, "one", tt.words)
			nothingLeft(t, o)
		})
	}
}

// TestMountsUnseen: an engine whose socket belongs to another process, and which does not see the mounts, is distinguished from one that fails.
func TestMountsUnseen(t *testing.T) {
	for name, start := range engines {
		t.Run(name, func(t *testing.T) { mountsUnseen(t, start(t)) })
	}
}

func mountsUnseen(t *testing.T, en testEngine) {
	o := en.options(t, "unseen")
	place := filepath.Join(o.dir, "mount", key("unseen", 1))
	shown := false
	apart := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.Out.URL.Scheme, r.Out.URL.Host = "http", "engine" },
		Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(en.address, "unix://"))
		}},
	}
	o.config["engines"] = map[string]any{"one": map[string]any{"address": listens(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/containers/create") {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			if bytes.Contains(body, []byte(place)) { // like in a namespace without the mount
				shown = true
				if err := unix.Unmount(place, unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			}
			r.Body = io.NopCloser(bytes.NewReader(body))
		}
		apart.ServeHTTP(w, r)
	})}}
	e := o.opened(t)
	_, err := e.Provision(t.Context(), order("unseen", o, func(s *sandboxer.Spec) {
		s.Vouched = append(s.Vouched, sandboxer.RestrictedMounts)
		s.Mounts = []sandboxer.Mount{{Source: t.TempDir(), Target: "/mnt/d"}}
	}))
	wantKind(t, err, sandboxer.Unsupported, "one", "mount namespaces of their own", "repo")
	if !shown {
		t.Error("the engine was not asked")
	}
	if _, err := os.Lstat(place); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
	nothingLeft(t, o)
}

// TestMountsLinkedUsers: a mount belongs to the user of the commands, even if the image's passwd and group files are links.
func TestMountsLinkedUsers(t *testing.T) {
	o := engines["docker"](t).options(t, "linked-users")
	e := o.opened(t)
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	untar := exec.Command("tar", "-x", "-C", root)
	untar.Stdin = bytes.NewReader(enginetest.BusyboxTar(t))
	if out, err := untar.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	in := func(name string) string { return filepath.Join(root, name) }
	if err := errors.Join(os.MkdirAll(in("store/users"), 0o755), os.WriteFile(in("store/users/p"), []byte("root:x:0:0::/root:/bin/sh\napp:x:1500:1600::/work:/bin/sh\n"), 0o644),
		os.WriteFile(in("store/g"), []byte("root:x:0:\ncrew:x:1700:\n"), 0o644), os.RemoveAll(in("etc/passwd")), os.RemoveAll(in("etc/group")),
		os.Symlink("users", in("store/alias")), os.Symlink("../store/g", in("etc/group")), os.Symlink("/store/alias/passwd", in("etc/passwd")), os.Symlink("p", in("store/users/passwd"))); err != nil {
		t.Fatal(err)
	}
	of := func(id, user, src string) sandboxer.Spec {
		return order(id, o, func(s *sandboxer.Spec) {
			s.Vouched = append(s.Vouched, sandboxer.RestrictedMounts)
			s.Mounts = []sandboxer.Mount{{Source: src, Target: "/mnt/d"}}
			s.User, s.Image = user, "dir:"+root
		})
	}
	for id, c := range map[string]struct{ user, is string }{"named": {"app", "1500 1600"}, "number": {"1500", "1500 1600"}, "group": {"app:crew", "1500 1700"}, "unlisted": {"1501", "1501 1501"}} {
		src := t.TempDir()
		if err := os.Chown(src, 4711, 4712); err != nil {
			t.Fatal(err)
		}
		h := up(t, e, of(id, c.user, src))
		if got := run(t, e, h, "echo g >/mnt/d/g; stat -c '%u %g' /mnt/d /mnt/d/g; id -u; id -g"); got != c.is+"\n"+c.is+"\n"+strings.ReplaceAll(c.is, " ", "\n") {
			t.Errorf("%s: inside: %q", c.user, got)
		}
		fi, err := os.Stat(filepath.Join(src, "g"))
		if err != nil {
			t.Fatal(err)
		}
		if st := fi.Sys().(*syscall.Stat_t); st.Uid != 4711 || st.Gid != 4712 {
			t.Errorf("%s: on this machine what was written belongs to %d:%d", c.user, st.Uid, st.Gid)
		}
	}
	if err := errors.Join(os.Remove(in("etc/passwd")), os.Symlink("/store", in("etc/passwd"))); err != nil {
		t.Fatal(err)
	}
	_, err = e.Provision(t.Context(), of("none", "1500", t.TempDir()))
	wantKind(t, err, sandboxer.Failed, "/store of the image is not a file")
}

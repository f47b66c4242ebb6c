//go:build linux

package local

import (
	"archive/tar"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// TestMountsOfTheServersOwn: no sandbox sees any of the server's directories, for any caller and
// under any name.
func TestMountsOfTheServersOwn(t *testing.T) {
	e := openTest(t)
	ownIDs(t, e)
	data, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	own, other, alias := filepath.Join(data, "a/own"), filepath.Join(data, "a/other"), filepath.Join(data, "alias")
	for _, d := range []string{filepath.Join(own, "sub"), other, alias} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	socket := filepath.Join(data, "a/api.sock")
	for _, f := range []string{socket, filepath.Join(own, "key"), filepath.Join(other, "f")} {
		if err := os.WriteFile(f, []byte("secret"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	e.env.Own = []string{own, socket, filepath.Join(data, "missing")}
	check := func(t *testing.T, src string, want sandboxer.Kind) {
		t.Helper()
		err := e.Check(t.Context(), sandboxer.Spec{ID: "x", Vouched: []string{sandboxer.RestrictedMounts}, Mounts: []sandboxer.Mount{{Source: src, Target: "/mnt/x", ReadOnly: true}}})
		if sandboxer.KindOf(err) != want {
			t.Errorf("%s: %v; want %q", src, err, want)
		}
	}
	for _, src := range []string{own, own + "/sub", own + "/key", socket, filepath.Dir(own), data, "/", e.env.Dir, e.dir("box"), filepath.Dir(e.env.Dir), "/run"} {
		check(t, src, sandboxer.Denied)
	}
	check(t, other, "")
	check(t, filepath.Join(other, "f"), "")
	check(t, "/proc/sys", sandboxer.Unsupported) // its owners cannot be mapped, which is known before anything is made
	// Another name makes no difference.
	for src, refused := range map[string]bool{own: true, filepath.Dir(own): true, other: false} {
		if err := unix.Mount(src, alias, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		want := sandboxer.Kind("")
		if refused {
			want = sandboxer.Denied
		}
		check(t, alias, want)
		if refused && src == own {
			check(t, alias+"/sub", want)
		}
		if !refused {
			check(t, data, sandboxer.Denied)
		}
		if err := unix.Unmount(alias, 0); err != nil {
			t.Fatal(err)
		}
	}
	// A mount inside a source would not be visible.
	in := filepath.Join(other, "in")
	if err := os.Mkdir(in, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(alias, in, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(in, 0) }()
	check(t, other, sandboxer.Invalid)
}

// TestMountsLeaveNothing: a create's mounts on this machine are gone when it has ended, even if it
// failed, and the sources are unchanged; the next server finds the sandbox.
func TestMountsLeaveNothing(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	e := openIn(t, dir, ours("test"))
	defer func() { _ = e.Close() }()
	ownIDs(t, e)
	src, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(src, "f"), []byte("f\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(src, 4711, 4712); err != nil {
		t.Fatal(err)
	}
	list := []sandboxer.Mount{{Source: src, Target: "/mnt/d"}, {Source: filepath.Join(src, "f"), Target: "/mnt/f", ReadOnly: true}}
	nothing := func(e *extension) {
		t.Helper()
		e.ids.leaving.Wait()
		left, err := mounts.Below(e.ids.mounts)
		entries, _ := os.ReadDir(e.ids.mounts)
		if err != nil || len(left) > 0 || len(entries) > 0 {
			t.Errorf("left: %q, %q, %v", left, entries, err)
		}
	}
	spec := sandboxer.Spec{ID: "fails", Generation: 1, Owner: e.env.Owner, Vouched: []string{sandboxer.RestrictedMounts}, Mounts: append(slices.Clone(list), sandboxer.Mount{Source: src, Target: "/etc/passwd"})}
	if _, err := e.Provision(t.Context(), spec); sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(sandboxer.Message(err), "/etc/passwd: it is not a directory") {
		t.Errorf("a directory at a file: %v", err)
	}
	nothing(e)
	h := up(t, e, sandboxer.Spec{ID: "box", Mounts: list, User: "user"})
	nothing(e)
	if got := sh(t, e, h, "id -u; echo g >/mnt/d/g; stat -c '%u %g' /mnt/d/g; cat /mnt/f; ls -A /.sandboxer/mounts"); got != "1000\n1000 1000\nf" {
		t.Errorf("inside: %q", got)
	}
	fi, err := os.Stat(filepath.Join(src, "g"))
	if err != nil {
		t.Fatal(err)
	}
	if st := fi.Sys().(*syscall.Stat_t); st.Uid != 4711 || st.Gid != 4712 {
		t.Errorf("on this machine what was written belongs to %d:%d", st.Uid, st.Gid)
	}
	next := openIn(t, dir, ours("test"))
	defer func() { _ = next.Close() }()
	if got := sh(t, next, h, "cat /mnt/d/g"); got != "g" {
		t.Errorf("with the next server: %q", got)
	}
	report, err := next.Teardown(context.Background(), h)
	if err != nil || len(report.Kept) != 2 || !strings.HasPrefix(report.Kept[0], src) {
		t.Errorf("Teardown: %+v, %v", report, err)
	}
	nothing(next)
	if data, err := os.ReadFile(filepath.Join(src, "g")); err != nil || string(data) != "g\n" {
		t.Errorf("the source: %q, %v", data, err)
	}
}

// TestMountsAndLocks: locks of this machine have no effect in a sandbox, and a writable mount says
// so. If that changes one day, the message is wrong.
func TestMountsAndLocks(t *testing.T) {
	needsGVisor(t)
	e := openIn(t, shortDir(t), ours("test"))
	defer func() { _ = e.Close() }()
	ownIDs(t, e)
	src, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(src, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	said := func(h sandboxer.Handle) string {
		t.Helper()
		r, err := e.WaitReady(t.Context(), h)
		if err != nil {
			t.Fatal(err)
		}
		return r.Extra[sandboxer.ExtraChanged]
	}
	h := up(t, e, sandboxer.Spec{ID: "writes", Mounts: []sandboxer.Mount{{Source: src, Target: "/mnt/d"}}})
	if got := sh(t, e, h, "flock -n /mnt/d/f echo free || echo held"); got != "free" || said(h) != sandboxer.ChangedMounts {
		t.Errorf("inside the lock is %s, and the sandbox says %q", got, said(h))
	}
	h = up(t, e, sandboxer.Spec{ID: "reads", Mounts: []sandboxer.Mount{{Source: src, Target: "/mnt/d", ReadOnly: true}}})
	if said(h) != "" {
		t.Errorf("of a mount that is only read the sandbox says %q", said(h))
	}
}

// TestMountsOnImages: the user is the image's, missing parts of targets are made, no link of an
// image redirects a mount, and its working directory is the workspace.
func TestMountsOnImages(t *testing.T) {
	e := openTest(t)
	ownIDs(t, e)
	busy, err := os.ReadFile(busybox(t))
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer(t, []tar.Header{
		{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, {Name: "bin/sh", Typeflag: tar.TypeLink, Linkname: "bin/busybox"},
		{Name: "bin/cat", Typeflag: tar.TypeSymlink, Linkname: "busybox"}, {Name: "bin/stat", Typeflag: tar.TypeSymlink, Linkname: "busybox"}, {Name: "bin/id", Typeflag: tar.TypeSymlink, Linkname: "busybox"},
		{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, {Name: "srv/app/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "agent", Typeflag: tar.TypeSymlink, Linkname: "/.sandboxer"}, {Name: "out", Typeflag: tar.TypeSymlink, Linkname: "/etc"},
	}, map[string][]byte{"bin/busybox": busy, "etc/passwd": []byte("root:x:0:0::/root:/bin/sh\napp:x:70:71::/srv/app:/bin/sh\n")}))
	if err == nil {
		img, err = mutate.Config(img, v1.Config{Env: []string{"PATH=/bin"}, User: "app", WorkingDir: "/srv/app"})
	}
	if err != nil {
		t.Fatal(err)
	}
	at, src := filepath.Join(t.TempDir(), "image.tar"), t.TempDir()
	if err := tarball.WriteToFile(at, name.MustParseReference("test:1").(name.Tag), img); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(src, "f"), []byte("f\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := up(t, e, sandboxer.Spec{Image: "tar:" + at, Mounts: []sandboxer.Mount{{Source: src, Target: "/not/there/yet"}}})
	if got := sh(t, e, h, "id -u; cat /not/there/yet/f; echo g >/not/there/yet/g; stat -c '%u %g' /not/there/yet/g"); got != "70\nf\n70 71" {
		t.Errorf("inside: %q", got)
	}
	for _, target := range []string{"/agent", "/agent/mounts", "/out", "/out/x", "/srv/app", "/srv", "/srv/app/in"} {
		spec := sandboxer.Spec{ID: sandboxer.NewID(), Generation: 1, Owner: e.env.Owner, Image: "tar:" + at, Vouched: []string{sandboxer.RestrictedImage, sandboxer.RestrictedMounts},
			Mounts: []sandboxer.Mount{{Source: src, Target: target}}}
		if _, err := e.Provision(t.Context(), spec); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("at %s: %v; want invalid", target, err)
		}
	}
}

// TestMountsOfAWarmSandbox: a warm sandbox has the mounts of its profile, in their present state.
func TestMountsOfAWarmSandbox(t *testing.T) {
	e := openTest(t)
	ownIDs(t, e)
	src := filepath.Join(t.TempDir(), "src")
	if err := os.Mkdir(src, 0o755); err != nil {
		t.Fatal(err)
	}
	spec := sandboxer.Spec{ID: sandboxer.NewID(), Generation: 1, Owner: e.env.Owner, Warm: true, Profile: sandboxer.Profile{Mounts: []sandboxer.Mount{{Source: src, Target: "/mnt/x"}}}}
	spec.Mounts = spec.Profile.Mounts
	basis := func() string {
		t.Helper()
		b, err := e.Basis(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	before := basis()
	h := up(t, e, spec)
	spec.Warm = false
	h, err := e.Claim(t.Context(), h, spec)
	if err != nil {
		t.Fatal(err)
	}
	sh(t, e, h, "echo x >/mnt/x/x")
	if data, err := os.ReadFile(filepath.Join(src, "x")); err != nil || string(data) != "x\n" {
		t.Errorf("the source: %q, %v", data, err)
	}
	if basis() != before {
		t.Error("the basis changes with what is in a source")
	}
	if err := errors.Join(os.Rename(src, src+".was"), os.Mkdir(src, 0o755)); err != nil {
		t.Fatal(err)
	}
	if basis() == before {
		t.Error("the basis is the same, and the source another directory")
	}
}

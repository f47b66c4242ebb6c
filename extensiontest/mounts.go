package extensiontest

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// source makes a directory of this machine with a file f, which only its owner reads.
func source(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(dir, "f"), "outside\n")
	return dir
}

func put(t *testing.T, name, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// wantTree reports an error unless dir holds these files with this content, and nothing else
// but directories.
func wantTree(t *testing.T, dir string, want map[string]string) {
	t.Helper()
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(p)
		name, _ := filepath.Rel(dir, p)
		got[name] = string(data)
		return err
	})
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("%s holds %q, %v; want %q", dir, got, err, want)
	}
}

// exchange swaps two names; one of them is missing for moments.
func exchange(a, b string) error {
	return errors.Join(os.Rename(a, a+".x"), os.Rename(b, a), os.Rename(a+".x", b))
}

func mounted(list ...sandboxer.Mount) func(*sandboxer.Spec) {
	return func(sp *sandboxer.Spec) { sp.Mounts = list }
}

// stranger removes from sp that an operator asks for the mounts.
func stranger(sp *sandboxer.Spec) {
	sp.Vouched = slices.DeleteFunc(slices.Clone(sp.Vouched), func(n string) bool { return n == sandboxer.RestrictedMounts })
}

// mounts are the tests of Spec.Mounts, which an extension enforces or refuses.
func (s *suite) mounts(t *testing.T) {
	refused := func(t *testing.T, kinds []sandboxer.Kind, change ...func(*sandboxer.Spec)) {
		t.Helper()
		b, sp := s.opened, s.spec()
		for _, f := range change {
			f(&sp)
		}
		s.owe(t, b, sp)
		h, err := b.Provision(ctx(t), sp)
		wantKind(t, err, "Provision", kinds...)
		if err == nil {
			t.Errorf("Provision returned %+v", h)
		}
		s.gone(t, b, sp)
	}
	if !s.enforces(Mounts) {
		s.test(t, "are refused", func(t *testing.T) {
			refused(t, []sandboxer.Kind{sandboxer.Unsupported}, mounted(sandboxer.Mount{Source: source(t), Target: "/mnt/x"}))
		})
		return
	}
	if !slices.Contains(s.Want, sandboxer.CanExec) {
		t.Fatal("cannot look inside: an extension with mounts needs exec")
	}
	invalid := []sandboxer.Kind{sandboxer.Invalid}

	both := func(t *testing.T, change ...func(*sandboxer.Spec)) {
		dir := source(t)
		sb := s.up(t, append(change, mounted(sandboxer.Mount{Source: dir, Target: "/mnt/data/deep"}))...)
		if got := sb.sh(t, "cat /mnt/data/deep/f"); got != "outside" {
			t.Errorf("inside, the file of this machine is %q", got)
		}
		sb.sh(t, "umask 077; echo inside >/mnt/data/deep/g; mkdir /mnt/data/deep/d; echo more >/mnt/data/deep/d/h; echo changed >>/mnt/data/deep/f")
		wantTree(t, dir, map[string]string{"f": "outside\nchanged\n", "g": "inside\n", "d/h": "more\n"})
		put(t, filepath.Join(dir, "late"), "late\n")
		if err := os.WriteFile(filepath.Join(dir, "g"), []byte("changed outside\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := sb.sh(t, "cat /mnt/data/deep/late /mnt/data/deep/g; rm /mnt/data/deep/late"); got != "late\nchanged outside" {
			t.Errorf("what this machine wrote later is %q inside", got)
		}
		// The owner of the directory there also owns the files.
		owner := func(name string) [2]uint32 {
			fi, err := os.Lstat(name)
			if err != nil {
				t.Fatal(err)
			}
			st := fi.Sys().(*syscall.Stat_t)
			return [2]uint32{st.Uid, st.Gid}
		}
		for _, name := range []string{"g", "d", "d/h"} {
			if got, want := owner(filepath.Join(dir, name)), owner(dir); got != want {
				t.Errorf("%s belongs to %v; the directory that is mounted to %v", name, got, want)
			}
		}
		if got := sb.sh(t, `[ "$(stat -c %u /mnt/data/deep/f)" = "$(id -u)" ] && [ "$(stat -c %g /mnt/data/deep/f)" = "$(id -g)" ] && echo mine`); got != "mine" {
			t.Error("inside, the files belong to somebody else than the user of commands")
		}
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		wantTree(t, dir, map[string]string{"f": "outside\nchanged\n", "g": "changed outside\n", "d/h": "more\n"})
	}
	s.test(t, "are seen from both sides", func(t *testing.T) { both(t) })
	s.test(t, "belong to the user", func(t *testing.T) {
		both(t, func(sp *sandboxer.Spec) { sp.User = s.User })
	})

	s.test(t, "read-only", func(t *testing.T) {
		dir := source(t)
		sb := s.up(t, mounted(sandboxer.Mount{Source: dir, Target: "/mnt/ro", ReadOnly: true}))
		if got := sb.sh(t, "cat /mnt/ro/f"); got != "outside" {
			t.Errorf("inside, the file of this machine is %q", got)
		}
		for _, script := range []string{"echo x >/mnt/ro/f", "echo x >>/mnt/ro/f", "echo x >/mnt/ro/new", "mkdir /mnt/ro/new", "rm -f /mnt/ro/f", "mv /mnt/ro/f /mnt/ro/g",
			"chmod 777 /mnt/ro/f", "ln -s x /mnt/ro/link", "touch /mnt/ro/f", "mount -o remount,rw /mnt/ro", "umount /mnt/ro"} {
			if x, _, _ := sb.run(t, sandboxer.Cmd{Args: s.script(script), User: "0"}); x.Code == 0 {
				t.Errorf("root inside could %q", script)
			}
		}
		wantTree(t, dir, map[string]string{"f": "outside\n"})
		if fi, err := os.Stat(filepath.Join(dir, "f")); err != nil || fi.Mode() != 0o600 {
			t.Errorf("the file has become %v, %v", fi, err)
		}
	})

	s.test(t, "a single file", func(t *testing.T) {
		dir := source(t)
		put(t, filepath.Join(dir, "beside"), "secret")
		f := filepath.Join(dir, "f")
		sb := s.up(t, mounted(sandboxer.Mount{Source: f, Target: "/etc/one.conf"}, sandboxer.Mount{Source: f, Target: "/mnt/two/conf", ReadOnly: true}))
		if got := sb.sh(t, "echo inside >>/etc/one.conf; cat /mnt/two/conf; ls /mnt/two"); got != "outside\ninside\nconf" {
			t.Errorf("inside: %q", got)
		}
		if x, _, _ := sb.run(t, sandboxer.Cmd{Args: s.script("echo x >>/mnt/two/conf"), User: "0"}); x.Code == 0 {
			t.Error("the file is written to where it is read-only")
		}
		wantTree(t, dir, map[string]string{"f": "outside\ninside\n", "beside": "secret"})
	})

	s.test(t, "one below another", func(t *testing.T) {
		upper, lower := source(t), source(t)
		put(t, filepath.Join(upper, "there/hidden"), "hidden")
		put(t, filepath.Join(lower, "f"), "lower\n")
		sb := s.up(t, mounted(
			sandboxer.Mount{Source: lower, Target: "/mnt/up/there", ReadOnly: true},
			sandboxer.Mount{Source: lower, Target: "/mnt/up/new/place"},
			sandboxer.Mount{Source: upper, Target: "/mnt/up"}))
		if got := sb.sh(t, "cat /mnt/up/f /mnt/up/there/f /mnt/up/new/place/f; ls /mnt/up/there"); got != "outside\nlower\nlower\nf" {
			t.Errorf("inside: %q", got)
		}
		if x, _, _ := sb.run(t, sandboxer.Cmd{Args: s.script("echo x >/mnt/up/there/x"), User: "0"}); x.Code == 0 {
			t.Error("the lower one is read-only, and was written to")
		}
		sb.sh(t, "echo x >/mnt/up/new/place/x; echo y >/mnt/up/y")
		wantTree(t, lower, map[string]string{"f": "lower\n", "x": "x\n"})
		wantTree(t, upper, map[string]string{"f": "outside\n", "there/hidden": "hidden", "y": "y\n"})
		t.Run("with nowhere to be", func(t *testing.T) {
			refused(t, invalid, mounted(sandboxer.Mount{Source: lower, Target: "/mnt/up/none"}, sandboxer.Mount{Source: upper, Target: "/mnt/up", ReadOnly: true}))
		})
		t.Run("through a link", func(t *testing.T) {
			if err := os.Symlink("/usr", filepath.Join(upper, "link")); err != nil {
				t.Fatal(err)
			}
			refused(t, invalid, mounted(sandboxer.Mount{Source: lower, Target: "/mnt/up/link/x"}, sandboxer.Mount{Source: upper, Target: "/mnt/up"}))
		})
	})

	s.test(t, "impossible targets", func(t *testing.T) {
		dir, work := source(t), "/mnt/work/space"
		for _, target := range []string{"/", "", "mnt/x", "/mnt/../x", "/mnt/x/", "/proc", "/proc/x", "/sys", "/sys/fs/x", "/dev", "/dev/shm", "/.sandboxer", "/.sandboxer/x", "/mnt/work", work, work + "/in"} {
			t.Run("at "+target, func(t *testing.T) {
				refused(t, invalid, mounted(sandboxer.Mount{Source: dir, Target: target}), func(sp *sandboxer.Spec) { sp.Workspace = work })
			})
		}
		t.Run("twice", func(t *testing.T) {
			refused(t, invalid, mounted(sandboxer.Mount{Source: dir, Target: "/mnt/x"}, sandboxer.Mount{Source: source(t), Target: "/mnt/x"}))
		})
		t.Run("too many", func(t *testing.T) {
			var list []sandboxer.Mount
			for i := range sandboxer.MaxMounts + 1 {
				list = append(list, sandboxer.Mount{Source: dir, Target: "/mnt/" + strings.Repeat("x", i+1)})
			}
			refused(t, invalid, mounted(list...))
		})
		t.Run("a directory at a file", func(t *testing.T) {
			refused(t, invalid, mounted(sandboxer.Mount{Source: dir, Target: "/etc/passwd"}))
		})
	})

	s.test(t, "impossible sources", func(t *testing.T) {
		dir := source(t)
		put(t, filepath.Join(dir, "d/f"), "")
		err := errors.Join(os.Symlink(filepath.Join(dir, "d"), filepath.Join(dir, "link")), syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
		if err != nil {
			t.Fatal(err)
		}
		for name, src := range map[string]string{"missing": dir + "/none", "relative": "d", "unclean": dir + "/d/../d", "a link": dir + "/link", "through a link": dir + "/link/f",
			"below a file": dir + "/f/x", "a named pipe": dir + "/fifo", "a device": "/dev/null"} {
			t.Run(name, func(t *testing.T) { refused(t, invalid, mounted(sandboxer.Mount{Source: src, Target: "/mnt/x"})) })
		}
	})

	s.test(t, "snapshots hold none", func(t *testing.T) {
		dir := source(t)
		m := mounted(sandboxer.Mount{Source: dir, Target: "/mnt/data"})
		sb := s.up(t, m)
		sb.sh(t, "echo mine >kept; echo before >/mnt/data/g")
		if sb.b.Can(sandboxer.CanArchive) {
			var out bytes.Buffer
			if err := sb.b.Archive(ctx(t), sb.h, "", &out); err != nil {
				t.Fatal(describe(err))
			}
			var names []string
			for r := tar.NewReader(&out); ; {
				h, err := r.Next()
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				names = append(names, path.Base(h.Name))
			}
			if !slices.Contains(names, "kept") || slices.Contains(names, "g") || slices.Contains(names, "f") {
				t.Errorf("an archive of the workspace holds %q", names)
			}
		}
		if !sb.b.Can(sandboxer.CanSnapshot) {
			return
		}
		snap := sb.save(t, "snap-"+sandboxer.NewID())
		put(t, filepath.Join(dir, "g"), "after\n")
		copied := s.restore(t, sb, snap, m)
		if got := copied.sh(t, "cat kept /mnt/data/g; echo copy >/mnt/data/h"); got != "mine\nafter" {
			t.Errorf("the restored sandbox sees %q", got)
		}
		wantTree(t, dir, map[string]string{"f": "outside\n", "g": "after\n", "h": "copy\n"})
	})

	s.roots(t, refused)
}

// roots are the tests of what callers that are not operators may mount.
func (s *suite) roots(t *testing.T, refused func(*testing.T, []sandboxer.Kind, ...func(*sandboxer.Spec))) {
	if s.MountRoot == "" || s.ReadOnlyRoot == "" {
		t.Fatal("the harness names no roots of mounts")
	}
	denied := []sandboxer.Kind{sandboxer.Denied}
	inRoot := func(t *testing.T, root string) string {
		t.Helper()
		dir, err := os.MkdirTemp(root, "mount")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		put(t, filepath.Join(dir, "d/f"), "inside\n")
		return dir
	}
	secret := func(t *testing.T) string {
		dir := source(t)
		put(t, filepath.Join(dir, "f"), "secret\n")
		return dir
	}

	s.test(t, "in a root", func(t *testing.T) {
		dir, ro := inRoot(t, s.MountRoot), inRoot(t, s.ReadOnlyRoot)
		sb := s.up(t, stranger, mounted(sandboxer.Mount{Source: dir + "/d", Target: "/mnt/rw"}, sandboxer.Mount{Source: ro, Target: "/mnt/ro", ReadOnly: true}))
		if got := sb.sh(t, "echo x >/mnt/rw/x; cat /mnt/rw/f /mnt/ro/d/f"); got != "inside\ninside" {
			t.Errorf("inside: %q", got)
		}
		wantTree(t, dir, map[string]string{"d/f": "inside\n", "d/x": "x\n"})
	})
	s.test(t, "out of the roots", func(t *testing.T) {
		dir := secret(t)
		for _, src := range []string{dir, filepath.Dir(s.MountRoot), s.MountRoot + "x", "/etc"} {
			refused(t, denied, stranger, mounted(sandboxer.Mount{Source: src, Target: "/mnt/x", ReadOnly: true}))
		}
	})
	s.test(t, "to write in a read-only root", func(t *testing.T) {
		refused(t, denied, stranger, mounted(sandboxer.Mount{Source: inRoot(t, s.ReadOnlyRoot), Target: "/mnt/x"}))
	})
	s.test(t, "led out by a link", func(t *testing.T) {
		dir, out := inRoot(t, s.MountRoot), secret(t)
		if err := errors.Join(os.Symlink(out, dir+"/link"), os.Symlink(filepath.Join(out, "f"), dir+"/file")); err != nil {
			t.Fatal(err)
		}
		for _, src := range []string{dir + "/link", dir + "/link/f", dir + "/file"} {
			refused(t, []sandboxer.Kind{sandboxer.Invalid, sandboxer.Denied}, stranger, mounted(sandboxer.Mount{Source: src, Target: "/mnt/x"}))
		}
	})
	s.test(t, "led out by a link after the check", func(t *testing.T) {
		dir, out := inRoot(t, s.MountRoot), secret(t)
		b, sp := s.opened, s.spec()
		stranger(&sp)
		sp.Mounts = []sandboxer.Mount{{Source: dir + "/d", Target: "/mnt/x"}}
		checked, err := b.Check(ctx(t), sp)
		if err != nil {
			t.Fatal(describe(err))
		}
		if err := errors.Join(os.Rename(dir+"/d", dir+"/was"), os.Symlink(out, dir+"/d")); err != nil {
			t.Fatal(err)
		}
		s.owe(t, b, sp)
		_, err = b.ProvisionChecked(ctx(t), sp, checked)
		wantKind(t, err, "Provision", sandboxer.Invalid, sandboxer.Denied)
		s.gone(t, b, sp)
	})
	s.test(t, "led out by a link at any time", func(t *testing.T) {
		dir, out := inRoot(t, s.MountRoot), secret(t)
		if err := os.Symlink(out, dir+"/other"); err != nil {
			t.Fatal(err)
		}
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := exchange(dir+"/d", dir+"/other"); err != nil {
					t.Error(err)
					return
				}
				time.Sleep(50 * time.Microsecond) // long enough for half of all looks
			}
		}()
		defer func() { close(stop); <-stopped }()
		b := s.opened
		for range 12 {
			sp := s.spec()
			stranger(&sp)
			sp.Mounts = []sandboxer.Mount{{Source: dir + "/d", Target: "/mnt/x"}}
			s.owe(t, b, sp)
			h, err := b.Provision(ctx(t), sp)
			if err != nil {
				wantKind(t, err, "Provision", sandboxer.Invalid, sandboxer.Denied)
				continue
			}
			if _, err := b.WaitReady(ctx(t), h); err != nil {
				t.Fatal(describe(err))
			}
			sb := &sandbox{s: s, b: b, h: h, spec: sp}
			if got := sb.sh(t, "cat /mnt/x/f; ls -a /mnt/x"); !strings.HasPrefix(got, "inside\n") || strings.Contains(got, "secret") {
				t.Fatalf("a sandbox sees %q", got)
			}
			sb.sh(t, "echo x >/mnt/x/x")
			if _, err := b.Teardown(ctx(t), h); err != nil {
				t.Fatal(describe(err))
			}
		}
		wantTree(t, out, map[string]string{"f": "secret\n"})
	})
}

//go:build linux

package local

import (
	"bytes"
	"crypto/md5"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// inOwnEtc runs the calling test again in a process with a mount namespace of its own, in
// which /etc and dpkg's database are copies, and reports whether this is that process.
func inOwnEtc(t *testing.T) bool {
	t.Helper()
	const mark = "SANDBOXER_TEST_OWN_ETC"
	if os.Getenv(mark) == "" {
		if os.Geteuid() != 0 {
			t.Skip("only root has a mount namespace of its own")
		}
		cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "private", os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), mark+"=1")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if strings.Contains(string(out), "--- SKIP") {
			t.Skipf("%s", out)
		}
		return false
	}
	for _, dir := range []string{"/etc", "/var/lib/dpkg"} {
		if _, err := os.Stat(dir); err != nil {
			continue
		}
		own := filepath.Join(t.TempDir(), "own")
		if out, err := exec.CommandContext(t.Context(), "cp", "-a", dir, own).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if err := unix.Mount(own, dir, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	}
	return true
}

// Files of a package that is installed while the server runs are complete in the next sandbox;
// a file that an operator changed is in none.
func TestEtcFollowsTheMachine(t *testing.T) {
	needsGVisor(t)
	if !inOwnEtc(t) {
		return
	}
	write := func(name, content string, mode os.FileMode) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name+".new", []byte(content), mode), os.Chmod(name+".new", mode), os.Rename(name+".new", name)); err != nil {
			t.Fatal(err)
		}
	}
	install := func(pkg string, files map[string]string) {
		t.Helper()
		status, err := os.ReadFile(dpkgStatus)
		if err != nil {
			t.Skip("no dpkg here")
		}
		entry := "\nPackage: " + pkg + "\nStatus: install ok installed\nConffiles:\n"
		for name, content := range files {
			write(name, content, 0o644)
			entry += fmt.Sprintf(" %s %x\n", name, md5.Sum([]byte(content)))
		}
		write(dpkgStatus, string(status)+entry+"Description: of a test\n", 0o644)
	}
	install("sbx-early", map[string]string{"/etc/sbxearly/conf": "as shipped", "/etc/sbxearly/changed": "as shipped", "/etc/sbxearly/private": "as shipped"})
	write("/etc/sbxearly/changed", "password=hunter2", 0o644)
	if err := os.Chmod("/etc/sbxearly/private", 0o600); err != nil {
		t.Fatal(err)
	}
	write("/etc/sbxearly/unowned", "password=hunter2", 0o644)
	for name, to := range map[string]string{"/etc/sbxearly/usr": "/usr/bin/env", "/etc/sbxearly/root": "/root/secret", "/etc/sbxearly/up": "../../root"} {
		if err := os.Symlink(to, name); err != nil {
			t.Fatal(err)
		}
	}
	e := openIn(t, shortDir(t), ours("test"))
	before := up(t, e, sandboxer.Spec{})
	if got, want := sh(t, e, before, "cd /etc/sbxearly; ls; cat conf; test -e usr && echo leads"), "conf\nusr\nas shippedleads"; got != want {
		t.Errorf("a sandbox has\n%s\nwant\n%s", got, want)
	}
	if got := sh(t, e, before, "cat /etc/shadow /etc/hostname /etc/machine-id /etc/fstab 2>/dev/null; true"); got != "" {
		t.Errorf("a sandbox has %q", got)
	}

	// An install: a package's file, an alternative, the linker's cache.
	install("sbx-late", map[string]string{"/etc/sbxlate.conf": "late"})
	if err := os.Symlink("/usr/bin/env", "/etc/alternatives/sbxlate"); err != nil {
		t.Fatal(err)
	}
	write("/etc/ld.so.cache", "another cache", 0o644)
	after := up(t, e, sandboxer.Spec{})
	const look = "cat /etc/sbxlate.conf; test -e /etc/alternatives/sbxlate && echo; head -c 13 /etc/ld.so.cache"
	if got, want := sh(t, e, after, look), "late\nanother cache"; got != want {
		t.Errorf("after an install a sandbox has %q; want %q", got, want)
	}
	if got := sh(t, e, before, "test -e /etc/sbxlate.conf || echo absent"); got != "absent" {
		t.Errorf("a sandbox from before changes: %q", got)
	}

	// What the operator lists, links aside.
	e.Close()
	e = openIn(t, filepath.Dir(e.dir("x")), ours("test"), func(c *Config) { c.Etc = []string{"/etc/sbxearly", "sbxearly/up/secret"} })
	listed := up(t, e, sandboxer.Spec{})
	if got, want := sh(t, e, listed, "cd /etc/sbxearly; ls; cat unowned"), "changed\nconf\nroot\nunowned\nup\nusr\npassword=hunter2"; got != want {
		t.Errorf("with etc: a sandbox has\n%s\nwant\n%s", got, want)
	}
}

func TestEtcSettings(t *testing.T) {
	for _, bad := range []string{"..", "../root", "/root", "/etc", "/etc/", "a/../b", "shadow", "/etc/shadow", "shadow-", "passwd", "gshadow", "sudoers.d/x", "security/opasswd", ""} {
		c := Config{Etc: []string{bad}}
		if err := c.Validate(); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("etc: %q gives %v", bad, err)
		}
	}
	c := Config{Etc: []string{"/etc/fonts", "matplotlibrc"}}
	if err := c.Validate(); err != nil || c.Etc[0] != "fonts" {
		t.Errorf("%v, %q", err, c.Etc)
	}
}

// Links and parents do not expose hidden directories.
func TestPathsAreFollowed(t *testing.T) {
	for _, bad := range []string{"/var", "/var/lib", "/var/run", "/var/spool/cron", "/", "/root/x", "/etc/ssl"} {
		c := Config{Paths: []string{bad}}
		if err := c.Validate(); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("paths: %q gives %v", bad, err)
		}
	}
	dir := t.TempDir()
	agent := filepath.Join(dir, "agent")
	if err := os.WriteFile(agent, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	fine := filepath.Join(dir, "fine")
	if err := os.Mkdir(fine, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		to string
		ok bool
	}{"etc": {"/etc", false}, "ssl": {"/etc/ssl", false}, "root": {"/root", false}, "var": {"/var", false}, "all": {"/", false},
		"chain": {filepath.Join(dir, "etc"), false}, "fine": {fine, true}} {
		link := filepath.Join(dir, "link-"+name)
		if name == "chain" {
			if err := os.Symlink("/etc", c.to); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink(c.to, link); err != nil {
			t.Fatal(err)
		}
		m := skeletonMaker{dir: filepath.Join(dir, "skel"), agent: agent, paths: []string{link}, checked: map[string]bool{}}
		_, err := m.make()
		if c.ok != (err == nil) || err != nil && (sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(err.Error(), "sandboxes can never see")) {
			t.Errorf("%s, a link to %s: %v", link, c.to, err)
		}
		if os.Geteuid() != 0 || c.ok {
			continue
		}
		// Also if it becomes one only after the check.
		at := filepath.Join(dir, "at-"+name)
		if err := os.Mkdir(at, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := bindShown(link, at); sandboxer.KindOf(err) != sandboxer.Invalid {
			_ = unmountBelow(at)
			t.Errorf("%s was mounted: %v", link, err)
		}
	}
}

func BenchmarkSkeletonLook(b *testing.B) {
	m := skeletonMaker{agent: "/bin/sh", dir: b.TempDir(), checked: map[string]bool{}}
	s, err := m.make()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		s.current()
	}
}

// A skeleton that a crash or the disk damaged is made again, and an intact one takes no room.
func TestSkeletonIsWhole(t *testing.T) {
	dir := t.TempDir()
	agent := filepath.Join(dir, "agent")
	if err := os.WriteFile(agent, []byte("program"), 0o755); err != nil {
		t.Fatal(err)
	}
	fresh := func() *skeleton {
		t.Helper()
		m := skeletonMaker{dir: filepath.Join(dir, "skel"), agent: agent, checked: map[string]bool{}}
		s, err := m.make()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := fresh()
	file := filepath.Join(s.dir, agentPath)
	was, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	fresh()
	if is, err := os.Stat(file); err != nil || !os.SameFile(was, is) {
		t.Errorf("an intact skeleton was made anew: %v", err)
	}
	for what, spoil := range map[string]func() error{
		"flipped":   func() error { return os.WriteFile(file, []byte("prograM"), 0o755) },
		"no passwd": func() error { return os.Remove(filepath.Join(s.dir, "etc/passwd")) },
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		fresh()
		if data, err := os.ReadFile(file); err != nil || string(data) != "program" {
			t.Errorf("%s: %q, %v", what, data, err)
		}
		if _, err := os.Stat(filepath.Join(s.dir, "etc/passwd")); err != nil {
			t.Error(err)
		}
	}
}

// A start on a full disk uses what an earlier one made; a first one reports what is missing, and
// works when there is room.
func TestOpensOnAFullDisk(t *testing.T) {
	needsGVisor(t)
	if os.Geteuid() != 0 {
		t.Skip("only root mounts a small disk")
	}
	for what, options := range map[string]string{"room": "size=64m", "inodes": "nr_inodes=2000,size=512m"} {
		t.Run(what, func(t *testing.T) {
			dir := shortDir(t)
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
				t.Fatal(err)
			}
			fill := func() (free func()) {
				t.Helper()
				hog := filepath.Join(dir, "hog")
				if err := os.MkdirAll(hog, 0o755); err != nil && !errors.Is(err, unix.ENOSPC) {
					t.Fatal(err)
				}
				if what == "room" {
					f, err := os.Create(filepath.Join(hog, "f"))
					if err != nil {
						t.Fatal(err)
					}
					defer f.Close()
					for size := 1 << 20; size >= 1; size /= 2 {
						for {
							if _, err := f.Write(make([]byte, size)); err != nil {
								break
							}
						}
					}
				} else {
					for i := 0; ; i++ {
						if err := os.WriteFile(filepath.Join(hog, fmt.Sprint(i)), nil, 0o600); err != nil {
							break
						}
					}
				}
				return func() {
					if err := os.RemoveAll(hog); err != nil {
						t.Fatal(err)
					}
				}
			}
			state := filepath.Join(dir, "s")
			if err := os.MkdirAll(state, 0o700); err != nil {
				t.Fatal(err)
			}
			open := func() (sandboxer.Extension, error) {
				return Adapter.Open(t.Context(), sandboxer.Env{Extension: "ext.local", Owner: ours("test"), Dir: state, Decode: func(v any) error {
					c := v.(*Config)
					c.Runner, c.Agent = filepath.Join(helpers, "sandboxer-runner"), filepath.Join(helpers, "sandboxer-agent")
					return nil
				}})
			}
			free := fill()
			if ext, err := open(); sandboxer.KindOf(err) != sandboxer.Unavailable {
				t.Fatalf("a first start without %s: %v, %v", what, ext, err)
			}
			free()
			ext, err := open()
			if err != nil {
				t.Fatal(err)
			}
			e := ext.(*extension)
			h := up(t, e, sandboxer.Spec{})
			free = fill()
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			if ext, err = open(); err != nil {
				t.Fatalf("a start without %s: %v", what, err)
			}
			e = ext.(*extension)
			defer e.Close()
			if got := sh(t, e, h, "echo here"); got != "here" {
				t.Errorf("it says %q", got)
			}
			if _, err := e.Provision(t.Context(), sandboxer.Spec{ID: "nospace", Generation: 1, Owner: ours("test")}); sandboxer.KindOf(err) != sandboxer.Exhausted {
				t.Errorf("a create without %s: %v", what, err)
			}
			free()
			up(t, e, sandboxer.Spec{})
			if _, err := e.Teardown(t.Context(), h); err != nil {
				t.Error(err)
			}
		})
	}
}

// Programs of this machine find the fonts of this machine, which takes files of /etc.
func TestFonts(t *testing.T) {
	needsGVisor(t)
	has := func(name string) bool { _, err := os.Stat(name); return err == nil }
	if !has("/usr/bin/fc-list") || !has("/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf") || !has("/etc/fonts/fonts.conf") {
		t.Skip("this machine has no fontconfig, or not the fonts of fonts-dejavu-core")
	}
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	for _, name := range []string{"root", "nobody"} {
		var out, said bytes.Buffer
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{User: name, Args: []string{"fc-match", "--format", "%{file}\n", "DejaVu Sans"}, Stdout: &out, Stderr: &said})
		if err != nil || x.Code != 0 || !strings.HasSuffix(strings.TrimSpace(out.String()), "/DejaVuSans.ttf") || strings.Contains(said.String(), "Cannot load") {
			t.Errorf("as %s: %+v, %v: %q, %q", name, x, err, out.String(), said.String())
		}
	}
}

// matplotlib of the machine finds its configuration, and draws.
func TestMatplotlib(t *testing.T) {
	needsGVisor(t)
	if _, err := os.Stat("/usr/lib/python3/dist-packages/matplotlib"); err != nil {
		t.Skip("this machine has no python3-matplotlib (scripts/setup.sh installs it)")
	}
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	const draw = `import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as p
p.plot([1, 2]); p.title("two"); p.savefig("/tmp/%d.png" % __import__("os").getuid())
print(matplotlib.matplotlib_fname())`
	for _, name := range []string{"root", "user"} {
		var out, said bytes.Buffer
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{User: name, Args: []string{"/usr/bin/python3", "-c", draw}, Stdout: &out, Stderr: &said})
		if err != nil || x.Code != 0 || out.String() != "/etc/matplotlibrc\n" || said.Len() > 0 {
			t.Errorf("as %s: %+v, %v: %q, %q", name, x, err, out.String(), said.String())
		}
	}
}

// TestMadeNextToClose: a place for a mount, and the list of user IDs, are also made while other processes, which close,
// remove the empty directories above them.
func TestMadeNextToClose(t *testing.T) {
	above := filepath.Join(t.TempDir(), "box")
	at := filepath.Join(above, "place")
	ids := &idRanges{dir: filepath.Join(above, "ids")}
	over := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
				_ = unix.Rmdir(ids.dir)
				_ = unix.Rmdir(above)
			}
		}
	})
	defer wg.Wait()
	defer close(over)
	for i := range 100 {
		if err := walkable(at); err != nil {
			t.Fatalf("a place after %d: %v", i, err)
		}
		if err := unix.Rmdir(at); err != nil {
			t.Fatal(err)
		}
		unlock, err := ids.lock(t.Context())
		if err != nil {
			t.Fatalf("a lock after %d: %v", i, err)
		}
		unlock()
	}
}

// TestOpenNextToClose: an extension opens, and has its root file system, while others in the same directory close.
func TestOpenNextToClose(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 10 {
				e := openIn(t, dir, ours("conformance"))
				if s, err := e.skeleton(); err != nil {
					t.Error(err)
				} else if _, err := os.Stat(filepath.Join(s.root, agentPath)); err != nil {
					t.Error(err)
				}
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	e := openIn(t, dir, ours("conformance"))
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(e.mounts()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the last one left its mounts: %v", err)
	}
}

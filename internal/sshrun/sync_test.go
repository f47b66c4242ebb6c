package sshrun_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// busyTools is a directory with BusyBox's tools and the login shell, and no others.
func busyTools(t *testing.T) string {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("there is no busybox")
	}
	dir := t.TempDir()
	copyFile := func(from, to string) {
		data, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, to), data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	copyFile(busybox, "busybox")
	copyFile("/bin/bash", "bash")
	out, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(string(out)) {
		os.Symlink("busybox", filepath.Join(dir, name))
	}
	return dir
}

func makeTree(t testing.TB, dir string) {
	t.Helper()
	put := func(name, text string, mode fs.FileMode) {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		os.Chmod(name, mode)
	}
	put("plain", "one", 0o644)
	put("run.sh", "#!/bin/sh\n", 0o755)
	put("deep/er/est/file", strings.Repeat("x", 300_000), 0o600)
	put("empty", "", 0o444)
	for _, n := range []string{"with space", "-rf", "quo'te", `back\slash`, "new\nline", "ünï", "\xff\xfe", "$HOME", "*", "a\tb", "~", ".hidden", strings.Repeat("long", 50)} {
		put("odd/"+n, n, 0o640)
	}
	os.MkdirAll(filepath.Join(dir, "emptydir"), 0o750)
	os.Symlink("plain", filepath.Join(dir, "link"))
	os.Symlink("/no/such place", filepath.Join(dir, "dangling"))
	os.Symlink("deep/er", filepath.Join(dir, "dirlink"))
	old := time.Date(2001, 2, 3, 4, 5, 6, 123456789, time.UTC)
	os.Chtimes(filepath.Join(dir, "plain"), old, old)
}

// describe tells all of a tree that a copy must keep.
func describe(t testing.TB, dir string, seconds bool) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(dir, file)
		fi, err := d.Info()
		if err != nil || name == "." {
			return err
		}
		text := ""
		switch {
		case fi.Mode().IsRegular():
			data, _ := os.ReadFile(file)
			at := fi.ModTime()
			if seconds {
				at = at.Truncate(time.Second)
			}
			text = fmt.Sprintf("%.20q %d %s", data, len(data), at.UTC())
		case fi.Mode().Type() == fs.ModeSymlink:
			text, _ = os.Readlink(file)
			found[name] = "link to " + text
			return nil
		}
		found[name] = fi.Mode().String() + " " + text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func sameTree(t *testing.T, got, want string, seconds bool) {
	t.Helper()
	g, w := describe(t, got, seconds), describe(t, want, seconds)
	for name := range w {
		if g[name] != w[name] {
			t.Errorf("%q is %q, want %q", name, g[name], w[name])
		}
	}
	for name := range g {
		if _, ok := w[name]; !ok {
			t.Errorf("%q should not be there", name)
		}
	}
}

func TestPush(t *testing.T) {
	for _, kind := range []string{"gnu", "busybox"} {
		t.Run(kind, func(t *testing.T) {
			var so sshtest.Options
			if kind == "busybox" {
				so.Tools = busyTools(t)
			}
			s := sshtest.Start(t, so)
			h := host(t, newPool(t, sshrun.Options{}), s.Target())
			coarse := kind == "busybox"
			src, dst := t.TempDir(), filepath.Join(t.TempDir(), "made", "anew")
			makeTree(t, src)
			push := func(sent int) sshrun.SyncStats {
				t.Helper()
				stats, err := h.Push(t.Context(), src, dst, sshrun.SyncOptions{Delete: true})
				if err != nil {
					t.Fatalf("%v: %v", err, errors.Unwrap(err))
				}
				sameTree(t, dst, src, coarse)
				if sent >= 0 && stats.Sent != sent {
					t.Errorf("%d sent, want %d", stats.Sent, sent)
				}
				return stats
			}
			first := push(-1)
			if first.Sent != first.Files || first.Files < 20 {
				t.Errorf("at first %d of %d were sent", first.Sent, first.Files)
			}
			again := 0
			if coarse {
				// Links cannot be distinguished there, nor odd names.
				again = 4
			}
			push(again)

			// A change within the same second, of the same size, is seen.
			name := filepath.Join(src, "run.sh")
			fi, _ := os.Stat(name)
			os.WriteFile(name, []byte("#!/bin/xx\n"), 0o755)
			at := fi.ModTime().Truncate(time.Second)
			if !at.Add(time.Millisecond).Equal(fi.ModTime()) {
				at = at.Add(time.Millisecond)
			}
			os.Chtimes(name, at, at)
			push(again + 1)

			// Deleted, changed into something else, changed in mode, planted.
			os.RemoveAll(filepath.Join(src, "odd"))
			os.Remove(filepath.Join(src, "dirlink"))
			os.MkdirAll(filepath.Join(src, "dirlink", "now"), 0o755)
			os.RemoveAll(filepath.Join(src, "deep"))
			os.WriteFile(filepath.Join(src, "deep"), []byte("a file"), 0o644)
			os.Chmod(filepath.Join(src, "plain"), 0o400)
			os.WriteFile(filepath.Join(dst, "planted"), nil, 0o644)
			os.Remove(filepath.Join(dst, "emptydir"))
			os.Symlink("/etc", filepath.Join(dst, "emptydir"))
			push(-1)
			if _, err := os.Stat("/etc/passwd"); err != nil {
				t.Fatal("a link was followed")
			}

			// And back again.
			os.Remove(filepath.Join(src, "deep"))
			os.RemoveAll(filepath.Join(src, "dirlink"))
			os.Chmod(filepath.Join(src, "plain"), 0o600)
			makeTree(t, src)
			push(-1)
		})
	}
}

func TestPushIgnores(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	src, dst := t.TempDir(), t.TempDir()
	for _, f := range []string{".sandboxerignore", "a.log", "keep.log", "sub/b.log", "build/x", "sub/build/y", "docs/build/z", "node_modules/m/i.js", "top", "sub/top", "extra"} {
		os.MkdirAll(filepath.Join(src, filepath.Dir(f)), 0o755)
		os.WriteFile(filepath.Join(src, f), nil, 0o644)
	}
	os.WriteFile(filepath.Join(src, ".sandboxerignore"), []byte("# logs\n*.log\n!keep.log\nbuild/\n/top\nnode_modules\ndocs/**/z\nextra\n"), 0o644)
	for _, f := range []string{"build/theirs", "stale/file", "stale2"} {
		os.MkdirAll(filepath.Join(dst, filepath.Dir(f)), 0o755)
		os.WriteFile(filepath.Join(dst, f), nil, 0o644)
	}
	if _, err := h.Push(t.Context(), src, dst, sshrun.SyncOptions{Delete: true}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for name := range describe(t, dst, true) {
		got = append(got, name)
	}
	slices.Sort(got)
	want := []string{".sandboxerignore", "build", "build/theirs", "docs", "keep.log", "sub", "sub/top"}
	if !slices.Equal(got, want) {
		t.Errorf("there are %q, want %q", got, want)
	}
}

func TestPushCutMidwayIsRepeatable(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	relay := sshtest.NewRelay(t, s.Port, 0)
	target := s.Target()
	target.Port = relay.Port
	h := host(t, newPool(t, sshrun.Options{}), target)
	src, dst := t.TempDir(), t.TempDir()
	makeTree(t, src)
	for i := range 40 {
		os.WriteFile(filepath.Join(src, fmt.Sprint("big", i)), bytes.Repeat([]byte{byte(i)}, 1<<20), 0o644)
	}
	done := make(chan error, 1)
	go func() {
		_, err := h.Push(t.Context(), src, dst, sshrun.SyncOptions{})
		done <- err
	}()
	waitFor(t, func() bool { _, err := os.Stat(filepath.Join(dst, "big1")); return err == nil })
	relay.Cut()
	err := <-done
	if err != nil && !errors.Is(err, sshrun.ErrLost) {
		t.Errorf("%v", err)
	}
	stats, err := h.Push(t.Context(), src, dst, sshrun.SyncOptions{})
	if err != nil {
		t.Fatal(err)
	}
	sameTree(t, dst, src, false)
	if stats.Sent >= stats.Files {
		t.Errorf("all %d were sent again", stats.Sent)
	}
}

// Files that many streams send at once need no other stream's directories.
func TestPushInParts(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{})
	relay := sshtest.NewRelay(t, s.Port, 25*time.Millisecond)
	target := s.Target()
	target.Port = relay.Port
	h := host(t, newPool(t, sshrun.Options{}), target)
	src := t.TempDir()
	for i := range 12 { // the big ones are the last of their directory: they leave small ones to others
		d := filepath.Join(src, fmt.Sprintf("d%02d/e/f", i))
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		for j := range 8 {
			os.WriteFile(filepath.Join(d, fmt.Sprint("small", j)), []byte{byte(j)}, 0o644)
		}
		os.WriteFile(filepath.Join(d, "zz"), bytes.Repeat([]byte{byte(i)}, 1<<20), 0o644)
	}
	for range 10 {
		dst := t.TempDir()
		if _, err := h.Push(t.Context(), src, dst, sshrun.SyncOptions{}); err != nil {
			t.Fatal(err)
		}
		sameTree(t, dst, src, false)
	}
}

func TestPushFarAway(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	relay := sshtest.NewRelay(t, s.Port, 20*time.Millisecond)
	target := s.Target()
	target.Port = relay.Port
	h := host(t, newPool(t, sshrun.Options{}), target)
	src, dst := t.TempDir(), t.TempDir()
	makeTree(t, src)
	for i := range 12 {
		os.WriteFile(filepath.Join(src, fmt.Sprint("big", i)), bytes.Repeat([]byte{byte(i)}, 1<<20), 0o644)
	}
	if _, err := h.Push(t.Context(), src, dst, sshrun.SyncOptions{}); err != nil {
		t.Fatal(err)
	}
	sameTree(t, dst, src, false)
}

func TestWriteFile(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	name := filepath.Join(t.TempDir(), "a 'file'")
	data := bytes.Repeat([]byte("0123456789\n"), 100_000)
	if err := h.WriteFile(t.Context(), name, 0o640, bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if fi, err := os.Stat(name); err != nil || fi.Mode() != 0o640 {
		t.Errorf("%v, %v", fi, err)
	}
	broken := errors.New("broken")
	if err := h.WriteFile(t.Context(), name, 0o640, io.MultiReader(strings.NewReader("half"), failing{broken})); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	if now, _ := os.ReadFile(name); !bytes.Equal(now, data) {
		t.Error("the former content is lost")
	}
	if left, _ := os.ReadDir(filepath.Dir(name)); len(left) != 1 {
		t.Errorf("left over: %v", left)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestBusyBoxHost(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{Tools: busyTools(t)})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	mark := filepath.Join(t.TempDir(), "pid")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := h.Run(ctx, sshrun.Cmd{Script: `setsid sleep 1000 & echo $! >"$1.t"; mv "$1.t" "$1"; sleep 1000`, Args: []string{mark}})
		done <- err
	}()
	waitFor(t, func() bool { _, err := os.Stat(mark); return err == nil })
	cancel()
	if err := <-done; sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Error(err)
	}
	pid, _ := os.ReadFile(mark)
	if alive(strings.TrimSpace(string(pid))) {
		t.Error("what it started lives on")
	}
}

func TestKillByVariable(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	id := fmt.Sprintf("sbx-%d", os.Getpid())
	start := func(id string) string {
		out, err := h.Output(t.Context(), `SBX_TEST=$1 setsid sleep 1000 >/dev/null 2>&1 & echo $!`, id)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	mine, other := start(id), start(id+"0")
	waitFor(t, func() bool {
		return len(withEnv(t, "SBX_TEST="+id)) == 1 && len(withEnv(t, "SBX_TEST="+id+"0")) == 1
	})
	if err := h.Kill(t.Context(), "SBX_TEST", id); err != nil {
		t.Error(err)
	}
	if alive(mine) || !alive(other) {
		t.Errorf("mine alive: %v; another's, with a longer name, alive: %v", alive(mine), alive(other))
	}
	h.Kill(t.Context(), "SBX_TEST", id+"0")
}

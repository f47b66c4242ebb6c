package sshrun_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

func subdir(root, dir string) sshrun.Subdir {
	return sshrun.Subdir{Root: root, Dir: dir, RootName: "the tree", Name: "the part"}
}

// tarOf makes a tar of files; a name that ends in "/" is a directory.
func tarOf(t *testing.T, files map[string]string) io.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, text := range files {
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o640, Size: int64(len(text)), ModTime: time.Unix(1e9, 0)}
		if strings.HasSuffix(name, "/") {
			h.Typeflag, h.Mode = tar.TypeDir, 0o750
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

func put(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// What Archive takes of a directory, Replace makes of another, with GNU's tools and BusyBox's.
func TestArchiveReplace(t *testing.T) {
	for _, tools := range []string{"gnu", "busybox"} {
		t.Run(tools, func(t *testing.T) {
			var so sshtest.Options
			if tools == "busybox" {
				so.Tools = busyTools(t)
			}
			s := sshtest.Start(t, so)
			h := host(t, newPool(t, sshrun.Options{}), s.Target())
			from, to := t.TempDir(), t.TempDir()
			makeTree(t, filepath.Join(from, "d"))
			put(t, filepath.Join(from, "beside"), "")
			put(t, filepath.Join(to, "new/er/old/file"), "old")
			put(t, filepath.Join(to, "beside"), "stays")
			if err := os.Symlink(s.Dir, filepath.Join(to, "new/er/link")); err != nil {
				t.Fatal(err)
			}
			for _, dir := range []string{"new/er", "made/anew", "."} {
				var b bytes.Buffer
				if err := h.Archive(t.Context(), subdir(from, "d"), &b); err != nil {
					t.Fatal(err)
				}
				if err := h.Replace(t.Context(), subdir(to, dir), nil, &b); err != nil {
					t.Fatalf("%s: %v", dir, err)
				}
				sameTree(t, filepath.Join(to, dir), filepath.Join(from, "d"), true)
				if data, err := os.ReadFile(filepath.Join(to, "beside")); dir != "." && string(data) != "stays" {
					t.Errorf("%s: beside it: %q, %v", dir, data, err)
				}
			}
			if _, err := os.Stat(s.Identity); err != nil {
				t.Error("what a link led to was deleted:", err)
			}
		})
	}
}

// What is kept stays the same directory, emptied, whatever its name means to find.
func TestReplaceKeeps(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	root := t.TempDir()
	keep := []string{"data", "data/in", "a*[b]?\\c'"}
	before := map[string]os.FileInfo{}
	for _, k := range keep {
		put(t, filepath.Join(root, "d", k, "old"), "old")
		before[k], _ = os.Stat(filepath.Join(root, "d", k))
	}
	put(t, filepath.Join(root, "d/axxbyc/old"), "old")
	if err := h.Replace(t.Context(), subdir(root, "d"), keep, tarOf(t, map[string]string{"data/new": "new"})); err != nil {
		t.Fatal(err)
	}
	for _, k := range keep {
		if fi, err := os.Stat(filepath.Join(root, "d", k)); err != nil || !os.SameFile(fi, before[k]) {
			t.Errorf("%s is another directory: %v", k, err)
		}
	}
	got := describe(t, filepath.Join(root, "d"), true)
	want := []string{"data", "data/in", "data/new", "a*[b]?\\c'"}
	for _, name := range want {
		if got[name] == "" {
			t.Errorf("%s is not there", name)
		}
		delete(got, name)
	}
	if len(got) > 0 {
		t.Errorf("left over: %v", got)
	}
}

// What is made belongs to whom the root does.
func TestReplaceOwner(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	root := t.TempDir()
	if err := os.Chown(root, 4321, 4322); err != nil {
		t.Fatal(err)
	}
	if err := h.Replace(t.Context(), subdir(root, "a/b"), nil, tarOf(t, map[string]string{"f": "x"})); err != nil {
		t.Fatal(err)
	}
	out, err := h.Output(t.Context(), `cd "$1" && stat -c '%u:%g %n' a a/b a/b/f`, root)
	if want := "4321:4322 a\n4321:4322 a/b\n4321:4322 a/b/f\n"; err != nil || string(out) != want {
		t.Errorf("%s, %v; want %s", out, err, want)
	}
}

// Nothing is read or changed behind a link that leads out, nor where there is no directory.
func TestArchiveRefuses(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	root, outside := t.TempDir(), t.TempDir()
	put(t, filepath.Join(outside, "secret"), "s")
	put(t, filepath.Join(outside, "sub/secret"), "s")
	put(t, filepath.Join(root, "file"), "f")
	put(t, filepath.Join(root, "real/f"), "f")
	for name, to := range map[string]string{"out": outside, "up": "..", "in": "real", "dangling": "nowhere"} {
		if err := os.Symlink(to, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	before := describe(t, root, false)
	for _, c := range []struct {
		root, dir        string
		archive, replace sandboxer.Kind // "" for none
		says             string
	}{
		{root, "out", sandboxer.Invalid, sandboxer.Invalid, "behind a symbolic link that leads out of the tree"},
		{root, "out/sub", sandboxer.Invalid, sandboxer.Invalid, "behind a symbolic link that leads out of the tree"},
		{root, "up", sandboxer.Invalid, sandboxer.Invalid, "behind a symbolic link that leads out of the tree"},
		{root, "in", "", sandboxer.Invalid, "behind a symbolic link"}, // a link is not written through at all
		{root, "dangling", sandboxer.NotFound, sandboxer.Invalid, ""},
		{root, "missing", sandboxer.NotFound, "", "the part does not exist"},
		{root, "file", sandboxer.Invalid, sandboxer.Invalid, "the part is a file, not a directory"},
		{filepath.Join(root, "gone"), ".", sandboxer.NotFound, sandboxer.NotFound, "the tree is gone from host test-host"},
	} {
		check := func(what string, err error, want sandboxer.Kind) {
			t.Helper()
			if want == "" {
				if err != nil {
					t.Errorf("%s of %s: %v", what, c.dir, err)
				}
			} else if sandboxer.KindOf(err) != want || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s of %s: %v; want %s, %q", what, c.dir, err, want, c.says)
			}
		}
		var b bytes.Buffer
		check("archive", h.Archive(t.Context(), subdir(c.root, c.dir), &b), c.archive)
		if c.archive != "" && b.Len() > 0 {
			t.Errorf("%s: %d bytes were read", c.dir, b.Len())
		}
		if c.replace != "" {
			check("replace", h.Replace(t.Context(), subdir(c.root, c.dir), nil, tarOf(t, map[string]string{"f": "x"})), c.replace)
		}
	}
	if now := describe(t, root, false); !maps.Equal(now, before) {
		t.Errorf("it is now %v, was %v", now, before)
	}
	for _, name := range []string{"secret", "sub/secret"} {
		if _, err := os.Stat(filepath.Join(outside, name)); err != nil {
			t.Error("outside:", err)
		}
	}
}

// What the account may not read or write is said as that, with what tar said.
func TestArchiveDenied(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("another account needs root")
	}
	s := sshtest.Start(t, sshtest.Options{Config: `ForceCommand exec setpriv --reuid=4321 --regid=4321 --clear-groups --bounding-set=-all --inh-caps=-all sh -c "$SSH_ORIGINAL_COMMAND"`})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	root := t.TempDir()
	for dir := root; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(s.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(root, "closed/f"), "x")
	put(t, filepath.Join(root, "open/f"), "x")
	for name, mode := range map[string]os.FileMode{"closed": 0o700, "open/f": 0o600} {
		if err := os.Chmod(filepath.Join(root, name), mode); err != nil {
			t.Fatal(err)
		}
	}
	denied := func(what string, err error, says string) {
		t.Helper()
		if sandboxer.KindOf(err) != sandboxer.Denied || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v; want denied, %q", what, err, says)
		}
	}
	denied("a directory", h.Archive(t.Context(), subdir(root, "closed"), io.Discard), "the account may not read the part on host test-host")
	err := h.Archive(t.Context(), subdir(root, "open"), io.Discard)
	denied("a file", err, "the account may not change a file in the part on host test-host")
	if _, said, ok := sshrun.ExitOf(err); !ok || !strings.Contains(said, "Permission denied") {
		t.Errorf("tar said %q", said)
	}
	denied("writing", h.Replace(t.Context(), subdir(root, "open"), nil, tarOf(t, map[string]string{"g": "x"})), "may not change a file in the part")
	if data, err := os.ReadFile(filepath.Join(root, "open/f")); string(data) != "x" {
		t.Errorf("the file is now %q, %v", data, err)
	}
}

// Files that change while they are read are no failure; what else tar says is one, and tar's
// own end counts, not its words alone.
func TestArchiveChanges(t *testing.T) {
	for _, c := range []struct {
		name, tar string
		kind      sandboxer.Kind // "" for none
	}{
		{"changed", `echo "tar: ./f: file changed as we read it" >&2; exit 1`, ""},
		{"removed", `echo "tar: ./f: File removed before we read it" >&2; exit 1`, ""},
		{"a socket", `echo "tar: ./s: socket ignored" >&2; exit 0`, ""},
		{"changed, and more", `echo "tar: ./f: file changed as we read it" >&2; echo "tar: ./g: Input/output error" >&2; exit 1`, sandboxer.Failed},
		{"worse", `echo "tar: ./f: file changed as we read it" >&2; exit 2`, sandboxer.Failed},
		{"without a word", `exit 1`, sandboxer.Failed},
		{"full", `echo "tar: -: Cannot write: No space left on device" >&2; exit 2`, sandboxer.Exhausted},
	} {
		t.Run(c.name, func(t *testing.T) {
			tools := t.TempDir()
			if err := os.WriteFile(filepath.Join(tools, "tar"), []byte("#!/bin/sh\n"+c.tar+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			s := sshtest.Start(t, sshtest.Options{Env: []string{"PATH=" + tools + ":/usr/bin:/bin"}})
			h := host(t, newPool(t, sshrun.Options{}), s.Target())
			root := t.TempDir()
			err := h.Archive(t.Context(), subdir(root, "."), io.Discard)
			if c.kind == "" && err != nil || c.kind != "" && sandboxer.KindOf(err) != c.kind {
				t.Errorf("%v; want kind %q", err, c.kind)
			}
		})
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("full") }

// Neither a writer that fails nor a reader that does is the host's fault.
func TestArchiveStreams(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	root := t.TempDir()
	put(t, filepath.Join(root, "f"), "x")
	if err := h.Archive(t.Context(), subdir(root, "."), full{}); sandboxer.KindOf(err) != sandboxer.Unavailable || !errors.Is(err, sshrun.ErrOutput) {
		t.Errorf("a writer that fails: %v", err)
	}
	if err := h.Replace(t.Context(), subdir(root, "d"), nil, strings.NewReader("no tar")); err == nil {
		t.Error("what is no tar was unpacked")
	}
}

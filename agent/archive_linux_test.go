package agent

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// listed reads a tar whole: the headers and contents by name.
func listed(t *testing.T, r io.Reader) (map[string]*tar.Header, map[string]string) {
	t.Helper()
	hs, content := map[string]*tar.Header{}, map[string]string{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return hs, content
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		hs[h.Name], content[h.Name] = h, string(b)
	}
}

func TestArchive(t *testing.T) {
	a := startAgent(t)
	long := strings.Repeat("long/", 40) + strings.Repeat("x", 200)
	when := time.Unix(1_700_000_000, 0)
	src := filepath.Join(a.dir, "src")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(name, content string, mode fs.FileMode) {
		t.Helper()
		must(os.MkdirAll(filepath.Dir(filepath.Join(src, name)), 0o755))
		must(os.WriteFile(filepath.Join(src, name), []byte(content), 0o600))
		must(os.Chmod(filepath.Join(src, name), mode))
	}
	write("plain", "plain", 0o640)
	write("suid", "suid", 0o755|fs.ModeSetuid)
	write(long, "long", 0o644)
	write("odd \xff\n\"name", "odd", 0o644)
	write("closed/f", "in a closed directory", 0o400)
	must(os.Mkdir(src+"/empty", 0o700))
	must(os.Link(src+"/plain", src+"/second"))
	must(os.Symlink("../../outside", src+"/link"))
	must(unix.Mkfifo(src+"/pipe", 0o600))
	must(os.Chmod(src+"/closed", 0o500))
	must(os.Chtimes(src+"/plain", when, when))

	var out bytes.Buffer
	must(a.Archive(t.Context(), src, &out))
	hs, content := listed(t, bytes.NewReader(out.Bytes()))
	for name, want := range map[string]string{"plain": "plain", "suid": "suid", long: "long", "odd \xff\n\"name": "odd", "closed/f": "in a closed directory"} {
		if hs[name] == nil || content[name] != want {
			t.Errorf("%q: %+v, %q", name, hs[name], content[name])
		}
	}
	if h := hs["second"]; h == nil || h.Typeflag != tar.TypeLink || h.Linkname != "plain" {
		t.Errorf("second: %+v", h)
	}
	if h := hs["suid"]; h != nil && h.Mode != 0o4755 { // a caller that keeps the archive may need to know that it is lost
		t.Errorf("suid: mode %o", h.Mode)
	}
	if hs["pipe"] == nil || hs["pipe"].Typeflag != tar.TypeFifo || hs["empty/"] == nil || hs["link"] == nil || hs["link"].Linkname != "../../outside" || !hs["plain"].ModTime.Equal(when) {
		t.Errorf("pipe %v, empty %v, link %v, plain %v", hs["pipe"], hs["empty/"], hs["link"], hs["plain"])
	}

	dst := filepath.Join(a.dir, "not", "there", "yet")
	c, uid := a.Client, os.Geteuid()
	if uid == 0 {
		c, uid = a.client(ClientOptions{Token: testToken, User: "4711:12"}), 4711
	}
	must(c.Unarchive(t.Context(), dst, &out))
	for name, want := range map[string]fs.FileMode{
		"plain": 0o640, "second": 0o640, "suid": 0o755, long: 0o644, "closed": 0o500 | fs.ModeDir, "closed/f": 0o400, "empty": 0o700 | fs.ModeDir, "link": 0o777 | fs.ModeSymlink, ".": 0o755 | fs.ModeDir,
	} {
		fi, err := os.Lstat(filepath.Join(dst, name))
		if err != nil || fi.Mode() != want || int(fi.Sys().(*syscall.Stat_t).Uid) != uid {
			t.Errorf("%q: %v, %v", name, fi, err)
		}
	}
	if fi, _ := os.Stat(dst + "/plain"); !fi.ModTime().Equal(when) || fi.Sys().(*syscall.Stat_t).Nlink != 2 {
		t.Errorf("plain: %+v", fi)
	}

	// Another archive replaces it.
	must(c.Unarchive(t.Context(), dst, archive(t, reg("./new", "new"))))
	if names, err := os.ReadDir(dst); err != nil || len(names) != 1 || names[0].Name() != "new" {
		t.Errorf("%v, %v", names, err)
	}
	must(c.Unarchive(t.Context(), "", archive(t, reg("here", "")))) // where its processes start
	if names, err := os.ReadDir(a.dir); err != nil || len(names) != 1 || names[0].Name() != "here" {
		t.Errorf("%v, %v", names, err)
	}
}

// TestArchiveOfOthers: the tars of images can read our archives.
func TestArchiveOfOthers(t *testing.T) {
	for _, tool := range [][]string{{"tar"}, {"busybox", "tar"}} {
		if _, err := exec.LookPath(tool[0]); err != nil {
			t.Logf("without %s", tool[0])
			continue
		}
		src, dst := t.TempDir(), t.TempDir()
		name := strings.Repeat("d/", 30) + strings.Repeat("x", 250)
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(src, name)), 0o755), os.WriteFile(filepath.Join(src, name), []byte("x"), 0o600),
			os.Symlink(strings.Repeat("target/", 40), src+"/link")); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if _, err := Tar(&out, src); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(tool[0], append(tool[1:], "-xf", "-", "-C", dst)...)
		cmd.Stdin = &out
		if said, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", tool, err, said)
		}
		if b, err := os.ReadFile(filepath.Join(dst, name)); string(b) != "x" {
			t.Errorf("%s: %q, %v", tool, b, err)
		}
		if l, err := os.Readlink(dst + "/link"); l != strings.Repeat("target/", 40) {
			t.Errorf("%s: %q, %v", tool, l, err)
		}
	}
}

// A meddler changes the tree when the header of a file is written.
type meddler struct {
	w    io.Writer
	when map[string]func() error
	t    *testing.T
}

func (m *meddler) Write(p []byte) (int, error) {
	if i := bytes.IndexByte(p, 0); i > 0 && len(p) == 512 {
		if f := m.when[string(p[:i])]; f != nil {
			delete(m.when, string(p[:i]))
			if err := f(); err != nil {
				m.t.Error(err)
			}
		}
	}
	return m.w.Write(p)
}

// TestTarOfWhatChanges: files that change during the read do not fail an archive.
func TestTarOfWhatChanges(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"a-shrinks", "b-grows", "d-vanishes", "e/f", "e/g/h", "i-becomes-a-directory", "j-first", "l", "m/n"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(in(name)), 0o755), os.WriteFile(in(name), bytes.Repeat([]byte("x"), 300_000), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Link(in("j-first"), in("k-second")), os.Symlink("a", in("o-link"))); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	_, err := Tar(&meddler{w: &out, t: t, when: map[string]func() error{
		"a-shrinks": func() error {
			return errors.Join(os.Truncate(in("a-shrinks"), 100), os.Remove(in("d-vanishes")), os.Remove(in("i-becomes-a-directory")), os.Mkdir(in("i-becomes-a-directory"), 0o755), os.Remove(in("j-first")))
		},
		"b-grows": func() error { return os.Truncate(in("b-grows"), 400_000) },
		"e/":      func() error { return os.RemoveAll(in("e")) },
		"l": func() error {
			return errors.Join(os.RemoveAll(in("m")), os.Symlink("..", in("m")), os.Remove(in("o-link")))
		},
	}}, dir)
	if err != nil {
		t.Fatal(err)
	}
	hs, content := listed(t, &out)
	if got := content["a-shrinks"]; got != strings.Repeat("x", 100)+strings.Repeat("\x00", 299_900) {
		t.Errorf("what shrank has %d bytes, and ends with %q", len(got), got[max(len(got)-5, 0):])
	}
	if got := content["b-grows"]; got != strings.Repeat("x", 300_000) {
		t.Errorf("what grew has %d bytes", len(got))
	}
	if h := hs["k-second"]; h == nil || h.Typeflag != tar.TypeReg || len(content["k-second"]) != 300_000 {
		t.Errorf("the second name of a file whose first vanished: %+v", h)
	}
	for _, name := range []string{"e/", "i-becomes-a-directory/", "l", "m"} { // as they were when Tar read them
		if hs[name] == nil {
			t.Errorf("without %s", name)
		}
	}
	if len(hs) != 7 {
		t.Errorf("the archive has %v", hs)
	}
}

// TestArchiveOfABusyTree packs a tree that other processes change all the time.
func TestArchiveOfABusyTree(t *testing.T) {
	a := startAgent(t)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for i := range 4 {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				d := fmt.Sprintf("%s/d%d", a.dir, (i+n)%3)
				f := fmt.Sprintf("%s/f%d", d, n%5)
				_ = os.MkdirAll(d, 0o755)
				_ = os.WriteFile(f, make([]byte, n%7*10_000), 0o600)
				_ = os.Truncate(f, int64(n%3*5_000))
				switch n % 4 {
				case 0:
					_ = os.Remove(f)
				case 1:
					_ = os.RemoveAll(d)
				case 2:
					_ = os.Rename(f, a.dir+"/moved")
				case 3:
					_ = os.RemoveAll(d)
					_ = os.Symlink("..", d)
					_ = os.Remove(d)
				}
			}
		})
	}
	for range 100 {
		var out bytes.Buffer
		if err := a.Archive(t.Context(), a.dir, &out); err != nil {
			t.Fatal(err)
		}
		listed(t, &out)
	}
}

func TestArchiveFails(t *testing.T) {
	a := startAgent(t)
	refused := func(err error, kind sandboxer.Kind, says string) {
		t.Helper()
		if sandboxer.KindOf(err) != kind || !strings.Contains(err.Error(), says) {
			t.Errorf("%v (%s); want %s, %q", err, sandboxer.KindOf(err), kind, says)
		}
	}
	ctx := t.Context()
	file := filepath.Join(a.dir, "file")
	if err := os.WriteFile(file, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(a.Archive(ctx, "/no/such", io.Discard), sandboxer.NotFound, "/no/such")
	refused(a.Archive(ctx, file, io.Discard), sandboxer.Invalid, "not a directory")
	refused(a.Archive(ctx, "/proc/self", io.Discard), sandboxer.Denied, "/proc/self")
	refused(a.Archive(ctx, "/", &atMost{1000}), sandboxer.Unavailable, "could not be written")
	refused(a.Unarchive(ctx, file, archive(t)), sandboxer.Invalid, "file")
	refused(a.Unarchive(ctx, "/proc/self", archive(t)), sandboxer.Denied, "/proc/self")
	refused(a.Unarchive(ctx, "/", archive(t)), sandboxer.Invalid, "root")

	d := a.dir + "/d"
	whole := archive(t, reg("f", strings.Repeat("x", 100_000))).Bytes()
	refused(a.Unarchive(ctx, d, bytes.NewReader(whole[:50_000])), sandboxer.Invalid, "f")
	refused(a.Unarchive(ctx, d, io.MultiReader(bytes.NewReader(whole[:50_000]), failingReader{})), sandboxer.Invalid, "could not be read")
	refused(a.Unarchive(ctx, d, io.MultiReader(bytes.NewReader(whole[:50_000]), errorReader{sandboxer.E(sandboxer.Unavailable, nil, "the store is away")})), sandboxer.Unavailable, "could not be read")
	refused(a.Unarchive(ctx, d, strings.NewReader(strings.Repeat("noise", 1000))), sandboxer.Invalid, "cannot be read")
	refused(a.Unarchive(ctx, d, archive(t, reg("../file", "x"))), sandboxer.Invalid, "leads out")
	refused(a.Unarchive(ctx, d, archive(t, reg("x", "1"), reg("x", "2"))), sandboxer.Invalid, "twice")
	refused(a.Unarchive(ctx, d, archive(t, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, reg("l/file", "x"))), sandboxer.Invalid, "l/file")
	if b, err := os.ReadFile(file); string(b) != "kept" {
		t.Errorf("what is outside: %q, %v", b, err)
	}
	if err := a.Unarchive(ctx, d, io.MultiReader(bytes.NewReader(whole), bytes.NewReader(make([]byte, 512<<10)))); err != nil {
		t.Errorf("an archive that is filled up: %v", err)
	}

	// A failure after the beginning also has its kind and its reason.
	deep, err := os.OpenRoot(d)
	if err != nil {
		t.Fatal(err)
	}
	for range maxTarDepth {
		if err := deep.Mkdir("x", 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := deep.OpenRoot("x")
		if err != nil {
			t.Fatal(err)
		}
		deep.Close()
		deep = next
	}
	deep.Close()
	refused(a.Archive(ctx, d, io.Discard), sandboxer.Invalid, "500 levels")
	if err := a.Unarchive(ctx, d, archive(t)); err != nil {
		t.Errorf("what is too deep to pack can be removed: %v", err)
	}
}

type errorReader struct{ err error }

func (e errorReader) Read([]byte) (int, error) { return 0, e.err }

// TestUnarchiveLeavesMounts: a mount in a directory keeps its content.
func TestUnarchiveLeavesMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	a := startAgent(t)
	d := a.dir + "/d"
	if err := errors.Join(os.MkdirAll(d+"/deep/volume", 0o755), os.WriteFile(d+"/file", nil, 0o600), os.WriteFile(a.dir+"/source", []byte("mounted"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Mount("tmpfs", d+"/deep/volume", "tmpfs", 0, ""), unix.Mount(a.dir+"/source", d+"/file", "", unix.MS_BIND, "")); err != nil {
		t.Skip("nothing can be mounted here: ", err)
	}
	defer func() {
		_ = unix.Unmount(d+"/deep/volume", unix.MNT_DETACH)
		_ = unix.Unmount(d+"/file", unix.MNT_DETACH)
	}()
	if err := errors.Join(os.WriteFile(d+"/deep/volume/kept", []byte("kept"), 0o600), os.WriteFile(d+"/deep/volume/over", []byte("old"), 0o600), os.WriteFile(d+"/deep/gone", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := a.Unarchive(t.Context(), d, archive(t, reg("deep/volume/over", "new"), reg("new", "new"))); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"deep/volume/kept": "kept", "deep/volume/over": "new", "file": "mounted", "new": "new"} {
		if b, err := os.ReadFile(filepath.Join(d, name)); string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	if _, err := os.Stat(d + "/deep/gone"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what was there before stays: %v", err)
	}
}

// TestArchiveByAFormerAgent: an agent without archives is distinguished from one without the
// directory.
func TestArchiveByAFormerAgent(t *testing.T) {
	c := liar{answer: []byte("HTTP/1.1 404 Not Found\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 19\r\n\r\n404 page not found\n")}.client(t, time.Minute)
	if err := c.Archive(t.Context(), "/d", io.Discard); sandboxer.KindOf(err) != sandboxer.Unsupported {
		t.Errorf("Archive: %v", err)
	}
	read := false
	if err := c.Unarchive(t.Context(), "/d", readerFunc(func([]byte) (int, error) { read = true; return 0, io.EOF })); sandboxer.KindOf(err) != sandboxer.Unsupported || read {
		t.Errorf("Unarchive: %v; read: %t", err, read)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

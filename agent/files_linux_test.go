package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestFiles(t *testing.T) {
	a := startAgent(t)
	ctx := t.Context()
	in := func(name string) string { return filepath.Join(a.dir, name) }
	content := bytes.Repeat([]byte{0, 1, 2, 255}, 1<<18)
	for _, r := range []io.Reader{bytes.NewReader(content), struct{ io.Reader }{bytes.NewReader(content)}} {
		if err := a.WriteFile(ctx, in("x/y/f"), fs.ModeSetuid|0o751, r); err != nil {
			t.Fatal(err)
		}
		f, err := a.ReadFile(ctx, in("x/y/f"))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(f)
		f.Close()
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("%d bytes back, %v", len(got), err)
		}
	}
	fi, err := a.StatFile(ctx, in("x/y/f"))
	if err != nil || fi.Path != in("x/y/f") || fi.Size != int64(len(content)) || fi.Mode != 0o751|fs.ModeSetuid || fi.ModTime.IsZero() || fi.Owner == "" || fi.Group == "" {
		t.Errorf("StatFile: %+v, %v", fi, err)
	}
	if err := a.WriteFile(ctx, in("x/y/f"), 0o600, strings.NewReader("")); err != nil {
		t.Fatal(err)
	}
	if fi, err = a.StatFile(ctx, in("x/y/f")); err != nil || fi.Size != 0 || fi.Mode != 0o600 {
		t.Errorf("after an empty one: %+v, %v", fi, err)
	}
	if err := os.Symlink("y/../y", in("x/link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/nowhere", in("x/dangling")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(in("x/pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	var list []string
	for fi, err := range a.ListFiles(ctx, in("x"), "") {
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, fmt.Sprintf("%s %v %s", strings.TrimPrefix(fi.Path, a.dir), fi.Mode, fi.Target))
	}
	want := "/x/dangling Lrwxrwxrwx /nowhere; /x/link Lrwxrwxrwx y/../y; /x/pipe prw-r--r-- ; /x/y drwxr-xr-x "
	if got := strings.Join(list, "; "); got != want {
		t.Errorf("ListFiles:\n%s\nwant\n%s", got, want)
	}
	for range a.ListFiles(ctx, in("x"), "") {
		break
	}
	if err := errors.Join(a.MakeDir(ctx, in("m/n")), a.MakeDir(ctx, in("m/n")), a.MoveFile(ctx, in("m"), in("new/place")),
		a.RemoveFile(ctx, in("x")), a.RemoveFile(ctx, in("x"))); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(in("new/place/n")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(in("x")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("x after RemoveFile: %v", err)
	}

	if err := os.WriteFile(in("plain"), []byte("p"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(in("pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	read := func(name string) error {
		f, err := a.ReadFile(ctx, name)
		if err == nil {
			f.Close()
		}
		return err
	}
	ls := func(name string) (err error) {
		for _, err = range a.ListFiles(ctx, name, "") {
		}
		return err
	}
	stat := func(name string) error { _, err := a.StatFile(ctx, name); return err }
	write := func(name string) error { return a.WriteFile(ctx, name, 0o644, strings.NewReader("x")) }
	for _, tt := range []struct {
		name string
		err  error
		kind sandboxer.Kind
	}{
		{"read nothing", read(in("nothing")), sandboxer.NotFound},
		{"read a directory", read(a.dir), sandboxer.Invalid},
		{"read a pipe", read(in("pipe")), sandboxer.Invalid},
		{"read below a file", read(in("plain/x")), sandboxer.Invalid},
		{"stat nothing", stat(in("nothing")), sandboxer.NotFound},
		{"list nothing", ls(in("nothing")), sandboxer.NotFound},
		{"list a file", ls(in("plain")), sandboxer.Invalid},
		{"write a directory", write(a.dir), sandboxer.Invalid},
		{"write below a file", write(in("plain/x")), sandboxer.Invalid},
		{"write a pipe", write(in("pipe")), sandboxer.Invalid},
		{"make over a file", a.MakeDir(ctx, in("plain")), sandboxer.Invalid},
		{"move nothing", a.MoveFile(ctx, in("nothing"), in("x")), sandboxer.NotFound},
		{"move over a directory", a.MoveFile(ctx, in("new"), a.dir), sandboxer.Invalid},
		{"remove the root", a.RemoveFile(ctx, "/"), sandboxer.Invalid},
		{"full disk", write("/dev/full"), sandboxer.Invalid},
	} {
		if sandboxer.KindOf(tt.err) != tt.kind {
			t.Errorf("%s: %v (%s); want %s", tt.name, tt.err, sandboxer.KindOf(tt.err), tt.kind)
		}
	}
	t.Run("source fails", func(t *testing.T) {
		err := a.WriteFile(ctx, in("broken"), 0o644, io.MultiReader(strings.NewReader("half"), failingReader{}))
		if !errors.Is(err, io.ErrNoProgress) {
			t.Errorf("%v", err)
		}
	})
	t.Run("canceled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		if err := a.WriteFile(ctx, in("never"), 0o644, strings.NewReader("x")); sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Errorf("%v", err)
		}
	})
}

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, io.ErrNoProgress }

func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting a small disk needs root")
	}
	a := startAgent(t)
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skip("cannot mount a small disk:", err)
	}
	defer func() { _ = syscall.Unmount(dir, 0) }()
	err := a.WriteFile(t.Context(), dir+"/f", 0o644, bytes.NewReader(make([]byte, 1<<20)))
	if sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("WriteFile: %v", err)
	}
	err = a.Unarchive(t.Context(), dir, archive(t, reg("g", strings.Repeat("x", 1<<20))))
	if sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("Unarchive: %v", err)
	}
}

func TestFilesOfUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("switching users needs root")
	}
	a := startAgent(t)
	c := a.client(ClientOptions{Token: testToken, User: "4711:12"})
	if err := errors.Join(c.WriteFile(t.Context(), a.dir+"/d/f", fs.ModeSetuid|0o755, strings.NewReader("x")), c.MakeDir(t.Context(), a.dir+"/e/g"),
		c.Unarchive(t.Context(), a.dir+"/u", archive(t, reg("v/w", "x")))); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"d", "d/f", "e", "e/g", "u", "u/v", "u/v/w"} {
		fi, err := os.Lstat(filepath.Join(a.dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if st := fi.Sys().(*syscall.Stat_t); st.Uid != 4711 || st.Gid != 12 {
			t.Errorf("%s belongs to %d:%d", name, st.Uid, st.Gid)
		}
	}
	if fi, _ := os.Stat(a.dir + "/d/f"); fi.Mode() != 0o755|fs.ModeSetuid {
		t.Errorf("mode %v", fi.Mode())
	}
}

// TestWireStat describes links as clients of the E2B data plane expect.
func TestWireStat(t *testing.T) {
	a := startAgent(t)
	dir, err := filepath.EvalSymlinks(a.dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/f", []byte("12345"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("f", dir+"/l"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nothing", dir+"/dangling"); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(dir+"/d/e", 0o755); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"f":        `"mode":416,"name":"f","path":"` + dir + `/f","permissions":"-rw-r-----","size":"5","type":"FILE_TYPE_FILE"`,
		"l":        `"mode":416,"name":"l","path":"` + dir + `/l","permissions":"Lrwxrwxrwx","size":"1","symlinkTarget":"` + dir + `/f","type":"FILE_TYPE_FILE"`,
		"dangling": `"permissions":"Lrwxrwxrwx","size":"7","symlinkTarget":"nothing"}`,
		"d":        `"permissions":"drwxr-xr-x"`,
	} {
		status, v := a.unary("filesystem.Filesystem/Stat", `{"path":"`+name+`"}`)
		e, _ := v["entry"].(map[string]any)
		for _, k := range []string{"owner", "group", "modifiedTime"} {
			if e[k] == "" {
				t.Errorf("%s lacks %s", name, k)
			}
			delete(e, k)
		}
		if got := jsonText(e); status != 200 || !strings.Contains(got, want) {
			t.Errorf("Stat(%s): %d %s\nwant %s", name, status, got, want)
		}
	}
	_, v := a.unary("filesystem.Filesystem/ListDir", `{"path":"`+dir+`","depth":2}`)
	var names []string
	for _, e := range v["entries"].([]any) {
		names = append(names, strings.TrimPrefix(e.(map[string]any)["path"].(string), dir+"/"))
	}
	if got := strings.Join(names, " "); got != "d d/e dangling f l" {
		t.Errorf("ListDir: %s", got)
	}
}

// TestManyListings: the memory of a listing does not depend on the directory.
func TestManyListings(t *testing.T) {
	a := startAgent(t)
	const files, callers = 3000, 12
	dir := filepath.Join(a.dir, "many")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("n", 200)
	for i := range files {
		if err := os.Symlink(long, filepath.Join(dir, fmt.Sprintf("%s%06d", long, i))); err != nil {
			t.Fatal(err)
		}
	}
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	before, most := m.HeapAlloc, uint64(0)
	var mu sync.Mutex
	look := func() {
		mu.Lock()
		defer mu.Unlock()
		runtime.ReadMemStats(&m)
		most = max(most, m.HeapAlloc)
	}
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			n := 0
			for fi, err := range a.ListFiles(t.Context(), dir, "") {
				if err != nil {
					t.Error(err)
					return
				}
				if want := fmt.Sprintf("%s/%s%06d", dir, long, n); fi.Path != want || fi.Target != long {
					t.Errorf("%d: %+v", n, fi)
					return
				}
				if n++; n%1000 == 0 {
					look()
				}
			}
			if n != files {
				t.Errorf("%d files listed; want %d", n, files)
			}
		})
	}
	all.Wait()
	t.Logf("%d listings of %d names took at most %d MiB", callers, files, (most-before)>>20)
	if most > before && most-before > 64<<20 { // 12 pages as sent, and read, and garbage
		t.Errorf("%d listings took %d MiB", callers, (most-before)>>20)
	}
}

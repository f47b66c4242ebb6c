package agent

import (
	"archive/tar"
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"
)

// TestSaveInPlace: a file that cannot be replaced is written in place, and keeps its content when the
// upload is cut, if a draft is possible.
func TestSaveInPlace(t *testing.T) {
	runtime.LockOSThread() // and never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		t.Skipf("no mount namespace: %v", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Skipf("no mount namespace: %v", err)
	}
	dir := t.TempDir()
	name := filepath.Join(dir, "mounted")
	closed := filepath.Join(dir, "closed")
	for _, err := range []error{
		os.WriteFile(name, []byte("what was there, and is long"), 0o640), unix.Mount(name, name, "", unix.MS_BIND, ""),
		os.Mkdir(closed, 0o755), os.WriteFile(closed+"/f", []byte("old"), 0o640),
		unix.Mount(closed, closed, "", unix.MS_BIND, ""), unix.Mount(closed+"/f", closed+"/f", "", unix.MS_BIND, ""),
		unix.Mount("", closed, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		_ = unix.Unmount(name, unix.MNT_DETACH)
		_ = unix.Unmount(closed, unix.MNT_DETACH)
	}()
	s := &server{}
	u := user{uid: uint32(os.Getuid()), gid: uint32(os.Getgid()), home: dir}
	cut := io.MultiReader(strings.NewReader("half"), iotest.ErrReader(errors.New("cut")))
	if _, err := s.save(name, u, nil, nil, cut); err == nil {
		t.Error("a cut upload succeeded")
	}
	if got, _ := os.ReadFile(name); string(got) != "what was there, and is long" {
		t.Errorf("a cut upload left %q", got)
	}
	for _, f := range []string{name, closed + "/f"} {
		if _, err := s.save(f, u, nil, nil, strings.NewReader("new")); err != nil {
			t.Error(err)
		}
		fi, err := os.Stat(f)
		if got, _ := os.ReadFile(f); err != nil || string(got) != "new" || fi.Mode() != 0o640 {
			t.Errorf("%s: %q, %v, %v", f, got, fi, err)
		}
	}
	for d, want := range map[string][]string{dir: {"closed", "mounted"}, closed: {"f"}} {
		if got := namesIn(t, d); !slices.Equal(got, want) {
			t.Errorf("%s holds %q; want %q", d, got, want)
		}
	}
}

func namesIn(t *testing.T, dir string) (names []string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		names = append(names, d.Name())
	}
	return names
}

// TestDraftsAreSwept: a later upload removes the drafts of a killed agent.
func TestDraftsAreSwept(t *testing.T) {
	a := startAgent(t)
	old, young, other := filepath.Join(a.dir, draftPrefix+"OLD"), filepath.Join(a.dir, draftPrefix+"YOUNG"), filepath.Join(a.dir, "sandboxer-old")
	past := time.Now().Add(-2 * draftAge)
	for _, f := range []string{old, young, other} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{old, other} {
		if err := os.Chtimes(f, past, past); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.WriteFile(t.Context(), filepath.Join(a.dir, "f"), 0, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(old); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an old draft: %v", err)
	}
	for _, f := range []string{young, other} {
		if _, err := os.Lstat(f); err != nil {
			t.Error(err)
		}
	}
}

// TestUntarCut: an archive that ends within a file keeps the file that it would have replaced, and leaves
// no partial file.
func TestUntarCut(t *testing.T) {
	for _, name := range []string{"f", "new"} {
		dir := t.TempDir()
		if err := os.WriteFile(dir+"/f", []byte("what was there"), 0o644); err != nil {
			t.Fatal(err)
		}
		whole := archive(t, tar.Header{Name: "a", Uname: "first"}, tar.Header{Name: name, Uname: strings.Repeat("x", 100_000)})
		if err := Untar(bytes.NewReader(whole.Bytes()[:50_000]), dir, UntarOptions{Replace: true}); err == nil {
			t.Error("a cut archive was unpacked")
		}
		if got, err := os.ReadFile(dir + "/f"); string(got) != "what was there" {
			t.Errorf("cut in %s: %d bytes, %v", name, len(got), err)
		}
		if got := namesIn(t, dir); !slices.Equal(got, []string{"a", "f"}) {
			t.Errorf("cut in %s: left %q", name, got)
		}
		if err := Untar(whole, t.TempDir(), UntarOptions{Replace: true}); err != nil {
			t.Error(err)
		}
	}
}

// TestTarSkips: sockets, pipes and devices are left out on both sides, and reported; directories keep
// set-group-ID and the sticky bit, files do not.
func TestTarSkips(t *testing.T) {
	src, dst := t.TempDir(), t.TempDir()
	for _, name := range []string{"a", "b", "c", "d/e"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(src, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mkfifo(filepath.Join(src, name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.WriteFile(src+"/f", nil, 0o755), os.Chmod(src+"/f", 0o755|fs.ModeSetgid), os.Chmod(src+"/d", 0o775|fs.ModeSetgid|fs.ModeSticky)); err != nil {
		t.Fatal(err)
	}
	const want = "4 sockets, pipes or devices are not copied: 'a', 'b', 'c', …"
	var out bytes.Buffer
	if skipped, err := Tar(&out, src); err != nil || skipped.String() != want {
		t.Errorf("packed: %q, %v", skipped, err)
	}
	named := tarrer{named: true, modes: fs.ModePerm}
	out.Reset()
	if err := named.write(&out, src); err != nil {
		t.Fatal(err)
	}
	var skipped Skipped
	if err := Untar(&out, dst, UntarOptions{Skipped: &skipped}); err != nil || skipped.String() != want {
		t.Errorf("unpacked: %q, %v", skipped, err)
	}
	for name, mode := range map[string]fs.FileMode{"f": 0o755, "d": 0o775 | fs.ModeDir | fs.ModeSetgid | fs.ModeSticky} {
		if fi, err := os.Lstat(filepath.Join(dst, name)); err != nil || fi.Mode() != mode {
			t.Errorf("%s: %v, %v; want %v", name, fi, err, mode)
		}
	}
}

// TestListedOnce: the pages of a large directory come from one reading, unless it changes meanwhile.
func TestListedOnce(t *testing.T) {
	dir := t.TempDir()
	for i := range 25 {
		if err := os.WriteFile(fmt.Sprintf("%s/f%02d", dir, i), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	past := time.Now().Add(-time.Hour)
	if err := os.Chtimes(dir, past, past); err != nil {
		t.Fatal(err)
	}
	s := &server{}
	page := func(after string) (names []string) {
		t.Helper()
		h := http.Header{afterHeader: {base64.RawURLEncoding.EncodeToString([]byte(after))}, lstatHeader: {"true"}}
		res, err := filesystemService{s}.listPage(t.Context(), h, dir, 10)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range res.Msg.GetEntries() {
			names = append(names, e.GetName())
		}
		if more := res.Header().Get(moreHeader) != ""; more != (len(names) == 10) {
			t.Errorf("after %q: %d entries, and more: %t", after, len(names), more)
		}
		return names
	}
	if got := page(""); len(got) != 10 || got[9] != "f09" {
		t.Errorf("the first page: %q", got)
	}
	if len(s.listed.all) != 25 {
		t.Fatalf("%d names are kept; want 25", len(s.listed.all))
	}
	s.listed.all[24] = "f24-kept" // recognisable, because it is not in the directory
	if got := page("f09"); len(got) != 10 || got[0] != "f10" {
		t.Errorf("the second page: %q", got)
	}
	if got := page("f19"); len(got) != 4 {
		t.Errorf("the last page was read again: %q", got)
	}
	if err := os.WriteFile(dir+"/f195", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := page("f19"); len(got) != 6 || got[0] != "f195" || got[5] != "f24" {
		t.Errorf("after a change: %q", got)
	}
}

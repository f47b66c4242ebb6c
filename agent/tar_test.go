package agent

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func archive(t testing.TB, hs ...tar.Header) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range hs {
		body := h.Uname // the content travels here
		h.Uname = ""
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(body))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			_, _ = io.WriteString(w, body)
		}
	}
	w.Close()
	return &b
}

func reg(name, content string) tar.Header { return tar.Header{Name: name, Uname: content} }

func TestUntar(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "x")
	when := time.Unix(1_700_000_000, 0)
	in := archive(t,
		tar.Header{Name: "top/", Typeflag: tar.TypeDir, Mode: 0o755},
		tar.Header{Name: "top/closed/", Typeflag: tar.TypeDir, Mode: 0o555, ModTime: when},
		tar.Header{Name: "top/closed/f", Uname: "content", Mode: 0o444, ModTime: when},
		tar.Header{Name: "top/run", Uname: "#!", Mode: 0o6755},
		reg("top/a/b/c", "deep"), // without entries for its parents
		tar.Header{Name: "top/link", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"},
		tar.Header{Name: "top/hard", Typeflag: tar.TypeLink, Linkname: "top/run"},
		tar.Header{Name: "top/", Typeflag: tar.TypeDir, Mode: 0o700},
	)
	if err := Untar(in, dir, UntarOptions{Strip: true}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"closed/f": "content", "run": "#!", "hard": "#!", "a/b/c": "deep"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	for name, want := range map[string]fs.FileMode{"closed": 0o555 | fs.ModeDir, "closed/f": 0o444, "run": 0o755, "link": 0o777 | fs.ModeSymlink} {
		if fi, err := os.Lstat(filepath.Join(dir, name)); err != nil || fi.Mode() != want {
			t.Errorf("%s: %v, %v; want %v", name, fi.Mode(), err, want)
		}
	}
	for _, name := range []string{"closed", "closed/f"} {
		if fi, _ := os.Stat(filepath.Join(dir, name)); !fi.ModTime().Equal(when) {
			t.Errorf("time of %s: %v", name, fi.ModTime())
		}
	}
	if l, _ := os.Readlink(filepath.Join(dir, "link")); l != "/etc/passwd" {
		t.Errorf("link to %q", l)
	}

	var out bytes.Buffer
	if _, err := Tar(&out, dir); err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(&out); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		names = append(names, string(h.Typeflag)+h.Name)
	}
	if got := strings.Join(names, " "); got != "5a/ 5a/b/ 0a/b/c 5closed/ 0closed/f 0hard 2link 1run" {
		t.Errorf("Tar wrote %s", got)
	}
}

func TestUntarRefuses(t *testing.T) {
	long := strings.Repeat("x", 300)
	small := TarLimits{Entries: 3, Path: 200, Depth: 4, Bytes: 10}
	for _, tt := range []struct {
		name string
		in   []tar.Header
		kind sandboxer.Kind
		msg  string
	}{
		{"upwards", []tar.Header{reg("../evil", "x")}, sandboxer.Invalid, "leads out"},
		{"upwards inside", []tar.Header{reg("a/../../evil", "x")}, sandboxer.Invalid, "leads out"},
		{"absolute", []tar.Header{reg("/evil", "x")}, sandboxer.Invalid, "absolute"},
		{"through an absolute link", []tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "OUTSIDE"}, reg("l/evil", "x")}, sandboxer.Invalid, "l/evil"},
		{"through an upward link", []tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../outside"}, reg("l/evil", "x")}, sandboxer.Invalid, "l/evil"},
		{"a directory over a link", []tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../outside"}, {Name: "l", Typeflag: tar.TypeDir}}, sandboxer.Invalid, "twice"},
		{"a link of a link", []tar.Header{{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../outside/secret"}, {Name: "h", Typeflag: tar.TypeLink, Linkname: "l"}}, sandboxer.Invalid, "not an earlier file"},
		{"a link to the outside", []tar.Header{{Name: "h", Typeflag: tar.TypeLink, Linkname: "../outside/secret"}}, sandboxer.Invalid, "outside"},
		{"a link to nothing", []tar.Header{{Name: "h", Typeflag: tar.TypeLink, Linkname: "x"}}, sandboxer.Invalid, "no earlier file"},
		{"one name twice", []tar.Header{reg("a", "1"), reg("./a", "2")}, sandboxer.Invalid, "twice"},
		{"a device", []tar.Header{{Name: "d", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}, sandboxer.Invalid, "character device"},
		{"a pipe", []tar.Header{{Name: "d", Typeflag: tar.TypeFifo}}, sandboxer.Invalid, "FIFO"},
		{"too many", []tar.Header{reg("a", ""), reg("b", ""), reg("c", ""), reg("d", "")}, sandboxer.Exhausted, "more than 3 entries"},
		{"too much", []tar.Header{reg("a", "123456"), reg("b", "123456")}, sandboxer.Exhausted, "more than 10 bytes"},
		{"too deep", []tar.Header{reg("a/b/c/d/e", "")}, sandboxer.Invalid, "4 is the limit"},
		{"too long", []tar.Header{reg(long, "")}, sandboxer.Invalid, "200 is the limit"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, replace := range []bool{false, true} {
				base := t.TempDir()
				outside := filepath.Join(base, "outside")
				if err := os.Mkdir(outside, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(outside, "secret"), []byte("s"), 0o600); err != nil {
					t.Fatal(err)
				}
				var in []tar.Header
				for _, h := range tt.in {
					h.Linkname = strings.ReplaceAll(h.Linkname, "OUTSIDE", outside)
					in = append(in, h)
				}
				err := Untar(archive(t, in...), filepath.Join(base, "in"), UntarOptions{Limits: small, Replace: replace})
				if sandboxer.KindOf(err) != tt.kind || !strings.Contains(sandboxer.Message(err), tt.msg) {
					t.Errorf("replace %v: %v (%s); want %s with %q", replace, err, sandboxer.KindOf(err), tt.kind, tt.msg)
				}
				checkOutside(t, base)
			}
		})
	}
	t.Run("broken archive", func(t *testing.T) {
		b := archive(t, reg("a", strings.Repeat("x", 2000))).Bytes()[:1500]
		if err := Untar(bytes.NewReader(b), t.TempDir(), UntarOptions{}); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%v", err)
		}
	})
}

// checkOutside fails if anything below base except the directory in was changed.
func checkOutside(t testing.TB, base string) {
	t.Helper()
	var got []string
	_ = filepath.WalkDir(base, func(p string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(base, p)
		if rel == "in" {
			return filepath.SkipDir
		}
		got = append(got, rel)
		return err
	})
	if s := strings.Join(got, " "); s != ". outside outside/secret" {
		t.Errorf("outside now: %s", s)
	}
	if b, _ := os.ReadFile(filepath.Join(base, "outside/secret")); string(b) != "s" {
		t.Errorf("the file outside now: %q", b)
	}
}

func TestUntarReplaces(t *testing.T) {
	dir := t.TempDir()
	if err := Untar(archive(t, reg("a/f", "old"), tar.Header{Name: "a/l", Typeflag: tar.TypeSymlink, Linkname: "f"}), dir, UntarOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := Untar(archive(t, reg("a/l", "new")), dir, UntarOptions{}); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("over an existing link: %v", err)
	}
	if err := Untar(archive(t, reg("a/l", "new")), dir, UntarOptions{Replace: true}); err != nil {
		t.Fatal(err)
	}
	f, _ := os.ReadFile(filepath.Join(dir, "a/f"))
	l, _ := os.ReadFile(filepath.Join(dir, "a/l"))
	if string(f) != "old" || string(l) != "new" {
		t.Errorf("f %q, l %q: the link was followed", f, l)
	}
}

func FuzzUntar(f *testing.F) {
	f.Add(archive(f, reg("a/b", "x"), tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../outside"}, reg("l/x", "y")).Bytes(), true)
	f.Add(archive(f, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "../outside/secret"}).Bytes(), false)
	f.Fuzz(func(t *testing.T, b []byte, replace bool) {
		base := t.TempDir()
		if err := os.Mkdir(filepath.Join(base, "outside"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(base, "outside/secret"), []byte("s"), 0o600); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(base, "in")
		_ = Untar(bytes.NewReader(b), dir, UntarOptions{Replace: replace, Limits: TarLimits{Bytes: 1 << 20, Entries: 1000}})
		checkOutside(t, base)
		_ = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error { // or the cleanup fails
			if err == nil && d.IsDir() {
				_ = os.Chmod(p, 0o755)
			}
			return nil
		})
	})
}

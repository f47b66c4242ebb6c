package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/erofs/go-erofs"
)

// laid returns what an image of the archives is, one line a file.
func laid(t testing.TB, limits Limits, layers ...[]byte) ([]string, error) {
	t.Helper()
	tree := NewTree(limits)
	var ls []Layer
	for _, data := range layers {
		ls = append(ls, Layer{Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }})
	}
	if err := tree.AddLayers(t.Context(), "test", ls); err != nil {
		return nil, err
	}
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := tree.Write(t.Context(), "test", f, dir); err != nil {
		return nil, err
	}
	fsys, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	err = fs.WalkDir(fsys, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == "." {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		line := p
		switch {
		case fi.IsDir():
			line += "/"
		case fi.Mode()&fs.ModeSymlink != 0:
			line += "@"
		default:
			b, err := fs.ReadFile(fsys, p)
			if err != nil {
				return err
			}
			line += "=" + string(b)
		}
		if perm := fi.Mode() & (fs.ModePerm | fs.ModeSetuid); perm != 0o644 && perm != 0o755 && perm != 0o777 {
			line += fmt.Sprintf(" %v", perm)
		}
		out = append(out, line)
		return nil
	})
	slices.Sort(out)
	return out, err
}

func file(name, content string) entry { return entry{tar.Header{Name: name, Mode: 0o644}, content} }
func dir(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}
func sym(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}, ""}
}
func hard(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to, Mode: 0o644}, ""}
}

var roomy = Limits{Unpacked: 1 << 30, Entries: 10_000}

func TestLayersOnTopOfEachOther(t *testing.T) {
	for _, c := range []struct {
		name   string
		layers [][]entry
		want   string
	}{
		{"replaced and added", [][]entry{{file("a", "1"), file("b", "2")}, {file("a", "3"), file("d/e", "4")}}, "a=3 b=2 d/ d/e=4"},
		{"whiteout", [][]entry{{file("d/a", "1"), file("d/b", "2")}, {file("d/.wh.a", "")}}, "d/ d/b=2"},
		{"whiteout of a directory", [][]entry{{file("d/a", "1"), file("x", "")}, {file(".wh.d", "")}}, "x="},
		{"whiteout and made anew, before", [][]entry{{file("d/a", "1")}, {file(".wh.d", ""), file("d/b", "2")}}, "d/ d/b=2"},
		{"whiteout and made anew, after", [][]entry{{file("d/a", "1")}, {dir("d"), file("d/b", "2"), file(".wh.d", "")}}, "d/ d/b=2"},
		{"opaque", [][]entry{{file("d/a", "1"), file("d/s/x", "")}, {dir("d"), file("d/.wh..wh..opq", ""), file("d/b", "2")}}, "d/ d/b=2"},
		{"opaque after", [][]entry{{file("d/a", "1")}, {file("d/b", "2"), file("d/.wh..wh..opq", "")}}, "d/ d/b=2"},
		{"notes of aufs", [][]entry{{file(".wh..wh.plnk/1", ""), file(".wh..wh.aufs", ""), file("a", "1")}}, ".wh..wh.plnk/ .wh..wh.plnk/1= a=1"},
		{"a file becomes a directory", [][]entry{{file("a", "1")}, {dir("a"), file("a/b", "2")}}, "a/ a/b=2"},
		{"a directory becomes a file", [][]entry{{file("a/b", "1")}, {file("a", "2")}}, "a=2"},
		{"hard links", [][]entry{{file("a", "1"), hard("b", "a")}, {hard("c", "/a"), file("a", "2")}}, "a=2 b=1 c=1"},
		{"hard link to a removed file", [][]entry{{file("a", "1")}, {hard("b", "a"), file(".wh.a", "")}}, "b=1"},
		{"hard link to a symbolic one", [][]entry{{sym("a", "x"), hard("b", "a")}}, "a@ b@"},
		{"through a symbolic link", [][]entry{{dir("usr/bin"), sym("bin", "usr/bin")}, {file("bin/x", "1")}}, "bin@ usr/ usr/bin/ usr/bin/x=1"},
		{"through an absolute one", [][]entry{{dir("run"), sym("var/run", "/run")}, {file("var/run/x", "1")}}, "run/ run/x=1 var/ var/run@"},
		{"through one upwards", [][]entry{{dir("a/b"), sym("a/b/up", "../../c"), dir("c")}, {file("a/b/up/x", "1")}}, "a/ a/b/ a/b/up@ c/ c/x=1"},
		{"absolute names", [][]entry{{file("/etc/x", "1"), file("./y", "2")}}, "etc/ etc/x=1 y=2"},
		{"devices", [][]entry{{{tar.Header{Name: "sda", Typeflag: tar.TypeBlock}, ""}, {tar.Header{Name: "p", Typeflag: tar.TypeFifo}, ""}, file("a", "")}}, "a="},
		{"set-user-ID", [][]entry{{{tar.Header{Name: "su", Mode: 0o4755}, "x"}, {tar.Header{Name: "tmp", Typeflag: tar.TypeDir, Mode: 0o1777}, ""}}}, "su=x tmp/"},
		{"extended attributes", [][]entry{{{tar.Header{Name: "a", Mode: 0o644, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "x"}}, "1"}}}, "a=1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var layers [][]byte
			for _, l := range c.layers {
				layers = append(layers, archive(t, l...))
			}
			got, err := laid(t, roomy, layers...)
			if err != nil || strings.Join(got, " ") != c.want {
				t.Errorf("got %q, %v\nwant %q", strings.Join(got, " "), err, c.want)
			}
		})
	}
}

func TestHostileLayers(t *testing.T) {
	many := make([]entry, 0, 100_000)
	for i := range cap(many) {
		many = append(many, file(fmt.Sprintf("f%d", i), ""))
	}
	var deep []entry
	deep = append(deep, file(strings.Repeat("d/", 3000)+"x", ""))
	links := []entry{file("big", strings.Repeat("x", 1<<20))}
	for i := range 2000 {
		links = append(links, hard(fmt.Sprintf("l%d", i), "big"))
	}
	for _, c := range []struct {
		name    string
		entries []entry
		says    string
	}{
		{"upwards", []entry{file("../../etc/passwd", "x")}, "leads upwards"},
		{"upwards inside", []entry{file("a/../../x", "x")}, "leads upwards"},
		{"whiteout upwards", []entry{file("../.wh.etc", "")}, "leads upwards"},
		{"hard link upwards", []entry{hard("x", "../../etc/shadow")}, "leads upwards"},
		{"hard link to what is not there", []entry{hard("x", "etc/shadow")}, "does not exist"},
		{"hard link to a directory", []entry{dir("d"), hard("x", "d")}, "not a file"},
		{"symbolic link out", []entry{sym("a", "../../../../etc"), file("a/passwd", "x")}, "lead out of the image"},
		{"symbolic links out, two steps", []entry{sym("a", ".."), sym("b", "a/.."), file("b/x", "x")}, "lead out of the image"},
		{"symbolic links in a circle", []entry{sym("a", "b"), sym("b", "a"), file("a/x", "x")}, "in a circle"},
		{"symbolic link to nothing", []entry{sym("a", "")}, "symbolic link with an impossible target"},
		{"below a file", []entry{file("a", "x"), file("a/b", "x")}, "below a file"},
		{"long name", []entry{file(strings.Repeat("n", 300), "x")}, "more than 255 bytes"},
		{"long path", deep, "more than 4096 bytes"},
		{"100,000 entries", many, "more than 10000 files"},
		{"bomb of hard links", links, "its files have more than"},
		{"owner", []entry{{tar.Header{Name: "a", Uid: 1 << 40}, ""}}, "impossible owner"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := laid(t, roomy, archive(t, c.entries...))
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v; want %q", err, c.says)
			}
		})
	}
	t.Run("bomb", func(t *testing.T) {
		// 100 MB of nothing in 100 KB.
		var z bytes.Buffer
		w := gzip.NewWriter(&z)
		io.Copy(w, io.LimitReader(zeros{}, 100<<20))
		w.Close()
		p := filepath.Join(t.TempDir(), "layer")
		if err := os.WriteFile(p, z.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		err := NewTree(Limits{Unpacked: 1 << 20, Entries: 10}).AddLayers(t.Context(), "test", []Layer{{Open: func() (io.ReadCloser, error) { return openLayer(p) }}})
		if err == nil || !strings.Contains(err.Error(), "unpacks to more than 1024 KiB") || time.Since(start) > time.Second {
			t.Errorf("%v after %s", err, time.Since(start))
		}
	})
	t.Run("sparse bomb", func(t *testing.T) {
		// A header that promises a terabyte, which the archive does not have.
		h := tar.Header{Name: "f", Size: 1 << 40, Format: tar.FormatPAX}
		var b bytes.Buffer
		tar.NewWriter(&b).WriteHeader(&h)
		_, err := laid(t, roomy, b.Bytes())
		if err == nil || !strings.Contains(err.Error(), "its files have more than 1024 MiB") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("cut off", func(t *testing.T) {
		data := archive(t, file("a", strings.Repeat("x", 10_000)))
		if _, err := laid(t, roomy, data[:2000]); err == nil {
			t.Error("half a layer was taken for a whole one")
		}
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func FuzzLayers(f *testing.F) {
	f.Add("a", byte(tar.TypeReg), "", "b/.wh.a", byte(tar.TypeReg), "")
	f.Add("a", byte(tar.TypeSymlink), "../..", "a/b", byte(tar.TypeReg), "")
	f.Add("a/b", byte(tar.TypeDir), "", "a", byte(tar.TypeLink), "a/b")
	f.Fuzz(func(t *testing.T, n1 string, t1 byte, l1, n2 string, t2 byte, l2 string) {
		tree := NewTree(Limits{Unpacked: 1 << 20, Entries: 100})
		for i, h := range []tar.Header{{Name: n1, Typeflag: t1, Linkname: l1}, {Name: n2, Typeflag: t2, Linkname: l2}} {
			if err := tree.put(i+1, 0, &h); err != nil {
				return
			}
		}
		var walk func(n *node, depth int)
		walk = func(n *node, depth int) {
			if depth > 10_000 {
				t.Fatal("the tree has a circle")
			}
			for name, k := range n.kids {
				if name == "" || name == "." || name == ".." || strings.Contains(name, "/") {
					t.Fatalf("a file is called %q", name)
				}
				walk(k, depth+1)
			}
		}
		walk(tree.root, 0)
	})
}

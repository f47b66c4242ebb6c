package safetar

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func pack(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		body := strings.Repeat("x", int(h.Size))
		if err := errors.Join(w.WriteHeader(&h), second(io.WriteString(w, body))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func second(_ int, err error) error { return err }

func file(name string, size int64) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeReg, Size: size}
}
func dir(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir} }
func link(name, to string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
}
func hard(name, to string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}
}

// read returns what a Reader lets through, as "type name>link".
func read(b []byte, rules Rules) (string, error) {
	var out []string
	for r := NewReader(bytes.NewReader(b), rules); ; {
		h, err := r.Next()
		if err == io.EOF {
			return strings.Join(out, " "), nil
		}
		if err != nil {
			return strings.Join(out, " "), err
		}
		s := string(h.Typeflag) + h.Name
		if h.Linkname != "" {
			s += ">" + h.Linkname
		}
		out = append(out, s)
		if _, err := io.Copy(io.Discard, r); err != nil {
			return strings.Join(out, " "), err
		}
	}
}

func TestReader(t *testing.T) {
	lax := Rules{OutsideLinks: true, SkipSpecial: true}
	for _, c := range []struct {
		name  string
		in    []tar.Header
		rules Rules
		want  string
	}{
		{"a tree", []tar.Header{dir("./"), dir("./d/"), file("./d/f", 3), link("d/l", "f"), hard("h", "./d/f")}, Rules{}, "5. 5d 0d/f 2d/l>f 1h>d/f"},
		{"parents that are missing", []tar.Header{file("a/b/f", 0), dir("a"), dir("a/b")}, Rules{}, "0a/b/f 5a 5a/b"},
		{"a directory again", []tar.Header{dir("a"), dir("a/")}, Rules{}, "5a 5a"},
		{"links inside", []tar.Header{link("a/l", "../b"), link("m", "a/x"), link("a/b/l", "../../c")}, Rules{}, "2a/l>../b 2m>a/x 2a/b/l>../../c"},
		{"links out of it", []tar.Header{link("l", "/etc"), link("m", "../x"), link("n", "a/../../x")}, lax, "2l>/etc 2m>../x 2n>a/../../x"},
		{"a hard link to a link", []tar.Header{link("l", "x"), hard("h", "l"), hard("i", "h")}, Rules{}, "2l>x 2h>x 2i>x"},
		{"a hard link to a hard link", []tar.Header{file("f", 1), hard("h", "f"), hard("i", "h")}, Rules{}, "0f 1h>f 1i>f"},
		{"what is special", []tar.Header{{Name: "c", Typeflag: tar.TypeChar}, {Name: "b", Typeflag: tar.TypeBlock}, {Name: "d/p", Typeflag: tar.TypeFifo}, hard("h", "c"), hard("i", "h"), file("f", 1)}, lax, "0f"},
		{"without the first element", []tar.Header{dir("r/"), dir("r/d"), file("r/d/f", 1), hard("r/h", "r/d/f"), file("s/g", 1), link("r/l", "d")}, Rules{Strip: true}, "5d 0d/f 1h>d/f 0g 2l>d"},
		{"git's comment", []tar.Header{{Name: "g", Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "x"}}, file("f", 1)}, Rules{}, "0f"},
		{"to the limits", []tar.Header{file("a", 5), file("b/c", 4)}, Rules{Entries: 3, Bytes: 9, FileBytes: 5, PathBytes: 3, NameBytes: 1, Depth: 2}, "0a 0b/c"},
	} {
		if got, err := read(pack(t, c.in...), c.rules); err != nil || got != c.want {
			t.Errorf("%s: got %q, %v; want %q", c.name, got, err, c.want)
		}
	}
}

func TestReaderRefuses(t *testing.T) {
	lax := Rules{OutsideLinks: true, SkipSpecial: true}
	sparse := file("f", 1)
	sparse.PAXRecords = map[string]string{"GNU.sparse.major": "1"}
	for _, c := range []struct {
		name  string
		in    []tar.Header
		rules Rules
		kind  sandboxer.Kind
		why   string
	}{
		{"absolute", []tar.Header{file("/x", 1)}, lax, sandboxer.Invalid, "absolute"},
		{"out", []tar.Header{file("../x", 1)}, lax, sandboxer.Invalid, "leads out"},
		{"out and in again", []tar.Header{file("a/../x", 1)}, lax, sandboxer.Invalid, "leads out"},
		{"by way of a link", []tar.Header{link("l", "/etc"), file("l/x", 1)}, lax, sandboxer.Invalid, "no directory"},
		{"by way of a link deep", []tar.Header{link("a/l", "/etc"), file("a/l/b/c", 1)}, lax, sandboxer.Invalid, "no directory"},
		{"by way of a directory that is a link later", []tar.Header{dir("d"), link("d", "/etc"), file("d/x", 1)}, lax, sandboxer.Invalid, "twice"},
		{"by way of parents that are a link later", []tar.Header{file("d/x", 1), link("d", "/etc"), file("d/y", 1)}, lax, sandboxer.Invalid, "twice"},
		{"a link that becomes a directory", []tar.Header{link("l", "/etc"), dir("l")}, lax, sandboxer.Invalid, "twice"},
		{"a link that becomes a file", []tar.Header{link("l", "/etc/passwd"), file("l", 1)}, lax, sandboxer.Invalid, "twice"},
		{"a file of two spellings", []tar.Header{file("a/f", 1), file("./a//f", 1)}, lax, sandboxer.Invalid, "twice"},
		{"what was left out again", []tar.Header{{Name: "p", Typeflag: tar.TypeFifo}, file("p", 1)}, lax, sandboxer.Invalid, "twice"},
		{"below what was left out", []tar.Header{{Name: "p", Typeflag: tar.TypeFifo}, file("p/x", 1)}, lax, sandboxer.Invalid, "no directory"},
		{"below a file", []tar.Header{file("f", 1), file("f/x", 1)}, lax, sandboxer.Invalid, "no directory"},
		{"a hard link out", []tar.Header{hard("h", "../x")}, lax, sandboxer.Invalid, "hard link"},
		{"an absolute hard link", []tar.Header{hard("h", "/etc/passwd")}, lax, sandboxer.Invalid, "hard link"},
		{"a hard link to nothing", []tar.Header{hard("h", "x")}, lax, sandboxer.Invalid, "no earlier file"},
		{"a hard link to what comes later", []tar.Header{hard("h", "x"), file("x", 1)}, lax, sandboxer.Invalid, "no earlier file"},
		{"a hard link to a directory", []tar.Header{dir("d"), hard("h", "d")}, lax, sandboxer.Invalid, "no earlier file"},
		{"a hard link to all", []tar.Header{dir("."), hard("h", ".")}, lax, sandboxer.Invalid, "no earlier file"},
		{"a hard link by way of a link", []tar.Header{link("l", "/etc"), hard("h", "l/passwd")}, lax, sandboxer.Invalid, "no earlier file"},
		{"a hard link that takes a link elsewhere", []tar.Header{link("a/l", "../b"), hard("h", "a/l")}, Rules{}, sandboxer.Invalid, "out of the root"},
		{"an absolute link", []tar.Header{link("l", "/x")}, Rules{}, sandboxer.Invalid, "out of the root"},
		{"a link out", []tar.Header{link("a/l", "../../x")}, Rules{}, sandboxer.Invalid, "out of the root"},
		{"a device", []tar.Header{{Name: "c", Typeflag: tar.TypeChar}}, Rules{}, sandboxer.Invalid, "character device"},
		{"a pipe", []tar.Header{{Name: "p", Typeflag: tar.TypeFifo}}, Rules{}, sandboxer.Invalid, "FIFO"},
		{"all that is a file", []tar.Header{file(".", 1)}, lax, sandboxer.Invalid, "root is not a directory"},
		{"case", []tar.Header{file("A", 1), file("a", 1)}, Rules{FoldCase: true}, sandboxer.Invalid, "case"},
		{"too many", []tar.Header{file("a", 0), file("b", 0)}, Rules{Entries: 1}, sandboxer.Exhausted, "more than 1 entries"},
		{"too many of one directory", []tar.Header{dir("a"), dir("a")}, Rules{Entries: 1}, sandboxer.Exhausted, "more than 1 entries"},
		{"too many of the root", []tar.Header{dir("."), dir("."), dir(".")}, Rules{Entries: 1}, sandboxer.Exhausted, "more than 1 entries"},
		{"too many that are stripped away", []tar.Header{dir("a"), dir("a")}, Rules{Entries: 1, Strip: true}, sandboxer.Exhausted, "more than 1 entries"},
		{"twice, stripped", []tar.Header{file("r/f", 1), file("s/f", 1)}, Rules{Strip: true}, sandboxer.Invalid, "twice"},
		{"out, stripped", []tar.Header{file("../../f", 1)}, Rules{Strip: true}, sandboxer.Invalid, "leads out"},
		{"absolute, stripped", []tar.Header{file("/r/f", 1)}, Rules{Strip: true}, sandboxer.Invalid, "absolute"},
		{"a hard link to what is stripped away", []tar.Header{file("r", 1), hard("s/h", "r")}, Rules{Strip: true}, sandboxer.Invalid, "no earlier file"},
		{"too many parents", []tar.Header{file("a/b", 0)}, Rules{Entries: 1}, sandboxer.Exhausted, "more than 1 entries"},
		{"too much", []tar.Header{file("a", 1), file("b", 1)}, Rules{Bytes: 1}, sandboxer.Exhausted, "more than 1 bytes"},
		{"too much at once", []tar.Header{file("a", 2)}, Rules{FileBytes: 1}, sandboxer.Exhausted, "one file"},
		{"too long", []tar.Header{file("abc", 0)}, Rules{PathBytes: 2}, sandboxer.Invalid, "2 is the limit"},
		{"too long a component", []tar.Header{file("a/bc", 0)}, Rules{NameBytes: 1}, sandboxer.Invalid, "1 is the limit"},
		{"too deep", []tar.Header{file("a/b/c", 0)}, Rules{Depth: 2}, sandboxer.Invalid, "directories deep"},
		{"too long a link", []tar.Header{link("l", "abc")}, Rules{PathBytes: 2}, sandboxer.Invalid, "2 is the limit"},
		{"a global header", []tar.Header{{Name: "g", Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"path": "../x"}}}, lax, sandboxer.Invalid, "global header"},
	} {
		if got, err := read(pack(t, c.in...), c.rules); sandboxer.KindOf(err) != c.kind || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: got %q, %v; want %s with %q", c.name, got, err, c.kind, c.why)
		}
	}
	for _, h := range []tar.Header{ // which package tar does not write
		{Name: "s", Typeflag: tar.TypeGNUSparse}, sparse, {Name: "x", Typeflag: 'V'}, {Name: "", Typeflag: tar.TypeReg}, {Name: "a\x00b", Typeflag: tar.TypeReg},
		{Name: "l", Typeflag: tar.TypeSymlink}, {Name: "l", Typeflag: tar.TypeSymlink, Linkname: "a\x00"}, {Name: "d", Typeflag: tar.TypeDir, Size: 1},
		{Name: "f/", Typeflag: tar.TypeReg}, {Name: "l/", Typeflag: tar.TypeSymlink, Linkname: "x"}, {Name: "f", Typeflag: tar.TypeReg, Size: -1},
	} {
		if e, err := NewChecker(lax).Check(&h); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%+v was taken for %+v, %v", h, e, err)
		}
	}
}

// TestSource: whose fault an error is.
func TestSource(t *testing.T) {
	whole := pack(t, file("f", 2000))
	if _, err := read(whole[:1000], Rules{}); sandboxer.KindOf(err) != sandboxer.Invalid || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut short: %v", err)
	}
	if _, err := read(bytes.Repeat([]byte("garbage!"), 200), Rules{}); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("no archive: %v", err)
	}
	lost := sandboxer.E(sandboxer.Unavailable, nil, "the host is away")
	for _, n := range []int{0, 1000} {
		r := NewReader(io.MultiReader(bytes.NewReader(whole[:n]), failing{lost}), Rules{})
		_, err := r.Next()
		if err == nil {
			_, err = io.Copy(io.Discard, r)
		}
		if !errors.Is(err, lost) || sandboxer.KindOf(err) != sandboxer.Unavailable {
			t.Errorf("a source that fails after %d bytes: %v", n, err)
		}
	}
}

type failing struct{ err error }

func (r failing) Read([]byte) (int, error) { return 0, r.err }

// written makes an archive of lines "type name>link".
func written(lines []byte) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for l := range bytes.Lines(lines) {
		l = bytes.TrimSuffix(l, []byte("\n"))
		if len(l) == 0 {
			continue
		}
		name, to, _ := strings.Cut(string(l[1:]), ">")
		_ = w.WriteHeader(&tar.Header{Typeflag: l[0], Name: name, Linkname: to}) // or it is left out
	}
	_ = w.Close()
	return b.Bytes()
}

// stays reports whether name is clean and stays inside. fs.ValidPath wants UTF-8 as well.
func stays(name string) bool {
	return filepath.IsLocal(name) && path.Clean(name) == name && strings.IndexByte(name, 0) < 0
}

// FuzzReader: whatever goes in, an unpacker that believes every word of what comes out, and
// follows every link, stays in its directory and within the limits.
func FuzzReader(f *testing.F) {
	for _, in := range [][]tar.Header{
		{dir("d/"), file("d/f", 3), link("d/l", "../x"), hard("h", "d/f"), link("o", "/etc"), file("o/x", 1)},
		{link("l", ".."), hard("m", "l"), file("m/x", 1), {Name: "p", Typeflag: tar.TypeFifo}, hard("q", "p")},
		{file("d/x", 1), link("d", "/"), file("../x", 1), file("a/../b", 1)},
	} {
		f.Add(pack(f, in...), true, true)
		f.Add(pack(f, in...), false, false)
	}
	f.Add([]byte("5d\n0d/f\n2d/l>../x\n1h>d/f\n2o>/etc\n0o/x\n6p\n1q>p"), true, true)
	f.Add([]byte("0\xd6\n2\xff>\xfe"), true, true) // names are bytes, and need not be UTF-8
	f.Add([]byte("0\xd6\n2\xff>\xfe"), false, false)
	f.Add([]byte("2l>..\n1m>l\n0m/x\n0a/../b\n0d/x\n2d>/\n0./f\n0f"), true, false)
	f.Fuzz(func(t *testing.T, b []byte, outside, special bool) {
		rules := Rules{OutsideLinks: outside, SkipSpecial: special, Entries: 100, Bytes: 1 << 20, PathBytes: 500, Depth: 20}
		kinds := map[string]byte{}
		var bytesOut int64
		if _, err := tar.NewReader(bytes.NewReader(b)).Next(); err != nil { // sums and sizes are hard to guess
			b = written(b)
		}
		for r := NewReader(bytes.NewReader(b), rules); ; {
			h, err := r.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				if k := sandboxer.KindOf(err); k != sandboxer.Invalid && k != sandboxer.Exhausted {
					t.Fatalf("%v (%s)", err, k)
				}
				break
			}
			if !stays(h.Name) {
				t.Fatalf("the name %q came through", h.Name)
			}
			for d := path.Dir(h.Name); d != "."; d = path.Dir(d) {
				if k, ok := kinds[d]; ok && k != tar.TypeDir {
					t.Fatalf("%q lies below %q, a %c", h.Name, d, k)
				}
				kinds[d] = tar.TypeDir
			}
			if old, ok := kinds[h.Name]; ok && (old != tar.TypeDir || h.Typeflag != tar.TypeDir) {
				t.Fatalf("%q came twice", h.Name)
			}
			switch h.Typeflag {
			case tar.TypeReg, tar.TypeDir:
			case tar.TypeLink:
				if kinds[h.Linkname] != tar.TypeReg {
					t.Fatalf("the hard link %q leads to %q", h.Name, h.Linkname)
				}
			case tar.TypeSymlink:
				if to := path.Join(path.Dir(h.Name), h.Linkname); !outside && (path.IsAbs(h.Linkname) || !stays(to)) {
					t.Fatalf("the link %q leads to %q", h.Name, h.Linkname)
				}
			default:
				t.Fatalf("%q is a %c", h.Name, h.Typeflag)
			}
			kinds[h.Name] = h.Typeflag
			n, err := io.Copy(io.Discard, r)
			if bytesOut += n; err == nil && n != h.Size {
				t.Fatalf("%q has %d bytes, and said %d", h.Name, n, h.Size)
			}
		}
		if len(kinds) > rules.Entries+1 || bytesOut > rules.Bytes {
			t.Fatalf("%d entries of %d bytes came through", len(kinds), bytesOut)
		}
	})
}

package execfiles

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func TestParseList(t *testing.T) {
	at := time.Unix(1_700_000_000, 0)
	file := func(name string) sandboxer.FileInfo {
		return sandboxer.FileInfo{Path: name, Size: 5, Mode: 0o644, ModTime: at, Owner: "root", Group: "root"}
	}
	const rec = "81a4 5 1700000000 0 0 root root ./"
	link := sandboxer.FileInfo{Path: "/d/l", Size: 1, Mode: fs.ModeSymlink | 0o777, ModTime: at, Owner: "1234", Group: "staff", Target: "a/b\n"}
	for _, tt := range []struct {
		name, dir, out string
		want           []sandboxer.FileInfo // nil for an error
	}{
		{"empty", "/d", "\x00", []sandboxer.FileInfo{}},
		{"sorted", "/d", rec + "b\n" + rec + "a\n\x00", []sandboxer.FileInfo{file("/d/a"), file("/d/b")}},
		{"of the root", "/", rec + "a\n\x00", []sandboxer.FileInfo{file("/a")}},
		{"line ends in a name", "/d", rec + "a\n81a4 5 1 0 0 x x b\n\n\x00", []sandboxer.FileInfo{file("/d/a\n81a4 5 1 0 0 x x b\n")}},
		{"spaces", "/d", rec + " a  b \n\x00", []sandboxer.FileInfo{file("/d/ a  b ")}},
		{"a link", "/d", "a1ff 1 1700000000 1234 50 UNKNOWN staff ./l\n\x00./l\x00a/b\n\n\x00", []sandboxer.FileInfo{link}},
		{"cut off", "/d", rec + "a\n", nil},
		{"cut off in the links", "/d", rec + "a\n\x00./a\x00b", nil},
		{"nonsense", "/d", "total 0\n\x00", nil},
		{"no numbers", "/d", "81a4 x 1700000000 0 0 root root ./a\n\x00", nil},
		{"a path", "/d", rec + "../x\n\x00", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseList(tt.dir, tt.out)
			if tt.want == nil {
				if sandboxer.KindOf(err) != sandboxer.Failed {
					t.Errorf("got %+v, %v; want a failure", got, err)
				}
				return
			}
			if err != nil || len(got) != len(tt.want) || len(got) > 0 && !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %+v, %v\nwant %+v", got, err, tt.want)
			}
		})
	}
}

func TestUnixMode(t *testing.T) {
	for m, want := range map[uint32]fs.FileMode{
		0o100644: 0o644, 0o040755: fs.ModeDir | 0o755, 0o120777: fs.ModeSymlink | 0o777, 0o010600: fs.ModeNamedPipe | 0o600,
		0o140700: fs.ModeSocket | 0o700, 0o020666: fs.ModeDevice | fs.ModeCharDevice | 0o666, 0o060660: fs.ModeDevice | 0o660,
		0o104755: fs.ModeSetuid | 0o755, 0o041777: fs.ModeDir | fs.ModeSticky | 0o777, 0o102755: fs.ModeSetgid | 0o755,
	} {
		if got := unixMode(m); got != want {
			t.Errorf("unixMode(%o) = %s; want %s", m, got, want)
		}
	}
}

// A guest prints what it likes: every path must stay directly below the directory.
func FuzzParseList(f *testing.F) {
	f.Add("81a4 5 1700000000 0 0 root root ./a\n\x00./a\x00b\n\x00")
	f.Add("\x00")
	f.Add("81a4 5 1 0 0 r r ./\n\x00")
	f.Add("81a4 5 1 0 0 r r ./..\n\x00")
	f.Add("x\n81a4 5 1 0 0 r r ./a/b\n\x00")
	f.Fuzz(func(t *testing.T, out string) {
		all, err := parseList("/d", out)
		if err != nil {
			return
		}
		for _, fi := range all {
			if path.Dir(fi.Path) != "/d" || path.Clean(fi.Path) != fi.Path || strings.Contains(fi.Path, "\x00") {
				t.Errorf("parseList(%q) yields the path %q", out, fi.Path)
			}
		}
		if !slices.IsSortedFunc(all, func(a, b sandboxer.FileInfo) int { return strings.Compare(a.Path, b.Path) }) {
			t.Errorf("parseList(%q) is not in order", out)
		}
	})
}

// TestListingInPages: what a guest prints in any pieces, of any length, is kept by the page.
func TestListingInPages(t *testing.T) {
	var out strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&out, "81a4 5 1700000000 0 0 root root ./%05d\nx\n", (i*7919)%10_000)
	}
	out.WriteString("\x00./00500\nx\x00target\n\x00")
	l := &listing{dir: "/d", after: "00498", limit: 3}
	for b := []byte(out.String()); len(b) > 0; {
		n := min(len(b), 777)
		if _, err := l.Write(b[:n]); err != nil {
			t.Fatal(err)
		}
		if b = b[n:]; len(l.got) > 6 {
			t.Fatalf("%d files are held for a page of 3", len(l.got))
		}
	}
	page, err := l.end()
	if err != nil || len(page) != 3 || page[0].Path != "/d/00498\nx" || page[2].Target != "target" || !l.cut {
		t.Errorf("%+v, %v, cut: %t", page, err, l.cut)
	}
	endless := &listing{dir: "/d", limit: 3}
	if _, err := endless.Write(make([]byte, 0)); err != nil {
		t.Error(err)
	}
	if _, err := endless.Write(bytes.Repeat([]byte("a"), maxPart+1)); sandboxer.KindOf(err) != sandboxer.Failed {
		t.Errorf("a name without end: %v", err)
	}
}

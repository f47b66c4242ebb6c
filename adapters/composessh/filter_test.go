package composessh

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestFilterTar: a host's tar, which believes its archive, gets none that leads out of the
// workspace, or puts something else where a service has a mount.
func TestFilterTar(t *testing.T) {
	reg := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o4755} }
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
	}
	dir := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir} }
	hard := func(name, to string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}
	}
	stay := map[string]bool{"conf": true, "data": false}
	for _, c := range []struct {
		name string
		in   []tar.Header
		want string // "refused" or what is passed on
	}{
		{"a tree", []tar.Header{dir("./"), dir("./d/"), reg("./d/f"), link("d/l", "/etc"), hard("d/h", "./d/f"), {Name: "p", Typeflag: tar.TypeFifo}}, "5d/ 0d/f 2d/l>/etc 1d/h>d/f"},
		{"mounts", []tar.Header{reg("conf"), dir("data"), reg("data/x")}, "0conf 5data/ 0data/x"},
		{"absolute", []tar.Header{reg("/etc/passwd")}, "refused"},
		{"upwards", []tar.Header{reg("../x")}, "refused"},
		{"upwards and back", []tar.Header{reg("d/../x")}, "refused"},
		{"by way of a link", []tar.Header{link("l", "/etc"), reg("l/passwd")}, "refused"},
		{"by way of a directory that becomes a link", []tar.Header{dir("d"), link("d", "/etc"), reg("d/passwd")}, "refused"},
		{"by way of a link of a link", []tar.Header{link("l", "/etc"), hard("m", "l"), reg("m/passwd")}, "refused"},
		{"a link that is written through", []tar.Header{link("l", "/etc/passwd"), reg("l")}, "refused"},
		{"a hard link out", []tar.Header{hard("h", "/etc/passwd")}, "refused"},
		{"a hard link to what is there", []tar.Header{hard("h", "there")}, "refused"},
		{"a mount of a file that is a link", []tar.Header{link("conf", "x")}, "refused"},
		{"a mount of a file that is a directory", []tar.Header{dir("conf")}, "refused"},
		{"a mount of a directory that is a file", []tar.Header{reg("data")}, "refused"},
		{"a mount of a directory that is a hard link", []tar.Header{reg("f"), hard("data", "f")}, "refused"},
	} {
		var in, out bytes.Buffer
		w := tar.NewWriter(&in)
		for _, h := range c.in {
			if err := w.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		err := filterTar(&in, &out, stay)
		var got []string
		for r := tar.NewReader(&out); ; {
			h, rerr := r.Next()
			if rerr != nil {
				break
			}
			s := string(h.Typeflag) + h.Name
			if h.Linkname != "" {
				s += ">" + h.Linkname
			}
			if h.Mode&^0o777 != 0 {
				t.Errorf("%s: %s has the mode %o", c.name, h.Name, h.Mode)
			}
			got = append(got, s)
		}
		switch {
		case c.want == "refused" && sandboxer.KindOf(err) != sandboxer.Invalid:
			t.Errorf("%s: %q was passed on, %v", c.name, got, err)
		case c.want != "refused" && (err != nil || strings.Join(got, " ") != c.want):
			t.Errorf("%s: %q was passed on, %v; want %q", c.name, got, err, c.want)
		}
	}
	full := errors.New("the pipe is closed")
	if err := filterTar(bytes.NewReader(make([]byte, 1024)), failing{full}, nil); !errors.Is(err, full) || sandboxer.KindOf(err) != sandboxer.Internal {
		t.Errorf("a writer that fails: %v", err)
	}
	lost := sandboxer.E(sandboxer.Unavailable, nil, "the store is away")
	if err := filterTar(failing{lost}, io.Discard, nil); !errors.Is(err, lost) || sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("a source that fails: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error)  { return 0, f.err }
func (f failing) Write([]byte) (int, error) { return 0, f.err }

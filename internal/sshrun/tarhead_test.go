package sshrun

import (
	"archive/tar"
	"bytes"
	"io"
	"strings"
	"testing"
	"time"
)

// What is made here reads as what was meant, and as what package tar would have made.
func FuzzTarHead(f *testing.F) {
	f.Add("a", byte('f'), uint32(0o644), int64(5), int64(1700000000), int64(123456789), "")
	f.Add("d/"+strings.Repeat("n", 94), byte('f'), uint32(0o4755), int64(1)<<33, int64(1), int64(0), "")
	f.Add("ü", byte('l'), uint32(0o777), int64(0), int64(-5), int64(1), "../x y")
	f.Add("dir", byte('d'), uint32(0o1777), int64(0), int64(1)<<33-1, int64(999999999), "")
	f.Fuzz(func(t *testing.T, name string, typ byte, mode uint32, size, sec, nsec int64, target string) {
		e := entry{typ: typ, mode: mode & 0o7777, size: size, sec: sec % (1 << 40), nsec: nsec}
		switch {
		case name == "" || strings.ContainsRune(name+target, 0) || strings.HasSuffix(name, "/") || strings.HasPrefix(name, "/"), nsec < 0 || nsec > 999_999_999, size < 0:
			return
		case typ == 'l' && target == "" || typ != 'l' && typ != 'd' && typ != 'f':
			return
		case typ != 'l':
			e.target = ""
		}
		if typ != 'f' {
			e.size = 0
		}
		var h tarHead
		head, err := h.of(name, e)
		if err != nil {
			return // what tar has no way to say
		}
		if len(head)%tarBlock != 0 {
			t.Errorf("%d bytes", len(head))
		}
		got, err := tar.NewReader(io.MultiReader(bytes.NewReader(head), zeros{})).Next()
		if err != nil {
			t.Fatalf("%q %+v: %v", name, e, err)
		}
		full := "./" + name
		want := map[byte]byte{'f': tar.TypeReg, 'd': tar.TypeDir, 'l': tar.TypeSymlink}[typ]
		if typ == 'd' {
			full += "/"
		}
		if got.Name != full || got.Typeflag != want || got.Size != e.size || uint32(got.Mode) != e.mode || got.Linkname != e.target || !got.ModTime.Equal(time.Unix(e.sec, e.nsec)) {
			t.Errorf("%q %+v reads as %+v", name, e, got)
		}
	})
}

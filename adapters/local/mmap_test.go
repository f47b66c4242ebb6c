//go:build linux

package local

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/local/pause"
)

// TestSmallFilesOfAnImageCanBeMapped maps files smaller than a block of the image:
// programs, which the sandbox's kernel maps itself, and data.
func TestSmallFilesOfAnImageCanBeMapped(t *testing.T) {
	if pause.Program == nil {
		t.Skip("no small program for this architecture")
	}
	box, err := os.ReadFile(busybox(t))
	if err != nil {
		t.Fatal(err)
	}
	tool, err := os.ReadFile(filepath.Join(helpers, "tool"))
	if err != nil {
		t.Fatal(err)
	}
	small := bytes.TrimRight(pause.Program, "\x00")
	if len(small) > 2000 {
		t.Fatalf("the program has %d bytes: not a small one", len(small))
	}
	files := map[string][]byte{"bin/busybox": box, "bin/tool": tool, "bin/small": small, "bin/same": small,
		"one": []byte("1"), "most": []byte(strings.Repeat("m", 4095)), "block": []byte(strings.Repeat("b", 4096)), "more": []byte(strings.Repeat("x", 4097))}
	entries := []tar.Header{{Name: "bin/sh", Typeflag: tar.TypeLink, Linkname: "bin/busybox"}, {Name: "bin/hard", Typeflag: tar.TypeLink, Linkname: "bin/small"}}
	var all []tar.Header
	for n := range files {
		all = append(all, tar.Header{Name: n, Typeflag: tar.TypeReg, Mode: 0o755})
	}
	img, err := mutate.AppendLayers(empty.Image, layer(t, append(all, entries...), files))
	if err != nil {
		t.Fatal(err)
	}
	saved := filepath.Join(t.TempDir(), "saved.tar")
	if err := tarball.WriteToFile(saved, name.MustParseReference("test/small:v1"), img); err != nil {
		t.Fatal(err)
	}
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{Image: "tar:" + saved})
	for _, f := range []string{"one", "most", "block", "more", "bin/small", "bin/hard"} {
		want := files[f]
		if want == nil {
			want = small
		}
		var out bytes.Buffer
		if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"/bin/tool", "map", "/" + f}, Stdout: &out}); err != nil || x.Code != 0 || !bytes.Equal(out.Bytes(), want) {
			t.Errorf("/%s mapped: %d bytes, exit %d, %v; it has %d: %.100q", f, out.Len(), x.Code, err, len(want), out.Bytes())
		}
	}
	// The rest of a mapped file's last page is zeros, not a neighbour's data.
	if got := sh(t, e, h, "/bin/tool maprest /one; /bin/tool maprest /bin/small"); got != "4095 zeros\n"+strconv.Itoa(4096-len(small))+" zeros" {
		t.Errorf("after the ends: %s", got)
	}
	for _, p := range []string{"small", "same", "hard"} { // it prints 2 without arguments
		if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"/bin/" + p}}); err != nil || x.Code != 2 {
			t.Errorf("/bin/%s: exit %d, %v", p, x.Code, err)
		}
	}
	if got := sh(t, e, h, "busybox wc -c </one; busybox stat -c %s /most; busybox md5sum </bin/small | busybox cut -c1-8"); !strings.HasPrefix(got, "1\n4095\n") {
		t.Errorf("sizes: %s", got)
	}
}

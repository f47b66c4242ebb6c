package images

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/erofs/go-erofs"
)

// TestEveryFileHasItsBlocks writes files of all sizes around a block's, with what makes
// inodes large and small, and looks at what became of them, also by the tool of the
// format's authors.
func TestEveryFileHasItsBlocks(t *testing.T) {
	want := map[string]string{}
	var first, second []entry
	add := func(layer *[]entry, name string, size int, change func(*entry)) {
		e := file(name, strings.Repeat(string(rune('a'+size%26)), size))
		if change != nil {
			change(&e)
		}
		want[name] = e.content
		*layer = append(*layer, e)
	}
	for _, size := range []int{0, 1, 2, 31, 32, 33, 700, 2048, 4031, 4032, 4033, 4063, 4064, 4065, 4095, 4096, 4097, 8191, 8192, 8193} {
		add(&first, fmt.Sprintf("small-inode/%d", size), size, nil)
		add(&first, fmt.Sprintf("large-inode/%d", size), size, func(e *entry) { e.h.Uid = 70_000; e.h.ModTime = time.Unix(1e9, 5) })
	}
	for i := range 300 { // a directory of several blocks
		add(&second, fmt.Sprintf("many/%03d%s", i, strings.Repeat("n", 100)), i, nil)
	}
	second = append(second, hard("hard", "small-inode/700"), sym("sym", "small-inode/700"))
	want["hard"] = want["small-inode/700"]
	tree := NewTree(roomy)
	var ls []Layer
	for _, data := range [][]byte{archive(t, first...), archive(t, second...)} {
		ls = append(ls, Layer{Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }})
	}
	if err := tree.AddLayers(t.Context(), "test", ls); err != nil {
		t.Fatal(err)
	}
	if err := tree.File("own", 0o755, 3, func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("own")), nil }); err != nil {
		t.Fatal(err)
	}
	want["own"] = "own"
	dir := t.TempDir()
	p := filepath.Join(dir, "image")
	f, err := os.Create(p)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := tree.Write(t.Context(), "test", f, dir); err != nil {
		t.Fatal(err)
	}
	fsys, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range want {
		got, err := fs.ReadFile(fsys, name)
		if err != nil || string(got) != content {
			t.Errorf("%s has %d bytes, %v; want %d", name, len(got), err, len(content))
			continue
		}
		fi, err := fs.Stat(fsys, name)
		if err != nil {
			t.Fatal(err)
		}
		if st := fi.Sys().(*erofs.Stat); st.InodeLayout != flatPlain {
			t.Errorf("%s, of %d bytes, is laid out as %d", name, len(content), st.InodeLayout)
		}
	}
	out, err := exec.Command("fsck.erofs", p).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		t.Log("not checked by fsck.erofs: install erofs-utils")
	} else if err != nil {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
}

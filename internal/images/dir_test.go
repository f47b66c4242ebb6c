//go:build linux

package images

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTarDir: a directory is a layer within bounds; what is neither file, directory nor link is left out.
func TestTarDir(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "d"), 0o700), os.WriteFile(filepath.Join(dir, "d", "f"), []byte("text"), 0o600),
		os.Symlink("/etc/passwd", filepath.Join(dir, "l")), unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
		os.Chmod(filepath.Join(dir, "d", "f"), os.ModeSetuid|0o755), os.Chmod(filepath.Join(dir, "d"), os.ModeSticky|0o777)); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := TarDir(t.Context(), &out, dir, Limits{Unpacked: 1 << 20, Entries: 10}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for r := tar.NewReader(&out); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, h.FileInfo().Mode().String()+" "+h.Name+" "+h.Linkname+string(text))
	}
	if want := []string{"dtrwxrwxrwx d/ ", "-rwxr-xr-x d/f text", "Lrwxrwxrwx l /etc/passwd"}; !slices.Equal(got, want) {
		t.Errorf("%q; want %q", got, want)
	}
	for _, l := range []Limits{{Unpacked: 1 << 20, Entries: 3}, {Unpacked: 1, Entries: 10}} {
		if err := TarDir(t.Context(), io.Discard, dir, l); err == nil || !strings.Contains(err.Error(), "more than") {
			t.Errorf("beyond %+v: %v", l, err)
		}
	}
}

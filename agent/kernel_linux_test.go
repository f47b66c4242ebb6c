package agent

import (
	"archive/tar"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Files of the kernel's file systems do not get into an archive, even if these are
// mounted below the packed directory.
func TestTarLeavesTheKernelOut(t *testing.T) {
	if !isKernels("/proc") || isKernels(t.TempDir()) {
		t.Error("/proc is no directory of files, a temporary one is")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(dir, "mounted")
	if err := os.Mkdir(at, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("proc", at, "proc", 0, ""); err != nil {
		t.Skipf("nothing can be mounted here: %v", err)
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	r, w := io.Pipe()
	go func() {
		_, err := Tar(w, dir)
		w.CloseWithError(err)
	}()
	in := tar.NewReader(r)
	var names []string
	for {
		h, err := in.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
	if len(names) != 1 || names[0] != "file" {
		t.Errorf("the archive has %.10q", names)
	}
}

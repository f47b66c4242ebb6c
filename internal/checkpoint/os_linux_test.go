package checkpoint

import (
	"bytes"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// A pipe that is saved holds as much as it may.
func TestSavedPipe(t *testing.T) {
	d, err := OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	s, err := New(d, testKey(1), Options{SpoolDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	go func() {
		_, _ = w.Write(bytes.Repeat([]byte{0}, 1024)) // an empty tar
		w.Close()
	}()
	if _, err := s.Save(t.Context(), "piped", Meta{}, r, SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	c, err := r.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Control(func(fd uintptr) {
		if n, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0); err != nil || n < pipeSize {
			t.Errorf("the pipe holds %d bytes: %v", n, err)
		}
	}); err != nil {
		t.Fatal(err)
	}
}

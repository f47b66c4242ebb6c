package enginetest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// An engine of the tests ends with whoever started it, also one that does not answer.
func TestEngineEndsWithItsOwner(t *testing.T) {
	if _, err := exec.LookPath("dockerd"); err != nil || os.Getuid() != 0 {
		t.Skip("a Docker engine needs root and dockerd (scripts/setup.sh installs it)")
	}
	dir, err := os.MkdirTemp("/tmp", "sbd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	d := &Docker{dir: dir}
	if err := d.keep(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "sock")); err != nil {
		t.Error(err)
	}
	pid, err := os.ReadFile(filepath.Join(dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	d.Hang(t)
	d.end.Close()
	if err := d.kept.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat("/proc/" + strings.TrimSpace(string(pid))); err == nil {
		t.Error("the engine lives on")
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("its files are left")
	}
}

package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestStartOnFullDisk: others write the disk full, take what the reserve gives up, and the
// server is killed. A command starts the next one, in which sandboxes are seen and destroyed.
func TestStartOnFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a small file system")
	}
	home, err := os.MkdirTemp("", "sbx") // a socket's name is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	if err := unix.Mount("tmpfs", home, "tmpfs", 0, "size=96m,mode=0700"); err != nil {
		t.Skipf("cannot mount a small file system here: %v", err)
	}
	t.Cleanup(func() {
		stopServer(t, home)
		if err := unix.Unmount(home, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	fills := 0
	fill := func() {
		t.Helper()
		fills++
		f, err := os.Create(filepath.Join(home, fmt.Sprint("filler", fills)))
		for block := make([]byte, 1<<20); err == nil && len(block) > 0; {
			if _, werr := f.Write(block); werr != nil {
				block = block[:len(block)/2]
			}
		}
		if err != nil && !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		f.Close()
	}
	run := func(want int, args ...string) string {
		t.Helper()
		cmd := selfCommand(home, args...)
		out, _ := cmd.CombinedOutput()
		if got := cmd.ProcessState.ExitCode(); got != want {
			t.Fatalf("%s: exit %d; want %d\n%s", strings.Join(args, " "), got, want, out)
		}
		return string(out)
	}
	for i := range 3 {
		run(0, "create", "--name", fmt.Sprint("s", i))
	}
	fill()
	// The log of the database has room for some.
	for n := 0; ; n++ {
		out, err := selfCommand(home, "create", "-q").CombinedOutput()
		if err != nil {
			if !strings.Contains(string(out), "is full") {
				t.Fatalf("creating: %v\n%s", err, out)
			}
			break
		}
		if fill(); n > 1000 {
			t.Fatal("the disk does not get full")
		}
	}
	fill()
	lock, err := os.ReadFile(filepath.Join(home, "data", "lock"))
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(lock), "\n")
	pid, err := strconv.Atoi(first)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	lives := func() bool { b, _ := os.ReadFile("/proc/" + first + "/cmdline"); return len(b) > 0 }
	for deadline := time.Now().Add(time.Minute); lives(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the server lives")
		}
	}
	fill()
	run(0, "up")
	if out := run(0, "ls", "--all"); !strings.Contains(out, "s2") {
		t.Errorf("ls shows %s", out)
	}
	if out := run(6, "create", "-q"); !strings.Contains(out, "can still be listed and destroyed") {
		t.Errorf("create says %s", out)
	}
	fill()
	run(0, "destroy", "--yes", "s0", "s1", "s2")
}

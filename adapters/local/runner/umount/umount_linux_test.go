package umount

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
)

// run starts the program in a mount namespace of its own, makes it continue, or closes
// its pipe, and returns its exit code.
func run(t *testing.T, told bool, args ...string) int {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	c := exec.Command(args[0], args[1:]...)
	c.ExtraFiles = []*os.File{r}
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // the program ends with this thread
	defer runtime.UnlockOSThread()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if told {
		if _, err := w.Write([]byte{0}); err != nil {
			t.Error(err)
		}
	}
	r.Close()
	w.Close()
	err = c.Wait()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0
}

func TestUmount(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a mount namespace")
	}
	emulator, other := "qemu-aarch64-static", "arm64"
	if runtime.GOARCH == "arm64" {
		emulator, other = "qemu-x86_64-static", "amd64"
	}
	for _, arch := range []string{runtime.GOARCH, other} {
		t.Run(arch, func(t *testing.T) {
			p, err := filepath.Abs(arch + ".elf")
			if err != nil {
				t.Fatal(err)
			}
			args := []string{p, "umount", "--sync-fd=3", "/proc"}
			if arch == other {
				if _, err := exec.LookPath(emulator); err != nil {
					t.Skipf("%s is missing", emulator)
				}
				args = append([]string{emulator}, args...)
			}
			if code := run(t, true, args...); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if code := run(t, false, args...); code != 1 {
				t.Errorf("exit code %d where who started it has ended, want 1", code)
			}
		})
	}
	if _, err := os.Stat("/proc/self"); err != nil {
		t.Error(err)
	}
}

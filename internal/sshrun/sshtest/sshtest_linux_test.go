package sshtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestEndsWithItsTest starts a server in a process that ends as one does that panics:
// without any cleaning up.
func TestEndsWithItsTest(t *testing.T) {
	const role = "SANDBOXER_TEST_SSHD"
	if os.Getenv(role) != "" {
		fmt.Printf("pid %d\n", Start(t, Options{}).PID)
		os.Exit(0)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run=^TestEndsWithItsTest$", "-test.v")
	cmd.Env = append(os.Environ(), role+"=1", "TMPDIR="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if strings.Contains(string(out), "--- SKIP") {
		t.Skipf("%s", out)
	}
	var pid int
	if _, line, ok := strings.Cut(string(out), "pid "); ok {
		_, _ = fmt.Sscan(line, &pid)
	}
	if err != nil || pid == 0 {
		t.Fatalf("%v\n%s", err, out)
	}
	for deadline := time.Now().Add(time.Minute); !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			t.Fatal("the server goes on when its test is gone")
		}
	}
}

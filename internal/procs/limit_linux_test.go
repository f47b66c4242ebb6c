package procs

import (
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// TestLimit reads the limits of a process as it was given them.
func TestLimit(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	if err := unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_LOCKS, &unix.Rlimit{Cur: 1 << 61, Max: 1<<61 + 1}, nil); err != nil {
		t.Fatal(err)
	}
	if soft, hard, err := Limit(cmd.Process.Pid, "Max file locks"); err != nil || soft != 1<<61 || hard != 1<<61+1 {
		t.Errorf("they are %d, %d, %v", soft, hard, err)
	}
	if soft, hard, err := Limit(cmd.Process.Pid, "Max resident set"); err != nil || soft != 0 || hard != 0 {
		t.Errorf("one that is not set is %d, %d, %v", soft, hard, err)
	}
	if soft, hard, err := Limit(os.Getpid(), "Max"); err != nil || soft != 0 || hard != 0 {
		t.Errorf("one that there is not is %d, %d, %v", soft, hard, err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	if soft, _, err := Limit(cmd.Process.Pid, "Max file locks"); err != nil || soft != 0 {
		t.Errorf("of one that ended: %d, %v", soft, err)
	}
}

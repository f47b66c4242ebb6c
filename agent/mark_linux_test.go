package agent

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// What carries the mark is killed also if it is in the middle of an execve, where its
// environment cannot be seen.
func TestKillMarkedAmidExec(t *testing.T) {
	script := t.TempDir() + "/again"
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec \"$0\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	mark := "SANDBOXER_EXEC=" + script
	for i := range 30 {
		cmd := exec.Command(script)
		cmd.Env = append(os.Environ(), mark)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() { defer close(ended); _ = cmd.Wait() }()
		code := runKillMarked([]string{mark, strconv.Itoa(1 << 30)}) // a session that nobody has
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
			_ = cmd.Process.Kill()
			<-ended
			t.Fatalf("%d: it lives on; the answer was %d", i, code)
		}
	}
}

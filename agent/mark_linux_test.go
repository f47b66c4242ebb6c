package agent

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// A marked process is killed even during an execve, when its environment cannot be seen.
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
		code := runKillMarked([]string{mark, strconv.Itoa(1 << 30)}) // a session that no process has
		select {
		case <-ended:
		case <-time.After(time.Minute):
			_ = cmd.Process.Kill()
			<-ended
			t.Fatalf("%d: it lives on; the answer was %d", i, code)
		}
	}
}

// One call ends several commands, each by its environment, session or tag; other processes
// continue.
func TestKillMarkedSeveral(t *testing.T) {
	begin := func(env string) (*exec.Cmd, <-chan struct{}) {
		t.Helper()
		cmd := exec.Command("sleep", "1000")
		cmd.Env = append(os.Environ(), env)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() { defer close(ended); _ = cmd.Wait() }()
		t.Cleanup(func() { _ = cmd.Process.Kill(); <-ended })
		return cmd, ended
	}
	mark := "SANDBOXER_EXEC=" + t.TempDir()
	_, first := begin(mark + "-1")
	_, second := begin(mark + "-2")
	third, thirds := begin("NOTHING=1")
	_, other := begin(mark + "-10")
	nobody := strconv.Itoa(1 << 30)
	if code := runKillMarked([]string{mark + "-1", nobody, "0", mark + "-2", nobody, "0", mark + "-3", strconv.Itoa(third.Process.Pid), "0"}); code != 0 {
		t.Errorf("it answers %d", code)
	}
	for i, ended := range []<-chan struct{}{first, second, thirds} {
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Errorf("number %d lives on", i+1)
		}
	}
	select {
	case <-other:
		t.Error("one with another mark was ended")
	default:
	}
	for _, args := range [][]string{{}, {"A=b"}, {"A", "7", "0"}, {"A=b", "1", "0"}, {"A=b", "7", "no"}, {"A=b", "7", "0", "C=d"}} {
		if code := runKillMarked(args); code != 2 {
			t.Errorf("%q: the answer is %d", args, code)
		}
	}
}

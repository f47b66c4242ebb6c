package procs_test

import (
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/procs"
)

// A process is found at every moment of an execve.
func TestAmidExec(t *testing.T) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("needs /proc")
	}
	// A program that becomes itself again and again is in the middle of it much of the time.
	script := t.TempDir() + "/again"
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec \"$0\" \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	mark := "SANDBOXER_TEST=" + script
	cmd := exec.Command(script, mark)
	cmd.Env = append(os.Environ(), mark)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for pid, end := cmd.Process.Pid, time.Now().Add(10*time.Second); len(procs.Stat(pid)) == 0 && time.Now().Before(end); {
	}
	buf := make([]byte, procs.Room)
	var env, args int
	const looks = 3000
	for range looks {
		if !procs.Has(procs.Environ(cmd.Process.Pid, buf), mark) {
			env++
		}
		if !procs.Has(procs.Args(cmd.Process.Pid, buf), mark) {
			args++
		}
	}
	if env > 0 || args > 0 {
		t.Errorf("of %d looks %d did not see its environment, %d not its arguments", looks, env, args)
	}
	if !slices.Contains(procs.WithEnv(mark), cmd.Process.Pid) || !slices.Contains(procs.WithArg(mark), cmd.Process.Pid) {
		t.Error("it is not listed")
	}
}

func TestNothingToSee(t *testing.T) {
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		t.Skip("needs /proc")
	}
	cmd := exec.Command("sleep", "60")
	cmd.Env = []string{}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	if env := procs.Environ(cmd.Process.Pid, make([]byte, procs.Room)); len(env) > 0 {
		t.Errorf("an empty environment reads %q", env)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	for _, pid := range []int{cmd.Process.Pid, 2} {
		if env := procs.Environ(pid, make([]byte, procs.Room)); len(env) > 0 && pid != 2 {
			t.Errorf("%d: %q", pid, env)
		}
	}
	if d := time.Since(begun); d > 500*time.Millisecond {
		t.Errorf("it took %s to see nothing", d)
	}
}

// A program may have any name, also one that looks like the rest of its line.
func TestStat(t *testing.T) {
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("needs /proc")
	}
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Skip("needs a sleep command")
	}
	link := t.TempDir() + "/a ) Z 1 (b"
	if err := os.Symlink(sleep, link); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(link, "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	f := procs.Stat(cmd.Process.Pid)
	if len(f) == 0 || f[0] == "Z" || f[1] != strconv.Itoa(os.Getpid()) {
		t.Errorf("fields from the state on: %q", f)
	}
	if f := procs.Stat(1 << 30); f != nil {
		t.Errorf("a process that there is not has %q", f)
	}
}

package procs_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
	// Many, so that noting where they are takes a good part of each execve.
	for i := range 5000 {
		cmd.Env = append(cmd.Env, fmt.Sprintf("A%d=1", i))
	}
	cmd.Env = append(cmd.Env, mark)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for pid, end := cmd.Process.Pid, time.Now().Add(10*time.Second); procs.Ended(pid) && time.Now().Before(end); {
	}
	buf := make([]byte, procs.Room)
	var env, args int
	const looks = 3000
	for range looks {
		if list, err := procs.Environ(cmd.Process.Pid, buf); err != nil || !procs.Has(list, mark) {
			env++
		}
		if list, err := procs.Args(cmd.Process.Pid, buf); err != nil || !procs.Has(list, mark) {
			args++
		}
	}
	if env > 0 || args > 0 {
		t.Errorf("of %d looks %d did not see its environment, %d not its arguments", looks, env, args)
	}
	for _, with := range []func(string) ([]int, error){procs.WithEnv, procs.WithArg} {
		if pids, err := with(mark); err != nil || !slices.Contains(pids, cmd.Process.Pid) {
			t.Errorf("it is not listed: %v, %v", pids, err)
		}
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
	if env, err := procs.Environ(cmd.Process.Pid, make([]byte, procs.Room)); err != nil || len(env) > 0 {
		t.Errorf("an empty environment reads %q, %v", env, err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	for _, pid := range []int{cmd.Process.Pid, 2} {
		if env, err := procs.Environ(pid, make([]byte, procs.Room)); err != nil || len(env) > 0 && pid != 2 {
			t.Errorf("%d: %q, %v", pid, env, err)
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
	f, err := procs.Stat(cmd.Process.Pid)
	if err != nil || len(f) == 0 || f[0] == "Z" || f[1] != strconv.Itoa(os.Getpid()) {
		t.Errorf("fields from the state on: %q", f)
	}
	if f, err := procs.Stat(1 << 30); len(f) > 0 || err != nil {
		t.Errorf("a process that there is not has %q, %v", f, err)
	}
}

// Without a descriptor left nothing can be looked at, and so nothing is said not to be there.
func TestWithoutDescriptors(t *testing.T) {
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("needs /proc")
	}
	if os.Getenv("SANDBOXER_TEST_DESCRIPTORS") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestWithoutDescriptors$", "-test.v")
		cmd.Env = append(os.Environ(), "SANDBOXER_TEST_DESCRIPTORS=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	parent := os.Getppid()
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	var full []*os.File
	few := unix.Rlimit{Cur: 64, Max: was.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	for {
		f, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		full = append(full, f)
	}
	buf := make([]byte, procs.Room)
	_, stat := procs.Stat(parent)
	_, read := procs.Read(parent, "limits")
	_, args := procs.Args(parent, buf)
	_, env := procs.Environ(parent, buf)
	_, all := procs.All()
	_, withEnv := procs.WithEnv("A=B")
	_, withArg := procs.WithArg("A")
	ended, over := procs.Ended(parent), procs.Ended(gone.Process.Pid)
	for _, f := range full {
		f.Close()
	}
	for what, err := range map[string]error{"Stat": stat, "Read": read, "Args": args, "Environ": env, "All": all, "WithEnv": withEnv, "WithArg": withArg} {
		if !errors.Is(err, unix.EMFILE) {
			t.Errorf("%s: %v; want too many open files", what, err)
		}
	}
	if ended || !over {
		t.Errorf("one that runs is said to have ended: %v; one that ended: %v", ended, over)
	}
}

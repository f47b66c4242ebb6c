// Package procstest is for tests that stop processes.
package procstest

import (
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/procs"
)

// Stop stops a process, as a machine that stalls would, until goOn is called or the test ends. It returns when the process
// runs no more of its program: on a busy machine, its threads go on for a while after the signal was sent.
func Stop(t testing.TB, pid int) (goOn func()) {
	t.Helper()
	goOn = sync.OnceFunc(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	t.Cleanup(goOn)
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if f, err := procs.Stat(pid); err == nil && len(f) > 0 && f[0] == "T" {
			return goOn
		}
		if time.Now().After(end) {
			t.Fatalf("process %d does not stop", pid)
		}
	}
}

package sshrun_test

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// A command finds a shell that waits for it since the one before, far away in a single
// round trip; and without further commands nothing stays.
func TestShellsWait(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("looks into /proc")
	}
	leaveNothing(t)
	mark := fmt.Sprintf("T=%d", os.Getpid())
	s := sshtest.Start(t, sshtest.Options{Env: []string{mark}})
	const way = 150 * time.Millisecond
	target := s.Target()
	target.Port = sshtest.NewRelay(t, s.Port, way).Port
	h := host(t, newPool(t, sshrun.Options{}), target)
	shells := func() int { return len(withEnv(t, mark)) }
	if _, err := h.Output(t.Context(), "true"); err != nil {
		t.Fatal(err)
	}
	// On a busy machine one pair may be slow, but not every one.
	const limit = 2*way + way*2/3
	var took time.Duration
	for range 5 {
		waitFor(t, func() bool { return shells() == 2 })
		time.Sleep(way) // until that is known here
		took = 0
		for i := range 2 {
			begun := time.Now()
			out, err := h.Output(t.Context(), `echo "$1 $SANDBOXER_RUN"`, fmt.Sprint(i))
			if err != nil || !strings.HasPrefix(string(out), fmt.Sprint(i, " ")) {
				t.Errorf("%q, %v", out, err)
			}
			took = max(took, time.Since(begun))
		}
		if took <= limit {
			break
		}
	}
	if took > limit {
		t.Errorf("it takes %s; a round trip takes %s", took, 2*way)
	}
	waitFor(t, func() bool { return shells() == 0 })
	// What is killed is found by its own mark, also in a shell that waited.
	if _, err := h.Output(t.Context(), "true"); err != nil {
		t.Error(err)
	}
	waitFor(t, func() bool { return shells() == 2 })
}

// Where a server admits few sessions none of them is kept for later.
func TestNoShellWhereFewAreAdmitted(t *testing.T) {
	leaveNothing(t)
	for most := 1; most <= 3; most++ {
		s := sshtest.Start(t, sshtest.Options{Config: fmt.Sprintf("MaxSessions %d", most)})
		h := host(t, newPool(t, sshrun.Options{}), s.Target())
		for range 5 {
			if _, err := h.Output(t.Context(), "true"); err != nil {
				t.Fatalf("MaxSessions %d: %v", most, err)
			}
		}
		// All of them for commands that run at the same time.
		done := make(chan error, most)
		for range most {
			go func() { _, err := h.Output(t.Context(), "sleep 0.2"); done <- err }()
		}
		for range most {
			if err := <-done; err != nil {
				t.Errorf("MaxSessions %d: %v", most, err)
			}
		}
	}
}

// What is in the middle of an execve is killed like everything else.
func TestKillAmidExec(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("looks into /proc")
	}
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	script := t.TempDir() + "/again"
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec \"$0\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		mark := fmt.Sprintf("%s-%d", script, i)
		if _, err := h.Output(t.Context(), `M=$1 setsid "$2" </dev/null >/dev/null 2>&1 &`, mark, script); err != nil {
			t.Fatal(err)
		}
		waitFor(t, func() bool { return len(withEnv(t, "M="+mark)) == 1 })
		if err := h.Kill(t.Context(), "M", mark); err != nil {
			t.Fatal(err)
		}
		if left := withEnv(t, "M="+mark); len(left) > 0 {
			h.Kill(t.Context(), "M", mark)
			t.Fatalf("%d: %d lives on", i, left)
		}
	}
}

package vmpacker_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// TestAgentOnMachine: the agent is copied when it is needed and again if it is gone, ends with the
// sandbox, and if it cannot run only what needs it fails.
func TestAgentOnMachine(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	e := attachTo(t, s, nil).opened(t)
	h := provision(t, e, order("agent", map[string]string{"vm": "vm"}))
	p := e.(sandboxer.ProcessManager)
	file := filepath.Join(s.Dir, "build/.sandboxer/sbx-agent/sandboxer-agent")
	// The agents are the processes that run the file, or ran it.
	agents := func() (pids []int) {
		t.Helper()
		all, err := procs.WithArg("--listen=own:" + filepath.Dir(file) + "/agent.sock")
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	kill := func() {
		t.Helper()
		run(t, e, h, "kill -KILL $(grep -ls own:"+filepath.Dir(file)+" /proc/[0-9]*/cmdline | cut -d/ -f3 | grep -vx $$) 2>/dev/null; :")
		await(t, "the agent to end", func() bool { return len(agents()) == 0 })
	}
	start := func() error {
		_, err := p.StartProcess(t.Context(), h, sandboxer.ProcessSpec{Args: []string{"sleep", "1000"}})
		return err
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) || len(agents()) != 0 {
		t.Errorf("before it is asked for: %v, %v", err, agents())
	}
	if err := start(); err != nil || len(agents()) != 1 {
		t.Fatalf("%v; agents %v", err, agents())
	}
	kill()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := start(); err != nil || len(agents()) != 1 {
		t.Errorf("after somebody removed it: %v; agents %v", err, agents())
	}
	kill()
	if err := os.Chmod(file, 0o600); err != nil { // as if nothing may be executed
		t.Fatal(err)
	}
	if err := start(); sandboxer.KindOf(err) != sandboxer.Unsupported {
		t.Errorf("where it cannot run: %v", err)
	}
	if got := run(t, e, h, "echo still"); !strings.Contains(got, "still") {
		t.Errorf("a command there: %q", got)
	}
	if err := os.Chmod(file, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := start(); err != nil {
		t.Errorf("where it can again: %v", err)
	}
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) || len(agents()) != 0 {
		t.Errorf("after the teardown: %v, %v", err, agents())
	}
}

package marked

import (
	"bufio"
	"crypto/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestMarkedScripts runs what is for the inside of a container here, with every shell that there
// is: what carries the mark in its environment, or has dropped that and carries the tag, is
// ended, and nothing else is, the scripts themselves least of all.
func TestMarkedScripts(t *testing.T) {
	for _, shell := range [][]string{{"dash"}, {"bash"}, {"busybox", "sh"}} {
		t.Run(shell[0], func(t *testing.T) {
			if _, err := exec.LookPath(shell[0]); err != nil {
				t.Skip(err)
			}
			value := filepath.Base(t.TempDir()) + rand.Text()
			start := func(env []string, script string) *exec.Cmd {
				t.Helper()
				cmd := exec.Command("sh", "-c", script)
				cmd.Env = append(os.Environ(), env...)
				out, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
				if said, err := bufio.NewReader(out).ReadString('\n'); said != "on\n" {
					t.Fatalf("it said %q, %v", said, err)
				}
				return cmd
			}
			const forever = "echo on; exec sleep 1000"
			marked := start([]string{"THE_MARK=" + value}, forever)
			hidden := start([]string{"THE_MARK=" + value}, Tagging(Tag(value))+"exec env -u THE_MARK sh -c '"+forever+"'")
			other := start([]string{"THE_MARK=" + value + "x"}, forever)
			run := func(script string, args ...string) string {
				t.Helper()
				cmd := exec.Command(shell[0], append(append(shell[1:], "-c", script, "sh", "THE_MARK", value, Tag(value)), args...)...)
				said, err := cmd.CombinedOutput()
				if err != nil {
					t.Fatalf("%v: %s", err, said)
				}
				return string(said)
			}
			run(Signal, "15") // its first has a parent here, which gets it nothing
			for _, cmd := range []*exec.Cmd{marked, hidden, other} {
				if state := stateOf(t, cmd.Process.Pid); state == "Z" {
					t.Error("a signal ended what has a parent")
				}
			}
			if code := exec.Command(shell[0], append(shell[1:], "-c", Look, "sh", "THE_MARK", value, Tag(value))...).Run(); code == nil || code.Error() != "exit status 4" {
				t.Errorf("a look at what runs: %v", code)
			}
			if said := run(Kill); said != "" {
				t.Errorf("it said %q", said)
			}
			run(Look)
			for _, cmd := range []*exec.Cmd{marked, hidden} {
				if state := stateOf(t, cmd.Process.Pid); state != "Z" {
					t.Errorf("%q lives on: %s", cmd.Args, state)
				}
			}
			if state := stateOf(t, other.Process.Pid); state == "Z" {
				t.Error("what has another mark was ended")
			}
		})
	}
}

// stateOf is Z for a process that was not waited for yet.
func stateOf(t *testing.T, pid int) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	return rest[:1]
}

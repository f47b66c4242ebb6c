package inside

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/program"
)

// TestBring: the program comes once, whole and executable, and again if it is another one; a complete sandbox is left alone.
func TestBring(t *testing.T) {
	here := t.TempDir()
	prog := program.Program{Path: filepath.Join(here, "prog"), Digest: "first"}
	if err := os.WriteFile(prog.Path, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	written, short := 0, false
	s := Shell{
		Dir: filepath.Join(here, "in side"),
		Run: func(ctx context.Context, what, script string, args ...string) (string, error) {
			out, err := exec.CommandContext(ctx, "/bin/sh", "-c", "exec sh -c "+Quoted(append([]string{script, "sh"}, args...)...)).Output()
			if err != nil {
				return "", sandboxer.E(sandboxer.Failed, err, "%s failed", what)
			}
			return string(out), nil
		},
		Write: func(_ context.Context, name string, f *os.File, size int64) error {
			written++
			var b bytes.Buffer
			if n, err := b.ReadFrom(f); err != nil || n != size {
				t.Errorf("%d of %d bytes: %v", n, size, err)
			}
			if short {
				b.Truncate(1)
			}
			return os.WriteFile(name, b.Bytes(), 0o600)
		},
	}
	bring := func() bool {
		t.Helper()
		ready, err := s.Bring(t.Context(), s.Done("it's", 2), func(machine string) (program.Program, error) {
			if machine == "" || strings.ContainsAny(machine, " \n") {
				t.Errorf("the machine is %q", machine)
			}
			return prog, nil
		})
		if err != nil {
			t.Error(err)
		}
		return ready
	}
	for i, want := range []int{1, 1, 2, 2} {
		if i == 2 {
			prog.Digest = "second"
		}
		if bring() || written != want {
			t.Errorf("call %d: the program was written %d times; want %d", i, written, want)
		}
	}
	if fi, err := os.Stat(filepath.Join(s.Dir, AgentFile)); err != nil || fi.Mode().Perm() != 0o755 {
		t.Errorf("the program is %v, %v", fi, err)
	}
	short, prog.Digest = true, "third"
	if _, err := s.Bring(t.Context(), s.Done("x", 1), func(string) (program.Program, error) { return prog, nil }); sandboxer.KindOf(err) != sandboxer.Failed {
		t.Errorf("a program that is cut short: %v", err)
	}
	if err := os.WriteFile(s.Done("it's", 2), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if !bring() || written != 3 {
		t.Errorf("a complete sandbox is not ready, or was written to: %d", written)
	}
}

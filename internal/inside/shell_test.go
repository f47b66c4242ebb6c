package inside

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/program"
)

// sh runs scripts on this machine.
func sh(ctx context.Context, what, script string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "/bin/sh", "-c", "exec sh -c "+Quoted(append([]string{script, "sh"}, args...)...)).Output()
	if err != nil {
		return "", sandboxer.E(sandboxer.Failed, err, "%s failed", what)
	}
	return string(out), nil
}

// TestToken: the token is made once, only its owner reads it, and a sandbox is entered when it is complete. The agent gets the token
// and the workspace, whatever its name is.
func TestToken(t *testing.T) {
	s := Shell{Dir: filepath.Join(t.TempDir(), "in side"), Run: sh}
	if err := os.Mkdir(s.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	done := s.Done("box", 1)
	token, dir, err := s.Secret(t.Context(), done)
	here, _ := os.Getwd()
	if err != nil || len(token) != 48 || dir != here {
		t.Fatalf("Secret = %q, %q, %v", token, dir, err)
	}
	if again, _, err := s.Secret(t.Context(), done); again != token {
		t.Errorf("the second token is %q, %v", again, err)
	}
	if fi, err := os.Stat(done + ".token"); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the token's file is %v, %v", fi, err)
	}
	if _, _, err := s.Entered(t.Context(), done); sandboxer.KindOf(err) != sandboxer.Failed {
		t.Errorf("a sandbox that is not complete is entered: %v", err)
	}
	workspace := filepath.Join(s.Dir, "it's\na workspace")
	if err := os.WriteFile(done, []byte(workspace+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, says, err := s.Entered(t.Context(), done); got != token || says != workspace || err != nil {
		t.Errorf("Entered = %q, %q, %v", got, says, err)
	}
	program := "#!/bin/sh\necho \"$SANDBOXER_AGENT_TOKEN $*\"\n"
	if err := os.WriteFile(filepath.Join(s.Dir, AgentFile), []byte(program), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("/bin/sh", "-c", s.serve(done, Contents{Workspace: workspace, Port: 9})).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("serve: %v: %s", err, out)
	}
	if said, err := os.ReadFile(done + ".log"); err != nil || string(said) != token+" init --untraced --listen 0.0.0.0:9 --workdir "+workspace+"\n" {
		t.Errorf("the agent got %q, %v", said, err)
	}
	if fi, err := os.Stat(workspace); err != nil || !fi.IsDir() {
		t.Errorf("the workspace is %v, %v", fi, err)
	}
}

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
		Run: sh,
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
		ready, err := s.Bring(t.Context(), s.Done("it's", 2), func(arch string) (program.Program, error) {
			if arch != runtime.GOARCH {
				t.Errorf("the architecture is %q", arch)
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

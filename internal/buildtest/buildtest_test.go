package buildtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestMain(m *testing.M) {
	code := m.Run()
	Remove()
	os.Exit(code)
}

// TestAgent starts a program that Program built. TestCache runs it.
func TestAgent(t *testing.T) {
	out, err := exec.Command(Program(t, "cmd/sandboxer-agent"), "version").CombinedOutput()
	t.Logf("%v: %s", err, out)
}

// TestCache: go test answers for a test that starts a built program from its cache, until the sources
// of the program change. It does so on a copy of the module, in which it changes the agent.
func TestCache(t *testing.T) {
	top, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		t.Skipf("no git checkout: %v", err)
	}
	dir := t.TempDir()
	copied := exec.Command("sh", "-c", `git ls-files -z -- ':!docs' ':!bench' | xargs -0 cp --parents -t "$0"`, dir)
	copied.Dir = strings.TrimSpace(string(top))
	if out, err := copied.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, other := range []string{".hidden", "bin"} {
		if err := os.Mkdir(filepath.Join(dir, other), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// go test does not trust files that changed within the last two seconds.
	old := exec.Command("find", dir, "-exec", "touch", "-d", "1 hour ago", "{}", "+")
	if out, err := old.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	cached := func(t *testing.T) bool {
		t.Helper()
		for _, other := range []string{".hidden", "bin"} { // such as git and make write between two runs
			if _, err := os.MkdirTemp(filepath.Join(dir, other), ""); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command("go", "test", "-vet=off", "-run", "^TestAgent$", "./internal/buildtest")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "SANDBOXER_TEST_WHOLE=")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		t.Logf("%s", out)
		return strings.Contains(string(out), "(cached)")
	}
	for runs := 1; !cached(t); runs++ {
		if runs == 10 { // the lock file is too new for the first two seconds
			t.Fatal("nothing changed, and the test runs each time")
		}
	}
	t.Run("mutant", func(t *testing.T) {
		if os.Getenv("SANDBOXER_TEST_WHOLE") == "" {
			t.Skip("compiling a mutant takes long; SANDBOXER_TEST_WHOLE=1 does it")
		}
		file := filepath.Join(dir, "agent", "mutant.go")
		if err := os.WriteFile(file, []byte("package agent\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if cached(t) {
			t.Error("the agent changed, and go test answered from its cache")
		}
	})
}

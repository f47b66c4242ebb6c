//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sand-boxer/sandboxer/internal/buildtest"
)

// TestMain removes what programs made.
func TestMain(m *testing.M) {
	code := m.Run()
	containersEngine.Stop()
	if dir, _ := built(); dir != "" {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

// programs returns the directory with the programs, as they are installed; it is made once,
// and everybody may look into it: a sandbox's processes are other users.
func programs(t *testing.T) string {
	t.Helper()
	started.Store(true)
	dir, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

var started atomic.Bool

var built = sync.OnceValues(func() (dir string, err error) {
	if !started.Load() {
		return "", errors.New("nobody wanted them")
	}
	if dir, err = os.MkdirTemp("", "sbx"); err != nil {
		return "", err
	}
	if err := buildtest.Build(dir, buildtest.Products); err != nil {
		return dir, err
	}
	return dir, os.Chmod(dir, 0o755)
})

// TestRealSandbox runs the programs as they are installed, on this machine's gVisor:
// with the helpers beside the binary, and with the binary alone playing their parts.
func TestRealSandbox(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: what an ordinary user may do depends on the kernel's settings")
	}
	dir, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // a sandbox's processes are other users
		t.Fatal(err)
	}
	bin := programs(t)
	alone := filepath.Join(dir, "alone")
	if err := os.Mkdir(alone, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(bin, "sandboxer"), filepath.Join(alone, "sandboxer")); err != nil {
		t.Fatal(err)
	}
	repo := filepath.Join(dir, "repo")
	if err := os.Mkdir(repo, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(repo, "hello.txt"), []byte("hello\n"), 0o644); err != nil {
		t.Fatal(err)
	}

	for name, where := range map[string]string{"with helpers": bin, "alone": alone} {
		t.Run(name, func(t *testing.T) {
			home := filepath.Join(dir, "home-"+filepath.Base(where))
			if err := os.Mkdir(home, 0o755); err != nil {
				t.Fatal(err)
			}
			run := func(args ...string) (stdout, stderr string, code int) {
				t.Helper()
				cmd := exec.Command(filepath.Join(where, "sandboxer"), args...)
				cmd.Env = append(os.Environ(), "SANDBOXER_HOME="+home, "SANDBOXER_PROGRESS=none")
				var out, errs bytes.Buffer
				cmd.Stdout, cmd.Stderr = &out, &errs
				err := cmd.Run()
				var x *exec.ExitError
				if err != nil && !errors.As(err, &x) {
					t.Fatal(err)
				}
				return out.String(), errs.String(), cmd.ProcessState.ExitCode()
			}
			t.Cleanup(func() { run("down") })

			out, errs, code := run("run", "--input", "repo="+repo, "--", "sh", "-c", "cat hello.txt; echo changed > hello.txt; uname -r; exit 43")
			if code == 125 && strings.Contains(errs, "cannot be used: ") {
				t.Skip("gVisor does not run here: ", errs)
			}
			if code != 43 || !strings.HasPrefix(out, "hello\n") || !strings.Contains(out, "gvisor") {
				t.Errorf("run = %d, %q, %q; want 43 and the file's content", code, out, errs)
			}
			if b, err := os.ReadFile(filepath.Join(repo, "hello.txt")); err != nil || string(b) != "hello\n" {
				t.Errorf("the original became %q, %v", b, err)
			}

			out, errs, code = run("doctor", "-o", "json")
			var report struct {
				Items []struct{ Name, Status, Evidence string }
			}
			if err := json.Unmarshal([]byte(out), &report); err != nil || code != 0 {
				t.Errorf("doctor = %d, %v, %s", code, err, errs)
			}
			tested := false
			for _, c := range report.Items {
				if c.Status == "fail" {
					t.Errorf("doctor: %s: %s", c.Name, c.Evidence)
				}
				tested = tested || c.Name == "self-test"
			}
			if !tested {
				t.Error("doctor did not boot a sandbox")
			}

			if _, errs, code := run("create", "--image", "dir:/nonexistent"); code != 2 || !strings.Contains(errs, "/nonexistent does not exist") {
				t.Errorf("create of a directory that is not there = %d, %s", code, errs)
			}

			// The server's path, and what is left when it is gone.
			if _, errs, code := run("create", "--name", "box"); code != 0 {
				t.Fatalf("create = %d, %s", code, errs)
			}
			if out, errs, code := run("exec", "box", "--", "id", "-u"); code != 0 || out != "0\n" {
				t.Errorf("exec = %d, %q, %s", code, out, errs)
			}
			if _, errs, code := run("destroy", "box"); code != 0 {
				t.Errorf("destroy = %d, %s", code, errs)
			}
			if out, errs, code := run("audit"); code != 0 || !strings.Contains(out, " 0 violations") {
				t.Errorf("audit = %d, %q, %s", code, out, errs)
			}
			bench(t, run)
			if _, errs, code := run("down"); code != 0 {
				t.Errorf("down = %d, %s", code, errs)
			}
			for _, left := range remains(t, home) {
				t.Errorf("left behind: %s", left)
			}
		})
	}
}

// bench measures real sandboxes and checks that the parts make up the whole.
func bench(t *testing.T, run func(args ...string) (string, string, int)) {
	out, errs, code := run("bench", "--sequential", "2", "--burst", "3", "-o", "json")
	var res struct {
		Series []struct {
			Mode       string
			Succeeded  int
			Iterations []struct {
				Split                                              bool
				TTI, Create, Accept, Provision, Ready, Probe, Exec float64
			}
		}
	}
	for _, name := range []string{"tti", "create", "accept", "provision", "ready", "probe", "exec"} {
		out = strings.ReplaceAll(out, `"`+name+`_ms"`, `"`+name+`"`)
	}
	if err := json.Unmarshal([]byte(out), &res); err != nil || code != 0 || len(res.Series) != 2 {
		t.Fatalf("bench = %d, %v, %d series, %s", code, err, len(res.Series), errs)
	}
	for i, want := range []int{2, 3} {
		s := res.Series[i]
		if s.Succeeded != want || len(s.Iterations) != want {
			t.Errorf("%s: %d of %d succeeded, %d iterations", s.Mode, s.Succeeded, want, len(s.Iterations))
		}
		least := 500.0 // of what no part accounts for: a busy machine may take some of it once
		for _, it := range s.Iterations {
			sum := it.Accept + it.Provision + it.Ready + it.Probe + it.Exec
			if !it.Split || it.Accept <= 0 || it.Provision <= 0 || it.Probe <= 0 || it.Exec <= 0 || sum > it.TTI+0.01 {
				t.Errorf("%s: %+v, whose parts make up %v", s.Mode, it, sum)
			}
			least = min(least, it.TTI-sum)
		}
		if least > 5 {
			t.Errorf("%s: %+v, of which no parts make up the whole", s.Mode, s.Iterations)
		}
	}
	if out, errs, code := run("ls", "-q"); code != 0 || out != "" {
		t.Errorf("after bench there is %q (%d, %s)", out, code, errs)
	}
}

// remains lists the processes and mounts of an installation.
func remains(t *testing.T, home string) (left []string) {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		if b, err := os.ReadFile(p); err == nil && bytes.Contains(b, []byte(home)) {
			left = append(left, "process "+string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})))
		}
	}
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, home) {
			left = append(left, "mount "+line)
		}
	}
	return left
}

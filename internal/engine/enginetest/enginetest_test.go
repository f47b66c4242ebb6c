package enginetest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// An engine of the tests ends with the process that started it, also one that does not answer.
func TestEngineEndsWithItsOwner(t *testing.T) {
	if _, err := exec.LookPath("dockerd"); err != nil || os.Getuid() != 0 {
		t.Skip("a Docker engine needs root and dockerd (scripts/setup.sh installs it)")
	}
	dir, err := os.MkdirTemp("/tmp", "sbd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	d := &Docker{dir: dir}
	if err := d.keep(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "sock")); err != nil {
		t.Error(err)
	}
	pid, err := os.ReadFile(filepath.Join(dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	d.Hang(t)
	d.end.Close()
	if err := d.kept.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat("/proc/" + strings.TrimSpace(string(pid))); err == nil {
		t.Error("the engine lives on")
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("its files are left")
	}
}

// Of an engine that was killed nothing is left when its owner ends, also what its containers ran.
func TestKilledEngineEndsWithItsOwner(t *testing.T) {
	d := &Docker{}
	t.Cleanup(d.Stop)
	env := append(os.Environ(), d.Start(t))
	docker := func(args ...string) string {
		t.Helper()
		cmd := exec.Command("docker", args...)
		cmd.Env = env
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("docker %q: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	id := docker("run", "-d", "--network=none", Image, "sh", "-c", "sleep 1000 & wait")
	docker("pause", docker("run", "-d", "--network=none", Image, "sleep", "1000"))
	pid, err := strconv.Atoi(docker("inspect", "-f", "{{.State.Pid}}", id))
	if err != nil {
		t.Fatal(err)
	}
	d.Kill(t)
	if ended(pid) {
		t.Error("the container ended with the engine")
	}
	d.end.Close()
	if err := d.kept.Wait(); err != nil {
		t.Error(err)
	}
	if !ended(pid) {
		t.Error("the container lives on")
	}
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), d.dir) {
			t.Errorf("%s lives on: %q", filepath.Dir(p), b)
		}
	}
	if err := filepath.WalkDir("/sys/fs/cgroup", func(path string, _ os.DirEntry, err error) error {
		if strings.Contains(path, id) {
			t.Errorf("a control group is left: %s", path)
		}
		return nil // others come and go
	}); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(d.dir); err == nil {
		t.Error("its files are left")
	}
}

// An engine that uses this machine's containerd is killed without that.
func TestKillWithoutContainerd(t *testing.T) {
	d := &Docker{dir: t.TempDir()}
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if err := os.WriteFile(filepath.Join(d.dir, "pid"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600); err != nil {
		t.Fatal(err)
	}
	d.Kill(t)
	if !ended(cmd.Process.Pid) {
		t.Error("it lives on")
	}
}

// Podman's service of a test ends with it, also one that does not listen to that.
func TestRootlessPodmanEnds(t *testing.T) {
	var dir string
	// its lists the processes of its directory.
	its := func() (pids []int) {
		t.Helper()
		procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range procs {
			b, err := os.ReadFile(p)
			if err != nil || !strings.Contains(string(b), dir+"/") {
				continue
			}
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(p))); err == nil && !ended(pid) {
				pids = append(pids, pid)
			}
		}
		return pids
	}
	if !t.Run("test", func(t *testing.T) {
		dir = filepath.Dir(strings.TrimPrefix(RootlessPodman(t), "unix://"))
		all := its()
		if len(all) == 0 {
			t.Error("there is no service")
		}
		for _, pid := range all {
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Error(err)
			}
		}
	}) || dir == "" {
		return
	}
	for end := time.Now().Add(time.Minute); len(its()) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("processes live on: %v", its())
		}
	}
}

//go:build linux

package local

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// limited is a script that prints the limits that a guest sees.
const limited = `awk '/^MemTotal/ {print $2 * 1024}' /proc/meminfo
nproc
grep -c ^processor /proc/cpuinfo
cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu/cpu.cfs_period_us
df -B1 --output=size /dev/shm | tail -1 | tr -d ' '`

// TestLimitsAreVisible checks that programs inside find the limits of their sandbox where
// they look: new, pooled, and copied with others.
func TestLimitsAreVisible(t *testing.T) {
	e := openTest(t)
	if !e.cgroups.usable() {
		t.Skip("no limits here")
	}
	want := func(memory int64, cpus, seen int, quota string, shm int64) string {
		return fmt.Sprintf("%d\n%d\n%d\n%d\n%s\n100000\n%d", memory, min(seen, runtime.NumCPU()), min(seen, runtime.NumCPU()), memory, quota, shm)
	}
	h := up(t, e, sandboxer.Spec{Limits: sandboxer.Limits{MemoryBytes: 512 << 20, MilliCPU: 1000}})
	if got, want := sh(t, e, h, limited), want(512<<20, 1, 1, "100000", 256<<20); got != want {
		t.Errorf("inside 512 MiB and one processor:\n%s\nwant:\n%s", got, want)
	}
	s := snapshot(t, e, h)
	copied := restored(t, e, sandboxer.Spec{Limits: sandboxer.Limits{MemoryBytes: 1 << 30, MilliCPU: 1500}}, s)
	if got, want := sh(t, e, copied, limited), want(1<<30, 1, 1, "150000", 256<<20); got != want {
		t.Errorf("inside a copy with 1 GiB and one and a half processors:\n%s\nwant:\n%s", got, want)
	}
}

func TestShmSize(t *testing.T) {
	for _, c := range []struct{ setting, memory, want int64 }{{0, 512 << 20, 256 << 20}, {0, 0, 64 << 20}, {1 << 30, 512 << 20, 1 << 30}} {
		e := &extension{cfg: Config{ShmSize: c.setting}}
		if got := e.shmSize(sandboxer.Limits{MemoryBytes: c.memory}); got != c.want {
			t.Errorf("shm_size %d and a limit of %d bytes give %d; want %d", c.setting, c.memory, got, c.want)
		}
	}
}

// TestOwnNameResolves checks that the sandbox's host name resolves to itself, also in a copy.
func TestOwnNameResolves(t *testing.T) {
	e := openTest(t)
	for _, spec := range []sandboxer.Spec{{}, {Image: "dir:" + plainRoot(t)}} {
		h := up(t, e, spec)
		const resolve = `printf '%s ' "$(cat /proc/sys/kernel/hostname)"; grep -c "^127.0.1.1[[:space:]]$(cat /proc/sys/kernel/hostname)$" /etc/hosts; stat -c '%a %u %U' / /etc /etc/hosts`
		want := h.SandboxID + " 1\n755 0 root\n755 0 root\n644 0 root"
		if got := sh(t, e, h, resolve); got != want {
			t.Errorf("in a new one: %q, want %q", got, want)
		}
		sh(t, e, h, "echo 192.0.2.1 mine >>/etc/hosts")
		c := restored(t, e, spec, snapshot(t, e, h))
		if got, want := sh(t, e, c, resolve), strings.Replace(want, h.SandboxID, c.SandboxID, 1); got != want {
			t.Errorf("in a copy: %q, want %q", got, want)
		}
		if got := sh(t, e, c, "grep -c mine /etc/hosts"); got != "1" {
			t.Errorf("what the guest added is there %s times", got)
		}
		if got := sh(t, e, c, "grep -c "+h.SandboxID+" /etc/hosts || true"); got != "0" {
			t.Errorf("the name of the source is there %s times", got)
		}
	}
}

// TestLinkedEtc checks that an image whose /etc is a link keeps the link's target.
func TestLinkedEtc(t *testing.T) {
	e := openTest(t)
	dir := plainRoot(t)
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "usr/etc"), 0o755), os.WriteFile(filepath.Join(dir, "usr/etc/mine"), []byte("mine"), 0o644),
		os.Symlink("usr/etc", filepath.Join(dir, "etc"))); err != nil {
		t.Fatal(err)
	}
	h := up(t, e, sandboxer.Spec{Image: "dir:" + dir})
	if got := sh(t, e, h, "cat /etc/mine; grep -c localhost /etc/hosts"); got != "mine2" {
		t.Errorf("its files: %q", got)
	}
}

// TestCopiesCanTell checks what a program can use to differ from its other copies: another host name, and
// the kernel's random numbers.
func TestCopiesCanTell(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	const draw = "uname -n; od -An -tx1 -N16 /dev/urandom"
	sh(t, e, h, draw) // the snapshot then contains the kernel's prepared random numbers
	s := snapshot(t, e, h)
	seen := map[string]bool{}
	for range 2 {
		for line := range strings.Lines(sh(t, e, restored(t, e, sandboxer.Spec{}, s), draw)) {
			if line = strings.TrimSpace(line); seen[line] {
				t.Errorf("two copies say %q", line)
			}
			seen[line] = true
		}
	}
}

// TestNestedNetwork checks that a program inside can make a network of its own, with only
// a loopback.
func TestNestedNetwork(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	for _, how := range []string{"add", "leave"} { // as bubblewrap does, and as others do
		if got := sh(t, e, h, helpers+"/tool nested "+how); got != "hello 127.0.0.1 from 127.0.0.1" {
			t.Errorf("%s: %s", how, got)
		}
	}
}

// TestWhatRunsInside checks docs/reference/what-runs-inside.md.
func TestWhatRunsInside(t *testing.T) {
	e := openTest(t)
	var l sandboxer.Limits
	if e.cgroups.usable() {
		l.MemoryBytes = 2 << 30
	}
	buildtest.Inside(t, "ext.local", func(t *testing.T, script string) (int, string) {
		h := up(t, e, sandboxer.Spec{Limits: l})
		out := &capture.First{Max: 1 << 20}
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Stdout: out, Stderr: out})
		if err != nil {
			t.Fatal(err)
		}
		return x.Code, out.String()
	})
}

// plainRoot is an image directory with one program.
func plainRoot(t *testing.T) string {
	t.Helper()
	box, err := os.ReadFile(busybox(t))
	dir := t.TempDir()
	if err == nil {
		err = os.Mkdir(filepath.Join(dir, "bin"), 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "bin/busybox"), box, 0o755)
	}
	for _, name := range []string{"sh", "cat", "grep", "stat"} {
		if err == nil {
			err = os.Symlink("busybox", filepath.Join(dir, "bin", name))
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

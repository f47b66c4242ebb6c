//go:build linux

package vmpacker_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/procs/procstest"
)

// blank configures machines with a disk that starts nothing: they are made, started and waited
// for as usual, and never accept a login.
func blank(t *testing.T, boot time.Duration) options {
	t.Helper()
	for _, tool := range []string{"qemu-system-x86_64", "qemu-img"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("there is no %s on this machine (scripts/setup.sh installs it)", tool)
		}
	}
	disk := filepath.Join(t.TempDir(), "blank.qcow2")
	if out, err := exec.Command("qemu-img", "create", "-q", "-f", "qcow2", disk, "8M").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return options{Owner: owner + "-faults", Dir: t.TempDir(), Hosts: t.TempDir(), Config: map[string]any{"accel": "tcg",
		"images": map[string]any{"small": map[string]any{"file": disk, "memory": 64 << 20, "boot_timeout": int64(boot)}}}}
}

func qemuOf(o options, id string) []int {
	pids, err := procs.WithArg("type=1,manufacturer=sandboxer,product=" + o.Owner + "/" + id + "/1")
	if err != nil {
		panic(err)
	}
	return pids
}

// clean checks that nothing is left of any machine, and a note only if it should stay.
func clean(t *testing.T, o options) {
	t.Helper()
	if left := qemus(t, o); left != "" {
		t.Errorf("machines left over: %s", left)
	}
	for _, d := range []string{"notes/*.note", "vm/*"} {
		if left, _ := filepath.Glob(filepath.Join(o.Dir, d)); len(left) > 0 {
			t.Errorf("left over: %q", left)
		}
	}
}

// An error while a machine is made leaves no machine and no disk, and a teardown by ID alone
// uses the note that is left.
func TestManagedNotMade(t *testing.T) {
	t.Parallel()
	const starts = "waiting for the machine to start"
	tests := []struct {
		name  string
		boot  time.Duration
		room  string // of the directory, if not the usual one
		fault func(o options, cancel func())
		want  sandboxer.Kind
		says  string
	}{
		{name: "its process is killed", fault: func(o options, _ func()) {
			for _, pid := range qemuOf(o, "faulty") {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}, want: sandboxer.Failed, says: "ended while it started"},
		{name: "it never answers", boot: time.Minute, want: sandboxer.Timeout, says: "its SSH server to speak"},
		{name: "called off, without its control socket", fault: func(o options, cancel func()) {
			os.Remove(o.Dir + "/vm/faulty.g1/qmp")
			cancel()
		}, want: sandboxer.Canceled},
		{name: "called off, standing still", fault: func(o options, cancel func()) {
			for _, pid := range qemuOf(o, "faulty") {
				syscall.Kill(pid, syscall.SIGSTOP)
			}
			cancel()
		}, want: sandboxer.Canceled},
		{name: "no room for its disk", room: "96k", want: sandboxer.Exhausted, says: "make some"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o := blank(t, cmp.Or(tt.boot, busy))
			if tt.room != "" {
				if os.Getuid() != 0 {
					t.Skip("a small disk needs root")
				}
				if err := syscall.Mount("none", o.Dir, "tmpfs", 0, "size="+tt.room); err != nil {
					t.Skipf("a small disk: %v", err)
				}
				t.Cleanup(func() { syscall.Unmount(o.Dir, syscall.MNT_DETACH) })
			}
			e := o.opened(t)
			s := machine("faulty")
			s.Owner = o.Owner
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ctx = sandboxer.WithProgress(ctx, func(p sandboxer.Progress) {
				if p.Step == starts && tt.fault != nil {
					tt.fault(o, cancel)
				}
			})
			_, err := e.Provision(ctx, s)
			kind(t, err, tt.want, tt.says)
			if left, _ := filepath.Glob(o.Dir + "/vm/*"); qemus(t, o) != "" || len(left) > 0 && tt.want != sandboxer.Exhausted {
				t.Errorf("left over by the create: %s %q", qemus(t, o), left)
			}
			if _, err := o.opened(t).Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID}); err != nil {
				t.Error(err)
			}
			clean(t, o)
		})
	}
}

// A broker that dies at any step leaves a machine that the next one finds and removes. In TestManaged it dies when the
// machine accepts its login.
func TestManagedKilled(t *testing.T) {
	t.Parallel()
	o := machineOf(t, nil)
	o.Owner, o.Config["accel"] = owner+"-killed", "tcg" // detecting that takes longer than the brokers live
	steps := []string{"starting a machine", "waiting for the machine to start"}
	if os.Getenv("SANDBOXER_TEST_WHOLE") != "" { // a machine boots for each
		steps = append(steps, "waiting for the machine to let us in", "copying")
	}
	for _, step := range steps {
		t.Run(step, func(t *testing.T) { dieAt(t, o, step) })
	}
}

// dieAt lets a broker with the environment env die at a step, and the next one find and remove its machine.
func dieAt(t *testing.T, o options, step string, env ...string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	in, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "broker")
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), os.Stderr
	cmd.Env = append(append(os.Environ(), "BROKER_IMAGE=small", "BROKER_DIES="+step), env...)
	err = cmd.Run()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !ws.Signaled() {
		t.Fatalf("it did not come to %q: %v", step, err)
	}
	if n := endAll(t, o); n != 1 {
		t.Errorf("killed at %q, %d machines were found", step, n)
	}
	clean(t, o)
}

// faults disturbs a running machine in several ways; it works afterwards.
func faults(t *testing.T, o options, e extension, h sandboxer.Handle) {
	pids := qemuOf(o, h.SandboxID)
	if len(pids) != 1 {
		t.Fatalf("its processes: %v", pids)
	}
	t.Run("control socket gone", func(t *testing.T) {
		socket := filepath.Join(o.Dir, "vm", h.SandboxID+".g1", "qmp")
		if err := os.Rename(socket, socket+".away"); err != nil {
			t.Fatal(err)
		}
		back := sync.OnceFunc(func() { os.Rename(socket+".away", socket) })
		defer back()
		kind(t, e.Pause(t.Context(), h), sandboxer.Unavailable)
		if got := run(t, e, h, "echo on"); got != "on" {
			t.Errorf("after a pause that failed: %q", got)
		}
		if _, err := e.Snapshot(t.Context(), h, "snap-none"); err == nil {
			t.Error("a snapshot without control of the machine")
		}
		if got := run(t, e, h, "echo on"); got != "on" {
			t.Errorf("after a snapshot that failed: %q", got)
		}
		if left, _ := filepath.Glob(o.Dir + "/snap/snap-none*"); len(left) > 0 {
			t.Errorf("left over: %q", left)
		}
		back()
		// The next broker repairs a machine that is noted as being saved.
		e2 := o.opened(t)
		if n, err := o.notes().Get(t.Context(), h.SandboxID+".g1"); err != nil || strings.Contains(string(n.Value), "snap-none") {
			t.Errorf("the note: %s, %v", n.Value, err)
		}
		if got := run(t, e2, h, "echo on"); got != "on" {
			t.Errorf("afterwards: %q", got)
		}
	})
	t.Run("standing still", func(t *testing.T) {
		defer procstest.Stop(t, pids[0])()
		if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Alive || err != nil {
			t.Errorf("IsAlive: %s, %v", l, err)
		}
	})
}

// killed checks the reports about a machine whose process was killed.
func killed(t *testing.T, o options, e extension, h sandboxer.Handle) {
	t.Helper()
	for _, pid := range qemuOf(o, h.SandboxID) {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	await(t, "the machine to end", func() bool { return len(qemuOf(o, h.SandboxID)) == 0 })
	if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Gone || err != nil {
		t.Errorf("IsAlive of a machine that was killed: %s, %v", l, err)
	}
	_, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
	kind(t, err, sandboxer.NotFound)
	listed := false
	for found, err := range e.ListRunning(t.Context(), o.Owner) {
		listed = listed || err == nil && found.SandboxID == h.SandboxID
	}
	if !listed {
		t.Error("it is not listed, and what is left of it would be found by nobody")
	}
	if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: h.SandboxID}); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(o.Dir, "*", h.SandboxID+".g*")); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
}

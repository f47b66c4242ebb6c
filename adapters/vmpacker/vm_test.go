//go:build linux

package vmpacker_test

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/vmpacker"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// imageDir is where the image of the machines is made, once for all tests.
var (
	imageDir  string
	imageOnce sync.Once
	imageErr  string
)

// image returns a directory with vmlinuz, initrd, disk.qcow2 and a key that the disk
// accepts, made from Debian's packages by the project's script.
func image(t *testing.T) string {
	t.Helper()
	for _, tool := range []string{"qemu-system-x86_64", "qemu-img", "mke2fs", "ssh-keygen", "sshd", "apt-get"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("there is no %s on this machine (scripts/setup.sh installs it)", tool)
		}
	}
	if os.Getuid() != 0 {
		t.Skip("making the machine's image needs root")
	}
	imageOnce.Do(func() {
		dir, err := os.MkdirTemp("", "vmimage")
		if err != nil {
			imageErr = err.Error()
			return
		}
		imageDir = dir
		private, public, err := sshrun.NewKey()
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "key"), []byte(private), 0o600)
		}
		if err != nil {
			imageErr = err.Error()
			return
		}
		if err := buildtest.ReadsFiles("../../scripts"); err != nil {
			imageErr = err.Error()
			return
		}
		if out, err := exec.Command("sh", "../../scripts/vm-image.sh", dir, public).CombinedOutput(); err != nil {
			imageErr = err.Error() + ": " + string(out)
		}
	})
	if imageErr != "" {
		t.Fatalf("the machine's image: %s", imageErr)
	}
	return imageDir
}

// machineOf configures machines from the image.
func machineOf(t *testing.T, change map[string]any) options {
	t.Helper()
	dir := image(t)
	img := map[string]any{"file": dir + "/disk.qcow2", "kernel": dir + "/vmlinuz", "initrd": dir + "/initrd",
		"append": "console=ttyS0 quiet panic=1", "memory": 128 << 20,
		"boot_timeout": int64(30 * time.Minute)}
	maps.Copy(img, change)
	return options{Owner: owner, Dir: t.TempDir(), Hosts: t.TempDir(), Config: map[string]any{
		"images": map[string]any{"small": img}, "max_vms": 20, "agent": buildtest.Program(t, "cmd/sandboxer-agent"),
	}}
}

func machine(id string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: owner, Image: "small"}
}

// qemus lists the machines on this one that are not gone.
func qemus(t *testing.T, o options) string {
	t.Helper()
	out, _ := exec.Command("sh", "-c", `grep -lsaF "$1" /proc/[0-9]*/cmdline | grep -v "/$$/"; :`, "sh", o.Dir).Output()
	var found []string
	for name := range strings.Lines(string(out)) {
		data, err := os.ReadFile(strings.TrimSpace(name))
		if err == nil && bytes.HasPrefix(program(data), []byte("qemu")) {
			found = append(found, name)
		}
	}
	return strings.Join(found, "")
}

// program is the name of a command line's program.
func program(cmdline []byte) []byte {
	first, _, _ := bytes.Cut(cmdline, []byte{0})
	return []byte(filepath.Base(string(first)))
}

// TestManaged: the whole life of a machine from an image that Packer built, of its snapshot, and of a machine that is
// restored from that. It is the only test of every change that waits until an emulated machine has started.
func TestManaged(t *testing.T) {
	t.Parallel()
	o := machineOf(t, nil)
	img := o.Config["images"].(map[string]any)["small"].(map[string]any)
	built, template := packed(t, `cp `+img["file"].(string)+` "$1"`)
	delete(img, "file")
	img["packer"] = built.Config["images"].(map[string]any)["small"].(map[string]any)["packer"]
	e := o.opened(t)
	repo := t.TempDir()
	if err := os.WriteFile(filepath.Join(repo, "Setup.hs"), []byte("main"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := contextAfter(t, busy)
		defer cancel()
		for _, id := range []string{"copy", "life"} {
			if _, err := e.Teardown(ctx, sandboxer.Handle{SandboxID: id}); err != nil {
				t.Error(err)
			}
		}
		clean(t, o)
	})
	s := machine("life")
	s.Inputs = map[string]string{"repo": repo}
	s.Env = map[string]string{"WHO": "source"}
	began := time.Now()
	h := provision(t, e, s)
	t.Logf("created in %s", time.Since(began))
	o.Config["accel"] = accelOf(t, o, "life") // detecting that again takes seconds
	if got := run(t, e, h, `echo "$(hostname) $WHO $(cat Setup.hs) $(id -u) $(awk '/MemTotal/ { print $2 < 131072 }' /proc/meminfo)"`); got != "life source main 0 1" {
		t.Errorf("inside: %q", got)
	}
	onTime(t, e, h)
	t.Run("nothing gets out", func(t *testing.T) {
		out := &capture.First{Max: 1 << 20}
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "nc -w 2 10.0.2.2 22 </dev/null || wget -T 2 -O - http://10.0.2.2:80/"}, Stdout: out, Stderr: out})
		if err != nil || x.Code == 0 {
			t.Errorf("this machine was reached: %+v, %v, %s", x, err, out)
		}
	})
	t.Run("dial", func(t *testing.T) {
		run(t, e, h, `nc -ll -p 4000 -e cat </dev/null >/dev/null 2>&1 &`)
		var c net.Conn
		await(t, "the echo to listen", func() bool {
			var err error
			c, err = e.Dial(t.Context(), h, 4000)
			return err == nil
		})
		defer c.Close()
		c.SetDeadline(time.Now().Add(busy))
		got := make([]byte, 4)
		_, err := io.WriteString(c, "ping")
		if err == nil {
			_, err = io.ReadFull(c, got)
		}
		if err != nil || string(got) != "ping" {
			t.Errorf("the echo said %q, %v", got, err)
		}
		_, err = e.Dial(t.Context(), h, 4001)
		kind(t, err, sandboxer.Unavailable)
	})
	t.Run("stats", func(t *testing.T) {
		st, err := e.Stats(t.Context(), h)
		if err != nil || st.MemoryLimit != 128<<20 || st.MemoryBytes < 16<<20 || st.CPU <= 0 || st.DiskBytes <= 0 || st.DiskLimit < st.DiskBytes || st.PIDs < 5 {
			t.Errorf("Stats: %+v, %v", st, err)
		}
	})
	t.Run("out of memory", func(t *testing.T) {
		// Make the kernel end a process as if it had no memory left. Before it does so on its own, an emulated machine
		// keeps reading its programs again for half a minute.
		script := `echo 1000 >/proc/self/oom_score_adj; echo f >/proc/sysrq-trigger; sleep 1000`
		if os.Getenv("SANDBOXER_TEST_WHOLE") != "" {
			script = `head -c 200000000 /dev/zero | tail -n 1`
		}
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}})
		if err != nil || x.Code != 137 || !x.OOMKilled {
			t.Errorf("%+v, %v", x, err)
		}
	})
	t.Run("pause", func(t *testing.T) {
		other := o.opened(t)
		run(t, e, h, past)
		if err := e.Pause(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		_, err := other.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
		kind(t, err, sandboxer.Conflict, "resume")
		if l, err := other.IsAlive(t.Context(), h); l != sandboxer.Alive || err != nil {
			t.Errorf("IsAlive of a paused machine: %s, %v", l, err)
		}
		if err := other.Resume(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		if got := run(t, e, h, "echo on"); got != "on" {
			t.Errorf("after the resume: %q", got)
		}
		onTime(t, e, h)
	})
	var snap sandboxer.Snapshot
	t.Run("snapshot", func(t *testing.T) {
		run(t, e, h, past+`; echo saved >mark; (i=1000; while :; do i=$((i+1)); echo $i >count; sleep 0.3; done) >/dev/null 2>&1 </dev/null &`)
		began := time.Now()
		var err error
		snap, err = e.Snapshot(t.Context(), h, "snap-life")
		if err != nil || !snap.Memory || snap.Bytes == 0 {
			t.Fatalf("Snapshot: %+v, %v", snap, err)
		}
		t.Logf("saved in %s, %d bytes", time.Since(began), snap.Bytes)
		run(t, e, h, "echo later >mark")
		c := machine("copy")
		c.Env = map[string]string{"WHO": "copy"}
		began = time.Now()
		ch, err := o.opened(t).RestoreFromSnapshot(t.Context(), c, snap)
		if err != nil {
			t.Fatalf("RestoreFromSnapshot: %v", err)
		}
		t.Logf("restored in %s", time.Since(began))
		if got := run(t, e, ch, `echo "$(hostname) $WHO $(cat mark)"`); got != "copy copy saved" {
			t.Errorf("in the copy: %q", got)
		}
		n := 1000
		for range 2 {
			await(t, fmt.Sprintf("the copy to count on from %d", n), func() bool {
				was := n
				if now, err := strconv.Atoi(run(t, e, ch, "cat count")); err == nil { // during a write it is empty
					n = now
				}
				return n > was
			})
		}
		onTime(t, e, ch)
		killed(t, o, e, ch)
	})
	faults(t, o, e, h)
	t.Run("found without a note", func(t *testing.T) {
		// As if the private directory had been lost.
		lost := o
		lost.Dir = t.TempDir()
		l := lost.opened(t)
		var found []sandboxer.Handle
		for h, err := range l.ListRunning(t.Context(), o.Owner) {
			if err != nil {
				t.Fatal(err)
			}
			if h.SandboxID == "life" {
				found = append(found, h)
			}
		}
		if len(found) != 1 {
			t.Fatalf("found %+v", found)
		}
		if _, err := l.Teardown(t.Context(), found[0]); err != nil {
			t.Error(err)
		}
		if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Gone || err != nil {
			t.Errorf("IsAlive afterwards: %s, %v", l, err)
		}
	})
	for range 2 {
		if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: "life"}); err != nil {
			t.Error(err)
		}
	}
	clean(t, o)
	if snap.SnapshotID == "" { // it failed, or only other parts were to run
		return
	}
	images := func() int {
		found, _ := filepath.Glob(o.Dir + "/image/*.qcow2")
		return len(found)
	}
	others := o
	others.Config = map[string]any{"images": map[string]any{"other": map[string]any{"file": "/no/such.qcow2"}}}
	t.Run("image stays", func(t *testing.T) {
		// Although no machine is based on it any more and no configuration uses it: a snapshot is.
		others.opened(t) // collects
		if n := images(); n != 1 {
			t.Fatalf("with a snapshot based on it there are %d images", n)
		}
	})
	t.Run("broker is killed", func(t *testing.T) {
		// The machine runs, restored from the snapshot, and no call has entered it yet.
		dieAt(t, o, "waiting for the machine to let us in", "BROKER_SNAPSHOT="+snap.SnapshotID)
	})
	if n := buildsOf(t, template); n != 1 {
		t.Errorf("Packer built %d times", n)
	}
	if err := e.DropSnapshot(t.Context(), sandboxer.Snapshot{SnapshotID: snap.SnapshotID}); err != nil {
		t.Error(err)
	}
	_, err := e.RestoreFromSnapshot(t.Context(), machine("none"), snap)
	kind(t, err, sandboxer.NotFound)
	if left, _ := filepath.Glob(filepath.Join(o.Dir, "snap/*")); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
	await(t, "the image to be removed with nothing based on it", func() bool {
		others.opened(t) // it does not wait for locks
		return images() == 0
	})
}

// accelOf returns how the machine of a sandbox runs.
func accelOf(t *testing.T, o options, id string) string {
	t.Helper()
	pids := qemuOf(o, id)
	if len(pids) != 1 {
		t.Fatalf("the processes of the machine of %s: %v", id, pids)
	}
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pids[0]))
	_, rest, _ := bytes.Cut(args, []byte("\x00-accel\x00"))
	accel, _, ok := bytes.Cut(rest, []byte{0})
	if err != nil || !ok {
		t.Fatalf("the machine of %s: %q, %v", id, args, err)
	}
	return string(accel)
}

// The suite on managed machines. Each of its sandboxes is a machine that boots, so without
// KVM it takes a quarter of an hour.
func TestManagedConformance(t *testing.T) {
	if os.Getenv("SANDBOXER_TEST_VM") == "" {
		t.Skip("takes long; set SANDBOXER_TEST_VM=1")
	}
	o := machineOf(t, nil)
	stranger := o
	stranger.Owner, stranger.Dir = "stranger", t.TempDir()
	want := []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanDial, sandboxer.CanProbe, sandboxer.CanDiscover,
		sandboxer.CanList, sandboxer.CanSnapshot, sandboxer.CanPause, sandboxer.CanCapacity, sandboxer.CanStats,
		sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch}
	extensiontest.Run(t, extensiontest.Harness{
		Inputs: vmpacker.Adapter.Inputs,
		Open:   o.must, Stranger: stranger.must, Want: want,
		Spec:     sandboxer.Spec{Owner: owner, Image: "small"},
		Enforces: []extensiontest.Feature{extensiontest.Memory, extensiontest.Hostname},
		Kill: func(t *testing.T, h sandboxer.Handle) {
			exec.Command("pkill", "-KILL", "-f", "product="+owner+"/"+h.SandboxID+"/").Run()
		},
		Listen: func(port int) []string {
			return []string{"nc", "-ll", "-p", strconv.Itoa(port), "-e", "cat"}
		},
	})
}

// A Debian machine, made with debootstrap and otherwise unknown here, with the real
// cloud-init: it is entered with the data of its seed. Its other parts are for service.
func TestDebian(t *testing.T) {
	t.Parallel()
	if os.Getenv("SANDBOXER_TEST_WHOLE") == "" && os.Getenv("SANDBOXER_TEST_DEBIAN") == "" {
		t.Skip("takes minutes and 150 MB of packages: it makes a Debian with debootstrap and boots it; SANDBOXER_TEST_WHOLE=1 runs it, as make test-long does, and SANDBOXER_TEST_DEBIAN=1 runs it alone")
	}
	for _, tool := range []string{"qemu-system-x86_64", "qemu-img", "mke2fs", "debootstrap"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("there is no %s on this machine", tool)
		}
	}
	if os.Getuid() != 0 {
		t.Skip("debootstrap needs root")
	}
	dir := t.TempDir()
	began := time.Now()
	if out, err := exec.Command("sh", "../../scripts/vm-debian.sh", dir, installed(t)).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Logf("made in %s", time.Since(began).Round(time.Second))
	o := options{Owner: owner + "-debian", Dir: t.TempDir(), Hosts: t.TempDir(), Config: map[string]any{"images": map[string]any{"debian": map[string]any{
		"file": dir + "/disk.qcow2", "kernel": dir + "/vmlinuz", "initrd": dir + "/initrd", "append": "root=/dev/vda rw console=ttyS0", "memory": 768 << 20, "cpus": 2,
		"boot_timeout": int64(time.Hour)}}}}
	e := o.opened(t)
	repo := t.TempDir()
	if err := os.WriteFile(filepath.Join(repo, "Makefile"), []byte("all:\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	s := sandboxer.Spec{ID: "bookworm", Generation: 1, Owner: o.Owner, Image: "debian", Inputs: map[string]string{"repo": repo}, Env: map[string]string{"WHO": "me"}}
	began = time.Now()
	h := provision(t, e, s)
	t.Logf("created in %s", time.Since(began).Round(time.Second))
	if got := run(t, e, h, `. /etc/os-release; echo "$ID $(hostname) $WHO $(ls) $(ps -p 1 -o comm= 2>/dev/null || cat /proc/1/comm)"`); got != "debian bookworm me Makefile systemd" {
		t.Errorf("inside: %q", got)
	}
	run(t, e, h, "cloud-init status --wait >/dev/null; echo saved >mark")
	began = time.Now()
	snap, err := e.Snapshot(t.Context(), h, "snap-debian")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("saved in %s, %d MB", time.Since(began).Round(time.Millisecond), snap.Bytes>>20)
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	c := s
	c.ID = "restored"
	t.Cleanup(func() {
		ctx, cancel := contextAfter(t, busy)
		defer cancel()
		if _, err := e.Teardown(ctx, sandboxer.Handle{SandboxID: c.ID}); err != nil {
			t.Error(err)
		}
		if err := e.DropSnapshot(ctx, sandboxer.Snapshot{SnapshotID: snap.SnapshotID}); err != nil {
			t.Error(err)
		}
		clean(t, o)
	})
	began = time.Now()
	ch, err := e.RestoreFromSnapshot(t.Context(), c, snap)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("restored in %s", time.Since(began).Round(time.Millisecond))
	if got := run(t, e, ch, `echo "$(hostname) $(cat mark)"`); got != "restored saved" {
		t.Errorf("in the copy: %q", got)
	}
	t.Run("service", func(t *testing.T) { service(t, e, ch) })
}

// past sets the clock of a machine wrong by years.
const past = "date -s @1000000000 >/dev/null"

// onTime checks that the clock of a machine is right. A command over SSH sets it, and is late if this machine is busy.
func onTime(t *testing.T, e sandboxer.Execer, h sandboxer.Handle) {
	t.Helper()
	before := time.Now()
	d, err := strconv.ParseInt(run(t, e, h, "date +%s"), 10, 64)
	if err != nil || d < before.Add(-busy).Unix() || d > time.Now().Add(busy).Unix() {
		t.Errorf("its clock says %d between %d and %d, %v", d, before.Unix(), time.Now().Unix(), err)
	}
}

//go:build linux

package vmpacker_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// packed configures an image that the real Packer builds, with its null builder: all of
// Packer runs except a machine. how is a shell script that makes $1, a disk.
func packed(t *testing.T, how string) (o options, template string) {
	t.Helper()
	for _, tool := range []string{"packer", "qemu-img"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("there is no %s on this machine (scripts/setup.sh installs it)", tool)
		}
	}
	dir := t.TempDir()
	script := filepath.Join(dir, "make.sh")
	if err := os.WriteFile(script, []byte("echo build >>"+dir+"/builds\n"+how+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	template = filepath.Join(dir, "image.json")
	text, err := json.Marshal(map[string]any{
		"variables": map[string]string{"size": "8M", "token": ""},
		"builders":  []any{map[string]any{"type": "null", "communicator": "none"}},
		"provisioners": []any{map[string]any{"type": "shell-local", "environment_vars": []string{"SIZE={{user `size`}}"},
			"inline": []string{"sh " + script + " disk.qcow2"}}},
		"post-processors": []any{map[string]any{"type": "artifice", "files": []string{"disk.qcow2"}}},
	})
	if err == nil {
		err = os.WriteFile(template, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	return options{Owner: owner + "-packed", Dir: t.TempDir(), Hosts: t.TempDir(), Config: map[string]any{
		"accel": "tcg",
		"images": map[string]any{"small": map[string]any{"memory": 64 << 20, "packer": map[string]any{
			"template": template, "variables": map[string]string{"size": "8M"}, "secrets": map[string]string{"token": "canary-token"},
		}}},
	}}, template
}

func buildsOf(t *testing.T, template string) int {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(filepath.Dir(template), "builds"))
	if err != nil {
		return 0
	}
	return strings.Count(string(data), "\n")
}

func packedOrder(id string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: owner + "-packed", Image: "small"}
}

// The disks here do not start: a create that has its image waits for a machine that
// never accepts a login, and is then cancelled.
func TestPackerBuildsOnce(t *testing.T) {
	o, template := packed(t, `sleep 1; qemu-img create -q -f qcow2 "$1" $SIZE`)
	a, b := o.opened(t), o.opened(t) // as if two processes
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var mu sync.Mutex
	steps := map[string]bool{}
	ctx = sandboxer.WithProgress(ctx, func(p sandboxer.Progress) {
		mu.Lock()
		defer mu.Unlock()
		steps[p.Step] = true
	})
	var wg sync.WaitGroup
	for i := range 4 {
		e := a
		if i%2 == 1 {
			e = b
		}
		id := fmt.Sprintf("p%d", i)
		wg.Go(func() {
			_, err := e.Provision(ctx, packedOrder(id))
			if k := sandboxer.KindOf(err); k != sandboxer.Canceled {
				t.Errorf("%s: %v", id, err)
			}
		})
	}
	saw := func(part string) bool {
		mu.Lock()
		defer mu.Unlock()
		for s := range steps {
			if strings.Contains(s, part) {
				return true
			}
		}
		return false
	}
	await(t, "the first machine to start", func() bool { return saw("waiting for the machine") })
	cancel()
	wg.Wait()
	if n := buildsOf(t, template); n != 1 {
		t.Errorf("Packer built %d times", n)
	}
	if !saw("packer: ") || !saw("starting a machine") {
		t.Errorf("progress: %v", steps)
	}
	records, _ := filepath.Glob(o.Dir + "/image/*.json")
	if len(records) != 1 {
		t.Fatalf("records: %q", records)
	}
	var rec struct{ Packer, SHA256, Log, Image string }
	data, err := os.ReadFile(records[0])
	if err == nil {
		err = json.Unmarshal(data, &rec)
	}
	log, lerr := os.ReadFile(rec.Log)
	if err != nil || lerr != nil || rec.Packer == "" || len(rec.SHA256) != 64 || rec.Image != "small" || !strings.Contains(string(log), ",artifact,") {
		t.Errorf("record %s, %v, %v; log:\n%s", data, err, lerr, log)
	}
	if strings.Contains(string(data)+string(log), "canary-token") {
		t.Error("a secret variable is in the record or the log")
	}
	if left, _ := filepath.Glob(o.Dir + "/image/*.work"); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
	for i := range 4 {
		if _, err := a.Teardown(t.Context(), sandboxer.Handle{SandboxID: fmt.Sprintf("p%d", i)}); err != nil {
			t.Error(err)
		}
	}
	if left := qemus(t, o); left != "" {
		t.Errorf("machines left over: %s", left)
	}
}

// A replaced image is removed with the last machine that is based on it.
func TestPackerImagesAreCollected(t *testing.T) {
	o, _ := packed(t, `qemu-img create -q -f qcow2 "$1" $SIZE`)
	begin := func(o options, id string) (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		starts, once := make(chan struct{}), sync.Once{}
		ctx = sandboxer.WithProgress(ctx, func(p sandboxer.Progress) {
			if strings.Contains(p.Step, "waiting for the machine") {
				once.Do(func() { close(starts) })
			}
		})
		e, done := o.opened(t), make(chan error, 1)
		go func() {
			_, err := e.Provision(ctx, packedOrder(id))
			done <- err
		}()
		select {
		case <-starts:
		case err := <-done:
			t.Fatalf("%s: %v", id, err)
		case <-time.After(busy):
			t.Fatalf("%s does not start", id)
		}
		return func() {
			cancel()
			kind(t, <-done, sandboxer.Canceled)
		}
	}
	images := func() []string {
		found, _ := filepath.Glob(o.Dir + "/image/*.qcow2")
		return found
	}
	stopOld := begin(o, "old")
	first := images()
	img := o.Config["images"].(map[string]any)["small"].(map[string]any)["packer"].(map[string]any)
	img["variables"] = map[string]string{"size": "9M"}
	stopNew := begin(o, "new")
	if n := images(); len(first) != 1 || len(n) != 2 {
		t.Errorf("with a machine on the old image: %q, then %q", first, n)
	}
	stopOld()
	e := o.opened(t)
	if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: "old"}); err != nil {
		t.Error(err)
	}
	await(t, "the old image to be removed", func() bool {
		o.opened(t) // it does not wait for locks
		return len(images()) == 1
	})
	left, _ := filepath.Glob(o.Dir + "/image/*")
	if n := images(); n[0] == first[0] || len(left) != 3 {
		t.Errorf("left over: %q", left)
	}
	stopNew()
	if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: "new"}); err != nil {
		t.Error(err)
	}
	if n := images(); len(n) != 1 {
		t.Errorf("the present image was removed: %q", n)
	}
	if left := qemus(t, o); left != "" {
		t.Errorf("machines left over: %s", left)
	}
}

func TestPackerFails(t *testing.T) {
	o, _ := packed(t, `echo "it is all wrong" >&2; exit 3`)
	_, err := o.opened(t).Provision(t.Context(), packedOrder("fails"))
	kind(t, err, sandboxer.Failed, "small", ".log")
	if strings.Contains(err.Error(), "canary-token") {
		t.Errorf("the error has a secret: %v", err)
	}
	nothing(t, o)
	o, template := packed(t, "")
	if err := os.WriteFile(template, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = o.opened(t).Provision(t.Context(), packedOrder("fails"))
	kind(t, err, sandboxer.Failed, "small")
	t.Setenv("SANDBOXER_PACKER_CMD", "/no/such/packer")
	_, err = o.opened(t).Provision(t.Context(), packedOrder("fails"))
	kind(t, err, sandboxer.Unavailable, "SANDBOXER_PACKER_CMD")
}

// nothing checks that no process or file of a build is left.
func nothing(t *testing.T, o options) {
	t.Helper()
	if n := building(); n != "" {
		t.Errorf("processes left over: %s", n)
	}
	left, _ := filepath.Glob(o.Dir + "/image/*.json")
	if work, _ := filepath.Glob(o.Dir + "/image/*.work"); len(left)+len(work) > 0 {
		t.Errorf("left over: %q %q", left, work)
	}
}

// building lists the processes of builds.
func building() string {
	out, _ := exec.Command("sh", "-c", `grep -lsaF "SANDBOXER_BUILD=$1-packed/" /proc/[0-9]*/environ`, "sh", owner).Output()
	return strings.TrimSpace(string(out))
}

func TestPackerCalledOff(t *testing.T) {
	o, template := packed(t, `sleep 1000 & sleep 1000`)
	e := o.opened(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := e.Provision(ctx, packedOrder("off"))
		done <- err
	}()
	await(t, "the build", func() bool { return buildsOf(t, template) > 0 })
	cancel()
	kind(t, <-done, sandboxer.Canceled)
	nothing(t, o)
}

// A killed broker ends its build.
func TestPackerDiesWithTheBroker(t *testing.T) {
	o, template := packed(t, `sleep 1000`)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	in, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "broker")
	cmd.Stdin, cmd.Stderr = strings.NewReader(string(in)), os.Stderr
	cmd.Env = append(os.Environ(), "BROKER_IMAGE=small")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, "the build", func() bool { return buildsOf(t, template) > 0 })
	if building() == "" {
		logs, _ := filepath.Glob(o.Dir + "/image/*.log")
		for _, l := range logs {
			data, _ := os.ReadFile(l)
			t.Logf("%s", data)
		}
		t.Error("no build was under way")
	}
	cmd.Process.Kill()
	cmd.Wait()
	await(t, "the build to end", func() bool { return building() == "" })
}

// An image that Packer makes with a machine of its own, through its qemu builder,
// starts as a managed machine.
func TestPackerMachine(t *testing.T) {
	if os.Getenv("SANDBOXER_TEST_VM") == "" {
		t.Skip("takes long: it starts two machines; set SANDBOXER_TEST_VM=1")
	}
	if _, err := exec.LookPath("packer"); err != nil {
		t.Skip("there is no packer on this machine (scripts/setup.sh installs it)")
	}
	o := machineOf(t, nil)
	dir := image(t)
	template := filepath.Join(t.TempDir(), "image.json")
	text, err := json.Marshal(map[string]any{
		"variables": map[string]string{"what": ""},
		"builders": []any{map[string]any{
			"type": "qemu", "disk_image": true, "use_backing_file": false, "iso_url": dir + "/disk.qcow2", "iso_checksum": "none",
			"accelerator": "tcg", "headless": true, "disk_interface": "virtio", "net_device": "virtio-net", "format": "qcow2", "boot_wait": "1s",
			"ssh_username": "root", "ssh_private_key_file": dir + "/key", "ssh_timeout": "5m", "ssh_file_transfer_method": "sftp",
			"ssh_handshake_attempts": 100, "shutdown_command": "poweroff", "output_directory": "made",
			"qemuargs": [][]string{{"-m", "128M"}, {"-cpu", "max"}, {"-kernel", dir + "/vmlinuz"}, {"-initrd", dir + "/initrd"},
				{"-append", "console=ttyS0 quiet panic=1"}},
		}},
		"provisioners": []any{map[string]any{"type": "shell", "inline": []string{"echo {{user `what`}} >/root/built", "sync"}}},
	})
	if err == nil {
		err = os.WriteFile(template, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	img := o.Config["images"].(map[string]any)["small"].(map[string]any)
	delete(img, "file")
	img["packer"] = map[string]any{"template": template, "base": dir + "/disk.qcow2", "variables": map[string]string{"what": "by Packer"},
		"timeout": int64(5 * time.Minute)}
	e := o.opened(t)
	h := provision(t, e, machine("built"))
	if got := run(t, e, h, "cat /root/built; hostname"); got != "by Packer\nbuilt" {
		t.Errorf("inside: %q", got)
	}
	records, _ := filepath.Glob(o.Dir + "/image/*.json")
	if len(records) != 1 {
		t.Fatalf("records: %q", records)
	}
	data, err := os.ReadFile(records[0])
	t.Logf("%s, %v", data, err)
	logs, _ := filepath.Glob(o.Dir + "/image/*.log")
	if log, err := os.ReadFile(strings.Join(logs, "")); err != nil || !strings.Contains(string(log), "Provisioning with shell script") {
		t.Errorf("%v; log: %s", err, log)
	}
	began := time.Now()
	provision(t, e, machine("again")) // without another build
	if n, _ := filepath.Glob(o.Dir + "/image/*.json"); len(n) != 1 {
		t.Errorf("after the second create: %q", n)
	}
	t.Logf("the second one took %s", time.Since(began))
}

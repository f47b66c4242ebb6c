package vmpacker

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/compattest"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

const hostKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBcVWRjMBwQw5NqfjCtBfUvSTPBM7hZc2AJvA6YdzTzi"

func TestFormOfMachines(t *testing.T) {
	compattest.CheckForm(t, "machine-note", compattest.Shape("1", place{}))
	compattest.CheckForm(t, "machine-snapshot", compattest.Shape("", saved{}))
	machine := shape{
		Image: "/images/debian.qcow2", Disk: "/images/debian.qcow2", Kernel: "/images/vmlinuz", Initrd: "/images/initrd", Append: "console=ttyS0",
		Memory: 1 << 30, CPUs: 2, User: "root", Identity: "/keys/id_ed25519", HostKeys: []string{hostKey},
	}
	compattest.CheckSamples(t, "machine-note", place{
		V: placeVersion, ID: "builds", Generation: 3, Owner: "0123456789abcdef", Kind: managed, Host: "vm",
		Target: sshrun.Target{Name: "vm", Addr: "root@127.0.0.1", Port: 2222, IdentityFile: "/keys/id_ed25519", ProxyJump: "jump", HostKeys: []string{hostKey},
			Sessions: 8, Connections: 1, Handshakes: 1, Silence: time.Minute},
		Base: "/opt/workspaces", User: "dev", Ports: []int{8080}, Untouched: true, Shape: &machine, State: state{Ready: true, Paused: true, Saving: "before"},
	}, func(data []byte) (any, error) {
		var p place
		err := p.decode(data)
		return p, err
	}, "stamp")
	compattest.CheckSamples(t, "machine-snapshot", saved{
		Receipt: sandboxer.Snapshot{SnapshotID: "before", Bytes: 1 << 30, Memory: true, Quiesced: true, Meta: map[string]string{"machine": "q35"},
			Credential: sandboxer.SecretRef{Tenant: "acme", Name: "key", Version: 1}, ExpiresAt: time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)}, // of other adapters
		Owner: "0123456789abcdef", Shape: machine, SandboxID: "builds", Generation: 3,
	}, func(data []byte) (any, error) {
		e := &extension{env: sandboxer.Env{Dir: t.TempDir()}}
		name := e.dir("snap", "before", "record.json")
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			return nil, err
		}
		if err := os.WriteFile(name, data, 0o600); err != nil {
			return nil, err
		}
		return e.savedAs("before")
	}, "stamp")
}

// TestFormerMachines: a note that an earlier version kept in a file is found, with all its data. A damaged one is an
// error for its sandbox, and does not hide the others.
func TestFormerMachines(t *testing.T) {
	dir := t.TempDir()
	e := &extension{env: sandboxer.Env{Dir: dir, Owner: "0123456789abcdef", Notes: notes.New(dir, "ext.vm", nil)}}
	if err := os.Mkdir(e.dir("box"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"builds.g3.json": `{
  "v": 1, "id": "builds", "generation": 3, "owner": "0123456789abcdef", "kind": "managed", "host": "localhost",
  "target": {"Name": "vm", "Addr": "root@127.0.0.1", "Port": 2222}, "base": "/opt/workspaces", "user": "dev", "ports": [8080],
  "shape": {"image": "debian", "disk": "/images/debian.qcow2", "memory": 1073741824, "cpus": 2, "user": "root"}, "state": {"ready": true, "paused": true}
}
`,
		"damaged.g1.json": `{"v":1,`,
		"another.g1.json": `{"v":1,"id":"builds","generation":3,"owner":"0123456789abcdef","kind":"managed","host":"localhost","target":{},"base":"/opt"}`,
	} {
		if err := os.WriteFile(e.dir("box", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := notes.Move(t.Context(), e.env.Notes, e.dir("box"), ".json"); err != nil {
			t.Fatal(err)
		}
		all, err := e.noted(t.Context())
		if len(all) != 1 || sandboxer.KindOf(err) != sandboxer.Unavailable {
			t.Fatalf("%d notes, %v", len(all), err)
		}
		p := all[0]
		if p.key() != "builds.g3" || p.Kind != managed || p.Target.Port != 2222 || p.User != "dev" || len(p.Ports) != 1 ||
			p.Shape.Disk != "/images/debian.qcow2" || p.Shape.Memory != 1<<30 || !p.State.Ready || !p.State.Paused {
			t.Errorf("it is read as %+v, %+v", p, p.Shape)
		}
		for _, id := range []string{"damaged", "another"} {
			if _, err := e.recall(t.Context(), id, 1); sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(sandboxer.HintOf(err), id+".g1.note") {
				t.Errorf("%s: %v (%s)", id, err, sandboxer.HintOf(err))
			}
		}
	}
}

// The data that a workspace's machine keeps.
func TestFormOfWorkspaces(t *testing.T) {
	compattest.CheckForm(t, "workspace-note", compattest.Shape("1", workspaceMeta{}))
	compattest.CheckSamples(t, "workspace-note", workspaceMeta{V: placeVersion, User: "dev", Ports: []int{8080}},
		func(data []byte) (any, error) { return readMeta(data) }, "stamp")
	for _, bad := range []string{`{"v":2}`, `{"v":1,"user":"-oProxyCommand=x"}`, `{"v":1,"ports":[0]}`, `[`} {
		if _, err := readMeta([]byte(bad)); err == nil {
			t.Errorf("%s is believed", bad)
		}
	}
}

// The error says that a note is of a newer program.
func TestNewerFormats(t *testing.T) {
	err := new(place).decode([]byte(`{"v":2,"id":{"in":"another form"}}`))
	if said := sandboxer.Message(err) + sandboxer.HintOf(err); sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(said, "newer sandboxer") || !strings.Contains(said, "upgrade") {
		t.Errorf("%v (%s)", err, said)
	}
}

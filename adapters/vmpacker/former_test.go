package vmpacker

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/compattest"
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
		Base: "/opt/workspaces", User: "dev", Ports: []int{8080}, Untouched: true, Shape: &machine, State: state{Ready: true, Paused: true, Saving: "before"}, Stamp: []byte("sealed"),
	}, func(data []byte) (any, error) {
		var p place
		err := p.decode(data)
		return p, err
	})
	compattest.CheckSamples(t, "machine-snapshot", saved{
		Receipt: sandboxer.Snapshot{SnapshotID: "before", Bytes: 1 << 30, Memory: true, Quiesced: true, Meta: map[string]string{"machine": "q35"}},
		Owner:   "0123456789abcdef", Shape: machine, SandboxID: "builds", Generation: 3, Stamp: []byte("sealed"),
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
	})
}

// What is kept with a workspace on its machine.
func TestFormOfWorkspaces(t *testing.T) {
	compattest.CheckForm(t, "workspace-note", compattest.Shape("1", workspaceMeta{}))
	compattest.CheckSamples(t, "workspace-note", workspaceMeta{V: placeVersion, User: "dev", Ports: []int{8080}, Stamp: []byte("sealed")},
		func(data []byte) (any, error) { return readMeta(data) })
	for _, bad := range []string{`{"v":2}`, `{"v":1,"user":"-oProxyCommand=x"}`, `{"v":1,"ports":[0]}`, `[`} {
		if _, err := readMeta([]byte(bad)); err == nil {
			t.Errorf("%s is believed", bad)
		}
	}
}

// A note of a newer program is said to be that.
func TestNewerFormats(t *testing.T) {
	err := new(place).decode([]byte(`{"v":2,"id":{"in":"another form"}}`))
	if said := sandboxer.Message(err) + sandboxer.HintOf(err); sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(said, "newer sandboxer") || !strings.Contains(said, "upgrade") {
		t.Errorf("%v (%s)", err, said)
	}
}

package process_test

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
)

// fullClass keeps sandboxes as directories and can do what needs no commands inside. The host keeps the contract for it.
const fullClass = `import os, shutil, uuid
from sandboxer import errors, request
from sandboxer.extensions.base import SandboxExtension

class Full(SandboxExtension):
    """Directories."""

    def at(self, handle):
        where = os.path.join(self.config["root"], "boxes", handle["sandbox_id"])
        if not os.path.isdir(where):
            raise errors.NotFound(f"sandbox {handle['sandbox_id']} is not there")
        return where

    def make(self, inputs, host):
        where = os.path.join(self.config["root"], "boxes", inputs["sandbox_id"])
        os.makedirs(os.path.dirname(where), exist_ok=True)
        return where, {"sandbox_id": inputs["sandbox_id"], "host": host, "generation": str(request.current().generation)}

    def provision(self, profile, inputs, host):
        where, handle = self.make(inputs, host)
        os.mkdir(where)
        return handle

    def wait_ready(self, handle):
        return {"remote_dir": self.at(handle), "host": handle["host"]}

    def teardown(self, handle):
        try:
            where = self.at(handle)
        except errors.NotFound:
            return {}
        shutil.rmtree(where)
        return {"removed": where}

    def is_alive(self, handle):
        self.at(handle)
        return True

    def list_running(self):
        boxes = os.path.join(self.config["root"], "boxes")
        for name in os.listdir(boxes) if os.path.isdir(boxes) else []:
            yield {"sandbox_id": name, "host": "localhost"}

    def discover(self, sandbox_id):
        return next((h for h in self.list_running() if h["sandbox_id"] == sandbox_id), None)

    def saved(self, id):
        return os.path.join(self.config["root"], "saved", id)

    def supports_snapshots(self):
        return True

    def snapshot(self, handle):
        id = uuid.uuid4().hex
        shutil.copytree(self.at(handle), self.saved(id), symlinks=True)
        return {"snapshot_id": id}

    def restore_from_snapshot(self, profile, snapshot_meta, inputs, host):
        where, handle = self.make(inputs, host)
        shutil.copytree(self.saved(snapshot_meta["snapshot_id"]), where, symlinks=True)
        return handle

    def drop_snapshot(self, snapshot_meta):
        shutil.rmtree(self.saved(snapshot_meta["snapshot_id"]), ignore_errors=True)

    def estimate_cost(self, profile, inputs, *, duration_s=3600):
        return 0.01 + 0.1 * duration_s / 3600

    def meter_actual(self, handle, *, duration_s):
        return 0.1 * duration_s / 3600

    def pause(self, handle):
        self.at(handle)

    def resume(self, handle):
        self.at(handle)

    def capacity(self, host):
        if host not in ("", "localhost"):
            raise errors.Invalid(f"there is no host {host}")
        return {"free": 100, "hosts": ["localhost"]}

    def stats(self, handle):
        self.at(handle)
        return {"pids": 0}

    def check(self, profile, inputs, host):
        pass
`

// A class that has what a directory can be asked for passes the suite for all of that.
func TestConformanceOfFullClass(t *testing.T) {
	needPython(t)
	path := module(t, "full.py", fullClass)
	dir, root := t.TempDir(), t.TempDir()
	extensiontest.Run(t, extensiontest.Harness{
		Inputs: []sandboxer.Input{{Name: sandboxer.AnyInput, Restricted: true}},
		Open: func(t *testing.T) sandboxer.Extension {
			e, err := openProgram(t, dir, "conformance", sandboxer.Program{Handler: "full:Full", Path: []string{path}}, map[string]any{"root": root})
			if err != nil {
				t.Fatal(err)
			}
			return e
		},
		Want: []sandboxer.Capability{sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanSnapshot, sandboxer.CanQuote,
			sandboxer.CanMeter, sandboxer.CanPause, sandboxer.CanCapacity, sandboxer.CanStats},
	})
}

package process_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/process"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// needPython skips where there is no Python that runs classes.
func needPython(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("there is no python3")
	}
}

// module writes a Python module and returns its directory.
func module(t testing.TB, name, text string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// guideClass is what the guide of the original program has, with its three bodies filled in.
const guideClass = `from sandboxer.extensions.base import SandboxExtension

class MyExtension(SandboxExtension):
    def provision(self, profile, inputs, host):
        import os, tempfile
        sid = self.new_sandbox_id(inputs)
        where = os.path.join(self.config["root"], "sbx-" + sid)
        os.makedirs(where)
        return {"sandbox_id": sid, "host": host, "remote_dir": where}

    def wait_ready(self, handle):
        return {"remote_dir": handle["remote_dir"], "host": handle["host"]}

    def teardown(self, handle):
        import shutil
        shutil.rmtree(handle["remote_dir"], ignore_errors=True)
        return {"removed": handle["remote_dir"]}
`

// A class that knows the guide alone passes what the suite has for extensions with nothing but the verbs: the host makes
// it idempotent.
func TestConformanceOfGuideClass(t *testing.T) {
	needPython(t)
	path := module(t, "my_backend.py", guideClass)
	dir, root := t.TempDir(), t.TempDir()
	extensiontest.Run(t, extensiontest.Harness{
		Inputs: []sandboxer.Input{{Name: sandboxer.AnyInput, Restricted: true}},
		Open: func(t *testing.T) sandboxer.Extension {
			e, err := openProgram(t, dir, "conformance", sandboxer.Program{Handler: "sandboxer.extensions.my_backend:MyExtension", Path: []string{path}}, map[string]any{"root": root})
			if err != nil {
				t.Fatal(err)
			}
			return e
		},
	})
	if left, _ := os.ReadDir(root); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "journal")); len(left) > 2 { // its own name, and the lock of that
		t.Errorf("left over in the journal: %v", left)
	}
}

// A fault of a class is reported in one line, at the handler.
func TestPythonFaults(t *testing.T) {
	needPython(t)
	path := module(t, "mod.py", `
class Lacks:
    def provision(self, profile, inputs, host): pass
class Raises:
    def __init__(self, config):
        raise RuntimeError("no\nway")
    def provision(self, profile, inputs, host): pass
    def wait_ready(self, handle): pass
    def teardown(self, handle): pass
class Half(Raises):
    def __init__(self, config): pass
    def read_file(self, handle, path): pass
number = 1
`)
	if err := os.WriteFile(filepath.Join(path, "broken.py"), []byte("def f(:\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for handler, want := range map[string]string{
		"absent:Class":  "handler: there is no module absent in " + path,
		"mod:Other":     "handler: module mod has no class Other: its classes are Half, Lacks, Raises",
		"mod:number":    "handler: mod:number is no class",
		"mod:Lacks":     "handler: class Lacks lacks wait_ready, teardown",
		"mod:Raises":    "handler: Raises.__init__ failed: RuntimeError: no way (mod.py:6)",
		"mod:Half":      "handler: Half has read_file and lacks write_file",
		"broken:Class":  "handler: module broken cannot be imported: SyntaxError",
		"json:JSONTool": "handler: module json has no class JSONTool",
	} {
		_, err := openProgram(t, t.TempDir(), "o", sandboxer.Program{Handler: handler, Path: []string{path}}, nil)
		if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v\nwant %s", handler, err, want)
		}
	}
	_, err := openProgram(t, t.TempDir(), "o", sandboxer.Program{Handler: "mod:Half", Path: []string{path}, Python: "/no/python"}, nil)
	if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.HasPrefix(err.Error(), "python: a class needs /no/python,") {
		t.Errorf("no such interpreter: %v", err)
	}
	_, err = openProgram(t, t.TempDir(), "o", sandboxer.Program{Handler: "mod:Half", Path: []string{path}, Python: "/bin/false"}, nil)
	if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.HasPrefix(err.Error(), "python: /bin/false is not a usable Python") {
		t.Errorf("another program: %v", err)
	}
}

// The description is kept: what did not change starts nothing, what did is asked again.
func TestDescriptionIsKept(t *testing.T) {
	needPython(t)
	path := module(t, "mod.py", strings.Replace(guideClass, "import os\n", "import os\n", 1))
	dir := t.TempDir()
	p := sandboxer.Program{Handler: "mod:MyExtension", Path: []string{path}}
	e, err := openProgram(t, dir, "o", p, nil)
	if err != nil {
		t.Fatal(err)
	}
	b := backend.New("ext.test", e, backend.Options{Close: time.Minute})
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if b.Can(sandboxer.CanProbe) {
		t.Error("it can what the class cannot")
	}
	if err := os.WriteFile(filepath.Join(path, "mod.py"), []byte(guideClass+"\n    def is_alive(self, handle): return True\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if e, err = openProgram(t, dir, "o", p, nil); err != nil {
		t.Fatal(err)
	}
	b = backend.New("ext.test", e, backend.Options{Close: time.Minute})
	defer b.Close()
	if !b.Can(sandboxer.CanProbe) {
		t.Error("what the class can now is not known")
	}
}

// A sandbox that is a process in a session of its own outlives the extension, and its broker; a helper does not.
func TestDaemonsLiveOn(t *testing.T) {
	needPython(t)
	path := module(t, "mod.py", `
import subprocess
class Daemons:
    accepts = ["env"]
    def provision(self, profile, inputs, host):
        p = subprocess.Popen(["sleep", "8421"], start_new_session=True)
        return {"sandbox_id": inputs["sandbox_id"], "host": host, "pid": str(p.pid)}
    def wait_ready(self, handle): return {}
    def teardown(self, handle):
        subprocess.run(["kill", handle["pid"]], check=False)
        return {}
    def exec(self, handle, command): return command.run(command.args)
`)
	e, err := openProgram(t, t.TempDir(), "o", sandboxer.Program{Handler: "mod:Daemons", Path: []string{path}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	b := backend.New("ext.test", e, backend.Options{Close: time.Minute})
	h, err := b.Provision(t.Context(), specOf("d1"))
	if err != nil {
		t.Fatal(err)
	}
	began := make(chan error, 1)
	go func() {
		_, err := b.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sleep", "8422"}})
		began <- err
	}()
	running := func(arg string) int {
		pids, err := procs.WithArg(arg)
		if err != nil {
			t.Fatal(err)
		}
		return len(pids)
	}
	for end := time.Now().Add(time.Minute); running("8422") == 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the command does not start")
		}
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	<-began
	if n := running("8421"); n != 1 {
		t.Errorf("%d of the sandbox's process run; want 1", n)
	}
	for end := time.Now().Add(time.Minute); running("8422") > 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a command lives on without the extension")
		}
	}
	pids, _ := procs.WithArg("8421")
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// Calls that go on after they were canceled keep the others waiting for a bounded time: the process is replaced, and what was
// cut short can be torn down.
func TestStuckClassIsReplaced(t *testing.T) {
	needPython(t)
	path := module(t, "mod.py", `
import os, sys, threading
host = sys.modules["__main__"]
host.STUCK_TIME, host.LOOK_TIME = 0.2, 0.02
class Stuck:
    def __init__(self, config): self.root = config["root"]
    def provision(self, profile, inputs, host):
        where = os.path.join(self.root, inputs["sandbox_id"])
        open(where, "w").close()
        if inputs["sandbox_id"].startswith("stuck"):
            threading.Event().wait()
        return {"sandbox_id": inputs["sandbox_id"], "host": host}
    def wait_ready(self, handle): return {}
    def teardown(self, handle):
        try:
            os.unlink(os.path.join(self.root, handle["sandbox_id"]))
        except FileNotFoundError:
            pass
        return {}
`)
	root := t.TempDir()
	p := sandboxer.Program{Handler: "mod:Stuck", Path: []string{path}, Concurrency: 2}
	e, err := openProgram(t, t.TempDir(), "o", p, map[string]any{"root": root})
	if err != nil {
		t.Fatal(err)
	}
	b := backend.New("ext.test", e, backend.Options{Close: time.Minute})
	defer b.Close()
	// once begins a provision, cancels it when it is stuck, and sees that its caller does not wait.
	once := func(id string) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() {
			_, err := b.Provision(ctx, specOf(id))
			done <- err
		}()
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			if _, err := os.Stat(filepath.Join(root, id)); err == nil {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("the provision of %s does not begin", id)
			}
		}
		cancel()
		if err := <-done; sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Errorf("a canceled provision: %v", err)
		}
	}
	// again has f succeed in the end; before that the process may end under it.
	again := func(what string, f func() error) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
			err := f()
			if err == nil {
				return
			}
			if sandboxer.KindOf(err) != sandboxer.Unavailable || time.Now().After(end) {
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	once("stuck1")
	once("stuck2")
	again("a provision that finds no place", func() error {
		_, err := b.Provision(t.Context(), specOf("d1"))
		return err
	})
	once("stuck3")
	for _, id := range []string{"stuck3", "stuck1", "stuck2", "d1"} {
		again("teardown of "+id, func() error {
			_, err := b.Teardown(t.Context(), sandboxer.Handle{SandboxID: id, Generation: 1})
			return err
		})
	}
	if left, _ := os.ReadDir(root); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}

// Sockets that are made side by side do not take each other for left ones.
func TestExchangesSideBySide(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 50 {
				close, err := process.MakeExchange(dir)
				if err != nil {
					t.Error(err)
					return
				}
				close()
			}
		})
	}
	wg.Wait()
}

package process_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// fullClass returns a directory with the class full:Full, which has all that a class can have, and one for its sandboxes,
// which other users can enter.
func fullClass(t *testing.T) (path, root string) {
	t.Helper()
	path, root = t.TempDir(), t.TempDir()
	if err := os.CopyFS(path, os.DirFS("testdata")); err != nil { // Python writes beside it what it compiles
		t.Fatal(err)
	}
	for dir := root; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return path, root
}

// A class that has all of it keeps the contract through the protocol, with real commands, files and connections.
func TestConformanceOfFullClass(t *testing.T) {
	needPython(t)
	path, root := fullClass(t)
	dir := t.TempDir()
	open := func(dir, owner string) func(t *testing.T) sandboxer.Extension {
		return func(t *testing.T) sandboxer.Extension {
			e, err := openProgram(t, dir, owner, sandboxer.Program{Handler: "full:Full", Path: []string{path}}, map[string]any{"root": root})
			if err != nil {
				t.Fatal(err)
			}
			return e
		}
	}
	h := extensiontest.Harness{
		Open: open(dir, "conformance"), Stranger: open(t.TempDir(), "stranger"),
		Inputs: []sandboxer.Input{{Name: sandboxer.AnyInput, Restricted: true}},
		Want: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanExpose,
			sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanSnapshot, sandboxer.CanQuote, sandboxer.CanMeter,
			sandboxer.CanNotify, sandboxer.CanPause, sandboxer.CanRenew, sandboxer.CanCapacity, sandboxer.CanStats},
		Enforces: []extensiontest.Feature{extensiontest.Owned},
		Parallel: 4,
		Listen: func(port int) []string {
			return []string{self(t), "echo", "127.0.0.1:" + strconv.Itoa(port)}
		},
		Kill: func(t *testing.T, h sandboxer.Handle) {
			where := filepath.Join(root, "conformance", "boxes", h.SandboxID)
			if out, err := exec.Command("python3", "-I", "-B", filepath.Join(path, "world.py"), "remove", where).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
		},
		User: otherUser(t),
	}
	extensiontest.RunWire(t, h)

	for _, left := range []string{"*/boxes/*", "*/saved/*"} {
		if found, _ := filepath.Glob(filepath.Join(root, left)); len(found) > 0 {
			t.Errorf("left over: %q", found)
		}
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "journal")); len(left) > 2 { // its own name, and the lock of that
		t.Errorf("left over in the journal: %v", left)
	}
	// Those that waited for the end of a sandbox's time end by themselves.
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		left := processesBelow(t, root)
		if len(left) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("processes are left: %q", left)
		}
	}
}

// processesBelow lists the processes that work in a directory below root, or were started with one as an argument.
func processesBelow(t *testing.T, root string) (found []string) {
	t.Helper()
	all, err := procs.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range all {
		cwd, _ := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
		args, _ := procs.Args(pid, nil)
		if strings.HasPrefix(cwd, root+"/") || bytes.Contains(args, []byte("\x00"+root+"/")) {
			found = append(found, fmt.Sprintf("%d %q in %s", pid, args, cwd))
		}
	}
	return found
}

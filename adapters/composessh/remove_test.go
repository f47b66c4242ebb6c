package composessh

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// Files that services wrote as other users are removed all the same, by the engine, and
// nothing else; a container that hangs there for that has the sandbox's label.
func TestRemoveDir(t *testing.T) {
	address := docker(t)
	sock := strings.TrimPrefix(address, "DOCKER_HOST=unix://")
	for name, mode := range map[string]os.FileMode{filepath.Dir(sock): 0o711, sock: 0o666} {
		fi, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(name, mode); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.Chmod(name, fi.Mode().Perm()) })
	}
	root, err := os.MkdirTemp("/tmp", "sbr") // all may pass to it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	const nobody = 65534
	box, other := filepath.Join(root, "sbx-o-box-g1"), filepath.Join(root, "sbx-o-other-g1")
	for _, d := range []string{root, root + "/.net", box, box + "/repo", box + "/copies", box + "/files", other} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(d, nobody, nobody); err != nil {
			t.Fatal(err)
		}
	}
	written := filepath.Join(box, "repo", "by-root")
	if err := os.Mkdir(written, 0o700); err != nil { // root's, for whoever looks from outside
		t.Fatal(err)
	}
	if err := os.WriteFile(written+"/file", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../sbx-o-other-g1", filepath.Join(box, "repo", "link")); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", removeDir, "sh", root, "sbx-o-box-g1", "docker")
	cmd.Env = append(os.Environ(), address, "HOME="+root)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if _, err := os.Lstat(box); !os.IsNotExist(err) {
		t.Errorf("the directory is there: %v", err)
	}
	if _, err := os.Lstat(other); err != nil {
		t.Errorf("the one beside it: %v", err)
	}
	ps := exec.Command("docker", "ps", "-aq", "--filter", "label="+engine.LabelName+"=sbx-o-box-g1")
	ps.Env = append(os.Environ(), address)
	if out, err := ps.Output(); err != nil || len(out) > 0 {
		t.Errorf("containers are left: %s, %v", out, err)
	}
}

// Docker before version 23 can hang for good when containers of one network end together.
func TestContainersAreRemovedInTurn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	calls := filepath.Join(dir, "calls")
	engine := `#!/bin/sh
echo "$*" >>` + calls + `
case "$1 $(grep -c ^rm ` + calls + `)" in "ps 0") echo a; echo b;; esac
`
	if err := os.WriteFile(filepath.Join(dir, "docker"), []byte(engine), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", removeObjects, "sh", "docker", "sbx-o-box-g1", "")
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	data, err := os.ReadFile(calls)
	if err != nil {
		t.Fatal(err)
	}
	var removed []string
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, "rm ") {
			removed = append(removed, strings.TrimSpace(line))
		}
	}
	if want := []string{"rm -f -v a", "rm -f -v b"}; !slices.Equal(removed, want) {
		t.Errorf("it called %q; want %q", removed, want)
	}
}

// A service that fails since sudo may do nothing there says which key of a profile lets it.
func TestHintOfNewPrivileges(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 1)
	e := r.opened(t, "hint")
	s := order("box", repo(t, `services:
  main:
    image: `+image+`
    command: [sh, -c, 'echo "sudo: The \"no new privileges\" flag is set, which prevents sudo from running as root." >&2; exit 1']
`, nil))
	teardown(t, e, s.ID)
	h, err := e.put(t.Context(), s)
	if err == nil {
		_, err = e.WaitReady(t.Context(), h)
	}
	if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.HintOf(err), "new_privileges: yes") {
		t.Errorf("%v, hint %q; want what a profile's inputs can say", err, sandboxer.HintOf(err))
	}
}

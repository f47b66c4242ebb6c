package composessh

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// The workspace belongs to the sandbox's user, who is looked up in the image that runs, also
// when its files come from a snapshot; a user that is not there is refused.
func TestUserOwnsTheWorkspace(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 1)
	e := r.opened(t, "user")
	dir := repo(t, `services:
  main:
    build: .
    command: [sleep, "86400"]
    working_dir: /work
    volumes: [".:/work"]
`, map[string]string{"Dockerfile": "FROM " + image + "\nRUN echo worker:x:4321:4322::/:/bin/sh >>/etc/passwd\n", "sub/file": "x"})
	stranger := order("stranger", dir)
	stranger.User = "no-such-user"
	teardown(t, e, stranger.ID)
	if _, err := e.put(t.Context(), stranger); sandboxer.KindOf(err) != sandboxer.Invalid || sandboxer.HintOf(err) == "" {
		t.Errorf("a user that is not there: %v; want invalid, and what to write", err)
	}
	s := order("box", dir)
	s.User = "worker"
	h, _ := provision(t, e, s)
	if got := run(t, e, h, "stat -c %u:%g . sub sub/file && echo more >>sub/file && mkdir new && id -u"); got != "4321:4322\n4321:4322\n4321:4322\n4321" {
		t.Errorf("inside: %q", got)
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, hdr := range []tar.Header{{Name: "saved/", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "saved/file", Mode: 0o600, Size: 5}} {
		if err := w.WriteHeader(&hdr); err != nil {
			t.Fatal(err)
		}
		w.Write([]byte("saved")[:hdr.Size])
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	restored := order("restored", dir)
	restored.User = "4567:4568" // nobody's name
	teardown(t, e, restored.ID)
	h, err := e.putFrom(t.Context(), restored, sandboxer.Contents{}, &archive)
	if err != nil {
		t.Fatal(err)
	}
	if got := run(t, e, h, "stat -c %u:%g . saved saved/file && cat saved/file"); got != "4567:4568\n4567:4568\n4567:4568\nsaved" {
		t.Errorf("restored: %q", got)
	}
}

// Where the account of a host is an ordinary one, who may use the engine, only its own user
// can have the workspace; another is refused before anything runs, and nothing is left.
func TestUserOfAnOrdinaryAccount(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 0)
	env := docker(t)
	socket := strings.TrimPrefix(env, "DOCKER_HOST=unix://")
	fi, err := os.Stat(socket)
	if err != nil {
		t.Fatal(err)
	}
	const account = 4321
	group := int(fi.Sys().(*syscall.Stat_t).Gid)
	if group == 0 { // where the engine's package made no group for it
		group = account + 1
		if err := os.Chown(socket, 0, group); err != nil {
			t.Fatal(err)
		}
	}
	s := r.host(t, "ordinary", sshtest.Options{Silent: true, Env: []string{env}, Config: fmt.Sprintf(
		`ForceCommand exec setpriv --reuid=%d --regid=%[1]d --groups=%d --bounding-set=-all --inh-caps=-all sh -c "$SSH_ORIGINAL_COMMAND"`, account, group)})
	for _, dir := range []string{s.Dir, filepath.Dir(s.Dir), filepath.Dir(socket)} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(s.Dir, account, account); err != nil {
		t.Fatal(err)
	}
	e := r.opened(t, "ordinary")
	dir := repo(t, `services:
  main:
    image: `+image+`
    command: [sleep, "86400"]
    working_dir: /work
    volumes: [".:/work"]
`, map[string]string{"file": "x"})
	other := order("other", dir)
	other.User = "4567:4568"
	teardown(t, e, other.ID)
	if _, err := e.put(t.Context(), other); sandboxer.KindOf(err) != sandboxer.Unsupported || !strings.Contains(sandboxer.Message(err), "is not root") || sandboxer.HintOf(err) == "" {
		t.Errorf("another user: %v; want unsupported, and what to do", err)
	}
	own := order("own", dir)
	own.User = fmt.Sprintf("%d:%[1]d", account)
	h, _ := provision(t, e, own)
	if got := run(t, e, h, "stat -c %u:%g . file && echo more >>file && mkdir new && id -u"); got != "4321:4321\n4321:4321\n4321" {
		t.Errorf("inside: %q", got)
	}
}

package composessh

import (
	"archive/tar"
	"bytes"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// The workspace belongs to the sandbox's user, who is looked up in the image that runs, also
// when its files come from a snapshot; a user that is not there is refused.
func TestUserOwnsTheWorkspace(t *testing.T) {
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
	if _, err := e.Provision(t.Context(), stranger); sandboxer.KindOf(err) != sandboxer.Invalid || sandboxer.HintOf(err) == "" {
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
	h, err := e.ProvisionFrom(t.Context(), restored, sandboxer.Contents{}, &archive)
	if err != nil {
		t.Fatal(err)
	}
	if got := run(t, e, h, "stat -c %u:%g . saved saved/file && cat saved/file"); got != "4567:4568\n4567:4568\n4567:4568\nsaved" {
		t.Errorf("restored: %q", got)
	}
}

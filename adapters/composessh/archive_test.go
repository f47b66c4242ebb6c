package composessh

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// A cutting reader reads from another, and calls cut once when after bytes have been read.
type cutting struct {
	io.Reader
	after int64
	cut   func()
}

func (c *cutting) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	if c.after -= int64(n); c.after <= 0 && c.cut != nil {
		c.cut()
		c.cut = nil
	}
	return n, err
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// The error for an archive that did not arrive says why: the host was lost, the archive is
// bad or cannot be read, or the account may not write; not what followed from it.
func TestRefillFails(t *testing.T) {
	t.Parallel()
	r := newRig(t, "docker-compose", 0)
	r.addHost(t, "host-1")
	relay := r.behind(t, "host-1")
	e := r.opened(t, "refill")
	h, err := e.host("host-1")
	if err != nil {
		t.Fatal(err)
	}
	large := func() io.Reader {
		pr, pw := io.Pipe()
		t.Cleanup(func() { pr.Close() })
		go func() {
			w := tar.NewWriter(pw)
			err := w.WriteHeader(&tar.Header{Name: "large", Typeflag: tar.TypeReg, Mode: 0o644, Size: 1 << 30})
			if err == nil {
				_, err = io.CopyN(w, zeros{}, 1<<30)
			}
			pw.CloseWithError(errors.Join(err, w.Close()))
		}()
		return pr
	}
	root := t.TempDir()
	fill := func(r io.Reader) error { return e.refill(t.Context(), h, root, ".", "", nil, r) }
	if err := fill(&cutting{large(), 4 << 20, relay.Cut}); sandboxer.KindOf(err) != sandboxer.Unavailable || !errors.Is(err, sshrun.ErrLost) {
		t.Errorf("the host was lost: %v", err)
	}
	lost := sandboxer.E(sandboxer.Unavailable, nil, "the store is away")
	if err := fill(io.MultiReader(io.LimitReader(large(), 4<<20), failing{lost})); !errors.Is(err, lost) {
		t.Errorf("the archive cannot be read: %v", err)
	}
	if err := fill(strings.NewReader(strings.Repeat("no tar", 1000))); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("what is no archive: %v", err)
	}
	file := filepath.Join(root, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err = e.refill(t.Context(), h, root, "file", "/work/file", nil, large())
	if want := "/work/file is a file, not a directory"; sandboxer.KindOf(err) != sandboxer.Invalid || sandboxer.Message(err) != want {
		t.Errorf("a file: %v; want %q", err, want)
	}
}

// The error for an account that may not write says what to do about it.
func TestArchiveDenied(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("another account needs root")
	}
	r := newRig(t, "docker-compose", 0)
	s := r.host(t, "ordinary", sshtest.Options{Silent: true, Config: `ForceCommand exec setpriv --reuid=4321 --regid=4321 --clear-groups --bounding-set=-all --inh-caps=-all sh -c "$SSH_ORIGINAL_COMMAND"`})
	root := t.TempDir()
	for _, dir := range []string{s.Dir, filepath.Dir(s.Dir), root, filepath.Dir(root)} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	e := r.opened(t, "denied")
	h, err := e.host("ordinary")
	if err != nil {
		t.Fatal(err)
	}
	err = e.refill(t.Context(), h, root, "new", "", nil, zeros{})
	if sandboxer.KindOf(err) != sandboxer.Denied || !strings.Contains(sandboxer.HintOf(err), "as that account's user") ||
		sandboxer.Message(err) != "the account may not change a file in the workspace on host ordinary" {
		t.Errorf("refill: %v (%s)", err, sandboxer.HintOf(err))
	}
}

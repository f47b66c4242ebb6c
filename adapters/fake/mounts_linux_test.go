package fake_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestMounts: what is mounted is in the sandbox by every way into it, also in one that was made beforehand and at a target for which this
// machine has no directory; and nothing of it is outside of the sandbox.
func TestMounts(t *testing.T) {
	if !canMount(t) {
		t.Skip("nothing can be mounted here")
	}
	src := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(src, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("f", "outside")
	w := fake.NewWorld()
	defer w.Close()
	e := fake.New(w, fake.Config{Agent: self(t)})
	defer e.Close()
	const target = "/no-such-directory-of-this-machine/models"
	order := sandboxer.Spec{ID: "a", Generation: 1, Vouched: []string{sandboxer.RestrictedMounts}, Mounts: []sandboxer.Mount{{Source: src, Target: target}}}
	over := order
	over.Mounts = []sandboxer.Mount{{Source: src, Target: "/tmp"}}
	if _, err := e.Provision(t.Context(), over); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("Provision with a mount over the fake's directory: %v", err)
	}
	warm := order
	warm.Warm = true
	h, err := e.Provision(t.Context(), warm)
	if err != nil {
		t.Fatal(err)
	}
	other := order
	other.Mounts = []sandboxer.Mount{{Source: src, Target: target, ReadOnly: true}}
	if _, err := e.Claim(t.Context(), h, other); sandboxer.KindOf(err) != sandboxer.Conflict {
		t.Errorf("Claim with other mounts: %v", err)
	}
	if h, err = e.Claim(t.Context(), h, order); err != nil {
		t.Fatal(err)
	}
	exec := func(script string) string {
		t.Helper()
		var out bytes.Buffer
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Dir: target, Stdout: &out})
		if err != nil || x.Code != 0 {
			t.Fatalf("%s: %+v, %v", script, x, err)
		}
		return out.String()
	}
	if got := exec("cat f; printf inside >" + target + "/g"); got != "outside" {
		t.Errorf("a command reads %q", got)
	}
	for name, open := range map[string]func() (io.ReadCloser, error){
		"files": func() (io.ReadCloser, error) { return e.ReadFile(t.Context(), h, target+"/g") },
		"agent": func() (io.ReadCloser, error) { return e.Capabilities.ReadFile(t.Context(), h, target+"/g") },
	} {
		r, err := open()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if data, err := io.ReadAll(r); err != nil || string(data) != "inside" {
			t.Errorf("%s: %q, %v", name, data, err)
		}
		r.Close()
	}
	if _, err := os.Lstat(filepath.Dir(target)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("on this machine: %v", err)
	}
	o := w.Live()[0]
	if entries, err := os.ReadDir(filepath.Join(o.Dir, target)); err != nil || len(entries) > 0 {
		t.Errorf("outside of the sandbox its directory holds %v, %v", entries, err)
	}
	report, err := e.Teardown(t.Context(), h)
	if err != nil || !slices.Equal(report.Kept, []string{src + ", which was mounted"}) {
		t.Errorf("Teardown: %+v, %v", report, err)
	}
	if data, err := os.ReadFile(filepath.Join(src, "g")); err != nil || string(data) != "inside" {
		t.Errorf("the source: %q, %v", data, err)
	}
	if _, err := os.Stat(o.Dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
}

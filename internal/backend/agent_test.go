package backend_test

import (
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// TestWhatASandboxSaysOfProcesses: what cannot be is Failed, and never passed on.
func TestWhatASandboxSaysOfProcesses(t *testing.T) {
	start := func(f *full) error {
		_, err := backend.New("ext.test", f, backend.Options{}).StartProcess(t.Context(), handle, sandboxer.ProcessSpec{Args: []string{"true"}})
		return err
	}
	if err := start(&full{pid: -1}); sandboxer.KindOf(err) != sandboxer.Failed {
		t.Errorf("a process -1: %v", err)
	}
	for name, list := range map[string][]sandboxer.Process{
		"too many":            make([]sandboxer.Process, 100_001),
		"no pid":              {{Args: []string{"true"}}},
		"a command too large": {{PID: 1, Args: []string{strings.Repeat("x", 3<<20)}}},
	} {
		got, err := backend.New("ext.test", &full{processes: list}, backend.Options{}).ListProcesses(t.Context(), handle)
		if sandboxer.KindOf(err) != sandboxer.Failed || got != nil {
			t.Errorf("%s: %d processes, %v; want failed", name, len(got), err)
		}
	}
}

func TestWhatASandboxSaysOfChanges(t *testing.T) {
	good := sandboxer.FileChange{Path: "/dir/f", Op: sandboxer.FileWrite}
	with := func(change func(*sandboxer.FileChange)) sandboxer.FileChange {
		c := good
		change(&c)
		return c
	}
	watch := func(c sandboxer.FileChange) (n int, err error) {
		b := backend.New("ext.test", &full{changes: []sandboxer.FileChange{good, c, good}}, backend.Options{})
		seq, err := b.WatchFiles(t.Context(), handle, "/dir", true)
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range seq {
			if err != nil {
				return n, err
			}
			n++
		}
		return n, nil
	}
	if n, err := watch(good); n != 3 || err != nil {
		t.Fatalf("three good ones: %d, %v", n, err)
	}
	for name, c := range map[string]sandboxer.FileChange{
		"elsewhere":            with(func(c *sandboxer.FileChange) { c.Path = "/etc/passwd" }),
		"beside":               with(func(c *sandboxer.FileChange) { c.Path = "/directory/f" }),
		"relative":             with(func(c *sandboxer.FileChange) { c.Path = "dir/f" }),
		"with dots":            with(func(c *sandboxer.FileChange) { c.Path = "/dir/../etc/f" }),
		"endless":              with(func(c *sandboxer.FileChange) { c.Path = "/dir/" + strings.Repeat("x", 1<<16) }),
		"of an unknown kind":   with(func(c *sandboxer.FileChange) { c.Op = "vanish" }),
		"of two files at once": with(func(c *sandboxer.FileChange) { c.File = &sandboxer.FileInfo{Path: "/dir/g"} }),
		"of a negative size":   with(func(c *sandboxer.FileChange) { c.File = &sandboxer.FileInfo{Path: "/dir/f", Size: -1} }),
	} {
		if n, err := watch(c); n != 1 || sandboxer.KindOf(err) != sandboxer.Failed {
			t.Errorf("%s: %d changes, then %v; want one, then failed", name, n, err)
		}
	}
}

func TestWhatAnExtensionTells(t *testing.T) {
	for _, bad := range []string{"", "../x", "A", "x\n", strings.Repeat("x", 1<<16)} {
		b := backend.New("ext.test", &full{told: []string{"good", bad, "good"}}, backend.Options{})
		seq, err := b.Notify(t.Context(), "us")
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for id, err := range seq {
			if err == nil {
				ids = append(ids, id)
			} else if sandboxer.KindOf(err) != sandboxer.Invalid {
				t.Errorf("%.20q: %v", bad, err)
			}
		}
		if len(ids) != 1 || ids[0] != "good" {
			t.Errorf("%.20q is told, and %q taken", bad, ids)
		}
	}
}

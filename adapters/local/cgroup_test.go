//go:build linux

package local

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// A sandbox with only its group left is found by that. If groups cannot be listed, there may be one.
func TestGroupsUnread(t *testing.T) {
	dir := t.TempDir()
	groups := filepath.Join(t.TempDir(), "groups")
	e := &extension{env: sandboxer.Env{Dir: dir, Owner: "unread"}, cgroups: &cgroups{roots: map[string]string{"all": groups}}}
	if err := os.Mkdir(e.dir("run"), 0o700); err != nil {
		t.Fatal(err)
	}
	list := func() (names []string, err error) {
		for h, herr := range e.ListRunning(t.Context(), "unread") {
			if names, err = append(names, h.Ref), herr; err != nil {
				return nil, err
			}
		}
		return names, nil
	}
	if names, err := list(); err != nil || len(names) > 0 {
		t.Errorf("before there are groups: %q, %v", names, err)
	}
	if err := os.MkdirAll(filepath.Join(groups, boxName("left", 1)), 0o700); err != nil {
		t.Fatal(err)
	}
	if names, err := list(); err != nil || len(names) != 1 || names[0] != boxName("left", 1) {
		t.Errorf("of a group that is left: %q, %v", names, err)
	}
	if err := os.RemoveAll(groups); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(groups, nil, 0o600); err != nil { // root reads every directory
		t.Fatal(err)
	}
	if names, err := list(); err == nil || !strings.Contains(err.Error(), "control groups of sandboxes cannot be listed") {
		t.Errorf("of groups that cannot be listed: %q, %v", names, err)
	}
	if f, err := e.Discover(t.Context(), "left"); err == nil || sandboxer.KindOf(err) == sandboxer.NotFound {
		t.Errorf("Discover = %+v, %v", f, err)
	}
}

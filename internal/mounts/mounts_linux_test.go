package mounts

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestLinkedRoot: a sandbox that mounts a directory above a root, or above others' mounts, cannot lead any caller out by a
// link in their place; a link that leads elsewhere in the directory does not help either.
func TestLinkedRoot(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	outer, out := filepath.Join(dir, "s"), filepath.Join(dir, "etc")
	ro, deep := filepath.Join(outer, "ro"), filepath.Join(outer, "a/rw")
	for _, d := range []string{ro, deep, out, filepath.Join(outer, "else")} {
		if err := errors.Join(os.MkdirAll(filepath.Join(d, "sub"), 0o755), os.WriteFile(filepath.Join(d, "shadow"), nil, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	nested := Opener{Extension: "ext.test", Settings: Settings{Roots: []Root{{Path: ro, ReadOnly: true}, {Path: deep}, {Path: outer}}}}
	apart := Opener{Extension: "ext.test", Settings: Settings{Roots: []Root{{Path: ro}, {Path: deep}}}} // a profile mounts what they lie in
	none := Opener{Extension: "ext.test"}
	at := func(src string, readOnly bool) sandboxer.Spec {
		return sandboxer.Spec{Mounts: []sandboxer.Mount{{Source: src, Target: "/x", ReadOnly: readOnly}}}
	}
	vouched := func(src string, readOnly bool) sandboxer.Spec {
		s := at(src, readOnly)
		s.Vouched = []string{sandboxer.RestrictedMounts}
		return s
	}
	profiles := func(src string, readOnly bool) sandboxer.Spec {
		s := at(src, readOnly)
		s.Profile.Mounts = []sandboxer.Mount{{Source: outer}, {Source: ro}, {Source: deep}}
		return s
	}
	each := func(f func(name, root string, open func(src string, readOnly bool) error)) {
		for name, who := range map[string]struct {
			o    Opener
			spec func(string, bool) sandboxer.Spec
		}{"nested roots": {nested, at}, "a root in what a profile mounts": {apart, at}, "an administrator": {none, vouched}, "a profile": {none, profiles}} {
			for _, root := range []string{ro, deep} {
				f(name, root, func(src string, readOnly bool) error {
					sources, err := who.o.Open(who.spec(src, readOnly))
					Close(sources)
					return err
				})
			}
		}
	}
	all := func(root string) []string { return []string{root, root + "/shadow", root + "/sub"} }
	each(func(name, root string, open func(string, bool) error) {
		for _, src := range all(root) {
			if err := open(src, true); err != nil {
				t.Errorf("%s: %s: %v", name, src, err)
			}
		}
	})
	for _, moved := range []string{ro, deep, filepath.Dir(deep)} {
		for _, to := range []string{out, "../etc", "else", filepath.Join(outer, "else")} {
			if err := errors.Join(os.Rename(moved, moved+".was"), os.Symlink(to, moved)); err != nil {
				t.Fatal(err)
			}
			each(func(name, root string, open func(string, bool) error) {
				if root != moved && filepath.Dir(root) != moved {
					return
				}
				for _, src := range all(root) {
					for _, readOnly := range []bool{true, false} {
						if err := open(src, readOnly); sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(sandboxer.Message(err), "link") || !strings.Contains(sandboxer.HintOf(err), "directory that it leads to") {
							t.Errorf("%s: with %s -> %s, %s: %v (%s)", name, moved, to, src, err, sandboxer.HintOf(err))
						}
					}
				}
			})
			if err := errors.Join(os.Remove(moved), os.Rename(moved+".was", moved)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestIDMaps: of what is mounted, everybody inside has exactly one owner on this machine, and
// the other way round.
func TestIDMaps(t *testing.T) {
	const base = 0x7000_0000
	for _, c := range []struct{ owner, user uint32 }{{0, 0}, {0, 1000}, {1000, 0}, {1000, 1000}, {65534, 65535}, {IDShift, 0}, {IDShift, 5}, {IDShift + 7, 5}, {IDShift + 5, 7},
		{IDShift + IDCount - 1, 0}, {IDShift + IDCount, 0}, {IDShift - 1, IDCount - 1}, {IDShift + 4, 5}} {
		t.Run(fmt.Sprintf("%d as %d", c.owner, c.user), func(t *testing.T) {
			inside, there := map[uint32]uint32{}, map[uint32]uint32{}
			for _, m := range idMaps(c.owner, c.user, base) {
				for i := range uint32(m.Size) {
					in, on := uint32(m.HostID)-base+i, uint32(m.ContainerID)+i
					if _, ok := inside[in]; ok || in >= IDCount {
						t.Fatalf("%d inside is mapped twice, or is no ID of the sandbox", in)
					}
					if _, ok := there[on]; ok {
						t.Fatalf("%d on this machine is mapped twice", on)
					}
					inside[in], there[on] = on, in
				}
			}
			if inside[c.user] != c.owner || len(inside) != IDCount {
				t.Errorf("the user inside is %d; %d IDs are mapped", inside[c.user], len(inside))
			}
			for on := range there {
				if on != c.owner && (on < IDShift || on >= IDShift+IDCount) {
					t.Fatalf("somebody inside is %d on this machine", on)
				}
			}
			space, err := IDSpace(idMaps(c.owner, c.user, base), idMaps(c.user, c.owner%IDCount, base))
			if os.Geteuid() == 0 && err != nil {
				t.Error(err)
			} else if err == nil {
				space.Close()
			}
		})
	}
}

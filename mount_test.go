package sandboxer

import (
	"strings"
	"testing"
)

func TestMountWithin(t *testing.T) {
	for _, c := range []struct {
		m        Mount
		dir      string
		readOnly bool
		want     bool
	}{
		{Mount{Source: "/a/b"}, "/a", false, true}, {Mount{Source: "/a"}, "/a", false, true}, {Mount{Source: "/ab"}, "/a", false, false}, {Mount{Source: "/"}, "/a", false, false},
		{Mount{Source: "/a"}, "/", false, true}, {Mount{Source: "/a"}, "/a", true, false}, {Mount{Source: "/a", ReadOnly: true}, "/a", true, true}, {Mount{Source: "/a", ReadOnly: true}, "/a", false, true},
	} {
		if got := c.m.Within(c.dir, c.readOnly); got != c.want {
			t.Errorf("%+v within %s (read-only: %t) = %t", c.m, c.dir, c.readOnly, got)
		}
	}
}

// TestVouchesMounts: an operator stands for what a profile of this installation mounts, and for
// what an administrator asks for.
func TestVouchesMounts(t *testing.T) {
	prof := Profile{Mounts: []Mount{{Source: "/a", Target: "/x", ReadOnly: true}}}
	in, out := Mount{Source: "/a/b", Target: "/y", ReadOnly: true}, Mount{Source: "/b", Target: "/z"}
	for name, c := range map[string]struct {
		spec Spec
		want bool
	}{
		"none":             {Spec{Profile: Profile{Builtin: true}}, true},
		"the profile's":    {Spec{Profile: prof, Mounts: []Mount{prof.Mounts[0], in}}, true},
		"for writing":      {Spec{Profile: prof, Mounts: []Mount{{Source: "/a", Target: "/y"}}}, false},
		"another":          {Spec{Profile: prof, Mounts: []Mount{in, out}}, false},
		"an administrator": {Spec{Profile: prof, Mounts: []Mount{in, out}, Vouched: []string{RestrictedMounts}}, true},
		"a built-in one's": {Spec{Profile: Profile{Builtin: true, Mounts: prof.Mounts}, Mounts: []Mount{in}}, false},
	} {
		if got := c.spec.Vouches(RestrictedMounts); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestCheckMounts(t *testing.T) {
	ok := []Mount{{Source: "/a", Target: "/mnt/b/c"}, {Source: "/a", Target: "/mnt/b"}, {Source: "/x", Target: "/procs"}, {Source: "/x", Target: "/workspaces"}}
	if err := CheckMounts(ok, "/workspace"); err != nil {
		t.Error(err)
	}
	if err := CheckMounts([]Mount{{Source: "/a", Target: "/workspace"}}, ""); err != nil {
		t.Errorf("without a workspace: %v", err)
	}
	for target, want := range map[string]string{
		"/": "root", "x": "clean", "/x/": "clean", "/x/../y": "clean", "/x\x00": "clean", "/proc": "/proc", "/proc/self": "/proc", "/sys": "/sys", "/dev/shm": "/dev", "/.sandboxer": "/.sandboxer",
		"/home": "hide the workspace", "/home/w": "hide the workspace", "/home/w/x": "in the workspace", "/mnt/b": "already",
	} {
		err := CheckMounts(append(ok[:2:2], Mount{Source: "/a", Target: target}), "/home/w")
		if KindOf(err) != Invalid || !strings.Contains(Message(err), want) {
			t.Errorf("%q: %v; want %q", target, err, want)
		}
	}
	if err := CheckMounts(make([]Mount, MaxMounts+1), ""); KindOf(err) != Invalid || !strings.Contains(Message(err), "at most 16") {
		t.Errorf("too many: %v", err)
	}
}

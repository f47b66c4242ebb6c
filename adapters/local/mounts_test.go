//go:build linux

package local

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestMountsTry(t *testing.T) {
	e := openTest(t)
	ownIDs(t, e)
	src := t.TempDir()
	os.Chmod(src, 0o755)
	os.WriteFile(filepath.Join(src, "f"), []byte("host\n"), 0o600)
	file := filepath.Join(t.TempDir(), "one")
	os.WriteFile(file, []byte("one\n"), 0o644)
	h := up(t, e, sandboxer.Spec{Vouched: []string{"mounts"}, Mounts: []sandboxer.Mount{{Source: file, Target: "/etc/x/y/one"}, {Source: src, Target: "/data"}, {Source: src, Target: "/usr/local/ro", ReadOnly: true}, {Source: file, Target: "/data/sub/one"}}})
	t.Log(sh(t, e, h, "cat /data/f /etc/x/y/one; echo guest >/data/g; ls -lan /data /data/sub; cat /data/sub/one; touch /usr/local/ro/x; cat /usr/local/ro/f; echo more >>/data/sub/one; grep -v proc /proc/mounts; ls /.sandboxer/mounts/d1; true"))
	g, err := os.ReadFile(filepath.Join(src, "g"))
	t.Logf("%q %v", g, err)
	g, err = os.ReadFile(file)
	t.Logf("%q %v", g, err)
}

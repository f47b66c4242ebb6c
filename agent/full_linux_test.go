package agent

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// An upload to a full disk, or to an impossible place, fails with the same cause each time, whatever its size.
func TestUploadThatIsNotTaken(t *testing.T) {
	a := startAgent(t)
	full := a.dir + "/full"
	if err := os.Mkdir(full, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", full, "tmpfs", 0, "size=1m"); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { unix.Unmount(full, unix.MNT_DETACH) })
	for name, want := range map[string]struct {
		kind sandboxer.Kind
		msg  string
	}{
		full + "/f": {sandboxer.Exhausted, "no space left on device"},
		full:        {sandboxer.Invalid, "is a directory"},
	} {
		for i := range 40 {
			err := a.WriteFile(t.Context(), name, 0o644, zeros{})
			if sandboxer.KindOf(err) != want.kind || strings.Count(sandboxer.Message(err), want.msg) != 1 {
				t.Fatalf("%s, upload %d: %v", name, i, err)
			}
		}
	}
}

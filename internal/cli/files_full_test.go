package cli

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// A full disk has one kind, whatever finds it.
func TestTarOnAFullDisk(t *testing.T) {
	for said, kind := range map[string]sandboxer.Kind{
		"tar: a: Cannot write: No space left on device": sandboxer.Exhausted, "tar: write error: Disk quota exceeded": sandboxer.Exhausted, "tar: short read": sandboxer.Failed,
	} {
		if err := tarFailed("t", 2, said); sandboxer.KindOf(err) != kind {
			t.Errorf("%s: %v", said, err)
		}
	}
}

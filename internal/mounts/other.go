//go:build !linux

package mounts

import (
	"runtime"

	"github.com/sand-boxer/sandboxer"
)

// Mounts work only on Linux; Can says so.

// A Source is an opened source of a mount.
type Source struct {
	Mount sandboxer.Mount
	IsDir bool
}

var errOther = sandboxer.E(sandboxer.Unsupported, nil, "directories can be mounted only on Linux; this is %s", runtime.GOOS)

// Can refuses.
func Can(string) error { return errOther }

// Open refuses.
func (o *Opener) Open(spec sandboxer.Spec) ([]*Source, error) {
	if len(spec.Mounts) == 0 {
		return nil, nil
	}
	return nil, errOther
}

// Close does nothing.
func Close([]*Source) {}

// ID refuses.
func (s *Source) ID() (string, error) { return "", errOther }

// Inside finds nothing.
func (s *Source) Inside(string) (string, bool) { return "", false }

// Holds refuses.
func (s *Source) Holds(string, sandboxer.Mount, bool) error { return errOther }

// Try refuses.
func try([]*Source) error { return errOther }

// At returns no path.
func At(string, int) string { return "" }

// A Space is where an engine sees mounts.
type Space struct{}

// ErrApart says that an engine sees mounts elsewhere.
var ErrApart error = errOther

// Close does nothing.
func (*Space) Close() {}

// Show refuses.
func Show(string, []*Source, uint32, uint32, *Space) error { return errOther }

// Hide finds nothing.
func Hide(string, *Space) error { return nil }

// In finds nothing.
func (s *Source) In(int) (bool, error) { return false, errOther }

// Peer refuses.
func Peer(int) (*Space, error) { return nil, errOther }

//go:build !linux

package fake

import "github.com/sand-boxer/sandboxer/internal/mounts"

// mounted refuses; nothing is mounted but on Linux.
func (o *Object) mounted(mounts.Opener) error {
	if len(o.Spec.Mounts) == 0 {
		return nil
	}
	return mounts.Can("")
}

func (o *Object) unmount() {}

func (o Object) within(f func() error) error { return f() }

package manager

import (
	"context"

	"github.com/sand-boxer/sandboxer"
)

// slot waits for one of the extension's worker slots. An extension that is not
// configured any more has no limit.
func (m *Manager) slot(ctx context.Context, extension string) (release func(), err error) {
	e := m.extension(extension)
	if e == nil {
		return func() {}, nil
	}
	return takeSlot(ctx, e.workers)
}

// saveSlot is slot for work that needs snapshots, whose store may hang while teardowns go on.
func (m *Manager) saveSlot(ctx context.Context, extension string) (release func(), err error) {
	e := m.extension(extension)
	if e == nil {
		return func() {}, nil
	}
	return takeSlot(ctx, e.saves)
}

// dropSlot waits for a slot in which rec may be dropped. A drop that only needs the store of portable
// snapshots takes no slot of an extension.
func (m *Manager) dropSlot(ctx context.Context, rec *sandboxer.SnapshotRecord) (release func(), err error) {
	if !rec.Kind.Has(sandboxer.SnapshotNative) || m.extension(rec.Extension) == nil {
		return takeSlot(ctx, m.drops)
	}
	return m.saveSlot(ctx, rec.Extension)
}

func takeSlot(ctx context.Context, slots chan struct{}) (release func(), err error) {
	select {
	case slots <- struct{}{}:
		return func() { <-slots }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

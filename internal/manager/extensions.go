package manager

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// Extension is one configured extension, opened or not.
type Extension struct {
	Info    sandboxer.ExtensionInfo
	Backend *backend.Backend // nil when Info.Problem is set
	// Reopen, if set, is asked again for an extension without a Backend, with back-off,
	// until it has one: a disk that is full or an engine that is down when the broker
	// starts is not for ever. It must not be asked twice at a time.
	Reopen func(context.Context) Extension
}

// extension is an Extension with its bounds. It does not change: one that is opened later is
// another (reopen), with the same bounds.
type extension struct {
	Extension
	creates     chan struct{} // slots of concurrent provisions
	placements  chan struct{} // slots of those who ask for a place; taken also under a slot of creates, never before one
	workers     chan struct{} // slots of concurrent sweep actions
	saves       chan struct{} // slots of those that need snapshots, which teardowns do not wait for
	poolCreates chan struct{} // slots of provisions for pools
	demand      *demand
	survey      chan struct{} // the slot of the one survey in progress
	probed      *time.Time    // guarded by survey: when all it lists was last probed
	unlisted    *bool         // guarded by survey: its last listing failed
	surveyed    *atomic.Bool  // it was listed since the start
	surveys     *surveyLog    // guarded by survey
}

func newExtension(e Extension, opts Options) *extension {
	return &extension{
		Extension:   e,
		creates:     make(chan struct{}, opts.Creates),
		placements:  make(chan struct{}, opts.Creates),
		workers:     make(chan struct{}, opts.Workers),
		saves:       make(chan struct{}, opts.Workers),
		poolCreates: make(chan struct{}, max(1, runtime.NumCPU()/2)),
		demand:      new(demand),
		survey:      make(chan struct{}, 1),
		probed:      new(time.Time),
		unlisted:    new(bool),
		surveyed:    new(atomic.Bool),
		surveys:     new(surveyLog),
	}
}

// extensions returns all of them as they are now.
func (m *Manager) extensions() []*extension { return *m.exts.Load() }

func (m *Manager) extension(id string) *extension {
	for _, e := range m.extensions() {
		if e.Info.ID == id {
			return e
		}
	}
	return nil
}

func (m *Manager) extensionIDs() []string {
	var ids []string
	for _, e := range m.extensions() {
		ids = append(ids, e.Info.ID)
	}
	return ids
}

// backend returns the backend of the extension, or why there is none now.
func (m *Manager) backend(id string) (*backend.Backend, error) {
	e := m.extension(id)
	switch {
	case e == nil:
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "extension %q is not configured any more", id).
			WithHint("configure it again: its sandboxes cannot be used or removed without it")
	case e.Backend == nil:
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "extension %q cannot be used here: %s", id, e.Info.Problem)
	}
	return e.Backend, nil
}

// Extensions lists the extensions, also those that could not be opened.
func (m *Manager) Extensions(ctx context.Context) []sandboxer.ExtensionInfo {
	p, err := may(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil
	}
	var out []sandboxer.ExtensionInfo
	for _, e := range m.extensions() {
		info := e.Info
		if e.Backend != nil && p.Can(sandboxer.ScopeAdmin) {
			info.Notices = e.Backend.Notices(ctx)
		}
		out = append(out, info)
	}
	return out
}

// Probe asks the extension what it can take now; Free is -1 if it cannot tell.
// Unavailable says why it cannot be used.
func (m *Manager) Probe(ctx context.Context, id string) (sandboxer.HostCapacity, error) {
	if _, err := may(ctx, sandboxer.ScopeRead); err != nil {
		return sandboxer.HostCapacity{}, err
	}
	if m.extension(id) == nil && m.extension("ext."+id) != nil {
		id = "ext." + id
	}
	if m.extension(id) == nil {
		return sandboxer.HostCapacity{}, sandboxer.E(sandboxer.NotFound, nil, "there is no extension %q%s", id, didYouMean(id, m.extensionIDs()))
	}
	b, err := m.backend(id)
	if err != nil {
		return sandboxer.HostCapacity{}, err
	}
	if !b.Can(sandboxer.CanCapacity) {
		return sandboxer.HostCapacity{Free: -1}, nil
	}
	return b.Capacity(ctx, "")
}

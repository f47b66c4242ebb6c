package manager

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/spec"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// Extension is one configured extension, opened or not.
type Extension struct {
	Info    sandboxer.ExtensionInfo
	Backend *backend.Backend // nil when Info.Problem is set
	// Reopen, if set, opens an extension that has no Backend. The manager calls it again and again, with back-off, until it
	// succeeds: a full disk, or an engine that was down when the broker started, may recover. Two calls never overlap.
	Reopen func(context.Context) Extension
	// Secrets are the names of the operator's secrets that its file refers to.
	Secrets []string
}

// extension is an Extension with its bounds. It never changes: when it is opened later, a new value with the same bounds
// replaces it (reopen).
type extension struct {
	Extension
	m           *Manager
	creates     chan struct{} // slots of concurrent provisions
	placements  chan struct{} // slots for asking for a place; taken also under a slot of creates, never before one
	workers     chan struct{} // slots of concurrent sweep actions
	saves       chan struct{} // slots of those that need snapshots, which teardowns do not wait for
	poolCreates chan struct{} // slots of provisions for pools
	demand      *demand
	survey      chan struct{} // the slot of the one survey in progress
	probed      *time.Time    // guarded by survey: when all it lists was last probed
	unlisted    *bool         // guarded by survey: its last listing failed
	surveyed    *atomic.Bool  // it was listed since the start
	surveys     *surveyLog    // guarded by survey
	breaker     *breaker
	capacity    *capacity
}

func newExtension(m *Manager, e Extension) *extension {
	return &extension{
		Extension:   e,
		m:           m,
		creates:     make(chan struct{}, m.opts.Creates),
		placements:  make(chan struct{}, m.opts.Creates),
		workers:     make(chan struct{}, m.opts.Workers),
		saves:       make(chan struct{}, m.opts.Workers),
		poolCreates: make(chan struct{}, max(1, runtime.NumCPU()/2)),
		demand:      new(demand),
		survey:      make(chan struct{}, 1),
		probed:      new(time.Time),
		unlisted:    new(bool),
		surveyed:    new(atomic.Bool),
		surveys:     new(surveyLog),
		breaker:     new(breaker),
		capacity:    new(capacity),
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
		return nil, spec.NotConfigured(id)
	case e.Backend == nil:
		return nil, spec.NotUsable(id, e.Info.Problem)
	}
	return e.Backend, nil
}

// site is the installation as it is now, against which requests are checked.
func (m *Manager) site() *spec.Site {
	s := &spec.Site{Owner: m.opts.Owner, KeepsPortable: m.opts.SnapshotStore != nil, MAC: m.mac}
	if set := m.catalogue.Load(); set != nil {
		s.Profiles = set.profiles
	}
	for _, e := range m.extensions() {
		s.Extensions = append(s.Extensions, e.judged())
	}
	return s
}

// judged is the extension in the form in which requests are checked.
func (e *extension) judged() spec.Extension {
	if e.Backend == nil { // not an interface that holds nil
		return spec.Extension{Info: e.Info}
	}
	return spec.Extension{Info: e.Info, Backend: e.Backend}
}

// Extensions lists the extensions, also those that could not be opened.
func (m *Manager) Extensions(ctx context.Context) []sandboxer.ExtensionInfo {
	p, err := access.May(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil
	}
	var out []sandboxer.ExtensionInfo
	for _, e := range m.extensions() {
		info := e.Info
		info.FailingUntil = e.breaker.retryAt(time.Now())
		if e.Backend != nil && p.Can(sandboxer.ScopeAdmin) {
			info.Notices = e.Backend.Notices(ctx)
		}
		out = append(out, info)
	}
	return out
}

// Probe asks the extension how many sandboxes it can take now; Free is -1 if it does not know. Unavailable says why it cannot
// be used.
func (m *Manager) Probe(ctx context.Context, id string) (sandboxer.HostCapacity, error) {
	if _, err := access.May(ctx, sandboxer.ScopeRead); err != nil {
		return sandboxer.HostCapacity{}, err
	}
	if m.extension(id) == nil && m.extension("ext."+id) != nil {
		id = "ext." + id
	}
	if m.extension(id) == nil {
		return sandboxer.HostCapacity{}, sandboxer.E(sandboxer.NotFound, nil, "there is no extension %q%s", id, suggest.DidYouMean(id, m.extensionIDs())).
			WithHint("list them with: sandboxer extension ls")
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

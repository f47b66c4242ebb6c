// Package manager owns the life of a sandbox: it creates, changes and ends sandboxes, charges for them, and finishes the work
// after a crash. The edges (REST, CLI, …) only translate.
//
// A sandbox changes state in one function (move), by compare-and-swap in the store, together with its ledger entries and its
// event. A job does the work that a state needs outside the database (state.go of the root). At most one job works on a sandbox
// at a time, in the manager's own context, so that a client that hangs up leaves nothing behind. The sweep finds and finishes
// work that a crash or a failure left undone: there is no other recovery code.
//
// That core (create, destroy, move, sweep) is in Manager. State outside the database is in types with their own locks. While
// such a lock is held, they call neither each other, the store nor a backend, except where their comments say so: events.Log
// (the history, and callers that wait for changes), access.APIKeys, access.Visits, access.Bounds (limits, in total and at
// once), sinks.Sinks (deliveries of usage rows), snapshotPins, usage (how many callers use a sandbox, and since when it is
// idle), quarantine, orphanSightings and graceClock.
//
// Package spec decides what a request makes, package lifecycle what the sweep does next.
package manager

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/nofile"
	"github.com/sand-boxer/sandboxer/internal/sinks"
)

// Options configure a Manager. Owner and Key are required.
type Options struct {
	Owner      string           // installation name, stamped on outside objects
	Key        []byte           // 32 bytes; seals environments and secrets in the store (AES-256-GCM)
	Log        *slog.Logger     // nil discards
	SweepEvery time.Duration    // default 5s
	Grace      time.Duration    // default 1m: at start nothing without a record is removed before it; also minimum age of an orphan sighting
	Workers    int              // concurrent sweep actions per extension, default 8
	History    time.Duration    // how long ended sandboxes, with their events, are kept; 0 for ever, else at least a day
	Quotas     sandboxer.Quotas // of tenants; see SetQuotas
	Sinks      []sandboxer.Sink // receivers of usage rows; see SetSinks
	// UsageData is the public form of a usage row, in the events that sinks get; nil means the row itself.
	UsageData func(sandboxer.UsageRow) any

	WentBack      time.Time     // when the database was found to be older than it had been: the sweep is on hold; zero if it was not, or was accepted
	SnapshotStore SnapshotStore // keeps the portable form of snapshots; nil: there are only native ones
	Snapshots     int           // most snapshots of one tenant that are kept at a time, default 200
	Stop          time.Duration // how long Close waits for work that does not stop, default 1m
	Creates       int           // concurrent provisions per extension, and as many who ask it for a place, default 2*NumCPU but at least 8; others queue

	// Execs and Streams bound the commands and the other uses (files, ports, events) at
	// once. Without Total, the default is chosen from the file descriptors that the
	// process may have.
	Execs, Streams access.AtOnce

	// OOMKilled, if not nil, is called for every command and every sandbox (what) that a
	// memory limit killed. A sandbox that dies of its command counts as both.
	OOMKilled func(extension, what string)

	// Overrun, if not nil, is called with what a sandbox cost beyond its hold: no tenant pays it.
	Overrun func(extension string, beyond sandboxer.Credits)

	// Pooled, if not nil, is called for every create of a profile that keeps a pool: whether
	// it was answered from there.
	Pooled func(profile string, warm bool)

	meterEvery time.Duration // how often meters are read, 5m but in tests

	fail func(point) // crash tests: called before and after every commit and effect
}

// Manager is the one owner of sandboxes. Its methods take the principal from ctx (sandboxer.WithPrincipal) and are safe for
// concurrent use. Every error has a sandboxer.Kind: Unauthenticated without a principal, Denied without the scope, and NotFound
// for a sandbox of another tenant, as for one that does not exist.
type Manager struct {
	*access.APIKeys // CreateKey, Keys, RevokeKey, Authenticate, Bind
	*access.Bounds  // SetQuotas, AdmitRequest, Quotas

	store     sandboxer.Store
	catalogue atomic.Pointer[profileSet]
	exts      atomic.Pointer[[]*extension] // replaced as a whole where one is opened later
	poolsDue  chan struct{}                // one slot: a pool may need something
	opts      Options
	log       *slog.Logger
	seal      sealer
	secret    SecretReader
	started   time.Time

	ctx      context.Context // of all work; ends at Close
	stop     context.CancelCauseFunc
	sweepDue chan struct{}  // one slot: something may be due
	wg       sync.WaitGroup // every goroutine of the manager

	// Each of these has a lock of its own, and calls none of the others.
	events            *events.Log
	ports             *access.Visits
	pins              *snapshotPins
	usage             *usage
	clock             *graceClock
	hold              sweepHold
	quarantine        *quarantine
	orphanSightings   *orphanSightings
	sweepLocks        *sweepLocks
	rooms             *rooms
	sinks             *sinks.Sinks
	networkChanges    *keyedLock              // by sandbox ID: the caller between the database and the backend with a policy
	networkEnforced   *syncSet[generationKey] // those of a former process whose network policy is in force
	probing           *syncSet[string]        // sandbox IDs that are about to be probed, because of an answer to a user
	reportedDamage    *syncSet[generationKey] // damaged records that were reported
	reportedSnapshots *syncSet[string]        // quarantined snapshots that were reported

	// mu guards what follows, the fields of jobs and forks that say so, and the replacement of
	// exts. No method of the above, of the store or of a backend is called under it.
	mu          sync.Mutex
	closed      bool
	looping     bool
	jobs        map[string]*job               // by sandbox ID
	forks       map[[2]string]*forkInProgress // by tenant and idempotency key
	lastMetered time.Time                     // when meters were last read
	lastCleanup time.Time                     // when idempotency keys and old history were last removed

	settingProfiles sync.Mutex    // serialises SetProfiles
	drops           chan struct{} // slots of the sweep's drops that need the store of portable snapshots alone
}

var errClosing = sandboxer.E(sandboxer.Unavailable, nil, "the broker is stopping").
	WithHint("try again when it runs; after its next start it finishes the work that it began")

// withDefaults fills in what is left out.
func (opts Options) withDefaults() Options {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.SweepEvery <= 0 {
		opts.SweepEvery = 5 * time.Second
	}
	if opts.Grace <= 0 {
		opts.Grace = time.Minute
	}
	if opts.meterEvery <= 0 {
		opts.meterEvery = 5 * time.Minute
	}
	if opts.Workers <= 0 {
		opts.Workers = 8
	}
	if opts.Stop <= 0 {
		opts.Stop = time.Minute
	}
	if opts.Creates <= 0 {
		opts.Creates = max(8, 2*runtime.NumCPU())
	}
	if opts.Snapshots <= 0 {
		opts.Snapshots = 200
	}
	if opts.fail == nil {
		opts.fail = func(point) {}
	}
	if opts.Execs.Total == 0 {
		opts.Execs = access.DefaultExecs(nofile.Limit())
	}
	if opts.Streams.Total == 0 {
		opts.Streams = access.DefaultStreams(nofile.Limit())
	}
	if opts.SnapshotStore != nil {
		opts.SnapshotStore = boundedStore{opts.SnapshotStore}
	}
	return opts
}

// New checks profiles against the extensions they name and returns a manager. It serves requests immediately, but continues the
// work of an earlier process only after Start. It does not close the store or the backends. One Invalid error has all faults.
func New(store sandboxer.Store, profiles []sandboxer.Profile, exts []Extension, opts Options) (*Manager, error) {
	if err := sandboxer.CheckID(opts.Owner); err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the name of an installation: want 1 to 48 characters a-z, 0-9 and inner hyphens", opts.Owner)
	}
	seal, err := newSealer(opts.Key)
	if err != nil {
		return nil, err
	}
	if opts.History != 0 && opts.History < keepKeys {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "a history of %s is too short: want %s or more, because a repeated request gets the same answer for that time", opts.History, keepKeys)
	}
	opts = opts.withDefaults()
	now := time.Now()
	m := &Manager{
		store:             store,
		opts:              opts,
		log:               opts.Log,
		seal:              seal,
		secret:            seal.secrets(store),
		started:           now,
		sweepDue:          make(chan struct{}, 1),
		poolsDue:          make(chan struct{}, 1),
		events:            events.New(store),
		Bounds:            access.NewBounds(store, opts.Quotas, opts.Execs, opts.Streams),
		ports:             access.NewVisits(opts.Key),
		pins:              newSnapshotPins(),
		usage:             newUsage(),
		clock:             newGraceClock(opts.Grace, now),
		quarantine:        newQuarantine(),
		orphanSightings:   newOrphanSightings(),
		sweepLocks:        newSweepLocks(),
		networkChanges:    newKeyedLock(),
		networkEnforced:   newSyncSet[generationKey](),
		probing:           newSyncSet[string](),
		reportedDamage:    newSyncSet[generationKey](),
		reportedSnapshots: newSyncSet[string](),
		jobs:              map[string]*job{},
		forks:             map[[2]string]*forkInProgress{},
		rooms:             &rooms{lines: map[string]*line{}},
	}
	m.APIKeys = access.NewAPIKeys(store, func() { m.events.Notify("") })
	m.exts.Store(new([]*extension))
	m.sinks = m.newSinks()
	m.drops = make(chan struct{}, opts.Workers)
	for _, e := range exts {
		if m.extension(e.Info.ID) != nil {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "extension %q is configured twice", e.Info.ID)
		}
		all := append(m.extensions(), newExtension(m, e))
		m.exts.Store(&all)
	}
	m.catalogue.Store(&profileSet{})
	if err := m.SetProfiles(profiles); err != nil {
		return nil, err
	}
	if !opts.WentBack.IsZero() {
		m.hold.wentBack.Store(&opts.WentBack)
	}
	m.ctx, m.stop = context.WithCancelCause(context.Background())
	return m, nil
}

// Start reads the database, resumes what an earlier process left unfinished, and
// then sweeps until Close. ctx bounds only that first pass.
func (m *Manager) Start(ctx context.Context) error {
	m.mu.Lock()
	if m.closed || m.looping {
		m.mu.Unlock()
		return sandboxer.E(sandboxer.Conflict, nil, "the manager was started or closed before")
	}
	m.looping = true
	m.wg.Add(4)
	m.mu.Unlock()
	if err := m.newPass().sweepRecords(ctx, time.Time{}); err != nil {
		m.wg.Add(-4)
		return err
	}
	for _, e := range m.extensions() { // those that are opened later begin by themselves
		m.newPass().async(func() { e.listen() })
	}
	go func() {
		defer m.wg.Done()
		m.keepPools()
	}()
	go func() {
		defer m.wg.Done()
		m.reopenAll()
	}()
	go func() {
		defer m.wg.Done()
		m.sinks.Run(m.ctx)
	}()
	go func() {
		defer m.wg.Done()
		m.loop()
	}()
	return nil
}

// Close ends all work, waits until it has stopped, and leaves sandboxes as they are: the next manager on the same store
// finishes interrupted work. After [Options.Stop] it no longer waits for work that does not stop because a backend hangs.
func (m *Manager) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	m.mu.Unlock()
	m.stop(errClosing)
	stopped := make(chan struct{})
	go func() { m.wg.Wait(); close(stopped) }()
	late := time.NewTimer(m.opts.Stop)
	defer late.Stop()
	select {
	case <-stopped:
	case <-late.C:
		m.mu.Lock()
		busy := slices.Sorted(maps.Keys(m.jobs))
		m.mu.Unlock()
		m.log.Warn("work that does not stop is abandoned; the next start finishes it", "after", m.opts.Stop, "jobs", busy)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return m.flush(ctx)
}

// enter counts one more piece of work that Close waits for.
func (m *Manager) enter() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return errClosing
	}
	m.wg.Add(1)
	return nil
}

// untilClosed returns ctx that also ends, with its cause, when the manager closes.
func (m *Manager) untilClosed(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(m.ctx, func() { cancel(context.Cause(m.ctx)) })
	return ctx, func(cause error) { stop(); cancel(cause) }
}

// isKind is errors.Is, for readability at the call.
func isKind(err error, k sandboxer.Kind) bool { return errors.Is(err, k) }

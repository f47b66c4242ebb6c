package manager

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
)

// The crash tests run the broker as a process that kills itself at a point, against
// a world in another process, whose durable log is the judge. Then they start the
// broker again on what is left.

const (
	roleVar  = "SANDBOXER_TEST_ROLE" // "world" or "broker"
	scriptIn = "SANDBOXER_TEST_SCRIPT"
)

// A script is what one life of a broker does.
type script struct {
	Dir, Socket, Owner string
	Other              string // the socket of another world, if the scenario needs one
	Receiver           string // of usage rows, a URL, if the scenario needs one
	Log                string // of the world
	Kill               point  // die here; empty means not at all
	Scenario           string
	ID                 string
	Tries              int // first lives that need not come to where they should die
}

// An outcome is what a broker that was not killed reports.
type outcome struct {
	Sandbox    *sandboxer.Sandbox
	Records    int
	Violations []Violation
	Holds      []sandboxer.OpenHold
	Balance    sandboxer.Credits
	Cost       sandboxer.Credits // of all sandboxes
	Charged    sandboxer.Credits // by all usage rows
	Rows, Told []string          // IDs of usage rows, and of the events in the file of the sink
	Kept       []string          // snapshots that are not dropped, and what the store has
	Err        string
}

// play is main of the processes of the crash tests.
func play(role string) int {
	var s script
	err := json.Unmarshal([]byte(os.Getenv(scriptIn)), &s)
	if err == nil {
		switch role {
		case "world":
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
			defer stop()
			err = fake.Serve(ctx, fake.ServeOptions{Socket: s.Socket, Log: s.Log, Ready: func() { fmt.Println("ready") }})
		case "broker":
			var out outcome
			if out, err = s.live(); err != nil {
				out.Err = err.Error()
			}
			err = json.NewEncoder(os.Stdout).Encode(out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// A lateBiller does not know yet what a sandbox cost when it is asked for the first time after its end, however late that is;
// with silent set, not before known is set.
type lateBiller struct {
	*fake.Extension
	silent bool
	known  atomic.Bool
}

func (l *lateBiller) MeterActual(ctx context.Context, h sandboxer.Handle, d time.Duration) (sandboxer.Usage, error) {
	u, err := l.Extension.MeterActual(ctx, h, d)
	if u.Final && !l.known.Load() {
		u.Final = false
		l.known.Store(!l.silent)
	}
	return u, err
}

// live is one life of the broker.
func (s script) live() (out outcome, err error) {
	store, err := sqlstore.OpenSQLite(context.Background(), s.Dir, sqlstore.Options{Reserve: -1})
	if err != nil {
		return out, err
	}
	defer store.Close()
	ext, err := fake.Adapter.Open(context.Background(), sandboxer.Env{
		Extension: "ext.fake", Owner: s.Owner,
		Decode: func(v any) error {
			cfg := v.(*fake.Config)
			cfg.Server = s.Socket
			if s.Scenario == "settle" || s.Scenario == "correct" {
				cfg.Setup, cfg.PerHour, cfg.BillsAfter = 20_000, 120_000, 1
			}
			if s.Scenario == "move" || s.Scenario == "untouched" {
				cfg.Hosts = []string{"one", "two"}
			}
			if s.Scenario == "pause-archive" {
				cfg.Drop = []sandboxer.Capability{sandboxer.CanCheckpoint, sandboxer.CanSnapshot}
			}
			if s.Scenario == "snapshot-workspace" {
				cfg.Drop = []sandboxer.Capability{sandboxer.CanCheckpoint}
			}
			if s.Scenario == "pool-dead" {
				cfg.Faults = []fake.Fault{{Verb: fake.VerbClaim, Kind: sandboxer.Unavailable, Times: 1}}
			}
			return nil
		},
	})
	if err != nil {
		return out, err
	}
	var others []Extension
	if s.Scenario == "burst" || s.Scenario == "debt" {
		other, err := fake.Adapter.Open(context.Background(), sandboxer.Env{
			Extension: "ext.other", Owner: s.Owner, Decode: func(v any) error { v.(*fake.Config).Server = s.Other; return nil },
		})
		if err != nil {
			return out, err
		}
		b := backend.New("ext.other", other, backend.Options{})
		defer b.Close()
		others = []Extension{{Info: sandboxer.ExtensionInfo{ID: "ext.other", Inputs: fake.Adapter.Inputs}, Backend: b}}
	}
	biller := &lateBiller{silent: s.Scenario == "correct"}
	if s.Scenario == "settle" || s.Scenario == "correct" {
		biller.Extension = ext.(*fake.Extension)
		ext = biller
	}
	b := backend.New("ext.fake", ext, backend.Options{})
	defer b.Close()
	opts := Options{Owner: s.Owner, Key: testKey, SweepEvery: 20 * time.Millisecond, Grace: 200 * time.Millisecond}
	opts.SnapshotStore = dirStore{s.Dir}
	if s.Scenario == "sink" {
		opts.Sinks = []sandboxer.Sink{{Name: "books", File: filepath.Join(s.Dir, "usage.jsonl")}}
	}
	if s.Receiver != "" {
		opts.Sinks = []sandboxer.Sink{{Name: "books", URL: s.Receiver}}
	}
	if s.Scenario == "settle" {
		opts.meterEvery = 20 * time.Millisecond
	}
	opts.fail = func(p point) {
		if p == s.Kill && (!biller.silent || biller.known.Load()) {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	info := sandboxer.ExtensionInfo{ID: "ext.fake", Inputs: fake.Adapter.Inputs}
	profiles := testProfiles()
	if strings.HasPrefix(s.Scenario, "pool") {
		profiles[1].Pool.Size = 1
	}
	if s.Scenario == "answer" {
		profiles[1].Ready = sandboxer.ReadyCheck{Command: []string{"true"}}
	}
	if others != nil {
		profiles[1].Route = &sandboxer.Route{Policy: sandboxer.RouteBurst, Candidates: []sandboxer.Candidate{
			{Extension: "ext.fake"}, {Extension: "ext.other", Price: &sandboxer.Price{Setup: 30_000, PerHour: 60_000}},
		}}
		profiles[1].Extension = ""
	}
	m, err := New(store, profiles, append([]Extension{{Info: info, Backend: b}}, others...), opts)
	if err != nil {
		return out, err
	}
	defer m.Close()
	if err := m.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "once", ""); err != nil {
		return out, err
	}
	if err := m.Start(context.Background()); err != nil {
		return out, err
	}
	// The client: it repeats what it wants, with one idempotency key, until it has it.
	req := sandboxer.CreateRequest{Profile: "paid", Key: "k", Env: map[string]string{"S": "x"}}
	if s.ID != "" {
		req.Inputs = map[string]string{"sandbox_id": s.ID}
	}
	if strings.HasPrefix(s.Scenario, "pool") && !s.waitForPool(m, store) {
		return out, errors.New("the pool stays empty")
	}
	if s.Scenario != "orphan" {
		if out.Sandbox, err = m.Create(acme, req); err != nil {
			return out, err
		}
	}
	switch s.Scenario {
	case "create", "move", "untouched", "answer", "burst", "debt", "sink", "correct":
	case "settle":
		err := insist(func() error {
			sb, err := m.Get(acme, out.Sandbox.ID)
			if err == nil && sb.Usage.At.IsZero() {
				err = errors.New("its meter was not read")
			}
			return err
		})
		if err != nil {
			return out, err
		}
	case "pool", "pool-dead":
	case "extend":
		if _, err := m.Extend(acme, out.Sandbox.ID, Extend{Add: time.Hour}); err != nil && !isKind(err, sandboxer.Conflict) {
			return out, err
		}
	case "network":
		if _, err := m.SetNetwork(acme, out.Sandbox.ID, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}); err != nil {
			return out, err
		}
	case "snapshot", "snapshot-workspace":
		if err := s.snapshots(m, out.Sandbox.ID); err != nil {
			return out, err
		}
	case "pause", "relapse", "pause-archive":
		for _, depth := range []sandboxer.PauseDepth{sandboxer.PauseFiles, sandboxer.PauseFreeze} {
			err := insist(func() error {
				if _, err := m.Resume(acme, out.Sandbox.ID, ResumeRequest{}); err != nil {
					return err
				}
				if _, err := m.Pause(acme, out.Sandbox.ID, PauseRequest{Depth: depth}); err != nil {
					return err
				}
				_, err := m.Resume(acme, out.Sandbox.ID, ResumeRequest{})
				return err
			})
			if err != nil {
				return out, err
			}
		}
	case "orphan":
		err := insist(func() error {
			if _, err := m.Destroy(admin, "stray"); !isKind(err, sandboxer.NotFound) {
				return err
			}
			return nil
		})
		if err != nil {
			return out, err
		}
	}
	for out.Sandbox != nil {
		out.Sandbox, err = m.Destroy(acme, out.Sandbox.ID)
		if err == nil {
			break
		}
		if !isKind(err, sandboxer.Unavailable) {
			return out, err
		}
		time.Sleep(10 * time.Millisecond)
	}
	if s.Scenario == "settle" || s.Scenario == "correct" {
		err := insist(func() error {
			sb, err := m.Get(acme, out.Sandbox.ID)
			if err == nil && sb.Billing != "" {
				err = fmt.Errorf("its bill is %s", sb.Billing)
			}
			out.Sandbox = sb
			if err != nil && s.Scenario == "correct" {
				return errors.Join(err, biller.late(m, sb))
			}
			return err
		})
		if err != nil {
			return out, err
		}
	}
	if s.Scenario == "sink" {
		if out.Told, err = m.told(opts.Sinks[0]); err != nil {
			return out, err
		}
	}
	if strings.HasPrefix(s.Scenario, "pool") {
		if err := emptyPool(m, store, "paid"); err != nil {
			return out, err
		}
	}
	audit, err := m.Audit(admin)
	if err != nil {
		return out, err
	}
	out.Violations = audit.Violations
	items, _, err := store.Sandboxes(context.Background(), sandboxer.Query{})
	if err != nil {
		return out, err
	}
	for _, sb := range items {
		if sb.Tenant != "" { // those that nobody claimed do not count
			out.Records++
		}
		out.Cost += sb.Cost
	}
	err = m.usageRows(context.Background(), func(r sandboxer.UsageRow) {
		out.Charged += r.Charged
		out.Rows = append(out.Rows, r.Key)
	})
	if err != nil {
		return out, err
	}
	recs, _, err := store.Snapshots(context.Background(), sandboxer.SnapshotQuery{States: keptStates})
	if err != nil {
		return out, err
	}
	for _, rec := range recs {
		out.Kept = append(out.Kept, fmt.Sprint(rec.ID, " is ", rec.State))
	}
	files, err := opts.SnapshotStore.List(context.Background())
	if err != nil {
		return out, err
	}
	out.Kept = append(out.Kept, files...)
	if out.Holds, err = store.OpenHolds(context.Background()); err != nil {
		return out, err
	}
	out.Balance, err = store.Balance(context.Background(), sandboxer.DefaultTenant)
	return out, err
}

// late has the pending bill of sb be settled by the clock, as if an hour had passed, and its backend know then what it cost.
func (l *lateBiller) late(m *Manager, sb *sandboxer.Sandbox) error {
	l.known.Store(sb.Billing == sandboxer.BillingEstimated)
	if sb.Billing != sandboxer.BillingPending {
		return nil
	}
	return m.box(sb).update(admin, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
		sb.EndedAt = sb.EndedAt.Add(-billWithin)
		return nil
	})
}

// told waits until the sink has every row, and returns the IDs of the events in its file.
func (m *Manager) told(sink sandboxer.Sink) (ids []string, err error) {
	err = insist(func() error {
		st, err := m.Sink(admin, sink.Name)
		if err == nil && (st.Behind > 0 || st.Seq == 0 || st.DeadLetters > 0) {
			err = fmt.Errorf("the sink is %d rows behind: %s", st.Behind, st.Problem)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if sink.File == "" {
		return nil, nil
	}
	data, err := os.ReadFile(sink.File)
	for line := range strings.Lines(string(data)) {
		var e struct{ ID string }
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			return nil, err
		}
		ids = append(ids, e.ID)
	}
	return ids, err
}

// waitForPool waits until there is something to claim, or was.
func (s script) waitForPool(m *Manager, store sandboxer.Store) bool {
	p := m.poolOf("profile.paid")
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if _, err := store.IdempotencyKey(context.Background(), sandboxer.DefaultTenant, "k"); err == nil {
			return true
		}
		p.mu.Lock()
		n := len(p.ready)
		p.mu.Unlock()
		if n > 0 {
			return true
		}
	}
	return false
}

// emptyPool ends the pool and what is in it, as a broker without its profile does.
func emptyPool(m *Manager, store sandboxer.Store, profile string) error {
	p := m.poolOf("profile." + profile)
	p.filling.Lock() // for good
	return insist(func() error {
		if _, _, err := m.DrainPool(admin, profile); err != nil {
			return err
		}
		left, _, err := store.Sandboxes(context.Background(), sandboxer.Query{States: liveStates})
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%d sandboxes are left", len(left))
		}
		return err
	})
}

// snapshots saves the sandbox in both forms, restores a copy from each, drops the
// snapshot and destroys the copies, as a client does who repeats what fails.
func (s script) snapshots(m *Manager, id string) error {
	var ids []string
	err := insist(func() error {
		ids = nil
		for _, kind := range []sandboxer.SnapshotKind{sandboxer.SnapshotNative, sandboxer.SnapshotPortable} {
			sb, err := m.Restore(acme, "base", RestoreRequest{Key: string(kind), Kind: kind})
			if isKind(err, sandboxer.NotFound) {
				m.Snapshot(acme, id, SnapshotRequest{Name: "base", Kind: sandboxer.SnapshotBoth})
			}
			if err != nil {
				return err
			}
			ids = append(ids, sb.ID)
		}
		_, err := m.DropSnapshot(acme, "base")
		return err
	})
	for _, id := range ids {
		if err == nil {
			err = insist(func() error { _, err := m.Destroy(acme, id); return err })
		}
	}
	return err
}

// insist repeats f until it succeeds.
func insist(f func() error) error {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := f()
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// crashes says how each point is reached.
var crashes = map[point]string{
	pRecord: "create", pProvision: "create", pLeaveHost: "move", pPlaced: "move", pUntouched: "untouched", pHandle: "create", pReady: "create", pAnswer: "answer", pRunning: "create",
	pEnding: "create", pTeardown: "create", pEnded: "create", // what was created is destroyed
	pMetered: "settle", pReading: "settle", pSettled: "settle",
	pSent: "sink", pTaken: "sink",
	pRenew: "extend", pExtended: "extend",
	pNetworkRecord: "network", pNetworkSet: "network",
	pSaving: "snapshot", pSave: "snapshot", pArchive: "snapshot", pSealed: "snapshot",
	pDropping: "snapshot", pDrop: "snapshot", pDelete: "snapshot", pDropped: "snapshot",
	pRestore: "snapshot", pRestoreFrom: "snapshot", pUnarchive: "snapshot-workspace",
	pPausing: "pause", pFuse: "pause", pFreeze: "pause", pPaused: "pause", pResuming: "pause", pUnfreeze: "pause",
	pResumeFailed: "relapse",
	pRetry:        "retry",
	pOrphan:       "orphan",
	pPoolRecord:   "pool", pWarm: "pool", pClaimed: "pool", pClaim: "pool",
	pDiscard: "pool-dead", pReplaced: "pool-dead",
	pLeft: "burst", pDebt: "debt", pDebtPaid: "debt",
}

// TestCrash kills the broker before and after every commit and every effect, once
// and also again in the life that recovers, and wants the same end as without: the
// same answer to the client, at no time two objects, in the end none, all money
// accounted for.
func TestCrash(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a hundred processes")
	}
	dir := t.TempDir()
	world := script{Socket: filepath.Join(dir, "world"), Log: filepath.Join(dir, "log")}
	startWorld(t, world)
	remote := fake.Connect(world.Socket)
	t.Cleanup(remote.Close)
	other := script{Socket: filepath.Join(dir, "other"), Log: filepath.Join(dir, "otherlog")}
	startWorld(t, other)
	elsewhere := fake.Connect(other.Socket)
	t.Cleanup(elsewhere.Close)

	var n atomic.Int32
	var lives sync.Map // of an owner in the world: the test
	t.Run("points", func(t *testing.T) {
		for _, p := range points {
			for _, side := range []point{".before", ".after"} {
				for _, kills := range []int{1, 2} {
					t.Run(fmt.Sprint(p, side, "/kills=", kills), func(t *testing.T) {
						t.Parallel()
						scenario, ok := crashes[p]
						if !ok {
							t.Fatalf("no scenario reaches %s: add one to crashes", p)
						}
						id := fmt.Sprint("crash-", n.Add(1))
						s := script{Dir: t.TempDir(), Socket: world.Socket, Owner: id, Scenario: scenario, Kill: p + side}
						if strings.HasPrefix(scenario, "pool") {
							// A pooled sandbox has no owner for a moment when the sweep
							// looks at it; then the client gets a new one instead.
							s.Tries = 5
						}
						switch scenario {
						case "settle": // a regular reading of the meter may be the first after the end: then the bill is not pending
							s.Tries = 5
						case "retry":
							s.ID = id
							if err := remote.Inject(t.Context(), fake.Fault{Verb: fake.VerbTeardown, ID: id, Kind: sandboxer.Unavailable, Times: kills + 2}); err != nil {
								t.Fatal(err)
							}
						case "move", "untouched":
							s.ID = id
							f := fake.Fault{Verb: fake.VerbProvision, ID: id, Kind: sandboxer.Unavailable, Untouched: scenario == "untouched", Times: kills}
							if err := remote.Inject(t.Context(), f); err != nil {
								t.Fatal(err)
							}
						case "burst", "debt":
							s.ID, s.Other = id, other.Socket
							faults := []fake.Fault{{Verb: fake.VerbProvision, ID: id, Lost: true, Times: 1}}
							if scenario == "debt" {
								faults = append(faults, fake.Fault{Verb: fake.VerbTeardown, ID: id, Kind: sandboxer.Unavailable, Times: 2})
							}
							for _, f := range faults {
								if err := remote.Inject(t.Context(), f); err != nil {
									t.Fatal(err)
								}
							}
						case "relapse":
							s.ID = id
							if err := remote.Inject(t.Context(), fake.Fault{Verb: fake.VerbRestore, ID: id, Kind: sandboxer.Unavailable, Times: kills + 2}); err != nil {
								t.Fatal(err)
							}
						case "orphan":
							placeOrphan(t, world.Socket, id)
						}
						lives.Store(id, t.Name())
						crashAndRecover(t, s, kills)
					})
				}
			}
		}
	})
	// A pause whose files are in a portable snapshot goes by other points.
	t.Run("archive", func(t *testing.T) {
		for _, p := range []point{pPausing, pArchive, pSealed, pTeardown, pPaused, pResuming, pProvision, pHandle, pReady, pUnarchive, pRunning, pDelete, pDropped} {
			for _, side := range []point{".before", ".after"} {
				t.Run(fmt.Sprint(p, side), func(t *testing.T) {
					t.Parallel()
					id := fmt.Sprint("crash-", n.Add(1))
					lives.Store(id, t.Name())
					crashAndRecover(t, script{Dir: t.TempDir(), Socket: world.Socket, Owner: id, Scenario: "pause-archive", Kill: p + side}, 1)
				})
			}
		}
	})
	// A bill that is pending when the broker dies.
	t.Run("settle", func(t *testing.T) {
		for _, side := range []point{".before", ".after"} {
			t.Run(fmt.Sprint(pEnded, side), func(t *testing.T) {
				t.Parallel()
				id := fmt.Sprint("crash-", n.Add(1))
				lives.Store(id, t.Name())
				crashAndRecover(t, script{Dir: t.TempDir(), Socket: world.Socket, Owner: id, Scenario: "settle", Kill: pEnded + side}, 1)
			})
		}
	})
	// A bill that was settled by the clock is corrected when the broker dies: the row of the correction is written once, and
	// nothing is charged for it.
	t.Run("correct", func(t *testing.T) {
		for _, side := range []point{".before", ".after"} {
			for _, kills := range []int{1, 2} {
				t.Run(fmt.Sprint(pSettled, side, "/kills=", kills), func(t *testing.T) {
					t.Parallel()
					id := fmt.Sprint("crash-", n.Add(1))
					lives.Store(id, t.Name())
					crashAndRecover(t, script{Dir: t.TempDir(), Socket: world.Socket, Owner: id, Scenario: "correct", Kill: pSettled + side}, kills)
				})
			}
		}
	})
	// A receiver of usage rows that loses an answer, and is busy then, has each row in the end.
	t.Run("receiver", func(t *testing.T) {
		for _, p := range []point{pSent, pTaken} {
			for _, side := range []point{".before", ".after"} {
				t.Run(fmt.Sprint(p, side), func(t *testing.T) {
					t.Parallel()
					id := fmt.Sprint("crash-", n.Add(1))
					lives.Store(id, t.Name())
					v := &receiver{events: map[string]int{}}
					srv := httptest.NewServer(v)
					defer srv.Close()
					s := script{Dir: t.TempDir(), Socket: world.Socket, Owner: id, Scenario: "sink", Receiver: srv.URL, Kill: p + side}
					v.has(t, crashAndRecover(t, s, 1).Rows)
				})
			}
		}
	})
	// What the world saw of each, in one reading: its log is long by now.
	log, err := remote.Log(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	more, err := elsewhere.Log(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range fake.Audit(more, true) {
		t.Errorf("the other world: %s", f)
	}
	of := map[string][]fake.Entry{}
	for _, e := range log {
		of[e.Owner] = append(of[e.Owner], e)
	}
	lives.Range(func(id, test any) bool {
		if len(of[id.(string)]) == 0 {
			t.Errorf("%s: the world saw nothing of it", test)
		}
		for _, f := range fake.Audit(of[id.(string)], true) {
			t.Errorf("%s: world: %s", test, f)
		}
		return true
	})
}

// crashAndRecover lives until it was killed so many times, or cannot reach the point
// any more, and then once without a kill.
func crashAndRecover(t *testing.T, s script, kills int) outcome {
	t.Helper()
	for i := range kills {
		out, killed := s.start(t)
		for i == 0 && !killed && s.Tries > 0 {
			s.Tries--
			s.Dir = t.TempDir()
			out, killed = s.start(t)
		}
		if !killed {
			if i == 0 {
				t.Fatalf("it never came to %s: %+v", s.Kill, out)
			}
			break // what the first life did is past that point
		}
	}
	s.Kill = ""
	out, killed := s.start(t)
	if killed {
		t.Fatal("killed by somebody else")
	}
	if out.Err != "" {
		t.Errorf("the client got %s", out.Err)
	}
	if len(out.Violations) > 0 {
		t.Errorf("audit: %+v", out.Violations)
	}
	if len(out.Holds) > 0 {
		t.Errorf("on hold: %+v", out.Holds)
	}
	if s.Scenario == "orphan" {
		return out
	}
	records := 1
	if strings.HasPrefix(s.Scenario, "snapshot") {
		records = 3
	}
	if out.Records != records {
		t.Errorf("%d records for %d idempotency keys", out.Records, records)
	}
	if len(out.Kept) > 0 {
		t.Errorf("in the end there are still %q", out.Kept)
	}
	if out.Sandbox == nil || out.Sandbox.State != sandboxer.Terminated {
		t.Fatalf("in the end %+v", out.Sandbox)
	}
	if want := sandboxer.Credit - out.Cost; out.Balance != want || out.Sandbox.Cost < 20_000 {
		t.Errorf("cost %s, balance %s, want %s", out.Cost, out.Balance, want)
	}
	rows := records
	if s.Scenario == "correct" {
		rows++
	}
	if out.Charged != out.Cost || len(out.Rows) != rows {
		t.Errorf("%d usage rows charge %s for %d sandboxes that cost %s", len(out.Rows), out.Charged, records, out.Cost)
	}
	if s.Scenario == "sink" && s.Receiver == "" && !slices.Equal(out.Told, out.Rows) {
		t.Errorf("the sink has %q of %q", out.Told, out.Rows)
	}
	return out
}

// A receiver of usage rows counts each event. It loses its first answer, and is busy the next time.
type receiver struct {
	mu     sync.Mutex
	events map[string]int // how often each came
	calls  int
}

func (v *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var batch []struct{ ID string }
	err := json.NewDecoder(req.Body).Decode(&batch)
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, e := range batch {
		v.events[e.ID]++
	}
	switch v.calls++; {
	case err != nil:
		w.WriteHeader(http.StatusBadRequest)
	case v.calls == 1:
		panic(http.ErrAbortHandler)
	case v.calls == 2:
		w.WriteHeader(http.StatusServiceUnavailable)
	}
}

// has checks that the receiver has those rows, and no other.
func (v *receiver) has(t *testing.T, rows []string) {
	t.Helper()
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, key := range rows {
		if v.events[key] == 0 {
			t.Errorf("the receiver lacks row %s", key)
		}
	}
	if len(v.events) != len(rows) || v.calls < 3 {
		t.Errorf("after %d calls the receiver has %v of %q", v.calls, v.events, rows)
	}
}

// start runs one life and reports whether it was killed.
func (s script) start(t *testing.T) (out outcome, killed bool) {
	t.Helper()
	cmd := command(t, "broker", s)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
		return out, true
	}
	if err != nil {
		t.Fatalf("the broker failed: %v\n%s", err, stderr.Bytes())
	}
	if err := json.Unmarshal(stdout.Bytes(), &out); err != nil {
		t.Fatalf("the broker said %q: %v", stdout.Bytes(), err)
	}
	return out, false
}

func command(t *testing.T, role string, s script) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	j, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", roleVar+"="+role, scriptIn+"="+string(j))
	if role == "broker" { // which is killed
		cmd.Env = append(cmd.Env, "TMPDIR="+s.Dir)
	}
	return cmd
}

func startWorld(t *testing.T, s script) {
	t.Helper()
	cmd := command(t, "world", s)
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // t.Context has ended by now, and asked it to stop
		io.Copy(io.Discard, out)
		cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the world said %q, %v", line, err)
	}
}

func placeOrphan(t *testing.T, socket, owner string) {
	t.Helper()
	ext, err := fake.Adapter.Open(t.Context(), sandboxer.Env{
		Owner: owner, Decode: func(v any) error { v.(*fake.Config).Server = socket; return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	b := backend.New("ext.fake", ext, backend.Options{})
	defer b.Close()
	if _, err := b.Provision(t.Context(), sandboxer.Spec{ID: "stray", Generation: 1, Owner: owner, Place: "localhost"}); err != nil {
		t.Fatal(err)
	}
}

// TestSteps reads the source: a commit or an effect outside of step would be one that
// no crash test knows.
func TestSteps(t *testing.T) {
	effects := []string{"Provision", "WaitReady", "Teardown", "Renew", "RestoreFromSnapshot", "Snapshot", "DropSnapshot", "Pause", "Resume",
		"Archive", "Unarchive", "CreateSandbox", "move"}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	fset := token.NewFileSet()
	found := 0
	used := map[string]int{}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		var walk func(n ast.Node, inStep bool)
		walk = func(n ast.Node, inStep bool) {
			ast.Inspect(n, func(c ast.Node) bool {
				call, ok := c.(*ast.CallExpr)
				if !ok || c == n {
					return true
				}
				sel, ok := call.Fun.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				if sel.Sel.Name == "step" {
					if id, ok := call.Args[0].(*ast.Ident); ok {
						used[id.Name]++
					}
					walk(call, true)
					return false
				}
				if slices.Contains(effects, sel.Sel.Name) && !reads(sel) {
					found++
					if !inStep {
						t.Errorf("%s: %s is outside of step", fset.Position(call.Pos()), sel.Sel.Name)
					}
				}
				return true
			})
		}
		walk(f, false)
	}
	if found < 8 || len(used) != len(points) {
		t.Errorf("found %d effects and %d points in use, %d are listed: %v", found, len(used), len(points), used)
	}
}

// reads tells the store's way to look a snapshot up from the backend's way to make one.
func reads(sel *ast.SelectorExpr) bool {
	of, ok := sel.X.(*ast.SelectorExpr)
	return ok && of.Sel.Name == "store" && sel.Sel.Name == "Snapshot"
}

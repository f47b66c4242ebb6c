package manager

import (
	"flag"
	"fmt"
	"maps"
	"path/filepath"
	"runtime/debug"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// A model is what a caller must be able to believe, whatever the backend does.
type model struct {
	*rig
	live    map[string]*believed // by ID
	keys    map[string]string    // what was made under an idempotency key: "id/generation"
	ends    map[string]int       // the last generation of an ID that has ended for certain
	faulty  bool                 // a fault may be waiting for its call
	granted sandboxer.Credits
	calm    time.Time              // since when the backend does what it is told; zero: it does not
	missing map[stranded]time.Time // records whose object is gone, since when that was noticed
	made    []string               // sandboxes that live, and whose IDs the broker chose
	saved   []string               // snapshots
	grants  int
	lied    bool    // a backend may have said that it removed what it did not
	deaths  *deaths // nil: no life ends in the middle of something
}

// stranded is a state of a sandbox that needs an object, and has none.
type stranded struct {
	generationKey
	object int
	state  sandboxer.State
}

// endOf bounds how long a state may outlive its object where the backend does what is asked:
// two periods, their probes, and a teardown that began to hang before, between two readings of the meter.
const endOf = 2*30*time.Second + 3*10*time.Second + readWithin + time.Minute

// believed is a living sandbox.
type believed struct {
	profile    string
	generation int
	expires    time.Time
	state      sandboxer.State
}

// TestModel does random things in random order, over restarts and faults, and
// compares what happens with the model.
func TestModel(t *testing.T) {
	setRapid(t, "checks", "20") // -rapid.checks=1000 for a night
	checkModel(t, nil)
}

// setRapid sets a flag of rapid for the time of a test, unless it was given.
func setRapid(t *testing.T, name, value string) {
	f := flag.Lookup("rapid." + name)
	if was := f.Value.String(); was == f.DefValue {
		f.Value.Set(value)
		t.Cleanup(func() { f.Value.Set(was) })
	}
}

func checkModel(t *testing.T, d *deaths) {
	rapid.Check(t, func(rt *rapid.T) {
		var failed any
		synctest.Test(t, func(t *testing.T) {
			defer func() { // rapid wants its panics in its own goroutine
				failed = recover()
				if err, ok := failed.(error); ok {
					failed = fmt.Sprintf("%v\n%s", err, debug.Stack())
				}
			}()
			playModel(t, rt, d)
		})
		if fmt.Sprintf("%T", failed) == "rapid.invalidData" {
			panic(failed) // no failure: rapid tells them apart by the line
		}
		if failed != nil {
			panic(failed)
		}
	})
}

func playModel(t *testing.T, rt *rapid.T, d *deaths) {
	meter := rapid.SampledFrom([]sandboxer.Credits{60_000, 240_000}).Draw(rt, "meter")
	bills := rapid.SampledFrom([]time.Duration{0, 1, 20 * time.Minute, 90 * time.Minute}).Draw(rt, "bills")
	other := fake.NewWorld()
	defer other.Close()
	m := &model{
		rig: newRig(t, func(s *setup) {
			quiet(s)
			s.other = other
			s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.burst", TTL: time.Hour, MaxTTL: 2 * time.Hour,
				Route: &sandboxer.Route{Policy: sandboxer.RouteBurst, Candidates: []sandboxer.Candidate{{Extension: "ext.fake"}, {Extension: "ext.other"}}}})
			s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.pooled", Extension: "ext.fake", TTL: time.Hour, MaxTTL: 2 * time.Hour,
				Pool: sandboxer.Pool{Size: 1}, Ready: sandboxer.ReadyCheck{Command: []string{"true"}}})
			s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.far", Extension: "ext.other", TTL: time.Hour, MaxTTL: 2 * time.Hour})
			for i := range s.profiles {
				s.profiles[i].MaxPaused, s.profiles[i].Network.Mode = time.Hour, sandboxer.NetworkPublic
			}
			s.profiles[1].OnCost = sandboxer.CostExtend
			s.opts.SweepEvery = 30 * time.Second
			s.opts.SnapshotStore = dirStore{s.dir}
			s.opts.Sinks = []sandboxer.Sink{{Name: "books", File: filepath.Join(s.dir, "usage.jsonl")}}
			s.opts.fail = d.pass
			s.fake.Hosts = []string{"left", "right"}
			s.fake.Setup, s.fake.PerHour, s.fake.MeterPerHour, s.fake.BillsAfter = 20_000, 120_000, meter, bills
			s.backend = backend.Options{Provision: time.Minute, Ready: time.Minute, Teardown: time.Minute, Save: time.Minute, Short: 10 * time.Second}
		}),
		live: map[string]*believed{}, keys: map[string]string{}, ends: map[string]int{},
		granted: sandboxer.Credit, calm: time.Now(), missing: map[stranded]time.Time{}, deaths: d,
	}
	if err := m.Grant(admin, sandboxer.DefaultTenant, m.granted, "start", ""); err != nil {
		rt.Fatal(err)
	}
	actions := map[string]func(*rapid.T){
		"create":     m.doCreate,
		"destroy":    m.doDestroy,
		"extend":     m.doExtend,
		"wait":       m.doWait,
		"pause":      m.doPause,
		"resume":     m.doResume,
		"snapshot":   m.doSnapshot,
		"restore":    m.doRestore,
		"drop":       m.doDrop,
		"claim":      m.doClaim,
		"network":    m.doNetwork,
		"grant":      m.doGrant,
		"stray":      m.doStray,
		"unlucky":    m.doUnlucky,
		"unluckier":  m.doUnlucky, // drawn as often as two
		"unluckiest": m.doUnlucky,
		"restart":    func(*rapid.T) { m.restart() },
		"fault":      m.doFault,
		"die":        m.doDie,
		"reach":      m.doReach,
		"":           m.check,
	}
	if rapid.Bool().Draw(rt, "peaceful") { // what faults excuse is seen in what goes without
		for _, a := range []string{"fault", "unlucky", "unluckier", "unluckiest", "die", "reach"} {
			delete(actions, a)
		}
	}
	if d != nil {
		m.dieIn(rt, actions)
	}
	rt.Repeat(actions)
	m.end(rt)
}

var chosen = []string{"one", "two"} // IDs that the caller chooses

func chosenID(t *rapid.T) string { return rapid.SampledFrom(chosen).Draw(t, "id") }

func (m *model) someID(t *rapid.T) string {
	living := slices.Sorted(maps.Keys(m.live))
	return rapid.SampledFrom(slices.Concat(chosen, m.made, living, living)).Draw(t, "id") // more often one that lives
}

// settle lets everything in flight come to rest and expiries fall due.
func (m *model) settle() {
	synctest.Wait()
	for id, b := range m.live {
		sb, err := m.store.SandboxGeneration(admin, id, b.generation)
		overspent := err == nil && sb.Reason == sandboxer.ReasonNoCredit && lifecycle.IsOverspent(sb)
		if overspent || !time.Now().Before(b.expires) {
			delete(m.live, id)
		}
	}
}

func (m *model) doCreate(t *rapid.T) {
	m.settle()
	id := chosenID(t)
	req := sandboxer.CreateRequest{
		Profile: rapid.SampledFrom([]string{"paid", "test", "burst", "far"}).Draw(t, "profile"),
		TTL:     rapid.SampledFrom([]time.Duration{time.Minute, time.Hour}).Draw(t, "ttl"),
		Inputs:  map[string]string{"sandbox_id": id},
	}
	if rapid.Bool().Draw(t, "keyed") {
		req.Key = fmt.Sprint(id, req.Profile, req.TTL) // one body for one key
	}
	open := m.learnKey(t, req.Key)
	sb, err := m.Create(acme, req)
	if m.died(t, id) {
		return
	}
	if open {
		m.learn(t, id)
		return
	}
	was, known := m.keys[req.Key]
	b := m.live[id]
	switch {
	case err != nil && m.faulty && (!isKind(err, sandboxer.Conflict) || slices.Contains([]string{errTerminating.Msg, errEnded.Msg}, sandboxer.Message(err))):
		m.look(t, id) // whatever it was, the end of the test adds up
		return
	case known:
		if err != nil || fmt.Sprint(sb.ID, "/", sb.Generation) != was {
			t.Fatalf("key %s gave %v, %v; before it gave %s", req.Key, sb, err, was)
		}
	case b != nil && b.profile != "profile."+req.Profile:
		if sandboxer.KindOf(err) != sandboxer.Conflict {
			t.Fatalf("%s belongs to %+v, and yet create gave %v, %v", id, b, sb, err)
		}
	case b != nil && (isKind(err, sandboxer.Invalid) || isKind(err, sandboxer.NoCredit)): // it cannot live so long
	case b != nil:
		if err != nil || sb.Generation != b.generation || sb.State != sandboxer.Running { // one that was paused is resumed
			t.Fatalf("%s lives (%+v), and yet create gave %v, %v", id, b, sb, err)
		}
		m.was(id, sb) // it may live longer now
	case err != nil && !isKind(err, sandboxer.NoCredit):
		// A fault may have kept one alive past its time, or hidden that it came to be.
		old, gerr := m.Get(acme, id)
		if !m.faulty || gerr != nil || !old.State.Live() || old.Profile == "profile."+req.Profile && old.State != sandboxer.Pausing {
			t.Fatalf("create of %s: %v", id, err)
		}
		m.believe(old)
	case err == nil:
		found := m.faulty && (sb.State == sandboxer.Paused || sb.State == sandboxer.Pausing) // one of which a failure had told us nothing
		if sb.Generation <= m.ends[id] || sb.State != sandboxer.Running && !found {
			t.Fatalf("%s is %s, generation %d after %d", id, sb.State, sb.Generation, m.ends[id])
		}
		m.believe(sb)
	}
	if req.Key != "" && err == nil {
		m.keys[req.Key] = fmt.Sprint(sb.ID, "/", sb.Generation)
	}
}

func (m *model) doDestroy(t *rapid.T) {
	m.settle()
	id := m.someID(t)
	sb, err := m.Destroy(acme, id)
	if m.died(t, id) {
		return
	}
	switch {
	case isKind(err, sandboxer.NotFound) && m.live[id] == nil && m.ends[id] == 0:
		return
	case err != nil && !m.faulty:
		t.Fatalf("destroy of %s: %v", id, err)
	case err == nil && sb.State != sandboxer.Terminated, err != nil && (sb == nil || sb.State != sandboxer.Terminating):
		t.Fatalf("destroy of %s gave %+v, %v", id, sb, err)
	}
	delete(m.live, id)
	if err == nil {
		m.ends[id] = sb.Generation
	}
}

func (m *model) doExtend(t *rapid.T) {
	m.settle()
	id := m.someID(t)
	sb, err := m.Extend(acme, id, Extend{Add: time.Duration(rapid.IntRange(1, 90).Draw(t, "minutes")) * time.Minute})
	if m.died(t, id) {
		return
	}
	b := m.live[id]
	switch {
	case b == nil && err == nil && !m.faulty:
		t.Fatalf("%s does not live, and was extended: %+v", id, sb)
	case err == nil && b != nil:
		b.expires = sb.ExpiresAt
	case err == nil: // it outlived its time because a fault held up what would have ended it
		m.believe(sb)
	case err != nil && !m.faulty && b != nil && !slices.Contains([]sandboxer.Kind{sandboxer.NoCredit, sandboxer.Invalid}, sandboxer.KindOf(err)):
		t.Fatalf("extend of %s: %v", id, err)
	}
}

// objects are those of both worlds. The other one does what it is told.
func (m *model) objects() []fake.Object { return append(m.world.Live(), m.setup.other.Live()...) }

// believe assumes that sb lives on unchanged, unless it is on its way to another state, or its
// object died without being noticed yet.
func (m *model) believe(sb *sandboxer.Sandbox) {
	stands := slices.ContainsFunc(m.objects(), func(o fake.Object) bool {
		return o.Spec.ID == sb.ID && o.Spec.Generation == lifecycle.ObjectGeneration(sb)
	})
	if sb.State == sandboxer.Running && stands || sb.State == sandboxer.Paused && (stands || !lifecycle.HasReadyObject(sb)) {
		m.live[sb.ID] = &believed{sb.Profile, sb.Generation, sb.ExpiresAt, sb.State}
	}
}

// was takes over what a call said of a sandbox, if that is one that is believed to live.
func (m *model) was(id string, sb *sandboxer.Sandbox) {
	if b := m.live[id]; b != nil && b.generation == sb.Generation {
		b.state, b.expires = sb.State, sb.ExpiresAt
	}
}

func (m *model) doPause(t *rapid.T) {
	m.settle()
	id := m.someID(t)
	depth := rapid.SampledFrom([]sandboxer.PauseDepth{"", sandboxer.PauseFreeze, sandboxer.PauseFiles}).Draw(t, "depth")
	sb, err := m.Pause(acme, id, PauseRequest{Depth: depth})
	if m.died(t, id) {
		return
	}
	b := m.live[id]
	switch {
	case err == nil:
		if sb.State != sandboxer.Paused || b == nil && !m.faulty {
			t.Fatalf("pause of %s gave %+v; believed %+v", id, sb, b)
		}
		m.was(id, sb)
	case m.faulty: // it runs on, is being paused still, or is lost
		m.look(t, id)
	case b != nil && (b.state == sandboxer.Running || depth == "") && !isKind(err, sandboxer.Unsupported): // ext.other freezes nothing
		t.Fatalf("pause of %s: %v", id, err)
	}
}

func (m *model) doResume(t *rapid.T) {
	m.settle()
	id := m.someID(t)
	sb, err := m.Resume(acme, id, ResumeRequest{})
	if m.died(t, id) {
		return
	}
	b := m.live[id]
	switch {
	case err == nil:
		if sb.State != sandboxer.Running || b == nil && !m.faulty {
			t.Fatalf("resume of %s gave %+v; believed %+v", id, sb, b)
		}
		m.was(id, sb)
	case m.faulty:
		m.look(t, id)
	case b != nil && !isKind(err, sandboxer.Invalid) && !isKind(err, sandboxer.NoCredit):
		t.Fatalf("resume of %s: %v", id, err)
	}
}

// look believes what the record says, after a fault has made it hard to know.
func (m *model) look(t *rapid.T, id string) {
	b := m.live[id]
	if b == nil {
		return
	}
	if m.settle(); m.died(t, id) {
		return
	}
	sb, err := m.store.SandboxGeneration(admin, id, b.generation)
	if err != nil {
		t.Fatal(err)
	}
	switch sb.State {
	case sandboxer.Running, sandboxer.Paused:
		m.was(id, sb)
	default: // pausing, with a retry; or ended
		delete(m.live, id)
	}
}

func (m *model) doSnapshot(t *rapid.T) {
	m.settle()
	id := m.someID(t)
	kind := rapid.SampledFrom([]sandboxer.SnapshotKind{"", sandboxer.SnapshotPortable, sandboxer.SnapshotBoth}).Draw(t, "kind")
	rec, err := m.Snapshot(acme, id, SnapshotRequest{TTL: time.Hour, Kind: kind})
	if m.died(t, id) {
		return
	}
	b := m.live[id]
	if err == nil {
		m.saved = append(m.saved, rec.ID)
	}
	switch {
	case err == nil && (b == nil && !m.faulty || rec.State != sandboxer.SnapshotSealed):
		t.Fatalf("snapshot of %s gave %+v; believed %+v", id, rec, b)
	case err != nil && !m.faulty && b != nil && b.state == sandboxer.Running && !isKind(err, sandboxer.Unsupported): // ext.other has none of its own
		t.Fatalf("snapshot of %s: %v", id, err)
	}
}

func (m *model) doWait(t *rapid.T) {
	time.Sleep(time.Duration(rapid.IntRange(1, 4000).Draw(t, "seconds")) * time.Second)
	m.settle()
}

// checkNoneStranded: no state outlives an object that is gone where the backend does what is asked.
func (m *model) checkNoneStranded(t *rapid.T) {
	there := map[generationKey]bool{}
	for _, o := range m.objects() {
		there[generationKey{o.Spec.ID, o.Spec.Generation}] = true
	}
	missing := map[stranded]time.Time{}
	err := m.records(admin, sandboxer.Query{States: liveStates}, func(sb *sandboxer.Sandbox) {
		if sb.State == sandboxer.Paused && !lifecycle.HasReadyObject(sb) || there[generationKey{sb.ID, lifecycle.ObjectGeneration(sb)}] {
			return
		}
		s := stranded{generationKey{sb.ID, sb.Generation}, lifecycle.ObjectGeneration(sb), sb.State}
		since, ok := m.missing[s]
		if !ok || m.calm.IsZero() {
			since = time.Now()
		}
		missing[s] = since
		if time.Since(since) > endOf {
			t.Fatalf("%+v is %s since %s, and its object is gone", sb, sb.State, since)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	m.missing = missing
}

// check holds after every step: the database is sound at every instant, and who is
// believed to live does.
func (m *model) check(t *rapid.T) {
	m.settle()
	a := &auditing{m: m.Manager}
	for _, audit := range []error{a.auditHistory(admin), a.auditLedger(admin)} {
		if audit != nil {
			t.Fatal(audit)
		}
	}
	if len(a.Violations) > 0 {
		t.Fatalf("%+v", a.Violations)
	}
	m.checkNoneStranded(t)
	for id, b := range m.live {
		sb, err := m.store.SandboxGeneration(admin, id, b.generation)
		if err != nil || sb.State != b.state {
			t.Fatalf("%s/%d is %v, %v; it was promised %s until %s", id, b.generation, sb, err, b.state, b.expires)
		}
	}
}

func (m *model) sound(t *rapid.T) {
	if a, err := m.Audit(admin); err != nil || len(a.Violations) > 0 {
		t.Fatalf("%+v, %v", a, err)
	}
}

// end makes peace with the world and adds everything up.
func (m *model) end(t *rapid.T) {
	m.world.Forgive()
	m.bringBack()
	m.faulty = false
	time.Sleep(61 * time.Minute) // retries, orphans, snapshots
	m.settle()
	for _, id := range append(slices.Clip(chosen), m.made...) {
		if _, err := m.Destroy(acme, id); err != nil && !isKind(err, sandboxer.NotFound) {
			t.Fatalf("destroy of %s: %v", id, err)
		}
	}
	m.sound(t)
	time.Sleep(62 * time.Minute) // bills that are pending
	m.settle()
	m.sound(t)
	if err := emptyPool(m.Manager, m.store, "pooled"); err != nil {
		t.Fatal(err)
	}
	m.zeros(t)
	m.told(t)
	for _, w := range []*fake.World{m.world, m.setup.other} {
		if faults := m.faults(w); len(faults) > 0 {
			t.Fatalf("world: %q", faults)
		}
	}
	if left, err := m.opts.SnapshotStore.List(admin); err != nil || len(left)+len(m.world.Snapshots()) > 0 {
		t.Fatalf("snapshots are left: %q, %q, %v", m.world.Snapshots(), left, err)
	}
	holds, err := m.store.OpenHolds(admin)
	if err != nil || len(holds) > 0 {
		t.Fatalf("on hold: %+v, %v", holds, err)
	}
	var cost sandboxer.Credits
	if err := m.records(admin, sandboxer.Query{}, func(sb *sandboxer.Sandbox) { cost += sb.Cost }); err != nil {
		t.Fatal(err)
	}
	if left, err := m.Balance(admin, sandboxer.DefaultTenant); err != nil || left != m.granted-cost {
		t.Fatalf("%s left of %s after %s, %v", left, m.granted, cost, err)
	}
}

package manager

import (
	"flag"
	"fmt"
	"maps"
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
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue { // -rapid.checks=1000 for a night
		f.Value.Set("20")
	}
	rapid.Check(t, func(rt *rapid.T) {
		var failed any
		synctest.Test(t, func(t *testing.T) {
			defer func() { failed = recover() }() // rapid wants its panics in its own goroutine
			playModel(t, rt)
		})
		if failed != nil {
			panic(failed)
		}
	})
}

func playModel(t *testing.T, rt *rapid.T) {
	meter := rapid.SampledFrom([]sandboxer.Credits{60_000, 240_000}).Draw(rt, "meter")
	bills := rapid.SampledFrom([]time.Duration{0, 1, 20 * time.Minute, 2 * time.Hour}).Draw(rt, "bills")
	other := fake.NewWorld()
	defer other.Close()
	m := &model{
		rig: newRig(t, func(s *setup) {
			quiet(s)
			s.other = other
			s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.burst", TTL: time.Hour, MaxTTL: 2 * time.Hour, MaxPaused: time.Hour,
				Route: &sandboxer.Route{Policy: sandboxer.RouteBurst, Candidates: []sandboxer.Candidate{{Extension: "ext.fake"}, {Extension: "ext.other"}}}})
			s.profiles[0].MaxPaused, s.profiles[1].MaxPaused = time.Hour, time.Hour
			s.profiles[1].OnCost = sandboxer.CostExtend
			s.opts.SweepEvery = 30 * time.Second
			s.fake.Hosts = []string{"left", "right"}
			s.fake.Setup, s.fake.PerHour, s.fake.MeterPerHour, s.fake.BillsAfter = 20_000, 120_000, meter, bills
			s.backend = backend.Options{Provision: time.Minute, Ready: time.Minute, Teardown: time.Minute, Save: time.Minute, Short: 10 * time.Second}
		}),
		live: map[string]*believed{}, keys: map[string]string{}, ends: map[string]int{},
		granted: sandboxer.Credit, calm: time.Now(), missing: map[stranded]time.Time{},
	}
	if err := m.Grant(admin, sandboxer.DefaultTenant, m.granted, "start", ""); err != nil {
		rt.Fatal(err)
	}
	actions := map[string]func(*rapid.T){
		"create":   m.doCreate,
		"destroy":  m.doDestroy,
		"extend":   m.doExtend,
		"wait":     m.doWait,
		"pause":    m.doPause,
		"resume":   m.doResume,
		"snapshot": m.doSnapshot,
		"restart":  func(*rapid.T) { m.restart() },
		"fault":    m.doFault,
		"die":      m.doDie,
		"reach":    m.doReach,
		"":         m.check,
	}
	if rapid.Bool().Draw(rt, "peaceful") { // what faults excuse is seen in what goes without
		for _, a := range []string{"fault", "die", "reach"} {
			delete(actions, a)
		}
	}
	rt.Repeat(actions)
	m.end(rt)
}

func someID(t *rapid.T) string { return rapid.SampledFrom([]string{"one", "two"}).Draw(t, "id") }

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
	id := someID(t)
	req := sandboxer.CreateRequest{
		Profile: rapid.SampledFrom([]string{"paid", "test", "burst"}).Draw(t, "profile"),
		TTL:     rapid.SampledFrom([]time.Duration{time.Minute, time.Hour}).Draw(t, "ttl"),
		Inputs:  map[string]string{"sandbox_id": id},
	}
	if rapid.Bool().Draw(t, "keyed") {
		req.Key = fmt.Sprint(id, req.Profile, req.TTL) // one body for one key
	}
	sb, err := m.Create(acme, req)
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
	id := someID(t)
	sb, err := m.Destroy(acme, id)
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
	id := someID(t)
	sb, err := m.Extend(acme, id, Extend{Add: time.Duration(rapid.IntRange(1, 90).Draw(t, "minutes")) * time.Minute})
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
	id := someID(t)
	depth := rapid.SampledFrom([]sandboxer.PauseDepth{"", sandboxer.PauseFreeze, sandboxer.PauseFiles}).Draw(t, "depth")
	sb, err := m.Pause(acme, id, PauseRequest{Depth: depth})
	b := m.live[id]
	switch {
	case err == nil:
		if sb.State != sandboxer.Paused || b == nil && !m.faulty {
			t.Fatalf("pause of %s gave %+v; believed %+v", id, sb, b)
		}
		m.was(id, sb)
	case m.faulty: // it runs on, is being paused still, or is lost
		m.look(t, id)
	case b != nil && (b.state == sandboxer.Running || depth == ""):
		t.Fatalf("pause of %s: %v", id, err)
	}
}

func (m *model) doResume(t *rapid.T) {
	m.settle()
	id := someID(t)
	sb, err := m.Resume(acme, id, ResumeRequest{})
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
	m.settle()
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
	id := someID(t)
	rec, err := m.Snapshot(acme, id, SnapshotRequest{TTL: time.Hour})
	b := m.live[id]
	switch {
	case err == nil && (b == nil && !m.faulty || rec.State != sandboxer.SnapshotSealed):
		t.Fatalf("snapshot of %s gave %+v; believed %+v", id, rec, b)
	case err != nil && !m.faulty && b != nil && b.state == sandboxer.Running:
		t.Fatalf("snapshot of %s: %v", id, err)
	}
}

func (m *model) doWait(t *rapid.T) {
	time.Sleep(time.Duration(rapid.IntRange(1, 4000).Draw(t, "seconds")) * time.Second)
	m.settle()
}

func (m *model) doFault(t *rapid.T) {
	f := fake.Fault{
		Verb: rapid.SampledFrom([]fake.Verb{fake.VerbProvision, fake.VerbWaitReady, fake.VerbTeardown, fake.VerbProbe, fake.VerbList, fake.VerbRenew,
			fake.VerbSnapshot, fake.VerbRestore, fake.VerbDropSnapshot, fake.VerbPause, fake.VerbResume, fake.VerbMeter}).Draw(t, "verb"),
		Times: rapid.IntRange(1, 3).Draw(t, "times"),
	}
	switch rapid.IntRange(0, 4).Draw(t, "manner") {
	case 0:
		f.Kind = rapid.SampledFrom([]sandboxer.Kind{sandboxer.Unavailable, sandboxer.Failed, sandboxer.NotFound, sandboxer.Internal}).Draw(t, "kind")
	case 1:
		f.Lost = true
	case 2:
		f.Hang = true
	case 3:
		f.Hang, f.Lost = true, true
	case 4:
		f.Delay = 10 * time.Second
		if f.Verb == fake.VerbTeardown || f.Verb == fake.VerbList || f.Verb == fake.VerbPause {
			f.Lie = true
		}
	}
	m.world.Inject(f)
	m.faulty, m.calm = true, time.Time{}
}

// doReach puts the backend out of reach, has it hang, or brings it back.
func (m *model) doReach(t *rapid.T) {
	m.world.Forgive()
	m.bringBack()
	m.faulty, m.calm = true, time.Time{}
	switch reach := rapid.SampledFrom([]string{"back", "away", "hung", "left", "right"}).Draw(t, "reach"); reach {
	case "left", "right": // this host alone
		m.world.SetAway(reach, true)
	case "back":
		m.calm = time.Now()
	case "away":
		m.world.Inject(fake.Fault{Verb: fake.VerbAny, Kind: sandboxer.Unavailable})
	case "hung":
		m.world.Inject(fake.Fault{Verb: fake.VerbAny, Hang: true})
	}
}

// bringBack has every host be in reach.
func (m *model) bringBack() {
	m.world.SetAway("left", false)
	m.world.SetAway("right", false)
}

// doDie has the object of a sandbox die in the middle of something that hangs, fails slowly
// or takes its time, or of nothing.
func (m *model) doDie(t *rapid.T) {
	m.settle()
	id := someID(t)
	verbs := map[string][]fake.Verb{
		"nothing": nil, "create": {fake.VerbProvision, fake.VerbWaitReady}, "freeze": {fake.VerbPause}, "save": {fake.VerbSnapshot}, "destroy": {fake.VerbTeardown},
		"pause": {fake.VerbPause, fake.VerbSnapshot, fake.VerbTeardown}, "resume": {fake.VerbResume, fake.VerbRestore, fake.VerbWaitReady},
	}
	amid := rapid.SampledFrom(slices.Sorted(maps.Keys(verbs))).Draw(t, "amid")
	if of := verbs[amid]; of != nil {
		f := fake.Fault{Verb: rapid.SampledFrom(of).Draw(t, "verb"), Times: 1, Delay: 10 * time.Second, Hang: rapid.Bool().Draw(t, "hang"), Lost: rapid.Bool().Draw(t, "lost")}
		m.world.Inject(f)
	}
	m.faulty = true
	over := make(chan struct{})
	go func() {
		defer close(over)
		switch amid {
		case "create":
			_, _ = m.Create(acme, sandboxer.CreateRequest{Profile: "test", TTL: time.Hour, Inputs: map[string]string{"sandbox_id": id}})
		case "freeze":
			_, _ = m.Pause(acme, id, PauseRequest{Depth: sandboxer.PauseFreeze})
		case "pause":
			_, _ = m.Pause(acme, id, PauseRequest{Depth: sandboxer.PauseFiles})
		case "resume":
			_, _ = m.Resume(acme, id, ResumeRequest{})
		case "save":
			_, _ = m.Snapshot(acme, id, SnapshotRequest{TTL: time.Hour})
		case "destroy":
			_, _ = m.Destroy(acme, id)
		}
	}()
	time.Sleep(5 * time.Second)
	m.world.Kill(id)
	if rapid.Bool().Draw(t, "forgiven") {
		m.world.Forgive()
		m.bringBack()
		m.calm = time.Now()
	}
	<-over
	m.settle()
	delete(m.live, id) // whatever is known of it
	if sb, err := m.store.Sandbox(admin, id); err == nil && sb.State == sandboxer.Terminated {
		m.ends[id] = max(m.ends[id], sb.Generation)
	}
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
	for _, id := range []string{"one", "two"} {
		if _, err := m.Destroy(acme, id); err != nil && !isKind(err, sandboxer.NotFound) {
			t.Fatalf("destroy of %s: %v", id, err)
		}
	}
	m.sound(t)
	time.Sleep(62 * time.Minute) // bills that are pending
	m.settle()
	m.sound(t)
	for _, w := range []*fake.World{m.world, m.setup.other} {
		if faults := fake.Audit(w.Log(), true); len(faults) > 0 {
			t.Fatalf("world: %q", faults)
		}
	}
	if left := m.world.Snapshots(); len(left) > 0 {
		t.Fatalf("snapshots are left: %q", left)
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

package manager

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
)

// backUp saves the database, and returns what brings the broker back to it.
func (r *rig) backUp() (back func()) {
	r.t.Helper()
	file := filepath.Join(r.t.TempDir(), "backup.db")
	if _, err := sqlstore.BackUp(r.t.Context(), r.setup.dir, file, 0); err != nil {
		r.t.Fatal(err)
	}
	return func() {
		r.t.Helper()
		r.close()
		if _, _, err := sqlstore.Restore(r.t.Context(), r.setup.dir, file); err != nil {
			r.t.Fatal(err)
		}
		r.open()
	}
}

func (r *rig) quarantine(want ...string) []Quarantined {
	r.t.Helper()
	qs, err := r.Quarantine(admin)
	if err != nil {
		r.t.Fatal(err)
	}
	var ids []string
	for _, q := range qs {
		ids = append(ids, q.ID)
	}
	slices.Sort(ids)
	slices.Sort(want)
	if !slices.Equal(ids, want) {
		r.t.Errorf("quarantined: %v, want %v", ids, want)
	}
	return qs
}

// TestDatabaseWentBack restores a backup. What was made since is kept and reported, and destroyed, or left
// until its fuse.
func TestDatabaseWentBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		old := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour})
		back := r.backUp()
		thread := sandboxer.Thread{User: "u", ID: "t"}
		mine := r.create(sandboxer.CreateRequest{Thread: thread, TTL: 2 * time.Hour})
		unwanted := r.create(sandboxer.CreateRequest{})
		left := r.create(sandboxer.CreateRequest{TTL: 20 * time.Minute})
		if _, err := r.Extend(acme, left.ID, Extend{Add: 10 * time.Minute}); err != nil {
			t.Fatal(err)
		}
		back()
		// No caller gets an object under a name that the database does not know.
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Thread: thread})
		wantErr(t, err, sandboxer.Conflict, mine.ID)
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "test", Thread: thread})
		wantErr(t, err, sandboxer.Conflict, mine.ID) // now a survey has seen it
		if n := len(r.world.Live()); n != 4 {
			t.Fatalf("%d objects are left of 4", n)
		}
		for _, q := range r.quarantine(mine.ID, unwanted.ID, left.ID) {
			if q.Until.IsZero() || q.Why == "" || q.Generation != 1 || q.Extension != "ext.fake" {
				t.Errorf("quarantined: %+v", q)
			}
			if q.ID == left.ID && q.Until.Before(left.ExpiresAt.Add(10*time.Minute)) {
				t.Errorf("kept until %s, its expiry had moved to ten minutes after %s", q.Until, left.ExpiresAt)
			}
		}
		if _, err := r.Quarantine(acme); !isKind(err, sandboxer.Denied) {
			t.Errorf("a tenant lists what is quarantined: %v", err)
		}
		r.accept()
		a, err := r.Audit(admin)
		if err != nil || len(a.Violations) != 3 || !strings.Contains(a.Violations[0].Detail, "sandboxer destroy ") {
			t.Errorf("audit: %+v, %v", a.Violations, err)
		}
		for _, who := range []string{sandboxer.DefaultTenant, "rival"} {
			if _, err := r.Destroy(as(who), mine.ID); !isKind(err, sandboxer.NotFound) {
				t.Errorf("%s destroys what the database does not know: %v", who, err)
			}
		}
		for _, id := range []string{unwanted.ID, mine.ID} {
			if gone, err := r.Destroy(admin, id); err != nil || gone.State != sandboxer.Terminated {
				t.Errorf("destroy: %+v, %v", gone, err)
			}
		}
		r.quarantine(left.ID)
		time.Sleep(time.Minute)
		synctest.Wait()
		r.quarantine(left.ID)
		told := map[sandboxer.EventType][]string{}
		events, err := r.Events(admin, sandboxer.EventQuery{Limit: sandboxer.MaxPage})
		for _, ev := range events {
			told[ev.Type] = append(told[ev.Type], ev.SandboxID)
		}
		if err != nil || len(told[sandboxer.EventQuarantine]) != 3 || !slices.Equal(told[sandboxer.EventOrphan], []string{unwanted.ID, mine.ID}) {
			t.Errorf("events: %v, %v", told, err)
		}

		time.Sleep(30 * time.Minute) // its fuse
		synctest.Wait()
		r.quarantine()
		r.destroy(old.ID)
		r.sound(0)
		r.noHolds()
	})
}

// TestQuarantineWithoutRecord keeps unknown objects until an administrator decides.
func TestQuarantineWithoutRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { s.opts.SweepEvery = 5 * time.Minute }) // there is a day to be swept
		make := func(id string, generation int) {
			t.Helper()
			if _, err := r.ext.Provision(t.Context(), sandboxer.Spec{ID: id, Generation: generation, Owner: "test"}); err != nil {
				t.Fatal(err)
			}
		}
		make("bare", 1)
		r.destroy(r.create(sandboxer.CreateRequest{Inputs: map[string]string{"sandbox_id": "former"}}).ID)
		make("former", 2)
		make("dead", 1)
		r.world.Kill("dead")
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		r.quarantine("bare", "former")
		_, err := r.Destroy(rival, "former")
		wantErr(t, err, sandboxer.NotFound, "former")
		for _, id := range []string{"bare", "former"} {
			if _, err := r.Destroy(admin, id); err != nil {
				t.Error(err)
			}
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		r.quarantine()
		r.sound(0)
	})
}

// TestQuarantineOfALaterGeneration has the database forget that a sandbox was resumed.
func TestQuarantineOfALaterGeneration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { ticking(s); s.opts.SnapshotStore = dirStore{s.dir} })
		id := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour}).ID
		if _, err := r.Pause(acme, id, PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
			t.Fatal(err)
		}
		back := r.backUp()
		if _, err := r.Resume(acme, id, ResumeRequest{}); err != nil {
			t.Fatal(err)
		}
		back()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if n := len(r.world.Live()); n != 1 {
			t.Fatalf("%d objects are left of 1", n)
		}
		r.quarantine(id)
		if sb, err := r.Destroy(acme, id); err != nil || sb.State != sandboxer.Terminated {
			t.Errorf("destroyed: %+v, %v", sb, err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		r.quarantine()
		if n := len(r.world.Live()); n != 0 {
			t.Errorf("%d objects are left of a sandbox that its owner destroyed", n)
		}
	})
}

// An unknown object is kept until its fuse, or until it is proven dead twice. It is asked about and reported
// now and then, and forgotten when it is explained or gone.
func TestQuarantineKeeps(t *testing.T) {
	k, at := objectKey{"ext.fake", "box", 3}, time.Now()
	found := sandboxer.Found{Handle: sandboxer.Handle{SandboxID: "box", Generation: 3}, Fuse: at.Add(time.Hour)}
	see := func(q *quarantine, after time.Duration, grace, wantKeep, wantLook bool) {
		t.Helper()
		if keep, look := q.see(k, "one", at.Add(after), grace); keep != wantKeep || look != wantLook {
			t.Errorf("after %s: keep %t, look %t; want %t, %t", after, keep, look, wantKeep, wantLook)
		}
	}
	q := newQuarantine()
	see(q, 0, false, true, true)
	see(q, probeEvery-1, false, true, false)
	see(q, probeEvery, false, true, true)
	if o, report := q.inspected(k, found, sandboxer.Alive, at); !report || o.Until != found.Fuse || o.Host != "one" {
		t.Errorf("inspected: %+v, report %t", o, report)
	}
	if _, report := q.inspected(k, found, sandboxer.Alive, at); report {
		t.Error("it is told twice")
	}
	q.reportAgain(k)
	if _, report := q.inspected(k, found, sandboxer.Alive, at); !report {
		t.Error("what could not be told is not told again")
	}
	see(q, time.Hour, false, true, true)
	see(q, time.Hour+1, true, true, false) // the clock may be wrong
	see(q, time.Hour+1, false, false, false)

	q = newQuarantine() // without a fuse
	see(q, 0, false, true, true)
	see(q, 1000*time.Hour, false, true, true)
	for i, c := range []struct {
		alive sandboxer.Liveness
		after time.Duration
		keep  bool
	}{
		{sandboxer.Gone, 0, true},
		{sandboxer.Gone, lifecycle.ConfirmAfter - 1, true},
		{sandboxer.Unknown, lifecycle.ConfirmAfter, true}, // proves nothing, and begins anew
		{sandboxer.OOMKilled, lifecycle.ConfirmAfter, true},
		{sandboxer.Gone, 2 * lifecycle.ConfirmAfter, false},
		{sandboxer.Alive, 2 * lifecycle.ConfirmAfter, true},
	} {
		if _, report := q.inspected(k, sandboxer.Found{}, c.alive, at.Add(c.after)); report && c.alive != sandboxer.Alive && c.alive != sandboxer.Unknown {
			t.Errorf("look %d: a dead one is told of", i)
		}
		if keep, _ := q.see(k, "", at, false); keep != c.keep {
			t.Errorf("look %d (%s): kept: %t", i, c.alive, keep)
		}
	}

	for name, c := range map[string]struct {
		extension         string
		listed, explained bool
		whole, gone       bool
	}{
		"listed":           {"ext.fake", true, false, true, false},
		"explained":        {"ext.fake", true, true, false, true},
		"gone":             {"ext.fake", false, false, true, true},
		"perhaps gone":     {"ext.fake", false, false, false, false},
		"another's survey": {"ext.other", false, false, true, false},
	} {
		q := newQuarantine()
		q.see(k, "", at, false)
		listed, explained := map[objectKey]sandboxer.Handle{}, map[objectKey]bool{k: c.explained}
		if c.listed {
			listed[k] = sandboxer.Handle{}
		}
		q.release(c.extension, listed, explained, c.whole)
		if gone := len(q.objects) == 0; gone != c.gone {
			t.Errorf("%s: forgotten: %t", name, gone)
		}
		q.remove(k)
		if _, report := q.inspected(k, found, sandboxer.Alive, at); report || len(q.objects) != 0 || q.get(k) != (Quarantined{}) {
			t.Errorf("%s: a look that comes late brings it back", name)
		}
	}
}

// The memory of unknown objects is bounded; what is beyond is kept all the same.
func TestQuarantineIsBounded(t *testing.T) {
	q := newQuarantine()
	for i := range maxQuarantine + 5 {
		if keep, look := q.see(objectKey{"ext.fake", "box", i + 1}, "", time.Now(), false); !keep || look != (i < maxQuarantine) {
			t.Fatalf("object %d: keep %t, look %t", i, keep, look)
		}
	}
	if len(q.objects) != maxQuarantine || len(q.list("")) != maxQuarantine {
		t.Errorf("%d remembered, %d listed; want %d", len(q.objects), len(q.list("")), maxQuarantine)
	}
}

// A stray object's grace period begins when it is first seen, and again after it was forgotten.
func TestOrphanSightings(t *testing.T) {
	o, at := newOrphanSightings(), time.Now()
	a, b, other := objectKey{"ext.fake", "a", 1}, objectKey{"ext.fake", "b", 1}, objectKey{"ext.other", "c", 1}
	for _, k := range []objectKey{a, b, other} {
		if since := o.note(k, at); !since.Equal(at) {
			t.Errorf("%v since %s", k, since)
		}
	}
	later := at.Add(time.Minute)
	if since := o.note(a, later); !since.Equal(at) {
		t.Errorf("seen again: since %s; want the first time", since)
	}
	o.forget(a)
	if since := o.note(a, later); !since.Equal(later) {
		t.Errorf("forgotten and seen: since %s", since)
	}
	o.retain("ext.fake", map[objectKey]sandboxer.Handle{a: {}, b: {}}, map[objectKey]bool{b: true})
	if len(o.since) != 2 || o.note(b, later) != later || o.note(other, later) != at {
		t.Errorf("left: %v; want a and what is another's", o.since)
	}
	o.retain("ext.fake", nil, nil)
	if len(o.since) != 1 {
		t.Errorf("left: %v; want what is another's", o.since)
	}
}

// TestDestroyUnknown: an administrator who destroys what nobody knows reads which extension cannot be asked, and not only its words.
func TestDestroyUnknown(t *testing.T) {
	r := newRig(t, nil)
	_, err := r.Destroy(admin, "nothing1")
	wantErr(t, err, sandboxer.NotFound, "no sandbox")
	r.world.Inject(fake.Fault{Verb: fake.VerbDiscover, Kind: sandboxer.Unavailable})
	_, err = r.Destroy(admin, "nothing1")
	wantErr(t, err, sandboxer.Unavailable, `ext.fake cannot say whether it has a sandbox "nothing1" that the database does not know`)
}

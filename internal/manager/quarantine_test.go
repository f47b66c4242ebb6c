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

// TestDatabaseWentBack restores a backup. What was made since is kept, told, and adopted,
// destroyed, or left until its fuse.
func TestDatabaseWentBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		if err := r.Grant(admin, "acme", sandboxer.Credit, "", ""); err != nil {
			t.Fatal(err)
		}
		old := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour})
		back := r.backUp()
		thread := sandboxer.Thread{User: "u", ID: "t"}
		mine := r.create(sandboxer.CreateRequest{Profile: "paid", Thread: thread, Name: "work", Env: map[string]string{"SECRET": "x"}})
		unwanted := r.create(sandboxer.CreateRequest{})
		left := r.create(sandboxer.CreateRequest{TTL: 20 * time.Minute})
		if _, err := r.Extend(acme, left.ID, Extend{Add: 10 * time.Minute}); err != nil {
			t.Fatal(err)
		}
		back()
		// Nobody gets what is there under a name that the database does not know.
		for _, who := range []string{"acme", "rival"} {
			_, err := r.Create(as(who), sandboxer.CreateRequest{Profile: "paid", Thread: thread})
			wantErr(t, err, sandboxer.Conflict, mine.ID)
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if n := len(r.world.Live()); n != 4 {
			t.Fatalf("%d objects are left of 4", n)
		}
		for _, q := range r.quarantine(mine.ID, unwanted.ID, left.ID) {
			if q.Tenant != "acme" || q.Until.IsZero() || q.Why == "" || q.ID == mine.ID && (q.Profile != "profile.paid" || q.Name != "work") {
				t.Errorf("quarantined: %+v", q)
			}
			if q.ID == left.ID && q.Until.Before(left.ExpiresAt.Add(10*time.Minute)) {
				t.Errorf("kept until %s, its expiry had moved to ten minutes after %s", q.Until, left.ExpiresAt)
			}
		}
		if _, err := r.Quarantine(acme); !isKind(err, sandboxer.Denied) {
			t.Errorf("a tenant lists what is quarantined: %v", err)
		}
		a, err := r.Audit(admin)
		if err != nil || len(a.Violations) != 3 || !strings.Contains(a.Violations[0].Detail, "sandboxer adopt ") {
			t.Errorf("audit: %+v, %v", a.Violations, err)
		}
		for _, who := range []string{"acme", "rival"} {
			if _, err := r.Destroy(as(who), mine.ID); !isKind(err, sandboxer.NotFound) {
				t.Errorf("%s destroys what the database does not know: %v", who, err)
			}
			if _, err := r.Adopt(as(who), mine.ID, Adoption{}); !isKind(err, sandboxer.Denied) {
				t.Errorf("%s adopts: %v", who, err)
			}
		}

		_, err = r.Adopt(admin, mine.ID, Adoption{Tenant: "rival"})
		wantErr(t, err, sandboxer.Invalid, "acme")
		sb, err := r.Adopt(admin, mine.ID, Adoption{})
		if err != nil {
			t.Fatal(err)
		}
		if sb.Tenant != "acme" || sb.Name != "work" || sb.State != sandboxer.Running || !sb.ExpiresAt.Equal(mine.ExpiresAt) {
			t.Errorf("adopted: %+v", sb)
		}
		if env, err := r.openEnv(sb); err != nil || env["SECRET"] != "x" {
			t.Errorf("its environment is %v, %v", env, err)
		}
		if holds, err := r.store.OpenHolds(t.Context()); err != nil || len(holds) != 1 || holds[0].Amount <= 0 || holds[0].SandboxID != mine.ID {
			t.Errorf("on hold: %+v, %v", holds, err)
		}
		if again, err := r.Create(acme, sandboxer.CreateRequest{Profile: "paid", Thread: thread}); err != nil || !again.Found {
			t.Errorf("its thread: %+v, %v", again, err)
		}
		_, err = r.Adopt(admin, mine.ID, Adoption{})
		wantErr(t, err, sandboxer.Conflict, "nothing to adopt")

		gone, err := r.Destroy(admin, unwanted.ID)
		if err != nil || gone.State != sandboxer.Terminated {
			t.Errorf("destroy: %+v, %v", gone, err)
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
		if err != nil || len(told[sandboxer.EventQuarantine]) != 3 || !slices.Equal(told[sandboxer.EventAdopt], []string{mine.ID}) || !slices.Equal(told[sandboxer.EventOrphan], []string{unwanted.ID}) {
			t.Errorf("events: %v, %v", told, err)
		}

		time.Sleep(30 * time.Minute) // its fuse
		synctest.Wait()
		r.quarantine()
		if _, err := r.Destroy(acme, mine.ID); err != nil {
			t.Fatal(err)
		}
		r.destroy(old.ID)
		r.sound(0)
		r.noHolds()
	})
}

// TestQuarantineWithoutStamp keeps what tells nothing of itself until somebody decides.
func TestQuarantineWithoutStamp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		make := func(id string, generation int, s []byte) {
			t.Helper()
			if _, err := r.ext.Provision(t.Context(), sandboxer.Spec{ID: id, Generation: generation, Owner: "test", Stamp: s}); err != nil {
				t.Fatal(err)
			}
		}
		make("bare", 1, nil)
		theirs := &sandboxer.Sandbox{ID: "other", Generation: 1, Tenant: "rival", Profile: "profile.test"}
		make("forged", 1, r.stampOf(theirs)) // another object's
		r.destroy(r.create(sandboxer.CreateRequest{Inputs: map[string]string{"sandbox_id": "former"}}).ID)
		make("former", 2, nil)
		make("dead", 1, nil)
		r.world.Kill("dead")
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		r.quarantine("bare", "forged", "former")

		_, err := r.Adopt(admin, "forged", Adoption{})
		wantErr(t, err, sandboxer.Invalid, "--tenant")
		_, err = r.Adopt(admin, "former", Adoption{Tenant: "rival", Profile: "test"})
		wantErr(t, err, sandboxer.Conflict, "acme")
		_, err = r.Adopt(admin, "nosuch", Adoption{})
		wantErr(t, err, sandboxer.NotFound, "nosuch")
		sb, err := r.Adopt(admin, "former", Adoption{Tenant: "acme", Profile: "test", TTL: time.Hour})
		if err != nil || sb.Generation != 2 || sb.ExpiresAt.Sub(sb.CreatedAt) != time.Hour {
			t.Fatalf("adopted: %+v, %v", sb, err)
		}
		if live := r.world.Live(); !slices.ContainsFunc(live, func(o fake.Object) bool { return o.Spec.ID == "former" && o.Fuse.Equal(sb.Spec.Fuse) }) {
			t.Error("the fuse did not move to the new expiry")
		}
		r.destroy("former")
		for _, id := range []string{"bare", "forged"} {
			if _, err := r.Destroy(admin, id); err != nil {
				t.Error(err)
			}
		}
		time.Sleep(time.Minute)
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
		_, err := r.Adopt(admin, id, Adoption{})
		wantErr(t, err, sandboxer.Conflict, "sandboxer resume "+id)
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

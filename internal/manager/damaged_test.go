package manager

import (
	"database/sql"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// garble makes the record of a sandbox unreadable, past the store.
func (r *rig) garble(id string) {
	r.t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(r.setup.dir, "sandboxer.db")+"?_busy_timeout=5000")
	if err != nil {
		r.t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(`UPDATE sandboxes SET data = '{"id":' WHERE id = ?`, id); err != nil {
		r.t.Fatal(err)
	}
}

// TestDamagedRecord damages one of several records: the others are not affected, its
// object is not taken for an orphan, and both can be removed.
func TestDamagedRecord(t *testing.T) {
	r := newRig(t, func(s *setup) { s.opts.Grace = time.Nanosecond })
	if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
		t.Fatal(err)
	}
	first := r.create(sandboxer.CreateRequest{Profile: "paid"})
	bad := r.create(sandboxer.CreateRequest{Profile: "paid", Name: "poor"})
	short := r.create(sandboxer.CreateRequest{TTL: time.Minute})
	r.garble(bad.ID)

	for _, ref := range []string{bad.ID, "poor", bad.ID[:5]} {
		_, err := r.Get(acme, ref)
		wantErr(t, err, sandboxer.Failed, "damaged")
		if !strings.Contains(sandboxer.HintOf(err), "sandboxer destroy "+bad.ID) {
			t.Errorf("hint %q names no way out", sandboxer.HintOf(err))
		}
		_, err = r.Get(rival, ref)
		wantErr(t, err, sandboxer.NotFound, "")
	}
	items, _, err := r.List(acme, sandboxer.Query{States: liveStates})
	if err != nil || len(items) != 3 || items[1].Damaged == "" {
		t.Fatalf("list = %d, %v; want three, the second damaged", len(items), err)
	}

	// The sweep leaves it and its object alone, and goes on with the others.
	if _, err := r.Extend(acme, short.ID, Extend{TTL: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	r.await(short.ID, sandboxer.Terminated)
	for range 3 {
		rep, err := r.Sweep(admin)
		if err != nil || rep.Damaged != 1 || rep.Orphans != 0 || rep.Seen != 2 {
			t.Fatalf("sweep = %+v, %v; want one damaged of two seen and nothing removed", rep, err)
		}
	}
	if n := len(r.world.Live()); n != 2 {
		t.Fatalf("%d objects live; want 2", n)
	}
	a, err := r.Audit(admin)
	if err != nil || len(a.Violations) != 1 || a.Violations[0].Invariant != invWhole || a.Violations[0].SandboxID != bad.ID {
		t.Fatalf("audit = %+v, %v; want the damaged record named", a.Violations, err)
	}

	// It survives a restart as it is, and can be destroyed: nothing is charged.
	r.restart()
	_, err = r.Destroy(rival, bad.ID)
	wantErr(t, err, sandboxer.NotFound, "")
	sb, err := r.Destroy(acme, bad.ID)
	if err != nil || sb.State != sandboxer.Terminated || sb.Cost != 0 || !strings.Contains(sb.Message, "damaged") || sb.CreatedAt.IsZero() {
		t.Fatalf("destroy = %+v, %v", sb, err)
	}
	r.get(bad.ID)
	r.destroy(first.ID)
	r.sound(0)
	r.noHolds()
}

// TestDamagedCutShort dies while a sandbox with a damaged record is being destroyed.
func TestDamagedCutShort(t *testing.T) {
	r := newRig(t, nil)
	bad := r.create(sandboxer.CreateRequest{})
	r.garble(bad.ID)
	r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, Kind: sandboxer.Unavailable, Times: 1})
	if _, err := r.Destroy(acme, bad.ID); !isKind(err, sandboxer.Unavailable) {
		t.Fatalf("destroy = %v; want it to be tried again", err)
	}
	r.restart() // what was written is whole now: the sweep does the rest
	if sb := r.await(bad.ID, sandboxer.Terminated); sb.Damaged != "" {
		t.Errorf("damaged: %q", sb.Damaged)
	}
	r.sound(0)
}

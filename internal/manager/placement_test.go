package manager

import (
	"context"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// spied tells what the manager asks of a fake.
type spied struct {
	*fake.Extension
	mu        sync.Mutex
	provision func(sandboxer.Spec)
	place     func(context.Context) error
	torn      []sandboxer.Handle
}

func (s *spied) Place(ctx context.Context, spec sandboxer.Spec, avoid []string) (string, error) {
	if s.place != nil {
		if err := s.place(ctx); err != nil {
			return "", err
		}
	}
	return s.Extension.Place(ctx, spec, avoid)
}

func (s *spied) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	if s.provision != nil {
		s.provision(spec)
	}
	return s.Extension.Provision(ctx, spec)
}

func (s *spied) Teardown(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
	s.mu.Lock()
	s.torn = append(s.torn, h)
	s.mu.Unlock()
	return s.Extension.Teardown(ctx, h)
}

// onTwoHosts is a rig whose extension has the hosts one and two, and prefers one.
func onTwoHosts(t *testing.T, change func(*setup)) (*rig, *spied) {
	s := &spied{}
	return newRig(t, func(set *setup) {
		quiet(set)
		set.fake.Hosts = []string{"one", "two"}
		set.wrap = func(e *fake.Extension) sandboxer.Extension { s.Extension = e; return s }
		if change != nil {
			change(set)
		}
	}), s
}

func (r *rig) hostsOf(id string) (hosts []string) {
	for _, o := range r.world.Live() {
		if o.Spec.ID == id {
			hosts = append(hosts, o.Host)
		}
	}
	return hosts
}

// The place is in the record before anybody gets the request to make something there, of sandboxes that
// are asked for and of those of a pool; what the caller asked for stays what it was.
func TestPlaceIsCommitted(t *testing.T) {
	r, spy := onTwoHosts(t, func(s *setup) {
		s.idle = true
		s.profiles[0].Pool.Size = 1
	})
	var made atomic.Int32 // the pool is filled meanwhile
	spy.provision = func(spec sandboxer.Spec) {
		made.Add(1)
		sb, err := r.store.Sandbox(admin, spec.ID)
		if err != nil || sb.Host != "one" || spec.Place != "one" || spec.Host != "" || sb.Spec.Host != "" {
			t.Errorf("%s is told to be made on %q (asked for: %q); its record says %+v, %v", spec.ID, spec.Place, spec.Host, sb, err)
		}
	}
	if err := r.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	sb := r.create(sandboxer.CreateRequest{Profile: "lazy", Inputs: map[string]string{"sandbox_id": "box"}})
	if sb.Host != "one" || sb.Spec.Host != "" || slices.Contains(sb.Spec.Vouched, sandboxer.RestrictedHost) {
		t.Errorf("it is %+v", sb)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		pools, err := r.Pools(admin)
		if err != nil || time.Now().After(end) {
			t.Fatalf("the pool stays empty: %+v, %v", pools, err)
		}
		if pools[0].Ready == 1 {
			break
		}
	}
	if n := made.Load(); n != 2 {
		t.Errorf("%d were made", n)
	}
	// A request that names the host asks for something else.
	if _, err := r.Create(admin2(sandboxer.DefaultTenant), sandboxer.CreateRequest{Profile: "lazy", Host: "one", Inputs: map[string]string{"sandbox_id": "box"}}); sandboxer.KindOf(err) != sandboxer.Conflict {
		t.Errorf("asked for on the host that we chose: %v", err)
	}
	if again := r.create(sandboxer.CreateRequest{Profile: "lazy", Inputs: map[string]string{"sandbox_id": "box"}}); again.Generation != sb.Generation || !again.Found {
		t.Errorf("asked for again: %+v", again)
	}
}

// admin2 is an administrator of a tenant.
func admin2(tenant string) context.Context {
	return as(tenant, sandboxer.ScopeRead, sandboxer.ScopeWrite, sandboxer.ScopeAdmin)
}

// If one host cannot take a sandbox another one does, unless something is left on the first or
// the request names it; other failures do not lead to another host.
func TestNextHost(t *testing.T) {
	for _, c := range []struct {
		name   string
		fault  fake.Fault
		host   string // asked for
		want   string // where it is made; "" if it is not
		vacate int    // teardowns
	}{
		{name: "unavailable", fault: fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable, Times: 1}, want: "two", vacate: 1},
		{name: "exhausted", fault: fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Exhausted, Times: 1}, want: "two", vacate: 1},
		{name: "untouched", fault: fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable, Untouched: true, Times: 1}, want: "two"},
		{name: "lost answer", fault: fake.Fault{Verb: fake.VerbProvision, Lost: true, Times: 1}, want: "two", vacate: 1},
		{name: "failed", fault: fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Failed, Times: 1}, vacate: 1},
		{name: "asked for", fault: fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable, Times: 1}, host: "one", vacate: 1},
		{name: "everywhere", fault: fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable}, vacate: 2},
		{name: "everywhere untouched", fault: fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable, Untouched: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, spy := onTwoHosts(t, nil)
			r.world.Inject(c.fault)
			sb, err := r.Create(admin2(sandboxer.DefaultTenant), sandboxer.CreateRequest{Profile: "test", Host: c.host, Inputs: map[string]string{"sandbox_id": "box"}})
			if c.want == "" {
				if sandboxer.KindOf(err) != c.fault.Kind {
					t.Errorf("Create: %v", err)
				}
				if sb := r.get("box"); sb.State != sandboxer.Terminated {
					t.Errorf("it is %s", sb.State)
				}
			} else if err != nil || sb.Host != c.want || !slices.Equal(r.hostsOf("box"), []string{c.want}) || sb.Untouched {
				t.Fatalf("it is %+v on %q, %v", sb, r.hostsOf("box"), err)
			}
			if len(spy.torn) != c.vacate || c.vacate > 0 && spy.torn[0].Host != "one" {
				t.Errorf("torn down: %+v; want %d times, first on one", spy.torn, c.vacate)
			}
			events, err := r.store.Events(admin, sandboxer.EventQuery{SandboxID: "box", Limit: 100})
			if err != nil {
				t.Fatal(err)
			}
			moved := slices.ContainsFunc(events, func(e sandboxer.Event) bool { return strings.Contains(e.Message, "could not be created on one") })
			if both := c.want == "two" || strings.HasPrefix(c.name, "everywhere"); moved != both {
				t.Errorf("its events tell of a move: %t; want %t", moved, both)
			}
			if c.want != "" {
				r.destroy("box")
			}
			r.sound(0)
			if faults := fake.Audit(r.world.Log(), true); len(faults) > 0 {
				t.Errorf("world: %q", faults)
			}
		})
	}
}

// What may be left on a host that went away keeps the sandbox from being made elsewhere.
func TestNotMovedFromWhatMayBeThere(t *testing.T) {
	r, _ := onTwoHosts(t, nil)
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Lost: true, Times: 1}, fake.Fault{Verb: fake.VerbTeardown, Kind: sandboxer.Unavailable, Times: 2})
	if _, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": "box"}}); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Fatalf("Create: %v", err)
	}
	if sb := r.get("box"); sb.State != sandboxer.Terminating || sb.Host != "one" {
		t.Errorf("it is %s on %q", sb.State, sb.Host)
	}
	if on := r.hostsOf("box"); !slices.Equal(on, []string{"one"}) {
		t.Errorf("it is on %q", on)
	}
	r.destroy("box")
	r.sound(0)
}

// A create that comes to no host ends without it, also in the next process; one that may have
// come to it does not.
func TestEndWithoutItsHost(t *testing.T) {
	r, spy := onTwoHosts(t, nil)
	r.world.SetAway("two", true)
	_, err := r.Create(admin2(sandboxer.DefaultTenant), sandboxer.CreateRequest{Profile: "test", Host: "two", Inputs: map[string]string{"sandbox_id": "box"}})
	if sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Fatalf("Create: %v", err)
	}
	if sb := r.get("box"); sb.State != sandboxer.Terminated || len(spy.torn) > 0 {
		t.Errorf("it is %s; torn down %+v", sb.State, spy.torn)
	}
	r.world.SetAway("two", false)
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Lost: true, Hang: true, Times: 1})
	req := sandboxer.CreateRequest{Profile: "test", Host: "two", Inputs: map[string]string{"sandbox_id": "other"}, NoWaiting: true}
	if _, err := r.Create(admin2(sandboxer.DefaultTenant), req); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); len(r.hostsOf("other")) == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	r.setup.idle = true
	r.restart()
	r.world.SetAway("two", true)
	if err := r.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Destroy(admin2(sandboxer.DefaultTenant), "other"); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("Destroy: %v", err)
	}
	if sb := r.get("other"); sb.State != sandboxer.Terminating {
		t.Errorf("it is %s, and may be on a host that cannot be asked", sb.State)
	}
	if i := len(spy.torn) - 1; i < 0 || spy.torn[i].Host != "two" || spy.torn[i].Ref != "" {
		t.Errorf("torn down by %+v; want the place that its record has", spy.torn)
	}
	r.world.SetAway("two", false)
	r.destroy("other")
	r.sound(0)
}

// Where a record does not say where its sandbox is, as those of earlier versions do not, that
// is found out: by a listing, or by looking for what was made already.
func TestUnknownPlaceIsFilledIn(t *testing.T) {
	r, _ := onTwoHosts(t, nil)
	sb, err := r.Create(admin2(sandboxer.DefaultTenant), sandboxer.CreateRequest{Profile: "test", Host: "two", Inputs: map[string]string{"sandbox_id": "runs"}})
	if err != nil {
		t.Fatal(err)
	}
	erase := func(id string, change func(*sandboxer.Sandbox)) {
		t.Helper()
		sb := r.get(id)
		err := r.box(sb).update(admin, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			sb.Host, sb.Spec.Host = "", ""
			change(sb)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	erase(sb.ID, func(*sandboxer.Sandbox) {})
	if _, err := r.Sweep(admin); err != nil {
		t.Fatal(err)
	}
	if sb := r.get(sb.ID); sb.Host != "two" {
		t.Errorf("after a listing it is on %q", sb.Host)
	}

	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Lost: true, Hang: true, Times: 1})
	req := sandboxer.CreateRequest{Profile: "test", Host: "two", Inputs: map[string]string{"sandbox_id": "half"}, NoWaiting: true}
	if _, err := r.Create(admin2(sandboxer.DefaultTenant), req); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); len(r.hostsOf("half")) == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	r.setup.idle = true
	r.restart()
	erase("half", func(*sandboxer.Sandbox) {})
	if err := r.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	if sb := r.await("half", sandboxer.Running); sb.Host != "two" || !slices.Equal(r.hostsOf("half"), []string{"two"}) {
		t.Errorf("it is on %q, by its record on %q", r.hostsOf("half"), sb.Host)
	}
	handles, err := Recorded(admin, r.store, "ext.fake")
	if err != nil || len(handles) != 2 || handles[0].Host != "two" || handles[1].Host != "two" {
		t.Errorf("recorded: %+v, %v", handles, err)
	}
	if handles, err := Recorded(admin, r.store, "ext.none"); err != nil || len(handles) != 0 {
		t.Errorf("recorded of another extension: %+v, %v", handles, err)
	}
}

// A sandbox restored in its native form goes on where that is, though no request names the host;
// one that is resumed from it, too.
func TestNativeSnapshotStaysOnItsHost(t *testing.T) {
	r, _ := onTwoHosts(t, nil)
	if _, err := r.Create(admin2(sandboxer.DefaultTenant), sandboxer.CreateRequest{Profile: "test", Host: "two", Inputs: map[string]string{"sandbox_id": "box"}}); err != nil {
		t.Fatal(err)
	}
	rec, err := r.Snapshot(acme, "box", SnapshotRequest{Name: "base", Kind: sandboxer.SnapshotNative})
	if err != nil || rec.Host != "two" {
		t.Fatalf("%+v, %v", rec, err)
	}
	sb, err := r.Restore(acme, "base", RestoreRequest{})
	if err != nil || sb.Host != "two" || sb.Spec.Host != "" {
		t.Fatalf("restored it is %+v, %v", sb, err)
	}
	if _, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
		t.Fatal(err)
	}
	if sb, err = r.Resume(acme, sb.ID, ResumeRequest{}); err != nil || sb.Host != "two" || sb.Untouched || !slices.Equal(r.hostsOf(sb.ID), []string{"two"}) {
		t.Errorf("resumed it is %+v on %q, %v", sb, r.hostsOf(sb.ID), err)
	}
}

// unreadable keeps snapshots that cannot be read.
type unreadable struct{ dirStore }

func (unreadable) Load(context.Context, string) (io.ReadCloser, error) {
	return nil, sandboxer.E(sandboxer.Unavailable, nil, "the bucket is away")
}

// That a snapshot cannot be read is no host's fault: no other host is tried, none is asked to
// tear down what it never heard of, and the record ends at once.
func TestUnreadableSnapshotMovesNobody(t *testing.T) {
	r, spy := onTwoHosts(t, func(s *setup) { s.opts.SnapshotStore = unreadable{dirStore{t.TempDir()}} })
	sb := r.create(sandboxer.CreateRequest{Profile: "test"})
	if _, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Name: "base", Kind: sandboxer.SnapshotPortable}); err != nil {
		t.Fatal(err)
	}
	spy.mu.Lock()
	spy.torn = nil
	spy.mu.Unlock()
	_, err := r.Restore(acme, "base", RestoreRequest{Name: "again"})
	wantErr(t, err, sandboxer.Unavailable, "the bucket is away")
	spy.mu.Lock()
	defer spy.mu.Unlock()
	if len(spy.torn) != 0 {
		t.Errorf("torn down: %+v", spy.torn)
	}
	items, _, err := r.List(acme, sandboxer.Query{States: []sandboxer.State{sandboxer.Terminated}})
	if err != nil || len(items) != 1 || items[0].Host != "one" {
		t.Fatalf("ended: %+v, %v; want the restored one, on its first host", items, err)
	}
	if h := history(t, r.Manager, items[0].ID); strings.Contains(h, "two") {
		t.Errorf("another host was tried: %s", h)
	}
}

// However many creates come, so many ask for a place at once; the others wait, until there is
// room, their caller leaves, or the manager closes.
func TestPlacementsAreBounded(t *testing.T) {
	const bound, creates = 3, 10
	asking := make(chan struct{}, creates)
	gate := make(chan struct{})
	r, spy := onTwoHosts(t, func(s *setup) { s.opts.Creates = bound })
	spy.place = func(ctx context.Context) error {
		asking <- struct{}{}
		defer func() { <-asking }()
		select {
		case <-gate:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	type answer struct {
		sb  *sandboxer.Sandbox
		err error
	}
	create := func(ctx context.Context) <-chan answer {
		out := make(chan answer, 1)
		go func() {
			sb, err := r.Create(ctx, sandboxer.CreateRequest{Profile: "test", NoWaiting: true})
			out <- answer{sb, err}
		}()
		return out
	}
	jobs := func() int {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.jobs)
	}
	some := func() (all []<-chan answer) {
		for range creates {
			all = append(all, create(acme))
		}
		eventually(t, "every create to have its job", func() bool { return jobs() == creates })
		eventually(t, "as many to ask as may", func() bool { return len(asking) == bound })
		return all
	}

	all := some()
	ctx, leave := context.WithCancel(acme)
	left := create(ctx)
	eventually(t, "one more job", func() bool { return jobs() == creates+1 })
	leave()
	if a := <-left; sandboxer.KindOf(a.err) != sandboxer.Canceled {
		t.Errorf("who left while it waited for its turn: %+v", a)
	}
	for range creates + 1 { // also of who left: the work goes on
		if n := len(asking); n > bound {
			t.Errorf("%d ask at once; want at most %d", n, bound)
		}
		gate <- struct{}{}
	}
	for _, c := range all {
		if a := <-c; a.err != nil {
			t.Error(a.err)
		}
	}
	eventually(t, "all to run", func() bool {
		items, _, err := r.List(acme, sandboxer.Query{States: []sandboxer.State{sandboxer.Running}})
		return err == nil && len(items) == creates+1 && jobs() == 0
	})

	all = some()
	if err := r.Manager.Close(); err != nil {
		t.Error(err)
	}
	for _, c := range all {
		if a := <-c; sandboxer.KindOf(a.err) != sandboxer.Unavailable {
			t.Errorf("when the manager closed: %+v", a)
		}
	}
}

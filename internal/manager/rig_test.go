package manager

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
)

// A rig is a manager on a real store and a fake backend.
type rig struct {
	*Manager
	t     testing.TB
	setup setup
	store *sqlstore.Store
	world *fake.World
	ext   *fake.Extension
	other *fake.Extension // of setup.other
	gone  chan struct{}   // after sever: closed when nothing of the manager runs any more
}

type setup struct {
	dir      string
	world    *fake.World
	fake     fake.Config
	backend  backend.Options
	opts     Options
	profiles []sandboxer.Profile
	inputs   []sandboxer.Input
	max      int                                       // of ext.fake
	idle     bool                                      // not started
	wrap     func(*fake.Extension) sandboxer.Extension // nil leaves the fake as it is
	other    *fake.World                               // behind ext.other, which has no snapshots of its own
	database func(sandboxer.Store) sandboxer.Store     // nil: as they are
}

var testKey = bytes.Repeat([]byte{7}, 32)

func testProfiles() []sandboxer.Profile {
	return []sandboxer.Profile{
		{ID: "profile.test", Extension: "ext.fake", TTL: 10 * time.Minute, MaxTTL: 2 * time.Hour, Env: map[string]string{"FROM": "profile"}},
		{ID: "profile.paid", Extension: "ext.fake", TTL: time.Hour, Price: sandboxer.Price{Setup: 20_000, PerHour: 120_000},
			Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}},
		{ID: "profile.lazy", Extension: "ext.fake", TTL: time.Hour, Idle: time.Minute},
	}
}

func newRig(t testing.TB, change func(*setup)) *rig {
	t.Helper()
	s := setup{
		dir: t.TempDir(), world: nil,
		fake:     fake.Config{},
		opts:     Options{Owner: "test", Key: testKey, SweepEvery: time.Hour, Grace: time.Minute},
		profiles: testProfiles(),
		inputs:   fake.Adapter.Inputs,
	}
	if change != nil {
		change(&s)
	}
	if s.world == nil {
		s.world = fake.NewWorld()
		t.Cleanup(func() { s.world.Close() })
	}
	if s.opts.Log == nil {
		s.opts.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	r := &rig{t: t, setup: s, world: s.world}
	if err := r.open(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

func (r *rig) open() error {
	store, err := sqlstore.OpenSQLite(context.Background(), r.setup.dir, sqlstore.Options{Reserve: -1})
	if err != nil {
		return err
	}
	r.store = store
	cfg := r.setup.fake
	cfg.Owner = r.setup.opts.Owner
	r.ext = fake.New(r.world, cfg)
	var ext sandboxer.Extension = r.ext
	if r.setup.wrap != nil {
		ext = r.setup.wrap(r.ext)
	}
	opts := r.setup.backend
	opts.Inputs = r.setup.inputs
	b := backend.New("ext.fake", ext, opts)
	info := sandboxer.ExtensionInfo{
		ID: "ext.fake", Adapter: "fake", Isolation: fake.Adapter.Isolation,
		Capabilities: b.Capabilities(), Inputs: r.setup.inputs, Max: r.setup.max,
	}
	exts := []Extension{{Info: info, Backend: b}}
	if r.setup.other != nil {
		cfg.Drop = []sandboxer.Capability{sandboxer.CanSnapshot, sandboxer.CanPause, sandboxer.CanCheckpoint}
		r.other = fake.New(r.setup.other, cfg)
		b := backend.New("ext.other", r.other, opts)
		info.ID, info.Capabilities = "ext.other", b.Capabilities()
		exts = append(exts, Extension{Info: info, Backend: b})
	}
	db := sandboxer.Store(store)
	if r.setup.database != nil {
		db = r.setup.database(store)
	}
	mopts := r.setup.opts
	mopts.WentBack = store.WentBack()
	m, err := New(db, r.setup.profiles, exts, mopts)
	if err != nil {
		return err
	}
	r.Manager = m
	if r.setup.idle {
		return nil
	}
	return m.Start(context.Background())
}

func (r *rig) close() {
	r.t.Helper()
	if err := r.Manager.Close(); err != nil {
		r.t.Error(err)
	}
	if err := r.store.Close(); err != nil {
		r.t.Error(err)
	}
}

// restart is a broker that stops in good order and comes back.
func (r *rig) restart() {
	r.t.Helper()
	r.close()
	if err := r.open(); err != nil {
		r.t.Fatal(err)
	}
}

// sever is what a crash is for everybody else: nothing that the manager does from now on reaches the database or a backend.
func (r *rig) sever() {
	for _, ext := range []*fake.Extension{r.ext, r.other} {
		if ext != nil {
			ext.Inject(fake.Fault{Verb: fake.VerbAny, Kind: sandboxer.Unavailable})
		}
	}
	r.store.Close()
	m, gone := r.Manager, make(chan struct{})
	r.gone = gone
	go func() {
		defer close(gone)
		m.Close()
	}()
}

func as(tenant string, scopes ...sandboxer.Scope) context.Context {
	if len(scopes) == 0 {
		scopes = []sandboxer.Scope{sandboxer.ScopeRead, sandboxer.ScopeWrite}
	}
	return sandboxer.WithPrincipal(context.Background(), sandboxer.Principal{Tenant: tenant, Actor: "user:" + tenant, Scopes: scopes})
}

var (
	acme  = as(sandboxer.DefaultTenant)
	rival = as("rival")
	admin = as("root", sandboxer.ScopeAdmin)
)

func (r *rig) create(req sandboxer.CreateRequest) *sandboxer.Sandbox {
	r.t.Helper()
	if req.Profile == "" {
		req.Profile = "test"
	}
	sb, err := r.Create(acme, req)
	if err != nil {
		r.t.Fatalf("create: %v", err)
	}
	return sb
}

func (r *rig) destroy(id string) *sandboxer.Sandbox {
	r.t.Helper()
	sb, err := r.Destroy(acme, id)
	if err != nil {
		r.t.Fatalf("destroy %s: %v", id, err)
	}
	return sb
}

func (r *rig) get(id string) *sandboxer.Sandbox {
	r.t.Helper()
	sb, err := r.Get(admin, id)
	if err != nil {
		r.t.Fatalf("get %s: %v", id, err)
	}
	return sb
}

// await polls until the sandbox is in state.
func (r *rig) await(id string, state sandboxer.State) *sandboxer.Sandbox {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(admin, time.Minute)
	defer cancel()
	sb, err := r.Wait(ctx, id, state)
	if err != nil {
		r.t.Fatalf("wait for %s to be %s: %v", id, state, err)
	}
	return sb
}

// sound fails the test if an invariant is broken, or more than want objects live.
func (r *rig) sound(want int) {
	r.t.Helper()
	a, err := r.Audit(admin)
	if err != nil {
		r.t.Fatalf("audit: %v", err)
	}
	for _, v := range a.Violations {
		r.t.Errorf("audit: %s: %s: %s", v.SandboxID, v.Invariant, v.Detail)
	}
	if n := len(r.world.Live()); n != want {
		r.t.Errorf("%d objects live, want %d", n, want)
	}
	for _, f := range fake.Audit(r.world.Log(), want == 0 && len(r.world.Snapshots()) == 0) {
		r.t.Errorf("world: %s", f)
	}
}

func (r *rig) noHolds() {
	r.t.Helper()
	holds, err := r.store.OpenHolds(context.Background())
	if err != nil || len(holds) > 0 {
		r.t.Errorf("open holds %v, %v", holds, err)
	}
}

// heldUp is a change of a setup after which nothing gets to a step before let is called.
// Cleanup has to call it, too, before the rig is closed.
func heldUp(step point) (hold func(*setup), let func()) {
	gate := make(chan struct{})
	return func(s *setup) {
		s.opts.fail = func(p point) {
			if p == step+".before" {
				<-gate
			}
		}
	}, sync.OnceFunc(func() { close(gate) })
}

// wantErr checks kind and text of err.
func wantErr(t testing.TB, err error, kind sandboxer.Kind, text string) {
	t.Helper()
	if sandboxer.KindOf(err) != kind || !strings.Contains(sandboxer.Message(err)+sandboxer.HintOf(err), text) {
		t.Errorf("error %v (%s), want kind %s and %q in it", err, sandboxer.KindOf(err), kind, text)
	}
}

// eventually polls until ok holds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func history(t testing.TB, m *Manager, id string) string {
	t.Helper()
	events, err := m.Events(admin, sandboxer.EventQuery{SandboxID: id})
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, ev := range events {
		if ev.Type == sandboxer.EventState {
			fmt.Fprintf(&b, "g%d %s→%s %s %s; ", ev.Generation, ev.From, ev.To, ev.Cause, ev.Actor)
		} else {
			fmt.Fprintf(&b, "g%d %s %s; ", ev.Generation, ev.Type, ev.Actor)
		}
	}
	return strings.TrimSuffix(b.String(), "; ")
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "init" { // the agent of a fake sandbox
		os.Exit(agent.Main(os.Args[1:]))
	}
	if role := os.Getenv(roleVar); role != "" { // a process of the crash tests
		os.Exit(play(role))
	}
	goleak.VerifyTestMain(m)
}

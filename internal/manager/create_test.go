package manager

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/access"
)

// many calls f n times at once and returns the answers.
func many(n int, f func(i int) (*sandboxer.Sandbox, error)) (sbs []*sandboxer.Sandbox, errs []error) {
	sbs, errs = make([]*sandboxer.Sandbox, n), make([]error, n)
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-start
			sbs[i], errs[i] = f(i)
		})
	}
	close(start)
	wg.Wait()
	return sbs, errs
}

// TestCoalesce lets 100 callers ask for the same thing at once.
func TestCoalesce(t *testing.T) {
	requests := map[string]func(i int) sandboxer.CreateRequest{
		"thread": func(int) sandboxer.CreateRequest {
			return sandboxer.CreateRequest{Profile: "paid", Thread: sandboxer.Thread{ID: "t-1"}}
		},
		"id": func(int) sandboxer.CreateRequest {
			return sandboxer.CreateRequest{Profile: "paid", Inputs: map[string]string{"sandbox_id": "chosen"}}
		},
		"key": func(int) sandboxer.CreateRequest { return sandboxer.CreateRequest{Profile: "paid", Key: "k"} },
		"thread, each with a key of its own": func(i int) sandboxer.CreateRequest {
			return sandboxer.CreateRequest{Profile: "paid", Thread: sandboxer.Thread{ID: "t-1"}, Key: fmt.Sprint("k", i)}
		},
		"thread, all with one key": func(int) sandboxer.CreateRequest {
			return sandboxer.CreateRequest{Profile: "paid", Thread: sandboxer.Thread{ID: "t-1"}, Key: "k"}
		},
	}
	faults := map[string]struct {
		fault fake.Fault
		kind  sandboxer.Kind
	}{
		"works":          {fake.Fault{Verb: fake.VerbProvision, Delay: 20 * time.Millisecond}, ""},
		"provision":      {fake.Fault{Verb: fake.VerbProvision, Delay: 20 * time.Millisecond, Kind: sandboxer.Failed}, sandboxer.Failed},
		"ready":          {fake.Fault{Verb: fake.VerbWaitReady, Delay: 20 * time.Millisecond, Kind: sandboxer.Exhausted}, sandboxer.Exhausted},
		"lost answer":    {fake.Fault{Verb: fake.VerbProvision, Delay: 20 * time.Millisecond, Lost: true}, sandboxer.Unavailable},
		"wrong handle":   {fake.Fault{Verb: fake.VerbProvision, Delay: 20 * time.Millisecond, Lie: true}, sandboxer.Internal},
		"vanishes early": {fake.Fault{Verb: fake.VerbWaitReady, Delay: 20 * time.Millisecond, Kind: sandboxer.NotFound}, sandboxer.Failed},
	}
	const callers = 100
	for rname, request := range requests {
		for fname, f := range faults {
			t.Run(rname+"/"+fname, func(t *testing.T) {
				r := newRig(t, quiet)
				// Credit for one: a second one, even for a moment, would be refused.
				if err := r.Grant(admin, sandboxer.DefaultTenant, 150_000, "", ""); err != nil {
					t.Fatal(err)
				}
				r.world.Inject(f.fault)
				sbs, errs := many(callers, func(i int) (*sandboxer.Sandbox, error) { return r.Create(acme, request(i)) })
				generations := map[string]bool{}
				for i := range callers {
					if sandboxer.KindOf(errs[i]) != f.kind {
						t.Fatalf("caller %d got %v, want kind %q", i, errs[i], f.kind)
					}
					if f.kind == "" {
						generations[fmt.Sprint(sbs[i].ID, sbs[i].Generation)] = true
					}
				}
				if f.kind != "" {
					r.sound(0)
					r.noHolds()
					return
				}
				if len(generations) != 1 {
					t.Errorf("%d sandboxes for one request: %v", len(generations), generations)
				}
				r.sound(1)
				// Asking again, with every key, still answers the same.
				for i := range callers {
					if sb, err := r.Create(acme, request(i)); err != nil || sb.ID != sbs[0].ID || sb.Generation != sbs[0].Generation {
						t.Fatalf("asked again: %v, %v", sb, err)
					}
				}
				r.destroy(sbs[0].ID)
				r.sound(0)
				r.noHolds()
			})
		}
	}
}

func TestIdempotencyKey(t *testing.T) {
	r := newRig(t, nil)
	req := sandboxer.CreateRequest{Profile: "test", Key: "k", Env: map[string]string{"A": "1"}}
	sb := r.create(req)

	other := req
	other.Env = map[string]string{"A": "2"}
	_, err := r.Create(acme, other)
	wantErr(t, err, sandboxer.Conflict, "was used for another request")

	theirs, err := r.Create(rival, req)
	if err != nil || theirs.ID == sb.ID {
		t.Errorf("another tenant's key is another key: %v, %v", theirs, err)
	}
	req.NoWaiting = true // says how to answer, not what to make
	if again := r.create(req); again.ID != sb.ID {
		t.Errorf("asked again: %s, want %s", again.ID, sb.ID)
	}
	r.restart()
	if again := r.create(req); again.ID != sb.ID {
		t.Errorf("asked again after a restart: %s, want %s", again.ID, sb.ID)
	}
	r.destroy(sb.ID)
	if again := r.create(req); again.ID != sb.ID || again.State != sandboxer.Terminated {
		t.Errorf("asked again after the destroy: %+v", again)
	}

	// A key that joins what another request made is a key of that for good.
	thread := sandboxer.CreateRequest{Profile: "test", Thread: sandboxer.Thread{ID: "t"}}
	first := r.create(thread)
	thread.Key = "joins"
	if joined := r.create(thread); joined.ID != first.ID || joined.Generation != 1 {
		t.Errorf("joined %+v", joined)
	}
	r.destroy(first.ID)
	if again := r.create(thread); again.Generation != 1 || again.State != sandboxer.Terminated {
		t.Errorf("asked again with the key that joined: generation %d, %s", again.Generation, again.State)
	}
	other = thread
	other.TTL = time.Hour
	_, err = r.Create(acme, other)
	wantErr(t, err, sandboxer.Conflict, "was used for another request")

	// A failure that does not pass is repeated as it was.
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Failed, Times: 1})
	req = sandboxer.CreateRequest{Profile: "test", Key: "f"}
	_, err1 := r.Create(acme, req)
	_, err2 := r.Create(acme, req)
	if sandboxer.KindOf(err1) != sandboxer.Failed || sandboxer.Message(err1) != sandboxer.Message(err2) || sandboxer.KindOf(err2) != sandboxer.Failed {
		t.Errorf("failed with %v, then %v", err1, err2)
	}
	r.sound(1)
}

func TestKeyOfPassingFailure(t *testing.T) {
	for _, kind := range []sandboxer.Kind{sandboxer.Unavailable, sandboxer.Timeout, sandboxer.Exhausted} {
		r := newRig(t, nil)
		req := sandboxer.CreateRequest{Profile: "test", Key: "k"}
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Kind: kind, Times: 1})
		_, err := r.Create(acme, req)
		wantErr(t, err, kind, "")
		r.restart()
		ids := make(chan string, 8)
		for range cap(ids) {
			go func() {
				sb, err := r.Create(acme, req)
				if err != nil {
					t.Errorf("%s: tried again: %v", kind, err)
					ids <- ""
					return
				}
				ids <- sb.ID
			}()
		}
		first := <-ids
		for range cap(ids) - 1 {
			if id := <-ids; id != first {
				t.Errorf("%s: one key made %q and %q", kind, first, id)
			}
		}
		r.sound(1)
	}
}

func TestIDs(t *testing.T) {
	r := newRig(t, nil)
	thread := sandboxer.CreateRequest{Profile: "test", Thread: sandboxer.Thread{ID: "thread-1"}}
	sb := r.create(thread)
	if sb.ID != "fe0dc8182dec7b77" {
		t.Errorf("the thread's ID is %s", sb.ID)
	}
	thread.Profile = "lazy"
	_, err := r.Create(acme, thread)
	wantErr(t, err, sandboxer.Conflict, "belongs to another sandbox")

	r.destroy(sb.ID)
	thread.Profile = "test"
	next := r.create(thread)
	if next.ID != sb.ID || next.Generation != 2 {
		t.Errorf("after a destroy: %s, generation %d", next.ID, next.Generation)
	}
	named := r.create(sandboxer.CreateRequest{Name: "db"})
	_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "test", Name: "db"})
	wantErr(t, err, sandboxer.Conflict, `the name "db" belongs to sandbox `+named.ID)
	if _, err := r.Create(rival, sandboxer.CreateRequest{Profile: "test", Name: "db"}); err != nil {
		t.Errorf("another tenant's name: %v", err)
	}
	r.destroy("db")
	if again := r.create(sandboxer.CreateRequest{Name: "db"}); again.ID == named.ID {
		t.Error("a name is free again after its sandbox ended")
	}
	r.sound(3)
}

// TestCreateDuringDestroy is a create of an ID whose former sandbox is going.
func TestCreateDuringDestroy(t *testing.T) {
	r := newRig(t, nil)
	req := sandboxer.CreateRequest{Profile: "test", Thread: sandboxer.Thread{ID: "t"}}
	sb := r.create(req)
	r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, Delay: 50 * time.Millisecond, Times: 1})
	gone := make(chan error, 1)
	go func() { _, err := r.Destroy(acme, sb.ID); gone <- err }()
	r.awaitEvent(sb.ID, sandboxer.Terminating)
	sbs, errs := many(20, func(int) (*sandboxer.Sandbox, error) { return r.Create(acme, req) })
	for i := range sbs {
		if errs[i] != nil || sbs[i].Generation != 2 || sbs[i].State != sandboxer.Running {
			t.Fatalf("%+v, %v", sbs[i], errs[i])
		}
	}
	if err := <-gone; err != nil {
		t.Error(err)
	}
	r.sound(1)

	// Its teardown fails: the new one must wait, and says so.
	r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, Kind: sandboxer.Unavailable})
	_, err := r.Destroy(acme, sb.ID)
	wantErr(t, err, sandboxer.Unavailable, "not removed yet")
	_, err = r.Create(acme, req)
	wantErr(t, err, sandboxer.Unavailable, "not removed yet")
	r.world.Forgive()
	r.create(req)
	r.sound(1)
}

// awaitEvent waits until the sandbox was in a state at some time.
func (r *rig) awaitEvent(id string, state sandboxer.State) {
	r.t.Helper()
	eventually(r.t, fmt.Sprint(id, " ", state), func() bool {
		events, err := r.store.Events(context.Background(), sandboxer.EventQuery{SandboxID: id, Limit: sandboxer.MaxPage})
		if err != nil {
			r.t.Fatal(err)
		}
		for _, ev := range events {
			if ev.To == state {
				return true
			}
		}
		return false
	})
}

// TestClientLeaves aborts a create at any moment: the work goes on.
func TestClientLeaves(t *testing.T) {
	r := newRig(t, nil)
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Delay: 20 * time.Millisecond}, fake.Fault{Verb: fake.VerbWaitReady, Delay: 20 * time.Millisecond})
	req := sandboxer.CreateRequest{Profile: "test", Key: "k"}
	ctx, cancel := context.WithTimeout(acme, 10*time.Millisecond)
	defer cancel()
	_, err := r.Create(ctx, req)
	wantErr(t, err, sandboxer.Timeout, "")
	sb := r.create(req)
	if sb.State != sandboxer.Running {
		t.Errorf("%+v", sb)
	}
	r.sound(1)
}

func TestNoWaiting(t *testing.T) {
	hold, let := heldUp(pProvision)
	r := newRig(t, hold)
	t.Cleanup(let)
	sb := r.create(sandboxer.CreateRequest{NoWaiting: true})
	if sb.State != sandboxer.Creating {
		t.Errorf("answered with %s", sb.State)
	}
	_, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"true"}})
	wantErr(t, err, sandboxer.Conflict, "is creating, not running")
	let()
	r.await(sb.ID, sandboxer.Running)

	r.world.Inject(fake.Fault{Verb: fake.VerbWaitReady, Kind: sandboxer.Failed, Times: 1})
	sb = r.create(sandboxer.CreateRequest{NoWaiting: true})
	_, err = r.Wait(acme, sb.ID, sandboxer.Running)
	wantErr(t, err, sandboxer.Failed, "could not be created")
	r.await(sb.ID, sandboxer.Terminated)

	r.world.Inject(fake.Fault{Verb: fake.VerbWaitReady, Silent: true, Times: 1}) // which the backend has a hint for
	sb = r.create(sandboxer.CreateRequest{NoWaiting: true})
	_, err = r.Wait(acme, sb.ID, sandboxer.Running)
	if hint := sandboxer.HintOf(err); hint != "remove the fault" {
		t.Errorf("what the backend said to do is %q: %v", hint, err)
	}
	r.await(sb.ID, sandboxer.Terminated)

	_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "test", NoWaiting: true, TTL: 1000 * time.Hour})
	wantErr(t, err, sandboxer.Invalid, "longer than profile")
	r.sound(1)
}

// TestRefused is every request that must not make anything, with what a person reads.
func TestRefused(t *testing.T) {
	inputs := []sandboxer.Input{
		{Name: "repo", Help: "what to work on", OneOf: "source", Restricted: true}, {Name: "vm", Help: "a machine", OneOf: "source"},
		{Name: "branch", Help: "which branch", Required: true},
	}
	profiles := []sandboxer.Profile{
		{ID: "profile.open", Extension: "ext.fake", Inputs: map[string]string{"branch": "main", "vm": "x"}, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}},
		{ID: "profile.strict", Extension: "ext.fake", TTL: time.Minute, MaxTTL: time.Hour,
			Limits: sandboxer.Limits{MilliCPU: 1000, MemoryBytes: 1 << 30}, Inputs: map[string]string{"branch": "main", "vm": "x"},
			Mounts: []sandboxer.Mount{{Source: "/srv/data", Target: "/data", ReadOnly: true}}},
		{ID: "profile.bare", Extension: "ext.fake", Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"example.org"}}},
		{ID: "profile.broken", Extension: "ext.none"},
	}
	r := newRig(t, func(s *setup) { s.inputs, s.profiles = inputs, profiles[:3] })
	ok := map[string]string{"branch": "b", "vm": "v"}
	allow := func(dst ...string) *sandboxer.NetworkPolicy {
		return &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: dst}
	}
	type request = sandboxer.CreateRequest
	for name, c := range map[string]struct {
		req  request
		kind sandboxer.Kind
		text string
	}{
		"no profile":               {request{}, sandboxer.Invalid, "no profile given"},
		"unknown profile":          {request{Profile: "profile.opem"}, sandboxer.Invalid, `did you mean "profile.open"?`},
		"unknown, no prefix":       {request{Profile: "strct"}, sandboxer.Invalid, `did you mean "profile.strict"?`},
		"unknown input":            {request{Profile: "open", Inputs: map[string]string{"rpeo": "x"}}, sandboxer.Invalid, `did you mean "repo"?`},
		"required input":           {request{Profile: "bare", Inputs: map[string]string{"vm": "x"}}, sandboxer.Invalid, `needs the input "branch": which branch`},
		"required input, empty":    {request{Profile: "open", Inputs: map[string]string{"branch": ""}}, sandboxer.Invalid, `needs the input "branch"`},
		"one of":                   {request{Profile: "bare", Inputs: map[string]string{"branch": "b"}}, sandboxer.Invalid, "one of the inputs repo, vm"},
		"token in URL":             {request{Profile: "open", Inputs: map[string]string{"repo": "https://ghp_x@example.org/a.git"}}, sandboxer.Invalid, "contains credentials"},
		"password in URL":          {request{Profile: "open", Inputs: map[string]string{"repo": "ssh://git:hunter2@example.org/a.git"}}, sandboxer.Invalid, "contains credentials"},
		"broken URL":               {request{Profile: "open", Inputs: map[string]string{"repo": "https://u:hunter2@exa mple.org/%zz"}}, sandboxer.Invalid, "not a usable URL"},
		"host path":                {request{Profile: "open", Inputs: map[string]string{"repo": "/etc"}}, sandboxer.Denied, "only an administrator"},
		"relative host path":       {request{Profile: "open", Inputs: map[string]string{"repo": "somewhere"}}, sandboxer.Denied, "only an administrator"},
		"image path":               {request{Profile: "open", Image: "dir:/etc"}, sandboxer.Denied, "only an administrator"},
		"bad id":                   {request{Profile: "open", Inputs: map[string]string{"sandbox_id": "A b"}}, sandboxer.Invalid, "is not a sandbox ID"},
		"bad thread":               {request{Profile: "open", Thread: sandboxer.Thread{ID: "a b"}}, sandboxer.Invalid, "is not a thread ID"},
		"thread user only":         {request{Profile: "open", Thread: sandboxer.Thread{User: "u"}}, sandboxer.Invalid, "without a thread"},
		"bad name":                 {request{Profile: "open", Name: "No Way"}, sandboxer.Invalid, "cannot be the name"},
		"bad key":                  {request{Profile: "open", Key: "a b"}, sandboxer.Invalid, "idempotency key"},
		"negative ttl":             {request{Profile: "open", TTL: -time.Second}, sandboxer.Invalid, "negative"},
		"tiny ttl":                 {request{Profile: "open", TTL: 1}, sandboxer.Invalid, "too short"},
		"long ttl":                 {request{Profile: "strict", TTL: 2 * time.Hour}, sandboxer.Invalid, "longer than profile profile.strict allows (1h)"},
		"default longest ttl":      {request{Profile: "open", TTL: 25 * time.Hour}, sandboxer.Invalid, "allows (1d)"},
		"bad env":                  {request{Profile: "open", Env: map[string]string{"A=B": "c"}}, sandboxer.Invalid, "environment variable"},
		"bad label":                {request{Profile: "open", Labels: map[string]string{"": "c"}}, sandboxer.Invalid, "label"},
		"more cpu":                 {request{Profile: "strict", Limits: sandboxer.Limits{MilliCPU: 1001}}, sandboxer.Invalid, "milli_cpu=1001 is more than profile profile.strict allows (1000)"},
		"negative limit":           {request{Profile: "open", Limits: sandboxer.Limits{PIDs: -1}}, sandboxer.Invalid, "pids=-1 is negative"},
		"wider network":            {request{Profile: "strict", Network: &sandboxer.NetworkPolicy{Mode: "public"}}, sandboxer.Invalid, "wider than the profile's (none)"},
		"unknown network":          {request{Profile: "strict", Network: &sandboxer.NetworkPolicy{Mode: "publik"}}, sandboxer.Invalid, `did you mean "public"?`},
		"list without mode":        {request{Profile: "open", Network: &sandboxer.NetworkPolicy{Mode: "none", Allow: []string{"a"}}}, sandboxer.Invalid, "use the mode allow"},
		"allow nothing":            {request{Profile: "open", Network: allow()}, sandboxer.Invalid, "names nothing"},
		"allow metadata":           {request{Profile: "open", Network: allow("169.254.169.254")}, sandboxer.Invalid, "never reach it"},
		"allow private":            {request{Profile: "open", Network: allow("10.1.2.3:80")}, sandboxer.Invalid, "wider"},
		"allow private, disguised": {request{Profile: "open", Network: allow("::ffff:10.1.2.3")}, sandboxer.Invalid, "an IPv4 address as one"},
		"allow private, within":    {request{Profile: "open", Network: allow("192.0.0.0/8")}, sandboxer.Invalid, "wider"},
		"allow link-local, within": {request{Profile: "open", Network: allow("fc00::/6")}, sandboxer.Invalid, "wider"},
		"allow all":                {request{Profile: "open", Network: allow("0.0.0.0/0")}, sandboxer.Invalid, "wider"},
		"allow other name":         {request{Profile: "bare", Inputs: ok, Network: allow("example.com")}, sandboxer.Invalid, "wider"},
		"mount":                    {request{Profile: "open", Mounts: []sandboxer.Mount{{Source: "/", Target: "/host"}}}, sandboxer.Denied, "does not offer that path for writing, nor does ext.fake"},
		"mount for writing":        {request{Profile: "strict", Mounts: []sandboxer.Mount{{Source: "/srv/data/a", Target: "/a"}}}, sandboxer.Denied, "does not offer"},
		"mount beside":             {request{Profile: "strict", Mounts: []sandboxer.Mount{{Source: "/srv/database", Target: "/a", ReadOnly: true}}}, sandboxer.Denied, "does not offer"},
		"mount with dots":          {request{Profile: "strict", Mounts: []sandboxer.Mount{{Source: "/srv/data/../x", Target: "/a", ReadOnly: true}}}, sandboxer.Invalid, "clean absolute"},
		"mount twice":              {request{Profile: "strict", Mounts: []sandboxer.Mount{{Source: "/srv/data", Target: "/data", ReadOnly: true}}}, sandboxer.Invalid, "already"},
		"negative cost":            {request{Profile: "open", MaxCost: -1}, sandboxer.Invalid, "negative"},
		"huge":                     {request{Profile: "open", Command: []string{strings.Repeat("x", 256<<10)}}, sandboxer.Invalid, "at most"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := r.Create(acme, c.req)
			wantErr(t, err, c.kind, c.text)
			if strings.Contains(fmt.Sprint(err), "hunter2") || strings.Contains(fmt.Sprint(err), "ghp_x") {
				t.Errorf("the error repeats the secret: %v", err)
			}
			if _, perr := r.Plan(acme, c.req); sandboxer.KindOf(perr) != sandboxer.KindOf(err) || sandboxer.Message(perr) != sandboxer.Message(err) {
				t.Errorf("plan says %v", perr)
			}
		})
	}
	if n, _, err := r.List(admin, sandboxer.Query{}); len(n) != 0 || err != nil {
		t.Errorf("%d records after refusals, %v", len(n), err)
	}
	r.sound(0)

	_, err := New(r.store, profiles, nil, r.setup.opts)
	wantErr(t, err, sandboxer.Invalid, "profile.broken is on extension ext.none, which does not exist")
}

func TestNewRefuses(t *testing.T) {
	r := newRig(t, func(s *setup) { s.idle = true; s.fake.Drop = []sandboxer.Capability{sandboxer.CanExec} })
	ok := r.setup.opts
	e := func() []Extension { return []Extension{r.Manager.extensions()[0].Extension} }
	for name, c := range map[string]struct {
		change   func(*Options)
		profiles []sandboxer.Profile
		exts     []Extension
		text     string
	}{
		"owner":     {func(o *Options) { o.Owner = "My Laptop" }, nil, e(), "name of an installation"},
		"key":       {func(o *Options) { o.Key = []byte("short") }, nil, e(), "has 5 bytes; want 32"},
		"twice":     {nil, nil, append(e(), e()...), "configured twice"},
		"requires":  {nil, []sandboxer.Profile{{ID: "profile.x", Extension: "ext.fake", Requires: []sandboxer.Capability{"exec", "files"}}}, e(), "extension ext.fake lacks exec, which the profile requires"},
		"isolation": {nil, []sandboxer.Profile{{ID: "profile.x", Extension: "ext.fake", Isolation: sandboxer.IsolationVM}}, e(), "does not isolate by vm (it gives process)"},
		"extension": {nil, []sandboxer.Profile{{ID: "profile.x", Extension: "ext.fade"}, {ID: "profile.y", Extension: "ext.fake", Isolation: "vm"}}, e(), "profile.y"},
		"same ID":   {nil, []sandboxer.Profile{{ID: "profile.x", Extension: "ext.fake"}, {ID: "profile.x", Extension: "ext.fake"}}, e(), "exists twice"},
	} {
		t.Run(name, func(t *testing.T) {
			opts := ok
			if c.change != nil {
				c.change(&opts)
			}
			_, err := New(r.store, c.profiles, c.exts, opts)
			wantErr(t, err, sandboxer.Invalid, c.text)
		})
	}

	// An extension that this machine cannot open is no reason not to start.
	broken := []Extension{{Info: sandboxer.ExtensionInfo{ID: "ext.fake", Problem: "there is no engine"}}}
	m, err := New(r.store, testProfiles(), broken, ok)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	_, err = m.Create(acme, sandboxer.CreateRequest{Profile: "test"})
	wantErr(t, err, sandboxer.Unavailable, "there is no engine")
	_, err = m.Probe(acme, "fake")
	wantErr(t, err, sandboxer.Unavailable, "there is no engine")
}

func TestPlan(t *testing.T) {
	r := newRig(t, nil)
	p, err := r.Plan(acme, sandboxer.CreateRequest{Profile: "paid", TTL: 30 * time.Minute, Env: map[string]string{"A": "b"}})
	if err != nil || p.Extension != "ext.fake" || p.TTL != 30*time.Minute || p.Quote.Amount != 80_000 || p.Spec.Env["A"] != "b" {
		t.Errorf("%+v, %v", p, err)
	}
	r.sound(0)
}

// TestRestartMidway stops the broker in good order in the middle of a create.
func TestRestartMidway(t *testing.T) {
	for _, verb := range []fake.Verb{fake.VerbProvision, fake.VerbWaitReady} {
		for _, lost := range []bool{false, true} {
			t.Run(fmt.Sprint(verb, " lost=", lost), func(t *testing.T) {
				r := newRig(t, nil)
				r.world.Inject(fake.Fault{Verb: verb, Hang: true, Lost: lost, Times: 1})
				req := sandboxer.CreateRequest{Profile: "test", Key: "k", Env: map[string]string{"A": "secret"}}
				answer := make(chan error, 1)
				go func() { _, err := r.Create(acme, req); answer <- err }()
				var id string
				eventually(t, "a record", func() bool {
					items, _, _ := r.store.Sandboxes(context.Background(), sandboxer.Query{})
					for _, sb := range items {
						id = sb.ID
					}
					return id != "" && len(r.world.Live()) == map[bool]int{true: 1, false: 0}[lost || verb == fake.VerbWaitReady]
				})
				r.close()
				r.world.Forgive()
				r.open()
				wantErr(t, <-answer, sandboxer.Unavailable, "the broker is stopping")
				sb := r.create(req)
				if sb.ID != id || sb.Generation != 1 || sb.State != sandboxer.Running {
					t.Errorf("%+v, want the sandbox %s", sb, id)
				}
				var out bytes.Buffer
				if _, err := r.Exec(acme, id, sandboxer.Cmd{Args: []string{"sh", "-c", "echo $A"}, Stdout: &out}); err != nil || out.String() != "secret\n" {
					t.Errorf("the environment did not survive: %q, %v", out.String(), err)
				}
				r.sound(1)
			})
		}
	}
}

// TestVanishedMidway loses the half-made object itself over a restart.
func TestVanishedMidway(t *testing.T) {
	r := newRig(t, nil)
	r.world.Inject(fake.Fault{Verb: fake.VerbWaitReady, Hang: true, Times: 1})
	sb := r.create(sandboxer.CreateRequest{NoWaiting: true})
	eventually(t, "an object", func() bool { return len(r.world.Live()) == 1 && r.get(sb.ID).Handle.SandboxID != "" })
	r.close()
	r.world.Forgive()
	r.world.Kill(sb.ID)
	r.open()
	r.await(sb.ID, sandboxer.Running)
	r.sound(1)
}

// TestSecretsAreSealed looks for a canary in everything that is kept.
func TestSecretsAreSealed(t *testing.T) {
	r := newRig(t, func(s *setup) { s.profiles[0].Env = map[string]string{"P": "canary-profile"} })
	sb := r.create(sandboxer.CreateRequest{Env: map[string]string{"S": "canary-request"}})
	if len(r.get(sb.ID).Spec.Env) != 0 || len(r.get(sb.ID).Spec.Profile.Env) != 0 {
		t.Error("the record shows the environment")
	}
	secret, _, err := r.CreateKey(admin, NewKey{Name: "ci", Scopes: []sandboxer.Scope{sandboxer.ScopeRead}})
	if err != nil {
		t.Fatal(err)
	}
	r.destroy(sb.ID)
	r.close()
	r.setup.idle = true
	defer r.open()
	files, err := filepath.Glob(filepath.Join(r.setup.dir, "*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		_, tail, _ := strings.Cut(strings.TrimPrefix(secret.Reveal(), access.TokenPrefix), "_")
		for _, canary := range []string{"canary-profile", "canary-request", tail} {
			if bytes.Contains(b, []byte(canary)) {
				t.Errorf("%s contains %s", filepath.Base(name), canary)
			}
		}
	}
}

// TestSealedApart moves one sandbox's environment to another's record.
func TestSealedApart(t *testing.T) {
	r := newRig(t, func(s *setup) { s.idle = true })
	a, b := &sandboxer.Sandbox{ID: "a", Generation: 1, Tenant: "x"}, &sandboxer.Sandbox{ID: "a", Generation: 2, Tenant: "x"}
	var err error
	if a.SealedEnv, err = r.box(a).sealEnv(map[string]string{"S": "x"}); err != nil {
		t.Fatal(err)
	}
	if env, err := r.box(a).openEnv(); err != nil || env["S"] != "x" {
		t.Errorf("%v, %v", env, err)
	}
	for _, sealed := range [][]byte{a.SealedEnv, a.SealedEnv[:5], append([]byte{1}, a.SealedEnv...)} {
		b.SealedEnv = sealed
		_, err = r.box(b).openEnv()
		wantErr(t, err, sandboxer.Failed, "cannot be opened")
	}
	again, err := r.box(a).sealEnv(map[string]string{"S": "x"})
	if err != nil || bytes.Equal(again, a.SealedEnv) {
		t.Errorf("sealing twice gives the same bytes, %v", err)
	}
}

func TestReplacedKey(t *testing.T) {
	r := newRig(t, nil)
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Hang: true, Times: 1})
	sb := r.create(sandboxer.CreateRequest{NoWaiting: true, Env: map[string]string{"S": "x"}})
	r.close()
	r.world.Forgive()
	r.setup.opts.Key = bytes.Repeat([]byte{8}, 32)
	r.open()
	_, err := r.Wait(acme, sb.ID, sandboxer.Running)
	wantErr(t, err, sandboxer.Failed, "environment of sandbox "+sb.ID+" cannot be opened")
	r.await(sb.ID, sandboxer.Terminated)
	r.sound(0)
}

// TestCreatesAreBounded lets more creates come than may run at once.
func TestCreatesAreBounded(t *testing.T) {
	r := newRig(t, func(s *setup) { s.opts.Creates = 3; quiet(s) })
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Hang: true, Times: 3})
	var ids []string
	for range 10 {
		ids = append(ids, r.create(sandboxer.CreateRequest{NoWaiting: true}).ID)
	}
	eventually(t, "three at once", func() bool { return len(r.Manager.extensions()[0].creates) == 3 })
	if n := len(r.world.Live()); n != 0 {
		t.Errorf("%d objects while the slots hang", n)
	}
	for _, id := range ids { // also those that wait for a slot can be destroyed
		r.destroy(id)
	}
	r.sound(0)
}

// TestQuotes is who says what it costs.
func TestQuotes(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  fake.Config
		want sandboxer.Credits
	}{
		"the profile": {fake.Config{}, 140_000},
		"the backend": {fake.Config{Setup: 1, PerHour: 1000}, 1001},
		"no quoter":   {fake.Config{Setup: 1, PerHour: 1000, Drop: []sandboxer.Capability{sandboxer.CanQuote}}, 140_000},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(s *setup) { s.fake = c.cfg })
			req := sandboxer.CreateRequest{Profile: "paid"}
			_, err := r.Create(acme, req)
			wantErr(t, err, sandboxer.NoCredit, "it costs up to "+c.want.String()+" credits for 1h0m0s, and default has 0.00")
			if err := r.Grant(admin, sandboxer.DefaultTenant, c.want, "", ""); err != nil {
				t.Fatal(err)
			}
			req.MaxCost = c.want - 1
			_, err = r.Create(acme, req)
			wantErr(t, err, sandboxer.NoCredit, "more than the "+req.MaxCost.String()+" you allow")
			req.MaxCost = c.want
			sb := r.create(req)
			if left, err := r.Balance(acme, ""); err != nil || left != 0 || sb.Quote.Amount != c.want {
				t.Errorf("%s left of %s, %v", left, sb.Quote.Amount, err)
			}
			r.destroy(sb.ID)
			r.sound(0)
			r.noHolds()
		})
	}
}

type asked struct {
	*fake.Extension
	tenant *string
}

func (a asked) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	*a.tenant = spec.Tenant
	return a.Extension.Provision(ctx, spec)
}

// The broker names the tenant of a sandbox to its extension, whatever the caller says of its
// consumer.
func TestTenantOfSpec(t *testing.T) {
	var tenant string
	r := newRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return asked{e, &tenant} }
	})
	sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "profile.test", Consumer: sandboxer.Consumer{ID: "rival", Kind: "ci"}})
	if err != nil {
		t.Fatal(err)
	}
	if tenant != sandboxer.DefaultTenant || sb.Spec.Tenant != "" {
		t.Errorf("it was told %q, and %q is kept; want acme, and nothing", tenant, sb.Spec.Tenant)
	}
}

// TestPlanOfMounts: that locks do not cross a mount is said before anything is made.
func TestPlanOfMounts(t *testing.T) {
	gvisor, container := []sandboxer.Isolation{sandboxer.IsolationGVisor}, []sandboxer.Isolation{sandboxer.IsolationContainer}
	write, read := sandboxer.Mount{Source: "/a", Target: "/b"}, sandboxer.Mount{Source: "/a", Target: "/c", ReadOnly: true}
	for _, c := range []struct {
		by     []sandboxer.Isolation
		mounts []sandboxer.Mount
		want   int
	}{
		{gvisor, []sandboxer.Mount{read, write, write}, 1}, {gvisor, []sandboxer.Mount{read}, 0}, {gvisor, nil, 0},
		{container, []sandboxer.Mount{write}, 0},
	} {
		if got := otherwise(c.by, sandboxer.Spec{Mounts: c.mounts}); len(got) != c.want {
			t.Errorf("%v with %v: %q", c.by, c.mounts, got)
		}
	}
}

package manager

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// roomy is a setup whose extension takes that many sandboxes, with profiles whose requests wait for
// room: wait and other for a minute, one for as long, with one sandbox at most.
func roomy(most int) func(*setup) {
	return func(s *setup) {
		s.max = most
		for id, max := range map[string]int{"profile.wait": 0, "profile.other": 0, "profile.one": 1} {
			s.profiles = append(s.profiles, sandboxer.Profile{ID: id, Extension: "ext.fake", TTL: time.Hour, Max: max, Wait: time.Minute, PauseDepth: sandboxer.PauseFiles})
		}
	}
}

// created is what a create in the background comes to.
type created struct {
	sb  *sandboxer.Sandbox
	err error
}

func (r *rig) createSoon(ctx context.Context, req sandboxer.CreateRequest) <-chan created {
	c := make(chan created, 1)
	go func() {
		sb, err := r.Create(ctx, req)
		c <- created{sb, err}
	}()
	return c
}

func (r *rig) waiting() int {
	r.rooms.mu.Lock()
	defer r.rooms.mu.Unlock()
	n := 0
	for _, l := range r.rooms.lines {
		n += l.waiting
	}
	return n
}

// TestRoom: no request gets more room than there is; a request waits as long as its profile says.
func TestRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, roomy(2))
		a, b := r.create(sandboxer.CreateRequest{}), r.create(sandboxer.CreateRequest{})
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"})
		wantErr(t, err, sandboxer.Exhausted, "extension ext.fake is full: it has 2 of 2 sandboxes")
		if sandboxer.RetryAfterOf(err) <= 0 {
			t.Errorf("%v does not say when to come back", err)
		}
		start := time.Now()
		_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "wait"})
		wantErr(t, err, sandboxer.Exhausted, "no room within 1m: extension ext.fake is full")
		if took := time.Since(start); took != time.Minute || sandboxer.RetryAfterOf(err) <= 0 {
			t.Errorf("it was refused after %s: %v", took, err)
		}
		c := r.createSoon(acme, sandboxer.CreateRequest{Profile: "wait", Key: "k"})
		time.Sleep(40 * time.Second)
		synctest.Wait()
		if r.waiting() != 1 {
			t.Errorf("%d wait; want 1", r.waiting())
		}
		r.destroy(a.ID)
		got := <-c
		if got.err != nil || got.sb.State != sandboxer.Running {
			t.Fatalf("there was room: %+v", got)
		}
		if left := time.Until(got.sb.ExpiresAt); left != time.Hour || !got.sb.Spec.Fuse.After(got.sb.ExpiresAt) {
			t.Errorf("it lives for %s from when it found room; its fuse is %s later", left, got.sb.Spec.Fuse.Sub(got.sb.ExpiresAt))
		}
		if again, err := r.Create(acme, sandboxer.CreateRequest{Profile: "wait", Key: "k"}); err != nil || again.ID != got.sb.ID || again.Found {
			t.Errorf("the key gives %+v, %v", again, err)
		}
		events, err := r.Events(acme, sandboxer.EventQuery{SandboxID: got.sb.ID})
		if err != nil || !slices.ContainsFunc(events, func(ev sandboxer.Event) bool { return ev.Message == "it waited 40s for room" }) {
			t.Errorf("its history does not say how long it waited: %+v, %v", events, err)
		}
		r.destroy(b.ID)
		r.destroy(got.sb.ID)
		r.sound(0)
	})
}

// TestRoomFair: tenants take turns, and of one tenant the first is first.
func TestRoomFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, roomy(1))
		running := r.create(sandboxer.CreateRequest{})
		order := make(chan string, 5)
		var wg sync.WaitGroup
		join := func(ctx context.Context, name string) {
			wg.Go(func() {
				sb, err := r.Create(ctx, sandboxer.CreateRequest{Profile: "wait", Name: name})
				if err != nil {
					t.Errorf("%s: %v", name, err)
					return
				}
				order <- name
				if _, err := r.Destroy(ctx, sb.ID); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		for i := range 3 {
			join(acme, fmt.Sprintf("a%d", i))
		}
		for i := range 2 {
			join(rival, fmt.Sprintf("b%d", i))
		}
		r.destroy(running.ID)
		wg.Wait()
		close(order)
		var got []string
		for name := range order {
			got = append(got, name)
		}
		if want := "a0 b0 a1 b1 a2"; strings.Join(got, " ") != want {
			t.Errorf("the order is %q, want %s", got, want)
		}
		if r.waiting() != 0 || len(r.rooms.lines) != 0 {
			t.Errorf("%d still wait, in %d lines", r.waiting(), len(r.rooms.lines))
		}
		r.sound(0)
	})
}

// TestRoomLines: a line has bounds, for each tenant and in all, and none of it is left.
func TestRoomLines(t *testing.T) {
	r := &rooms{lines: map[string]*line{}}
	var all []*waiter
	join := func(tenant string) error {
		w := &waiter{tenant: tenant, done: make(chan struct{})}
		err := r.join("ext.x", w)
		if err == nil {
			all = append(all, w)
		}
		return err
	}
	for i := range maxWaiting {
		if err := join(fmt.Sprintf("t%d", i/maxWaitingOfTenant)); err != nil {
			t.Fatal(i, err)
		}
		if (i+1)%maxWaitingOfTenant == 0 && i+1 < maxWaiting {
			err := join(fmt.Sprintf("t%d", i/maxWaitingOfTenant))
			wantErr(t, err, sandboxer.Exhausted, "100 requests of tenant")
		}
	}
	err := join("one-more")
	wantErr(t, err, sandboxer.Exhausted, "1000 requests wait for room on extension ext.x")
	if sandboxer.RetryAfterOf(err) <= 0 {
		t.Errorf("%v does not say when to come back", err)
	}
	for _, w := range all {
		r.leave("ext.x", w, errAbandoned)
		<-w.done
		r.leave("ext.x", w, errAbandoned) // done already
	}
	if len(r.lines) != 0 {
		t.Errorf("%d lines are left", len(r.lines))
	}
}

// TestRoomConcurrent: creates at the same time never share a place, and all that wait get one.
func TestRoomConcurrent(t *testing.T) {
	var peak atomic.Int64
	r := newRig(t, func(s *setup) {
		roomy(3)(s)
		s.wrap = func(f *fake.Extension) sandboxer.Extension { return &peaked{f, s.world, &peak} }
	})
	var wg sync.WaitGroup
	for i := range 24 {
		ctx := as(fmt.Sprintf("tenant%d", i%4))
		wg.Go(func() {
			sb, err := r.Create(ctx, sandboxer.CreateRequest{Profile: []string{"wait", "one"}[i%2]})
			if err == nil {
				_, err = r.Destroy(ctx, sb.ID)
			}
			if err != nil {
				t.Errorf("create %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if peak.Load() > 3 || r.waiting() != 0 {
		t.Errorf("%d were there at once where 3 may be, and %d still wait", peak.Load(), r.waiting())
	}
	r.sound(0)
}

// peaked notes how many sandboxes were there at most when one was made.
type peaked struct {
	*fake.Extension
	world *fake.World
	peak  *atomic.Int64
}

func (c *peaked) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	h, err := c.Extension.Provision(ctx, spec)
	n := int64(len(c.world.Live()))
	for p := c.peak.Load(); n > p && !c.peak.CompareAndSwap(p, n); p = c.peak.Load() {
	}
	return h, err
}

// TestRoomProfile: a full profile holds up only its own requests.
func TestRoomProfile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, roomy(0))
		a := r.create(sandboxer.CreateRequest{Profile: "one"})
		c := r.createSoon(acme, sandboxer.CreateRequest{Profile: "one"})
		synctest.Wait()
		b := r.create(sandboxer.CreateRequest{Profile: "wait"})
		if r.waiting() != 1 {
			t.Errorf("%d wait, want 1", r.waiting())
		}
		r.destroy(a.ID)
		got := <-c
		if got.err != nil {
			t.Fatal(got.err)
		}
		// More room is there at once where a profile is changed.
		c = r.createSoon(rival, sandboxer.CreateRequest{Profile: "one"})
		synctest.Wait()
		profiles := slices.Clone(r.setup.profiles)
		for i := range profiles {
			if profiles[i].ID == "profile.one" {
				profiles[i].Max = 2
			}
		}
		if err := r.SetProfiles(profiles); err != nil {
			t.Fatal(err)
		}
		more := <-c
		if more.err != nil {
			t.Fatal(more.err)
		}
		for _, sb := range []*sandboxer.Sandbox{b, got.sb, more.sb} {
			if _, err := r.Destroy(admin, sb.Ref()); err != nil {
				t.Error(err)
			}
		}
		r.sound(0)
	})
}

// TestRoomCallers: a caller that leaves does not wait any more, and nothing is made for it; others who wait for
// the same sandbox go on. Everything also ends with the manager.
func TestRoomCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, roomy(1))
		a := r.create(sandboxer.CreateRequest{})
		alone, leave := context.WithCancel(acme)
		gone := r.createSoon(alone, sandboxer.CreateRequest{Profile: "wait"})
		same := sandboxer.CreateRequest{Profile: "wait", Inputs: map[string]string{"sandbox_id": "shared"}}
		first, second := r.createSoon(alone, same), r.createSoon(acme, same)
		synctest.Wait()
		if r.waiting() != 2 {
			t.Errorf("%d wait, want 2", r.waiting())
		}
		leave()
		for _, c := range []<-chan created{gone, first} {
			if got := <-c; !isKind(got.err, sandboxer.Canceled) {
				t.Errorf("who left got %+v", got)
			}
		}
		synctest.Wait()
		if r.waiting() != 1 {
			t.Errorf("%d wait, want 1", r.waiting())
		}
		r.destroy(a.ID)
		got := <-second
		if got.err != nil || got.sb.ID != "shared" {
			t.Fatalf("%+v", got)
		}
		third := r.createSoon(acme, sandboxer.CreateRequest{Profile: "wait"})
		synctest.Wait()
		r.restart()
		if got := <-third; !isKind(got.err, sandboxer.Unavailable) {
			t.Errorf("at the end of the broker it got %+v", got)
		}
		if n := len(r.world.Live()); n != 1 {
			t.Errorf("%d are there, want 1", n)
		}
		r.destroy("shared")
		r.sound(0)
	})
}

// TestRoomPause: what is paused to files takes no room, and finds some when it goes on.
func TestRoomPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, roomy(1))
		a := r.create(sandboxer.CreateRequest{Profile: "wait"})
		frozen, err := r.Pause(acme, a.ID, PauseRequest{Depth: sandboxer.PauseFreeze})
		if err != nil {
			t.Fatal(err)
		}
		_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "test"})
		wantErr(t, err, sandboxer.Exhausted, "is full")
		if _, err = r.Resume(acme, frozen.ID, ResumeRequest{}); err != nil {
			t.Errorf("one that is frozen has its place: %v", err)
		}
		if _, err := r.Pause(acme, a.ID, PauseRequest{}); err != nil {
			t.Fatal(err)
		}
		b := r.create(sandboxer.CreateRequest{})
		_, err = r.Resume(acme, a.ID, ResumeRequest{})
		wantErr(t, err, sandboxer.Exhausted, "no room within 1m")
		if sb := r.get(a.ID); sb.State != sandboxer.Paused || sb.Pause.Attempts != 0 {
			t.Errorf("it is %s after %d attempts", sb.State, sb.Pause.Attempts)
		}
		// It cannot be copied either, and none of several copies is left.
		_, err = r.Fork(acme, b.ID, ForkRequest{Count: 1})
		wantErr(t, err, sandboxer.Exhausted, "is full")
		c := make(chan error)
		go func() {
			_, err := r.Resume(acme, a.ID, ResumeRequest{})
			c <- err
		}()
		time.Sleep(30 * time.Second)
		r.destroy(b.ID)
		if err := <-c; err != nil {
			t.Error(err)
		}
		r.destroy(a.ID)
		r.sound(0)
	})
}

// TestRoomPool: a pooled sandbox makes way for a request, whatever its profile says of waiting, and
// is not replaced while there is no room.
func TestRoomPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) {
			ticking(s)
			s.max = 3
			pooled(2)(s)
			for i := range s.profiles {
				if s.profiles[i].ID == "profile.test" {
					s.profiles[i].Max = 2
				} else {
					s.profiles[i].Pool.Size = 0
				}
			}
		})
		r.full("test", 2)
		warm := r.create(sandboxer.CreateRequest{}) // of the pool, which is filled again
		if warm.Pool == "" {
			t.Error("it did not come from the pool")
		}
		r.full("test", 2)
		cold := []*sandboxer.Sandbox{r.create(sandboxer.CreateRequest{Inputs: map[string]string{"sandbox_id": "mine"}})} // ends one
		// The profile is full, and its pool is of no use to it.
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"})
		wantErr(t, err, sandboxer.Exhausted, "profile profile.test is full: it has 2 of 2")
		if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
			t.Fatal(err)
		}
		cold = append(cold, r.create(sandboxer.CreateRequest{Profile: "paid"})) // ends the other
		if n := len(r.world.Live()); n != 3 {
			t.Errorf("%d are there, want 3", n)
		}
		_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "paid"})
		wantErr(t, err, sandboxer.Exhausted, "extension ext.fake is full: it has 3 of 3")
		time.Sleep(time.Minute)
		synctest.Wait()
		if warm := r.warm("profile.test"); len(warm) > 0 || len(r.world.Live()) != 3 {
			t.Errorf("the pool was filled with %d where there is no room", len(warm))
		}
		if pools, err := r.Pools(admin); err != nil || !strings.Contains(pools[0].Problem, "is full") {
			t.Errorf("the pool does not say why it is empty: %+v, %v", pools, err)
		}
		r.destroy(cold[1].ID)
		r.full("test", 1)
		r.destroy(cold[0].ID)
		r.destroy(warm.ID)
		r.full("test", 2)
		r.sound(2)
	})
}

// TestRoomMadeDuringTry: what ends to make way for a request may end after the request looked for room, and before the answer is
// judged.
func TestRoomMadeDuringTry(t *testing.T) {
	r := newRig(t, nil)
	over, tries := make(chan struct{}), 0
	w := &waiter{tenant: sandboxer.DefaultTenant, profile: "profile.test", done: make(chan struct{})}
	w.commit = func(*sandboxer.Room) error {
		if tries++; tries > 1 {
			return nil
		}
		close(over)
		return sandboxer.E(sandboxer.Exhausted, &sandboxer.FullError{Of: "ext.fake"}, "no room")
	}
	if err := r.Manager.rooms.join("ext.fake", w); err != nil {
		t.Fatal(err)
	}
	r.Manager.rooms.giveWay(w, over)
	l := r.Manager.rooms.begin("ext.fake")
	r.Manager.serveOnce(l)
	select {
	case <-w.done:
		t.Fatalf("the request was refused: %v", w.err)
	default:
	}
	r.Manager.serveOnce(l)
	r.Manager.rooms.end(l)
	if <-w.done; w.err != nil {
		t.Error(w.err)
	}
}

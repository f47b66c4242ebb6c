package manager

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// idleProfile is a profile whose sandboxes nobody may leave unused for long.
func idleProfile(idle time.Duration, onIdle sandboxer.ExpiryAction) sandboxer.Profile {
	return sandboxer.Profile{ID: "profile.idle", Extension: "ext.fake", TTL: time.Hour, Idle: idle, OnIdle: onIdle}
}

// TestOnIdle: one that nobody uses is paused, its time to live stands still, and whoever uses it
// finds it again; a request may say otherwise.
func TestOnIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) {
			ticking(s)
			p := idleProfile(time.Minute, sandboxer.ExpiryPause)
			p.AutoResume = true
			s.profiles = append(s.profiles, p)
		})
		idle, own := r.create(sandboxer.CreateRequest{Profile: "idle"}), r.create(sandboxer.CreateRequest{Profile: "idle", OnIdle: sandboxer.ExpiryDestroy, Idle: 30 * time.Second})
		busy := r.create(sandboxer.CreateRequest{Profile: "idle"})
		_, _, end, err := r.Manager.beginStream(acme, sandboxer.ScopeWrite, busy.ID)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(40 * time.Second)
		synctest.Wait()
		if sb := r.get(own.ID); sb.State != sandboxer.Terminated || sb.Reason != sandboxer.ReasonIdle {
			t.Errorf("one that is to be destroyed after 30s is %s (%s) after 40", sb.State, sb.Reason)
		}
		if sb := r.get(idle.ID); sb.State != sandboxer.Running {
			t.Errorf("one that is to be paused after a minute is %s after 40s", sb.State)
		}
		time.Sleep(30 * time.Second)
		synctest.Wait()
		sb := r.get(idle.ID)
		if sb.State != sandboxer.Paused || sb.Reason != sandboxer.ReasonIdle || sb.Pause.Cause != sandboxer.ReasonIdle || sb.Pause.Left < 58*time.Minute {
			t.Errorf("it is %s (%s), with %s left", sb.State, sb.Reason, sb.Pause.Left)
		}
		if sb := r.get(busy.ID); sb.State != sandboxer.Running {
			t.Errorf("one that is in use is %s (%s)", sb.State, sb.Reason)
		}
		end()
		b, h, end, err := r.Manager.beginStream(acme, sandboxer.ScopeWrite, idle.ID)
		if err != nil || b == nil || h.SandboxID != idle.ID {
			t.Fatalf("using it: %v", err)
		}
		end()
		time.Sleep(70 * time.Second)
		synctest.Wait()
		if sb := r.get(idle.ID); sb.State != sandboxer.Paused {
			t.Errorf("unused for another minute it is %s (%s)", sb.State, sb.Reason)
		}
		r.destroy(idle.ID)
		r.destroy(busy.ID)
		r.sound(0)
	})
}

// TestOnIdleAtTheLastMoment: whoever begins to use a sandbox while it is being committed that nobody
// does, waits for that, and then has it resumed, or is told that it does not run; nobody gets one that
// is taken away at once.
func TestOnIdleAtTheLastMoment(t *testing.T) {
	for name, c := range map[string]struct {
		onIdle sandboxer.ExpiryAction
		resume bool
		step   point
		kind   sandboxer.Kind
	}{
		"paused and resumed": {sandboxer.ExpiryPause, true, pPausing, ""},
		"paused":             {sandboxer.ExpiryPause, false, pPausing, sandboxer.Conflict},
		"destroyed":          {sandboxer.ExpiryDestroy, false, pEnding, sandboxer.Conflict},
	} {
		t.Run(name, func(t *testing.T) {
			committing, gate := make(chan struct{}), make(chan struct{})
			var once sync.Once
			r := newRig(t, func(s *setup) {
				p := idleProfile(time.Millisecond, c.onIdle)
				p.AutoResume = c.resume
				s.profiles = append(s.profiles, p)
				s.opts.fail = func(at point) {
					if at == c.step+".before" {
						once.Do(func() { close(committing); <-gate })
					}
				}
			})
			sb := r.create(sandboxer.CreateRequest{Profile: "idle"})
			time.Sleep(2 * time.Millisecond)
			swept := make(chan error, 1)
			go func() { _, err := r.Sweep(admin); swept <- err }()
			<-committing
			if _, held := r.usage.begin(sb.ID, r.usage.seen()); held == nil {
				t.Error("it can be used while it is committed that nobody uses it")
			}
			used := make(chan error, 1)
			go func() {
				_, _, end, err := r.Manager.beginStream(acme, sandboxer.ScopeWrite, sb.ID)
				if err == nil {
					defer end()
					if now := r.get(sb.ID); now.State != sandboxer.Running {
						t.Errorf("it is used while it is %s", now.State)
					}
				}
				used <- err
			}()
			close(gate)
			if err := <-used; sandboxer.KindOf(err) != c.kind {
				t.Errorf("using it: %v, want %q", err, c.kind)
			}
			if err := <-swept; err != nil {
				t.Error(err)
			}
			r.destroy(sb.ID)
			r.sound(0)
		})
	}
}

// TestExpiryWithinProfile: what a request may choose.
func TestExpiryWithinProfile(t *testing.T) {
	const pause, destroy = sandboxer.ExpiryPause, sandboxer.ExpiryDestroy
	for _, c := range []struct {
		profile       sandboxer.Profile
		idle          time.Duration
		onIdle, onTTL sandboxer.ExpiryAction
		want          string // in the error
	}{
		{sandboxer.Profile{}, time.Hour, pause, pause, ""},
		{sandboxer.Profile{Idle: time.Hour, OnIdle: pause, OnTTL: pause}, time.Minute, destroy, destroy, ""},
		{sandboxer.Profile{Idle: time.Hour}, time.Hour, "", "", ""},
		{sandboxer.Profile{Idle: time.Hour}, time.Hour + 1, "", "", "longer than profile"},
		{sandboxer.Profile{}, time.Millisecond, "", "", "at least 1s"},
		{sandboxer.Profile{}, -time.Hour, "", "", "at least 1s"},
		{sandboxer.Profile{}, 0, pause, "", "no effect without an idle time"},
		{sandboxer.Profile{Idle: time.Hour, OnIdle: destroy}, 0, pause, "", "says destroy"},
		{sandboxer.Profile{OnTTL: destroy}, 0, "", pause, "says destroy"},
		{sandboxer.Profile{}, 0, "", "freeze", "want destroy or pause"},
	} {
		p, err := withExpiry(c.profile, c.idle, c.onIdle, c.onTTL)
		switch {
		case c.want != "":
			wantErr(t, err, sandboxer.Invalid, c.want)
		case err != nil:
			t.Errorf("%+v: %v", c, err)
		case c.idle != 0 && p.Idle != c.idle, c.onIdle != "" && p.OnIdle != c.onIdle, c.onTTL != "" && p.OnTTL != c.onTTL:
			t.Errorf("%+v becomes %s, %s, %s", c, p.Idle, p.OnIdle, p.OnTTL)
		}
	}

	r := newRig(t, func(s *setup) {
		s.fake.Drop = []sandboxer.Capability{sandboxer.CanPause, sandboxer.CanSnapshot}
	})
	for _, req := range []sandboxer.CreateRequest{{Profile: "test", OnTTL: pause}, {Profile: "test", Idle: time.Minute, OnIdle: pause}} {
		_, err := r.Create(acme, req)
		wantErr(t, err, sandboxer.Unsupported, "does not support pause")
	}
	r.sound(0)
}

package manager

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// idleProfile is a profile whose sandboxes may not be unused for long.
func idleProfile(idle time.Duration, onIdle sandboxer.ExpiryAction) sandboxer.Profile {
	return sandboxer.Profile{ID: "profile.idle", Extension: "ext.fake", TTL: time.Hour, Idle: idle, OnIdle: onIdle}
}

// TestOnIdle: an unused sandbox is paused, its time to live stops, and its next user
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

// TestOnIdleAtTheLastMoment: a caller that begins to use a sandbox while it is being committed as idle
// waits for that, and then has it resumed, or gets the error that it does not run; no caller gets a sandbox that
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

// TestExpiryOfWhatCannotPause: a request cannot have paused what its extension cannot pause.
func TestExpiryOfWhatCannotPause(t *testing.T) {
	const pause = sandboxer.ExpiryPause
	r := newRig(t, func(s *setup) {
		s.fake.Drop = []sandboxer.Capability{sandboxer.CanPause, sandboxer.CanSnapshot}
	})
	for _, req := range []sandboxer.CreateRequest{{Profile: "test", OnTTL: pause}, {Profile: "test", Idle: time.Minute, OnIdle: pause}} {
		_, err := r.Create(acme, req)
		wantErr(t, err, sandboxer.Unsupported, "does not support pause")
	}
	r.sound(0)
}

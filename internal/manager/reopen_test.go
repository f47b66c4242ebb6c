package manager

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// An extension that cannot be opened at the start is tried again; until then it says why
// and when, and afterwards what waited for it goes on at once.
func TestExtensionOpensLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { s.opts.SweepEvery = 5 * time.Second })
		long := sandboxer.CreateRequest{TTL: time.Hour}
		gone, kept := r.create(long), r.create(long)
		whole := r.Manager.extensions()[0].Extension
		r.Manager.Close()

		tries := new(atomic.Int32)
		working := new(atomic.Bool)
		broken := Extension{Info: whole.Info}
		broken.Info.Problem, broken.Info.Capabilities = "the disk is full", nil
		again := broken
		again.Info.Problem = "the disk is still full"
		broken.Reopen = func(context.Context) Extension {
			tries.Add(1)
			if working.Load() {
				return whole
			}
			return again
		}
		m, err := New(r.store, r.setup.profiles, []Extension{broken}, r.setup.opts)
		if err != nil {
			t.Fatal(err)
		}
		r.Manager = m
		if err := m.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		_, err = m.Destroy(acme, gone.ID)
		wantErr(t, err, sandboxer.Unavailable, "the disk is full")
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		if n := tries.Load(); n < 20 || n > 40 {
			t.Errorf("%d attempts in twenty minutes", n)
		}
		info := m.Extensions(admin)[0]
		if info.Problem != "the disk is still full" || !info.RetryAt.After(time.Now()) || info.RetryAt.After(time.Now().Add(2*reopenEvery)) {
			t.Errorf("it says %+v", info)
		}
		a, err := m.Audit(admin)
		if err != nil || len(a.Violations) != 1 || a.Violations[0].Invariant != invAsked || a.Violations[0].Detail != "ext.fake could not be opened: the disk is still full" {
			t.Errorf("the audit says %+v, %v", a.Violations, err)
		}
		_, err = m.Create(acme, sandboxer.CreateRequest{Profile: "test"})
		wantErr(t, err, sandboxer.Unavailable, "the disk is still full")
		if got := r.get(gone.ID); got.State != sandboxer.Terminating || got.RetryAt.IsZero() {
			t.Errorf("what is to go is %s, again at %s", got.State, got.RetryAt)
		}

		working.Store(true)
		opens := m.Extensions(admin)[0].RetryAt
		time.Sleep(time.Until(opens) + time.Second)
		synctest.Wait()
		if info := m.Extensions(admin)[0]; info.Problem != "" || !info.RetryAt.IsZero() || len(info.Capabilities) == 0 {
			t.Errorf("open, it says %+v", info)
		}
		if got := r.get(gone.ID); got.State != sandboxer.Terminated {
			t.Errorf("what was to go is %s (%s)", got.State, got.LastError)
		}
		if got := r.get(kept.ID); got.State != sandboxer.Running {
			t.Errorf("what was to stay is %s", got.State)
		}
		r.create(long)
		n := tries.Load()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if tries.Load() != n {
			t.Error("it is opened again and again")
		}
		r.sound(2)
	})
}

// An attempt that is under way when the broker stops ends with it.
func TestReopenEndsWithTheManager(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		info := r.Manager.extensions()[0].Info
		r.Manager.Close()
		info.Problem = "not yet"
		entered := make(chan struct{})
		m, err := New(r.store, r.setup.profiles, []Extension{{Info: info, Reopen: func(ctx context.Context) Extension {
			close(entered)
			<-ctx.Done()
			info.Problem = errors.Join(ctx.Err()).Error()
			return Extension{Info: info}
		}}}, r.setup.opts)
		if err != nil {
			t.Fatal(err)
		}
		r.Manager = m
		if err := m.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-entered
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

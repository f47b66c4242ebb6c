package engine

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// A fakeHost answers questions as ask does, and does nothing else.
type fakeHost struct {
	ask func(context.Context) (sandboxer.Exit, error)
}

func (fakeHost) Name() string { return "host-1" }
func (h fakeHost) Run(ctx context.Context, _ sshrun.Cmd) (sandboxer.Exit, error) {
	return h.ask(ctx)
}
func (h fakeHost) Ask(ctx context.Context, _ sshrun.Cmd) (sandboxer.Exit, error) { return h.ask(ctx) }
func (h fakeHost) Capture(ctx context.Context, _ sshrun.Cmd, _ int) ([]byte, sandboxer.Exit, error) {
	exit, err := h.ask(ctx)
	return nil, exit, err
}
func (fakeHost) Kill(context.Context, string, string) error { return nil }
func (fakeHost) Dial(context.Context, string, string) (net.Conn, error) {
	return nil, errors.New("nothing is there")
}

// hanging is a host whose engine hangs as long as hung is set, and how often it was asked.
func hanging(hung *atomic.Bool) (h fakeHost, asked *atomic.Int32) {
	asked = &atomic.Int32{}
	return fakeHost{func(ctx context.Context) (sandboxer.Exit, error) {
		asked.Add(1)
		if !hung.Load() {
			return sandboxer.Exit{}, nil
		}
		select {
		case <-time.After(WatchEvery):
			return sandboxer.Exit{Code: 124}, nil
		case <-ctx.Done():
			return sandboxer.Exit{}, ctx.Err()
		}
	}}, asked
}

// A call that needs an engine that hangs ends after three unanswered questions, with a warning
// before; later ones end soon, until it answers, when owed work is done.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hung atomic.Bool
		h, asked := hanging(&hung)
		w := NewWatch(t.Context(), WatchOptions{Program: "docker", Name: "host-1", Host: func() (Host, error) { return h, nil }})
		defer w.Close()

		// One that answers ends no call, however long it takes.
		within, done, err := w.Attend(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if within.Err() != nil || asked.Load() == 0 {
			t.Errorf("a call of an hour: %v, asked %d times", context.Cause(within), asked.Load())
		}
		other := errors.New("something else")
		if err := done(other); err != other {
			t.Errorf("done(%v) = %v", other, err)
		}

		hung.Store(true)
		var mu sync.Mutex
		var steps []string
		begun := time.Now()
		within, done, err = w.Attend(sandboxer.WithProgress(t.Context(), func(p sandboxer.Progress) {
			mu.Lock()
			defer mu.Unlock()
			steps = append(steps, p.Step)
		}))
		if err != nil {
			t.Fatal(err)
		}
		<-within.Done()
		if took := time.Since(begun); took < watchMisses*WatchEvery || took > 6*WatchEvery {
			t.Errorf("it ended after %s", took)
		}
		err = done(context.Cause(within))
		if !errors.Is(err, ErrHangs) || sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(sandboxer.Message(err), "docker") || !strings.Contains(sandboxer.Message(err), "host-1") || sandboxer.HintOf(err) == "" {
			t.Errorf("it ended with %v", err)
		}
		mu.Lock()
		if told := strings.Join(steps, "\n"); !strings.Contains(told, "on host host-1 does not answer") {
			t.Errorf("before it was told %q", told)
		}
		mu.Unlock()

		begun = time.Now()
		if _, _, err := w.Attend(t.Context()); !errors.Is(err, ErrHangs) || time.Since(begun) > recheckTime {
			t.Errorf("the next call: %v after %s", err, time.Since(begun))
		}
		var did []int
		var failed atomic.Bool
		for i := range 2 {
			w.Owe(func(context.Context) error { did = append(did, i); return nil })
		}
		w.Owe(func(context.Context) error { failed.Store(true); return errors.New("it is gone") })
		synctest.Wait()
		if len(did) > 0 {
			t.Error("what is owed was done while it hangs")
		}
		hung.Store(false)
		time.Sleep(3 * WatchEvery) // the check under way ends
		if err := w.Recheck(t.Context()); err != nil || w.Hangs() {
			t.Errorf("once it answers: %v, %t", err, w.Hangs())
		}
		synctest.Wait()
		if len(did) != 2 || !failed.Load() {
			t.Errorf("of what was owed %v was done, and the last %t", did, failed.Load())
		}
		if _, done, err := w.Attend(t.Context()); err != nil || done(nil) != nil {
			t.Errorf("Attend: %v", err)
		}
	})
}

// What is owed to an engine that hangs again is owed still, within a bound; after Close nothing
// begins.
func TestWatchOwes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hung atomic.Bool
		h, _ := hanging(&hung)
		w := NewWatch(t.Context(), WatchOptions{Program: "docker", Name: "host-1", Host: func() (Host, error) { return h, nil }})
		var tries atomic.Int32
		w.Hung()
		w.Owe(func(ctx context.Context) error {
			if tries.Add(1) == 1 {
				w.Hung()
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		})
		w.Answered()
		time.Sleep(2 * killTime)
		w.Answered()
		synctest.Wait()
		if tries.Load() != 2 {
			t.Errorf("it was tried %d times", tries.Load())
		}
		for range maxOwed + 5 {
			w.Owe(func(context.Context) error { tries.Add(1); return nil })
		}
		w.mu.Lock()
		n := len(w.owed)
		w.mu.Unlock()
		if n != maxOwed {
			t.Errorf("%d are owed", n)
		}
		w.Close()
		w.Answered()
		synctest.Wait()
		if tries.Load() != 2 {
			t.Error("something was done after Close")
		}
	})
}

// An engine that is not watched is never one that hangs.
func TestNoWatch(t *testing.T) {
	var w *Watch
	ctx, done, err := w.Attend(t.Context())
	failed := errors.New("failed")
	if err != nil || ctx != t.Context() || done(failed) != failed || w.Hangs() {
		t.Errorf("Attend: %v", err)
	}
	w.Answered()
	w.Owe(nil)
}

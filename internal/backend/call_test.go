package backend_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// A call that does not stop is left behind: at its deadline, or when its caller leaves. It is
// counted until it ends.
func TestOverstaying(t *testing.T) {
	for _, o := range ops {
		synctest.Test(t, func(t *testing.T) {
			release := make(chan struct{})
			var left atomic.Int64
			b := backend.New("ext.test", allOps(func(context.Context, string) error {
				<-release
				return nil
			}), backend.Options{Linger: 7 * time.Second, Abandoned: func(_, op string, n int) { left.Add(int64(n)) }})
			for _, leave := range []bool{true, false} {
				if !leave && o.limit == 0 {
					continue // it may last
				}
				ctx, cancel := context.WithCancel(t.Context())
				want := o.limit + 7*time.Second
				if leave {
					time.AfterFunc(time.Second, cancel)
					want = 8 * time.Second
				}
				start := time.Now()
				err := o.call(ctx, b)
				if took := time.Since(start); took != want {
					t.Errorf("%s: left behind after %s; want %s", o.name, took, want)
				}
				kind := sandboxer.Timeout
				if leave {
					kind = sandboxer.Canceled
				}
				if sandboxer.KindOf(err) != kind {
					t.Errorf("%s: %v; want %s", o.name, err, kind)
				}
				cancel()
			}
			if left.Load() == 0 {
				t.Errorf("%s: nothing was counted", o.name)
			}
			close(release)
			synctest.Wait()
			if n := left.Load(); n != 0 {
				t.Errorf("%s: %d calls are counted after their end", o.name, n)
			}
		})
	}
}

// Too many calls without an end are followed by no more; the last to be refused are those
// by which a sandbox is ended.
func TestTooManyOverstay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		defer func() { close(release); synctest.Wait() }()
		var calls atomic.Int64
		b := backend.New("ext.test", allOps(func(context.Context, string) error {
			calls.Add(1)
			<-release
			return nil
		}), backend.Options{MaxAbandoned: 3})
		h := sandboxer.Handle{SandboxID: "a", Generation: 1}
		for range 5 {
			if _, err := b.Stats(t.Context(), h); err == nil {
				t.Error("a call that does not end succeeds")
			}
		}
		if n := calls.Load(); n != 3 {
			t.Errorf("%d calls were made; want 3", n)
		}
		if _, err := b.Stats(t.Context(), h); !errors.Is(err, sandboxer.Unavailable) || sandboxer.RetryAfterOf(err) == 0 {
			t.Errorf("beyond the bound: %v", err)
		}
		for range 15 {
			_, _ = b.Teardown(t.Context(), h)
		}
		if n := calls.Load(); n != 12 {
			t.Errorf("%d calls were made; want 12", n)
		}
	})
}

type lateExtension struct {
	plain
	release chan struct{}
	closed  atomic.Bool
	wrote   chan error
}

func (l *lateExtension) Exec(_ context.Context, _ sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	<-l.release
	_, err := cmd.Stdout.Write([]byte("late"))
	l.wrote <- err
	return sandboxer.Exit{}, nil
}

type closer struct {
	io.Reader
	closed *atomic.Bool
}

func (c closer) Close() error { c.closed.Store(true); return nil }

// What a call that was left behind brings later is let go of, and it does not touch what was
// its caller's.
func TestLateAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lateExtension{release: make(chan struct{}), wrote: make(chan error, 1)}
		b := backend.New("ext.test", &struct {
			*lateExtension
			lateFiler
		}{l, lateFiler{nil, l}}, backend.Options{})
		h := sandboxer.Handle{SandboxID: "a", Generation: 1}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var out strings.Builder
		if _, err := b.Exec(ctx, h, sandboxer.Cmd{Args: []string{"true"}, Stdout: &out}); !errors.Is(err, sandboxer.Timeout) {
			t.Errorf("exec: %v", err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := b.ReadFile(ctx, h, "/x"); !errors.Is(err, sandboxer.Timeout) {
			t.Errorf("read: %v", err)
		}
		close(l.release)
		synctest.Wait()
		if err := <-l.wrote; err == nil || out.Len() > 0 {
			t.Errorf("it wrote %q to whom had left: %v", out.String(), err)
		}
		if !l.closed.Load() {
			t.Error("what it opened stays open")
		}
	})
}

type lateFiler struct {
	sandboxer.Filer // the rest is not called
	l               *lateExtension
}

func (f lateFiler) ReadFile(context.Context, sandboxer.Handle, string) (io.ReadCloser, error) {
	<-f.l.release
	return closer{strings.NewReader(""), &f.l.closed}, nil
}

package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// hanging is a place that answers until it hangs; then it heeds nothing but its context.
type hanging struct {
	Blobs
	hangs func() bool
}

func (h hanging) wait(ctx context.Context) error {
	if h.hangs() {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (h hanging) Put(ctx context.Context, name string, r io.Reader) error {
	if err := h.wait(ctx); err != nil {
		return err
	}
	return h.Blobs.Put(ctx, name, r)
}

func (h hanging) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	return h.Blobs.Get(ctx, name, off, n)
}

func (h hanging) Stat(ctx context.Context, name string) (Blob, error) {
	if err := h.wait(ctx); err != nil {
		return Blob{}, err
	}
	return h.Blobs.Stat(ctx, name)
}

func (h hanging) List(ctx context.Context, prefix string) ([]Blob, error) {
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	return h.Blobs.List(ctx, prefix)
}

func (h hanging) Delete(ctx context.Context, name string) error {
	if err := h.wait(ctx); err != nil {
		return err
	}
	return h.Blobs.Delete(ctx, name)
}

// Whatever the store waits for in a place that hangs, it ends soon after its caller's time is
// over: also what it would put in order then.
func TestPlaceHangs(t *testing.T) {
	blobs := newDir(t)
	in := archive(t, item{name: "f", body: "text"})
	whole, err := New(blobs, testKey(1), Options{SpoolDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	save(t, whole, "one", in)
	save(t, whole, "two", in)
	calls := map[string]func(context.Context, *Store) error{
		"Save": func(ctx context.Context, s *Store) error {
			_, err := s.Save(ctx, "new", Meta{}, bytes.NewReader(in), SaveOptions{})
			return err
		},
		"Get": func(ctx context.Context, s *Store) error { _, err := s.Get(ctx, "one"); return err },
		"Open": func(ctx context.Context, s *Store) error {
			_, r, err := s.Open(ctx, "one")
			if err == nil {
				_, err = io.Copy(io.Discard, r)
				err = errors.Join(err, r.Close())
			}
			return err
		},
		"Drop": func(ctx context.Context, s *Store) error { return s.Drop(ctx, "two") },
		"IDs":  func(ctx context.Context, s *Store) error { _, err := s.IDs(ctx); return err },
		"GC":   func(ctx context.Context, s *Store) error { _, err := s.GC(ctx); return err },
	}
	dir := t.TempDir()
	for name, call := range calls {
		// From its first request on, from its second, and so on until it needs no more.
		for n := 0; ; n++ {
			ended := false
			synctest.Test(t, func(t *testing.T) {
				var requests atomic.Int64
				place := hanging{blobs, func() bool { return requests.Add(1) > int64(n) }}
				s, err := New(place, testKey(1), Options{SpoolDir: dir})
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				began := time.Now()
				_ = call(ctx, s)
				if took := time.Since(began); took > time.Minute+6*lateness {
					t.Errorf("%s of a place that hangs after %d requests took %s", name, n, took)
				}
				ended = requests.Load() <= int64(n)
			})
			if ended {
				break
			}
		}
	}
}

// One whose time is over does not wait for another's look at a place that hangs.
func TestPlaceHangsForAnother(t *testing.T) {
	blobs, dir := newDir(t), t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s, err := New(hanging{blobs, func() bool { return true }}, testKey(1), Options{SpoolDir: dir})
		if err != nil {
			t.Fatal(err)
		}
		long, leave := context.WithCancel(t.Context())
		first := make(chan error)
		go func() { first <- s.chunks.refresh(long) }()
		synctest.Wait()
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.chunks.refresh(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the second: %v", err)
		}
		leave()
		if err := <-first; !errors.Is(err, context.Canceled) {
			t.Errorf("the first: %v", err)
		}
	})
}

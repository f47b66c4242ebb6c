package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/sand-boxer/sandboxer"
)

func canceledCalls(s *suite) {
	sb := s.create("a", 1)
	w := everything("kept")
	s.ok(s.Write(s.ctx, w))
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	sb.State = sandboxer.Running
	for name, call := range map[string]func() error{
		"CreateSandbox":  func() error { return s.CreateSandbox(ctx, sandbox("b", 1), everything("x")) },
		"UpdateSandbox":  func() error { return s.UpdateSandbox(ctx, sb, everything("x")) },
		"Write":          func() error { return s.Write(ctx, everything("x")) },
		"PutAPIKey":      func() error { return s.PutAPIKey(ctx, *everything("x").APIKey) },
		"Forget history": func() error { _, err := s.ForgetHistory(ctx, start.AddDate(1, 0, 0), 10); return err },
		"Forget":         func() error { return s.ForgetIdempotencyKeys(ctx, start.AddDate(1, 0, 0)) },
		"Sandbox":        func() error { _, err := s.Sandbox(ctx, "a"); return err },
		"Sandboxes":      func() error { _, _, err := s.Sandboxes(ctx, sandboxer.Query{}); return err },
		"Events":         func() error { _, err := s.Events(ctx, sandboxer.EventQuery{}); return err },
		"Balance":        func() error { _, err := s.Balance(ctx, "acme"); return err },
	} {
		if err := call(); sandboxer.KindOf(err) != sandboxer.Canceled || !errors.Is(err, context.Canceled) {
			s.Errorf("%s with a canceled context: %v; want canceled", name, err)
		}
	}
	s.wroteNothing("x")
	_, err := s.Sandbox(s.ctx, "b")
	s.fails(err, sandboxer.NotFound)
	_, err = s.IdempotencyKey(s.ctx, "acme", "key-kept")
	s.ok(err)
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	if got.State != sandboxer.Creating || got.Version != 1 || sb.Version != 1 {
		s.Errorf("stored %s, version %d; want creating, 1", got.State, got.Version)
	}

	// A caller that leaves while writes are under way gets a true answer.
	var done, left atomic.Int64
	parallel(32, func(i int) error {
		ctx, cancel := context.WithCancel(s.ctx)
		defer cancel()
		go cancel()
		err := s.Write(ctx, sandboxer.Writes{Entries: []sandboxer.Entry{grant(fmt.Sprint("race", i), "racers", 1)}})
		if err == nil {
			done.Add(1)
		} else {
			left.Add(1)
		}
		return err
	})
	if b := s.balance("racers"); int64(b) != done.Load() {
		s.Errorf("%d writes reported success and %d were canceled, but %d happened", done.Load(), left.Load(), b)
	}
}

func closedStore(s *suite) {
	sb := s.create("a", 1)
	s.ok(s.Close())
	for name, call := range map[string]func() error{
		"CreateSandbox": func() error { return s.CreateSandbox(s.ctx, sandbox("b", 1), sandboxer.Writes{}) },
		"UpdateSandbox": func() error { return s.UpdateSandbox(s.ctx, sb, sandboxer.Writes{}) },
		"Write":         func() error { return s.Write(s.ctx, sandboxer.Writes{}) },
		"Sandbox":       func() error { _, err := s.Sandbox(s.ctx, "a"); return err },
		"Sandboxes":     func() error { _, _, err := s.Sandboxes(s.ctx, sandboxer.Query{}); return err },
		"OpenHolds":     func() error { _, err := s.OpenHolds(s.ctx); return err },
	} {
		if err := call(); sandboxer.KindOf(err) != sandboxer.Unavailable {
			s.Errorf("%s after Close: %v; want unavailable", name, err)
		}
	}
	s.ok(s.Close()) // again is no error
}

func closeWhileWriting(s *suite) {
	var acknowledged atomic.Int64
	closed := make(chan error, 1)
	errs := parallel(16, func(i int) error {
		for j := range 1000 {
			if i == 0 && j == 5 {
				go func() { closed <- s.Close() }()
			}
			err := s.Write(s.ctx, sandboxer.Writes{Entries: []sandboxer.Entry{grant(fmt.Sprintf("%d/%d", i, j), "acme", 1)}})
			if err != nil {
				return err
			}
			acknowledged.Add(1)
		}
		return nil
	})
	if n := count(errs, sandboxer.Unavailable); n != 16 {
		s.Errorf("%d writers got the error that the store is closed; want 16: %v", n, errs)
	}
	s.ok(<-closed)
	if s.reopen == nil {
		return
	}
	s.Store = s.reopen(s.T, s.Store)
	if b := s.balance("acme"); int64(b) != acknowledged.Load() {
		s.Errorf("%d writes were acknowledged, %d are there", acknowledged.Load(), b)
	}
}

func reopenEverything(s *suite) {
	if s.reopen == nil {
		s.Skip("this store does not outlive its process")
	}
	full := filled[sandboxer.Sandbox](s.T)
	full.State = sandboxer.Running
	s.putSecrets(&full)
	s.ok(s.CreateSandbox(s.ctx, &full, everything("x")))
	s.book(entry("h", sandboxer.EntryHold, "a", 1, -3))
	for i := range 5 {
		s.create(fmt.Sprint("s", i), 1)
	}
	before, err := s.Sandbox(s.ctx, full.ID)
	s.ok(err)
	events, entries, holds, list := s.events(sandboxer.EventQuery{}), s.entries(sandboxer.EntryQuery{}), s.holds(), s.list(sandboxer.Query{})
	_, cursor, err := s.Sandboxes(s.ctx, sandboxer.Query{Limit: 2})
	s.ok(err)

	s.Store = s.reopen(s.T, s.Store)
	after, err := s.Sandbox(s.ctx, full.ID)
	s.ok(err)
	s.same("sandbox", after, before)
	s.same("events", s.events(sandboxer.EventQuery{}), events)
	s.same("entries", s.entries(sandboxer.EntryQuery{}), entries)
	s.same("holds", s.holds(), holds)
	s.same("list", s.list(sandboxer.Query{}), list)
	if b := s.balance("acme"); b != 4 {
		s.Errorf("balance = %d; want 4", b)
	}
	_, err = s.IdempotencyKey(s.ctx, "acme", "key-x")
	s.ok(err)
	_, err = s.APIKey(s.ctx, "api-x")
	s.ok(err)
	if got := s.list(sandboxer.Query{After: cursor}); !slices.Equal(got, list[2:]) {
		s.Errorf("a cursor from before selects %v; want %v", got, list[2:])
	}
	// The numbers continue.
	w := everything("y")
	s.ok(s.UpdateSandbox(s.ctx, after, w))
	if after.Version != 2 || w.Events[0].Seq <= events[len(events)-1].Seq {
		s.Errorf("version %d and event %d after reopening", after.Version, w.Events[0].Seq)
	}
}

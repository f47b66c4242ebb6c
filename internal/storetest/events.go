package storetest

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func eventNumbers(s *suite) {
	var last int64
	for i := range 5 {
		w := sandboxer.Writes{Events: []sandboxer.Event{
			{Tenant: "acme", Type: sandboxer.EventStep, Message: fmt.Sprint(i, "a"), Seq: 99},
			{Tenant: "acme", Type: sandboxer.EventStep, Message: fmt.Sprint(i, "b")},
		}}
		s.ok(s.Write(s.ctx, w))
		stored := s.events(sandboxer.EventQuery{After: last})
		if len(stored) != 2 {
			s.Fatalf("%d events after %d; want 2", len(stored), last)
		}
		for j, e := range stored {
			if e.Seq <= last || e.Seq != w.Events[j].Seq || e.Message != w.Events[j].Message {
				s.Errorf("event %+v, told the writer %+v, after number %d", e, w.Events[j], last)
			}
			last = e.Seq
		}
	}
	errs := parallel(16, func(i int) error {
		return s.Write(s.ctx, sandboxer.Writes{Events: []sandboxer.Event{{Tenant: "acme", Type: sandboxer.EventStep}}})
	})
	if count(errs, "") != 16 {
		s.Fatal(errs)
	}
	for i, e := range s.events(sandboxer.EventQuery{After: last}) {
		if e.Seq <= last {
			s.Errorf("concurrent event %d has number %d after %d", i, e.Seq, last)
		}
		last = e.Seq
	}
}

func eventNewest(s *suite) {
	for i := range 5 {
		for _, tenant := range []string{"t1", "t2"} {
			s.ok(s.Write(s.ctx, sandboxer.Writes{Events: []sandboxer.Event{{Tenant: tenant, Type: sandboxer.EventStep, Message: fmt.Sprint(i)}}}))
		}
	}
	first := s.events(sandboxer.EventQuery{Limit: 1})[0].Seq
	for _, tt := range []struct {
		q    sandboxer.EventQuery
		want string
	}{
		{sandboxer.EventQuery{Newest: true, Limit: 3}, "344"},
		{sandboxer.EventQuery{Newest: true, Limit: 2, Tenant: "t1"}, "34"},
		{sandboxer.EventQuery{Newest: true, Limit: 100, Tenant: "t2"}, "01234"},
		{sandboxer.EventQuery{Newest: true, Limit: 3, After: first + 7}, "44"},
		{sandboxer.EventQuery{Limit: 3}, "001"},
	} {
		got := ""
		for _, e := range s.events(tt.q) {
			got += e.Message
		}
		if got != tt.want {
			s.Errorf("Events(%+v) = %s; want %s", tt.q, got, tt.want)
		}
	}
}

func eventEveryField(s *suite) {
	w := sandboxer.Writes{Events: []sandboxer.Event{filled[sandboxer.Event](s.T)}}
	s.ok(s.Write(s.ctx, w))
	want := filled[sandboxer.Event](s.T)
	want.Seq = w.Events[0].Seq
	want.Progress = nil // of events that are never stored
	truncateTimes(reflect.ValueOf(&want))
	s.same("event", s.events(sandboxer.EventQuery{})[0], want)

	s.ok(s.Write(s.ctx, sandboxer.Writes{Events: []sandboxer.Event{{}}}))
	got := s.events(sandboxer.EventQuery{After: want.Seq})[0]
	s.same("empty event", got, sandboxer.Event{Seq: got.Seq})
}

func eventFilters(s *suite) {
	at := time.Now().Truncate(time.Second)
	for i := range 12 {
		s.ok(s.Write(s.ctx, sandboxer.Writes{Events: []sandboxer.Event{{
			At: at.Add(time.Duration(i) * time.Second), Tenant: []string{"t1", "t2"}[i%2], SandboxID: []string{"a", "b", "c"}[i%3], Type: sandboxer.EventStep, Message: fmt.Sprint(i),
		}}}))
	}
	all := s.events(sandboxer.EventQuery{})
	start := all[0].At
	for _, c := range []struct {
		q    sandboxer.EventQuery
		want string
	}{
		{sandboxer.EventQuery{Since: start.Add(9 * time.Second)}, "9 10 11"},
		{sandboxer.EventQuery{Since: start.Add(3 * time.Second), Tenant: "t2", After: all[5].Seq, Limit: 2}, "7 9"},
		{sandboxer.EventQuery{Since: start.Add(-time.Hour), SandboxID: "c", Limit: 1}, "2"},
		{sandboxer.EventQuery{Since: start.Add(time.Hour)}, ""},
		{sandboxer.EventQuery{}, "0 1 2 3 4 5 6 7 8 9 10 11"},
		{sandboxer.EventQuery{Tenant: "t2"}, "1 3 5 7 9 11"},
		{sandboxer.EventQuery{SandboxID: "c"}, "2 5 8 11"},
		{sandboxer.EventQuery{Tenant: "t1", SandboxID: "c"}, "2 8"},
		{sandboxer.EventQuery{Limit: 2}, "0 1"},
		{sandboxer.EventQuery{After: all[8].Seq}, "9 10 11"},
		{sandboxer.EventQuery{After: all[3].Seq, Tenant: "t2", Limit: 2}, "5 7"},
		{sandboxer.EventQuery{After: all[11].Seq}, ""},
		{sandboxer.EventQuery{Tenant: "t3"}, ""},
	} {
		var got []string
		for _, e := range s.events(c.q) {
			got = append(got, e.Message)
		}
		if strings.Join(got, " ") != c.want {
			s.Errorf("Events(%+v) = %v; want %s", c.q, got, c.want)
		}
	}
}

func eventsAtomic(s *suite) {
	sb := sandbox("a", 1)
	s.ok(s.CreateSandbox(s.ctx, sb, everything("create")))
	s.ok(s.UpdateSandbox(s.ctx, sb, everything("update")))
	s.ok(s.Write(s.ctx, everything("alone")))
	if n := len(s.events(sandboxer.EventQuery{})); n != 3 {
		s.Errorf("%d events; want 3", n)
	}
	if n := len(s.entries(sandboxer.EntryQuery{})); n != 3 {
		s.Errorf("%d entries; want 3", n)
	}
	for _, key := range []string{"create", "update", "alone"} {
		_, err := s.IdempotencyKey(s.ctx, "acme", "key-"+key)
		s.ok(err)
		_, err = s.APIKey(s.ctx, "api-"+key)
		s.ok(err)
	}
	// The last thing of a transaction fails: nothing of it stays, the record included.
	w := everything("x")
	w.Cover = true
	w.Entries = append(w.Entries, sandboxer.Entry{Key: "hold", Tenant: "acme", Type: sandboxer.EntryHold, Amount: -1000})
	state := sb.State
	sb.State = sandboxer.Running
	s.fails(s.UpdateSandbox(s.ctx, sb, w), sandboxer.NoCredit)
	s.fails(s.CreateSandbox(s.ctx, sandbox("b", 1), w), sandboxer.NoCredit)
	s.wroteNothing("x")
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	if got.State != state || got.Version != sb.Version {
		s.Errorf("stored %s, version %d; want %s, %d", got.State, got.Version, state, sb.Version)
	}
	_, err = s.Sandbox(s.ctx, "b")
	s.fails(err, sandboxer.NotFound)
}

package storetest

import (
	"fmt"
	"math"
	"reflect"
	"slices"
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
	kept(reflect.ValueOf(&want))
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

func grant(key, tenant string, amount sandboxer.Credits) sandboxer.Entry {
	return sandboxer.Entry{Key: key, Tenant: tenant, Type: sandboxer.EntryGrant, Amount: amount}
}

// entry returns an entry of a sandbox of tenant acme.
func entry(key string, typ sandboxer.EntryType, id string, generation int, amount sandboxer.Credits) sandboxer.Entry {
	return sandboxer.Entry{Key: key, Tenant: "acme", Type: typ, SandboxID: id, Generation: generation, Amount: amount}
}

func ledgerBalance(s *suite) {
	if b := s.balance("acme"); b != 0 {
		s.Errorf("balance of the unknown = %d; want 0", b)
	}
	s.book(grant("g1", "acme", 100), grant("g2", "acme", 50), grant("g3", "other", 7))
	s.book(entry("h1", sandboxer.EntryHold, "a", 1, -60))
	s.book(entry("p1", sandboxer.EntryPost, "a", 1, 45), entry("v1", sandboxer.EntryVoid, "a", 1, 15))
	if a, o := s.balance("acme"), s.balance("other"); a != 105 || o != 7 {
		s.Errorf("balances = %d and %d; want 105 and 7", a, o)
	}
}

func ledgerKeyTwice(s *suite) {
	s.book(grant("g", "acme", 100))
	s.book(grant("g", "acme", 100), entry("h", sandboxer.EntryHold, "a", 1, -30), entry("h", sandboxer.EntryHold, "a", 1, -30))
	if b := s.balance("acme"); b != 70 {
		s.Errorf("balance = %d; want 70", b)
	}
	if got := s.entries(sandboxer.EntryQuery{}); len(got) != 2 || got[0].Amount != 100 || got[1].Amount != -30 {
		s.Errorf("entries = %+v; want the first two", got)
	}
	want := []sandboxer.OpenHold{{Tenant: "acme", SandboxID: "a", Generation: 1, Amount: 30}}
	if got := s.holds(); !slices.Equal(got, want) {
		s.Errorf("open holds = %+v; want %+v", got, want)
	}
	// A repeated booking writes what comes with it.
	s.ok(s.Write(s.ctx, sandboxer.Writes{Entries: []sandboxer.Entry{grant("g", "acme", 100)}, Events: []sandboxer.Event{{Tenant: "acme"}}}))
	if n := len(s.events(sandboxer.EventQuery{})); n != 1 {
		s.Errorf("%d events; want 1", n)
	}
}

func ledgerKeyOfAnother(s *suite) {
	hold := entry("h", sandboxer.EntryHold, "a", 1, -30)
	s.book(grant("g", "acme", 100), hold)
	later := hold
	later.Note, later.At = "again", start.Add(time.Hour) // do not make it another booking
	s.book(later)
	others := []sandboxer.Entry{grant("g", "acme", 101), grant("g", "other", 100), {Key: "g", Tenant: "acme", Type: sandboxer.EntryVoid, Amount: 100}}
	for _, change := range []func(*sandboxer.Entry){
		func(e *sandboxer.Entry) { e.SandboxID = "b" },
		func(e *sandboxer.Entry) { e.Generation = 2 },
	} {
		e := hold
		change(&e)
		others = append(others, e)
	}
	for i, e := range others {
		w := everything(fmt.Sprint(i))
		w.Entries = append(w.Entries, e)
		s.fails(s.Write(s.ctx, w), sandboxer.Conflict)
		s.wroteNothing(fmt.Sprint(i))
	}
	// Also within one write.
	s.fails(s.Write(s.ctx, sandboxer.Writes{Entries: []sandboxer.Entry{grant("n", "acme", 1), grant("n", "acme", 2)}}), sandboxer.Conflict)
	if a, o := s.balance("acme"), s.balance("other"); a != 70 || o != 0 {
		s.Errorf("balances = %d and %d; want 70 and 0", a, o)
	}
}

func ledgerEveryField(s *suite) {
	e := filled[sandboxer.Entry](s.T)
	e.Type = sandboxer.EntryGrant
	s.book(e)
	kept(reflect.ValueOf(&e))
	s.same("entry", s.entries(sandboxer.EntryQuery{})[0], e)
	bare := sandboxer.Entry{Key: "bare", Tenant: "acme", Type: sandboxer.EntryVoid}
	s.book(bare)
	s.same("bare entry", s.entries(sandboxer.EntryQuery{Tenant: "acme"})[0], bare)
}

func ledgerUncovered(s *suite) {
	s.book(grant("g", "acme", 100), grant("g2", "other", 1000))
	w := everything("x")
	w.Entries[0].Tenant = "other"
	w.Entries = append(w.Entries, entry("h", sandboxer.EntryHold, "a", 1, -101))
	w.Cover = true
	s.fails(s.Write(s.ctx, w), sandboxer.NoCredit)
	s.wroteNothing("x")
	if a, o := s.balance("acme"), s.balance("other"); a != 100 || o != 1000 {
		s.Errorf("balances = %d and %d; want 100 and 1000", a, o)
	}
	if got := s.holds(); len(got) != 0 {
		s.Errorf("open holds = %+v; want none", got)
	}
	// The key of a refused entry is not used up.
	s.ok(s.Write(s.ctx, sandboxer.Writes{Entries: []sandboxer.Entry{entry("h", sandboxer.EntryHold, "a", 1, -99)}, Cover: true}))
}

func ledgerCoverExact(s *suite) {
	s.book(grant("g", "acme", 100))
	// What counts is the balance after the whole transaction.
	s.ok(s.Write(s.ctx, sandboxer.Writes{Cover: true, Entries: []sandboxer.Entry{
		entry("h", sandboxer.EntryHold, "a", 1, -110), grant("g2", "acme", 10),
	}}))
	if b := s.balance("acme"); b != 0 {
		s.Errorf("balance = %d; want 0", b)
	}
	s.fails(s.Write(s.ctx, sandboxer.Writes{Cover: true, Entries: []sandboxer.Entry{entry("h2", sandboxer.EntryHold, "b", 1, -1)}}), sandboxer.NoCredit)
}

func ledgerNoCover(s *suite) {
	s.book(entry("h", sandboxer.EntryHold, "a", 1, -5))
	if b := s.balance("acme"); b != -5 {
		s.Errorf("balance = %d; want -5", b)
	}
}

func ledgerOpenHolds(s *suite) {
	if got := s.holds(); len(got) != 0 {
		s.Errorf("open holds of an empty store = %+v", got)
	}
	s.book(grant("g", "acme", 1000),
		entry("a1h", sandboxer.EntryHold, "a", 1, -100), // settled below
		entry("a2h", sandboxer.EntryHold, "a", 2, -100), // partly
		entry("b1h", sandboxer.EntryHold, "b", 1, -50),  // not
		entry("b1h2", sandboxer.EntryHold, "b", 1, -25), // extended
		entry("c1h", sandboxer.EntryHold, "c", 1, -10))  // posted beyond the hold
	s.book(entry("a1p", sandboxer.EntryPost, "a", 1, 60), entry("a1v", sandboxer.EntryVoid, "a", 1, 40),
		entry("a2p", sandboxer.EntryPost, "a", 2, 30),
		entry("c1p", sandboxer.EntryPost, "c", 1, 12))
	want := []sandboxer.OpenHold{
		{Tenant: "acme", SandboxID: "a", Generation: 2, Amount: 70},
		{Tenant: "acme", SandboxID: "b", Generation: 1, Amount: 75},
		{Tenant: "acme", SandboxID: "c", Generation: 1, Amount: -2},
	}
	got := s.holds()
	slices.SortFunc(got, func(a, b sandboxer.OpenHold) int { return strings.Compare(a.SandboxID, b.SandboxID) })
	if !slices.Equal(got, want) {
		s.Errorf("open holds = %+v; want %+v", got, want)
	}
}

func ledgerPages(s *suite) {
	var want []string
	for i := range 21 {
		key := fmt.Sprintf("k%02d", i)
		s.book(sandboxer.Entry{Key: key, Tenant: []string{"t1", "t2"}[i%2], SandboxID: []string{"a", "b", "c"}[i%3], Type: sandboxer.EntryGrant, Amount: 1})
		want = append(want, key)
	}
	for _, c := range []struct {
		name string
		q    sandboxer.EntryQuery
		want func(i int) bool
	}{
		{"all", sandboxer.EntryQuery{}, func(int) bool { return true }},
		{"tenant", sandboxer.EntryQuery{Tenant: "t2"}, func(i int) bool { return i%2 == 1 }},
		{"sandbox", sandboxer.EntryQuery{SandboxID: "c"}, func(i int) bool { return i%3 == 2 }},
		{"both", sandboxer.EntryQuery{Tenant: "t1", SandboxID: "b"}, func(i int) bool { return i%6 == 4 }},
	} {
		var want2 []string
		for i, k := range want {
			if c.want(i) {
				want2 = append(want2, k)
			}
		}
		for _, limit := range []int{1, 4, 20, 21, 22} {
			var got []string
			for q := c.q; ; {
				q.Limit = limit
				items, next, err := s.Entries(s.ctx, q)
				s.ok(err)
				if len(items) > limit || next != "" && len(items) != limit {
					s.Fatalf("%s: a page of %d has %d entries and next %q", c.name, limit, len(items), next)
				}
				for _, e := range items {
					got = append(got, e.Key)
				}
				if next == "" {
					break
				}
				q.After = next
			}
			if !slices.Equal(got, want2) {
				s.Errorf("%s, pages of %d: %v; want %v", c.name, limit, got, want2)
			}
		}
	}
}

func ledgerBadCursor(s *suite) {
	other, own := cursors(s)
	for _, c := range foreign(own, other) {
		_, _, err := s.Entries(s.ctx, sandboxer.EntryQuery{After: c})
		s.fails(err, sandboxer.Invalid)
	}
}

func ledgerInvalid(s *suite) {
	s.book(grant("g", "acme", math.MaxInt64))
	for name, e := range map[string]sandboxer.Entry{
		"no key":           grant("", "acme", 1),
		"no tenant":        grant("k", "", 1),
		"unknown type":     {Key: "k", Tenant: "acme", Type: "gift", Amount: 1},
		"balance too big":  grant("k", "acme", 1),
		"hold too big":     entry("k", sandboxer.EntryPost, "a", 1, math.MinInt64),
		"refund of riches": entry("k", sandboxer.EntryVoid, "a", 1, 1),
	} {
		w := everything("x")
		w.Entries = append(w.Entries[:0], e)
		if err := s.Write(s.ctx, w); sandboxer.KindOf(err) != sandboxer.Invalid {
			s.Errorf("%s: error %v; want invalid", name, err)
		}
		s.wroteNothing("x")
	}
	if b := s.balance("acme"); b != math.MaxInt64 {
		s.Errorf("balance = %d; want it unchanged", b)
	}
}

func ledgerConcurrent(s *suite) {
	const writers, each, funds = 64, 5, 100
	s.book(grant("g", "acme", funds))
	won := make([]int, writers)
	errs := parallel(writers, func(i int) error {
		for j := range each {
			id := fmt.Sprintf("s%d-%d", i, j)
			err := s.CreateSandbox(s.ctx, sandbox(id, 1), sandboxer.Writes{
				Cover:   true,
				Entries: []sandboxer.Entry{entry(id, sandboxer.EntryHold, id, 1, -1)},
				Events:  []sandboxer.Event{{Tenant: "acme", Type: sandboxer.EventState, SandboxID: id}},
			})
			switch sandboxer.KindOf(err) {
			case "":
				won[i]++
			case sandboxer.NoCredit:
			default:
				return err
			}
		}
		return nil
	})
	if count(errs, "") != writers {
		s.Fatal(errs)
	}
	total := 0
	for _, n := range won {
		total += n
	}
	if b := s.balance("acme"); total != funds || b != 0 {
		s.Errorf("%d of %d holds were granted, balance %d; want %d and 0", total, writers*each, b, funds)
	}
	if n, h, e := len(pages(s, sandboxer.Query{Limit: 1000}, nil)), len(s.holds()), len(s.entries(sandboxer.EntryQuery{Limit: 1000})); n != funds || h != funds || e != funds+1 {
		s.Errorf("%d sandboxes, %d holds, %d entries; want %d, %d, %d", n, h, e, funds, funds, funds+1)
	}
}

func idempotencyKey(s *suite) {
	k := filled[sandboxer.IdempotencyKey](s.T)
	s.ok(s.Write(s.ctx, sandboxer.Writes{Key: &k}))
	kept(reflect.ValueOf(&k))
	got, err := s.IdempotencyKey(s.ctx, k.Tenant, k.Key)
	s.ok(err)
	s.same("key", got, k)
	_, err = s.IdempotencyKey(s.ctx, k.Tenant, "unknown")
	s.fails(err, sandboxer.NotFound)
	s.fails(s.Write(s.ctx, sandboxer.Writes{Key: &k, Events: []sandboxer.Event{{Message: "x"}}}), sandboxer.Conflict)
	if n := len(s.events(sandboxer.EventQuery{})); n != 0 {
		s.Errorf("%d events; want 0", n)
	}
	errs := parallel(16, func(i int) error {
		return s.Write(s.ctx, sandboxer.Writes{Key: &sandboxer.IdempotencyKey{Tenant: "t", Key: "raced", Digest: fmt.Sprint(i)}})
	})
	if ok, conflict := count(errs, ""), count(errs, sandboxer.Conflict); ok != 1 || conflict != 15 {
		s.Errorf("%d writers got the key and %d met a conflict; want 1 and 15", ok, conflict)
	}
}

func idempotencyTenant(s *suite) {
	for _, tenant := range []string{"t1", "t2"} {
		s.ok(s.Write(s.ctx, sandboxer.Writes{Key: &sandboxer.IdempotencyKey{Tenant: tenant, Key: "k", Digest: tenant}}))
	}
	got, err := s.IdempotencyKey(s.ctx, "t2", "k")
	s.ok(err)
	if got.Digest != "t2" {
		s.Errorf("t2 got the key of %s", got.Digest)
	}
	_, err = s.IdempotencyKey(s.ctx, "t3", "k")
	s.fails(err, sandboxer.NotFound)
}

func idempotencyForget(s *suite) {
	for i, key := range []string{"old", "edge", "new"} {
		s.ok(s.Write(s.ctx, sandboxer.Writes{Key: &sandboxer.IdempotencyKey{Tenant: "t", Key: key, At: start.Add(time.Duration(i) * time.Hour)}}))
	}
	s.ok(s.ForgetIdempotencyKeys(s.ctx, start.Add(time.Hour)))
	_, err := s.IdempotencyKey(s.ctx, "t", "old")
	s.fails(err, sandboxer.NotFound)
	for _, key := range []string{"edge", "new"} {
		_, err := s.IdempotencyKey(s.ctx, "t", key)
		s.ok(err)
	}
	s.ok(s.Write(s.ctx, sandboxer.Writes{Key: &sandboxer.IdempotencyKey{Tenant: "t", Key: "old"}}))
}

func apiKeys(s *suite) {
	k := filled[sandboxer.APIKey](s.T)
	s.ok(s.PutAPIKey(s.ctx, k))
	kept(reflect.ValueOf(&k))
	got, err := s.APIKey(s.ctx, k.ID)
	s.ok(err)
	s.same("key", got, k)

	bare := sandboxer.APIKey{ID: "bare", Tenant: "t2"}
	s.ok(s.PutAPIKey(s.ctx, bare))
	got, err = s.APIKey(s.ctx, "bare")
	s.ok(err)
	s.same("bare key", got, bare)

	replaced := filled[sandboxer.APIKey](s.T)
	replaced.ID = "bare"
	s.ok(s.PutAPIKey(s.ctx, replaced))
	kept(reflect.ValueOf(&replaced))
	got, err = s.APIKey(s.ctx, "bare")
	s.ok(err)
	s.same("replaced key", got, replaced)

	s.ok(s.PutAPIKey(s.ctx, sandboxer.APIKey{ID: "other", Tenant: "t3", CreatedAt: start}))
	all, err := s.APIKeys(s.ctx, "")
	s.ok(err)
	own, err := s.APIKeys(s.ctx, "t3")
	s.ok(err)
	if len(all) != 3 || len(own) != 1 || own[0].ID != "other" {
		s.Errorf("%d keys in all, of t3 %+v; want 3 and one", len(all), own)
	}
	_, err = s.APIKey(s.ctx, "unknown")
	s.fails(err, sandboxer.NotFound)
	s.fails(s.PutAPIKey(s.ctx, sandboxer.APIKey{}), sandboxer.Invalid)
}

func apiKeyInWrites(s *suite) {
	s.ok(s.Write(s.ctx, sandboxer.Writes{
		APIKey: &sandboxer.APIKey{ID: "k", Tenant: "t"},
		Events: []sandboxer.Event{{Tenant: "t", Type: sandboxer.EventKey}},
	}))
	_, err := s.APIKey(s.ctx, "k")
	s.ok(err)
	w := everything("x")
	w.APIKey.ID = "k"
	w.APIKey.RevokedAt = start
	w.Cover = true
	w.Entries = []sandboxer.Entry{entry("h", sandboxer.EntryHold, "a", 1, -1)}
	s.fails(s.Write(s.ctx, w), sandboxer.NoCredit)
	k, err := s.APIKey(s.ctx, "k")
	s.ok(err)
	if !k.RevokedAt.IsZero() {
		s.Error("a refused transaction revoked a key")
	}
}

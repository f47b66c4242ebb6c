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
	truncateTimes(reflect.ValueOf(&e))
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
	// The balance after the whole transaction counts.
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

func ledgerShown(s *suite) {
	for i, e := range []sandboxer.Entry{
		{Tenant: "t1", SandboxID: "x", ShownID: "a"}, {Tenant: "t2", SandboxID: "a"}, {Tenant: "t1", SandboxID: "a", ShownID: "b"}, {Tenant: "t1", SandboxID: "y", ShownID: "a"},
	} {
		e.Key, e.Type, e.Amount = fmt.Sprint(i), sandboxer.EntryGrant, 1
		s.book(e)
	}
	for _, c := range []struct {
		q    sandboxer.EntryQuery
		want string
	}{
		{sandboxer.EntryQuery{ShownID: "a"}, "0 1 3"},
		{sandboxer.EntryQuery{ShownID: "a", Tenant: "t1"}, "0 3"},
		{sandboxer.EntryQuery{ShownID: "a", Tenant: "t2"}, "1"},
		{sandboxer.EntryQuery{ShownID: "a", SandboxID: "y"}, "3"},
		{sandboxer.EntryQuery{ShownID: "x"}, ""},
		{sandboxer.EntryQuery{SandboxID: "a"}, "1 2"},
	} {
		var keys []string
		for _, e := range s.entries(c.q) {
			keys = append(keys, e.Key)
		}
		if got := strings.Join(keys, " "); got != c.want {
			s.Errorf("%+v: %q; want %q", c.q, got, c.want)
		}
	}
}

func ledgerUnsettled(s *suite) {
	for _, id := range []string{"lives", "settled", "pending", "free"} {
		sb := sandbox(id, 1)
		s.ok(s.CreateSandbox(s.ctx, sb, sandboxer.Writes{}))
		if id != "free" {
			s.book(entry(id+"h", sandboxer.EntryHold, id, 1, -10))
		}
		if id == "lives" {
			continue
		}
		sb.State, sb.EndedAt = sandboxer.Terminated, start
		var w sandboxer.Writes
		if id == "settled" {
			w.Entries = []sandboxer.Entry{entry("p", sandboxer.EntryPost, id, 1, 4), entry("v", sandboxer.EntryVoid, id, 1, 6)}
		} else if id == "pending" {
			sb.Billing = sandboxer.BillingPending
		}
		s.ok(s.UpdateSandbox(s.ctx, sb, w))
	}
	pending := sandboxer.Query{States: []sandboxer.State{sandboxer.Terminated}, Unsettled: true}
	if got := s.list(pending); !slices.Equal(got, []string{"pending"}) {
		s.Errorf("ended, with something on hold: %q", got)
	}
	if got := s.list(sandboxer.Query{Unsettled: true}); !slices.Equal(got, []string{"pending", "lives"}) {
		s.Errorf("with something on hold: %q", got)
	}
	if n, err := s.ForgetHistory(s.ctx, start.Add(time.Hour), 100); err != nil || n != 2 {
		s.Errorf("%d were forgotten, %v; want those that are settled", n, err)
	}
	s.book(entry("p2", sandboxer.EntryPost, "pending", 1, 10))
	if got := s.list(pending); len(got) != 0 {
		s.Errorf("settled since, and yet: %q", got)
	}
}

package storetest

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func listOrder(s *suite) {
	if got := s.list(sandboxer.Query{}); len(got) != 0 {
		s.Errorf("an empty store lists %v", got)
	}
	// The order is that of creation, whatever the records' own times say.
	for i, id := range []string{"b", "c", "a"} {
		s.create(id, 1, func(sb *sandboxer.Sandbox) { sb.CreatedAt = start.Add(-time.Duration(i) * time.Hour) })
	}
	b, err := s.Sandbox(s.ctx, "b")
	s.ok(err)
	s.end(b)
	s.create("b", 2)
	if got, want := s.list(sandboxer.Query{}), []string{"b/2", "a", "c", "b"}; !slices.Equal(got, want) {
		s.Errorf("list = %v; want %v", got, want)
	}
}

// listed makes sandboxes that differ in the fields that lists filter by.
func listed(s *suite) {
	make := func(id string, edit func(*sandboxer.Sandbox)) { s.create(id, 1, edit) }
	make("aa", func(sb *sandboxer.Sandbox) { sb.Tenant, sb.Name, sb.State = "t1", "web", sandboxer.Running })
	make("ab", func(sb *sandboxer.Sandbox) {
		sb.Tenant, sb.Name, sb.Profile = "t2", "web", "profile.big"
		sb.ExpiresAt = start.Add(time.Hour)
		sb.Debts = []sandboxer.Debt{{Extension: "ext.near", Reason: sandboxer.ReasonReplaced, RetryAt: start.Add(time.Minute)}, {Extension: "ext.gone", RetryAt: start.Add(time.Second)}}
	})
	make("ba", func(sb *sandboxer.Sandbox) { sb.Tenant, sb.Extension, sb.State = "t1", "ext.far", sandboxer.Paused })
	make("bb", func(sb *sandboxer.Sandbox) {
		sb.Tenant, sb.State, sb.Extension = "t1", sandboxer.Terminated, "ext.far"
		sb.Spec.Labels = map[string]string{"env": "ci"}
		sb.ExpiresAt = start
	})
}

func listFilters(s *suite) {
	listed(s)
	for _, c := range []struct {
		name string
		q    sandboxer.Query
		want []string
	}{
		{"none", sandboxer.Query{}, []string{"bb", "ba", "ab", "aa"}},
		{"tenant", sandboxer.Query{Tenant: "t1"}, []string{"bb", "ba", "aa"}},
		{"profile", sandboxer.Query{Profile: "profile.big"}, []string{"ab"}},
		{"extension", sandboxer.Query{Extension: "ext.far"}, []string{"bb", "ba"}},
		{"name", sandboxer.Query{Name: "web"}, []string{"ab", "aa"}},
		{"shown ID", sandboxer.Query{ShownID: "ab"}, []string{"ab"}},
		{"shown ID that is none", sandboxer.Query{ShownID: "a"}, []string{}},
		{"ID prefix", sandboxer.Query{IDPrefix: "b"}, []string{"bb", "ba"}},
		{"whole ID as prefix", sandboxer.Query{IDPrefix: "ba"}, []string{"ba"}},
		{"one state", sandboxer.Query{States: []sandboxer.State{sandboxer.Running}}, []string{"aa"}},
		{"the end", sandboxer.Query{States: []sandboxer.State{sandboxer.Terminated}}, []string{"bb"}},
		{"states", sandboxer.Query{States: []sandboxer.State{sandboxer.Paused, sandboxer.Terminated, sandboxer.Creating}}, []string{"bb", "ba", "ab"}},
		{"labels", sandboxer.Query{Labels: map[string]string{"env": "ci"}}, []string{"bb"}},
		{"due", sandboxer.Query{DueBefore: start}, []string{"bb"}},
		{"due for a debt", sandboxer.Query{DueBefore: start.Add(time.Second)}, []string{"bb", "ab"}},
		{"debts", sandboxer.Query{DebtsAt: "ext.near"}, []string{"ab"}},
		{"debts of a second", sandboxer.Query{DebtsAt: "ext.gone"}, []string{"ab"}},
		{"no debts", sandboxer.Query{DebtsAt: "ext.local"}, []string{}},
		{"unknown tenant", sandboxer.Query{Tenant: "t"}, []string{}},
	} {
		if got := s.list(c.q); !slices.Equal(got, c.want) {
			s.Errorf("%s: list = %v; want %v", c.name, got, c.want)
		}
	}
}

func listCombined(s *suite) {
	listed(s)
	all := sandboxer.Query{
		Tenant: "t1", Extension: "ext.far", Profile: "profile.local", IDPrefix: "b", Labels: map[string]string{"env": "ci"},
		States: []sandboxer.State{sandboxer.Terminated, sandboxer.Paused}, DueBefore: start,
	}
	if got, want := s.list(all), []string{"bb"}; !slices.Equal(got, want) {
		s.Errorf("list = %v; want %v", got, want)
	}
	for name, spoil := range map[string]func(*sandboxer.Query){
		"tenant":    func(q *sandboxer.Query) { q.Tenant = "t2" },
		"extension": func(q *sandboxer.Query) { q.Extension = "ext.local" },
		"profile":   func(q *sandboxer.Query) { q.Profile = "profile.big" },
		"prefix":    func(q *sandboxer.Query) { q.IDPrefix = "a" },
		"name":      func(q *sandboxer.Query) { q.Name = "web" },
		"labels":    func(q *sandboxer.Query) { q.Labels = map[string]string{"env": "prod"} },
		"states":    func(q *sandboxer.Query) { q.States = []sandboxer.State{sandboxer.Running} },
		"due":       func(q *sandboxer.Query) { q.DueBefore = start.Add(-time.Microsecond) },
	} {
		q := all
		spoil(&q)
		if got := s.list(q); len(got) != 0 {
			s.Errorf("with another %s: list = %v; want nothing", name, got)
		}
	}
}

func listPrefix(s *suite) {
	for _, id := range []string{"a_b", "axb", "a%b", "a-b", "A_b", "a\\b", "a"} {
		s.create(id, 1)
	}
	for prefix, want := range map[string][]string{
		"a_":   {"a_b"},
		"a%":   {"a%b"},
		"%":    {},
		"_":    {},
		"a\\":  {"a\\b"},
		"A":    {"A_b"},
		"a":    {"a", "a\\b", "a-b", "a%b", "axb", "a_b"},
		"a_b":  {"a_b"},
		"a_bb": {},
		"'":    {},
	} {
		if got := s.list(sandboxer.Query{IDPrefix: prefix}); !slices.Equal(got, want) {
			s.Errorf("prefix %q: list = %v; want %v", prefix, got, want)
		}
	}
}

func listLabels(s *suite) {
	for id, labels := range map[string]map[string]string{
		"none":  nil,
		"one":   {"env": "ci"},
		"two":   {"env": "ci", "team": "a"},
		"other": {"env": "prod", "team": "a"},
		"odd":   {`a"b.c'[0]$`: `v"'`, "": ""},
		"num":   {"n": "1"},
	} {
		s.create(id, 1, func(sb *sandboxer.Sandbox) { sb.Spec.Labels = labels })
	}
	for _, c := range []struct {
		labels map[string]string
		want   []string
	}{
		{map[string]string{"env": "ci"}, []string{"one", "two"}},
		{map[string]string{"env": "ci", "team": "a"}, []string{"two"}},
		{map[string]string{"team": "a"}, []string{"other", "two"}},
		{map[string]string{"env": ""}, nil},
		{map[string]string{"env": "c"}, nil},
		{map[string]string{"": ""}, []string{"odd"}},
		{map[string]string{`a"b.c'[0]$`: `v"'`}, []string{"odd"}},
		{map[string]string{"n": "1"}, []string{"num"}},
		{map[string]string{}, []string{"none", "num", "odd", "one", "other", "two"}},
	} {
		got := s.list(sandboxer.Query{Labels: c.labels})
		slices.Sort(got)
		if !slices.Equal(got, c.want) {
			s.Errorf("labels %v: list = %v; want %v", c.labels, got, c.want)
		}
	}
}

func listDue(s *suite) {
	at := func(expires, retry time.Duration) func(*sandboxer.Sandbox) {
		return func(sb *sandboxer.Sandbox) {
			if expires != 0 {
				sb.ExpiresAt = start.Add(expires)
			}
			if retry != 0 {
				sb.RetryAt = start.Add(retry)
			}
		}
	}
	const h = time.Hour
	s.create("never", 1)
	s.create("expires", 1, at(h, 0))
	s.create("retries", 1, at(0, h))
	s.create("retries-first", 1, at(3*h, h))
	s.create("expires-first", 1, at(h, 3*h))
	s.create("late", 1, at(3*h, 4*h))
	for _, c := range []struct {
		before time.Time
		want   []string
	}{
		{start.Add(h - time.Microsecond), nil},
		{start.Add(h), []string{"expires-first", "retries-first", "retries", "expires"}},
		{start.Add(3 * h), []string{"late", "expires-first", "retries-first", "retries", "expires"}},
		{start.Add(h).In(time.FixedZone("west", -8*3600)), []string{"expires-first", "retries-first", "retries", "expires"}},
	} {
		if got := s.list(sandboxer.Query{DueBefore: c.before}); !slices.Equal(got, c.want) {
			s.Errorf("due before %s: list = %v; want %v", c.before, got, c.want)
		}
	}
	sb, err := s.Sandbox(s.ctx, "expires")
	s.ok(err)
	s.update(sb, func(sb *sandboxer.Sandbox) { sb.ExpiresAt = start.Add(9 * h) })
	if got := s.list(sandboxer.Query{DueBefore: start.Add(h)}); slices.Contains(got, "expires") {
		s.Errorf("an extended sandbox is still due: %v", got)
	}
}

func listPages(s *suite) {
	var want []string
	for i := range 23 {
		id := fmt.Sprintf("s%02d", i)
		s.create(id, 1, func(sb *sandboxer.Sandbox) { sb.Tenant = []string{"t1", "t2"}[i%2] })
		want = append([]string{id}, want...)
	}
	for _, limit := range []int{1, 2, 5, 22, 23, 24} {
		if got := pages(s, sandboxer.Query{Limit: limit}, nil); !slices.Equal(got, want) {
			s.Errorf("pages of %d = %v; want %v", limit, got, want)
		}
		if got := pages(s, sandboxer.Query{Limit: limit, Tenant: "t1"}, nil); len(got) != 12 {
			s.Errorf("pages of %d of one tenant have %d sandboxes; want 12", limit, len(got))
		}
	}
}

// pages reads a list to its end, calling between before every page except the first.
func pages(s *suite, q sandboxer.Query, between func(page int)) (all []string) {
	s.Helper()
	for page := 0; ; page++ {
		items, next, err := s.Sandboxes(s.ctx, q)
		s.ok(err)
		if len(items) > q.Limit || next != "" && len(items) != q.Limit {
			s.Fatalf("page %d has %d sandboxes and next %q; limit %d", page, len(items), next, q.Limit)
		}
		all = append(all, ids(items)...)
		if next == "" {
			return all
		}
		q.After = next
		if between != nil {
			between(page)
		}
	}
}

func listStablePages(s *suite) {
	var want []string
	for i := range 20 {
		id := fmt.Sprintf("old%02d", i)
		s.create(id, 1)
		want = append([]string{id}, want...)
	}
	var wg sync.WaitGroup
	got := pages(s, sandboxer.Query{Limit: 3}, func(page int) {
		for i := range 4 {
			wg.Go(func() {
				if err := s.CreateSandbox(s.ctx, sandbox(fmt.Sprintf("new%d-%d", page, i), 1), sandboxer.Writes{}); err != nil {
					s.Error(err)
				}
			})
		}
		sb, err := s.Sandbox(s.ctx, want[page])
		s.ok(err)
		s.update(sb, func(sb *sandboxer.Sandbox) { sb.Message = "touched" })
	})
	wg.Wait()
	if !slices.Equal(got, want) {
		s.Errorf("pages = %v; want exactly those that were there: %v", got, want)
	}
}

func listLimits(s *suite) {
	errs := parallel(8, func(i int) error {
		for j := range (sandboxer.MaxPage + 8) / 8 {
			if err := s.CreateSandbox(s.ctx, sandbox(fmt.Sprintf("s%d-%d", i, j), 1), sandboxer.Writes{
				Events:  []sandboxer.Event{{Tenant: "acme", Type: sandboxer.EventStep}},
				Entries: []sandboxer.Entry{{Key: fmt.Sprintf("%d/%d", i, j), Tenant: "acme", Type: sandboxer.EntryGrant, Amount: 1}},
			}); err != nil {
				return err
			}
		}
		return nil
	})
	if count(errs, "") != 8 {
		s.Fatal(errs)
	}
	for limit, want := range map[int]int{0: sandboxer.DefaultPage, -1: sandboxer.DefaultPage, 7: 7, sandboxer.MaxPage: sandboxer.MaxPage, sandboxer.MaxPage + 1: sandboxer.MaxPage} {
		items, next, err := s.Sandboxes(s.ctx, sandboxer.Query{Limit: limit})
		s.ok(err)
		events, err := s.Events(s.ctx, sandboxer.EventQuery{Limit: limit})
		s.ok(err)
		entries, nextEntry, err := s.Entries(s.ctx, sandboxer.EntryQuery{Limit: limit})
		s.ok(err)
		if len(items) != want || len(events) != want || len(entries) != want || next == "" || nextEntry == "" {
			s.Errorf("limit %d: %d sandboxes, %d events, %d entries; want %d of each and another page", limit, len(items), len(events), len(entries), want)
		}
	}
}

// foreign are cursors that no store made, or that it made for another list.
func foreign(own, other string) []string {
	return []string{"x", "1", "0", "-1", "' OR 1=1", own + "0", own[:len(own)-1], "0" + own, other, repeat("a", 10_000)}
}

// cursors returns a cursor of sandboxes and one of entries.
func cursors(s *suite) (sandboxes, entries string) {
	for i := range 2 {
		s.create(fmt.Sprint("c", i), 1)
		s.book(sandboxer.Entry{Key: fmt.Sprint(i), Tenant: "acme", Type: sandboxer.EntryGrant, Amount: 1})
	}
	_, sandboxes, err := s.Sandboxes(s.ctx, sandboxer.Query{Limit: 1})
	s.ok(err)
	_, entries, err = s.Entries(s.ctx, sandboxer.EntryQuery{Limit: 1})
	s.ok(err)
	return sandboxes, entries
}

func listBadCursor(s *suite) {
	own, other := cursors(s)
	for _, c := range foreign(own, other) {
		_, _, err := s.Sandboxes(s.ctx, sandboxer.Query{After: c})
		s.fails(err, sandboxer.Invalid)
	}
}

func listTenants(s *suite) {
	for _, tenant := range []string{"t1", "t2"} {
		sb := sandbox(tenant+"-sb", 1)
		sb.Tenant = tenant
		s.ok(s.CreateSandbox(s.ctx, sb, sandboxer.Writes{
			Events:  []sandboxer.Event{{Tenant: tenant, Type: sandboxer.EventState, SandboxID: sb.ID}},
			Entries: []sandboxer.Entry{{Key: tenant, Tenant: tenant, Type: sandboxer.EntryGrant, Amount: 3}},
			APIKey:  &sandboxer.APIKey{ID: "key-" + tenant, Tenant: tenant},
		}))
	}
	if got, want := s.list(sandboxer.Query{Tenant: "t1"}), []string{"t1-sb"}; !slices.Equal(got, want) {
		s.Errorf("sandboxes of t1 = %v; want %v", got, want)
	}
	for _, q := range []sandboxer.Query{
		{Tenant: "t1", IDPrefix: "t2"}, {Tenant: "t1", Name: "t2-sb"},
	} {
		if got := s.list(q); len(got) != 0 {
			s.Errorf("t1 sees %v", got)
		}
	}
	for _, e := range s.events(sandboxer.EventQuery{Tenant: "t1"}) {
		if e.Tenant != "t1" {
			s.Errorf("t1 sees the event %+v", e)
		}
	}
	if got := s.events(sandboxer.EventQuery{Tenant: "t1", SandboxID: "t2-sb"}); len(got) != 0 {
		s.Errorf("t1 sees the events %+v", got)
	}
	if got := s.entries(sandboxer.EntryQuery{Tenant: "t1"}); len(got) != 1 || got[0].Tenant != "t1" {
		s.Errorf("entries of t1 = %+v", got)
	}
	keys, err := s.APIKeys(s.ctx, "t1")
	s.ok(err)
	if len(keys) != 1 || keys[0].ID != "key-t1" {
		s.Errorf("API keys of t1 = %+v", keys)
	}
	if b := s.balance("t1"); b != 3 {
		s.Errorf("balance of t1 = %d; want 3", b)
	}
}

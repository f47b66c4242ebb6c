package storetest

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func createSetsVersion(s *suite) {
	sb := s.create("a", 1)
	if sb.Version != 1 {
		s.Errorf("version after create = %d; want 1", sb.Version)
	}
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	if got.Version != 1 {
		s.Errorf("stored version = %d; want 1", got.Version)
	}
}

func createLiveID(s *suite) {
	for _, state := range sandboxer.States() {
		if !state.Live() {
			continue
		}
		id := "in-" + string(state)
		s.create(id, 1, func(sb *sandboxer.Sandbox) { sb.State = state })
		other := sandbox(id, 2)
		other.Tenant = "other"
		s.fails(s.CreateSandbox(s.ctx, other, sandboxer.Writes{}), sandboxer.Conflict)
		if other.Version != 0 {
			s.Errorf("a refused create set version %d", other.Version)
		}
	}
}

func named(name string) func(*sandboxer.Sandbox) {
	return func(sb *sandboxer.Sandbox) { sb.Name = name }
}

func createLiveName(s *suite) {
	s.create("a", 1, named("web"))
	b := sandbox("b", 1)
	b.Name = "web"
	s.fails(s.CreateSandbox(s.ctx, b, sandboxer.Writes{}), sandboxer.Conflict)
	_, err := s.Sandbox(s.ctx, "b")
	s.fails(err, sandboxer.NotFound)
	b.Tenant = "other"
	s.ok(s.CreateSandbox(s.ctx, b, sandboxer.Writes{}))
}

func createNameFree(s *suite) {
	s.end(s.create("a", 1, named("web")))
	s.create("b", 1, named("web"))
}

func createUnnamed(s *suite) {
	s.create("a", 1)
	s.create("b", 1)
}

func createNextGeneration(s *suite) {
	s.end(s.create("a", 1))
	s.end(s.create("a", 2))
	s.create("a", 5)
}

func createGenerationGrows(s *suite) {
	s.end(s.create("a", 3))
	for _, generation := range []int{1, 2, 3} {
		s.fails(s.CreateSandbox(s.ctx, sandbox("a", generation), sandboxer.Writes{}), sandboxer.Conflict)
	}
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	if got.Generation != 3 {
		s.Errorf("generation = %d; want 3", got.Generation)
	}
}

func createConflictWritesNothing(s *suite) {
	s.create("a", 1)
	s.fails(s.CreateSandbox(s.ctx, sandbox("a", 2), everything("x")), sandboxer.Conflict)
	s.wroteNothing("x")
	if b := s.balance("acme"); b != 0 {
		s.Errorf("balance = %s; want 0", b)
	}
}

func createTakenKey(s *suite) {
	first := sandbox("a", 1)
	key := &sandboxer.IdempotencyKey{Tenant: "acme", Key: "k", SandboxID: "a"}
	s.ok(s.CreateSandbox(s.ctx, first, sandboxer.Writes{Key: key}))
	w := everything("x")
	w.Key = key
	s.fails(s.CreateSandbox(s.ctx, sandbox("b", 1), w), sandboxer.Conflict)
	_, err := s.Sandbox(s.ctx, "b")
	s.fails(err, sandboxer.NotFound)
	s.wroteNothing("x")
}

func createInvalid(s *suite) {
	for _, edit := range []func(*sandboxer.Sandbox){
		func(sb *sandboxer.Sandbox) { sb.ID = "" },
		func(sb *sandboxer.Sandbox) { sb.Generation = 0 },
		func(sb *sandboxer.Sandbox) { sb.State = "asleep" },
	} {
		sb := sandbox("a", 1)
		edit(sb)
		s.fails(s.CreateSandbox(s.ctx, sb, everything("x")), sandboxer.Invalid)
	}
	s.wroteNothing("x")
	if got := s.list(sandboxer.Query{}); len(got) != 0 {
		s.Errorf("stored %v; want nothing", got)
	}
}

func createConcurrent(s *suite) {
	errs := parallel(32, func(i int) error {
		w := sandboxer.Writes{Events: []sandboxer.Event{{Tenant: "acme", Type: sandboxer.EventState}}}
		return s.CreateSandbox(s.ctx, sandbox("a", i+1), w)
	})
	if ok, conflict := count(errs, ""), count(errs, sandboxer.Conflict); ok != 1 || conflict != 31 {
		s.Errorf("%d creates won and %d met a conflict; want 1 and 31: %v", ok, conflict, errs)
	}
	if n := len(s.events(sandboxer.EventQuery{})); n != 1 {
		s.Errorf("%d events; want the winner's only", n)
	}
}

func updateRaisesVersion(s *suite) {
	sb := s.create("a", 1)
	for want := int64(2); want < 5; want++ {
		s.update(sb, func(sb *sandboxer.Sandbox) { sb.Message = fmt.Sprint(want) })
		got, err := s.Sandbox(s.ctx, "a")
		s.ok(err)
		if sb.Version != want || got.Version != want || got.Message != sb.Message {
			s.Errorf("version %d, stored %d (%q); want %d", sb.Version, got.Version, got.Message, want)
		}
	}
}

func updateStale(s *suite) {
	sb := s.create("a", 1)
	stale := *sb
	s.update(sb, func(sb *sandboxer.Sandbox) { sb.State = sandboxer.Running })
	for _, version := range []int64{0, 1, 3} {
		stale.Version = version
		stale.State = sandboxer.Terminated
		s.fails(s.UpdateSandbox(s.ctx, &stale, everything("x")), sandboxer.Conflict)
		if stale.Version != version {
			s.Errorf("a refused update moved the version from %d to %d", version, stale.Version)
		}
	}
	s.wroteNothing("x")
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	if got.State != sandboxer.Running || got.Version != 2 {
		s.Errorf("stored %s, version %d; want running, 2", got.State, got.Version)
	}
}

func updateMissing(s *suite) {
	sb := sandbox("a", 1)
	sb.Version = 1
	s.fails(s.UpdateSandbox(s.ctx, sb, everything("x")), sandboxer.NotFound)
	s.wroteNothing("x")
}

func updateOtherGeneration(s *suite) {
	first := s.create("a", 1)
	s.end(first)
	second := s.create("a", 2)
	s.update(first, func(sb *sandboxer.Sandbox) { sb.Cost = 5 })
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	s.same("second generation", got, second)
}

func updateTakenName(s *suite) {
	s.create("a", 1, named("web"))
	b := s.create("b", 1)
	b.Name = "web"
	s.fails(s.UpdateSandbox(s.ctx, b, everything("x")), sandboxer.Conflict)
	s.wroteNothing("x")
	if b.Version != 1 {
		s.Errorf("a refused update moved the version to %d", b.Version)
	}
	b.Name = "db"
	s.ok(s.UpdateSandbox(s.ctx, b, sandboxer.Writes{}))
}

func updateConcurrent(s *suite) {
	sb := s.create("a", 1)
	const rounds = 5
	for round := range rounds {
		errs := parallel(32, func(i int) error {
			mine := *sb
			mine.Message = fmt.Sprint(i)
			return s.UpdateSandbox(s.ctx, &mine, sandboxer.Writes{
				Events:  []sandboxer.Event{{Tenant: "acme", Type: sandboxer.EventStep}},
				Entries: []sandboxer.Entry{{Key: fmt.Sprintf("%d/%d", round, i), Tenant: "acme", Type: sandboxer.EntryGrant, Amount: 1}},
			})
		})
		if ok, conflict := count(errs, ""), count(errs, sandboxer.Conflict); ok != 1 || conflict != 31 {
			s.Fatalf("%d updates won and %d met a conflict; want 1 and 31: %v", ok, conflict, errs)
		}
		var err error
		sb, err = s.Sandbox(s.ctx, "a")
		s.ok(err)
		if want := fmt.Sprint(slices.Index(errs, nil)); sb.Message != want {
			s.Errorf("stored the record of %s; the winner is %s", sb.Message, want)
		}
	}
	if n, b := len(s.events(sandboxer.EventQuery{})), s.balance("acme"); n != rounds || b != rounds {
		s.Errorf("%d events and a balance of %d; want %d each", n, b, rounds)
	}
}

func recordEveryField(s *suite) {
	sb := filled[sandboxer.Sandbox](s.T)
	sb.State = sandboxer.Running
	given := filled[sandboxer.Sandbox](s.T)
	given.State = sandboxer.Running
	given.Version = 1
	s.ok(s.CreateSandbox(s.ctx, &sb, sandboxer.Writes{}))
	s.same("given record", sb, given) // but for its version the caller's record is left alone

	want := filled[sandboxer.Sandbox](s.T)
	want.State = sandboxer.Running
	want.Version = 1
	want.Spec.Env, want.Spec.Stamp, want.Spec.Place = nil, nil, "" // only sealed, and not stored
	want.Damaged, want.Found = "", false                           // not stored
	truncateTimes(reflect.ValueOf(&want))
	got, err := s.Sandbox(s.ctx, sb.ID)
	s.ok(err)
	s.same("created", *got, want)
	items, _, err := s.Sandboxes(s.ctx, sandboxer.Query{})
	s.ok(err)
	if len(items) != 1 {
		s.Fatalf("%d records; want 1", len(items))
	}
	s.same("listed", *items[0], want)

	// The same for an update: a record without anything gets everything.
	bare := s.create("bare", 1)
	full := filled[sandboxer.Sandbox](s.T)
	full.ID, full.Generation, full.Version, full.State, full.Name = bare.ID, bare.Generation, bare.Version, sandboxer.Paused, "full"
	full.ShownID = "shown" // that of the first is taken
	s.ok(s.UpdateSandbox(s.ctx, &full, sandboxer.Writes{}))
	want.ID, want.Generation, want.Version, want.State, want.Name = bare.ID, bare.Generation, 2, sandboxer.Paused, "full"
	want.ShownID = "shown"
	got, err = s.Sandbox(s.ctx, "bare")
	s.ok(err)
	s.same("updated", *got, want)
}

func recordZeroFields(s *suite) {
	sb := &sandboxer.Sandbox{ID: "a", Generation: 1, State: sandboxer.Warm}
	s.ok(s.CreateSandbox(s.ctx, sb, sandboxer.Writes{}))
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	s.same("created", got, sb)

	// A full record becomes bare again.
	full := filled[sandboxer.Sandbox](s.T)
	full.ID, full.Generation, full.Version, full.State = "a", 1, 1, sandboxer.Warm
	s.ok(s.UpdateSandbox(s.ctx, &full, sandboxer.Writes{}))
	sb.Version = 2
	s.ok(s.UpdateSandbox(s.ctx, sb, sandboxer.Writes{}))
	got, err = s.Sandbox(s.ctx, "a")
	s.ok(err)
	s.same("updated", got, sb)
	if due := s.list(sandboxer.Query{DueBefore: start.AddDate(100, 0, 0)}); len(due) != 0 {
		s.Errorf("due: %v; want nothing", due)
	}
}

func recordHandleData(s *suite) {
	for i, data := range []string{"{\"b\" : 1,\n  \"a\": \"<&>\\u00e9\u2028\"}", `"text"`, `1.0`, `[ ]`, `null`} {
		id := fmt.Sprint("h", i)
		s.create(id, 1, func(sb *sandboxer.Sandbox) { sb.Handle.Data = json.RawMessage(data) })
		got, err := s.Sandbox(s.ctx, id)
		s.ok(err)
		if string(got.Handle.Data) != data {
			s.Errorf("handle data %q came back as %q", data, got.Handle.Data)
		}
	}
}

func recordEnvironment(s *suite) {
	s.create("a", 1, func(sb *sandboxer.Sandbox) {
		sb.Spec.Env = map[string]string{"TOKEN": "secret"}
		sb.SealedEnv = []byte{1, 0, 2}
	})
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	if got.Spec.Env != nil || string(got.SealedEnv) != "\x01\x00\x02" {
		s.Errorf("environment %v, sealed %v; want only the sealed one", got.Spec.Env, got.SealedEnv)
	}
}

func recordIsCopy(s *suite) {
	sb := s.create("a", 1, func(sb *sandboxer.Sandbox) { sb.Spec.Labels = map[string]string{"k": "v"} })
	sb.Message = "changed by the caller"
	sb.Spec.Labels["k"] = "changed"
	first, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	if first.Message != "" || first.Spec.Labels["k"] != "v" {
		s.Errorf("the caller's later changes were stored: %+v", first)
	}
	first.Spec.Labels["k"] = "changed"
	second, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	if second.Spec.Labels["k"] != "v" {
		s.Error("two reads share memory")
	}
}

func recordOddStrings(s *suite) {
	short := "it's \"q\"; -- %_\\ \n <b>&é世\U0001F600"
	odd := short + repeat("x", 100_000)
	s.create("a", 1, func(sb *sandboxer.Sandbox) {
		sb.Name, sb.Message, sb.Host = short, odd, odd
		sb.Spec.Labels = map[string]string{short: short}
		sb.Spec.Inputs = map[string]string{odd: odd}
	})
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	if got.Name != short || got.Message != odd || got.Host != odd || got.Spec.Inputs[odd] != odd {
		s.Error("a string came back changed")
	}
	for _, q := range []sandboxer.Query{{Name: short}, {Labels: map[string]string{short: short}}} {
		if got := s.list(q); len(got) != 1 {
			s.Errorf("Sandboxes(%+v) = %v; want the one", q, got)
		}
	}
}

func getNewest(s *suite) {
	for _, generation := range []int{1, 2, 10} {
		sb := s.create("a", generation)
		got, err := s.Sandbox(s.ctx, "a")
		s.ok(err)
		if got.Generation != generation {
			s.Errorf("Sandbox returned generation %d; want %d", got.Generation, generation)
		}
		s.end(sb)
	}
}

func getExact(s *suite) {
	for _, generation := range []int{1, 2, 10} {
		s.end(s.create("a", generation))
	}
	for _, generation := range []int{10, 1, 2} {
		got, err := s.SandboxGeneration(s.ctx, "a", generation)
		s.ok(err)
		if got.Generation != generation {
			s.Errorf("SandboxGeneration(%d) returned %d", generation, got.Generation)
		}
	}
	_, err := s.SandboxGeneration(s.ctx, "a", 3)
	s.fails(err, sandboxer.NotFound)
}

func getMissing(s *suite) {
	_, err := s.Sandbox(s.ctx, "nothing")
	s.fails(err, sandboxer.NotFound)
	_, err = s.SandboxGeneration(s.ctx, "nothing", 1)
	s.fails(err, sandboxer.NotFound)
}

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

// listed makes sandboxes that differ in what lists filter by.
func listed(s *suite) {
	make := func(id string, edit func(*sandboxer.Sandbox)) { s.create(id, 1, edit) }
	make("aa", func(sb *sandboxer.Sandbox) { sb.Tenant, sb.Name, sb.State = "t1", "web", sandboxer.Running })
	make("ab", func(sb *sandboxer.Sandbox) { sb.Tenant, sb.Name, sb.Profile = "t2", "web", "profile.big" })
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

// pages reads a list to its end, calling between before every page but the first.
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

// cursors returns one of sandboxes and one of entries.
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

// shown is a change of a record to one of tenant that shows id.
func shown(tenant, id string) func(*sandboxer.Sandbox) {
	return func(sb *sandboxer.Sandbox) { sb.Tenant, sb.ShownID = tenant, id }
}

func createLiveShown(s *suite) {
	s.create("x", 1, shown("t1", "a"))
	s.create("y", 1, shown("t2", "a"))
	s.create("a", 1, shown("t3", ""))
	refused := func(id, tenant, shows string) {
		s.Helper()
		sb := sandbox(id, 1)
		shown(tenant, shows)(sb)
		s.fails(s.CreateSandbox(s.ctx, sb, sandboxer.Writes{}), sandboxer.Conflict)
	}
	refused("z", "t1", "a")
	refused("z", "t3", "a")
	refused("a", "t4", "b")
	one, err := s.Sandbox(s.ctx, "x")
	s.ok(err)
	one.State = sandboxer.Terminated
	s.ok(s.UpdateSandbox(s.ctx, one, sandboxer.Writes{}))
	s.create("z", 1, shown("t1", "a"))
	other, err := s.Sandbox(s.ctx, "y")
	s.ok(err)
	other.Tenant = "t1"
	s.fails(s.UpdateSandbox(s.ctx, other, sandboxer.Writes{}), sandboxer.Conflict)
}

func getShown(s *suite) {
	end := func(id string) {
		sb, err := s.Sandbox(s.ctx, id)
		s.ok(err)
		sb.State = sandboxer.Terminated
		s.ok(s.UpdateSandbox(s.ctx, sb, sandboxer.Writes{}))
	}
	is := func(tenant, id, want string, generation int) {
		s.Helper()
		sb, err := s.SandboxShown(s.ctx, tenant, id)
		s.ok(err)
		if sb.ID != want || sb.Generation != generation || sb.Shown() != id {
			s.Errorf("%s of %s is %s, generation %d; want %s, %d", id, tenant, sb.ID, sb.Generation, want, generation)
		}
	}
	s.create("x", 1, shown("t1", "a"))
	s.create("a", 1, shown("t2", ""))
	is("t1", "a", "x", 1)
	is("t2", "a", "a", 1)
	end("x")
	s.create("x", 2, shown("t1", "a"))
	is("t1", "a", "x", 2)
	end("x")
	is("t1", "a", "x", 2)
	s.create("y", 1, shown("t1", "a"))
	is("t1", "a", "y", 1)
	for _, none := range [][2]string{{"t1", "x"}, {"t3", "a"}, {"", "a"}, {"t1", ""}} {
		_, err := s.SandboxShown(s.ctx, none[0], none[1])
		s.fails(err, sandboxer.NotFound)
	}
	for id, want := range map[string][]string{"a": {"t1", "t2"}, "x": nil} {
		got, err := s.TenantsOfShown(s.ctx, id)
		s.ok(err)
		if !slices.Equal(got, want) {
			s.Errorf("%s is %v's; want %v", id, got, want)
		}
	}
	if got, want := s.list(sandboxer.Query{IDPrefix: "a"}), []string{"y", "x/2", "a", "x"}; !slices.Equal(got, want) {
		s.Errorf("those that show a…: %v; want %v", got, want)
	}
}

package storetest

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"

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
	s.putSecrets(&sb, &given)
	s.ok(s.CreateSandbox(s.ctx, &sb, sandboxer.Writes{}))
	s.same("given record", sb, given) // apart from its version the caller's record is left alone

	want := filled[sandboxer.Sandbox](s.T)
	want.State = sandboxer.Running
	want.Version = 1
	want.Secrets, want.Spec.Credential = given.Secrets, given.Spec.Credential
	want.Spec.Env, want.Spec.Place = nil, "" // only sealed, and not stored
	want.Damaged, want.Found = "", false     // not stored
	want.Spec.Profile.Route = nil            // never in a spec
	for i := range want.Route {
		want.Route[i].Words = "" // not stored
	}
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
	full.Secrets, full.Spec.Credential = given.Secrets, given.Spec.Credential
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

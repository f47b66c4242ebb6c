package storetest

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/sand-boxer/sandboxer"
)

// A model is the expected content of a store, in the simplest form that answers the same
// questions.
type model struct {
	sandboxes []sandboxer.Sandbox // in the order of creation
	entries   []sandboxer.Entry
	events    []string // their messages
	keys      map[string]bool
}

// testModel runs random operations on a store and on a model of it, and compares
// their answers.
func testModel(t *testing.T, open func(t *testing.T) sandboxer.Store) {
	rapid.Check(t, func(rt *rapid.T) {
		store := open(t)
		defer store.Close()
		s := &suite{T: t, ctx: t.Context(), Store: store}
		m := &model{keys: map[string]bool{}}
		serial := 0
		rt.Repeat(map[string]func(*rapid.T){
			"create": func(rt *rapid.T) {
				sb := sandbox(rapid.SampledFrom([]string{"a", "b", "c"}).Draw(rt, "id"), rapid.IntRange(1, 4).Draw(rt, "generation"))
				sb.Tenant, sb.Name = drawTenant(rt), drawName(rt)
				sb.State = drawState(rt, sandboxer.Creating)
				w := drawWrites(rt, &serial)
				err := s.CreateSandbox(s.ctx, sb, w)
				compare(rt, "create", err, m.create(*sb, w))
			},
			"update": func(rt *rapid.T) {
				if len(m.sandboxes) == 0 {
					rt.Skip("nothing to update")
				}
				sb := rapid.SampledFrom(m.sandboxes).Draw(rt, "sandbox")
				sb.Version += int64(rapid.SampledFrom([]int{0, 0, 0, -1, 1}).Draw(rt, "staleness"))
				sb.State = drawState(rt, sb.State)
				sb.Tenant, sb.Name = drawTenant(rt), drawName(rt)
				before := sb
				w := drawWrites(rt, &serial)
				err := s.UpdateSandbox(s.ctx, &sb, w)
				compare(rt, "update", err, m.update(before, w))
			},
			"write": func(rt *rapid.T) {
				w := drawWrites(rt, &serial)
				compare(rt, "write", s.Write(s.ctx, w), m.write(w))
			},
			"list": func(rt *rapid.T) {
				q := sandboxer.Query{
					Tenant:   rapid.SampledFrom([]string{"", "t1", "t2"}).Draw(rt, "tenant"),
					Name:     drawName(rt),
					IDPrefix: rapid.SampledFrom([]string{"", "a", "b"}).Draw(rt, "prefix"),
					States:   rapid.SliceOfN(rapid.SampledFrom(sandboxer.States()), 0, 3).Draw(rt, "states"),
					Limit:    rapid.IntRange(1, 4).Draw(rt, "limit"),
				}
				if got, want := pages(s, q, nil), m.list(q); !slices.Equal(got, want) {
					rt.Fatalf("Sandboxes(%+v) = %v; want %v", q, got, want)
				}
			},
			"check": func(rt *rapid.T) { m.check(rt, s) },
		})
		m.check(rt, s)
	})
}

// drawState returns the next state. A new sandbox has not ended, and an ended one stays ended.
func drawState(rt *rapid.T, from sandboxer.State) sandboxer.State {
	if !from.Live() {
		return from
	}
	states := sandboxer.States()
	if from == sandboxer.Creating {
		states = slices.DeleteFunc(states, func(s sandboxer.State) bool { return !s.Live() })
	}
	return rapid.SampledFrom(states).Draw(rt, "state")
}

func drawTenant(rt *rapid.T) string {
	return rapid.SampledFrom([]string{"t1", "t2"}).Draw(rt, "tenant")
}
func drawName(rt *rapid.T) string {
	return rapid.SampledFrom([]string{"", "", "n1", "n2"}).Draw(rt, "name")
}

func drawWrites(rt *rapid.T, serial *int) (w sandboxer.Writes) {
	*serial++
	w.Cover = rapid.Bool().Draw(rt, "cover")
	for range rapid.IntRange(0, 2).Draw(rt, "entries") {
		e := sandboxer.Entry{
			Key: fmt.Sprint("k", rapid.IntRange(0, 30).Draw(rt, "key")), Tenant: drawTenant(rt),
			SandboxID:  rapid.SampledFrom([]string{"a", "b"}).Draw(rt, "of"),
			Generation: rapid.IntRange(1, 2).Draw(rt, "of generation"),
			Type:       rapid.SampledFrom([]sandboxer.EntryType{sandboxer.EntryGrant, sandboxer.EntryHold, sandboxer.EntryPost, sandboxer.EntryVoid}).Draw(rt, "type"),
			Amount:     sandboxer.Credits(rapid.IntRange(0, 3).Draw(rt, "amount")),
		}
		if e.Type == sandboxer.EntryHold {
			e.Amount = -e.Amount
		}
		if rapid.IntRange(0, 3).Draw(rt, "booking") > 0 { // its own under each key, except for a few
			e.Key = fmt.Sprint(e.Key, " ", e.Tenant, e.SandboxID, e.Generation, e.Type, e.Amount)
		}
		w.Entries = append(w.Entries, e)
	}
	if rapid.Bool().Draw(rt, "event") {
		w.Events = []sandboxer.Event{{Tenant: drawTenant(rt), Type: sandboxer.EventStep, Message: fmt.Sprint("event ", *serial)}}
	}
	if rapid.IntRange(0, 3).Draw(rt, "has key") == 0 {
		w.Key = &sandboxer.IdempotencyKey{Tenant: drawTenant(rt), Key: fmt.Sprint(rapid.IntRange(0, 9).Draw(rt, "idempotency key"))}
	}
	return w
}

func compare(rt *rapid.T, op string, err error, want sandboxer.Kind) {
	if got := sandboxer.KindOf(err); got != want {
		rt.Fatalf("%s: error %v (%q); want %q", op, err, got, want)
	}
}

func (m *model) nameTaken(sb sandboxer.Sandbox) bool {
	return sb.Name != "" && sb.State.Live() && slices.ContainsFunc(m.sandboxes, func(o sandboxer.Sandbox) bool {
		return o.State.Live() && o.Tenant == sb.Tenant && o.Name == sb.Name && (o.ID != sb.ID || o.Generation != sb.Generation)
	})
}

func (m *model) create(sb sandboxer.Sandbox, w sandboxer.Writes) sandboxer.Kind {
	for _, o := range m.sandboxes {
		if o.ID == sb.ID && (o.State.Live() || o.Generation >= sb.Generation) {
			return sandboxer.Conflict
		}
	}
	if m.nameTaken(sb) {
		return sandboxer.Conflict
	}
	kind := m.write(w)
	if kind == "" {
		sb.Version = 1
		m.sandboxes = append(m.sandboxes, sb)
	}
	return kind
}

func (m *model) update(sb sandboxer.Sandbox, w sandboxer.Writes) sandboxer.Kind {
	i := slices.IndexFunc(m.sandboxes, func(o sandboxer.Sandbox) bool { return o.ID == sb.ID && o.Generation == sb.Generation })
	if m.sandboxes[i].Version != sb.Version || m.nameTaken(sb) {
		return sandboxer.Conflict
	}
	kind := m.write(w)
	if kind == "" {
		sb.Version++
		m.sandboxes[i] = sb
	}
	return kind
}

func (m *model) write(w sandboxer.Writes) sandboxer.Kind {
	if w.Key != nil && m.keys[w.Key.Tenant+"/"+w.Key.Key] {
		return sandboxer.Conflict
	}
	entries := slices.Clone(m.entries)
	for _, e := range w.Entries {
		switch i := slices.IndexFunc(entries, func(o sandboxer.Entry) bool { return o.Key == e.Key }); {
		case i < 0:
			entries = append(entries, e)
		case entries[i] != e:
			return sandboxer.Conflict
		}
	}
	for _, e := range w.Entries {
		if w.Cover && balance(entries, e.Tenant) < 0 {
			return sandboxer.NoCredit
		}
	}
	m.entries = entries
	for _, e := range w.Events {
		m.events = append(m.events, e.Message)
	}
	if w.Key != nil {
		m.keys[w.Key.Tenant+"/"+w.Key.Key] = true
	}
	return ""
}

func balance(entries []sandboxer.Entry, tenant string) (sum sandboxer.Credits) {
	for _, e := range entries {
		if e.Tenant == tenant && e.Type != sandboxer.EntryPost {
			sum += e.Amount
		}
	}
	return sum
}

func (m *model) list(q sandboxer.Query) []string {
	var out []*sandboxer.Sandbox
	for _, sb := range slices.Backward(m.sandboxes) {
		if (q.Tenant == "" || q.Tenant == sb.Tenant) && (q.Name == "" || q.Name == sb.Name) &&
			strings.HasPrefix(sb.ID, q.IDPrefix) && (len(q.States) == 0 || slices.Contains(q.States, sb.State)) {
			out = append(out, &sb)
		}
	}
	return ids(out)
}

// check compares everything that is cheap to ask for.
func (m *model) check(rt *rapid.T, s *suite) {
	for _, want := range m.sandboxes {
		got, err := s.SandboxGeneration(s.ctx, want.ID, want.Generation)
		if err != nil || got.Version != want.Version || got.State != want.State || got.Tenant != want.Tenant || got.Name != want.Name {
			rt.Fatalf("stored %+v (%v); want %+v", got, err, want)
		}
	}
	if got, want := s.list(sandboxer.Query{Limit: sandboxer.MaxPage}), m.list(sandboxer.Query{}); !slices.Equal(got, want) {
		rt.Fatalf("sandboxes = %v; want %v", got, want)
	}
	if got := s.entries(sandboxer.EntryQuery{}); len(got) != len(m.entries) {
		rt.Fatalf("%d entries; want %d", len(got), len(m.entries))
	}
	for _, tenant := range []string{"t1", "t2"} {
		if got, want := s.balance(tenant), balance(m.entries, tenant); got != want {
			rt.Fatalf("balance of %s = %d; want %d", tenant, got, want)
		}
	}
	holds := map[string]sandboxer.Credits{}
	for _, e := range m.entries {
		if e.Type != sandboxer.EntryGrant {
			holds[fmt.Sprintf("%s/%s/%d", e.Tenant, e.SandboxID, e.Generation)] -= e.Amount
		}
	}
	maps.DeleteFunc(holds, func(_ string, c sandboxer.Credits) bool { return c == 0 })
	got := map[string]sandboxer.Credits{}
	for _, h := range s.holds() {
		got[fmt.Sprintf("%s/%s/%d", h.Tenant, h.SandboxID, h.Generation)] = h.Amount
	}
	if !maps.Equal(got, holds) {
		rt.Fatalf("open holds = %v; want %v", got, holds)
	}
	var messages []string
	for _, e := range s.events(sandboxer.EventQuery{}) {
		messages = append(messages, e.Message)
	}
	if !slices.Equal(messages, m.events) {
		rt.Fatalf("events = %v; want %v", messages, m.events)
	}
}

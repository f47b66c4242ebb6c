// Package storetest is the conformance suite of sandboxer.Store: every implementation
// of the store runs it, and new behaviour of stores is written here first.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A Record is a kind of record that a store keeps and that can be damaged.
type Record string

const (
	SandboxRecord  Record = "sandbox"
	SnapshotRecord Record = "snapshot"
)

// Run tests the store that open returns. open is called once for every behaviour and
// returns a new, empty store, which the suite closes. reopen closes s and opens its
// data again; it may be nil for a store that does not outlive its process. damage
// makes the stored record of one generation, or of the snapshot id if generation is
// 0, unreadable, but not the values that the store searches
// by; it may be left out for a store whose records tests cannot reach.
func Run(t *testing.T, open func(t *testing.T) sandboxer.Store, reopen func(t *testing.T, s sandboxer.Store) sandboxer.Store,
	damage ...func(t *testing.T, s sandboxer.Store, of Record, id string)) {
	for _, b := range slices.Concat(behaviours, damaged(damagedSandbox), damaged(damagedSnapshot)) {
		t.Run(b.name, func(t *testing.T) {
			s := &suite{T: t, ctx: t.Context(), Store: open(t), reopen: reopen}
			if len(damage) > 0 {
				s.damage = damage[0]
			}
			defer func() { s.Close() }()
			b.test(s)
		})
	}
	t.Run("model/random operations", func(t *testing.T) { testModel(t, open) })
}

type behaviour struct {
	name string
	test func(*suite)
}

var behaviours = []behaviour{
	{"create/sets version 1", createSetsVersion},
	{"create/live ID is a conflict", createLiveID},
	{"create/live name is a conflict in its tenant only", createLiveName},
	{"create/live shown ID is a conflict in its tenant only", createLiveShown},
	{"create/name is free after the end", createNameFree},
	{"create/unnamed sandboxes do not collide", createUnnamed},
	{"create/next generation after the end", createNextGeneration},
	{"create/generation must grow", createGenerationGrows},
	{"create/conflict writes nothing", createConflictWritesNothing},
	{"create/taken idempotency key writes nothing", createTakenKey},
	{"create/record without identity is invalid", createInvalid},
	{"create/concurrent creates of one ID have one winner", createConcurrent},

	{"update/raises version", updateRaisesVersion},
	{"update/stale version writes nothing", updateStale},
	{"update/missing sandbox is not found", updateMissing},
	{"update/leaves other generations alone", updateOtherGeneration},
	{"update/claiming a taken name is a conflict", updateTakenName},
	{"update/concurrent updates have one winner", updateConcurrent},

	{"record/every field survives", recordEveryField},
	{"record/zero fields stay zero", recordZeroFields},
	{"record/handle data survives byte for byte", recordHandleData},
	{"record/environment is stored sealed only", recordEnvironment},
	{"record/stored copy is the store's own", recordIsCopy},
	{"record/odd strings survive", recordOddStrings},

	{"get/newest generation", getNewest},
	{"get/exact generation", getExact},
	{"get/shown ID means the newest of its tenant", getShown},
	{"get/missing is not found", getMissing},

	{"list/newest first", listOrder},
	{"list/each filter", listFilters},
	{"list/filters combine", listCombined},
	{"list/ID prefix is literal", listPrefix},
	{"list/labels must all match", listLabels},
	{"list/due means expiry or retry", listDue},
	{"list/by the state of the bill", listBilling},
	{"list/pages cover everything once", listPages},
	{"list/pages are stable while sandboxes are made", listStablePages},
	{"list/limit has a default and a maximum", listLimits},
	{"list/foreign cursor is invalid", listBadCursor},
	{"list/tenants do not see each other", listTenants},

	{"events/numbers grow and are reported", eventNumbers},
	{"events/every field survives", eventEveryField},
	{"events/filters and limit", eventFilters},
	{"events/newest of many", eventNewest},
	{"events/written with their record or not at all", eventsAtomic},

	{"ledger/balance is the sum", ledgerBalance},
	{"ledger/key twice is a no-op", ledgerKeyTwice},
	{"ledger/key of another booking is a conflict", ledgerKeyOfAnother},
	{"ledger/every field survives", ledgerEveryField},
	{"ledger/uncovered writes nothing", ledgerUncovered},
	{"ledger/cover allows down to zero", ledgerCoverExact},
	{"ledger/without cover may go below zero", ledgerNoCover},
	{"ledger/open holds", ledgerOpenHolds},
	{"ledger/entries page and filter", ledgerPages},
	{"ledger/entries by shown ID", ledgerShown},
	{"ledger/ended with something on hold", ledgerUnsettled},
	{"ledger/foreign cursor is invalid", ledgerBadCursor},
	{"ledger/entry that cannot be booked is invalid", ledgerInvalid},
	{"ledger/concurrent covers never overdraw", ledgerConcurrent},

	{"history/old and ended is forgotten, the ledger is not", historyForgotten},
	{"history/goes in batches", historyBatches},
	{"history/dropped snapshots are forgotten", historySnapshots},

	{"keys/idempotency key survives", idempotencyKey},
	{"keys/idempotency key is the tenant's own", idempotencyTenant},
	{"keys/idempotency keys are forgotten by age", idempotencyForget},
	{"keys/an idempotency key is freed for what it stands for", idempotencyFree},
	{"keys/API key is put, replaced and listed", apiKeys},
	{"keys/API key is written with its event", apiKeyInWrites},

	{"secrets/versions grow, and the newest is found", secretVersions},
	{"secrets/belong to a tenant", secretTenants},
	{"secrets/are keys to accounts", secretCredential},
	{"secrets/a version is kept while something refers to it", secretKept},
	{"secrets/a sandbox gets the newest version, once", secretOfSandbox},
	{"secrets/removal names what refers to it", secretRemoval},
	{"secrets/bounds", secretBounds},
	{"secrets/written with their event or not at all", secretAtomic},
	{"secrets/survive reopening", secretReopen},

	{"usage/every field survives", usageEveryField},
	{"usage/a key is written once", usageOnce},
	{"usage/pages and filters", usagePages},
	{"usage/written with its record or not at all", usageAtomic},
	{"usage/old rows are forgotten, their numbers are not given again", usageForgotten},
	{"usage/survives reopening", usageReopen},
	{"sinks/only the one who knows where it is moves it", sinkCursor},
	{"sinks/dead letters", sinkDead},

	{"snapshots/versions", snapshotVersions},
	{"snapshots/a name means one that is not dropped", snapshotNames},
	{"snapshots/every field survives", snapshotEveryField},
	{"snapshots/written with their sandbox or not at all", snapshotWithSandbox},
	{"snapshots/filters and pages", snapshotList},
	{"snapshots/survive reopening", snapshotReopen},

	{"quota/use is counted from the records", quotaUse},
	{"quota/too much writes nothing", quotaWritesNothing},
	{"quota/concurrent creates never overshoot", quotaConcurrent},
	{"quota/spending is counted from the ledger", spendUse},
	{"quota/spending too much writes nothing", spendWritesNothing},
	{"quota/concurrent holds never overspend", spendConcurrent},
	{"quota/spending of API keys", spendOfKeys},
	{"room/what takes room is counted", roomCounted},
	{"room/too much writes nothing", roomWritesNothing},
	{"room/concurrent creates never share a place", roomConcurrent},

	{"closing/canceled calls change nothing", canceledCalls},
	{"closing/closed store is unavailable", closedStore},
	{"closing/close while writing answers everybody", closeWhileWriting},
	{"closing/everything survives reopening", reopenEverything},
}

// A suite is one behaviour's store with helpers.
type suite struct {
	*testing.T
	sandboxer.Store
	ctx    context.Context
	reopen func(*testing.T, sandboxer.Store) sandboxer.Store
	damage func(*testing.T, sandboxer.Store, Record, string)
}

var start = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

// sandbox returns a small record.
func sandbox(id string, generation int) *sandboxer.Sandbox {
	return &sandboxer.Sandbox{
		ID: id, Generation: generation, Tenant: "acme", Profile: "profile.local", Extension: "ext.local",
		State: sandboxer.Creating, CreatedAt: start,
		Spec: sandboxer.Spec{ID: id, Generation: generation},
	}
}

func (s *suite) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatalf("unexpected error: %v", err)
	}
}

// fails checks that err has the kind and a sentence for people.
func (s *suite) fails(err error, kind sandboxer.Kind) {
	s.Helper()
	if !errors.Is(err, kind) {
		s.Fatalf("error is %v (%s); want %s", err, sandboxer.KindOf(err), kind)
	}
	if sandboxer.Message(err) == "" {
		s.Fatalf("error %v has no message", err)
	}
}

// create stores a sandbox after edit.
func (s *suite) create(id string, generation int, edit ...func(*sandboxer.Sandbox)) *sandboxer.Sandbox {
	s.Helper()
	sb := sandbox(id, generation)
	for _, f := range edit {
		f(sb)
	}
	s.ok(s.CreateSandbox(s.ctx, sb, sandboxer.Writes{}))
	return sb
}

func (s *suite) update(sb *sandboxer.Sandbox, edit func(*sandboxer.Sandbox)) {
	s.Helper()
	edit(sb)
	s.ok(s.UpdateSandbox(s.ctx, sb, sandboxer.Writes{}))
}

func (s *suite) end(sb *sandboxer.Sandbox) {
	s.Helper()
	s.update(sb, func(sb *sandboxer.Sandbox) { sb.State = sandboxer.Terminated })
}

// list returns the IDs, with generations above 1, that q selects.
func (s *suite) list(q sandboxer.Query) []string {
	s.Helper()
	items, next, err := s.Sandboxes(s.ctx, q)
	s.ok(err)
	if next != "" {
		s.Fatalf("Sandboxes(%+v) has another page", q)
	}
	return ids(items)
}

func ids(items []*sandboxer.Sandbox) []string {
	out := make([]string, len(items))
	for i, sb := range items {
		out[i] = sb.ID
		if sb.Generation > 1 {
			out[i] += fmt.Sprintf("/%d", sb.Generation)
		}
	}
	return out
}

func (s *suite) events(q sandboxer.EventQuery) []sandboxer.Event {
	s.Helper()
	events, err := s.Events(s.ctx, q)
	s.ok(err)
	return events
}

func (s *suite) entries(q sandboxer.EntryQuery) []sandboxer.Entry {
	s.Helper()
	entries, next, err := s.Entries(s.ctx, q)
	s.ok(err)
	if next != "" {
		s.Fatalf("Entries(%+v) has another page", q)
	}
	return entries
}

func (s *suite) balance(tenant string) sandboxer.Credits {
	s.Helper()
	b, err := s.Balance(s.ctx, tenant)
	s.ok(err)
	return b
}

func (s *suite) holds() []sandboxer.OpenHold {
	s.Helper()
	h, err := s.OpenHolds(s.ctx)
	s.ok(err)
	return h
}

func (s *suite) book(entries ...sandboxer.Entry) {
	s.Helper()
	s.ok(s.Write(s.ctx, sandboxer.Writes{Entries: entries}))
}

// everything returns one of each thing that can be written with a record.
func everything(key string) sandboxer.Writes {
	return sandboxer.Writes{
		Entries: []sandboxer.Entry{{Key: "entry-" + key, Tenant: "acme", Type: sandboxer.EntryGrant, Amount: 7, At: start}},
		Events:  []sandboxer.Event{{Tenant: "acme", Type: sandboxer.EventStep, Message: "event-" + key, At: start}},
		Key:     &sandboxer.IdempotencyKey{Tenant: "acme", Key: "key-" + key, At: start},
		APIKey:  &sandboxer.APIKey{ID: "api-" + key, Tenant: "acme", CreatedAt: start},
	}
}

// wroteNothing checks that no part of everything(key) was written.
func (s *suite) wroteNothing(key string) {
	s.Helper()
	if got := s.entries(sandboxer.EntryQuery{}); slices.ContainsFunc(got, func(e sandboxer.Entry) bool { return e.Key == "entry-"+key }) {
		s.Errorf("a ledger entry was written: %+v", got)
	}
	if got := s.events(sandboxer.EventQuery{}); slices.ContainsFunc(got, func(e sandboxer.Event) bool { return e.Message == "event-"+key }) {
		s.Errorf("an event was written: %+v", got)
	}
	_, err := s.IdempotencyKey(s.ctx, "acme", "key-"+key)
	s.fails(err, sandboxer.NotFound)
	_, err = s.APIKey(s.ctx, "api-"+key)
	s.fails(err, sandboxer.NotFound)
}

// same compares two values and names the first field that differs.
func (s *suite) same(what string, got, want any) {
	s.Helper()
	if path := difference(reflect.ValueOf(got), reflect.ValueOf(want), what); path != "" {
		s.Errorf("%s", path)
	}
}

func difference(got, want reflect.Value, path string) string {
	if got.Kind() == reflect.Pointer && want.Kind() == reflect.Pointer && !got.IsNil() && !want.IsNil() {
		return difference(got.Elem(), want.Elem(), path)
	}
	if got.Kind() == reflect.Struct && got.Type() == want.Type() && got.Type() != reflect.TypeFor[time.Time]() {
		for i := range got.NumField() {
			if d := difference(got.Field(i), want.Field(i), path+"."+got.Type().Field(i).Name); d != "" {
				return d
			}
		}
		return ""
	}
	if !reflect.DeepEqual(got.Interface(), want.Interface()) {
		return fmt.Sprintf("%s = %#v; want %#v", path, got.Interface(), want.Interface())
	}
	return ""
}

// fill sets every field below v to something that is not its zero value and differs
// from its neighbours, so that a field which is not stored is noticed.
func fill(t *testing.T, v reflect.Value, n *int) {
	*n++
	switch v.Interface().(type) {
	case time.Time: // finer than is kept, in a zone that is not kept
		zone := time.FixedZone("somewhere", 3*3600)
		v.Set(reflect.ValueOf(start.Add(time.Duration(*n)*time.Second + 123456789).In(zone)))
		return
	case []byte:
		v.SetBytes([]byte{0, 0xff, byte(*n)})
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, v.Field(i), n)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), n)
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 { // json.RawMessage
			v.SetBytes(fmt.Appendf(nil, `{"n":%d}`, *n))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(t, v.Index(i), n)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range 2 {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			fill(t, key, n)
			fill(t, value, n)
			v.SetMapIndex(key, value)
		}
	case reflect.String:
		v.SetString(fmt.Sprintf("value-%d", *n))
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(*n))
	case reflect.Bool:
		v.SetBool(true)
	default:
		t.Fatalf("fill cannot make a %s: teach it", v.Type())
	}
}

// filled returns a T without a zero field.
func filled[T any](t *testing.T) T {
	var v T
	n := 0
	fill(t, reflect.ValueOf(&v).Elem(), &n)
	return v
}

// truncateTimes truncates every time below v to the precision of a store.
func truncateTimes(v reflect.Value) {
	if t, ok := v.Interface().(time.Time); ok {
		v.Set(reflect.ValueOf(t.UTC().Truncate(time.Microsecond)))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			truncateTimes(v.Field(i))
		}
	case reflect.Pointer:
		if !v.IsNil() {
			truncateTimes(v.Elem())
		}
	case reflect.Slice:
		for i := range v.Len() {
			truncateTimes(v.Index(i))
		}
	}
}

// parallel runs f n times at once and returns the errors.
func parallel(n int, f func(i int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-begin
			errs[i] = f(i)
		})
	}
	close(begin)
	wg.Wait()
	return errs
}

func count(errs []error, kind sandboxer.Kind) (n int) {
	for _, err := range errs {
		if err == nil && kind == "" || err != nil && kind != "" && errors.Is(err, kind) {
			n++
		}
	}
	return n
}

func repeat(s string, n int) string { return strings.Repeat(s, n) }

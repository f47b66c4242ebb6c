package storetest

import (
	"fmt"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// at returns e with another time.
func at(e sandboxer.Entry, t time.Time) sandboxer.Entry {
	e.At = t
	return e
}

// spent checks what the store says that a tenant spent in the month and on the day of t.
func (s *suite) spent(tenant string, t time.Time, month, day int64) {
	s.Helper()
	items, _, err := s.QuotaUse(s.ctx, sandboxer.QuotaUseQuery{Tenant: tenant, At: t})
	s.ok(err)
	if got := items[0].Used; got[sandboxer.QuotaSpendMonth] != month || got[sandboxer.QuotaSpendDay] != day {
		s.Errorf("%s on %s: %d in the month and %d on the day; want %d and %d", tenant, t, got[sandboxer.QuotaSpendMonth], got[sandboxer.QuotaSpendDay], month, day)
	}
}

func spendUse(s *suite) {
	const day = 24 * time.Hour
	midnight := start.Truncate(day)
	s.book(grant("g", "acme", 1000), grant("g2", "zoo", 1000))
	s.spent("acme", start, 0, 0)
	s.book(at(entry("h", sandboxer.EntryHold, "a", 1, -60), midnight.Add(-1)))
	s.spent("acme", start, 60, 60) // what is on hold counts, since whenever
	settle := []sandboxer.Entry{at(entry("p", sandboxer.EntryPost, "a", 1, 40), midnight), at(entry("v", sandboxer.EntryVoid, "a", 1, 20), midnight)}
	s.book(settle...)
	s.book(settle...) // again changes nothing
	s.book(at(entry("h2", sandboxer.EntryHold, "b", 1, -7), start), at(entry("p2", sandboxer.EntryPost, "b", 1, 5), midnight.Add(day-time.Microsecond)))
	s.book(at(entry("h3", sandboxer.EntryHold, "c", 1, -100), start), at(entry("p3", sandboxer.EntryPost, "c", 1, 100), midnight.AddDate(0, 0, -1)))
	s.spent("acme", start, 147, 47)
	s.spent("acme", start.In(time.FixedZone("", 14*3600)), 147, 47)
	s.spent("acme", midnight.Add(-1), 147, 102)
	s.spent("acme", midnight.Add(day), 147, 2)
	s.spent("acme", midnight.AddDate(0, 1, 0), 2, 2)
	s.spent("acme", midnight.AddDate(0, -1, 0), 2, 2)
	s.spent("zoo", start, 0, 0)

	other := at(entry("h4", sandboxer.EntryHold, "d", 1, -9), start)
	other.Tenant = "zoo"
	s.book(other)
	items, next, err := s.QuotaUse(s.ctx, sandboxer.QuotaUseQuery{Limit: 1, At: start})
	s.ok(err)
	if len(items) != 1 || items[0].Tenant != "acme" || items[0].Used[sandboxer.QuotaSpendMonth] != 147 || next != "acme" {
		s.Errorf("the first page is %+v, next %q", items, next)
	}
	items, next, err = s.QuotaUse(s.ctx, sandboxer.QuotaUseQuery{After: next, Limit: 1, At: start})
	s.ok(err)
	if len(items) != 1 || items[0].Tenant != "zoo" || items[0].Used[sandboxer.QuotaSpendDay] != 9 || next != "" {
		s.Errorf("the second page is %+v, next %q", items, next)
	}
}

func spendWritesNothing(s *suite) {
	within := func(w sandboxer.Writes, r sandboxer.Resource, most int64) sandboxer.Writes {
		w.Quota = &sandboxer.TenantQuota{Tenant: "acme", Quota: sandboxer.Quota{r: most}, At: start}
		return w
	}
	s.book(grant("g", "acme", 1000))
	s.book(at(entry("h", sandboxer.EntryHold, "a", 1, -60), start), at(entry("p", sandboxer.EntryPost, "a", 1, 40), start))
	for _, r := range []sandboxer.Resource{sandboxer.QuotaSpendMonth, sandboxer.QuotaSpendDay} {
		w := within(everything("x"), r, 99)
		w.Entries = []sandboxer.Entry{at(entry("h2", sandboxer.EntryHold, "b", 1, -40), start)}
		s.fails(s.CreateSandbox(s.ctx, sandbox("b", 1), w), sandboxer.NoCredit)
		s.wroteNothing("x")
	}
	w := within(sandboxer.Writes{Entries: []sandboxer.Entry{at(entry("h2", sandboxer.EntryHold, "b", 1, -40), start)}}, sandboxer.QuotaSpendDay, 100)
	s.ok(s.Write(s.ctx, w))
	s.ok(s.Write(s.ctx, within(w, sandboxer.QuotaSpendDay, 0))) // a repeated booking adds nothing
	// What was spent may be settled, whatever the bound is since.
	s.ok(s.Write(s.ctx, within(sandboxer.Writes{Entries: []sandboxer.Entry{
		at(entry("p2", sandboxer.EntryPost, "b", 1, 30), start), at(entry("v2", sandboxer.EntryVoid, "b", 1, 10), start),
	}}, sandboxer.QuotaSpendDay, 0)))
	s.spent("acme", start, 90, 90)
}

func spendConcurrent(s *suite) {
	s.book(grant("g", "acme", 1000))
	errs := parallel(50, func(i int) error {
		id := fmt.Sprint("s", i)
		return s.CreateSandbox(s.ctx, sandbox(id, 1), sandboxer.Writes{
			Entries: []sandboxer.Entry{at(entry(id, sandboxer.EntryHold, id, 1, -10), start)}, Cover: true,
			Quota: &sandboxer.TenantQuota{Tenant: "acme", Quota: sandboxer.Quota{sandboxer.QuotaSpendDay: 75}, At: start},
		})
	})
	if count(errs, "") != 7 || count(errs, sandboxer.NoCredit) != 43 {
		s.Errorf("%d holds of 10 were made, %d refused; the bound is 75", count(errs, ""), count(errs, sandboxer.NoCredit))
	}
	s.spent("acme", start, 70, 70)
}

func spendOfKeys(s *suite) {
	s.book(grant("g", "acme", 1000), grant("g2", "zoo", 1000))
	for id, m := range map[string]sandboxer.MaxSpend{"daily": {Day: 100}, "monthly": {Month: 100}, "free": {}} {
		s.ok(s.PutAPIKey(s.ctx, sandboxer.APIKey{ID: id, Name: "name of " + id, Tenant: "acme", MaxSpend: m}))
	}
	hold := func(name, id, key string, amount sandboxer.Credits, t time.Time) sandboxer.Writes {
		e := at(entry(name, sandboxer.EntryHold, id, 1, -amount), t)
		e.KeyID = key
		return sandboxer.Writes{Entries: []sandboxer.Entry{e}, Cover: true}
	}
	refused := func(w sandboxer.Writes) {
		s.Helper()
		w.Events = []sandboxer.Event{{Message: "x"}}
		s.fails(s.Write(s.ctx, w), sandboxer.NoCredit)
		if n := len(s.events(sandboxer.EventQuery{})); n != 0 {
			s.Error("a refused write has events")
		}
	}
	tomorrow := start.AddDate(0, 0, 1)
	for _, key := range []string{"daily", "monthly"} {
		a, b := key+"a", key+"b"
		refused(hold(a, a, key, 101, start))
		s.ok(s.Write(s.ctx, hold(a, a, key, 60, start)))
		s.ok(s.Write(s.ctx, hold(a, a, key, 60, start))) // again adds nothing
		refused(hold(b, b, key, 41, start))
		foreign := hold(b, b, key, 41, start)
		foreign.Entries[0].Tenant = "zoo" // an administrator's key counts what it spends everywhere
		refused(foreign)
		// More for the same sandbox without a key, as the sweep holds it, counts for its key.
		refused(hold(a+"2", a, "", 41, start))
		s.ok(s.Write(s.ctx, hold(a+"2", a, "", 20, start)))
		s.book(at(entry(a+"p", sandboxer.EntryPost, a, 1, 70), start), at(entry(a+"v", sandboxer.EntryVoid, a, 1, 10), start))
		refused(hold(b, b, key, 31, start))
		s.ok(s.Write(s.ctx, hold(b, b, key, 30, start)))
	}
	s.ok(s.Write(s.ctx, hold("c", "c", "daily", 70, tomorrow))) // 30 are on hold since yesterday
	refused(hold("d", "d", "monthly", 1, tomorrow))
	s.ok(s.Write(s.ctx, hold("d", "d", "monthly", 70, tomorrow.AddDate(0, 1, 0))))
	for i, key := range []string{"free", "unknown", ""} {
		s.ok(s.Write(s.ctx, hold(fmt.Sprint("f", i), fmt.Sprint("f", i), key, 101, start)))
	}
	// Another key that holds more takes the sandbox over, with all that is on hold.
	refused(hold("more", "f0", "daily", 1, tomorrow.AddDate(0, 0, 1)))
	s.ok(s.Write(s.ctx, hold("b2", "monthlyb", "free", 1, start)))
	s.ok(s.Write(s.ctx, hold("e", "e", "monthly", 30, tomorrow.AddDate(0, 1, 0))))
}

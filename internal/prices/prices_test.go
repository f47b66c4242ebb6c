package prices

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

var book = []sandboxer.PriceRow{
	{Provider: "a", SKU: "vcpu", Unit: sandboxer.UnitVCPUSecond, NanoUSD: 14_000, AsOf: "2026-08-01"},
	{Provider: "a", SKU: "memory", Unit: sandboxer.UnitGiBSecond, NanoUSD: 4_500, AsOf: "2026-05-25"},
	{Provider: "a", SKU: "create", Unit: sandboxer.UnitOnce, NanoUSD: 600, AsOf: "2026-08-01"},
	{Provider: "b", SKU: "vcpu", Unit: sandboxer.UnitVCPUSecond, NanoUSD: 1, Minimum: time.Minute, AsOf: "2026-08-01"},
	{Provider: "b", SKU: "gold", Unit: sandboxer.UnitOnce, NanoUSD: math.MaxInt64, AsOf: "2026-08-01"},
}

func TestQuote(t *testing.T) {
	for name, c := range map[string]struct {
		provider            string
		uses                []Use
		d                   time.Duration
		amount, setup, hour sandboxer.Credits
	}{
		// 2 × 0.0504 + 0.5 × 0.0162 = 0.1089 for an hour.
		"an hour": {"a", []Use{{"vcpu", 2000}, {"memory", 512 << 20}}, time.Hour, 108_900, 0, 108_900},
		// 14 + 2.25 millionths for a second, rounded up once: 16.25 becomes 17, and not 14 + 3 or 15 + 3.
		"once, at its end":   {"a", []Use{{"vcpu", 1000}, {"memory", 512 << 20}}, time.Second, 17, 0, 58_500},
		"parts of millionth": {"a", []Use{{"create", 1}, {"create", 1}, {"create", 1}}, 0, 2, 2, 0},
		"nothing":            {"a", nil, time.Hour, 0, 0, 0},
		"no time":            {"a", []Use{{"vcpu", 2000}}, 0, 0, 0, 100_800},
		"a minimum":          {"b", []Use{{"vcpu", 100_000_000}}, time.Second, 6_000, 0, 360_000},
		"over the minimum":   {"b", []Use{{"vcpu", 100_000_000}}, 2 * time.Minute, 12_000, 0, 360_000},
		"a nanosecond more":  {"a", []Use{{"vcpu", 1000}}, time.Second + 1, 15, 0, 50_400},
	} {
		q, err := Quote(book, c.provider, c.uses, c.d)
		if err != nil || q.Amount != c.amount || q.Setup != c.setup || q.PerHour != c.hour || q.Duration != c.d || len(q.Rows) != len(c.uses) {
			t.Errorf("%s: %+v, %v; want %d, %d, %d", name, q, err, c.amount, c.setup, c.hour)
		}
	}
	q, err := Quote(book, "a", []Use{{"vcpu", 1}, {"memory", 1}}, time.Hour)
	if err != nil || q.Detail != "a price list as of 2026-05-25" || !slices.Equal(q.Rows, book[:2]) {
		t.Errorf("%+v, %v; want the rows and the oldest day", q, err)
	}
	for name, c := range map[string]struct {
		uses []Use
		want sandboxer.Kind
	}{
		"no row":          {[]Use{{"disk", 1}}, sandboxer.NotFound},
		"negative amount": {[]Use{{"vcpu", -1}}, sandboxer.Invalid},
		"out of range":    {[]Use{{"gold", math.MaxInt64}}, sandboxer.Invalid},
	} {
		if q, err := Quote(book, "b", c.uses, time.Hour); sandboxer.KindOf(err) != c.want {
			t.Errorf("%s: %+v, %v; want %s", name, q, err, c.want)
		}
	}
}

func TestStale(t *testing.T) {
	day := time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC)
	if got := Stale(book, day.Add(StaleAfter)); !slices.Equal(got, []string{"a/memory of 2026-05-25"}) {
		t.Errorf("after 90 days: %q", got)
	}
	if got := Stale(book, day.Add(StaleAfter+1)); len(got) != len(book) {
		t.Errorf("later: %q", got)
	}
}

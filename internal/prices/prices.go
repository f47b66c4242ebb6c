// Package prices computes a quote from rows of the price book.
package prices

import (
	"cmp"
	"math/big"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// StaleAfter is the age from which a row of the price book is old.
const StaleAfter = 90 * 24 * time.Hour

// A Use is an amount of one thing that a provider sells: thousandths of a virtual processor for
// sandboxer.UnitVCPUSecond, bytes for sandboxer.UnitGiBSecond, a number for sandboxer.UnitOnce.
type Use struct {
	SKU    string
	Amount int64
}

// units says how much of an amount is one unit, and whether it is for a second.
var units = map[sandboxer.PriceUnit]struct {
	one      int64
	bySecond bool
}{
	sandboxer.UnitVCPUSecond: {1000, true},
	sandboxer.UnitGiBSecond:  {1 << 30, true},
	sandboxer.UnitOnce:       {1, false},
}

// Quote returns the price of the uses for the time d. The sum is exact, and is rounded up once, at its end, to a
// millionth of a credit. The quote keeps the rows. A minimum counts in the amount, not in the rates. Kinds: NotFound if
// the book lacks a row, Invalid for a negative amount or a sum beyond the range of Credits.
func Quote(book []sandboxer.PriceRow, provider string, uses []Use, d time.Duration) (*sandboxer.MeterQuote, error) {
	q := &sandboxer.MeterQuote{Duration: d}
	sum, setup, hour := new(big.Rat), new(big.Rat), new(big.Rat)
	for _, u := range uses {
		i := slices.IndexFunc(book, func(r sandboxer.PriceRow) bool { return r.Provider == provider && r.SKU == u.SKU })
		if i < 0 {
			return nil, sandboxer.E(sandboxer.NotFound, nil, "the price book has no price of %s for %s", provider, u.SKU).
				WithHint("add a row to prices.yaml")
		}
		row := book[i]
		unit, known := units[row.Unit]
		if !known || u.Amount < 0 || d < 0 {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%d %s of %s for %s cannot be priced by %q", u.Amount, u.SKU, provider, d, row.Unit)
		}
		price := new(big.Rat).Mul(big.NewRat(row.NanoUSD, 1), big.NewRat(u.Amount, unit.one))
		q.Rows = append(q.Rows, row)
		if !unit.bySecond {
			sum.Add(sum, price)
			setup.Add(setup, price)
			continue
		}
		sum.Add(sum, times(price, max(d, row.Minimum)))
		hour.Add(hour, times(price, time.Hour))
	}
	for _, part := range []struct {
		to   *sandboxer.Credits
		nano *big.Rat
	}{{&q.Amount, sum}, {&q.Setup, setup}, {&q.PerHour, hour}} {
		var ok bool
		if *part.to, ok = credits(part.nano); !ok {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "the price of %s for %s is out of range", provider, d)
		}
	}
	q.Detail = detail(provider, q.Rows)
	return q, nil
}

// times returns the price of a second for the time d.
func times(price *big.Rat, d time.Duration) *big.Rat {
	return new(big.Rat).Mul(price, big.NewRat(int64(d), int64(time.Second)))
}

// credits rounds an amount up to a millionth of a credit.
func credits(nano *big.Rat) (sandboxer.Credits, bool) {
	micro := new(big.Rat).Quo(nano, big.NewRat(1000, 1))
	whole, rest := new(big.Int).QuoRem(micro.Num(), micro.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		whole.Add(whole, big.NewInt(1))
	}
	return sandboxer.Credits(whole.Int64()), whole.IsInt64()
}

// detail says where the prices are from.
func detail(provider string, rows []sandboxer.PriceRow) string {
	if len(rows) == 0 {
		return provider
	}
	oldest := slices.MinFunc(rows, func(a, b sandboxer.PriceRow) int { return cmp.Compare(a.AsOf, b.AsOf) })
	return provider + " price list as of " + oldest.AsOf
}

// Stale names the rows that are older than StaleAfter, each as provider/sku with its day.
func Stale(book []sandboxer.PriceRow, now time.Time) []string {
	var old []string
	for _, r := range book {
		if day, err := time.Parse(time.DateOnly, r.AsOf); err != nil || now.Sub(day) > StaleAfter {
			old = append(old, r.Provider+"/"+r.SKU+" of "+strings.TrimSpace(r.AsOf))
		}
	}
	return old
}

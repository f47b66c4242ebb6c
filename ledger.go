package sandboxer

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"time"
)

// Credits is an amount of money in millionths of a credit. One credit is one US dollar. Money is never
// a float.
type Credits int64

// Credit is one whole credit.
const Credit Credits = 1_000_000

// String formats c with as many decimals as it needs, at least two: "0.12", "-3.00".
func (c Credits) String() string {
	sign := ""
	u := uint64(c)
	if c < 0 {
		sign, u = "-", uint64(-c)
	}
	frac := strings.TrimRight(fmt.Sprintf("%06d", u%1_000_000), "0")
	for len(frac) < 2 {
		frac += "0"
	}
	return sign + strconv.FormatUint(u/1_000_000, 10) + "." + frac
}

// ParseCredits reads a decimal amount of credits exactly, with at most six decimals. Kind: Invalid.
func ParseCredits(s string) (Credits, error) {
	neg := strings.HasPrefix(s, "-")
	whole, frac, point := strings.Cut(strings.TrimPrefix(s, "-"), ".")
	if whole == "" || point && frac == "" || len(frac) > 6 || len(whole) > 12 || strings.HasPrefix(whole, "+") {
		return 0, E(Invalid, nil, "%q is not an amount of credits (want a decimal such as 0.12 with at most six decimals)", s).WithHint("write it as 0.12 or 3")
	}
	n, err := strconv.ParseUint(whole+frac+strings.Repeat("0", 6-len(frac)), 10, 63)
	if err != nil {
		return 0, E(Invalid, nil, "%q is not an amount of credits (want a decimal such as 0.12)", s).WithHint("write it as 0.12 or 3")
	}
	if neg {
		return -Credits(n), nil
	}
	return Credits(n), nil
}

// MeterQuote is the price of a sandbox before it exists.
type MeterQuote struct {
	Amount   Credits       `json:"amount"`             // for Duration, everything included
	Setup    Credits       `json:"setup,omitempty"`    // part of Amount that does not depend on time
	PerHour  Credits       `json:"per_hour,omitempty"` // the rest, for each hour of life
	Duration time.Duration `json:"duration_ns"`
	Detail   string        `json:"detail,omitempty"` // how the amount was calculated, for display
	// ByBackend says that the backend gave the price, and not the profile. The broker sets it.
	ByBackend bool `json:"by_backend,omitempty"`
	// Rows are the rows of the price book by which it was calculated, as they were then.
	Rows []PriceRow `json:"rows,omitempty"`
}

// MaxPriceRows bounds the rows of a quote.
const MaxPriceRows = 32

// For returns the price of a life of d by the quote's rates, rounded half to even. A negative d counts
// as 0. An amount beyond the range of Credits becomes the nearest one in the range.
func (q MeterQuote) For(d time.Duration) Credits {
	return addCredits(q.Setup, mulDiv(q.PerHour, max(d, 0), time.Hour))
}

// Rated returns q with an hourly rate. If q has only an amount, the rate is the amount divided by the
// duration. The charge for a sandbox's life is calculated from the rates.
func (q MeterQuote) Rated() MeterQuote {
	if q.Setup == 0 && q.PerHour == 0 && q.Amount != 0 && q.Duration > 0 {
		q.PerHour = mulDiv(q.Amount, time.Hour, q.Duration)
	}
	return q
}

// mulDiv returns a*b/c rounded half to even, for b ≥ 0 and c > 0, computed in 128 bits
// so that nothing is lost on the way.
func mulDiv(a Credits, b, c time.Duration) Credits {
	u := uint64(a)
	if a < 0 {
		u = -u
	}
	hi, lo := bits.Mul64(u, uint64(b))
	if hi >= uint64(c) { // the quotient needs more than 64 bits
		return limit(math.MaxUint64, a < 0)
	}
	q, r := bits.Div64(hi, lo, uint64(c))
	if rest := uint64(c) - r; r > rest || r == rest && q%2 == 1 {
		if q != math.MaxUint64 {
			q++
		}
	}
	return limit(q, a < 0)
}

// limit returns u as Credits, with a sign, or the nearest value in their range.
func limit(u uint64, negative bool) Credits {
	switch {
	case negative && u >= 1<<63:
		return math.MinInt64
	case negative:
		return -Credits(u)
	case u > math.MaxInt64:
		return math.MaxInt64
	}
	return Credits(u)
}

func addCredits(a, b Credits) Credits {
	switch sum := a + b; {
	case a > 0 && b > 0 && sum < 0:
		return math.MaxInt64
	case a < 0 && b < 0 && sum >= 0:
		return math.MinInt64
	default:
		return sum
	}
}

// Usage is the total consumption of a sandbox since Provision, in exact units.
type Usage struct {
	At        time.Time     `json:"at"`
	Cost      Credits       `json:"cost"`
	CPU       time.Duration `json:"cpu_ns,omitempty"`
	MiBMillis int64         `json:"mib_ms,omitempty"` // memory: MiB times milliseconds
	RxBytes   int64         `json:"rx_bytes,omitempty"`
	TxBytes   int64         `json:"tx_bytes,omitempty"`
	// Final says that the sandbox has ended and that no later reading differs.
	Final bool `json:"final,omitempty"`
}

// Check reports a reading that cannot be true: a negative amount.
func (u Usage) Check() error {
	if min(int64(u.Cost), int64(u.CPU), u.MiBMillis, u.RxBytes, u.TxBytes) < 0 {
		return E(Internal, nil, "a meter reports a negative amount: cost %s, cpu_ns %d, mib_ms %d, rx_bytes %d, tx_bytes %d", u.Cost, int64(u.CPU), u.MiBMillis, u.RxBytes, u.TxBytes)
	}
	return nil
}

// Billing says how far the bill of a terminated sandbox is.
type Billing string

// The states of a bill. The empty Billing is of every other sandbox.
const (
	// BillingPending is of a terminated sandbox whose backend does not know yet what it cost. Its hold stays open
	// until the backend knows, an hour at most.
	BillingPending Billing = "pending"
	// BillingEstimated is of a terminated sandbox that was settled by the clock, because its backend did not know in
	// time. For a day the backend is asked again; what it then says becomes a usage row, and no charge.
	BillingEstimated Billing = "estimated"
)

// EntryType is the kind of a ledger entry.
type EntryType string

// The entry types. Amounts are signed from the tenant's point of view: a grant and a void are positive,
// a hold is negative. A post turns a hold, or a part of it, into revenue and carries the charged
// amount. The money left the balance with the hold, so a post does not change the balance.
const (
	EntryGrant EntryType = "grant"
	EntryHold  EntryType = "hold"
	EntryPost  EntryType = "post"
	EntryVoid  EntryType = "void"
)

// An Entry is one immutable ledger line. A balance is the sum of grants, holds and voids. Writing the
// same booking twice under one Key has no effect, so that it is safe to repeat; another booking under
// that Key is a Conflict. For a terminated sandbox holds + posts + voids sum to zero (posts counted
// positive): nothing stays on hold, except while its bill is pending ([BillingPending]).
type Entry struct {
	Key        string    `json:"key"`
	Tenant     string    `json:"tenant"`
	SandboxID  string    `json:"sandbox_id,omitempty"`
	ShownID    string    `json:"shown_id,omitempty"` // Sandbox.ShownID
	Generation int       `json:"generation,omitempty"`
	Type       EntryType `json:"type"`
	Amount     Credits   `json:"amount"`
	Note       string    `json:"note,omitempty"`
	At         time.Time `json:"at"`
	KeyID      string    `json:"key_id,omitempty"` // API key that made a hold; empty if it was made without one
}

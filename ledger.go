package sandboxer

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Credits are millionths of a credit; one credit is one US dollar. Money is never a
// float.
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

// ParseCredits reads a decimal amount of credits, exactly: at most six decimals.
func ParseCredits(s string) (Credits, error) {
	neg := strings.HasPrefix(s, "-")
	whole, frac, _ := strings.Cut(strings.TrimPrefix(s, "-"), ".")
	if whole == "" || len(frac) > 6 || len(whole) > 12 || strings.HasPrefix(whole, "+") {
		return 0, E(Invalid, nil, "%q is not an amount of credits (want a decimal such as 0.12 with at most six decimals)", s)
	}
	n, err := strconv.ParseUint(whole+frac+strings.Repeat("0", 6-len(frac)), 10, 63)
	if err != nil {
		return 0, E(Invalid, nil, "%q is not an amount of credits (want a decimal such as 0.12)", s)
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
	PerHour  Credits       `json:"per_hour,omitempty"` // the rest, per hour of life
	Duration time.Duration `json:"duration_ns"`
	Detail   string        `json:"detail,omitempty"` // how it was arrived at, for people
}

// For returns what the quote's rates make for a life of d, rounded half to even and
// never less than Setup.
func (q MeterQuote) For(d time.Duration) Credits {
	if d < 0 {
		d = 0
	}
	hour := int64(time.Hour)
	whole, rest := int64(d)/hour, int64(d)%hour
	n := int64(q.PerHour)*whole + mulDivHalfEven(int64(q.PerHour), rest, hour)
	return q.Setup + Credits(n)
}

// mulDivHalfEven returns a*b/c rounded half to even, for 0 ≤ b < c ≤ 2^42 and a that
// keeps a*(b/1000) within 63 bits; b and c are first reduced to microseconds.
func mulDivHalfEven(a, b, c int64) int64 {
	b, c = b/1000, c/1000
	n := a * b
	q, r := n/c, n%c
	if r*2 > c || r*2 == c && q%2 == 1 {
		q++
	}
	return q
}

// Usage is what a sandbox consumed since Provision.
type Usage struct {
	At      time.Time     `json:"at"`
	Cost    Credits       `json:"cost"`
	CPU     time.Duration `json:"cpu_ns,omitempty"`
	RxBytes int64         `json:"rx_bytes,omitempty"`
	TxBytes int64         `json:"tx_bytes,omitempty"`
}

// EntryType is the kind of a ledger entry.
type EntryType string

// The entry types. Amounts are signed from the tenant's point of view: a grant and
// a void are positive, a hold negative. A post resolves (part of) a hold into
// revenue and carries the amount charged; the money left the balance with the hold,
// so a post does not change it.
const (
	EntryGrant EntryType = "grant"
	EntryHold  EntryType = "hold"
	EntryPost  EntryType = "post"
	EntryVoid  EntryType = "void"
)

// An Entry is one immutable ledger line; a balance is the sum of grants, holds and
// voids. Writing a Key twice is a no-op, which makes every booking safe to repeat.
// For a terminated sandbox holds + posts + voids sum to zero (posts counted
// positive): nothing stays on hold.
type Entry struct {
	Key        string    `json:"key"`
	Tenant     string    `json:"tenant"`
	SandboxID  string    `json:"sandbox_id,omitempty"`
	Generation int       `json:"generation,omitempty"`
	Type       EntryType `json:"type"`
	Amount     Credits   `json:"amount"`
	Note       string    `json:"note,omitempty"`
	At         time.Time `json:"at"`
}

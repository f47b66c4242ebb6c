// Package hostedtest is for tests against hosted services themselves, which need a key and cost money.
package hostedtest

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	// SpendVar names the variable with the most US dollars that one test may spend.
	SpendVar = "SANDBOXER_TEST_SPEND"

	defaultSpend = "1"
	// longest is the life of a sandbox for which a test asks no end: what a failed test leaves behind costs no more.
	longest = 15 * time.Minute
)

// Key returns the key of an account from an environment variable. Without one the test skips.
func Key(t testing.TB, name string) string {
	t.Helper()
	key := os.Getenv(name)
	if key == "" {
		t.Skipf("it makes sandboxes at the service itself, which cost money: %s=KEY runs it, and %s bounds the US dollars (%s)", name, SpendVar, defaultSpend)
	}
	return key
}

// A Budget bounds what the sandboxes of a test may cost, by the prices that their extension quotes.
type Budget struct {
	mu   sync.Mutex
	left sandboxer.Credits
	live map[string]reserved // by the sandbox's ID
}

// reserved is what a sandbox may cost at the most.
type reserved struct {
	amount sandboxer.Credits
	quote  sandboxer.MeterQuote
	from   time.Time
}

// NewBudget returns the budget that SpendVar gives.
func NewBudget(t testing.TB) *Budget {
	t.Helper()
	text := os.Getenv(SpendVar)
	if text == "" {
		text = defaultSpend
	}
	most, err := sandboxer.ParseCredits(text)
	if err != nil || most <= 0 {
		t.Fatalf("%s=%s is not an amount of US dollars", SpendVar, text)
	}
	return &Budget{left: most, live: map[string]reserved{}}
}

// Make makes a sandbox by make, which gets a fuse that is not far away, if the budget has what the sandbox costs until then.
// Kinds: those of make; Exhausted for too small a budget; Failed for a price that is not known.
func (b *Budget) Make(ctx context.Context, x sandboxer.Quoter, spec sandboxer.Spec, make func(sandboxer.Spec) (sandboxer.Handle, error)) (sandboxer.Handle, error) {
	if err := b.reserve(ctx, x, &spec); err != nil {
		return sandboxer.Handle{}, sandboxer.Untouched(err)
	}
	h, err := make(spec)
	if sandboxer.IsUntouched(err) {
		b.giveBack(spec.ID)
	}
	return h, err
}

// Teardown removes a sandbox by teardown. Then the budget gets back what the sandbox did not use.
func (b *Budget) Teardown(ctx context.Context, h sandboxer.Handle, teardown func(context.Context, sandboxer.Handle) (sandboxer.CleanupReport, error)) (sandboxer.CleanupReport, error) {
	report, err := teardown(ctx, h)
	if err == nil {
		b.giveBack(h.SandboxID)
	}
	return report, err
}

// reserve puts aside what a sandbox costs until its fuse, which it may bring nearer.
func (b *Budget) reserve(ctx context.Context, x sandboxer.Quoter, spec *sandboxer.Spec) error {
	if spec.Fuse.IsZero() || time.Until(spec.Fuse) > longest {
		spec.Fuse = time.Now().Add(longest)
	}
	life := time.Until(spec.Fuse)
	q, err := x.EstimateCost(ctx, *spec, life)
	if err != nil {
		return err
	}
	if q == nil {
		return sandboxer.E(sandboxer.Failed, nil, "the price of a sandbox is not known, so a test may not make one")
	}
	rated := q.Rated()
	amount := rated.For(life)
	b.mu.Lock()
	defer b.mu.Unlock()
	if had, ok := b.live[spec.ID]; ok { // a repeated call
		b.left += had.amount
	}
	if amount > b.left {
		delete(b.live, spec.ID)
		return sandboxer.E(sandboxer.Exhausted, nil, "the test may spend %s US dollars more, and this sandbox may cost %s", b.left, amount).
			WithHint("raise %s", SpendVar)
	}
	b.left -= amount
	b.live[spec.ID] = reserved{amount, rated, time.Now()}
	return nil
}

// giveBack gives back what a sandbox that is gone did not use.
func (b *Budget) giveBack(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	had, ok := b.live[id]
	if !ok {
		return
	}
	delete(b.live, id)
	b.left += max(0, had.amount-had.quote.For(time.Since(had.from)))
}

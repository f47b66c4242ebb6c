package hostedtest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

type quoter struct{ q *sandboxer.MeterQuote }

func (q quoter) EstimateCost(context.Context, sandboxer.Spec, time.Duration) (*sandboxer.MeterQuote, error) {
	return q.q, nil
}

// The reservations of a test never exceed its budget; what a sandbox did not use comes back.
func TestBudget(t *testing.T) {
	t.Setenv(SpendVar, "0.30")
	synctest.Test(t, func(t *testing.T) {
		b, dollar := NewBudget(t), quoter{&sandboxer.MeterQuote{PerHour: 1_000_000}}
		one, two := sandboxer.Spec{ID: "one"}, sandboxer.Spec{ID: "two", Fuse: time.Now().Add(24 * time.Hour)}
		for range 2 { // a repeated call reserves nothing more
			if err := b.reserve(t.Context(), dollar, &one); err != nil {
				t.Fatal(err)
			}
		}
		if left := time.Until(one.Fuse); left != longest {
			t.Errorf("a sandbox without a fuse lives for %v", left)
		}
		if err := b.reserve(t.Context(), dollar, &two); sandboxer.KindOf(err) != sandboxer.Exhausted {
			t.Errorf("a second one of 0.25 within 0.30: %v", err)
		}
		time.Sleep(3 * time.Minute)
		b.giveBack("one")
		b.giveBack("one")
		if err := b.reserve(t.Context(), dollar, &two); err != nil || b.left != 50_000 { // 0.30, less 0.05 that one used and 0.20 for the 12 minutes of two
			t.Errorf("after the first one ended: %v, %s left", err, b.left)
		}
		made := func(err error) (sandboxer.Handle, error) {
			return b.Make(t.Context(), dollar, sandboxer.Spec{ID: "four", Fuse: time.Now().Add(time.Minute)}, func(sandboxer.Spec) (sandboxer.Handle, error) { return sandboxer.Handle{}, err })
		}
		left := b.left
		if _, err := made(sandboxer.Untouched(sandboxer.E(sandboxer.Invalid, nil, "no"))); err == nil || b.left != left {
			t.Errorf("after a create that made nothing: %v, %s left", err, b.left)
		}
		if _, err := made(nil); err != nil || b.left >= left {
			t.Errorf("after a create: %v, %s left", err, b.left)
		}
		gone := func(context.Context, sandboxer.Handle) (sandboxer.CleanupReport, error) {
			return sandboxer.CleanupReport{}, nil
		}
		if _, err := b.Teardown(t.Context(), sandboxer.Handle{SandboxID: "four"}, gone); err != nil || b.left != left {
			t.Errorf("after its teardown: %v, %s left", err, b.left)
		}
		if err := b.reserve(t.Context(), quoter{}, &sandboxer.Spec{ID: "three"}); sandboxer.KindOf(err) != sandboxer.Failed {
			t.Errorf("a sandbox without a price: %v", err)
		}
	})
}

package manager

import (
	"fmt"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestAuditIsBounded has more objects outside than an audit names: the others are counted.
func TestAuditIsBounded(t *testing.T) {
	r := newRig(t, func(s *setup) { s.idle = true })
	const more = 5
	for i := range maxViolations + more {
		spec := sandboxer.Spec{ID: fmt.Sprintf("stray%d", i), Generation: 1, Owner: "test"}
		if _, err := r.ext.Provision(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
	}
	a, err := r.Audit(admin)
	if err != nil || len(a.Violations) != maxViolations || a.LeftOut != more {
		t.Errorf("%d violations are named and %d left out, %v; want %d and %d", len(a.Violations), a.LeftOut, err, maxViolations, more)
	}
}

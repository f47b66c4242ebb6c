//go:build linux

package runner

import (
	"testing"

	"gvisor.dev/gvisor/pkg/sentry/seccheck"
)

// A newer gVisor may rename the variable that withoutTracing sets, and would then describe
// its trace points again.
func TestWithoutTracing(t *testing.T) {
	withoutTracing()
	seccheck.Initialize()
	if n := len(seccheck.Points); n > 0 {
		t.Errorf("%d trace points are described", n)
	}
}

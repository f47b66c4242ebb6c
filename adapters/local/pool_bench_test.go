//go:build linux

package local

import (
	"fmt"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// BenchmarkClaim claims a warm sandbox and runs true in it; making and removing it do
// not count.
func BenchmarkClaim(b *testing.B) {
	needsGVisor(b)
	e := openIn(b, shortDir(b), "bench")
	defer e.Close()
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		spec := sandboxer.Spec{ID: fmt.Sprintf("claim%d", i), Generation: 1, Owner: "bench", Warm: true, Fuse: time.Now().Add(time.Hour)}
		h, err := e.Provision(b.Context(), spec)
		if err != nil {
			b.Fatal(err)
		}
		spec.Warm, spec.Env = false, map[string]string{"A": "b"}
		b.StartTimer()
		if _, err := e.Claim(b.Context(), h, spec); err != nil {
			b.Fatal(err)
		}
		if x, err := e.Exec(b.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
			b.Fatal(x, err)
		}
		b.StopTimer()
		if _, err := e.Teardown(b.Context(), h); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

//go:build linux

package local

import (
	"fmt"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// BenchmarkCycle makes a sandbox, runs true in it and destroys it.
func BenchmarkCycle(b *testing.B) {
	for _, limits := range []sandboxer.Limits{{}, {MilliCPU: 2000, MemoryBytes: 1 << 30, PIDs: 512, DiskBytes: 1 << 30}} {
		b.Run(fmt.Sprintf("limits=%t", limits != sandboxer.Limits{}), func(b *testing.B) {
			needsGVisor(b)
			e := openIn(b, shortDir(b), "bench")
			defer e.Close()
			for i := 0; b.Loop(); i++ {
				h, err := e.Provision(b.Context(), sandboxer.Spec{ID: fmt.Sprintf("b%d", i), Generation: 1, Owner: "bench", Limits: limits})
				if err != nil {
					b.Fatal(err)
				}
				if x, err := e.Exec(b.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
					b.Fatal(x, err)
				}
				if _, err := e.Teardown(b.Context(), h); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkExec runs true in a running sandbox.
func BenchmarkExec(b *testing.B) {
	needsGVisor(b)
	e := openIn(b, shortDir(b), "bench")
	defer e.Close()
	h, err := e.Provision(b.Context(), sandboxer.Spec{ID: "bench", Generation: 1, Owner: "bench"})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Teardown(b.Context(), h)
	b.Run("parallel=1", func(b *testing.B) {
		for b.Loop() {
			if x, err := e.Exec(b.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
				b.Fatal(x, err)
			}
		}
	})
	b.Run("parallel=16", func(b *testing.B) {
		b.SetParallelism(8)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if x, err := e.Exec(b.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
					b.Fatal(x, err)
				}
			}
		})
	})
}

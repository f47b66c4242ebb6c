package sshrun_test

import (
	"testing"

	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

func BenchmarkRun(b *testing.B) {
	for _, transport := range []string{"openssh", "native"} {
		b.Run(transport, func(b *testing.B) {
			// The rc files of whoever runs this would be measured too.
			s := sshtest.Start(b, sshtest.Options{})
			h := host(b, newPool(b, sshrun.Options{Transport: transport}), s.Target())
			for b.Loop() {
				if _, err := h.Run(b.Context(), sshrun.Cmd{Args: []string{"true"}}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

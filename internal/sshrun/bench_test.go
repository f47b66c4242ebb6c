package sshrun_test

import (
	"testing"

	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

func BenchmarkRun(b *testing.B) {
	// The user's rc files would be measured too.
	s := sshtest.Start(b, sshtest.Options{})
	h := host(b, newPool(b, sshrun.Options{}), s.Target())
	for b.Loop() {
		if _, err := h.Run(b.Context(), sshrun.Cmd{Args: []string{"true"}}); err != nil {
			b.Fatal(err)
		}
	}
}

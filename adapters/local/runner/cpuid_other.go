//go:build linux && !amd64

package runner

// askProcessorOnce does nothing: only of processors of this kind are there questions.
func askProcessorOnce() {}

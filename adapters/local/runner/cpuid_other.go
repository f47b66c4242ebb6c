//go:build linux && !amd64

package runner

// askProcessorOnce does nothing: only amd64 processors have such queries.
func askProcessorOnce() {}

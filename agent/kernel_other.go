//go:build !linux

package agent

// isKernels reports whether a directory is of a file system of the kernel's.
func isKernels(string) bool { return false }

//go:build !amd64 && !arm64

package umount

// Program is empty: gVisor does not run on this architecture.
var Program []byte

//go:build !linux

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "bench: gVisor runs on Linux only")
	os.Exit(1)
}

//go:build linux

// Command sandboxer-runner is started by sandboxer as gVisor's child processes. It
// is of no use by hand.
package main

import (
	"fmt"
	"os"

	"github.com/sand-boxer/sandboxer/adapters/local/runner"
)

func main() {
	if !runner.IsChild() {
		fmt.Fprintln(os.Stderr, "sandboxer-runner is started by sandboxer; see sandboxer help")
		os.Exit(2)
	}
	runner.Main()
}

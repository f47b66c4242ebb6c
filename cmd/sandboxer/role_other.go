//go:build !linux

package main

import (
	"os"
	"path/filepath"

	"github.com/sand-boxer/sandboxer/agent"
)

// playRole does not return when this process was started as the agent. gVisor's
// children exist on Linux only.
func playRole() {
	if filepath.Base(os.Args[0]) == "sandboxer-agent" {
		os.Exit(agent.Main(os.Args[1:]))
	}
}

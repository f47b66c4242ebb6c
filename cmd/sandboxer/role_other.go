//go:build !linux

package main

import (
	"os"
	"path/filepath"

	"github.com/sand-boxer/sandboxer/adapters/saasstub/service"
	"github.com/sand-boxer/sandboxer/agent"
)

// playRole does not return when this process was started as the agent or as the stub service. gVisor's
// children exist on Linux only.
func playRole() {
	if service.IsChild() {
		service.Main()
	}
	if filepath.Base(os.Args[0]) == "sandboxer-agent" {
		os.Exit(agent.Main(os.Args[1:]))
	}
}

package main

import (
	"os"
	"path/filepath"

	"github.com/sand-boxer/sandboxer/adapters/local/runner"
	"github.com/sand-boxer/sandboxer/adapters/saasstub/service"
	"github.com/sand-boxer/sandboxer/agent"
)

// playRole does not return when this process was started as one of the helper
// programs. It comes before everything else: gVisor's children parse their own
// arguments and must find the process as they were started.
func playRole() {
	if runner.IsChild() {
		runner.Main()
	}
	if service.IsChild() {
		service.Main()
	}
	if filepath.Base(os.Args[0]) == "sandboxer-agent" {
		os.Exit(agent.Main(os.Args[1:]))
	}
}

package sshrun

import (
	"os"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/compattest"
)

func TestFormOfHosts(t *testing.T) {
	compattest.CheckForm(t, "host-record", compattest.Shape("", Record{}))
	compattest.CheckSamples(t, "host-record", Record{
		Name: "build-1", Addr: "deploy@build-1.example.com", Port: 2222, IdentityFile: "/keys/id_ed25519", ProxyJump: "jump.example.com",
		HostKeys: []string{"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBcVWRjMBwQw5NqfjCtBfUvSTPBM7hZc2AJvA6YdzTzi"},
		Labels:   map[string]string{"zone": "eu"}, Capacity: 4, Only: OnlyMachines, State: Draining, AddedAt: time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC),
		LastProbe: &Facts{At: time.Date(2026, 11, 22, 10, 0, 1, 0, time.UTC), System: "Linux x86_64", Engine: "docker", EngineVersion: "26.1.5", EngineProblem: "permission denied",
			Compose: "docker compose", ComposeVersion: "2.26.1", Tools: map[string]string{"tar": "/usr/bin/tar"}, DiskFree: 1 << 40, Processors: 8, ClockAhead: 0.25, Latency: 0.5},
	}, func(data []byte) (any, error) {
		r := NewRegistry(t.TempDir())
		if err := os.WriteFile(r.file("build-1"), data, 0o600); err != nil {
			return nil, err
		}
		return r.Host("build-1")
	})
}

package docker

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// checkRuntime refuses an isolation without a configured runtime.
func (e *extension) checkRuntime(spec sandboxer.Spec) error {
	if spec.Profile.Isolation == sandboxer.IsolationGVisor && e.cfg.Runtime == "" {
		return sandboxer.E(sandboxer.Unsupported, nil, "the profile promises the isolation gvisor, and %s runs containers by the engine's usual runtime", e.env.Extension).
			WithHint("have the operator install gVisor on the engine's machine and set runtime: runsc in the config of %s", e.env.Extension)
	}
	return nil
}

// hasRuntime refuses an engine that does not have the configured runtime.
func (e *extension) hasRuntime(h *host, info engine.Info) error {
	r := e.cfg.Runtime
	switch {
	case r == "":
	case info.Podman:
		return sandboxer.E(sandboxer.Unsupported, nil, "the engine %s is Podman, whose service takes no runtime for a container", h.name).
			WithHint("use Docker's engine there, or leave runtime out of the config of %s", e.env.Extension)
	case strings.HasPrefix(r, "io.containerd."): // a program of that name, unknown to the engine until a start
	case info.Runtimes[r] == nil:
		return sandboxer.E(sandboxer.Unsupported, nil, "the engine %s has no runtime %q; it has %s", h.name, r, strings.Join(slices.Sorted(maps.Keys(info.Runtimes)), ", ")).
			WithHint("have it added to runtimes in the engine's daemon.json, or change runtime in the config of %s", e.env.Extension)
	}
	return nil
}

// gVisorBuilt ends the kernel version of all gVisor versions; newer ones also have gvisor in their release.
const gVisorBuilt = "#1 SMP Sun Jan 10 15:06:54 PST 2016"

// isolated refuses a sandbox without the isolation of its profile: a runtime's name is only an entry
// in the engine's configuration. No program of the image has run yet, and if its kernel is the
// machine's own, that kernel says so.
func (e *extension) isolated(ctx context.Context, c *agent.Client, h *host, spec sandboxer.Spec) error {
	if spec.Profile.Isolation != sandboxer.IsolationGVisor {
		return nil
	}
	version := &capture.First{Max: 4 << 10}
	x, err := c.Exec(ctx, sandboxer.Cmd{Args: []string{agentPath, "kernel"}, Dir: "/", User: "0", Stdout: version})
	if err != nil {
		return err
	}
	if v := strings.TrimSpace(version.String()); x.Code != 0 || !strings.HasSuffix(v, gVisorBuilt) {
		return sandboxer.E(sandboxer.Unsupported, nil, "the profile promises the isolation gvisor, and the runtime %s of the engine %s does not give it: the kernel inside says %q", e.cfg.Runtime, h.name, engine.OneLine(v)).
			WithHint("have runsc be the runtime of that name in the engine's daemon.json")
	}
	return nil
}

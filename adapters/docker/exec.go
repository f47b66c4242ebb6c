package docker

import (
	"cmp"
	"context"

	"github.com/sand-boxer/sandboxer"
)

// Exec implements sandboxer.Execer through the agent. If the memory limit kills the whole sandbox with the command,
// the engine reports that.
func (e *extension) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	call, err := e.openAgent(ctx, h, true)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	cmd.Dir, cmd.User = cmp.Or(cmd.Dir, call.Dir), cmp.Or(cmd.User, call.User)
	exit, err := call.Agent.Exec(call.Ctx, cmd)
	if err != nil && ctx.Err() == nil { // the sandbox may have been killed with the command
		if now, ferr := e.find(ctx, h); ferr == nil && now.state != "running" && now.state != "paused" { // for Podman a container is stopped before it has exited
			if c, ierr := now.host.api.InspectContainer(ctx, now.container); ierr == nil && outOfMemory(c) {
				_ = call.End(nil)
				return sandboxer.Exit{Code: 137, Signal: "KILL", OOMKilled: true}, nil
			}
		}
	}
	return exit, call.End(err)
}

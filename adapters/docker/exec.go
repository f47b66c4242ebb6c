package docker

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
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
	if err != nil && ctx.Err() == nil && e.killedForMemory(ctx, h, err) {
		_ = call.End(nil)
		return sandboxer.Exit{Code: 137, Signal: "KILL", OOMKilled: true}, nil
	}
	return exit, call.End(err)
}

// noticeTime is how long an engine may take to notice that a container has ended, after the connection to its agent broke. A busy
// machine needs seconds.
const noticeTime = 10 * time.Second

// killedForMemory reports whether a command failed with err because the memory limit killed the whole sandbox.
func (e *extension) killedForMemory(ctx context.Context, h sandboxer.Handle, err error) bool {
	deadline := time.Now()
	if sandboxer.KindOf(err) == sandboxer.Unavailable && !errors.Is(err, agent.ErrNotReached) {
		deadline = deadline.Add(noticeTime)
	}
	for {
		b, err := e.find(ctx, h)
		if err != nil || b.state == "paused" {
			return false
		}
		if b.state != "running" {
			c, err := b.host.api.InspectContainer(ctx, b.container)
			if err != nil || c.State.Status == "exited" || outOfMemory(c) { // Podman's is stopped before it has exited
				return err == nil && outOfMemory(c)
			}
		}
		if !time.Now().Before(deadline) {
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(100 * time.Millisecond):
		}
	}
}

//go:build linux

package local

import (
	"context"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
)

// Renew implements sandboxer.Renewer. The fuse is in the sandbox's first process: it
// needs no broker to end the sandbox. The next broker clears what then remains.
func (e *extension) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return err
	}
	defer unlock()
	name := b.name
	rec, err := e.record(name)
	if err != nil {
		return err
	}
	rec.Fuse = until
	if err := e.writeRecord(name, rec); err != nil {
		return diskError(err, "writing the sandbox's record")
	}
	if e.frozen(name) != "" {
		return nil // it is set when the sandbox is thawed
	}
	return b.setFuse(ctx, until)
}

// setFuse sets the fuse of the sandbox's first process: a zero time means none.
func (b *liveSandbox) setFuse(ctx context.Context, until time.Time) error {
	b.mu.Lock()
	b.fuse = until
	b.mu.Unlock()
	for {
		awake, err := b.agentAwake(ctx)
		if err != nil {
			return err
		}
		if awake {
			return b.within(ctx, false, func(ctx context.Context) error { return b.agent.Init(ctx, agent.Settings{Fuse: &until}) })
		}
		ws, err := b.run(ctx, ownCapabilities, nil, pausePath, "fuse", strconv.FormatInt(fuseSeconds(until), 10))
		if err = b.lost(ctx, err, "moving the sandbox's deadline"); err != nil {
			return err
		}
		if ws != 0 {
			return sandboxer.E(sandboxer.Unavailable, nil, "moving the sandbox's deadline failed: status %#x", uint32(ws))
		}
		// The agent may have started meanwhile, and ignores that signal.
		if awake, err = b.agentAwake(ctx); err != nil || !awake {
			return err
		}
	}
}

// agentAwake reports whether the sandbox's first process has become the agent.
func (b *liveSandbox) agentAwake(ctx context.Context) (bool, error) {
	if b.awake.Load() {
		return true, nil
	}
	first, err := b.readSmall(ctx, "/proc/1/cmdline")
	if err != nil {
		return false, err
	}
	if strings.HasPrefix(first, pausePath+"\x00") {
		return false, nil
	}
	b.awake.Store(true)
	return true, nil
}

// tellFuse sends the current fuse to the agent of an older build, which starts with the
// fuse of its sandbox's create. It uses the connection for nothing else.
func (b *liveSandbox) tellFuse(ctx context.Context, conn net.Conn) error {
	b.mu.Lock()
	fuse := b.fuse
	b.mu.Unlock()
	c := agent.NewClient(agent.ClientOptions{Dial: func(context.Context) (net.Conn, error) { return conn, nil }})
	defer c.Close()
	return c.Init(ctx, agent.Settings{Fuse: &fuse})
}

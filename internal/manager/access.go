package manager

import (
	"context"
	"net"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// beginStream finds a running sandbox for a principal with scope and notes its use, a stream.
// end must be called when the use is over. Exhausted: too many uses at once.
func (m *Manager) beginStream(ctx context.Context, scope sandboxer.Scope, ref string) (b *backend.Backend, h sandboxer.Handle, end func(), err error) {
	_, b, h, end, err = m.beginUse(ctx, m.Streams, scope, ref)
	return b, h, end, err
}

func (m *Manager) beginUse(ctx context.Context, kind *access.Limiter, scope sandboxer.Scope, ref string) (sb *sandboxer.Sandbox, b *backend.Backend, h sandboxer.Handle, end func(), err error) {
	for {
		sb, b, end, held, err := m.tryUse(ctx, kind, scope, ref)
		if err != nil {
			return nil, nil, h, nil, err
		}
		if held == nil {
			return sb, b, sb.Handle, end, nil
		}
		if err := events.Wait(ctx, held); err != nil {
			return nil, nil, h, nil, err
		}
	}
}

// tryUse is beginUse without waiting. If the sandbox is about to end or to pause for lack of use, it returns held, which is
// closed once that is committed; the caller then has to read the record again.
func (m *Manager) tryUse(ctx context.Context, kind *access.Limiter, scope sandboxer.Scope, ref string) (sb *sandboxer.Sandbox, b *backend.Backend, end func(), held <-chan struct{}, err error) {
	seen := m.usage.seen()
	sb, err = m.find(ctx, scope, ref)
	if err == nil && lifecycle.IsPaused(sb) && sb.Spec.Profile.AutoResume {
		sb, err = m.box(sb).resumeOrWait(ctx, 0)
	}
	if err != nil {
		return nil, nil, nil, nil, err
	}
	if sb.State != sandboxer.Running {
		return nil, nil, nil, nil, notRunning(sb)
	}
	if b, err = m.backend(sb.Extension); err != nil {
		return nil, nil, nil, nil, err
	}
	if m.ctx.Err() != nil {
		return nil, nil, nil, nil, errClosing
	}
	ended, err := kind.Begin(sb.ID, sb.Tenant, sandboxer.PrincipalFrom(ctx))
	if err != nil {
		return nil, nil, nil, nil, err
	}
	used, held := m.usage.begin(sb.ID, seen)
	if held != nil {
		ended()
		return sb, b, nil, held, nil
	}
	return sb, b, func() { used(); ended() }, nil, nil
}

func notRunning(sb *sandboxer.Sandbox) error {
	e := sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s, not running", sb.Shown(), sb.State)
	switch sb.State {
	case sandboxer.Pausing, sandboxer.Paused:
		e.WithHint("resume it: sandboxer resume %s", sb.Shown())
	case sandboxer.Creating:
		e.WithHint("wait for it: sandboxer wait %s", sb.Shown())
	case sandboxer.Terminating, sandboxer.Terminated:
		if sb.Reason != "" {
			e.Msg += " (" + string(sb.Reason) + ")"
		}
		e.WithHint("create a new one")
		if sb.Reason == sandboxer.ReasonOOMKilled {
			e.WithHint("create a new one that may use more memory: --memory, or limits.memory in the profile")
		}
	}
	return e
}

// Exec runs cmd in a running sandbox and returns how it ended. It needs the write
// scope. When ctx ends, or the manager closes, cmd is killed inside the sandbox.
// Conflict: the sandbox does not run. Otherwise see sandboxer.Execer.
func (m *Manager) Exec(ctx context.Context, ref string, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	if err := m.enter(); err != nil {
		return sandboxer.Exit{}, err
	}
	defer m.wg.Done()
	_, b, h, end, err := m.beginUse(ctx, m.Execs, sandboxer.ScopeWrite, ref)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	defer end()
	ctx, cancel := m.untilClosed(ctx)
	defer cancel(nil)
	return m.exec(ctx, b, h, cmd)
}

// exec runs a command. If the command may have ended because the sandbox did, it has the sandbox probed.
func (m *Manager) exec(ctx context.Context, b *backend.Backend, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	x, err := b.Exec(ctx, h, cmd)
	if x.OOMKilled {
		m.oomKilled(b.ID(), "command")
	}
	if x.OOMKilled || isKind(err, sandboxer.NotFound) {
		m.probeSoon(h)
	}
	return x, m.probeOnError(h, err)
}

// probeOnError returns err, the error of a use of the sandbox of h, and has the sandbox probed if the error says that it may
// not respond.
func (m *Manager) probeOnError(h sandboxer.Handle, err error) error {
	if isKind(err, sandboxer.Unavailable) {
		m.probeSoon(h)
	}
	return err
}

// oomKilled counts commands and sandboxes that the memory limit killed.
func (m *Manager) oomKilled(extension, what string) {
	if m.opts.OOMKilled != nil {
		m.opts.OOMKilled(extension, what)
	}
}

// Dial opens a stream to a TCP port inside a running sandbox. It needs the write
// scope; an open stream counts as use until it is closed.
func (m *Manager) Dial(ctx context.Context, ref string, port int) (net.Conn, error) {
	b, h, end, err := m.beginStream(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	c, err := b.Dial(ctx, h, port)
	if err != nil {
		end()
		return nil, m.probeOnError(h, err)
	}
	return &usedConn{c, end}, nil
}

type usedConn struct {
	net.Conn
	end func()
}

func (c *usedConn) Close() error { defer c.end(); return c.Conn.Close() }

// CloseWrite ends the sending half, where the stream can do that.
func (c *usedConn) CloseWrite() error { return halfclose.CloseWrite(c.Conn) }

// Stats measures a running sandbox. This does not count as use.
func (m *Manager) Stats(ctx context.Context, ref string) (sandboxer.Stats, error) {
	sb, err := m.find(ctx, sandboxer.ScopeRead, ref)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	if sb.State != sandboxer.Running {
		return sandboxer.Stats{}, notRunning(sb)
	}
	b, err := m.backend(sb.Extension)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	s, err := b.Stats(ctx, sb.Handle)
	return s, m.probeOnError(sb.Handle, err)
}

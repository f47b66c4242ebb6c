package manager

import (
	"context"
	"net"
	"sync"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// An AgentVisit is one use of the agent inside a sandbox, for a door whose clients speak the protocol of the agent. It counts
// as use of the sandbox until End.
type AgentVisit struct {
	visit Visit
}

// VisitAgent begins a use of the agent of a running sandbox. The principal in ctx needs the write scope, because a caller that
// reaches the agent can do everything inside. A paused sandbox is resumed if its profile allows that. Kinds: NotFound, Conflict
// (it does not run), Exhausted (too many uses at once), Unsupported if the sandboxes of the extension have no agent.
func (m *Manager) VisitAgent(ctx context.Context, ref string) (*AgentVisit, error) {
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	b, err := m.backend(sb.Extension)
	if err != nil {
		return nil, err
	}
	if !b.Can(sandboxer.CanAgent) { // checked first, so that no paused sandbox is resumed in vain
		return nil, backend.Lacks(sb.Extension, sandboxer.CanAgent).WithHint("its sandboxes have no agent")
	}
	// It ends with the caller's key, and with everything that ends the use of a port.
	bound, release := m.Bind(context.WithoutCancel(ctx), sandboxer.PrincipalFrom(ctx))
	if err := context.Cause(bound); err != nil {
		release()
		return nil, err
	}
	v := &AgentVisit{}
	err = m.beginVisit(ctx, bound, &v.visit, m.Streams, sb.Ref(), func(now *sandboxer.Sandbox, running bool) error {
		switch {
		case running:
		case now.State == sandboxer.Running:
			return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s was paused and resumed meanwhile", now.Shown()).WithHint("try again")
		default:
			return notRunning(now)
		}
		return context.Cause(bound) // the key may have ended
	})
	if err != nil {
		release()
		return nil, err
	}
	end := v.visit.End
	v.visit.End = sync.OnceFunc(func() { end(); release() })
	return v, nil
}

// Sandbox returns the sandbox of the agent.
func (v *AgentVisit) Sandbox() (id string, generation int) {
	return v.visit.SandboxID, v.visit.Generation
}

// Context ends, with the reason as its cause, when the visit has to end: the sandbox
// stopped running, the key was revoked or expired, the manager closes, or End was called.
func (v *AgentVisit) Context() context.Context { return v.visit.Ctx }

// Dial opens a connection to the agent. It is cut when Context ends.
func (v *AgentVisit) Dial(ctx context.Context) (net.Conn, error) {
	if v.visit.Ctx.Err() != nil {
		return nil, context.Cause(v.visit.Ctx)
	}
	c, err := v.visit.b.DialAgent(ctx, v.visit.h)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(v.visit.Ctx, func() { c.Close() })
	return &usedConn{c, func() { stop() }}, nil
}

// End ends the use and cuts its connections. It may be called again.
func (v *AgentVisit) End() { v.visit.End() }

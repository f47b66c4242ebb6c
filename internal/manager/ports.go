package manager

import (
	"context"
	"errors"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// PortInfo describes one port of a sandbox.
type PortInfo struct {
	sandboxer.Port
	Declared  bool  // by the profile
	Open      bool  // served by the port proxy
	Listening *bool // nil: cannot be seen from here
	Unseen    error // why it cannot, of all ports or of none
}

// maxOpenPorts bounds the open ports that the record of one sandbox has.
const maxOpenPorts = 256

// OpenPort makes the port proxy serve a port of a sandbox, from now until it is closed
// or the sandbox ends. It needs the write scope and is idempotent. Unsupported: the
// extension has no way to its ports.
func (m *Manager) OpenPort(ctx context.Context, ref string, port int) (*sandboxer.Sandbox, error) {
	return m.changePort(ctx, ref, port, func(sb *sandboxer.Sandbox, open int) (string, error) {
		b, err := m.backend(sb.Extension)
		if err != nil {
			return "", err
		}
		if !b.Can(sandboxer.CanDial) && !b.Can(sandboxer.CanExpose) {
			return "", backend.Lacks(sb.Extension, sandboxer.CanDial).WithHint("the ports of its sandboxes cannot be reached")
		}
		switch {
		case open >= 0:
			return "", nil
		case len(sb.Opened) >= maxOpenPorts:
			return "", sandboxer.E(sandboxer.Exhausted, nil, "sandbox %s has %d open ports, which is the maximum", sb.Shown(), maxOpenPorts)
		}
		sb.Opened = append(slices.Clip(sb.Opened), sandboxer.OpenPort{Port: port, Rev: sb.Version + 1})
		return "opened", nil
	})
}

// ClosePort stops the port proxy from serving a port: connections through it are cut
// and signed URLs of it end for good. A port that is not open is success.
func (m *Manager) ClosePort(ctx context.Context, ref string, port int) (*sandboxer.Sandbox, error) {
	return m.changePort(ctx, ref, port, func(sb *sandboxer.Sandbox, open int) (string, error) {
		if open < 0 {
			return "", nil
		}
		sb.Opened = slices.Delete(slices.Clone(sb.Opened), open, open+1)
		return "closed", nil
	})
}

// RevokePort ends every signed URL of an open port, and its connections. The port stays open. NotFound: it is not open.
func (m *Manager) RevokePort(ctx context.Context, ref string, port int) (*sandboxer.Sandbox, error) {
	return m.changePort(ctx, ref, port, func(sb *sandboxer.Sandbox, open int) (string, error) {
		if open < 0 {
			return "", notOpen(sb.Shown(), port)
		}
		sb.Opened = slices.Clone(sb.Opened)
		sb.Opened[open].Rev = sb.Version + 1
		return "URLs revoked", nil
	})
}

func notOpen(id string, port int) error {
	return sandboxer.E(sandboxer.NotFound, nil, "port %d of sandbox %s is not open", port, id).
		WithHint("open it: sandboxer port open %s %d", id, port)
}

// changePort changes the record of a port. change gets the index of the
// port in sb.Opened, or -1, and returns what happened, or "" for nothing.
func (m *Manager) changePort(ctx context.Context, ref string, port int, change func(sb *sandboxer.Sandbox, open int) (string, error)) (*sandboxer.Sandbox, error) {
	if port < 1 || port > 65535 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%d is not a port", port).WithHint("give a number from 1 to 65535")
	}
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	what := ""
	errNothing := errors.New("nothing changes")
	err = m.box(sb).update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) (err error) {
		if !sb.State.Live() || sb.State == sandboxer.Terminating {
			return notRunning(sb)
		}
		if what, err = change(sb, openAt(sb, port)); err != nil {
			return err
		}
		if what == "" {
			return errNothing
		}
		w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventPort, "port "+strconv.Itoa(port)+" "+what))
		return nil
	})
	if err != nil && err != errNothing {
		return nil, err
	}
	if what != "" && what != "opened" {
		m.ports.End(sb.ID, port)
	}
	return m.withLastUse(sb), nil
}

func openAt(sb *sandboxer.Sandbox, port int) int {
	return slices.IndexFunc(sb.Opened, func(o sandboxer.OpenPort) bool { return o.Port == port })
}

// Ports lists the ports of a sandbox: declared, published and open ones, and those with a listener, as far as that can be found
// out. This does not count as use.
func (m *Manager) Ports(ctx context.Context, ref string) (*sandboxer.Sandbox, []PortInfo, error) {
	sb, err := m.find(ctx, sandboxer.ScopeRead, ref)
	if err != nil {
		return nil, nil, err
	}
	var list []PortInfo
	at := func(n int) *PortInfo {
		i := slices.IndexFunc(list, func(p PortInfo) bool { return p.Port.Port == n })
		if i < 0 {
			list = append(list, PortInfo{Port: sandboxer.Port{Port: n}})
			i = len(list) - 1
		}
		return &list[i]
	}
	for _, p := range sb.Reachability.Ports {
		at(p.Port).Port = p
	}
	for _, n := range sb.Spec.Ports {
		at(n).Declared = true
	}
	for _, o := range sb.Opened {
		at(o.Port).Open = true
	}
	listening, err := m.box(sb).listening(ctx)
	if err != nil && len(list) == 0 && sb.State == sandboxer.Running {
		return nil, nil, err // an empty list would say that nothing listens
	}
	for _, n := range listening {
		at(n)
	}
	for i := range list {
		if list[i].Unseen = err; err == nil {
			l := slices.Contains(listening, list[i].Port.Port)
			list[i].Listening = &l
		}
	}
	slices.SortFunc(list, func(a, b PortInfo) int { return a.Port.Port - b.Port.Port })
	return sb, list, nil
}

// listening returns the TCP ports that have a listener.
func (bx box) listening(ctx context.Context) ([]int, error) {
	b, err := bx.m.backend(bx.sb.Extension)
	if err != nil {
		return nil, err
	}
	if bx.sb.State != sandboxer.Running {
		return nil, notRunning(bx.sb)
	}
	return b.ListPorts(ctx, bx.sb.Handle)
}

// Signed URLs live at most this long, even if their sandbox lives longer.
const (
	DefaultPortTTL = time.Hour
	MaxPortTTL     = 7 * 24 * time.Hour
)

// SignPort returns a token that lets its bearer use an open port through the port proxy without any other credential, for ttl
// (0: DefaultPortTTL). The token also ends with this generation of the sandbox, by ClosePort and by RevokePort. NotFound: the
// port is not open.
func (m *Manager) SignPort(ctx context.Context, ref string, port int, ttl time.Duration) (sandboxer.Secret, *sandboxer.Sandbox, time.Time, error) {
	if ttl == 0 {
		ttl = DefaultPortTTL
	}
	if ttl < time.Second || ttl > MaxPortTTL {
		return "", nil, time.Time{}, sandboxer.E(sandboxer.Invalid, nil, "a URL cannot last for %s: want 1s to %s", sandboxer.FormatDuration(ttl), sandboxer.FormatDuration(MaxPortTTL))
	}
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return "", nil, time.Time{}, err
	}
	if !sb.State.Live() || sb.State == sandboxer.Terminating {
		return "", nil, time.Time{}, notRunning(sb)
	}
	i := openAt(sb, port)
	if i < 0 {
		return "", nil, time.Time{}, notOpen(sb.Shown(), port)
	}
	until := time.Now().Add(ttl + time.Second - 1).Truncate(time.Second).UTC() // not shorter than was asked for
	c := access.PortClaim{ID: sb.ID, Generation: sb.Generation, Port: port, Rev: sb.Opened[i].Rev, Until: until}
	return m.ports.SignPort(c), sb, until, nil
}

// PortAccess asks for access to an open port: with a token of SignPort, or for the
// principal in ctx, who needs the write scope.
type PortAccess struct {
	Ref   string // of the sandbox; with a token it may be empty, and has to agree otherwise
	ID    string // or Sandbox.ID, as a host name has it
	Port  int
	Token sandboxer.Secret
}

// A Visit is one use of an open port. It counts as use of the sandbox until End.
type Visit struct {
	SandboxID  string
	Tenant     string // whose sandbox it is
	Generation int
	Port       int
	Until      time.Time // when its token expires; zero without one
	// Ctx ends when the visit has to end: the port was closed or revoked, the sandbox
	// stopped running, the token expired, or the manager closes.
	Ctx context.Context
	End func()

	cut context.CancelCauseFunc // ends Ctx
	b   *backend.Backend
	h   sandboxer.Handle
}

var errNoVisit = sandboxer.E(sandboxer.Unauthenticated, nil, "there is no such port, or it is private").
	WithHint("ask its owner for a signed URL (sandboxer port url ID PORT), or send an API key")

// Visit begins a use of a port. Kinds: Unauthenticated for every invalid token, whatever the reason; for a principal NotFound,
// or Conflict if the sandbox does not run.
func (m *Manager) Visit(ctx context.Context, a PortAccess) (*Visit, error) {
	v := &Visit{Port: a.Port}
	signed := a.Token != ""
	var claim access.PortClaim
	if signed {
		var ok bool
		claim, ok = m.ports.ReadPort(a.Token)
		if !ok || time.Now().After(claim.Until) || a.ID != "" && a.ID != claim.ID || a.Port != 0 && a.Port != claim.Port {
			return nil, errNoVisit
		}
		sb, err := m.store.SandboxGeneration(ctx, claim.ID, claim.Generation)
		if isKind(err, sandboxer.NotFound) {
			return nil, errNoVisit
		}
		if err != nil {
			return nil, err
		}
		if a.Ref != "" && a.Ref != sb.ID && a.Ref != sb.Shown() && a.Ref != sb.Ref() {
			return nil, errNoVisit
		}
		a.Ref, v.Port, v.Until = sb.Ref(), claim.Port, claim.Until
		ctx = sandboxer.WithPrincipal(ctx, sandboxer.Principal{Tenant: sb.Tenant, Actor: "url:" + claim.ID, Scopes: []sandboxer.Scope{sandboxer.ScopeWrite}})
	}
	if !signed && a.ID != "" {
		p, err := access.May(ctx, sandboxer.ScopeWrite)
		if err != nil {
			return nil, err
		}
		sb, err := m.store.Sandbox(ctx, a.ID)
		switch {
		case sb != nil && sb.Tenant != p.Tenant && !p.Can(sandboxer.ScopeAdmin), isKind(err, sandboxer.NotFound):
			return nil, noSuchSandbox(a.ID)
		case err != nil:
			return nil, err
		}
		a.Ref = sb.Ref()
	}
	// Checked before the sandbox is used: a request for a closed port must not wake it.
	sb, err := m.find(ctx, sandboxer.ScopeWrite, a.Ref)
	if err != nil {
		return nil, err
	}
	i := openAt(sb, v.Port)
	switch {
	case signed && (sb.Generation != claim.Generation || i < 0 || sb.Opened[i].Rev != claim.Rev || !sb.State.Live()):
		return nil, errNoVisit
	case i < 0:
		return nil, notOpen(sb.Shown(), v.Port)
	}
	rev := sb.Opened[i].Rev
	closed := notOpen(sb.Shown(), v.Port)
	if signed {
		closed = errNoVisit
	}
	err = m.beginVisit(ctx, context.WithoutCancel(ctx), v, m.Streams, sb.Ref(), func(now *sandboxer.Sandbox, running bool) error {
		if !running {
			return errNoVisit
		}
		if i := openAt(now, v.Port); i < 0 || now.Opened[i].Rev != rev {
			return closed
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if signed {
		t := time.AfterFunc(time.Until(claim.Until), func() { v.cut(errNoVisit) })
		end := v.End
		v.End = func() { t.Stop(); end() }
	}
	return v, nil
}

// beginVisit counts v as a use of the sandbox id, in kind, until v.End is called. The opening ends with ctx, the visit itself
// with stay. The right to visit may have ended just before the visit was counted, so check decides by the present record
// whether the visit may begin, and whether the object is still the one that runs.
func (m *Manager) beginVisit(ctx, stay context.Context, v *Visit, kind *access.Limiter, id string, check func(now *sandboxer.Sandbox, running bool) error) error {
	sb, b, h, end, err := m.beginUse(ctx, kind, sandboxer.ScopeWrite, id)
	if err != nil {
		return err
	}
	v.SandboxID, v.Tenant, v.Generation, v.b, v.h = sb.ID, sb.Tenant, sb.Generation, b, h
	v.Ctx, v.cut = m.untilClosed(stay)
	leave := m.ports.Enter(v.SandboxID, v.Port, v.cut)
	v.End = func() {
		leave()
		v.cut(nil)
		end()
	}
	now, err := m.store.SandboxGeneration(ctx, sb.ID, sb.Generation)
	if err == nil {
		err = check(now, now.State == sandboxer.Running && lifecycle.ObjectGeneration(now) == h.Generation)
	}
	if err != nil {
		v.End()
	}
	return err
}

// Dials reports whether Dial is the way to the port; otherwise Endpoint is.
func (v *Visit) Dials() bool { return v.b.Can(sandboxer.CanDial) }

// Dial opens a stream to the port.
func (v *Visit) Dial(ctx context.Context) (net.Conn, error) { return v.b.Dial(ctx, v.h, v.Port) }

// Endpoint is where the backend publishes the port.
func (v *Visit) Endpoint(ctx context.Context) (sandboxer.Endpoint, error) {
	return v.b.Expose(ctx, v.h, v.Port)
}

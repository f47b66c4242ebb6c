package e2b

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strconv"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/hosted"
	"github.com/sand-boxer/sandboxer/internal/inside"
)

// daemonPort is where the daemon of a sandbox listens.
const daemonPort = 49983

// A way leads to the daemon of a sandbox.
type way struct {
	agent     *agent.Client
	dir, user string // of commands; empty means the template's
}

// base is the URL of the daemon of a sandbox.
func (x *extension) base(ref string) string {
	switch {
	case x.cfg.SandboxURL != "":
		return x.cfg.SandboxURL
	case x.cfg.Domain == vendorDomain:
		return "https://sandbox." + x.cfg.Domain
	}
	return fmt.Sprintf("https://%d-%s.%s", daemonPort, ref, x.cfg.Domain)
}

// look asks the service for the way to a running sandbox, and keeps it. Kinds: NotFound; Conflict for a paused one.
func (x *extension) look(ctx context.Context, ref string) (way, error) {
	sb, _, err := x.detail(ctx, ref)
	switch {
	case err != nil:
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			x.forget(ctx, ref)
		}
		return way{}, err
	case sb.State == paused:
		return way{}, sandboxer.E(sandboxer.Conflict, nil, "the sandbox is paused").WithHint("resume it first")
	case sb.Domain != "" && sb.Domain != x.cfg.Domain && x.cfg.SandboxURL == "": // its token goes nowhere else
		return way{}, sandboxer.E(sandboxer.Unavailable, nil, "the sandbox is at the domain %q, and %s is configured for %q", sb.Domain, x.Env.Extension, x.cfg.Domain).
			WithHint("set domain of %s", x.Env.Extension)
	}
	w := way{dir: sb.Metadata[tagWorkspace], user: sb.Metadata[tagUser]}
	base := x.base(ref)
	w.agent = x.agents.Get(hosted.InAccount(ctx, ref), sb.AccessToken, agent.ClientOptions{BaseURL: base, Token: sb.AccessToken, User: w.user,
		Header: http.Header{"E2b-Sandbox-Id": {ref}, "E2b-Sandbox-Port": {strconv.Itoa(daemonPort)}},
		Dial:   hosted.Dial(base)})
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.ways == nil {
		x.ways = map[string]way{}
	}
	x.ways[hosted.InAccount(ctx, ref)] = w
	return w, nil
}

// forget drops the way to a sandbox of ctx's account.
func (x *extension) forget(ctx context.Context, ref string) {
	name := hosted.InAccount(ctx, ref)
	x.agents.Drop(name)
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.ways, name)
}

// openAgent is agent.Capabilities.Open.
func (x *extension) openAgent(ctx context.Context, h sandboxer.Handle, _ bool) (agent.Call, error) {
	ctx, ref, err := x.on(ctx, h)
	if err != nil {
		return agent.Call{}, err
	}
	x.mu.Lock()
	w, known := x.ways[hosted.InAccount(ctx, ref)]
	x.mu.Unlock()
	if !known {
		if w, err = x.look(ctx, ref); err != nil {
			return agent.Call{}, err
		}
	}
	why := func() error { _, err := x.look(context.WithoutCancel(ctx), ref); return err }
	within, done := hosted.Attend(ctx, w.agent.Health, why, func() { x.forget(ctx, ref) })
	return agent.Call{Agent: w.agent, Ctx: within, Done: done, Why: why, Dir: w.dir, User: w.user}, nil
}

// WriteFile implements sandboxer.Filer. The vendor's daemon does not know our header for the permissions.
func (x *extension) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	if err := x.Capabilities.WriteFile(ctx, h, name, mode, r); err != nil || mode == 0 {
		return err
	}
	fi, err := x.StatFile(ctx, h, name)
	if err != nil || !fi.Mode.IsRegular() || fi.Mode == mode {
		return err
	}
	bits := uint32(mode.Perm())
	for of, bit := range map[fs.FileMode]uint32{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if mode&of != 0 {
			bits |= bit
		}
	}
	exec := func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) { return x.Exec(ctx, h, cmd) }
	return inside.Run(ctx, exec, "setting the permissions of "+name, sandboxer.Cmd{Args: []string{"chmod", strconv.FormatUint(uint64(bits), 8), name}})
}

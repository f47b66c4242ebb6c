package server

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

type inCreate struct {
	Key    string `header:"Idempotency-Key" maxLength:"255" doc:"One key makes one sandbox, however often it is sent; another body under it is a conflict"`
	Prefer string `header:"Prefer" doc:"respond-async: answer 202 as soon as the request is recorded"`
}

// request is the create that the headers and the body ask for.
func (in *inCreate) request(b api.CreateSandbox) sandboxer.CreateRequest {
	b.Key, b.NoWaiting = in.Key, prefersAsync(in.Prefer)
	return b
}

func (s *Server) create(ctx context.Context, in *inCreate, b api.CreateSandbox) (*answer, error) {
	req := in.request(b)
	sb, err := s.m.Create(ctx, req)
	if err != nil {
		return nil, err
	}
	if sb.Found {
		return recorded(sb, http.StatusOK, req.NoWaiting), nil
	}
	return recorded(sb, http.StatusCreated, req.NoWaiting), nil
}

// recorded answers a request for sb with status, or with 202 if it may (noWaiting) and sb is still being made.
func recorded(sb *sandboxer.Sandbox, status int, noWaiting bool) *answer {
	out := place(sb)
	out.Status = status
	if noWaiting {
		out.Applied = "respond-async"
		if sb.State == sandboxer.Creating {
			out.Status = http.StatusAccepted
		}
	}
	return out
}

// prefersAsync reads a Prefer header (RFC 7240).
func prefersAsync(h string) bool {
	for p := range strings.SplitSeq(h, ",") {
		name, _, _ := strings.Cut(p, ";")
		if strings.EqualFold(strings.TrimSpace(name), "respond-async") {
			return true
		}
	}
	return false
}

func place(sb *sandboxer.Sandbox) *answer {
	return &answer{Status: http.StatusOK, Location: "/v1/sandboxes/" + sb.Shown(), Body: api.NewSandbox(sb)}
}

func (s *Server) plan(ctx context.Context, _ *none, b api.CreateSandbox) (*reply[api.Plan], error) {
	p, err := s.m.Plan(ctx, b)
	return replied(newPlan, p, err)
}

func newPlan(p manager.Plan) api.Plan {
	sp := p.Spec
	return api.Plan{
		SchemaVersion: api.SchemaVersion, Profile: sp.Profile.ID, Extension: p.Extension, Route: api.NewRoute(p.Route), TTL: api.TTL(p.TTL),
		Quote: api.NewQuote(p.Quote), Inputs: sp.Inputs, Host: sp.Host, Image: sp.Image, Command: sp.Command,
		Env: names(sp.Env), Labels: sp.Labels, Limits: sp.Limits, Network: sp.Network, Mounts: sp.Mounts, Ports: sp.Ports,
		Workspace: sp.Workspace, User: sp.User, Changed: p.Changed,
	}
}

func names(m map[string]string) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

type inList struct {
	InPage
	Profile string   `query:"profile" doc:"Only of this profile"`
	State   []string `query:"state,explode" enum:"creating,warm,running,pausing,paused,terminating,terminated" doc:"Only in one of these states; repeat it for several. Default: every live state"`
	Label   []string `query:"label,explode" doc:"key=value; repeat it for several, and all must match"`
	Name    string   `query:"name" doc:"Only with this name"`
	Thread  string   `query:"thread" doc:"Only with the ID of this thread"`
	User    string   `query:"thread_user" doc:"The user of that thread; default: default"`
	Tenant  string   `query:"tenant" doc:"Only of this tenant, for administrators"`
}

func (s *Server) list(ctx context.Context, in *inList) (*reply[api.List[api.Sandbox]], error) {
	q := sandboxer.Query{Profile: in.Profile, Name: in.Name, Tenant: in.Tenant, After: in.Cursor, Limit: in.Limit, States: statesOf(in.State)}
	if len(q.States) == 0 {
		q.States = liveStates()
	}
	if in.User != "" && in.Thread == "" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "thread_user is given without a thread").WithHint("a user has many threads: name the thread, too")
	}
	if in.Thread != "" {
		id, err := sandboxer.Thread{User: in.User, ID: in.Thread}.SandboxID()
		if err != nil {
			return nil, err
		}
		q.ShownID = id
	}
	for _, l := range in.Label {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "the label %q is not of the form key=value", l).WithHint("write label=KEY=VALUE, once for each label")
		}
		if q.Labels == nil {
			q.Labels = map[string]string{}
		}
		q.Labels[k] = v
	}
	sbs, next, err := s.m.List(ctx, q)
	return listed(api.NewSandbox, sbs, next, err)
}

func statesOf(names []string) []sandboxer.State {
	var out []sandboxer.State
	for _, n := range names {
		out = append(out, sandboxer.State(n))
	}
	return out
}

func liveStates() []sandboxer.State {
	return slices.DeleteFunc(sandboxer.States(), func(st sandboxer.State) bool { return !st.Live() })
}

type inGet struct {
	InRef
	Wait    []string `query:"wait,explode" enum:"creating,warm,running,pausing,paused,terminating,terminated" doc:"Answer when the sandbox is in one of these states, or as it is when the timeout is over"`
	Timeout string   `query:"timeout" doc:"How long to wait, at most 5m; default 1m"`
}

func (s *Server) get(ctx context.Context, in *inGet) (*reply[api.Sandbox], error) {
	if len(in.Wait) > 0 {
		limit, err := durationIn("timeout", in.Timeout, time.Minute, 5*time.Minute)
		if err != nil {
			return nil, err
		}
		ctx, cancel := edge.Stream(ctx)
		defer cancel(nil)
		wctx, stop := context.WithTimeout(ctx, limit)
		sb, err := s.m.Wait(wctx, in.ID, statesOf(in.Wait)...)
		over := wctx.Err() == context.DeadlineExceeded
		stop()
		if err == nil {
			return sandboxReply(sb, nil)
		}
		if !over {
			return nil, edge.StreamError(ctx, err)
		}
	}
	return sandboxReply(s.m.Get(ctx, in.ID))
}

func durationIn(name, v string, def, most time.Duration) (time.Duration, error) {
	if v == "" {
		return def, nil
	}
	var d api.Duration
	if err := d.UnmarshalText([]byte(v)); err != nil {
		return 0, err
	}
	if d <= 0 || d.Std() > most {
		return 0, sandboxer.E(sandboxer.Invalid, nil, "%s is %s; want more than 0 and at most %s", name, d, most).
			WithHint("give a shorter time, such as 30s, and ask again when it is over")
	}
	return d.Std(), nil
}

func (s *Server) extend(ctx context.Context, in *InRef, b api.ExtendSandbox) (*reply[api.Sandbox], error) {
	return sandboxReply(s.m.Extend(ctx, in.ID, b))
}

func (s *Server) setNetwork(ctx context.Context, in *InRef, p sandboxer.NetworkPolicy) (*reply[api.Sandbox], error) {
	return sandboxReply(s.m.SetNetwork(ctx, in.ID, p))
}

type inDestroy struct {
	InRef
	Wait bool `query:"wait" default:"true" doc:"Answer when the sandbox is removed completely, not as soon as the request is recorded"`
}

// destroy answers 200 when the sandbox is gone and 202 while its teardown goes on.
func (s *Server) destroy(ctx context.Context, in *inDestroy) (*answer, error) {
	sb, err := s.destroyed(ctx, in.ID, in.Wait)
	if err != nil && (sb == nil || !errors.Is(err, sandboxer.Unavailable)) {
		return nil, err
	}
	edge.LogError(ctx, err)
	out := place(sb)
	if sb.State != sandboxer.Terminated {
		out.Status = http.StatusAccepted
		if err != nil && out.Body.LastError == "" {
			out.Body.LastError = sandboxer.Message(err)
		}
	}
	return out, nil
}

func (s *Server) destroyed(ctx context.Context, ref string, wait bool) (*sandboxer.Sandbox, error) {
	if wait {
		return s.m.Destroy(ctx, ref)
	}
	// The record is found first, so that a name means the same sandbox below.
	sb, err := s.m.Get(ctx, ref)
	if errors.Is(err, sandboxer.NotFound) {
		return s.m.Destroy(ctx, ref) // it may be quarantined
	}
	if err != nil {
		return nil, err
	}
	type result struct {
		sb  *sandboxer.Sandbox
		err error
	}
	done := make(chan result, 1)
	edge.Go(ctx, func(ctx context.Context) {
		sb, err := s.m.Destroy(ctx, sb.Ref())
		done <- result{sb, err}
	})
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	begun := make(chan result, 1)
	go func() {
		sb, err := s.m.Wait(wctx, sb.Ref(), sandboxer.Terminating, sandboxer.Terminated)
		begun <- result{sb, err}
	}()
	select {
	case r := <-done:
		return r.sb, r.err
	case r := <-begun:
		return r.sb, r.err
	}
}

func (s *Server) stats(ctx context.Context, in *InRef) (*reply[api.Stats], error) {
	st, err := s.m.Stats(ctx, in.ID)
	return replied(api.NewStats, st, err)
}

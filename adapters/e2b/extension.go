package e2b

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/hosted"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/prices"
)

// An extension has Teardown, IsAlive, Discover and ListRunning from hosted.Sandboxes, and what happens inside a sandbox from
// agent.Capabilities.
type extension struct {
	hosted.Sandboxes
	agent.Capabilities
	cfg    Config
	client *hosted.Client
	memory bool // snapshots have the processes, too; false for a service of tests

	agents agent.Clients // by account and the service's name of the sandbox (hosted.InAccount)
	mu     sync.Mutex
	ways   map[string]way // likewise
}

// The compiler checks what the adapter claims.
var _ interface {
	sandboxer.Extension
	sandboxer.Checker
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Snapshotter
	sandboxer.Quoter
	sandboxer.Meter
	sandboxer.Pauser
	sandboxer.Renewer
	sandboxer.Narrower
} = (*extension)(nil)

// Without implements sandboxer.Narrower: the service carries HTTP, and gives nobody its daemon.
func (x *extension) Without() []sandboxer.Capability {
	return []sandboxer.Capability{sandboxer.CanDial, sandboxer.CanAgent}
}

// Close ends the connections.
func (x *extension) Close() error { return x.agents.Close() }

// Check implements sandboxer.Checker. It refuses what the service cannot do.
func (x *extension) Check(_ context.Context, spec sandboxer.Spec) error {
	no := hosted.Refuse(x.Env.Extension, map[string]bool{
		"a main command: the template has a start command":                              len(spec.Command) > 0,
		"limits: the template sets them":                                                spec.Limits != sandboxer.Limits{},
		"mounts: it does not run on the server's machine":                               len(spec.Mounts) > 0,
		"ports: the service forwards no TCP connections":                                len(spec.Ports) > 0,
		"a host: the service chooses it":                                                spec.Host != "",
		"a list of destinations: the service filters by the names in HTTP and TLS only": spec.Network.Mode == sandboxer.NetworkAllow,
		"a place in a pool: it would be paid while it waits":                            spec.Warm,
	})
	return cmp.Or(no, hosted.CheckLife(spec, x.cfg.MaxLifetime), inside.Check(spec))
}

// Provision implements sandboxer.Extension.
func (x *extension) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	template := cmp.Or(spec.Image, x.cfg.Template)
	h, err := x.provision(ctx, spec, template)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		err = sandboxer.Untouched(sandboxer.E(sandboxer.Failed, err, "the service has no template %q: %s", template, sandboxer.Message(err)))
	}
	return h, err
}

// Names of tags, in addition to those of package hosted.
const (
	tagUser      = "sandboxer-user"
	tagWorkspace = "sandboxer-workspace"
)

// provision makes a sandbox from a template, or from a snapshot. Kind: NotFound if there is none.
func (x *extension) provision(ctx context.Context, spec sandboxer.Spec, template string) (sandboxer.Handle, error) {
	if err := x.Check(ctx, spec); err != nil {
		return sandboxer.Handle{}, err
	}
	return x.Make(ctx, spec, func(ctx context.Context, tags map[string]string) (hosted.Object, error) {
		for name, value := range map[string]string{tagUser: spec.User, tagWorkspace: spec.Workspace} {
			if value != "" {
				tags[name] = value
			}
		}
		v2 := newSandbox{TemplateID: template, Timeout: seconds(hosted.Lifetime(spec.Fuse, x.cfg.MaxLifetime)), Metadata: tags, EnvVars: spec.Env,
			Internet: spec.Network.Mode == sandboxer.NetworkPublic}
		v1 := v2
		v1.Secure = true
		sb, err := post(ctx, x, "/sandboxes", v2, v1)
		if err != nil {
			return hosted.Object{}, err
		}
		return sb.object()
	})
}

// on is On, with the service's name for the sandbox alone.
func (x *extension) on(ctx context.Context, h sandboxer.Handle) (context.Context, string, error) {
	ctx, h, err := x.On(ctx, h)
	return ctx, h.Ref, err
}

// readyTime bounds the wait for the daemon of a sandbox.
const readyTime = time.Minute

// WaitReady implements sandboxer.Extension: the daemon answers, and the workspace is there.
func (x *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (r sandboxer.Reachability, err error) {
	ctx, ref, err := x.on(ctx, h)
	if err != nil {
		return r, err
	}
	for end := time.Now().Add(readyTime); ; {
		w, err := x.look(ctx, ref)
		if err != nil {
			return r, err
		}
		if err := x.ready(ctx, w); err == nil || time.Now().After(end) || ctx.Err() != nil {
			return r, err
		}
	}
}

// ready is one look of WaitReady inside.
func (x *extension) ready(ctx context.Context, w way) error {
	short, cancel := context.WithTimeout(ctx, readyTime/6)
	defer cancel()
	err := w.agent.WaitReady(short)
	if err == nil && w.dir != "" {
		err = w.agent.MakeDir(ctx, w.dir)
	}
	if sandboxer.KindOf(err) == sandboxer.Unavailable && ctx.Err() == nil {
		err = sandboxer.E(sandboxer.Unavailable, err, "the sandbox runs, but its agent does not answer").WithHint("try again later")
	}
	return err
}

// EstimateCost implements sandboxer.Quoter.
func (x *extension) EstimateCost(_ context.Context, _ sandboxer.Spec, d time.Duration) (*sandboxer.MeterQuote, error) {
	return x.price(int64(x.cfg.VCPUs), x.cfg.Memory, d)
}

// price is the price of a sandbox of a size, by the price book.
func (x *extension) price(cpus, memory int64, d time.Duration) (*sandboxer.MeterQuote, error) {
	return prices.Quote(x.Env.Prices, "e2b", []prices.Use{{SKU: "vcpu", Amount: cpus * 1000}, {SKU: "memory", Amount: memory}}, d)
}

// MeterActual implements sandboxer.Meter. The service tells the size of a sandbox, and no usage: that is the price of the size for
// the time by our clock, and is never final.
func (x *extension) MeterActual(ctx context.Context, h sandboxer.Handle, d time.Duration) (u sandboxer.Usage, err error) {
	ctx, ref, err := x.on(ctx, h)
	if err != nil {
		return u, err
	}
	sb, _, err := x.detail(ctx, ref)
	if err != nil {
		return u, err
	}
	if sb.CPUs < 1 || sb.CPUs > 1024 || sb.MemoryMB < 1 || sb.MemoryMB > 1<<24 {
		return u, sandboxer.E(sandboxer.Unavailable, nil, "the service reports an impossible size of sandbox %s", h.SandboxID)
	}
	q, err := x.price(sb.CPUs, sb.MemoryMB<<20, d)
	if err != nil {
		return u, err
	}
	return sandboxer.Usage{At: time.Now(), Cost: q.Amount, MiBMillis: sb.MemoryMB * d.Milliseconds()}, nil
}

// Renew implements sandboxer.Renewer. A paused sandbox is kept until it is removed: the deadline is that of its resume.
func (x *extension) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	ctx, ref, err := x.on(ctx, h)
	if err != nil {
		return err
	}
	sb, _, err := x.detail(ctx, ref)
	if err != nil {
		return err
	}
	if sb.State != paused {
		if err := x.renew(ctx, ref, hosted.Lifetime(until, 0)); err != nil {
			return err
		}
	}
	return x.KeepFuse(ctx, hosted.Object{Ref: ref, Tags: sb.Metadata}, until)
}

// renew gives a running sandbox the time left. The service may cut it to what the plan allows, without a word.
func (x *extension) renew(ctx context.Context, ref string, left time.Duration) error {
	refused := func(most time.Duration) error {
		return sandboxer.E(sandboxer.Invalid, nil, "%s does not let a sandbox run for %s more: %s are left", x.Env.Extension, left.Round(time.Second), most.Round(time.Second)).
			WithHint("pause the sandbox, or restore a snapshot of it as a new sandbox")
	}
	if left > x.cfg.MaxLifetime {
		return refused(x.cfg.MaxLifetime)
	}
	if _, err := hosted.Call[struct{}](ctx, x.client, http.MethodPost, at(ref)+"/timeout", map[string]int{"timeout": seconds(left)}); err != nil {
		return err
	}
	sb, now, err := x.detail(ctx, ref)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound: // a second is over soon
		return nil
	case err != nil:
		return err
	case sb.EndAt.Sub(now) < left-time.Minute:
		return refused(sb.EndAt.Sub(now))
	}
	return nil
}

// Pause implements sandboxer.Pauser. Streams end with it.
func (x *extension) Pause(ctx context.Context, h sandboxer.Handle) error {
	ctx, ref, err := x.on(ctx, h)
	if err != nil {
		return err
	}
	defer x.forget(ctx, ref) // with the connections, which end
	_, _, err = hosted.Send[struct{}](ctx, x.client, hosted.Request{Method: http.MethodPost, Path: at(ref) + "/pause", Body: struct{}{}, Within: slow})
	if hosted.Status(err) == http.StatusConflict { // it is paused, or is being changed
		if sb, _, look := x.detail(ctx, ref); look == nil && sb.State == paused {
			return nil
		}
	}
	return err
}

// Resume implements sandboxer.Pauser.
func (x *extension) Resume(ctx context.Context, h sandboxer.Handle) error {
	ctx, ref, err := x.on(ctx, h)
	if err != nil {
		return err
	}
	sb, _, err := x.detail(ctx, ref)
	if err != nil || sb.State != paused { // a connect could only make it live longer
		return err
	}
	fuse, err := x.Fuse(ctx, hosted.Object{Ref: ref, Tags: sb.Metadata})
	if err != nil {
		return err
	}
	left := time.Until(fuse)
	if left <= 0 || left > x.cfg.MaxLifetime { // nobody knows when it is to end, or that is later than it may run
		left = x.cfg.MaxLifetime
	}
	body := map[string]int{"timeout": seconds(left)}
	_, err = post(ctx, x, at(ref)+"/connect", body, body)
	return err
}

// Stats implements sandboxer.StatsReader. The service measures every few seconds, and not everything.
func (x *extension) Stats(ctx context.Context, h sandboxer.Handle) (st sandboxer.Stats, err error) {
	ctx, ref, err := x.on(ctx, h)
	if err != nil {
		return st, err
	}
	_, now, err := x.detail(ctx, ref) // its clock decides
	if err != nil {
		return st, err
	}
	query := url.Values{"start": {strconv.FormatInt(now.Add(-time.Minute).Unix(), 10)}}
	measured, err := hosted.Call[[]metric](ctx, x.client, http.MethodGet, at(ref)+"/metrics?"+query.Encode(), nil)
	if err != nil {
		return st, err
	}
	st = sandboxer.Stats{At: time.Now().UTC(), CPU: -1, MemoryBytes: -1, DiskBytes: -1, PIDs: -1, RxBytes: -1, TxBytes: -1}
	if len(measured) == 0 { // it has just begun
		return st, nil
	}
	last := slices.MaxFunc(measured, func(a, b metric) int { return cmp.Compare(a.Unix, b.Unix) })
	st.MemoryBytes, st.MemoryLimit = max(last.MemUsed, -1), max(last.MemTotal, 0)
	st.DiskBytes, st.DiskLimit = max(last.DiskUsed, -1), max(last.DiskTotal, 0)
	return st, nil
}

package modal

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"time"

	modal "github.com/modal-labs/modal-client/go"
	"google.golang.org/grpc/codes"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/hosted"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/prices"
	"github.com/sand-boxer/sandboxer/internal/program"
)

// An extension has Teardown, IsAlive, Discover and ListRunning from hosted.Sandboxes, and the work inside from
// agent.Capabilities.
type extension struct {
	hosted.Sandboxes
	agent.Capabilities
	cfg      Config
	accounts accounts
	agents   agent.Clients // by account and Modal's name of the sandbox
	programs program.Finder
}

// The compiler checks what the adapter claims.
var _ interface {
	sandboxer.Extension
	sandboxer.Checker
	sandboxer.Limiter
	sandboxer.Admitter
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Snapshotter
	sandboxer.Quoter
	sandboxer.Execer
	sandboxer.ProcessManager
} = (*extension)(nil)

// Close implements io.Closer.
func (x *extension) Close() error {
	err := x.agents.Close()
	x.accounts.close()
	return err
}

// appOf returns our app in ctx's account, which it makes if create is set. Kind: NotFound if there is none.
func (x *extension) appOf(ctx context.Context, create bool) (*modal.App, error) {
	a := in(ctx)
	a.mu.Lock()
	app := a.app
	a.mu.Unlock()
	if app != nil {
		return app, nil
	}
	bounded, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	app, err := a.client.Apps.FromName(bounded, x.cfg.App, &modal.AppFromNameParams{CreateIfMissing: create})
	if err != nil {
		return nil, failure(ctx, err)
	}
	a.setApp(app)
	return app, nil
}

func (a *account) setApp(app *modal.App) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.app = app
}

// answerTime is for a question to the control plane, with the client's own repetitions.
const answerTime = 30 * time.Second

// attend returns ctx, from enter, that also ends if Modal does not answer any more. done returns the error of the call for its caller.
func (x *extension) attend(ctx context.Context) (within context.Context, done func(error) error) {
	return hosted.Attend(ctx, func(ctx context.Context) error {
		if _, err := in(ctx).client.Apps.FromName(ctx, x.cfg.App, nil); err != nil && ctx.Err() != nil { // else it is an answer, whatever it says
			return err
		}
		return nil
	}, func() error {
		return sandboxer.E(sandboxer.Unavailable, nil, "Modal does not answer any more").WithHint("check that the server reaches Modal, and try again later")
	}, func() {})
}

// sandbox returns a sandbox in ctx's account, where it need not exist.
func (x *extension) sandbox(ctx context.Context, ref string) *modal.Sandbox {
	sb, _ := in(ctx).client.Sandboxes.FromID(ctx, ref, nil) // it asks nobody
	return sb
}

// get returns a sandbox that has not ended. What has ended costs nothing, and cannot come back.
func (x *extension) get(ctx context.Context, ref string) (hosted.Object, error) {
	ctx, done, err := x.enter(ctx)
	if err != nil {
		return hosted.Object{}, err
	}
	defer done()
	bounded, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	sb := x.sandbox(bounded, ref)
	code, err := sb.Poll(bounded, nil)
	if err == nil && code != nil {
		return hosted.Object{}, sandboxer.E(sandboxer.NotFound, nil, "the sandbox has ended (code %d)", *code)
	}
	var tags map[string]string
	if err == nil {
		tags, err = sb.GetTags(bounded, nil)
	}
	if err != nil {
		return hosted.Object{}, failure(ctx, err)
	}
	return hosted.Object{Ref: ref, Tags: tags}, nil
}

// remove ends a sandbox, and returns when it has ended.
func (x *extension) remove(ctx context.Context, ref string) error {
	x.agents.Drop(hosted.InAccount(ctx, ref))
	ctx, done, err := x.enter(ctx)
	if err != nil {
		return err
	}
	defer done()
	bounded, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	_, err = x.sandbox(bounded, ref).Terminate(bounded, &modal.SandboxTerminateParams{Wait: true})
	return failure(ctx, err)
}

// list yields the running sandboxes of our app with these tags.
func (x *extension) list(ctx context.Context, tags map[string]string) iter.Seq2[hosted.Object, error] {
	return func(yield func(hosted.Object, error) bool) {
		ctx, leave, err := x.enter(ctx)
		if err != nil {
			yield(hosted.Object{}, err)
			return
		}
		defer leave()
		within, done := x.attend(ctx)
		defer func() { _ = done(nil) }()
		app, err := x.appOf(within, false)
		if sandboxer.KindOf(err) == sandboxer.NotFound { // without an app there are no sandboxes
			return
		}
		var all iter.Seq2[*modal.Sandbox, error]
		if err == nil {
			all, err = in(ctx).client.Sandboxes.ExperimentalList(within, &modal.SandboxExperimentalListParams{AppID: app.AppID, Tags: tags})
		}
		if err != nil {
			yield(hosted.Object{}, done(err))
			return
		}
		for sb, err := range all {
			var o hosted.Object
			if err = x.listFailure(within, err); err == nil {
				if o, err = x.get(within, sb.SandboxID); sandboxer.KindOf(err) == sandboxer.NotFound {
					continue
				}
			}
			if err != nil {
				yield(o, done(err))
				return
			}
			if !yield(o, nil) {
				return
			}
		}
	}
}

// listFailure is failure, for a listing: that our app is not found any more proves nothing about its sandboxes.
func (x *extension) listFailure(ctx context.Context, err error) error {
	if err == nil || codeOf(err) != codes.NotFound {
		return failure(ctx, err)
	}
	in(ctx).setApp(nil)
	return sandboxer.E(sandboxer.Unavailable, err, "Modal does not find the app %s any more", x.cfg.App).WithHint("try again later")
}

// DefaultLimits implements sandboxer.Limiter. Every sandbox has limits, since Modal bills what is used beyond a request.
func (x *extension) DefaultLimits(sandboxer.Spec) sandboxer.Limits {
	return sandboxer.Limits{MilliCPU: x.cfg.MilliCPU, MemoryBytes: x.cfg.Memory}
}

func (x *extension) limits(spec sandboxer.Spec) sandboxer.Limits {
	d := x.DefaultLimits(spec)
	return sandboxer.Limits{MilliCPU: cmp.Or(spec.Limits.MilliCPU, d.MilliCPU), MemoryBytes: cmp.Or(spec.Limits.MemoryBytes, d.MemoryBytes)}
}

// Admit implements sandboxer.Admitter: Modal pulls images, and they run nowhere else.
func (x *extension) Admit(_ sandboxer.Spec, name string) error {
	switch name {
	case sandboxer.RestrictedImage, sandboxer.RestrictedMounts, sandboxer.RestrictedHost: // Check refuses the last two for every caller
		return nil
	}
	return sandboxer.E(sandboxer.Denied, nil, "the input %q is a path of the server's machine, which only an administrator may use", name).
		WithHint("copy the files in once the sandbox is there, or ask for a profile that names the directory")
}

// longest is Modal's bound of a sandbox's life, which is fixed when it is made.
const longest = 24 * time.Hour

// Check implements sandboxer.Checker.
func (x *extension) Check(_ context.Context, spec sandboxer.Spec) error {
	if err := cmp.Or(inside.Check(spec), inside.CheckRepo(spec), hosted.CheckLife(spec, longest)); err != nil {
		return err
	}
	return hosted.Refuse(x.Env.Extension, map[string]bool{
		"mounts: a path of the server's machine means nothing there": len(spec.Mounts) > 0,
		"a host":                    spec.Host != "",
		"a place in a pool":         spec.Warm,
		"a limit of the disk":       spec.Limits.DiskBytes > 0,
		"a limit of processes":      spec.Limits.PIDs > 0,
		"GPUs":                      spec.Limits.GPUs > 0,
		"less memory than 128 MiB":  spec.Limits.MemoryBytes > 0 && spec.Limits.MemoryBytes < 128<<20,
		"a destination with a port": slices.ContainsFunc(spec.Network.Allow, func(s string) bool { d, err := sandboxer.ParseDestination(s); return err == nil && d.Port != 0 }),
		"an empty command":          len(spec.Command) > 0 && spec.Command[0] == "",
	})
}

// network translates a policy. A sandbox without one reaches nothing.
func network(p sandboxer.NetworkPolicy, to *modal.SandboxCreateParams) error {
	switch p.Mode {
	case "", sandboxer.NetworkNone:
		to.BlockNetwork = true
	case sandboxer.NetworkPublic:
	default:
		to.OutboundCIDRAllowlist, to.OutboundDomainAllowlist = &modal.Allowlist{Entries: []string{}}, &modal.Allowlist{Entries: []string{}}
		for _, text := range p.Allow {
			d, err := sandboxer.ParseDestination(text)
			switch {
			case err != nil:
				return err
			case d.Name == "":
				to.OutboundCIDRAllowlist.Entries = append(to.OutboundCIDRAllowlist.Entries, d.Prefix.String())
			case d.Below:
				to.OutboundDomainAllowlist.Entries = append(to.OutboundDomainAllowlist.Entries, "*."+d.Name)
			default:
				to.OutboundDomainAllowlist.Entries = append(to.OutboundDomainAllowlist.Entries, d.Name)
			}
		}
	}
	return nil
}

// Provision implements sandboxer.Extension.
func (x *extension) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	return x.provision(ctx, spec, "")
}

// provision is Provision, from the image of a snapshot if one is named. Modal builds an image before there is a sandbox: that may
// take minutes, and can be repeated.
func (x *extension) provision(ctx context.Context, spec sandboxer.Spec, image string) (h sandboxer.Handle, err error) {
	if err := cmp.Or(ctx.Err(), x.Check(ctx, spec)); err != nil {
		return h, err
	}
	ctx, leave, err := x.enter(hosted.For(ctx, spec.Credential))
	if err != nil {
		return h, hosted.OfRequest(spec, err)
	}
	defer leave()
	ctx, done := x.attend(ctx)
	defer func() { err = done(err) }()
	app, err := x.appOf(ctx, true)
	if err != nil {
		return h, hosted.OfRequest(spec, sandboxer.Untouched(err))
	}
	limits := x.limits(spec)
	p := &modal.SandboxCreateParams{
		CPU: float64(limits.MilliCPU) / 2000, CPULimit: float64(limits.MilliCPU) / 2000, // Modal counts cores, each of two threads
		MemoryMiB: int(limits.MemoryBytes >> 20), MemoryLimitMiB: int(limits.MemoryBytes >> 20),
		Runtime: modal.SandboxRuntimeGVisor, Env: spec.Env, Name: x.Name(sandboxer.Handle{SandboxID: spec.ID, Generation: spec.Generation}),
	}
	if err := network(spec.Network, p); err != nil {
		return h, err
	}
	img := in(ctx).client.Images.FromRegistry(cmp.Or(spec.Image, x.cfg.Image), nil)
	if image != "" {
		img, err = in(ctx).client.Images.FromID(ctx, image, nil)
	}
	if err == nil {
		img, err = img.Build(ctx, app, nil)
	}
	if err != nil {
		return h, hosted.OfRequest(spec, x.imageFailure(ctx, spec, err))
	}
	h, err = x.Make(ctx, spec, func(ctx context.Context, tags map[string]string) (hosted.Object, error) {
		p.Tags = tags
		p.Timeout = hosted.Lifetime(spec.Fuse, longest).Truncate(time.Second) + time.Second // in whole seconds, and never before the fuse
		p.Timeout = min(p.Timeout, longest)
		bounded, cancel := context.WithTimeout(ctx, answerTime) // there is time left to look for what it made
		defer cancel()
		sb, err := in(ctx).client.Sandboxes.ExperimentalCreate(bounded, app, img, p)
		if err != nil {
			return hosted.Object{}, x.createFailure(ctx, err)
		}
		return hosted.Object{Ref: sb.SandboxID, Tags: tags}, nil
	})
	if err != nil {
		return h, err
	}
	return h, x.fill(ctx, spec, h.Ref, image != "")
}

// imageFailure is the error for an image that cannot be had. There is no sandbox yet.
func (x *extension) imageFailure(ctx context.Context, spec sandboxer.Spec, err error) error {
	if is[modal.RemoteError](err) && ctx.Err() == nil {
		err = sandboxer.E(sandboxer.Failed, err, "Modal cannot use the image %s: %s", cmp.Or(spec.Image, x.cfg.Image), capture.Text(err.Error(), maxText)).
			WithHint("check the image's name, and that Modal can pull it")
	} else {
		in(ctx).setApp(nil) // which may be why
		err = failure(ctx, err)
	}
	return sandboxer.Untouched(err)
}

// createFailure is the error of a create. That the name is taken means that an earlier one, whose answer was lost, has made it.
func (x *extension) createFailure(ctx context.Context, err error) error {
	switch codeOf(err) {
	case codes.AlreadyExists:
		return sandboxer.E(sandboxer.Unavailable, err, "an earlier request made the sandbox already, and the service does not list it yet").WithHint("try again in %s", x.cfg.Settle)
	case codes.NotFound: // the app, or the image
		in(ctx).setApp(nil)
		return sandboxer.Untouched(sandboxer.E(sandboxer.Unavailable, err, "Modal does not find the app or the image any more").WithHint("try again"))
	}
	return failure(ctx, err)
}

// EstimateCost implements sandboxer.Quoter, by the price book.
func (x *extension) EstimateCost(_ context.Context, spec sandboxer.Spec, d time.Duration) (*sandboxer.MeterQuote, error) {
	limits := x.limits(spec)
	q, err := prices.Quote(x.Env.Prices, "modal", []prices.Use{{SKU: "vcpu", Amount: limits.MilliCPU}, {SKU: "memory", Amount: limits.MemoryBytes}}, d)
	if sandboxer.KindOf(err) == sandboxer.NotFound { // the operator's book has no price: the profile's applies
		return nil, nil
	}
	return q, err
}

package daytona

import (
	"cmp"
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/hosted"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/prices"
	"github.com/sand-boxer/sandboxer/internal/program"
)

// An extension has Teardown, Discover and ListRunning from hosted.Sandboxes, and what happens inside from agent.Capabilities.
type extension struct {
	hosted.Sandboxes
	agent.Capabilities
	cfg      Config
	client   *hosted.Client
	programs program.Finder
	agents   agent.Clients // by hosted.InAccount
}

// The compiler checks what the adapter claims.
var _ interface {
	sandboxer.Extension
	sandboxer.Checker
	sandboxer.Narrower
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Snapshotter
	sandboxer.Quoter
	sandboxer.Renewer
} = (*extension)(nil)

// Without implements sandboxer.Narrower: the agent has a token, so connections to it are not passed on.
func (x *extension) Without() []sandboxer.Capability {
	return []sandboxer.Capability{sandboxer.CanAgent}
}

// Close implements io.Closer.
func (x *extension) Close() error { return x.agents.Close() }

// Check implements sandboxer.Checker. It refuses what Daytona cannot do.
func (x *extension) Check(_ context.Context, spec sandboxer.Spec) error {
	l := spec.Limits
	no := hosted.Refuse(x.Env.Extension, map[string]bool{
		"mounts: a path of the server's machine means nothing there":               len(spec.Mounts) > 0,
		"a host: the setting target chooses the region":                            spec.Host != "",
		"a user: the snapshot or image sets it, and each command can have its own": spec.User != "",
		"a place in a pool: it would be paid while it waits":                       spec.Warm,
		"a limit of processes": l.PIDs != 0,
		"GPUs":                 l.GPUs != 0,
		"a part of a processor or GiB: Daytona takes whole ones":      l.MilliCPU%1000 != 0 || l.MemoryBytes%gib != 0 || l.DiskBytes%gib != 0,
		"limits without an image: Daytona's snapshots have their own": l != sandboxer.Limits{} && spec.Image == "",
		"an image name with a space or a backslash":                   strings.ContainsAny(spec.Image, " \t\r\n\\"),
	})
	return cmp.Or(no, hosted.CheckLife(spec, x.cfg.MaxLifetime), inside.Check(spec), inside.CheckRepo(spec), new(creation).network(spec.Network))
}

// network translates a policy. Daytona's lists have no ports, and it does not say what two lists mean together.
func (c *creation) network(p sandboxer.NetworkPolicy) error {
	c.BlockAll = p.Mode == "" || p.Mode == sandboxer.NetworkNone || p.Mode == sandboxer.NetworkAllow && len(p.Allow) == 0
	if p.Mode != sandboxer.NetworkAllow {
		return nil
	}
	var nets, domains []string
	all, err := p.Destinations()
	for _, d := range all {
		if d.Name == "" {
			nets = append(nets, d.Prefix.String())
		} else {
			domains = append(domains, d.Name)
		}
		if d.Port != 0 || d.Below || len(nets) > 0 && len(domains) > 0 {
			return sandboxer.E(sandboxer.Unsupported, nil, "Daytona cannot enforce the destination %q: it takes either domains or addresses, without ports and patterns", d).
				WithHint("name only domains, or only addresses and networks")
		}
	}
	c.AllowList, c.DomainAllow = strings.Join(nets, ","), strings.Join(domains, ",")
	return err
}

// minutes is the time until the fuse, in whole minutes: not less.
func (x *extension) minutes(fuse time.Time) int64 {
	return int64((hosted.Lifetime(fuse, x.cfg.MaxLifetime) + time.Minute - 1) / time.Minute)
}

// Provision implements sandboxer.Extension.
func (x *extension) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	return x.provision(ctx, spec, "")
}

// provision is Provision, from a snapshot of ours if one is named.
func (x *extension) provision(ctx context.Context, spec sandboxer.Spec, snapshot string) (sandboxer.Handle, error) {
	if err := cmp.Or(ctx.Err(), x.Check(ctx, spec)); err != nil {
		return sandboxer.Handle{}, err
	}
	l := spec.Limits
	c := creation{Name: x.Name(sandboxer.Handle{SandboxID: spec.ID, Generation: spec.Generation}), Target: x.cfg.Target, Snapshot: cmp.Or(snapshot, x.cfg.Snapshot)}
	if spec.Image != "" && snapshot == "" {
		c.Snapshot, c.Build = "", map[string]string{"dockerfileContent": "FROM " + spec.Image + "\n"}
		c.CPU, c.Memory, c.Disk = l.MilliCPU/1000, l.MemoryBytes/gib, l.DiskBytes/gib
	}
	_ = c.network(spec.Network) // Check has read it
	h, err := x.Make(ctx, spec, func(ctx context.Context, tags map[string]string) (hosted.Object, error) {
		c.Labels, c.TTL = tags, x.minutes(spec.Fuse)
		c.AutoStop = c.TTL
		o, _, err := hosted.Send[object](ctx, x.client, hosted.Request{Method: http.MethodPost, Path: "/sandbox", Body: c, Within: 40 * time.Second}) // it waits for a machine; there is time left to look for it
		if err == nil {
			err = o.check()
		}
		if hosted.Status(err) == http.StatusConflict { // an earlier create, whose answer was lost, has the name
			err = sandboxer.E(sandboxer.Unavailable, nil, "an earlier request made the sandbox already, and the service does not list it yet: %s", sandboxer.Message(err)).WithHint("try again in %s", x.cfg.Settle)
		}
		return hosted.Object{Ref: o.ID, Tags: o.Labels}, err
	})
	if err != nil {
		return h, err
	}
	return h, x.complete(hosted.For(ctx, spec.Credential), h, spec, snapshot != "")
}

// Renew implements sandboxer.Renewer.
func (x *extension) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	ctx, h, err := x.On(ctx, h)
	if err != nil {
		return err
	}
	o, err := x.extend(ctx, h.Ref, until)
	if err != nil {
		return err
	}
	return x.KeepFuse(ctx, hosted.Object{Ref: h.Ref, Tags: o.Labels}, until)
}

// extend gives the sandbox a life until the fuse.
func (x *extension) extend(ctx context.Context, ref string, fuse time.Time) (o object, err error) {
	if err := hosted.CheckLife(sandboxer.Spec{Fuse: fuse}, x.cfg.MaxLifetime); err != nil {
		return o, err
	}
	left, idle := x.minutes(fuse), int64(0)
	o, head, err := hosted.Send[object](ctx, x.client, hosted.Request{Method: http.MethodPost, Path: at(ref) + "/ttl/" + strconv.FormatInt(left, 10)})
	now := hosted.Clock(head)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound: // an older Daytona, or no sandbox
		if o, err = x.look(ctx, ref); err != nil {
			return o, err
		}
		idle = left + int64(max(now.Sub(o.CreatedAt), 0)/time.Minute) + 1 // it may have been idle since then
	case err != nil:
		return o, err
	case o.short(fuse, now):
		return o, sandboxer.E(sandboxer.Unsupported, nil, "Daytona ends the sandbox before the time that was asked for").WithHint("an administrator sets max_lifetime to what the organization allows")
	}
	_, err = hosted.Call[struct{}](ctx, x.client, http.MethodPost, at(ref)+"/autostop/"+strconv.FormatInt(idle, 10), nil)
	return o, err
}

// short reports whether Daytona's lifetime of the sandbox, by its own clock from a time on, ends before the fuse does by ours.
func (o object) short(fuse, from time.Time) bool {
	return !o.AutoDestroyAt.IsZero() && o.AutoDestroyAt.Sub(from) < time.Until(fuse)-time.Minute
}

// EstimateCost implements sandboxer.Quoter. Daytona takes nothing for 5 GiB of disk.
func (x *extension) EstimateCost(_ context.Context, spec sandboxer.Spec, d time.Duration) (*sandboxer.MeterQuote, error) {
	l := spec.Limits
	uses := []prices.Use{{SKU: "vcpu", Amount: cmp.Or(l.MilliCPU, 1000*x.cfg.CPU)}, {SKU: "memory", Amount: cmp.Or(l.MemoryBytes, x.cfg.Memory)}}
	if paid := cmp.Or(l.DiskBytes, x.cfg.Disk) - 5*gib; paid > 0 {
		uses = append(uses, prices.Use{SKU: "disk", Amount: paid})
	}
	return prices.Quote(x.Env.Prices, "daytona", uses, d)
}

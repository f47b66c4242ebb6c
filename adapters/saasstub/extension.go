package saasstub

import (
	"cmp"
	"context"
	"iter"
	"maps"
	"net/http"
	"net/url"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/saasstub/service"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

// An extension has Teardown, IsAlive, Discover and ListRunning from hosted.Sandboxes.
type extension struct {
	hosted.Sandboxes
	cfg    Config
	client *hosted.Client
	own    *service.Launcher // nil for a service elsewhere
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
	sandboxer.Renewer
	sandboxer.CapacityReporter
} = (*extension)(nil)

// call sends a request to the service. If ours does not run and would have nothing, only a create starts it.
func call[T any](ctx context.Context, x *extension, method, path string, body any) (T, error) {
	if x.own != nil && method != http.MethodPost && x.own.Empty(ctx) {
		return *new(T), sandboxer.E(sandboxer.NotFound, nil, "the stub service does not run, and has no sandboxes")
	}
	return hosted.Call[T](ctx, x.client, method, path, body)
}

func at(ref string) string { return "/v1/sandboxes/" + url.PathEscape(ref) }

func (x *extension) get(ctx context.Context, ref string) (hosted.Object, error) {
	sb, err := call[service.Sandbox](ctx, x, http.MethodGet, at(ref), nil)
	return hosted.Object{Ref: sb.Ref, Tags: sb.Tags}, err
}

func (x *extension) remove(ctx context.Context, ref string) error {
	_, err := call[service.Sandbox](ctx, x, http.MethodDelete, at(ref), nil)
	return err
}

func (x *extension) list(ctx context.Context, tags map[string]string) iter.Seq2[hosted.Object, error] {
	return pages(ctx, x, "/v1/sandboxes", tags, func(sb service.Sandbox) hosted.Object { return hosted.Object{Ref: sb.Ref, Tags: sb.Tags} })
}

// pages yields what the service lists at path with these tags.
func pages[T, U any](ctx context.Context, x *extension, path string, tags map[string]string, of func(T) U) iter.Seq2[U, error] {
	return hosted.Pages(func(next string) (items []U, following string, err error) {
		query := url.Values{"after": {next}}
		for name, value := range tags {
			query.Set(name, value)
		}
		p, err := call[service.Page[T]](ctx, x, http.MethodGet, path+"?"+query.Encode(), nil)
		for _, item := range p.Items {
			items = append(items, of(item))
		}
		if x.own != nil && sandboxer.KindOf(err) == sandboxer.NotFound { // it does not run
			err = nil
		}
		return items, p.Next, err
	})
}

// Check implements sandboxer.Checker. It refuses what only a running command could use.
func (x *extension) Check(_ context.Context, spec sandboxer.Spec) error {
	if n := len(spec.Inputs[inputNote]); n > service.MaxNoteBytes {
		return sandboxer.E(sandboxer.Invalid, nil, "the input note has %d bytes: at most %d are possible", n, service.MaxNoteBytes)
	}
	return hosted.Refuse(x.Env.Extension+", "+said+",", map[string]bool{
		"an image": spec.Image != "", "a main command": len(spec.Command) > 0, "environment variables": len(spec.Env) > 0,
		"limits": spec.Limits != sandboxer.Limits{}, "mounts": len(spec.Mounts) > 0, "ports": len(spec.Ports) > 0, "a host": spec.Host != "",
		"a network": cmp.Or(spec.Network.Mode, sandboxer.NetworkNone) != sandboxer.NetworkNone, "a workspace": spec.Workspace != "",
		"a user": spec.User != "", "a place in a pool": spec.Warm,
	})
}

// Provision implements sandboxer.Extension.
func (x *extension) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	return x.provision(ctx, spec, "")
}

// provision is Provision, from a snapshot if one is named.
func (x *extension) provision(ctx context.Context, spec sandboxer.Spec, snapshot string) (sandboxer.Handle, error) {
	if err := x.Check(ctx, spec); err != nil {
		return sandboxer.Handle{}, err
	}
	return x.Make(ctx, spec, func(ctx context.Context, tags map[string]string) (hosted.Object, error) {
		sb, err := call[service.Sandbox](ctx, x, http.MethodPost, "/v1/sandboxes", service.Create{
			Tags: tags, TTLMS: hosted.Lifetime(spec.Fuse, service.MaxTTL).Milliseconds(), Note: spec.Inputs[inputNote], Snapshot: snapshot})
		return hosted.Object{Ref: sb.Ref, Tags: sb.Tags}, err
	})
}

// on sends a request about the sandbox of h, which exists unless the service says otherwise.
func on[T any](ctx context.Context, x *extension, h sandboxer.Handle, method, suffix string, body any) (out T, err error) {
	ref, err := x.Ref(ctx, h)
	if err != nil {
		return out, err
	}
	return call[T](hosted.For(ctx, h.Credential), x, method, at(ref)+suffix, body)
}

// WaitReady implements sandboxer.Extension: what exists is ready.
func (x *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	sb, err := on[service.Sandbox](ctx, x, h, http.MethodGet, "", nil)
	return sandboxer.Reachability{Extra: map[string]string{"stub": said, inputNote: sb.Note}}, err
}

// Renew implements sandboxer.Renewer.
func (x *extension) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	_, err := on[service.Sandbox](ctx, x, h, http.MethodPut, "", service.Renew{TTLMS: hosted.Lifetime(until, service.MaxTTL).Milliseconds(), Tags: hosted.FuseTag(until)})
	return err
}

// EstimateCost implements sandboxer.Quoter.
func (x *extension) EstimateCost(_ context.Context, _ sandboxer.Spec, d time.Duration) (*sandboxer.MeterQuote, error) {
	q := sandboxer.MeterQuote{Duration: d, Detail: said + "; nothing is billed"}
	if x.cfg.Bill {
		q.Setup, q.PerHour, q.Detail = x.cfg.Setup, x.cfg.PerHour, said
		q.Amount = q.For(d)
	}
	return &q, nil
}

// MeterActual implements sandboxer.Meter. The service measures by its own clock, and knows ended sandboxes, too.
func (x *extension) MeterActual(ctx context.Context, h sandboxer.Handle, _ time.Duration) (sandboxer.Usage, error) {
	u, err := on[service.Usage](ctx, x, h, http.MethodGet, "/usage", nil)
	q, _ := x.EstimateCost(ctx, sandboxer.Spec{}, time.Duration(u.LivedMS)*time.Millisecond) // which asks nobody
	return sandboxer.Usage{At: time.Now(), Cost: q.Amount, Final: u.Final}, err
}

// Capacity implements sandboxer.CapacityReporter.
func (x *extension) Capacity(ctx context.Context, host string) (sandboxer.HostCapacity, error) {
	if host != "" {
		return sandboxer.HostCapacity{}, sandboxer.E(sandboxer.NotFound, nil, "%s has no hosts", x.Env.Extension)
	}
	ctx, known := x.Keys.Operator(ctx)
	if !known {
		return sandboxer.HostCapacity{Free: -1, Attrs: map[string]string{"stub": said}}, nil
	}
	c, err := call[service.Capacity](ctx, x, http.MethodGet, "/v1/capacity", nil)
	if x.own != nil && sandboxer.KindOf(err) == sandboxer.NotFound { // it does not run, and is empty
		c.Free, err = x.cfg.Capacity, nil
	}
	return sandboxer.HostCapacity{Free: max(c.Free, 0), Attrs: map[string]string{"stub": said}}, err
}

// nameOf is the name of a snapshot at the service. We choose it, so a repeated request finds what the first one saved.
func (x *extension) nameOf(id string) string { return x.Env.Owner + "." + id }
func (x *extension) snapshotAt(id string) string {
	return "/v1/snapshots/" + url.PathEscape(x.nameOf(id))
}

// receipt is the metadata of a snapshot; the service saves nothing else.
func receipt(s service.Snapshot) sandboxer.Snapshot {
	return sandboxer.Snapshot{SnapshotID: s.Tags[tagSnapshot], Bytes: int64(len(s.Note)), Quiesced: true}
}

// Snapshot implements sandboxer.Snapshotter.
func (x *extension) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
	o, err := x.Find(ctx, h)
	if err != nil && sandboxer.KindOf(err) != sandboxer.NotFound { // without its sandbox, it may be saved already
		return sandboxer.Snapshot{}, err
	}
	tags := map[string]string{tagSnapshot: id, tagOwner: x.Env.Owner}
	maps.Copy(tags, o.Tags)
	s, err := call[service.Snapshot](hosted.For(ctx, h.Credential), x, http.MethodPut, x.snapshotAt(id), service.Save{Ref: o.Ref, Tags: tags})
	return receipt(s), err
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (x *extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (sandboxer.Handle, error) {
	return x.provision(ctx, spec, x.nameOf(s.SnapshotID))
}

// DropSnapshot implements sandboxer.Snapshotter.
func (x *extension) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	accounts, err := x.Keys.Accounts(ctx, s.Credential)
	for _, ref := range accounts {
		_, e := call[service.Snapshot](hosted.For(ctx, ref), x, http.MethodDelete, x.snapshotAt(s.SnapshotID), nil)
		if sandboxer.KindOf(e) != sandboxer.NotFound {
			err = cmp.Or(err, e)
		}
	}
	return err
}

// ListSnapshots implements sandboxer.Snapshotter.
func (x *extension) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return hosted.Everywhere(ctx, x.Keys, func(ctx context.Context) iter.Seq2[sandboxer.FoundSnapshot, error] {
		return pages(ctx, x, "/v1/snapshots", map[string]string{tagOwner: owner}, func(s service.Snapshot) sandboxer.FoundSnapshot {
			h, _ := x.Handle(hosted.Object{Tags: s.Tags}, owner)
			found := receipt(s)
			found.Credential = hosted.Account(ctx)
			return sandboxer.FoundSnapshot{Snapshot: found, Whole: true, SandboxID: h.SandboxID, Generation: h.Generation}
		})
	})
}

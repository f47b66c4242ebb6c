package daytona

import (
	"cmp"
	"context"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

// A saved is a snapshot in the answers of the API. It has no labels, so its name says what it is of.
type saved struct {
	ID          string  `json:"id"`
	Name        string  `json:"name"`
	State       string  `json:"state"`
	ErrorReason string  `json:"errorReason"`
	Size        float64 `json:"size"` // GiB
	CPU         int64   `json:"cpu"`
	Memory      int64   `json:"mem"`  // GiB
	Disk        int64   `json:"disk"` // GiB

	is sandboxer.FoundSnapshot
}

// saved yields the snapshots of owner's in ctx's account.
func (x *extension) saved(ctx context.Context, owner string) iter.Seq2[saved, error] {
	return hosted.Pages(func(next string) (ours []saved, following string, err error) {
		query := url.Values{"page": {cmp.Or(next, "1")}, "limit": {"100"}, "name": {x.SnapshotPrefix(owner)}}
		page, err := hosted.Call[struct {
			Items []saved `json:"items"`
			Pages int     `json:"totalPages"`
		}](ctx, x.client, http.MethodGet, "/snapshots?"+query.Encode(), nil)
		for _, s := range page.Items {
			var ok bool
			if s.is, ok = x.ReadSnapshotName(s.Name, owner); !ok {
				continue
			}
			s.is.Snapshot.Credential, s.is.Whole = hosted.Account(ctx), s.State == "active" || s.State == "inactive"
			if s.is.Whole && s.Size > 0 && s.Size < 1<<20 {
				s.is.Snapshot.Bytes = int64(s.Size * gib)
			}
			ours = append(ours, s)
		}
		if n, _ := strconv.Atoi(query.Get("page")); n < page.Pages {
			following = strconv.Itoa(n + 1)
		}
		return ours, following, err
	})
}

// find returns the snapshot of an ID in ctx's account. Kind: NotFound if there is none.
func (x *extension) find(ctx context.Context, id string) (saved, error) {
	return pick(x.saved(ctx, x.Env.Owner), id)
}

// pick is find in a listing.
func pick(all iter.Seq2[saved, error], id string) (saved, error) {
	for s, err := range all {
		if err != nil || s.is.Snapshot.SnapshotID == id {
			return s, err
		}
	}
	return saved{}, sandboxer.E(sandboxer.NotFound, nil, "Daytona has no snapshot %s", id)
}

// Snapshot implements sandboxer.Snapshotter. It returns once Daytona has saved the files.
func (x *extension) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (done sandboxer.Snapshot, err error) {
	if ctx, h, err = x.On(ctx, h); err != nil {
		return done, err
	}
	asked := false
	err = hosted.Poll(ctx, func() (bool, error) {
		s, err := x.find(ctx, id)
		switch missing := sandboxer.KindOf(err) == sandboxer.NotFound; {
		case missing && asked: // it is not listed yet
			return false, nil
		case missing:
			asked = true
			_, err = hosted.Call[struct{}](ctx, x.client, http.MethodPost, at(h.Ref)+"/snapshot", map[string]any{"name": x.SnapshotName(id, h)})
		case s.State == "error" || s.State == "build_failed":
			err = sandboxer.E(sandboxer.Failed, nil, "Daytona could not save the sandbox: %s", capture.Text(s.ErrorReason, maxText))
		}
		done = s.is.Snapshot
		return s.is.Whole, err
	})
	return done, err
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (x *extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (sandboxer.Handle, error) {
	from, err := x.find(hosted.For(ctx, spec.Credential), s.SnapshotID)
	if l := spec.Limits; err == nil {
		err = hosted.Refuse(x.Env.Extension, map[string]bool{"limits that differ from those of its snapshot": cmp.Or(l.MilliCPU, from.CPU*1000) != from.CPU*1000 ||
			cmp.Or(l.MemoryBytes, from.Memory*gib) != from.Memory*gib || cmp.Or(l.DiskBytes, from.Disk*gib) != from.Disk*gib})
	}
	if err != nil {
		return sandboxer.Handle{}, err
	}
	return x.provision(ctx, spec, from.Name)
}

// DropSnapshot implements sandboxer.Snapshotter. It returns once Daytona has removed the snapshot. One without a key may be in any account.
func (x *extension) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	all := func(ctx context.Context) iter.Seq2[saved, error] { return x.saved(ctx, x.Env.Owner) }
	return hosted.Poll(ctx, func() (bool, error) {
		old, err := pick(hosted.Within(ctx, x.Keys, s.Credential, all), s.SnapshotID)
		if err == nil {
			s.Credential = old.is.Snapshot.Credential // where it is looked for from now on
		}
		if err == nil && old.State != "removing" {
			_, err = hosted.Call[struct{}](hosted.For(ctx, s.Credential), x.client, http.MethodDelete, "/snapshots/"+url.PathEscape(old.ID), nil)
		}
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			return true, nil
		}
		return false, err
	})
}

// ListSnapshots implements sandboxer.Snapshotter.
func (x *extension) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return hosted.Everywhere(ctx, x.Keys, func(ctx context.Context) iter.Seq2[sandboxer.FoundSnapshot, error] {
		return func(yield func(sandboxer.FoundSnapshot, error) bool) {
			for s, err := range x.saved(ctx, owner) {
				if !yield(s.is, err) {
					return
				}
			}
		}
	})
}

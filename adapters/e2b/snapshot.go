package e2b

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

// A snapshot at the service has a name and no tags, so that its name says what we know of it.
type snapshot struct {
	ID    string   `json:"snapshotID"`
	Names []string `json:"names"`
}

// metaID is where a receipt has the service's ID.
const metaID = "e2b"

// of returns what the names of a snapshot say; ok is false if it is not one of owner's. The service puts the team before a name and
// a version behind it.
func (x *extension) of(s snapshot, owner string) (found sandboxer.FoundSnapshot, ok bool) {
	for _, name := range append(s.Names, s.ID) {
		name, _, _ = strings.Cut(name[strings.LastIndex(name, "/")+1:], ":")
		if found, ok = x.ReadSnapshotName(name, owner); ok {
			found.Snapshot, found.Whole = x.receipt(found.Snapshot.SnapshotID, s), true
			return found, true
		}
	}
	return found, false
}

// receipt is what we keep of a snapshot. The service stops the sandbox while it saves it.
func (x *extension) receipt(id string, s snapshot) sandboxer.Snapshot {
	return sandboxer.Snapshot{SnapshotID: id, Memory: x.memory, Quiesced: true, Meta: map[string]string{metaID: s.ID}}
}

// saved finds a snapshot by our ID, in the account of a key, or in every account if none is named: then a key that the
// service refuses is an error unless the snapshot is in another account. Kind: NotFound.
func (x *extension) saved(ctx context.Context, key sandboxer.SecretRef, id string) (sandboxer.Snapshot, error) {
	all := func(ctx context.Context) iter.Seq2[sandboxer.FoundSnapshot, error] { return x.listed(ctx, x.Env.Owner) }
	for f, err := range hosted.Within(ctx, x.Keys, key, all) {
		if err != nil || f.Snapshot.SnapshotID == id {
			return f.Snapshot, err
		}
	}
	return sandboxer.Snapshot{}, sandboxer.E(sandboxer.NotFound, nil, "the service has no snapshot %s", id)
}

// Snapshot implements sandboxer.Snapshotter.
func (x *extension) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
	if s, err := x.saved(ctx, h.Credential, id); sandboxer.KindOf(err) != sandboxer.NotFound {
		return s, err
	}
	o, err := x.Find(ctx, h)
	if err != nil {
		return sandboxer.Snapshot{}, err
	}
	ctx = hosted.For(ctx, h.Credential)
	is, _ := x.Handle(o, x.Env.Owner)
	is.Credential = h.Credential
	save := func() (snapshot, error) {
		s, _, err := hosted.Send[snapshot](ctx, x.client, hosted.Request{Method: http.MethodPost, Path: at(o.Ref) + "/snapshots", Body: map[string]string{"name": x.SnapshotName(id, is)}, Within: 6 * slow})
		return s, err
	}
	s, err := save()
	if hosted.Status(err) == http.StatusConflict {
		if sb, _, look := x.detail(ctx, o.Ref); look == nil && sb.State == paused { // the service saves only what runs
			if err := x.Resume(ctx, is); err != nil {
				return sandboxer.Snapshot{}, err
			}
			s, err = save()
			if back := x.Pause(context.WithoutCancel(ctx), is); back != nil {
				return sandboxer.Snapshot{}, back
			}
		}
	}
	if err == nil && s.ID == "" {
		err = sandboxer.E(sandboxer.Unavailable, nil, "the service sent a snapshot without a name").WithHint("check that the URL leads to the service")
	}
	if err != nil {
		return sandboxer.Snapshot{}, err
	}
	return x.receipt(id, s), nil
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (x *extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (h sandboxer.Handle, err error) {
	if s.Meta[metaID] == "" {
		if s, err = x.saved(ctx, s.Credential, s.SnapshotID); err != nil {
			return h, err
		}
	}
	return x.provision(ctx, spec, s.Meta[metaID])
}

// DropSnapshot implements sandboxer.Snapshotter. A snapshot is a template of the account.
func (x *extension) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	s, err := x.saved(ctx, s.Credential, s.SnapshotID)
	if err == nil {
		ctx = hosted.For(ctx, s.Credential)
		_, err = hosted.Call[struct{}](ctx, x.client, http.MethodDelete, "/templates/"+url.PathEscape(s.Meta[metaID]), nil)
	}
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil
	}
	return err
}

// ListSnapshots implements sandboxer.Snapshotter.
func (x *extension) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return hosted.Everywhere(ctx, x.Keys, func(ctx context.Context) iter.Seq2[sandboxer.FoundSnapshot, error] { return x.listed(ctx, owner) })
}

// listed is ListSnapshots for one account.
func (x *extension) listed(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return func(yield func(sandboxer.FoundSnapshot, error) bool) {
		for s, err := range pages[snapshot](ctx, x, "/snapshots", url.Values{}) {
			f, ours := x.of(s, owner)
			f.Snapshot.Credential = hosted.Account(ctx)
			if (ours || err != nil) && (!yield(f, err) || err != nil) {
				return
			}
		}
	}
}

package remote

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"iter"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// snapshotPrefix begins the names there of an installation's snapshots.
func snapshotPrefix(owner string) string {
	sum := sha256.Sum256([]byte(owner))
	return "sbx-" + hex.EncodeToString(sum[:6]) + "-"
}

func (p *peer) snapshotName(id string) string { return snapshotPrefix(p.env.Owner) + id }

// saved returns the snapshot there of our ID, sealed or not. Kind: NotFound, also for one that was dropped.
func (p *peer) saved(ctx context.Context, id string) (*api.Snapshot, error) {
	name := p.snapshotName(id)
	for s, err := range p.snapshots(ctx, api.SnapshotQuery{Name: name}) {
		if err != nil {
			return nil, p.fail(err)
		}
		if s.Name == name {
			return &s, nil
		}
	}
	return nil, sandboxer.E(sandboxer.NotFound, nil, "%s: there is no snapshot %.60q", p.name, id)
}

// snapshots lists those that are not dropped.
func (p *peer) snapshots(ctx context.Context, q api.SnapshotQuery) iter.Seq2[api.Snapshot, error] {
	if p.admin {
		q.Tenant = p.tenant
	}
	q.Limit = sandboxer.MaxPage
	return api.All(func(cursor string) (*api.List[api.Snapshot], error) {
		q.Cursor = cursor
		return p.client.Snapshots(ctx, q)
	})
}

func receipt(s *api.Snapshot, id string) sandboxer.Snapshot {
	return sandboxer.Snapshot{SnapshotID: id, Bytes: s.Bytes, Memory: s.Memory, Quiesced: s.Quiesced, Meta: map[string]string{"remote_snapshot": s.ID}}
}

// Snapshot implements sandboxer.Snapshotter. The API saves what runs: one that is frozen runs while it is saved.
func (p *peer) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
	none := sandboxer.Snapshot{}
	switch s, err := p.saved(ctx, id); {
	case err == nil && s.State == sandboxer.SnapshotSealed:
		return receipt(s, id), nil
	case err == nil:
		return none, sandboxer.E(sandboxer.Conflict, nil, "%s: the snapshot %s is being made or dropped", p.name, id).WithHint("ask again later")
	case sandboxer.KindOf(err) != sandboxer.NotFound:
		return none, err
	}
	sb, err := p.running(ctx, h)
	if err != nil {
		return none, err
	}
	if sb.State == sandboxer.Paused {
		if err := p.Resume(ctx, h); err != nil {
			return none, err
		}
		defer func() {
			c, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
			defer cancel()
			_ = p.Pause(c, h) // whoever froze it sees that it runs
		}()
	}
	s, err := use(ctx, p, h, func(ref string) (*api.Snapshot, error) {
		return p.client.Snapshot(ctx, ref, api.CreateSnapshot{Name: p.snapshotName(id), Kind: sandboxer.SnapshotNative})
	})
	switch {
	case err != nil:
		return none, err
	case s.State != sandboxer.SnapshotSealed:
		return none, sandboxer.E(sandboxer.Unavailable, nil, "%s: the snapshot is %s: %.1000s", p.name, s.State, s.LastError)
	}
	return receipt(s, id), nil
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (p *peer) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, from sandboxer.Snapshot) (sandboxer.Handle, error) {
	none := sandboxer.Handle{}
	req, err := p.request(ctx, spec)
	if err != nil {
		return none, err
	}
	// A restored sandbox gets an ID of the other installation's, so it is looked for by its labels, and made once by the key.
	for sb, err := range p.live(ctx, p.env.Owner, spec.ID) {
		if err != nil {
			return none, p.fail(err)
		}
		if s, _ := stampOf(&sb); s.generation == spec.Generation {
			return p.made(ctx, &sb, spec)
		}
	}
	s, err := p.saved(ctx, from.SnapshotID)
	if err != nil {
		return none, err
	}
	restore := api.RestoreSnapshot{Kind: sandboxer.SnapshotNative, TTL: req.TTL, Consumer: req.Consumer, Labels: req.Labels, Env: req.Env,
		NoWaiting: true, Key: sandboxer.ExternalName(p.env.Owner, spec.ID, spec.Generation)}
	for {
		sb, err := whole(ctx, func(ctx context.Context) (*api.Sandbox, error) { return p.client.Restore(ctx, s.ID, restore) })
		switch {
		case err != nil:
			return none, p.fail(err)
		case ended(sb) && sb.Found && restore.Key != "": // of an earlier attempt, which was torn down
			restore.Key = ""
			continue
		}
		return p.made(ctx, sb, spec)
	}
}

// DropSnapshot implements sandboxer.Snapshotter.
func (p *peer) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	found, err := p.saved(ctx, s.SnapshotID)
	if err == nil {
		if found, err = p.client.DropSnapshot(ctx, found.ID); err != nil {
			err = p.fail(err)
		}
	}
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return nil
	case err != nil:
		return err
	case found.LastError != "":
		return sandboxer.E(sandboxer.Unavailable, nil, "%s: the snapshot is not gone yet: %.1000s", p.name, found.LastError)
	}
	return nil
}

// ListSnapshots implements sandboxer.Snapshotter.
func (p *peer) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return func(yield func(sandboxer.FoundSnapshot, error) bool) {
		of := map[string]stamped{} // by the ID there
		for s, err := range p.snapshots(ctx, api.SnapshotQuery{}) {
			if err != nil {
				yield(sandboxer.FoundSnapshot{}, p.fail(err))
				return
			}
			id, ours := strings.CutPrefix(s.Name, snapshotPrefix(owner))
			if !ours {
				continue
			}
			f := sandboxer.FoundSnapshot{Snapshot: sandboxer.Snapshot{SnapshotID: id}}
			if s.State == sandboxer.SnapshotSealed {
				f.Snapshot, f.Whole = receipt(&s, id), true
			}
			if _, known := of[s.SandboxID]; !known && s.SandboxID != "" {
				sb, err := p.client.Get(ctx, p.ref(s.SandboxID))
				switch {
				case err == nil && sb.ID == s.SandboxID:
					of[s.SandboxID], _ = stampOf(sb)
				case err != nil && sandboxer.KindOf(err) != sandboxer.NotFound:
					yield(sandboxer.FoundSnapshot{}, p.fail(err))
					return
				}
			}
			if src := of[s.SandboxID]; src.owner == owner {
				f.SandboxID, f.Generation, f.Stamp = src.id, src.generation, src.stamp
			}
			if !yield(f, nil) {
				return
			}
		}
	}
}

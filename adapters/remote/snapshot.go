package remote

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"iter"
	"slices"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// snapshotPrefix begins the names there of an installation's snapshots by an extension.
func snapshotPrefix(owner, extension string) string {
	sum := sha256.Sum256([]byte(owner + "\x00" + extension))
	return "sbx-" + hex.EncodeToString(sum[:6]) + "-"
}

func (p *peer) snapshotName(id string) string {
	return snapshotPrefix(p.env.Owner, p.env.Extension) + id
}

// saved returns the snapshot there with our ID, sealed or not. Kind: NotFound, also for one that was dropped.
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

// What a receipt keeps of the source, whose record there changes and is not kept for ever.
const (
	metaSnapshot = "remote_snapshot"
	metaAsked    = "remote_asked"   // its labelAsked
	metaNetwork  = "remote_network" // its networkOf
)

// receipt is the receipt of s, whose source is src; src is nil if it is not known any more.
func receipt(s *api.Snapshot, id string, src *api.Sandbox) sandboxer.Snapshot {
	meta := map[string]string{metaSnapshot: s.ID}
	if src != nil {
		meta[metaAsked], meta[metaNetwork] = src.Labels[labelAsked], networkOf(src.Network)
	}
	return sandboxer.Snapshot{SnapshotID: id, Bytes: s.Bytes, Memory: s.Memory, Quiesced: s.Quiesced, Meta: meta}
}

// source returns the source of s there; nil if there is no record of it any more.
func (p *peer) source(ctx context.Context, s *api.Snapshot) (*api.Sandbox, error) {
	if s.SandboxID == "" {
		return nil, nil
	}
	sb, err := p.client.Get(ctx, p.ref(s.SandboxID))
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound, err == nil && (sb.ID != s.SandboxID || sb.Generation != s.Generation):
		return nil, nil
	case err != nil:
		return nil, p.fail(err)
	}
	return sb, nil
}

// askedOf identifies what spec asks of the profile there, except the network, which changes.
func askedOf(spec sandboxer.Spec) string {
	text, _ := json.Marshal([]any{spec.Limits, spec.Image, append([]string{}, spec.Command...), spec.User}) // all of it can be encoded
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// networkOf writes a policy so that equivalent ones are equal.
func networkOf(n sandboxer.NetworkPolicy) string {
	allow := slices.Clone(n.Allow)
	slices.Sort(allow)
	return strings.Join(append([]string{string(cmp.Or(n.Mode, sandboxer.NetworkNone))}, slices.Compact(allow)...), " ")
}

// mayRestore refuses a restore of s, whose receipt is from, to something else than spec and req say: a native form has what its source had or,
// on another profile there, what that profile gives.
func (p *peer) mayRestore(ctx context.Context, spec sandboxer.Spec, req api.CreateSandbox, s *api.Snapshot, from sandboxer.Snapshot) error {
	refuse := func(what string) error {
		return sandboxer.E(sandboxer.Unsupported, nil, "%s restores the snapshot with %s; the request asks for something else", p.name, what).
			WithHint("restore it on the profile of its source, or restore a portable one")
	}
	network := sandboxer.NetworkPolicy{}
	if req.Network != nil {
		network = *req.Network
	}
	if req.Profile != s.Profile {
		to, err := p.profile(ctx, req.Profile)
		switch {
		case err != nil:
			return p.fail(err)
		case networkOf(network) != networkOf(to.Network):
			return refuse("the network of " + to.ID)
		case req.Limits.Or(to.Limits) != to.Limits, cmp.Or(req.Image, to.Image) != to.Image, cmp.Or(req.User, to.User) != to.User,
			len(req.Command) > 0 && !slices.Equal(req.Command, to.Command):
			return refuse("the limits, the image, the command and the user of " + to.ID)
		}
		return nil
	}
	if from.Meta[metaAsked] == "" { // a receipt made without knowing the source
		src, err := p.source(ctx, s)
		if err != nil {
			return err
		}
		if src == nil {
			return sandboxer.E(sandboxer.Unsupported, nil, "%s no longer knows the settings of the snapshot's sandbox", p.name).
				WithHint("restore a portable snapshot")
		}
		from = receipt(s, from.SnapshotID, src)
	}
	switch {
	case networkOf(network) != from.Meta[metaNetwork]:
		return refuse("the network of its source")
	case askedOf(spec) != from.Meta[metaAsked]:
		return refuse("the limits, the image, the command and the user of its source")
	}
	return nil
}

// Snapshot implements sandboxer.Snapshotter. The API saves running sandboxes: a frozen one runs while it is saved. If it
// cannot be frozen again, that is the error, and nothing is saved: its later changes would be lost.
func (p *peer) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (saved sandboxer.Snapshot, err error) {
	none := sandboxer.Snapshot{}
	switch s, err := p.saved(ctx, id); {
	case err == nil && s.State == sandboxer.SnapshotSealed:
		src, err := p.source(ctx, s)
		if err != nil {
			return none, err
		}
		return receipt(s, id, src), nil
	case err == nil:
		return none, sandboxer.E(sandboxer.Conflict, nil, "%s: the snapshot %s is being made or dropped", p.name, id).WithHint("try again later")
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
			again := p.Pause(c, h)
			if err != nil || again == nil || sandboxer.KindOf(again) == sandboxer.NotFound {
				return
			}
			saved, err = none, again
			_ = p.DropSnapshot(c, sandboxer.Snapshot{SnapshotID: id}) // a retry saves the state at that time
		}()
	}
	s, err := use(ctx, p, h, func(ref string) (*api.Snapshot, error) {
		return p.client.Snapshot(ctx, ref, api.CreateSnapshot{Name: p.snapshotName(id), Kind: sandboxer.SnapshotNative})
	})
	switch {
	case err != nil:
		return none, err
	case s.State != sandboxer.SnapshotSealed:
		return none, sandboxer.E(sandboxer.Unavailable, nil, "%s: the snapshot is not sealed: %s", p.name, textThere(s.LastError))
	}
	return receipt(s, id, sb), nil
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (p *peer) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, from sandboxer.Snapshot) (sandboxer.Handle, error) {
	none := sandboxer.Handle{}
	req, err := p.request(ctx, spec)
	if err != nil {
		return none, err
	}
	// The other installation chooses the ID of a restored sandbox, so it is found by its labels, and the key makes it only once.
	for sb, err := range p.live(ctx, p.env.Owner, spec.ID) {
		if err != nil {
			return none, p.fail(err)
		}
		if s, _ := originOf(&sb); s.Generation == spec.Generation {
			return p.made(ctx, &sb, spec)
		}
	}
	s, err := p.saved(ctx, from.SnapshotID)
	if err != nil {
		return none, err
	}
	if err := p.mayRestore(ctx, spec, req, s, from); err != nil {
		return none, err
	}
	restore := api.RestoreSnapshot{Profile: req.Profile, Kind: sandboxer.SnapshotNative, TTL: req.TTL, Consumer: req.Consumer, Labels: req.Labels, Env: req.Env,
		NoWaiting: true, Key: farID(p.env.Owner, p.env.Extension, spec.ID, spec.Generation)}
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
		return sandboxer.E(sandboxer.Unavailable, nil, "%s: the snapshot is not gone yet: %s", p.name, textThere(found.LastError))
	}
	return nil
}

// ListSnapshots implements sandboxer.Snapshotter.
func (p *peer) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return func(yield func(sandboxer.FoundSnapshot, error) bool) {
		of := map[string]*api.Sandbox{} // by the ID there and the generation
		for s, err := range p.snapshots(ctx, api.SnapshotQuery{}) {
			if err != nil {
				yield(sandboxer.FoundSnapshot{}, p.fail(err))
				return
			}
			id, ours := strings.CutPrefix(s.Name, snapshotPrefix(owner, p.env.Extension))
			if !ours {
				continue
			}
			f := sandboxer.FoundSnapshot{Snapshot: sandboxer.Snapshot{SnapshotID: id}}
			key := s.SandboxID + "." + strconv.Itoa(s.Generation)
			src, known := of[key]
			if !known {
				if src, err = p.source(ctx, &s); err != nil {
					yield(sandboxer.FoundSnapshot{}, err)
					return
				}
				of[key] = src
			}
			if s.State == sandboxer.SnapshotSealed {
				f.Snapshot, f.Whole = receipt(&s, id, src), true
			}
			if src != nil {
				if was, _ := originOf(src); p.owns(was, owner) {
					f.SandboxID, f.Generation = was.ID, was.Generation
				}
			}
			if !yield(f, nil) {
				return
			}
		}
	}
}

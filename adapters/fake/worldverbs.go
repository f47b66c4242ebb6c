package fake

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// saved is a snapshot as the world keeps it.
type saved struct {
	sandboxer.Snapshot
	owner      string
	of         string
	generation int
}

// Snapshots returns the IDs of the snapshots there are.
func (w *World) Snapshots() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Sorted(maps.Keys(w.snapshots))
}

// burn destroys what is past its fuse.
func (w *World) burn() {
	now := time.Now()
	if w.burnsAt.IsZero() || now.Before(w.burnsAt) {
		return
	}
	w.burnsAt = time.Time{}
	for _, o := range w.sorted() {
		if o.Fuse.IsZero() || now.Before(o.Fuse) || w.destroy(o, OpFuse) != nil {
			w.fuse(o)
		}
	}
}

// fuse takes note of when o burns.
func (w *World) fuse(o *Object) {
	if !o.Fuse.IsZero() && (w.burnsAt.IsZero() || o.Fuse.Before(w.burnsAt)) {
		w.burnsAt = o.Fuse
	}
}

func (w *World) snapshotDir(id string) string { return filepath.Join(w.base, "snapshots", id) }

func (w *World) save(_ context.Context, s saving) (sandboxer.Snapshot, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if filepath.Base(s.ID) != s.ID || s.ID == "." || s.ID == ".." {
		return sandboxer.Snapshot{}, sandboxer.E(sandboxer.Invalid, nil, "%q is not a snapshot ID", s.ID)
	}
	if old, ok := w.snapshots[s.ID]; ok {
		return old.Snapshot, nil
	}
	w.burn()
	o, err := w.newest(s.Of)
	if err != nil {
		return sandboxer.Snapshot{}, err
	}
	if err := o.use(); err != nil {
		return sandboxer.Snapshot{}, err
	}
	if !o.Paused {
		defer thaw(o.cookie())
		if err := freeze(o.cookie()); err != nil {
			return sandboxer.Snapshot{}, err
		}
	}
	dir := w.snapshotDir(s.ID)
	n, err := copyTree(o.Dir, dir)
	if err != nil {
		os.RemoveAll(dir)
		return sandboxer.Snapshot{}, sandboxer.E(sandboxer.Unavailable, err, "the files of %s could not be copied", o.Ref)
	}
	snap := sandboxer.Snapshot{SnapshotID: s.ID, Bytes: n, Quiesced: true}
	w.snapshots[s.ID] = saved{snap, o.Spec.Owner, o.Spec.ID, o.Spec.Generation}
	e := w.entry(o, OpSnapshot)
	e.Note = s.ID
	return snap, w.note(e)
}

func (w *World) saves(_ context.Context, owner string) (found []sandboxer.FoundSnapshot, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(w.snapshots)) {
		if s := w.snapshots[id]; s.owner == owner {
			found = append(found, sandboxer.FoundSnapshot{Snapshot: s.Snapshot, Whole: true, SandboxID: s.of, Generation: s.generation})
		}
	}
	return found, nil
}

func (w *World) drop(_ context.Context, d dropping) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s, ok := w.snapshots[d.ID]
	if !ok || d.Owner != "" && d.Owner != s.owner {
		return none{}, nil
	}
	if err := os.RemoveAll(w.snapshotDir(d.ID)); err != nil {
		return none{}, sandboxer.E(sandboxer.Unavailable, err, "the snapshot %s cannot be removed", d.ID)
	}
	delete(w.snapshots, d.ID)
	return none{}, w.note(Entry{Op: OpDrop, Owner: s.owner, Note: d.ID})
}

func (w *World) pause(_ context.Context, p pausing) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	o, err := w.newest(p.Of)
	if err != nil || o.Paused == p.On {
		return none{}, err
	}
	does, op := thaw, OpResume
	if p.On {
		does, op = freeze, OpPause
	}
	if err := does(o.cookie()); err != nil {
		return none{}, err
	}
	o.Paused = p.On
	return none{}, w.note(w.entry(o, op))
}

func (w *World) renew(_ context.Context, r renewal) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	o, err := w.newest(r.Of)
	if err != nil {
		return none{}, err
	}
	o.Fuse = r.Until
	w.fuse(o)
	return none{}, w.note(w.entry(o, OpRenew))
}

func (w *World) claim(_ context.Context, c claim) (Object, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	o, err := w.newest(c.Of)
	if err != nil {
		return Object{}, err
	}
	c.Spec.Env = c.Env
	by := c.Spec.ClaimDigest()
	switch {
	case o.Claimed != "" && o.Claimed != by, o.Claimed == "" && !o.Spec.Warm:
		return Object{}, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is not a warm one", o.Ref)
	case o.Claimed == by && o.Spec.Warm:
		return Object{}, sandboxer.E(sandboxer.Unavailable, nil, "the claim of sandbox %s was interrupted", o.Ref)
	case o.Claimed == by:
		return *o, w.note(w.entry(o, OpFound))
	}
	if !slices.Equal(o.Spec.Mounts, c.Spec.Mounts) || o.Mounts != nil && o.Spec.User != c.Spec.User {
		return Object{}, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s was made for other mounts", o.Ref)
	}
	o.Claimed = by
	fuse := o.Fuse
	warm := o.Spec
	o.Spec, o.Env, o.Fuse = c.Spec, maps.Clone(c.Env), c.Spec.Fuse
	if !fuse.IsZero() && fuse.Before(o.Fuse) {
		w.fuse(o)
	}
	if err := w.populate(o, createRequest{}); err != nil {
		o.Spec = warm
		return Object{}, err
	}
	return *o, w.note(w.entry(o, OpClaim))
}

func (w *World) network(_ context.Context, r rewiring) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	o, err := w.newest(r.Of)
	if err != nil {
		return none{}, err
	}
	o.Spec.Network = r.Policy
	return none{}, w.note(w.entry(o, OpNetwork))
}

func (w *World) spend(_ context.Context, s spending) (none, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	o, err := w.newest(s.Of)
	if err == nil {
		o.CPU += s.CPU
	}
	return none{}, err
}

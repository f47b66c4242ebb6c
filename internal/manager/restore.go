package manager

import (
	"context"
	"io"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// Restore makes a sandbox from a sealed snapshot and returns it running. It has its own ID, generation, owner, labels, tokens
// and time to live. Restore is safe to repeat as Create is. Kinds: as Create; NotFound when the snapshot is dropped, Conflict
// when it is not sealed yet, Unsupported when the extension cannot restore its form.
func (m *Manager) Restore(ctx context.Context, ref string, req RestoreRequest) (*sandboxer.Sandbox, error) {
	rec, err := m.findSnapshot(ctx, sandboxer.ScopeWrite, ref)
	if isKind(err, sandboxer.NotFound) && req.Key != "" {
		if dropped, derr := m.droppedSnapshot(ctx, ref); derr == nil && dropped != nil { // a repetition has the same answer
			if sb, _ := m.restoreOne(ctx, dropped, req, copying{}); sb != nil {
				return sb, nil
			}
		}
	}
	if err != nil {
		return nil, err
	}
	return m.restoreOne(ctx, rec, req, copying{})
}

// copying is the fork that a restore is part of; zero for a restore of its own.
type copying struct {
	digest    string          // of the fork; empty without a key
	extension string          // on which the copies stay
	leaving   <-chan struct{} // once it is closed, the restore does not wait for room any more
}

// restoreOne is Restore of one record.
func (m *Manager) restoreOne(ctx context.Context, rec *sandboxer.SnapshotRecord, req RestoreRequest, fork copying) (*sandboxer.Sandbox, error) {
	o, err := m.resolveRestore(sandboxer.PrincipalFrom(ctx), rec, req, fork.extension)
	if err != nil {
		return nil, err
	}
	if o.leaving = fork.leaving; fork.digest != "" {
		o.Digest = fork.digest
	}
	free := fork.digest == "" // the keys of a fork are freed together
	return o.underKey(ctx, free, func(ctx context.Context) (*sandboxer.Sandbox, error) {
		if rec.State != sandboxer.SnapshotSealed {
			return nil, notSealed(rec)
		}
		return o.startCreate(ctx)
	})
}

// resolveRestore checks a restore of rec for p, with stay on that extension.
func (m *Manager) resolveRestore(p sandboxer.Principal, rec *sandboxer.SnapshotRecord, req RestoreRequest, stay string) (*creation, error) {
	r, err := m.site().Restore(p, rec, func() (map[string]string, error) {
		return m.openAs(snapshotSealName(rec), "snapshot "+rec.ID, rec.SealedEnv)
	}, req, stay)
	return m.creation(r), err
}

// A sourceError says why the source of a restore is not available. No host caused it, and no host was asked.
type sourceError struct{ error }

func (e *sourceError) Unwrap() error { return e.error }

// restore makes the object of spec from the snapshot's native form, or from the portable
// one where the extension takes that. Otherwise its files are unpacked once it is ready.
func (m *Manager) restore(ctx context.Context, b *backend.Backend, spec sandboxer.Spec, from string, native bool) (h sandboxer.Handle, err error) {
	rec, err := m.store.Snapshot(ctx, from)
	switch {
	case isKind(err, sandboxer.NotFound):
		return h, sandboxer.E(sandboxer.Failed, err, "the snapshot %s no longer exists", from)
	case err != nil:
		return h, err
	case rec.State != sandboxer.SnapshotSealed:
		return h, sandboxer.E(sandboxer.Failed, nil, "the snapshot %s is %s, not sealed", from, rec.State)
	}
	if !native && b.Can(sandboxer.CanCheckpoint) {
		err = m.step(pRestoreFrom, func() error {
			r, err := m.load(ctx, from)
			if err != nil {
				return &sourceError{err}
			}
			defer r.Close()
			h, err = b.ProvisionFrom(ctx, spec, sandboxer.Contents{Volumes: rec.Portable.Volumes, Quiesced: rec.Portable.Quiesced}, r)
			return err
		})
		return h, err
	}
	if !native {
		err = m.step(pProvision, func() (err error) { h, err = b.Provision(ctx, spec); return err })
		return h, err
	}
	err = m.step(pRestore, func() (err error) { h, err = b.RestoreFromSnapshot(ctx, spec, rec.Native); return err })
	if isKind(err, sandboxer.NotFound) {
		err = sandboxer.E(sandboxer.Failed, err, "%s no longer has the snapshot %s", rec.Extension, from)
	}
	return h, err
}

// isUnpacked reports whether the workspace of sb is filled from a portable snapshot once its object is
// ready.
func isUnpacked(b *backend.Backend, sb *sandboxer.Sandbox) bool {
	return lifecycle.SourceOf(sb) != "" && !lifecycle.IsNative(sb) && !lifecycle.IsFrozen(sb) && !b.Can(sandboxer.CanCheckpoint)
}

// unarchive fills the workspace of sb, whose object is ready and unused, with the files of the snapshot.
func (bx box) unarchive(ctx context.Context, b *backend.Backend) error {
	return bx.m.step(pUnarchive, func() error {
		r, err := bx.m.load(ctx, lifecycle.SourceOf(bx.sb))
		if err != nil {
			return err
		}
		defer r.Close()
		return b.Unarchive(ctx, bx.sb.Handle, bx.sb.Spec.Workspace, r)
	})
}

// load opens the portable form of a snapshot.
func (m *Manager) load(ctx context.Context, id string) (io.ReadCloser, error) {
	if m.opts.SnapshotStore == nil {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "this installation no longer stores portable snapshots")
	}
	return m.opts.SnapshotStore.Load(ctx, id)
}

package manager

import (
	"context"
	"io"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/spec"
)

// ImportRequest says what to make of an exported snapshot.
type ImportRequest struct {
	Name    string   `json:"name,omitempty"`
	Profile string   `json:"profile,omitempty"` // what it is restored as, where the one it was made of does not exist here
	Accept  []string `json:"accept,omitempty"`  // signers to be trusted this once
}

// portable finds a sealed snapshot that has the portable form.
func (m *Manager) portable(ctx context.Context, ref string) (*sandboxer.SnapshotRecord, error) {
	rec, err := m.findSnapshot(ctx, sandboxer.ScopeRead, ref)
	switch {
	case err != nil:
		return nil, err
	case rec.State != sandboxer.SnapshotSealed:
		return nil, notSealed(rec)
	case !rec.Kind.Has(sandboxer.SnapshotPortable):
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "snapshot %s has only the native form of %s: its files cannot be compared or exported", rec.ID, rec.Extension).
			WithHint("make a portable one of the sandbox: sandboxer snapshot create --portable %s", rec.ShownSandbox())
	case m.opts.SnapshotStore == nil:
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "this installation no longer stores portable snapshots")
	}
	return rec, nil
}

// ExportSnapshot writes the portable form of a snapshot to w, as one file that
// ImportSnapshot reads on any installation.
func (m *Manager) ExportSnapshot(ctx context.Context, ref string, w io.Writer) error {
	rec, err := m.portable(ctx, ref)
	if err != nil {
		return err
	}
	end, err := m.Streams.Begin("", rec.Tenant, sandboxer.PrincipalFrom(ctx))
	if err != nil {
		return err
	}
	defer end()
	unpin, err := m.pinSealed(ctx, rec.ID)
	if err != nil {
		return err
	}
	defer unpin()
	ctx, cancel := m.untilClosed(ctx)
	defer cancel(nil)
	return m.opts.SnapshotStore.Export(ctx, rec.ID, w)
}

// ImportSnapshot makes a snapshot of a file that ExportSnapshot wrote, and returns it
// sealed. It trusts nothing in the file except its files.
func (m *Manager) ImportSnapshot(ctx context.Context, req ImportRequest, r io.Reader) (*sandboxer.SnapshotRecord, error) {
	p, err := access.May(ctx, sandboxer.ScopeWrite)
	if err == nil {
		err = spec.CheckName(req.Name)
	}
	if err != nil {
		return nil, err
	}
	if m.opts.SnapshotStore == nil {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "this installation stores no portable snapshots")
	}
	var prof sandboxer.Profile
	if req.Profile != "" {
		if prof, err = m.profile(req.Profile); err != nil {
			return nil, err
		}
	}
	if err := m.checkRoom(ctx, p.Tenant); err != nil {
		return nil, err
	}
	end, err := m.Streams.Begin("", p.Tenant, p)
	if err != nil {
		return nil, err
	}
	defer end()
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.wg.Done()
	ctx, cancel := m.untilClosed(ctx)
	defer cancel(nil)
	rec := &sandboxer.SnapshotRecord{
		ID: sandboxer.NewSnapshotID(), Name: req.Name, Tenant: p.Tenant, Profile: prof.ID, Kind: sandboxer.SnapshotPortable,
		State: sandboxer.SnapshotSaving, CreatedAt: now(),
	}
	release, err := m.pins.claim(rec.ID)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := m.step(pSaving, func() error { return m.putSnapshot(ctx, rec, "begun", sandboxer.QuotaSnapshots) }); err != nil {
		return nil, err
	}
	claimed := *rec
	err = m.step(pArchive, func() (err error) {
		rec.Portable, err = m.opts.SnapshotStore.Import(ctx, &claimed, r, req.Accept)
		return err
	})
	if err == nil {
		if rec.Profile == "" {
			if prof, perr := m.profile(claimed.Profile); perr == nil {
				rec.Profile = prof.ID
			}
		}
		rec.Message = claimed.Message
		err = m.step(pSealed, func() error {
			rec.State, rec.SealedAt = sandboxer.SnapshotSealed, now()
			return m.putSnapshot(ctx, rec, "sealed", sandboxer.QuotaSnapshotBytes)
		})
	}
	if err == nil {
		return rec, nil
	}
	rec.State, rec.SealedAt = sandboxer.SnapshotSaving, time.Time{}
	if m.ctx.Err() == nil {
		if derr := m.dropClaimed(context.WithoutCancel(ctx), rec, sandboxer.Message(err)); derr != nil {
			m.log.WarnContext(ctx, "drop after a failed import", "snapshot", rec.ID, "err", derr)
		}
	}
	return nil, err
}

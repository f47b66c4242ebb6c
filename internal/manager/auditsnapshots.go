package manager

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// auditSnapshots compares the records of snapshots with their store and with the sandboxes that need them. It checks each
// difference once more, because the record may have changed.
func (a *auditing) auditSnapshots(ctx context.Context) error {
	withStore := a.auditSnapshotStore(ctx)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	suspects, n, err := a.m.unsoundSnapshots(ctx, withStore)
	a.Checked += n
	if err != nil || len(suspects) == 0 {
		return err
	}
	again, _, err := a.m.unsoundSnapshots(ctx, withStore)
	for k, v := range suspects {
		if _, ok := again[k]; ok && !a.isReported(v) {
			a.add(v)
		}
	}
	return err
}

// isReported reports whether v names a backend that did not answer, and is in the result already.
func (a *Audit) isReported(v Violation) bool {
	who, _, _ := strings.Cut(v.Detail, ":")
	return v.Invariant == invAsked && slices.ContainsFunc(a.Violations, func(o Violation) bool {
		return o.Invariant == invAsked && strings.HasPrefix(o.Detail, who+":")
	})
}

// auditSnapshotStore names the snapshots whose files cannot be read: their manifests or, in a deep audit, all their data. Data
// that several snapshots share is read, and named, for each of them. It reports whether the store answers. If it does not, the
// store is named once and not asked again.
func (a *auditing) auditSnapshotStore(ctx context.Context) bool {
	if a.m.opts.SnapshotStore == nil {
		return false
	}
	ids, err := a.m.opts.SnapshotStore.List(ctx)
	if err != nil {
		a.violated(invAsked, "", "%s: %s", storeName, sandboxer.Message(err))
		return false
	}
	for i, id := range ids {
		a.Checked++
		began := time.Now()
		err := a.m.opts.SnapshotStore.Check(ctx, id, a.deep)
		if ctx.Err() != nil {
			return false
		}
		if hung(err, began) {
			a.violated(invAsked, "", "%s: snapshot %s could not be read, and %d more were not checked: %s", storeName, id, len(ids)-i-1, sandboxer.Message(err))
			return false
		}
		if err == nil || isKind(err, sandboxer.NotFound) { // dropped meanwhile
			continue
		}
		of := ""
		if rec, rerr := a.m.store.Snapshot(ctx, id); rerr == nil {
			of = rec.SandboxID
		}
		switch sandboxer.KindOf(err) {
		case sandboxer.Unavailable, sandboxer.Timeout, sandboxer.Exhausted, sandboxer.Canceled:
			a.violated(invAsked, of, "snapshot %s could not be read: %s", id, sandboxer.Message(err))
		default:
			a.violated(invRead, of, "snapshot %s: %s", id, sandboxer.Message(err))
		}
	}
	return true
}

// unsoundSnapshots checks the records of snapshots, and with withStore also the content of the store of portable snapshots.
func (m *Manager) unsoundSnapshots(ctx context.Context, withStore bool) (map[string]Violation, int, error) {
	out, n := map[string]Violation{}, 0
	violated := func(invariant, id, of, format string, args ...any) {
		out[id+" "+invariant] = Violation{invariant, of, fmt.Sprintf(format, args...)}
	}
	kept, asked := map[string]bool{}, false
	if withStore {
		ids, err := m.opts.SnapshotStore.List(ctx)
		if ctx.Err() != nil {
			return nil, 0, context.Cause(ctx)
		}
		asked = err == nil // else auditSnapshotStore says why
		for _, id := range ids {
			kept[id] = true
		}
	}
	living := map[string]*sandboxer.SnapshotRecord{}
	err := m.snapshots(ctx, sandboxer.SnapshotQuery{States: keptStates}, func(rec *sandboxer.SnapshotRecord) error {
		n++
		living[rec.ID] = rec
		return m.unsoundSnapshot(ctx, rec, asked && !kept[rec.ID], func(invariant, format string, args ...any) {
			violated(invariant, rec.ID, rec.SandboxID, format, args...)
		})
	})
	if err != nil {
		return nil, n, err
	}
	unknown, silent, err := m.quarantinedSnapshots(ctx, "", withStore)
	if err != nil {
		return nil, n, err
	}
	for id, s := range unknown {
		violated(invKept, id, s.found.SandboxID, "%s", s.text())
	}
	for id := range kept {
		if living[id] == nil && unknown[id] == nil {
			violated(invKept, id, "", "there are stored files of snapshot %s, which does not exist", id)
		}
	}
	for name, err := range silent {
		violated(invAsked, name, "", "%s: %s", name, sandboxer.Message(err))
	}
	err = m.records(ctx, sandboxer.Query{States: []sandboxer.State{sandboxer.Paused}}, func(sb *sandboxer.Sandbox) {
		rec := living[sb.Pause.Snapshot]
		if !lifecycle.HasReadyObject(sb) && (rec == nil || rec.State != sandboxer.SnapshotSealed) {
			violated(invSaved, sb.ID, sb.ID, "it is paused to snapshot %q, which is not sealed", sb.Pause.Snapshot)
		}
	})
	return out, n, err
}

// unsoundSnapshot calls violated for each fault of one record. lacksFiles says that the store of portable snapshots has no
// files of it.
func (m *Manager) unsoundSnapshot(ctx context.Context, rec *sandboxer.SnapshotRecord, lacksFiles bool, violated func(invariant, format string, args ...any)) error {
	switch {
	case rec.Damaged != "":
		violated(invWhole, "%s", snapshotRecords.violate(rec).Detail)
		return nil
	}
	if rec.State != sandboxer.SnapshotSealed {
		return nil
	}
	if rec.Kind.Has(sandboxer.SnapshotNative) && rec.Native.SnapshotID != rec.ID {
		violated(invForm, "snapshot %s is sealed without the extension's receipt", rec.ID)
	}
	if rec.Kind.Has(sandboxer.SnapshotPortable) && (rec.Portable.Digest == "" || lacksFiles) {
		violated(invForm, "snapshot %s is sealed, but its files are missing", rec.ID)
	}
	why, err := m.whyDrop(ctx, rec, time.Now())
	if err != nil {
		return err
	}
	if over := time.Since(rec.SealedAt); why != "" && rec.Purpose != "" && !m.pins.inUse(rec.ID) && over > 2*m.opts.SweepEvery+m.opts.Grace {
		violated(invOwn, "snapshot %s: %s", rec.ID, why)
	}
	return nil
}

package manager

import (
	"cmp"
	"context"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/spec"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// Snapshot saves a running sandbox, which keeps running, and returns the record once it is sealed: read back and verified. If
// the caller leaves, the work continues. Kinds: Unsupported if the extension cannot make the requested form; Conflict when the
// sandbox does not run, or the name is taken; Exhausted when the tenant has too many.
func (m *Manager) Snapshot(ctx context.Context, ref string, req SnapshotRequest) (*sandboxer.SnapshotRecord, error) {
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	return m.box(sb).takeSnapshot(ctx, req, "")
}

func (bx box) takeSnapshot(ctx context.Context, req SnapshotRequest, purpose sandboxer.SnapshotPurpose) (*sandboxer.SnapshotRecord, error) {
	if err := spec.CheckName(req.Name); err != nil {
		return nil, err
	}
	if req.TTL < 0 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "a time to live of %s is negative", req.TTL).WithHint("give a time above zero, or leave it out")
	}
	b, err := bx.m.backend(bx.sb.Extension)
	if err != nil {
		return nil, err
	}
	kind, err := bx.m.kindFor(b, bx.sb.Extension, req.Kind)
	if err != nil {
		return nil, err
	}
	if bx.sb.State != sandboxer.Running {
		return nil, notRunning(bx.sb)
	}
	if err := bx.m.checkRoom(ctx, bx.sb.Tenant); err != nil {
		return nil, err
	}
	for {
		if bx.sb.State != sandboxer.Running {
			return nil, notRunning(bx.sb)
		}
		j, mine, err := bx.m.begin(ctx, bx.sb.ID, bx.sb.Generation, true, nil)
		if err != nil {
			return nil, err
		}
		var rec *sandboxer.SnapshotRecord
		if mine {
			own := *bx.sb
			j.run(func(ctx context.Context) (_ *sandboxer.Sandbox, err error) {
				rec = newSnapshot(&own, kind, purpose)
				rec.Name = req.Name
				if req.TTL > 0 {
					rec.ExpiresAt = rec.CreatedAt.Add(req.TTL)
				}
				return nil, bx.m.box(&own).save(b, rec).take(ctx)
			})
		}
		if err := events.Wait(ctx, j.done); err != nil {
			return nil, err
		}
		if mine {
			return rec, j.err
		}
		if bx.sb, err = bx.m.store.SandboxGeneration(ctx, bx.sb.ID, bx.sb.Generation); err != nil {
			return nil, err
		}
	}
}

// kindFor returns the form of a snapshot on an extension, and refuses a form that the extension or this installation does not
// support.
func (m *Manager) kindFor(b *backend.Backend, ext string, kind sandboxer.SnapshotKind) (sandboxer.SnapshotKind, error) {
	native, portable := b.Can(sandboxer.CanSnapshot), b.Can(sandboxer.CanArchive) && m.opts.SnapshotStore != nil
	switch {
	case kind == "" && native:
		return sandboxer.SnapshotNative, nil
	case kind == "" && portable:
		return sandboxer.SnapshotPortable, nil
	case kind == "":
		return "", backend.Lacks(ext, sandboxer.CanSnapshot).WithHint("the extension can neither save sandboxes nor archive their files")
	case !slices.Contains(sandboxer.SnapshotKinds(), kind):
		return "", sandboxer.E(sandboxer.Invalid, nil, "%q is not a kind of snapshot%s", kind, suggest.DidYouMean(string(kind), strings.Split(suggest.List(sandboxer.SnapshotKinds()), ", "))).
			WithHint("the kinds are: %s", suggest.List(sandboxer.SnapshotKinds()))
	case kind.Has(sandboxer.SnapshotNative) && !native:
		return "", backend.Lacks(ext, sandboxer.CanSnapshot).
			WithHint("make a portable snapshot (--portable), which keeps the files of the workspace")
	case kind.Has(sandboxer.SnapshotPortable) && m.opts.SnapshotStore == nil:
		return "", sandboxer.E(sandboxer.Unsupported, nil, "this installation stores no portable snapshots")
	case kind.Has(sandboxer.SnapshotPortable) && !portable:
		return "", backend.Lacks(ext, sandboxer.CanArchive).WithHint("a portable snapshot is an archive of a sandbox's files")
	}
	return kind, nil
}

// keptStates are those in which a snapshot takes room.
var keptStates = []sandboxer.SnapshotState{sandboxer.SnapshotSaving, sandboxer.SnapshotSealed, sandboxer.SnapshotDropping}

func (m *Manager) checkRoom(ctx context.Context, tenant string) error {
	items, _, err := m.store.Snapshots(ctx, sandboxer.SnapshotQuery{
		Tenant: tenant, States: keptStates, Purposes: []sandboxer.SnapshotPurpose{""}, Limit: min(m.opts.Snapshots, sandboxer.MaxPage),
	})
	if err == nil && len(items) >= m.opts.Snapshots {
		err = sandboxer.E(sandboxer.Exhausted, nil, "%s has %d snapshots, which is the maximum", tenant, len(items)).
			WithHint("drop those that are not needed any more; list them: sandboxer snapshot ls")
	}
	if err != nil {
		return err
	}
	return m.CheckSnapshotBytes(ctx, tenant)
}

// newSnapshot is the record of a snapshot of sb that is about to be made.
func newSnapshot(sb *sandboxer.Sandbox, kind sandboxer.SnapshotKind, purpose sandboxer.SnapshotPurpose) *sandboxer.SnapshotRecord {
	spec := sb.Spec
	spec.Env = nil
	message := ""
	if len(spec.Mounts) > 0 {
		var targets []string
		for _, mt := range spec.Mounts {
			targets = append(targets, mt.Target)
		}
		message = "it does not include the mounts at " + strings.Join(targets, ", ")
	}
	return &sandboxer.SnapshotRecord{
		Message: message,
		ID:      sandboxer.NewSnapshotID(), Tenant: sb.Tenant, SandboxID: sb.ID, ShownID: sb.ShownID, Generation: sb.Generation, Parent: sb.RestoredFrom,
		Profile: sb.Profile, Extension: sb.Extension, Host: sb.Host, Spec: spec, Secrets: maps.Clone(sb.Secrets),
		Kind: kind, Purpose: purpose, State: sandboxer.SnapshotSaving, CreatedAt: now(),
	}
}

// A save makes one snapshot of a sandbox; rec is the snapshot's record.
type save struct {
	box
	b   *backend.Backend // of the sandbox
	rec *sandboxer.SnapshotRecord
}

func (bx box) save(b *backend.Backend, rec *sandboxer.SnapshotRecord) save { return save{bx, b, rec} }

// take writes rec, saves sb, and seals rec. The caller owns the job of sb.
func (sv save) take(ctx context.Context) (err error) {
	if err := sv.sealFor(sv.rec); err != nil {
		return err
	}
	release, err := sv.m.pins.claim(sv.rec.ID)
	if err != nil {
		return err
	}
	defer release()
	if err := sv.m.step(pSaving, func() error { return sv.m.putSnapshot(ctx, sv.rec, "begun", sandboxer.QuotaSnapshots) }); err != nil {
		return err
	}
	err = sv.data(ctx)
	if err == nil {
		err = sv.m.step(pSealed, func() error {
			sv.rec.State, sv.rec.SealedAt = sandboxer.SnapshotSealed, now()
			return sv.m.putSnapshot(ctx, sv.rec, "sealed", sandboxer.QuotaSnapshotBytes)
		})
	}
	if err == nil || sv.m.ctx.Err() != nil { // the next manager drops what this one leaves
		return err
	}
	sv.m.log.WarnContext(ctx, "snapshot failed", "snapshot", sv.rec.ID, "sandbox", sv.sb.ID, "err", err)
	late := context.WithoutCancel(ctx) // a destroy may have stopped it; what was begun is dropped all the same
	sv.rec.State, sv.rec.SealedAt = sandboxer.SnapshotSaving, time.Time{}
	if derr := sv.m.dropClaimed(late, sv.rec, sandboxer.Message(err)); derr != nil {
		sv.m.log.WarnContext(ctx, "drop after a failed snapshot", "snapshot", sv.rec.ID, "err", derr)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return wrapError(sandboxer.KindOf(err), err, "sandbox %s could not be saved", sv.sb.Shown())
}

// sealFor gives rec the environment of sb, sealed for rec.
func (bx box) sealFor(rec *sandboxer.SnapshotRecord) error {
	env, err := bx.openEnv()
	if err == nil {
		rec.SealedEnv, err = bx.m.sealAs(snapshotSealName(rec), env)
	}
	return err
}

// data saves sb in the forms of rec, and adds the receipts to rec.
func (sv save) data(ctx context.Context) error {
	if sv.rec.Kind.Has(sandboxer.SnapshotNative) {
		err := sv.m.step(pSave, func() (err error) { sv.rec.Native, err = sv.b.Snapshot(ctx, sv.sb.Handle, sv.rec.ID); return err })
		if err != nil {
			return err
		}
	}
	if !sv.rec.Kind.Has(sandboxer.SnapshotPortable) {
		sv.rec.ExpiresAt = earlier(sv.rec.ExpiresAt, sv.rec.Native.ExpiresAt)
		return nil
	}
	if sv.m.opts.SnapshotStore == nil {
		return sandboxer.E(sandboxer.Unsupported, nil, "this installation stores no portable snapshots")
	}
	return sv.m.step(pArchive, func() error {
		pr, pw := io.Pipe()
		begun, done := make(chan sandboxer.Contents, 1), make(chan error, 1)
		begin := func(c sandboxer.Contents) io.Writer {
			begun <- c
			return pw
		}
		go func() {
			var err error
			if sv.b.Can(sandboxer.CanCheckpoint) {
				err = sv.b.Checkpoint(ctx, sv.sb.Handle, begin)
			} else {
				err = sv.b.Archive(ctx, sv.sb.Handle, sv.sb.Spec.Workspace, begin(sandboxer.Contents{}))
			}
			pw.CloseWithError(err)
			done <- err
			close(begun)
		}()
		c, ok := <-begun
		if !ok {
			return <-done
		}
		sv.rec.Portable = sandboxer.PortablePayload{Volumes: c.Volumes, Quiesced: c.Quiesced}
		var err error
		sv.rec.Portable, err = sv.m.opts.SnapshotStore.Save(ctx, sv.rec, pr)
		if err == nil {
			_, _ = io.Copy(io.Discard, pr) // the archive ends when it says so
		}
		pr.CloseWithError(cmp.Or(err, io.ErrClosedPipe))
		aerr := <-done
		if err == nil || aerr != nil && sandboxer.KindOf(aerr) != sandboxer.Internal {
			return aerr // the archive failed first
		}
		return err
	})
}

// earlier is the earlier of two times, of which a zero one means never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// putSnapshot writes rec with an event about it, within the tenant's quota for its resources.
func (m *Manager) putSnapshot(ctx context.Context, rec *sandboxer.SnapshotRecord, what string, takes ...sandboxer.Resource) error {
	w := sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{rec}, Quota: m.QuotaFor(rec.Tenant, takes...)}
	if what != "" {
		w.Events = []sandboxer.Event{snapshotEvent(ctx, rec, what)}
	}
	err := m.store.Write(ctx, w)
	if err == nil {
		m.events.Notify(rec.SandboxID)
		m.scheduleSweep(time.Time{}, rec.RetryAt)
		if rec.State == sandboxer.SnapshotSealed {
			m.scheduleSweep(time.Time{}, rec.ExpiresAt)
		}
	}
	return err
}

func snapshotEvent(ctx context.Context, rec *sandboxer.SnapshotRecord, what string) sandboxer.Event {
	return sandboxer.Event{
		At: now(), SandboxID: rec.SandboxID, ShownID: rec.ShownID, Generation: rec.Generation, Tenant: rec.Tenant,
		Type: sandboxer.EventSnapshot, Actor: events.Actor(ctx), Message: rec.ID + " " + what,
	}
}

// snapshots calls f with every record q selects, page by page, until it fails.
func (m *Manager) snapshots(ctx context.Context, q sandboxer.SnapshotQuery, f func(*sandboxer.SnapshotRecord) error) error {
	q.Limit = sandboxer.MaxPage
	for {
		items, next, err := m.store.Snapshots(ctx, q)
		if err != nil {
			return err
		}
		for _, rec := range items {
			if err := f(rec); err != nil {
				return err
			}
		}
		if next == "" {
			return nil
		}
		q.After = next
	}
}

// pinSealed keeps a sealed snapshot from being dropped until unpin. NotFound: it was dropped;
// Conflict: it is being saved or dropped.
func (m *Manager) pinSealed(ctx context.Context, id string) (unpin func(), err error) {
	unpin, err = m.pins.pin(id)
	if err != nil {
		return nil, err
	}
	rec, err := m.store.Snapshot(ctx, id)
	if err == nil && rec.State != sandboxer.SnapshotSealed {
		err = notSealed(rec)
	}
	if err != nil {
		unpin()
		return nil, err
	}
	return unpin, nil
}

func notSealed(rec *sandboxer.SnapshotRecord) error {
	if rec.State == sandboxer.SnapshotDropping || rec.State == sandboxer.SnapshotDropped {
		return sandboxer.E(sandboxer.NotFound, nil, "snapshot %s was dropped", rec.ID).
			WithHint("list snapshots: sandboxer snapshot ls")
	}
	return sandboxer.E(sandboxer.Conflict, nil, "snapshot %s is not sealed yet", rec.ID).
		WithHint("wait until it is: sandboxer snapshot get %s", rec.ID)
}

// GetSnapshot returns the snapshot that ref means: an ID, a name, or the beginning of an ID that only one has ("snap-" may be
// left out). A dropped snapshot has no name any more. A snapshot that is not dropped takes precedence over a dropped one.
func (m *Manager) GetSnapshot(ctx context.Context, ref string) (*sandboxer.SnapshotRecord, error) {
	return m.findSnapshot(ctx, sandboxer.ScopeRead, ref)
}

func (m *Manager) findSnapshot(ctx context.Context, scope sandboxer.Scope, ref string) (*sandboxer.SnapshotRecord, error) {
	p, err := access.May(ctx, scope)
	if err != nil {
		return nil, err
	}
	q := sandboxer.SnapshotQuery{Tenant: p.Tenant, Limit: 2}
	if p.Can(sandboxer.ScopeAdmin) {
		q.Tenant = ""
	}
	rec, err := m.store.Snapshot(ctx, ref)
	if rec != nil && rec.Damaged != "" && (q.Tenant == "" || rec.Tenant == q.Tenant) {
		return rec, err
	}
	if err == nil && (q.Tenant == "" || rec.Tenant == q.Tenant) {
		return rec, nil
	}
	others := rec != nil && rec.Damaged != "" // this caller learns nothing of them
	if err != nil && !others && !isKind(err, sandboxer.NotFound) {
		return nil, err
	}
	prefix := ref
	if !strings.HasPrefix(prefix, "snap-") {
		prefix = "snap-" + ref
	}
	for _, states := range [][]sandboxer.SnapshotState{keptStates, nil} {
		for _, by := range []sandboxer.SnapshotQuery{{Name: ref}, {IDPrefix: prefix}} {
			if ref == "" || by.IDPrefix != "" && len(prefix) < len("snap-")+3 || by.Name != "" && states == nil { // a name is free once its snapshot is dropped
				continue
			}
			by.Tenant, by.Limit, by.States = q.Tenant, q.Limit, states
			items, _, err := m.store.Snapshots(ctx, by)
			if err != nil {
				return nil, err
			}
			if len(items) == 1 {
				return snapshotRecords.whole(items[0])
			}
			if len(items) > 1 {
				return nil, sandboxer.E(sandboxer.Conflict, nil, "%q means several snapshots: %s and %s", ref, items[0].ID, items[1].ID).
					WithHint("write more of the ID")
			}
		}
	}
	return nil, sandboxer.E(sandboxer.NotFound, nil, "there is no snapshot %q", ref).
		WithHint("list yours: sandboxer snapshot ls")
}

// droppedSnapshot is the newest dropped snapshot that had the name, nil if none had. A caller that repeats a request
// that it made before the snapshot was dropped means that one.
func (m *Manager) droppedSnapshot(ctx context.Context, name string) (*sandboxer.SnapshotRecord, error) {
	p, err := access.May(ctx, sandboxer.ScopeWrite)
	if err != nil || name == "" {
		return nil, err
	}
	q := sandboxer.SnapshotQuery{Tenant: p.Tenant, Name: name, Limit: 1, States: []sandboxer.SnapshotState{sandboxer.SnapshotDropping, sandboxer.SnapshotDropped}}
	if p.Can(sandboxer.ScopeAdmin) {
		q.Tenant = ""
	}
	items, _, err := m.store.Snapshots(ctx, q)
	if err != nil || len(items) == 0 {
		return nil, err
	}
	return snapshotRecords.whole(items[0])
}

// Snapshots pages through snapshots, newest first. Without the admin scope only the
// caller's tenant is listed. q.SandboxID may be anything Get takes, q.Parent anything
// GetSnapshot takes. Without q.Purposes only users' own are listed, without q.States
// those that are not dropped.
func (m *Manager) Snapshots(ctx context.Context, q sandboxer.SnapshotQuery) ([]*sandboxer.SnapshotRecord, string, error) {
	p, err := access.May(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil, "", err
	}
	if !p.Can(sandboxer.ScopeAdmin) {
		if q.Tenant != "" && q.Tenant != p.Tenant {
			return nil, "", nil
		}
		q.Tenant = p.Tenant
	}
	if err := access.CheckPage(q.Limit); err != nil {
		return nil, "", err
	}
	if q.SandboxID != "" {
		sb, err := m.find(ctx, sandboxer.ScopeRead, q.SandboxID)
		if err != nil {
			return nil, "", err
		}
		q.SandboxID = sb.ID
	}
	if q.Parent != "" {
		rec, err := m.findSnapshot(ctx, sandboxer.ScopeRead, q.Parent)
		if err != nil {
			return nil, "", err
		}
		q.Parent = rec.ID
	}
	for _, s := range q.States {
		if !s.Valid() {
			return nil, "", sandboxer.E(sandboxer.Invalid, nil, "%q is not a state of snapshots", s).
				WithHint("the states are: %s", suggest.List(sandboxer.SnapshotStates()))
		}
	}
	if len(q.States) == 0 {
		q.States = keptStates
	}
	if len(q.Purposes) == 0 {
		q.Purposes = []sandboxer.SnapshotPurpose{""}
	}
	return m.store.Snapshots(ctx, q)
}

package manager

import (
	"cmp"
	"context"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// Snapshot saves a running sandbox, which goes on running, and returns the record once
// it is sealed: read back and verified. A caller who leaves does not stop it. Kinds:
// Unsupported where the extension cannot do what is asked; Conflict when the sandbox
// does not run, or the name is taken; Exhausted when the tenant has too many.
func (m *Manager) Snapshot(ctx context.Context, ref string, req SnapshotRequest) (*sandboxer.SnapshotRecord, error) {
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	return m.takeSnapshot(ctx, sb, req, "")
}

func (m *Manager) takeSnapshot(ctx context.Context, sb *sandboxer.Sandbox, req SnapshotRequest, purpose sandboxer.SnapshotPurpose) (*sandboxer.SnapshotRecord, error) {
	if err := checkName(req.Name); err != nil {
		return nil, err
	}
	if req.TTL < 0 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "a time to live of %s is negative", req.TTL)
	}
	b, err := m.backend(sb.Extension)
	if err != nil {
		return nil, err
	}
	kind, err := m.kindFor(b, sb.Extension, req.Kind)
	if err != nil {
		return nil, err
	}
	if sb.State != sandboxer.Running {
		return nil, notRunning(sb)
	}
	if err := m.checkRoom(ctx, sb.Tenant); err != nil {
		return nil, err
	}
	for {
		if sb.State != sandboxer.Running {
			return nil, notRunning(sb)
		}
		j, mine, err := m.begin(ctx, sb.ID, sb.Generation, true, nil)
		if err != nil {
			return nil, err
		}
		var rec *sandboxer.SnapshotRecord
		if mine {
			own := *sb
			m.run(j, func(ctx context.Context) (_ *sandboxer.Sandbox, err error) {
				rec = newSnapshot(&own, kind, purpose)
				rec.Name = req.Name
				if req.TTL > 0 {
					rec.ExpiresAt = rec.CreatedAt.Add(req.TTL)
				}
				return nil, m.saveSnapshot(ctx, b, &own, rec)
			})
		}
		if err := wait(ctx, j.done); err != nil {
			return nil, err
		}
		if mine {
			return rec, j.err
		}
		if sb, err = m.store.SandboxGeneration(ctx, sb.ID, sb.Generation); err != nil {
			return nil, err
		}
	}
}

// kindFor settles the form of a snapshot on an extension, and refuses what it or this
// installation cannot do.
func (m *Manager) kindFor(b *backend.Backend, ext string, kind sandboxer.SnapshotKind) (sandboxer.SnapshotKind, error) {
	native, portable := b.Can(sandboxer.CanSnapshot), b.Can(sandboxer.CanArchive) && m.opts.SnapshotStore != nil
	switch {
	case kind == "" && native:
		return sandboxer.SnapshotNative, nil
	case kind == "" && portable:
		return sandboxer.SnapshotPortable, nil
	case kind == "":
		return "", backend.Lacks(ext, sandboxer.CanSnapshot).WithHint("it can neither save sandboxes nor archive their files")
	case !slices.Contains(sandboxer.SnapshotKinds(), kind):
		return "", sandboxer.E(sandboxer.Invalid, nil, "%q is not a kind of snapshot%s", kind, didYouMean(string(kind), strings.Split(join(sandboxer.SnapshotKinds()), ", "))).
			WithHint("the kinds are: %s", join(sandboxer.SnapshotKinds()))
	case kind.Has(sandboxer.SnapshotNative) && !native:
		return "", backend.Lacks(ext, sandboxer.CanSnapshot).
			WithHint("it has none of its own: make a portable one (--portable), which keeps the files of the workspace")
	case kind.Has(sandboxer.SnapshotPortable) && m.opts.SnapshotStore == nil:
		return "", sandboxer.E(sandboxer.Unsupported, nil, "this installation keeps no portable snapshots")
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
		err = sandboxer.E(sandboxer.Exhausted, nil, "%s has %d snapshots, as many as it may keep", tenant, len(items)).
			WithHint("drop those that are not needed any more; list them: sandboxer snapshot ls")
	}
	if err != nil {
		return err
	}
	return m.checkSnapshotBytes(ctx, tenant)
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
		message = "it holds nothing of what is mounted at " + strings.Join(targets, ", ")
	}
	return &sandboxer.SnapshotRecord{
		Message: message,
		ID:      sandboxer.NewSnapshotID(), Tenant: sb.Tenant, SandboxID: sb.ID, ShownID: sb.ShownID, Generation: sb.Generation, Parent: sb.RestoredFrom,
		Profile: sb.Profile, Extension: sb.Extension, Host: sb.Host, Spec: spec,
		Kind: kind, Purpose: purpose, State: sandboxer.SnapshotSaving, CreatedAt: now(),
	}
}

// saveSnapshot writes rec down, saves sb, and seals rec. The caller owns the job of sb.
func (m *Manager) saveSnapshot(ctx context.Context, b *backend.Backend, sb *sandboxer.Sandbox, rec *sandboxer.SnapshotRecord) (err error) {
	if err := m.sealFor(sb, rec); err != nil {
		return err
	}
	release, err := m.pins.claim(rec.ID)
	if err != nil {
		return err
	}
	defer release()
	if err := m.step(pSaving, func() error { return m.putSnapshot(ctx, rec, "begun", sandboxer.QuotaSnapshots) }); err != nil {
		return err
	}
	err = m.saveData(ctx, b, sb, rec)
	if err == nil {
		err = m.step(pSealed, func() error {
			rec.State, rec.SealedAt = sandboxer.SnapshotSealed, now()
			return m.putSnapshot(ctx, rec, "sealed", sandboxer.QuotaSnapshotBytes)
		})
	}
	if err == nil || m.ctx.Err() != nil { // the next manager drops what this one leaves
		return err
	}
	m.log.WarnContext(ctx, "snapshot failed", "snapshot", rec.ID, "sandbox", sb.ID, "err", err)
	late := context.WithoutCancel(ctx) // a destroy may have stopped it; what was begun is dropped all the same
	rec.State, rec.SealedAt = sandboxer.SnapshotSaving, time.Time{}
	if derr := m.dropClaimed(late, rec, sandboxer.Message(err)); derr != nil {
		m.log.WarnContext(ctx, "drop after a failed snapshot", "snapshot", rec.ID, "err", derr)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return wrapError(sandboxer.KindOf(err), err, "sandbox %s could not be saved", sb.Shown())
}

// sealFor gives rec the environment of sb, sealed for rec.
func (m *Manager) sealFor(sb *sandboxer.Sandbox, rec *sandboxer.SnapshotRecord) error {
	env, err := m.openEnv(sb)
	if err == nil {
		rec.SealedEnv, err = m.sealAs(snapshotSealName(rec), env)
	}
	return err
}

// saveData saves sb in the forms that rec asks for and completes rec with the receipts.
func (m *Manager) saveData(ctx context.Context, b *backend.Backend, sb *sandboxer.Sandbox, rec *sandboxer.SnapshotRecord) error {
	if rec.Kind.Has(sandboxer.SnapshotNative) {
		err := m.step(pSave, func() (err error) { rec.Native, err = b.Snapshot(ctx, sb.Handle, rec.ID); return err })
		if err != nil {
			return err
		}
	}
	if !rec.Kind.Has(sandboxer.SnapshotPortable) {
		return nil
	}
	if m.opts.SnapshotStore == nil {
		return sandboxer.E(sandboxer.Unsupported, nil, "this installation keeps no portable snapshots")
	}
	return m.step(pArchive, func() error {
		pr, pw := io.Pipe()
		begun, done := make(chan sandboxer.Contents, 1), make(chan error, 1)
		begin := func(c sandboxer.Contents) io.Writer {
			begun <- c
			return pw
		}
		go func() {
			var err error
			if b.Can(sandboxer.CanCheckpoint) {
				err = b.Checkpoint(ctx, sb.Handle, begin)
			} else {
				err = b.Archive(ctx, sb.Handle, sb.Spec.Workspace, begin(sandboxer.Contents{}))
			}
			pw.CloseWithError(err)
			done <- err
			close(begun)
		}()
		c, ok := <-begun
		if !ok {
			return <-done
		}
		rec.Portable = sandboxer.PortablePayload{Volumes: c.Volumes, Quiesced: c.Quiesced}
		var err error
		rec.Portable, err = m.opts.SnapshotStore.Save(ctx, rec, pr)
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

// putSnapshot writes rec with an event that says what became of it, within the tenant's
// quota for what it takes.
func (m *Manager) putSnapshot(ctx context.Context, rec *sandboxer.SnapshotRecord, what string, takes ...sandboxer.Resource) error {
	w := sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{rec}, Quota: m.quotaFor(rec.Tenant, takes...)}
	if what != "" {
		w.Events = []sandboxer.Event{snapshotEvent(ctx, rec, what)}
	}
	err := m.store.Write(ctx, w)
	if err == nil {
		m.notify(rec.SandboxID)
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
		Type: sandboxer.EventSnapshot, Actor: actor(ctx), Message: rec.ID + " " + what,
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
			WithHint("list those there are: sandboxer snapshot ls")
	}
	return sandboxer.E(sandboxer.Conflict, nil, "snapshot %s is not sealed yet", rec.ID).
		WithHint("wait until it is: sandboxer snapshot get %s", rec.ID)
}

// GetSnapshot returns the snapshot that ref means: an ID, a name, or the beginning of
// an ID that only one has ("snap-" may be left out). One that is not dropped goes
// before those that are.
func (m *Manager) GetSnapshot(ctx context.Context, ref string) (*sandboxer.SnapshotRecord, error) {
	return m.findSnapshot(ctx, sandboxer.ScopeRead, ref)
}

func (m *Manager) findSnapshot(ctx context.Context, scope sandboxer.Scope, ref string) (*sandboxer.SnapshotRecord, error) {
	p, err := may(ctx, scope)
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
	others := rec != nil && rec.Damaged != "" // of which this caller learns nothing
	if err != nil && !others && !isKind(err, sandboxer.NotFound) {
		return nil, err
	}
	prefix := ref
	if !strings.HasPrefix(prefix, "snap-") {
		prefix = "snap-" + ref
	}
	for _, states := range [][]sandboxer.SnapshotState{keptStates, nil} {
		for _, by := range []sandboxer.SnapshotQuery{{Name: ref}, {IDPrefix: prefix}} {
			if ref == "" || by.IDPrefix != "" && len(prefix) < len("snap-")+3 {
				continue
			}
			by.Tenant, by.Limit, by.States = q.Tenant, q.Limit, states
			items, _, err := m.store.Snapshots(ctx, by)
			if err != nil {
				return nil, err
			}
			if len(items) == 1 || len(items) > 1 && by.Name != "" && states == nil && q.Tenant != "" {
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

// Snapshots pages through snapshots, newest first. Without the admin scope only the
// caller's tenant is listed. q.SandboxID may be anything Get takes, q.Parent anything
// GetSnapshot takes. Without q.Purposes only users' own are listed, without q.States
// those that are not dropped.
func (m *Manager) Snapshots(ctx context.Context, q sandboxer.SnapshotQuery) ([]*sandboxer.SnapshotRecord, string, error) {
	p, err := may(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil, "", err
	}
	if !p.Can(sandboxer.ScopeAdmin) {
		if q.Tenant != "" && q.Tenant != p.Tenant {
			return nil, "", nil
		}
		q.Tenant = p.Tenant
	}
	if err := checkPage(q.Limit); err != nil {
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
				WithHint("the states are: %s", join(sandboxer.SnapshotStates()))
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

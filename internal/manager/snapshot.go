package manager

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// A SnapshotStore keeps the portable form of snapshots: the files of a workspace, in a form
// of its own that any extension's sandbox can be filled from. Its methods are safe
// for concurrent use, and end soon after their context does.
type SnapshotStore interface {
	// Save keeps what the tar r holds under rec.ID, replacing what was begun there, and
	// what rec.Portable says of its contents already. It returns once all of it was read
	// back and its digest verified.
	Save(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader) (sandboxer.PortablePayload, error)
	// Load opens the tar kept under id. Reading fails with Failed where it is not what
	// was saved. NotFound: there is none.
	Load(ctx context.Context, id string) (io.ReadCloser, error)
	// Files lists what is kept under id, in the order of names.
	Files(ctx context.Context, id string) ([]SnapshotFile, error)
	// Export writes what is kept under id as one file that Import reads anywhere.
	Export(ctx context.Context, id string, w io.Writer) error
	// Import is Save from such a file. It completes rec with what the file says of its
	// origin. accept names signers to be trusted this once. Invalid: it is not such a
	// file, or not a whole one. Denied: nobody here knows who signed it.
	Import(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader, accept []string) (sandboxer.PortablePayload, error)
	// Drop removes what is kept, or was begun, under id; absence is success.
	Drop(ctx context.Context, id string) error
	// Describe returns what is kept under id and what it says of where it came from: sandbox,
	// generation, extension, profile. NotFound: there is none. Failed: it is damaged.
	Describe(ctx context.Context, id string) (*sandboxer.SnapshotRecord, error)
	// List returns the IDs there is anything under, damaged or not.
	List(ctx context.Context) ([]string, error)
	// Check reads what is kept under id: what says which files there are, and, if deep is
	// set, all of their content, with progress reported. Failed: it is not what was saved.
	// NotFound: there is none.
	Check(ctx context.Context, id string, deep bool) error
}

// ImportRequest says what to make of an exported snapshot.
type ImportRequest struct {
	Name    string   `json:"name,omitempty"`
	Profile string   `json:"profile,omitempty"` // what it is restored as, where the one it was made of does not exist here
	Accept  []string `json:"accept,omitempty"`  // signers to be trusted this once
}

// SnapshotFile is one file of a portable snapshot.
type SnapshotFile struct {
	Path   string `json:"path"` // relative to the workspace
	Type   string `json:"type"` // "file", "dir", "link"
	Size   int64  `json:"size"`
	Mode   int64  `json:"mode"`             // permission bits
	Target string `json:"target,omitempty"` // of a link
	Digest string `json:"digest,omitempty"` // of a file's content
}

// Change is one difference between two snapshots.
type Change struct {
	Path   string `json:"path"`
	Change string `json:"change"` // "added", "removed", "changed"
	Before int64  `json:"before"` // size; 0 where it was added
	After  int64  `json:"after"`  // size; 0 where it was removed
}

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
		return "", sandboxer.E(sandboxer.Unsupported, nil, "extension %s can neither save sandboxes nor archive their files", ext)
	case !slices.Contains(sandboxer.SnapshotKinds(), kind):
		return "", sandboxer.E(sandboxer.Invalid, nil, "%q is not a kind of snapshot%s", kind, didYouMean(string(kind), strings.Split(join(sandboxer.SnapshotKinds()), ", "))).
			WithHint("the kinds are: %s", join(sandboxer.SnapshotKinds()))
	case kind.Has(sandboxer.SnapshotNative) && !native:
		return "", sandboxer.E(sandboxer.Unsupported, nil, "extension %s has no snapshots of its own", ext).
			WithHint("make a portable one (--portable), which keeps the files of the workspace")
	case kind.Has(sandboxer.SnapshotPortable) && m.opts.SnapshotStore == nil:
		return "", sandboxer.E(sandboxer.Unsupported, nil, "this installation keeps no portable snapshots")
	case kind.Has(sandboxer.SnapshotPortable) && !portable:
		return "", sandboxer.E(sandboxer.Unsupported, nil, "extension %s cannot archive the files of a sandbox", ext)
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
	return &sandboxer.SnapshotRecord{
		ID: sandboxer.NewSnapshotID(), Tenant: sb.Tenant, SandboxID: sb.ID, Generation: sb.Generation, Parent: sb.RestoredFrom,
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
	kind := sandboxer.KindOf(err)
	answer := sandboxer.E(kind, err, "sandbox %s could not be saved: %s", sb.ID, sandboxer.Message(err))
	answer.Hint, answer.RetryAfter = sandboxer.HintOf(err), sandboxer.RetryAfterOf(err)
	return answer
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
		At: now(), SandboxID: rec.SandboxID, Generation: rec.Generation, Tenant: rec.Tenant,
		Type: sandboxer.EventSnapshot, Actor: actor(ctx), Message: rec.ID + " " + what,
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
				return wholeSnapshot(items[0])
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

// DropSnapshot removes a snapshot and returns its record, dropped. What was restored
// from it lives on. One that is dropped already is success. An administrator may name one that
// the database does not know, by its whole ID. Conflict: something is
// being restored from it, or a paused sandbox resumes from it. If the backend cannot
// do it now, the error is Unavailable and the sweep goes on until it is done.
func (m *Manager) DropSnapshot(ctx context.Context, ref string) (*sandboxer.SnapshotRecord, error) {
	rec, err := m.findSnapshot(ctx, sandboxer.ScopeWrite, ref)
	if rec != nil && rec.Damaged != "" {
		rec, err = m.repairSnapshotRecord(ctx, rec, err)
	}
	if isKind(err, sandboxer.NotFound) && checkSnapshotID(ref) == nil {
		if lost, lerr := m.dropQuarantined(ctx, ref); !isKind(lerr, sandboxer.NotFound) && !isKind(lerr, sandboxer.Denied) {
			rec, err = lost, lerr
		}
	}
	if err != nil {
		return nil, err
	}
	if rec.State == sandboxer.SnapshotDropped {
		return rec, nil
	}
	if rec.Purpose == sandboxer.ForPause {
		if sb, err := m.store.Sandbox(ctx, rec.SandboxID); err == nil && sb.Pause.Snapshot == rec.ID {
			return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is paused and resumes from snapshot %s", sb.ID, rec.ID).
				WithHint("destroy or resume that sandbox instead")
		}
	}
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.wg.Done()
	bg, cancel := m.untilClosed(context.WithoutCancel(ctx))
	defer cancel(nil)
	return m.dropByID(bg, rec.ID, "")
}

// dropInternal drops a snapshot that the broker made for itself, as far as that is possible
// now; the sweep does the rest.
func (m *Manager) dropInternal(ctx context.Context, id string) {
	if _, err := m.dropByID(ctx, id, ""); err != nil && ctx.Err() == nil {
		m.log.WarnContext(ctx, "drop of a snapshot that is not needed any more", "snapshot", id, "err", err)
	}
}

// dropByID drops one snapshot unless it is in use.
func (m *Manager) dropByID(ctx context.Context, id, why string) (*sandboxer.SnapshotRecord, error) {
	release, err := m.pins.claim(id)
	if err != nil {
		return nil, err
	}
	defer release()
	rec, err := m.store.Snapshot(ctx, id)
	if err != nil {
		return nil, err
	}
	if user, err := m.restoringFrom(ctx, rec); err != nil {
		return nil, err
	} else if user != "" {
		return nil, sandboxer.E(sandboxer.Conflict, nil, "snapshot %s is in use: sandbox %s is being restored from it", id, user).
			WithHint("try again when that sandbox runs")
	}
	return rec, m.dropClaimed(ctx, rec, why)
}

// restoringFrom returns a sandbox that is being made from rec, or "". A sandbox whose
// object exists needs the snapshot no more, but its making may be repeated.
func (m *Manager) restoringFrom(ctx context.Context, rec *sandboxer.SnapshotRecord) (user string, err error) {
	if rec.State != sandboxer.SnapshotSealed {
		return "", nil
	}
	err = m.records(ctx, sandboxer.Query{States: []sandboxer.State{sandboxer.Creating}}, func(sb *sandboxer.Sandbox) {
		if sourceOf(sb) == rec.ID {
			user = sb.ID
		}
	})
	return user, err
}

// dropClaimed drops rec, which the caller has claimed.
func (m *Manager) dropClaimed(ctx context.Context, rec *sandboxer.SnapshotRecord, why string) error {
	if rec.State == sandboxer.SnapshotDropped {
		return nil
	}
	if rec.State != sandboxer.SnapshotDropping {
		err := m.step(pDropping, func() error {
			rec.State = sandboxer.SnapshotDropping
			if why != "" {
				rec.Message = why
			}
			rec.Retries, rec.RetryAt, rec.LastError = 0, time.Time{}, ""
			return m.putSnapshot(ctx, rec, "")
		})
		if err != nil {
			return err
		}
	}
	err := m.removeSnapshotData(ctx, rec)
	if err == nil {
		return m.step(pDropped, func() error {
			rec.State, rec.DroppedAt = sandboxer.SnapshotDropped, now()
			rec.RetryAt, rec.LastError, rec.SealedEnv = time.Time{}, "", nil
			return m.putSnapshot(ctx, rec, "dropped")
		})
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	rec.Retries++
	rec.LastError = sandboxer.Message(err)
	rec.RetryAt = now().Add(backoff(rec.Retries, rand.Float64()))
	if werr := m.step(pRetry, func() error { return m.putSnapshot(ctx, rec, "") }); werr != nil {
		return werr
	}
	e := sandboxer.E(sandboxer.Unavailable, err, "snapshot %s is not dropped yet: %s", rec.ID, rec.LastError).
		WithHint("it is tried again by itself")
	e.RetryAfter = time.Until(rec.RetryAt)
	return e
}

// removeSnapshotData removes what there is of rec outside the database.
func (m *Manager) removeSnapshotData(ctx context.Context, rec *sandboxer.SnapshotRecord) error {
	if rec.Extension == "" && rec.Kind == sandboxer.SnapshotBoth { // repaired
		if err := m.removeFromAllExtensions(ctx, rec.ID); err != nil || m.opts.SnapshotStore == nil {
			return err
		}
	} else if rec.Kind.Has(sandboxer.SnapshotNative) {
		b, err := m.backend(rec.Extension)
		if err != nil {
			return err
		}
		receipt := rec.Native
		receipt.SnapshotID = rec.ID
		if err := m.step(pDrop, func() error { return b.DropSnapshot(ctx, receipt) }); err != nil {
			return err
		}
	}
	if rec.Kind.Has(sandboxer.SnapshotPortable) {
		if m.opts.SnapshotStore == nil {
			return sandboxer.E(sandboxer.Unavailable, nil, "this installation keeps no portable snapshots any more")
		}
		return m.step(pDelete, func() error { return m.opts.SnapshotStore.Drop(ctx, rec.ID) })
	}
	return nil
}

// sweepSnapshots takes the steps that snapshots owe: those that a dead process was
// saving are dropped, as are those whose time is over, and those that the broker made
// for a sandbox or a fork that needs them no more.
func (m *Manager) sweepSnapshots(ctx context.Context, t *tracker, at time.Time) error {
	each := func(q sandboxer.SnapshotQuery) error {
		q.Limit = sandboxer.MaxPage
		for {
			items, next, err := m.store.Snapshots(ctx, q)
			if err != nil {
				return err
			}
			for _, rec := range items {
				if rec.Damaged != "" {
					m.reportDamagedSnapshot(rec)
					continue // what it is would have to be known
				}
				why, err := m.whyDrop(ctx, rec, at)
				if err != nil {
					return err
				}
				if why == "" || m.pins.inUse(rec.ID) || !m.take(rec.ID) {
					continue
				}
				m.async(t, func() {
					defer m.drop(rec.ID)
					release, err := m.dropSlot(m.ctx, rec)
					if err != nil {
						return
					}
					defer release()
					if rec.State != sandboxer.SnapshotSaving {
						why = ""
					}
					if _, err := m.dropByID(m.ctx, rec.ID, why); err != nil && m.ctx.Err() == nil && !isKind(err, sandboxer.Conflict) {
						t.count(func(r *SweepReport) { r.Failed++ })
						m.log.Warn("sweep", "snapshot", rec.ID, "err", err)
					}
				})
			}
			if next == "" {
				return nil
			}
			q.After = next
		}
	}
	for _, q := range []sandboxer.SnapshotQuery{
		{States: []sandboxer.SnapshotState{sandboxer.SnapshotSaving, sandboxer.SnapshotDropping}},
		{States: []sandboxer.SnapshotState{sandboxer.SnapshotSealed}, Purposes: []sandboxer.SnapshotPurpose{sandboxer.ForPause, sandboxer.ForFork}},
		{States: []sandboxer.SnapshotState{sandboxer.SnapshotSealed}, DueBefore: at},
	} {
		if err := each(q); err != nil {
			return err
		}
	}
	return nil
}

// whyDrop says why rec is to be dropped now, or "".
func (m *Manager) whyDrop(ctx context.Context, rec *sandboxer.SnapshotRecord, at time.Time) (why string, err error) {
	if rec.Purpose == sandboxer.ForPause && (rec.State == sandboxer.SnapshotSaving || rec.State == sandboxer.SnapshotSealed) {
		sb, err := m.store.SandboxGeneration(ctx, rec.SandboxID, rec.Generation)
		switch {
		case isKind(err, sandboxer.NotFound):
		case err != nil:
			return "", err
		case sb.Pause.Snapshot == rec.ID && sb.State != sandboxer.Terminated:
			return "", nil
		}
		return "its sandbox is not paused any more", nil
	}
	switch {
	case rec.Unconfirmed && rec.State == sandboxer.SnapshotSaving:
		return "", nil // the database went back: it may be whole since
	case rec.State == sandboxer.SnapshotSaving:
		return "the broker stopped while it was being saved", nil
	case rec.State == sandboxer.SnapshotDropping && !at.Before(rec.RetryAt):
		return "it is being dropped", nil
	case rec.State == sandboxer.SnapshotSealed && rec.Purpose == sandboxer.ForFork:
		return "its fork is over", nil
	case rec.State == sandboxer.SnapshotSealed && !rec.ExpiresAt.IsZero() && !at.Before(rec.ExpiresAt) && !m.inGracePeriod():
		return "its time to live ran out", nil
	}
	return "", nil
}

// Diff compares the files of two portable snapshots, in the order of names.
func (m *Manager) Diff(ctx context.Context, before, after string) ([]Change, error) {
	var lists [2][]SnapshotFile
	for i, ref := range []string{before, after} {
		rec, err := m.portable(ctx, ref)
		if err != nil {
			return nil, err
		}
		if lists[i], err = m.opts.SnapshotStore.Files(ctx, rec.ID); err != nil {
			return nil, err
		}
	}
	return compare(lists[0], lists[1]), nil
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
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "snapshot %s is native to %s: what files it has is not known", rec.ID, rec.Extension).
			WithHint("make a portable one of the sandbox: sandboxer snapshot create --portable %s", rec.SandboxID)
	case m.opts.SnapshotStore == nil:
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "this installation keeps no portable snapshots any more")
	}
	return rec, nil
}

// compare merges two lists that are in the order of paths.
func compare(a, b []SnapshotFile) []Change {
	out := []Change{}
	byPath := func(a, b SnapshotFile) int { return strings.Compare(a.Path, b.Path) }
	a, b = slices.SortedFunc(slices.Values(a), byPath), slices.SortedFunc(slices.Values(b), byPath)
	for len(a) > 0 || len(b) > 0 {
		switch {
		case len(b) == 0 || len(a) > 0 && a[0].Path < b[0].Path:
			out = append(out, Change{a[0].Path, "removed", a[0].Size, 0})
			a = a[1:]
		case len(a) == 0 || b[0].Path < a[0].Path:
			out = append(out, Change{b[0].Path, "added", 0, b[0].Size})
			b = b[1:]
		default:
			if a[0] != b[0] {
				out = append(out, Change{a[0].Path, "changed", a[0].Size, b[0].Size})
			}
			a, b = a[1:], b[1:]
		}
	}
	return out
}

// ExportSnapshot writes the portable form of a snapshot to w, as one file that
// ImportSnapshot reads on any installation.
func (m *Manager) ExportSnapshot(ctx context.Context, ref string, w io.Writer) error {
	rec, err := m.portable(ctx, ref)
	if err != nil {
		return err
	}
	end, err := m.streams.begin("", rec.Tenant, sandboxer.PrincipalFrom(ctx))
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
// sealed. What the file says is not trusted beyond its files.
func (m *Manager) ImportSnapshot(ctx context.Context, req ImportRequest, r io.Reader) (*sandboxer.SnapshotRecord, error) {
	p, err := may(ctx, sandboxer.ScopeWrite)
	if err == nil {
		err = checkName(req.Name)
	}
	if err != nil {
		return nil, err
	}
	if m.opts.SnapshotStore == nil {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "this installation keeps no portable snapshots")
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
	end, err := m.streams.begin("", p.Tenant, p)
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

func snapshotSealName(rec *sandboxer.SnapshotRecord) []byte {
	return fmt.Appendf(nil, "snapshot/%s/%s", rec.ID, rec.Tenant)
}

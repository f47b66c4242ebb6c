package manager

import (
	"cmp"
	"context"
	"io"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// Restore makes a sandbox from a sealed snapshot and returns it running. ID, generation,
// owner, labels, tokens and time to live are its own. It is safe to repeat as Create
// is. Kinds: as Create; NotFound when the snapshot is dropped, Conflict when it is not
// sealed yet, Unsupported when its form cannot be restored there.
func (m *Manager) Restore(ctx context.Context, ref string, req RestoreRequest) (*sandboxer.Sandbox, error) {
	rec, err := m.findSnapshot(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	return m.restoreOne(ctx, rec, req, "", nil)
}

// restoreOne is Restore of one record, for the fork with that digest if it is part of one, which waits for
// no room any more once leaving is closed.
func (m *Manager) restoreOne(ctx context.Context, rec *sandboxer.SnapshotRecord, req RestoreRequest, fork string, leaving <-chan struct{}) (*sandboxer.Sandbox, error) {
	o, err := m.resolveRestore(sandboxer.PrincipalFrom(ctx), rec, req)
	if err != nil {
		return nil, err
	}
	if o.leaving = leaving; fork != "" {
		o.digest = fork
	}
	if o.key != "" {
		if sb, err := m.replay(ctx, o); sb != nil || err != nil {
			return sb, err
		}
	}
	if rec.State != sandboxer.SnapshotSealed {
		return nil, notSealed(rec)
	}
	sb, err := m.startCreate(ctx, o)
	if o.key != "" && isKind(err, sandboxer.Conflict) {
		if sb, err := m.replay(ctx, o); sb != nil || err != nil {
			return sb, err
		}
	}
	return sb, err
}

// resolveRestore checks a restore of rec for p and merges it with its source and its
// profile, as resolve does for a create. What the source was allowed is not asked again,
// but for what its profile does not give any more.
func (m *Manager) resolveRestore(p sandboxer.Principal, rec *sandboxer.SnapshotRecord, req RestoreRequest) (*resolvedRequest, error) {
	target := cmp.Or(req.Profile, rec.Profile)
	if target == "" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "snapshot %s was made of a profile that does not exist here", rec.ID).
			WithHint("say which one to restore it on: --profile")
	}
	prof, err := m.profile(target)
	if err != nil {
		return nil, err
	}
	as, err := formFor(rec, prof, req)
	if err == nil && as == sandboxer.SnapshotPortable {
		err = m.canPlace(rec, prof)
	}
	if err != nil {
		return nil, err
	}
	if req.Inputs["sandbox_id"] != "" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "a restored sandbox has an ID of its own, and does not take the input \"sandbox_id\"")
	}
	ext, err := m.extensionFor(prof)
	if err != nil {
		return nil, err
	}
	env, err := m.openAs(snapshotSealName(rec), "snapshot "+rec.ID, rec.SealedEnv)
	if err != nil {
		return nil, err
	}
	if prof, err = withExpiry(prof, req.Idle, req.OnIdle, req.OnTTL); err == nil {
		prof, err = withTTL(prof, req.TTL)
	}
	if err != nil {
		return nil, err
	}
	spec := m.restoredSpec(ext, prof, rec, env, req, as)
	sized := req
	sized.Inputs = spec.Inputs
	if spec.Inputs, err = ext.inputs(prof, spec.Inputs, spec.Host, spec.Image); err != nil {
		return nil, err
	}
	shown, _, err := identify(spec.Inputs, sandboxer.Thread{}) // its profile may name one
	if err != nil {
		return nil, err
	}
	spec.ID = newID(rec.Tenant, shown)
	for _, err := range []error{
		checkCommon(prof, commonRequest{req.Name, req.Key, req.TTL, req.Env, req.Labels, req.MaxCost}),
		m.mayPause(prof.Extension, req.OnIdle, req.OnTTL), checkSize(sized), m.checkStillAllowed(p, prof, spec, "snapshot "+rec.ID),
	} {
		if err != nil {
			return nil, err
		}
	}
	spec.Vouched = keptRestrictions(spec, rec.Spec)
	if p.Can(sandboxer.ScopeAdmin) {
		spec.Vouched = ext.restricted(spec)
	}
	place := ""
	if as == sandboxer.SnapshotNative {
		place = rec.Host // where it lies; nobody asked for that
	}
	return &resolvedRequest{
		tenant: rec.Tenant, actor: p.Actor, id: spec.ID, shown: shown, name: req.Name, ext: ext, spec: spec, place: place,
		ttl: lifeOf(prof, req.TTL), maxCost: req.MaxCost,
		key: req.Key, digest: m.mac(restoreDigest(rec.ID, req)), noWaiting: req.NoWaiting,
		from: rec, as: as,
	}, nil
}

// restoredSpec says what a restored sandbox has from where; what it does not name is the
// profile's. Inputs are what is asked for, before they are checked; ID and Vouched are not
// settled yet.
func (m *Manager) restoredSpec(ext *extension, prof sandboxer.Profile, rec *sandboxer.SnapshotRecord, env map[string]string, req RestoreRequest, as sandboxer.SnapshotKind) sandboxer.Spec {
	spec := m.profileSpec(prof)

	// The source's: the inputs that the extension takes, and the environment. On its own
	// profile it is all as its source was, whatever has become of the profile.
	spec.Inputs = inputsFor(ext.Info.Inputs, rec.Spec.Inputs)
	spec.Env = merge(prof.Env, env)
	if prof.ID != rec.Profile {
		spec.Inputs = merge(spec.Inputs, prof.Inputs) // whoever names another profile means it
	} else if s := rec.Spec; s.ID != "" { // not an imported one, which has no spec
		spec.Image, spec.Command, spec.Limits, spec.Network = s.Image, s.Command, s.Limits, s.Network
		spec.Mounts, spec.Ports, spec.Workspace, spec.User = s.Mounts, s.Ports, s.Workspace, s.User
	}

	// The request's: consumer, and what it adds. It names inputs and a host for a portable
	// form alone (formFor). Name and time to live are the request's.
	spec.Inputs = merge(spec.Inputs, req.Inputs)
	spec.Env = merge(spec.Env, req.Env)
	spec.Labels = merge(prof.Labels, req.Labels)
	spec.Consumer = req.Consumer
	if as == sandboxer.SnapshotPortable {
		spec.Host = req.Host
	}
	return spec
}

// formFor settles in which form rec is restored on a profile.
func formFor(rec *sandboxer.SnapshotRecord, prof sandboxer.Profile, req RestoreRequest) (sandboxer.SnapshotKind, error) {
	native := rec.Kind.Has(sandboxer.SnapshotNative) && rec.Extension == prof.Extension
	portable := rec.Kind.Has(sandboxer.SnapshotPortable)
	otherwise := len(req.Inputs) > 0 || req.Host != ""
	switch req.Kind {
	case "":
		switch {
		case native && !(otherwise && portable):
		case portable:
			return sandboxer.SnapshotPortable, nil
		default:
			return "", sandboxer.E(sandboxer.Unsupported, nil, "snapshot %s is native to %s, and %s is on %s", rec.ID, rec.Extension, prof.ID, prof.Extension).
				WithHint("restore it on a profile of %s, or make a portable one of its sandbox", rec.Extension)
		}
	case sandboxer.SnapshotNative:
		if !native {
			return "", sandboxer.E(sandboxer.Unsupported, nil, "snapshot %s has no form that is native to %s", rec.ID, prof.Extension).
				WithHint("leave out the kind, or choose another profile")
		}
	case sandboxer.SnapshotPortable:
		if portable {
			return sandboxer.SnapshotPortable, nil
		}
		return "", sandboxer.E(sandboxer.Unsupported, nil, "snapshot %s has no portable form", rec.ID).
			WithHint("leave out the kind, or make a portable one of its sandbox")
	default:
		return "", sandboxer.E(sandboxer.Invalid, nil, "%q is not a form to restore: want native or portable", req.Kind)
	}
	if otherwise {
		return "", sandboxer.E(sandboxer.Unsupported, nil, "the native form of snapshot %s goes on with the inputs and on the host of its source", rec.ID).
			WithHint("restore its portable form, or leave out inputs and host")
	}
	return sandboxer.SnapshotNative, nil
}

// canPlace refuses a portable snapshot on a profile whose extension has no way to bring its files, or no place for
// its volumes.
func (m *Manager) canPlace(rec *sandboxer.SnapshotRecord, prof sandboxer.Profile) error {
	b, err := m.backend(prof.Extension)
	if err != nil {
		if len(rec.Portable.Volumes) == 0 {
			err = nil // whoever makes it tells
		}
		return err
	}
	if !b.Can(sandboxer.CanCheckpoint) && !b.Can(sandboxer.CanArchive) {
		return backend.LacksRestore(prof.Extension).WithHint("a portable snapshot is an archive of a sandbox's files, and it takes none")
	}
	if len(rec.Portable.Volumes) > 0 && !b.Can(sandboxer.CanCheckpoint) {
		err = sandboxer.E(sandboxer.Unsupported, nil, "snapshot %s holds the volumes %s, and %s cannot place any", rec.ID, strings.Join(rec.Portable.Volumes, ", "), prof.Extension).
			WithHint("restore it on a profile of the kind that it was made on, or make a snapshot of a sandbox that keeps no volumes")
	}
	return err
}

// inputsFor keeps those inputs that the extension declares.
func inputsFor(declared []sandboxer.Input, have map[string]string) map[string]string {
	out := map[string]string{}
	for name, value := range have {
		if _, ok := sandboxer.DeclarationOf(declared, name); ok && name != "sandbox_id" {
			out[name] = value
		}
	}
	return out
}

// sourceOf names the snapshot that the object of sb is made from, or "".
func sourceOf(sb *sandboxer.Sandbox) string {
	switch {
	case isPaused(sb):
		return sb.Pause.Snapshot
	case sb.RestoredAs == sandboxer.SnapshotNative:
		return sb.RestoredFrom
	case sb.RestoredAs == sandboxer.SnapshotPortable && sb.ReadyAt.IsZero():
		return sb.RestoredFrom
	}
	return ""
}

// isNative reports whether that snapshot is taken in the form that is its extension's own.
func isNative(sb *sandboxer.Sandbox) bool {
	return isPaused(sb) || sb.RestoredAs == sandboxer.SnapshotNative
}

// A sourceError is why what a sandbox is restored from cannot be had: no host is to blame, and
// none heard of it.
type sourceError struct{ error }

func (e *sourceError) Unwrap() error { return e.error }

// restore makes the object of spec from the snapshot's native form, or from the portable
// one where the extension takes that; elsewhere its files come once it is ready.
func (m *Manager) restore(ctx context.Context, b *backend.Backend, spec sandboxer.Spec, from string, native bool) (h sandboxer.Handle, err error) {
	rec, err := m.store.Snapshot(ctx, from)
	switch {
	case isKind(err, sandboxer.NotFound):
		return h, sandboxer.E(sandboxer.Failed, err, "the snapshot %s does not exist any more", from)
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
		err = sandboxer.E(sandboxer.Failed, err, "%s does not have the snapshot %s any more", rec.Extension, from)
	}
	return h, err
}

// unarchive fills the workspace of sb, which is ready and has never run, with what the
// snapshot holds.
func (m *Manager) unarchive(ctx context.Context, b *backend.Backend, sb *sandboxer.Sandbox) error {
	return m.step(pUnarchive, func() error {
		r, err := m.load(ctx, sb.RestoredFrom)
		if err != nil {
			return err
		}
		defer r.Close()
		return b.Unarchive(ctx, sb.Handle, sb.Spec.Workspace, r)
	})
}

// load opens the portable form of a snapshot.
func (m *Manager) load(ctx context.Context, id string) (io.ReadCloser, error) {
	if m.opts.SnapshotStore == nil {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "this installation keeps no portable snapshots any more")
	}
	return m.opts.SnapshotStore.Load(ctx, id)
}

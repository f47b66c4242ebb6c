package manager

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// RestoreRequest asks for a new sandbox from a snapshot. Zero fields take the values of
// the profile; environment and inputs are the source's, with Env and Inputs added.
type RestoreRequest struct {
	// Profile is another profile to restore on; empty means the source's. On another
	// extension only a portable snapshot can be restored.
	Profile string                 `json:"profile,omitempty"`
	Kind    sandboxer.SnapshotKind `json:"kind,omitempty"` // native or portable; empty prefers native where that can be restored
	// Inputs and Host say otherwise than the source had it, and so only for the portable form:
	// a native one goes on as it was. An empty input takes away that of the source.
	Inputs    map[string]string  `json:"inputs,omitempty"`
	Host      string             `json:"host,omitempty"`
	Name      string             `json:"name,omitempty"`
	TTL       time.Duration      `json:"ttl_ns,omitempty"`
	Consumer  sandboxer.Consumer `json:"consumer,omitzero"`
	Labels    map[string]string  `json:"labels,omitempty"`
	Env       map[string]string  `json:"env,omitempty"`
	MaxCost   sandboxer.Credits  `json:"max_cost,omitempty"`
	Key       string             `json:"-"` // idempotency key
	NoWaiting bool               `json:"-"` // answer as soon as the record is committed

	fork string // digest of the fork that this is a part of, if it is
}

// Restore makes a sandbox from a sealed snapshot and returns it running. ID, generation,
// owner, labels, tokens and time to live are its own. It is safe to repeat as Create
// is. Kinds: as Create; NotFound when the snapshot is dropped, Conflict when it is not
// sealed yet, Unsupported when its form cannot be restored there.
func (m *Manager) Restore(ctx context.Context, ref string, req RestoreRequest) (*sandboxer.Sandbox, error) {
	rec, err := m.findSnapshot(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	return m.restoreOne(ctx, rec, req)
}

func (m *Manager) restoreOne(ctx context.Context, rec *sandboxer.SnapshotRecord, req RestoreRequest) (*sandboxer.Sandbox, error) {
	o, err := m.resolveRestore(sandboxer.PrincipalFrom(ctx), rec, req)
	if err != nil {
		return nil, err
	}
	if o.key != "" {
		if sb, err := m.replay(ctx, o); sb != nil || err != nil {
			return sb, err
		}
	}
	if rec.State != sandboxer.SnapshotSealed {
		return nil, unsealed(rec)
	}
	sb, err := m.launch(ctx, o)
	if o.key != "" && isKind(err, sandboxer.Conflict) {
		if sb, err := m.replay(ctx, o); sb != nil || err != nil {
			return sb, err
		}
	}
	return sb, err
}

// resolveRestore makes an order of a restore request.
func (m *Manager) resolveRestore(p sandboxer.Principal, rec *sandboxer.SnapshotRecord, req RestoreRequest) (*order, error) {
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
	create := sandboxer.CreateRequest{
		Profile: prof.ID, Name: req.Name, TTL: req.TTL, Consumer: req.Consumer, Labels: req.Labels, Env: req.Env,
		MaxCost: req.MaxCost, Key: req.Key, NoWaiting: req.NoWaiting, Host: req.Host,
	}
	if e := m.extension(prof.Extension); e != nil {
		create.Inputs = inputsFor(e.Info.Inputs, rec.Spec.Inputs)
	}
	if prof.ID != rec.Profile {
		create.Inputs = merge(create.Inputs, prof.Inputs) // whoever names another profile means it
	}
	create.Inputs = merge(create.Inputs, req.Inputs)
	if req.Inputs["sandbox_id"] != "" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "a restored sandbox has an ID of its own, and does not take the input \"sandbox_id\"")
	}
	operator := p // what the source was allowed is not asked again
	operator.Scopes = []sandboxer.Scope{sandboxer.ScopeAdmin}
	o, err := m.resolve(operator, create)
	if err != nil {
		return nil, err
	}
	j, err := json.Marshal(req)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the request does not encode")
	}
	sum := sha256.Sum256(append([]byte(rec.ID+"\x00"), j...))
	o.digest = cmp.Or(req.fork, m.mac(hex.EncodeToString(sum[:])))
	o.tenant = rec.Tenant
	o.from, o.as = rec, as
	env, err := m.openAs(snapshotSealName(rec), "snapshot "+rec.ID, rec.SealedEnv)
	if err != nil {
		return nil, err
	}
	o.spec.Env = merge(merge(prof.Env, env), req.Env)
	if prof.ID == rec.Profile && rec.Spec.ID != "" { // as its source was, whatever has become of the profile
		s := rec.Spec
		o.spec.Image, o.spec.Command, o.spec.Limits, o.spec.Network = s.Image, s.Command, s.Limits, s.Network
		o.spec.Mounts, o.spec.Ports, o.spec.Workspace, o.spec.User = s.Mounts, s.Ports, s.Workspace, s.User
	}
	if err := m.holds(p, prof, o.spec, "snapshot "+rec.ID); err != nil {
		return nil, err
	}
	if as == sandboxer.SnapshotNative {
		o.place = rec.Host // where it lies; nobody asked for that
	}
	o.spec.Vouched = inherited(o.spec, rec.Spec)
	if p.Can(sandboxer.ScopeAdmin) {
		o.spec.Vouched = o.restricted(o.spec)
	}
	return o, nil
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

// canPlace refuses a snapshot with volumes on a profile whose extension has no place for
// them.
func (m *Manager) canPlace(rec *sandboxer.SnapshotRecord, prof sandboxer.Profile) error {
	if len(rec.Portable.Volumes) == 0 {
		return nil
	}
	b, err := m.backend(prof.Extension)
	if err == nil && !b.Can(sandboxer.CanCheckpoint) {
		err = sandboxer.E(sandboxer.Unsupported, nil, "snapshot %s holds the volumes %s, and %s cannot place any", rec.ID, strings.Join(rec.Portable.Volumes, ", "), prof.Extension).
			WithHint("restore it on a profile of the kind that it was made on, or make a snapshot of a sandbox that keeps no volumes")
	}
	return err
}

// inputsFor keeps those inputs that the extension declares.
func inputsFor(declared []sandboxer.Input, have map[string]string) map[string]string {
	out := map[string]string{}
	for _, in := range declared {
		if v, ok := have[in.Name]; ok && in.Name != "sandbox_id" {
			out[in.Name] = v
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
		err = m.step(pFrom, func() error {
			r, err := m.load(ctx, from)
			if err != nil {
				return err
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
	if m.opts.Vault == nil {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "this installation keeps no portable snapshots any more")
	}
	return m.opts.Vault.Load(ctx, id)
}

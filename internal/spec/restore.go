package spec

import (
	"cmp"
	"maps"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// Restore checks a restore of rec for p and merges it with its source and its profile, as Create does for a create. env opens
// the environment of rec when it is needed. Permissions of the source are not checked again, except those that its profile no
// longer gives. If stay is set, the restore is made on that extension.
func (s *Site) Restore(p sandboxer.Principal, rec *sandboxer.SnapshotRecord, env func() (map[string]string, error), req sandboxer.RestoreRequest, stay string) (*Resolved, error) {
	prof, err := s.restoredOn(rec, req, stay)
	if err != nil {
		return nil, err
	}
	if req.Inputs["sandbox_id"] != "" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "a restored sandbox has an ID of its own, and does not take the input \"sandbox_id\"")
	}
	if req.Consumer, err = boundConsumer(p, req.Consumer); err != nil {
		return nil, err
	}
	ask := Ask{Inputs: req.Inputs, Host: req.Host, MaxCost: req.MaxCost, Restored: true, Words: p.Can(sandboxer.ScopeAdmin)}
	if prof.ID == rec.Profile {
		ask.Limits, ask.Network = rec.Spec.Limits, &rec.Spec.Network
	}
	return s.resolve(prof, ask, func(prof sandboxer.Profile, e *Extension) (*Resolved, error) {
		return s.restoreOn(p, prof, e, rec, env, req)
	})
}

// restoreOn is Restore on one candidate.
func (s *Site) restoreOn(p sandboxer.Principal, prof sandboxer.Profile, e *Extension, rec *sandboxer.SnapshotRecord, env func() (map[string]string, error), req sandboxer.RestoreRequest) (*Resolved, error) {
	as, err := s.restoredAs(rec, prof, req)
	if err != nil {
		return nil, err
	}
	saved, err := env()
	if err != nil {
		return nil, err
	}
	if prof, err = withExpiry(prof, req.Idle, req.OnIdle, req.OnTTL); err == nil {
		prof, err = withTTL(prof, req.TTL)
	}
	if err != nil {
		return nil, err
	}
	spec := s.restoredSpec(e, prof, rec, saved, req, as)
	if spec.Credential, err = e.restoredKey(rec, as, p.Consumer); err != nil {
		return nil, err
	}
	sized := req
	sized.Inputs = spec.Inputs
	v := View{Profile: prof, Inputs: e.Info.Inputs}
	if spec.Inputs, _, err = v.inputs(spec.Inputs, spec.Host, spec.Image); err != nil {
		return nil, err
	}
	shown, _, err := identify(spec.Inputs, sandboxer.Thread{}) // its profile may name one
	if err != nil {
		return nil, err
	}
	spec.ID = newID(rec.Tenant, shown)
	secrets := maps.Clone(rec.Secrets)
	maps.DeleteFunc(secrets, func(variable string, _ sandboxer.SecretRef) bool { _, given := req.Env[variable]; return given })
	err = cmp.Or(
		checkCommon(prof, commonRequest{name: req.Name, key: req.Key, ttl: req.TTL, env: req.Env, labels: req.Labels, maxCost: req.MaxCost}),
		s.mayPause(prof.Extension, req.OnIdle, req.OnTTL),
		checkSize(sized),
		s.CheckStillAllowed(p, prof, spec, secrets, "snapshot "+rec.ID),
	)
	if err != nil {
		return nil, err
	}
	spec.Vouched = keptRestrictions(spec, rec.Spec)
	if p.Can(sandboxer.ScopeAdmin) {
		spec.Vouched = e.Restricted(spec)
	}
	r := &Resolved{
		Tenant: rec.Tenant, Actor: p.Actor, ID: spec.ID, Shown: shown, Name: req.Name, Extension: e.Info.ID, Spec: spec,
		TTL: lifecycle.LifeOf(prof, req.TTL), MaxCost: req.MaxCost,
		Key: req.Key, Digest: s.kept(restoreDigest(rec.ID, req)), NoWaiting: req.NoWaiting,
		From: rec, As: as, Secrets: secrets,
	}
	if as == sandboxer.SnapshotNative {
		r.Place = rec.Host // it is there; no caller asked for that
	}
	return r, nil
}

// restoredOn returns the profile on which rec is restored; with stay, reduced to that extension.
func (s *Site) restoredOn(rec *sandboxer.SnapshotRecord, req sandboxer.RestoreRequest, stay string) (sandboxer.Profile, error) {
	target := cmp.Or(req.Profile, rec.Profile)
	if target == "" {
		return sandboxer.Profile{}, sandboxer.E(sandboxer.Invalid, nil, "snapshot %s belongs to a profile that does not exist here", rec.ID).
			WithHint("name the profile to restore it on: --profile")
	}
	prof, err := FindProfile(s.Profiles, target)
	if err != nil || stay == "" || prof.Route == nil {
		return prof, err
	}
	on, ok := prof.On(stay)
	if !ok {
		return on, LeftRoute(prof, stay)
	}
	if e := s.extension(stay); e != nil {
		on.Inputs = taken(e.Info.Inputs, on.Inputs)
	}
	return on, nil
}

// LeftRoute is the error for a sandbox on an extension that its profile p no longer lists. Kind: Denied.
func LeftRoute(p sandboxer.Profile, extension string) error {
	return sandboxer.E(sandboxer.Denied, nil, "profile %s no longer routes to extension %s", p.ID, extension).
		WithHint("ask an administrator to add it to the route of the profile again")
}

// restoredAs returns the form in which rec is restored on a profile.
func (s *Site) restoredAs(rec *sandboxer.SnapshotRecord, prof sandboxer.Profile, req sandboxer.RestoreRequest) (sandboxer.SnapshotKind, error) {
	as, err := formFor(rec, prof, req)
	if err == nil && as == sandboxer.SnapshotPortable {
		err = s.canPlace(rec, prof)
	}
	return as, err
}

// restoredSpec merges the values of the source into those of the profile. Inputs are the requested ones, not yet checked; ID
// and Vouched are not set yet.
func (s *Site) restoredSpec(e *Extension, prof sandboxer.Profile, rec *sandboxer.SnapshotRecord, env map[string]string, req sandboxer.RestoreRequest, as sandboxer.SnapshotKind) sandboxer.Spec {
	spec := s.ProfileSpec(prof)

	// From the source come the environment and the inputs that the extension takes. On its own profile a restored sandbox has
	// all values of its source, even if the profile has changed.
	spec.Inputs = inputsFor(e.Info.Inputs, rec.Spec.Inputs)
	spec.Env = merge(prof.Env, env)
	if prof.ID != rec.Profile {
		spec.Inputs = merge(spec.Inputs, prof.Inputs) // a caller that names another profile means it
	} else if source := rec.Spec; source.ID != "" { // not an imported one, which has no spec
		if prof.Extension == rec.Extension || !s.isRouted(prof.ID) { // another candidate has its own images
			spec.Image = source.Image
		}
		spec.Command, spec.Limits, spec.Network = source.Command, source.Limits, source.Network
		spec.Mounts, spec.Ports, spec.Workspace, spec.User = source.Mounts, source.Ports, source.Workspace, source.User
	}

	// From the request come the consumer, the name, the time to live and additional values. It may name inputs and a host only
	// for a portable form (formFor).
	spec.Inputs = merge(spec.Inputs, req.Inputs)
	spec.Env = merge(spec.Env, req.Env)
	spec.Labels = merge(prof.Labels, req.Labels)
	spec.Consumer = req.Consumer
	if as == sandboxer.SnapshotPortable {
		spec.Host = req.Host
	}
	return spec
}

// isRouted reports whether the profile of that ID has several extensions.
func (s *Site) isRouted(id string) bool {
	p, err := FindProfile(s.Profiles, id)
	return err == nil && p.Route != nil
}

// formFor decides in which form rec is restored on a profile.
func formFor(rec *sandboxer.SnapshotRecord, prof sandboxer.Profile, req sandboxer.RestoreRequest) (sandboxer.SnapshotKind, error) {
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
		return "", sandboxer.E(sandboxer.Unsupported, nil, "the native form of snapshot %s keeps the inputs and the host of its source", rec.ID).
			WithHint("restore its portable form, or leave out inputs and host")
	}
	return sandboxer.SnapshotNative, nil
}

// canPlace refuses a portable snapshot if the extension of the profile cannot unpack its files or place its volumes.
func (s *Site) canPlace(rec *sandboxer.SnapshotRecord, prof sandboxer.Profile) error {
	b, err := s.backend(prof.Extension)
	if err != nil {
		if len(rec.Portable.Volumes) == 0 {
			err = nil // making it reports that
		}
		return err
	}
	if !b.Can(sandboxer.CanCheckpoint) && !b.Can(sandboxer.CanArchive) {
		return backend.LacksRestore(prof.Extension).WithHint("a portable snapshot is an archive of a sandbox's files, and the extension cannot restore archives")
	}
	if len(rec.Portable.Volumes) > 0 && !b.Can(sandboxer.CanCheckpoint) {
		err = sandboxer.E(sandboxer.Unsupported, nil, "snapshot %s holds the volumes %s, and %s cannot place any", rec.ID, strings.Join(rec.Portable.Volumes, ", "), prof.Extension).
			WithHint("restore it on a profile like that of its source, or make a snapshot of a sandbox that keeps no volumes")
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

package manager

import (
	"context"
	"reflect"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// A profileSet is what can be asked for at one time, with the pools that belong to it.
// It never changes; SetProfiles puts another in its place.
type profileSet struct {
	profiles []sandboxer.Profile
	pools    []*pool
}

// SetProfiles checks profiles against the extensions they name and offers them from
// now on instead of those before; sandboxes that exist keep what they were made with. When
// anything is wrong, nothing changes: all faults found are in the one Invalid error.
func (m *Manager) SetProfiles(profiles []sandboxer.Profile) error {
	m.settingProfiles.Lock()
	defer m.settingProfiles.Unlock()
	var faults []string
	next := &profileSet{profiles: slices.Clone(profiles)}
	for i, p := range next.profiles {
		if slices.ContainsFunc(next.profiles[:i], func(q sandboxer.Profile) bool { return q.ID == p.ID }) {
			faults = append(faults, "profile "+p.ID+" exists twice")
		}
		if fault := m.checkProfile(p); fault != "" {
			faults = append(faults, fault)
		}
		if p.Pool.Size > 0 {
			// What is remembered of a pool holds as long as its profile is the same.
			if old := m.poolOf(p.ID); old != nil && reflect.DeepEqual(old.profile, p) {
				next.pools = append(next.pools, old)
				continue
			}
			next.pools = append(next.pools, &pool{profile: p})
		}
	}
	if len(faults) > 0 {
		return sandboxer.E(sandboxer.Invalid, nil, "%s", strings.Join(faults, "\n"))
	}
	m.catalogue.Store(next)
	m.serveAll()  // there may be more room
	m.wakePools() // what waits for a profile that changed is removed
	return nil
}

// checkProfile says what is wrong with p, or "". An extension that could not be
// opened on this machine makes its profiles unusable, not wrong.
func (m *Manager) checkProfile(p sandboxer.Profile) string {
	e := m.extension(p.Extension)
	if e == nil {
		return "profile " + p.ID + " is on extension " + p.Extension + ", which does not exist" + didYouMean(p.Extension, m.extensionIDs())
	}
	if err := p.Ready.Check(); err != nil {
		return "profile " + p.ID + ": ready: " + sandboxer.Message(err)
	}
	if e.Backend == nil {
		return ""
	}
	candidates, refused := route(p, []ability{e.ability()})
	if len(candidates) == 0 {
		return "profile " + p.ID + ": " + refused[0].why
	}
	if p.Pool.Size > 0 && !e.Backend.Can(sandboxer.CanPool) {
		return "profile " + p.ID + " keeps a pool, which extension " + p.Extension + " cannot"
	}
	return ""
}

// Profiles lists the profiles in the order given to New, or to SetProfiles since. Without the admin scope
// the values of their environments are left out.
func (m *Manager) Profiles(ctx context.Context) []sandboxer.Profile {
	p, err := may(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil
	}
	out := slices.Clone(m.catalogue.Load().profiles)
	if !p.Can(sandboxer.ScopeAdmin) {
		for i := range out {
			out[i].Env = nil
		}
	}
	return out
}

// profile finds a profile by its ID, with or without the prefix.
func (m *Manager) profile(id string) (sandboxer.Profile, error) {
	var ids []string
	for _, p := range m.catalogue.Load().profiles {
		if p.ID == id || p.ID == "profile."+id {
			return p, nil
		}
		ids = append(ids, p.ID)
	}
	if id == "" {
		return sandboxer.Profile{}, sandboxer.E(sandboxer.Invalid, nil, "no profile given").WithHint("choose one of: %s", join(ids))
	}
	return sandboxer.Profile{}, sandboxer.E(sandboxer.Invalid, nil, "profile %q does not exist%s", id, didYouMean(id, ids)).
		WithHint("the profiles are: %s", join(ids))
}

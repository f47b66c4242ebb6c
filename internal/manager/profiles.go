package manager

import (
	"context"
	"reflect"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/spec"
)

// A profileSet has the profiles that are offered at one time, with the pools that belong to it.
// It never changes; SetProfiles replaces it.
type profileSet struct {
	profiles []sandboxer.Profile
	pools    []*pool
}

// SetProfiles checks profiles against the extensions they name and offers them from
// now on instead of the former ones. Existing sandboxes keep what they were made with. If
// anything is wrong, nothing changes: all faults found are in the one Invalid error.
func (m *Manager) SetProfiles(profiles []sandboxer.Profile) error {
	m.settingProfiles.Lock()
	defer m.settingProfiles.Unlock()
	var faults []string
	site := m.site()
	next := &profileSet{profiles: slices.Clone(profiles)}
	for i, p := range next.profiles {
		if slices.ContainsFunc(next.profiles[:i], func(q sandboxer.Profile) bool { return q.ID == p.ID }) {
			faults = append(faults, "profile "+p.ID+" exists twice")
		}
		if fault := site.CheckProfile(p); fault != "" {
			faults = append(faults, fault)
		}
		if p.Pool.Size > 0 {
			// The state of a pool is kept as long as its profile does not change.
			first := p.Candidates()[0]
			if old := m.poolOf(p.ID); old != nil && reflect.DeepEqual(old.profile, first) {
				next.pools = append(next.pools, old)
				continue
			}
			next.pools = append(next.pools, &pool{m: m, profile: first})
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

// Profiles lists the profiles in the order given to New, or to SetProfiles since. Without the admin scope
// the values of their environments are left out.
func (m *Manager) Profiles(ctx context.Context) []sandboxer.Profile {
	p, err := access.May(ctx, sandboxer.ScopeRead)
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
	return spec.FindProfile(m.catalogue.Load().profiles, id)
}

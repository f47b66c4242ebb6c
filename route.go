package sandboxer

import (
	"cmp"
	"maps"
	"slices"
)

// Route lets a profile be served by one of several extensions. For each request the first candidate that
// can serve it is chosen; Policy says what happens if that one has no room or cannot be reached.
type Route struct {
	Policy     RoutePolicy     `json:"policy"`
	Prefer     RoutePreference `json:"prefer,omitempty"`
	Candidates []Candidate     `json:"candidates"` // 1 to MaxCandidates, each of another extension
}

// MaxCandidates bounds the candidates of one route.
const MaxCandidates = 32

// RoutePolicy says what happens to a request whose candidate has no room.
type RoutePolicy string

// The policies.
const (
	RouteWait   RoutePolicy = "wait"   // it waits for room, as long as Profile.Wait says
	RouteReject RoutePolicy = "reject" // it is refused at once, as Exhausted
	RouteBurst  RoutePolicy = "burst"  // the next candidate serves it; also if one cannot be reached
)

// RoutePolicies lists every policy.
func RoutePolicies() []RoutePolicy { return []RoutePolicy{RouteWait, RouteReject, RouteBurst} }

// RoutePreference is the order of candidates, where it is not that of the list.
type RoutePreference string

// PreferPrice puts self-hosted extensions before metered ones, and the lower price first. A price that is
// not known comes last.
const PreferPrice RoutePreference = "price"

// RoutePreferences lists every preference.
func RoutePreferences() []RoutePreference { return []RoutePreference{PreferPrice} }

// Candidate is one extension of a route, with its own bounds. They hold for every caller: this candidate refuses a request that
// exceeds them.
type Candidate struct {
	Extension string            `json:"extension"`         // "ext.<name>"
	Image     string            `json:"image,omitempty"`   // instead of the profile's; no other can be requested
	Limits    Limits            `json:"limits,omitzero"`   // the highest limits, and the default where the profile has none or a higher one
	Network   *NetworkPolicy    `json:"network,omitempty"` // instead of the profile's
	Inputs    map[string]string `json:"inputs,omitempty"`  // instead of the profile's; no other values can be requested
	Price     *Price            `json:"price,omitempty"`   // instead of the profile's
}

// Candidates returns the profile as it is on each extension that may serve it, in the order listed: these
// profiles have an extension and no route.
func (p Profile) Candidates() []Profile {
	if p.Route == nil {
		return []Profile{p}
	}
	all := make([]Profile, len(p.Route.Candidates))
	for i := range p.Route.Candidates {
		all[i] = p.Route.Candidates[i].of(p)
	}
	return all
}

// On returns the profile as it is on the extension, and whether the extension may serve it.
func (p Profile) On(extension string) (Profile, bool) {
	if p.Route == nil {
		return p, p.Extension == extension
	}
	i := slices.IndexFunc(p.Route.Candidates, func(c Candidate) bool { return c.Extension == extension })
	if i < 0 {
		return p, false
	}
	return p.Route.Candidates[i].of(p), true
}

// Extensions lists the extensions that may serve the profile, in the order listed.
func (p Profile) Extensions() []string {
	if p.Route == nil {
		return []string{p.Extension}
	}
	var ids []string
	for _, c := range p.Route.Candidates {
		ids = append(ids, c.Extension)
	}
	return ids
}

// of is the profile p as it is on c.
func (c *Candidate) of(p Profile) Profile {
	p.Route, p.Extension = nil, c.Extension
	p.Image = cmp.Or(c.Image, p.Image)
	p.MaxLimits = c.Limits.Or(p.MaxLimits.Or(p.Limits))
	p.Limits = p.Limits.Or(c.Limits).lowered(c.Limits)
	if c.Network != nil {
		p.Network = *c.Network
	}
	if len(c.Inputs) > 0 {
		inputs := maps.Clone(p.Inputs)
		if inputs == nil {
			inputs = map[string]string{}
		}
		maps.Copy(inputs, c.Inputs)
		p.Inputs = inputs
	}
	if c.Price != nil {
		p.Price = *c.Price
	}
	return p
}

// lowered returns l with no field above that of most, where 0 means no bound.
func (l Limits) lowered(most Limits) Limits {
	least := func(have, most int64) int64 {
		if most > 0 && have > most {
			return most
		}
		return have
	}
	return Limits{
		MilliCPU: least(l.MilliCPU, most.MilliCPU), MemoryBytes: least(l.MemoryBytes, most.MemoryBytes),
		DiskBytes: least(l.DiskBytes, most.DiskBytes), PIDs: least(l.PIDs, most.PIDs), GPUs: int(least(int64(l.GPUs), int64(most.GPUs))),
	}
}

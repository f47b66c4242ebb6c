package catalog

import (
	"fmt"
	"slices"

	"github.com/sand-boxer/sandboxer"
)

// routeForm is the file form of a route.
type routeForm struct {
	Policy     sandboxer.RoutePolicy     `yaml:"policy" required:"true" help:"What happens to a request for which the candidate has no room: wait (as long as wait says), reject (it is refused at once) or burst (the next candidate serves it, also where one cannot be reached)."`
	Prefer     sandboxer.RoutePreference `yaml:"prefer" help:"price: self-hosted extensions first, and among them and the others the lowest price; without it the order of the list."`
	Candidates []candidateForm           `yaml:"candidates" required:"true" nonempty:"true" help:"The extensions, at most 32; the first that can serve a request does."`
}

// candidateForm is the file form of one candidate.
type candidateForm struct {
	Extension string            `yaml:"extension" required:"true" format:"extension" help:"The extension that makes its sandboxes."`
	Image     string            `yaml:"image" format:"image" help:"Image there, instead of the profile's; a request cannot name another."`
	Limits    limitsForm        `yaml:"limits" help:"The highest limits there, for every caller."`
	Network   *networkForm      `yaml:"network" short:"none,public" help:"What a sandbox may reach there; at most what the profile allows."`
	Inputs    map[string]string `yaml:"inputs" text:"any" help:"Inputs there, instead of the profile's; a request cannot give other values."`
	Price     *priceForm        `yaml:"price" help:"Price that tenants pay there if the extension quotes none."`
}

// route translates, and reports faults that no single field shows. p is the profile without its route.
func (f *routeForm) route(d *decoder, p sandboxer.Profile) *sandboxer.Route {
	if f == nil {
		return nil
	}
	r := &sandboxer.Route{Policy: f.Policy, Prefer: f.Prefer}
	switch {
	case d.places["extension"].key != nil:
		d.faultKey("route", "", "a profile has either extension or route")
	case f.Policy == sandboxer.RouteWait && p.Wait == 0 && d.places["wait"].key == nil:
		d.fault("route.policy", "", "the policy wait needs a time to wait: name one (wait)")
	case f.Policy != sandboxer.RouteWait && p.Wait != 0:
		d.faultKey("wait", "", "a time to wait has no effect with the policy %s", f.Policy)
	case f.Prefer != "" && p.Pool.Size > 0:
		d.faultKey("pool", "", "a pool holds sandboxes of the first candidate, and with a preference another one may come first: leave out one of them")
	}
	if len(f.Candidates) > sandboxer.MaxCandidates {
		d.faultKey("route.candidates", "", "%d candidates are too many: want at most %d", len(f.Candidates), sandboxer.MaxCandidates)
	}
	for i, c := range f.Candidates {
		r.Candidates = append(r.Candidates, c.candidate(d, candidatePath(i), p))
		if c.Extension != "" && slices.ContainsFunc(f.Candidates[:i], func(o candidateForm) bool { return o.Extension == c.Extension }) {
			d.fault(candidatePath(i)+".extension", "", "%s is already a candidate", c.Extension)
		}
	}
	return r
}

func candidatePath(i int) string { return fmt.Sprintf("route.candidates[%d]", i) }

func (f candidateForm) candidate(d *decoder, path string, p sandboxer.Profile) sandboxer.Candidate {
	c := sandboxer.Candidate{Extension: f.Extension, Image: f.Image, Limits: f.Limits.limits(), Inputs: f.Inputs}
	err := c.Limits.Check()
	if err == nil {
		err = c.Limits.Within(p.MaxLimits, "max_limits")
	}
	if err != nil {
		d.faultKey(path+".limits", "", "%s", sandboxer.Message(err))
	}
	if f.Network != nil {
		policy := f.Network.policy(d, path+".network")
		c.Network = &policy
		if err := policy.Within(p.Network); err != nil {
			d.fault(path+".network", "", "%s", sandboxer.Message(err))
		}
	}
	if f.Price != nil {
		c.Price = &sandboxer.Price{Setup: f.Price.Setup, PerHour: f.Price.PerHour}
	}
	return c
}

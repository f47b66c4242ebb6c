package spec

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// A View has the facts about one candidate when a request is routed. Unknown facts are zero and refuse nothing.
type View struct {
	Profile   sandboxer.Profile   // as it is on the candidate, with its extension
	Bounds    sandboxer.Candidate // what its route sets; zero without a route
	Problem   string              // why the extension cannot be used now: the backend's words
	Can       []sandboxer.Capability
	Isolation []sandboxer.Isolation
	Inputs    []sandboxer.Input
	Metered   bool

	Refusal error     // what our own rules refuse there
	Check   error     // what the backend refuses: its words
	Full    error     // no room on the extension or in the profile
	RetryAt time.Time // not zero: the extension fails, and is left alone until then

	RetryAfter time.Duration // with RetryAt: how long that is

	Asked bool               // the backend was asked for Check and Price
	Price *sandboxer.Credits // for TTL; nil if it is not known
	Says  string             // of the backend, with its quote
	TTL   time.Duration      // of the sandbox there
}

// An Ask is the part of a request that decides about candidates.
type Ask struct {
	Inputs   map[string]string
	Host     string
	Image    string
	Limits   sandboxer.Limits
	Network  *sandboxer.NetworkPolicy
	MaxCost  sandboxer.Credits // 0 is no bound
	Restored bool              // the source gives inputs, too
	Words    bool              // the caller may read the words of backends: an administrator
}

// A Choice is a candidate with its verdict. Err is why it is refused.
type Choice struct {
	sandboxer.RouteChoice
	At  int // index of its view
	Err error
}

// A Routing is a request on every candidate of its profile.
type Routing struct {
	Profile sandboxer.Profile // with its route
	Ask     Ask
	Views   []View
	On      []*Resolved // the request as it is there; nil where it is refused
}

// Route returns the verdict on each candidate, by the facts that are known now.
func (r *Routing) Route() []Choice { return Route(r.Profile, &r.Ask, r.Views) }

// Chosen returns the view of the chosen candidate, or the error that explains why there is none.
func (r *Routing) Chosen(choices []Choice) (at int, err error) {
	for _, c := range choices {
		if c.Verdict == sandboxer.RouteChosen {
			return c.At, nil
		}
	}
	return 0, refusedByAll(r.Profile, choices, r.Ask.Words)
}

// resolve checks the request on each candidate of the profile, by on, and returns it on the chosen one. The answers of backends
// are not known yet.
func (s *Site) resolve(p sandboxer.Profile, ask Ask, on func(sandboxer.Profile, *Extension) (*Resolved, error)) (*Resolved, error) {
	r := &Routing{Profile: p, Ask: ask, Views: s.views(p)}
	r.On = make([]*Resolved, len(r.Views))
	for _, c := range r.Route() {
		if c.Verdict == sandboxer.RouteRefused && c.Reason != sandboxer.WhyPolicy {
			continue
		}
		v := &r.Views[c.At]
		if r.On[c.At], v.Refusal = on(v.Profile, s.extension(v.Profile.Extension)); v.Refusal == nil {
			v.TTL = r.On[c.At].TTL
		}
	}
	at, err := r.Chosen(r.Route())
	if err != nil {
		return nil, err
	}
	for _, o := range r.On {
		if o != nil {
			o.Routing = r
		}
	}
	return r.On[at], nil
}

// views returns the views of the candidates of p, with the facts about their extensions.
func (s *Site) views(p sandboxer.Profile) []View {
	views := make([]View, 0, 1)
	for i, on := range p.Candidates() {
		v := View{Profile: on, Problem: "it is not configured"}
		if p.Route != nil {
			v.Bounds = p.Route.Candidates[i]
		}
		if e := s.extension(on.Extension); e != nil {
			v.Problem, v.Isolation, v.Inputs, v.Metered = e.Info.Problem, e.Info.Isolation, e.Info.Inputs, e.Info.Pricing == sandboxer.PricingMetered
			if e.Backend != nil {
				v.Can = e.Backend.Capabilities()
			}
		}
		if p.Route != nil { // what only other candidates take
			v.Profile.Inputs = taken(v.Inputs, on.Inputs)
		}
		views = append(views, v)
	}
	return views
}

// taken returns those of a profile's inputs that an extension with these declarations accepts.
func taken(declared []sandboxer.Input, inputs map[string]string) map[string]string {
	out := inputsFor(declared, inputs)
	if id, ok := inputs["sandbox_id"]; ok {
		out["sandbox_id"] = id
	}
	return out
}

// Route decides which candidate of p serves a request, by the view of each. It returns the candidates in the order in which
// they were considered; at most one is chosen.
func Route(p sandboxer.Profile, ask *Ask, views []View) []Choice {
	out := make([]Choice, 0, len(views))
	policy, served, stopped := sandboxer.RouteBurst, "", ""
	if p.Route != nil {
		policy = p.Route.Policy
	}
	for _, at := range order(p, views) {
		v := &views[at]
		c := Choice{At: at}
		c.Extension, c.Price = v.Profile.Extension, v.Price
		why, detail, err := v.judge(ask)
		waits := why == sandboxer.WhyFull && policy == sandboxer.RouteWait
		switch {
		case why != "" && !waits:
			c.Verdict, c.Reason, c.Detail, c.Err = sandboxer.RouteRefused, why, detail, err
			if v.Check != nil && err == v.Check || v.Full != nil && err == v.Full {
				c.Words = sandboxer.Message(err)
			} else if why == sandboxer.WhyUnusable {
				c.Words = v.Problem
			}
			if why.MayPass() && policy != sandboxer.RouteBurst && served == "" && stopped == "" {
				stopped = c.Extension
			}
		case served != "":
			c.Verdict, c.Reason, c.Detail = sandboxer.RouteStandby, sandboxer.WhyLater, served+" serves the request"
		case stopped != "":
			c.Verdict, c.Reason = sandboxer.RouteRefused, sandboxer.WhyPolicy
			c.Detail = fmt.Sprintf("the policy %s does not go on to it from %s; try again later, or have the operator change the policy", policy, stopped)
			c.Err = sandboxer.E(sandboxer.Unavailable, nil, "%s", c.Detail)
		default:
			served, c.Verdict = c.Extension, sandboxer.RouteChosen
			c.Reason, c.Detail = chosenFor(p, waits)
		}
		if v.Says != "" && p.Route != nil && c.Verdict != sandboxer.RouteRefused {
			c.Detail += ": " + v.Says
		}
		out = append(out, c)
	}
	return out
}

func chosenFor(p sandboxer.Profile, waits bool) (sandboxer.RouteReason, string) {
	switch {
	case p.Route == nil:
		return sandboxer.WhyOnly, "the profile is on it"
	case waits:
		return sandboxer.WhyWaits, fmt.Sprintf("it has no room now, and the request waits for it up to %s; ask for less, or try when a sandbox has ended", sandboxer.FormatDuration(p.Wait))
	case p.Route.Prefer == sandboxer.PreferPrice:
		return sandboxer.WhyCheapest, "it is the first candidate by price that can serve the request"
	}
	return sandboxer.WhyFirst, "it is the first candidate that can serve the request"
}

// order is the order in which the views are considered.
func order(p sandboxer.Profile, views []View) []int {
	all := make([]int, len(views))
	for i := range all {
		all[i] = i
	}
	if p.Route == nil || p.Route.Prefer != sandboxer.PreferPrice {
		return all
	}
	last := func(b bool) int {
		if b {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(all, func(i, j int) int {
		a, b := &views[i], &views[j]
		c := cmp.Or(cmp.Compare(last(a.Metered), last(b.Metered)), cmp.Compare(last(a.Price == nil), last(b.Price == nil)))
		if c == 0 && a.Price != nil {
			c = cmp.Compare(*a.Price, *b.Price)
		}
		return c
	})
	return all
}

// judge returns why the candidate cannot serve the request: the reason, a sentence that says what would change it and quotes no
// backend, and the error for a profile with only this candidate. If it can, the reason is empty.
func (v *View) judge(ask *Ask) (why sandboxer.RouteReason, detail string, err error) {
	if why, text, detail := v.suits(); why != "" {
		return why, detail, sandboxer.E(sandboxer.Unavailable, nil, "profile %s cannot be used: %s", v.Profile.ID, text)
	}
	if why, err = v.takes(ask); why != "" {
		return why, plain(err), err
	}
	switch {
	case v.Refusal != nil:
		return reasonOf(v.Refusal), plain(v.Refusal), v.Refusal
	case v.Check != nil:
		why = reasonOf(v.Check)
		return why, checkDetails[why], v.Check
	case ask.MaxCost > 0 && v.Asked && v.Price == nil && v.Metered:
		err = sandboxer.E(sandboxer.NoCredit, nil, "its price is not known, and the request allows up to %s credits", ask.MaxCost).WithHint("leave out the bound, or have the operator set a price")
		return sandboxer.WhyNoPrice, plain(err), err
	case ask.MaxCost > 0 && v.Price != nil && *v.Price > ask.MaxCost:
		err = OverMaxCost(*v.Price, v.TTL, ask.MaxCost)
		return sandboxer.WhyPrice, plain(err), err
	case !v.RetryAt.IsZero():
		e := sandboxer.E(sandboxer.Unavailable, nil, "extension %s failed several times in a row, and is tried again at %s", v.Profile.Extension, v.RetryAt.UTC().Format(time.RFC3339))
		e.RetryAfter = v.RetryAfter
		return sandboxer.WhyFailing, "it failed several times in a row; try again after " + v.RetryAt.UTC().Format(time.RFC3339), e.WithHint("try again then, or use another profile")
	case v.Full != nil:
		return sandboxer.WhyFull, "it has no room now; try again when a sandbox has ended, or ask an administrator for more room", v.Full
	}
	return "", "", nil
}

// OverMaxCost is the error for a sandbox that costs more for its time to live than the request allows.
func OverMaxCost(cost sandboxer.Credits, ttl time.Duration, most sandboxer.Credits) error {
	return sandboxer.E(sandboxer.NoCredit, nil, "it would cost up to %s credits for %s, more than the %s you allow", cost, ttl, most).
		WithHint("allow more, or ask for a shorter time to live")
}

// checkDetails are the sentences that tenants see if a backend refused a request.
var checkDetails = map[sandboxer.RouteReason]string{
	sandboxer.WhyNotAllowed:  "it does not allow what the request asks for; leave out inputs, image, host or mounts that are restricted",
	sandboxer.WhyUnsupported: "its backend cannot do what the request asks for; ask for less",
	sandboxer.WhyInvalid:     "its backend refuses the request; change the request",
	sandboxer.WhyFull:        "its backend has no room now; try again later",
	sandboxer.WhyUnavailable: "its backend cannot be asked now; try again later",
	sandboxer.WhyPrice:       "its provider is not paid; an administrator can see why",
}

// reasonOf is the reason for a refusal that is err.
func reasonOf(err error) sandboxer.RouteReason {
	switch sandboxer.KindOf(err) {
	case sandboxer.Denied:
		return sandboxer.WhyNotAllowed
	case sandboxer.Unsupported:
		return sandboxer.WhyUnsupported
	case sandboxer.Exhausted:
		return sandboxer.WhyFull
	case sandboxer.NoCredit:
		return sandboxer.WhyPrice
	case sandboxer.Unavailable, sandboxer.Timeout, sandboxer.Canceled, sandboxer.Internal:
		return sandboxer.WhyUnavailable
	}
	return sandboxer.WhyInvalid
}

// suits returns why the extension cannot keep the promises of the profile, whatever the request: the reason, a text for
// administrators, and a sentence that says what would change it and quotes no backend.
func (v *View) suits() (why sandboxer.RouteReason, text, detail string) {
	p, id := v.Profile, v.Profile.Extension
	var missing []string
	for _, c := range p.Requires {
		if !slices.Contains(v.Can, c) {
			missing = append(missing, string(c))
		}
	}
	switch {
	case v.Problem != "":
		why, text, detail = sandboxer.WhyUnusable, fmt.Sprintf("extension %s cannot be used here: %s", id, v.Problem), "it cannot be used now; an administrator can see why"
	case len(missing) > 0:
		why, text = sandboxer.WhyLacks, fmt.Sprintf("extension %s lacks %s, which the profile requires", id, strings.Join(missing, ", "))
	case p.Ready.Lacks(v.Can) != "":
		why, text = sandboxer.WhyLacks, fmt.Sprintf("extension %s lacks %s, which the profile's readiness check needs", id, p.Ready.Lacks(v.Can))
	case p.Isolation != "" && !slices.Contains(v.Isolation, p.Isolation):
		why, text = sandboxer.WhyIsolation, fmt.Sprintf("extension %s does not isolate by %s (it gives %s)", id, p.Isolation, suggest.List(v.Isolation))
	default:
		return "", "", ""
	}
	return why, text, cmp.Or(detail, text+"; an administrator has to change the profile")
}

// takes returns which part of the request the candidate does not accept.
func (v *View) takes(ask *Ask) (sandboxer.RouteReason, error) {
	if _, why, err := v.inputs(ask.Inputs, ask.Host, ask.Image); err != nil && !(ask.Restored && why == sandboxer.WhyMissingInput) {
		return why, err
	}
	b := &v.Bounds
	for _, name := range slices.Sorted(maps.Keys(b.Inputs)) {
		if asked, ok := ask.Inputs[name]; ok && asked != b.Inputs[name] {
			return sandboxer.WhyFixedInput, sandboxer.E(sandboxer.Invalid, nil, "its input %q cannot be changed", name).WithHint("leave the input out")
		}
	}
	if b.Image != "" && ask.Image != "" && ask.Image != b.Image {
		return sandboxer.WhyFixedImage, sandboxer.E(sandboxer.Invalid, nil, "its image is %s, and cannot be changed", b.Image).WithHint("leave the image out")
	}
	if err := ask.Limits.Within(b.Limits, "the candidate"); err != nil {
		return sandboxer.WhyLimits, sandboxer.E(sandboxer.Invalid, err, "%s", sandboxer.Message(err)).WithHint("ask for less")
	}
	if b.Network != nil && ask.Network != nil {
		if err := ask.Network.Within(*b.Network); err != nil {
			has := strings.TrimSpace(string(cmp.Or(b.Network.Mode, sandboxer.NetworkNone)) + " " + strings.Join(b.Network.Allow, ", "))
			return sandboxer.WhyNetwork, sandboxer.E(sandboxer.Invalid, err, "its network is %s, and cannot be wider", has).WithHint("ask for less")
		}
	}
	return "", nil
}

// plain is the message of err with its hint.
func plain(err error) string {
	text := sandboxer.Message(err)
	if hint := sandboxer.HintOf(err); hint != "" {
		text += "; " + hint
	}
	return text
}

// refusedByAll is the error if no candidate of p serves a request: that of the only candidate, or that which all share, or a
// summary, which quotes backends only if words is set. Its kind is that of the first refusal that may pass, or else of the first
// refusal.
func refusedByAll(p sandboxer.Profile, choices []Choice, words bool) error {
	same := func(c Choice) bool { return c.Detail == choices[0].Detail && c.Words == "" && !c.Reason.MayPass() }
	if len(choices) == 1 || !slices.ContainsFunc(choices, func(c Choice) bool { return !same(c) }) { // a fault of the request, wherever it goes
		return choices[0].Err
	}
	first, causes := choices[0].Err, make([]error, len(choices))
	var says []string
	for i, c := range choices {
		causes[i] = c.Err
		text := c.Extension + ": " + c.Detail
		if words && c.Words != "" {
			text += " (" + c.Words + ")"
		}
		says = append(says, text)
	}
	hint := "change the request as said, or choose another profile"
	if i := slices.IndexFunc(choices, func(c Choice) bool { return c.Reason.MayPass() }); i >= 0 {
		first, hint = choices[i].Err, "try again later, change the request as said, or choose another profile"
	}
	e := sandboxer.E(sandboxer.KindOf(first), errors.Join(causes...), "profile %s has no extension for this request: %s", p.ID, strings.Join(says, ". "))
	e.RetryAfter = sandboxer.RetryAfterOf(first)
	return e.WithHint("%s", hint)
}

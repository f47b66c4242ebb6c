package manager

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/spec"
)

// A said is the answer of the backend about a creation.
type said struct {
	checked *backend.Checked // its spec, which the backend has checked
	quote   sandboxer.MeterQuote
}

// routed returns c on the candidate that serves it, with the verdicts on the others. With all, it asks the backends of all
// candidates; otherwise only those that the decision needs. failed are the extensions that could not make the sandbox, with
// their reasons.
func (c *creation) routed(ctx context.Context, all bool, failed map[string]error) (*creation, []sandboxer.RouteChoice, error) {
	r := *c.Routing
	r.Views = append([]spec.View(nil), r.Views...) // a repeated try asks again
	r.Ask.Words = r.Ask.Words && len(failed) == 0  // a record keeps why the last one failed, and its tenant reads that
	on := make([]*creation, len(r.Views))
	var chosen *creation
	for i, o := range r.On {
		if o == nil {
			continue
		}
		if why := failed[o.Extension]; isFull(why) {
			r.Views[i].Full = why
			continue
		} else if why != nil {
			r.Views[i].Check = why
			continue
		}
		on[i] = c.on(o)
		if c.isRouted() {
			leaveAlone(&r.Views[i], on[i].ext.breaker.retryAt(time.Now()))
		}
	}
	defer func() {
		for _, o := range on {
			if o != nil && o != chosen {
				o.ext.breaker.end(o.trial)
			}
		}
	}()
	if all || r.Profile.Route != nil && r.Profile.Route.Prefer == sandboxer.PreferPrice {
		var wg sync.WaitGroup
		for i := range on {
			if on[i] != nil && r.Views[i].RetryAt.IsZero() {
				wg.Go(func() { on[i].view(ctx, &r.Views[i], !all) })
			}
		}
		wg.Wait()
	}
	for {
		choices := r.Route()
		at, err := r.Chosen(choices)
		switch {
		case err != nil:
			return nil, nil, err
		case r.Views[at].Asked:
			var out []sandboxer.RouteChoice
			for _, choice := range choices {
				out = append(out, choice.RouteChoice)
			}
			chosen = on[at]
			return chosen, out, nil
		}
		on[at].view(ctx, &r.Views[at], !all)
		if err := ctx.Err(); err != nil {
			return nil, nil, context.Cause(ctx)
		}
	}
}

// on is c on another candidate; r is the request there.
func (c *creation) on(r *spec.Resolved) *creation {
	own := *c
	own.Resolved = *r
	own.SetID(c.ID)
	own.Digest, own.ext = c.Digest, c.m.extension(r.Extension)
	return &own
}

// leaveAlone notes until when routes skip the extension; a zero time: they do not.
func leaveAlone(v *spec.View, until time.Time) {
	if v.RetryAt = until; !until.IsZero() {
		v.RetryAfter = time.Until(until)
	}
}

// view asks the backend of c, and notes its answer in v. With try, c is then made there, as the trial of a backend that routes
// skip.
func (c *creation) view(ctx context.Context, v *spec.View, try bool) {
	if try && c.isRouted() {
		var until time.Time
		if c.trial, until = c.ext.breaker.begin(time.Now()); !until.IsZero() {
			leaveAlone(v, until)
			return
		}
	}
	v.Asked = true
	sb := c.record(1)
	if v.Refusal = cmp.Or(c.boundDisk(sb), c.checkCredential(ctx)); v.Refusal != nil {
		return
	}
	if v.Full, v.Check = c.noRoom(ctx, sb); v.Check != nil {
		return
	}
	if !try && v.Full == nil {
		if v.Full = c.belowMax(ctx); v.Full != nil && !isFull(v.Full) {
			v.Full, v.Check = nil, v.Full
			return
		}
	}
	known, err := c.ask(ctx, sb)
	if v.Check = err; err == nil && known {
		v.Price = &c.asked.quote.Amount
	}
	if c.asked != nil && c.asked.quote.ByBackend {
		v.Says = c.asked.quote.Detail
	}
}

// ask asks the backend whether it takes sb and what that costs, and reports whether the price is known.
func (c *creation) ask(ctx context.Context, sb *sandboxer.Sandbox) (known bool, err error) {
	defer func() {
		if err != nil {
			c.ext.heard(ctx, c.trial, sb, err)
		}
	}()
	a := new(said)
	if a.checked, err = c.checkBackend(ctx, sb); err != nil {
		return false, err
	}
	if a.quote, known, err = c.quote(ctx, sb); err != nil {
		return false, err
	}
	c.asked = a
	return known, nil
}

// withWait is the route of a request that waited for room on the chosen candidate.
func withWait(choices []sandboxer.RouteChoice, waited time.Duration) []sandboxer.RouteChoice {
	out := slices.Clone(choices)
	for i := range out {
		if out[i].Verdict == sandboxer.RouteChosen {
			out[i].Reason, out[i].Detail = sandboxer.WhyWaits, "the request waited "+sandboxer.FormatDuration(waited)+" there for room"
		}
	}
	return out
}

// isRouted reports whether there is more than one extension that may serve c.
func (c *creation) isRouted() bool { return c.Routing != nil && c.Routing.Profile.Route != nil }

// routeText is the text of the event about a route: the chosen extension with its backend's remark, and the candidates before
// it with their reasons.
func routeText(sb *sandboxer.Sandbox) string {
	text := "routed to " + sb.Extension
	if sb.Quote.ByBackend && sb.Quote.Detail != "" {
		text += " (" + sb.Quote.Detail + ")"
	}
	var refused []string
	for _, c := range sb.Route {
		if c.Verdict == sandboxer.RouteChosen {
			break
		}
		refused = append(refused, fmt.Sprintf("%s: %s", c.Extension, c.Reason))
	}
	if len(refused) == 0 {
		return text
	}
	return text + ", not to " + strings.Join(refused, ", ")
}

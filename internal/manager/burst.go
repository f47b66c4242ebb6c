package manager

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// leaveWithin bounds the teardown with which a create leaves a candidate.
const leaveWithin = 10 * time.Second

// bursts reports whether c goes on to the next candidate of its profile where one has no room or cannot be reached.
func (c *creation) bursts() bool {
	return c.isRouted() && c.Routing.Profile.Route.Policy == sandboxer.RouteBurst
}

// isLeft reports whether a candidate is left because of err.
func isLeft(err error) bool {
	return isKind(err, sandboxer.Exhausted) || isKind(err, sandboxer.Unavailable)
}

// goOn commits that sb, which its extension could not make because of err, is made by the next candidate of its profile. It
// returns why the create fails if there is none. failed collects the extensions that could not make it, and why. Only the
// request knows the candidates, so a create that is continued after a restart stays where it is.
func (wk work) goOn(ctx context.Context, failed map[string]error, err error) error {
	c := wk.j.request
	var source *sourceError
	lost := isKind(err, sandboxer.Timeout) && wk.sb.Handle.SandboxID == "" // no answer to the create
	switch {
	case ctx.Err() != nil, c == nil, !c.bursts(), !isLeft(err) && !lost, errors.As(err, &source):
		return err
	case wk.sb.State != sandboxer.Creating, lifecycle.IsPaused(wk.sb), lifecycle.SourceOf(wk.sb) != "" && lifecycle.IsNative(wk.sb):
		return err
	}
	failed[wk.sb.Extension] = err
	debt := wk.debt()
	for {
		next, route, err := c.routed(ctx, false, failed)
		if err != nil {
			return err
		}
		elsewhere, err := next.takeOver(ctx, wk, route, debt)
		if err == nil {
			break
		}
		next.ext.breaker.end(next.trial)
		if !elsewhere {
			return err
		}
		failed[next.Extension] = err
	}
	if debt == nil || lost { // a create that may still be on its way could come after a teardown
		return nil
	}
	leaving, cancel := context.WithTimeout(ctx, leaveWithin)
	defer cancel()
	if err := wk.payDebt(leaving, *debt, false); err != nil && leaving.Err() == nil {
		wk.m.log.WarnContext(ctx, "parts may remain where it was not made", "sandbox", wk.sb.ID, "extension", debt.Extension, "err", err)
	}
	return nil
}

// debt is what may exist of sb where it could not be made; nil if no call to make it was sent. The teardown that follows proves,
// if it succeeds, that nothing is left. It is committed before, because its answer may be lost, too.
func (wk work) debt() *sandboxer.Debt {
	if wk.j.untried || wk.sb.Untouched {
		return nil
	}
	at := now()
	return &sandboxer.Debt{Extension: wk.sb.Extension, Handle: handleOf(wk.sb), Reason: sandboxer.ReasonReplaced, Since: at, RetryAt: at.Add(leaveWithin)}
}

// takeOver commits that c makes the sandbox of wk, as the next generation, and what may exist of it elsewhere. elsewhere says
// that another candidate may have the room that this one has not.
func (c *creation) takeOver(ctx context.Context, wk work, route []sandboxer.RouteChoice, debt *sandboxer.Debt) (elsewhere bool, _ error) {
	next, elsewhere, err := c.priced(ctx, wk.sb.Generation)
	if err != nil {
		return elsewhere, err
	}
	change := func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
		if sb.State != sandboxer.Creating {
			return errTerminating
		}
		generation := lifecycle.ObjectGeneration(sb) + 1
		sb.Spec, sb.Extension, sb.Host, sb.Untouched = next.Spec, next.Extension, next.Host, false
		sb.Spec.Generation, sb.Spec.Fuse = generation, lifecycle.FirstFuse(next.Spec.Profile, now(), sb.ExpiresAt, renews(c.ext.Backend))
		sb.SealedEnv, sb.RestoredFrom, sb.RestoredAs, sb.Route = next.SealedEnv, next.RestoredFrom, next.RestoredAs, route
		sb.Handle, sb.ProvisionedAt, sb.AbsentSince, sb.UnresponsiveSince = sandboxer.Handle{}, time.Time{}, time.Time{}, time.Time{}
		sb.Pool, sb.PooledAt, sb.Reason = "", time.Time{}, ""
		sb.Retries, sb.RetryAt, sb.LastError = 0, time.Time{}, ""
		w.Quota = wk.m.QuotaFor(sb.Tenant, ofSandboxes...)
		requote(ctx, sb, w, next.Quote)
		w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventStep, routeText(sb)))
		if debt != nil {
			sb.Debts = append(slices.Clip(sb.Debts), *debt)
			w.Events = append(w.Events, debtEvent(ctx, sb, "what may exist of it on "+debt.Extension+" is to be removed"))
		}
		return nil
	}
	err = wk.j.withRoom(ctx, roomRequest{next.Extension, next.Profile, next.Tenant, c.leaving}, func(room *sandboxer.Room) error {
		return wk.m.step(pLeft, func() error {
			return wk.update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error { w.Room = room; return change(sb, w) })
		})
	})
	if err != nil {
		return isFull(err), c.explainCreateError(ctx, next, err)
	}
	wk.j.goes(c)
	return false, nil
}

// requote replaces the price of sb: what is on hold becomes the amount of the quote q.
func requote(ctx context.Context, sb *sandboxer.Sandbox, w *sandboxer.Writes, q sandboxer.MeterQuote) {
	switch more := q.Amount - sb.Quote.Amount; {
	case more > 0:
		w.Entries, w.Cover = entries(hold(ctx, sb, fmt.Sprintf("hold:%d", sb.Version), more)), true
	case more < 0:
		w.Entries = entries(booking(sb, fmt.Sprintf("void:%d", sb.Version), sandboxer.EntryVoid, -more))
	}
	sb.Quote = q
}

// debtEvent is an event about a debt of sb.
func debtEvent(ctx context.Context, sb *sandboxer.Sandbox, text string) sandboxer.Event {
	ev := events.Of(ctx, sb, sandboxer.EventStep, text)
	ev.Cause = sandboxer.ReasonReplaced
	return ev
}

// owes reports whether the object is a debt of sb.
func owes(sb *sandboxer.Sandbox, s objectKey) bool {
	return slices.ContainsFunc(sb.Debts, func(d sandboxer.Debt) bool {
		return d.Extension == s.extension && (s.generation == 0 || s.generation == d.Handle.Generation)
	})
}

// payDebts tears down the debts of sb that are due at that time, as one of the works of the sweep; all of them, as part of the
// present work, if it is zero.
func (bx box) payDebts(ctx context.Context, due time.Time) error {
	var errs []error
	for _, d := range bx.sb.Debts {
		if due.IsZero() || !due.Before(d.RetryAt) {
			errs = append(errs, bx.payDebt(ctx, d, !due.IsZero()))
		}
	}
	return errors.Join(errs...)
}

// payDebt tears down one debt of sb, and commits that it is gone, or when that is tried again. With slot it waits for one of the
// extension; work that has the slot of another extension must not.
func (bx box) payDebt(ctx context.Context, d sandboxer.Debt, slot bool) error {
	if slot {
		release, err := bx.m.slot(ctx, d.Extension)
		if err != nil {
			return err
		}
		defer release()
	}
	b, err := bx.m.backend(d.Extension)
	if err == nil {
		err = bx.m.step(pDebt, func() error { _, err := b.Teardown(ctx, d.Handle); return err })
		if err == nil {
			err = doubtGone(ctx, b, d.Extension, d.Handle)
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	uerr := bx.m.step(pDebtPaid, func() error {
		return bx.update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			i := slices.IndexFunc(sb.Debts, func(o sandboxer.Debt) bool {
				return o.Extension == d.Extension && o.Handle.Generation == d.Handle.Generation
			})
			if i < 0 {
				return errNotNeeded // another caller proved it
			}
			sb.Debts = slices.Clone(sb.Debts)
			if err == nil {
				sb.Debts = slices.Delete(sb.Debts, i, i+1)
				w.Events = append(w.Events, debtEvent(ctx, sb, "nothing of it is left on "+d.Extension))
				return nil
			}
			o := &sb.Debts[i]
			o.Retries, o.LastError = o.Retries+1, sandboxer.Message(err)
			o.RetryAt = now().Add(lifecycle.Backoff(o.Retries, rand.Float64()))
			if o.Retries <= 3 || o.Retries%20 == 0 {
				w.Events = append(w.Events, debtEvent(ctx, sb, "what may exist on "+d.Extension+" is not removed yet: "+o.LastError))
			}
			return nil
		})
	})
	if uerr == errNotNeeded {
		return nil
	}
	if err != nil && uerr == nil {
		return sandboxer.E(sandboxer.Unavailable, err, "what may exist of it on %s is not removed yet: %s", d.Extension, sandboxer.Message(err))
	}
	return uerr
}

package remote

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// MeterActual implements sandboxer.Meter: what the other installation charges us for the sandbox. It books that at the end, and
// computes it from the price at creation and the running time. It reports usage for a running sandbox.
func (p *peer) MeterActual(ctx context.Context, h sandboxer.Handle, _ time.Duration) (sandboxer.Usage, error) {
	none := sandboxer.Usage{}
	sb, err := p.find(ctx, h)
	if err != nil {
		return none, err
	}
	u := sandboxer.Usage{At: time.Now(), Cost: sb.Cost.Std()}
	measured := sb.State == sandboxer.Running && p.has(sandboxer.CanStats)
	if measured {
		s, err := p.Stats(ctx, h)
		if err != nil {
			return none, err
		}
		// It reports a negative figure for what it cannot measure.
		u.CPU, u.RxBytes, u.TxBytes = max(s.CPU, 0), max(s.RxBytes, 0), max(s.TxBytes, 0)
	}
	u.Final = sb.State == sandboxer.Terminated && sb.Billing == ""
	if sb.State != sandboxer.Terminated && sb.Quote != nil && !sb.ReadyAt.IsZero() {
		q := sandboxer.MeterQuote{Setup: sb.Quote.Setup.Std(), PerHour: sb.Quote.PerHour.Std()}
		until := u.At
		switch {
		case !sb.EndingAt.IsZero():
			until = sb.EndingAt
		case sb.Pause != nil && !sb.Pause.At.IsZero():
			until = sb.Pause.At
		}
		u.Cost = min(q.For(until.Sub(sb.ReadyAt)-sb.PausedFor.Std()), sb.Quote.Amount.Std())
	}
	if u.Cost < 0 {
		return none, sandboxer.E(sandboxer.Unavailable, nil, "%s reports impossible costs of sandbox %s: %s", p.name, sb.ID, u.Cost)
	}
	return u, nil
}

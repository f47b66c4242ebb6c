package remote

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// MeterActual implements sandboxer.Meter: what the other installation charges us for the sandbox, which it books at its end, and
// reckons by the price that it was made at and the time that it has run. What it has used is said of one that runs.
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
		// Of what it cannot measure it says a negative figure.
		u.CPU, u.RxBytes, u.TxBytes = max(s.CPU, 0), max(s.RxBytes, 0), max(s.TxBytes, 0)
	}
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
		return none, sandboxer.E(sandboxer.Unavailable, nil, "%s says that sandbox %s costs %s, which cannot be", p.name, sb.ID, u.Cost)
	}
	return u, nil
}

package manager

import (
	"context"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/sinks"
)

// usageKept is how long usage rows are kept, delivered or not: a year and a month.
const usageKept = 400 * 24 * time.Hour

// newSinks returns the deliverer of usage rows.
func (m *Manager) newSinks() *sinks.Sinks {
	return sinks.New(m.store, m.opts.Sinks, sinks.Options{
		Owner: m.opts.Owner, Secret: m.secret, Log: m.log, Data: m.opts.UsageData,
		Sent:  func(f func() error) error { return m.step(pSent, f) },
		Taken: func(f func() error) error { return m.step(pTaken, f) },
	})
}

// SetSinks replaces the sinks of usage rows.
func (m *Manager) SetSinks(all []sandboxer.Sink) { m.sinks.Set(all) }

// UsageRows pages through the usage rows, oldest first; without the admin scope through those of the caller's tenant. after is
// next of the page before.
func (m *Manager) UsageRows(ctx context.Context, q sandboxer.UsageQuery, after string) (rows []sandboxer.UsageRow, next string, err error) {
	if q.Tenant, err = billedPage(ctx, q.Tenant, q.Limit); err != nil {
		return nil, "", err
	}
	if after != "" {
		if q.After, err = strconv.ParseInt(after, 10, 64); err != nil || q.After < 0 {
			return nil, "", sandboxer.E(sandboxer.Invalid, nil, "%.64q is not a cursor of usage rows", after).WithHint("use next_cursor of the page before")
		}
	}
	if q.Limit == 0 {
		q.Limit = sandboxer.DefaultPage
	}
	rows, err = m.store.UsageRows(ctx, q)
	if len(rows) == q.Limit {
		next = strconv.FormatInt(rows[len(rows)-1].Seq, 10)
	}
	return rows, next, err
}

// A SinkStatus is a sink with its progress, and with its first dead letters if one sink is requested.
type SinkStatus struct {
	sinks.Status
	Dead []sandboxer.DeadLetter
}

// Sinks lists the sinks of usage rows. It needs the admin scope.
func (m *Manager) Sinks(ctx context.Context) (all []SinkStatus, err error) {
	if _, err := access.May(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, err
	}
	list, err := m.sinks.List(ctx)
	for _, st := range list {
		all = append(all, SinkStatus{Status: st})
	}
	return all, err
}

// Sink returns one sink with its dead letters. It needs the admin scope, as ReplaySink and DropSink do. Kind: NotFound.
func (m *Manager) Sink(ctx context.Context, name string) (SinkStatus, error) {
	return m.sink(ctx, func() (sinks.Status, error) { return m.sinks.Get(ctx, name) })
}

// ReplaySink delivers rows to a sink once more; see sinks.Sinks.
func (m *Manager) ReplaySink(ctx context.Context, name string, since time.Time) (SinkStatus, error) {
	return m.sink(ctx, func() (sinks.Status, error) { return m.sinks.Replay(ctx, name, since) })
}

// DropSink gives up dead letters of a sink; see sinks.Sinks.
func (m *Manager) DropSink(ctx context.Context, name string, seqs []int64) (SinkStatus, error) {
	return m.sink(ctx, func() (sinks.Status, error) { return m.sinks.Drop(ctx, name, seqs) })
}

func (m *Manager) sink(ctx context.Context, do func() (sinks.Status, error)) (SinkStatus, error) {
	if _, err := access.May(ctx, sandboxer.ScopeAdmin); err != nil {
		return SinkStatus{}, err
	}
	st, err := do()
	if err != nil {
		return SinkStatus{}, err
	}
	dead, err := m.store.DeadLetters(ctx, sandboxer.DeadLetterQuery{Sink: st.ID()})
	return SinkStatus{st, dead}, err
}

// forgetUsage removes old usage rows, in batches short enough for others to commit in between.
func (m *Manager) forgetUsage(ctx context.Context) error {
	const batch, batches = 500, 20
	for range batches {
		if n, err := m.store.ForgetUsage(ctx, now().Add(-usageKept), batch); err != nil || n < batch {
			return err
		}
	}
	return nil
}

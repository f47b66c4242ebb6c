package manager

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// housekeep does small tasks that are not urgent.
func (m *Manager) housekeep() {
	m.mu.Lock()
	due := time.Since(m.lastCleanup) >= time.Hour
	if due {
		m.lastCleanup = time.Now()
	}
	m.mu.Unlock()
	if due {
		if err := m.store.ForgetIdempotencyKeys(m.ctx, now().Add(-keepKeys)); err != nil && m.ctx.Err() == nil {
			m.log.Warn("forget idempotency keys", "err", err)
		}
		if err := m.forgetHistory(m.ctx); err != nil && m.ctx.Err() == nil {
			m.log.Warn("forget history", "err", err)
		}
		if err := m.forgetUsage(m.ctx); err != nil && m.ctx.Err() == nil {
			m.log.Warn("forget usage rows", "err", err)
		}
		if err := m.store.ForgetSecretVersions(m.ctx); err != nil && m.ctx.Err() == nil {
			m.log.Warn("forget versions of secrets", "err", err)
		}
	}
	m.usage.forgetUnused(time.Hour)
	if err := m.SaveLastUse(m.ctx, time.Minute); err != nil && m.ctx.Err() == nil {
		m.log.Warn("last use of API keys", "err", err)
	}
}

// forgetHistory removes records that ended long ago, in batches short enough for others to
// commit in between. The next tick removes the rest.
func (m *Manager) forgetHistory(ctx context.Context) error {
	if m.opts.History == 0 {
		return nil
	}
	const batch, batches = 500, 20
	before := now().Add(-m.opts.History)
	total := 0
	for range batches {
		n, err := m.store.ForgetHistory(ctx, before, batch)
		if err != nil {
			return err
		}
		if total += n; n < batch {
			if total > 0 {
				m.log.Info("old history was removed", "count", total, "before", before)
			}
			return nil
		}
	}
	m.log.Info("old history was removed, more is left", "count", total, "before", before)
	m.mu.Lock()
	m.lastCleanup = time.Time{}
	m.mu.Unlock()
	return nil
}

// flush stores the data that is only in memory, at the end.
func (m *Manager) flush(ctx context.Context) error {
	for _, id := range m.usage.ids() {
		sb, err := m.store.Sandbox(ctx, id)
		if err == nil && sb.State == sandboxer.Running {
			err = m.box(sb).saveUse(ctx)
		}
		if err != nil && !isKind(err, sandboxer.NotFound) && sb == nil {
			return err
		}
	}
	return m.SaveLastUse(ctx, 0)
}

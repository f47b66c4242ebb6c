package sqlstore

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	// A sandbox with an open hold is kept, so that the audit can name it.
	oldSandboxes = `SELECT seq, id, generation FROM sandboxes WHERE state = 'terminated' AND ended_at < ?
AND NOT EXISTS (SELECT 1 FROM open_holds h WHERE h.tenant = sandboxes.tenant AND h.sandbox_id = sandboxes.id AND h.generation = sandboxes.generation)
ORDER BY ended_at, seq LIMIT ?`

	forgetSandboxEvents = `DELETE FROM events WHERE seq IN (SELECT e.seq FROM (` + oldSandboxes + `) s
JOIN events e ON e.sandbox_id = s.id AND e.generation = s.generation)`

	forgetSandboxes = `DELETE FROM sandboxes WHERE seq IN (SELECT seq FROM (` + oldSandboxes + `))`

	forgetSnapshots = `DELETE FROM snapshots WHERE seq IN (SELECT seq FROM snapshots WHERE state = 'dropped' AND due_at < ? ORDER BY due_at LIMIT ?)`

	forgetEvents = `DELETE FROM events WHERE seq IN (SELECT e.seq FROM events e WHERE e.at < ?
AND NOT EXISTS (SELECT 1 FROM sandboxes s WHERE s.id = e.sandbox_id AND s.generation = e.generation) ORDER BY e.at LIMIT ?)`
)

// ForgetHistory removes what ended before t; see sandboxer.Store.
func (s *Store) ForgetHistory(ctx context.Context, t time.Time, limit int) (removed int, err error) {
	err = s.commit(ctx, false, func(tx *tx) error {
		if _, err := tx.exec(forgetSandboxEvents, micros(t), limit); err != nil {
			return err
		}
		n, err := tx.exec(forgetSandboxes, micros(t), limit)
		if err != nil {
			return err
		}
		dropped, err := tx.exec(forgetSnapshots, micros(t), limit)
		if err != nil {
			return err
		}
		rest, err := tx.exec(forgetEvents, micros(t), limit)
		removed = int(n + dropped + rest)
		return err
	}, sandboxer.Writes{})
	return removed, err
}

// ForgetIdempotencyKeys removes keys recorded before t, some at a time, so that no other
// write waits long behind it.
func (s *Store) ForgetIdempotencyKeys(ctx context.Context, t time.Time) error {
	for {
		var n int64
		err := s.commit(ctx, false, func(tx *tx) (err error) {
			n, err = tx.exec(deleteIdempotencyKeys, micros(t), sandboxer.MaxPage)
			return err
		}, sandboxer.Writes{})
		if err != nil || n < sandboxer.MaxPage {
			return err
		}
	}
}

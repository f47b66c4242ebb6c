package sqlstore

import (
	"context"
	"database/sql"
	"slices"

	"github.com/sand-boxer/sandboxer"
)

const insertEvent = `INSERT INTO events (at, sandbox_id, shown_id, generation, tenant, type, from_state, to_state, cause, actor, message)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING seq`

// putEvents appends events and reports the number of each in seqs.
func (t *tx) putEvents(events []sandboxer.Event, seqs []int64) error {
	for i, e := range events {
		args := []any{micros(e.At), e.SandboxID, e.ShownID, e.Generation, e.Tenant, string(e.Type), string(e.From), string(e.To), string(e.Cause), e.Actor, e.Message}
		if _, err := t.row(insertEvent, args, &seqs[i]); err != nil {
			return err
		}
	}
	return nil
}

// Events returns a page of history, oldest first.
func (s *Store) Events(ctx context.Context, q sandboxer.EventQuery) (events []sandboxer.Event, err error) {
	f := pageFilter(q.Tenant, q.SandboxID)
	f.add("seq > ?", q.After)
	if !q.Since.IsZero() { // by its index: the history before is not read
		f.add("seq >= (SELECT seq FROM events WHERE at >= ? ORDER BY at LIMIT 1)", micros(q.Since))
		f.add("at >= ?", micros(q.Since))
	}
	order := " ORDER BY seq"
	if q.Newest {
		order += " DESC"
	}
	query := `SELECT seq, at, sandbox_id, shown_id, generation, tenant, type, from_state, to_state, cause, actor, message FROM events` +
		f.String() + order + ` LIMIT ?`
	err = s.rows(ctx, query, append(f.args, pageSize(q.Limit)), func(rows *sql.Rows) error {
		var e sandboxer.Event
		var at int64
		if err := rows.Scan(&e.Seq, &at, &e.SandboxID, &e.ShownID, &e.Generation, &e.Tenant, &e.Type, &e.From, &e.To, &e.Cause, &e.Actor, &e.Message); err != nil {
			return err
		}
		e.At = fromMicros(at)
		events = append(events, e)
		return nil
	})
	if q.Newest {
		slices.Reverse(events)
	}
	return events, err
}

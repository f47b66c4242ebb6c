package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

const (
	insertUsage = `INSERT INTO usage (key, tenant, at, data) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING`

	oldUsage    = `SELECT seq FROM (SELECT seq, at FROM usage ORDER BY seq LIMIT ?) WHERE at < ?`
	forgetDead  = `DELETE FROM dead_letters WHERE seq IN (` + oldUsage + `)`
	forgetUsage = `DELETE FROM usage WHERE seq IN (` + oldUsage + `)`

	sinkBySeq = `SELECT seq, problem, since FROM sinks WHERE name = ?`
	putSink   = `INSERT INTO sinks (name, seq, problem, since, stopped) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET seq = excluded.seq, problem = excluded.problem, since = excluded.since, stopped = excluded.stopped`
	sinkStates = `SELECT name, seq, problem, since, stopped, (SELECT count(*) FROM usage u WHERE u.seq > sinks.seq),
(SELECT count(*) FROM dead_letters d WHERE d.sink = sinks.name) FROM sinks ORDER BY name`
	forgetSink = `DELETE FROM sinks WHERE name = ?`

	putDead     = `INSERT OR REPLACE INTO dead_letters (sink, seq, at, reason, again) VALUES (?, ?, ?, ?, ?)`
	removeDead  = `DELETE FROM dead_letters WHERE sink = ? AND seq = ?`
	sendAgain   = `UPDATE dead_letters SET again = 1 WHERE sink = ?`
	forgetDeads = `DELETE FROM dead_letters WHERE sink = ?`
)

// putUsage appends the rows whose key is new.
func (t *tx) putUsage(rows []sandboxer.UsageRow) error {
	for _, r := range rows {
		if r.Key == "" || r.Tenant == "" {
			return sandboxer.E(sandboxer.Invalid, nil, "a usage row needs a key and a tenant (have %q, %q)", r.Key, r.Tenant)
		}
		for _, at := range []*time.Time{&r.At, &r.From, &r.Until, &r.Meter.At} {
			*at = toMicros(*at)
		}
		data, err := json.Marshal(r)
		if err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "the usage row %s cannot be stored", r.Key)
		}
		if _, err := t.exec(insertUsage, r.Key, r.Tenant, micros(r.At), string(data)); err != nil {
			return err
		}
	}
	return nil
}

// decodeUsage reads a stored usage row.
func decodeUsage(seq int64, data []byte) (sandboxer.UsageRow, error) {
	var r sandboxer.UsageRow
	if _, err := strictjson.DecodeStored(data, &r); err != nil {
		return r, sandboxer.E(sandboxer.Failed, err, "usage row %d is damaged", seq).
			WithHint("restore a backup: sandboxer backup ls")
	}
	r.Seq = seq
	return r, nil
}

// UsageRows returns a page of usage rows; see sandboxer.Store.
func (s *Store) UsageRows(ctx context.Context, q sandboxer.UsageQuery) (items []sandboxer.UsageRow, err error) {
	var f filter
	if q.Tenant != "" {
		f.tenant(q.Tenant, q.Again != "")
	}
	f.add("seq > ?", q.After)
	if q.Again != "" {
		f.add("seq IN (SELECT seq FROM dead_letters WHERE sink = ? AND again = 1)", q.Again)
	}
	if !q.Since.IsZero() {
		f.add("at >= ?", micros(q.Since))
	}
	if !q.Until.IsZero() {
		f.add("at < ?", micros(q.Until))
	}
	err = s.rows(ctx, `SELECT seq, data FROM usage`+f.String()+` ORDER BY seq LIMIT ?`, append(f.args, pageSize(q.Limit)), func(rows *sql.Rows) error {
		var seq int64
		var data []byte
		if err := rows.Scan(&seq, &data); err != nil {
			return err
		}
		r, err := decodeUsage(seq, data)
		items = append(items, r)
		return err
	})
	return items, err
}

// ForgetUsage removes old usage rows; see sandboxer.Store.
func (s *Store) ForgetUsage(ctx context.Context, t time.Time, limit int) (removed int, err error) {
	err = s.commit(ctx, false, func(tx *tx) error {
		if _, err := tx.exec(forgetDead, limit, micros(t)); err != nil {
			return err
		}
		n, err := tx.exec(forgetUsage, limit, micros(t))
		removed = int(n)
		return err
	}, sandboxer.Writes{})
	return removed, err
}

// changeSink makes a change of what is kept of a sink; see sandboxer.SinkChange.
func (t *tx) changeSink(c *sandboxer.SinkChange) error {
	if c == nil {
		return nil
	}
	var seq, since int64
	var problem string
	if _, err := t.row(sinkBySeq, []any{c.Name}, &seq, &problem, &since); err != nil {
		return err
	}
	if seq != c.From {
		return sandboxer.E(sandboxer.Conflict, nil, "sink %s is at row %d and not at %d: another request has changed it", c.Name, seq, c.From)
	}
	if c.Forget {
		if _, err := t.exec(forgetDeads, c.Name); err != nil {
			return err
		}
		_, err := t.exec(forgetSink, c.Name)
		return err
	}
	if problem == "" || c.Problem == "" {
		since = micros(c.At)
	}
	if _, err := t.exec(putSink, c.Name, c.To, c.Problem, since, c.Stopped); err != nil {
		return err
	}
	if c.Again {
		if _, err := t.exec(sendAgain, c.Name); err != nil {
			return err
		}
	}
	for _, seq := range c.Gone {
		if _, err := t.exec(removeDead, c.Name, seq); err != nil {
			return err
		}
	}
	for _, d := range c.Dead {
		if _, err := t.exec(putDead, c.Name, d.Seq, micros(d.At), d.Reason, d.Again); err != nil {
			return err
		}
	}
	return nil
}

// SinkStates returns how far the sinks are; see sandboxer.Store.
func (s *Store) SinkStates(ctx context.Context) (all []sandboxer.SinkState, err error) {
	err = s.rows(ctx, sinkStates, nil, func(rows *sql.Rows) error {
		var st sandboxer.SinkState
		var since int64
		if err := rows.Scan(&st.Name, &st.Seq, &st.Problem, &since, &st.Stopped, &st.Behind, &st.DeadLetters); err != nil {
			return err
		}
		if st.Problem != "" {
			st.Since = fromMicros(since)
		}
		all = append(all, st)
		return nil
	})
	return all, err
}

// DeadLetters returns a page of dead letters; see sandboxer.Store.
func (s *Store) DeadLetters(ctx context.Context, q sandboxer.DeadLetterQuery) (all []sandboxer.DeadLetter, err error) {
	var f filter
	f.add("sink = ?", q.Sink)
	f.add("seq > ?", q.After)
	err = s.rows(ctx, `SELECT sink, seq, at, reason, again FROM dead_letters`+f.String()+` ORDER BY seq LIMIT ?`, append(f.args, pageSize(q.Limit)), func(rows *sql.Rows) error {
		var d sandboxer.DeadLetter
		var at int64
		if err := rows.Scan(&d.Sink, &d.Seq, &at, &d.Reason, &d.Again); err != nil {
			return err
		}
		d.At = fromMicros(at)
		all = append(all, d)
		return nil
	})
	return all, err
}

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	newestSandbox = `SELECT generation, state FROM sandboxes WHERE id = ? ORDER BY generation DESC LIMIT 1`

	insertSandbox = `INSERT INTO sandboxes (tenant, shown_id, name, profile, extension, state, due_at, ended_at, takes_room, billing, labels, data, handle_data, sealed_env, id, generation, version)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT DO NOTHING`

	updateSandbox = `UPDATE sandboxes SET tenant = ?, shown_id = ?, name = ?, profile = ?, extension = ?, state = ?, due_at = ?, ended_at = ?, takes_room = ?, billing = ?, labels = ?, data = ?,
handle_data = ?, sealed_env = ?, version = version + 1 WHERE id = ? AND generation = ? AND version = ?`

	// The index alone answers this, even if the record is damaged.
	newestShown  = `SELECT id, generation FROM sandboxes WHERE tenant = ? AND shown_id = ? ORDER BY seq DESC LIMIT 1`
	tenantsShown = `SELECT DISTINCT tenant FROM sandboxes WHERE shown_id = ? ORDER BY tenant LIMIT ?`
	liveShown    = `SELECT 1 FROM sandboxes WHERE tenant = ? AND shown_id = ? AND state <> 'terminated' AND id <> ?`

	unsettled = `seq IN (SELECT s.seq FROM open_holds h CROSS JOIN sandboxes s WHERE s.id = h.sandbox_id AND s.generation = h.generation AND s.tenant = h.tenant)`

	sandboxVersion = `SELECT version FROM sandboxes WHERE id = ? AND generation = ?`

	selectSandbox     = `SELECT seq, id, generation, version, data, handle_data, sealed_env FROM sandboxes`
	sandboxByID       = selectSandbox + ` WHERE id = ? ORDER BY generation DESC LIMIT 1`
	sandboxGeneration = selectSandbox + ` WHERE id = ? AND generation = ?`
)

// CreateSandbox inserts sb; see sandboxer.Store.
func (s *Store) CreateSandbox(ctx context.Context, sb *sandboxer.Sandbox, w sandboxer.Writes) error {
	values, err := sandboxValues(sb)
	if err != nil {
		return err
	}
	own := *sb
	err = s.commit(ctx, true, func(t *tx) error {
		if len(sb.Secrets) > 0 || sb.Spec.Credential.Name != "" {
			var err error
			if own, err = t.fillSecrets(sb); err == nil {
				values, err = sandboxValues(&own)
			}
			if err != nil {
				return err
			}
		}
		var generation int
		var state sandboxer.State
		found, err := t.row(newestSandbox, []any{sb.ID}, &generation, &state)
		if err != nil {
			return err
		}
		if found && state.Live() {
			return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s exists and is %s", sb.Shown(), state)
		}
		if found && generation >= sb.Generation {
			return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is at generation %d already; a new one of generation %d is stale", sb.Shown(), generation, sb.Generation)
		}
		n, err := t.exec(insertSandbox, values...)
		if err == nil && n == 0 {
			err = t.taken(sb)
		}
		return err
	}, w)
	if err == nil {
		sb.Version, sb.Secrets, sb.Spec.Credential = 1, own.Secrets, own.Spec.Credential
	}
	return err
}

// UpdateSandbox replaces the record; see sandboxer.Store.
func (s *Store) UpdateSandbox(ctx context.Context, sb *sandboxer.Sandbox, w sandboxer.Writes) error {
	values, err := sandboxValues(sb)
	if err != nil {
		return err
	}
	version, key := sb.Version, sb.Spec.Credential
	values = append(values, version)
	err = s.commit(ctx, false, func(t *tx) error {
		if sb.Spec.Credential.Name != "" && sb.Spec.Credential.Version == 0 { // it goes to another account
			own := *sb
			var err error
			if own.Spec.Credential, err = t.fillSecret(sb, sb.Spec.Credential); err == nil {
				values, err = sandboxValues(&own)
			}
			if err != nil {
				return err
			}
			key, values = own.Spec.Credential, append(values, version)
		}
		n, err := t.exec(updateSandbox, values...)
		if isTaken(err) {
			return t.taken(sb)
		}
		if err != nil || n == 1 {
			return err
		}
		var stored int64
		found, err := t.row(sandboxVersion, []any{sb.ID, sb.Generation}, &stored)
		if err != nil {
			return err
		}
		if !found {
			return noSandbox(sb.ID, sb.Generation)
		}
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s was changed by another request: version %d is stale, it is at %d", sb.Shown(), version, stored)
	}, w)
	if err == nil {
		sb.Version, sb.Spec.Credential = version+1, key
	}
	return err
}

// Sandbox returns the newest generation of id.
func (s *Store) Sandbox(ctx context.Context, id string) (*sandboxer.Sandbox, error) {
	return sandboxes.one(ctx, s, sandboxByID, recordKey{id: id})
}

// SandboxShown returns the newest sandbox of the tenant with the shown ID.
func (s *Store) SandboxShown(ctx context.Context, tenant, shown string) (*sandboxer.Sandbox, error) {
	var key recordKey
	found, err := s.row(ctx, newestShown, []any{tenant, shown}, &key.id, &key.generation)
	switch {
	case err != nil:
		return nil, err
	case !found:
		return nil, noSandbox(shown, 0)
	}
	return sandboxes.one(ctx, s, sandboxGeneration, key)
}

// TenantsOfShown returns the tenants whose sandboxes have, or had, the shown ID.
func (s *Store) TenantsOfShown(ctx context.Context, shown string) (tenants []string, err error) {
	err = s.rows(ctx, tenantsShown, []any{shown, sandboxer.DefaultPage}, func(rows *sql.Rows) error {
		var tenant string
		err := rows.Scan(&tenant)
		tenants = append(tenants, tenant)
		return err
	})
	return tenants, err
}

// SandboxGeneration returns one generation of id.
func (s *Store) SandboxGeneration(ctx context.Context, id string, generation int) (*sandboxer.Sandbox, error) {
	if generation < 1 {
		return nil, noSandbox(id, generation)
	}
	return sandboxes.one(ctx, s, sandboxGeneration, recordKey{id, generation})
}

// Sandboxes returns a page of records, newest first; see sandboxer.Store.
func (s *Store) Sandboxes(ctx context.Context, q sandboxer.Query) (items []*sandboxer.Sandbox, next string, err error) {
	return sandboxes.page(ctx, s, sandboxFilter(q), q.After, q.Limit)
}

func sandboxFilter(q sandboxer.Query) filter {
	f := filter{
		byColumns: q.Tenant != "" || q.Profile != "" || q.Extension != "" || q.Name != "" || q.ShownID != "" || len(q.Labels) > 0,
		idPrefix:  q.IDPrefix,
	}
	live := len(q.States) > 0 && !slices.ContainsFunc(q.States, func(st sandboxer.State) bool { return !st.Live() })
	if q.Tenant != "" {
		f.tenant(q.Tenant, live && q.Name == "" && q.ShownID == "" || q.IDPrefix != "")
	}
	if q.Profile != "" {
		f.add("profile = ?", q.Profile)
	}
	if q.Extension != "" {
		f.add("extension = ?", q.Extension)
	}
	if q.DebtsAt != "" {
		f.add(`CASE WHEN instr(data, '"debts":') > 0 AND json_valid(data) THEN EXISTS (SELECT 1 FROM json_each(data, '$.debts') AS debt WHERE debt.value ->> '$.extension' = ?) END`, q.DebtsAt)
	}
	if q.Name != "" {
		f.add("name = ? AND name <> ''", q.Name) // as the index of live names has it
	}
	if q.ShownID != "" {
		f.add("shown_id = ?", q.ShownID)
	}
	if q.IDPrefix != "" {
		f.add("shown_id >= ? AND shown_id < ?", q.IDPrefix, q.IDPrefix+"\U0010FFFF")
	}
	if len(q.States) > 0 {
		in(&f, "state", q.States)
		if live {
			f.add("state <> 'terminated'") // lets the index of live records be used
		}
	}
	for k, v := range q.Labels {
		f.add("EXISTS (SELECT 1 FROM json_each(labels) AS label WHERE label.key = ? AND label.value = ?)", k, v)
	}
	if q.Unsettled {
		f.add(unsettled)
	}
	if q.Billing != "" {
		f.add("billing = ? AND billing <> ''", string(q.Billing)) // as its index has it
	}
	if !q.DueBefore.IsZero() {
		f.add("due_at <= ?", micros(q.DueBefore))
	}
	return f
}

// sandboxValues returns the columns of sb in the order of insertSandbox and
// updateSandbox.
func sandboxValues(sb *sandboxer.Sandbox) ([]any, error) {
	if sb.ID == "" || sb.Generation < 1 || !sb.State.Valid() {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "a record needs an ID, a generation from 1 and a state (have %q, %d, %q)", sb.ID, sb.Generation, sb.State)
	}
	r := *sb
	r.Handle.Data = nil // JSON would reformat it
	for _, t := range []*time.Time{&r.AbsentSince, &r.UnresponsiveSince, &r.CreatedAt, &r.ProvisionedAt, &r.ReadyAt, &r.ResumedAt, &r.PooledAt, &r.Pause.At, &r.UsedAt, &r.ExpiresAt, &r.RetryAt, &r.EndingAt, &r.EndedAt, &r.Spec.Fuse, &r.Usage.At} {
		*t = toMicros(*t)
	}
	r.Debts = slices.Clone(sb.Debts)
	for i := range r.Debts {
		r.Debts[i].Since, r.Debts[i].RetryAt = toMicros(r.Debts[i].Since), toMicros(r.Debts[i].RetryAt)
	}
	data, err := json.Marshal(&r)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the record of sandbox %s cannot be stored", sb.ID)
	}
	labels := []byte("{}")
	if len(sb.Spec.Labels) > 0 {
		if labels, err = json.Marshal(sb.Spec.Labels); err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "the labels of sandbox %s cannot be stored", sb.ID)
		}
	}
	var ended any
	if sb.State == sandboxer.Terminated {
		ended = micros(sb.EndedAt)
	}
	return []any{sb.Tenant, sb.Shown(), sb.Name, sb.Profile, sb.Extension, string(sb.State), earliest(r.ExpiresAt, r.RetryAt, r.DebtsDue()), ended, sb.TakesRoom(), string(sb.Billing), string(labels), string(data),
		[]byte(sb.Handle.Data), sb.SealedEnv, sb.ID, sb.Generation}, nil
}

// earliest returns the earliest of the times at which the sweep has work, or nil if all are zero.
func earliest(times ...time.Time) any {
	var first time.Time
	for _, t := range times {
		if first.IsZero() || !t.IsZero() && t.Before(first) {
			first = t
		}
	}
	if first.IsZero() {
		return nil
	}
	return micros(first)
}

func noSandbox(id string, generation int) error {
	if generation == 0 {
		return sandboxer.E(sandboxer.NotFound, nil, "there is no sandbox %s", id)
	}
	return sandboxer.E(sandboxer.NotFound, nil, "there is no generation %d of sandbox %s", generation, id)
}

// taken says which of sb's unique values another record has.
func (t *tx) taken(sb *sandboxer.Sandbox) error {
	var one int
	found, err := t.row(liveShown, []any{sb.Tenant, sb.Shown(), sb.ID}, &one)
	switch {
	case err != nil:
		return err
	case found:
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s exists", sb.Shown())
	case sb.Name == "":
		return sandboxer.E(sandboxer.Conflict, nil, "generation %d of sandbox %s has ended: a later one is live", sb.Generation, sb.Shown())
	}
	return nameTaken(sb)
}

func nameTaken(sb *sandboxer.Sandbox) error {
	return sandboxer.E(sandboxer.Conflict, nil, "a sandbox named %q exists", sb.Name).
		WithHint("choose another name, or destroy that sandbox first")
}

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

const (
	insertIdempotencyKey = `INSERT INTO idempotency_keys (tenant, key, digest, sandbox_id, generation, at)
VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`

	selectIdempotencyKey = `SELECT tenant, key, digest, sandbox_id, generation, at FROM idempotency_keys WHERE tenant = ? AND key = ?`

	freeIdempotencyKey = `DELETE FROM idempotency_keys WHERE tenant = ? AND key = ? AND sandbox_id = ? AND generation = ?`

	deleteIdempotencyKeys = `DELETE FROM idempotency_keys WHERE (tenant, key) IN
(SELECT tenant, key FROM idempotency_keys WHERE at < ? LIMIT ?)`

	putAPIKey = `INSERT INTO api_keys (id, name, tenant, hash, scopes, created_at, expires_at, revoked_at, last_used_at, max_spend)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET name = excluded.name, tenant = excluded.tenant, hash = excluded.hash, scopes = excluded.scopes,
created_at = excluded.created_at, expires_at = excluded.expires_at, revoked_at = excluded.revoked_at, last_used_at = excluded.last_used_at,
max_spend = excluded.max_spend`

	selectAPIKey = `SELECT id, name, tenant, hash, scopes, created_at, expires_at, revoked_at, last_used_at, max_spend FROM api_keys`
	apiKeyByID   = selectAPIKey + ` WHERE id = ?`
)

func (t *tx) putIdempotencyKey(k sandboxer.IdempotencyKey) error {
	n, err := t.exec(insertIdempotencyKey, k.Tenant, k.Key, k.Digest, k.SandboxID, k.Generation, micros(k.At))
	if err == nil && n == 0 {
		err = sandboxer.E(sandboxer.Conflict, nil, "the idempotency key %q was used before", k.Key)
	}
	return err
}

func (t *tx) freeIdempotencyKey(k sandboxer.IdempotencyKey) error {
	_, err := t.exec(freeIdempotencyKey, k.Tenant, k.Key, k.SandboxID, k.Generation)
	return err
}

// IdempotencyKey returns what was recorded under (tenant, key).
func (s *Store) IdempotencyKey(ctx context.Context, tenant, key string) (sandboxer.IdempotencyKey, error) {
	var k sandboxer.IdempotencyKey
	var at int64
	found, err := s.row(ctx, selectIdempotencyKey, []any{tenant, key}, &k.Tenant, &k.Key, &k.Digest, &k.SandboxID, &k.Generation, &at)
	if err == nil && !found {
		err = sandboxer.E(sandboxer.NotFound, nil, "the idempotency key %q is not known", key)
	}
	if err != nil {
		return sandboxer.IdempotencyKey{}, err
	}
	k.At = fromMicros(at)
	return k, nil
}

// PutAPIKey inserts or replaces k.
func (s *Store) PutAPIKey(ctx context.Context, k sandboxer.APIKey) error {
	return s.Write(ctx, sandboxer.Writes{APIKey: &k})
}

func (t *tx) putAPIKey(k sandboxer.APIKey) error {
	if k.ID == "" {
		return sandboxer.E(sandboxer.Invalid, nil, "an API key needs an ID")
	}
	scopes, err := json.Marshal(k.Scopes)
	if err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "the scopes of API key %s cannot be stored", k.ID)
	}
	spend, err := json.Marshal(keyBounds{k.MaxSpend, k.Consumer})
	if err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "the bounds of API key %s cannot be stored", k.ID)
	}
	_, err = t.exec(putAPIKey, k.ID, k.Name, k.Tenant, k.Hash, string(scopes),
		micros(k.CreatedAt), micros(k.ExpiresAt), micros(k.RevokedAt), micros(k.LastUsedAt), string(spend))
	return err
}

// APIKey returns one key by ID.
func (s *Store) APIKey(ctx context.Context, id string) (sandboxer.APIKey, error) {
	var r apiKeyRow
	found, err := s.row(ctx, apiKeyByID, []any{id}, r.dest()...)
	if err == nil && !found {
		err = sandboxer.E(sandboxer.NotFound, nil, "there is no API key %s", id)
	}
	if err != nil {
		return sandboxer.APIKey{}, err
	}
	return r.apiKey()
}

// APIKeys returns a tenant's keys, or all, in the order they were made.
func (s *Store) APIKeys(ctx context.Context, tenant string) (keys []sandboxer.APIKey, err error) {
	var f filter
	if tenant != "" {
		f.add("tenant = ?", tenant)
	}
	err = s.rows(ctx, selectAPIKey+f.String()+` ORDER BY created_at, id`, f.args, func(rows *sql.Rows) error {
		var r apiKeyRow
		if err := rows.Scan(r.dest()...); err != nil {
			return err
		}
		k, err := r.apiKey()
		keys = append(keys, k)
		return err
	})
	if err != nil {
		return nil, err
	}
	return keys, nil
}

// keyBounds are what the requests of a key are bound by: the column max_spend.
type keyBounds struct {
	sandboxer.MaxSpend
	Consumer string `json:"consumer,omitempty"`
}

// An apiKeyRow is a row of selectAPIKey.
type apiKeyRow struct {
	key                                 sandboxer.APIKey
	scopes, maxSpend                    []byte
	created, expires, revoked, lastUsed int64
}

func (r *apiKeyRow) dest() []any {
	return []any{&r.key.ID, &r.key.Name, &r.key.Tenant, &r.key.Hash, &r.scopes, &r.created, &r.expires, &r.revoked, &r.lastUsed, &r.maxSpend}
}

func (r *apiKeyRow) apiKey() (sandboxer.APIKey, error) {
	k := r.key
	if _, err := strictjson.DecodeStored(r.scopes, &k.Scopes); err != nil {
		return k, sandboxer.E(sandboxer.Failed, err, "the record of API key %s is damaged", k.ID)
	}
	var bounds keyBounds
	if _, err := strictjson.DecodeStored(r.maxSpend, &bounds); err != nil {
		return k, sandboxer.E(sandboxer.Failed, err, "the bounds of API key %s are damaged", k.ID)
	}
	k.MaxSpend, k.Consumer = bounds.MaxSpend, bounds.Consumer
	k.CreatedAt, k.ExpiresAt = fromMicros(r.created), fromMicros(r.expires)
	k.RevokedAt, k.LastUsedAt = fromMicros(r.revoked), fromMicros(r.lastUsed)
	return k, nil
}

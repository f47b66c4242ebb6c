package sqlstore

import (
	"context"
	"database/sql"
	"maps"
	"strconv"

	"github.com/sand-boxer/sandboxer"
)

// secretUses are the references to the secret (?1, ?2) in records that may still read it. A damaged record may refer to
// anything: its version is NULL. Only the operator's secrets, whose tenant is empty, may be in records of every tenant.
var secretUses = func() string {
	const data = `CASE WHEN json_valid(r.data) THEN r.data ELSE '{}' END`
	of := func(what, table, id, live string) string {
		who := `SELECT '` + what + ` ' || r.` + id + ` AS who, `
		from := ` FROM ` + table + ` r`
		where := ` WHERE r.` + live + ` AND (?1 = '' OR r.tenant || '' = ?1)`
		in := func(all, path string) string { // path leads from one of all to the reference
			return who + `CAST(ref.value ->> '` + path + `.version' AS INTEGER) AS version` + from + `, json_each(` + all + `) AS ref` + where +
				` AND coalesce(ref.value ->> '` + path + `.tenant', '') = ?1 AND ref.value ->> '` + path + `.name' = ?2 UNION ALL `
		}
		return in(data+`, '$.secrets'`, `$`) + in(`json_array(json((`+data+`) -> '$.spec.credential'))`, `$`) + in(data+`, '$.debts'`, `$.handle.credential`) +
			who + `NULL` + from + where + ` AND NOT json_valid(r.data)`
	}
	return `(` + of("sandbox", "sandboxes", "shown_id", "state <> 'terminated'") + ` UNION ALL ` + of("snapshot", "snapshots", "id", "state <> 'dropped'") + `)`
}()

const (
	selectSecret  = `SELECT tenant, name, version, sealed, created_at FROM secrets WHERE tenant = ? AND name = ?`
	newestSecret  = selectSecret + ` ORDER BY version DESC LIMIT 1`
	secretVersion = selectSecret + ` AND version = ?`

	newestVersion = `SELECT max(version) FROM secrets WHERE tenant = ? AND name = ? HAVING count(*) > 0`
	hasVersion    = `SELECT version FROM secrets WHERE tenant = ? AND name = ? AND version = ?`

	// max(version) makes created_at that of the same row.
	listSecrets = `SELECT name, max(version), created_at, count(*) FROM secrets WHERE tenant = ? GROUP BY name ORDER BY name LIMIT ?`

	countSecrets  = `SELECT count(DISTINCT name), count(CASE WHEN name = ? THEN 1 END) FROM secrets WHERE tenant = ?`
	insertSecret  = `INSERT INTO secrets (tenant, name, version, sealed, created_at) VALUES (?, ?, ?, ?, ?)`
	deleteSecret  = `DELETE FROM secrets WHERE tenant = ? AND name = ?`
	manyVersioned = `SELECT tenant, name FROM secrets GROUP BY tenant, name HAVING count(*) > 1`
)

var (
	lastSecretVersion = `SELECT coalesce(max(version), 0) FROM
(SELECT version FROM secrets WHERE tenant = ?1 AND name = ?2 UNION ALL SELECT version FROM ` + secretUses + `)`

	// With a NULL among the uses, NOT IN is never true: then nothing is removed.
	pruneSecret = `DELETE FROM secrets WHERE tenant = ?1 AND name = ?2
AND version < (SELECT max(n.version) FROM secrets n WHERE n.tenant = ?1 AND n.name = ?2)
AND version NOT IN (SELECT version FROM ` + secretUses + `)`

	whoUsesSecret = `SELECT count(*), coalesce((SELECT group_concat(who, ', ') FROM (SELECT DISTINCT who FROM ` + secretUses + ` LIMIT ?3)), '')
FROM (SELECT DISTINCT who FROM ` + secretUses + `)`
)

// maxUsersNamed bounds how many records a refusal names.
const maxUsersNamed = 10

// fillSecrets returns sb with the versions of its secrets and of its key; see sandboxer.Store.CreateSandbox.
func (t *tx) fillSecrets(sb *sandboxer.Sandbox) (own sandboxer.Sandbox, err error) {
	own = *sb
	if own.Spec.Credential.Name != "" {
		own.Spec.Credential, err = t.fillSecret(sb, own.Spec.Credential)
	}
	own.Secrets = maps.Clone(sb.Secrets)
	for variable, ref := range own.Secrets {
		if err == nil {
			own.Secrets[variable], err = t.fillSecret(sb, ref)
		}
	}
	return own, err
}

// fillSecret returns a reference of sb with its version.
func (t *tx) fillSecret(sb *sandboxer.Sandbox, ref sandboxer.SecretRef) (sandboxer.SecretRef, error) {
	if ref.Tenant != "" && ref.Tenant != sb.Tenant {
		return ref, sandboxer.E(sandboxer.Invalid, nil, "sandbox %s cannot use a secret of another tenant", sb.Shown())
	}
	query, args := newestVersion, []any{ref.Tenant, ref.Name}
	if ref.Version > 0 {
		query, args = hasVersion, append(args, ref.Version)
	}
	found, err := t.row(query, args, &ref.Version)
	if err == nil && !found {
		err = noSecret(ref)
	}
	return ref, err
}

func noSecret(ref sandboxer.SecretRef) error {
	e := sandboxer.E(sandboxer.NotFound, nil, "there is no %s", ref)
	switch {
	case ref.Version > 0: // a later value never takes its place
		return e.WithHint("it was removed, and what refers to it cannot be used any more")
	case ref.Tenant == "":
		return e.WithHint("an administrator sets it: sandboxer secret set --operator %s", ref.Name)
	}
	return e.WithHint("set it: sandboxer secret set %s", ref.Name)
}

// putSecret inserts r and removes what it replaces; see sandboxer.Writes.
func (t *tx) putSecret(r sandboxer.SecretRecord) error {
	if err := sandboxer.CheckSecretName(r.Name); err != nil {
		return err
	}
	var last, names, versions int64
	if _, err := t.row(lastSecretVersion, []any{r.Tenant, r.Name}, &last); err != nil {
		return err
	}
	if r.Version <= last || len(r.Sealed) == 0 {
		return sandboxer.E(sandboxer.Conflict, nil, "%s was changed by another request", r.SecretRef)
	}
	if _, err := t.exec(insertSecret, r.Tenant, r.Name, r.Version, r.Sealed, micros(r.CreatedAt)); err != nil {
		return err
	}
	if _, err := t.exec(pruneSecret, r.Tenant, r.Name); err != nil {
		return err
	}
	if _, err := t.row(countSecrets, []any{r.Name, r.Tenant}, &names, &versions); err != nil {
		return err
	}
	switch {
	case names > sandboxer.MaxSecrets:
		return sandboxer.E(sandboxer.Exhausted, nil, "there can be no more than %d secrets of one tenant", sandboxer.MaxSecrets).
			WithHint("remove those that are not needed: sandboxer secret ls; sandboxer secret rm NAME")
	case versions > sandboxer.MaxSecretVersions:
		return sandboxer.E(sandboxer.Exhausted, nil, "secret %s has %d versions that sandboxes and snapshots still use, and can have no more", r.Name, versions-1).
			WithHint("destroy the oldest sandboxes and snapshots that use it, or set the secret under another name")
	}
	return nil
}

// removeSecret removes a secret; see sandboxer.Writes.
func (t *tx) removeSecret(r sandboxer.SecretRemoval) error {
	if !r.Force {
		var n int
		var who string
		if _, err := t.row(whoUsesSecret, []any{r.Tenant, r.Name, maxUsersNamed}, &n, &who); err != nil {
			return err
		}
		if n > maxUsersNamed {
			who += " and " + strconv.Itoa(n-maxUsersNamed) + " more"
		}
		if n > 0 {
			return sandboxer.E(sandboxer.Conflict, nil, "secret %s is needed by %s", r.Name, who).
				WithHint("destroy them first; or an administrator removes it all the same, and they can no longer read it: sandboxer secret rm --force %s", r.Name)
		}
	}
	n, err := t.exec(deleteSecret, r.Tenant, r.Name)
	if err == nil && n == 0 {
		e := sandboxer.E(sandboxer.NotFound, nil, "there is no %s", sandboxer.SecretRef{Tenant: r.Tenant, Name: r.Name}).WithHint("list them: sandboxer secret ls")
		if err = e; r.Tenant == "" {
			err = e.WithHint("list them: sandboxer secret ls --operator")
		}
	}
	return err
}

// Secret returns one version of a secret; see sandboxer.Store.
func (s *Store) Secret(ctx context.Context, ref sandboxer.SecretRef) (sandboxer.SecretRecord, error) {
	query, args := newestSecret, []any{ref.Tenant, ref.Name}
	if ref.Version > 0 {
		query, args = secretVersion, append(args, ref.Version)
	}
	var r sandboxer.SecretRecord
	var at int64
	found, err := s.row(ctx, query, args, &r.Tenant, &r.Name, &r.Version, &r.Sealed, &at)
	if err == nil && !found {
		err = noSecret(ref)
	}
	if err != nil {
		return sandboxer.SecretRecord{}, err
	}
	r.CreatedAt = fromMicros(at)
	return r, nil
}

// Secrets lists a tenant's secrets; see sandboxer.Store.
func (s *Store) Secrets(ctx context.Context, tenant string) (all []sandboxer.SecretRecord, err error) {
	err = s.rows(ctx, listSecrets, []any{tenant, sandboxer.MaxSecrets}, func(rows *sql.Rows) error {
		r := sandboxer.SecretRecord{SecretRef: sandboxer.SecretRef{Tenant: tenant}}
		var at int64
		if err := rows.Scan(&r.Name, &r.Version, &at, &r.Versions); err != nil {
			return err
		}
		r.CreatedAt = fromMicros(at)
		all = append(all, r)
		return nil
	})
	return all, err
}

// NextSecretVersion returns the version that a secret may get next.
func (s *Store) NextSecretVersion(ctx context.Context, tenant, name string) (last int64, err error) {
	_, err = s.row(ctx, lastSecretVersion, []any{tenant, name}, &last)
	return last + 1, err
}

// ForgetSecretVersions removes versions that nothing needs any more; see sandboxer.Store.
func (s *Store) ForgetSecretVersions(ctx context.Context) error {
	var several [][]any
	err := s.rows(ctx, manyVersioned, nil, func(rows *sql.Rows) error {
		var tenant, name string
		err := rows.Scan(&tenant, &name)
		several = append(several, []any{tenant, name})
		return err
	})
	for _, of := range several {
		if err == nil {
			err = s.commit(ctx, false, func(t *tx) error { _, err := t.exec(pruneSecret, of...); return err }, sandboxer.Writes{})
		}
	}
	return err
}

-- Times are microseconds since 1970 in UTC; money is in millionths of a credit.

-- +goose Up

-- One row for every incarnation of a sandbox, kept after its end. data is the whole
-- record as JSON; the other columns repeat what is searched or must be unique, or
-- hold what JSON would not keep byte for byte.
CREATE TABLE sandboxes (
	seq         INTEGER PRIMARY KEY AUTOINCREMENT, -- order of creation
	id          TEXT    NOT NULL,
	generation  INTEGER NOT NULL,
	version     INTEGER NOT NULL,
	tenant      TEXT    NOT NULL,
	name        TEXT    NOT NULL,
	profile     TEXT    NOT NULL,
	extension   TEXT    NOT NULL,
	state       TEXT    NOT NULL,
	due_at      INTEGER,                           -- the earlier of expiry and retry
	labels      TEXT    NOT NULL,                  -- JSON object
	data        TEXT    NOT NULL,
	handle_data BLOB,
	sealed_env  BLOB,
	UNIQUE (id, generation)
) STRICT;

CREATE UNIQUE INDEX sandboxes_live_id ON sandboxes (id) WHERE state <> 'terminated';
CREATE UNIQUE INDEX sandboxes_live_name ON sandboxes (tenant, name) WHERE state <> 'terminated' AND name <> '';
CREATE INDEX sandboxes_live ON sandboxes (seq, due_at) WHERE state <> 'terminated';
CREATE INDEX sandboxes_tenant ON sandboxes (tenant, seq);

CREATE TABLE events (
	seq        INTEGER PRIMARY KEY AUTOINCREMENT,
	at         INTEGER NOT NULL,
	sandbox_id TEXT    NOT NULL,
	generation INTEGER NOT NULL,
	tenant     TEXT    NOT NULL,
	type       TEXT    NOT NULL,
	from_state TEXT    NOT NULL,
	to_state   TEXT    NOT NULL,
	cause      TEXT    NOT NULL,
	actor      TEXT    NOT NULL,
	message    TEXT    NOT NULL
) STRICT;

CREATE INDEX events_sandbox ON events (sandbox_id, seq);
CREATE INDEX events_tenant ON events (tenant, seq);

CREATE TABLE entries (
	seq        INTEGER PRIMARY KEY AUTOINCREMENT,
	key        TEXT    NOT NULL UNIQUE,
	tenant     TEXT    NOT NULL,
	sandbox_id TEXT    NOT NULL,
	generation INTEGER NOT NULL,
	type       TEXT    NOT NULL,
	amount     INTEGER NOT NULL,
	note       TEXT    NOT NULL,
	at         INTEGER NOT NULL
) STRICT;

CREATE INDEX entries_tenant ON entries (tenant, seq);
CREATE INDEX entries_sandbox ON entries (sandbox_id, seq);

-- The sums over entries, kept up in the transaction that adds an entry, so that
-- asking for one does not become slower with every entry ever written.
CREATE TABLE balances (
	tenant  TEXT    PRIMARY KEY,
	balance INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE open_holds (
	tenant     TEXT    NOT NULL,
	sandbox_id TEXT    NOT NULL,
	generation INTEGER NOT NULL,
	amount     INTEGER NOT NULL,
	PRIMARY KEY (tenant, sandbox_id, generation)
) STRICT, WITHOUT ROWID;

CREATE TABLE idempotency_keys (
	tenant     TEXT    NOT NULL,
	key        TEXT    NOT NULL,
	digest     TEXT    NOT NULL,
	sandbox_id TEXT    NOT NULL,
	generation INTEGER NOT NULL,
	at         INTEGER NOT NULL,
	PRIMARY KEY (tenant, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_keys_at ON idempotency_keys (at);

CREATE TABLE api_keys (
	id           TEXT    PRIMARY KEY,
	name         TEXT    NOT NULL,
	tenant       TEXT    NOT NULL,
	hash         BLOB,
	scopes       TEXT    NOT NULL, -- JSON array
	created_at   INTEGER NOT NULL,
	expires_at   INTEGER NOT NULL,
	revoked_at   INTEGER NOT NULL,
	last_used_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

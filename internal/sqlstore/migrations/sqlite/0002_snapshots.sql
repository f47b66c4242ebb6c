-- +goose Up

-- One row for every snapshot, kept after it was dropped; as in sandboxes, data is the
-- whole record.
CREATE TABLE snapshots (
	seq        INTEGER PRIMARY KEY AUTOINCREMENT, -- order of creation
	id         TEXT    NOT NULL UNIQUE,
	version    INTEGER NOT NULL,
	tenant     TEXT    NOT NULL,
	name       TEXT    NOT NULL,
	sandbox_id TEXT    NOT NULL,
	parent     TEXT    NOT NULL,
	purpose    TEXT    NOT NULL,
	state      TEXT    NOT NULL,
	due_at     INTEGER,                           -- the earlier of expiry and retry
	data       TEXT    NOT NULL,
	sealed_env BLOB
) STRICT;

CREATE UNIQUE INDEX snapshots_name ON snapshots (tenant, name) WHERE state <> 'dropped' AND name <> '';
CREATE INDEX snapshots_live ON snapshots (seq, due_at) WHERE state <> 'dropped';
CREATE INDEX snapshots_tenant ON snapshots (tenant, seq);
CREATE INDEX snapshots_sandbox ON snapshots (sandbox_id, seq);
CREATE INDEX snapshots_parent ON snapshots (parent, seq) WHERE parent <> '';

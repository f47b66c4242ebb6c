-- +goose Up

-- An ID that a caller chose is its tenant's: shown_id is what the caller chose, and id, which
-- is unique in the installation, what objects outside carry. The table is made anew, so that
-- the column lies before data and can be read where that is damaged.
CREATE TABLE sandboxes_shown (
	seq         INTEGER PRIMARY KEY AUTOINCREMENT, -- order of creation
	id          TEXT    NOT NULL,
	generation  INTEGER NOT NULL,
	version     INTEGER NOT NULL,
	tenant      TEXT    NOT NULL,
	shown_id    TEXT    NOT NULL,
	name        TEXT    NOT NULL,
	profile     TEXT    NOT NULL,
	extension   TEXT    NOT NULL,
	state       TEXT    NOT NULL,
	due_at      INTEGER,                           -- the earlier of expiry and retry
	ended_at    INTEGER,
	labels      TEXT    NOT NULL,                  -- JSON object
	data        TEXT    NOT NULL,
	handle_data BLOB,
	sealed_env  BLOB,
	UNIQUE (id, generation)
) STRICT;

INSERT INTO sandboxes_shown (seq, id, generation, version, tenant, shown_id, name, profile, extension, state, due_at, ended_at, labels, data, handle_data, sealed_env)
SELECT seq, id, generation, version, tenant, id, name, profile, extension, state, due_at, ended_at, labels, data, handle_data, sealed_env FROM sandboxes;

-- No number of a record comes again, also of one that was forgotten.
INSERT INTO sqlite_sequence (name, seq) SELECT 'sandboxes_shown', 0 WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'sandboxes_shown');
UPDATE sqlite_sequence SET seq = (SELECT max(seq) FROM sqlite_sequence WHERE name IN ('sandboxes', 'sandboxes_shown')) WHERE name = 'sandboxes_shown';

DROP TABLE sandboxes;
ALTER TABLE sandboxes_shown RENAME TO sandboxes;

CREATE UNIQUE INDEX sandboxes_live_id ON sandboxes (id) WHERE state <> 'terminated';
CREATE UNIQUE INDEX sandboxes_live_shown ON sandboxes (tenant, shown_id) WHERE state <> 'terminated';
CREATE UNIQUE INDEX sandboxes_live_name ON sandboxes (tenant, name) WHERE state <> 'terminated' AND name <> '';
CREATE INDEX sandboxes_live ON sandboxes (seq, due_at) WHERE state <> 'terminated';
CREATE INDEX sandboxes_tenant ON sandboxes (tenant, seq);
CREATE INDEX sandboxes_shown ON sandboxes (shown_id, tenant, seq, id, generation);
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE state = 'terminated';

-- Empty where it is sandbox_id.
ALTER TABLE events ADD COLUMN shown_id TEXT NOT NULL DEFAULT '';
ALTER TABLE entries ADD COLUMN shown_id TEXT NOT NULL DEFAULT '';
CREATE INDEX entries_shown ON entries (shown_id, seq) WHERE shown_id <> '';

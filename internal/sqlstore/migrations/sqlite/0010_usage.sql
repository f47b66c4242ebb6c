-- +goose Up

-- What sandboxes used and cost. data is the whole row as JSON; the other columns repeat what is searched.
CREATE TABLE usage (
	seq    INTEGER PRIMARY KEY AUTOINCREMENT, -- order of commits
	key    TEXT    NOT NULL UNIQUE,
	tenant TEXT    NOT NULL,
	at     INTEGER NOT NULL,
	data   TEXT    NOT NULL
) STRICT;
CREATE INDEX usage_tenant ON usage (tenant, seq);
CREATE INDEX usage_at ON usage (at);

-- How far each sink is: seq is that of the last row which was delivered, or became a dead letter.
CREATE TABLE sinks (
	name    TEXT    PRIMARY KEY,
	seq     INTEGER NOT NULL,
	problem TEXT    NOT NULL,
	since   INTEGER NOT NULL,
	stopped INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Rows that a sink refused; again is 1 for those that are to be delivered once more.
CREATE TABLE dead_letters (
	sink   TEXT    NOT NULL,
	seq    INTEGER NOT NULL,
	at     INTEGER NOT NULL,
	reason TEXT    NOT NULL,
	again  INTEGER NOT NULL,
	PRIMARY KEY (sink, seq)
) STRICT, WITHOUT ROWID;

-- Query.Billing.
ALTER TABLE sandboxes ADD COLUMN billing TEXT NOT NULL DEFAULT '';
CREATE INDEX sandboxes_billing ON sandboxes (billing) WHERE billing <> '';
UPDATE sandboxes SET billing = 'pending' WHERE state = 'terminated' AND json_valid(data) AND data ->> '$.billing' = 'pending';

-- +goose Up

-- What was charged to a tenant on each day in UTC: the sums over posts in entries, kept up as balances are. day counts
-- from 1970. key_id is the API key for which it counts, or empty.
CREATE TABLE spent (
	tenant TEXT    NOT NULL,
	day    INTEGER NOT NULL,
	key_id TEXT    NOT NULL,
	amount INTEGER NOT NULL,
	PRIMARY KEY (tenant, day, key_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX spent_key ON spent (key_id, day) WHERE key_id <> '';
INSERT INTO spent (tenant, day, key_id, amount)
SELECT tenant, at / 86400000000 AS day, '', sum(amount) FROM entries WHERE type = 'post' GROUP BY tenant, day;

-- The API key that made a hold, and the one for which what is on hold counts: that of the last hold that has one.
ALTER TABLE entries ADD COLUMN key_id TEXT NOT NULL DEFAULT '';
ALTER TABLE open_holds ADD COLUMN key_id TEXT NOT NULL DEFAULT '';
CREATE INDEX open_holds_key ON open_holds (key_id) WHERE key_id <> '';

ALTER TABLE api_keys ADD COLUMN max_spend TEXT NOT NULL DEFAULT '{}'; -- JSON

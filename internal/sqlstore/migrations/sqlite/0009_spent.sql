-- +goose Up

-- What was charged to a tenant on each day in UTC: the sums over posts in entries, kept up as balances are. day counts
-- from 1970.
CREATE TABLE spent (
	tenant TEXT    NOT NULL,
	day    INTEGER NOT NULL,
	amount INTEGER NOT NULL,
	PRIMARY KEY (tenant, day)
) STRICT, WITHOUT ROWID;
INSERT INTO spent (tenant, day, amount) SELECT tenant, at / 86400000000 AS day, sum(amount) FROM entries WHERE type = 'post' GROUP BY tenant, day;

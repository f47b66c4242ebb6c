-- +goose Up

-- Secrets of tenants; those of tenant '' are the operator's. Records of sandboxes and snapshots refer to them in
-- data ($.secrets).
CREATE TABLE secrets (
	tenant     TEXT    NOT NULL,
	name       TEXT    NOT NULL,
	version    INTEGER NOT NULL,
	sealed     BLOB    NOT NULL,
	created_at INTEGER NOT NULL,
	PRIMARY KEY (tenant, name, version)
) STRICT;

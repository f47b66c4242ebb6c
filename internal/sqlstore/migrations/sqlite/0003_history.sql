-- +goose Up

-- When a sandbox ended, so that old ones are found without reading every record. An
-- ended one whose record does not say counts as ended now.
ALTER TABLE sandboxes ADD COLUMN ended_at INTEGER;
UPDATE sandboxes SET ended_at = coalesce(
	CASE WHEN json_valid(data) THEN CAST(unixepoch(data ->> '$.ended_at', 'subsec') * 1000000 AS INTEGER) END,
	unixepoch() * 1000000) WHERE state = 'terminated';
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE state = 'terminated';
CREATE INDEX events_at ON events (at);

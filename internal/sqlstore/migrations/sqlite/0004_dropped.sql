-- +goose Up

-- What is due for a dropped snapshot is to be forgotten: due_at is when it was dropped.
CREATE INDEX snapshots_dropped ON snapshots (due_at) WHERE state = 'dropped';

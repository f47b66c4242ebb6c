-- +goose Up

-- What the database knows of itself and of whose it is: one row. epoch is drawn anew at
-- every start and former is the one before; the file "mark" beside the database has the same.
-- went_back_at is when the database was last found older than that file, or 0. owner
-- and key_check say which installation and which sealing key it was used with.
CREATE TABLE installation (
	id           INTEGER PRIMARY KEY CHECK (id = 1),
	epoch        TEXT    NOT NULL,
	former       TEXT    NOT NULL,
	went_back_at INTEGER NOT NULL,
	owner        TEXT    NOT NULL,
	key_check    TEXT    NOT NULL
) STRICT;
INSERT INTO installation VALUES (1, '', '', 0, '', '');

-- +goose Up

-- Whether a sandbox has, or may have, something on its backend (Sandbox.TakesRoom), so that
-- those who do can be counted in the transaction that adds one.
ALTER TABLE sandboxes ADD COLUMN takes_room INTEGER NOT NULL DEFAULT 1;
UPDATE sandboxes SET takes_room = 0 WHERE state = 'terminated' OR state = 'paused' AND CASE WHEN json_valid(data)
THEN data ->> '$.pause.depth' <> 'freeze' AND NOT coalesce(data ->> '$.pause.undo', 0) ELSE 0 END;

CREATE INDEX sandboxes_room_extension ON sandboxes (extension) WHERE takes_room = 1;
CREATE INDEX sandboxes_room_profile ON sandboxes (profile, tenant) WHERE takes_room = 1 AND tenant <> '';

package sqlstore

import (
	"context"

	"github.com/sand-boxer/sandboxer"
)

// An index alone answers the first and the last. A pooled sandbox has no tenant.
const (
	extensionRoom = `SELECT count(*) FROM sandboxes WHERE extension = ? AND takes_room = 1`
	tenantsRoom   = extensionRoom + ` AND tenant <> ''`
	profileRoom   = `SELECT count(*) FROM sandboxes WHERE profile = ? AND takes_room = 1 AND tenant <> ''`
)

// roomUse counts what r bounds.
func (t *tx) roomUse(r *sandboxer.Room) (use sandboxer.RoomUse, err error) {
	if r != nil && r.ExtensionMax > 0 {
		if _, err := t.row(extensionRoom, []any{r.Extension}, &use.Extension); err != nil {
			return use, err
		}
	}
	if r != nil && r.ProfileMax > 0 {
		_, err = t.row(profileRoom, []any{r.Profile}, &use.Profile)
	}
	return use, err
}

// RoomUse counts what r bounds, without pools; see sandboxer.Store.
func (s *Store) RoomUse(ctx context.Context, r sandboxer.Room) (use sandboxer.RoomUse, err error) {
	if r.ExtensionMax > 0 {
		if _, err := s.row(ctx, tenantsRoom, []any{r.Extension}, &use.Extension); err != nil {
			return use, err
		}
	}
	if r.ProfileMax > 0 {
		_, err = s.row(ctx, profileRoom, []any{r.Profile}, &use.Profile)
	}
	return use, err
}

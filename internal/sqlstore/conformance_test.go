package sqlstore

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/storetest"
)

func TestMain(m *testing.M) {
	if child() {
		return
	}
	goleak.VerifyTestMain(m)
}

func TestConformance(t *testing.T) {
	dirs := map[sandboxer.Store]string{}
	open := func(t *testing.T, dir string) sandboxer.Store {
		s, err := OpenSQLite(t.Context(), dir, Options{Reserve: -1})
		if err != nil {
			t.Fatal(err)
		}
		dirs[s] = dir
		return s
	}
	storetest.Run(t,
		func(t *testing.T) sandboxer.Store { return open(t, t.TempDir()) },
		func(t *testing.T, s sandboxer.Store) sandboxer.Store {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			return open(t, dirs[s])
		},
		func(t *testing.T, s sandboxer.Store, of storetest.Record, id string) {
			table := map[storetest.Record]cursor{storetest.SandboxRecord: sandboxes.table, storetest.SnapshotRecord: snapshots.table}[of]
			garble(t, s.(*Store), table, id, `{"id":`)
		})
}

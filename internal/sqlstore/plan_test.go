package sqlstore

import (
	"database/sql"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestPlans holds the queries that must not become slower as history grows to their
// indexes.
func TestPlans(t *testing.T) {
	s := openTest(t, t.TempDir())
	live := []sandboxer.State{sandboxer.Running, sandboxer.Terminating}
	for _, c := range []struct {
		q    sandboxer.Query
		want string
	}{
		{sandboxer.Query{}, "SCAN sandboxes"}, // by its key, which is the order
		{sandboxer.Query{Tenant: "t"}, "sandboxes_tenant"},
		{sandboxer.Query{States: live}, "sandboxes_live"},
		{sandboxer.Query{States: live, DueBefore: time.Now()}, "sandboxes_live"},
		{sandboxer.Query{States: live, Tenant: "t"}, "sandboxes_live"},
		{sandboxer.Query{States: live, Tenant: "t", Name: "n"}, "sandboxes_live_name"},
		{sandboxer.Query{States: live, Extension: "e"}, "sandboxes_live"},
		{sandboxer.Query{IDPrefix: "a"}, "sandboxes_shown"},
		{sandboxer.Query{IDPrefix: "a", Tenant: "t"}, "sandboxes_shown"},
		{sandboxer.Query{ShownID: "a"}, "sandboxes_shown"},
		{sandboxer.Query{ShownID: "a", Tenant: "t"}, "sandboxes_shown"},
		{sandboxer.Query{ShownID: "a", Tenant: "t", States: live}, "sandboxes_live_shown"},
	} {
		f := sandboxFilter(c.q)
		plan := explain(t, s, selectSandbox+f.String()+` ORDER BY seq DESC LIMIT 10`, f.args)
		if !uses(plan, c.want) {
			t.Errorf("Sandboxes(%+v): plan %q; want %s", c.q, plan, c.want)
		}
	}
	for query, want := range map[string]string{
		sandboxByID:       "sqlite_autoindex_sandboxes_1",
		sandboxGeneration: "sqlite_autoindex_sandboxes_1",
		sandboxes.index:   "COVERING INDEX sqlite_autoindex_sandboxes_1",
		oldSandboxes:      "sandboxes_ended",
		forgetSnapshots:   "snapshots_dropped",
		snapshots.index:   "COVERING INDEX sqlite_autoindex_snapshots_1",
		forgetEvents:      "events_at",
		tenantsShown:      "COVERING INDEX sandboxes_shown",
		newestShown:       "COVERING INDEX sandboxes_shown",
		liveShown:         "sandboxes_live_shown",
		newestSandbox:     "sqlite_autoindex_sandboxes_1",
		updateSandbox:     "sqlite_autoindex_sandboxes_1",
		apiKeyByID:        "PRIMARY KEY",
		tenantBalance:     "PRIMARY KEY",
		keySpend:          "spent USING INDEX spent_key (key_id=? AND day",
		tenantSpend:       "spent USING PRIMARY KEY (tenant=? AND day",

		extensionRoom: "COVERING INDEX sandboxes_room_extension",
		profileRoom:   "COVERING INDEX sandboxes_room_profile",

		quotaUseQuery(sandboxer.QuotaSandboxes):     "sandboxes_live",
		quotaUseQuery(sandboxer.QuotaSnapshotBytes): "snapshots_live",
	} {
		if plan := explain(t, s, query, make([]any, strings.Count(query, "?"))); !uses(plan, want) {
			t.Errorf("%s: plan %q; want %s", query, plan, want)
		}
	}
	for sandbox, want := range map[string]string{"": "_tenant", "a": "_sandbox"} {
		for _, table := range []string{"events", "entries"} {
			f := pageFilter("t", sandbox)
			f.add("seq > ?", 1)
			if plan := explain(t, s, `SELECT * FROM `+table+f.String()+` ORDER BY seq LIMIT 10`, f.args); !uses(plan, table+want) {
				t.Errorf("%s of sandbox %q: plan %q; want %s", table, sandbox, plan, table+want)
			}
		}
	}
}

// uses reports whether plan names index.
func uses(plan, index string) bool {
	return regexp.MustCompile(regexp.QuoteMeta(index) + `\b`).MatchString(plan)
}

func explain(t *testing.T, s *Store, query string, args []any) (plan string) {
	t.Helper()
	err := s.rows(t.Context(), "EXPLAIN QUERY PLAN "+query, args, func(r *sql.Rows) error {
		var id, parent, unused int
		var detail string
		err := r.Scan(&id, &parent, &unused, &detail)
		plan += detail + "; "
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

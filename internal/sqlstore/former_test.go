package sqlstore

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/compattest"
)

// Every database of a former build is opened, migrated, and read to its last record.
func TestFormerDatabases(t *testing.T) {
	schemas := map[int64]bool{}
	for _, f := range compattest.Fixtures(t) {
		schemas[f.Schema] = true
		t.Run(f.Name, func(t *testing.T) {
			dir := t.TempDir()
			f.Install(t, dir)
			data := filepath.Join(dir, compattest.DataDir)
			s := openTest(t, data)
			_, err := os.Stat(filepath.Join(data, migrationBackupFile(newestSchema(t))))
			if migrated := f.Schema < newestSchema(t); migrated != (err == nil) {
				t.Errorf("from schema %d to %d: the backup before it: %v", f.Schema, newestSchema(t), err)
			}
			all, _, err := s.Sandboxes(t.Context(), sandboxer.Query{Limit: sandboxer.MaxPage})
			if err != nil {
				t.Fatal(err)
			}
			var placed int
			if _, err := s.row(t.Context(), `SELECT count(*) FROM sandboxes WHERE takes_room = 1`, nil, &placed); err != nil {
				t.Error(err)
			}
			for _, sb := range all {
				if sb.TakesRoom() {
					placed--
				}
			}
			if placed != 0 {
				t.Errorf("%d sandboxes more than those that do are counted as taking room", placed)
			}
			states := map[sandboxer.State][]string{}
			for _, sb := range all {
				if sb.Damaged != "" || sb.Version == 0 || !sb.State.Valid() || sb.CreatedAt.IsZero() || (sb.Handle.SandboxID == sb.ID) == (sb.State == sandboxer.Paused) {
					t.Errorf("sandbox %s is read as %+v", sb.ID, sb)
				}
				if len(sb.SealedEnv) == 0 || sb.Spec.Labels["is"] != sb.Name {
					t.Errorf("sandbox %s lost its environment or labels: %+v", sb.Name, sb.Spec)
				}
				states[sb.State] = append(states[sb.State], sb.Name)
				if _, err := s.Events(t.Context(), sandboxer.EventQuery{SandboxID: sb.ID}); err != nil {
					t.Error(err)
				}
			}
			for state, want := range map[sandboxer.State][]string{
				sandboxer.Running: f.Running, sandboxer.Paused: f.Paused, sandboxer.Terminated: f.Ended,
			} {
				if got := states[state]; !equal(got, want) {
					t.Errorf("%s: %q; want %q", state, got, want)
				}
			}
			snaps, _, err := s.Snapshots(t.Context(), sandboxer.SnapshotQuery{Purposes: []sandboxer.SnapshotPurpose{""}, Limit: sandboxer.MaxPage})
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, r := range snaps {
				if r.Damaged != "" || r.State != sandboxer.SnapshotSealed || r.Bytes() == 0 {
					t.Errorf("snapshot %s is read as %+v", r.ID, r)
				}
				names = append(names, r.Name)
			}
			if !equal(names, f.Snapshots) {
				t.Errorf("snapshots %q; want %q", names, f.Snapshots)
			}
			keys, err := s.APIKeys(t.Context(), "")
			if err != nil || len(keys) != 1 || keys[0].Name != "fixture" || !slices.Equal(keys[0].Scopes, []sandboxer.Scope{sandboxer.ScopeRead}) {
				t.Errorf("keys %+v, %v", keys, err)
			}
			if got, err := s.Balance(t.Context(), "acme"); err != nil || got != 12_500_000 {
				t.Errorf("the balance is %d, %v", got, err)
			}
			if _, _, err := s.Entries(t.Context(), sandboxer.EntryQuery{}); err != nil {
				t.Error(err)
			}
			if _, err := s.OpenHolds(t.Context()); err != nil {
				t.Error(err)
			}
			if err := verify(t.Context(), filepath.Join(data, dbFile)); err != nil {
				t.Error(err)
			}

			// And it is written like any other.
			sb := all[slices.IndexFunc(all, func(sb *sandboxer.Sandbox) bool { return sb.State == sandboxer.Running })]
			sb.Message = "changed"
			if err := s.UpdateSandbox(t.Context(), sb, sandboxer.Writes{Events: []sandboxer.Event{{SandboxID: sb.ID, Generation: 1, Tenant: sb.Tenant, Type: sandboxer.EventWarning}}}); err != nil {
				t.Error(err)
			}
			if got, err := s.Sandbox(t.Context(), sb.ID); err != nil || got.Message != "changed" {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
	for n := range newestSchema(t) {
		if !schemas[n+1] {
			t.Errorf("no fixture has a database of schema %d: commit what makes it, and then the fixture: scripts/fixture.sh COMMIT", n+1)
		}
	}
}

func equal(got, want []string) bool {
	got, want = slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))
	return slices.Equal(got, want)
}

func newestSchema(t *testing.T) int64 {
	t.Helper()
	files, err := migrations.ReadDir("migrations/sqlite")
	if err != nil {
		t.Fatal(err)
	}
	return int64(len(files))
}

// A database of a newer program is not called damaged, and the way out is named: the newer
// program, or the backup from before the upgrade.
func TestNewerFormats(t *testing.T) {
	dir := used(t, 3)
	s, err := openSQLite(t.Context(), dir, Options{Reserve: -1}, later(t, "CREATE TABLE later (n INTEGER);"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = OpenSQLite(t.Context(), dir, Options{Reserve: -1})
	backup := filepath.Join(dir, migrationBackupFile(900))
	refused(t, err, sandboxer.Failed, dir, "newer sandboxer", "schema 900", "upgrade", "sandboxer backup restore --data-dir "+dir+" "+backup)
	if strings.Contains(err.Error(), "damaged") {
		t.Errorf("%v", err)
	}
	if _, _, err := Restore(t.Context(), dir, backup); err != nil {
		t.Fatal(err)
	}
	if _, err := openTest(t, dir).Sandbox(t.Context(), "s2"); err != nil {
		t.Error(err)
	}

	// A backup of the newer program's is of no use to this one.
	other := t.TempDir()
	s, err = openSQLite(t.Context(), other, Options{Reserve: -1}, later(t, "CREATE TABLE later (n INTEGER);"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = OpenSQLite(t.Context(), other, Options{Reserve: -1})
	refused(t, err, sandboxer.Failed, other, "newer sandboxer", "upgrade")
	if strings.Contains(sandboxer.HintOf(err), "backup restore") {
		t.Errorf("there is no backup to restore: %s", sandboxer.HintOf(err))
	}
}

func TestFormOfDatabase(t *testing.T) {
	s := openTest(t, t.TempDir())
	rows, err := s.readers.QueryContext(t.Context(), `SELECT coalesce(sql, name) FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' ORDER BY name`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var form strings.Builder
	for rows.Next() {
		var statement string
		if err := rows.Scan(&statement); err != nil {
			t.Fatal(err)
		}
		form.WriteString(statement + "\n")
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	compattest.CheckForm(t, "database", form.String())
	compattest.CheckForm(t, "database-records", compattest.Shape("", sandboxer.Sandbox{}, sandboxer.SnapshotRecord{}, sandboxer.MaxSpend{}, sandboxer.UsageRow{}))

	var sb sandboxer.Sandbox
	fill(reflect.ValueOf(&sb).Elem(), "sandbox")
	sb.State, sb.Reason, sb.Fault, sb.RestoredAs = sandboxer.Running, sandboxer.ReasonRequested, sandboxer.Timeout, sandboxer.SnapshotNative
	sb.Pause.Depth, sb.Pause.Cause, sb.Unconfirmed = sandboxer.PauseDisk, sandboxer.ReasonExpired, sandboxer.Claimed
	fillSpec(&sb.Spec)
	compattest.CheckSamples(t, "database-sandbox", &sb, func(data []byte) (any, error) {
		return sandboxes.decode(&row{recordKey: recordKey{"id", 1}, version: 1, data: data, handleData: sb.Handle.Data})
	}, "confirmed_at")
	var rec sandboxer.SnapshotRecord
	fill(reflect.ValueOf(&rec).Elem(), "snapshot")
	rec.Kind, rec.Purpose, rec.State = sandboxer.SnapshotBoth, sandboxer.ForPause, sandboxer.SnapshotSealed
	fillSpec(&rec.Spec)
	compattest.CheckSamples(t, "database-snapshot", &rec, func(data []byte) (any, error) {
		return snapshots.decode(&row{recordKey: recordKey{id: "id"}, version: 1, data: data})
	}, "unconfirmed")
	var used sandboxer.UsageRow
	fill(reflect.ValueOf(&used).Elem(), "usage")
	compattest.CheckSamples(t, "database-usage", &used, func(data []byte) (any, error) { return decodeUsage(1, data) })
}

func fillSpec(s *sandboxer.Spec) {
	s.Network.Mode, s.Profile.Network.Mode = sandboxer.NetworkPublic, sandboxer.NetworkNone
	s.Profile.Isolation, s.Profile.Requires = sandboxer.IsolationGVisor, []sandboxer.Capability{sandboxer.CanExec}
	s.Profile.OnTTL, s.Profile.PauseDepth = sandboxer.ExpiryPause, sandboxer.PauseFiles
}

// fill sets every field within v that is stored: strings to the field's name.
func fill(v reflect.Value, name string) {
	switch v.Interface().(type) {
	case time.Time:
		v.Set(reflect.ValueOf(time.Date(2026, 11, 24, 12, 0, 0, 1000, time.UTC)))
		return
	case json.RawMessage:
		v.SetBytes([]byte(`{"v":1}`))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(name)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), name)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), name)
	case reflect.Map:
		e := reflect.New(v.Type().Elem()).Elem()
		fill(e, name)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("key").Convert(v.Type().Key()), e)
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && f.Tag.Get("json") != "-" {
				tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
				fill(v.Field(i), tag)
			}
		}
	default:
		panic("a stored field of kind " + v.Kind().String())
	}
}

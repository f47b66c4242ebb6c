package server

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func TestSnapshotsAndPauses(t *testing.T) {
	r := newRig(t)
	ctx := context.Background()
	_, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	reader, _ := r.key("acme", sandboxer.ScopeRead)
	_, rival := r.key("rival", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb := r.create(c, api.CreateSandbox{Profile: "test", Env: map[string]string{"TOKEN": "canary-env"}})
	if err := c.WriteFile(ctx, sb.ID, "/workspace/f", 0o644, strings.NewReader("saved")); err != nil {
		t.Fatal(err)
	}
	fails := func(what string, err error, kind sandboxer.Kind) {
		t.Helper()
		if sandboxer.KindOf(err) != kind {
			t.Errorf("%s: %v; want %s", what, err, kind)
		}
	}

	snap, err := c.Snapshot(ctx, sb.ID, api.CreateSnapshot{Name: "base", TTL: time.Hour})
	if err != nil || snap.State != sandboxer.SnapshotSealed || snap.SandboxID != sb.ID || snap.Kind != sandboxer.SnapshotNative || snap.ExpiresAt.IsZero() {
		t.Fatalf("snapshot %+v, %v", snap, err)
	}
	if got, err := c.GetSnapshot(ctx, "base"); err != nil || got.ID != snap.ID {
		t.Errorf("get: %+v, %v", got, err)
	}
	l, err := c.Snapshots(ctx, api.SnapshotQuery{Sandbox: sb.ID, States: []sandboxer.SnapshotState{sandboxer.SnapshotSealed}})
	if err != nil || len(l.Items) != 1 || l.Items[0].ID != snap.ID {
		t.Errorf("list: %+v, %v", l, err)
	}
	_, err = rival.GetSnapshot(ctx, snap.ID)
	fails("another tenant's snapshot", err, sandboxer.NotFound)
	_, err = rival.Restore(ctx, snap.ID, api.RestoreSnapshot{})
	fails("restore of another tenant's", err, sandboxer.NotFound)
	for path, body := range map[string]string{
		"/v1/sandboxes/" + sb.ID + "/snapshots": `{}`, "/v1/sandboxes/" + sb.ID + "/fork": `{"count": 1}`, "/v1/sandboxes/" + sb.ID + "/pause": `{}`,
		"/v1/sandboxes/" + sb.ID + "/resume": `{}`, "/v1/snapshots/" + snap.ID + "/restore": `{}`,
	} {
		if got := r.send("POST", path, reader.Token, "application/json", body); got.status != http.StatusForbidden {
			t.Errorf("%s with a key that may only read: %d", path, got.status)
		}
	}

	copied, err := c.Restore(ctx, "base", api.RestoreSnapshot{Name: "copy", TTL: time.Minute, Key: "k"})
	if err != nil || copied.RestoredFrom != snap.ID || copied.RestoredAs != sandboxer.SnapshotNative || copied.State != sandboxer.Running {
		t.Fatalf("restored %+v, %v", copied, err)
	}
	if again, err := c.Restore(ctx, "base", api.RestoreSnapshot{Name: "copy", TTL: time.Minute, Key: "k"}); err != nil || again.ID != copied.ID {
		t.Errorf("the same key restored %+v, %v", again, err)
	}
	f, err := c.ReadFile(ctx, copied.ID, "/workspace/f")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(f); err != nil || string(got) != "saved" {
		t.Errorf("the copy has %q, %v", got, err)
	}
	f.Close()
	made, err := c.Fork(ctx, sb.ID, api.ForkSandbox{Count: 2})
	if err != nil || len(made.Items) != 2 {
		t.Errorf("fork: %+v, %v", made, err)
	}
	once, err := c.Fork(ctx, sb.ID, api.ForkSandbox{Count: 1, Key: "copies"})
	if err != nil {
		t.Fatal(err)
	}
	if again, err := c.Fork(ctx, sb.ID, api.ForkSandbox{Count: 1, Key: "copies"}); err != nil || again.Items[0].ID != once.Items[0].ID {
		t.Errorf("the same key: %+v, %v; want %s", again, err, once.Items[0].ID)
	}
	if _, err := c.Fork(ctx, sb.ID, api.ForkSandbox{Count: 2, Key: "copies"}); !errors.Is(err, sandboxer.Conflict) {
		t.Errorf("another fork under the key: %v", err)
	}
	_, err = c.Fork(ctx, sb.ID, api.ForkSandbox{Count: 101})
	fails("a fork of 101", err, sandboxer.Invalid)

	p, err := c.Pause(ctx, sb.ID, api.PauseSandbox{Depth: sandboxer.PauseFiles})
	if err != nil || p.State != sandboxer.Paused || p.Pause == nil || p.Pause.Depth != sandboxer.PauseFiles || p.Pause.Snapshot == "" {
		t.Fatalf("paused %+v, %v", p, err)
	}
	_, err = c.Run(ctx, sb.ID, api.Exec{Args: []string{"true"}})
	fails("exec on a paused sandbox", err, sandboxer.Conflict)
	_, err = c.Pause(ctx, sb.ID, api.PauseSandbox{Depth: sandboxer.PauseFreeze})
	fails("another depth", err, sandboxer.Conflict)
	if up, err := c.Resume(ctx, sb.ID, api.ResumeSandbox{TTL: time.Minute}); err != nil || up.State != sandboxer.Running || up.Pause != nil || up.ID != sb.ID {
		t.Errorf("resumed %+v, %v", up, err)
	}
	_, err = c.Pause(ctx, sb.ID, api.PauseSandbox{Depth: sandboxer.PauseDisk})
	fails("memory that cannot be saved", err, sandboxer.Unsupported)

	_, err = c.ExportSnapshot(ctx, "base")
	fails("export of a native snapshot", err, sandboxer.Unsupported)
	_, err = c.DiffSnapshots(ctx, "base", "base")
	fails("diff of native snapshots", err, sandboxer.Unsupported)
	_, err = c.ImportSnapshot(ctx, "", "", nil, strings.NewReader("x"))
	fails("import without a snapshot store", err, sandboxer.Unsupported)
	if dropped, err := c.DropSnapshot(ctx, "base"); err != nil || dropped.State != sandboxer.SnapshotDropped {
		t.Errorf("dropped %+v, %v", dropped, err)
	}
	_, err = c.Restore(ctx, snap.ID, api.RestoreSnapshot{})
	fails("restore of a dropped one", err, sandboxer.NotFound)
	if text := r.log.String(); strings.Contains(text, "canary-env") {
		t.Error("the log has a value of the environment")
	}
	a, err := r.admin.Audit(ctx)
	if err != nil || len(a.Violations) > 0 {
		t.Errorf("audit: %+v, %v", a, err)
	}
}

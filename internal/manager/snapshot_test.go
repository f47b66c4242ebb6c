package manager

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// newSnapshotRig is a rig that keeps portable snapshots too.
func newSnapshotRig(t *testing.T, change ...func(*setup)) *rig {
	return newRig(t, func(s *setup) {
		s.opts.SnapshotStore = dirStore{t.TempDir()}
		for _, f := range change {
			f(s)
		}
	})
}

func (r *rig) write(id, name, content string) {
	r.t.Helper()
	if err := r.WriteFile(acme, id, path.Join("/workspace", name), 0o644, strings.NewReader(content)); err != nil {
		r.t.Fatalf("write %s in %s: %v", name, id, err)
	}
}

func (r *rig) wantFile(id, name, want string) {
	r.t.Helper()
	f, err := r.ReadFile(acme, id, path.Join("/workspace", name))
	if err != nil {
		r.t.Errorf("read %s in %s: %v", name, id, err)
		return
	}
	defer f.Close()
	if got, err := io.ReadAll(f); err != nil || string(got) != want {
		r.t.Errorf("%s in %s is %q, %v; want %q", name, id, got, err, want)
	}
}

func (r *rig) snapshot(id string, req SnapshotRequest) *sandboxer.SnapshotRecord {
	r.t.Helper()
	rec, err := r.Snapshot(acme, id, req)
	if err != nil {
		r.t.Fatalf("snapshot of %s: %v", id, err)
	}
	return rec
}

func (r *rig) restored(ref string, req RestoreRequest) *sandboxer.Sandbox {
	r.t.Helper()
	sb, err := r.Restore(acme, ref, req)
	if err != nil {
		r.t.Fatalf("restore of %s: %v", ref, err)
	}
	return sb
}

func (r *rig) env(id, name string) string {
	r.t.Helper()
	var out bytes.Buffer
	x, err := r.Exec(acme, id, sandboxer.Cmd{Args: []string{"sh", "-c", "echo $" + name}, Stdout: &out})
	if err != nil || x.Code != 0 {
		r.t.Fatalf("exec in %s: %+v, %v", id, x, err)
	}
	return strings.TrimSpace(out.String())
}

// clean drops every snapshot and wants nothing left.
func (r *rig) clean() {
	r.t.Helper()
	items, _, err := r.store.Snapshots(admin, sandboxer.SnapshotQuery{States: keptStates})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, rec := range items {
		var err error
		eventually(r.t, "the sweep to leave "+rec.ID, func() bool { // it may be dropping it at this moment
			_, err = r.DropSnapshot(admin, rec.ID)
			return rec.State != sandboxer.SnapshotDropping || !isKind(err, sandboxer.Conflict)
		})
		if err != nil {
			r.t.Errorf("drop %s (%s, %s): %v", rec.ID, rec.Purpose, rec.State, err)
		}
	}
	if left := r.world.Snapshots(); len(left) > 0 {
		r.t.Errorf("snapshots are left at the backend: %q", left)
	}
	r.sound(0)
	r.noHolds()
}

func TestSnapshotAndRestore(t *testing.T) {
	for _, kind := range sandboxer.SnapshotKinds() {
		t.Run(string(kind), func(t *testing.T) {
			r := newSnapshotRig(t)
			sb := r.create(sandboxer.CreateRequest{Env: map[string]string{"TOKEN": "s3cret", "WHO": "source"}, Labels: map[string]string{"a": "1"}, Name: "web"})
			r.write(sb.ID, "f", "before")
			rec := r.snapshot(sb.ID, SnapshotRequest{Name: "base", Kind: kind})
			if rec.State != sandboxer.SnapshotSealed || rec.SandboxID != sb.ID || rec.Kind != kind || rec.SealedAt.IsZero() ||
				kind.Has(sandboxer.SnapshotNative) != (rec.Native.SnapshotID == rec.ID) || kind.Has(sandboxer.SnapshotPortable) != (rec.Portable.Digest != "") {
				t.Errorf("record %+v", rec)
			}
			r.write(sb.ID, "f", "after") // it goes on
			for i := range 2 {
				copied := r.restored("base", RestoreRequest{
					Name: fmt.Sprint("copy", i), TTL: time.Minute, Env: map[string]string{"WHO": "copy"}, Labels: map[string]string{"b": "2"},
				})
				r.wantFile(copied.ID, "f", "before")
				if copied.ID == sb.ID || copied.State != sandboxer.Running || copied.RestoredFrom != rec.ID || copied.Spec.Owner != "test" ||
					!maps.Equal(copied.Spec.Labels, map[string]string{"b": "2"}) || copied.ExpiresAt.Sub(copied.CreatedAt) != time.Minute {
					t.Errorf("copy %+v", copied)
				}
				if got := r.env(copied.ID, "WHO") + " " + r.env(copied.ID, "TOKEN") + " " + r.env(copied.ID, "FROM"); got != "copy s3cret profile" {
					t.Errorf("the copy's environment is %q", got)
				}
				child := r.snapshot(copied.ID, SnapshotRequest{Kind: kind})
				if child.Parent != rec.ID {
					t.Errorf("parent %q of the copy's snapshot; want %s", child.Parent, rec.ID)
				}
				r.destroy(copied.ID)
			}
			items, _, err := r.Snapshots(acme, sandboxer.SnapshotQuery{Parent: "base"})
			if err != nil || len(items) != 2 {
				t.Errorf("%d children, %v", len(items), err)
			}
			r.wantFile(sb.ID, "f", "after")
			r.destroy(sb.ID)
			r.wantFile(r.restored(rec.ID, RestoreRequest{}).ID, "f", "before") // it outlives its source
			dropped, err := r.DropSnapshot(acme, rec.ID)
			if err != nil || dropped.State != sandboxer.SnapshotDropped {
				t.Fatalf("drop: %+v, %v", dropped, err)
			}
			if again, err := r.DropSnapshot(acme, rec.ID); err != nil || again.State != sandboxer.SnapshotDropped {
				t.Errorf("drop again: %+v, %v", again, err)
			}
			_, err = r.Restore(acme, rec.ID, RestoreRequest{})
			wantErr(t, err, sandboxer.NotFound, "dropped")
			for _, sb := range r.live() {
				r.destroy(sb.ID)
			}
			r.clean()
		})
	}
}

// live returns the living sandboxes.
func (r *rig) live() (all []*sandboxer.Sandbox) {
	r.t.Helper()
	if err := r.records(admin, sandboxer.Query{States: liveStates}, func(sb *sandboxer.Sandbox) { all = append(all, sb) }); err != nil {
		r.t.Fatal(err)
	}
	return all
}

func TestSnapshotSecretIsSealed(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{Env: map[string]string{"TOKEN": "canary-7f3a"}})
	rec := r.snapshot(sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotBoth})
	if bytes.Contains(rec.SealedEnv, []byte("canary")) || len(rec.SealedEnv) == 0 || rec.Spec.Env != nil {
		t.Errorf("record %+v", rec)
	}
	sb2 := *sb
	sb2.ID = rec.ID
	if _, err := r.openAs(sealName(&sb2), "x", rec.SealedEnv); err == nil {
		t.Error("a snapshot's environment opens as a sandbox's")
	}
}

func TestSnapshotRefusals(t *testing.T) {
	r := newSnapshotRig(t, func(s *setup) { s.opts.Snapshots = 2 })
	sb := r.create(sandboxer.CreateRequest{})
	_, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: "odd"})
	wantErr(t, err, sandboxer.Invalid, "native, portable, both")
	_, err = r.Snapshot(acme, sb.ID, SnapshotRequest{Name: "Not A Name"})
	wantErr(t, err, sandboxer.Invalid, "name")
	_, err = r.Snapshot(rival, sb.ID, SnapshotRequest{})
	wantErr(t, err, sandboxer.NotFound, sb.ID)
	_, err = r.Snapshot(as(sandboxer.DefaultTenant, sandboxer.ScopeRead), sb.ID, SnapshotRequest{})
	wantErr(t, err, sandboxer.Denied, "write")

	rec := r.snapshot(sb.ID, SnapshotRequest{Name: "base"})
	_, err = r.Snapshot(acme, sb.ID, SnapshotRequest{Name: "base"})
	wantErr(t, err, sandboxer.Conflict, "base")
	_, err = r.GetSnapshot(rival, rec.ID)
	wantErr(t, err, sandboxer.NotFound, "")
	_, err = r.Restore(rival, rec.ID, RestoreRequest{})
	wantErr(t, err, sandboxer.NotFound, "")
	_, err = r.DropSnapshot(rival, "base")
	wantErr(t, err, sandboxer.NotFound, "")
	_, err = r.Restore(acme, rec.ID, RestoreRequest{Kind: sandboxer.SnapshotPortable})
	wantErr(t, err, sandboxer.Unsupported, "portable")
	_, err = r.Restore(acme, rec.ID, RestoreRequest{TTL: 100 * time.Hour})
	wantErr(t, err, sandboxer.Invalid, "longer")
	_, err = r.Diff(acme, rec.ID, rec.ID)
	wantErr(t, err, sandboxer.Unsupported, "native")
	for _, ref := range []string{rec.ID, "base", rec.ID[:9], rec.ID[5:10]} {
		if got, err := r.GetSnapshot(acme, ref); err != nil || got.ID != rec.ID {
			t.Errorf("GetSnapshot(%q) = %v, %v", ref, got, err)
		}
	}

	r.snapshot(sb.ID, SnapshotRequest{})
	_, err = r.Snapshot(acme, sb.ID, SnapshotRequest{})
	wantErr(t, err, sandboxer.Exhausted, "snapshot ls")
	if _, err := r.DropSnapshot(acme, "base"); err != nil {
		t.Fatal(err)
	}
	r.snapshot(sb.ID, SnapshotRequest{Name: "base"})
	r.destroy(sb.ID)
	_, err = r.Snapshot(acme, sb.ID, SnapshotRequest{})
	wantErr(t, err, sandboxer.Conflict, "terminated")
	r.clean()
}

// dropCheckpoint leaves an extension the archives of workspaces.
func dropCheckpoint(s *setup) { s.fake.Drop = []sandboxer.Capability{sandboxer.CanCheckpoint} }

// TestVolumes: what a sandbox has in addition to its workspace is in its portable snapshots, is
// shown, is in place before the copy runs, and is never lost silently.
func TestVolumes(t *testing.T) {
	other := fake.NewWorld()
	defer other.Close()
	r := newSnapshotRig(t, func(s *setup) {
		s.other = other
		s.profiles = append(s.profiles,
			sandboxer.Profile{ID: "profile.kept", Extension: "ext.fake", Inputs: map[string]string{"volume": "data"},
				Command: []string{"sh", "-c", "cat ../volumes/data/f >at-start 2>&1; sleep 1000"}},
			sandboxer.Profile{ID: "profile.bare", Extension: "ext.fake"},
			sandboxer.Profile{ID: "profile.other", Extension: "ext.other"})
	})
	sb := r.create(sandboxer.CreateRequest{Profile: "kept"})
	r.write(sb.ID, "w", "work")
	r.write(sb.ID, "../volumes/data/f", "data")
	rec := r.snapshot(sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotPortable})
	if !slices.Equal(rec.Portable.Volumes, []string{"data"}) || rec.Portable.Quiesced {
		t.Errorf("the snapshot is said to hold %+v", rec.Portable)
	}
	copied := r.restored(rec.ID, RestoreRequest{})
	r.wantFile(copied.ID, "w", "work")
	r.wantFile(copied.ID, "../volumes/data/f", "data")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		f, err := r.ReadFile(acme, copied.ID, "/workspace/at-start")
		if isKind(err, sandboxer.NotFound) && time.Now().Before(deadline) {
			continue // the first one's command had not begun when it was saved
		}
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(f)
		f.Close()
		if err == nil && string(got) == "data" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("when the copy began its volume said %q, %v", got, err)
		}
	}
	// Where nothing can place them it is refused, before anything is made.
	_, err := r.Restore(acme, rec.ID, RestoreRequest{Profile: "other"})
	wantErr(t, err, sandboxer.Unsupported, "data")
	if len(other.Live()) > 0 {
		t.Errorf("there is %+v", other.Live())
	}
	// A fork takes them with it, and a snapshot without any is restored on it.
	forked, err := r.Fork(acme, sb.ID, ForkRequest{Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	r.wantFile(forked[0].ID, "../volumes/data/f", "data")
	bare := r.create(sandboxer.CreateRequest{Profile: "bare"})
	r.write(bare.ID, "w", "bare")
	plain := r.snapshot(bare.ID, SnapshotRequest{Kind: sandboxer.SnapshotPortable})
	if len(plain.Portable.Volumes) > 0 {
		t.Errorf("the snapshot is said to hold %+v", plain.Portable)
	}
	r.wantFile(r.restored(plain.ID, RestoreRequest{Profile: "kept"}).ID, "w", "bare")
	for _, sb := range r.live() {
		r.destroy(sb.ID)
	}
	r.clean()
}

// TestSnapshotFails: whatever the backend does, nothing is left but the truth.
func TestSnapshotFails(t *testing.T) {
	for name, fault := range map[string]fake.Fault{
		"refused":    {Verb: fake.VerbSnapshot, Kind: sandboxer.Unavailable, Times: 1},
		"lost":       {Verb: fake.VerbSnapshot, Lost: true, Times: 1},
		"archive":    {Verb: fake.VerbArchive, Kind: sandboxer.Exhausted, Times: 1},
		"checkpoint": {Verb: fake.VerbCheckpoint, Kind: sandboxer.Exhausted, Times: 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := newSnapshotRig(t, func(s *setup) {
				if name == "archive" {
					dropCheckpoint(s)
				}
			})
			sb := r.create(sandboxer.CreateRequest{})
			r.world.Inject(fault)
			_, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotBoth})
			if err == nil || !strings.Contains(sandboxer.Message(err), "could not be saved") {
				t.Errorf("error %v", err)
			}
			if left := r.world.Snapshots(); len(left) > 0 {
				t.Errorf("left at the backend: %q", left)
			}
			r.write(sb.ID, "f", "it runs on")
			r.snapshot(sb.ID, SnapshotRequest{})
			r.destroy(sb.ID)
			r.clean()
		})
	}
	t.Run("drop", func(t *testing.T) {
		r := newSnapshotRig(t)
		sb := r.create(sandboxer.CreateRequest{})
		rec := r.snapshot(sb.ID, SnapshotRequest{})
		r.world.Inject(fake.Fault{Verb: fake.VerbDropSnapshot, Kind: sandboxer.Unavailable, Times: 1})
		_, err := r.DropSnapshot(acme, rec.ID)
		wantErr(t, err, sandboxer.Unavailable, "is not dropped yet")
		_, err = r.Restore(acme, rec.ID, RestoreRequest{})
		wantErr(t, err, sandboxer.NotFound, "dropped")
		eventually(t, "the sweep drops it", func() bool {
			r.Sweep(admin)
			got, err := r.GetSnapshot(acme, rec.ID)
			return err == nil && got.State == sandboxer.SnapshotDropped
		})
		r.destroy(sb.ID)
		r.clean()
	})
	t.Run("destroy", func(t *testing.T) {
		r := newSnapshotRig(t)
		sb := r.create(sandboxer.CreateRequest{})
		r.world.Inject(fake.Fault{Verb: fake.VerbSnapshot, Hang: true, Times: 1})
		failed := make(chan error, 1)
		go func() { _, err := r.Snapshot(acme, sb.ID, SnapshotRequest{}); failed <- err }()
		eventually(t, "the snapshot to begin", func() bool { return r.working(sb.ID) })
		r.destroy(sb.ID)
		if err := <-failed; !isKind(err, sandboxer.Conflict) {
			t.Errorf("the snapshot of what was destroyed meanwhile: %v", err)
		}
		r.clean()
	})
}

func TestSnapshotExpires(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	rec := r.snapshot(sb.ID, SnapshotRequest{TTL: time.Millisecond, Kind: sandboxer.SnapshotBoth})
	kept := r.snapshot(sb.ID, SnapshotRequest{TTL: time.Hour})
	eventually(t, "it to expire", func() bool {
		r.Sweep(admin)
		got, err := r.GetSnapshot(acme, rec.ID)
		return err == nil && got.State == sandboxer.SnapshotDropped
	})
	if got, err := r.GetSnapshot(acme, kept.ID); err != nil || got.State != sandboxer.SnapshotSealed {
		t.Errorf("the other is %+v, %v", got, err)
	}
	r.destroy(sb.ID)
	r.clean()
}

// TestDropWaitsForRestore: what is being restored from is not collected.
func TestDropWaitsForRestore(t *testing.T) {
	hold, let := heldUp(pRestore)
	r := newSnapshotRig(t, hold)
	t.Cleanup(let)
	sb := r.create(sandboxer.CreateRequest{})
	rec := r.snapshot(sb.ID, SnapshotRequest{})
	done := make(chan error, 1)
	go func() { _, err := r.Restore(acme, rec.ID, RestoreRequest{}); done <- err }()
	eventually(t, "the restore to begin", func() bool { return len(r.live()) == 2 })
	_, err := r.DropSnapshot(acme, rec.ID)
	wantErr(t, err, sandboxer.Conflict, "in use")
	let()
	if err := <-done; err != nil {
		t.Errorf("restore: %v", err)
	}
	if _, err := r.DropSnapshot(acme, rec.ID); err != nil {
		t.Errorf("drop: %v", err)
	}
}

func TestRestoreIsIdempotent(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	rec := r.snapshot(sb.ID, SnapshotRequest{})
	a := r.restored(rec.ID, RestoreRequest{Key: "k"})
	b := r.restored(rec.ID, RestoreRequest{Key: "k"})
	if a.ID != b.ID {
		t.Errorf("one key made %s and %s", a.ID, b.ID)
	}
	_, err := r.Restore(acme, rec.ID, RestoreRequest{Key: "k", TTL: time.Minute})
	wantErr(t, err, sandboxer.Conflict, "another request")
}

// TestRestoreElsewhere: the files of a portable snapshot move to any extension.
func TestRestoreElsewhere(t *testing.T) {
	other := fake.NewWorld()
	defer other.Close()
	r := newSnapshotRig(t, func(s *setup) {
		s.other = other
		s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.other", Extension: "ext.other", Workspace: "/work", Env: map[string]string{"FROM": "other"}})
	})
	sb := r.create(sandboxer.CreateRequest{Env: map[string]string{"MINE": "kept"}})
	r.write(sb.ID, "f", "moved")
	r.write(sb.ID, "d/g", "too")
	native := r.snapshot(sb.ID, SnapshotRequest{})
	_, err := r.Restore(acme, native.ID, RestoreRequest{Profile: "other"})
	wantErr(t, err, sandboxer.Unsupported, "native to ext.fake")
	rec := r.snapshot(sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotBoth})
	moved := r.restored(rec.ID, RestoreRequest{Profile: "other"})
	if moved.Extension != "ext.other" || moved.RestoredAs != sandboxer.SnapshotPortable || len(other.Live()) != 1 {
		t.Errorf("moved %+v", moved)
	}
	for name, want := range map[string]string{"/work/f": "moved", "/work/d/g": "too"} {
		f, err := r.ReadFile(acme, moved.ID, name)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(f); err != nil || string(got) != want {
			t.Errorf("%s is %q, %v", name, got, err)
		}
		f.Close()
	}
	if got := r.env(moved.ID, "MINE"); got != "kept" {
		t.Errorf("its environment lost MINE: %q", got)
	}
	_, err = r.Snapshot(acme, moved.ID, SnapshotRequest{Kind: sandboxer.SnapshotNative})
	wantErr(t, err, sandboxer.Unsupported, "--portable")
	back := r.snapshot(moved.ID, SnapshotRequest{})
	if back.Kind != sandboxer.SnapshotPortable || back.Parent != rec.ID {
		t.Errorf("its own snapshot is %+v", back)
	}
	r.wantFile(r.restored(back.ID, RestoreRequest{Profile: "test"}).ID, "d/g", "too")
	_, err = r.Pause(acme, moved.ID, PauseRequest{})
	wantErr(t, err, sandboxer.Unsupported, "ext.other")
	for _, sb := range r.live() {
		r.destroy(sb.ID)
	}
	r.clean()
}

// TestRestoreOtherwise: what is restored may get other inputs and another host than its
// source, in its portable form; a native one goes on as it was.
func TestRestoreOtherwise(t *testing.T) {
	r := newSnapshotRig(t, func(s *setup) {
		s.fake.Hosts = []string{"a", "b"}
		s.inputs = append(slices.Clone(s.inputs), sandboxer.Input{Name: "vm"}, sandboxer.Input{Name: "target"})
		s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.two", Extension: "ext.fake", Inputs: map[string]string{"vm": "two"}})
	})
	sb := r.create(sandboxer.CreateRequest{Inputs: map[string]string{"vm": "one"}, Host: "a"})
	r.write(sb.ID, "f", "moved")
	both := r.snapshot(sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotBoth})
	check := func(req RestoreRequest, form sandboxer.SnapshotKind, host string, inputs map[string]string) {
		t.Helper()
		got := r.restored(both.ID, req)
		if got.RestoredAs != form || got.Reachability.Host != host || !maps.Equal(got.Spec.Inputs, inputs) {
			t.Errorf("%+v: restored %s on %q with %v; want %s on %q with %v", req, got.RestoredAs, got.Reachability.Host, got.Spec.Inputs, form, host, inputs)
		}
		r.wantFile(got.ID, "f", "moved")
		r.destroy(got.ID)
	}
	check(RestoreRequest{}, sandboxer.SnapshotNative, "a", map[string]string{"vm": "one"})
	check(RestoreRequest{Host: "b"}, sandboxer.SnapshotPortable, "b", map[string]string{"vm": "one"})
	check(RestoreRequest{Inputs: map[string]string{"vm": "", "target": "x"}}, sandboxer.SnapshotPortable, "a", map[string]string{"target": "x"})
	check(RestoreRequest{Profile: "two", Kind: sandboxer.SnapshotPortable}, sandboxer.SnapshotPortable, "a", map[string]string{"vm": "two"})
	check(RestoreRequest{Profile: "two", Inputs: map[string]string{"vm": "three"}}, sandboxer.SnapshotPortable, "a", map[string]string{"vm": "three"})
	native := r.snapshot(sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotNative})
	for _, bad := range []struct {
		who context.Context
		id  string
		req RestoreRequest
		is  sandboxer.Kind
		say string
	}{
		{acme, native.ID, RestoreRequest{Host: "b"}, sandboxer.Unsupported, "host of its source"},
		{acme, both.ID, RestoreRequest{Kind: sandboxer.SnapshotNative, Inputs: map[string]string{"vm": "two"}}, sandboxer.Unsupported, "keeps the inputs"},
		{acme, both.ID, RestoreRequest{Host: "nowhere"}, sandboxer.Invalid, "nowhere"},
		{acme, both.ID, RestoreRequest{Inputs: map[string]string{"vn": "two"}}, sandboxer.Invalid, "vn"},
		{acme, both.ID, RestoreRequest{Inputs: map[string]string{"sandbox_id": "mine"}}, sandboxer.Invalid, "sandbox_id"},
		{acme, both.ID, RestoreRequest{Inputs: map[string]string{"repo": "/etc"}}, sandboxer.Denied, "administrator"},
	} {
		_, err := r.Restore(bad.who, bad.id, bad.req)
		wantErr(t, err, bad.is, bad.say)
	}
	for _, sb := range r.live() {
		r.destroy(sb.ID)
	}
	r.clean()
}

func TestDiffExportImport(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	r.write(sb.ID, "same", "same")
	r.write(sb.ID, "gone", "gone")
	r.write(sb.ID, "grows", "a")
	one := r.snapshot(sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotPortable})
	if err := r.RemoveFile(acme, sb.ID, "/workspace/gone"); err != nil {
		t.Fatal(err)
	}
	r.write(sb.ID, "grows", "abc")
	r.write(sb.ID, "new", "12")
	two := r.snapshot(sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotBoth})
	got, err := r.Diff(acme, one.ID, two.ID)
	want := []Change{{"gone", "removed", 4, 0}, {"grows", "changed", 1, 3}, {"new", "added", 0, 2}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("diff %+v, %v; want %+v", got, err, want)
	}
	var out bytes.Buffer
	if err := r.ExportSnapshot(acme, two.ID, &out); err != nil {
		t.Fatal(err)
	}
	_, err = r.ImportSnapshot(acme, ImportRequest{Profile: "nonesuch"}, bytes.NewReader(out.Bytes()))
	wantErr(t, err, sandboxer.Invalid, "nonesuch")
	imported, err := r.ImportSnapshot(acme, ImportRequest{Name: "came"}, &out)
	if err != nil || imported.State != sandboxer.SnapshotSealed || imported.Profile != "profile.test" || imported.SandboxID != "" {
		t.Fatalf("imported %+v, %v", imported, err)
	}
	if got, err := r.Diff(acme, two.ID, "came"); err != nil || len(got) != 0 {
		t.Errorf("what came differs: %+v, %v", got, err)
	}
	r.wantFile(r.restored("came", RestoreRequest{}).ID, "grows", "abc")
	_, err = r.ImportSnapshot(acme, ImportRequest{}, strings.NewReader(strings.Repeat("nonsense ", 1000)))
	wantErr(t, err, sandboxer.Invalid, "no snapshot")
	for _, sb := range r.live() {
		r.destroy(sb.ID)
	}
	r.clean()
}

func TestFork(t *testing.T) {
	r := newSnapshotRig(t, func(s *setup) { s.fake.Capacity = 12 })
	sb := r.create(sandboxer.CreateRequest{})
	r.write(sb.ID, "f", "shared")
	made, err := r.Fork(acme, sb.ID, ForkRequest{Count: 5, TTL: time.Minute, Labels: map[string]string{"n": "1"}})
	if err != nil || len(made) != 5 {
		t.Fatalf("%d made, %v", len(made), err)
	}
	parents := map[string]bool{}
	for _, c := range made {
		r.wantFile(c.ID, "f", "shared")
		parents[c.RestoredFrom] = true
	}
	if len(parents) != 1 {
		t.Errorf("they come from %v; want one snapshot", parents)
	}
	if left := r.world.Snapshots(); len(left) > 0 {
		t.Errorf("the implicit snapshot is left: %q", left)
	}
	if items, _, err := r.Snapshots(acme, sandboxer.SnapshotQuery{}); err != nil || len(items) > 0 {
		t.Errorf("listed: %v, %v", items, err)
	}
	_, err = r.Fork(acme, sb.ID, ForkRequest{Count: 7})
	wantErr(t, err, sandboxer.Exhausted, "room for 6")
	_, err = r.Fork(acme, sb.ID, ForkRequest{Count: 101})
	wantErr(t, err, sandboxer.Invalid, "100")

	r.world.Inject(fake.Fault{Verb: fake.VerbRestore, Kind: sandboxer.Failed, Skip: 2, Times: 1})
	_, err = r.Fork(acme, sb.ID, ForkRequest{Count: 4})
	wantErr(t, err, sandboxer.Failed, "destroyed again")
	if n := len(r.live()); n != 6 {
		t.Errorf("%d live after a fork that failed; want 6", n)
	}
	for _, c := range r.live() {
		r.destroy(c.ID)
	}
	r.clean()
}

// TestForkAgain repeats a fork: one key makes one set of copies.
func TestForkAgain(t *testing.T) {
	r := newSnapshotRig(t, func(s *setup) { s.fake.Capacity = 12 })
	sb := r.create(sandboxer.CreateRequest{Key: "used"})
	req := ForkRequest{Count: 3, Key: "k", Env: map[string]string{"A": "1"}}
	ids := func(made []*sandboxer.Sandbox) (out []string) {
		for _, sb := range made {
			out = append(out, sb.ID)
		}
		slices.Sort(out)
		return out
	}
	answers := make([][]string, 4)
	var wg sync.WaitGroup
	for i := range answers {
		wg.Go(func() {
			made, err := r.Fork(acme, sb.ID, req)
			if answers[i] = ids(made); err != nil {
				t.Errorf("fork: %v", err)
			}
		})
	}
	wg.Wait()
	r.restart()
	made, err := r.Fork(acme, sb.ID, req)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range answers {
		if len(a) != 3 || !slices.Equal(a, ids(made)) {
			t.Errorf("one caller has %v, after a restart %v", a, ids(made))
		}
	}
	if n := len(r.live()); n != 4 {
		t.Errorf("%d live; want 4", n)
	}

	// The key stands for this request alone.
	for _, other := range []ForkRequest{{Count: 2, Key: "k", Env: req.Env}, {Count: 3, Key: "k"}, {Count: 3, Key: "used"}} {
		_, err = r.Fork(acme, sb.ID, other)
		wantErr(t, err, sandboxer.Conflict, "was used for another request")
	}
	_, err = r.Fork(acme, made[0].ID, req)
	wantErr(t, err, sandboxer.Conflict, "was used for another request")
	_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "test", Key: "k"})
	wantErr(t, err, sandboxer.Conflict, "was used for another request")
	_, err = r.Fork(acme, sb.ID, ForkRequest{Count: 1, Key: "a b"})
	wantErr(t, err, sandboxer.Invalid, "idempotency key")

	// A caller who leaves and asks again gets the copies of the first request.
	ctx, leave := context.WithCancel(acme)
	r.world.Inject(fake.Fault{Verb: fake.VerbRestore, Delay: 2 * time.Second, Times: 1})
	go func() {
		eventually(t, "the fork to begin", func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.forks) == 1 })
		leave()
	}()
	_, err = r.Fork(ctx, sb.ID, ForkRequest{Count: 2, Key: "left"})
	wantErr(t, err, sandboxer.Canceled, "")
	if again, err := r.Fork(acme, sb.ID, ForkRequest{Count: 2, Key: "left"}); err != nil || len(again) != 2 {
		t.Errorf("asked again: %d, %v", len(again), err)
	}
	if n := len(r.live()); n != 6 {
		t.Errorf("%d live; want 6", n)
	}

	// Of one that failed, and of one that was cut short, nothing is left.
	r.world.Inject(fake.Fault{Verb: fake.VerbRestore, Kind: sandboxer.Failed, Skip: 1, Times: 1})
	_, err = r.Fork(acme, sb.ID, ForkRequest{Count: 3, Key: "fails"})
	wantErr(t, err, sandboxer.Failed, "destroyed again")
	for range 2 {
		if _, err = r.Fork(acme, sb.ID, ForkRequest{Count: 3, Key: "fails"}); err == nil {
			t.Error("a fork that failed succeeds under its key")
		}
	}
	k, err := r.store.IdempotencyKey(t.Context(), sandboxer.DefaultTenant, "left")
	if err != nil {
		t.Fatal(err)
	}
	k.Key = "cut"
	sum := sha256.Sum256([]byte("fork\x00" + sb.ID + "\x00" + `{"count":3}`))
	k.Digest = hex.EncodeToString(sum[:])
	if err := r.store.Write(t.Context(), sandboxer.Writes{Key: &k}); err != nil {
		t.Fatal(err)
	}
	_, err = r.Fork(acme, sb.ID, ForkRequest{Count: 3, Key: "cut"})
	wantErr(t, err, sandboxer.Conflict, "cut short")
	if n := len(r.live()); n != 5 {
		t.Errorf("%d live; want 5", n)
	}
	for _, c := range r.live() {
		r.destroy(c.ID)
	}
	r.clean()
}

func TestSnapshotsAtOnce(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotBoth}); err != nil {
				t.Errorf("snapshot: %v", err)
			}
		})
	}
	wg.Wait()
	if n := len(r.world.Snapshots()); n != 8 {
		t.Errorf("%d snapshots", n)
	}
	r.destroy(sb.ID)
	r.clean()
}

// TestLeftSaving: what a broker that is gone was saving is dropped by the next.
func TestLeftSaving(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	rec := newSnapshot(sb, sandboxer.SnapshotBoth, "")
	if err := r.store.Write(context.Background(), sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{rec}}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.ext.Snapshot(context.Background(), sb.Handle, rec.ID); err != nil {
		t.Fatal(err)
	}
	_, err := r.Restore(acme, rec.ID, RestoreRequest{})
	wantErr(t, err, sandboxer.Conflict, "not sealed")
	r.restart()
	eventually(t, "it to be dropped", func() bool {
		r.Sweep(admin)
		got, err := r.GetSnapshot(acme, rec.ID)
		return err == nil && got.State == sandboxer.SnapshotDropped && strings.Contains(got.Message, "the broker stopped")
	})
	r.destroy(sb.ID)
	r.clean()
}

// A sweep that saw a snapshot while it was being saved does not drop it once it is whole.
func TestSweepOfSealedSnapshot(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	rec, err := r.Snapshot(acme, sb.ID, SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	seen := *rec
	seen.State = sandboxer.SnapshotSaving
	tr := r.newPass()
	if err := tr.sweepSnapshot(acme, &seen, now()); err != nil {
		t.Fatal(err)
	}
	tr.wg.Wait()
	if rec, err = r.GetSnapshot(acme, rec.ID); err != nil || rec.State != sandboxer.SnapshotSealed {
		t.Errorf("it is %s, %v; want sealed", rec.State, err)
	}
}

// TestDroppedSnapshotsHaveNoName: a name is free once its snapshot is dropped, also where several had it.
// The ID still says what became of it.
func TestDroppedSnapshotsHaveNoName(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	var rec *sandboxer.SnapshotRecord
	for range 2 {
		rec = r.snapshot(sb.ID, SnapshotRequest{Name: "base"})
		if _, err := r.DropSnapshot(acme, "base"); err != nil {
			t.Fatal(err)
		}
		for _, ctx := range []context.Context{acme, admin} {
			_, err := r.GetSnapshot(ctx, "base")
			wantErr(t, err, sandboxer.NotFound, `there is no snapshot "base"`)
		}
		_, err := r.Restore(acme, "base", RestoreRequest{})
		wantErr(t, err, sandboxer.NotFound, `there is no snapshot "base"`)
	}
	if got, err := r.GetSnapshot(acme, rec.ID); err != nil || got.State != sandboxer.SnapshotDropped {
		t.Errorf("by its ID: %+v, %v", got, err)
	}
}

package manager

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// remembering is a fake whose snapshots say that they hold memory.
type remembering struct{ *fake.Extension }

func (e remembering) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
	s, err := e.Extension.Snapshot(ctx, h, id)
	s.Memory = true
	return s, err
}

func withMemory(s *setup) {
	s.wrap = func(e *fake.Extension) sandboxer.Extension { return remembering{e} }
}

func (r *rig) pause(id string, depth sandboxer.PauseDepth) *sandboxer.Sandbox {
	r.t.Helper()
	sb, err := r.Pause(acme, id, PauseRequest{Depth: depth})
	if err != nil {
		r.t.Fatalf("pause %s: %v", id, err)
	}
	return sb
}

func (r *rig) resume(id string) *sandboxer.Sandbox {
	r.t.Helper()
	sb, err := r.Resume(acme, id, ResumeRequest{})
	if err != nil {
		r.t.Fatalf("resume %s: %v", id, err)
	}
	return sb
}

func TestPauseAndResume(t *testing.T) {
	for _, depth := range sandboxer.PauseDepths() {
		t.Run(string(depth), func(t *testing.T) {
			r := newSnapshotRig(t, withMemory)
			sb := r.create(sandboxer.CreateRequest{Name: "web", Env: map[string]string{"K": "v"}})
			want := ""
			for i := range 3 {
				want += fmt.Sprint(i)
				r.write(sb.ID, "f", want)
				p := r.pause(sb.ID, depth)
				if p.State != sandboxer.Paused || p.Pause.Depth != depth || p.Pause.At.IsZero() || p.ID != sb.ID || p.Generation != 1 {
					t.Fatalf("paused: %+v", p)
				}
				if again := r.pause(sb.ID, ""); again.Version != p.Version {
					t.Errorf("pausing what is paused changed it: %+v", again)
				}
				objects := 1
				if depth != sandboxer.PauseFreeze {
					objects = 0
				}
				r.sound(objects)
				_, err := r.ReadFile(acme, sb.ID, "/workspace/f")
				wantErr(t, err, sandboxer.Conflict, "sandboxer resume")
				if i == 1 {
					r.restart()
				}
				up := r.resume("web")
				if up.State != sandboxer.Running || up.ID != sb.ID || up.Generation != 1 || up.Pause.Depth != "" || up.Name != "web" {
					t.Fatalf("resumed: %+v", up)
				}
				if depth != sandboxer.PauseFreeze && up.Handle.Generation != i+2 {
					t.Errorf("resume %d made an object of generation %d", i+1, up.Handle.Generation)
				}
				r.wantFile(sb.ID, "f", want)
				if got := r.env(sb.ID, "K"); got != "v" {
					t.Errorf("K is %q", got)
				}
				if again := r.resume(sb.ID); again.Version != up.Version {
					t.Errorf("resuming what runs changed it: %+v", again)
				}
				if left := r.world.Snapshots(); len(left) > 0 {
					t.Errorf("after the resume there are still %q", left)
				}
				r.sound(1)
			}
			r.destroy(sb.ID)
			again := r.create(sandboxer.CreateRequest{Inputs: map[string]string{"sandbox_id": sb.ID}})
			if depth != sandboxer.PauseFreeze && again.Generation != 5 {
				t.Errorf("the next of that ID has generation %d: its object could be taken for an older one", again.Generation)
			}
			r.destroy(sb.ID)
			r.clean()
		})
	}
}

func TestPauseRefusals(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	_, err := r.Pause(acme, sb.ID, PauseRequest{Depth: "deep"})
	wantErr(t, err, sandboxer.Invalid, "freeze, disk, files")
	_, err = r.Pause(rival, sb.ID, PauseRequest{})
	wantErr(t, err, sandboxer.NotFound, "")
	_, err = r.Resume(rival, sb.ID, ResumeRequest{})
	wantErr(t, err, sandboxer.NotFound, "")
	// The fake saves files alone: memory would be lost without a word.
	_, err = r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseDisk})
	wantErr(t, err, sandboxer.Unsupported, "--depth files")
	if got := r.get(sb.ID); got.State != sandboxer.Running || got.Pause.Depth != "" {
		t.Errorf("it is %+v", got)
	}
	r.write(sb.ID, "f", "it runs on")
	if got := r.env(sb.ID, "FROM"); got != "profile" { // not frozen either
		t.Errorf("FROM is %q", got)
	}
	r.pause(sb.ID, sandboxer.PauseFiles)
	_, err = r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFreeze})
	wantErr(t, err, sandboxer.Conflict, "files")
	items, _, err := r.Snapshots(acme, sandboxer.SnapshotQuery{Purposes: []sandboxer.SnapshotPurpose{sandboxer.ForPause}})
	if err != nil || len(items) != 1 {
		t.Fatalf("%v, %v", items, err)
	}
	_, err = r.DropSnapshot(acme, items[0].ID)
	wantErr(t, err, sandboxer.Conflict, "resumes from")
	_, err = r.Snapshot(acme, sb.ID, SnapshotRequest{})
	wantErr(t, err, sandboxer.Conflict, "paused")
	r.destroy(sb.ID)
	_, err = r.Resume(acme, sb.ID, ResumeRequest{})
	wantErr(t, err, sandboxer.Conflict, "terminated")
	r.clean()
}

// TestPauseFails: a pause that fails leaves it running, a resume that fails leaves it
// paused with its checkpoint.
func TestPauseFails(t *testing.T) {
	for _, tt := range []struct {
		name  string
		depth sandboxer.PauseDepth
		fault fake.Fault
	}{
		{"freeze", sandboxer.PauseFreeze, fake.Fault{Verb: fake.VerbPause, Kind: sandboxer.Unavailable, Times: 1}},
		{"freeze lost", sandboxer.PauseFreeze, fake.Fault{Verb: fake.VerbPause, Lost: true, Times: 1}},
		{"snapshot", sandboxer.PauseFiles, fake.Fault{Verb: fake.VerbSnapshot, Kind: sandboxer.Exhausted, Times: 1}},
		{"snapshot lost", sandboxer.PauseFiles, fake.Fault{Verb: fake.VerbSnapshot, Lost: true, Times: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newSnapshotRig(t)
			sb := r.create(sandboxer.CreateRequest{})
			r.world.Inject(tt.fault)
			_, err := r.Pause(acme, sb.ID, PauseRequest{Depth: tt.depth})
			if err == nil || !strings.Contains(sandboxer.Message(err), "keeps running") {
				t.Fatalf("error %v", err)
			}
			if got := r.get(sb.ID); got.State != sandboxer.Running || got.Pause != (sandboxer.Pause{}) {
				t.Fatalf("it is %+v", got)
			}
			r.env(sb.ID, "FROM")
			r.pause(sb.ID, tt.depth)
			r.resume(sb.ID)
			r.destroy(sb.ID)
			r.clean()
		})
	}
	t.Run("teardown", func(t *testing.T) { // the checkpoint is sealed: there is no way back but forward
		r := newSnapshotRig(t)
		sb := r.create(sandboxer.CreateRequest{})
		r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, Kind: sandboxer.Unavailable, Times: 1})
		_, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles})
		wantErr(t, err, sandboxer.Unavailable, "not paused yet")
		eventually(t, "the sweep finishes it", func() bool { r.Sweep(admin); return r.get(sb.ID).State == sandboxer.Paused })
		r.sound(0)
		r.resume(sb.ID)
		r.destroy(sb.ID)
		r.clean()
	})
	for _, tt := range []struct {
		name  string
		depth sandboxer.PauseDepth
		fault fake.Fault
	}{
		{"restore", sandboxer.PauseFiles, fake.Fault{Verb: fake.VerbRestore, Kind: sandboxer.Exhausted, Times: 1}},
		{"restore lost", sandboxer.PauseFiles, fake.Fault{Verb: fake.VerbRestore, Lost: true, Times: 1}},
		{"ready", sandboxer.PauseFiles, fake.Fault{Verb: fake.VerbWaitReady, Kind: sandboxer.Failed, Times: 1}},
		{"thaw", sandboxer.PauseFreeze, fake.Fault{Verb: fake.VerbResume, Kind: sandboxer.Unavailable, Times: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newSnapshotRig(t)
			sb := r.create(sandboxer.CreateRequest{})
			r.write(sb.ID, "f", "kept")
			r.pause(sb.ID, tt.depth)
			r.world.Inject(tt.fault)
			_, err := r.Resume(acme, sb.ID, ResumeRequest{})
			if err == nil || !strings.Contains(sandboxer.Message(err), "stays paused") {
				t.Fatalf("error %v", err)
			}
			if got := r.get(sb.ID); got.State != sandboxer.Paused || got.Pause.Attempts != 1 {
				t.Fatalf("it is %+v", got)
			}
			n := 0
			if tt.depth == sandboxer.PauseFreeze {
				n = 1
			}
			r.sound(n)
			r.resume(sb.ID)
			r.wantFile(sb.ID, "f", "kept")
			r.destroy(sb.ID)
			r.clean()
		})
	}
	t.Run("the frozen object is gone", func(t *testing.T) {
		r := newSnapshotRig(t, func(s *setup) { s.fake.Drop = []sandboxer.Capability{sandboxer.CanNotify} }) // nobody knows of it yet
		sb := r.create(sandboxer.CreateRequest{})
		r.pause(sb.ID, sandboxer.PauseFreeze)
		r.world.Kill(sb.ID)
		_, err := r.Resume(acme, sb.ID, ResumeRequest{})
		wantErr(t, err, sandboxer.Failed, "")
		if got := r.get(sb.ID); got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonLost {
			t.Errorf("it is %+v", got)
		}
		r.clean()
	})
}

// TestPauseByArchive: where an extension saves nothing itself, the files of the workspace are kept in a portable
// snapshot, and come back in an object of the next generation.
func TestPauseByArchive(t *testing.T) {
	for _, tt := range []struct {
		name    string
		without []sandboxer.Capability
	}{
		{"archive", []sandboxer.Capability{sandboxer.CanSnapshot, sandboxer.CanPause, sandboxer.CanCheckpoint}},
		{"archive of what can be frozen", []sandboxer.Capability{sandboxer.CanSnapshot, sandboxer.CanCheckpoint}},
		{"checkpoint", []sandboxer.Capability{sandboxer.CanSnapshot, sandboxer.CanPause}},
		{"checkpoint of what is frozen", []sandboxer.Capability{sandboxer.CanSnapshot}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newSnapshotRig(t, func(s *setup) { s.fake.Drop = tt.without })
			sb := r.create(sandboxer.CreateRequest{Name: "web", Env: map[string]string{"K": "v"}})
			want := ""
			for i := range 3 {
				want += fmt.Sprint(i)
				r.write(sb.ID, "f", want)
				p := r.pause(sb.ID, sandboxer.PauseFiles)
				if p.State != sandboxer.Paused || p.Pause.Depth != sandboxer.PauseFiles || !strings.Contains(p.Message, "only the files of its workspace are kept") {
					t.Fatalf("paused: %+v", p)
				}
				if rec, err := r.store.Snapshot(t.Context(), p.Pause.Snapshot); err != nil || rec.Kind != sandboxer.SnapshotPortable || rec.State != sandboxer.SnapshotSealed {
					t.Fatalf("it is paused to %+v, %v", rec, err)
				}
				r.sound(0)
				if i == 1 {
					r.restart()
				}
				up := r.resume("web")
				if up.State != sandboxer.Running || up.ID != sb.ID || up.Pause != (sandboxer.Pause{}) || up.Message != "" || up.Handle.Generation != i+2 {
					t.Fatalf("resumed: %+v", up)
				}
				r.wantFile(sb.ID, "f", want)
				if got := r.env(sb.ID, "K"); got != "v" {
					t.Errorf("K is %q", got)
				}
				r.sound(1)
				eventually(t, "the snapshot is dropped", func() bool {
					rec, err := r.store.Snapshot(t.Context(), p.Pause.Snapshot)
					return isKind(err, sandboxer.NotFound) || err == nil && rec.State == sandboxer.SnapshotDropped
				})
			}
			r.destroy(sb.ID)
			r.clean()
		})
	}
}

// TestPauseByArchiveFails: as TestPauseFails, of files in a portable snapshot.
func TestPauseByArchiveFails(t *testing.T) {
	archives := func(s *setup) {
		s.fake.Drop = []sandboxer.Capability{sandboxer.CanSnapshot, sandboxer.CanPause, sandboxer.CanCheckpoint}
	}
	t.Run("archive", func(t *testing.T) {
		r := newSnapshotRig(t, archives)
		sb := r.create(sandboxer.CreateRequest{})
		r.write(sb.ID, "f", "kept")
		r.world.Inject(fake.Fault{Verb: fake.VerbArchive, Kind: sandboxer.Exhausted, Times: 1})
		_, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles})
		wantErr(t, err, sandboxer.Exhausted, "keeps running")
		r.wantFile(sb.ID, "f", "kept")
		r.destroy(sb.ID)
		r.clean()
	})
	for _, f := range []fake.Fault{
		{Verb: fake.VerbProvision, Kind: sandboxer.Exhausted, Times: 1},
		{Verb: fake.VerbProvision, Lost: true, Times: 1},
		{Verb: fake.VerbWaitReady, Kind: sandboxer.Failed, Times: 1},
		{Verb: fake.VerbUnarchive, Kind: sandboxer.Exhausted, Times: 1},
		{Verb: fake.VerbUnarchive, Lost: true, Times: 1},
	} {
		t.Run(fmt.Sprintf("%s lost %t", f.Verb, f.Lost), func(t *testing.T) {
			r := newSnapshotRig(t, archives)
			sb := r.create(sandboxer.CreateRequest{})
			r.write(sb.ID, "f", "kept")
			r.pause(sb.ID, sandboxer.PauseFiles)
			r.world.Inject(f)
			_, err := r.Resume(acme, sb.ID, ResumeRequest{})
			if err == nil || !strings.Contains(sandboxer.Message(err), "stays paused") {
				t.Fatalf("error %v", err)
			}
			if got := r.get(sb.ID); got.State != sandboxer.Paused || got.Pause.Attempts != 1 {
				t.Fatalf("it is %+v", got)
			}
			r.sound(0)
			r.resume(sb.ID)
			r.wantFile(sb.ID, "f", "kept")
			r.destroy(sb.ID)
			r.clean()
		})
	}
	t.Run("no store of portable snapshots", func(t *testing.T) {
		r := newRig(t, archives)
		sb := r.create(sandboxer.CreateRequest{})
		_, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles})
		wantErr(t, err, sandboxer.Unsupported, "does not support pause")
		r.destroy(sb.ID)
		r.clean()
	})
	t.Run("disk", func(t *testing.T) { // memory is not kept
		r := newSnapshotRig(t, archives)
		sb := r.create(sandboxer.CreateRequest{})
		_, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseDisk})
		wantErr(t, err, sandboxer.Unsupported, "--depth files")
		r.destroy(sb.ID)
		r.clean()
	})
}

// TestDestroyAnywhere: destroy is accepted in every state of a pause.
func TestDestroyAnywhere(t *testing.T) {
	for _, tt := range []struct {
		name  string
		verb  fake.Verb
		state sandboxer.State
	}{
		{"pausing", fake.VerbSnapshot, sandboxer.Pausing},
		{"tearing down", fake.VerbTeardown, sandboxer.Pausing},
		{"resuming", fake.VerbRestore, sandboxer.Creating},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newSnapshotRig(t)
			sb := r.create(sandboxer.CreateRequest{})
			if tt.state == sandboxer.Creating {
				r.pause(sb.ID, sandboxer.PauseFiles)
			}
			r.world.Inject(fake.Fault{Verb: tt.verb, Hang: true, Times: 1})
			done := make(chan error, 1)
			go func() {
				var err error
				if tt.state == sandboxer.Creating {
					_, err = r.Resume(acme, sb.ID, ResumeRequest{})
				} else {
					_, err = r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles})
				}
				done <- err
			}()
			eventually(t, "the state", func() bool {
				met := slices.ContainsFunc(r.world.Log(), func(e fake.Entry) bool { return e.Op == fake.OpFault })
				return met && r.get(sb.ID).State == tt.state
			})
			if got := r.destroy(sb.ID); got.State != sandboxer.Terminated {
				t.Errorf("destroyed: %+v", got)
			}
			if err := <-done; err == nil {
				t.Error("what was destroyed meanwhile succeeded")
			}
			r.clean()
		})
	}
	for _, depth := range []sandboxer.PauseDepth{sandboxer.PauseFreeze, sandboxer.PauseFiles} {
		t.Run("paused "+string(depth), func(t *testing.T) {
			r := newSnapshotRig(t)
			sb := r.create(sandboxer.CreateRequest{})
			r.pause(sb.ID, depth)
			r.destroy(sb.ID)
			r.clean()
		})
	}
}

// TestDropAfterDestroy: what a destroyed sandbox was paused to, and could not be dropped with it, can be dropped by a user.
func TestDropAfterDestroy(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	r.pause(sb.ID, sandboxer.PauseFiles)
	id := r.get(sb.ID).Pause.Snapshot
	r.world.Inject(fake.Fault{Verb: fake.VerbDropSnapshot, Kind: sandboxer.Unavailable})
	r.destroy(sb.ID)
	r.world.Forgive()
	if rec, err := r.DropSnapshot(admin, id); err != nil || rec.State != sandboxer.SnapshotDropped {
		t.Errorf("%+v, %v", rec, err)
	}
	r.clean()
}

// TestResumeOnDemand: use resumes where the profile says so, once for all who come.
func TestResumeOnDemand(t *testing.T) {
	r := newSnapshotRig(t, func(s *setup) {
		s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.doze", Extension: "ext.fake", AutoResume: true, PauseDepth: sandboxer.PauseFiles})
	})
	sb := r.create(sandboxer.CreateRequest{Profile: "doze", Inputs: map[string]string{"sandbox_id": "thread"}})
	r.write(sb.ID, "f", "x")
	if p := r.pause(sb.ID, ""); p.Pause.Depth != sandboxer.PauseFiles {
		t.Errorf("the profile's depth was not taken: %+v", p.Pause)
	}
	before := len(r.world.Log())
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() { r.wantFile(sb.ID, "f", "x") })
	}
	wg.Wait()
	made := 0
	for _, e := range r.world.Log()[before:] {
		if e.Op == fake.OpCreate {
			made++
		}
	}
	if made != 1 {
		t.Errorf("%d objects were made for 16 readers", made)
	}
	r.pause(sb.ID, "")
	if got := r.env(sb.ID, "HOME"); got == "" {
		t.Error("exec answered nothing")
	}
	r.pause(sb.ID, "")
	if _, err := r.Stats(acme, sb.ID); !isKind(err, sandboxer.Conflict) {
		t.Errorf("looking at figures woke it: %v", err)
	}
	again := r.create(sandboxer.CreateRequest{Profile: "doze", Inputs: map[string]string{"sandbox_id": "thread"}})
	if again.State != sandboxer.Running || again.Generation != sb.Generation {
		t.Errorf("asked for again by its ID: %+v", again)
	}
	r.destroy(sb.ID)
	r.clean()
}

// TestPauseMoney: paused time costs nothing, holds stay right, and a new time to live
// is paid for.
func TestPauseMoney(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newSnapshotRig(t, func(s *setup) {
			quiet(s)
			s.opts.SweepEvery = 10 * time.Minute // there are days to be swept
			s.opts.SnapshotStore = nil
			s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.nap", Extension: "ext.fake", TTL: time.Hour, MaxTTL: 4 * time.Hour,
				OnTTL: sandboxer.ExpiryPause, MaxPaused: 24 * time.Hour, Price: sandboxer.Price{PerHour: 120_000}})
		})
		if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
			t.Fatal(err)
		}
		sb := r.create(sandboxer.CreateRequest{Profile: "nap"})
		time.Sleep(30 * time.Minute)
		r.pause(sb.ID, sandboxer.PauseFreeze)
		time.Sleep(10 * time.Hour)
		p, err := r.Extend(acme, sb.ID, Extend{TTL: 20 * time.Hour})
		if err != nil || time.Until(p.ExpiresAt).Round(time.Minute) != 20*time.Hour {
			t.Errorf("extended while paused: %v, %v", p, err)
		}
		r.sound(1)
		up := r.resume(sb.ID)
		if left := time.Until(up.ExpiresAt).Round(time.Second); left != 30*time.Minute || up.PausedFor.Round(time.Second) != 10*time.Hour {
			t.Errorf("resumed with %s left, paused for %s", left, up.PausedFor)
		}
		time.Sleep(31 * time.Minute) // its time is over: the profile pauses it
		synctest.Wait()
		p = r.get(sb.ID)
		if p.State != sandboxer.Paused || p.Pause.Cause != sandboxer.ReasonExpired || p.Pause.Depth != sandboxer.PauseFiles || p.Reason != sandboxer.ReasonExpired {
			t.Fatalf("when its time was over: %+v", p)
		}
		r.sound(0)
		time.Sleep(5 * time.Hour)
		up = r.resume(sb.ID)
		if left := time.Until(up.ExpiresAt).Round(time.Second); left != time.Hour || up.Quote.Duration.Round(time.Minute) != 2*time.Hour {
			t.Errorf("resumed with %s left, quoted for %s", left, up.Quote.Duration)
		}
		time.Sleep(30 * time.Minute)
		r.pause(sb.ID, sandboxer.PauseFiles)
		time.Sleep(25 * time.Hour) // longer than it is kept
		synctest.Wait()
		end := r.get(sb.ID)
		if end.State != sandboxer.Terminated || end.Reason != sandboxer.ReasonExpired {
			t.Fatalf("after its keep: %+v", end)
		}
		if end.Cost < 180_000 || end.Cost > 181_000 { // an hour and a half at 0.12, and a sweep
			t.Errorf("it cost %s for 1.5 hours at 0.12", end.Cost)
		}
		r.clean()

		broke := r.create(sandboxer.CreateRequest{Profile: "nap"})
		time.Sleep(61 * time.Minute)
		synctest.Wait()
		left, err := r.Balance(admin, sandboxer.DefaultTenant)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Grant(admin, sandboxer.DefaultTenant, -left, "", ""); err != nil {
			t.Fatal(err)
		}
		_, err = r.Resume(acme, broke.ID, ResumeRequest{})
		wantErr(t, err, sandboxer.NoCredit, "")
		if got := r.get(broke.ID); got.State != sandboxer.Paused {
			t.Errorf("it is %s", got.State)
		}
		r.destroy(broke.ID)
		r.clean()
	})
}

// TestPauseOnExpiryFails: a sandbox that can never be paused ends as without; one that may be later
// is tried again, and one that cannot be saved is frozen unless a depth was asked for.
func TestPauseOnExpiryFails(t *testing.T) {
	for _, tt := range []struct {
		name  string
		fault fake.Fault
		depth sandboxer.PauseDepth // of the profile
		want  sandboxer.State
		how   sandboxer.PauseDepth
	}{
		{"for good", fake.Fault{Verb: fake.VerbSnapshot, Kind: sandboxer.Failed, Times: 1}, "", sandboxer.Terminated, ""},
		{"for now", fake.Fault{Verb: fake.VerbSnapshot, Kind: sandboxer.Unavailable, Times: 2}, "", sandboxer.Paused, sandboxer.PauseFiles},
		{"not to disk", fake.Fault{Verb: fake.VerbSnapshot, Kind: sandboxer.Unsupported, Times: 9}, "", sandboxer.Paused, sandboxer.PauseFreeze},
		{"not as is insisted on", fake.Fault{Verb: fake.VerbSnapshot, Kind: sandboxer.Unsupported, Times: 9}, sandboxer.PauseFiles, sandboxer.Terminated, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, func(s *setup) {
					quiet(s)
					s.opts.SweepEvery = 30 * time.Second
					s.profiles[0].OnTTL, s.profiles[0].PauseDepth = sandboxer.ExpiryPause, tt.depth
				})
				sb := r.create(sandboxer.CreateRequest{TTL: time.Minute})
				r.write(sb.ID, "kept", "as it was")
				r.world.Inject(tt.fault)
				time.Sleep(3 * time.Minute)
				synctest.Wait()
				if got := r.get(sb.ID); got.State != tt.want || tt.how != "" && got.Pause.Depth != tt.how {
					t.Errorf("it is %s to %q (%s, %s)", got.State, got.Pause.Depth, got.Message, got.LastError)
				}
				if tt.want == sandboxer.Paused {
					r.resume(sb.ID)
					r.wantFile(sb.ID, "kept", "as it was")
					r.destroy(sb.ID)
				}
				r.clean()
			})
		})
	}
}

// TestPauseKeepsNoLonger: a backend that keeps nothing that runs for as long as a pause may last, as another
// installation with a max_ttl, freezes it all the same, and saves it; its end is not that of the sandbox.
func TestPauseKeepsNoLonger(t *testing.T) {
	for _, depth := range []sandboxer.PauseDepth{sandboxer.PauseFreeze, sandboxer.PauseFiles} {
		t.Run(string(depth), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, func(s *setup) {
					quiet(s)
					s.opts.SweepEvery = 30 * time.Second
					s.profiles[0].OnTTL, s.profiles[0].PauseDepth = sandboxer.ExpiryPause, depth
				})
				sb := r.create(sandboxer.CreateRequest{TTL: time.Minute})
				r.write(sb.ID, "kept", "as it was")
				r.world.Inject(fake.Fault{Verb: fake.VerbRenew, Kind: sandboxer.Invalid, Times: 1})
				time.Sleep(3 * time.Minute)
				synctest.Wait()
				got := r.get(sb.ID)
				if got.State != sandboxer.Paused || got.Pause.Depth != depth {
					t.Fatalf("it is %s to %q (%s, %s)", got.State, got.Pause.Depth, got.Message, got.LastError)
				}
				if depth == sandboxer.PauseFreeze && got.Spec.Fuse.Before(got.ExpiresAt) {
					t.Errorf("its fuse is %s, and it is kept until %s", got.Spec.Fuse, got.ExpiresAt)
				}
				if got = r.resume(sb.ID); got.Spec.Fuse.Before(got.ExpiresAt) || got.Spec.Fuse.After(got.ExpiresAt.Add(time.Hour)) {
					t.Errorf("resumed, its fuse is %s, and it expires at %s", got.Spec.Fuse, got.ExpiresAt)
				}
				r.wantFile(sb.ID, "kept", "as it was")
				r.destroy(sb.ID)
				r.clean()
			})
		})
	}
}

// TestPauseCycles: a hundred pauses lose no write.
func TestPauseCycles(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	var want strings.Builder
	for i := range 100 {
		line := fmt.Sprintln("write", i)
		want.WriteString(line)
		x, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", `printf '%s\n' "$1" >>log`, "sh", strings.TrimSpace(line)}})
		if err != nil || x.Code != 0 {
			t.Fatalf("write %d: %+v, %v", i, x, err)
		}
		depth := sandboxer.PauseFiles
		if i%3 == 0 {
			depth = sandboxer.PauseFreeze
		}
		r.pause(sb.ID, depth)
		r.resume(sb.ID)
	}
	r.wantFile(sb.ID, "log", want.String())
	r.destroy(sb.ID)
	r.clean()
}

// TestProbeOfFormerObject: the death of the object that a pause removed does not end the sandbox that was resumed meanwhile.
func TestProbeOfFormerObject(t *testing.T) {
	r := newSnapshotRig(t)
	former := r.get(r.create(sandboxer.CreateRequest{}).ID)
	r.pause(former.ID, sandboxer.PauseFiles)
	r.resume(former.ID)
	ps := r.Manager.newPass()
	ps.sweepOne(former, lifecycle.Died)
	<-ps.done()
	if got := r.get(former.ID); got.State != sandboxer.Running {
		t.Errorf("it is %s (%s)", got.State, got.Reason)
	}
	r.destroy(former.ID)
	r.clean()
}

// TestPortsAfterResume: what was open before a pause is open after it, and leads to the
// new object; meanwhile it leads nowhere, or wakes the sandbox where the profile says so.
func TestPortsAfterResume(t *testing.T) {
	r := newSnapshotRig(t, func(s *setup) {
		for _, p := range []sandboxer.Profile{{ID: "profile.web"}, {ID: "profile.wakes", AutoResume: true}} {
			p.Extension, p.Ports = "ext.fake", []int{8080}
			s.profiles = append(s.profiles, p)
		}
	})
	visit := func(id string) error {
		v, err := r.Visit(acme, PortAccess{Ref: id, Port: 8080})
		if err == nil {
			v.End()
		}
		return err
	}
	sb := r.create(sandboxer.CreateRequest{Profile: "web"})
	if err := visit(sb.ID); err != nil {
		t.Fatal(err)
	}
	v, err := r.Visit(acme, PortAccess{Ref: sb.ID, Port: 8080})
	if err != nil {
		t.Fatal(err)
	}
	r.pause(sb.ID, sandboxer.PauseFiles)
	if v.Ctx.Err() == nil {
		t.Error("a visit outlives the pause")
	}
	v.End()
	wantErr(t, visit(sb.ID), sandboxer.Conflict, "sandboxer resume")
	r.resume(sb.ID)
	if err := visit(sb.ID); err != nil {
		t.Errorf("after the resume: %v", err)
	}
	wakes := r.create(sandboxer.CreateRequest{Profile: "wakes"})
	r.pause(wakes.ID, sandboxer.PauseFiles)
	if err := visit(wakes.ID); err != nil {
		t.Errorf("a visit did not wake it: %v", err)
	}
	r.destroy(sb.ID)
	r.destroy(wakes.ID)
	r.clean()
}

// A sandbox that could not be resumed, and whose object is gone since, is lost: it does not
// wait for the end of its time to be frozen again.
func TestGoneWhilePausingAgain(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(sandboxer.CreateRequest{})
	if _, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFreeze}); err != nil {
		t.Fatal(err)
	}
	r.world.Inject(fake.Fault{Verb: fake.VerbResume, Kind: sandboxer.Invalid}, fake.Fault{Verb: fake.VerbPause, Kind: sandboxer.Unavailable})
	if _, err := r.Resume(acme, sb.ID, ResumeRequest{}); err == nil {
		t.Fatal("it was resumed")
	}
	if got := r.get(sb.ID); got.State != sandboxer.Pausing {
		t.Fatalf("it is %s", got.State)
	}
	r.world.Forgive()
	r.world.Kill(sb.ID)
	for end := time.Now().Add(time.Minute); r.get(sb.ID).State != sandboxer.Terminated; {
		if time.Now().After(end) {
			t.Fatalf("it is %+v", r.get(sb.ID))
		}
		if _, err := r.Sweep(admin); err != nil {
			t.Fatal(err)
		}
	}
	if got := r.get(sb.ID); got.Reason != sandboxer.ReasonLost {
		t.Errorf("it ended as %s: %s", got.Reason, got.Message)
	}
	r.sound(0)
}

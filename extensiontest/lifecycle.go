package extensiontest

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func (s *suite) unknown() sandboxer.Handle {
	return sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1}
}

func (s *suite) probe(t *testing.T) {
	want := func(t *testing.T, sb *sandbox, h sandboxer.Handle, want sandboxer.Liveness) {
		t.Helper()
		if got, err := sb.b.IsAlive(ctx(t), h); err != nil || got != want {
			t.Errorf("IsAlive = %s, %v; want %s", got, err, want)
		}
	}
	s.test(t, "alive then gone", func(t *testing.T) {
		sb := s.up(t)
		want(t, sb, sb.h, sandboxer.Alive)
		other := *sb
		other.b = s.open(t)
		want(t, &other, viaJSON(t, sb.h), sandboxer.Alive)
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		want(t, sb, sb.h, sandboxer.Gone)
		want(t, &other, sb.h, sandboxer.Gone)
	})
	s.alone(t, "out of memory", s.probeMemory)
	s.test(t, "unknown sandbox is gone", func(t *testing.T) {
		want(t, &sandbox{b: s.opened}, s.unknown(), sandboxer.Gone)
	})
	s.test(t, "before it is ready", func(t *testing.T) {
		b, sp := s.opened, s.spec()
		s.owe(t, b, sp)
		h, err := b.Provision(ctx(t), sp)
		if err != nil {
			t.Fatal(describe(err))
		}
		want(t, &sandbox{b: b}, h, sandboxer.Alive)
	})
	s.test(t, "an unasked probe is unknown", func(t *testing.T) {
		sb := s.up(t)
		c, cancel := context.WithCancel(t.Context())
		cancel()
		if got, err := sb.b.IsAlive(c, sb.h); err == nil || got != sandboxer.Unknown {
			t.Errorf("IsAlive with a canceled context = %s, %v; want unknown and an error", got, err)
		}
	})
}

func (s *suite) discover(t *testing.T) {
	s.test(t, "by ID from another process", func(t *testing.T) {
		fuse := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
		sb := s.up(t, func(sp *sandboxer.Spec) { sp.Generation, sp.Fuse = 4, fuse })
		b := s.open(t)
		f, err := b.Discover(ctx(t), sb.spec.ID)
		if err != nil {
			t.Fatal(describe(err))
		}
		h := f.Handle
		if !f.Fuse.Equal(fuse) && (b.Can(sandboxer.CanRenew) || !f.Fuse.IsZero()) { // what cannot move it need not tell it
			t.Errorf("discovered the fuse %s; want %s", f.Fuse, fuse)
		}
		if h.SandboxID != sb.h.SandboxID || h.Generation != 4 || h.Ref != sb.h.Ref || h.Host != sb.h.Host {
			t.Errorf("discovered %+v; provisioned %+v", h, sb.h)
		}
		found := *sb
		found.b, found.h = b, h
		found.alive(t)
		if _, err := b.Teardown(ctx(t), h); err != nil {
			t.Error(describe(err))
		}
		s.gone(t, b, sb.spec)
	})
	s.test(t, "unknown ID", func(t *testing.T) {
		_, err := s.opened.Discover(ctx(t), s.spec().ID)
		wantKind(t, err, "Discover", sandboxer.NotFound)
	})
	s.test(t, "the newest generation", func(t *testing.T) {
		old := s.up(t)
		if _, err := old.b.Teardown(ctx(t), old.h); err != nil {
			t.Fatal(describe(err))
		}
		sp := old.spec
		sp.Generation = 2
		sb := s.upSpec(t, old.b, sp)
		if f, err := sb.b.Discover(ctx(t), sp.ID); err != nil || f.Handle.Generation != 2 {
			t.Errorf("Discover = %+v, %v; want generation 2", f.Handle, err)
		}
	})
	s.test(t, "makes nothing", func(t *testing.T) {
		b, sp := s.opened, s.spec()
		b.Discover(ctx(t), sp.ID)
		s.gone(t, b, sp)
	})
}

func (s *suite) list(t *testing.T) {
	s.test(t, "each sandbox once", func(t *testing.T) {
		a, b := s.up(t), s.up(t, func(sp *sandboxer.Spec) { sp.Generation = 2 })
		other := s.open(t)
		for _, sb := range []*sandbox{a, b} {
			s.eventually(t, sb.spec.ID+" to be listed once", func() bool { return len(listed(t, other, sb.spec)) == 1 })
			for _, h := range listed(t, other, sb.spec) {
				if h.Generation != sb.spec.Generation || h.Ref != sb.h.Ref {
					t.Errorf("listed %+v; provisioned %+v", h, sb.h)
				}
				found := *sb
				found.b, found.h = other, viaJSON(t, h)
				found.alive(t)
			}
		}
	})
	s.test(t, "gone after teardown", func(t *testing.T) {
		sb := s.up(t)
		s.eventually(t, "it to be listed", func() bool { return len(listed(t, sb.b, sb.spec)) == 1 })
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		s.eventually(t, "it to disappear", func() bool { return len(listed(t, sb.b, sb.spec)) == 0 })
	})
	s.test(t, "a listed handle tears down", func(t *testing.T) {
		sb := s.up(t)
		s.eventually(t, "it to be listed", func() bool { return len(listed(t, sb.b, sb.spec)) == 1 })
		for _, h := range listed(t, s.open(t), sb.spec) {
			if _, err := sb.b.Teardown(ctx(t), h); err != nil {
				t.Error(describe(err))
			}
		}
		s.gone(t, sb.b, sb.spec)
	})
	s.test(t, "owners are apart", func(t *testing.T) {
		sb := s.up(t)
		for _, owner := range []string{"somebody-else", sb.spec.Owner + "x", strings.TrimSuffix(sb.spec.Owner, sb.spec.Owner[len(sb.spec.Owner)-1:]) + "?"} {
			for h, err := range sb.b.ListRunning(ctx(t), owner) {
				if err != nil {
					t.Errorf("ListRunning(%q): %s", owner, describe(err))
				} else if h.SandboxID == sb.spec.ID {
					t.Errorf("ListRunning(%q) yields %+v, which is %q's", owner, h, sb.spec.Owner)
				}
			}
		}
	})
	s.test(t, "before it is ready", func(t *testing.T) {
		b, sp := s.opened, s.spec()
		s.owe(t, b, sp)
		if _, err := b.Provision(ctx(t), sp); err != nil {
			t.Fatal(describe(err))
		}
		s.eventually(t, "it to be listed", func() bool { return len(listed(t, b, sp)) == 1 })
	})
	s.test(t, "can be broken off", func(t *testing.T) {
		a, b := s.up(t), s.up(t)
		s.eventually(t, "both to be listed", func() bool { return len(listed(t, a.b, a.spec))+len(listed(t, a.b, b.spec)) == 2 })
		for _, err := range a.b.ListRunning(ctx(t), a.spec.Owner) {
			if err != nil {
				t.Error(describe(err))
			}
			break
		}
	})
}

func (s *suite) snapshot(t *testing.T) {
	// saved makes a sandbox, lets f prepare it and saves it.
	saved := func(t *testing.T, f func(*sandbox)) (*sandbox, sandboxer.Snapshot) {
		t.Helper()
		sb := s.up(t)
		if sb.b.Can(sandboxer.CanExec) {
			sb.sh(t, "echo saved >mark")
		}
		if f != nil {
			f(sb)
		}
		return sb, sb.save(t, "snap-"+sandboxer.NewID())
	}
	mark := func(t *testing.T, sb *sandbox, want string) {
		t.Helper()
		if sb.b.Can(sandboxer.CanExec) {
			if got := sb.sh(t, "cat mark"); got != want {
				t.Errorf("mark says %q; want %q", got, want)
			}
		}
	}

	s.test(t, "restore", func(t *testing.T) {
		sb, snap := saved(t, nil)
		if snap.SnapshotID == "" || snap.Bytes < 0 {
			t.Errorf("receipt: %+v", snap)
		}
		if sb.b.Can(sandboxer.CanExec) {
			sb.sh(t, "echo later >mark")
		}
		copied := s.restore(t, sb, snap)
		mark(t, copied, "saved")
		mark(t, sb, "later") // and the source runs on
		copied.alive(t)
		sb.alive(t)
	})
	s.test(t, "from another process", func(t *testing.T) {
		sb, snap := saved(t, nil)
		j, err := json.Marshal(snap)
		if err != nil {
			t.Fatal(err)
		}
		var back sandboxer.Snapshot
		if err := json.Unmarshal(j, &back); err != nil {
			t.Fatal(err)
		}
		other := *sb
		other.b = s.open(t)
		mark(t, s.restore(t, &other, back), "saved")
	})
	s.test(t, "outlives its source", func(t *testing.T) {
		sb, snap := saved(t, nil)
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		mark(t, s.restore(t, sb, snap), "saved")
	})
	s.test(t, "is idempotent", func(t *testing.T) {
		sb, snap := saved(t, nil)
		if sb.b.Can(sandboxer.CanExec) {
			sb.sh(t, "echo later >mark")
		}
		if again := sb.save(t, snap.SnapshotID); !reflect.DeepEqual(again, snap) {
			t.Errorf("saved again under the same ID: %+v; first %+v", again, snap)
		}
		mark(t, s.restore(t, sb, snap), "saved")
	})
	s.test(t, "restore is idempotent", func(t *testing.T) {
		sb, snap := saved(t, nil)
		copied := s.restore(t, sb, snap)
		if sb.b.Can(sandboxer.CanExec) {
			copied.sh(t, "echo copy >mark")
		}
		h, err := s.open(t).RestoreFromSnapshot(ctx(t), copied.spec, snap)
		if err != nil || h.Ref != copied.h.Ref {
			t.Errorf("restored again: %+v, %v; first %+v", h, err, copied.h)
		}
		mark(t, copied, "copy")
	})
	s.test(t, "fork", func(t *testing.T) {
		sb, snap := saved(t, nil)
		a, b := s.restore(t, sb, snap), s.restore(t, sb, snap)
		if sb.b.Can(sandboxer.CanExec) {
			a.sh(t, "echo a >mark")
		}
		mark(t, b, "saved")
		if _, err := a.b.Teardown(ctx(t), a.h); err != nil {
			t.Error(describe(err))
		}
		b.alive(t)
		mark(t, s.restore(t, sb, snap), "saved")
	})
	s.test(t, "processes", func(t *testing.T) {
		if !s.opened.Can(sandboxer.CanExec) {
			t.Skip("cannot look inside: the extension has no exec")
		}
		seconds := sleepLength()
		sb, snap := saved(t, func(sb *sandbox) { sb.sh(t, "sleep $1 >/dev/null 2>&1 </dev/null &", seconds) })
		if n := sb.count(t, seconds); n != 1 {
			t.Errorf("%d processes in the source after saving; want 1", n)
		}
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil { // a shared process table must not fool us
			t.Fatal(describe(err))
		}
		want := 0
		if snap.Memory {
			want = 1
		}
		if n := s.restore(t, sb, snap).count(t, seconds); n != want {
			t.Errorf("%d processes in the copy; a snapshot with memory %t promises %d", n, snap.Memory, want)
		}
	})
	s.test(t, "keeps files", func(t *testing.T) {
		if !s.opened.Can(sandboxer.CanExec) {
			t.Skip("cannot look inside: the extension has no exec")
		}
		sb, snap := saved(t, func(sb *sandbox) { sb.sh(t, fill, "tree") })
		if got, want := s.restore(t, sb, snap).sh(t, look, "tree"), sb.sh(t, look, "tree"); withoutTime(got) != withoutTime(want) {
			t.Errorf("the copy is\n%s\nwant\n%s", got, want)
		}
	})
	s.test(t, "memory", func(t *testing.T) {
		if !s.opened.Can(sandboxer.CanExec) {
			t.Skip("cannot look inside: the extension has no exec")
		}
		// The count of a loop is in its memory alone.
		sb, snap := saved(t, func(sb *sandbox) {
			sb.sh(t, `(i=1000; while :; do i=$((i+1)); echo $i >count.new; mv count.new count; sleep 0.05 2>/dev/null || sleep 1; done) >/dev/null 2>&1 </dev/null &`)
			poll(t, "the loop to count", s.long(), func() bool { return sb.number(t) > 1002 })
		})
		if !snap.Memory {
			t.Skip("the extension saves files alone")
		}
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		copied := s.restore(t, sb, snap)
		first := copied.number(t)
		if first < 1002 {
			t.Errorf("the copy counts from %d", first)
		}
		poll(t, "the copy to go on counting", s.long(), func() bool { return copied.number(t) > first })
	})
	s.test(t, "identity", func(t *testing.T) {
		sb := s.up(t, func(sp *sandboxer.Spec) { sp.Env["WHO"] = "source" })
		if !sb.b.Can(sandboxer.CanExec) {
			t.Skip("cannot look inside: the extension has no exec")
		}
		snap := sb.save(t, "snap-"+sandboxer.NewID())
		copied := s.restore(t, sb, snap, func(sp *sandboxer.Spec) { sp.Env["WHO"] = "copy" })
		if got := copied.sh(t, "echo $WHO"); got != "copy" {
			t.Errorf("a command in the copy sees WHO=%q; its spec says copy", got)
		}
		if s.enforces(Hostname) {
			if got := copied.sh(t, "hostname"); got != copied.spec.ID {
				t.Errorf("the copy %s calls itself %q", copied.spec.ID, got)
			}
		}
		before := time.Now().Unix()
		got, err := strconv.ParseInt(copied.sh(t, "date +%s"), 10, 64)
		if after := time.Now().Unix(); err != nil || got < before-2 || got > after+2 {
			t.Errorf("the copy's clock says %d at %d to %d", got, before, after)
		}
	})
	s.test(t, "of a paused sandbox", func(t *testing.T) {
		sb := s.up(t)
		if !sb.b.Can(sandboxer.CanPause) {
			t.Skip("the extension cannot pause")
		}
		if sb.b.Can(sandboxer.CanExec) {
			sb.sh(t, "echo saved >mark")
		}
		if err := sb.b.Pause(ctx(t), sb.h); err != nil {
			t.Fatalf("Pause: %s", describe(err))
		}
		snap := sb.save(t, "snap-"+sandboxer.NewID())
		if sb.b.Can(sandboxer.CanExec) { // it stays as it was
			_, err := sb.b.Exec(ctx(t), sb.h, sandboxer.Cmd{Args: s.script("true")})
			wantKind(t, err, "Exec in the source, which is paused", sandboxer.Conflict)
		}
		copied := s.restore(t, sb, snap)
		mark(t, copied, "saved")
		copied.alive(t) // and the copy runs
		if err := sb.b.Resume(ctx(t), sb.h); err != nil {
			t.Fatalf("Resume: %s", describe(err))
		}
		sb.alive(t)
	})
	s.test(t, "the next generation of its source", func(t *testing.T) {
		sb, snap := saved(t, nil)
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		copied := s.restore(t, sb, snap, func(sp *sandboxer.Spec) { sp.ID, sp.Generation = sb.spec.ID, sb.spec.Generation+1 })
		mark(t, copied, "saved")
		if _, err := s.open(t).Teardown(ctx(t), sb.h); err != nil { // which comes late
			t.Errorf("Teardown of the former generation: %s", describe(err))
		}
		copied.alive(t)
		mark(t, copied, "saved")
	})
	s.test(t, "drop", func(t *testing.T) {
		sb, snap := saved(t, nil)
		copied := s.restore(t, sb, snap)
		for i := range 2 {
			if err := s.open(t).DropSnapshot(ctx(t), snap); err != nil {
				t.Errorf("DropSnapshot, call %d: %s", i+1, describe(err))
			}
		}
		copied.alive(t)
		mark(t, copied, "saved")
		sb.alive(t)
		sp := s.spec()
		s.owe(t, sb.b, sp)
		_, err := sb.b.RestoreFromSnapshot(ctx(t), sp, snap)
		wantKind(t, err, "RestoreFromSnapshot of a dropped one", sandboxer.NotFound)
		s.gone(t, sb.b, sp)
	})
	s.test(t, "list", func(t *testing.T) {
		sb := s.up(t)
		snap := sb.save(t, "snap-"+sandboxer.NewID())
		other := s.open(t)
		listed := func(owner string) (all []sandboxer.FoundSnapshot) {
			t.Helper()
			for f, err := range other.ListSnapshots(ctx(t), owner) {
				if err != nil {
					t.Fatalf("ListSnapshots: %s", describe(err))
				}
				if f.Snapshot.SnapshotID == snap.SnapshotID {
					all = append(all, f)
				}
			}
			return all
		}
		check := func(when string) {
			t.Helper()
			all := listed(sb.spec.Owner)
			if len(all) != 1 {
				t.Errorf("%s it is listed %d times", when, len(all))
				return
			}
			f := all[0]
			if !f.Whole || !reflect.DeepEqual(f.Snapshot, snap) {
				t.Errorf("%s its receipt is %+v, whole: %v; want %+v", when, f.Snapshot, f.Whole, snap)
			}
			if f.SandboxID != sb.spec.ID || f.Generation != sb.spec.Generation {
				t.Errorf("%s it is of %q, generation %d; want %q, %d", when, f.SandboxID, f.Generation, sb.spec.ID, sb.spec.Generation)
			}
		}
		check("at first")
		if all := listed("another" + sb.spec.Owner); len(all) > 0 {
			t.Error("another owner sees it")
		}
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		check("without its sandbox")
		if err := sb.b.DropSnapshot(ctx(t), snap); err != nil {
			t.Fatal(describe(err))
		}
		if len(listed(sb.spec.Owner)) > 0 {
			t.Error("a dropped one is listed")
		}
	})
	s.test(t, "drop by ID alone", func(t *testing.T) {
		sb, snap := saved(t, nil)
		if err := s.open(t).DropSnapshot(ctx(t), sandboxer.Snapshot{SnapshotID: snap.SnapshotID}); err != nil {
			t.Error(describe(err))
		}
		sp := s.spec()
		s.owe(t, sb.b, sp)
		_, err := sb.b.RestoreFromSnapshot(ctx(t), sp, snap)
		wantKind(t, err, "RestoreFromSnapshot of a dropped one", sandboxer.NotFound)
	})
	s.test(t, "drop of the unknown", func(t *testing.T) {
		if err := s.opened.DropSnapshot(ctx(t), sandboxer.Snapshot{SnapshotID: "snap-" + sandboxer.NewID()}); err != nil {
			t.Error(describe(err))
		}
	})
	s.test(t, "unknown sandbox", func(t *testing.T) {
		_, err := s.opened.Snapshot(ctx(t), s.unknown(), "snap-"+sandboxer.NewID())
		wantKind(t, err, "Snapshot", sandboxer.NotFound)
	})
	s.test(t, "secrets stay inside", func(t *testing.T) {
		canary := "canary-" + sandboxer.NewID()
		sb := s.up(t, func(sp *sandboxer.Spec) { sp.Env["TOKEN"] = canary })
		if j, err := json.Marshal(sb.save(t, "snap-"+sandboxer.NewID())); err != nil || strings.Contains(string(j), canary) {
			t.Errorf("the receipt contains the value of a variable: %s, %v", j, err)
		}
	})
}

// save saves sb under id; the snapshot is dropped when the test ends.
func (sb *sandbox) save(t *testing.T, id string) sandboxer.Snapshot {
	t.Helper()
	t.Cleanup(func() {
		c, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
		defer cancel()
		if err := sb.b.DropSnapshot(c, sandboxer.Snapshot{SnapshotID: id}); err != nil {
			t.Errorf("DropSnapshot(%s)"+AtTheEnd+"%s", id, describe(err))
		}
	})
	snap, err := sb.b.Snapshot(ctx(t), sb.h, id)
	if err != nil {
		t.Fatalf("Snapshot: %s", describe(err))
	}
	return snap
}

// number returns the count of the test's loop.
func (sb *sandbox) number(t *testing.T) int {
	t.Helper()
	n, _ := strconv.Atoi(sb.sh(t, "cat count 2>/dev/null || :")) // empty while it is written
	return n
}

// withoutTime removes the last line of look's output, a time of change.
func withoutTime(looked string) string { return looked[:max(0, strings.LastIndex(looked, "\n"))] }

// restore makes a ready copy of snap with sb's backend.
func (s *suite) restore(t *testing.T, sb *sandbox, snap sandboxer.Snapshot, change ...func(*sandboxer.Spec)) *sandbox {
	t.Helper()
	sp := s.spec()
	for _, f := range change {
		f(&sp)
	}
	s.owe(t, sb.b, sp)
	h, err := sb.b.RestoreFromSnapshot(ctx(t), sp, snap)
	if err != nil {
		t.Fatalf("RestoreFromSnapshot: %s", describe(err))
	}
	r, err := sb.b.WaitReady(ctx(t), h)
	if err != nil {
		t.Fatalf("WaitReady of the copy: %s", describe(err))
	}
	return &sandbox{s: s, b: sb.b, h: h, reach: r, spec: sp}
}

func (s *suite) quote(t *testing.T) {
	s.test(t, "grows with time and makes nothing", func(t *testing.T) {
		b, sp := s.opened, s.spec()
		var last sandboxer.Credits
		for _, d := range []time.Duration{time.Minute, time.Hour, 24 * time.Hour} {
			q, err := b.EstimateCost(ctx(t), sp, d)
			if err != nil {
				t.Fatal(describe(err))
			}
			if q == nil {
				continue // no charge known
			}
			if q.Duration != d || q.Setup < 0 || q.PerHour < 0 || q.Amount < q.Setup || q.Amount < last {
				t.Errorf("quote for %s: %+v; before: %s", d, *q, last)
			}
			last = q.Amount
		}
		s.gone(t, b, sp)
	})
}

func (s *suite) meter(t *testing.T) {
	s.test(t, "cumulative", func(t *testing.T) {
		sb := s.up(t)
		var last sandboxer.Usage
		for i := range 3 {
			b := sb.b
			if i == 2 {
				b = s.open(t)
			}
			u, err := b.MeterActual(ctx(t), sb.h, time.Minute)
			if err != nil {
				t.Fatal(describe(err))
			}
			if u.Cost < last.Cost || u.CPU < last.CPU || u.MiBMillis < last.MiBMillis || u.RxBytes < last.RxBytes || u.TxBytes < last.TxBytes || u.At.Before(last.At) {
				t.Errorf("reading %d went back: %+v after %+v", i+1, u, last)
			}
			if u.Cost < 0 || u.Final || time.Since(u.At).Abs() > time.Hour {
				t.Errorf("reading %d: %+v", i+1, u)
			}
			last = u
		}
	})
	s.test(t, "after the teardown", func(t *testing.T) {
		sb := s.up(t)
		last, err := sb.b.MeterActual(ctx(t), sb.h, time.Minute)
		if err != nil {
			t.Fatal(describe(err))
		}
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		for range 2 {
			u, err := s.open(t).MeterActual(ctx(t), sb.h, time.Minute)
			if sandboxer.KindOf(err) == sandboxer.NotFound {
				return // it knows nothing of it any more: the broker's clock counts
			}
			if err != nil {
				t.Fatal(describe(err))
			}
			if u.Cost < last.Cost || last.Final && !(u.Final && u.Cost == last.Cost) {
				t.Errorf("after the teardown: %+v after %+v", u, last)
			}
			last = u
		}
	})
	s.test(t, "unknown sandbox", func(t *testing.T) {
		_, err := s.opened.MeterActual(ctx(t), s.unknown(), time.Minute)
		wantKind(t, err, "MeterActual", sandboxer.NotFound)
	})
}

func (s *suite) pause(t *testing.T) {
	s.test(t, "freezes and thaws", func(t *testing.T) {
		sb := s.up(t)
		exec := sb.b.Can(sandboxer.CanExec)
		files := sb.b.Can(sandboxer.CanFiles) && exec
		dir := ""
		if exec {
			dir = sb.dir(t)
			sb.sh(t, `(while :; do echo x >>beats; sleep 0.05 2>/dev/null || sleep 1; done) >/dev/null 2>&1 </dev/null &`)
		}
		beats := func() int64 {
			fi, err := sb.b.StatFile(ctx(t), sb.h, dir+"/beats")
			if err != nil {
				return -1
			}
			return fi.Size
		}
		if files {
			poll(t, "the first beats", s.long(), func() bool { return beats() > 2 })
		}
		for range 2 { // pausing what is paused is success
			if err := sb.b.Pause(ctx(t), sb.h); err != nil {
				t.Fatalf("Pause: %s", describe(err))
			}
		}
		if sb.b.Can(sandboxer.CanProbe) {
			if l, err := sb.b.IsAlive(ctx(t), sb.h); err != nil || l != sandboxer.Alive {
				t.Errorf("IsAlive of a paused sandbox = %s, %v", l, err)
			}
		}
		if sb.b.Can(sandboxer.CanList) {
			s.eventually(t, "the paused sandbox to be listed", func() bool { return len(listed(t, sb.b, sb.spec)) == 1 })
		}
		other := *sb
		other.b = s.open(t)
		for range 2 {
			if err := other.b.Resume(ctx(t), viaJSON(t, sb.h)); err != nil {
				t.Fatalf("Resume: %s", describe(err))
			}
		}
		sb.alive(t)
		if files {
			n := beats()
			poll(t, "beats after the thaw", s.long(), func() bool { return beats() > n })
		}
	})
	s.test(t, "a frozen process does not run", func(t *testing.T) {
		sb := s.up(t)
		if !sb.b.Can(sandboxer.CanExec) {
			t.Skip("cannot look inside: the extension has no exec")
		}
		out := &buffer{}
		r := sb.start(t, sandboxer.Cmd{Args: s.script("while echo x; do sleep 0.02 2>/dev/null || sleep 1; done"), Stdout: out})
		poll(t, "the first beats", s.long(), func() bool { return len(out.String()) > 4 })
		if err := sb.b.Pause(ctx(t), sb.h); err != nil {
			t.Fatalf("Pause: %s", describe(err))
		}
		if s.PauseCuts {
			_, err := r.wait(t)
			wantKind(t, err, "the call that follows a command, after a pause", sandboxer.Conflict)
			if err := sb.b.Resume(ctx(t), sb.h); err != nil {
				t.Fatalf("Resume: %s", describe(err))
			}
			sb.alive(t)
			return
		}
		// Earlier output may still be on its way; then silence.
		quiet, n := 0, 0
		for end := time.Now().Add(s.long()); quiet < 25 && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			if m := len(out.String()); m == n {
				quiet++
			} else {
				quiet, n = 0, m
			}
		}
		if quiet < 25 {
			t.Errorf("a paused sandbox still writes (%d bytes)", n)
		}
		if err := sb.b.Resume(ctx(t), sb.h); err != nil {
			t.Fatalf("Resume: %s", describe(err))
		}
		poll(t, "beats after the thaw", s.long(), func() bool { return len(out.String()) > n })
	})
	s.test(t, "exec on a paused sandbox", func(t *testing.T) {
		sb := s.up(t)
		if !sb.b.Can(sandboxer.CanExec) {
			t.Skip("the extension has no exec")
		}
		if err := sb.b.Pause(ctx(t), sb.h); err != nil {
			t.Fatalf("Pause: %s", describe(err))
		}
		c, cancel := context.WithTimeout(t.Context(), s.long())
		defer cancel()
		_, err := s.open(t).Exec(c, sb.h, sandboxer.Cmd{Args: s.script("true")})
		wantKind(t, err, "Exec in a paused sandbox", sandboxer.Conflict)
		if err := sb.b.Resume(ctx(t), sb.h); err != nil {
			t.Fatalf("Resume: %s", describe(err))
		}
		sb.alive(t)
	})
	s.test(t, "resume of one that was not paused", func(t *testing.T) {
		sb := s.up(t)
		if err := sb.b.Resume(ctx(t), sb.h); err != nil {
			t.Errorf("Resume: %s", describe(err))
		}
		sb.alive(t)
	})
	s.test(t, "teardown of a paused sandbox", func(t *testing.T) {
		sb := s.up(t)
		if err := sb.b.Pause(ctx(t), sb.h); err != nil {
			t.Fatalf("Pause: %s", describe(err))
		}
		if _, err := s.open(t).Teardown(ctx(t), sb.h); err != nil {
			t.Fatalf("Teardown: %s", describe(err))
		}
		s.gone(t, sb.b, sb.spec)
	})
	s.test(t, "unknown sandbox", func(t *testing.T) {
		b := s.opened
		wantKind(t, b.Pause(ctx(t), s.unknown()), "Pause", sandboxer.NotFound)
		wantKind(t, b.Resume(ctx(t), s.unknown()), "Resume", sandboxer.NotFound)
	})
}

func (s *suite) renew(t *testing.T) {
	s.test(t, "moves the fuse out", func(t *testing.T) {
		other := s.open(t)
		s.outlives(t, func(*sandboxer.Spec) {}, func(sb *sandbox) {
			if err := other.Renew(ctx(t), sb.h, sb.spec.Fuse.Add(time.Hour)); err != nil {
				t.Fatal(describe(err))
			}
		})
	})
	s.test(t, "moves the fuse in", func(t *testing.T) {
		sb := s.up(t)
		if err := sb.b.Renew(ctx(t), sb.h, time.Now().Add(time.Second)); err != nil {
			t.Fatal(describe(err))
		}
		poll(t, "the backend to destroy it", s.Settle+s.Patience, func() bool {
			_, err := sb.b.WaitReady(ctx(t), sb.h)
			return sandboxer.KindOf(err) == sandboxer.NotFound
		})
		// Dead; its remains are removed as after any death.
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		s.gone(t, sb.b, sb.spec)
	})
	s.test(t, "while it is frozen", func(t *testing.T) {
		sb := s.up(t)
		if !sb.b.Can(sandboxer.CanPause) {
			t.Skip("it cannot freeze")
		}
		// A pause whose answer was lost is repeated, and with it the move of the fuse before it.
		for _, f := range []func() error{
			func() error { return sb.b.Pause(ctx(t), sb.h) },
			func() error { return sb.b.Renew(ctx(t), sb.h, time.Now().Add(time.Hour)) },
			func() error { return sb.b.Resume(ctx(t), sb.h) },
		} {
			if err := f(); err != nil {
				t.Fatal(describe(err))
			}
		}
		sb.alive(t)
	})
	s.test(t, "unknown sandbox", func(t *testing.T) {
		wantKind(t, s.opened.Renew(ctx(t), s.unknown(), time.Now().Add(time.Hour)), "Renew", sandboxer.NotFound)
	})
}

// outlives makes a sandbox with a fuse that soon expires, and has move move it: the sandbox must exist after the first fuse
// has expired. If a busy machine takes so long that it expires before, a longer one is tried.
func (s *suite) outlives(t *testing.T, change func(*sandboxer.Spec), move func(*sandbox)) {
	t.Helper()
	for fuse := 2 * time.Second; ; fuse *= 2 {
		sp := s.spec()
		change(&sp)
		sp.Fuse = time.Now().Add(s.Settle + fuse)
		s.owe(t, s.opened, sp)
		h, err := s.opened.Provision(ctx(t), sp)
		var r sandboxer.Reachability
		if err == nil {
			r, err = s.opened.WaitReady(ctx(t), h)
		}
		left := time.Until(sp.Fuse)
		if left < fuse/2 && fuse < time.Minute {
			continue
		}
		if err != nil {
			t.Fatalf("a sandbox with a fuse of %s: %s", fuse, describe(err))
		}
		sb := &sandbox{s: s, b: s.opened, h: h, reach: r, spec: sp}
		move(sb)
		poll(t, "the first fuse to pass", time.Minute+fuse, func() bool { return time.Now().After(sp.Fuse.Add(time.Second)) })
		sb.alive(t)
		return
	}
}

func (s *suite) network(t *testing.T) {
	set := func(t *testing.T, sb *sandbox, p sandboxer.NetworkPolicy) {
		t.Helper()
		if err := sb.b.SetNetwork(ctx(t), sb.h, p); err != nil {
			t.Fatalf("SetNetwork(%+v): %s", p, describe(err))
		}
	}
	public := sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}
	s.test(t, "is idempotent", func(t *testing.T) {
		sb := s.up(t)
		for _, p := range []sandboxer.NetworkPolicy{{}, {Mode: sandboxer.NetworkNone}, public, public, {}} {
			set(t, sb, p)
		}
		sb.alive(t)
	})
	s.test(t, "from another process", func(t *testing.T) {
		sb := s.up(t)
		other := *sb
		other.b, other.h = s.open(t), viaJSON(t, sb.h)
		set(t, &other, public)
		other.alive(t)
	})
	s.test(t, "nonsense is refused", func(t *testing.T) {
		sb := s.up(t)
		for _, p := range []sandboxer.NetworkPolicy{{Mode: "sometimes"}, {Mode: sandboxer.NetworkPublic, Allow: []string{"example.org"}}} {
			wantKind(t, sb.b.SetNetwork(ctx(t), sb.h, p), fmt.Sprintf("SetNetwork(%+v)", p), sandboxer.Invalid, sandboxer.Unsupported)
		}
		for _, list := range [][]string{{}, {"127.0.0.1"}, {"not a name"}} {
			p := sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: list}
			wantKind(t, sb.b.SetNetwork(ctx(t), sb.h, p), fmt.Sprintf("SetNetwork(%+v)", p), sandboxer.Invalid, sandboxer.Unsupported)
		}
		sb.alive(t)
	})
	s.test(t, "unknown sandbox", func(t *testing.T) {
		wantKind(t, s.opened.SetNetwork(ctx(t), s.unknown(), public), "SetNetwork", sandboxer.NotFound)
	})
	// Another process of the broker that starts meanwhile may set up the network of every sandbox, with the policy of that moment.
	s.alone(t, "opens and closes", func(t *testing.T) {
		if s.Outside == nil || s.Connect == nil {
			t.Skip("the harness has nothing outside to reach")
		}
		to := s.Outside(t)
		sb := s.up(t, func(sp *sandboxer.Spec) { sp.Network = sandboxer.NetworkPolicy{} })
		allow := func(list ...string) sandboxer.NetworkPolicy {
			return sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: list}
		}
		check := func(t *testing.T, sb *sandbox, what string, want bool) {
			t.Helper()
			x, o, e := sb.run(t, sandboxer.Cmd{Args: s.Connect(to)})
			if (x.Code == 0) != want {
				t.Errorf("%s: reached is %t; want %t\n%s%s", what, x.Code == 0, want, o, e)
			}
		}
		check(t, sb, "none", false)
		other := fmt.Sprint(to.Port() ^ 1)
		for _, step := range []struct {
			what string
			p    sandboxer.NetworkPolicy
			want bool
		}{
			{"public", public, true},
			{"another address", allow("192.0.2.1"), false},
			{"the address", allow(to.Addr().String()), true},
			{"another port", allow(to.Addr().String() + ":" + other), false},
			{"the port", allow(to.String()), true},
			{"none again", sandboxer.NetworkPolicy{}, false},
			{"the address again", allow(to.String()), true},
		} {
			set(t, sb, step.p)
			check(t, sb, step.what, step.want)
		}
		again := *sb
		again.b = s.open(t)
		check(t, &again, "the address, in another process", true)
		set(t, &again, sandboxer.NetworkPolicy{})
		check(t, &again, "none, in another process", false)
	})
}

func (s *suite) capacity(t *testing.T) {
	s.test(t, "an offer", func(t *testing.T) {
		b := s.opened
		o, err := b.Capacity(ctx(t), "")
		if err != nil {
			t.Fatal(describe(err))
		}
		if o.Free < -1 || o.Free == 0 {
			t.Errorf("free = %d on a backend that is about to take sandboxes", o.Free)
		}
		for _, host := range o.Hosts {
			if _, err := b.Capacity(ctx(t), host); err != nil {
				t.Errorf("the offered host %q: %s", host, describe(err))
			}
		}
	})
	s.test(t, "unknown host", func(t *testing.T) {
		if o, err := s.opened.Capacity(ctx(t), "no-such-host.invalid"); err == nil {
			t.Errorf("a host that does not exist offers %+v", o)
		}
	})
}

func (s *suite) stats(t *testing.T) {
	s.test(t, "plausible and growing", func(t *testing.T) {
		sb := s.up(t)
		first, err := sb.b.Stats(ctx(t), sb.h)
		if err != nil {
			t.Fatal(describe(err))
		}
		if time.Since(first.At).Abs() > time.Minute {
			t.Errorf("measured %s ago", time.Since(first.At))
		}
		if !sb.b.Can(sandboxer.CanExec) {
			return
		}
		sb.sh(t, "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; head -c 3000000 /dev/zero >big")
		// Figures may be outdated by the time they are read.
		other := s.open(t)
		poll(t, "the figures to show what was done", s.long(), func() bool {
			st, err := other.Stats(ctx(t), sb.h)
			return err == nil && (st.CPU < 0 || st.CPU >= first.CPU) && (st.DiskBytes < 0 || st.DiskBytes >= 2_500_000)
		})
		started, w := newSignalWriter()
		sb.start(t, sandboxer.Cmd{Args: s.script("echo started; sleep 3600 & sleep 3600"), Stdout: w})
		await(t, started, "the command to start")
		last := ""
		poll(t, "processes and memory to be counted", s.long(), func() bool {
			st, err := sb.b.Stats(ctx(t), sb.h)
			last = fmt.Sprintf("%+v, %v", st, err)
			return err == nil && (st.PIDs < 0 || st.PIDs >= 2) && (st.MemoryBytes < 0 || st.MemoryBytes > 0)
		})
		if t.Failed() {
			t.Logf("last figures: %s", last)
		}
	})
	s.test(t, "limits are shown", func(t *testing.T) {
		if !s.enforces(Memory) {
			t.Skip("the harness does not list memory in Enforces")
		}
		sb := s.up(t, func(sp *sandboxer.Spec) { sp.Limits.MemoryBytes = 128 << 20 })
		if st, err := sb.b.Stats(ctx(t), sb.h); err != nil || st.MemoryLimit != 128<<20 {
			t.Errorf("memory limit = %d, %v; want %d", st.MemoryLimit, err, 128<<20)
		}
	})
	s.test(t, "unknown sandbox", func(t *testing.T) {
		_, err := s.opened.Stats(ctx(t), s.unknown())
		wantKind(t, err, "Stats", sandboxer.NotFound)
	})
}

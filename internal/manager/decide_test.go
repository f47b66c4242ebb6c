package manager

import (
	"slices"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func TestDecide(t *testing.T) {
	now := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	type record = sandboxer.Sandbox
	const (
		alive, gone, unknown = sandboxer.Alive, sandboxer.Gone, sandboxer.Unknown
		silent               = sandboxer.Unresponsive
		busy                 = true
	)
	young := record{State: sandboxer.Creating, CreatedAt: ago(time.Second), ExpiresAt: now.Add(time.Hour)}
	with := func(r record, f func(*record)) record { f(&r); return r }
	made := with(young, func(r *record) { r.Handle.SandboxID = "x" })
	run := record{State: sandboxer.Running, CreatedAt: ago(time.Hour), ReadyAt: ago(time.Hour), UsedAt: ago(time.Minute), ExpiresAt: now.Add(time.Hour)}
	lazy := with(run, func(r *record) { r.Spec.Profile.Idle = time.Minute })
	missed := func(d time.Duration) record { return with(run, func(r *record) { r.AbsentSince = ago(d) }) }
	mute := with(run, func(r *record) { r.UnresponsiveSince = ago(time.Hour) })
	frozen := with(run, func(r *record) {
		r.State, r.Pause = sandboxer.Paused, sandboxer.Pause{Depth: sandboxer.PauseFreeze, At: ago(time.Minute)}
	})
	in := func(s sandboxer.State, r record) record { r.State = s; return r }
	past := func(r record) record { r.ExpiresAt = now; return r }
	later := func(r record) record { r.RetryAt = now.Add(1); return r }

	ended := func(r sandboxer.Reason) action { return action{verbEnd, r} }
	for _, c := range []struct {
		name    string
		record  record
		seen    sandboxer.Liveness
		working bool
		want    action
	}{
		{"creating, somebody at it", young, unknown, busy, action{verb: verbNone}},
		{"creating, nobody at it", young, unknown, false, action{verb: verbResume}},
		{"creating, nobody at it, and it is there", young, alive, false, action{verb: verbResume}},
		{"creating, nobody at it, and it is not there", young, gone, false, action{verb: verbResume}},
		{"creating, to be retried later", later(young), unknown, false, action{verb: verbNone}},
		{"creating for too long", with(young, func(r *record) { r.CreatedAt = ago(stuckAfter + 1) }), unknown, false, ended(sandboxer.ReasonFailed)},
		{"creating for too long, somebody at it", with(young, func(r *record) { r.CreatedAt = ago(stuckAfter + 1) }), unknown, busy, action{verb: verbNone}},
		{"creating, not made yet, somebody at it", young, gone, busy, action{verb: verbNone}},
		{"creating, made, first absence, somebody at it", made, gone, busy, action{verb: verbMarkAbsent}},
		{"creating, made, absent, somebody at it", with(made, func(r *record) { r.AbsentSince = ago(confirmAfter) }), gone, busy, ended(sandboxer.ReasonLost)},
		{"creating, made, absent, nobody at it", with(made, func(r *record) { r.AbsentSince = ago(confirmAfter) }), gone, false, action{verb: verbResume}},
		{"creating, claimed, absent, somebody at it", with(made, func(r *record) { r.Pool, r.Tenant, r.AbsentSince = "p", sandboxer.DefaultTenant, ago(time.Hour) }), gone, busy, action{verb: verbNone}},
		{"creating and expired", past(young), unknown, false, ended(sandboxer.ReasonExpired)},
		{"creating, hanging and expired", past(young), unknown, busy, ended(sandboxer.ReasonExpired)},

		{"running", run, alive, false, action{verb: verbNone}},
		{"running, unknown", run, unknown, false, action{verb: verbNone}},
		{"running, expired", past(run), alive, false, ended(sandboxer.ReasonExpired)},
		{"running, expired, unknown", past(run), unknown, false, ended(sandboxer.ReasonExpired)},
		{"running, expired, somebody at it", past(run), alive, busy, ended(sandboxer.ReasonExpired)},
		{"running without expiry", with(run, func(r *record) { r.ExpiresAt = time.Time{} }), alive, false, action{verb: verbNone}},
		{"running, first absence", run, gone, false, action{verb: verbMarkAbsent}},
		{"running, second absence too soon", missed(confirmAfter - 1), gone, false, action{verb: verbNone}},
		{"running, second absence", missed(confirmAfter), gone, false, ended(sandboxer.ReasonLost)},
		{"running, told to have died", run, died, false, ended(sandboxer.ReasonLost)},
		{"running, told to have died, somebody at it", run, died, busy, ended(sandboxer.ReasonLost)},
		{"frozen, told to have died", frozen, died, false, ended(sandboxer.ReasonLost)},
		{"creating, nobody at it, told to have died", young, died, false, action{verb: verbResume}},
		{"terminating, to be retried later, told to have died", later(in(sandboxer.Terminating, run)), died, false, action{verb: verbNone}},
		{"running, absent once and now unknown", missed(time.Hour), unknown, false, action{verb: verbNone}},
		{"running, killed for its memory", run, sandboxer.OOMKilled, false, ended(sandboxer.ReasonOOMKilled)},
		{"running, killed for its memory, somebody at it", run, sandboxer.OOMKilled, busy, action{verb: verbMarkAbsent}},
		{"running, killed for its memory, seen twice, somebody at it", missed(confirmAfter), sandboxer.OOMKilled, busy, ended(sandboxer.ReasonOOMKilled)},
		{"running, absent once and back", missed(time.Hour), alive, false, action{verb: verbClearMarks}},
		{"running, unresponsive", run, silent, false, action{verb: verbMarkUnresponsive}},
		{"running, unresponsive, somebody at it", run, silent, busy, action{verb: verbNone}},
		{"running, unresponsive for long", mute, silent, false, action{verb: verbNone}},
		{"running, unresponsive and now unknown", mute, unknown, false, action{verb: verbNone}},
		{"running, unresponsive and back", mute, alive, false, action{verb: verbClearMarks}},
		{"running, unresponsive, then absent", mute, gone, false, action{verb: verbMarkAbsent}},
		{"running, unresponsive and expired", past(mute), silent, false, ended(sandboxer.ReasonExpired)},
		{"frozen, unresponsive", frozen, silent, false, action{verb: verbMarkUnresponsive}},
		{"running, absent, somebody at it", missed(time.Hour), gone, busy, ended(sandboxer.ReasonLost)},
		{"running, absent once and back, somebody at it", missed(time.Hour), alive, busy, action{verb: verbClearMarks}},
		{"running, idle", lazy, alive, false, ended(sandboxer.ReasonIdle)},
		{"running, idle, and to be paused then", with(lazy, func(r *record) { r.Spec.Profile.OnIdle = sandboxer.ExpiryPause }), alive, false, action{verbPause, sandboxer.ReasonIdle}},
		{"running, idle, and to be paused then, somebody at it", with(lazy, func(r *record) { r.Spec.Profile.OnIdle = sandboxer.ExpiryPause }), alive, busy, action{verb: verbNone}},
		{"running, idle, and to be paused then, but expired", past(with(lazy, func(r *record) { r.Spec.Profile.OnIdle = sandboxer.ExpiryPause })), alive, false, ended(sandboxer.ReasonExpired)},
		{"running, idle, unknown", lazy, unknown, false, ended(sandboxer.ReasonIdle)},
		{"running, used just now", with(lazy, func(r *record) { r.UsedAt = ago(time.Minute - 1) }), alive, false, action{verb: verbNone}},
		{"running, lost rather than idle", with(lazy, func(r *record) { r.AbsentSince = ago(confirmAfter) }), gone, false, ended(sandboxer.ReasonLost)},

		{"warm", in(sandboxer.Warm, run), alive, false, action{verb: verbNone}},
		{"warm is not idle", in(sandboxer.Warm, lazy), alive, false, action{verb: verbNone}},
		{"warm, expired", in(sandboxer.Warm, past(run)), alive, false, ended(sandboxer.ReasonExpired)},
		{"warm, first absence", in(sandboxer.Warm, run), gone, false, action{verb: verbMarkAbsent}},

		{"pausing", in(sandboxer.Pausing, run), unknown, busy, action{verb: verbNone}},
		{"pausing, expired", in(sandboxer.Pausing, past(run)), unknown, false, ended(sandboxer.ReasonExpired)},
		{"pausing, expired, somebody at it", in(sandboxer.Pausing, past(run)), unknown, busy, action{verb: verbNone}},
		{"pausing, nobody at it", in(sandboxer.Pausing, run), gone, false, action{verb: verbPause}},
		{"pausing, first absence, somebody at it", in(sandboxer.Pausing, run), gone, busy, action{verb: verbMarkAbsent}},
		{"pausing, absent, somebody at it", in(sandboxer.Pausing, missed(confirmAfter)), gone, busy, ended(sandboxer.ReasonLost)},
		{"pausing, to be retried later", later(in(sandboxer.Pausing, run)), unknown, false, action{verb: verbNone}},
		{"pausing, to be retried later, first absence", later(in(sandboxer.Pausing, run)), gone, false, action{verb: verbMarkAbsent}},
		{"pausing, to be retried later, second absence too soon", later(in(sandboxer.Pausing, missed(confirmAfter-1))), gone, false, action{verb: verbNone}},
		{"pausing, to be retried later, second absence", later(in(sandboxer.Pausing, missed(confirmAfter))), gone, false, ended(sandboxer.ReasonLost)},
		{"pausing, to be retried later, absent once and back", later(in(sandboxer.Pausing, missed(time.Hour))), alive, false, action{verb: verbClearMarks}},
		{"pausing, to be retried later, unresponsive", later(in(sandboxer.Pausing, run)), silent, false, action{verb: verbNone}},
		{"paused is not lost", in(sandboxer.Paused, missed(time.Hour)), gone, false, action{verb: verbNone}},
		{"paused, expired", in(sandboxer.Paused, past(run)), unknown, false, ended(sandboxer.ReasonExpired)},

		{"terminating", in(sandboxer.Terminating, run), unknown, false, action{verb: verbTeardown}},
		{"terminating, gone by itself", in(sandboxer.Terminating, run), gone, false, action{verb: verbTeardown}},
		{"terminating, somebody at it", in(sandboxer.Terminating, run), unknown, busy, action{verb: verbNone}},
		{"terminating, to be retried later", later(in(sandboxer.Terminating, run)), unknown, false, action{verb: verbNone}},
		{"terminating, to be retried later, first absence", later(in(sandboxer.Terminating, run)), gone, false, action{verb: verbMarkAbsent}},
		{"terminating, to be retried later, absent", later(in(sandboxer.Terminating, missed(time.Hour))), gone, false, action{verb: verbNone}},
		{"terminating, to be retried later, absent once and back", later(in(sandboxer.Terminating, missed(time.Hour))), alive, false, action{verb: verbClearMarks}},
		{"terminating, to be retried now", with(in(sandboxer.Terminating, run), func(r *record) { r.RetryAt = now }), unknown, false, action{verb: verbTeardown}},
		{"terminated", in(sandboxer.Terminated, past(run)), alive, false, action{verb: verbNone}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := decide(&c.record, c.seen, c.working, now); got != c.want {
				t.Errorf("decided %v, want %v", got, c.want)
			}
		})
	}
}

// TestDecideIsSafe tries every combination for what must never happen.
func TestDecideIsSafe(t *testing.T) {
	now := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	times := []time.Time{{}, now.Add(-time.Hour), now, now.Add(time.Hour)}
	n := 0
	for _, state := range sandboxer.States() {
		for _, seen := range []sandboxer.Liveness{sandboxer.Alive, sandboxer.Gone, sandboxer.OOMKilled, sandboxer.Unknown, died, ""} {
			for _, working := range []bool{false, true} {
				for _, absent := range times {
					for _, expires := range times {
						for _, retry := range times {
							sb := &sandboxer.Sandbox{State: state, CreatedAt: now.Add(-time.Minute), AbsentSince: absent, ExpiresAt: expires, RetryAt: retry, UsedAt: now}
							a := decide(sb, seen, working, now)
							n++
							switch {
							case a.verb == verbMarkAbsent && seen != sandboxer.Gone && seen != sandboxer.OOMKilled, a.verb == verbClearMarks && seen != sandboxer.Alive:
								t.Errorf("%+v gets %v, seen %s", sb, a, seen)
							case a.reason == sandboxer.ReasonLost && seen != died && (seen != sandboxer.Gone || absent.IsZero()):
								t.Errorf("%+v is lost without proof (%s)", sb, seen)
							case a.reason == sandboxer.ReasonOOMKilled && seen != sandboxer.OOMKilled:
								t.Errorf("%+v is killed for memory without proof (%s)", sb, seen)
							case a.reason == sandboxer.ReasonExpired && !expires.Equal(now) && !expires.Equal(now.Add(-time.Hour)):
								t.Errorf("%+v has expired too soon", sb)
							case state == sandboxer.Terminated && a.verb != verbNone:
								t.Errorf("a terminated sandbox gets %v", a)
							case a.verb == verbEnd && !state.CanBecome(sandboxer.Terminating):
								t.Errorf("%s cannot end", state)
							case working && !slices.Contains([]action{{verb: verbNone}, {verb: verbMarkAbsent}, {verb: verbClearMarks}, {verbEnd, sandboxer.ReasonExpired}, {verbEnd, sandboxer.ReasonLost}, {verbEnd, sandboxer.ReasonOOMKilled}}, a):
								t.Errorf("%s gets %v while somebody is at it", state, a)
							}
						}
					}
				}
			}
		}
	}
	if n < 3000 {
		t.Errorf("only %d combinations", n)
	}
}

func TestBackoff(t *testing.T) {
	for n, want := range map[int]time.Duration{0: time.Second, 1: time.Second, 2: 2 * time.Second, 5: 16 * time.Second, 9: 256 * time.Second, 10: 5 * time.Minute, 1000: 5 * time.Minute} {
		least, most := backoff(n, 0), backoff(n, 0.999999)
		if least != want*3/4 || most <= want || most > want*5/4 {
			t.Errorf("backoff(%d) is %s to %s, want %s give or take a quarter", n, least, most, want)
		}
	}
}

// TestMove tries every pair of states on real records.
func TestMove(t *testing.T) {
	r := newRig(t, func(s *setup) { s.idle = true })
	n := 0
	for _, from := range sandboxer.States() {
		for _, to := range sandboxer.States() {
			n++
			sb := &sandboxer.Sandbox{ID: sandboxer.NewID(), Generation: 1, Tenant: sandboxer.DefaultTenant, State: from, CreatedAt: now(), Retries: 3, RetryAt: now(), LastError: "x", AbsentSince: now()}
			if err := r.store.CreateSandbox(t.Context(), sb, sandboxer.Writes{}); err != nil {
				t.Fatal(err)
			}
			err := r.move(acme, sb, to, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
				sb.Reason, sb.Message = sandboxer.ReasonRequested, "because"
				return nil
			})
			stored, gerr := r.store.Sandbox(t.Context(), sb.ID)
			events, eerr := r.store.Events(t.Context(), sandboxer.EventQuery{SandboxID: sb.ID})
			if gerr != nil || eerr != nil {
				t.Fatal(gerr, eerr)
			}
			if !from.CanBecome(to) {
				wantErr(t, err, sandboxer.Conflict, "cannot become")
				if stored.State != from || stored.Version != 1 || len(events) != 0 {
					t.Errorf("%s→%s was refused and yet changed the record", from, to)
				}
				continue
			}
			if err != nil || stored.State != to || stored.Retries != 0 || !stored.RetryAt.IsZero() || stored.LastError != "" || !stored.AbsentSince.IsZero() {
				t.Errorf("%s→%s: %v, %+v", from, to, err, stored)
			}
			if len(events) != 1 || events[0].From != from || events[0].To != to || events[0].Cause != sandboxer.ReasonRequested || events[0].Actor != "user:default" {
				t.Errorf("%s→%s: events %+v", from, to, events)
			}
		}
	}
	if n != 49 {
		t.Errorf("%d pairs of states: a new state needs a look at decide and Destroy", n)
	}
}

package lifecycle

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

	spent := func(r record, on sandboxer.CostAction) record {
		r.Quote.Amount, r.Usage.Cost, r.Spec.Profile.OnCost = 10, 10, on
		return r
	}

	owing := func(r record, due time.Duration) record {
		r.Debts = []sandboxer.Debt{{RetryAt: now.Add(time.Hour)}, {RetryAt: now.Add(due)}}
		return r
	}

	ended := func(r sandboxer.Reason) Action { return Action{End, r} }
	for _, c := range []struct {
		name    string
		record  record
		seen    sandboxer.Liveness
		working bool
		want    Action
	}{
		{"it owes, somebody at it", owing(young, 0), unknown, busy, Action{Verb: PayDebts}},
		{"it owes, nobody at it", owing(young, 0), unknown, false, Action{Verb: Resume}},
		{"it owes, and runs", owing(run, -time.Hour), alive, false, Action{Verb: PayDebts}},
		{"it owes later", owing(run, 1), alive, false, Action{Verb: None}},
		{"it owes, and is paused", owing(frozen, 0), alive, false, Action{Verb: PayDebts}},
		{"it owes, and is missing", owing(run, 0), gone, false, Action{Verb: MarkAbsent}},
		{"it owes, and ends", owing(in(sandboxer.Terminating, later(run)), 0), unknown, false, Action{Verb: None}},
		{"it owes, and has expired", owing(past(run), 0), unknown, false, ended(sandboxer.ReasonExpired)},
		{"creating, somebody at it", young, unknown, busy, Action{Verb: None}},
		{"creating, nobody at it", young, unknown, false, Action{Verb: Resume}},
		{"creating, nobody at it, and it is there", young, alive, false, Action{Verb: Resume}},
		{"creating, nobody at it, and it is not there", young, gone, false, Action{Verb: Resume}},
		{"creating, to be retried later", later(young), unknown, false, Action{Verb: None}},
		{"creating for too long", with(young, func(r *record) { r.CreatedAt = ago(StuckAfter + 1) }), unknown, false, ended(sandboxer.ReasonFailed)},
		{"creating for too long, somebody at it", with(young, func(r *record) { r.CreatedAt = ago(StuckAfter + 1) }), unknown, busy, Action{Verb: None}},
		{"creating, not made yet, somebody at it", young, gone, busy, Action{Verb: None}},
		{"creating, made, first absence, somebody at it", made, gone, busy, Action{Verb: MarkAbsent}},
		{"creating, made, absent, somebody at it", with(made, func(r *record) { r.AbsentSince = ago(ConfirmAfter) }), gone, busy, ended(sandboxer.ReasonLost)},
		{"creating, made, absent, nobody at it", with(made, func(r *record) { r.AbsentSince = ago(ConfirmAfter) }), gone, false, Action{Verb: Resume}},
		{"creating, claimed, absent, somebody at it", with(made, func(r *record) { r.Pool, r.Tenant, r.AbsentSince = "p", sandboxer.DefaultTenant, ago(time.Hour) }), gone, busy, Action{Verb: None}},
		{"creating and expired", past(young), unknown, false, ended(sandboxer.ReasonExpired)},
		{"creating, hanging and expired", past(young), unknown, busy, ended(sandboxer.ReasonExpired)},

		{"running", run, alive, false, Action{Verb: None}},
		{"running, unknown", run, unknown, false, Action{Verb: None}},
		{"running, expired", past(run), alive, false, ended(sandboxer.ReasonExpired)},
		{"running, expired, unknown", past(run), unknown, false, ended(sandboxer.ReasonExpired)},
		{"running, expired, somebody at it", past(run), alive, busy, ended(sandboxer.ReasonExpired)},
		{"running without expiry", with(run, func(r *record) { r.ExpiresAt = time.Time{} }), alive, false, Action{Verb: None}},
		{"running, overspent", spent(run, ""), alive, false, ended(sandboxer.ReasonNoCredit)},
		{"running, overspent, somebody at it", spent(run, sandboxer.CostDestroy), unknown, busy, ended(sandboxer.ReasonNoCredit)},
		{"running, overspent, nothing more to hold", spent(run, sandboxer.CostExtend), unknown, false, ended(sandboxer.ReasonNoCredit)},
		{"running, overspent, to be paused", spent(run, sandboxer.CostPause), alive, false, Action{Pause, sandboxer.ReasonNoCredit}},
		{"running, overspent, to be paused, somebody at it", spent(run, sandboxer.CostPause), alive, busy, Action{Verb: None}},
		{"running, overspent and gone", spent(missed(ConfirmAfter), ""), gone, false, ended(sandboxer.ReasonLost)},
		{"running, nothing on hold", with(spent(run, ""), func(r *record) { r.Quote.Amount = 0 }), alive, false, Action{Verb: None}},
		{"paused, overspent", spent(frozen, ""), alive, false, Action{Verb: None}},
		{"running, first absence", run, gone, false, Action{Verb: MarkAbsent}},
		{"running, second absence too soon", missed(ConfirmAfter - 1), gone, false, Action{Verb: None}},
		{"running, second absence", missed(ConfirmAfter), gone, false, ended(sandboxer.ReasonLost)},
		{"running, told to have died", run, Died, false, ended(sandboxer.ReasonLost)},
		{"running, told to have died, somebody at it", run, Died, busy, ended(sandboxer.ReasonLost)},
		{"frozen, told to have died", frozen, Died, false, ended(sandboxer.ReasonLost)},
		{"creating, nobody at it, told to have died", young, Died, false, Action{Verb: Resume}},
		{"terminating, to be retried later, told to have died", later(in(sandboxer.Terminating, run)), Died, false, Action{Verb: None}},
		{"running, absent once and now unknown", missed(time.Hour), unknown, false, Action{Verb: None}},
		{"running, killed for its memory", run, sandboxer.OOMKilled, false, ended(sandboxer.ReasonOOMKilled)},
		{"running, killed for its memory, somebody at it", run, sandboxer.OOMKilled, busy, Action{Verb: MarkAbsent}},
		{"running, killed for its memory, seen twice, somebody at it", missed(ConfirmAfter), sandboxer.OOMKilled, busy, ended(sandboxer.ReasonOOMKilled)},
		{"running, absent once and back", missed(time.Hour), alive, false, Action{Verb: ClearMarks}},
		{"running, unresponsive", run, silent, false, Action{Verb: MarkUnresponsive}},
		{"running, unresponsive, somebody at it", run, silent, busy, Action{Verb: None}},
		{"running, unresponsive for long", mute, silent, false, Action{Verb: None}},
		{"running, unresponsive and now unknown", mute, unknown, false, Action{Verb: None}},
		{"running, unresponsive and back", mute, alive, false, Action{Verb: ClearMarks}},
		{"running, unresponsive, then absent", mute, gone, false, Action{Verb: MarkAbsent}},
		{"running, unresponsive and expired", past(mute), silent, false, ended(sandboxer.ReasonExpired)},
		{"frozen, unresponsive", frozen, silent, false, Action{Verb: MarkUnresponsive}},
		{"running, absent, somebody at it", missed(time.Hour), gone, busy, ended(sandboxer.ReasonLost)},
		{"running, absent once and back, somebody at it", missed(time.Hour), alive, busy, Action{Verb: ClearMarks}},
		{"running, idle", lazy, alive, false, ended(sandboxer.ReasonIdle)},
		{"running, idle, and to be paused then", with(lazy, func(r *record) { r.Spec.Profile.OnIdle = sandboxer.ExpiryPause }), alive, false, Action{Pause, sandboxer.ReasonIdle}},
		{"running, idle, and to be paused then, somebody at it", with(lazy, func(r *record) { r.Spec.Profile.OnIdle = sandboxer.ExpiryPause }), alive, busy, Action{Verb: None}},
		{"running, idle, and to be paused then, but expired", past(with(lazy, func(r *record) { r.Spec.Profile.OnIdle = sandboxer.ExpiryPause })), alive, false, ended(sandboxer.ReasonExpired)},
		{"running, idle, unknown", lazy, unknown, false, ended(sandboxer.ReasonIdle)},
		{"running, used just now", with(lazy, func(r *record) { r.UsedAt = ago(time.Minute - 1) }), alive, false, Action{Verb: None}},
		{"running, lost rather than idle", with(lazy, func(r *record) { r.AbsentSince = ago(ConfirmAfter) }), gone, false, ended(sandboxer.ReasonLost)},

		{"warm", in(sandboxer.Warm, run), alive, false, Action{Verb: None}},
		{"warm is not idle", in(sandboxer.Warm, lazy), alive, false, Action{Verb: None}},
		{"warm, expired", in(sandboxer.Warm, past(run)), alive, false, ended(sandboxer.ReasonExpired)},
		{"warm, first absence", in(sandboxer.Warm, run), gone, false, Action{Verb: MarkAbsent}},

		{"pausing", in(sandboxer.Pausing, run), unknown, busy, Action{Verb: None}},
		{"pausing, expired", in(sandboxer.Pausing, past(run)), unknown, false, ended(sandboxer.ReasonExpired)},
		{"pausing, expired, somebody at it", in(sandboxer.Pausing, past(run)), unknown, busy, Action{Verb: None}},
		{"pausing, nobody at it", in(sandboxer.Pausing, run), gone, false, Action{Verb: Pause}},
		{"pausing, first absence, somebody at it", in(sandboxer.Pausing, run), gone, busy, Action{Verb: MarkAbsent}},
		{"pausing, absent, somebody at it", in(sandboxer.Pausing, missed(ConfirmAfter)), gone, busy, ended(sandboxer.ReasonLost)},
		{"pausing, to be retried later", later(in(sandboxer.Pausing, run)), unknown, false, Action{Verb: None}},
		{"pausing, to be retried later, first absence", later(in(sandboxer.Pausing, run)), gone, false, Action{Verb: MarkAbsent}},
		{"pausing, to be retried later, second absence too soon", later(in(sandboxer.Pausing, missed(ConfirmAfter-1))), gone, false, Action{Verb: None}},
		{"pausing, to be retried later, second absence", later(in(sandboxer.Pausing, missed(ConfirmAfter))), gone, false, ended(sandboxer.ReasonLost)},
		{"pausing, to be retried later, absent once and back", later(in(sandboxer.Pausing, missed(time.Hour))), alive, false, Action{Verb: ClearMarks}},
		{"pausing, to be retried later, unresponsive", later(in(sandboxer.Pausing, run)), silent, false, Action{Verb: None}},
		{"paused is not lost", in(sandboxer.Paused, missed(time.Hour)), gone, false, Action{Verb: None}},
		{"paused, expired", in(sandboxer.Paused, past(run)), unknown, false, ended(sandboxer.ReasonExpired)},

		{"terminating", in(sandboxer.Terminating, run), unknown, false, Action{Verb: Teardown}},
		{"terminating, gone by itself", in(sandboxer.Terminating, run), gone, false, Action{Verb: Teardown}},
		{"terminating, somebody at it", in(sandboxer.Terminating, run), unknown, busy, Action{Verb: None}},
		{"terminating, to be retried later", later(in(sandboxer.Terminating, run)), unknown, false, Action{Verb: None}},
		{"terminating, to be retried later, first absence", later(in(sandboxer.Terminating, run)), gone, false, Action{Verb: MarkAbsent}},
		{"terminating, to be retried later, absent", later(in(sandboxer.Terminating, missed(time.Hour))), gone, false, Action{Verb: None}},
		{"terminating, to be retried later, absent once and back", later(in(sandboxer.Terminating, missed(time.Hour))), alive, false, Action{Verb: ClearMarks}},
		{"terminating, to be retried now", with(in(sandboxer.Terminating, run), func(r *record) { r.RetryAt = now }), unknown, false, Action{Verb: Teardown}},
		{"terminated", in(sandboxer.Terminated, past(run)), alive, false, Action{Verb: None}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := Decide(&c.record, c.seen, c.working, now, time.Time{}); got != c.want {
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
	for _, from := range []time.Time{{}, now, now.Add(1)} {
		for _, state := range sandboxer.States() {
			for _, seen := range []sandboxer.Liveness{sandboxer.Alive, sandboxer.Gone, sandboxer.OOMKilled, sandboxer.Unknown, Died, ""} {
				for _, working := range []bool{false, true} {
					for _, absent := range times {
						for _, expires := range times {
							for _, retry := range times {
								sb := &sandboxer.Sandbox{State: state, CreatedAt: now.Add(-time.Minute), AbsentSince: absent, ExpiresAt: expires, RetryAt: retry, UsedAt: now}
								a := Decide(sb, seen, working, now, from)
								n++
								switch {
								case a.Verb == MarkAbsent && seen != sandboxer.Gone && seen != sandboxer.OOMKilled, a.Verb == ClearMarks && seen != sandboxer.Alive:
									t.Errorf("%+v gets %v, seen %s", sb, a, seen)
								case a.Reason == sandboxer.ReasonLost && seen != Died && (seen != sandboxer.Gone || absent.IsZero()):
									t.Errorf("%+v is lost without proof (%s)", sb, seen)
								case a.Reason == sandboxer.ReasonOOMKilled && seen != sandboxer.OOMKilled:
									t.Errorf("%+v is killed for memory without proof (%s)", sb, seen)
								case a.Reason == sandboxer.ReasonExpired && !expires.Equal(now) && !expires.Equal(now.Add(-time.Hour)):
									t.Errorf("%+v has expired too soon", sb)
								case now.Before(from) && (a.Reason == sandboxer.ReasonExpired || a.Reason == sandboxer.ReasonIdle || a.Verb == Pause || a.Verb == Resume):
									t.Errorf("%s gets %v while no deadline counts", state, a)
								case state == sandboxer.Terminated && a.Verb != None:
									t.Errorf("a terminated sandbox gets %v", a)
								case a.Verb == End && !state.CanBecome(sandboxer.Terminating):
									t.Errorf("%s cannot end", state)
								case working && !slices.Contains([]Action{{Verb: None}, {Verb: MarkAbsent}, {Verb: ClearMarks}, {End, sandboxer.ReasonExpired}, {End, sandboxer.ReasonLost}, {End, sandboxer.ReasonOOMKilled}}, a):
									t.Errorf("%s gets %v while somebody is at it", state, a)
								}
							}
						}
					}
				}
			}
		}
	}
	if n < 9000 {
		t.Errorf("only %d combinations", n)
	}
}

func TestBackoff(t *testing.T) {
	for n, want := range map[int]time.Duration{0: time.Second, 1: time.Second, 2: 2 * time.Second, 5: 16 * time.Second, 9: 256 * time.Second, 10: 5 * time.Minute, 1000: 5 * time.Minute} {
		least, most := Backoff(n, 0), Backoff(n, 0.999999)
		if least != want*3/4 || most <= want || most > want*5/4 {
			t.Errorf("backoff(%d) is %s to %s, want %s give or take a quarter", n, least, most, want)
		}
	}
}

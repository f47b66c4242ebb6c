package manager

import (
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestSettle: what its backend finally says that a sandbox cost is charged, as far as it was on hold; else the
// time that it ran is.
func TestSettle(t *testing.T) {
	const clock, hold = 20_000 + 60_000, 20_000 + 120_000 // for the half hour, for the hour
	for name, c := range map[string]struct {
		fake    fake.Config
		profile string
		fault   fake.Fault
		wait    time.Duration // how long the bill is pending
		cost    sandboxer.Credits
		over    sandboxer.Credits
		final   bool
		events  string
		later   sandboxer.Credits // what a correction says
	}{
		"known at once":      {fake: fake.Config{MeterPerHour: 40_000, BillsAfter: 1}, cost: 40_000, final: true},
		"known later":        {fake: fake.Config{MeterPerHour: 40_000, BillsAfter: 20 * time.Minute}, wait: 36 * time.Minute, cost: 40_000, final: true, events: "the bill is pending until"},
		"known too late":     {fake: fake.Config{MeterPerHour: 40_000, BillsAfter: 2 * time.Hour}, wait: 66 * time.Minute, cost: clock, events: "settled by the time that it ran", later: 40_000},
		"far too late":       {fake: fake.Config{MeterPerHour: 40_000, BillsAfter: 30 * time.Hour}, wait: 66 * time.Minute, cost: clock, events: "settled by the time that it ran"},
		"never known":        {fake: fake.Config{MeterPerHour: 40_000}, cost: clock},
		"out of reach":       {fake: fake.Config{MeterPerHour: 40_000, BillsAfter: 1}, fault: fake.Fault{Verb: fake.VerbMeter, Kind: sandboxer.Unavailable}, wait: 66 * time.Minute, cost: clock, events: "settled by the time that it ran"},
		"hangs":              {fake: fake.Config{MeterPerHour: 40_000, BillsAfter: 1}, fault: fake.Fault{Verb: fake.VerbMeter, Hang: true}, wait: 72 * time.Minute, cost: clock, events: "settled by the time that it ran"},
		"more than the hold": {fake: fake.Config{MeterPerHour: 1_000_000, BillsAfter: 1}, cost: hold, over: 520_000 - hold, final: true, events: "0.38 more than was on hold"},
		"price of a profile": {fake: fake.Config{BillsAfter: 1, Setup: -1}, profile: "paid", cost: clock, final: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var over sandboxer.Credits
				r := newRig(t, func(s *setup) {
					s.fake = c.fake
					s.fake.Setup += 1
					if s.fake.Setup > 0 {
						s.fake.Setup, s.fake.PerHour = 20_000, 120_000
					}
					s.opts.SweepEvery = 5 * time.Minute
					s.opts.meterEvery = 24 * time.Hour
					s.opts.Overrun = func(_ string, beyond sandboxer.Credits) { over += beyond }
				})
				if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
					t.Fatal(err)
				}
				sb := r.create(sandboxer.CreateRequest{Profile: c.profile, TTL: time.Hour})
				time.Sleep(30 * time.Minute)
				if c.fault.Verb != "" {
					r.world.Inject(c.fault)
				}
				sb = r.destroy(sb.ID)
				if c.wait > 0 {
					if sb.Billing != sandboxer.BillingPending || sb.State != sandboxer.Terminated || sb.Cost != 0 {
						t.Fatalf("it is %s, %q, and cost %s; want a pending bill", sb.State, sb.Billing, sb.Cost)
					}
					if held, err := r.store.OpenHolds(admin); err != nil || len(held) != 1 || held[0].Amount != hold {
						t.Errorf("on hold: %+v, %v", held, err)
					}
					r.sound(0)
					r.restart()
					time.Sleep(c.wait)
					synctest.Wait()
					sb = r.get(sb.ID)
				}
				estimated := strings.Contains(c.events, "settled by")
				if (sb.Billing == sandboxer.BillingEstimated) != estimated || sb.Billing == sandboxer.BillingPending || sb.Cost != c.cost || sb.Usage.Final != c.final || over != c.over {
					t.Errorf("it cost %s, %q, %+v, and %s beyond its hold; want %s, final %t, %s", sb.Cost, sb.Billing, sb.Usage, over, c.cost, c.final, c.over)
				}
				if left, err := r.Balance(admin, sandboxer.DefaultTenant); err != nil || left != sandboxer.Credit-c.cost {
					t.Errorf("%s are left, %v", left, err)
				}
				if c.fault.Verb == "" && c.profile == "" && sb.Usage.Cost == 0 {
					t.Errorf("no reading was kept: %+v", sb.Usage)
				}
				if text := billing(t, r, sb.ID); !strings.Contains(text, c.events) || c.events == "" && text != "" {
					t.Errorf("events: %q; want %q", text, c.events)
				}
				r.noHolds()
				r.sound(0)
				rows := []sandboxer.UsageRow{{Type: sandboxer.UsageSettled, Charged: c.cost, Cost: c.cost + c.over, Overrun: c.over, Final: !estimated}}
				wantUsage(t, r, rows)
				if !estimated {
					return
				}
				time.Sleep(25 * time.Hour)
				synctest.Wait()
				if sb = r.get(sb.ID); sb.Billing != "" || sb.Cost != c.cost || sb.RetryAt != (time.Time{}) {
					t.Errorf("a day later it is %q and cost %s, with a retry at %s", sb.Billing, sb.Cost, sb.RetryAt)
				}
				if c.later > 0 {
					rows = append(rows, sandboxer.UsageRow{Type: sandboxer.UsageCorrection, Cost: c.later, Final: true})
				}
				wantUsage(t, r, rows)
				r.sound(0)
			})
		})
	}
}

// wantUsage checks the amounts of all usage rows.
func wantUsage(t *testing.T, r *rig, want []sandboxer.UsageRow) {
	t.Helper()
	rows, next, err := r.UsageRows(admin, sandboxer.UsageQuery{}, "")
	if err != nil || len(rows) != len(want) || next != "" {
		t.Fatalf("%d usage rows, %q, %v; want %d: %+v", len(rows), next, err, len(want), rows)
	}
	for i, row := range rows {
		got := sandboxer.UsageRow{Type: row.Type, Charged: row.Charged, Cost: row.Cost, Overrun: row.Overrun, Final: row.Final}
		if !reflect.DeepEqual(got, want[i]) {
			t.Errorf("row %d says %+v; want %+v", i, got, want[i])
		}
		if row.Ran != 30*time.Minute || row.Until.Sub(row.From) != row.Ran || row.Quote.Amount == 0 || i > 0 && row.Corrects != rows[0].Key {
			t.Errorf("row %d is %+v", i, row)
		}
	}
}

// billing returns the messages of the events about the bill of a sandbox.
func billing(t *testing.T, r *rig, id string) string {
	t.Helper()
	events, err := r.Events(admin, sandboxer.EventQuery{SandboxID: id})
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, ev := range events {
		if ev.Type == sandboxer.EventBilling {
			all = append(all, ev.Message)
		}
	}
	return strings.Join(all, "; ")
}

// TestSettleUnmetered: a meter that counts anything but the whole life of a sandbox decides nothing.
func TestSettleUnmetered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) {
			s.fake = fake.Config{Setup: 20_000, PerHour: 120_000, MeterPerHour: 10_000, BillsAfter: 1}
			s.profiles[0].MaxPaused = time.Hour
		})
		if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
			t.Fatal(err)
		}
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		time.Sleep(20 * time.Minute)
		if _, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Resume(acme, sb.ID, ResumeRequest{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		if sb = r.destroy(sb.ID); sb.Cost != 80_000 || sb.Usage.Final {
			t.Errorf("after a pause to files it cost %s, by %+v; want the half hour", sb.Cost, sb.Usage)
		}
		r.noHolds()
	})
}

// TestAuditPending: the audit names a hold that is not pending, a bill that is pending for too long, and one whose
// hold is another.
func TestAuditPending(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*sandboxer.Sandbox)
		want   string
	}{
		"not pending": {func(sb *sandboxer.Sandbox) { sb.Billing = "" }, invResolve},
		"too long":    {func(sb *sandboxer.Sandbox) { sb.EndedAt = now().Add(-5 * time.Hour) }, invPending},
		"other hold":  {func(sb *sandboxer.Sandbox) { sb.Quote.Amount++ }, invQuote},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(s *setup) {
				s.fake = fake.Config{Setup: 20_000, PerHour: 120_000, BillsAfter: time.Hour}
			})
			if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
				t.Fatal(err)
			}
			sb := r.destroy(r.create(sandboxer.CreateRequest{TTL: time.Hour}).ID)
			c.change(sb)
			if err := r.store.UpdateSandbox(admin, sb, sandboxer.Writes{}); err != nil {
				t.Fatal(err)
			}
			a, err := r.Audit(admin)
			if err != nil || len(a.Violations) != 1 || a.Violations[0].Invariant != c.want {
				t.Errorf("%+v, %v; want %q", a.Violations, err, c.want)
			}
		})
	}
}

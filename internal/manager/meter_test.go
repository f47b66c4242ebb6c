package manager

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// TestOnCost: the meter costs three times what was quoted, so that the hold of an hour is used up after 20
// minutes.
func TestOnCost(t *testing.T) {
	const hold = 120_000
	for name, c := range map[string]struct {
		on     sandboxer.CostAction
		max    sandboxer.Credits
		grant  sandboxer.Credits
		spend  int64
		after  time.Duration
		state  sandboxer.State
		reason sandboxer.Reason
		held   sandboxer.Credits
		events string
	}{
		"not yet near":           {after: 14 * time.Minute, state: sandboxer.Running, held: hold},
		"near":                   {after: 17 * time.Minute, state: sandboxer.Running, held: hold, events: "it has cost 0.096 of 0.12 on hold"},
		"destroy is the default": {after: 26 * time.Minute, state: sandboxer.Terminated, reason: sandboxer.ReasonNoCredit, events: "it has cost 0.096 of 0.12 on hold"},
		"pause":                  {on: sandboxer.CostPause, after: 26 * time.Minute, state: sandboxer.Paused, held: hold, events: "it has cost 0.096 of 0.12 on hold"},
		"extend": {on: sandboxer.CostExtend, after: 26 * time.Minute, state: sandboxer.Running, held: 2 * hold,
			events: "it has cost 0.096 of 0.12 on hold; it has cost 0.126 of 0.12 on hold: now 0.24 are on hold"},
		"extend beyond what the request allows": {on: sandboxer.CostExtend, max: 2*hold - 1, after: 26 * time.Minute, state: sandboxer.Terminated, reason: sandboxer.ReasonNoCredit, events: "it has cost 0.096 of 0.12 on hold"},
		"extend without credits":                {on: sandboxer.CostExtend, grant: 2*hold - 1, after: 26 * time.Minute, state: sandboxer.Terminated, reason: sandboxer.ReasonNoCredit, events: "it has cost 0.096 of 0.12 on hold"},
		"extend beyond max_spend":               {on: sandboxer.CostExtend, spend: 2*hold - 1, after: 26 * time.Minute, state: sandboxer.Terminated, reason: sandboxer.ReasonNoCredit, events: "it has cost 0.096 of 0.12 on hold"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, func(s *setup) {
					s.fake = fake.Config{PerHour: 120_000, MeterPerHour: 360_000, BillsAfter: 1}
					s.profiles[0].OnCost, s.profiles[0].MaxPaused = c.on, time.Hour
					s.opts.SweepEvery = time.Minute
					if c.spend > 0 {
						quota(sandboxer.Quota{sandboxer.QuotaSpendDay: c.spend})(s)
					}
				})
				grant := c.grant
				if grant == 0 {
					grant = sandboxer.Credit
				}
				if err := r.Grant(admin, sandboxer.DefaultTenant, grant, "", ""); err != nil {
					t.Fatal(err)
				}
				sb := r.create(sandboxer.CreateRequest{TTL: time.Hour, MaxCost: c.max})
				time.Sleep(c.after)
				synctest.Wait()
				sb = r.get(sb.ID)
				if sb.State != c.state || sb.Reason != c.reason && c.reason != "" {
					t.Errorf("it is %s, %s: %s; want %s, %s", sb.State, sb.Reason, sb.Message, c.state, c.reason)
				}
				if text := billing(t, r, sb.ID); text != c.events && c.state == sandboxer.Running || !strings.HasPrefix(text, c.events) {
					t.Errorf("events: %q; want %q", text, c.events)
				}
				var held sandboxer.Credits
				if holds, err := r.store.OpenHolds(admin); err != nil {
					t.Fatal(err)
				} else if len(holds) > 0 {
					held = holds[0].Amount
				}
				if held != c.held {
					t.Errorf("%s on hold; want %s", held, c.held)
				}
				if c.state == sandboxer.Terminated && sb.Cost != hold {
					t.Errorf("it cost %s; want the hold", sb.Cost)
				}
				if c.state == sandboxer.Paused {
					if _, err := r.Resume(acme, sb.ID, ResumeRequest{}); err != nil {
						t.Fatal(err)
					}
					if sb = r.get(sb.ID); sb.Quote.Amount != 2*hold || lifecycle.IsOverspent(sb) {
						t.Errorf("resumed with %s on hold; want as much again", sb.Quote.Amount)
					}
				}
				r.sound(len(r.world.Live()))
			})
		})
	}
}

// TestResumeOverspent: one that has used up its hold is resumed only if more can be put on hold, and the refusal says what
// is in the way.
func TestResumeOverspent(t *testing.T) {
	for name, c := range map[string]struct {
		credits, most sandboxer.Credits
		why           string
	}{
		"without credits":  {150_000, 0, "cannot pay for more time"},
		"above its bound":  {10_000_000, 130_000, "its request allows 0.13"},
		"both":             {150_000, 130_000, "its request allows 0.13"},
		"more credits now": {10_000_000, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, func(s *setup) {
					s.fake = fake.Config{PerHour: 120_000, MeterPerHour: 360_000, BillsAfter: 1}
					s.profiles[0].OnCost, s.profiles[0].MaxPaused = sandboxer.CostPause, 2*time.Hour
					s.opts.SweepEvery = time.Minute
				})
				if err := r.Grant(admin, sandboxer.DefaultTenant, c.credits, "", ""); err != nil {
					t.Fatal(err)
				}
				sb := r.create(sandboxer.CreateRequest{TTL: time.Hour, MaxCost: c.most})
				time.Sleep(26 * time.Minute)
				synctest.Wait()
				_, err := r.Resume(acme, sb.ID, ResumeRequest{})
				want := sandboxer.Running
				if c.why != "" {
					wantErr(t, err, sandboxer.NoCredit, c.why)
					want = sandboxer.Paused
				} else if err != nil {
					t.Error(err)
				}
				if sb = r.get(sb.ID); sb.State != want {
					t.Errorf("it is %s; want %s", sb.State, want)
				}
				r.sound(len(r.world.Live()))
			})
		})
	}
}

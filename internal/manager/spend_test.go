package manager

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestMaxSpend: an hour costs 0.12, of which a day may hold two.
func TestMaxSpend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const hour = 120_000
		r := newRig(t, func(s *setup) {
			s.fake = fake.Config{PerHour: hour}
			quota(sandboxer.Quota{sandboxer.QuotaSpendDay: 2 * hour, sandboxer.QuotaSpendMonth: 3 * hour})(s)
			s.profiles[0].MaxPaused = 72 * time.Hour // longer than the test
		})
		if err := r.Grant(admin, sandboxer.DefaultTenant, 100*sandboxer.Credit, "", ""); err != nil {
			t.Fatal(err)
		}
		refused := func(err error, text string) {
			t.Helper()
			wantErr(t, err, sandboxer.NoCredit, text)
			wantErr(t, err, sandboxer.NoCredit, "ask for a shorter time to live")
		}
		create := func(ttl time.Duration) error {
			_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", TTL: ttl})
			return err
		}
		one := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		refused(create(61*time.Minute), "tenant default may spend 0.24 credits in a day (UTC): 0.12 are charged or on hold, and this holds 0.122 more")
		refused(create(61*time.Minute), "wait until 2000-01-02T00:00:00Z")
		two := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		_, err := r.Extend(acme, two.ID, Extend{Add: time.Minute})
		refused(err, "0.24 are charged or on hold, and this holds 0.002 more")
		if got := r.get(two.ID); !got.ExpiresAt.Equal(two.ExpiresAt) || got.Quote.Amount != hour {
			t.Errorf("a refused extension left %s and %s on hold", got.ExpiresAt, got.Quote.Amount)
		}

		// What is released may be spent.
		time.Sleep(30 * time.Minute)
		r.destroy(one.ID)
		r.used(sandboxer.Amounts{sandboxer.QuotaSpendDay: 180_000, sandboxer.QuotaSpendMonth: 180_000})
		if _, err := r.Extend(acme, two.ID, Extend{Add: 30 * time.Minute}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Pause(acme, two.ID, PauseRequest{}); err != nil {
			t.Fatal(err)
		}
		_, err = r.Resume(acme, two.ID, ResumeRequest{TTL: 90 * time.Minute})
		refused(err, "0.24 are charged or on hold")

		// On the next day what is on hold counts, and what was charged does not; it does in the month.
		time.Sleep(24 * time.Hour)
		r.used(sandboxer.Amounts{sandboxer.QuotaSpendDay: 180_000, sandboxer.QuotaSpendMonth: 240_000})
		refused(create(time.Hour), "in a day (UTC): 0.18 are charged")
		if err := create(30 * time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(24 * time.Hour)
		refused(create(2*time.Hour), "may spend 0.36 credits in a month (UTC): 0.30 are")
		refused(create(2*time.Hour), "wait until 2000-02-01T00:00:00Z")
		r.SetQuotas(sandboxer.Quotas{})
		if err := create(2 * time.Hour); err != nil {
			t.Error(err)
		}
		r.sound(2)
	})
}

// TestMaxSpendOfKeys: a key's bound is of what is made, extended or resumed with it.
func TestMaxSpendOfKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const hour = 120_000
		r := newRig(t, func(s *setup) { s.fake = fake.Config{PerHour: hour} })
		if err := r.Grant(admin, sandboxer.DefaultTenant, 100*sandboxer.Credit, "", ""); err != nil {
			t.Fatal(err)
		}
		login := func(m sandboxer.MaxSpend) context.Context {
			token, _, err := r.CreateKey(admin, sandboxer.KeyRequest{Name: "ci", Tenant: sandboxer.DefaultTenant, Scopes: sandboxer.Scopes(), MaxSpend: m})
			if err != nil {
				t.Fatal(err)
			}
			p, err := r.Authenticate(t.Context(), token)
			if err != nil {
				t.Fatal(err)
			}
			return sandboxer.WithPrincipal(t.Context(), p)
		}
		key, other := login(sandboxer.MaxSpend{Day: hour}), login(sandboxer.MaxSpend{})
		one, err := r.Create(key, sandboxer.CreateRequest{Profile: "test", TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		const refusal = "API key ci may spend 0.12 credits in a day (UTC): "
		_, err = r.Create(key, sandboxer.CreateRequest{Profile: "test", TTL: time.Hour})
		wantErr(t, err, sandboxer.NoCredit, refusal+"0.12 are charged or on hold, and this holds 0.12 more")
		_, err = r.Extend(key, one.ID, Extend{Add: time.Minute})
		wantErr(t, err, sandboxer.NoCredit, refusal)
		two, err := r.Create(other, sandboxer.CreateRequest{Profile: "test", TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		_, err = r.Extend(key, two.ID, Extend{Add: time.Minute})
		wantErr(t, err, sandboxer.NoCredit, refusal)
		if _, err := r.Extend(other, one.ID, Extend{Add: time.Minute}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Create(key, sandboxer.CreateRequest{Profile: "test", TTL: time.Hour}); err != nil {
			t.Errorf("the other key has all on hold: %v", err)
		}
		_, _, err = r.CreateKey(admin, sandboxer.KeyRequest{Name: "ci", Scopes: sandboxer.Scopes(), MaxSpend: sandboxer.MaxSpend{Day: -1}})
		wantErr(t, err, sandboxer.Invalid, "less than nothing")
	})
}

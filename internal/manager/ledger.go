package manager

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/spec"
)

// bookingKey names one booking of one generation, so that repeating it changes
// nothing.
func bookingKey(sb *sandboxer.Sandbox, what string) string {
	return fmt.Sprintf("sbx:%s:g%d:%s", sb.ID, sb.Generation, what)
}

func booking(sb *sandboxer.Sandbox, what string, t sandboxer.EntryType, amount sandboxer.Credits) sandboxer.Entry {
	return sandboxer.Entry{
		Key: bookingKey(sb, what), Tenant: sb.Tenant, SandboxID: sb.ID, ShownID: sb.ShownID, Generation: sb.Generation,
		Type: t, Amount: amount, At: now(),
	}
}

func hold(ctx context.Context, sb *sandboxer.Sandbox, what string, amount sandboxer.Credits) sandboxer.Entry {
	e := booking(sb, what, sandboxer.EntryHold, -amount)
	e.KeyID = sandboxer.PrincipalFrom(ctx).KeyID
	return e
}

// cannotPay reports whether err is the store's error that a balance does not cover a hold. Every other NoCredit is about a
// limit, and has its own hint (HintOf).
func cannotPay(err error) bool {
	return isKind(err, sandboxer.NoCredit) && sandboxer.HintOf(err) == ""
}

// holdMore adds a hold to w: the price of a life of sb, without its pauses, minus the amount on hold already. A shorter life
// changes nothing. The tenant must be able to pay (NoCredit of the store).
func holdMore(ctx context.Context, sb *sandboxer.Sandbox, w *sandboxer.Writes, life time.Duration) {
	if life <= sb.Quote.Duration {
		return
	}
	more := sb.Quote.For(life) - sb.Quote.For(sb.Quote.Duration)
	w.Entries, w.Cover = entries(hold(ctx, sb, fmt.Sprintf("hold:%d", sb.Version), more)), true
	sb.Quote.Amount += more
	sb.Quote.Duration = life
}

// entries leaves out entries that move no credits.
func entries(all ...sandboxer.Entry) []sandboxer.Entry {
	var out []sandboxer.Entry
	for _, e := range all {
		if e.Amount != 0 {
			out = append(out, e)
		}
	}
	return out
}

// billedTenant returns the tenant whose credits a principal may see.
func billedTenant(p sandboxer.Principal, tenant string) (string, error) {
	tenant = cmp.Or(tenant, p.Tenant)
	if tenant != p.Tenant && !p.Can(sandboxer.ScopeAdmin) {
		return "", sandboxer.E(sandboxer.Denied, nil, "you cannot see the credits of another tenant").
			WithHint("leave out the tenant to see your own; an administrator sees all")
	}
	return tenant, nil
}

// Balance returns what tenant can still spend; "" means the caller's own.
func (m *Manager) Balance(ctx context.Context, tenant string) (sandboxer.Credits, error) {
	p, err := access.May(ctx, sandboxer.ScopeRead)
	if err == nil {
		tenant, err = billedTenant(p, tenant)
	}
	if err != nil {
		return 0, err
	}
	return m.store.Balance(ctx, tenant)
}

// Grant gives tenant credits, or takes back credits that it has not spent when amount is
// negative (NoCredit when that is less). It needs the admin scope. A grant repeated
// under the same key counts once; another amount or tenant under it is a Conflict. With
// an empty key every call counts.
func (m *Manager) Grant(ctx context.Context, tenant string, amount sandboxer.Credits, key, note string) error {
	p, err := access.May(ctx, sandboxer.ScopeAdmin)
	if err != nil {
		return err
	}
	if amount == 0 {
		return sandboxer.E(sandboxer.Invalid, nil, "a grant of 0 credits changes nothing")
	}
	if err := spec.CheckKey(key); err != nil {
		return err
	}
	if len(note) > 1024 {
		return sandboxer.E(sandboxer.Invalid, nil, "the note has %d bytes: want at most 1024", len(note))
	}
	tenant = cmp.Or(tenant, p.Tenant)
	key = cmp.Or(key, sandboxer.NewID()+sandboxer.NewID())
	err = m.store.Write(ctx, sandboxer.Writes{
		Entries: []sandboxer.Entry{{
			Key: "grant:" + key, Tenant: tenant, Type: sandboxer.EntryGrant,
			Amount: amount, Note: note, At: now(),
		}},
		Cover: amount < 0,
	})
	if isKind(err, sandboxer.Conflict) {
		return sandboxer.E(sandboxer.Conflict, err, "the key %q was used for another grant: another tenant or another amount", key).
			WithHint("use a new key for a new grant; see what was granted with: sandboxer credits ledger")
	}
	return err
}

// billedPage returns the tenant whose rows about money the caller may page through: the given one, or its own; "" means all, for
// administrators.
func billedPage(ctx context.Context, tenant string, limit int) (string, error) {
	p, err := access.May(ctx, sandboxer.ScopeRead)
	if err == nil && (tenant != "" || !p.Can(sandboxer.ScopeAdmin)) {
		tenant, err = billedTenant(p, tenant)
	}
	if err == nil {
		err = access.CheckPage(limit)
	}
	return tenant, err
}

// Entries pages through the ledger, oldest first; without the admin scope through
// that of the caller's tenant. q.SandboxID is an ID as tenants know it, or TENANT/ID.
func (m *Manager) Entries(ctx context.Context, q sandboxer.EntryQuery) (_ []sandboxer.Entry, _ string, err error) {
	if q.Tenant, err = billedPage(ctx, q.Tenant, q.Limit); err != nil {
		return nil, "", err
	}
	q.ShownID, q.SandboxID = q.SandboxID, "" // also of those that were forgotten
	if whose, id, ok := cutRef(q.ShownID); ok {
		if q.Tenant != "" && q.Tenant != whose {
			return nil, "", nil
		}
		q.Tenant, q.ShownID = whose, id
	}
	return m.store.Entries(ctx, q)
}

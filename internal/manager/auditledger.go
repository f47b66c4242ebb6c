package manager

import (
	"context"
	"fmt"

	"github.com/sand-boxer/sandboxer"
)

// ledgerSums sums the ledger of one generation.
type ledgerSums struct {
	held, posted, voided sandboxer.Credits
	charged              sandboxer.Credits // by usage rows
	told                 bool              // whether there are any: former builds wrote none, and old ones are removed
}

func (b *ledgerSums) add(e sandboxer.Entry) {
	switch e.Type {
	case sandboxer.EntryHold:
		b.held -= e.Amount
	case sandboxer.EntryPost:
		b.posted += e.Amount
	case sandboxer.EntryVoid:
		b.voided += e.Amount
	}
}

// fault returns the difference between the ledger and the record of a sandbox, or "".
func (b *ledgerSums) fault(sb *sandboxer.Sandbox) (invariant, detail string) {
	open := b.held - b.posted - b.voided
	switch {
	case b.posted > b.held:
		return invOver, fmt.Sprintf("generation %d: %s posted of %s held", sb.Generation, b.posted, b.held)
	case (sb.State.Live() || sb.Billing == sandboxer.BillingPending) && open != sb.Quote.Amount:
		return invQuote, fmt.Sprintf("generation %d: %s on hold, %s quoted", sb.Generation, open, sb.Quote.Amount)
	case !sb.State.Live() && open != 0 && sb.Billing != sandboxer.BillingPending:
		return invResolve, fmt.Sprintf("generation %d ended with %s on hold", sb.Generation, open)
	case b.told && b.charged != b.posted:
		return invUsage, fmt.Sprintf("generation %d: usage rows charge %s, %s posted", sb.Generation, b.charged, b.posted)
	case sb.Cost != b.posted:
		return invCost, fmt.Sprintf("generation %d cost %s, %s posted", sb.Generation, sb.Cost, b.posted)
	}
	return "", ""
}

// auditLedger adds up the whole ledger.
func (a *auditing) auditLedger(ctx context.Context) error {
	sums := map[generationKey]*ledgerSums{}
	tenants := map[string]sandboxer.Credits{}
	err := a.m.usageRows(ctx, func(r sandboxer.UsageRow) { // first: what they say is posted then
		a.Checked++
		k := generationKey{r.SandboxID, r.Generation}
		if sums[k] == nil {
			sums[k] = &ledgerSums{told: true}
		}
		sums[k].charged += r.Charged
	})
	if err != nil {
		return err
	}
	err = a.m.entries(ctx, sandboxer.EntryQuery{}, func(e sandboxer.Entry) {
		a.Checked++
		if e.SandboxID != "" {
			k := generationKey{e.SandboxID, e.Generation}
			if sums[k] == nil {
				sums[k] = &ledgerSums{}
			}
			sums[k].add(e)
		}
		if e.Type == sandboxer.EntryPost {
			return
		}
		tenants[e.Tenant] += e.Amount
		if tenants[e.Tenant] < 0 {
			a.violated(invNegate, e.SandboxID, "after entry %s, tenant %s is at %s", e.Key, e.Tenant, tenants[e.Tenant])
		}
	})
	if err != nil {
		return err
	}
	for k, sum := range sums {
		var invariant, detail string
		sb, err := a.m.recheckRecord(ctx, k, func(sb *sandboxer.Sandbox) (bool, error) {
			if invariant, detail = sum.fault(sb); invariant == "" {
				return true, nil
			}
			now := &ledgerSums{charged: sum.charged, told: sum.told} // it may have been settled since
			err := a.m.entries(ctx, sandboxer.EntryQuery{SandboxID: k.id}, func(e sandboxer.Entry) {
				if e.Generation == k.generation {
					now.add(e)
				}
			})
			invariant, detail = now.fault(sb)
			return invariant == "", err
		})
		switch {
		case isKind(err, sandboxer.NotFound):
			// Old records go, the ledger stays; but only what was resolved is forgotten.
			if open := sum.held - sum.posted - sum.voided; open != 0 {
				a.violated(invResolve, k.id, "generation %d has %s on hold and no record", k.generation, open)
			}
		case sb != nil && sb.Damaged != "":
			a.damaged(sb)
		case err != nil:
			return err
		case invariant != "":
			a.violated(invariant, k.id, "%s", detail)
		}
	}
	return nil
}

// usageRows calls f with every usage row.
func (m *Manager) usageRows(ctx context.Context, f func(sandboxer.UsageRow)) error {
	q := sandboxer.UsageQuery{Limit: sandboxer.MaxPage}
	for {
		rows, err := m.store.UsageRows(ctx, q)
		if err != nil {
			return err
		}
		for _, r := range rows {
			q.After = r.Seq
			f(r)
		}
		if len(rows) < q.Limit {
			return nil
		}
	}
}

// entries calls f with every ledger entry q selects.
func (m *Manager) entries(ctx context.Context, q sandboxer.EntryQuery, f func(sandboxer.Entry)) error {
	q.Limit = sandboxer.MaxPage
	for {
		items, next, err := m.store.Entries(ctx, q)
		if err != nil {
			return err
		}
		for _, e := range items {
			f(e)
		}
		if next == "" {
			return nil
		}
		q.After = next
	}
}

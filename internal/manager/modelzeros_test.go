package manager

import (
	"slices"
	"strings"
	"time"

	"pgregory.net/rapid"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// zeros holds at every instant, however a life ended: nothing is charged twice or without a usage row, nothing that has ended is on
// hold without a pending bill, and no object is without a record. It does not believe what the audit says.
func (m *model) zeros(t *rapid.T) {
	type bill struct {
		held, posted, voided sandboxer.Credits
		posts                int
		rows                 []sandboxer.UsageRow
	}
	bills, keys := map[generationKey]*bill{}, map[string]bool{}
	of := func(kind, key, id string, generation int) *bill {
		if keys[kind+key] {
			t.Fatalf("%s %s is there twice", kind, key)
		}
		keys[kind+key] = true
		k := generationKey{id, generation}
		if bills[k] == nil {
			bills[k] = &bill{}
		}
		return bills[k]
	}
	err := m.entries(admin, sandboxer.EntryQuery{}, func(e sandboxer.Entry) {
		switch b := of("entry", e.Key, e.SandboxID, e.Generation); e.Type {
		case sandboxer.EntryHold:
			b.held -= e.Amount
		case sandboxer.EntryPost:
			b.posted += e.Amount
			b.posts++
		case sandboxer.EntryVoid:
			b.voided += e.Amount
		}
	})
	if err == nil {
		err = m.usageRows(admin, func(r sandboxer.UsageRow) {
			b := of("usage row", r.Key, r.SandboxID, r.Generation)
			b.rows = append(b.rows, r)
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]int{} // of each ID the newest generation of objects
	ended := map[generationKey]time.Time{}
	places := map[generationKey]string{} // hosts of those that live
	metered := m.metered()
	err = m.records(admin, sandboxer.Query{}, func(sb *sandboxer.Sandbox) {
		known[sb.ID] = max(known[sb.ID], lifecycle.ObjectGeneration(sb))
		ended[generationKey{sb.ID, lifecycle.ObjectGeneration(sb)}] = sb.EndingAt
		if sb.State != sandboxer.Terminated {
			places[generationKey{sb.ID, lifecycle.ObjectGeneration(sb)}] = sb.Host
		}
		b := bills[generationKey{sb.ID, sb.Generation}]
		if b == nil {
			b = &bill{}
		}
		onHold := b.held - b.posted - b.voided
		pending := sb.Billing == sandboxer.BillingPending
		switch {
		case sb.State != sandboxer.Terminated || pending:
			if onHold != sb.Quote.Amount || b.posts > 0 || len(b.rows) > 0 {
				t.Fatalf("%+v is %s, with %s of %s on hold, and %+v", sb, sb.State, onHold, sb.Quote.Amount, b)
			}
			return
		case onHold != 0 || b.posts > 1 || b.posted != sb.Cost:
			t.Fatalf("%+v has ended, with %s on hold, and %+v", sb, onHold, b)
		case sb.ReadyAt.IsZero() || sb.Tenant == "":
			if len(b.rows) > 0 || b.posted > 0 {
				t.Fatalf("%+v never ran, and has %+v", sb, b)
			}
			return
		case len(b.rows) == 0 || len(b.rows) > 2 || b.rows[0].Type != sandboxer.UsageSettled || b.rows[0].Charged != b.posted:
			t.Fatalf("%+v has ended, with %+v", sb, b)
		case len(b.rows) == 2 && (b.rows[1].Type != sandboxer.UsageCorrection || b.rows[1].Charged != 0 || b.rows[0].Final):
			t.Fatalf("%+v was corrected with %+v", sb, b.rows[1])
		}
		for _, r := range b.rows {
			if !r.Meter.Final {
				if want := min(sb.Quote.For(r.Ran), b.held); r.Charged != want {
					t.Fatalf("%+v cost %s by the clock, and is charged by %+v", sb, want, r)
				}
				continue
			}
			if !slices.Contains(metered[objectKey{sb.Extension, sb.ID, lifecycle.ObjectGeneration(sb)}], r.Cost) ||
				r.Type == sandboxer.UsageSettled && r.Charged != min(r.Cost, sb.Quote.Amount) {
				t.Fatalf("%+v is charged by %+v; its backend says %v", sb, r, metered[objectKey{sb.Extension, sb.ID, lifecycle.ObjectGeneration(sb)}])
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range m.objects() {
		if o.Spec.Generation > known[o.Spec.ID] {
			t.Fatalf("%s/%d is there, and of it no more than generation %d is recorded", o.Spec.ID, o.Spec.Generation, known[o.Spec.ID])
		}
		if host := places[generationKey{o.Spec.ID, o.Spec.Generation}]; host != "" && host != o.Host && !m.lied {
			t.Fatalf("%s/%d is on %s, and its record says that it is on %s", o.Spec.ID, o.Spec.Generation, o.Host, host)
		}
	}
	for _, e := range slices.Concat(m.world.Log(), m.setup.other.Log()) {
		if at := ended[generationKey{e.SandboxID, e.Generation}]; e.Op == fake.OpCreate && !at.IsZero() && e.At.Truncate(time.Microsecond).After(at) {
			t.Fatalf("%s/%d was made at %s, and was to end at %s", e.SandboxID, e.Generation, e.At, at)
		}
	}
}

// faults are those that the world finds. A broker that dies after it left a host may come back to it: nobody knows any more that it
// had been there.
func (m *model) faults(w *fake.World) []string {
	return slices.DeleteFunc(fake.Audit(w.Log(), true), func(f string) bool {
		return m.deaths != nil && strings.HasSuffix(f, "was made again after its teardown")
	})
}

// metered is what the worlds' logs say that each generation of objects cost: usually one amount.
func (m *model) metered() map[objectKey][]sandboxer.Credits {
	price := sandboxer.MeterQuote{Setup: m.setup.fake.Setup, PerHour: m.setup.fake.MeterPerHour}
	out := map[objectKey][]sandboxer.Credits{}
	for name, w := range map[string]*fake.World{"ext.fake": m.world, "ext.other": m.setup.other} {
		began := map[string]time.Time{}
		for _, e := range w.Log() {
			switch at := e.Ref + e.Host; e.Op {
			case fake.OpCreate, fake.OpLate:
				began[at] = e.At
			case fake.OpRemove, fake.OpKill, fake.OpFuse:
				k := objectKey{name, e.SandboxID, e.Generation}
				out[k] = append(out[k], price.For(e.At.Sub(began[at])))
			}
		}
	}
	return out
}

// told checks that the sink has every usage row once.
func (m *model) told(t *rapid.T) {
	var ids, rows []string
	err := m.usageRows(admin, func(r sandboxer.UsageRow) { rows = append(rows, r.Key) })
	if err == nil && len(rows) > 0 {
		ids, err = m.Manager.told(m.opts.Sinks[0])
	}
	if err != nil || !slices.Equal(ids, rows) {
		t.Fatalf("the sink has %q of %q, %v", ids, rows, err)
	}
}

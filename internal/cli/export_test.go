package cli

import (
	"encoding/csv"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// exported are rows of a sandbox whose cost was known a month later, and of one with hostile text, on a page each.
func exported() []api.UsageRow {
	at := func(text string) time.Time {
		t, err := time.Parse(time.RFC3339Nano, text)
		if err != nil {
			panic(err)
		}
		return t
	}
	first := api.UsageRow{Seq: 7, ID: "sbx:box:g1:usage", Type: sandboxer.UsageSettled, At: at("2026-11-30T23:30:00.5Z"), Tenant: "acme", Sandbox: "box", Generation: 1,
		Consumer: sandboxer.Consumer{ID: "agent-7", Kind: "agent"}, Labels: map[string]string{"team": "a,b"}, Profile: "profile.local", Extension: "ext.local",
		From: at("2026-11-30T21:59:59.25Z"), Until: at("2026-11-30T23:29:59.25Z"), Ran: int64(90 * time.Minute), Charged: 75_000, Cost: 75_000,
		Meter: &api.Usage{At: at("2026-11-30T23:29:00Z"), Cost: 70_000, CPU: 12, MiBMillis: 34}}
	later := first
	later.Seq, later.ID, later.Type, later.Corrects, later.At = 8, "sbx:box:g1:correction", sandboxer.UsageCorrection, first.ID, at("2026-12-01T02:00:00Z")
	later.Charged, later.Cost, later.Overrun, later.Final, later.Meter = 0, 90_000, 15_000, true, nil
	soon := later
	soon.Seq, soon.ID, soon.At = 9, "sbx:box:g1:other", at("2026-11-30T23:59:00Z")
	odd := api.UsageRow{Seq: 10, ID: "sbx:odd:g2:usage", Type: sandboxer.UsageSettled, At: at("2026-12-01T00:00:00Z"), Tenant: "=cmd", Sandbox: "odd", Generation: 2,
		Profile: "profile.x", Extension: "ext.x", From: at("2026-11-30T23:00:00Z"), Until: at("2026-12-01T00:00:00Z"), Ran: int64(time.Hour), Charged: 1_000_000, Cost: 1_000_000, Final: true}
	return []api.UsageRow{first, later, soon, odd}
}

// export runs credits export against a server that has two rows on a page.
func export(t *testing.T, args ...string) string {
	t.Helper()
	rows := exported()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if r.URL.Path != "/v1/credits/usage" || q.Get("tenant") != "acme" || q.Get("since") != "2026-11-01T00:00:00Z" || q.Get("until") != "2026-12-02T12:00:00Z" {
			t.Errorf("asked is %s", r.URL)
		}
		l := api.List[api.UsageRow]{Items: rows[:2], NextCursor: "8"}
		if q.Get("cursor") == "8" {
			l = api.List[api.UsageRow]{Items: rows[2:]}
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(l)
	}))
	defer srv.Close()
	out, errs := runWith(t, srv.URL, append([]string{"credits", "export", "--tenant", "acme", "--since", "2026-11-01", "--until", "2026-12-02T12:00:00Z"}, args...))
	if len(errs) > 0 {
		t.Errorf("%s", errs)
	}
	return string(out)
}

func TestExport(t *testing.T) {
	const wantCSV = `seq,id,type,corrects,at,tenant,consumer,sandbox,generation,profile,extension,from,until,ran_ns,charged,cost,overrun,final,cpu_ns,mib_ms,rx_bytes,tx_bytes
7,sbx:box:g1:usage,settled,,2026-11-30T23:30:00.5Z,acme,agent-7,box,1,profile.local,ext.local,2026-11-30T21:59:59.25Z,2026-11-30T23:29:59.25Z,5400000000000,0.075,0.075,0.00,false,12,34,0,0
8,sbx:box:g1:correction,correction,sbx:box:g1:usage,2026-12-01T02:00:00Z,acme,agent-7,box,1,profile.local,ext.local,2026-11-30T21:59:59.25Z,2026-11-30T23:29:59.25Z,5400000000000,0.00,0.09,0.015,true,,,,
9,sbx:box:g1:other,correction,sbx:box:g1:usage,2026-11-30T23:59:00Z,acme,agent-7,box,1,profile.local,ext.local,2026-11-30T21:59:59.25Z,2026-11-30T23:29:59.25Z,5400000000000,0.00,0.09,0.015,true,,,,
10,sbx:odd:g2:usage,settled,,2026-12-01T00:00:00Z,'=cmd,,odd,2,profile.x,ext.x,2026-11-30T23:00:00Z,2026-12-01T00:00:00Z,3600000000000,1.00,1.00,0.00,true,,,,
`
	if got := export(t); got != wantCSV {
		t.Errorf("csv:\n%s", got)
	}
	lines := strings.Split(strings.TrimSpace(export(t, "--format", "jsonl")), "\n")
	for i, want := range exported() {
		var got api.UsageRow
		if i >= len(lines) {
			t.Fatalf("%d lines", len(lines))
		}
		if _, err := strictjson.DecodeStored([]byte(lines[i]), &got); err != nil || got.ID != want.ID || got.Seq != want.Seq || got.Charged != want.Charged || !got.At.Equal(want.At) {
			t.Errorf("jsonl: %s, %v", lines[i], err)
		}
	}
	const wantFocus = `BilledCost,BillingAccountId,BillingAccountName,BillingCurrency,BillingPeriodEnd,BillingPeriodStart,ChargeCategory,ChargeClass,ChargeDescription,ChargeFrequency,ChargePeriodEnd,ChargePeriodStart,ConsumedQuantity,ConsumedUnit,ContractedCost,EffectiveCost,InvoiceIssuerName,ListCost,PricingQuantity,PricingUnit,ProviderName,PublisherName,ResourceId,ResourceName,ResourceType,ServiceCategory,ServiceName,SkuId,SubAccountId,SubAccountName,SubAccountType,Tags,x_Id,x_Corrects,x_Cost,x_Overrun,x_Final
0.075,acme,,USD,2026-12-01T00:00:00Z,2026-11-01T00:00:00Z,Usage,,sandbox box of profile.local,Usage-Based,2026-11-30T23:30:00Z,2026-11-30T21:59:59Z,1.500000000,Hours,0.075,0.075,sandboxer,0.075,1.500000000,Hours,sandboxer,sandboxer,acme/box/g1,,sandbox,Compute,ext.local,profile.local,agent-7,agent-7,agent,"{""team"":""a,b""}",sbx:box:g1:usage,,0.075,0.00,false
0.00,acme,,USD,2027-01-01T00:00:00Z,2026-12-01T00:00:00Z,Usage,Correction,sandbox box of profile.local,Usage-Based,2026-11-30T23:30:00Z,2026-11-30T21:59:59Z,0,Hours,0.00,0.00,sandboxer,0.00,0,Hours,sandboxer,sandboxer,acme/box/g1,,sandbox,Compute,ext.local,profile.local,agent-7,agent-7,agent,"{""team"":""a,b""}",sbx:box:g1:correction,sbx:box:g1:usage,0.09,0.015,true
0.00,acme,,USD,2026-12-01T00:00:00Z,2026-11-01T00:00:00Z,Usage,,sandbox box of profile.local,Usage-Based,2026-11-30T23:30:00Z,2026-11-30T21:59:59Z,0,Hours,0.00,0.00,sandboxer,0.00,0,Hours,sandboxer,sandboxer,acme/box/g1,,sandbox,Compute,ext.local,profile.local,agent-7,agent-7,agent,"{""team"":""a,b""}",sbx:box:g1:other,sbx:box:g1:usage,0.09,0.015,true
1.00,'=cmd,,USD,2027-01-01T00:00:00Z,2026-12-01T00:00:00Z,Usage,,sandbox odd of profile.x,Usage-Based,2026-12-01T00:00:00Z,2026-11-30T23:00:00Z,1.000000000,Hours,1.00,1.00,sandboxer,1.00,1.000000000,Hours,sandboxer,sandboxer,'=cmd/odd/g2,,sandbox,Compute,ext.x,profile.x,,,,{},sbx:odd:g2:usage,,1.00,0.00,true
`
	if got := export(t, "--format", "focus"); got != wantFocus {
		t.Errorf("focus:\n%s", got)
	}
}

// TestFocus: the columns are those of the specification, with all that are mandatory, and ours behind them.
func TestFocus(t *testing.T) {
	mandatory := strings.Fields(`BilledCost BillingAccountId BillingAccountName BillingCurrency BillingPeriodEnd BillingPeriodStart ChargeCategory ChargeClass
		ChargeDescription ChargePeriodEnd ChargePeriodStart ContractedCost EffectiveCost InvoiceIssuerName ListCost PricingQuantity PricingUnit ProviderName
		PublisherName ServiceCategory ServiceName`)
	others := strings.Fields(`AvailabilityZone BillingAccountType CapacityReservationId CapacityReservationStatus ChargeFrequency CommitmentDiscountCategory
		CommitmentDiscountId CommitmentDiscountName CommitmentDiscountQuantity CommitmentDiscountStatus CommitmentDiscountType CommitmentDiscountUnit
		ConsumedQuantity ConsumedUnit ContractedUnitPrice InvoiceId ListUnitPrice PricingCategory PricingCurrency PricingCurrencyContractedUnitPrice
		PricingCurrencyEffectiveCost PricingCurrencyListUnitPrice RegionId RegionName ResourceId ResourceName ResourceType ServiceSubcategory SkuId SkuMeter
		SkuPriceDetails SkuPriceId SubAccountId SubAccountName SubAccountType Tags`)
	table, err := csv.NewReader(strings.NewReader(export(t, "--format", "focus"))).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	names, ours := table[0], slices.IndexFunc(table[0], func(n string) bool { return strings.HasPrefix(n, "x_") })
	if !slices.IsSorted(names[:ours]) {
		t.Errorf("the columns are not in the order of the alphabet: %q", names[:ours])
	}
	for i, n := range names {
		if known := slices.Contains(mandatory, n) || slices.Contains(others, n); known != (i < ours) {
			t.Errorf("the column %s is of FOCUS: %t", n, known)
		}
	}
	for _, n := range mandatory {
		i := slices.Index(names, n)
		for _, row := range table[1:] {
			if i < 0 || row[i] == "" && n != "BillingAccountName" && n != "ChargeClass" {
				t.Errorf("%s is missing, or null: %q", n, row)
			}
		}
	}
}

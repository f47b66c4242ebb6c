package catalog

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func TestPrices(t *testing.T) {
	load := func(text string) (*Catalog, error) {
		return loadOver(t, sandboxer.Builtin, map[string]string{"prices.yaml": text})
	}
	const row = "provider: fake, sku: vcpu, unit: vcpu_s, nano_usd: 14000, basis: max, as_of: '2026-08-01', source: a list, confidence: reported"
	c, err := load("prices:\n  - {" + row + ", minimum: 1m}\n")
	want := []sandboxer.PriceRow{{Provider: "fake", SKU: "vcpu", Unit: sandboxer.UnitVCPUSecond, NanoUSD: 14_000, Basis: sandboxer.BasisMax,
		Minimum: time.Minute, AsOf: "2026-08-01", Source: "a list", Confidence: sandboxer.PriceReported}}
	if err != nil || !slices.Equal(c.Prices, want) {
		t.Errorf("%+v, %v; want the rows of the last file alone", c.Prices, err)
	}
	day := time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC)
	if old := c.StalePrices(day.AddDate(0, 0, 91)); len(old) != 0 {
		t.Errorf("no extension quotes by them, and yet %q are old", old)
	}
	c.Extensions = append(c.Extensions, ExtensionFile{Adapter: sandboxer.Adapter{Kind: "fake"}})
	if old := c.StalePrices(day.AddDate(0, 0, 91)); !slices.Equal(old, []string{"fake/vcpu of 2026-08-01"}) {
		t.Errorf("old: %q", old)
	}
	c, err = loadOver(t, sandboxer.Builtin, nil)
	if err != nil || len(c.Prices) == 0 {
		t.Fatalf("built in: %+v, %v", c.Prices, err)
	}
	if old := c.StalePrices(day.AddDate(1, 0, 0)); len(old) != 0 {
		t.Errorf("nobody has an account, and yet %q are old", old)
	}
	if i := slices.IndexFunc(c.Prices, func(r sandboxer.PriceRow) bool { return r.Provider == "e2b" && r.SKU == "vcpu" }); i < 0 || c.Prices[i].NanoUSD != 14_000 {
		t.Errorf("e2b's vCPU is not 0.0504 for an hour: %+v", c.Prices)
	}
	for text, message := range map[string]string{
		"prices: [{" + row + "}, {" + row + "}]":                                  "another row",
		"prices: [{" + row + ", colour: red}]":                                    "colour",
		"prices: [{" + strings.Replace(row, "14000", "1.5", 1) + "}]":             "nano_usd",
		"prices: [{" + strings.Replace(row, "14000", "-1", 1) + "}]":              "nano_usd",
		"prices: [{" + strings.Replace(row, "vcpu_s", "vcpu_h", 1) + "}]":         "unit",
		"prices: [{" + strings.Replace(row, "reported", "none", 1) + "}]":         "confidence",
		"prices: [{" + strings.Replace(row, "2026-08-01", "2026-13-01", 1) + "}]": "as_of",
		"prices: [{" + strings.Replace(row, ", source: a list", "", 1) + "}]":     "source",
		"rows: []": "prices",
	} {
		if _, err := load(text); err == nil || !strings.Contains(err.Error(), message) {
			t.Errorf("%s: %v; want %q", text, err, message)
		}
	}
}

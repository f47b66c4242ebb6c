package catalog

import (
	"reflect"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestQuotas(t *testing.T) {
	load := func(text string) (*Catalog, error) {
		return loadOver(t, sandboxer.Builtin, map[string]string{"quotas.yaml": text})
	}
	c, err := load(`
default:
  sandboxes: 20
  disk: 200GiB
tenants:
  acme:
    sandboxes: 100
    snapshots: 0
    snapshot_bytes: 1TiB
    images: 3
    execs: 50
    requests: 600
    max_spend: {day: 0.5, month: 12}
  "a tenant's: name": {}
`)
	want := sandboxer.Quotas{Default: sandboxer.Quota{sandboxer.QuotaSandboxes: 20, sandboxer.QuotaDisk: 200 << 30}, Tenants: map[string]sandboxer.Quota{
		"acme": {sandboxer.QuotaSandboxes: 100, sandboxer.QuotaSnapshots: 0, sandboxer.QuotaSnapshotBytes: 1 << 40, sandboxer.QuotaImages: 3,
			sandboxer.QuotaExecs: 50, sandboxer.QuotaRequests: 600,
			sandboxer.QuotaSpendDay: 500_000, sandboxer.QuotaSpendMonth: 12_000_000},
		"a tenant's: name": {},
	}}
	if err != nil || !reflect.DeepEqual(c.Quotas, want) {
		t.Fatalf("%+v, %v", c.Quotas, err)
	}
	if _, bounded := c.Quotas.Of("acme")[sandboxer.QuotaDisk]; bounded {
		t.Error("an entry is added to the default")
	}
	if n := len(c.Quotas.Of("other")); n != 2 {
		t.Errorf("another tenant has %d bounds", n)
	}
	if c, err := loadOver(t, sandboxer.Builtin, nil); err != nil || len(c.Quotas.Of("acme")) != 0 {
		t.Errorf("without a file: %+v, %v", c.Quotas, err)
	}
	for text, message := range map[string]string{
		"default: {sandboxs: 1}":           "sandboxes",
		"default: {sandboxes: -1}":         "default.sandboxes",
		"default: {sandboxes: many}":       "expected",
		"default: {disk: 200}":             "expected",
		"default: {disk:}":                 "expected",
		"default: {requests: 1.5}":         "expected",
		"default: {max_spend: 5}":          "expected",
		"default: {max_spend: {day: -1}}":  "default.max_spend.day",
		"default: {max_spend: {week: 1}}":  "default.max_spend.week",
		"tenants: {acme: 3}":               "expected",
		"tenants: {acme: {}, acme: {}}":    "acme",
		"tenant: {acme: {sandboxes: 1}}":   "tenants",
		"- default":                        "expected",
		"default: {sandboxes: 1, disk: x}": "quotas.yaml",
	} {
		if _, err := load(text); err == nil || !strings.Contains(err.Error(), message) {
			t.Errorf("%s: %v; want %q", text, err, message)
		}
	}
}

// TestQuotasFormIsWhole: every resource has its key, and nothing else has.
func TestQuotasFormIsWhole(t *testing.T) {
	var names []string
	for _, f := range fieldsOf(reflect.TypeFor[quotaForm]()) {
		if f.name != "max_spend" {
			names = append(names, f.name)
		}
	}
	for _, f := range fieldsOf(reflect.TypeFor[spendForm]()) {
		names = append(names, "spend_"+f.name)
	}
	var all []string
	for _, r := range sandboxer.Resources() {
		all = append(all, string(r))
	}
	if !reflect.DeepEqual(names, all) {
		t.Errorf("the file has %q, the resources are %q", names, all)
	}
	one, credit := int64(1), sandboxer.Credit
	if q := (quotaForm{&one, &one, &one, &one, &one, &one, &one, spendForm{&credit, &credit}}).quota(); len(q) != len(all) {
		t.Errorf("of the file's form %+v is left", q)
	}
}

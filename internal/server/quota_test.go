package server

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// TestQuotas: an error for a full quota names use and limit, and administrators, who raise it,
// are always served.
func TestQuotas(t *testing.T) {
	r := newRig(t)
	reader, acme := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	_, rival := r.key("rival", sandboxer.ScopeRead)
	r.m.SetQuotas(sandboxer.Quotas{Tenants: map[string]sandboxer.Quota{"acme": {sandboxer.QuotaSandboxes: 1, sandboxer.QuotaRequests: 1000}}})
	r.create(acme, api.CreateSandbox{})
	a := r.send("POST", "/v1/sandboxes", reader.Token, "application/json", `{"profile":"test"}`)
	if a.status != http.StatusTooManyRequests || a.Code != sandboxer.Exhausted || !strings.Contains(a.Detail, "quota of tenant acme for sandboxes is used: 1 of 1") || a.Hint == "" {
		t.Errorf("%d %s", a.status, a.body)
	}
	ctx := context.Background()
	own, err := acme.Quotas(ctx, api.QuotaQuery{})
	if err != nil || len(own.Items) != 1 || own.Items[0].Tenant != "acme" || len(own.Items[0].Resources) != len(sandboxer.Resources()) {
		t.Fatalf("%+v, %v", own, err)
	}
	if q := own.Items[0].Resources[0]; q.Resource != sandboxer.QuotaSandboxes || q.Used != 1 || q.Limit == nil || *q.Limit != 1 {
		t.Errorf("sandboxes: %+v", q)
	}
	if q := own.Items[0].Resources[1]; q.Resource != sandboxer.QuotaDisk || q.Limit != nil {
		t.Errorf("disk: %+v", q)
	}
	for _, q := range []api.QuotaQuery{{Tenant: "acme"}, {All: true}} {
		if _, err := rival.Quotas(ctx, q); sandboxer.KindOf(err) != sandboxer.Denied {
			t.Errorf("the rival asks for %+v: %v", q, err)
		}
	}
	if all, err := r.admin.Quotas(ctx, api.QuotaQuery{All: true}); err != nil || len(all.Items) != 1 || all.Items[0].Tenant != "acme" {
		t.Errorf("an administrator sees %+v, %v", all, err)
	}

	r.m.SetQuotas(sandboxer.Quotas{Default: sandboxer.Quota{sandboxer.QuotaRequests: 2}})
	other, _ := r.key("other", sandboxer.ScopeRead)
	for range 2 {
		if a := r.send("GET", "/v1/status", other.Token, "", ""); a.status != http.StatusOK {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	for _, path := range []string{"/v1/status", "/v1/sandboxes/x", "/v1/audit"} {
		a = r.send("GET", path, other.Token, "", "")
		if a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") == "" || a.RetryAfter <= 0 || !strings.Contains(a.Detail, "requests is used: 2 of 2 a minute") {
			t.Errorf("%s: %d %v %s", path, a.status, a.header, a.body)
		}
	}
	if _, err := r.admin.Status(ctx); err != nil {
		t.Errorf("an administrator: %v", err)
	}
	if a := r.send("GET", "/healthz", "", "", ""); a.status != http.StatusOK {
		t.Errorf("health: %d %s", a.status, a.body)
	}
}

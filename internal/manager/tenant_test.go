package manager

import (
	"context"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

type asked struct {
	*fake.Extension
	tenant *string
}

func (a asked) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	*a.tenant = spec.Tenant
	return a.Extension.Provision(ctx, spec)
}

// An extension is told whose sandbox it makes by the broker, whatever the caller says of its
// consumer.
func TestTenantOfSpec(t *testing.T) {
	var tenant string
	r := newRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return asked{e, &tenant} }
	})
	sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "profile.test", Consumer: sandboxer.Consumer{ID: "rival", Kind: "ci"}})
	if err != nil {
		t.Fatal(err)
	}
	if tenant != "acme" || sb.Spec.Tenant != "" {
		t.Errorf("it was told %q, and %q is kept; want acme, and nothing", tenant, sb.Spec.Tenant)
	}
}

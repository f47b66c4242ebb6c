package adapters

import (
	"context"
	"testing"
	"testing/fstest"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/catalog"
)

// TestSeedsFiles: files of the Python sand-boxer, with the names of its classes, load unchanged. Those of hosted services open once
// the operator's secret of their name is set.
func TestSeedsFiles(t *testing.T) {
	for _, tt := range []struct{ id, module, class, isolation, pricing, adapter string }{
		{"ext.saas-stub", "saas_stub", "SaaSStubExtension", "container", "metered", "saas-stub"},
		{"ext.compose-ssh", "compose_ssh", "ComposeSSHExtension", "container", "self-hosted", "compose-ssh"},
		{"ext.vm-packer", "vm_packer", "VMPackerExtension", "vm", "self-hosted", "vm-packer"},
		{"ext.e2b", "e2b", "E2BExtension", "vm", "metered", "e2b"},
		{"ext.modal", "modal", "ModalExtension", "container", "metered", "modal"},
	} {
		extension := "id: " + tt.id + "\ntitle: As it was\nhandler: sandboxer.extensions." + tt.module + ":" + tt.class +
			"\ncapabilities:\n  isolation_levels: [" + tt.isolation + "]\n  pricing_model: " + tt.pricing + "\n"
		profile := "id: profile.seed\ntitle: As it was\nextension: " + tt.id + "\n"
		c, err := catalog.Load([]catalog.Layer{{Name: "user", FS: fstest.MapFS{
			"extensions/" + tt.id + ".yaml": {Data: []byte(extension)}, "profiles/profile.seed.yaml": {Data: []byte(profile)},
		}}}, All())
		if err != nil {
			t.Errorf("%s: %v", tt.id, err)
			continue
		}
		if len(c.Extensions) != 1 || c.Extensions[0].Adapter.Kind != tt.adapter || len(c.Profiles) != 1 {
			t.Errorf("%s: the catalogue has %+v", tt.id, c.Extensions)
		}
		if tt.pricing != "metered" {
			continue
		}
		c.Secret = func(_ context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error) {
			return map[sandboxer.SecretRef]sandboxer.Secret{{Name: "e2b"}: "e2b_0", {Name: "modal"}: "ak-0:as-0"}[ref], nil
		}
		opened, err := c.Open(t.Context(), "test", t.TempDir(), nil)
		if err != nil || opened[0].Info.Problem != "" {
			t.Errorf("%s is not opened: %v, %q", tt.id, err, opened[0].Info.Problem)
		}
	}
}

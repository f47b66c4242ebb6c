package hosted

import (
	"context"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestNamedByExtension: a file that does not say the name of a secret means the one that has the name of the extension.
func TestNamedByExtension(t *testing.T) {
	secrets := map[sandboxer.SecretRef]sandboxer.Secret{{Name: "cloud-eu"}: "operator's", {Name: "other"}: "other"}
	env := sandboxer.Env{Extension: "ext.cloud-eu", Secret: func(_ context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error) {
		if s, ok := secrets[ref]; ok {
			return s, nil
		}
		return "", sandboxer.E(sandboxer.NotFound, nil, "there is no %s", ref)
	}}
	type credential = sandboxer.Credential
	for _, tt := range []struct {
		open  func(context.Context, sandboxer.Env, sandboxer.Secret, credential) (*Keys, error)
		fixed sandboxer.Secret
		file  credential
		want  credential
		key   sandboxer.Secret // of the operator
	}{
		{NeedKeys, "", credential{}, credential{Secret: "cloud-eu"}, "operator's"},
		{NeedKeys, "", credential{Secret: "other"}, credential{Secret: "other"}, "other"},
		{NeedKeys, "fixed", credential{}, credential{}, "fixed"},
		{NeedKeys, "", credential{By: sandboxer.ByTenant}, credential{Secret: "cloud-eu", By: sandboxer.ByTenant}, ""},
		{NeedKeys, "fixed", credential{By: sandboxer.ByConsumer}, credential{Secret: "cloud-eu", By: sandboxer.ByConsumer}, ""},
		{OpenKeys, "", credential{By: sandboxer.ByTenant}, credential{Secret: "cloud-eu", By: sandboxer.ByTenant}, ""},
		{OpenKeys, "", credential{}, credential{}, ""},
	} {
		k, err := tt.open(t.Context(), env, tt.fixed, tt.file)
		if err != nil {
			t.Errorf("%+v: %v", tt.file, err)
			continue
		}
		if k.credential() != tt.want {
			t.Errorf("%+v with the key %q: %+v; want %+v", tt.file, tt.fixed, k.credential(), tt.want)
		}
		if ctx, ok := k.Operator(t.Context()); ok {
			if key, err := k.Of(ctx); err != nil || key != tt.key {
				t.Errorf("%+v: the key is %q, %v; want %q", tt.file, key, err, tt.key)
			}
		}
	}
}

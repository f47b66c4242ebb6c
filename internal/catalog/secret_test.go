package catalog

import (
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

// TestSecretDoesNotEncode: a configuration that is written out again shows no secret.
func TestSecretDoesNotEncode(t *testing.T) {
	s := sandboxer.Secret("hunter2")
	out, err := yaml.Marshal(map[string]any{
		"plain": s, "pointer": &s, "list": []sandboxer.Secret{s},
		"struct": struct {
			Token sandboxer.Secret `yaml:"token"`
		}{s},
	})
	if err != nil {
		t.Fatal(err)
	}
	if text := string(out); strings.Contains(text, "hunter2") || strings.Count(text, "[redacted]") != 4 {
		t.Errorf("the secret is encoded as\n%s", text)
	}
}

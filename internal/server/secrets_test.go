package server

import (
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestSecretIsNotRepeated: no answer and no line of the log has the value of a secret, also when the request is wrong.
func TestSecretIsNotRepeated(t *testing.T) {
	const canary = "canary-of-a-secret"
	r := newRig(t)
	k, c := r.key("default", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	for body, want := range map[string]int{
		`{"value":"` + canary + `"}`:               200,
		`{"value":"` + canary + `\u0000"}`:         400,
		`{"value":["` + canary + `"]}`:             400,
		`{"value":"` + canary + `","more":1}`:      400,
		`{"value":"` + canary:                      400,
		`"` + canary + `"`:                         400,
		`{"value":"a","value":"` + canary + `"}`:   400,
		`{"value":{"deep":"` + canary + `"}}`:      400,
		`{"value":"` + canary + `","value":"x"}  `: 400,
	} {
		a := r.send("PUT", "/v1/secrets/token", k.Token, "application/json", body)
		if a.status != want || strings.Contains(a.body, canary) {
			t.Errorf("%s: %d %s", body, a.status, a.body)
		}
	}
	if l, err := c.Secrets(t.Context(), false); err != nil || len(l.Items) != 1 || l.Items[0].Version != 1 {
		t.Errorf("the secrets are %+v, %v", l, err)
	}
	for path, want := range map[string]int{"/v1/secrets": 200, "/v1/secrets/token": 405, "/v1/events": 200} {
		if a := r.send("GET", path, k.Token, "", ""); a.status != want || strings.Contains(a.body, canary) {
			t.Errorf("GET %s: %d %s", path, a.status, a.body)
		}
	}
	if err := c.RemoveSecret(t.Context(), "token", false, true); sandboxer.KindOf(err) != sandboxer.Denied {
		t.Errorf("force by a tenant: %v", err)
	}
	if err := c.RemoveSecret(t.Context(), "token", false, false); err != nil {
		t.Error(err)
	}
	if strings.Contains(r.log.String(), canary) {
		t.Error("the log has it")
	}
}

package process

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// Secrets that overlap, and a text whose rest must not be shown.
func TestHideIn(t *testing.T) {
	const pem = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nend\n-----END KEY-----"
	var s secrets
	with, err := json.Marshal([]any{"secret", "secret-word", "word-play", map[string]string{"pem": pem}, "plain", "short"})
	if err != nil {
		t.Fatal(err)
	}
	s.learn([]byte(`["${env:A}", "${env:B}", "${env:C}", {"pem": "${file:/d}"}, "plain", "${env:E}"]`), with)
	for _, c := range []struct {
		text string
		most int
		want string
	}{
		{"plain text", 100, "plain text"},
		{"plain text", 5, "plain"},
		{"", 0, ""},
		{"a secret", 100, "a [redacted]"},
		{"a secret-word", 100, "a [redacted]"}, // one is the beginning of the other
		{"secret-word-play", 100, "[redacted]"},
		{"secretsecret", 100, "[redacted][redacted]"},
		{"a secret-word", 7, "a [redacted]"},
		{"a secret-word", 3, "a [redacted]"},
		{"a secret-word", 2, "a "},
		{"secret-word, and more", 12, "[redacted],"},
		{"a short one", 100, "a short one"}, // shorter than minSecret
		{"key: " + pem, 9, "key: [redacted]"},
		{"key: " + strings.ReplaceAll(pem, "\n", " "), 100, "key: -----BEGIN KEY----- [redacted] end -----END KEY-----"},
	} {
		if got := s.hideIn(c.text, c.most); got != c.want {
			t.Errorf("the first %d of %q: %q, want %q", c.most, c.text, got, c.want)
		}
	}
	if got := s.reach(); got != len(pem) {
		t.Errorf("reach: %d", got)
	}
}

// All texts of a setting that is not known without its secrets are secrets: a script gets only the name of the setting.
func TestSettingsWithSecrets(t *testing.T) {
	without, with := []byte(`{"a": {"b": ["${env:X}", "plain-text"]}, "c": "plain-text", "d": "${env:Y}"}`), []byte(`{"a": {"b": ["nested-secret", "plain-text"]}, "c": "plain-text", "d": ""}`)
	names := different(without, with)
	if !slices.Equal(names, []string{"a", "d"}) {
		t.Errorf("settings with secrets: %q", names)
	}
	var s secrets
	s.learn([]byte(`{"c": "plain-text"}`), with)
	if got := s.hide("nested-secret"); got != "[redacted]" {
		t.Error(got)
	}
}

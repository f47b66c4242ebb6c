package catalog

import (
	"reflect"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestSinks(t *testing.T) {
	load := func(text string) (*Catalog, error) {
		return loadOver(t, sandboxer.Builtin, map[string]string{"sinks.yaml": text})
	}
	c, err := load("sinks:\n  hub: {url: 'https://hub.example.org/usage', keys: [new, old]}\n  books: {file: /var/lib/usage.jsonl}\n  near: {url: 'http://127.0.0.1:1/', keys: [k]}\n")
	want := []sandboxer.Sink{{Name: "books", File: "/var/lib/usage.jsonl"}, {Name: "hub", URL: "https://hub.example.org/usage", Keys: []string{"new", "old"}},
		{Name: "near", URL: "http://127.0.0.1:1/", Keys: []string{"k"}}}
	if err != nil || !reflect.DeepEqual(c.Sinks, want) {
		t.Errorf("%+v, %v; want %+v", c.Sinks, err, want)
	}
	for text, message := range map[string]string{
		"{}": "either url or file",
		"{url: 'https://a', file: /b, keys: [k]}":   "either url or file",
		"{file: /b, keys: [k]}":                     "not for a file",
		"{file: b}":                                 "absolute path",
		"{url: 'https://a'}":                        "1 to 4 keys",
		"{url: 'https://a', keys: [a, b, c, d, e]}": "1 to 4 keys",
		"{url: 'https://a', keys: [whsec_a+b]}":     "keys",
		"{url: 'http://a.example.org', keys: [k]}":  "https://",
		"{url: 'https://user:pass@a', keys: [k]}":   "without a user",
		"{url: 'https://a', keys: [k], retry: 3}":   "retry",
		"{file: /same}\n  another: {file: /same}":   "another writes this file, too",
	} {
		if _, err := load("sinks:\n  hub: " + text + "\n"); err == nil || !strings.Contains(err.Error(), message) || !strings.Contains(err.Error(), " 2:") {
			t.Errorf("%s: %v; want %q at line 2", text, err, message)
		}
	}
	if _, err := load("sinks:\n  Hub/1: {file: /b}\n"); err == nil || !strings.Contains(err.Error(), "Hub/1") {
		t.Errorf("an odd name: %v", err)
	}
	for _, canary := range []string{"{url: 'https://a', keys: [whsec_canary]}", "{url: 'https://a', keys: [whsec_canary+/=]}", "{url: 'https://a', keys: ['canary ']}",
		"{url: 'https://user:canary@a', keys: [k]}", "{url: 'https://a?token=canary', keys: [k]}"} {
		if _, err := load("sinks:\n  hub: " + canary + "\n"); err == nil || strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: %v", canary, err)
		}
	}
}

package server

import (
	"net/http"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// TestRoom: a request that finds no room gets an error that says when to retry.
func TestRoom(t *testing.T) {
	r := newRig(t)
	writer, acme := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	if err := r.m.SetProfiles([]sandboxer.Profile{{ID: "profile.test", Extension: "ext.fake", Max: 1}}); err != nil {
		t.Fatal(err)
	}
	r.create(acme, api.CreateSandbox{})
	for _, prefer := range [][]string{nil, {"Prefer", "respond-async"}} {
		a := r.send("POST", "/v1/sandboxes", writer.Token, "application/json", `{"profile":"test"}`, prefer...)
		if a.status != http.StatusTooManyRequests || a.Code != sandboxer.Exhausted || a.header.Get("Retry-After") == "" || a.RetryAfter <= 0 ||
			!strings.Contains(a.Detail, "profile profile.test is full: it has 1 of 1 sandboxes") || a.Hint == "" {
			t.Errorf("%d %v %s", a.status, a.header, a.body)
		}
	}
}

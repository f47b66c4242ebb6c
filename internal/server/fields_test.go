package server

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// TestRequestFields: all that a request says reaches the manager.
func TestRequestFields(t *testing.T) {
	header := fieldtest.Withheld{"Key": "a header", "NoWaiting": "a header"}
	t.Run("create", func(t *testing.T) {
		fieldtest.Conversion[api.CreateSandbox, sandboxer.CreateRequest]{
			Convert:  func(b api.CreateSandbox) sandboxer.CreateRequest { return new(inCreate).request(b) },
			Withheld: header, Unset: header,
		}.Check(t)
		in := inCreate{Key: "k", Prefer: "wait=5, respond-async"}
		if r := in.request(api.CreateSandbox{}); r.Key != "k" || !r.NoWaiting {
			t.Errorf("of the headers comes %+v", r)
		}
	})
	t.Run("restore", func(t *testing.T) {
		fieldtest.Conversion[api.RestoreSnapshot, manager.RestoreRequest]{
			Convert:  func(b api.RestoreSnapshot) manager.RestoreRequest { return new(inRestore).request(b) },
			Withheld: header, Unset: header,
		}.Check(t)
		in := inRestore{Key: "k", Prefer: "respond-async"}
		if r := in.request(api.RestoreSnapshot{}); r.Key != "k" || !r.NoWaiting {
			t.Errorf("of the headers comes %+v", r)
		}
	})
	t.Run("fork", func(t *testing.T) {
		key := fieldtest.Withheld{"Key": "a header"}
		fieldtest.Conversion[api.ForkSandbox, manager.ForkRequest]{
			Convert:  func(b api.ForkSandbox) manager.ForkRequest { return new(inFork).request(b) },
			Withheld: key, Unset: key,
		}.Check(t)
		if r := (&inFork{Key: "k"}).request(api.ForkSandbox{}); r.Key != "k" {
			t.Errorf("of the header comes %+v", r)
		}
	})
	t.Run("plan", func(t *testing.T) {
		fieldtest.Conversion[manager.Plan, api.Plan]{
			Convert: newPlan,
			Withheld: fieldtest.Withheld{
				"Spec.ID":         "chosen anew when it is made, unless the caller chose it",
				"Spec.Generation": "settled when it is made",
				"Spec.Owner":      "the installation's name, which the status has",
				"Spec.Consumer":   "changes nothing about what is made",
				"Spec.Tenant":     "the caller's",
				"Spec.Env[value]": "values may be secret; names are shown",
				"Spec.Fuse":       "counts from when it is made",
				"Spec.Warm":       "never of what a caller asks for",
				"Spec.Vouched":    "decides what is admitted, which the answer shows",
				"Spec.Place":      "chosen when it is made",
				"Spec.Credential": "the name of a key, which the extension's file chooses",
				// The profile is named, and has an answer of its own.
				"Spec.Profile.Title": "see the profile", "Spec.Profile.Description": "see the profile", "Spec.Profile.Extension": "extension is where it is made", "Spec.Profile.Route": "extension is the one that was chosen",
				"Spec.Profile.Isolation": "see the profile", "Spec.Profile.Requires": "see the profile",
				"Spec.Profile.Image": "see image", "Spec.Profile.Command": "see command", "Spec.Profile.Env": "see env", "Spec.Profile.Labels": "see labels", "Spec.Profile.Secrets": "see the profile",
				"Spec.Profile.Limits": "see limits", "Spec.Profile.MaxLimits": "see the profile", "Spec.Profile.Network": "see network",
				"Spec.Profile.Mounts": "see mounts", "Spec.Profile.Ports": "see ports", "Spec.Profile.Workspace": "see workspace", "Spec.Profile.User": "see user",
				"Spec.Profile.Inputs": "see inputs", "Spec.Profile.TTL": "see ttl", "Spec.Profile.MaxTTL": "see the profile", "Spec.Profile.OnIdle": "see the profile", "Spec.Profile.Idle": "see the profile",
				"Spec.Profile.OnTTL": "see the profile", "Spec.Profile.OnCost": "see the profile", "Spec.Profile.PauseDepth": "see the profile", "Spec.Profile.MaxPaused": "see the profile",
				"Spec.Profile.AutoResume": "see the profile", "Spec.Profile.Max": "see the profile", "Spec.Profile.Wait": "see the profile", "Spec.Profile.Price": "see quote", "Spec.Profile.Ready": "see the profile", "Spec.Profile.Pool": "see the profile", "Spec.Profile.Builtin": "see the profile",
			},
		}.Check(t)
	})
}

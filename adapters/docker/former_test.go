package docker

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestFormerRecords: records that earlier versions kept in files are found after an open, and are no longer in files.
// A damaged one is an error for its sandbox alone.
func TestFormerRecords(t *testing.T) {
	en := testEngine{image: "engine:x"}
	o := en.options(t, "former")
	o.config["engines"] = map[string]any{"one": map[string]any{"address": nothing(t)}}
	box := filepath.Join(o.dir, "box")
	if err := os.Mkdir(box, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"made.g1.json":    `{"v":1,"host":"one","ready":true,"claim":"0a","done":true,"fuse":"2026-11-01T10:00:00Z","fuse_due":true,"network":{"mode":"allow","allow":["example.org"]}}`,
		"begun.g2.json":   `{"v":1,"host":"one"}`,
		"damaged.g1.json": `{"v":`,
		"newer.g1.json":   `{"v":2,"elsewhere":true}`,
	} {
		if err := os.WriteFile(filepath.Join(box, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Mkdir(filepath.Join(o.dir, "agent"), 0o700), os.WriteFile(filepath.Join(o.dir, "agent", "one"), []byte("0a since etc"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for range 2 { // also when it is opened again
		e := o.must(t)
		for key, want := range map[string]record{
			"made.g1": {V: 1, Host: "one", Ready: true, Claim: "0a", Done: true, Fuse: time.Date(2026, 11, 1, 10, 0, 0, 0, time.UTC), FuseDue: true,
				Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"example.org"}}},
			"begun.g2":   {V: 1, Host: "one"},
			"unknown.g1": {V: 1, Ready: true},
		} {
			if r, err := e.recall(t.Context(), key); err != nil || !reflect.DeepEqual(r, want) {
				t.Errorf("%s = %+v, %v", key, r, err)
			}
		}
		_, err := e.recall(t.Context(), "damaged.g1")
		wantKind(t, err, sandboxer.Unavailable, filepath.Join(o.dir, "notes", "damaged.g1.note"))
		_, err = e.recall(t.Context(), "newer.g1")
		wantKind(t, err, sandboxer.Unavailable, "newer sandboxer")
		if n, err := e.env.Notes.Get(t.Context(), "one"); err != nil || string(n.Value) != "0a since etc" {
			t.Errorf("the agent of an engine: %q, %v", n.Value, err)
		}
		if _, err := os.Stat(box); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the former directory: %v", err)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

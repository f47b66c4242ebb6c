// Package registry_test holds the registry's documents to what the built-in
// extensions and their adapters declare.
package registry_test

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters"
	"github.com/sand-boxer/sandboxer/internal/catalog"
)

var update = flag.Bool("update", false, "rewrite the documents")

func TestRegistry(t *testing.T) {
	c, err := catalog.Load([]catalog.Layer{{Name: "built-in", FS: sandboxer.Builtin}}, adapters.All())
	if err != nil {
		t.Fatal(err)
	}
	want := make(map[string]bool)
	for _, e := range c.Extensions {
		name := e.ID + ".yaml"
		want[name] = true
		doc, err := catalog.Registry(e)
		if err != nil {
			t.Fatal(err)
		}
		if *update {
			if err := os.WriteFile(name, doc, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, doc) {
			t.Errorf("registry/%s is stale (%v); go test ./registry -update rewrites it", name, err)
		}
	}
	names, err := filepath.Glob("*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if want[name] {
			continue
		}
		if *update {
			if err := os.Remove(name); err != nil {
				t.Fatal(err)
			}
			continue
		}
		t.Errorf("registry/%s describes no built-in extension; go test ./registry -update removes it", name)
	}
}

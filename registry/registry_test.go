// Package registry_test holds the registry's documents to what the built-in
// extensions and their adapters declare.
package registry_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

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
		doc, err := document(e)
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

// registryEntry is what others may know of an extension before they use it.
type registryEntry struct {
	ID           string                 `yaml:"id"`
	Title        string                 `yaml:"title"`
	Description  string                 `yaml:"description,omitempty"`
	Adapter      string                 `yaml:"adapter"`
	Handler      string                 `yaml:"handler"`
	Capabilities registryCapabilities   `yaml:"capabilities"`
	Operations   []sandboxer.Capability `yaml:"operations"`
	Inputs       []registryInput        `yaml:"inputs"`
	Config       yaml.Node              `yaml:"config_schema"`
}

type registryCapabilities struct {
	IsolationLevels []sandboxer.Isolation  `yaml:"isolation_levels"`
	PricingModel    sandboxer.PricingModel `yaml:"pricing_model"`
}

type registryInput struct {
	Name     string `yaml:"name"`
	Help     string `yaml:"help"`
	Required bool   `yaml:"required,omitempty"`
	OneOf    string `yaml:"one_of,omitempty"`
	Default  string `yaml:"default,omitempty"`

	Restricted bool `yaml:"restricted,omitempty"`
}

// document is the registry's document about an extension, made from what its file and its
// adapter declare. Its name is registry/<extension ID>.yaml.
func document(e catalog.ExtensionFile) ([]byte, error) {
	a, info := e.Adapter, e.Info()
	entry := registryEntry{
		ID: e.ID, Title: info.Title, Description: strings.TrimSpace(a.Help), Adapter: a.Kind, Handler: e.Handler,
		Capabilities: registryCapabilities{e.Isolation, e.Pricing},
		Operations:   info.Capabilities, Inputs: []registryInput{},
	}
	for _, in := range info.Inputs {
		entry.Inputs = append(entry.Inputs, registryInput(in))
	}
	j, err := catalog.ConfigSchema(a)
	if err != nil {
		return nil, err
	}
	if j == nil {
		j = []byte("null")
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(j, &doc); err != nil { // JSON is YAML, and keeps its order
		return nil, err
	}
	block(&doc)
	entry.Config = *doc.Content[0]
	var b bytes.Buffer
	fmt.Fprintf(&b, "# Generated from %s and the adapter %q; do not edit.\n", e.ID+".yaml", a.Kind)
	out, err := yaml.Dump(entry)
	if err != nil {
		return nil, err
	}
	b.Write(out)
	return b.Bytes(), nil
}

// block drops JSON's braces and quotes where YAML does without.
func block(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		block(c)
	}
}

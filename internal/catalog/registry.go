package catalog

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

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

// Registry returns the registry's document about an extension, made from what its
// file and its adapter declare. Its name is registry/<extension ID>.yaml.
func Registry(e ExtensionFile) ([]byte, error) {
	a, info := e.Adapter, e.Info()
	entry := registryEntry{
		ID: e.ID, Title: info.Title, Description: strings.TrimSpace(a.Help), Adapter: a.Kind, Handler: e.Handler,
		Capabilities: registryCapabilities{e.Isolation, e.Pricing},
		Operations:   info.Capabilities, Inputs: []registryInput{},
	}
	for _, in := range info.Inputs {
		entry.Inputs = append(entry.Inputs, registryInput(in))
	}
	j, err := json.Marshal(configSchema(a))
	if said := e.said.Load(); said != nil {
		entry.Description = cmp.Or(strings.TrimSpace(said.Help), entry.Description)
		if len(said.Config) > 0 {
			j = said.Config
		}
	}
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the configuration of adapter %q has no schema", a.Kind)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(j, &doc); err != nil { // JSON is YAML, and keeps its order
		return nil, sandboxer.E(sandboxer.Internal, err, "the schema of adapter %q cannot be written", a.Kind)
	}
	block(&doc)
	entry.Config = *doc.Content[0]
	var b bytes.Buffer
	fmt.Fprintf(&b, "# Generated from %s and the adapter %q; do not edit.\n", e.ID+".yaml", a.Kind)
	out, err := yaml.Dump(entry)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the registry document of %s cannot be written", e.ID)
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

// Init writes a starter profile on extension e, every line explained, which loads
// as it stands.
func Init(w io.Writer, name string, e ExtensionFile) error {
	id := ProfileID(name)
	if f := formats["profile"]; !f.matches(id) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the name of a profile: want 1 to 48 characters a-z, 0-9 and inner hyphens", clip(name))
	}
	var b bytes.Buffer
	p := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	p("# What users get when they ask for --profile %s.", strings.TrimPrefix(id, profilePrefix))
	p("# Save it as profiles/%s.yaml and check it with: sandboxer profile validate", id)
	p("id: %s", id)
	p("title: %s", strings.TrimPrefix(id, profilePrefix))
	p("# description: A paragraph for people.")
	p("")
	p("# The extension that makes its sandboxes: %s.", e.Info().Title)
	p("extension: %s", e.ID)
	p("isolation: %s # promised to users; %s offers %s", e.Isolation[0], e.ID, listed(e.Isolation, "and"))
	info := e.Info()
	if caps := info.Capabilities; len(caps) > 0 {
		p("# requires: [%s] # refuse to run where one of these is missing", strings.Join(texts(caps), ", "))
	}
	p("")
	p("network: none # or public, or {allow: [example.org, \"*.example.org:443\"]}")
	p("# limits: # what is left out takes the default of the adapter")
	p("#   cpus: 2")
	p("#   memory: 1GiB")
	p("#   disk: 4GiB")
	p("#   pids: 512")
	p("")
	p("# max: 20 # how many may exist at once")
	p("# wait: 1m # how long a request waits for room before it is refused")
	p("")
	p("ttl: 30m # lifetime when the caller names none")
	p("max_ttl: 24h # the longest a caller may ask for")
	p("# idle: 15m # on_idle is done after so long without use")
	if slices.Contains(info.Capabilities, sandboxer.CanSnapshot) || slices.Contains(info.Capabilities, sandboxer.CanPause) {
		p("# on_idle: pause # instead of destroying it then")
		p("# on_ttl: pause # instead of destroying it when its time is over")
		p("# max_paused: 7d # how long a paused one is kept")
		p("# auto_resume: true # using a paused one resumes it")
	}
	if slices.Contains(info.Capabilities, sandboxer.CanPool) {
		p("# pool: # ready beforehand, so that a create takes milliseconds")
		p("#   size: 2")
	}
	p("")
	if len(info.Inputs) > 0 {
		p("# Defaults for inputs; a caller's --input key=value wins.")
		p("# inputs:")
		for _, in := range info.Inputs {
			if in.Name == sandboxer.AnyInput {
				p("#   name: value # any other: %s", in.Help)
				continue
			}
			note := in.Help
			if in.Required {
				note += " (required)"
			}
			p("#   %s: %q # %s", in.Name, in.Default, note)
		}
		p("")
	}
	p("# image: python:3.13 # where the extension runs images; without it the adapter's default")
	p("# env: # environment of everything inside; no secrets here")
	p("#   LANG: C.UTF-8")
	p("# command: [sleep, infinity] # main process; without it the adapter's default")
	p("# ports: [8080]")
	p("# ready: # what has to be answered before a user gets it; or command: [curl, -f, localhost]")
	p("#   http: {port: 8080, path: /, status: 200}")
	p("#   timeout: 30s")
	p("# price: # in credits, where the extension itself quotes nothing")
	p("#   per_hour: \"0.12\"")
	_, err := w.Write(b.Bytes())
	return err
}

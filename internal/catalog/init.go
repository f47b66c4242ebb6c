package catalog

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// Init writes a starter profile on extension e, every line explained, which loads
// unchanged.
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
	p("# limits: # limits that are left out take the adapter's defaults")
	p("#   cpus: 2")
	p("#   memory: 1GiB")
	p("#   disk: 4GiB")
	p("#   pids: 512")
	p("")
	p("# max: 20 # how many may exist at the same time")
	p("# wait: 1m # how long a request waits for room before it is refused")
	p("")
	p("ttl: 30m # lifetime when the caller names none")
	p("max_ttl: 24h # the longest a caller may ask for")
	p("# idle: 15m # on_idle happens after this time without use")
	pauses := []sandboxer.Capability{sandboxer.CanSnapshot, sandboxer.CanPause, sandboxer.CanArchive, sandboxer.CanCheckpoint}
	if slices.ContainsFunc(pauses, func(c sandboxer.Capability) bool { return slices.Contains(info.Capabilities, c) }) {
		p("# on_idle: pause # instead of destroying it then")
		p("# on_ttl: pause # instead of destroying it when it expires")
		p("# max_paused: 7d # how long a paused one is kept")
		p("# auto_resume: true # using a paused one resumes it")
	}
	if slices.Contains(info.Capabilities, sandboxer.CanMeter) {
		p("# on_cost: extend # instead of destroying it when it has cost what is on hold")
	}
	if slices.Contains(info.Capabilities, sandboxer.CanPool) {
		p("# pool: # kept ready, so that a create takes milliseconds")
		p("#   size: 2")
	}
	p("")
	if len(info.Inputs) > 0 {
		p("# Defaults for inputs; a caller's --input key=value overrides them.")
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

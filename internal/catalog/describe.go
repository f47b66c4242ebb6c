package catalog

import (
	"fmt"
	"slices"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// Describe loads the known descriptions of extensions that describe themselves (sandboxer.Describer), without
// opening them, and checks the files against them. stateDir is that of Open. When anything is wrong it returns Faults,
// and removes the faulty files from the catalogue.
func (c *Catalog) Describe(stateDir string) error {
	return c.describeAll(func(e ExtensionFile) (sandboxer.Description, bool) {
		if e.Adapter.Known == nil {
			return sandboxer.Description{}, false
		}
		return e.Adapter.Known(e.Env("", stateDir, nil))
	})
}

// DescribeAs is Describe with the descriptions that open has of the extensions whose files are the same.
func (c *Catalog) DescribeAs(open *Catalog) error {
	return c.describeAll(func(e ExtensionFile) (d sandboxer.Description, ok bool) {
		if o, err := open.Extension(e.ID); err == nil && o.Same(e) {
			if said := o.said.Load(); said != nil {
				return *said, true
			}
		}
		return d, false
	})
}

// Outdated reports whether e has a description of a program that has changed by now: its files changed since it
// was opened. It is false for extensions that do not describe themselves. stateDir is that of Open.
func (e ExtensionFile) Outdated(stateDir string) bool {
	if e.Adapter.Known == nil || e.said.Load() == nil {
		return false
	}
	_, ok := e.Adapter.Known(e.Env("", stateDir, nil))
	return !ok
}

// describeAll takes over the descriptions that of knows, and checks the files against them.
func (c *Catalog) describeAll(of func(ExtensionFile) (sandboxer.Description, bool)) error {
	var faults Faults
	described, unsound := map[string]bool{}, map[string]bool{}
	for _, e := range c.Extensions {
		d, ok := of(e)
		if !ok {
			continue
		}
		e.said.Store(&d)
		own := e.holds()
		faults, described[e.ID], unsound[e.ID] = append(faults, own...), true, len(own) > 0
	}
	for _, p := range c.Profiles {
		if !slices.ContainsFunc(p.Extensions(), func(id string) bool { return described[id] }) {
			continue
		}
		p.binds(func(id string) (ExtensionFile, bool) { e, err := c.Extension(id); return e, err == nil })
		own := p.file.src.take()
		faults = append(faults, own...)
		unsound[p.ID] = len(own) > 0 || slices.ContainsFunc(p.Extensions(), func(id string) bool { return unsound[id] })
	}
	if len(faults) == 0 {
		return nil
	}
	c.Extensions = slices.DeleteFunc(c.Extensions, func(e ExtensionFile) bool { return unsound[e.ID] })
	c.Profiles = slices.DeleteFunc(c.Profiles, func(p ProfileFile) bool { return unsound[p.ID] })
	return faults.sorted()
}

// holds checks e's file against the extension's description.
func (e ExtensionFile) holds() Faults {
	d, said := e.file.again(), e.said.Load()
	e.offers(d, said.Isolation, said.Pricing)
	return d.src.take()
}

// offers checks the promises of e's file against what it can have.
func (e ExtensionFile) offers(d *decoder, levels []sandboxer.Isolation, models []sandboxer.PricingModel) {
	whose := fmt.Sprintf("adapter %q", e.Adapter.Kind)
	if e.said.Load() != nil {
		whose = "the extension"
	}
	for i, lvl := range e.Isolation {
		if lvl != "" && !slices.Contains(levels, lvl) {
			d.fault(fmt.Sprintf("capabilities.isolation_levels[%d]", i), "",
				"%s cannot give isolation level %q: it gives %s", whose, lvl, orNone(levels))
		}
	}
	if m := e.Pricing; m != "" && !slices.Contains(models, m) {
		d.fault("capabilities.pricing_model", "", "%s cannot have pricing model %q: it has %s", whose, m, orNone(models))
	}
}

// binds checks p against what the extensions that may serve it have, as far as that is known.
func (p ProfileFile) binds(find func(id string) (ExtensionFile, bool)) {
	var declared []sandboxer.Input
	var who []string
	for i, id := range p.Extensions() {
		e, ok := find(id)
		if !ok || !p.bindsTo(e, i) {
			continue
		}
		declared = append(declared, e.Info().Inputs...)
		who = append(who, fmt.Sprintf("%s (adapter %q)", e.ID, e.Adapter.Kind))
	}
	if len(who) == len(p.Extensions()) {
		p.takes("inputs", p.Inputs, declared, who...)
	}
}

// bindsTo checks p against e, the extension of its candidate i. It reports whether it is known what e has.
func (p ProfileFile) bindsTo(e ExtensionFile, i int) bool {
	d := p.file.dec
	// at is the place of a fault: of what e cannot give, or the candidate itself.
	at := func(path string) string {
		if p.Route != nil {
			return candidatePath(i) + ".extension"
		}
		return path
	}
	if p.Isolation != "" && !slices.Contains(e.Isolation, p.Isolation) {
		d.fault(at("isolation"), "", "%s does not offer isolation level %q: it offers %s", e.ID, p.Isolation, orNone(e.Isolation))
	}
	if e.Adapter.Known != nil && e.said.Load() == nil {
		return false
	}
	info := e.Info()
	for i, c := range p.Requires {
		if c != "" && !slices.Contains(info.Capabilities, c) {
			d.fault(at(fmt.Sprintf("requires[%d]", i)), "", "%s (adapter %q) does not have %q: it has %s",
				e.ID, e.Adapter.Kind, c, orNone(info.Capabilities))
		}
	}
	if lacks := p.Ready.Lacks(info.Capabilities); lacks != "" {
		d.faultKey(at("ready"), "", "%s (adapter %q) lacks %s, which the readiness check needs", e.ID, e.Adapter.Kind, lacks)
	}
	if p.Route != nil {
		p.takes(candidatePath(i)+".inputs", p.Route.Candidates[i].Inputs, info.Inputs, fmt.Sprintf("%s (adapter %q)", e.ID, e.Adapter.Kind))
	}
	return true
}

// takes checks the names of the inputs at path against those that are declared by who.
func (p ProfileFile) takes(path string, inputs map[string]string, declared []sandboxer.Input, who ...string) {
	d := p.file.dec
	names := make([]string, len(declared))
	for i, in := range declared {
		names[i] = in.Name
	}
	any := slices.Contains(names, sandboxer.AnyInput)
	for k := range inputs {
		switch err := sandboxer.CheckInputName(k); {
		case any && err != nil:
			d.faultKey(join(path, k), "", "%s: %s", sandboxer.Message(err), sandboxer.HintOf(err))
		case any || slices.Contains(names, k):
		case len(who) > 1:
			d.faultKey(join(path, k), suggest.Nearest(k, names), "none of %s takes such an input: they take %s", listed(who, "and"), orNone(names))
		default:
			d.faultKey(join(path, k), suggest.Nearest(k, names), "%s takes no such input: it takes %s", who[0], orNone(names))
		}
	}
}

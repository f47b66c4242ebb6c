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
	unsound := map[string]bool{}
	for _, e := range c.Extensions {
		d, ok := of(e)
		if !ok {
			continue
		}
		e.said.Store(&d)
		own := e.holds()
		faults, unsound[e.ID] = append(faults, own...), len(own) > 0
		for _, p := range c.Profiles {
			if p.Extension == e.ID {
				p.binds(e)
				own := p.file.src.take()
				faults, unsound[p.ID] = append(faults, own...), unsound[e.ID] || len(own) > 0
			}
		}
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

// binds checks p against what its extension has.
func (p ProfileFile) binds(e ExtensionFile) {
	d := p.file.dec
	if e.Adapter.Known != nil && e.said.Load() == nil {
		return // nothing is known of it yet
	}
	info := e.Info()
	for i, c := range p.Requires {
		if c != "" && !slices.Contains(info.Capabilities, c) {
			d.fault(fmt.Sprintf("requires[%d]", i), "", "%s (adapter %q) does not have %q: it has %s",
				e.ID, e.Adapter.Kind, c, orNone(info.Capabilities))
		}
	}
	if lacks := p.Ready.Lacks(info.Capabilities); lacks != "" {
		d.faultKey("ready", "", "%s (adapter %q) lacks %s, which the readiness check needs", e.ID, e.Adapter.Kind, lacks)
	}
	names := make([]string, len(info.Inputs))
	for i, in := range info.Inputs {
		names[i] = in.Name
	}
	any := slices.Contains(names, sandboxer.AnyInput)
	for k := range p.Inputs {
		switch err := sandboxer.CheckInputName(k); {
		case any && err != nil:
			d.faultKey(join("inputs", k), "", "%s: %s", sandboxer.Message(err), sandboxer.HintOf(err))
		case !any && !slices.Contains(names, k):
			d.faultKey(join("inputs", k), suggest.Nearest(k, names), "%s (adapter %q) takes no such input: it takes %s", e.ID, e.Adapter.Kind, orNone(names))
		}
	}
}

package spec

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// ability is what one extension can do for a profile.
type ability struct {
	extension string
	problem   string // why it cannot be used now
	can       []sandboxer.Capability
	isolation []sandboxer.Isolation
}

// candidate is one extension with the reason why it was chosen or refused.
type candidate struct {
	extension string
	why       string
}

func (e *Extension) ability() ability {
	o := ability{extension: e.Info.ID, problem: e.Info.Problem, isolation: e.Info.Isolation}
	if e.Backend != nil {
		o.can = e.Backend.Capabilities()
	}
	return o
}

// route says which of the extensions can serve p, best first, and why the others cannot.
// A profile names its extension; among several that one is the only
// candidate.
func route(p sandboxer.Profile, abilities []ability) (chosen, refused []candidate) {
	for _, o := range abilities {
		var missing []string
		for _, c := range p.Requires {
			if !slices.Contains(o.can, c) {
				missing = append(missing, string(c))
			}
		}
		no := ""
		switch {
		case o.extension != p.Extension:
			no = "the profile is on " + p.Extension
		case o.problem != "":
			no = fmt.Sprintf("extension %s cannot be used here: %s", o.extension, o.problem)
		case len(missing) > 0:
			no = fmt.Sprintf("extension %s lacks %s, which the profile requires", o.extension, strings.Join(missing, ", "))
		case p.Ready.Lacks(o.can) != "":
			no = fmt.Sprintf("extension %s lacks %s, which the profile's readiness check needs", o.extension, p.Ready.Lacks(o.can))
		case p.Isolation != "" && !slices.Contains(o.isolation, p.Isolation):
			no = fmt.Sprintf("extension %s does not isolate by %s (it gives %s)", o.extension, p.Isolation, suggest.List(o.isolation))
		}
		if no != "" {
			refused = append(refused, candidate{o.extension, no})
			continue
		}
		chosen = append(chosen, candidate{o.extension, "the profile names it"})
	}
	return chosen, refused
}

package catalog

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// TestProfileFields: every key of a profile's file becomes a field of the profile, and every
// field has a key. (TestProfileEveryField reads such a file.)
func TestProfileFields(t *testing.T) {
	fieldtest.Conversion[profileForm, sandboxer.Profile]{
		Convert: func(f profileForm) sandboxer.Profile {
			return f.profile(newDecoder(newSource("x", nil))) // whatever else is wrong with it
		},
		Unset: fieldtest.Withheld{"Builtin": "the layer says it, not the file"},
	}.Check(t)
	fieldtest.Conversion[quotaForm, map[string]int64]{
		Convert: func(f quotaForm) map[string]int64 {
			out := map[string]int64{}
			for r, n := range f.quota() {
				out[string(r)] = n
			}
			return out
		},
	}.Check(t)
}

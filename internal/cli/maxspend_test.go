package cli

import (
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestMaxSpendFlag(t *testing.T) {
	for _, c := range []struct {
		values []string
		want   sandboxer.MaxSpend
		fault  string
	}{
		{nil, sandboxer.MaxSpend{}, ""},
		{[]string{"day=5", "month=50.5"}, sandboxer.MaxSpend{Day: 5_000_000, Month: 50_500_000}, ""},
		{[]string{"month=1"}, sandboxer.MaxSpend{Month: 1_000_000}, ""},
		{[]string{"week=1"}, sandboxer.MaxSpend{}, `"week" is not a period`},
		{[]string{"5"}, sandboxer.MaxSpend{}, "key=value"},
		{[]string{"day=0"}, sandboxer.MaxSpend{}, "not a positive amount"},
		{[]string{"day=-1"}, sandboxer.MaxSpend{}, "not a positive amount"},
		{[]string{"day=much"}, sandboxer.MaxSpend{}, "not an amount of credits"},
	} {
		got, err := parseMaxSpend(c.values)
		switch {
		case c.fault != "":
			if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(sandboxer.Message(err), c.fault) {
				t.Errorf("%q: error %v; want %q", c.values, err, c.fault)
			}
		case err != nil || got != c.want:
			t.Errorf("%q: %+v, %v", c.values, got, err)
		case len(c.values) > 1 && maxSpend(got) != "day=5.00,month=50.50":
			t.Errorf("%q is shown as %q", c.values, maxSpend(got))
		}
	}
}

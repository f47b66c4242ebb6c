package egress

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestConfig: a configuration is read as it is written, within bounds, and a link knows the
// names of its own networks.
func TestConfig(t *testing.T) {
	c := Config{V: 1, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"a.example"}},
		Never:    []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")},
		Networks: map[string]map[string][]netip.Addr{"front": {"web": {netip.MustParseAddr("10.213.0.2")}}, "back": {"db": {netip.MustParseAddr("10.213.0.66")}}},
		Links:    map[string][]string{"web": {"front"}, "db": {"back", "front"}}}
	data, err := c.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Read(data)
	if err != nil {
		t.Fatal(err)
	}
	if h := got.Hosts("web"); len(h) != 1 || len(got.Hosts("db")) != 2 || len(got.Hosts("other")) != 0 || h["web"][0].String() != "10.213.0.2" {
		t.Errorf("hosts of web: %v", h)
	}
	for _, bad := range []string{"", "{}", `{"v":2,"network":{},"links":{}}`, `{"v":1,"links":{},"more":1}`, `{"v":1,"links":{"` + strings.Repeat("x", MaxLen) + `":[]}}`} {
		if _, err := Read([]byte(bad)); err == nil {
			t.Errorf("%.40q was read", bad)
		}
	}
}

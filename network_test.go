package sandboxer_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestParseDestination(t *testing.T) {
	for in, want := range map[string]string{
		"example.org": "", "Example.ORG.": "example.org", "*.example.org:443": "", "db": "", "_dns.example.org": "",
		"192.0.2.1": "", "192.0.2.1:80": "", "192.0.2.0/24": "", "192.0.2.0/24:22": "", "0.0.0.0/0": "", "10.0.0.0/8:5432": "",
		"2001:db8::1": "", "[2001:db8::1]": "2001:db8::1", "[2001:db8::1]:443": "", "2001:db8::/32": "", "[2001:db8::/32]:53": "", "fc00::/7": "",
		"192.0.2.7/32": "192.0.2.7", "xn--bcher-kva.example": "",
	} {
		d, err := sandboxer.ParseDestination(in)
		if want == "" {
			want = in
		}
		if err != nil || d.String() != want {
			t.Errorf("%q is %q, %v; want %q", in, d, err, want)
		}
		if again, err := sandboxer.ParseDestination(d.String()); err != nil || again != d {
			t.Errorf("%q read again is %+v, %v; want %+v", d, again, err, d)
		}
	}
	for _, in := range []string{
		"", ".", "*", "*.", "a..b", "-a.example", "a-.example", "exa mple", "bücher.example", "example.org:", "example.org:0", "example.org:65536",
		"example.org:+1", "*.*.example", "a.*.example", "example.org/24", "10.0.0.1/8", "10.0.0.0/33", "1.2.3", "0x7f.1", "127.1", "2130706433",
		"[192.0.2.1]:80", "[2001:db8::1", "2001:db8::1]", "[2001:db8::1]443", "[2001:db8::1]:", "::ffff:10.0.0.1", "fe80::1%eth0",
		"localhost", "x.localhost", "127.0.0.1", "127.0.0.0/8", "169.254.169.254", "169.254.0.0/16", "168.63.129.16", "100.100.100.200", "::1", "::",
		"fe80::/10", "fd00:ec2::254", "224.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1", "ff02::1", strings.Repeat("a", 64) + ".example",
		strings.Repeat("a.", 127) + "example",
	} {
		if d, err := sandboxer.ParseDestination(in); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%q is %+v, %v; want invalid", in, d, err)
		}
	}
}

func FuzzParseDestination(f *testing.F) {
	for _, s := range []string{"example.org:443", "[2001:db8::/32]:53", "*.x", "10.0.0.0/8", "]:["} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := sandboxer.ParseDestination(s)
		if err != nil {
			return
		}
		if again, err := sandboxer.ParseDestination(d.String()); err != nil || again != d {
			t.Errorf("%q is %+v, read again %+v, %v", s, d, again, err)
		}
		if (d.Name == "") == !d.Prefix.IsValid() {
			t.Errorf("%q is %+v", s, d)
		}
	})
}

func TestAddressRanges(t *testing.T) {
	for class, list := range map[string]string{
		"public":  "1.1.1.1 203.0.113.9 172.15.255.255 172.32.0.1 100.63.0.1 2606:4700::1111 2001:db8::1 2001:1::1",
		"private": "10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 100.64.0.1 198.18.0.1 fc00::1 fd12:3456::1",
		"never": "0.0.0.0 0.1.2.3 127.0.0.1 127.255.255.255 169.254.169.254 168.63.129.16 100.100.100.200 192.0.0.192 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 " +
			":: ::1 ::ffff:10.0.0.1 ::ffff:1.1.1.1 ::7f00:1 64:ff9b::7f00:1 64:ff9b:1::1 100::1 2001::1 2002:7f00:1::1 fe80::1 fec0::1 ff02::1 fd00:ec2::254 fd20:ce::254 " +
			"4000::1 8000::1 d000::1 e000::1 f400::1 fb00::1",
	} {
		for s := range strings.FieldsSeq(list) {
			a := netip.MustParseAddr(s)
			got := map[bool]string{true: "public"}[sandboxer.PublicAddr(a)] + map[bool]string{true: "private"}[sandboxer.PrivateAddr(a)] +
				map[bool]string{true: "never"}[sandboxer.NeverAddr(a)]
			if got != class {
				t.Errorf("%s is %s; want %s", s, got, class)
			}
		}
	}
}

func TestNetworkPolicyWithin(t *testing.T) {
	policy := func(s string) sandboxer.NetworkPolicy {
		mode, list, ok := strings.Cut(s, ":")
		p := sandboxer.NetworkPolicy{Mode: sandboxer.NetworkMode(mode)}
		if ok {
			p.Allow = strings.Split(list, ",")
		}
		return p
	}
	for _, tc := range []struct {
		outer, inner string
		ok           bool
	}{
		{"none", "none", true}, {"none", "", true}, {"", "none", true}, {"none", "public", false}, {"none", "allow:example.org", false},
		{"public", "none", true}, {"public", "public", true}, {"public", "allow:example.org,*.example.org:443,192.0.2.0/24", true},
		{"public", "allow:0.0.0.0/0:443", false}, {"public", "allow:8.0.0.0/8", true}, {"public", "allow:192.0.0.0/8", false}, {"public", "allow:10.0.0.0/8", false}, {"public", "allow:fd12::1", false},
		{"allow:example.org", "public", false}, {"allow:example.org", "none", true},
		{"allow:example.org", "allow:example.org", true}, {"allow:example.org", "allow:EXAMPLE.org:443", true},
		{"allow:example.org:443", "allow:example.org", false}, {"allow:example.org:443", "allow:example.org:80", false},
		{"allow:example.org", "allow:a.example.org", false}, {"allow:example.org", "allow:*.example.org", false},
		{"allow:*.example.org", "allow:a.example.org:80", true}, {"allow:*.example.org", "allow:*.example.org", true},
		{"allow:*.example.org", "allow:*.a.example.org", true}, {"allow:*.example.org", "allow:example.org", false},
		{"allow:*.example.org", "allow:badexample.org", false}, {"allow:*.example.org", "allow:*.org", false},
		{"allow:192.0.2.0/24", "allow:192.0.2.7:80", true}, {"allow:192.0.2.7", "allow:192.0.2.0/24", false},
		{"allow:10.0.0.0/8", "allow:10.1.0.0/16", true}, {"allow:0.0.0.0/0", "allow:10.1.0.0/16", false}, {"allow:0.0.0.0/0", "allow:192.0.2.1", true},
		{"allow:0.0.0.0/0", "allow:example.org", false}, {"allow:example.org", "allow:192.0.2.1", false},
		{"allow:fc00::/7", "allow:[fd12::/16]:80", true}, {"allow:0.0.0.0/0", "allow:2001:db8::1", false},
	} {
		inner, outer := policy(tc.inner), policy(tc.outer)
		for _, p := range []sandboxer.NetworkPolicy{inner, outer} {
			if err := p.Check(); err != nil {
				t.Fatal(err)
			}
		}
		if err := inner.Within(outer); (err == nil) != tc.ok {
			t.Errorf("%q within %q: %v; want %t", tc.inner, tc.outer, err, tc.ok)
		}
	}
	for _, bad := range []string{"allow", "public:example.org", "none:example.org", "some", "allow:localhost", "allow:a b"} {
		if err := policy(bad).Check(); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%q: %v; want invalid", bad, err)
		}
	}
}

func TestDestinationOpens(t *testing.T) {
	for _, tc := range []struct {
		dst, addr string
		want      bool
	}{
		{"0.0.0.0/0", "1.1.1.1", true}, {"0.0.0.0/0", "10.0.0.1", false}, {"0.0.0.0/0", "127.0.0.1", false}, {"10.0.0.0/8", "10.0.0.1", true},
		{"100.64.0.0/10", "100.100.100.200", false}, {"fc00::/7", "fd00:ec2::254", false}, {"fc00::/7", "fd12::1", true},
		{"128.0.0.0/1", "192.168.0.1", false}, {"192.0.2.1", "192.0.2.2", false}, {"::/0", "::1", false}, {"::/0", "2001:db8::1", true},
		{"10.0.0.0/7", "10.0.0.1", false},
	} {
		d, err := sandboxer.ParseDestination(tc.dst)
		if err != nil {
			t.Fatal(err)
		}
		if got := d.Opens(netip.MustParseAddr(tc.addr)); got != tc.want {
			t.Errorf("%s opens %s: %t; want %t", tc.dst, tc.addr, got, tc.want)
		}
	}
}

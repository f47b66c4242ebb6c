package sandboxer

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// A Destination is one entry of NetworkPolicy.Allow. Either Name or Prefix is set.
type Destination struct {
	Name   string       // domain in lower case, without the last dot
	Below  bool         // the names below Name ("*.name") without Name itself
	Prefix netip.Prefix // a single address has its full length
	Port   uint16       // 0 means every port
}

// ParseDestination reads a domain, *.domain, IP address or CIDR, each with an optional :port (an IPv6
// address or CIDR before a port is in brackets). Kind: Invalid, also for a destination that no sandbox
// may reach (NeverAddr).
func ParseDestination(s string) (Destination, error) {
	bad := func(why string) (Destination, error) {
		return Destination{}, E(Invalid, nil, "%q is not a destination: %s", s, why).
			WithHint("write a domain, *.domain, IP address or CIDR, each with an optional :port: example.org:443, [2001:db8::1]:443")
	}
	var d Destination
	host, port := s, ""
	if inner, ok := strings.CutPrefix(s, "["); ok {
		var rest string
		if host, rest, ok = strings.Cut(inner, "]"); !ok || !strings.Contains(host, ":") || rest != "" && rest[0] != ':' {
			return bad("brackets enclose an IPv6 address or CIDR")
		}
		if rest != "" {
			port = cmp.Or(rest[1:], "?")
		}
	} else if _, err := parsePrefix(s); err != nil {
		if i := strings.LastIndexByte(s, ':'); i >= 0 {
			host, port = s[:i], cmp.Or(s[i+1:], "?")
			if strings.Contains(host, ":") {
				return bad("an IPv6 address needs brackets before a port")
			}
		}
	}
	if port != "" {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 || port[0] == '+' {
			return bad("a port is a number from 1 to 65535")
		}
		d.Port = uint16(n)
	}
	p, err := parsePrefix(host)
	if err == nil {
		switch {
		case p.Addr().Zone() != "" || p.Addr().Is4In6():
			return bad("write the address without a zone, and an IPv4 address as one")
		case p != p.Masked():
			return bad("the address has bits outside its mask; the network is " + p.Masked().String())
		case slices.ContainsFunc(ranges().never, func(n netip.Prefix) bool { return within(p, n) }):
			return bad("sandboxes can never reach it: it is this machine, link-local, multicast, a metadata service or not in use")
		}
		d.Prefix = p
		return d, nil
	}
	if strings.Contains(host, "/") {
		return bad("the part before the slash must be an address, and the part after it a length")
	}
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	name, d.Below = strings.CutPrefix(name, "*.")
	if why := checkDomain(name); why != "" {
		return bad(why)
	}
	d.Name = name
	return d, nil
}

func parsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a.WithZone(""), a.BitLen()), zoned(a)
	}
	return netip.ParsePrefix(s)
}

func zoned(a netip.Addr) error {
	if a.Zone() != "" {
		return E(Invalid, nil, "the address has a zone")
	}
	return nil
}

// checkDomain says why name is not a domain, or "". The last label must not be a
// number: some resolvers read such names as addresses.
func checkDomain(name string) string {
	labels := strings.Split(name, ".")
	if name == "" || len(name) > 253 {
		return "a domain has 1 to 253 characters"
	}
	for _, l := range labels {
		ok := len(l) >= 1 && len(l) <= 63 && l[0] != '-' && l[len(l)-1] != '-'
		for _, c := range []byte(l) {
			ok = ok && (c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '_')
		}
		if !ok {
			return "a domain is made of letters, digits, hyphens and dots (others as xn--…)"
		}
	}
	last := labels[len(labels)-1]
	switch {
	case last[0] >= '0' && last[0] <= '9':
		return "a domain does not end in a number"
	case last == "localhost":
		return "localhost is the sandbox itself, which is always reached"
	}
	return ""
}

// String returns d in the form that ParseDestination reads.
func (d Destination) String() string {
	host := d.Name
	switch {
	case d.Below:
		host = "*." + d.Name
	case d.Prefix.IsValid() && d.Prefix.IsSingleIP():
		host = d.Prefix.Addr().String()
	case d.Prefix.IsValid():
		host = d.Prefix.String()
	}
	if d.Port == 0 {
		return host
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return host + ":" + strconv.Itoa(int(d.Port))
}

// Matches reports whether d includes the domain name, which is in lower case and without its last dot.
func (d Destination) Matches(name string) bool {
	switch {
	case d.Name == "":
		return false
	case d.Below:
		return strings.HasSuffix(name, "."+d.Name)
	}
	return name == d.Name
}

// Opens reports whether d, a CIDR or an address, permits a: public addresses in it, and private ones if
// all of d is in one private range. So 0.0.0.0/0 means the internet, and 10.1.0.0/16 means that private
// network.
func (d Destination) Opens(a netip.Addr) bool {
	return d.Prefix.IsValid() && d.Prefix.Contains(a) && (PublicAddr(a) || d.private() && PrivateAddr(a))
}

func (d Destination) private() bool {
	return d.Prefix.IsValid() && slices.ContainsFunc(ranges().private, func(p netip.Prefix) bool { return within(d.Prefix, p) })
}

// public reports whether d contains only the public internet. The code that enforces the
// policy checks what a name leads to.
func (d Destination) public() bool {
	overlaps := func(p netip.Prefix) bool { return d.Prefix.Overlaps(p) }
	return d.Name != "" || !slices.ContainsFunc(ranges().private, overlaps) && !slices.ContainsFunc(ranges().never, overlaps)
}

// covers reports whether d permits everything that e permits.
func (d Destination) covers(e Destination) bool {
	switch {
	case d.Port != 0 && d.Port != e.Port:
		return false
	case d.Name != "":
		return d == (Destination{Name: e.Name, Below: e.Below, Port: d.Port}) || d.Below && (d.Matches(e.Name) || e.Below && e.Name == d.Name)
	}
	return e.Prefix.IsValid() && within(e.Prefix, d.Prefix) && (d.private() || !e.private())
}

// within reports whether inner is a part of outer.
func within(inner, outer netip.Prefix) bool {
	return inner.Bits() >= outer.Bits() && outer.Contains(inner.Addr())
}

// Destinations parses p.Allow. Kind: Invalid.
func (p NetworkPolicy) Destinations() ([]Destination, error) {
	var out []Destination
	for _, s := range p.Allow {
		d, err := ParseDestination(s)
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// MaxDestinations is the largest number of entries of NetworkPolicy.Allow.
const MaxDestinations = 1000

// Check reports what is wrong with p. Kind: Invalid.
func (p NetworkPolicy) Check() error {
	switch p.Mode {
	case "", NetworkNone, NetworkPublic:
		if len(p.Allow) > 0 {
			return E(Invalid, nil, "destinations are listed, but the network mode is %q", cmp.Or(p.Mode, NetworkNone)).WithHint("use the mode allow")
		}
		return nil
	case NetworkAllow:
		switch n := len(p.Allow); {
		case n == 0:
			return E(Invalid, nil, "network allow names nothing to reach").WithHint("use the mode none, or list destinations")
		case n > MaxDestinations:
			return E(Invalid, nil, "%d destinations are too many: want at most %d", n, MaxDestinations)
		}
		_, err := p.Destinations()
		return err
	}
	return E(Invalid, nil, "%q is not a network mode", p.Mode).WithHint("the modes are none, public and allow")
}

// Within returns nil if policy p permits nothing that outer forbids. Otherwise the error, Invalid,
// names a destination that outer forbids. Both must be valid (Check).
func (p NetworkPolicy) Within(outer NetworkPolicy) error {
	wider := func(what string) error {
		return E(Invalid, nil, "network %s is wider than the profile's (%s)", what, cmp.Or(outer.Mode, NetworkNone)).
			WithHint("the network of a sandbox cannot get wider than its profile allows: create another sandbox from a profile with that network")
	}
	switch p.Mode {
	case "", NetworkNone:
		return nil
	case NetworkPublic:
		if outer.Mode != NetworkPublic {
			return wider("public")
		}
		return nil
	}
	have, err := outer.Destinations()
	if err != nil {
		return err
	}
	want, err := p.Destinations()
	if err != nil {
		return err
	}
	for _, w := range want {
		switch {
		case outer.Mode == NetworkPublic && w.public():
		case outer.Mode == NetworkAllow && slices.ContainsFunc(have, func(h Destination) bool { return h.covers(w) }):
		default:
			return wider(strconv.Quote(w.String()))
		}
	}
	return nil
}

// PublicAddr reports whether a is an address of the public internet, as the mode public permits it. It
// excludes loopback, link-local, multicast, private and shared ranges, the metadata services of clouds,
// and IPv6 ranges that lead to an IPv4 address.
func PublicAddr(a netip.Addr) bool { return a.IsValid() && !NeverAddr(a) && !PrivateAddr(a) }

// PrivateAddr reports whether a is private: a sandbox reaches it only if its policy lists the address
// or a part of a private range with it.
func PrivateAddr(a netip.Addr) bool {
	return !NeverAddr(a) && slices.ContainsFunc(ranges().private, func(p netip.Prefix) bool { return p.Contains(a) })
}

// NeverAddr reports whether no policy can permit a. (This machine's own addresses are forbidden too,
// but only the part that enforces the policy knows them.)
func NeverAddr(a netip.Addr) bool {
	return !a.IsValid() || a.Zone() != "" || slices.ContainsFunc(ranges().never, func(p netip.Prefix) bool { return p.Contains(a) })
}

type addrRanges struct{ never, private []netip.Prefix }

var ranges = sync.OnceValue(func() addrRanges {
	parse := func(list ...string) (out []netip.Prefix) {
		for _, s := range list {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	return addrRanges{
		never: parse(
			"0.0.0.0/8",          // this network
			"100.100.100.200/32", // a cloud's metadata
			"127.0.0.0/8",        // loopback
			"168.63.129.16/32",   // a cloud's host agent
			"169.254.0.0/16",     // link-local; metadata
			"192.0.0.0/24",       // protocol assignments; a cloud's metadata
			"224.0.0.0/3",        // multicast, reserved, broadcast
			"::/3",               // loopback, mapped and translated IPv4, nothing else in use
			"2001::/32",          // tunnels to IPv4 (Teredo)
			"2002::/16",          // tunnels to IPv4 (6to4)
			"4000::/2",           // not in use
			"8000::/2",           // not in use
			"c000::/3",           // not in use
			"e000::/4",           // not in use
			"f000::/5",           // not in use
			"f800::/6",           // not in use
			"fd00:ec2::/32",      // a cloud's metadata
			"fd20:ce::254/128",   // a cloud's metadata
			"fe00::/7",           // link-local, site-local, multicast
		),
		private: parse(
			"10.0.0.0/8",
			"100.64.0.0/10", // shared by carriers
			"172.16.0.0/12",
			"192.168.0.0/16",
			"198.18.0.0/15", // benchmarks
			"fc00::/7",      // unique local
		),
	}
})

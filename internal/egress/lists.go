package egress

import (
	"net/netip"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// Prefixes reads a setting that lists IP addresses and CIDRs. Kind: Invalid.
func Prefixes(setting string, list []string) (out []netip.Prefix, err error) {
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if a, aerr := netip.ParseAddr(s); aerr == nil {
			p, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s: %q is not an IP address or CIDR", setting, s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// Resolvers reads a setting that lists DNS servers and returns them as host:port. Kind:
// Invalid.
func Resolvers(setting string, list []string) (out []string, err error) {
	for _, s := range list {
		at, err := netip.ParseAddrPort(s)
		if a, aerr := netip.ParseAddr(strings.Trim(s, "[]")); aerr == nil {
			at, err = netip.AddrPortFrom(a, 53), nil
		}
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s: %q is not an IP address or address:port", setting, s)
		}
		out = append(out, at.String())
	}
	return out, nil
}

//go:build linux

package usernet

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Policy is a checked network policy. The zero Policy lets nothing through.
type Policy struct {
	mode  sandboxer.NetworkMode
	list  []sandboxer.Destination
	never []netip.Prefix
}

// NewPolicy checks p. Addresses in never are unreachable, whatever p says. Kind:
// Invalid.
func NewPolicy(p sandboxer.NetworkPolicy, never []netip.Prefix) (Policy, error) {
	if err := p.Check(); err != nil {
		return Policy{}, err
	}
	list, err := p.Destinations()
	return Policy{mode: p.Mode, list: list, never: never}, err
}

// open reports whether p lets anything through at all.
func (p *Policy) open() bool {
	return p.mode == sandboxer.NetworkPublic || p.mode == sandboxer.NetworkAllow
}

// dials reports whether p lets the sandbox reach to. names are the names by which it may know to.
func (p *Policy) dials(to netip.AddrPort, names []string) bool {
	ip := to.Addr()
	if to.Port() == 0 || p.denied(ip) {
		return false
	}
	switch p.mode {
	case sandboxer.NetworkPublic:
		return sandboxer.PublicAddr(ip)
	case sandboxer.NetworkAllow:
		return slices.ContainsFunc(p.list, func(d sandboxer.Destination) bool {
			if d.Port != 0 && d.Port != to.Port() {
				return false
			}
			return d.Opens(ip) || sandboxer.PublicAddr(ip) && slices.ContainsFunc(names, d.Matches)
		})
	}
	return false
}

func (p *Policy) denied(ip netip.Addr) bool {
	return sandboxer.NeverAddr(ip) || slices.ContainsFunc(p.never, func(n netip.Prefix) bool { return n.Contains(ip) })
}

// resolves reports whether name, in lower case, may be asked for.
func (p *Policy) resolves(name string) bool {
	switch p.mode {
	case sandboxer.NetworkPublic:
		return true
	case sandboxer.NetworkAllow:
		return slices.ContainsFunc(p.list, func(d sandboxer.Destination) bool { return d.Matches(name) })
	}
	return false
}

// tells reports whether an answer may contain ip: only what could be reached.
func (p *Policy) tells(ip netip.Addr) bool {
	return !p.denied(ip) && (sandboxer.PublicAddr(ip) ||
		p.mode == sandboxer.NetworkAllow && slices.ContainsFunc(p.list, func(d sandboxer.Destination) bool { return d.Opens(ip) }))
}

// pins remember for which names the sandbox got an address, and until when.
// Under an allow list of names, only a pinned address is reached: it is the answer
// that this sandbox got here, not what the name means to another resolver.
type pins struct {
	byAddr map[netip.Addr]map[string]time.Time
	count  int
}

// A pin lasts as long as its answer, within these bounds: programs resolve first and
// connect later, and a name's owner must not be able to pin for ever.
const (
	pinLeast = 5 * time.Minute
	pinMost  = time.Hour
	maxPins  = 8192
)

func (p *pins) add(ip netip.Addr, name string, ttl time.Duration, now time.Time) {
	if p.byAddr == nil {
		p.byAddr = map[netip.Addr]map[string]time.Time{}
	}
	names := p.byAddr[ip]
	if _, known := names[name]; !known {
		if p.count >= maxPins {
			p.prune(now)
		}
		if p.count >= maxPins {
			return // reached again when others have expired
		}
		if names = p.byAddr[ip]; names == nil {
			names = map[string]time.Time{}
			p.byAddr[ip] = names
		}
		p.count++
	}
	if until := now.Add(min(max(ttl, pinLeast), pinMost)); until.After(names[name]) {
		names[name] = until
	}
}

func (p *pins) prune(now time.Time) {
	for ip, names := range p.byAddr {
		maps.DeleteFunc(names, func(_ string, until time.Time) bool {
			if until.After(now) {
				return false
			}
			p.count--
			return true
		})
		if len(names) == 0 {
			delete(p.byAddr, ip)
		}
	}
}

// names returns the names under which ip is pinned.
func (p *pins) names(ip netip.Addr, now time.Time) (out []string) {
	for name, until := range p.byAddr[ip] {
		if until.After(now) {
			out = append(out, name)
		}
	}
	return out
}

//go:build linux

package usernet

import (
	"bufio"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"
)

// private are the destinations that are never "the public internet": this machine,
// its neighbours, and what clouds put at fixed addresses.
var private = func() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range []string{
		"0.0.0.0/8",        // this network
		"10.0.0.0/8",       // private
		"100.64.0.0/10",    // shared by carriers; some clouds' metadata
		"127.0.0.0/8",      // loopback
		"169.254.0.0/16",   // link-local; metadata
		"172.16.0.0/12",    // private
		"192.0.0.0/24",     // protocol assignments
		"192.168.0.0/16",   // private
		"198.18.0.0/15",    // benchmarking
		"224.0.0.0/4",      // multicast
		"240.0.0.0/4",      // reserved, broadcast
		"168.63.129.16/32", // a cloud's host agent
	} {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}()

// Public returns the policy of sandboxes with public network: everything but private
// destinations and this machine's own addresses.
func Public() Policy {
	own := &ownAddresses{}
	return func(_ string, to netip.AddrPort) bool {
		ip := to.Addr()
		if !ip.Is4() || to.Port() == 0 {
			return false
		}
		for _, p := range private {
			if p.Contains(ip) {
				return false
			}
		}
		return !own.has(ip)
	}
}

// ownAddresses knows the addresses of this machine's interfaces, which may be public
// ones.
type ownAddresses struct {
	mu   sync.Mutex
	at   time.Time
	list map[netip.Addr]bool
}

const ownAddressesFresh = 5 * time.Second

func (o *ownAddresses) has(ip netip.Addr) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.at) > ownAddressesFresh {
		addrs, err := net.InterfaceAddrs()
		if err != nil {
			return true // unknown: rather refuse
		}
		o.list = map[netip.Addr]bool{}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				o.list[p.Addr().Unmap()] = true
			}
		}
		o.at = time.Now()
	}
	return o.list[ip]
}

// HostResolvers returns this machine's DNS servers as host:port.
func HostResolvers() []string {
	f, err := os.Open("/etc/resolv.conf")
	if err != nil {
		return nil
	}
	defer f.Close()
	var out []string
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		if w := strings.Fields(sc.Text()); len(w) > 1 && w[0] == "nameserver" {
			out = append(out, net.JoinHostPort(w[1], "53"))
		}
	}
	return out
}

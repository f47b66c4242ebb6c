// Package egress has the messages between a broker and the programs that it puts on a host
// about the networks of containers there: sandboxer-egress (package gateway) lets them
// out through a policy, on hosts that have no such thing of their own.
//
// For each sandbox, one gateway runs in the host's own network and holds the policy. Next to it, for
// each service, runs a link: a container whose network the service shares, with a TAP device
// in it as the only way out. The link hands the device to the gateway by way of a Unix
// socket, and is all that has a right over that network. The gateway's own TCP/IP stack (package
// usernet) reads what the services send, decides and dials. Nothing of the
// host's interfaces, routes or firewall changes, and without a gateway there is no way out.
package egress

import (
	"encoding/json"
	"net/netip"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// Names in the containers of the program.
const (
	Dir    = "/run/egress"         // of the socket, shared by the gateway and its links
	Socket = Dir + "/gateway.sock" // the gateway's
	File   = "/etc/egress.json"    // the gateway's Config
	Binary = "/sandboxer-egress"   // the program, the only file of its image
	Build  = "sandboxer-build"     // name of the link that images are built behind
	Prefix = "sandboxer-"          // what names of the gateway and of links begin with
	Name   = Prefix + "gateway"    // of the gateway's service, and of the volume with Dir
	Device = "sbx0"                // a link's TAP device
	MaxLen = 1 << 20               // bytes of a Config
	// User is the user and group of the gateway, which has no rights over anything else.
	User = 65534
	// MaxLinks is how many links one gateway has: one for each service, and one for builds.
	MaxLinks = 128
)

// Guests is the range of the ends of links. No network of a sandbox may have
// an address in it.
var Guests = netip.MustParsePrefix("10.0.2.0/24")

// Config is the configuration of a gateway.
type Config struct {
	V       int                     `json:"v"` // 1
	Network sandboxer.NetworkPolicy `json:"network"`
	Never   []netip.Prefix          `json:"never,omitempty"`     // not reached, whatever Network says
	DNS     []string                `json:"resolvers,omitempty"` // host:port; none means the host's own
	// Networks are names and their addresses, by the network in which they are known.
	Networks map[string]map[string][]netip.Addr `json:"networks,omitempty"`
	Links    map[string][]string                `json:"links"` // the networks that each is in
}

// Read decodes a Config.
func Read(data []byte) (*Config, error) {
	c := &Config{}
	if len(data) > MaxLen {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the configuration of the gateway is longer than %d bytes", MaxLen)
	}
	if err := strictjson.Decode(data, c); err != nil {
		return nil, err
	}
	if c.V != 1 || len(c.Links) > MaxLinks {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the configuration of the gateway is of version %d with %d links; this program knows version 1 with at most %d", c.V, len(c.Links), MaxLinks)
	}
	return c, nil
}

// Hosts are the names that a link knows.
func (c *Config) Hosts(link string) map[string][]netip.Addr {
	out := map[string][]netip.Addr{}
	for _, n := range c.Links[link] {
		for name, addrs := range c.Networks[n] {
			out[name] = append(out[name], addrs...)
		}
	}
	return out
}

// A Message is what a link or a waiting program sends to the gateway, in one packet. The
// answer is one packet as well: "ok", or an error.
type Message struct {
	Link string   `json:"link,omitempty"` // the device that comes with it is of this link
	Wait []string `json:"wait,omitempty"` // answer once all of these have a device
}

// Marshal encodes c.
func (c *Config) Marshal() ([]byte, error) { return json.Marshal(c) }

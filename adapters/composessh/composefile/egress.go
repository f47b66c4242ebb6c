package composefile

import (
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/egress"
)

// Egress makes services reach the outside through a gateway (package egress): next to each
// service runs a link, another service whose network it shares.
type Egress struct {
	Image        string // of the program
	File         string // on the host, with the gateway's Config
	LinkLabel    string // label of a link, with the name of its service
	GatewayLabel string // label of the gateway
	Container    string // what the name of the gateway's container begins with, and that of the link for builds
}

// LinkOf is the name of a service's link.
func LinkOf(service string) string { return egress.Prefix + "link-" + service }

// Linked are the services that have a link: those in a network that the file does not cut off
// from the outside.
func (p *Project) Linked() []string {
	return slices.DeleteFunc(p.networked(), func(name string) bool {
		for n := range p.model.Services[name].Networks {
			if !p.internal[n] {
				return false
			}
		}
		return true
	})
}

// networked are the services with networks of their own.
func (p *Project) networked() (names []string) {
	for _, s := range p.Services {
		if p.model.Services[s.Name].NetworkMode == "" && s.Replicas > 0 {
			names = append(names, s.Name)
		}
	}
	return names
}

// checkEgress refuses what is impossible for services behind links.
func (p *Project) checkEgress(r Rendering) error {
	refuse := func(what, why string) error {
		return sandboxer.E(sandboxer.Unsupported, nil, "%s: %s: %s; this is not possible where a gateway filters the network", p.File, what, why).
			WithHint("change that in the file, or use a profile without a network")
	}
	for _, s := range p.Services {
		switch {
		case strings.HasPrefix(s.Name, egress.Prefix):
			return refuse("services."+s.Name, "names that begin with "+egress.Prefix+" are reserved for the gateway")
		case s.Replicas > 1:
			return refuse("services."+s.Name, fmt.Sprintf("it runs %d times, but can run only once", s.Replicas))
		}
	}
	for _, v := range p.Volumes {
		if strings.HasPrefix(v, egress.Prefix) {
			return refuse("volumes."+v, "names that begin with "+egress.Prefix+" are reserved for the gateway")
		}
	}
	for n, cidr := range r.Subnets {
		if in, err := netip.ParsePrefix(cidr); err == nil && in.Overlaps(egress.Guests) {
			return refuse("networks."+n, fmt.Sprintf("%s contains addresses of %s, which the gateway uses", in, egress.Guests))
		}
	}
	return nil
}

// addresses are the addresses of every service in each of its networks: those that the file fixes, as
// readdressed has them, and for the rest one after the other.
func (p *Project) addresses(r Rendering) map[string]map[string]netip.Addr {
	out := map[string]map[string]netip.Addr{}
	by := p.readdressed(r)
	next := map[string]int{}
	for _, name := range p.networked() {
		out[name] = map[string]netip.Addr{}
		for n, c := range p.model.Services[name].Networks {
			in, err := netip.ParsePrefix(r.Subnets[n])
			if err != nil {
				continue // only planned so far
			}
			if c != nil && c.Ipv4Address != "" {
				out[name][n], _ = netip.ParseAddr(by[c.Ipv4Address])
				continue
			}
			out[name][n] = nth(in, uint32(2+len(p.addrs[n])+next[n])) // the first is the network's own
			next[n]++
		}
	}
	return out
}

// EgressConfig is the configuration, without the policy, of the gateway in the file that Render
// writes. With builds it has a link for builds, too.
func (p *Project) EgressConfig(r Rendering, builds bool) egress.Config {
	cfg := egress.Config{V: 1, Networks: map[string]map[string][]netip.Addr{}, Links: map[string][]string{}}
	know := func(network, name string, a netip.Addr) {
		name = strings.ToLower(strings.TrimSuffix(name, "."))
		if cfg.Networks[network] == nil {
			cfg.Networks[network] = map[string][]netip.Addr{}
		}
		if name != "" && !slices.Contains(cfg.Networks[network][name], a) {
			cfg.Networks[network][name] = append(cfg.Networks[network][name], a)
		}
	}
	addrs := p.addresses(r)
	for _, name := range p.networked() {
		for n, c := range p.model.Services[name].Networks {
			a, ok := addrs[name][n]
			if !ok {
				continue
			}
			know(n, name, a)
			if c != nil {
				for _, alias := range c.Aliases {
					know(n, alias, a)
				}
			}
		}
	}
	for _, name := range p.Linked() {
		s := p.model.Services[name]
		cfg.Links[name] = slices.Collect(maps.Keys(s.Networks))
		// A service may use any name for another one, just as in a network that it alone is in.
		for _, l := range s.Links {
			to, as, ok := strings.Cut(l, ":")
			for n := range s.Networks {
				if a, there := addrs[to][n]; ok && there {
					own := egress.Prefix + name
					know(own, as, a)
					if !slices.Contains(cfg.Links[name], own) {
						cfg.Links[name] = append(cfg.Links[name], own)
					}
				}
			}
		}
		slices.Sort(cfg.Links[name])
	}
	if builds {
		cfg.Links[egress.Build] = []string{}
	}
	return cfg
}

// OwnResolvers are the services that name DNS servers, which are never asked where a gateway
// resolves names.
func (p *Project) OwnResolvers() (names []string) {
	for _, s := range p.Services {
		if len(p.model.Services[s.Name].DNS) > 0 {
			names = append(names, s.Name)
		}
	}
	return names
}

// Bounds of the programs next to the services, which do not belong to the sandbox.
const (
	linkMemory    = 64 << 20
	gatewayMemory = 512 << 20
	helperPids    = 128
)

// behindGateway puts the services behind links, and adds the links and the gateway.
func (p *Project) behindGateway(services, volumes map[string]any, r Rendering) {
	e := r.Egress
	helper := func(label, value string, memory int, command ...string) map[string]any {
		out := map[string]any{
			"image": e.Image, "pull_policy": "never", "command": command, "restart": "on-failure:10", "stop_grace_period": "1s",
			"labels":   labels(types.Labels{label: value}, r.Labels),
			"cap_drop": []string{"ALL"}, "security_opt": []string{"no-new-privileges"},
			"mem_limit": memory, "memswap_limit": memory, "pids_limit": helperPids,
			"logging": map[string]any{"driver": "json-file", "options": map[string]any{"max-size": "1m", "max-file": "1"}},
			"volumes": []any{map[string]any{"type": "volume", "source": egress.Name, "target": egress.Dir}},
		}
		return out
	}
	link := func(name string) map[string]any {
		out := helper(e.LinkLabel, name, linkMemory, "link", name)
		out["cap_add"] = []string{"NET_ADMIN"} // over the network that it shares with the service, which has it not
		out["devices"] = []string{"/dev/net/tun:/dev/net/tun:rw"}
		return out
	}
	gateway := helper(e.GatewayLabel, "yes", gatewayMemory, "gateway")
	gateway["network_mode"] = "host"
	gateway["user"] = fmt.Sprintf("%[1]d:%[1]d", egress.User)
	gateway["read_only"] = true
	gateway["container_name"] = e.Container + "-gateway"
	gateway["volumes"] = append(gateway["volumes"].([]any), map[string]any{"type": "bind", "source": e.File, "target": egress.File, "read_only": true})
	addrs := p.addresses(r)
	linked := p.Linked()
	for _, name := range linked {
		s, l := services[name].(map[string]any), link(name)
		for _, key := range []string{"networks", "ports", "expose", "hostname", "domainname", "extra_hosts", "dns_opt", "dns_search"} {
			if v, ok := s[key]; ok {
				l[key] = v
				delete(s, key)
			}
		}
		delete(s, "dns")
		delete(s, "links")
		for _, v := range l["networks"].(map[string]any) {
			one := v.(map[string]any)
			aliases, _ := one["aliases"].([]string)
			one["aliases"] = append(aliases, name)
		}
		services[LinkOf(name)] = l
	}
	for _, name := range p.networked() {
		s := services[name].(map[string]any)
		if slices.Contains(linked, name) {
			s = services[LinkOf(name)].(map[string]any)
		}
		for n, a := range addrs[name] {
			s["networks"].(map[string]any)[n].(map[string]any)["ipv4_address"] = a.String()
		}
	}
	for _, info := range p.Services {
		s := services[info.Name].(map[string]any)
		peer := info.Name
		for range p.Services { // of one that shares another's, the last of them
			_, next, shares := strings.Cut(p.model.Services[peer].NetworkMode, "service:")
			if !shares {
				break
			}
			peer = next
		}
		if !slices.Contains(linked, peer) {
			continue
		}
		s["network_mode"] = "service:" + LinkOf(peer)
		deps, _ := s["depends_on"].(map[string]any)
		if deps == nil {
			deps = map[string]any{}
			s["depends_on"] = deps
		}
		deps[LinkOf(peer)] = map[string]any{"condition": types.ServiceConditionStarted}
	}
	builds := link(egress.Build)
	builds["network_mode"] = "none"
	builds["container_name"] = e.Container + "-build"
	builds["profiles"] = []string{egress.Build} // started by its name alone
	services[egress.Build], services[egress.Name] = builds, gateway
	volumes[egress.Name] = map[string]any{"labels": labels(nil, r.Labels)}
}

// EgressFile is where the gateway's Config is, below the sandbox's directory.
func EgressFile(dir string) string { return path.Join(dir, "files", "egress.json") }

package composefile

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer/internal/egress"
)

// TestBehindGateway: services with a way out share the network of a link, and have no right
// of a link's and nothing of the gateway's; what is in no such network is as it was.
func TestBehindGateway(t *testing.T) {
	p, err := Load(t.Context(), workspace(t, `
services:
  web: {image: x, hostname: h, dns: [192.0.2.1], links: ["db:database"], extra_hosts: ["a:192.0.2.2"], ports: ["80"], networks: {front: {aliases: [www]}}}
  db: {image: x, networks: {front: {ipv4_address: 172.16.0.9}, back: {}}}
  side: {image: x, network_mode: "service:more"}
  more: {image: x, network_mode: "service:web"}
  shut: {image: x, networks: [back]}
  alone: {image: x, network_mode: none}
networks:
  front: {ipam: {config: [{subnet: 172.16.0.0/24}]}}
  back: {internal: true}
`), Options{})
	if err != nil {
		t.Fatal(err)
	}
	r := Rendering{Dir: "/srv/s", Labels: map[string]string{"name": "s"}, Subnets: map[string]string{"front": "10.213.0.0/26", "back": "10.213.0.64/26"},
		Egress: &Egress{Image: "sha256:1", File: EgressFile("/srv/s"), LinkLabel: "link", GatewayLabel: "gateway", Container: "s"}}
	services := render(t, p, r)["services"].(map[string]any)
	at := func(service, key string) any { return services[service].(map[string]any)[key] }
	for _, c := range []struct{ service, key, want string }{
		{"web", "network_mode", "service:sandboxer-link-web"}, {"side", "network_mode", "service:sandboxer-link-web"}, {"more", "network_mode", "service:sandboxer-link-web"},
		{"db", "network_mode", "service:sandboxer-link-db"}, {"shut", "network_mode", "<nil>"}, {"alone", "network_mode", "none"}, {egress.Name, "network_mode", "host"},
		{"web", "networks", "<nil>"}, {"web", "hostname", "<nil>"}, {"web", "dns", "<nil>"}, {"web", "links", "<nil>"}, {"web", "ports", "<nil>"}, {"web", "extra_hosts", "<nil>"},
		{"sandboxer-link-web", "hostname", "h"}, {"sandboxer-link-web", "dns", "<nil>"}, {"sandboxer-link-web", "ports", "[127.0.0.1::80/tcp]"}, {"sandboxer-link-web", "extra_hosts", "[a:192.0.2.2]"},
		{"sandboxer-link-web", "networks", "map[front:map[aliases:[www web] ipv4_address:10.213.0.3]]"},
		{"sandboxer-link-db", "networks", "map[back:map[aliases:[db] ipv4_address:10.213.0.66] front:map[aliases:[db] ipv4_address:10.213.0.2]]"},
		{"shut", "networks", "map[back:map[ipv4_address:10.213.0.67]]"},
		{"web", "depends_on", "map[sandboxer-link-web:map[condition:service_started]]"},
		{"sandboxer-link-web", "cap_add", "[NET_ADMIN]"}, {"sandboxer-link-web", "cap_drop", "[ALL]"},
		{egress.Name, "cap_add", "<nil>"}, {egress.Name, "cap_drop", "[ALL]"}, {egress.Name, "user", "65534:65534"}, {egress.Name, "read_only", "true"},
		{egress.Build, "profiles", "[sandboxer-build]"}, {egress.Build, "network_mode", "none"},
	} {
		if got := fmt.Sprint(at(c.service, c.key)); got != c.want {
			t.Errorf("%s.%s: %s; want %s", c.service, c.key, got, c.want)
		}
	}
	for name := range services {
		own := strings.HasPrefix(name, egress.Prefix)
		if got := at(name, "cap_add") != nil || at(name, "devices") != nil || strings.Contains(fmt.Sprint(at(name, "volumes")), egress.Name); got != own {
			t.Errorf("%s has something of the gateway's: %t", name, got)
		}
	}
	cfg := p.EgressConfig(r, true)
	for link, want := range map[string]string{
		"web":        "map[database:[10.213.0.2] db:[10.213.0.2] web:[10.213.0.3] www:[10.213.0.3]]",
		"db":         "map[db:[10.213.0.66 10.213.0.2] shut:[10.213.0.67] web:[10.213.0.3] www:[10.213.0.3]]",
		egress.Build: "map[]",
	} {
		if got := fmt.Sprint(cfg.Hosts(link)); got != want {
			t.Errorf("%s knows %s; want %s", link, got, want)
		}
	}
	if len(cfg.Links) != 3 {
		t.Errorf("links %v", cfg.Links)
	}
	if got := fmt.Sprint(p.OwnResolvers()); got != "[web]" {
		t.Errorf("services with resolvers of their own: %s", got)
	}
}

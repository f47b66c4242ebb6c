package composessh

import (
	"context"
	"net"
	"slices"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// Dial implements sandboxer.Dialer. A port that the file publishes is the one inside;
// any other belongs to the default service.
func (e *extension) Dial(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
	ho, m, s, err := e.findRunning(ctx, h)
	if err != nil {
		return nil, err
	}
	service, target := m.target(port)
	i := slices.IndexFunc(s.containers, func(c engine.Container) bool { return c.Service() == service && c.State.Running })
	if i < 0 {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "nothing listens on port %d of the service %s", target, service)
	}
	c := &s.containers[i]
	return ho.engine.Dial(ctx, engine.Endpoint{Container: c, Network: s.network(c), Port: target, Name: "the service " + service})
}

// target says which port of which service is meant: one that the file publishes under
// that number, one that a service publishes as its own, or one of the default service.
func (m *meta) target(port int) (service string, target int) {
	services := slices.Clone(m.Services)
	slices.SortStableFunc(services, func(a, b composefile.Service) int {
		switch {
		case a.Name == m.Service && b.Name != m.Service:
			return -1
		case b.Name == m.Service && a.Name != m.Service:
			return 1
		}
		return 0
	})
	for _, s := range services {
		for _, p := range s.Ports {
			if p.Protocol == "tcp" && p.Published == port {
				return s.Name, p.Target
			}
		}
	}
	for _, s := range services {
		for _, p := range s.Ports {
			if p.Protocol == "tcp" && p.Target == port {
				return s.Name, port
			}
		}
	}
	return m.Service, port
}

// ListPorts implements sandboxer.PortLister: those of all services, by the numbers that Dial
// knows them by.
func (e *extension) ListPorts(ctx context.Context, h sandboxer.Handle) ([]int, error) {
	ho, m, s, err := e.findRunning(ctx, h)
	if err != nil {
		return nil, err
	}
	listeners, err := ho.engine.Listeners(ctx, s.containers)
	if err != nil {
		return nil, err
	}
	open := map[string]map[int]bool{} // ports that listen, by service
	numbers := map[int]bool{}         // those that may lead to one
	for _, c := range s.containers {
		name := c.Service()
		if open[name] == nil {
			open[name] = map[int]bool{}
		}
		for _, l := range listeners[c.ID] {
			open[name][l.Port] = true
			numbers[l.Port] = numbers[l.Port] || name == m.Service
		}
	}
	for _, s := range m.Services {
		for _, p := range s.Ports {
			numbers[p.Target], numbers[p.Published] = true, true
		}
	}
	var ports []int
	for n, may := range numbers {
		if name, target := m.target(n); may && n > 0 && open[name][target] {
			ports = append(ports, n)
		}
	}
	return ports, nil
}

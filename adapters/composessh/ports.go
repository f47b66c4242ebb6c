package composessh

import (
	"context"
	"net"
	"slices"

	"github.com/sand-boxer/sandboxer"
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
	to := engine.Endpoint{Container: c, Network: s.network(c), Port: target, Name: "the service " + service}
	if service == m.Service && m.Agent != "" {
		to.Inside = func(ctx context.Context) (net.Conn, error) { return e.dialByAgent(ctx, ho, m, c.ID, target) }
	}
	return ho.engine.Dial(ctx, to)
}

// target returns the service and the port that are meant: a port that the file publishes under
// that number, one that a service publishes as its own, or one of the default service.
func (m *meta) target(port int) (service string, target int) {
	for _, published := range []bool{true, false} {
		for _, name := range m.names() {
			s := m.service(name)
			for i := 0; s != nil && i < len(s.Ports); i++ {
				if p := s.Ports[i]; p.Protocol == "tcp" && (published && p.Published == port || !published && p.Target == port) {
					return name, p.Target
				}
			}
		}
	}
	return m.Service, port
}

// ListPorts implements sandboxer.PortLister: the ports of all services, by the numbers that Dial
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
	type port struct {
		service string
		number  int
	}
	open := map[port]bool{}   // those that listen
	numbers := map[int]bool{} // those that may lead to one
	for _, c := range s.containers {
		for _, l := range listeners[c.ID] {
			open[port{c.Service(), l.Port}] = true
			numbers[l.Port] = numbers[l.Port] || c.Service() == m.Service
		}
	}
	for _, s := range m.Services {
		for _, p := range s.Ports {
			numbers[p.Target], numbers[p.Published] = true, true
		}
	}
	var ports []int
	for n, may := range numbers {
		if name, target := m.target(n); may && n > 0 && open[port{name, target}] {
			ports = append(ports, n)
		}
	}
	return ports, nil
}

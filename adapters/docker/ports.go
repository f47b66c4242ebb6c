package docker

import (
	"context"
	"net"
	"strconv"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// ports are a sandbox's named ports, each with the address by which the broker's machine reaches it, if
// there is one: that of a container on the engine's network, on this machine. Dial reaches all of them,
// even without an address.
func (e *extension) ports(ctx context.Context, b *box) ([]sandboxer.Port, error) {
	var all []sandboxer.Port
	for _, p := range b.made.Ports {
		all = append(all, sandboxer.Port{Port: p})
	}
	if len(all) == 0 || b.host.socket == "" || b.made.Mode != string(sandboxer.NetworkPublic) {
		return all, nil
	}
	info, err := b.host.look(ctx)
	if err != nil {
		return nil, err
	}
	if info.Rootless {
		return all, nil // a rootless engine's networks belong to its account
	}
	c, err := b.host.api.InspectContainer(ctx, b.container)
	if err != nil {
		return nil, err
	}
	p, err := b.host.here(c)
	if err != nil {
		return all, nil
	}
	p.Close()
	if ip := networkAddress(c); ip != "" {
		for i := range all {
			all[i].Addr = net.JoinHostPort(ip, strconv.Itoa(all[i].Port))
		}
	}
	return all, nil
}

// networkAddress is the address of a container in its network, "" without.
func networkAddress(c engine.ContainerDetail) string {
	for _, n := range c.NetworkSettings.Networks { // there is only one
		if n.IPAddress != "" {
			return n.IPAddress
		}
		if n.GlobalIPv6Address != "" {
			return n.GlobalIPv6Address
		}
	}
	return ""
}

//go:build linux

package local

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

// networked reports whether p needs a link out of the sandbox.
func networked(p sandboxer.NetworkPolicy) bool {
	return p.Mode != "" && p.Mode != sandboxer.NetworkNone
}

// policy prepares p for enforcement.
func (e *extension) policy(p sandboxer.NetworkPolicy) (usernet.Policy, error) {
	never, err := e.cfg.never()
	if err != nil {
		return usernet.Policy{}, err
	}
	return usernet.NewPolicy(p, never)
}

// link makes a network link for the sandbox called name that enforces p.
func (e *extension) link(name string, p sandboxer.NetworkPolicy) (*usernet.Net, error) {
	opts, err := e.linkOptions(name, p)
	if err != nil {
		return nil, err
	}
	return usernet.New(opts)
}

func (e *extension) linkOptions(name string, p sandboxer.NetworkPolicy) (usernet.Options, error) {
	policy, err := e.policy(p)
	resolvers := e.resolvers
	if list := e.cfg.DNS; len(list) > 0 {
		resolvers = func() []string { return list }
	}
	return usernet.Options{Policy: policy, Resolvers: resolvers, Path: e.dir("box", name, "link")}, err
}

// linked reports whether a running sandbox has a link, or should have one. A link that is
// currently unused also needs its other end: that end is what refuses at once.
func (r record) linked() bool { return networked(r.Network) || r.Link != 0 }

// reconnect reconnects sandboxes of an earlier broker process to the network. Open
// connections are lost, as with any change of network. It does not wait for sandboxes that do
// not answer; they get it when they do.
func (e *extension) reconnect() error {
	names, err := e.recorded()
	if err != nil {
		return err
	}
	var all sync.WaitGroup
	for _, name := range names {
		if rec, err := e.record(name); err == nil && rec.linked() {
			all.Add(1)
			e.aside(func() {
				defer all.Done()
				e.reconnectOne(name)
			})
		}
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(pulseEvery):
	}
	return nil
}

// replug is reconnect for a sandbox that responds again.
func (e *extension) replug(name string) {
	if rec, err := e.record(name); err == nil && rec.linked() {
		e.aside(func() { e.reconnectOne(name) })
	}
}

// reconnectOne gives a sandbox its network if it should have one and has none.
func (e *extension) reconnectOne(name string) {
	err := func() error {
		unlock, err := e.lock(e.ctx, name)
		if err != nil {
			return err
		}
		defer unlock()
		b, err := e.hold(name)
		if err != nil {
			return err
		}
		rec, err := e.record(name)
		if err != nil {
			return err
		}
		b.mu.Lock()
		has := b.net != nil
		b.mu.Unlock()
		if has || !rec.linked() {
			return nil
		}
		return e.connect(e.ctx, b, rec)
	}()
	if err != nil && !errors.Is(err, sandboxer.NotFound) && e.ctx.Err() == nil {
		e.warn("a sandbox has no network", fmt.Errorf("sandbox %s: %w", name, err))
	}
}

// connect gives a running sandbox its network with the policy in rec, which it records
// first.
func (e *extension) connect(ctx context.Context, b *liveSandbox, rec record) error {
	if rec.Link == 0 { // it never had a link, or an older build's, which ended with that build
		return e.plugIn(ctx, b, rec)
	}
	err := e.writeRecord(b.name, rec)
	if err != nil {
		return err
	}
	if err = e.takeLink(b, rec); err == nil || !networked(rec.Network) {
		return err
	}
	e.warn("the network link of a sandbox cannot be reused; it gets a new one", fmt.Errorf("sandbox %s: %w", b.name, err))
	return e.plugIn(ctx, b, rec)
}

// takeLink makes this process the other end of a sandbox's link from an earlier process.
// Another interface would take forty descriptors of the sandbox, which its kernel never
// releases; and the kernel would have to answer for that.
func (e *extension) takeLink(b *liveSandbox, rec record) error {
	opts, err := e.linkOptions(b.name, rec.Network)
	if err != nil {
		return err
	}
	guest, err := b.socket(rec.Link)
	if err != nil {
		return err
	}
	defer unix.Close(guest)
	n, err := usernet.Take(opts, guest)
	if err != nil {
		return err
	}
	b.connected(n)
	return nil
}

// socket returns a descriptor of the socket with that inode number in the sandbox's kernel.
// It is no os.File: Go could make it blocking, and the kernel would then wait for it.
func (b *liveSandbox) socket(inode uint64) (fd int, err error) {
	process, err := unix.PidfdOpen(b.pid, 0)
	if err != nil {
		return -1, os.NewSyscallError("pidfd_open", err)
	}
	defer unix.Close(process)
	if !b.alive() { // so the number was not reused before
		return -1, errors.New("the sandbox ended")
	}
	dir := fmt.Sprintf("/proc/%d/fd", b.pid)
	open, err := os.ReadDir(dir)
	if err != nil {
		return -1, err
	}
	want := fmt.Sprintf("socket:[%d]", inode)
	for _, d := range open {
		if to, err := os.Readlink(filepath.Join(dir, d.Name())); err != nil || to != want {
			continue
		}
		theirs, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		fd, err := unix.PidfdGetfd(process, theirs, 0)
		if err != nil {
			return -1, os.NewSyscallError("pidfd_getfd", err)
		}
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Ino == inode && st.Mode&unix.S_IFMT == unix.S_IFSOCK {
			return fd, nil
		}
		unix.Close(fd)
	}
	return -1, errors.New("the sandbox's kernel closed it")
}

// connected replaces the link of b.
func (b *liveSandbox) connected(n *usernet.Net) {
	b.mu.Lock()
	old := b.net
	b.net = n
	b.mu.Unlock()
	if old != nil {
		old.Close()
	}
}

// plugIn gives a running sandbox a new link with the policy in rec, which it records
// first.
func (e *extension) plugIn(ctx context.Context, b *liveSandbox, rec record) error {
	n, err := e.link(b.name, rec.Network)
	if err != nil {
		return err
	}
	rec.Link = n.Inode()
	rec.Plugs++
	if err = e.writeRecord(b.name, rec); err == nil {
		err = b.plug(ctx, n.Guest(), fmt.Sprintf("eth%d", rec.Plugs))
	}
	n.CloseGuest()
	if err != nil {
		n.Close()
		return err
	}
	b.connected(n)
	return nil
}

// SetNetwork implements sandboxer.Networker. The next process of the broker enforces the
// record; so it is never wider than the policy in force and the requested one: a narrower
// policy is written before, a failed one is reverted.
func (e *extension) SetNetwork(ctx context.Context, h sandboxer.Handle, p sandboxer.NetworkPolicy) error {
	policy, err := e.policy(p)
	if err != nil {
		return err
	}
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return err
	}
	defer unlock()
	name := b.name
	rec, err := e.record(name)
	if err != nil {
		return err
	}
	b.mu.Lock()
	link := b.net
	b.mu.Unlock()
	former := rec
	rec.Network = p
	if link == nil && networked(p) {
		if err = e.connect(ctx, b, rec); err == nil {
			return nil
		}
		// The number of the interface is used up, whether it was made or not.
		former.Plugs = rec.Plugs + 1
		return errors.Join(sandboxer.E(sandboxer.Unavailable, err, "the sandbox's network could not be made"), e.writeRecord(name, former))
	}
	if err := e.writeRecord(name, rec); err != nil {
		return diskError(err, "writing the sandbox's record")
	}
	if link != nil {
		link.SetPolicy(policy)
	}
	return nil
}

// interfaces describes the sandbox's interfaces to gVisor: loopback, and, if link is not
// nil, an Ethernet interface of that name on it.
func interfaces(link *os.File, name string) *boot.CreateLinksAndRoutesArgs {
	// Loopback must be requested: without it there is no 127.0.0.1.
	args := &boot.CreateLinksAndRoutesArgs{LoopbackLinks: []boot.LoopbackLink{boot.DefaultLoopbackLink}}
	if link == nil {
		return args
	}
	route := func(p netip.Prefix) net.IPNet {
		return net.IPNet{IP: p.Masked().Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	}
	args.FilePayload = urpc.FilePayload{Files: []*os.File{link}}
	args.FDBasedLinks = []boot.FDBasedLink{{
		Name: name, MTU: usernet.MTU, NumChannels: 1, LinkAddress: usernet.GuestMAC, QDisc: config.QDiscFIFO,
		Addresses:         []boot.IPWithPrefix{{Address: usernet.Guest.AsSlice(), PrefixLen: 24}, {Address: usernet.Guest6.AsSlice(), PrefixLen: 64}},
		Routes:            []boot.Route{{Destination: route(netip.PrefixFrom(usernet.Guest, 24))}, {Destination: route(netip.PrefixFrom(usernet.Guest6, 64))}},
		Neighbors:         []boot.Neighbor{{IP: usernet.Gateway.AsSlice(), HardwareAddr: usernet.GatewayMAC}, {IP: usernet.Gateway6.AsSlice(), HardwareAddr: usernet.GatewayMAC}},
		TXChecksumOffload: true, RXChecksumOffload: true,
	}}
	args.Defaultv4Gateway = boot.DefaultRoute{Name: name, Route: boot.Route{
		Destination: route(netip.PrefixFrom(netip.IPv4Unspecified(), 0)), Gateway: usernet.Gateway.AsSlice()}}
	args.Defaultv6Gateway = boot.DefaultRoute{Name: name, Route: boot.Route{
		Destination: route(netip.PrefixFrom(netip.IPv6Unspecified(), 0)), Gateway: usernet.Gateway6.AsSlice()}}
	return args
}

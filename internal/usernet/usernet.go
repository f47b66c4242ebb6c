//go:build linux

// Package usernet is the other end of a sandbox's network: one end of a socket pair
// is the sandbox's eth0, or a TAP device is, and the other feeds a TCP/IP stack in this
// process, which dials its connections again from here. Therefore
// Go code (Policy) decides what a sandbox may reach, the same for root and ordinary users, without
// touching this machine's interfaces, routes or firewall. Names are resolved here
// too, at the gateway's address, so that a policy may consist of names.
//
// Every sandbox has the same addresses, so that copies of one need no renumbering.
package usernet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/sand-boxer/sandboxer/internal/halfclose"
)

// Addresses on every sandbox's link. Gateway also answers DNS.
var (
	Guest    = netip.MustParseAddr("10.0.2.100")
	Gateway  = netip.MustParseAddr("10.0.2.2")
	Guest6   = netip.MustParseAddr("fd53:4258::100")
	Gateway6 = netip.MustParseAddr("fd53:4258::2")
)

// Hardware addresses of the two ends.
var (
	GuestMAC   = net.HardwareAddr{2, 0, 0, 0, 0, 100}
	GatewayMAC = net.HardwareAddr{2, 0, 0, 0, 0, 2}
)

// MTU is the largest packet on a link, in bytes without its Ethernet header.
const MTU = 65520

const (
	nic = 1

	// The receive window bounds the data under way to us. Without it the link
	// drops packets under load and uploads fall to a tenth.
	rootWindow  = 2 << 20
	userWindow  = 128 << 10 // where the socket's buffer cannot be forced
	firstWindow = 256 << 10
	sendBuffer  = 1 << 20
	maxPending  = 1024 // connections being opened
	maxFlows    = 4096 // connections and datagram flows: each takes a descriptor of the broker's
	dialLimit   = 10 * time.Second
	udpIdle     = 60 * time.Second
)

// Options configure a Net.
type Options struct {
	Policy Policy
	// Resolvers returns the DNS servers (host:port) that the gateway asks. They are not
	// subject to Policy: the sandbox never addresses them itself. nil means none.
	Resolvers func() []string
	// Hosts are names whose addresses the gateway knows, in lower case and without a
	// dot at the end. It answers for them whatever Policy says, and for their addresses
	// (PTR); this link does not lead to those addresses.
	Hosts map[string][]netip.Addr
	// Path is the name of the sandbox's end in the file system, in a directory of the
	// broker's own; an existing file is replaced. Take needs it.
	Path string
}

// Net is the broker's end of one sandbox's link.
type Net struct {
	opts     Options
	stack    *stack.Stack
	link     *linkEndpoint
	guest    *os.File // nil once it is the sandbox's alone
	inode    uint64   // of the socket that guest is
	ctx      context.Context
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	dnsSlots chan struct{}
	own      func(netip.Addr) bool // this machine's addresses

	mu     sync.Mutex
	closed bool
	policy Policy
	pins   pins
	flows  map[*flow]struct{}
}

// A flow is one connection, or the datagrams between two ports, that was admitted.
type flow struct {
	to     netip.AddrPort
	dns    bool     // to the gateway's resolver
	names  []string // under which the sandbox knew the address
	ctx    context.Context
	cancel context.CancelFunc
}

// New makes a link. Guest returns the sandbox's end.
//
// The ends are datagram sockets: one that loses its other end stays usable, and can
// get another (Take).
func New(opts Options) (_ *Net, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("making the network link: %w", err)
	}
	guest, host := os.NewFile(uintptr(fds[0]), "sandbox-link"), os.NewFile(uintptr(fds[1]), "link")
	defer func() {
		if err != nil {
			guest.Close()
		}
	}()
	widen(fds[0])
	window := widen(fds[1])
	var st unix.Stat_t
	err = unix.Fstat(fds[0], &st)
	if err == nil && opts.Path != "" {
		err = bind(fds[0], opts.Path)
	}
	if err == nil {
		// The sandbox's end goes to a process that expects to block on it.
		err = unix.SetNonblock(fds[0], false)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making the network link: %w", err), host.Close())
	}
	conn, err := packets(host)
	if err != nil {
		return nil, err
	}
	return open(opts, guest, conn, st.Ino, window)
}

// OnDevice serves a TAP device (IFF_TAP and IFF_NO_PI, without offloads), whose own end has
// the address Guest, the hardware address GuestMAC and its way out by Gateway. n owns the device
// then, also after an error.
func OnDevice(opts Options, tap *os.File) (n *Net, err error) {
	// The device has its own queue, and packets that it does not take are sent again.
	return open(opts, nil, tap, 0, userWindow)
}

// Take makes the other end of a link that lost its own with a former process of the
// broker, or still has it there: the sandbox only notices that its connections are
// gone. guest is the sandbox's end, a descriptor that stays the caller's, and opts.Path its
// name.
func Take(opts Options, guest int) (*Net, error) {
	var st unix.Stat_t
	if err := unix.Fstat(guest, &st); err != nil {
		return nil, fmt.Errorf("looking at the network link: %w", err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("making an end of the network link: %w", err)
	}
	host := os.NewFile(uintptr(fd), "link")
	window := widen(fd)
	own := opts.Path + ".new" // both have to connect to each other, and need a name for that
	err = bind(fd, own)
	if err == nil {
		// The sandbox's end first: while it has another peer it refuses this one.
		err = errors.Join(connect(guest, own), os.Remove(own))
	}
	if err == nil {
		err = connect(fd, opts.Path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("taking up the network link: %w", err), host.Close())
	}
	conn, err := packets(host)
	if err != nil {
		return nil, err
	}
	return open(opts, nil, conn, st.Ino, window)
}

// packets is what a socket carries. The file is closed.
func packets(f *os.File) (net.Conn, error) {
	defer f.Close()
	return net.FileConn(f)
}

// open serves the other end of a link.
func open(opts Options, guest *os.File, conn io.ReadWriteCloser, inode uint64, window int) (*Net, error) {
	_, device := conn.(*os.File)
	if opts.Resolvers == nil {
		opts.Resolvers = func() []string { return nil }
	}
	s := stack.New(stack.Options{
		// Without ARP the peer's hardware address stays zero.
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	n := &Net{
		opts: opts, policy: opts.Policy, own: OwnAddr, stack: s, guest: guest, inode: inode,
		link:     newLinkEndpoint(conn, MTU+header.EthernetMinimumSize, tcpip.LinkAddress(GatewayMAC), device),
		dnsSlots: make(chan struct{}, dnsPending), flows: map[*flow]struct{}{},
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	if err := n.configure(window); err != nil {
		n.Close()
		return nil, err
	}
	n.link.start() // a sandbox whose link is taken up may be sending already
	return n, nil
}

// widen enlarges the buffer of an end of a link, and returns how much of a stream may be under way.
func widen(fd int) (window int) {
	window = rootWindow
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4<<20); err != nil {
		window = userWindow
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	return window
}

// bind gives a socket the name path, even if another had it.
func bind(fd int, path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return named(path, func(a unix.Sockaddr) error { return os.NewSyscallError("bind", unix.Bind(fd, a)) })
}

func connect(fd int, path string) error {
	return named(path, func(a unix.Sockaddr) error { return os.NewSyscallError("connect", unix.Connect(fd, a)) })
}

// named calls f with the address of path, which may be longer than addresses are.
func named(path string, f func(unix.Sockaddr) error) error {
	dir, err := os.OpenFile(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	return f(&unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))})
}

func (n *Net) configure(window int) error {
	s := n.stack
	sack := tcpip.TCPSACKEnabled(true)
	// Buffers grow only with what is read: connections whose other side reads nothing use
	// little of the broker's memory.
	rcv := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: min(window, firstWindow), Max: window}
	moderate := tcpip.TCPModerateReceiveBufferOption(true)
	snd := tcpip.TCPSendBufferSizeRangeOption{Min: 4096, Default: sendBuffer, Max: 8 * sendBuffer}
	for _, err := range []tcpip.Error{
		s.SetTransportProtocolOption(tcp.ProtocolNumber, &sack),
		s.SetTransportProtocolOption(tcp.ProtocolNumber, &rcv),
		s.SetTransportProtocolOption(tcp.ProtocolNumber, &moderate),
		s.SetTransportProtocolOption(tcp.ProtocolNumber, &snd),
		s.CreateNIC(nic, ethernet.New(n.link)),
		s.AddProtocolAddress(nic, tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber,
			AddressWithPrefix: tcpip.AddressWithPrefix{Address: addr(Gateway), PrefixLen: 24}}, stack.AddressProperties{}),
		s.AddProtocolAddress(nic, tcpip.ProtocolAddress{Protocol: ipv6.ProtocolNumber,
			AddressWithPrefix: tcpip.AddressWithPrefix{Address: addr(Gateway6), PrefixLen: 64}}, stack.AddressProperties{}),
		s.SetPromiscuousMode(nic, true), // take what is meant for any address
		s.SetSpoofing(nic, true),        // and answer as that address
		s.AddStaticNeighbor(nic, ipv4.ProtocolNumber, addr(Guest), tcpip.LinkAddress(GuestMAC)),
		s.AddStaticNeighbor(nic, ipv6.ProtocolNumber, addr(Guest6), tcpip.LinkAddress(GuestMAC)),
	} {
		if err != nil {
			return fmt.Errorf("setting up the network stack: %s", err)
		}
	}
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}, {Destination: header.IPv6EmptySubnet, NIC: nic}})
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(s, 0, maxPending, n.forwardTCP).HandlePacket)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, udp.NewForwarder(s, n.forwardUDP).HandlePacket)
	return nil
}

// Guest returns the sandbox's end of a link that is new. It stays n's; CloseGuest closes
// our copy once the sandbox has its own.
func (n *Net) Guest() *os.File { return n.guest }

// Inode is the number of the socket that is the sandbox's end. It identifies the end among
// all that the sandbox has open.
func (n *Net) Inode() uint64 { return n.inode }

// CloseGuest closes this process's copy of the sandbox's end.
func (n *Net) CloseGuest() { n.guest.Close() }

// Close cuts the link and every connection over it, and waits for them to end.
func (n *Net) Close() {
	n.mu.Lock()
	done := n.closed
	n.closed = true
	n.mu.Unlock()
	if done {
		return
	}
	n.cancel()
	n.guest.Close()
	n.link.Close()
	n.wg.Wait()
	n.stack.RemoveNIC(nic)
	n.stack.Close()
	n.stack.Wait()
}

// SetPolicy changes what the sandbox may reach, from the next packet on. Connections
// that p does not let through are cut before it returns.
func (n *Net) SetPolicy(p Policy) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.policy = p
	for f := range n.flows {
		if !n.lets(f) {
			f.cancel()
		}
	}
}

// lets reports whether the policy lets f through, as far as it concerns the address.
// The caller holds n.mu.
func (n *Net) lets(f *flow) bool {
	if f.dns {
		return n.policy.open()
	}
	return n.policy.dials(f.to, f.names)
}

// admit returns the flow to the local end of id, if it is let through. It is counted
// until it is released, and Close waits for that.
func (n *Net) admit(id stack.TransportEndpointID) *flow {
	ip, ok := netip.AddrFromSlice(id.LocalAddress.AsSlice())
	if !ok {
		return nil
	}
	f := &flow{to: netip.AddrPortFrom(ip.Unmap(), id.LocalPort)}
	gateway := f.to.Addr() == Gateway || f.to.Addr() == Gateway6
	f.dns = gateway && f.to.Port() == dnsPort
	n.mu.Lock()
	defer n.mu.Unlock()
	if !f.dns {
		f.names = n.pins.names(f.to.Addr(), time.Now())
	}
	if n.closed || gateway && !f.dns || len(n.flows) >= maxFlows || !n.lets(f) {
		return nil
	}
	f.ctx, f.cancel = context.WithCancel(n.ctx)
	n.flows[f] = struct{}{}
	n.wg.Add(1)
	return f
}

func (n *Net) release(f *flow) {
	f.cancel()
	n.mu.Lock()
	delete(n.flows, f)
	n.mu.Unlock()
	n.wg.Done()
}

var errOwn = errors.New("an address of this machine")

// dial connects to the destination of f. The policy has checked the address that is dialled:
// there is no name left to resolve differently.
func (n *Net) dial(network string, f *flow) (net.Conn, error) {
	if n.own(f.to.Addr()) {
		return nil, errOwn
	}
	d := net.Dialer{Timeout: dialLimit}
	return d.DialContext(f.ctx, network, f.to.String())
}

func (n *Net) forwardTCP(r *tcp.ForwarderRequest) {
	f := n.admit(r.ID())
	if f == nil {
		r.Complete(true) // a reset: the sandbox sees "connection refused" at once
		return
	}
	go func() {
		defer n.release(f)
		var out net.Conn
		if !f.dns {
			var err error
			if out, err = n.dial("tcp", f); err != nil {
				r.Complete(true)
				return
			}
			defer out.Close()
		}
		var wq waiter.Queue
		ep, terr := r.CreateEndpoint(&wq)
		if terr != nil {
			r.Complete(true)
			return
		}
		r.Complete(false)
		// A cut connection did not end: the sandbox sees a reset.
		n.carry(f, gonet.NewTCPConn(&wq, ep), out, 0, ep.Abort)
	}()
}

func (n *Net) forwardUDP(r *udp.ForwarderRequest) bool {
	f := n.admit(r.ID())
	if f == nil {
		return false // answered with "port unreachable"
	}
	if !f.dns && n.own(f.to.Addr()) {
		n.release(f)
		return false
	}
	var wq waiter.Queue
	ep, terr := r.CreateEndpoint(&wq)
	if terr != nil {
		n.release(f)
		return true
	}
	go func() {
		defer n.release(f)
		in := gonet.NewUDPConn(&wq, ep)
		defer in.Close()
		var out net.Conn
		if !f.dns {
			var err error
			if out, err = n.dial("udp", f); err != nil {
				return
			}
			defer out.Close()
		}
		n.carry(f, in, out, udpIdle, nil)
	}()
	return true
}

// carry serves an admitted flow: by the resolver, or by copying to and from out until
// both sides ended, one of them fails, nothing moved for idle (if not 0), or the flow
// is cut, with abort if it is a stream.
func (n *Net) carry(f *flow, in, out net.Conn, idle time.Duration, abort func()) {
	defer in.Close()
	defer context.AfterFunc(f.ctx, func() {
		if abort != nil {
			abort()
		}
		in.Close()
		if out != nil {
			out.Close()
		}
	})()
	if f.dns {
		n.serveDNS(f.ctx, in, abort != nil)
		return
	}
	done := make(chan struct{})
	go func() { defer close(done); pipe(in, out, idle) }()
	pipe(out, in, idle)
	<-done
}

func pipe(dst, src net.Conn, idle time.Duration) {
	buf := make([]byte, 16<<10) // most connections say little
	if idle > 0 {
		buf = make([]byte, 64<<10) // a datagram is not read in parts
	}
	for {
		if idle > 0 {
			_ = src.SetReadDeadline(time.Now().Add(idle))
		}
		k, err := src.Read(buf)
		if k > 0 {
			if _, werr := dst.Write(buf[:k]); werr != nil {
				src.Close()
				return
			}
		}
		if err == nil {
			if k == len(buf) && k < 128<<10 && idle == 0 {
				buf = make([]byte, 128<<10)
			}
			continue
		}
		if !errors.Is(err, io.EOF) || errors.Is(halfclose.CloseWrite(dst), errors.ErrUnsupported) {
			dst.Close()
		}
		return
	}
}

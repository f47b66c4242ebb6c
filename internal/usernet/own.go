//go:build linux

package usernet

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// OwnAddr reports whether ip leads to this machine itself, or to all of a network at
// once. The kernel's routing table knows, even for addresses that no interface has.
// If it cannot be found out, the address counts as own.
func OwnAddr(ip netip.Addr) bool {
	kind, err := routeKind(ip)
	if err == nil {
		return kind == unix.RTN_LOCAL || kind == unix.RTN_BROADCAST || kind == unix.RTN_ANYCAST || kind == unix.RTN_MULTICAST
	}
	var errno syscall.Errno
	if e, ok := err.(*os.SyscallError); ok {
		errno, _ = e.Err.(syscall.Errno)
	}
	if errno == unix.ENETUNREACH || errno == unix.EHOSTUNREACH || errno == unix.EACCES || errno == unix.EINVAL {
		return false // there is no way to it: dialling will say so
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return true
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err != nil || p.Addr().Unmap() == ip {
			return true
		}
	}
	return false
}

// Public returns whether a connection that any caller asks for may go to an address: to a public one that is neither this
// machine's own nor in never.
func Public(never []netip.Prefix) func(netip.Addr) bool {
	return func(a netip.Addr) bool {
		return sandboxer.PublicAddr(a) && !OwnAddr(a) && !slices.ContainsFunc(never, func(p netip.Prefix) bool { return p.Contains(a) })
	}
}

// routeKind asks the kernel what kind of route leads to ip (RTN_…).
func routeKind(ip netip.Addr) (byte, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	family := byte(unix.AF_INET)
	if ip.Is6() {
		family = unix.AF_INET6
	}
	addr := ip.AsSlice()
	msg := make([]byte, unix.SizeofNlMsghdr+unix.SizeofRtMsg+unix.SizeofRtAttr+len(addr))
	hdr := (*unix.NlMsghdr)(unsafe.Pointer(&msg[0]))
	hdr.Len, hdr.Type, hdr.Flags, hdr.Seq = uint32(len(msg)), unix.RTM_GETROUTE, unix.NLM_F_REQUEST, 1
	msg[unix.SizeofNlMsghdr] = family
	msg[unix.SizeofNlMsghdr+1] = byte(ip.BitLen()) // length of the destination
	attr := msg[unix.SizeofNlMsghdr+unix.SizeofRtMsg:]
	binary.NativeEndian.PutUint16(attr, uint16(unix.SizeofRtAttr+len(addr)))
	binary.NativeEndian.PutUint16(attr[2:], unix.RTA_DST)
	copy(attr[unix.SizeofRtAttr:], addr)
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1})
	if err := unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, os.NewSyscallError("sendto", err)
	}
	buf := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, buf, 0)
	for err == unix.EINTR { // with a time limit, the kernel does not resume it
		n, _, err = unix.Recvfrom(fd, buf, 0)
	}
	if err != nil {
		return 0, os.NewSyscallError("recvfrom", err)
	}
	if n < unix.SizeofNlMsghdr+4 {
		return 0, fmt.Errorf("an answer of %d bytes", n)
	}
	switch (*unix.NlMsghdr)(unsafe.Pointer(&buf[0])).Type {
	case unix.NLMSG_ERROR:
		code := int32(binary.NativeEndian.Uint32(buf[unix.SizeofNlMsghdr:]))
		return 0, os.NewSyscallError("RTM_GETROUTE", syscall.Errno(-code))
	case unix.RTM_NEWROUTE:
		if n >= unix.SizeofNlMsghdr+unix.SizeofRtMsg {
			return buf[unix.SizeofNlMsghdr+7], nil // rtm_type
		}
	}
	return 0, fmt.Errorf("an answer that is no route")
}

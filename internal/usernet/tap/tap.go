//go:build linux

// Package tap makes the TAP devices for links of package usernet (usernet.OnDevice), in
// the network of a container: the device is the only way out of it.
package tap

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/namespaces"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

// In makes a device in another network than this program's, in place of one of that name: a process that had that one
// can neither send nor receive any more. netns is open on the network's namespace. Entering it takes CAP_SYS_ADMIN, and changing it
// CAP_NET_ADMIN. The file is ready for usernet.OnDevice.
func In(netns *os.File, name string) (*os.File, error) {
	fd := -1
	err := namespaces.InNetwork(netns, func() (err error) {
		if err = remove(name); err == nil {
			fd, err = Make(name)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "tap"), nil
}

func remove(name string) error {
	dev, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err == nil {
		err = netlink.LinkDel(dev)
	}
	if err != nil {
		return fmt.Errorf("removing the former device %s: %w", name, err)
	}
	return nil
}

// Make makes a device in the network that the calling thread is in, and returns it as a descriptor: an os.File would have the poller of this process wake up for what
// another process reads. The device exists as long as a process has it open: containers that
// share the network keep the device when its reader ends, and only then can send nothing.
func Make(name string) (fd int, err error) {
	fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("opening /dev/net/tun, which the host has to have for this: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	req, err := unix.NewIfreq(name)
	if err != nil {
		return -1, err
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return -1, fmt.Errorf("making the device %s: %w", name, err)
	}
	if err := setUp(name); err != nil {
		return -1, fmt.Errorf("setting up the device %s: %w", name, err)
	}
	return fd, nil
}

func setUp(name string) error {
	dev, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	index := dev.Attrs().Index
	guest := &net.IPNet{IP: usernet.Guest.AsSlice(), Mask: net.CIDRMask(24, 32)}
	for _, err := range []error{
		netlink.LinkSetHardwareAddr(dev, usernet.GuestMAC),
		netlink.LinkSetMTU(dev, usernet.MTU),
		netlink.AddrReplace(dev, &netlink.Addr{IPNet: guest}),
		netlink.LinkSetUp(dev),
		netlink.NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: usernet.Gateway.AsSlice(), HardwareAddr: usernet.GatewayMAC}),
		netlink.RouteReplace(&netlink.Route{LinkIndex: index, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Gw: usernet.Gateway.AsSlice()}),
	} {
		if err != nil {
			return err
		}
	}
	return nil
}

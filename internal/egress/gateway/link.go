//go:build linux

package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/egress"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

// runLink makes the device of a link in this network, has the way out and the names of whoever
// shares it lead there, and hands it to the gateway, and to the next one when that is gone.
func runLink(ctx context.Context, name string) error {
	device, err := makeDevice()
	if err != nil {
		return err
	}
	defer unix.Close(device)
	if err := resolveBy("/etc/resolv.conf"); err != nil {
		return err
	}
	for ctx.Err() == nil {
		c, err := connect(ctx)
		if err != nil {
			return err
		}
		stop := context.AfterFunc(ctx, func() { c.Close() })
		if err = ask(c, egress.Message{Link: name}, device); err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		stop()
		c.Close()
		if ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, "sandboxer-egress: the gateway is gone:", err)
		}
	}
	return nil
}

// makeDevice makes the TAP device and returns it as a descriptor, since it is never read here:
// an os.File would have the poller of this process wake up for what the gateway reads. It is there as long as somebody has it open: whoever
// shares the network keeps the device when the gateway ends, and only then can send nothing.
func makeDevice() (fd int, err error) {
	fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("opening /dev/net/tun, which the host has to have for this: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	req, err := unix.NewIfreq(egress.Device)
	if err != nil {
		return -1, err
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return -1, fmt.Errorf("making the device %s: %w", egress.Device, err)
	}
	if err := setUp(); err != nil {
		return -1, fmt.Errorf("setting up the device %s: %w", egress.Device, err)
	}
	return fd, nil
}

func setUp() error {
	dev, err := netlink.LinkByName(egress.Device)
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

// resolveBy has a resolver's configuration name the gateway instead of the servers in it. The
// file is written in place: whoever shares it has it mounted.
func resolveBy(file string) error {
	old, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	text := []byte("nameserver " + usernet.Gateway.String() + "\n")
	for line := range bytes.Lines(old) {
		if f := bytes.Fields(line); len(f) > 0 && !bytes.Equal(f[0], []byte("nameserver")) && !bytes.HasPrefix(f[0], []byte("#")) {
			text = append(append(text, bytes.TrimSpace(line)...), '\n')
		}
	}
	return os.WriteFile(file, text, 0o644)
}

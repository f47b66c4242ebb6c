//go:build linux

// Package gateway is sandboxer-egress; see package egress.
package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/egress"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

const usage = `usage: sandboxer-egress COMMAND

sandboxer starts it in containers of a host; there is no need to run it by hand.

  gateway          serve the devices of links as the configuration says
  link NAME        make the device of a link and hand it to the gateway
  wait NAME...     wait until the gateway serves these links
`

// maxProcs is how many processors it uses. Its container's limit of processes counts threads, and
// Go ends a program that gets none: busy guests must not cause that.
const maxProcs = 16

// Main runs the program and returns its exit status.
func Main(args []string) int {
	runtime.GOMAXPROCS(min(runtime.GOMAXPROCS(0), maxProcs))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	var err error
	switch {
	case len(args) == 1 && args[0] == "gateway":
		err = serveFile(ctx)
	case len(args) == 2 && args[0] == "link":
		err = runLink(ctx, args[1])
	case len(args) > 1 && args[0] == "wait":
		err = wait(ctx, args[1:])
	default:
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	if err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "sandboxer-egress:", err)
		return 1
	}
	return 0
}

func serveFile(ctx context.Context) error {
	data, err := os.ReadFile(egress.File)
	if err != nil {
		return err
	}
	cfg, err := egress.Read(data)
	if err != nil {
		return err
	}
	return Serve(ctx, cfg, egress.Socket)
}

const (
	hello    = 10 * time.Second // for a first message
	maxWords = 64 << 10         // bytes of a message
)

type gateway struct {
	cfg       *egress.Config
	policy    usernet.Policy
	resolvers func() []string

	mu      sync.Mutex
	nets    map[string]*usernet.Net
	changed chan struct{} // closed and replaced when nets changes
}

// Serve is the gateway at a socket, until ctx ends.
func Serve(ctx context.Context, cfg *egress.Config, socket string) error {
	policy, err := usernet.NewPolicy(cfg.Network, cfg.Never)
	if err != nil {
		return err
	}
	g := &gateway{cfg: cfg, policy: policy, resolvers: usernet.HostResolvers(), nets: map[string]*usernet.Net{}, changed: make(chan struct{})}
	if len(cfg.DNS) > 0 {
		g.resolvers = func() []string { return cfg.DNS }
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) { // a former gateway's
		return err
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { l.Close() })()
	if err := os.Chmod(socket, 0o666); err != nil { // links are of other users; the directory is theirs and the gateway's alone
		l.Close()
		return err
	}
	var all sync.WaitGroup
	defer all.Wait()
	slots := make(chan struct{}, 2*egress.MaxLinks)
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		select {
		case slots <- struct{}{}:
		default:
			c.Close()
			continue
		}
		all.Go(func() {
			defer func() { <-slots }()
			defer c.Close()
			defer context.AfterFunc(ctx, func() { c.Close() })()
			if err := g.talk(ctx, c); err != nil && ctx.Err() == nil {
				fmt.Fprintln(os.Stderr, "sandboxer-egress:", err)
				_, _ = c.Write([]byte(err.Error()))
			}
		})
	}
}

// talk serves a link, or a program that waits for one, as long as the connection lasts.
func (g *gateway) talk(ctx context.Context, c *net.UnixConn) error {
	_ = c.SetDeadline(time.Now().Add(hello))
	m, device, err := receive(c)
	if err != nil {
		return err
	}
	_ = c.SetDeadline(time.Time{})
	if len(m.Wait) > 0 {
		if device != nil {
			device.Close()
		}
		return g.await(ctx, c, m.Wait)
	}
	if _, known := g.cfg.Links[m.Link]; !known || device == nil {
		if device != nil {
			device.Close()
		}
		return fmt.Errorf("no link is called %.100q, or its device is missing", m.Link)
	}
	n, err := usernet.OnDevice(usernet.Options{Policy: g.policy, Resolvers: g.resolvers, Hosts: g.cfg.Hosts(m.Link)}, device)
	if err != nil {
		return err
	}
	g.put(m.Link, n)
	defer func() {
		g.mu.Lock()
		if g.nets[m.Link] == n {
			delete(g.nets, m.Link)
		}
		g.mu.Unlock()
		n.Close()
	}()
	if _, err := c.Write([]byte("ok")); err != nil {
		return err
	}
	_, _ = c.Read(make([]byte, 1)) // nothing more comes before its end
	return nil
}

// put makes n the net of a link.
func (g *gateway) put(link string, n *usernet.Net) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.nets[link] = n
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *gateway) await(ctx context.Context, c *net.UnixConn, links []string) error {
	gone := make(chan struct{})
	go func() { defer close(gone); _, _ = c.Read(make([]byte, 1)) }()
	defer func() { c.Close(); <-gone }()
	for {
		g.mu.Lock()
		ready := !slices.ContainsFunc(links, func(l string) bool { return g.nets[l] == nil })
		changed := g.changed
		g.mu.Unlock()
		if ready {
			_, err := c.Write([]byte("ok"))
			return err
		}
		select {
		case <-changed:
		case <-gone:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// receive takes one message and the device that may come with it.
func receive(c *net.UnixConn) (m egress.Message, device *os.File, err error) {
	buf, oob := make([]byte, maxWords), make([]byte, unix.CmsgSpace(4*4))
	n, k, flags, _, err := c.ReadMsgUnix(buf, oob)
	if err != nil {
		return m, nil, err
	}
	files, err := filesOf(oob[:k])
	if len(files) > 0 {
		device = files[0]
	}
	switch {
	case err != nil:
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || len(files) > 1:
		err = errors.New("a message that is too long")
	default:
		err = strictjson.Decode(buf[:n], &m)
	}
	if err != nil {
		for _, f := range files {
			f.Close()
		}
		return m, nil, err
	}
	return m, device, nil
}

// filesOf are the descriptors of a control message.
func filesOf(oob []byte) (files []*os.File, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	list, err := unix.ParseSocketControlMessage(oob)
	for _, m := range list {
		fds, ferr := unix.ParseUnixRights(&m)
		err = errors.Join(err, ferr)
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			err = errors.Join(err, unix.SetNonblock(fd, true))
			files = append(files, os.NewFile(uintptr(fd), "device"))
		}
	}
	return files, err
}

// wait asks the gateway until it serves the links.
func wait(ctx context.Context, links []string) error {
	c, err := connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	return ask(c, egress.Message{Wait: links}, -1)
}

// retry is the time between two attempts to find a gateway.
const retry = 20 * time.Millisecond

// connect returns a connection to the gateway, once there is one.
func connect(ctx context.Context) (*net.UnixConn, error) {
	for {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: egress.Socket, Net: "unixpacket"})
		if err == nil {
			return c, nil
		}
		select {
		case <-time.After(retry):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// ask sends a message, with the descriptor of a device if that is not negative, and waits for
// the answer.
func ask(c *net.UnixConn, m egress.Message, device int) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	var oob []byte
	if device >= 0 {
		oob = unix.UnixRights(device)
	}
	if _, _, err := c.WriteMsgUnix(data, oob, nil); err != nil {
		return err
	}
	buf := make([]byte, 4096)
	n, err := c.Read(buf)
	if err == nil && string(buf[:n]) != "ok" {
		err = fmt.Errorf("the gateway says: %s", buf[:n])
	}
	return err
}

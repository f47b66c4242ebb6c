package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
)

func newCmdPort(f *factory) *cobra.Command {
	return newGroup("port", "Ports inside a sandbox", []string{"ports"}, newCmdPortLs(f), newCmdPortOpen(f), newCmdPortClose(f),
		newCmdPortURL(f), newCmdPortRevoke(f), newCmdPortForward(f))
}

func newCmdPortLs(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "ls ID", Aliases: []string{"list"}, Short: "List ports: declared, listening, or open at the port proxy", Args: wants(1, 1, "one sandbox"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			return listed(cmd.Context(), f, portView(), func(ctx context.Context, s *session) (*api.List[api.SandboxPort], error) {
				l, err := s.Ports(ctx, args[0])
				if err == nil && len(l.Items) > 0 && l.Items[0].Unseen != "" {
					fmt.Fprintf(f.io.err, "%s it cannot be seen which ports have a listener: %s\n", f.io.paint("33", "warning:"), clean(l.Items[0].Unseen))
				}
				return l, err
			})
		},
	}
}

func portView() view[*api.SandboxPort] {
	return view[*api.SandboxPort]{
		cols: []string{"PORT", "LISTENS", "DECLARED", "OPEN", "URL"},
		wide: []string{"BACKEND"},
		row: func(p *api.SandboxPort) []string {
			listens := "?"
			if p.Listening != nil {
				listens = yesNo(*p.Listening)
			}
			return []string{fmt.Sprint(p.Port), listens, yesNo(p.Declared), yesNo(p.Open), p.Proxy, strings.TrimSpace(p.Addr + " " + p.URL)}
		},
		name: func(p *api.SandboxPort) string { return fmt.Sprint(p.Port) },
	}
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

type portOptions struct {
	refOptions
	port int
	ttl  time.Duration
}

func portArg(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, invalid("%q is not a port", s).WithHint("write a number from 1 to 65535")
	}
	return int(n), nil
}

// newCmdPortDo is a command on one port of a sandbox.
func newCmdPortDo(f *factory, use, short, long string, run func(context.Context, *session, *portOptions) error) (*cobra.Command, *portOptions) {
	o := &portOptions{refOptions: refOptions{f: f}}
	return &cobra.Command{
		Use: use + " ID PORT", Short: short, Long: long, Args: wants(2, 2, "a sandbox and a port"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			o.ref = args[0]
			if o.port, err = portArg(args[1]); err != nil {
				return err
			}
			s, err := f.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer s.close()
			return run(cmd.Context(), s, o)
		},
	}, o
}

func newCmdPortOpen(f *factory) *cobra.Command {
	c, _ := newCmdPortDo(f, "open", "Open a port at the port proxy",
		"Open a port of the sandbox at the server's port proxy and print its address. It stays open until it is closed or the sandbox ends.\n"+
			"Visitors need an API key, or a signed URL (port url). For a port on this machine, see port forward.", portOpenRun)
	return c
}

func portOpenRun(ctx context.Context, s *session, o *portOptions) error {
	p, err := s.OpenPort(ctx, o.ref, o.port)
	if err != nil {
		return err
	}
	if format := o.f.format(); format == "table" || format == "wide" {
		if p.Proxy == "" {
			o.f.progress().note("port %d is open; the server listens on no TCP address, which browsers need: sandboxer down; sandboxer up --listen 127.0.0.1:8080", o.port)
			return nil
		}
		fmt.Fprintln(o.f.io.out, p.Proxy)
		return nil
	}
	return printOne(o.f, p, portView())
}

func newCmdPortClose(f *factory) *cobra.Command {
	c, _ := newCmdPortDo(f, "close", "Close a port at the port proxy and revoke its signed URLs",
		"", func(ctx context.Context, s *session, o *portOptions) error { return s.ClosePort(ctx, o.ref, o.port) })
	return c
}

func newCmdPortRevoke(f *factory) *cobra.Command {
	c, _ := newCmdPortDo(f, "revoke", "Revoke the signed URLs of a port, which stays open",
		"", func(ctx context.Context, s *session, o *portOptions) error { return s.RevokePort(ctx, o.ref, o.port) })
	return c
}

func newCmdPortURL(f *factory) *cobra.Command {
	c, o := newCmdPortDo(f, "url", "Print a signed URL of an open port",
		"Print a signed URL. Anyone who has it may use the port until it expires, is revoked (port revoke, port close), or the\nsandbox ends.", portURLRun)
	o.ttl = time.Hour
	c.Flags().Var((*durationFlag)(&o.ttl), "ttl", "validity of the URL: a `DURATION`, at most 7d")
	return c
}

func portURLRun(ctx context.Context, s *session, o *portOptions) error {
	u, err := s.SignPort(ctx, o.ref, o.port, o.ttl)
	if err != nil {
		return err
	}
	if format := o.f.format(); format == "table" || format == "wide" {
		fmt.Fprintln(o.f.io.out, u.URL)
		return nil
	}
	return printOne(o.f, u, view[*api.PortURL]{name: func(u *api.PortURL) string { return u.URL }})
}

type portForwardOptions struct {
	refOptions
	address string
	pairs   [][2]int // local (0: any free one), remote
}

func newCmdPortForward(f *factory) *cobra.Command {
	o := &portForwardOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "forward ID [LOCAL:]REMOTE…", Short: "Make ports of a sandbox reachable on this machine until interrupted",
		Args: wants(2, -1, "a sandbox and ports"), ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			for _, a := range args[1:] {
				local, remote, both := strings.Cut(a, ":")
				if !both {
					remote = local
				}
				l, lerr := strconv.ParseUint(local, 10, 16)
				r, rerr := strconv.ParseUint(remote, 10, 16)
				if lerr != nil || rerr != nil || r == 0 {
					return invalid("%q is not [LOCAL:]REMOTE", a).WithHint("write for example 8080, 9000:8080 or 0:8080")
				}
				o.pairs = append(o.pairs, [2]int{int(l), int(r)})
			}
			return portForwardRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.address, "address", "127.0.0.1", "local `ADDRESS` to listen on")
	return c
}

func portForwardRun(ctx context.Context, o *portForwardOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	sb, err := s.Get(ctx, o.ref)
	if err != nil {
		return err
	}
	if sb.State != sandboxer.Running {
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s, not running", sb.ID, sb.State)
	}
	p := o.f.progress()
	var listeners []net.Listener
	defer func() {
		for _, l := range listeners {
			l.Close()
		}
	}()
	for _, pair := range o.pairs {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(o.address, strconv.Itoa(pair[0])))
		if err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "cannot listen on port %d", pair[0]).WithHint("choose another: 0:%d takes any free one", pair[1])
		}
		listeners = append(listeners, l)
	}
	// Callers read the addresses from stdout: with port 0 they cannot know them.
	for i, l := range listeners {
		fmt.Fprintf(o.f.io.out, "%s -> %s:%d\n", l.Addr(), sb.ID, o.pairs[i][1])
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		for _, l := range listeners {
			l.Close()
		}
	})
	defer stop()
	var wg sync.WaitGroup
	for i, l := range listeners {
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				wg.Go(func() {
					if err := relay(ctx, s.Client, refOf(sb), o.pairs[i][1], c); err != nil && ctx.Err() == nil {
						p.note("port %d: %s", o.pairs[i][1], sentence(err))
					}
				})
			}
		})
	}
	wg.Wait()
	return nil
}

// relay carries one connection to a port of the sandbox and back.
func relay(ctx context.Context, c *api.Client, id string, port int, here net.Conn) error {
	defer here.Close()
	there, err := c.Dial(ctx, id, port)
	if err != nil {
		return err
	}
	defer there.Close()
	stop := context.AfterFunc(ctx, func() {
		here.Close()
		there.Close()
	})
	defer stop()
	done := make(chan error, 2)
	pump := func(dst, src net.Conn) {
		_, err := io.Copy(dst, src)
		_ = halfclose.CloseWrite(dst)
		done <- err
	}
	go pump(there, here)
	go pump(here, there)
	err = errors.Join(<-done, <-done)
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// guestOptions say how a command inside a sandbox is attached to this terminal.
type guestOptions struct {
	env              envFlags
	user, dir        string
	service          string
	interactive, tty bool

	cmd sandboxer.Cmd // what the flags ask for (build); without streams
}

func (g *guestOptions) register(c *cobra.Command, withEnv bool) {
	fl := c.Flags()
	if withEnv {
		g.env.bind(fl)
	}
	fl.StringVarP(&g.user, "user", "u", "", "`USER` name or uid[:gid] inside")
	fl.StringVar(&g.service, "service", "", "`NAME` of the compose service to run in (default: the sandbox's default service)")
	fl.StringVarP(&g.dir, "workdir", "w", "", "absolute `DIR` inside; default: the workspace")
	fl.BoolVarP(&g.interactive, "interactive", "i", false, "pass stdin to the command (default: yes)")
	fl.BoolVarP(&g.tty, "tty", "t", false, "give the command a terminal (default: when stdin and stdout are one)")
}

// settle reads the flags that depend on the terminal.
func (g *guestOptions) settle(f *factory, c *cobra.Command) {
	if !c.Flags().Changed("interactive") {
		g.interactive = true
	}
	if !c.Flags().Changed("tty") {
		g.tty = f.io.inTTY && f.io.outTTY && g.interactive
	}
}

// build makes the command of the flags and args, once, after settle.
func (g *guestOptions) build(f *factory, args []string) error {
	if g.dir != "" && !strings.HasPrefix(g.dir, "/") {
		return invalid("--workdir: %q is not an absolute path", g.dir)
	}
	env, err := g.env.read(f.env)
	if err != nil {
		return err
	}
	for _, name := range terminalEnv {
		v := f.getenv(name)
		if _, ok := env[name]; !g.tty || v == "" || ok {
			continue
		}
		if env == nil {
			env = map[string]string{}
		}
		env[name] = v
	}
	g.cmd = sandboxer.Cmd{Args: args, Env: env, Dir: g.dir, User: g.user, Service: g.service}
	return nil
}

// execIn runs the command of g in the sandbox, attached to this process's streams, and returns
// its exit code. Signals sent to this process go to the command; the third interrupt
// kills it.
func execIn(ctx context.Context, f *factory, s *session, ref string, g guestOptions) (int, error) {
	cmd := g.cmd
	cmd.Stdout, cmd.Stderr = f.io.stdout, f.io.stderr
	if g.interactive {
		cmd.Stdin = f.io.in
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	restore := func() {}
	if g.tty {
		size := sandboxer.WinSize{Cols: 80, Rows: 24}
		if s, ok := f.io.size(); ok {
			size = s
		}
		cmd.TTY = &size
		resize := make(chan sandboxer.WinSize, 1)
		cmd.Resize = resize
		winch := make(chan os.Signal, 1)
		signal.Notify(winch, syscall.SIGWINCH)
		defer signal.Stop(winch)
		go func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-winch:
					if s, ok := f.io.size(); ok {
						select {
						case resize <- s:
						case <-ctx.Done():
							return
						}
					}
				}
			}
		}()
		if f.io.inTTY && g.interactive {
			old, err := term.MakeRaw(int(f.io.in.Fd()))
			if err != nil {
				return 0, sandboxer.E(sandboxer.Unavailable, err, "the command cannot use this terminal")
			}
			restore = sync.OnceFunc(func() { _ = term.Restore(int(f.io.in.Fd()), old) })
		}
	}
	defer restore()

	got := make(chan os.Signal, 8)
	signal.Notify(got, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	defer signal.Stop(got)
	signals := make(chan os.Signal, 8)
	cmd.Signals = signals
	go func() {
		for interrupts := 0; ; {
			select {
			case <-ctx.Done():
				return
			case sig := <-got:
				if sig == os.Interrupt {
					if interrupts++; interrupts == 3 {
						cancel()
						return
					}
				}
				select {
				case signals <- sig:
				case <-ctx.Done():
					return
				}
			}
		}
	}()

	exit, err := s.Exec(ctx, ref, cmd)
	restore()
	if err != nil {
		return 0, lostSandbox(s, ref, err)
	}
	if exit.OOMKilled {
		fmt.Fprintf(f.io.err, "sandboxer: killed for its use of memory%s\n", whyOOM(s, ref))
	} else if exit.Signal == "KILL" && f.format() != "json" {
		fmt.Fprintf(f.io.err, "sandboxer: the command was killed (signal KILL)%s\n", whyKilled(s, ref))
	}
	return exit.Code, nil
}

// lostSandbox explains a command that was cut off because its sandbox ended.
func lostSandbox(s *session, ref string, err error) error {
	if errors.Is(err, sandboxer.Invalid) || errors.Is(err, sandboxer.Canceled) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	sb, gerr := s.Get(ctx, ref)
	if gerr != nil || sb.State != sandboxer.Terminated && sb.State != sandboxer.Terminating || errors.Is(err, sandboxer.Conflict) {
		return err
	}
	return sandboxer.E(sandboxer.Failed, err, "the command broke off: sandbox %s is %s (%s)", sb.ID, sb.State, sb.Reason)
}

// whyKilled describes why a command was killed, as far as that is known.
func whyKilled(s *session, ref string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	sb, err := s.Get(ctx, ref)
	switch {
	case err != nil:
		return ""
	case sb.State != sandboxer.Running && sb.Reason == sandboxer.ReasonOOMKilled: // the kill came from the end of its sandbox
		return fmt.Sprintf(" for its use of memory; sandbox %s is %s (%s)", sb.ID, sb.State, sb.Reason)
	case sb.State != sandboxer.Running:
		return fmt.Sprintf(": sandbox %s is %s (%s)", sb.ID, sb.State, sb.Reason)
	case sb.Limits.MemoryBytes > 0:
		return "; out of memory is one cause: the limit is " + size(sb.Limits.MemoryBytes)
	}
	return ""
}

// whyOOM names the limit that was exceeded and the state of the sandbox. After such a kill the broker
// probes the sandbox, which takes it a moment.
func whyOOM(s *session, ref string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	var sb *api.Sandbox
	for try := range 10 {
		if try > 0 {
			time.Sleep(50 * time.Millisecond)
		}
		var err error
		if sb, err = s.Get(ctx, ref); err != nil {
			return ""
		}
		if sb.State != sandboxer.Running {
			break
		}
	}
	text := ""
	if sb.Limits.MemoryBytes > 0 {
		text = "; the limit is " + size(sb.Limits.MemoryBytes)
	}
	if sb.State != sandboxer.Running {
		text += fmt.Sprintf("; sandbox %s is %s (%s)", sb.ID, sb.State, sb.Reason)
	}
	return text
}

type execOptions struct {
	refOptions
	guestOptions
}

func newCmdExec(f *factory, run func(context.Context, *execOptions) error) *cobra.Command {
	o := &execOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use:   "exec ID [flags] -- CMD…",
		Short: "Run a command in a sandbox",
		Long: "Run a command in a sandbox, with your stdin, stdout and stderr, and exit with its exit code. 125 means that\n" +
			"sandboxer itself failed, 126 and 127 that the command cannot be executed or does not exist, 128+n signal n.\n" +
			"137 with a line on stderr about memory means that the sandbox's memory limit killed it.",
		Example:           "  sandboxer exec 7k2m -- make test\n  tar c . | sandboxer exec 7k2m -- tar x",
		Annotations:       map[string]string{guestCommand: "yes", ownSignals: "yes"},
		Args:              wants(2, -1, "a sandbox and a command: sandboxer exec ID -- CMD…"),
		ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			o.settle(f, cmd)
			if err := o.build(f, args[1:]); err != nil {
				return err
			}
			return run(cmd.Context(), o)
		},
	}
	o.register(c, true)
	return c
}

func execRun(ctx context.Context, o *execOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	code, err := execIn(ctx, o.f, s, o.ref, o.guestOptions)
	if err != nil || code == 0 {
		return err
	}
	return &exitError{code, nil}
}

func newCmdShell(f *factory) *cobra.Command {
	o := &execOptions{refOptions: refOptions{f: f}}
	c := &cobra.Command{
		Use: "shell ID", Short: "Open a shell in a sandbox",
		Annotations:       map[string]string{guestCommand: "yes", ownSignals: "yes"},
		Args:              wants(1, 1, "one sandbox"),
		ValidArgsFunction: f.completeSandbox,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			o.settle(f, cmd)
			if err := o.build(f, loginShell()); err != nil {
				return err
			}
			return execRun(cmd.Context(), o)
		},
	}
	o.register(c, true)
	return c
}

// terminalEnv tells a command on a terminal what the terminal can show, and how its
// user writes texts, times and figures.
var terminalEnv = []string{"TERM", "COLORTERM", "LC_ALL", "LC_CTYPE", "LC_COLLATE", "LC_MESSAGES", "LC_MONETARY", "LC_NUMERIC", "LC_TIME",
	"LC_ADDRESS", "LC_IDENTIFICATION", "LC_MEASUREMENT", "LC_NAME", "LC_PAPER", "LC_TELEPHONE"}

// loginShell starts the best available shell. If neither sandbox nor user sets a
// locale, it is UTF-8: otherwise shells take a wide character for several.
func loginShell() []string {
	return []string{"/bin/sh", "-c", `[ -n "$LANG$LC_ALL$LC_CTYPE" ] || export LANG=C.UTF-8; if command -v bash >/dev/null 2>&1; then exec bash -l; fi; exec sh -l`}
}

type runOptions struct {
	requestOptions
	guestOptions
	f    *factory
	keep bool
}

func newCmdRun(f *factory, run func(context.Context, *runOptions) error) *cobra.Command {
	o := &runOptions{f: f}
	o.noMain = true
	c := &cobra.Command{
		Use:   "run [PROFILE|IMAGE] [flags] [-- CMD…]",
		Short: "Run a command in a new sandbox and destroy it",
		Long: "Create a sandbox, run CMD in it (a shell if there is none and this is a terminal), and destroy it. Exits with\n" +
			"CMD's exit code; 125 means that sandboxer itself failed. Without a server, everything happens in this process.\n\n" +
			"While the sandbox is created, the first interrupt destroys it; later, interrupts go to CMD and the third kills it.",
		Example:           "  sandboxer run --input repo=. -- make test\n  sandboxer run local-public -- curl -s https://example.org",
		Annotations:       map[string]string{guestCommand: "yes", ownSignals: "yes"},
		ValidArgsFunction: f.completeProfiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.split(f, cmd, args); err != nil {
				return err
			}
			o.settle(f, cmd)
			if o.service == "" && o.thread == "" { // it is made for this command: the workspace is its user's
				o.requestOptions.user = o.guestOptions.user
			}
			if err := o.requestOptions.build(f); err != nil {
				return err
			}
			if len(o.command) == 0 {
				if !o.tty {
					return invalid("no command is given, and a shell needs a terminal").WithHint("write it after --: sandboxer run -- CMD…")
				}
				o.command = loginShell()
			}
			if err := o.guestOptions.build(f, o.command); err != nil {
				return err
			}
			return run(cmd.Context(), o)
		},
	}
	o.requestOptions.register(f, c)
	o.guestOptions.register(c, false)
	c.Flags().BoolVar(&o.keep, "keep", false, "keep the sandbox until it expires")
	return c
}

func runRun(ctx context.Context, o *runOptions) error {
	p := o.f.progress()
	defer p.stop()
	hits, release := interrupts()
	defer release()
	connect := o.f.connectOrEmbed
	if o.keep {
		connect = o.f.connectOrStart // a server must end it
	}
	// Everything up to the command ends at the first interrupt, except the request: its
	// answer names the sandbox to destroy, so it is awaited until the second.
	request, drop := context.WithCancel(ctx)
	defer drop()
	begin, cancel := context.WithCancel(ctx)
	defer cancel()
	left := make(chan struct{})
	defer close(left)
	go func() {
		for _, end := range []context.CancelFunc{cancel, drop} {
			select {
			case <-hits:
				end()
			case <-left:
				return
			}
		}
	}()
	s, err := connect(begin, p)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := s.close(); cerr != nil {
			fmt.Fprintf(o.f.io.err, "%s %s\n", o.f.io.paint("33", "warning:"), cleanLines(sentence(cerr)))
		}
	}()
	req, err := o.requestFor(s)
	if err != nil {
		return err
	}
	req.NoWaiting = true
	var sb *api.Sandbox
	if err := begin.Err(); err != nil {
		return sandboxer.E(sandboxer.Canceled, err, "interrupted")
	}
	if sb, err = s.Create(request, req); err != nil {
		if errors.Is(err, sandboxer.Canceled) {
			return sandboxer.E(sandboxer.Canceled, err, "interrupted")
		}
		return o.refused(ctx, o.f, s, req.Profile, err)
	}
	id, ref, there := sb.ID, refOf(sb), sb.Found // one that another caller made is not ours to destroy
	if there {
		p.note("sandbox %s exists already; it is kept when the command has ended", id)
	}
	if !o.keep && !there {
		defer func() { finish(s, p, ref) }()
	}
	if sb, err = await(begin, s, p, sb); err != nil {
		if begin.Err() != nil {
			return sandboxer.E(sandboxer.Canceled, err, "interrupted while %s was being created", id)
		}
		return err
	}
	p.ready(ctx, s, sb)
	release() // from here on, interrupts are the command's
	code, err := execIn(ctx, o.f, s, ref, o.guestOptions)
	if err != nil {
		return err
	}
	if o.keep || there {
		p.note("kept: sandboxer shell %s   |   sandboxer destroy %s", id, id)
	}
	if code == 0 {
		return nil
	}
	return &exitError{code, nil}
}

// finish destroys the sandbox of run. A second interrupt leaves that to the sweep of
// the next process that has the data directory.
func finish(s *session, p *progress, id string) {
	hits, release := interrupts()
	defer release()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	begin := time.Now()
	done := make(chan error, 1)
	var sb *api.Sandbox
	go func() {
		var err error
		sb, err = s.Destroy(ctx, id, true)
		done <- err
	}()
	var err error
	select {
	case err = <-done:
	case <-hits:
		cancel()
		if err = <-done; err != nil {
			err = fmt.Errorf("interrupted; it is destroyed by the server, or when sandboxer runs next")
		}
	}
	if err != nil {
		p.stop()
		fmt.Fprintf(p.io.err, "%s sandbox %s is not gone yet: %s\n", p.io.paint("33", "warning:"), id, cleanLines(sentence(err)))
		return
	}
	p.done("destroyed after %s · cost %s · total %s", seconds(time.Since(begin)), costText(sb), p.took())
}

package agent

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	pb "github.com/sand-boxer/sandboxer/agent/proto/process"
)

// DefaultAddress is the address at which the agent listens inside its sandbox.
const DefaultAddress = "127.0.0.1:49983"

// Environment variables of the agent.
const (
	envToken   = EnvPrefix + "TOKEN"
	envListen  = EnvPrefix + "LISTEN"
	envUser    = EnvPrefix + "USER"
	envWorkdir = EnvPrefix + "WORKDIR"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// defaultLang makes programs use UTF-8. glibc has it since 2.35, Debian since before; musl has no other.
const defaultLang = "C.UTF-8"

// MainTag is the tag of the process that init starts from its own arguments.
const MainTag = "main"

// deaf are signals that the agent ignores. It catches them all the same: if our parent had
// them ignored, so would every program of the sandbox, and ^C or ^Z would do nothing in its
// terminals; a caught signal returns to its default after exec.
var deaf = []os.Signal{
	unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGPIPE, unix.SIGALRM, unix.SIGTSTP,
	unix.SIGTTIN, unix.SIGTTOU, unix.SIGCONT, unix.SIGXCPU, unix.SIGXFSZ, unix.SIGVTALRM, unix.SIGWINCH, unix.SIGIO, unix.SIGPWR,
}

type addresses []string

func (a *addresses) String() string     { return strings.Join(*a, ",") }
func (a *addresses) Set(s string) error { *a = append(*a, strings.Split(s, ",")...); return nil }

// initFlags are the settings of init from its flags.
type initFlags struct {
	listen   addresses
	set      settings
	grace    time.Duration
	ringKiB  int
	verbose  bool
	reserved bool
	detached bool
	untraced bool
	fuse     fuseTime
}

func (o *initFlags) register(fs *flag.FlagSet) {
	fs.Var(&o.listen, "listen", "`address` host:port, unix:/path, own:/path, own:@name or donate:/path, may be repeated (default "+DefaultAddress+", or $"+envListen+")")
	fs.StringVar(&o.set.user, "user", os.Getenv(envUser), "`user` for calls that name none (default the agent's own, or $"+envUser+")")
	fs.StringVar(&o.set.workdir, "workdir", os.Getenv(envWorkdir), "`directory` where processes start (default the user's home, or $"+envWorkdir+")")
	fs.DurationVar(&o.grace, "grace", 5*time.Second, "time between SIGTERM and SIGKILL at the end")
	fs.IntVar(&o.ringKiB, "replay-kib", 1024, "output to keep of each process, in KiB")
	fs.BoolVar(&o.reserved, "above-limits", false, "keep CAP_SYS_RESOURCE for the agent, but not for the processes that it starts")
	fs.BoolVar(&o.verbose, "v", false, "log more")
	fs.BoolVar(&o.detached, "detached", false, "write the byte 6 to standard error once it listens, and nothing after that")
	fs.BoolVar(&o.untraced, "untraced", false, "let no process without CAP_SYS_PTRACE trace the agent or write to its memory")
	fs.Var(&o.fuse, "fuse", "`time` (RFC 3339, or seconds since 1970; 0 means never) at which the agent ends, and the sandbox with it")
}

func (o *initFlags) check() error {
	switch {
	case o.ringKiB < 4 || o.ringKiB > 1<<20:
		return fmt.Errorf("--replay-kib %d: want 4 to 1048576", o.ringKiB)
	case o.set.workdir != "" && !filepath.IsAbs(o.set.workdir):
		return fmt.Errorf("--workdir %q is not absolute", o.set.workdir)
	}
	return nil
}

// InUseExit is the exit code of init if another program already listens at one of its addresses.
const InUseExit = 4

// listenAll listens at every address, or returns the code to exit with.
func listenAll(at addresses) (listeners []net.Listener, code int) {
	for _, addr := range at {
		l, err := listen(addr)
		if err != nil {
			fmt.Fprintf(os.Stderr, "sandboxer-agent: cannot listen: %v\n", err)
			if errors.Is(err, unix.EADDRINUSE) && strings.HasPrefix(addr, ownPrefix) {
				return nil, InUseExit
			}
			return nil, 1
		}
		listeners = append(listeners, l)
	}
	return listeners, 0
}

// watchSignals returns the signals that end the agent, and those of ended children.
func watchSignals() (end, children chan os.Signal) {
	children = make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	end = make(chan os.Signal, 1)
	signal.Notify(end, unix.SIGTERM)
	if !signal.Ignored(unix.SIGINT) {
		signal.Notify(end, unix.SIGINT)
	}
	signal.Notify(make(chan os.Signal, 1), deaf...)
	return end, children
}

// runInit serves a sandbox until SIGTERM.
func runInit(args []string) int {
	fs := flag.NewFlagSet("init", flag.ContinueOnError)
	var o initFlags
	o.register(fs)
	if code, ok := parse(fs, args); !ok {
		return code
	}
	if o.untraced { // first: no process of the sandbox runs yet
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
			return report(os.NewSyscallError("prctl(PR_SET_DUMPABLE)", err))
		}
	}
	set := o.set
	set.token = os.Getenv(envToken)
	if len(o.listen) == 0 {
		_ = o.listen.Set(cmp.Or(os.Getenv(envListen), DefaultAddress))
	}
	complain := func(format string, args ...any) int {
		fmt.Fprintf(os.Stderr, "sandboxer-agent: "+format+"\n", args...)
		return 2
	}
	if err := o.check(); err != nil {
		return complain("%v", err)
	}

	level := slog.LevelWarn
	if o.verbose {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	s := newServer(set, baseEnv(os.Environ()), o.ringKiB<<10, log)
	if set.user != "" {
		if _, err := s.userOf(set.user); err != nil {
			return complain("--user: %v", err)
		}
	}

	listeners, code := listenAll(o.listen)
	if code != 0 {
		return code
	}

	if o.reserved {
		if err := s.procs.reserve(); err != nil {
			return complain("--above-limits: %v", err)
		}
	} else {
		s.limitThreads()
	}

	if o.detached {
		if err := detach(); err != nil {
			return complain("--detached: %v", err)
		}
	}

	// A sandbox is mostly idle: collect early, keep little.
	debug.SetGCPercent(50)
	unix.Umask(0o022)
	// This gives us orphans even if we are not the first process of a PID namespace.
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

	end, children := watchSignals()
	var wg sync.WaitGroup
	wg.Go(func() {
		for range children {
			s.procs.reap()
		}
	})
	s.procs.reap() // children that ended before we watched for them

	code = s.serveUntil(end, listeners, o, fs.Args())
	signal.Stop(children)
	close(children)
	wg.Wait()
	return code
}

// serveUntil serves at the listeners, and runs the main command if there is one, until end, until the
// sandbox's time is over or until a listener fails. Then it ends everything.
func (s *server) serveUntil(end <-chan os.Signal, listeners []net.Listener, o initFlags, main []string) int {
	var wg sync.WaitGroup
	defer wg.Wait()
	hs := s.servers(headTime)
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		wg.Go(func() {
			if err := hs.serve(l); !errors.Is(err, http.ErrServerClosed) {
				failed <- err
			}
		})
	}
	s.log.Debug("listening", "addresses", o.listen.String())

	code := 0
	if len(main) > 0 {
		if err := s.startMain(main); err != nil {
			s.log.Error("the main command did not start", "err", err)
			code = 1
		}
	}
	s.fuse.set(time.Time(o.fuse))
	if code == 0 {
		select {
		case <-end:
		case <-s.fuse.blown:
			s.log.Warn("the sandbox has expired, and the broker did not end it")
		case err := <-failed:
			s.log.Error("the listener failed", "err", err)
			code = 1
		}
	}
	s.procs.stop(o.grace)
	// Callers that still listen get the ends of the processes; then all connections are closed.
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	for _, hs := range []*http.Server{hs.made, hs.donated} {
		if hs.Shutdown(ctx) != nil {
			_ = hs.Close()
		}
	}
	return code
}

// A fuseTime is a time; zero if there is none.
type fuseTime time.Time

func (f *fuseTime) String() string {
	if t := time.Time(*f); !t.IsZero() {
		return t.Format(time.RFC3339Nano)
	}
	return "0"
}

func (f *fuseTime) Set(v string) error {
	if n, err := strconv.ParseInt(v, 10, 64); err == nil {
		*f = fuseTime{}
		if n > 0 {
			*f = fuseTime(time.Unix(n, 0))
		}
		return nil
	}
	t, err := time.Parse(time.RFC3339, v)
	*f = fuseTime(t)
	return err
}

func (s *server) startMain(args []string) error {
	u, err := s.userOf("")
	if err != nil {
		return err
	}
	c, err := s.prepare(&pb.ProcessConfig{Cmd: args[0], Args: args[1:]}, u)
	if err != nil {
		return err
	}
	tag := MainTag
	c.tag = &tag
	_, sub, err := s.procs.start(c)
	if err != nil {
		return err
	}
	sub.close()
	return nil
}

// baseEnv is the part of our own environment that processes inherit.
func baseEnv(environ []string) []string {
	var base []string
	for _, kv := range environ {
		if !strings.HasPrefix(kv, EnvPrefix) {
			base = append(base, kv)
		}
	}
	if getenv(base, "PATH") == "" {
		base = append(base, "PATH="+defaultPath)
	}
	if getenv(base, "LANG") == "" {
		base = append(base, "LANG="+defaultLang) // without one, programs assume ASCII
	}
	return base
}

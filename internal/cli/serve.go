package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/portproxy"
	"github.com/sand-boxer/sandboxer/internal/provisioner"
	"github.com/sand-boxer/sandboxer/internal/server"
)

type serveOptions struct {
	f              *factory
	socket, listen string
	hosts          []string
	cert, key      string // files
	insecure       bool
	portURL        string
	deerflow       bool
	logFormat      string
}

func newCmdServe(f *factory, runF func(context.Context, *serveOptions) error) *cobra.Command {
	o := &serveOptions{f: f}
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run the server in the foreground",
		Long: "Run the server in the foreground, with its log on stderr, until it is interrupted. Sandboxes live on without it;\n" +
			"the next server finds them again. SIGHUP lets it read the profiles anew, as reload does.",
		Args:        wants(0, 0, "no arguments"),
		Annotations: map[string]string{ownSignals: "yes"},
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := f.settings()
			if err != nil {
				return err
			}
			pick := func(flag *string, key string) {
				if *flag == "" {
					*flag = s.get(key)
				}
			}
			pick(&o.socket, "socket")
			pick(&o.listen, "listen")
			pick(&o.logFormat, "log_format")
			pick(&o.cert, "tls_cert")
			pick(&o.key, "tls_key")
			o.insecure = o.insecure || s.get("insecure") == "true"
			if (o.cert == "") != (o.key == "") {
				return invalid("a certificate and its key belong together: --tls-cert is %q, --tls-key is %q", o.cert, o.key)
			}
			if o.cert != "" && o.listen == "" {
				return invalid("--tls-cert is given, and there is no TCP listener to use it").WithHint("add --listen, for example: sandboxer serve --listen :8443")
			}
			pick(&o.portURL, "port_url")
			if err := checkPortURL(o.portURL); err != nil {
				return err
			}
			o.deerflow = o.deerflow || s.get("deerflow") == "true"
			if o.deerflow && o.listen == "" {
				return invalid("--deerflow is given, and there is no TCP listener that deer-flow could reach").WithHint("add --listen, for example: sandboxer serve --deerflow --listen 127.0.0.1:8080")
			}
			if len(o.hosts) == 0 && s.get("hosts") != "" {
				o.hosts = strings.Split(s.get("hosts"), ",")
			}
			if o.socket, err = filepath.Abs(o.socket); err != nil {
				return sandboxer.E(sandboxer.Invalid, err, "--socket: %q cannot be made absolute", o.socket)
			}
			if o.listen != "" {
				if err := checkListen(o.listen); err != nil {
					return err
				}
			}
			if err := oneOf("log format", logFormats)(o.logFormat); err != nil {
				return err
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return serveRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.socket, "socket", "", "Unix `socket` to listen on (SANDBOXER_SOCKET)")
	c.Flags().StringVar(&o.listen, "listen", "", "also listen on this TCP `address`, for clients with an API key (SANDBOXER_LISTEN)")
	c.Flags().StringSliceVar(&o.hosts, "allow-host", nil, "`name` by which clients may address the TCP listener (SANDBOXER_HOSTS)")
	c.Flags().StringVar(&o.cert, "tls-cert", "", "speak TLS on the TCP listener with the certificate in this PEM `file` (SANDBOXER_TLS_CERT)")
	c.Flags().StringVar(&o.key, "tls-key", "", "`file` with the certificate's private key (SANDBOXER_TLS_KEY)")
	c.Flags().BoolVar(&o.insecure, "insecure", false, "listen without TLS also where other machines reach it: a proxy in front speaks TLS (SANDBOXER_INSECURE)")
	c.Flags().StringVar(&o.portURL, "port-url", "", "`address` below whose host open ports have names of their own: https://ports.example.org (SANDBOXER_PORT_URL)")
	c.Flags().BoolVar(&o.deerflow, "deerflow", false, "let deer-flow in, by the API of its provisioner (SANDBOXER_DEERFLOW)")
	c.Flags().StringVar(&o.logFormat, "log-format", "", "text or json (SANDBOXER_LOG_FORMAT)")
	complete(c, "log-format", logFormats...)
	return c
}

func serveRun(ctx context.Context, o *serveOptions) error {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	tell := supervisor(o.f.env)
	s, err := o.f.settings()
	if err != nil {
		return err
	}
	for i, x := range s.all {
		if x.Key == "log_format" {
			s.all[i].Value = o.logFormat
		}
	}
	log, err := o.f.logger(false)
	if err != nil {
		return err
	}
	quietLibraries(log)
	defer endAfter(ctx, stopsWithin, func() {
		log.Error("ending although not everything has stopped; the next start finishes what was under way", "after", stopsWithin)
		os.Exit(exitCode(nil, sandboxer.E(sandboxer.Timeout, nil, "not everything has stopped")))
	})()
	cfg, err := o.f.brokerConfig()
	if err != nil {
		return err
	}
	o.f.confineProcess(log)
	metrics := server.NewMetrics()
	cfg.Log, cfg.Observe, cfg.Abandoned, cfg.OOMKilled, cfg.Pooled = log, metrics.Observe, metrics.Abandoned, metrics.OOMKilled, metrics.Pooled
	b, err := newBroker(ctx, cfg)
	if err != nil {
		return err
	}
	err = func() error {
		// The socket appears when everything behind it works.
		unix, err := edge.ListenUnix(o.socket)
		if err != nil {
			return err
		}
		listeners := []net.Listener{unix}
		if o.listen != "" {
			var tcp net.Listener
			if o.cert != "" {
				tcp, err = edge.ListenTLS(o.listen, o.cert, o.key, log)
			} else {
				tcp, err = edge.ListenTCP(o.listen, o.insecure)
			}
			if err != nil {
				return errors.Join(err, unix.Close())
			}
			listeners = append(listeners, tcp)
		}
		for _, l := range listeners {
			log.Info("listening", "network", l.Addr().Network(), "addr", l.Addr().String())
		}
		var aside sync.WaitGroup
		bctx, cancel := context.WithCancel(ctx)
		aside.Go(func() { frugal(bctx) })
		aside.Go(func() {
			backUpRegularly(bctx, log, cfg.Dir, s.span("backup_every"), s.number("keep_backups"))
		})
		hups := make(chan os.Signal, 1)
		signal.Notify(hups, syscall.SIGHUP)
		defer signal.Stop(hups)
		aside.Go(func() {
			for {
				select {
				case <-hups:
					if _, err := b.reload(bctx); err != nil {
						log.Error("the profiles cannot be read anew", "err", err)
					}
				case <-bctx.Done():
					return
				}
			}
		})
		defer aside.Wait()
		defer cancel()
		var ports *url.URL
		if o.portURL != "" {
			if ports, err = url.Parse(o.portURL); err != nil {
				return checkPortURL(o.portURL)
			}
		}
		var deerflow *provisioner.Options
		if o.deerflow {
			if deerflow, err = b.deerflow(s); err != nil {
				return err
			}
		}
		front, closeDoors := newEdge(b, edge.Options{Log: log, Hosts: o.hosts}, server.Options{Data: cfg.Dir, WentBack: b.store.WentBack(), Metrics: metrics, Reload: b.reload}, ports, deerflow)
		defer closeDoors()
		tell(log, "READY=1")
		return front.Serve(ctx, listeners...)
	}()
	stop() // a second signal ends the process at once
	tell(log, "STOPPING=1")
	log.Info("stopping; sandboxes live on")
	return errors.Join(err, b.Close())
}

// newEdge puts the doors of a broker together: the REST interface, the ports of its
// sandboxes, on names of their own below ports if that is not nil, and deer-flow's where
// there are options for it. close lets go of what the doors hold.
func newEdge(b *broker, eo edge.Options, so server.Options, ports *url.URL, deerflow *provisioner.Options) (_ *edge.Edge, close func()) {
	proxy := portproxy.New(b.manager, ports)
	so.Version, so.Owner, so.PortURL = version(), b.owner, proxy.URL
	eo.Observe = so.Metrics.Request
	e := edge.New(b.manager, eo)
	e.Mount(server.New(b.manager, so).Door())
	e.Mount(proxy.Door())
	if deerflow == nil {
		return e, proxy.Close
	}
	p := provisioner.New(b.manager, *deerflow)
	for _, d := range p.Doors() {
		e.Mount(d)
	}
	return e, func() { p.Close(); proxy.Close() }
}

// stopsWithin is how long a server that is told to stop takes at most, whatever hangs: less
// than the five seconds that are promised. What has not stopped by then ends as by a kill.
const stopsWithin = 4800 * time.Millisecond

// endAfter calls end when d has passed since ctx ended, unless it is told not to.
func endAfter(ctx context.Context, d time.Duration, end func()) (stop func()) {
	over, cancel := context.WithCancel(context.Background())
	context.AfterFunc(ctx, func() {
		select {
		case <-time.After(d):
			end()
		case <-over.Done():
		}
	})
	return cancel
}

// quietLibraries gives what libraries say by themselves the level of debugging: net/http
// repeats what a sandbox's agent sends unasked, as often as it likes.
func quietLibraries(log *slog.Logger) {
	stdlog.SetFlags(0)
	stdlog.SetOutput(slog.NewLogLogger(log.Handler(), slog.LevelDebug).Writer())
}

// checkPortURL wants a scheme and the name of a host, under which there can be others.
func checkPortURL(s string) error {
	if s == "" {
		return nil
	}
	u, err := url.Parse(s)
	if err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.User == nil && (u.Path == "" || u.Path == "/") && u.RawQuery == "" && u.Fragment == "" {
		if d, err := sandboxer.ParseDestination(u.Hostname()); u.Hostname() == "localhost" || err == nil && d.Name != "" && !d.Below {
			return nil
		}
	}
	return invalid("%q is not the address of a domain for ports", s).
		WithHint("write for example https://ports.example.org, whose names (*.ports.example.org) all lead to this server")
}

// maxLog is the size from which a background server begins a new log.
const maxLog = 16 << 20

// startServer starts a server in the background and waits until it answers.
func (f *factory) startServer(ctx context.Context, p *progress) error {
	s, err := f.settings()
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the path of the running program is unknown")
	}
	if err := os.MkdirAll(s.get("log_dir"), 0o700); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the log directory %s cannot be made", s.get("log_dir"))
	}
	logName := filepath.Join(s.get("log_dir"), "server.log")
	if st, err := os.Stat(logName); err == nil && st.Size() > maxLog {
		_ = os.Rename(logName, logName+".1")
	}
	logFile, err := os.OpenFile(logName, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the log %s cannot be opened", logName)
	}
	defer logFile.Close()
	begin, err := logFile.Seek(0, io.SeekEnd)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the log %s cannot be read", logName)
	}
	socket := s.get("socket")
	args := []string{"serve", "--data-dir", s.get("data_dir"), "--socket", socket}
	if s.further != "" {
		args = append(args, "--config-dir", s.further)
	}
	if f.flags.logLevel != "" {
		args = append(args, "--log-level", f.flags.logLevel)
	}
	if f.listen != "" {
		args = append(args, "--listen", f.listen)
	}
	cmd := exec.Command(self, args...)
	cmd.Args[0] = "sandboxer"
	cmd.Dir = "/"
	cmd.Env = serverEnv(os.Environ())
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the server cannot be started")
	}
	died := make(chan error, 1)
	go func() { died <- cmd.Wait() }()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for {
		select {
		case <-tick.C:
			if answers(ctx, socket) {
				p.note("started a server (process %d, log %s); stop it with: sandboxer down", cmd.Process.Pid, logName)
				return nil
			}
		case <-died:
			// Somebody else may have been faster: then theirs is as good.
			for died := time.Now(); ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
				if answers(ctx, socket) {
					return nil
				}
				if time.Since(died) > patienceWith(logTail(logFile, begin)) {
					break
				}
			}
			return sandboxer.E(sandboxer.Unavailable, nil, "the server did not start: %s", logTail(logFile, begin)).
				WithHint("see all of it with: sandboxer serve")
		case <-ctx.Done():
			return sandboxer.E(sandboxer.Canceled, ctx.Err(), "given up waiting for the server (process %d), which goes on starting", cmd.Process.Pid)
		case <-deadline:
			return sandboxer.E(sandboxer.Timeout, nil, "the server (process %d) does not answer", cmd.Process.Pid).WithHint("look into %s", logName)
		}
	}
}

// patienceWith tells for how long another server may answer yet, after one that said tail
// did not start. Other commands use the data directory, too, and never will.
func patienceWith(tail string) time.Duration {
	switch {
	case strings.Contains(tail, "is in use by") && strings.Contains(tail, "(sandboxer serve"):
		return 10 * time.Second
	case strings.Contains(tail, "is in use by"), strings.Contains(tail, "another server answers"):
		return time.Second
	}
	return 0
}

// serverEnv is the environment of a background server: the caller's, without what
// concerns only the caller, and without relative paths, for it runs elsewhere.
func serverEnv(env []string) []string {
	var out []string
	for _, kv := range env {
		switch name, val, _ := strings.Cut(kv, "="); name {
		case "SANDBOXER_API_KEY", "SANDBOXER_API_KEY_FILE", "SANDBOXER_URL", "SANDBOXER_OUTPUT", "SANDBOXER_CONFIG_DIR":
		case "SANDBOXER_HOME", "SANDBOXER_S3_CREDENTIALS":
			if abs, err := filepath.Abs(val); err == nil && val != "" {
				out = append(out, name+"="+abs)
			}
		default:
			out = append(out, kv)
		}
	}
	return out
}

// logTail is what the server said last since it was started.
func logTail(f *os.File, from int64) string {
	b, _ := io.ReadAll(io.NewSectionReader(f, from, 64<<10))
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	if i := slices.IndexFunc(lines, func(l []byte) bool { return bytes.HasPrefix(l, []byte("error: ")) }); i >= 0 {
		return string(bytes.TrimPrefix(bytes.Join(lines[i:], []byte("\n")), []byte("error: ")))
	}
	return string(bytes.Join(lines[max(0, len(lines)-3):], []byte("\n")))
}

type upOptions struct {
	f      *factory
	listen string
}

func newCmdUp(f *factory, runF func(context.Context, *upOptions) error) *cobra.Command {
	o := &upOptions{f: f}
	c := &cobra.Command{
		Use: "up", Short: "Start the server in the background, if none runs", Args: wants(0, 0, "no arguments"),
		Long: "Start the server in the background, if none runs. It listens on the Unix socket, and where the settings or --listen\n" +
			"say so on a TCP address too, for clients with an API key and for browsers that visit ports.",
		Example: "  sandboxer up\n  sandboxer up --listen 127.0.0.1:8080",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.listen != "" {
				if err := checkListen(o.listen); err != nil {
					return err
				}
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return upRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.listen, "listen", "", "also listen on this TCP `address`, for clients with an API key (SANDBOXER_LISTEN)")
	return c
}

func upRun(ctx context.Context, o *upOptions) error {
	p := o.f.progress()
	defer p.stop()
	o.f.listen = o.listen
	if o.listen != "" {
		if ok, err := o.f.running(ctx); err != nil {
			return err
		} else if ok {
			return sandboxer.E(sandboxer.Conflict, nil, "a server runs already, and where it listens is settled").
				WithHint("stop it first, which its sandboxes survive: sandboxer down")
		}
	}
	s, err := o.f.connectOrStart(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	p.stop()
	return showStatus(ctx, o.f, s)
}

type statusOptions struct{ f *factory }

func newCmdStatus(f *factory, runF func(context.Context, *statusOptions) error) *cobra.Command {
	o := &statusOptions{f}
	return &cobra.Command{
		Use: "status", Short: "Show the server and who it takes you for", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return statusRun(cmd.Context(), o)
		},
	}
}

func statusRun(ctx context.Context, o *statusOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	return showStatus(ctx, o.f, s)
}

func showStatus(ctx context.Context, f *factory, s *session) error {
	st, err := s.Status(ctx)
	if err != nil {
		return err
	}
	return printOne(f, st, view[*api.Status]{
		name: func(st *api.Status) string { return st.Owner },
		detail: func(st *api.Status) [][2]string {
			rows := [][2]string{
				{"server", fmt.Sprintf("%s, process %d, up %s", st.Version, st.PID, sandboxer.FormatDuration(st.Uptime.Std()))},
				{"owner", st.Owner},
				{"data", st.Data},
				{"you", fmt.Sprintf("%s, tenant %s, may %s", st.Actor, st.Tenant, join(st.Scopes, ", "))},
				{"sandboxes", countStates(st.Sandboxes)},
				{"extensions", fmt.Sprint(st.Extensions)},
			}
			if len(st.Unavailable) > 0 {
				rows = append(rows, [2]string{"unavailable", strings.Join(st.Unavailable, ", ")})
			}
			if st.Unconfirmed > 0 || time.Since(st.WentBack) < 24*time.Hour {
				rows = append(rows, [2]string{"went back", fmt.Sprintf("%s, the database was older than before; %d sandboxes are unconfirmed: sandboxer audit", moment(st.WentBack, ago), st.Unconfirmed)})
			}
			for _, n := range st.Notices {
				rows = append(rows, [2]string{"notice", n})
			}
			if st.Quarantined > 0 {
				rows = append(rows, [2]string{"quarantined", fmt.Sprintf("%d, unknown to the database: sandboxer ls --quarantined", st.Quarantined)})
			}
			return rows
		},
	})
}

func countStates(m map[sandboxer.State]int) string {
	var parts []string
	for _, st := range sandboxer.States() {
		if n := m[st]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, st))
		}
	}
	if parts == nil {
		return "none"
	}
	return strings.Join(parts, ", ")
}

func newCmdReload(f *factory, runF func(context.Context, *plainOptions) error) *cobra.Command {
	o := &plainOptions{f}
	return &cobra.Command{
		Use: "reload", Short: "Let the server read its profiles and quotas anew", Args: wants(0, 0, "no arguments"),
		Long: "Let the server read its profiles and quotas anew, as SIGHUP does. All or nothing: with a fault in any file nothing changes.\n" +
			"Sandboxes keep what they were made with. Extensions and settings take a restart: down, then up.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return reloadRun(cmd.Context(), o)
		},
	}
}

func reloadRun(ctx context.Context, o *plainOptions) error {
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	r, err := s.Reload(ctx)
	if err != nil {
		return err
	}
	return printOne(o.f, r, view[*api.Reload]{
		name: func(r *api.Reload) string { return strings.Join(slices.Concat(r.Added, r.Changed, r.Removed), "\n") },
		detail: func(r *api.Reload) [][2]string {
			rows := [][2]string{{"added", strings.Join(r.Added, ", ")}, {"changed", strings.Join(r.Changed, ", ")},
				{"removed", strings.Join(r.Removed, ", ")}, {"unchanged", fmt.Sprint(r.Unchanged)}}
			if r.Quotas {
				rows = append(rows, [2]string{"quotas", "changed"})
			}
			if len(r.Restart) > 0 {
				rows = append(rows, [2]string{"takes a restart", strings.Join(r.Restart, ", ")})
			}
			return rows
		},
	})
}

type downOptions struct{ f *factory }

func newCmdDown(f *factory, runF func(context.Context, *downOptions) error) *cobra.Command {
	o := &downOptions{f}
	return &cobra.Command{
		Use: "down", Short: "Stop the server of this machine; sandboxes live on", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return downRun(cmd.Context(), o)
		},
	}
}

func downRun(ctx context.Context, o *downOptions) error {
	set, err := o.f.settings()
	if err != nil {
		return err
	}
	if u := set.get("url"); u != "" && !strings.HasPrefix(u, "unix://") {
		return invalid("only the server of this machine can be stopped, not %s", u).WithHint("stop it where it runs")
	}
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	st, err := s.Status(ctx)
	if err != nil {
		return err
	}
	p := o.f.progress()
	defer p.stop()
	if err := syscall.Kill(st.PID, syscall.SIGTERM); err != nil {
		return sandboxer.E(sandboxer.Denied, err, "the server, process %d, cannot be signalled", st.PID)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		// Gone is the process, not only its socket: its data directory must be free.
		if err := syscall.Kill(st.PID, 0); errors.Is(err, syscall.ESRCH) || isZombie(st.PID) {
			break
		}
		select {
		case <-ctx.Done():
			return sandboxer.E(sandboxer.Canceled, ctx.Err(), "given up waiting for the server, process %d, which goes on stopping", st.PID)
		case <-tick.C:
		}
	}
	p.done("stopped the server, process %d", st.PID)
	if n := countStates(st.Sandboxes); n != "none" {
		p.note("sandboxes left behind: %s; nobody ends them in time before a server runs again", n)
	}
	return nil
}

// isZombie reports whether a process has ended and only waits for its parent to
// notice, as happens to a server whose starter never waits.
func isZombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, ok := bytes.Cut(b, []byte(") "))
	return ok && bytes.HasPrefix(rest, []byte("Z"))
}

// welcomeRun is what the bare command shows on a terminal.
func welcomeRun(ctx context.Context, f *factory) error {
	w := f.io.out
	if s, err := f.connect(ctx); err == nil {
		defer s.close()
		if err := showStatus(ctx, f, s); err != nil {
			return err
		}
	} else {
		fmt.Fprintln(w, "No server runs on this machine.")
	}
	fmt.Fprint(w, "\nNext:\n"+
		"  sandboxer run --input repo=. -- ls -l    run a command in a copy of this directory\n"+
		"  sandboxer create --ttl 1h                make a sandbox that stays\n"+
		"  sandboxer --help                         see everything else\n")
	return nil
}

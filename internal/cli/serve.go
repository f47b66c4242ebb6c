package cli

import (
	"bytes"
	"context"
	"errors"
	"io"
	stdlog "log"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/portproxy"
	"github.com/sand-boxer/sandboxer/internal/provisioner"
	"github.com/sand-boxer/sandboxer/internal/server"
	"github.com/sand-boxer/sandboxer/internal/subprocess"
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

func newCmdServe(f *factory) *cobra.Command {
	o := &serveOptions{f: f}
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run the server in the foreground",
		Long: "Run the server in the foreground, with its log on stderr, until it is interrupted. Sandboxes outlive it; the\n" +
			"next server finds them again. After SIGHUP it reads the profiles again, as with reload.",
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
			if o.deerflow {
				if err := checkAnonymous(s, o); err != nil {
					return err
				}
			}
			if o.socket, err = filepath.Abs(o.socket); err != nil {
				return sandboxer.E(sandboxer.Invalid, err, "--socket: %q cannot be made absolute", o.socket)
			}
			if o.listen != "" {
				if err := checkListen(o.listen); err != nil {
					return err
				}
				if err := edge.CheckTCP(o.listen, o.insecure || o.cert != ""); err != nil {
					return err // before anything is opened
				}
			}
			if err := oneOf("log format", logFormats)(o.logFormat); err != nil {
				return err
			}
			return serveRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.socket, "socket", "", "Unix `SOCKET` to listen on (SANDBOXER_SOCKET)")
	c.Flags().StringVar(&o.listen, "listen", "", "also listen on this TCP `ADDRESS`, for clients with an API key (SANDBOXER_LISTEN)")
	c.Flags().StringSliceVar(&o.hosts, "allow-host", nil, "`NAME` by which clients may address the TCP listener (SANDBOXER_HOSTS)")
	c.Flags().StringVar(&o.cert, "tls-cert", "", "speak TLS on the TCP listener with the certificate in this PEM `FILE` (SANDBOXER_TLS_CERT)")
	c.Flags().StringVar(&o.key, "tls-key", "", "`FILE` with the certificate's private key (SANDBOXER_TLS_KEY)")
	c.Flags().BoolVar(&o.insecure, "insecure", false, "listen without TLS even if other machines can reach the address: a proxy in front provides TLS (SANDBOXER_INSECURE)")
	c.Flags().StringVar(&o.portURL, "port-url", "", "`ADDRESS` under which open ports get host names of their own: https://ports.example.org (SANDBOXER_PORT_URL)")
	c.Flags().BoolVar(&o.deerflow, "deerflow", false, "serve the API of deer-flow's provisioner (SANDBOXER_DEERFLOW)")
	c.Flags().StringVar(&o.logFormat, "log-format", "", "`FORMAT` of the log: text or json (SANDBOXER_LOG_FORMAT)")
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
		log.Error("exiting before all work has stopped; the next start finishes it", "after", stopsWithin)
		os.Exit(exitCode(nil, sandboxer.E(sandboxer.Timeout, nil, "not everything has stopped")))
	})()
	cfg, err := o.f.brokerConfig()
	if err != nil {
		return err
	}
	o.f.confineProcess(log)
	metrics := server.NewMetrics()
	cfg.Log, cfg.Observe, cfg.Abandoned, cfg.OOMKilled, cfg.Pooled, cfg.Overrun = log, metrics.Observe, metrics.Abandoned, metrics.OOMKilled, metrics.Pooled, metrics.Overrun
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
						log.Error("the profiles cannot be reloaded", "err", err)
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
		front, closeDoors := newEdge(b, edge.Options{Log: log, Hosts: o.hosts}, server.Options{Data: cfg.Dir, Metrics: metrics, Reload: b.reload}, ports, deerflow)
		defer closeDoors()
		tell(log, "READY=1")
		return front.Serve(ctx, listeners...)
	}()
	stop() // a second signal ends the process at once
	tell(log, "STOPPING=1")
	log.Info("stopping; sandboxes keep running")
	return errors.Join(err, b.Close())
}

// newEdge puts the doors of a broker together: the REST interface, the ports of its
// sandboxes, on names of their own below ports if that is not nil, and deer-flow's if
// there are options for it. close releases the doors' resources.
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

// stopsWithin is the longest time that a server takes to stop, even if something hangs: less than the
// promised five seconds. Work that has not stopped by then ends as by a kill.
const stopsWithin = 4800 * time.Millisecond

// endAfter calls end when d has passed since ctx ended, unless stop is called.
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

// quietLibraries logs messages of libraries at the level of debugging: net/http
// repeats unrequested data of a sandbox's agent as often as the agent sends it.
func quietLibraries(log *slog.Logger) {
	stdlog.SetFlags(0)
	stdlog.SetOutput(slog.NewLogLogger(log.Handler(), slog.LevelDebug).Writer())
}

// checkPortURL requires a scheme and a host name that may have subdomains.
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
	cmd := subprocess.Command(context.Background(), subprocess.Self, self, args...)
	cmd.Args[0] = "sandboxer"
	cmd.Env = serverEnv(cmd.Env)
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
			// Another process may have been faster: its server is as good.
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
			return sandboxer.E(sandboxer.Canceled, ctx.Err(), "stopped waiting for the server (process %d), which continues to start", cmd.Process.Pid)
		case <-deadline:
			return sandboxer.E(sandboxer.Timeout, nil, "the server (process %d) does not answer", cmd.Process.Pid).WithHint("see %s", logName)
		}
	}
}

// patienceWith is how long another server may still answer, after one that printed tail
// did not start. Other commands also use the data directory, and never answer.
func patienceWith(tail string) time.Duration {
	switch {
	case strings.Contains(tail, "is in use by") && strings.Contains(tail, "(sandboxer serve"):
		return 10 * time.Second
	case strings.Contains(tail, "is in use by"), strings.Contains(tail, "another server answers"):
		return time.Second
	}
	return 0
}

// serverEnv is the environment of a background server: the caller's, without variables that
// concern only the caller, and without relative paths, since it runs in another directory.
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

// logTail is the end of the server's log since it was started.
func logTail(f *os.File, from int64) string {
	b, _ := io.ReadAll(io.NewSectionReader(f, from, 64<<10))
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	if i := slices.IndexFunc(lines, func(l []byte) bool { return bytes.HasPrefix(l, []byte("error: ")) }); i >= 0 {
		return string(bytes.TrimPrefix(bytes.Join(lines[i:], []byte("\n")), []byte("error: ")))
	}
	return string(bytes.Join(lines[max(0, len(lines)-3):], []byte("\n")))
}

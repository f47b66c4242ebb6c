// Package extension turns an adapter into a separate program: an extension that the broker starts, or
// connects to, without being built into the broker (docs/how-to/write-an-extension.md).
//
//	func main() { extension.Main(Adapter) }
//
// An adapter is written like a built-in one: package sandboxer has the contract, and package
// extensiontest tests it.
package extension

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/catalog"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/protocol"
)

// Main serves a until the broker disconnects, and exits. Without arguments it is a child process of the
// broker and speaks on the standard input and output. It then sets os.Stdout to os.Stderr, whose lines
// go to the broker's log. With -listen it is a service:
//
//	my-backend -listen unix:/run/my-backend.sock
//	my-backend -listen tls:0.0.0.0:7443 -cert cert.pem -key key.pem -client-ca ca.pem
//
// The exit code is 0 after the end of its input or a signal to stop, 1 after a failure, and 2 for wrong
// arguments.
func Main(a sandboxer.Adapter) {
	os.Exit(run(a, os.Args, os.Stdin, os.Stdout))
}

func run(a sandboxer.Adapter, args []string, in io.Reader, out *os.File) int {
	fs := flag.NewFlagSet(args[0], flag.ContinueOnError)
	listen := fs.String("listen", "", "serve as a service: unix:/path or tls:host:port")
	cert := fs.String("cert", "", "certificate `file` of a service by TLS, in PEM")
	key := fs.String("key", "", "its key `file`")
	ca := fs.String("client-ca", "", "`file` with who signs the certificates of brokers")
	if err := fs.Parse(args[1:]); err != nil || fs.NArg() > 0 {
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Stdout = os.Stderr
	var err error
	if *listen == "" {
		err = Serve(ctx, a, in, out)
	} else {
		var l net.Listener
		if l, err = listener(*listen, *cert, *key, *ca); err == nil {
			err = ServeListener(ctx, a, l)
		}
	}
	if err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// listener listens on the address where of a service.
func listener(where, cert, key, ca string) (net.Listener, error) {
	kind, addr, _ := strings.Cut(where, ":")
	switch kind {
	case "unix":
		if st, err := os.Lstat(addr); err == nil && st.Mode().Type() == os.ModeSocket {
			_ = os.Remove(addr) // of a former process
		}
		old := syscall.Umask(0o177)
		defer syscall.Umask(old)
		return net.Listen("unix", addr)
	case "tls":
		config, err := protocol.TLS(ca, cert, key)
		if err != nil {
			return nil, fmt.Errorf("-listen tls: %s", sandboxer.Message(err))
		}
		return tls.Listen("tcp", addr, config)
	}
	return nil, fmt.Errorf("-listen %s: want unix:/path or tls:host:port", where)
}

// Serve speaks the extension protocol for a on in and out until in ends or ctx is done. The end of in
// is success. Serve opens one extension and closes it at the end.
func Serve(ctx context.Context, a sandboxer.Adapter, in io.Reader, out io.Writer) error {
	return serve(ctx, a, protocol.NewReader(in), out, nil)
}

// maxWaiting bounds streams of a service whose requests have not arrived.
const maxWaiting = 256

// ServeListener serves a to the brokers that connect to l, until ctx is done. Each broker has its own
// extension. Every client of l has full access. So l must be a Unix socket that only the broker's user
// reaches, or require client certificates.
func ServeListener(ctx context.Context, a sandboxer.Adapter, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	waiting := newWaiting()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil { // of one connection, or too many files are open
			time.Sleep(100 * time.Millisecond)
			continue
		}
		wg.Go(func() { accepted(ctx, a, conn, waiting) })
	}
}

// accepted serves one connection of a service.
func accepted(ctx context.Context, a sandboxer.Adapter, conn net.Conn, waiting *waiting) {
	_ = conn.SetDeadline(time.Now().Add(protocol.HelloTime))
	early := context.AfterFunc(ctx, func() { conn.Close() })
	defer early()
	r := protocol.NewReader(conn)
	first, err := r.Peek(1)
	if err != nil {
		conn.Close()
		return
	}
	if first[0] != '{' {
		token, err := protocol.ReadToken(r)
		_ = conn.SetDeadline(time.Time{})
		if err != nil || !waiting.put(token, protocol.NewStream(conn, r)) {
			conn.Close()
		}
		return
	}
	defer conn.Close()
	if err := serve(ctx, a, r, conn, waiting); err != nil && ctx.Err() == nil {
		slog.Warn("a broker's connection ended", "err", err)
	}
}

// waiting has the streams of a service whose requests have not arrived, and the requests whose streams have not.
type waiting struct {
	mu      sync.Mutex
	streams map[string]chan *protocol.Stream
}

func newWaiting() *waiting { return &waiting{streams: map[string]chan *protocol.Stream{}} }

// of returns the channel for the stream of token; false if there are too many.
func (w *waiting) of(token string) (chan *protocol.Stream, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.streams[token]
	if c == nil {
		if len(w.streams) >= maxWaiting {
			return nil, false
		}
		c = make(chan *protocol.Stream, 1)
		w.streams[token] = c
		time.AfterFunc(protocol.TokenTime, func() { w.drop(token, c) })
	}
	return c, true
}

// drop forgets token, and closes a stream that no request asked for.
func (w *waiting) drop(token string, c chan *protocol.Stream) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.streams[token] == c {
		delete(w.streams, token)
	}
	select {
	case s := <-c:
		s.Close()
	default:
	}
}

func (w *waiting) put(token string, s *protocol.Stream) bool {
	c, ok := w.of(token)
	if !ok {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.streams[token] != c {
		return false // it is too late
	}
	select {
	case c <- s:
		return true
	default: // there is one
		return false
	}
}

func (w *waiting) take(ctx context.Context, token string) (*protocol.Stream, error) {
	c, ok := w.of(token)
	if !ok {
		return nil, sandboxer.E(sandboxer.Exhausted, nil, "too many streams are under way")
	}
	ctx, cancel := context.WithTimeout(ctx, protocol.TokenTime)
	defer cancel()
	select {
	case s := <-c:
		w.drop(token, c)
		return s, nil
	case <-ctx.Done():
		w.drop(token, c)
		return nil, sandboxer.E(sandboxer.Unavailable, ctx.Err(), "the stream of a request did not come")
	}
}

// serve speaks on one control connection.
func serve(ctx context.Context, a sandboxer.Adapter, r *bufio.Reader, w io.Writer, streams *waiting) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	theirs, err := within(ctx, protocol.HelloTime, func() (*protocol.Hello, error) { return protocol.ReadHello(r) })
	if err != nil {
		if errors.Is(err, io.EOF) {
			return nil // the other side wanted nothing
		}
		return err
	}
	ours := protocol.Hello{Protocols: protocol.Versions, Program: a.Kind + " " + version()}
	if _, err := protocol.Agree(theirs.Protocols); err != nil {
		ours.Error = protocol.Traced(err)
		return errors.Join(err, protocol.WriteHello(w, ours))
	}
	log := &logger{early: slog.NewTextHandler(os.Stderr, nil)}
	o := opened{base: ctx, streams: theirs.Streams, waiting: streams}
	var conn *protocol.Conn
	env := sandboxer.Env{
		Extension: theirs.Extension, Owner: theirs.Owner, Dir: theirs.Dir, Hosts: theirs.Hosts, Own: theirs.Own, Log: slog.New(log),
		Decode: func(v any) error { return catalog.DecodeConfig(orEmpty(theirs.Config), v) },
		Recorded: func(ctx context.Context) ([]sandboxer.Handle, error) {
			var all []sandboxer.Handle
			for {
				var page protocol.Handles
				err := conn.Call(ctx, protocol.MethodRecorded, protocol.RecordedParams{Skip: len(all)}, &page, "")
				if all = append(all, page.Handles...); err != nil || !page.More || len(page.Handles) == 0 {
					return all, err
				}
			}
		},
	}
	if len(theirs.NotesKey) > 0 {
		env.Notes, err = notes.WithKey(env.Dir, env.Extension, theirs.NotesKey)
	}
	if err == nil {
		o.ext, err = a.Open(ctx, env)
	}
	if err != nil {
		ours.Error = protocol.Traced(err)
		for _, f := range catalog.FaultsOf(err) {
			ours.Error.Fault(f.Path, f.Message)
		}
		return errors.Join(err, protocol.WriteHello(w, ours))
	}
	if c, ok := o.ext.(io.Closer); ok {
		defer c.Close()
	}
	description, err := describe(a, o.ext)
	if err != nil {
		ours.Error = protocol.Traced(err)
		return errors.Join(err, protocol.WriteHello(w, ours))
	}
	o.can = map[sandboxer.Capability]bool{"": true}
	for _, c := range description.Capabilities {
		o.can[c] = true
	}
	ours.Description = &description
	if err := protocol.WriteHello(w, ours); err != nil {
		return err
	}
	if d, ok := w.(net.Conn); ok {
		_ = d.SetDeadline(time.Time{}) // the hello was in time
	}
	conn = protocol.New(r, w, protocol.Options{Serve: o.serve, Trace: true, MaxServed: 256})
	defer conn.Wait() // before the extension is closed
	defer conn.Close()
	log.connect(conn)
	stop := context.AfterFunc(ctx, conn.Close)
	defer stop()
	if err := conn.Run(ctx); !errors.Is(err, io.EOF) && ctx.Err() == nil {
		return err
	}
	return nil
}

func orEmpty(config json.RawMessage) json.RawMessage {
	if len(config) == 0 {
		return json.RawMessage("{}")
	}
	return config
}

// within runs f, which cannot be interrupted, for no longer than limit.
func within[T any](ctx context.Context, limit time.Duration, f func() (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	type answer struct {
		v   T
		err error
	}
	c := make(chan answer, 1)
	go func() {
		v, err := f()
		c <- answer{v, err}
	}()
	select {
	case a := <-c:
		return a.v, a.err
	case <-ctx.Done():
		var none T
		return none, fmt.Errorf("no hello came: %w", ctx.Err())
	}
}

// describe returns the description of ext, which a has opened.
func describe(a sandboxer.Adapter, ext sandboxer.Extension) (sandboxer.Description, error) {
	if d, ok := ext.(sandboxer.Describer); ok {
		return d.Describe(), nil
	}
	schema, err := catalog.ConfigSchema(a)
	if err != nil {
		return sandboxer.Description{}, sandboxer.E(sandboxer.Internal, err, "the configuration of %s has no schema", a.Kind)
	}
	return sandboxer.Description{
		Title: a.Title, Help: strings.TrimSpace(a.Help), Isolation: a.Isolation, Pricing: a.Pricing,
		Capabilities: capabilities(ext), Inputs: append([]sandboxer.Input{}, a.Inputs...), Config: schema, Runtime: a.Runtime,
	}, nil
}

// version is the program's version, from its module.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

// opened is an extension that is served.
type opened struct {
	base    context.Context // ends with the connection
	ext     sandboxer.Extension
	can     map[sandboxer.Capability]bool
	streams string   // path of the socket
	waiting *waiting // of a service
}

func (o *opened) serve(ctx context.Context, r *protocol.Request) (any, error) {
	m, ok := methods[r.Method]
	if !ok || !o.can[m.can] {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "this extension does not support %.64q", r.Method)
	}
	return m.do(call{ctx: ctx, ext: o.ext, req: r, lasting: o.base, open: o.open})
}

// open opens the stream of a request.
func (o *opened) open(ctx context.Context, token string) (*protocol.Stream, error) {
	s, err := o.connect(ctx, token)
	if err != nil {
		return nil, err
	}
	s.Trace = true
	return s, nil
}

func (o *opened) connect(ctx context.Context, token string) (*protocol.Stream, error) {
	switch {
	case token == "":
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the request has no stream")
	case o.waiting != nil:
		return o.waiting.take(ctx, token)
	}
	s, err := protocol.OpenStream(o.streams, token)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the broker's socket for streams cannot be reached")
	}
	return s, nil
}

// A logger sends what the adapter logs to the broker.
type logger struct {
	early slog.Handler // until there is a connection
	mu    sync.Mutex
	conn  *protocol.Conn
	attrs []slog.Attr
	group string
	root  *logger
}

func (l *logger) connect(c *protocol.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn = c
}

func (l *logger) connection() *protocol.Conn {
	if l.root != nil {
		return l.root.connection()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conn
}

// Enabled implements slog.Handler: the broker decides.
func (l *logger) Enabled(context.Context, slog.Level) bool { return true }

// logTime is how long a line waits for a broker that does not read.
const logTime = time.Second

// Handle implements slog.Handler.
func (l *logger) Handle(ctx context.Context, r slog.Record) error {
	conn := l.connection()
	if conn == nil {
		return l.early.Handle(ctx, r)
	}
	attrs := map[string]string{}
	for _, a := range l.attrs {
		attrs[a.Key] = a.Value.String()
	}
	r.Attrs(func(a slog.Attr) bool {
		attrs[l.group+a.Key] = a.Value.String()
		return true
	})
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), logTime)
	defer cancel()
	conn.Log(ctx, r.Level, r.Message, attrs)
	return nil
}

// WithAttrs implements slog.Handler.
func (l *logger) WithAttrs(attrs []slog.Attr) slog.Handler {
	next := l.child()
	for _, a := range attrs {
		next.attrs = append(next.attrs, slog.Attr{Key: l.group + a.Key, Value: a.Value})
	}
	next.early = l.early.WithAttrs(attrs)
	return next
}

// WithGroup implements slog.Handler.
func (l *logger) WithGroup(name string) slog.Handler {
	next := l.child()
	next.group += name + "."
	next.early = l.early.WithGroup(name)
	return next
}

func (l *logger) child() *logger {
	root := l
	if l.root != nil {
		root = l.root
	}
	return &logger{early: l.early, attrs: append([]slog.Attr{}, l.attrs...), group: l.group, root: root}
}

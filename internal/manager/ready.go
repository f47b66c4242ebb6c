package manager

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

const (
	// readyStep is the first pause before a sandbox is asked again. Each pause is a quarter longer than the one before, up to
	// maxReadyStep. So at most a quarter is added to the start time of a fast sandbox.
	readyStep    = 5 * time.Millisecond
	maxReadyStep = 100 * time.Millisecond
	// maxReadyAnswer bounds the part of an answer that is read (only its status counts), and
	// maxReadySaid the part of a command's output that is shown.
	maxReadyAnswer = 64 << 10
	maxReadySaid   = 200
)

// An asker asks a sandbox once whether it is ready. answer is the result, as text for users. After an error there is no point
// in asking again.
type asker func(ctx context.Context) (ready bool, answer string, err error)

// wantsAnswer reports whether the ready check of sb is to run: whenever its processes were started, and not when frozen ones
// continue.
func wantsAnswer(sb *sandboxer.Sandbox) bool {
	started := !lifecycle.IsPaused(sb) || sb.Pause.Depth == sandboxer.PauseFiles && !sb.Pause.Undo
	return sb.Spec.Profile.Ready.Asks() && started && !lifecycle.IsPooled(sb)
}

// awaitAnswer waits until sb, which its extension reports as ready, passes the ready check of its profile, and notes the answer
// in j. A resumed sandbox runs even if the check fails, with a warning, so that its content stays reachable.
func (wk backed) awaitAnswer(ctx context.Context, reach sandboxer.Reachability) error {
	check := wk.sb.Spec.Profile.Ready.WithDefaults()
	ask, what, err := askerFor(wk.b, wk.sb.Handle, check, reach)
	var answer string
	if err == nil {
		report, done := wk.m.events.TrackProgress(events.Of(ctx, wk.sb, sandboxer.EventProgress, ""))
		defer done()
		answer, err = askUntil(ctx, ask, check.Timeout, func(answer string) {
			report(sandboxer.Progress{Step: "waiting for " + what + "; so far it " + answer})
		})
	}
	switch {
	case err == nil:
		wk.j.told = append(wk.j.told, events.Of(ctx, wk.sb, sandboxer.EventStep, fmt.Sprintf("ready: %s %s", what, answer)))
		return nil
	case ctx.Err() != nil:
		return err
	}
	if err == errNotReady {
		err = sandboxer.E(sandboxer.Failed, nil, "it was not ready within %s: %s %s", sandboxer.FormatDuration(check.Timeout), what, answer).
			WithHint("check the command that it starts with, or change the readiness check of %s (ready)", wk.sb.Profile)
	}
	if lifecycle.IsPaused(wk.sb) && !isKind(err, sandboxer.NotFound) {
		wk.j.told = append(wk.j.told, events.Of(ctx, wk.sb, sandboxer.EventWarning, "it runs, but may not be ready: "+sandboxer.Message(err)))
		return nil
	}
	return err
}

// errNotReady says that the time to get ready is over.
var errNotReady = errors.New("not ready in time")

// askUntil asks until the check passes, or until the time is over. It returns the last answer.
func askUntil(ctx context.Context, ask asker, limit time.Duration, waiting func(answer string)) (string, error) {
	asking, cancel := context.WithTimeoutCause(ctx, limit, errNotReady)
	defer cancel()
	answer := "was not asked"
	for step := readyStep; ; step = min(step+step/4, maxReadyStep) {
		ready, said, err := ask(asking)
		switch {
		case err != nil:
			return answer, err
		case ready:
			return said, nil
		case !isOver(asking) || answer == "was not asked":
			answer = said // an answer says more than that there was no time for one
		}
		waiting(answer)
		select {
		case <-asking.Done():
			return answer, context.Cause(asking)
		case <-time.After(step):
		}
	}
}

// isOver reports whether the time of ctx is over. A connection takes its deadline from ctx, and ends a moment before
// ctx does.
func isOver(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// askerFor returns the asker for check and the sandbox of h, and its description for users.
func askerFor(b *backend.Backend, h sandboxer.Handle, check sandboxer.ReadyCheck, reach sandboxer.Reachability) (ask asker, what string, err error) {
	if len(check.Command) > 0 {
		return commandAsker(b, h, check.Command), "the command " + strconv.Quote(check.Command[0]), nil
	}
	var at endpoint
	if check.HTTP.Port == 0 {
		if reach.URL == "" {
			return nil, "", sandboxer.E(sandboxer.Unsupported, nil, "the sandboxes of %s have no URL for a readiness check", b.ID()).
				WithHint("name a port in the profile: ready.http.port")
		}
		at = endpoint{base: reach.URL, dial: (&net.Dialer{}).DialContext}
		if b.DialsURLs() {
			at.dial, at.secure = func(ctx context.Context, _, _ string) (net.Conn, error) { return b.DialURL(ctx, h) }, true
		}
		what = "GET " + check.HTTP.Path
	} else {
		at = endpoint{base: "http://localhost:" + strconv.Itoa(check.HTTP.Port)}
		what = fmt.Sprintf("GET %s on port %d", check.HTTP.Path, check.HTTP.Port)
	}
	ways := func(ctx context.Context) (endpoint, error) { return at, nil }
	switch port := check.HTTP.Port; {
	case port == 0:
	case b.Can(sandboxer.CanDial):
		at.dial = func(ctx context.Context, _, _ string) (net.Conn, error) { return b.Dial(ctx, h, port) }
	case b.Can(sandboxer.CanExpose):
		ways = func(ctx context.Context) (endpoint, error) {
			e, err := b.Expose(ctx, h, port)
			return endpoint{base: e.URL, header: e.Header, dial: (&net.Dialer{}).DialContext}, err
		}
	default:
		at.dial = func(ctx context.Context, _, _ string) (net.Conn, error) { return dialByExec(ctx, b, h, port), nil }
	}
	return func(ctx context.Context) (bool, string, error) {
		e, err := ways(ctx)
		if err == nil {
			var status int
			if status, err = e.get(ctx, check.HTTP.Path); err == nil && status == check.HTTP.Status {
				return true, fmt.Sprintf("answered %d", status), nil
			}
			if err == nil {
				return false, fmt.Sprintf("answered %d instead of %d", status, check.HTTP.Status), nil
			}
		}
		return false, whyNoAnswer(ctx, err), hopeless(err)
	}, what, nil
}

// hopeless returns err if it is useless to ask again, and otherwise nil.
func hopeless(err error) error {
	for _, k := range []sandboxer.Kind{sandboxer.NotFound, sandboxer.Unsupported, sandboxer.Invalid, sandboxer.Denied} {
		if isKind(err, k) {
			return err
		}
	}
	return nil
}

// whyNoAnswer explains in our own words why a request got no answer. The text of the guest is not repeated.
func whyNoAnswer(ctx context.Context, err error) string {
	var known *sandboxer.Error
	switch {
	case isOver(ctx):
		return "did not answer in the remaining time"
	case errors.As(err, &known):
		return "did not answer: " + sandboxer.Message(err)
	case errors.Is(err, errNoHTTP):
		return "gave an answer that is not HTTP, or too long"
	}
	return "did not answer: the connection failed, or was closed"
}

// An endpoint is where HTTP requests of one sandbox go.
type endpoint struct {
	base   string      // URL
	header http.Header // credentials for the backend's edge
	dial   func(ctx context.Context, network, addr string) (net.Conn, error)
	secure bool // dial does TLS where base is of https
}

// errNoHTTP says that the answer was not HTTP.
var errNoHTTP = errors.New("no HTTP")

// get sends one GET request on a connection of its own and returns the status of the answer. It
// follows no redirect and takes no more than maxReadyAnswer: the sandbox may answer anything.
func (e endpoint) get(ctx context.Context, path string) (status int, err error) {
	u, err := url.Parse(strings.TrimSuffix(e.base, "/") + path)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return 0, sandboxer.E(sandboxer.Invalid, nil, "the sandbox's URL is not one of http or https")
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return 0, sandboxer.E(sandboxer.Invalid, nil, "the sandbox's URL cannot be requested")
	}
	req.Close = true
	req.Header.Set("User-Agent", "sandboxer")
	for name, values := range e.header {
		req.Header[name] = values
	}
	addr := u.Host
	if u.Port() == "" {
		addr = net.JoinHostPort(u.Hostname(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
	}
	c, err := e.dial(ctx, "tcp", addr)
	if err != nil {
		return 0, err
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	defer c.Close()
	if u.Scheme == "https" && !e.secure {
		s := tls.Client(c, &tls.Config{ServerName: u.Hostname(), MinVersion: tls.VersionTLS12})
		if err := s.HandshakeContext(ctx); err != nil {
			return 0, err
		}
		c = s
	}
	if err := req.Write(c); err != nil {
		return 0, cause(c, err)
	}
	r := &io.LimitedReader{R: c, N: maxReadyAnswer}
	for br := bufio.NewReader(r); ; {
		resp, err := http.ReadResponse(br, req)
		var broken net.Error
		switch {
		case err == nil && (resp.StatusCode >= 200 || resp.StatusCode == http.StatusSwitchingProtocols): // others announce that the answer comes
			return resp.StatusCode, nil
		case err == nil:
		case r.N == maxReadyAnswer || errors.As(err, &broken): // nothing came
			return 0, cause(c, err)
		default:
			return 0, errNoHTTP
		}
	}
}

// cause is why c, that failed with err, ended, if it knows.
func cause(c net.Conn, err error) error {
	if e, ok := c.(*execConn); ok {
		if why := e.why(); why != nil {
			return why
		}
	}
	return err
}

// commandAsker asks by running a command: exit code 0 is ready.
func commandAsker(b *backend.Backend, h sandboxer.Handle, args []string) asker {
	return func(ctx context.Context) (bool, string, error) {
		said := &capture.Last{Max: maxReadySaid}
		x, err := b.Exec(ctx, h, sandboxer.Cmd{Args: args, Stderr: said})
		switch {
		case isOver(ctx):
			return false, "did not end in the remaining time", nil
		case err != nil:
			return false, "could not be run: " + sandboxer.Message(err), hopeless(err)
		}
		answer := fmt.Sprintf("ended with %d", x.Code)
		if line := lastLine(said.String()); line != "" && x.Code != 0 {
			answer += ": " + line
		}
		return x.Code == 0, answer, nil
	}
}

// lastLine is the last line of said that is not blank, fit to be shown.
func lastLine(said string) string {
	said = strings.TrimSpace(said)
	said = said[strings.LastIndexByte(said, '\n')+1:]
	return capture.Text(said, maxReadySaid)
}

// execRelay connects its input and output to a port, with a program that is inside.
const execRelay = `port=$1
if command -v bash >/dev/null 2>&1; then
	exec bash -c 'exec 3<>"/dev/tcp/127.0.0.1/$1" 4<&0 || exit; cat <&4 >&3 & cat <&3; kill $!' bash "$port"
elif command -v nc >/dev/null 2>&1; then
	exec nc 127.0.0.1 "$port"
elif command -v python3 >/dev/null 2>&1; then
	exec python3 -c 'import os, socket, sys, threading
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def up():
    while b := os.read(0, 65536):
        s.sendall(b)
threading.Thread(target=up, daemon=True).start()
while b := s.recv(65536):
    os.write(1, b)' "$port"
fi
exit 96`

// noRelay is the exit code of execRelay where the sandbox has no program for it.
const noRelay = 96

// An execConn is a connection to a port inside that a command carries. Closing it ends the
// command.
type execConn struct {
	net.Conn
	cancel context.CancelFunc
	done   chan struct{}
	err    error // of the command; set when done is closed
}

// dialByExec opens a connection to a port inside a sandbox that has no other way to it.
func dialByExec(ctx context.Context, b *backend.Backend, h sandboxer.Handle, port int) net.Conn {
	ctx, cancel := context.WithCancel(ctx)
	near, far := net.Pipe()
	c := &execConn{Conn: near, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer far.Close() // after that: a caller that sees the end may ask why
		defer close(c.done)
		x, err := b.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", execRelay, "sh", strconv.Itoa(port)}, Stdin: far, Stdout: far})
		switch {
		case err != nil:
			c.err = err
		case x.Code == noRelay || x.Code == 127:
			c.err = sandboxer.E(sandboxer.Unsupported, nil, "nothing in the sandbox can connect to a port: it has no shell with bash, nc or python3").
				WithHint("use an image that has one of them, or check readiness by a command (ready.command)")
		case x.Code != 0:
			c.err = sandboxer.E(sandboxer.Unavailable, nil, "nothing listens on port %d", port)
		}
	}()
	return c
}

// Close ends the command, and returns when it has ended.
func (c *execConn) Close() error {
	err := c.Conn.Close()
	c.cancel()
	<-c.done
	return err
}

// why is why the command ended, nil if it did not or all is well.
func (c *execConn) why() error {
	select {
	case <-c.done:
		return c.err
	default:
		return nil
	}
}

package engine

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// An API is one engine by its HTTP API, Docker's or Podman's. It does not need the engine's program, and a
// call takes a millisecond. Its methods are safe for concurrent use.
//
// Kinds of all methods: NotFound for what does not exist, Conflict where the engine says so, Exhausted for
// a full disk, Unavailable for an engine that is not there (ErrAbsent) or does not answer
// (ErrHangs), Failed, with the engine's message, for what it refuses otherwise.
type API struct {
	o      APIOptions
	client *http.Client

	mu     sync.Mutex
	silent bool                  // it did not answer when it was last asked
	conns  map[net.Conn]struct{} // of requests; nil once the API is closed
}

// APIOptions say which engine.
type APIOptions struct {
	Name string // what messages call it
	// Dial opens a connection on which the engine speaks HTTP.
	Dial func(ctx context.Context) (net.Conn, error)
	// Every is how often an engine is pinged while a call waits for it, and how long it may
	// take to answer the ping; 0 means WatchEvery.
	Every time.Duration
}

// apiVersion is the oldest version of the API that has all that is used here: that of Docker
// 19.03. Podman accepts it, too.
const apiVersion = "/v1.40"

const (
	maxAPIAnswer = 64 << 20 // bytes of one plain answer
	maxAPISaid   = 64 << 10 // of an error
)

// NewAPI returns a client of an engine. It makes no request yet.
func NewAPI(o APIOptions) *API {
	if o.Every == 0 {
		o.Every = WatchEvery
	}
	a := &API{o: o, conns: map[net.Conn]struct{}{}}
	a.client = &http.Client{
		Transport: &http.Transport{
			DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return a.dial(ctx) },
			MaxIdleConnsPerHost: 4,
			IdleConnTimeout:     30 * time.Second,
			DisableCompression:  true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return a
}

// dial opens a connection that ends with the API, even if it opens after its caller has left.
func (a *API) dial(ctx context.Context) (net.Conn, error) {
	c, err := a.o.Dial(ctx)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.conns == nil {
		c.Close()
		return nil, net.ErrClosed
	}
	t := &apiConn{Conn: c, a: a}
	a.conns[t] = struct{}{}
	return t, nil
}

// An apiConn is a connection that the API closes.
type apiConn struct {
	net.Conn
	a *API
}

func (c *apiConn) Close() error {
	c.a.mu.Lock()
	delete(c.a.conns, c)
	c.a.mu.Unlock()
	return c.Conn.Close()
}

// Name is what messages call the engine.
func (a *API) Name() string { return a.o.Name }

// Close ends the requests that are under way, and those to come. Attached commands go on.
func (a *API) Close() {
	a.client.CloseIdleConnections()
	a.mu.Lock()
	conns := a.conns
	a.conns = nil
	a.mu.Unlock()
	for c := range conns {
		c.Close()
	}
}

// hung is the error of calls that an engine does not answer.
func (a *API) hung() error {
	return sandboxer.E(sandboxer.Unavailable, ErrHangs, "the engine %s does not answer", a.o.Name).
		WithHint("the server tries again, and what runs there continues to run; check the engine there")
}

// Attend returns ctx that also ends when the engine has not answered three pings in a row, for a
// call of the engine. The duration of a call is no sign of a hang: an engine may have an image of
// gigabytes to unpack. done must be called with the error of the call, and returns the error for
// the caller.
func (a *API) Attend(ctx context.Context) (context.Context, func(error) error, error) {
	a.mu.Lock()
	silent := a.silent
	a.mu.Unlock()
	if silent { // no call waits long for one that did not answer
		if !a.answers(ctx, min(recheckTime, a.o.Every)) {
			if ctx.Err() != nil {
				return nil, nil, a.failed(ctx, ctx.Err())
			}
			return nil, nil, a.hung()
		}
	}
	within, cancel := context.WithCancelCause(ctx)
	hung := a.hung()
	watch := time.AfterFunc(a.o.Every, func() {
		for missed := 0; within.Err() == nil; {
			if a.answers(within, a.o.Every) {
				missed = 0
				select {
				case <-within.Done():
				case <-time.After(a.o.Every):
				}
				continue
			}
			if missed++; missed >= watchMisses && within.Err() == nil {
				cancel(hung)
			}
		}
	})
	return within, func(err error) error {
		watch.Stop()
		if err != nil && ctx.Err() == nil && context.Cause(within) == hung {
			err = hung
		}
		cancel(nil)
		return err
	}, nil
}

// answers asks the engine whether it is there.
func (a *API) answers(ctx context.Context, limit time.Duration) bool {
	short, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	r, err := http.NewRequestWithContext(short, http.MethodGet, "http://engine/_ping", nil)
	if err != nil {
		return false
	}
	res, err := a.client.Do(r)
	if err == nil {
		_, _ = io.CopyN(io.Discard, res.Body, 1<<10) // so that the connection is used again
		res.Body.Close()
	}
	// One that is not there has not hung: the call itself says so.
	ok := err == nil || short.Err() == nil
	if ctx.Err() == nil {
		a.mu.Lock()
		a.silent = !ok
		a.mu.Unlock()
	}
	return ok
}

// failed is the error of a request that got no answer.
func (a *API) failed(ctx context.Context, err error) error {
	var se *sandboxer.Error
	switch {
	case ctx.Err() != nil:
		return sandboxer.E(sandboxer.KindOf(ctx.Err()), ctx.Err(), "the request to the engine %s was given up", a.o.Name)
	case errors.As(err, &se):
		return se
	}
	return sandboxer.E(sandboxer.Unavailable, errors.Join(ErrAbsent, err), "the engine %s cannot be reached", a.o.Name).
		WithHint("check that it runs, and that this account may use it")
}

// said is the error in an answer of the engine.
func (a *API) said(what string, res *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(res.Body, maxAPISaid))
	var m struct {
		Message string `json:"message"`
		Cause   string `json:"cause"` // of Podman
	}
	if json.Unmarshal(body, &m) != nil || m.Message == "" {
		m.Message = http.StatusText(res.StatusCode)
	}
	return a.refused(what, res.StatusCode, m.Message)
}

// refused is the error for what the engine refused, with its message.
func (a *API) refused(what string, status int, words string) error {
	text := OneLine(words)
	switch {
	case status == http.StatusNotFound:
		return sandboxer.E(sandboxer.NotFound, errors.New(text), "%s: the engine %s does not have it: %s", what, a.o.Name, text)
	case status == http.StatusConflict, strings.Contains(text, "is already in use"): // as Podman says it of names
		return sandboxer.E(sandboxer.Conflict, errors.New(text), "%s: the engine %s refuses: %s", what, a.o.Name, text)
	}
	e := Failure(a.o.Name, what, words, words)
	if e.Kind == sandboxer.Failed && status == http.StatusServiceUnavailable {
		e.Kind = sandboxer.Unavailable
	}
	return e
}

// request makes a request and passes the answer to read. body is sent as JSON, or, if it is an
// io.Reader, as it is.
func (a *API) request(ctx context.Context, what, method, path string, query url.Values, body any, read func(*http.Response) error) error {
	within, done, err := a.Attend(ctx)
	if err != nil {
		return err
	}
	return done(func() error {
		var send io.Reader
		kind := "application/json"
		switch b := body.(type) {
		case nil:
		case io.Reader:
			send, kind = b, "application/x-tar"
		default:
			data, err := json.Marshal(body)
			if err != nil {
				return sandboxer.E(sandboxer.Internal, err, "a request to the engine cannot be encoded")
			}
			send = bytes.NewReader(data)
		}
		at := "http://engine" + apiVersion + path
		if len(query) > 0 {
			at += "?" + query.Encode()
		}
		r, err := http.NewRequestWithContext(within, method, at, send)
		if err != nil {
			return sandboxer.E(sandboxer.Internal, err, "a request to the engine cannot be made")
		}
		if send != nil {
			r.Header.Set("Content-Type", kind)
		}
		res, err := a.client.Do(r)
		if err != nil {
			return a.failed(within, err)
		}
		defer res.Body.Close()
		if res.StatusCode >= 300 && res.StatusCode != http.StatusNotModified {
			return a.said(what, res)
		}
		if read == nil {
			_, _ = io.CopyN(io.Discard, res.Body, maxAPISaid)
			return nil
		}
		if err := read(res); err != nil {
			if within.Err() != nil {
				return a.failed(within, err)
			}
			var se *sandboxer.Error
			if errors.As(err, &se) {
				return err
			}
			return sandboxer.E(sandboxer.Unavailable, err, "%s: the answer of the engine %s cannot be read", what, a.o.Name)
		}
		return nil
	}())
}

// remove removes what is at path. Absence is success.
func (a *API) remove(ctx context.Context, what, path string, query url.Values) error {
	err := a.request(ctx, what, http.MethodDelete, path, query, nil, nil)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil
	}
	return err
}

// into reads a plain answer.
func into(v any) func(*http.Response) error {
	return func(res *http.Response) error {
		return json.NewDecoder(io.LimitReader(res.Body, maxAPIAnswer)).Decode(v)
	}
}

// filters encodes the filters of a listing.
func filters(f map[string][]string) url.Values {
	data, err := json.Marshal(f)
	if err != nil {
		panic(err) // strings
	}
	return url.Values{"filters": {string(data)}}
}

// labelFilter is the filter for objects with all of these labels.
func labelFilter(labels map[string]string) []string {
	var all []string
	for k, v := range labels {
		if v != "" {
			k += "=" + v
		}
		all = append(all, k)
	}
	return all
}

// Info is how an engine describes itself.
type Info struct {
	ServerVersion   string
	Architecture    string // as uname -m has it, or amd64
	OSType          string
	NCPU            int
	MemTotal        int64
	MemoryLimit     bool
	SwapLimit       bool
	PidsLimit       bool
	CPUCfsQuota     bool       `json:"CpuCfsQuota"`
	Driver          string     // that keeps containers' files
	DriverStatus    [][]string // names and values of what it says of itself
	SecurityOptions []string
	Runtimes        map[string]json.RawMessage // by name
	Podman          bool                       `json:"-"`
	Rootless        bool                       // root in its containers is not its machine's; Podman says so here alone, Docker in SecurityOptions
}

// Arch is the architecture as Go calls it.
func (i Info) Arch() string {
	switch i.Architecture {
	case "x86_64":
		return "amd64"
	case "aarch64":
		return "arm64"
	}
	return i.Architecture
}

// Backing is the file system of containers' files, "" where the engine does not report it.
func (i Info) Backing() string {
	for _, s := range i.DriverStatus {
		if len(s) == 2 && s[0] == "Backing Filesystem" {
			return s[1]
		}
	}
	return ""
}

// Snapshotter reports whether a snapshotter of containerd keeps containers' files, and not a storage driver of the engine.
func (i Info) Snapshotter() bool {
	return slices.ContainsFunc(i.DriverStatus, func(s []string) bool {
		return len(s) == 2 && s[0] == "driver-type" && strings.HasPrefix(s[1], "io.containerd.snapshotter.")
	})
}

// Info asks what the engine is.
func (a *API) Info(ctx context.Context) (i Info, err error) {
	err = a.request(ctx, "inspecting the engine", http.MethodGet, "/info", nil, nil, func(res *http.Response) error {
		i.Podman = strings.HasPrefix(res.Header.Get("Server"), "Libpod/")
		return into(&i)(res)
	})
	i.Rootless = i.Rootless || i.secured("rootless")
	return i, err
}

// Remaps reports whether the engine maps the user IDs of all containers (userns-remap).
func (i Info) Remaps() bool { return i.secured("userns") }

func (i Info) secured(by string) bool {
	return slices.ContainsFunc(i.SecurityOptions, func(o string) bool { return slices.Contains(strings.Split(o, ","), "name="+by) })
}

// An Event is an engine's event about a container.
type Event struct {
	ID     string            // of the container
	Action string            // die, pause, unpause, destroy, …; Podman has died and remove
	Labels map[string]string // of the container, mixed with other attributes
}

// maxEvent bounds the size of one event.
const maxEvent = 1 << 20

// Events passes the engine's events about containers with all of these labels to f, from when it calls opened
// on, until ctx ends or the engine does, and returns why. f is called by one goroutine. Events that it does not
// take in time wait at the engine.
func (a *API) Events(ctx context.Context, labels map[string]string, opened func(), f func(Event)) error {
	q := filters(map[string][]string{"type": {"container"}, "label": labelFilter(labels)})
	return a.request(ctx, "watching the engine", http.MethodGet, "/events", q, nil, func(res *http.Response) error {
		opened()
		lines := bufio.NewScanner(res.Body)
		lines.Buffer(nil, maxEvent)
		for lines.Scan() {
			var ev struct {
				Action string
				Actor  struct {
					ID         string
					Attributes map[string]string
				}
			}
			if err := json.Unmarshal(lines.Bytes(), &ev); err != nil {
				return err
			}
			f(Event{ID: ev.Actor.ID, Action: ev.Action, Labels: ev.Actor.Attributes})
		}
		if err := lines.Err(); err != nil {
			return err
		}
		return io.ErrUnexpectedEOF
	})
}

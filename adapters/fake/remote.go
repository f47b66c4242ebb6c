package fake

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A world of its own process is asked over a Unix socket: POST /<method>, JSON both
// ways. Commands and files of its sandboxes are the client's own business, as they
// share the machine; they end with the sandbox all the same.

// ServeOptions say where a world lives.
type ServeOptions struct {
	Socket string  // Unix socket to listen on
	Log    string  // file the log is appended to, each line on the disk before it is answered; empty means none
	Faults []Fault // from the start
	Ready  func()  // called once the socket listens; may be nil
}

// Serve runs a world until ctx is done, and destroys it then. It is the oracle of
// crash tests: it outlives the broker and remembers every step the broker took.
func Serve(ctx context.Context, opts ServeOptions) error {
	for _, f := range opts.Faults {
		if err := f.validate(); err != nil {
			return err
		}
	}
	w := NewWorld()
	defer w.Close()
	w.Inject(opts.Faults...)
	if opts.Log != "" {
		file, err := os.OpenFile(opts.Log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			return err
		}
		w.file = file
	}
	if err := w.note(Entry{Op: OpStart}); err != nil {
		return err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", opts.Socket)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: w.handler(), ReadHeaderTimeout: time.Minute}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if opts.Ready != nil {
		opts.Ready()
	}
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return w.Close()
}

func (w *World) handler() http.Handler {
	mux := http.NewServeMux()
	handle(mux, "fault", w.fault)
	handle(mux, "create", w.create)
	handle(mux, "find", w.find)
	handle(mux, "remove", w.remove)
	handle(mux, "ended", w.ended)
	handle(mux, "list", w.list)
	handle(mux, "save", w.save)
	handle(mux, "drop", w.drop)
	handle(mux, "saves", w.saves)
	handle(mux, "unreachable", w.unreachable)
	handle(mux, "news", w.news)
	handle(mux, "away", func(_ context.Context, a setAway) (none, error) { w.SetAway(a.Host, a.Away); return none{}, nil })
	handle(mux, "pause", w.pause)
	handle(mux, "renew", w.renew)
	handle(mux, "network", w.network)
	handle(mux, "claim", w.claim)
	handle(mux, "spend", w.spend)
	handle(mux, "agent", w.agent)
	handle(mux, "log", func(context.Context, none) ([]Entry, error) { return w.Log(), nil })
	handle(mux, "oom_kill", w.oomKill)
	handle(mux, "kill", func(_ context.Context, id string) (none, error) { w.Kill(id); return none{}, nil })
	handle(mux, "forgive", func(context.Context, none) (none, error) { w.Forgive(); return none{}, nil })
	handle(mux, "inject", func(_ context.Context, list []Fault) (none, error) {
		for _, f := range list {
			if err := f.validate(); err != nil {
				return none{}, err
			}
		}
		w.Inject(list...)
		return none{}, nil
	})
	return mux
}

// answer is what travels back.
type answer struct {
	Kind      sandboxer.Kind  `json:"kind,omitempty"`
	Msg       string          `json:"msg,omitempty"`
	Hint      string          `json:"hint,omitempty"`
	Untouched bool            `json:"untouched,omitempty"`
	Value     json.RawMessage `json:"value,omitempty"`
}

type setAway struct {
	Host string
	Away bool
}

func handle[In, Out any](mux *http.ServeMux, name string, f func(context.Context, In) (Out, error)) {
	mux.HandleFunc("POST /"+name, func(w http.ResponseWriter, r *http.Request) {
		var in In
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		out, err := f(r.Context(), in)
		var a answer
		if err != nil {
			a = answer{Kind: sandboxer.KindOf(err), Msg: err.Error(), Hint: sandboxer.HintOf(err), Untouched: sandboxer.IsUntouched(err)}
		}
		if a.Value, err = json.Marshal(out); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		json.NewEncoder(w).Encode(a)
	})
}

// Remote is a world in another process.
type Remote struct{ http http.Client }

// Connect returns the world that listens on socket. It need not listen yet.
func Connect(socket string) *Remote {
	return &Remote{http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}}
}

// Close closes idle connections.
func (r *Remote) Close() { r.http.CloseIdleConnections() }

// Live is World.Live.
func (r *Remote) Live(ctx context.Context) ([]Object, error) {
	return call[[]Object](ctx, r, "list", listing{})
}

// Log is World.Log.
func (r *Remote) Log(ctx context.Context) ([]Entry, error) {
	return call[[]Entry](ctx, r, "log", none{})
}

// Inject is World.Inject.
func (r *Remote) Inject(ctx context.Context, faults ...Fault) error {
	_, err := call[none](ctx, r, "inject", faults)
	return err
}

// Forgive is World.Forgive.
func (r *Remote) Forgive(ctx context.Context) error {
	_, err := call[none](ctx, r, "forgive", none{})
	return err
}

// SetAway is World.SetAway.
func (r *Remote) SetAway(ctx context.Context, host string, away bool) error {
	_, err := call[none](ctx, r, "away", setAway{host, away})
	return err
}

// Kill is World.Kill.
func (r *Remote) Kill(ctx context.Context, id string) error {
	_, err := call[none](ctx, r, "kill", id)
	return err
}

func (r *Remote) fault(ctx context.Context, q faultQuery) (Fault, error) {
	return call[Fault](ctx, r, "fault", q)
}

// create waits for its answer although the caller left: a request under way might
// come after the teardown that the caller sends next.
func (r *Remote) create(ctx context.Context, o createRequest) (Object, error) {
	if err := ctx.Err(); err != nil {
		return Object{}, err
	}
	out, err := call[Object](context.WithoutCancel(ctx), r, "create", o) // which has an end of its own
	if ctx.Err() != nil {
		return Object{}, ctx.Err()
	}
	return out, err
}

func (r *Remote) find(ctx context.Context, q query) (Object, error) {
	return call[Object](ctx, r, "find", q)
}

func (r *Remote) remove(ctx context.Context, q query) ([]Object, error) {
	return call[[]Object](ctx, r, "remove", q)
}

func (r *Remote) list(ctx context.Context, l listing) ([]Object, error) {
	return call[[]Object](ctx, r, "list", l)
}

func (r *Remote) save(ctx context.Context, s saving) (sandboxer.Snapshot, error) {
	return call[sandboxer.Snapshot](ctx, r, "save", s)
}

func (r *Remote) drop(ctx context.Context, d dropping) (none, error) {
	return call[none](ctx, r, "drop", d)
}

func (r *Remote) saves(ctx context.Context, owner string) ([]sandboxer.FoundSnapshot, error) {
	return call[[]sandboxer.FoundSnapshot](ctx, r, "saves", owner)
}

func (r *Remote) unreachable(ctx context.Context, hosts []string) ([]string, error) {
	return call[[]string](ctx, r, "unreachable", hosts)
}

func (r *Remote) news(ctx context.Context, q newsQuery) (news, error) {
	return call[news](ctx, r, "news", q)
}

func (r *Remote) pause(ctx context.Context, p pausing) (none, error) {
	return call[none](ctx, r, "pause", p)
}

func (r *Remote) claim(ctx context.Context, c claim) (Object, error) {
	return call[Object](ctx, r, "claim", c)
}

func (r *Remote) network(ctx context.Context, n rewiring) (none, error) {
	return call[none](ctx, r, "network", n)
}

func (r *Remote) renew(ctx context.Context, n renewal) (none, error) {
	return call[none](ctx, r, "renew", n)
}

// OOMKill is World.OOMKill.
func (r *Remote) OOMKill(ctx context.Context, id string) error {
	_, err := r.oomKill(ctx, id)
	return err
}

func (r *Remote) oomKill(ctx context.Context, id string) (none, error) {
	return call[none](ctx, r, "oom_kill", id)
}

func (r *Remote) agent(ctx context.Context, q agentQuery) (string, error) {
	return call[string](ctx, r, "agent", q)
}

func (r *Remote) ended(ctx context.Context, q query) (Object, error) {
	return call[Object](ctx, r, "ended", q)
}

func (r *Remote) spend(ctx context.Context, s spending) (none, error) {
	return call[none](ctx, r, "spend", s)
}

// remoteTime bounds a question to a world in another process: what takes long, such as a
// command, is done here. That process may be stopped.
const remoteTime = 10 * time.Second

func call[Out any](ctx context.Context, r *Remote, name string, in any) (out Out, err error) {
	body, err := json.Marshal(in)
	if err != nil {
		return out, err
	}
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, remoteTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://world/"+name, bytes.NewReader(body))
	if err != nil {
		return out, err
	}
	resp, err := r.http.Do(req)
	if err != nil {
		if caller.Err() != nil {
			return out, caller.Err()
		}
		return out, sandboxer.E(sandboxer.Unavailable, err, "the fake world does not answer").WithHint("check that its process is running")
	}
	defer resp.Body.Close()
	var a answer
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || resp.StatusCode != http.StatusOK {
		return out, sandboxer.E(sandboxer.Unavailable, errors.Join(err, errors.New(resp.Status)), "the answer of the fake world is invalid")
	}
	if a.Kind != "" {
		e := sandboxer.E(a.Kind, nil, "%s", a.Msg)
		e.Untouched = a.Untouched
		if a.Hint != "" {
			e = e.WithHint("%s", a.Hint)
		}
		return out, e
	}
	err = json.Unmarshal(a.Value, &out)
	return out, err
}

// ReadLog reads the log file of a world. A last line that a crash cut off is left
// out.
func ReadLog(r io.Reader) (log []Entry, err error) {
	in := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		if err == io.EOF {
			return log, nil
		}
		if err != nil {
			return nil, err
		}
		var e Entry
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		log = append(log, e)
	}
}

package e2b

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
)

// A plane is the service, as its API is described: control plane and edge on one port. Its sandboxes are those of a fake.World, and
// our agent is the daemon in them. It keeps to what the vendor documents where that is stricter than we need.
type plane struct {
	url   string
	world *fake.World
	ext   *fake.Extension

	mu    sync.Mutex
	boxes map[string]*box
	saves map[string]*save // by the service's ID
	old   bool             // it creates and connects by v1 only
	lag   time.Duration    // of the listing
	skew  time.Duration    // of its clock
	most  time.Duration    // a timeout is cut to this
	key   string
	other string           // key to another account
	fault http.HandlerFunc // answers instead of the service
	lost  int              // answers of this many creates are lost
	quiet chan struct{}    // not nil: nothing is answered until it is closed
	// daemon starts another daemon for a sandbox than our agent, if set.
	daemon func(*box) (addr string, stop func(), err error)
}

type box struct {
	order
	id, token string
	key       string // to its account
	h         sandboxer.Handle
	paused    bool
	born      time.Time
	start     time.Time
	end       time.Time
	live      context.Context // ends with its streams
	cut       context.CancelFunc
	daemon    string // address of the daemon; empty for our agent
	stop      func() // of the daemon
}

// order is the body of a create, of v1 and v2.
type order struct {
	TemplateID string            `json:"templateID"`
	Timeout    *int              `json:"timeout"`
	Metadata   map[string]string `json:"metadata"`
	EnvVars    map[string]string `json:"envVars"`
	Internet   *bool             `json:"allow_internet_access"`
	Secure     bool              `json:"secure"`
	Network    struct {
		Public *bool `json:"allowPublicTraffic"`
	} `json:"network"`
}

type save struct {
	id, name string
	snap     sandboxer.Snapshot
}

const testKey = "e2b_0123456789abcdef"

func newPlane(t testing.TB) *plane {
	t.Helper()
	p := &plane{world: fake.NewWorld(), boxes: map[string]*box{}, saves: map[string]*save{}, key: testKey}
	p.ext = fake.New(p.world, fake.Config{Owner: "service", Agent: buildtest.Program(t, "cmd/sandboxer-agent")})
	srv := httptest.NewServer(p)
	p.url = srv.URL
	t.Cleanup(func() {
		for _, b := range p.boxes {
			b.cut()
			if b.stop != nil {
				b.stop()
			}
		}
		srv.Close()
		p.ext.Close()
		p.world.Close()
	})
	return p
}

// set changes how the service behaves.
func (p *plane) set(change func(*plane)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(p)
}

// hang has the service answer nothing until resume.
func (p *plane) hang() (resume func()) {
	quiet := make(chan struct{})
	p.set(func(p *plane) { p.quiet = quiet })
	return func() { p.set(func(p *plane) { p.quiet = nil }); close(quiet) }
}

func (p *plane) now() time.Time { return time.Now().Add(p.skew) }

// answer writes JSON; an error has the code in its body, too.
func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(status)
	if v != nil {
		_ = json.NewEncoder(w).Encode(v)
	}
}

func refuse(w http.ResponseWriter, status int, format string, args ...any) {
	answer(w, status, map[string]any{"code": status, "message": fmt.Sprintf(format, args...)})
}

func (p *plane) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	quiet, fault := p.quiet, p.fault
	w.Header().Set("Date", p.now().UTC().Format(http.TimeFormat))
	p.mu.Unlock()
	if quiet != nil {
		select {
		case <-quiet:
		case <-r.Context().Done():
			return
		}
	}
	if id := r.Header.Get("E2b-Sandbox-Id"); id != "" {
		p.edge(w, r, id)
		return
	}
	if fault != nil {
		fault(w, r)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if key := r.Header.Get("X-API-Key"); key == "" || key != p.key && key != p.other {
		refuse(w, http.StatusUnauthorized, "invalid API key")
		return
	}
	path, v2 := r.URL.EscapedPath(), false
	if rest, ok := strings.CutPrefix(path, "/v2/"); ok {
		path, v2 = "/"+rest, true
	}
	parts := strings.Split(path, "/")[1:]
	for i := range parts {
		parts[i], _ = url.PathUnescape(parts[i])
	}
	route := r.Method + " " + parts[0]
	for i := 2; i < len(parts); i++ {
		route += " " + parts[i]
	}
	switch {
	case v2 && p.old && r.Method == http.MethodPost:
		http.Error(w, "404 page not found", http.StatusNotFound)
	case route == "POST sandboxes" && len(parts) == 1:
		p.create(w, r, v2)
	case route == "GET sandboxes" && len(parts) == 1 && v2:
		p.list(w, r)
	case route == "GET snapshots":
		p.listSaves(w, r)
	case route == "DELETE templates" && len(parts) == 2:
		p.drop(w, parts[1])
	case parts[0] == "sandboxes" && len(parts) > 1 && (!v2 || route == "POST sandboxes connect"):
		b := p.live(parts[1])
		if b == nil || b.key != r.Header.Get("X-API-Key") {
			refuse(w, http.StatusNotFound, "Sandbox %q doesn't exist or you don't have access to it", parts[1])
			return
		}
		p.one(w, r, route, b)
	default:
		refuse(w, http.StatusNotFound, "no matching operation was found")
	}
}

// live returns a sandbox that has not expired.
func (p *plane) live(id string) *box {
	b := p.boxes[id]
	if b != nil && !b.paused && time.Now().After(b.end) {
		p.kill(b)
		return nil
	}
	return b
}

func (p *plane) kill(b *box) {
	delete(p.boxes, b.id)
	b.cut()
	if b.stop != nil {
		b.stop()
	}
	if _, err := p.ext.Teardown(context.Background(), b.h); err != nil {
		panic(err)
	}
}

// read decodes a body, strictly.
func read(w http.ResponseWriter, r *http.Request, v any) bool {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil && err != io.EOF {
		refuse(w, http.StatusBadRequest, "body: %v", err)
		return false
	}
	return true
}

func (p *plane) create(w http.ResponseWriter, r *http.Request, v2 bool) {
	var o order
	if !read(w, r, &o) {
		return
	}
	switch {
	case o.Timeout == nil || *o.Timeout < 1 || o.Internet == nil || o.Network.Public == nil, o.Secure == v2:
		refuse(w, http.StatusBadRequest, "what is always sent is missing, or secure is of another version: %+v", o)
		return
	case *o.Timeout > 24*3600:
		refuse(w, http.StatusBadRequest, "Timeout cannot be greater than 24 hours")
		return
	}
	b := &box{order: o, key: r.Header.Get("X-API-Key"), id: "i" + sandboxer.NewID() + sandboxer.NewID(), token: sandboxer.NewID(), born: time.Now()}
	b.live, b.cut = context.WithCancel(context.Background())
	spec := sandboxer.Spec{ID: b.id, Generation: 1, Owner: "service", Env: o.EnvVars}
	var err error
	if s := p.saves[o.TemplateID]; s != nil {
		b.h, err = p.ext.RestoreFromSnapshot(r.Context(), spec, s.snap)
	} else if o.TemplateID == "base" {
		b.h, err = p.ext.Provision(r.Context(), spec)
	} else {
		refuse(w, http.StatusNotFound, "template '%s' not found", o.TemplateID)
		return
	}
	if err != nil {
		refuse(w, http.StatusInternalServerError, "%v", err)
		return
	}
	if p.daemon != nil {
		if b.daemon, b.stop, err = p.daemon(b); err != nil {
			refuse(w, http.StatusInternalServerError, "%v", err)
			return
		}
	}
	b.lives(p, *o.Timeout, time.Now())
	p.boxes[b.id] = b
	if p.lost > 0 {
		p.lost--
		panic(http.ErrAbortHandler)
	}
	answer(w, http.StatusCreated, b.made())
}

func (b *box) lives(p *plane, timeout int, start time.Time) {
	d := time.Duration(timeout) * time.Second
	if p.most > 0 {
		d = min(d, p.most)
	}
	b.start, b.end = start, time.Now().Add(d)
}

func (b *box) made() map[string]any {
	return map[string]any{"templateID": b.TemplateID, "sandboxID": b.id, "clientID": "c", "envdVersion": "0.6.13", "envdAccessToken": b.token, "domain": nil}
}

func (b *box) detail(p *plane, token bool) map[string]any {
	state := "running"
	if b.paused {
		state = "paused"
	}
	v := map[string]any{"templateID": b.TemplateID, "sandboxID": b.id, "clientID": "c", "startedAt": b.start.Add(p.skew), "endAt": b.end.Add(p.skew),
		"envdVersion": "0.6.13", "cpuCount": 2, "memoryMB": 512, "diskSizeMB": 10240, "metadata": b.Metadata, "state": state, "volumeMounts": []string{}}
	if token {
		v["envdAccessToken"], v["domain"], v["allowInternetAccess"] = b.token, nil, *b.Internet
	}
	return v
}

// one is a request about one sandbox.
func (p *plane) one(w http.ResponseWriter, r *http.Request, route string, b *box) {
	var body struct {
		Timeout *int   `json:"timeout"`
		Name    string `json:"name"`
		Memory  *bool  `json:"memory"`
	}
	if !read(w, r, &body) {
		return
	}
	var err error
	switch route {
	case "GET sandboxes":
		answer(w, http.StatusOK, b.detail(p, true))
	case "DELETE sandboxes":
		p.kill(b)
		w.WriteHeader(http.StatusNoContent)
	case "POST sandboxes timeout":
		if b.paused {
			refuse(w, http.StatusNotFound, "Sandbox %q is not running", b.id)
			return
		}
		b.lives(p, *body.Timeout, b.start)
		w.WriteHeader(http.StatusNoContent)
	case "POST sandboxes pause":
		if b.paused {
			refuse(w, http.StatusConflict, "Error pausing sandbox - sandbox '%s' is already paused", b.id)
			return
		}
		if err = p.ext.Pause(r.Context(), b.h); err == nil {
			b.paused = true
			b.cut()
			w.WriteHeader(http.StatusNoContent)
		}
	case "POST sandboxes connect":
		status := http.StatusOK
		if b.paused {
			if err = p.ext.Resume(r.Context(), b.h); err == nil {
				b.paused, status = false, http.StatusCreated
				b.live, b.cut = context.WithCancel(context.Background())
				b.lives(p, *body.Timeout, time.Now())
			}
		}
		if err == nil {
			answer(w, status, b.made())
		}
	case "POST sandboxes snapshots":
		if b.paused {
			refuse(w, http.StatusConflict, "sandbox %q is paused", b.id)
			return
		}
		s := &save{id: "team/" + body.Name + ":default", name: body.Name}
		if s.snap, err = p.ext.Snapshot(r.Context(), b.h, sandboxer.NewID()); err == nil {
			p.saves[s.id] = s
			answer(w, http.StatusCreated, s.info())
		}
	case "GET sandboxes metrics":
		var st sandboxer.Stats
		if st, err = p.ext.Stats(r.Context(), b.h); err == nil {
			answer(w, http.StatusOK, []map[string]any{{"timestamp": p.now(), "timestampUnix": p.now().Unix(), "cpuCount": 2, "cpuUsedPct": 1.5,
				"memUsed": st.MemoryBytes, "memTotal": 512 << 20, "memCache": 0, "diskUsed": st.DiskBytes, "diskTotal": 10 << 30}})
		}
	default:
		refuse(w, http.StatusNotFound, "no matching operation was found")
	}
	if err != nil {
		refuse(w, http.StatusInternalServerError, "%v", err)
	}
}

func (s *save) info() map[string]any {
	return map[string]any{"snapshotID": s.id, "names": []string{"team/" + s.name}}
}

// list filters as the service does: the filter is decoded twice more than the query.
func (p *plane) list(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	filter, err := url.ParseQuery(q.Get("metadata"))
	if err != nil {
		refuse(w, http.StatusBadRequest, "metadata: %v", err)
		return
	}
	var found []*box
	for _, id := range slices.Collect(maps.Keys(p.boxes)) {
		b := p.live(id)
		if b == nil || b.key != r.Header.Get("X-API-Key") || time.Since(b.born) < p.lag || b.paused && !strings.Contains(q.Get("state"), "paused") {
			continue
		}
		matches := true
		for k, v := range filter {
			k, _ = url.QueryUnescape(k)
			want, _ := url.QueryUnescape(v[0])
			matches = matches && b.Metadata[k] == want
		}
		if matches {
			found = append(found, b)
		}
	}
	slices.SortFunc(found, func(a, b *box) int { return cmp.Or(b.born.Compare(a.born), cmp.Compare(a.id, b.id)) })
	page(w, r, found, func(b *box) any { return b.detail(p, false) })
}

// page answers a page of at most five, so that a listing has several.
func page[T any](w http.ResponseWriter, r *http.Request, all []T, show func(T) any) {
	from, _ := strconv.Atoi(r.URL.Query().Get("nextToken"))
	from = min(from, len(all))
	shown := []any{}
	for _, one := range all[from:min(from+5, len(all))] {
		shown = append(shown, show(one))
	}
	if from+5 < len(all) {
		w.Header().Set("X-Next-Token", strconv.Itoa(from+5))
	}
	answer(w, http.StatusOK, shown)
}

func (p *plane) listSaves(w http.ResponseWriter, r *http.Request) {
	var all []*save
	for _, s := range p.saves {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *save) int { return cmp.Compare(a.id, b.id) })
	page(w, r, all, func(s *save) any { return s.info() })
}

func (p *plane) drop(w http.ResponseWriter, id string) {
	s := p.saves[id]
	if s == nil {
		refuse(w, http.StatusNotFound, "template '%s' not found", id)
		return
	}
	delete(p.saves, id)
	_ = p.ext.DropSnapshot(context.Background(), s.snap)
	w.WriteHeader(http.StatusNoContent)
}

// edge leads to the daemon of a sandbox.
func (p *plane) edge(w http.ResponseWriter, r *http.Request, id string) {
	p.mu.Lock()
	b := p.live(id)
	if b == nil || b.paused {
		p.mu.Unlock()
		answer(w, http.StatusBadGateway, map[string]any{"sandboxId": id, "message": "The sandbox was not found", "code": 502})
		return
	}
	h, token, live, daemon := b.h, b.token, b.live, b.daemon
	p.mu.Unlock()
	if r.Header.Get("E2b-Sandbox-Port") != "49983" || r.URL.Path != "/health" && r.Header.Get("X-Access-Token") != token {
		refuse(w, http.StatusUnauthorized, "unauthorized access")
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(live, cancel)()
	_ = http.NewResponseController(w).EnableFullDuplex()
	body := &ended{ReadCloser: r.Body}
	r.Body = body
	(&httputil.ReverseProxy{
		Rewrite: func(out *httputil.ProxyRequest) {
			out.SetURL(&url.URL{Scheme: "http", Host: "sandbox"})
			for _, own := range []string{"X-Access-Token", "E2b-Sandbox-Id", "E2b-Sandbox-Port"} {
				if daemon == "" {
					out.Out.Header.Del(own)
				}
			}
		},
		FlushInterval: -1,
		Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				if daemon != "" {
					return new(net.Dialer).DialContext(ctx, "tcp", daemon)
				}
				return p.ext.DialAgent(ctx, h)
			}},
		ModifyResponse: func(res *http.Response) error {
			if !body.end.Load() { // a server with full duplex closes the connection then, and does not say so itself
				res.Header.Set("Connection", "close")
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}).ServeHTTP(w, r.WithContext(ctx))
}

// ended is a body that knows whether it was read to its end.
type ended struct {
	io.ReadCloser
	end atomic.Bool
}

func (e *ended) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if err == io.EOF {
		e.end.Store(true)
	}
	return n, err
}

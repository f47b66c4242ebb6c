package daytona

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A world is a Daytona. Its sandboxes are real processes of this machine, each with its own home, processes and network.
type world struct {
	t    testing.TB
	srv  *httptest.Server
	home string

	mu     sync.Mutex
	keys   map[string]string // that it accepts, with the organization of each
	boxes  map[string]*box
	saved  map[string]*snap
	faults faults
	gate   chan struct{} // closed while it answers
	count  int
	made   int           // creates that made something
	skew   time.Duration // of its clock
	maxTTL time.Duration // of the organization
	oldAPI bool          // it knows no ttl
}

// faults are what goes wrong with the next requests.
type faults struct {
	status  int    // answer of every request to the API
	header  string // header with a 7 in such an answer
	lost    bool   // a create has no answer
	lagging bool   // the listing shows nothing, and names lead nowhere
	unrun   bool   // the next command of a session is accepted, and does not run
	page    string // answer of every request, in the words of no Daytona
}

type box struct {
	id, name, reason string
	org              string
	labels           map[string]string
	states           []string // the present one first; each look moves on
	home             string
	holder           *exec.Cmd // of its namespaces
	pid              int       // of the first process in them
	created, set     time.Time // by its clock; when its lifetime was set, by ours
	ttl, autoStop    int64
	token            string
	previews         map[string]net.Listener
	sessions         map[string]*session
	req              map[string]any
}

type snap struct {
	id, name, source, home, org string
	polls                       int
}

func newWorld(t testing.TB) *world {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("the sandboxes of the fake are namespaces, which need root")
	}
	home, err := os.MkdirTemp("", "daytona-")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, home: home, keys: map[string]string{"key": "org"}, boxes: map[string]*box{}, saved: map[string]*snap{}, gate: make(chan struct{})}
	close(w.gate)
	if err := os.Chmod(home, 0o755); err != nil {
		t.Fatal(err)
	}
	w.srv = httptest.NewServer(http.HandlerFunc(w.serve))
	t.Cleanup(func() {
		w.mu.Lock()
		for _, b := range w.boxes {
			if b.states[0] != "destroyed" {
				w.end(b)
			}
		}
		w.mu.Unlock()
		w.srv.CloseClientConnections()
		w.srv.Close()
		os.RemoveAll(home)
	})
	return w
}

// with sets what goes wrong from now on.
func (w *world) with(f faults) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = f
}

// there are the IDs of the sandboxes that exist.
func (w *world) there() (ids []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, b := range w.boxes {
		if b.states[0] != "destroyed" {
			ids = append(ids, id)
		}
	}
	return ids
}

// set puts a sandbox into a state.
func (w *world) set(id, state string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.boxes[id]
	if b.states = []string{state}; state == "destroyed" {
		w.end(b)
	}
}

// end kills what runs in a sandbox and removes its files.
func (w *world) end(b *box) {
	w.unfinished(b)
	b.kill()
	for _, p := range b.previews {
		p.Close()
	}
	b.sessions, b.previews = nil, nil
	_ = os.RemoveAll(b.home)
	b.states = []string{"destroyed"}
}

// hang makes it stop answering.
func (w *world) hang() (resume func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	gate := make(chan struct{})
	w.gate = gate
	return func() { close(gate) }
}

// open waits while it hangs.
func (w *world) open(r *http.Request) {
	w.mu.Lock()
	gate := w.gate
	w.mu.Unlock()
	select {
	case <-gate:
	case <-r.Context().Done():
	}
}

func say(rw http.ResponseWriter, status int, v any) {
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(status)
	json.NewEncoder(rw).Encode(v)
}

func refuse(rw http.ResponseWriter, status int, format string, args ...any) {
	say(rw, status, map[string]any{"statusCode": status, "error": http.StatusText(status), "message": fmt.Sprintf(format, args...)})
}

func (w *world) serve(rw http.ResponseWriter, r *http.Request) {
	w.open(r)
	w.mu.Lock()
	rw.Header().Set("Date", time.Now().Add(w.skew).UTC().Format(http.TimeFormat))
	key, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	f, org := w.faults, w.keys[key]
	w.mu.Unlock()
	if org == "" {
		refuse(rw, http.StatusUnauthorized, "Invalid credentials")
		return
	}
	if rest, ok := strings.CutPrefix(r.URL.Path, "/toolbox/"); ok {
		id, path, _ := strings.Cut(rest, "/")
		w.toolbox(rw, r, org, id, "/"+path)
		return
	}
	if f.page != "" {
		_, _ = io.WriteString(rw, f.page)
		return
	}
	if f.status != 0 {
		if f.header != "" {
			rw.Header()[f.header] = []string{"7"} // as it is written, with small letters
		}
		refuse(rw, f.status, "no, for now")
		return
	}
	path := strings.Split(strings.TrimPrefix(r.URL.Path, "/api/"), "/")
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case path[0] == "sandbox" && len(path) == 1 && r.Method == http.MethodPost:
		w.create(rw, r, org)
	case path[0] == "sandbox" && len(path) == 1:
		w.list(rw, r, org)
	case path[0] == "sandbox":
		for _, b := range w.boxes {
			if b.expired() && b.states[0] != "destroyed" {
				w.end(b)
			}
			if b.org == org && (b.id == path[1] || b.name == path[1] && !f.lagging) && b.states[0] != "destroyed" {
				w.sandbox(rw, r, b, path[2:])
				return
			}
		}
		refuse(rw, http.StatusNotFound, "Sandbox with ID or name %s not found", path[1])
	case path[0] == "snapshots":
		w.snapshots(rw, r, org, path[1:])
	case path[0] == "config":
		say(rw, 200, map[string]any{})
	default:
		refuse(rw, http.StatusNotFound, "Cannot %s %s", r.Method, r.URL.Path)
	}
}

func (b *box) expired() bool {
	return b.ttl > 0 && time.Since(b.set) > time.Duration(b.ttl)*time.Minute
}

func (w *world) view(b *box) map[string]any {
	v := map[string]any{"id": b.id, "name": b.name, "organizationId": b.org, "user": "daytona", "env": map[string]string{}, "labels": b.labels, "public": false,
		"networkBlockAll": b.req["networkBlockAll"], "target": "local", "cpu": 1, "gpu": 0, "memory": 1, "disk": 3, "state": b.states[0], "errorReason": b.reason,
		"createdAt": b.created.UTC().Format(time.RFC3339Nano), "autoStopInterval": b.autoStop, "autoDeleteInterval": b.req["autoDeleteInterval"], "toolboxProxyUrl": w.srv.URL + "/toolbox"}
	if !w.oldAPI && b.ttl > 0 {
		v["autoDestroyAt"] = b.set.Add(w.skew + time.Duration(b.ttl)*time.Minute).UTC().Format(time.RFC3339Nano)
	}
	return v
}

func (w *world) create(rw http.ResponseWriter, r *http.Request, org string) {
	var req struct {
		Name, Snapshot string
		Labels         map[string]string
		BuildInfo      *struct{ DockerfileContent string }
		TTLMinutes     int64
		AutoStop       int64 `json:"autoStopInterval"`
	}
	data, _ := io.ReadAll(r.Body)
	all := map[string]any{}
	json.Unmarshal(data, &all)
	if err := json.Unmarshal(data, &req); err != nil {
		refuse(rw, 400, "%v", err)
		return
	}
	for _, b := range w.boxes {
		if b.org == org && req.Name != "" && b.name == req.Name && b.states[0] != "destroyed" {
			refuse(rw, http.StatusConflict, "Sandbox with name %s already exists", req.Name)
			return
		}
	}
	w.count++
	w.made++
	id := fmt.Sprintf("%08x-%s", w.count, sandboxer.NewID())
	b := &box{id: id, name: cmp.Or(req.Name, id), org: org, labels: req.Labels, home: filepath.Join(w.home, id), created: time.Now().Add(w.skew), set: time.Now(), ttl: req.TTLMinutes, autoStop: req.AutoStop,
		token: sandboxer.NewID(), previews: map[string]net.Listener{}, sessions: map[string]*session{}, req: all,
		states: []string{"pulling_snapshot", "creating", "unknown", "starting", "started"}}
	if w.maxTTL > 0 {
		b.ttl = min(b.ttl, int64(w.maxTTL/time.Minute))
	}
	if req.BuildInfo != nil {
		b.states = []string{"pending_build", "building_snapshot", "creating", "started"}
		if strings.Contains(req.BuildInfo.DockerfileContent, "invalid") {
			b.states, b.reason = []string{"pending_build", "building_snapshot", "build_failed"}, "the image cannot be pulled"
		}
	}
	if s := w.saved[req.Snapshot]; s != nil && s.org == org {
		if out, err := exec.Command("cp", "-a", s.home, b.home).CombinedOutput(); err != nil {
			w.t.Errorf("%v: %s", err, out)
		}
	} else if strings.HasPrefix(req.Snapshot, "sandboxer-") {
		refuse(rw, 404, "Snapshot %s not found", req.Snapshot)
		return
	}
	if err := b.hold(); err != nil {
		refuse(rw, 500, "%v", err)
		return
	}
	w.boxes[id] = b
	if w.faults.lost {
		panic(http.ErrAbortHandler)
	}
	say(rw, 200, w.view(b))
}

func (w *world) list(rw http.ResponseWriter, r *http.Request, org string) {
	var want map[string]string
	json.Unmarshal([]byte(cmp.Or(r.FormValue("labels"), "{}")), &want)
	ids := []string{}
	for id, b := range w.boxes {
		ok := b.org == org && b.states[0] != "destroyed" && !w.faults.lagging
		for k, v := range want {
			ok = ok && b.labels[k] == v
		}
		if ok && id > r.FormValue("cursor") {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	items, next := []any{}, any(nil)
	for _, id := range ids {
		if len(items) == 2 { // many pages
			next = ids[1]
			break
		}
		items = append(items, w.view(w.boxes[id]))
	}
	say(rw, 200, map[string]any{"items": items, "nextCursor": next})
}

func (w *world) sandbox(rw http.ResponseWriter, r *http.Request, b *box, path []string) {
	number := func() int64 { n, _ := strconv.ParseInt(path[1], 10, 64); return n }
	switch what := strings.Join(path[:min(len(path), 1)], ""); r.Method + " " + what {
	case "GET ":
		say(rw, 200, w.view(b))
		if len(b.states) > 1 {
			if b.states = b.states[1:]; b.states[0] == "destroyed" {
				w.end(b)
			}
		}
		return
	case "DELETE ":
		if b.states[0] == "destroying" {
			refuse(rw, http.StatusConflict, "Sandbox is being destroyed")
			return
		}
		b.states = []string{b.states[0], "destroying", "destroyed"}
	case "POST autostop":
		b.autoStop = number()
	case "POST ttl":
		if w.oldAPI {
			refuse(rw, 404, "Cannot POST %s", r.URL.Path)
			return
		}
		b.ttl, b.set = number(), time.Now()
		if w.maxTTL > 0 {
			b.ttl = min(b.ttl, int64(w.maxTTL/time.Minute))
		}
	case "PUT labels":
		var req struct{ Labels map[string]string }
		json.NewDecoder(r.Body).Decode(&req)
		b.labels = req.Labels
	case "GET ports":
		p := b.previews[path[1]]
		if p == nil {
			p = w.preview(b, path[1])
			b.previews[path[1]] = p
		}
		say(rw, 200, map[string]any{"sandboxId": b.id, "url": "http://" + p.Addr().String(), "token": b.token})
		return
	case "POST snapshot":
		var req struct{ Name string }
		json.NewDecoder(r.Body).Decode(&req)
		if w.saved[req.Name] != nil {
			refuse(rw, http.StatusConflict, "Snapshot with name %s already exists", req.Name)
			return
		}
		s := &snap{id: sandboxer.NewID(), name: req.Name, source: b.id, org: b.org, home: filepath.Join(w.home, "snap-"+sandboxer.NewID())}
		if out, err := exec.Command("cp", "-a", b.home, s.home).CombinedOutput(); err != nil {
			refuse(rw, 400, "%s", out)
			return
		}
		w.saved[req.Name] = s
		b.states = []string{"snapshotting", "started"}
	default:
		refuse(rw, http.StatusNotFound, "Cannot %s %s", r.Method, r.URL.Path)
		return
	}
	say(rw, 200, w.view(b))
}

func (w *world) snapshots(rw http.ResponseWriter, r *http.Request, org string, path []string) {
	if len(path) == 0 {
		names := []string{}
		for name, s := range w.saved {
			if s.org == org && strings.Contains(name, r.FormValue("name")) {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		page, _ := strconv.Atoi(cmp.Or(r.FormValue("page"), "1"))
		items := []any{}
		for i, name := range names {
			if i/2+1 == page {
				w.saved[name].polls++
				items = append(items, w.snapView(w.saved[name]))
			}
		}
		say(rw, 200, map[string]any{"items": items, "total": len(names), "page": page, "totalPages": (len(names) + 1) / 2})
		return
	}
	for name, s := range w.saved {
		if s.org != org || s.id != path[0] && name != path[0] {
			continue
		}
		if r.Method == http.MethodDelete {
			os.RemoveAll(s.home)
			delete(w.saved, name)
		}
		s.polls++
		say(rw, 200, w.snapView(s))
		return
	}
	refuse(rw, 404, "Snapshot %s not found", path[0])
}

func (w *world) snapView(s *snap) map[string]any {
	return map[string]any{"id": s.id, "name": s.name, "state": map[bool]string{true: "active", false: "snapshotting"}[s.polls > 1], "errorReason": nil, "size": 0.5, "general": false,
		"entrypoint": nil, "cpu": 1, "gpu": 0, "mem": 1, "disk": 3, "createdAt": time.Now(), "updatedAt": time.Now(), "lastUsedAt": nil, "sourceSandboxId": s.source}
}

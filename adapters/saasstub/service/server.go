package service

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// A server is the service of one directory.
type server struct {
	dir string
	now func() time.Time // the real time

	mu    sync.Mutex
	state *state
	idle  time.Time // since when there is no sandbox; zero if there is one
	// broken: the state could not be written last time.
	broken bool
}

func newServer(dir string, now func() time.Time) (*server, error) {
	s, err := readState(dir)
	if err != nil {
		return nil, err
	}
	return &server{dir: dir, now: now, state: s}, nil
}

// idleFor is how long there has been no sandbox.
func (s *server) idleFor() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	set, now := s.settings(), s.now()
	if s.state.expire(now.Add(set.Faults.Skew), set.Faults) {
		_ = s.state.write(s.dir) // the next process ends them, too
	}
	switch {
	case len(s.state.Sandboxes) > 0:
		s.idle = time.Time{}
		return 0
	case s.idle.IsZero():
		s.idle = now
	}
	return now.Sub(s.idle)
}

// settings returns the settings as they are now. Without a file that can be read there are no faults.
func (s *server) settings() Settings {
	set := Settings{}
	if readFile(s.dir, settingsFile, &set) != nil {
		set = Settings{}
	}
	set.Capacity = cmp.Or(min(set.Capacity, MaxCapacity), MaxCapacity)
	return set
}

// A request is one request, under the lock of the server.
type request struct {
	*http.Request
	*state
	now     time.Time // by the service's clock
	set     Settings
	rand    *rand.Rand
	changed bool // the state is to be written
}

// fault is an answer that is an error.
type fault struct {
	status  int
	message string
}

func (f fault) Error() string { return f.message }

func wrong(status int, format string, args ...any) error {
	return fault{status, fmt.Sprintf(format, args...)}
}

// handler serves the interface of the service.
func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, f := range map[string]func(*request) (any, error){
		"GET /v1/health":                func(*request) (any, error) { return Health{os.Getpid()}, nil },
		"GET /v1/capacity":              func(r *request) (any, error) { return Capacity{max(0, r.set.Capacity-len(r.Sandboxes))}, nil },
		"POST /v1/sandboxes":            (*request).create,
		"GET /v1/sandboxes":             (*request).list,
		"GET /v1/sandboxes/{ref}":       (*request).get,
		"PUT /v1/sandboxes/{ref}":       (*request).renew,
		"DELETE /v1/sandboxes/{ref}":    (*request).remove,
		"GET /v1/sandboxes/{ref}/usage": (*request).usage,
		"PUT /v1/snapshots/{name}":      (*request).save,
		"GET /v1/snapshots":             (*request).snapshots,
		"DELETE /v1/snapshots/{name}":   (*request).drop,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, f) })
	}
	return mux
}

// serve answers one request, or fails as the settings say.
func (s *server) serve(w http.ResponseWriter, r *http.Request, f func(*request) (any, error)) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxBodyBytes))
	if err != nil {
		answer(w, nil, wrong(http.StatusRequestEntityTooLarge, "the request is incomplete, or longer than %d bytes", MaxBodyBytes))
		return
	}
	s.mu.Lock()
	set := s.settings()
	s.state.Requests++
	q := &request{Request: r, state: s.state, set: set, now: s.now().Add(set.Faults.Skew), rand: rand.New(rand.NewPCG(uint64(set.Seed), uint64(s.state.Requests)))}
	q.changed = q.expire(q.now, set.Faults)
	hits := func(percent int) bool { return q.rand.IntN(100) < percent }
	silent, throttled, unavailable := hits(set.Faults.Silent), hits(set.Faults.Throttled), hits(set.Faults.Unavailable)
	conflict, lost := hits(set.Faults.Conflict) && r.Method != http.MethodGet, hits(set.Faults.Lost) && r.Method == http.MethodPost
	var out any
	switch {
	case r.URL.Path == "/v1/health":
		silent, lost = false, false
		out, err = f(q)
	case silent:
	case throttled:
		err = wrong(http.StatusTooManyRequests, "too many requests")
	case unavailable:
		err = wrong(http.StatusServiceUnavailable, "no machine is free")
	case conflict:
		err = wrong(http.StatusConflict, "another change is under way")
	default:
		q.Body = io.NopCloser(bytes.NewReader(body))
		out, err = f(q)
	}
	if q.changed {
		werr := s.state.write(s.dir)
		if werr != nil && err == nil { // it is not sure to be there for the next process: the answer is unknown, as after a crash
			lost = true
		}
		if werr != nil && !s.broken { // told once: the log has no other bound
			fmt.Fprintln(os.Stderr, werr)
		}
		s.broken = werr != nil
	}
	s.mu.Unlock()
	switch {
	case silent:
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	case lost && err == nil:
		panic(http.ErrAbortHandler)
	}
	answer(w, out, err)
}

func answer(w http.ResponseWriter, out any, err error) {
	status := http.StatusOK
	if err != nil {
		f, ok := err.(fault)
		if !ok {
			f = fault{http.StatusInternalServerError, err.Error()}
		}
		if status = f.status; status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
			w.Header().Set("Retry-After", strconv.Itoa(RetryAfter))
		}
		out = Problem{f.message}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(out) // the client may have left
}

// read decodes the body.
func (r *request) read(v any) error {
	data, err := io.ReadAll(r.Body)
	if err == nil {
		err = strictjson.Decode(data, v)
	}
	if err != nil {
		return wrong(http.StatusBadRequest, "the body cannot be read: %v", err)
	}
	return nil
}

func (r *request) sandbox(ref string) (Sandbox, error) {
	sb, ok := r.Sandboxes[ref]
	if !ok {
		return sb, wrong(http.StatusNotFound, "there is no sandbox %.100q", ref)
	}
	return sb, nil
}

func checkTags(tags map[string]string) error {
	if len(tags) > maxTags {
		return wrong(http.StatusBadRequest, "%d tags are too many: at most %d are kept", len(tags), maxTags)
	}
	for name, value := range tags {
		if name == "" || len(name) > maxTagBytes || len(value) > maxTagBytes {
			return wrong(http.StatusBadRequest, "a tag is empty, or longer than %d bytes", maxTagBytes)
		}
	}
	return nil
}

func lifetime(ms int64) (time.Duration, error) {
	if ms < 1 || ms > MaxTTL.Milliseconds() {
		return 0, wrong(http.StatusBadRequest, "a lifetime of %d ms: want 1 to %d", ms, MaxTTL.Milliseconds())
	}
	return time.Duration(ms) * time.Millisecond, nil
}

func (r *request) create() (any, error) {
	var c Create
	if err := r.read(&c); err != nil {
		return nil, err
	}
	ttl, err := lifetime(c.TTLMS)
	if err = cmp.Or(err, checkTags(c.Tags)); err != nil {
		return nil, err
	}
	switch saved, ok := r.Snapshots[c.Snapshot]; {
	case len(c.Note) > MaxNoteBytes:
		return nil, wrong(http.StatusBadRequest, "a note of %d bytes: at most %d are kept", len(c.Note), MaxNoteBytes)
	case c.Snapshot != "" && !ok:
		return nil, wrong(http.StatusNotFound, "there is no snapshot %.100q", c.Snapshot)
	case len(r.Sandboxes) >= r.set.Capacity:
		return nil, wrong(http.StatusTooManyRequests, "there are %d sandboxes, and no more are kept", len(r.Sandboxes))
	case ok:
		c.Note = cmp.Or(c.Note, saved.Note)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %d", r.set.Seed, r.Requests))
	sb := Sandbox{Ref: "stub-" + hex.EncodeToString(sum[:8]), Tags: c.Tags, Note: c.Note, Created: r.now, Expires: r.now.Add(ttl)}
	r.Sandboxes[sb.Ref], r.changed = sb, true
	return sb, nil
}

// list lists the sandboxes with the tags of the query as they were some time ago.
func (r *request) list() (any, error) {
	then := r.now.Add(-r.set.Faults.Lag)
	var all []Sandbox
	for _, sb := range r.Sandboxes {
		if !sb.Created.After(then) {
			all = append(all, sb)
		}
	}
	for _, sb := range r.Ended {
		if !sb.Created.After(then) && sb.Ended.After(then) {
			all = append(all, sb)
		}
	}
	return page(r, all, func(sb Sandbox) (string, map[string]string) { return sb.Ref, sb.Tags }), nil
}

// page is the page that the query asks for, of what has its tags.
func page[T any](r *request, all []T, of func(T) (key string, tags map[string]string)) Page[T] {
	query := r.URL.Query()
	after := query.Get("after")
	query.Del("after")
	all = slices.DeleteFunc(all, func(x T) bool {
		key, tags := of(x)
		for name := range query {
			if tags[name] != query.Get(name) {
				return true
			}
		}
		return key <= after
	})
	slices.SortFunc(all, func(a, b T) int {
		x, _ := of(a)
		y, _ := of(b)
		return cmp.Compare(x, y)
	})
	p := Page[T]{Items: all[:min(len(all), MaxPage)]}
	if len(all) > MaxPage {
		p.Next, _ = of(all[MaxPage-1])
	}
	return p
}

func (r *request) get() (any, error) { return r.sandbox(r.PathValue("ref")) }

func (r *request) renew() (any, error) {
	var c Renew
	if err := r.read(&c); err != nil {
		return nil, err
	}
	ttl, err := lifetime(c.TTLMS)
	if err = cmp.Or(err, checkTags(c.Tags)); err != nil {
		return nil, err
	}
	sb, err := r.sandbox(r.PathValue("ref"))
	if err != nil {
		return nil, err
	}
	sb.Tags = maps.Clone(sb.Tags)
	maps.Copy(sb.Tags, c.Tags)
	if err := checkTags(sb.Tags); err != nil {
		return nil, err
	}
	sb.Expires = r.now.Add(ttl)
	r.Sandboxes[sb.Ref], r.changed = sb, true
	return sb, nil
}

func (r *request) remove() (any, error) {
	sb, err := r.sandbox(r.PathValue("ref"))
	if err != nil {
		return nil, err
	}
	r.end(sb, r.now)
	r.changed = true
	return sb, nil
}

func (r *request) usage() (any, error) {
	ref := r.PathValue("ref")
	if i := slices.IndexFunc(r.Ended, func(sb Sandbox) bool { return sb.Ref == ref }); i >= 0 {
		return Usage{r.Ended[i].Ended.Sub(r.Ended[i].Created).Milliseconds(), true}, nil
	}
	sb, err := r.sandbox(ref)
	return Usage{r.now.Sub(sb.Created).Milliseconds(), false}, err
}

func (r *request) save() (any, error) {
	var c Save
	if err := r.read(&c); err != nil {
		return nil, err
	}
	name := r.PathValue("name")
	if saved, ok := r.Snapshots[name]; ok {
		return saved, nil
	}
	sb, err := r.sandbox(c.Ref)
	if err = cmp.Or(err, checkTags(c.Tags)); err != nil {
		return nil, err
	}
	switch {
	case len(name) > maxTagBytes:
		return nil, wrong(http.StatusBadRequest, "the name of the snapshot is longer than %d bytes", maxTagBytes)
	case len(r.Snapshots) >= MaxCapacity:
		return nil, wrong(http.StatusTooManyRequests, "there are %d snapshots, and no more are kept", len(r.Snapshots))
	}
	saved := Snapshot{Name: name, Tags: c.Tags, Note: sb.Note, Created: r.now}
	r.Snapshots[name], r.changed = saved, true
	return saved, nil
}

func (r *request) snapshots() (any, error) {
	return page(r, slices.Collect(maps.Values(r.Snapshots)), func(s Snapshot) (string, map[string]string) { return s.Name, s.Tags }), nil
}

func (r *request) drop() (any, error) {
	saved, ok := r.Snapshots[r.PathValue("name")]
	if !ok {
		return nil, wrong(http.StatusNotFound, "there is no snapshot %.100q", r.PathValue("name"))
	}
	delete(r.Snapshots, saved.Name)
	r.changed = true
	return saved, nil
}

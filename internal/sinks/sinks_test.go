package sinks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
)

const key, former = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=", "whsec_YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXphYmNkZWY="

// A rig is a store with usage rows, and sinks that deliver them.
type rig struct {
	*testing.T
	store *sqlstore.Store
	*Sinks
	n      int
	stop   func()
	values map[string]sandboxer.Secret
}

func newRig(t *testing.T) *rig {
	t.Helper()
	store, err := sqlstore.OpenSQLite(t.Context(), t.TempDir(), sqlstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{T: t, store: store, stop: func() {}, values: map[string]sandboxer.Secret{"new": key, "old": former, "bad": "whsec_short"}}
	t.Cleanup(func() { r.stop(); store.Close() })
	return r
}

// run delivers to the sinks until stop is called, as another process would.
func (r *rig) run(all ...sandboxer.Sink) {
	r.Helper()
	r.stop()
	r.Sinks = New(r.store, all, Options{Owner: "owner", Log: slog.New(slog.DiscardHandler), Data: func(r sandboxer.UsageRow) any { return api.NewUsageRow(r) },
		Backoff: func(int) time.Duration { return time.Millisecond },
		Secret: func(_ context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error) {
			if v, ok := r.values[ref.Name]; ok && ref.Tenant == "" {
				return v, nil
			}
			return "", sandboxer.E(sandboxer.NotFound, nil, "there is no %s", ref)
		}})
	ctx, cancel := context.WithCancel(r.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Sinks.Run(ctx) }()
	r.stop = sync.OnceFunc(func() { cancel(); <-done })
}

// use writes n rows.
func (r *rig) use(n int, label string) {
	r.Helper()
	var rows []sandboxer.UsageRow
	for range n {
		r.n++
		rows = append(rows, sandboxer.UsageRow{Key: fmt.Sprint("row-", r.n), Type: sandboxer.UsageSettled, Tenant: "acme", SandboxID: "x", At: time.Unix(int64(r.n), 0),
			Charged: sandboxer.Credits(r.n), Ran: 1 << 60, Labels: map[string]string{"l": label}})
	}
	if err := r.store.Write(r.Context(), sandboxer.Writes{Usage: rows}); err != nil {
		r.Fatal(err)
	}
	if r.Sinks != nil {
		r.Wake()
	}
}

// await waits until the sink is as ok wants it.
func (r *rig) await(name string, ok func(Status) bool) Status {
	r.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		st, err := r.Get(r.Context(), name)
		if err == nil && ok(st) {
			return st
		}
		if time.Now().After(deadline) {
			r.Fatalf("the sink is %+v, %v", st, err)
		}
	}
}

func upToDate(st Status) bool { return st.Seq > 0 && st.Behind == 0 && st.Problem == "" }

// A receiver keeps the events that it gets, each once, and answers as answer says.
type receiver struct {
	t       *testing.T
	mu      sync.Mutex
	books   map[string]int // how often each event came
	charged sandboxer.Credits
	batches int
	answer  func(n int, ids []string) (status int, kept bool) // 0: the answer is lost; -1: it comes after the caller has left
}

func (v *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	v.mu.Lock()
	defer v.mu.Unlock()
	body, err := io.ReadAll(req.Body)
	if err != nil || len(body) > maxBytes {
		v.t.Errorf("%d bytes, %v", len(body), err)
	}
	for _, key := range []sandboxer.Secret{key, former} {
		want, err := Sign(key, req.Header.Get("webhook-id"), req.Header.Get("webhook-timestamp"), body)
		if err != nil || !slices.Contains(strings.Fields(req.Header.Get("webhook-signature")), want) {
			v.t.Errorf("signatures %q lack %q, %v", req.Header.Get("webhook-signature"), want, err)
		}
	}
	var batch []struct {
		SpecVersion, ID, Source, Type string
		Data                          struct {
			Charged string `json:"charged"`
			Ran     string `json:"ran_ns"`
		}
	}
	if err := json.Unmarshal(body, &batch); err != nil || len(batch) == 0 || len(batch) > maxEvents {
		v.t.Errorf("%d events, %v", len(batch), err)
	}
	var ids []string
	for _, e := range batch {
		ids = append(ids, e.ID)
		if e.SpecVersion != "1.0" || e.Source != "urn:sandboxer:owner" || e.Type != eventType || e.Data.Ran != "1152921504606846976" {
			v.t.Errorf("an event is %+v", e)
		}
	}
	v.batches++
	status, kept := v.answer(v.batches, ids)
	if kept {
		for _, e := range batch {
			if v.books[e.ID]++; v.books[e.ID] == 1 {
				c, err := sandboxer.ParseCredits(e.Data.Charged)
				if v.charged += c; err != nil {
					v.t.Error(err)
				}
			}
		}
	}
	if status < 0 {
		<-req.Context().Done()
	}
	if status <= 0 {
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(status)
	io.WriteString(w, "as the test says\x1b")
}

func (r *rig) receiver(answer func(n int, ids []string) (int, bool)) (*receiver, sandboxer.Sink) {
	v := &receiver{t: r.T, books: map[string]int{}, answer: answer}
	srv := httptest.NewServer(v)
	r.Cleanup(srv.Close)
	return v, sandboxer.Sink{Name: "hub", URL: srv.URL, Keys: []string{"new", "old"}}
}

// TestLossy: a receiver that loses requests and answers, is down now and then, and answers too late, has each row once in its
// books, in spite of deliverers that stop in between.
func TestLossy(t *testing.T) {
	r := newRig(t)
	rnd := rand.New(rand.NewPCG(1, 2))
	var last atomic.Bool // no deliverer stops any more
	v, sink := r.receiver(func(int, []string) (int, bool) {
		switch rnd.IntN(6) {
		case 0:
			return 0, false
		case 1:
			return 0, true
		case 2:
			return 503, rnd.IntN(2) == 0
		case 3:
			return 429, false
		case 4:
			if !last.Load() {
				return -1, rnd.IntN(2) == 0
			}
		}
		return 204, true
	})
	for i := range 10 {
		r.use(150, "")
		last.Store(i == 9)
		r.run(sink)
		r.use(70, "")
	}
	st := r.await("hub", upToDate)
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.books) != r.n || st.DeadLetters != 0 || v.charged != sandboxer.Credits(r.n*(r.n+1)/2) {
		t.Errorf("the receiver has %d of %d rows and charges %s; %+v", len(v.books), r.n, v.charged, st)
	}
}

// TestRefused: what a receiver refuses is found by halving, becomes a dead letter, and can be replayed or dropped.
func TestRefused(t *testing.T) {
	r := newRig(t)
	bad := []string{"row-7", "row-400", "row-900"}
	v, sink := r.receiver(func(_ int, ids []string) (int, bool) {
		if slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(bad, id) }) {
			return 422, false
		}
		return 200, true
	})
	r.use(1000, "")
	r.run(sink)
	st := r.await("hub", upToDate)
	v.mu.Lock()
	if st.DeadLetters != 3 || len(v.books) != 997 || v.batches > 70 {
		t.Errorf("%d dead letters, %d rows, after %d batches", st.DeadLetters, len(v.books), v.batches)
	}
	bad = bad[2:]
	v.mu.Unlock()
	dead, err := r.store.DeadLetters(t.Context(), sandboxer.DeadLetterQuery{Sink: "hub"})
	if err != nil || len(dead) != 3 || dead[0].Reason != "it answers 422: as the test says\uFFFD" {
		t.Errorf("%+v, %v", dead, err)
	}
	if _, err := r.Replay(t.Context(), "hub", time.Time{}); err != nil {
		t.Fatal(err)
	}
	r.await("hub", func(st Status) bool {
		dead, err := r.store.DeadLetters(t.Context(), sandboxer.DeadLetterQuery{Sink: "hub"})
		return err == nil && len(dead) == 1 && !dead[0].Again
	})
	if _, err := r.Drop(t.Context(), "hub", []int64{7}); !errors.Is(err, sandboxer.NotFound) {
		t.Errorf("a dead letter that is none is dropped: %v", err)
	}
	if st, err := r.Drop(t.Context(), "hub", nil); err != nil || st.DeadLetters != 0 {
		t.Errorf("%+v, %v", st, err)
	}
	if _, err := r.Replay(t.Context(), "hub", time.Unix(990, 0)); err != nil {
		t.Fatal(err)
	}
	r.await("hub", upToDate)
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.books) != 999 || v.books["row-990"] != 2 || v.books["row-989"] != 1 {
		t.Errorf("%d rows; row 990 came %d times", len(v.books), v.books["row-990"])
	}
}

// TestAnswers: what else a receiver answers loses no row, and leaves no dead letter.
func TestAnswers(t *testing.T) {
	for _, status := range []int{302, 401, 404, 410, 500} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			r := newRig(t)
			v, sink := r.receiver(func(n int, _ []string) (int, bool) {
				if n == 1 {
					return status, false
				}
				return 200, true
			})
			r.use(3, "")
			r.run(sink)
			if status == 410 {
				r.await("hub", func(st Status) bool { return st.Stopped })
				r.use(1, "")
				r.run(sink)
				if _, err := r.Replay(t.Context(), "hub", time.Time{}); err != nil {
					t.Fatal(err)
				}
			}
			st := r.await("hub", upToDate)
			v.mu.Lock()
			defer v.mu.Unlock()
			if len(v.books) != r.n || st.DeadLetters != 0 || v.batches != 2 {
				t.Errorf("%d of %d rows in %d batches, %+v", len(v.books), r.n, v.batches, st)
			}
		})
	}
}

// TestProblems: an administrator reads why a receiver gets nothing, in one sentence.
func TestProblems(t *testing.T) {
	secret := func(context.Context, sandboxer.SecretRef) (sandboxer.Secret, error) {
		return key, nil
	}
	status := 0
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) })
	plain, tls := httptest.NewServer(handler), httptest.NewUnstartedServer(handler)
	tls.Config.ErrorLog = log.New(io.Discard, "", 0)
	tls.StartTLS()
	defer plain.Close()
	defer tls.Close()
	gone := httptest.NewServer(handler)
	gone.Close()
	for _, c := range []struct {
		url    string
		status int
		want   string
	}{
		{plain.URL, 500, "it answers 500"},
		{plain.URL, 307, "it answers 307, and redirects are not followed"},
		{tls.URL, 200, "it does not answer: tls: failed to verify certificate: x509: certificate signed by unknown authority"},
		{gone.URL, 200, "it does not answer: dial tcp " + gone.Listener.Addr().String() + ": connect: connection refused"},
	} {
		status = c.status
		e := newEndpoint(sandboxer.Sink{Name: "hub", URL: c.url, Keys: []string{"k"}}, secret)
		if err := e.deliver(t.Context(), nil); sandboxer.Message(err) != c.want {
			t.Errorf("%q; want %q", sandboxer.Message(err), c.want)
		}
		e.close()
	}
	hangs := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}))
	defer hangs.Close()
	e := newEndpoint(sandboxer.Sink{Name: "hub", URL: hangs.URL, Keys: []string{"k"}}, secret)
	defer e.close()
	e.client.Timeout = time.Millisecond
	if err := e.deliver(t.Context(), nil); sandboxer.Message(err) != "it does not answer within 1ms" {
		t.Errorf("%v", err)
	}
	dir := t.TempDir()
	if err := (fileOutlet{dir}).deliver(t.Context(), nil); sandboxer.Message(err) != "the file "+dir+" cannot be written: is a directory" {
		t.Errorf("%v", err)
	}
}

// TestKeys: without a key that signs nothing is sent; with it everything is.
func TestKeys(t *testing.T) {
	r := newRig(t)
	v, sink := r.receiver(func(int, []string) (int, bool) { return 200, true })
	r.use(1, "")
	for key, want := range map[string]string{"none": "there is no operator's secret none", "bad": "not a signing key"} {
		sink.Keys = []string{key, "old"}
		r.run(sink)
		if st := r.await("hub", func(st Status) bool { return strings.Contains(st.Problem, want) }); strings.Contains(st.Problem, "short") {
			t.Errorf("the value is in %q", st.Problem)
		}
	}
	if using := r.Using(sink.Keys[0]); v.batches != 0 || !slices.Equal(using, []string{"hub"}) || len(r.Using("new")) != 0 {
		t.Errorf("%d batches, %q", v.batches, using)
	}
	sink.Keys = []string{"new", "old"}
	r.Set([]sandboxer.Sink{sink})
	r.await("hub", upToDate)
}

// TestLarge: a batch has 1 MiB at most, and an event that is larger is a dead letter.
func TestLarge(t *testing.T) {
	r := newRig(t)
	v, sink := r.receiver(func(int, []string) (int, bool) { return 200, true })
	r.use(7, strings.Repeat("x", 300<<10))
	r.use(1, strings.Repeat("x", 2<<20))
	r.use(1, "")
	r.run(sink)
	st := r.await("hub", upToDate)
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.books) != 8 || st.DeadLetters != 1 || v.batches != 4 {
		t.Errorf("%d rows in %d batches, %d dead letters", len(v.books), v.batches, st.DeadLetters)
	}
}

// TestFile: a file gets each row once, also after a crash at any byte, and no other file is touched.
func TestFile(t *testing.T) {
	r := newRig(t)
	sink := sandboxer.Sink{Name: "books", File: filepath.Join(t.TempDir(), "usage.jsonl")}
	r.use(3, "")
	r.run(sink)
	r.await("books", upToDate)
	whole, err := os.ReadFile(sink.File)
	if err != nil || strings.Count(string(whole), "\n") != 3 {
		t.Fatalf("%s, %v", whole, err)
	}
	for n := len(whole) - 1; n >= 0; n -= 17 {
		r.stop()
		if err := os.WriteFile(sink.File, whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		// What was committed before is in the file.
		lines := int64(strings.Count(string(whole[:n]), "\n"))
		st, err := r.Get(t.Context(), "books")
		if err == nil {
			err = r.store.Write(t.Context(), sandboxer.Writes{Sink: &sandboxer.SinkChange{Name: "books", From: st.Seq, To: max(0, lines-1)}})
		}
		if err != nil {
			t.Fatal(err)
		}
		r.run(sink)
		r.await("books", upToDate)
		if got, err := os.ReadFile(sink.File); err != nil || string(got) != string(whole) {
			t.Fatalf("cut at %d:\n%s, %v; want\n%s", n, got, err, whole)
		}
	}
	for _, foreign := range []string{"root:x:0:0", "a line\n", "{\"specversion\":\"1.0\"}\n", "{\"specversion\":\"1.0\",\"id\":\"row-1\"}\nmore"} {
		r.stop()
		if err := os.WriteFile(sink.File, []byte(foreign), 0o600); err != nil {
			t.Fatal(err)
		}
		r.use(1, "")
		r.run(sink)
		r.await("books", func(st Status) bool { return strings.Contains(st.Problem, "nothing is appended") })
		if got, err := os.ReadFile(sink.File); err != nil || string(got) != foreign {
			t.Errorf("%q became %q, %v", foreign, got, err)
		}
	}
}

// TestDrop: a sink that no file declares is only known, gets nothing, and can be forgotten.
func TestDrop(t *testing.T) {
	r := newRig(t)
	_, sink := r.receiver(func(int, []string) (int, bool) { return 400, false })
	r.use(2, "")
	r.run(sink)
	r.await("hub", func(st Status) bool { return st.DeadLetters == 2 })
	r.run()
	if _, err := r.Replay(t.Context(), "hub", time.Time{}); !errors.Is(err, sandboxer.Invalid) {
		t.Errorf("a replay: %v", err)
	}
	if _, err := r.Drop(t.Context(), "hub", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Get(t.Context(), "hub"); !errors.Is(err, sandboxer.NotFound) {
		t.Errorf("it is still known: %v", err)
	}
}

// TestSign compares with the example of the specification of Standard Webhooks.
func TestSign(t *testing.T) {
	got, err := Sign("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", []byte(`{"test": 2432232314}`))
	if want := "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="; err != nil || got != want {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}

package hosted

import (
	"context"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/compattest"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/notes"
)

func TestFormOfAttempt(t *testing.T) {
	compattest.CheckForm(t, "hosted-attempt", compattest.Shape("", attempt{}))
}

// A caller that leaves ends the look for an earlier sandbox, however long the listing is; a create has an end of its own.
func TestMakeEnds(t *testing.T) {
	ctx, leave := context.WithCancel(t.Context())
	listing := false
	s := &Sandboxes{
		Env: sandboxer.Env{Extension: "ext.test", Owner: "o", Notes: notes.New(t.TempDir(), "ext.test", make([]byte, 32))},
		List: func(ctx context.Context, _ map[string]string) iter.Seq2[Object, error] {
			return func(yield func(Object, error) bool) {
				if listing {
					leave()
					<-ctx.Done()
					yield(Object{}, ctx.Err())
				}
			}
		},
	}
	create := func(ctx context.Context, _ map[string]string) (Object, error) {
		if _, bounded := ctx.Deadline(); !bounded || ctx.Err() != nil {
			t.Errorf("a create is bounded: %t, and its context has ended: %v", bounded, ctx.Err())
		}
		return Object{Ref: "ref"}, nil
	}
	if h, err := s.Make(ctx, sandboxer.Spec{ID: "one", Generation: 1, Owner: "o"}, create); err != nil || h.Ref != "ref" {
		t.Errorf("Make = %+v, %v", h, err)
	}
	listing = true
	if _, err := s.Make(ctx, sandboxer.Spec{ID: "two", Generation: 1, Owner: "o"}, create); !errors.Is(err, context.Canceled) {
		t.Errorf("Make after its caller left: %v", err)
	}
}

// A question has no body: some services refuse one.
func TestBodies(t *testing.T) {
	var got []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, _ := io.ReadAll(r.Body)
		got = append(got, r.Header.Get("Content-Type")+" "+string(data))
		io.WriteString(w, `{}`)
	}))
	defer srv.Close()
	c := &Client{Base: srv.URL}
	for _, body := range []any{nil, struct{}{}} {
		if _, err := Call[struct{}](t.Context(), c, http.MethodGet, "/", body); err != nil {
			t.Fatal(err)
		}
	}
	if len(got) != 2 || got[0] != " " || got[1] != "application/json {}" {
		t.Errorf("the service got %q", got)
	}
}

// A key is where Authorize puts it; an answer without content is one; a failure has its status; a gateway's 503 refuses nothing.
func TestSend(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Next", r.Header.Get("X-Key")+r.Header.Get("Authorization"))
		switch r.URL.Path {
		case "/busy":
			http.Error(w, `{"message":"no room"}`, http.StatusServiceUnavailable)
		case "/gateway":
			http.Error(w, "upstream", http.StatusServiceUnavailable)
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	}))
	defer srv.Close()
	c := &Client{Base: srv.URL, Keys: &Keys{fixed: "k"}, Tries: 1, Refusals: map[int]sandboxer.Kind{http.StatusServiceUnavailable: sandboxer.Unavailable},
		Authorize: func(h http.Header, key sandboxer.Secret) { h.Set("X-Key", string(key)) }}
	if _, h, err := Send[struct{}](t.Context(), c, Request{Method: http.MethodPost, Path: "/"}); err != nil || h.Get("X-Next") != "k" {
		t.Errorf("an answer without content: %v, %v", h, err)
	}
	for path, untouched := range map[string]bool{"/busy": true, "/gateway": false} {
		_, err := Call[struct{}](t.Context(), c, http.MethodPost, path, nil)
		if Status(err) != http.StatusServiceUnavailable || sandboxer.IsUntouched(err) != untouched {
			t.Errorf("%s: %v, untouched: %t", path, err, sandboxer.IsUntouched(err))
		}
	}
	c.Keys = &Keys{fixed: "key-canary\n"}
	if _, err := Call[struct{}](t.Context(), c, http.MethodPost, "/", nil); !IsRefused(err) || !sandboxer.IsUntouched(err) || strings.Contains(err.Error(), "canary") {
		t.Errorf("a key with a line break: %v", err)
	}
}

// A fuse that was moved is found again, before the tag that says the first one.
func TestKeepFuse(t *testing.T) {
	now := time.Now().UTC()
	s := &Sandboxes{Env: sandboxer.Env{Extension: "ext.test", Owner: "o", Notes: notes.New(t.TempDir(), "ext.test", make([]byte, 32))}}
	o := Object{Ref: "ref", Tags: hosts.Mark{Owner: "o", Extension: "ext.test", ID: "one", Generation: 2}.Labels(prefix)}
	o.Tags[tagFuse] = FuseTag(now)[tagFuse]
	for _, want := range []time.Time{now, now.Add(time.Hour)} {
		if got, err := s.Fuse(t.Context(), o); err != nil || !got.Equal(want) {
			t.Errorf("Fuse = %s, %v; want %s", got, err, want)
		}
		if err := s.KeepFuse(t.Context(), o, now.Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
}

// A sandbox that would outlive what the service allows is refused before anything exists.
func TestCheckLife(t *testing.T) {
	for left, want := range map[time.Duration]sandboxer.Kind{0: "", time.Hour - time.Second: "", time.Hour + time.Minute: sandboxer.Unsupported} {
		spec := sandboxer.Spec{}
		if left != 0 {
			spec.Fuse = time.Now().Add(left)
		}
		if err := CheckLife(spec, time.Hour); sandboxer.KindOf(err) != want || want != "" && !sandboxer.IsUntouched(err) {
			t.Errorf("%s: %v", left, err)
		}
	}
}

// A form is sent as it is written, also when it is sent again.
func TestForm(t *testing.T) {
	var got []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f, head, err := r.FormFile("one.file")
		if err != nil || r.ContentLength <= 0 {
			t.Errorf("a form of %d bytes: %v", r.ContentLength, err)
			return
		}
		data, _ := io.ReadAll(f)
		got = append(got, r.FormValue("one.path")+" "+head.Filename+" "+string(data))
		if len(got) == 1 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	defer srv.Close()
	c := &Client{Base: srv.URL}
	form := &Form{Field: "one.path", Value: "/tmp/x", FileField: "one.file", Name: "x", File: strings.NewReader("content"), Size: 7}
	_, _, err := Send[struct{}](t.Context(), c, Request{Method: http.MethodDelete, Path: "/", Body: form})
	if err != nil || len(got) != 2 || got[0] != "/tmp/x x content" || got[1] != got[0] {
		t.Errorf("%v; the service got %q", err, got)
	}
	if _, err := Call[map[string]int](t.Context(), c, http.MethodDelete, "/", form); err == nil {
		t.Error("an empty answer is accepted where one is needed")
	}
}

// A service that has several limits names the one that was reached in the header.
func TestRetryAfter(t *testing.T) {
	for _, c := range []struct {
		header map[string]string
		want   time.Duration
	}{
		{map[string]string{"Retry-After": "3"}, 3 * time.Second},
		{map[string]string{"Retry-After-sandbox-create": "7", "Retry-After-authenticated": "2"}, 7 * time.Second},
		{map[string]string{"Retry-After-sandbox-create": "-1"}, 0},
		{map[string]string{"Retry-After": "99999999"}, maxAfter},
		{map[string]string{"Retry-Afterwards": "3"}, 0},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for name, value := range c.header {
				w.Header()[name] = []string{value} // as it is written
			}
			http.Error(w, `{"message":"too many"}`, http.StatusTooManyRequests)
		}))
		client := &Client{Base: srv.URL, Refusals: map[int]sandboxer.Kind{http.StatusTooManyRequests: sandboxer.Exhausted}}
		_, err := Call[struct{}](t.Context(), client, http.MethodGet, "/", nil)
		srv.Close()
		if sandboxer.RetryAfterOf(err) != c.want {
			t.Errorf("%v: %v says %s; want %s", c.header, err, sandboxer.RetryAfterOf(err), c.want)
		}
	}
}

// A call goes on while its sandbox answers, ends with the reason when it does not any more, and as its caller's when that left.
func TestAttend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var answer, why error
		forgotten := 0
		ctx, leave := context.WithCancel(t.Context())
		attend := func() (context.Context, func(error) error) {
			return Attend(ctx, func(context.Context) error { return answer }, func() error { return why }, func() { forgotten++ })
		}
		within, done := attend()
		time.Sleep(time.Hour)
		if err := done(nil); err != nil || within.Err() == nil {
			t.Errorf("after an hour with answers: %v", err)
		}
		if _, done = attend(); sandboxer.KindOf(done(sandboxer.E(sandboxer.Unauthenticated, nil, "no"))) != sandboxer.Unavailable || forgotten != 1 {
			t.Errorf("a token that is not taken was forgotten %d times", forgotten)
		}
		synctest.Wait() // the last question may be open still
		answer = errors.New("no answer")
		within, done = attend()
		<-within.Done()
		if err := done(within.Err()); sandboxer.KindOf(err) != sandboxer.Unavailable || sandboxer.HintOf(err) == "" {
			t.Errorf("without answers: %v", err)
		}
		synctest.Wait()
		why = sandboxer.E(sandboxer.NotFound, nil, "it is gone")
		within, done = attend()
		<-within.Done()
		if err := done(within.Err()); err != why {
			t.Errorf("without answers: %v; want why", err)
		}
		within, done = attend()
		leave()
		<-within.Done()
		if err := done(within.Err()); !errors.Is(err, context.Canceled) {
			t.Errorf("after the caller left: %v", err)
		}
		if forgotten != 2 {
			t.Errorf("the way was forgotten %d times", forgotten)
		}
	})
}

// The name of a snapshot says what it is of, to its owner alone, and a sandbox that does not work is not called alive.
func TestNames(t *testing.T) {
	s := &Sandboxes{
		Env: sandboxer.Env{Extension: "ext.test", Owner: "o"},
		Get: func(context.Context, string) (Object, error) {
			return Object{Ref: "r", Down: true, Tags: hosts.Mark{Owner: "o", Extension: "ext.test", ID: "box", Generation: 2}.Labels(prefix)}, nil
		},
	}
	h := sandboxer.Handle{SandboxID: "box", Generation: 2, Ref: "r"}
	name := s.SnapshotName("snap", h)
	f, ok := s.ReadSnapshotName(name, "o")
	if !ok || f.Snapshot.SnapshotID != "snap" || f.SandboxID != "box" || f.Generation != 2 {
		t.Errorf("%s says %+v, %t", name, f, ok)
	}
	for name, owner := range map[string]string{name: "other", name + "_x": "o", "sandboxer-x_snap_box_2": "o", s.SnapshotPrefix("o") + "snap_box_x": "o"} {
		if f, ok := s.ReadSnapshotName(name, owner); ok {
			t.Errorf("%s says %+v to %s", name, f, owner)
		}
	}
	if later := h; s.Name(h) == s.Name(sandboxer.Handle{SandboxID: "box", Generation: 3}) || s.Name(later) != s.Name(h) {
		t.Error("the name of a sandbox is not that of its generation")
	}
	if l, err := s.IsAlive(t.Context(), h); l != sandboxer.Unresponsive || err != nil {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	one := For(t.Context(), sandboxer.SecretRef{Tenant: "a", Name: "key", Version: 1})
	if InAccount(one, "r") == InAccount(t.Context(), "r") || InAccount(one, "r") == InAccount(one, "s") {
		t.Error("two sandboxes have one name in a cache")
	}
}

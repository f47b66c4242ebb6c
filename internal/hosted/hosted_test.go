package hosted

import (
	"context"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"testing"
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

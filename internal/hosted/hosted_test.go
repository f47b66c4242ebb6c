package hosted

import (
	"context"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/compattest"
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

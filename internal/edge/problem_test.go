package edge

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

// The one table of kinds is complete, and a client gets back what the server had.
func TestKinds(t *testing.T) {
	seen := map[int]sandboxer.Kind{}
	for _, k := range sandboxer.Kinds() {
		row, ok := kinds[k]
		if !ok {
			t.Errorf("%s has no HTTP status", k)
			continue
		}
		if row.status < 400 || row.title == "" {
			t.Errorf("%s: status %d, title %q", k, row.status, row.title)
		}
		if other, dup := seen[row.status]; dup {
			t.Errorf("%s and %s share status %d", k, other, row.status)
		}
		seen[row.status] = k
	}
	if len(kinds) != len(sandboxer.Kinds()) {
		t.Errorf("%d rows for %d kinds", len(kinds), len(sandboxer.Kinds()))
	}
}

// A client gets back what the door had, except the cause.
func TestErrorsRoundTrip(t *testing.T) {
	for _, kind := range sandboxer.Kinds() {
		t.Run(string(kind), func(t *testing.T) {
			want := sandboxer.E(kind, errors.New("the private cause"), "what failed").WithHint("what to do")
			want.RetryAfter = 1500 * time.Millisecond
			d := serve(t, &fakeAuth{get: func(context.Context) error { return fmt.Errorf("wrapped: %w", want) }}, Options{})
			_, err := edgetest.Client(t, "unix://"+d.Unix, api.Options{NoRetry: true}).Get(t.Context(), "x")
			var e *sandboxer.Error
			var p *api.Problem
			if !errors.As(err, &e) || e.Kind != kind || !errors.As(err, &p) || p.Status != kinds[kind].status {
				t.Fatalf("error %#v", err)
			}
			if e.RetryAfter != want.RetryAfter || p.RequestID == "" {
				t.Errorf("retry after %s, request %q", e.RetryAfter, p.RequestID)
			}
			if strings.Contains(err.Error(), "private") {
				t.Errorf("the cause travelled: %v", err)
			}
			if kind != sandboxer.Internal && (e.Msg != want.Msg || e.Hint != want.Hint) {
				t.Errorf("message %q, hint %q", e.Msg, e.Hint)
			}
		})
	}
}

// Of a bug the client sees an ID, under which the log has the cause.
func TestInternalErrorID(t *testing.T) {
	d := serve(t, &fakeAuth{get: func(context.Context) error { return errors.New("secret path /root/x") }}, Options{})
	_, err := edgetest.Client(t, "unix://"+d.Unix, api.Options{NoRetry: true}).Get(t.Context(), "x")
	var p *api.Problem
	if !errors.As(err, &p) {
		t.Fatal(err)
	}
	id, ok := strings.CutPrefix(p.Detail, "internal error ")
	if !ok || strings.Contains(p.Detail+p.Hint, "/root") {
		t.Errorf("the client is told %q, %q", p.Detail, p.Hint)
	}
	if !strings.Contains(d.log.String(), "error_id="+id) || !strings.Contains(d.log.String(), "secret path /root/x") {
		t.Errorf("the log has no cause under %q:\n%s", id, d.log)
	}
}

// An internal error with a sentence for callers tells that besides the ID, and the log has the cause.
func TestInternalErrorPublic(t *testing.T) {
	failed := sandboxer.E(sandboxer.Internal, errors.New("in exec, line 7"), "hidden")
	failed.Public = "Mine.exec failed: ZeroDivisionError"
	for name, err := range map[string]error{"as it is": failed, "discreet": sandboxer.Discreet(failed), "wrapped": sandboxer.E(sandboxer.Internal, failed, "exec failed")} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, &fakeAuth{get: func(context.Context) error { return err }}, Options{})
			_, err := edgetest.Client(t, "unix://"+d.Unix, api.Options{NoRetry: true}).Get(t.Context(), "x")
			var p *api.Problem
			if !errors.As(err, &p) {
				t.Fatal(err)
			}
			rest, _ := strings.CutPrefix(p.Detail, "internal error ")
			id, told, _ := strings.Cut(rest, ": ")
			if told != failed.Public || strings.Contains(p.Detail+p.Hint, "line 7") {
				t.Errorf("the client is told %q, %q", p.Detail, p.Hint)
			}
			for line := range strings.Lines(d.log.String()) {
				if strings.Contains(line, "error_id="+id) && strings.Contains(line, "line 7") {
					return
				}
			}
			t.Errorf("no line of the log has %q and the cause:\n%s", id, d.log)
		})
	}
}

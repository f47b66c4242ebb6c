package sandboxer_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const private = "open /var/lib/secret/place: hunter2"

func TestErrorChains(t *testing.T) {
	cause := errors.New(private)
	limited := sandboxer.E(sandboxer.Exhausted, cause, "no room on %q", "ext.a").WithHint("try %s", "later")
	limited.RetryAfter = 3 * time.Second

	for _, test := range []struct {
		name    string
		err     error
		kind    sandboxer.Kind
		message string
		hint    string
		retry   time.Duration
	}{
		{name: "nil"},
		{name: "plain", err: cause, kind: sandboxer.Internal, message: "internal error"},
		{name: "own", err: sandboxer.E(sandboxer.NotFound, nil, "no %s", "box"), kind: sandboxer.NotFound, message: "no box"},
		{name: "hint and delay", err: limited, kind: sandboxer.Exhausted, message: `no room on "ext.a"`, hint: "try later", retry: 3 * time.Second},
		{name: "wrapped by fmt", err: fmt.Errorf("creating %s: %w", private, limited),
			kind: sandboxer.Exhausted, message: `no room on "ext.a"`, hint: "try later", retry: 3 * time.Second},
		{name: "outermost kind, inner hint", err: sandboxer.E(sandboxer.Failed, limited, "the create failed"),
			kind: sandboxer.Failed, message: "the create failed", hint: "try later", retry: 3 * time.Second},
		{name: "outermost hint", err: sandboxer.E(sandboxer.Failed, limited, "the create failed").WithHint("look"),
			kind: sandboxer.Failed, message: "the create failed", hint: "look", retry: 3 * time.Second},
		{name: "joined", err: errors.Join(cause, limited), kind: sandboxer.Exhausted, message: `no room on "ext.a"`, hint: "try later", retry: 3 * time.Second},
		{name: "internal", err: sandboxer.E(sandboxer.Internal, cause, "the table at %s broke", private), kind: sandboxer.Internal, message: "internal error"},
		{name: "internal over something told", err: sandboxer.E(sandboxer.Internal, sandboxer.E(sandboxer.NotFound, nil, "%s", private), "broke"),
			kind: sandboxer.Internal, message: "internal error"},
		{name: "bare kind", err: fmt.Errorf("%s: %w", private, sandboxer.Conflict), kind: sandboxer.Conflict, message: "internal error"},
		{name: "deadline", err: fmt.Errorf("%s: %w", private, context.DeadlineExceeded), kind: sandboxer.Timeout, message: "the operation did not finish in time"},
		{name: "canceled", err: fmt.Errorf("%s: %w", private, context.Canceled), kind: sandboxer.Canceled, message: "the operation was canceled"},
		{name: "kind over context", err: sandboxer.E(sandboxer.Unavailable, context.DeadlineExceeded, "the engine is silent"),
			kind: sandboxer.Unavailable, message: "the engine is silent"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := sandboxer.KindOf(test.err); got != test.kind {
				t.Errorf("KindOf = %q, want %q", got, test.kind)
			}
			if got := sandboxer.Message(test.err); got != test.message {
				t.Errorf("Message = %q, want %q", got, test.message)
			}
			if strings.Contains(sandboxer.Message(test.err), private) {
				t.Error("Message tells what was not written for strangers")
			}
			if got := sandboxer.HintOf(test.err); got != test.hint {
				t.Errorf("HintOf = %q, want %q", got, test.hint)
			}
			if got := sandboxer.RetryAfterOf(test.err); got != test.retry {
				t.Errorf("RetryAfterOf = %v, want %v", got, test.retry)
			}
		})
	}
}

func TestErrorIs(t *testing.T) {
	cause := errors.New("the cause")
	err := fmt.Errorf("around: %w", sandboxer.E(sandboxer.Failed, sandboxer.E(sandboxer.NotFound, cause, "inner"), "outer"))
	for _, k := range sandboxer.Kinds() {
		want := k == sandboxer.Failed || k == sandboxer.NotFound
		if got := errors.Is(err, k); got != want {
			t.Errorf("errors.Is(err, %s) = %v, want %v", k, got, want)
		}
	}
	if !errors.Is(err, cause) {
		t.Error("the cause is not in the chain")
	}
	if got, want := err.Error(), "around: outer: inner: the cause"; got != want {
		t.Errorf("the operator reads %q, want %q", got, want)
	}
	if got, want := sandboxer.E(sandboxer.Failed, nil, "alone").Error(), "alone"; got != want {
		t.Errorf("an error without a cause reads %q, want %q", got, want)
	}
}

// TestLists: the functions that list a type's constants name every one of them, once.
func TestLists(t *testing.T) {
	declared := declaredStrings(t)
	check := func(typ string, listed []string) {
		t.Helper()
		slices.Sort(listed)
		if n := len(listed); len(slices.Compact(slices.Clone(listed))) != n {
			t.Errorf("the list of %s names one twice: %q", typ, listed)
		}
		if want := declared[typ]; !slices.Equal(listed, want) {
			t.Errorf("the list of %s is %q, declared are %q", typ, listed, want)
		}
	}
	check("Kind", texts(sandboxer.Kinds()))
	check("State", texts(sandboxer.States()))
	check("Capability", texts(slices.Concat(sandboxer.Capabilities(), sandboxer.Besides())))
	check("Isolation", texts(sandboxer.Isolations()))
	check("PricingModel", texts(sandboxer.PricingModels()))
	check("Scope", texts(sandboxer.Scopes()))
}

func texts[S ~string](list []S) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return out
}

// declaredStrings returns the values of this package's string constants by their
// type, sorted.
func declaredStrings(t *testing.T) map[string][]string {
	fset := token.NewFileSet()
	out := map[string][]string{}
	for _, name := range []string{"errors.go", "state.go", "capability.go", "profile.go", "sandbox.go"} {
		f, err := parser.ParseFile(fset, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				v := s.(*ast.ValueSpec)
				typ, ok := v.Type.(*ast.Ident)
				if !ok {
					continue
				}
				for _, x := range v.Values {
					if lit, ok := x.(*ast.BasicLit); ok && lit.Kind == token.STRING {
						out[typ.Name] = append(out[typ.Name], strings.Trim(lit.Value, `"`))
					}
				}
			}
		}
	}
	for _, list := range out {
		slices.Sort(list)
	}
	return out
}

package sandboxer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/sand-boxer/sandboxer"
)

func TestNewID(t *testing.T) {
	const alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
	seen := map[string]bool{}
	used := map[rune]bool{}
	for range 2000 {
		id := sandboxer.NewID()
		if len(id) != 8 || strings.Trim(id, alphabet) != "" {
			t.Fatalf("NewID = %q, want 8 characters of %s", id, alphabet)
		}
		if err := sandboxer.CheckID(id); err != nil {
			t.Fatal(err)
		}
		if seen[id] {
			t.Fatalf("NewID gave %q twice", id)
		}
		seen[id] = true
		for _, r := range id {
			used[r] = true
		}
	}
	if len(used) != len(alphabet) {
		t.Errorf("16000 random characters use %d of %d", len(used), len(alphabet))
	}
}

func TestCheckID(t *testing.T) {
	for _, id := range []string{"a", "0", "a-b", "a--b", "7k2mq0xa", strings.Repeat("x", 48), "fe0dc8182dec7b77"} {
		if err := sandboxer.CheckID(id); err != nil {
			t.Errorf("CheckID(%q) = %v", id, err)
		}
	}
	for _, id := range []string{"", "-", "-a", "a-", "A", "a.b", "a_b", "a/b", "..", "a b", "ä", "a\n", "\na", strings.Repeat("x", 49)} {
		err := sandboxer.CheckID(id)
		if !errors.Is(err, sandboxer.Invalid) {
			t.Errorf("CheckID(%q) = %v, want Invalid", id, err)
		} else if !strings.Contains(sandboxer.Message(err), fmt.Sprintf("%q", id)) {
			t.Errorf("CheckID(%q) does not say what it refuses: %s", id, sandboxer.Message(err))
		}
	}
}

func TestThreadID(t *testing.T) {
	for _, test := range []struct{ user, thread, want string }{
		{"", "thread-1", "fe0dc8182dec7b77"},
		{"default", "thread-1", "fe0dc8182dec7b77"},
		{"alice", "thread-1", "dc977b840cb8638e"},
		{"bob", "thread-1", "38e740e3a7a8bcc6"},
		{"u_1-x", "A1_b-2", "3b94c5ffc1b086bb"},
	} {
		got, err := sandboxer.Thread{User: test.user, ID: test.thread}.SandboxID()
		if err != nil || got != test.want {
			t.Errorf("%s/%s: %q, %v; want %s", test.user, test.thread, got, err, test.want)
		}
	}
	// A name with other characters stands for its cleaned form with a digest.
	raw, err := sandboxer.Thread{User: "a@b.c", ID: "t"}.SandboxID()
	if err != nil {
		t.Fatal(err)
	}
	if clean, err := (sandboxer.Thread{User: "a-b-c-d648b243a3e817ea", ID: "t"}).SandboxID(); err != nil || clean != raw {
		t.Errorf("a@b.c: %q, its cleaned form: %q, %v", raw, clean, err)
	}
	// Two pairs whose first 8 digits are equal and the others are not.
	a, _ := sandboxer.Thread{User: "user-9721", ID: "thread-9721"}.SandboxID()
	b, _ := sandboxer.Thread{User: "user-94361", ID: "thread-94361"}.SandboxID()
	if a[:8] != b[:8] || a == b {
		t.Errorf("%s and %s: want the same first 8 digits and different others", a, b)
	}
	for _, id := range []string{"", "a b", "a:b", "a/b", "ä", "a\n", strings.Repeat("x", 65)} {
		if got, err := (sandboxer.Thread{ID: id}).SandboxID(); !errors.Is(err, sandboxer.Invalid) {
			t.Errorf("thread %q: %q, %v; want Invalid", id, got, err)
		}
	}
}

// TestThreadIDsDiffer: neither another user nor another thread leads to the same
// sandbox, whatever the names are made of.
func TestThreadIDsDiffer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		user := rapid.OneOf(rapid.String(), rapid.StringMatching(`[a:@.-]{0,6}`))
		thread := rapid.StringMatching(`[A-Za-z0-9_-]{1,8}`)
		a := sandboxer.Thread{User: user.Draw(t, "user"), ID: thread.Draw(t, "thread")}
		b := sandboxer.Thread{User: user.Draw(t, "other user"), ID: thread.Draw(t, "other thread")}
		x, err := a.SandboxID()
		if err != nil {
			t.Fatal(err)
		}
		if err := sandboxer.CheckID(x); err != nil {
			t.Fatal(err)
		}
		y, err := b.SandboxID()
		if err != nil {
			t.Fatal(err)
		}
		if a.User == "" {
			a.User = "default"
		}
		if b.User == "" {
			b.User = "default"
		}
		if (a == b) != (x == y) {
			t.Fatalf("%+v is %s, %+v is %s", a, x, b, y)
		}
	})
}

func TestExternalName(t *testing.T) {
	if got, want := sandboxer.ExternalName("laptop", "7k2mq0xa", 3), "sbx-laptop-7k2mq0xa-g3"; got != want {
		t.Errorf("ExternalName = %q, want %q", got, want)
	}
}

// TestSecretDoesNotPrint goes through every ordinary way of writing a value.
func TestSecretDoesNotPrint(t *testing.T) {
	const plain = "hunter2-hunter2"
	s := sandboxer.Secret(plain)
	if s.Reveal() != plain {
		t.Fatalf("Reveal = %q", s.Reveal())
	}
	type config struct {
		Token  sandboxer.Secret            `json:"token" xml:"token"`
		List   []sandboxer.Secret          `json:"list" xml:"list"`
		Ptr    *sandboxer.Secret           `json:"ptr" xml:"ptr"`
		Values map[string]sandboxer.Secret `json:"values" xml:"-"`
		Any    any                         `json:"any" xml:"any"`
	}
	c := config{s, []sandboxer.Secret{s}, &s, map[string]sandboxer.Secret{"x": s}, s}

	var log bytes.Buffer
	for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
		l := slog.New(h).With("with", s)
		l.Info("m", "secret", s, "config", c, "pointer", &s, slog.Group("g", "secret", s))
	}
	out := map[string]string{"slog": log.String()}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%t", "%f", "%c", "%U", "%20s", "%-20v", "%.3s", "%!"} {
		out["fmt "+verb] = fmt.Sprintf(verb, s) + fmt.Sprintf(verb, c) + fmt.Sprintf(verb, []any{s, &s})
	}
	out["Println"] = fmt.Sprintln(s, c)
	out["error"] = fmt.Errorf("login with %v: %w", s, sandboxer.E(sandboxer.Denied, nil, "key %s", s)).Error()
	data, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	out["json"] = string(data)
	if data, err = xml.Marshal(c); err != nil {
		t.Fatal(err)
	}
	out["xml"] = string(data)

	hexed := fmt.Sprintf("%x", plain)
	for how, text := range out {
		lower := strings.ToLower(text)
		if strings.Contains(lower, plain) || strings.Contains(lower, plain[:3]) || strings.Contains(lower, hexed) {
			t.Errorf("%s shows the secret: %s", how, text)
		}
	}
	if got := fmt.Sprint(s); got != "[redacted]" {
		t.Errorf("a secret prints as %q", got)
	}
}

func TestScopes(t *testing.T) {
	for _, test := range []struct {
		has  []sandboxer.Scope
		want []sandboxer.Scope
	}{
		{nil, nil},
		{[]sandboxer.Scope{"everything"}, []sandboxer.Scope{}},
		{[]sandboxer.Scope{sandboxer.ScopeRead}, []sandboxer.Scope{sandboxer.ScopeRead}},
		{[]sandboxer.Scope{sandboxer.ScopeWrite}, []sandboxer.Scope{sandboxer.ScopeWrite}},
		{[]sandboxer.Scope{sandboxer.ScopeAdmin}, sandboxer.Scopes()},
	} {
		p := sandboxer.Principal{Scopes: test.has}
		var got []sandboxer.Scope
		for _, s := range sandboxer.Scopes() {
			if p.Can(s) {
				got = append(got, s)
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(test.want) {
			t.Errorf("a principal with %v can %v, want %v", test.has, got, test.want)
		}
	}
}

func TestPrincipalTravels(t *testing.T) {
	p := sandboxer.PrincipalFrom(context.Background())
	for _, s := range sandboxer.Scopes() {
		if p.Can(s) {
			t.Errorf("nobody can %s", s)
		}
	}
	ctx := sandboxer.WithPrincipal(context.Background(), sandboxer.Principal{Tenant: "a", Scopes: sandboxer.Scopes()})
	if p := sandboxer.PrincipalFrom(ctx); p.Tenant != "a" || !p.Can(sandboxer.ScopeAdmin) {
		t.Errorf("PrincipalFrom = %+v", p)
	}
	ctx = sandboxer.WithPrincipal(ctx, sandboxer.Principal{Tenant: "b"})
	if p := sandboxer.PrincipalFrom(ctx); p.Tenant != "b" || p.Can(sandboxer.ScopeRead) {
		t.Errorf("the inner principal is %+v", p)
	}
}

func TestObjectID(t *testing.T) {
	if got := sandboxer.ObjectID(sandboxer.DefaultTenant, "fe0dc8182dec7b77"); got != "fe0dc8182dec7b77" {
		t.Errorf("the default tenant's is %s", got)
	}
	// A known answer: objects of before must be found again.
	if got, want := sandboxer.ObjectID("rival", "fe0dc8182dec7b77"), "t-5wsptx8xp4qc73kad1azg9f1jw"; got != want {
		t.Errorf("rival's is %s; want %s", got, want)
	}
	seen := map[string]string{}
	for _, tenant := range []string{"a", "b", "a/b", "ab", "a\x01b", "", "default2"} {
		for _, id := range []string{"x", "b/x", "bx", strings.Repeat("x", 48)} {
			got := sandboxer.ObjectID(tenant, id)
			if err := sandboxer.CheckID(got); err != nil || !sandboxer.IsDerivedID(got) || got == id {
				t.Errorf("%q of %q has %s, %v", id, tenant, got, err)
			}
			if was, ok := seen[got]; ok {
				t.Errorf("%q of %q has that of %s", id, tenant, was)
			}
			seen[got] = fmt.Sprintf("%q of %q", id, tenant)
		}
	}
	for _, id := range []string{"t-", "t-x", "x", sandboxer.NewID(), "t-" + strings.Repeat("i", 26), "t-" + strings.Repeat("0", 27), "u-" + strings.Repeat("0", 26)} {
		if sandboxer.IsDerivedID(id) {
			t.Errorf("%q counts as derived", id)
		}
	}
}

package manager

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestTenancy calls every method that takes a sandbox with a foreign one, and with
// one that never was: nothing tells them apart.
func TestTenancy(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(sandboxer.CreateRequest{Name: "mine"})
	calls := map[string]func(context.Context, string) error{
		"get":     func(ctx context.Context, ref string) error { _, err := r.Get(ctx, ref); return err },
		"wait":    func(ctx context.Context, ref string) error { _, err := r.Wait(ctx, ref); return err },
		"extend":  func(ctx context.Context, ref string) error { _, err := r.Extend(ctx, ref, Extend{Add: 1}); return err },
		"destroy": func(ctx context.Context, ref string) error { _, err := r.Destroy(ctx, ref); return err },
		"exec": func(ctx context.Context, ref string) error {
			_, err := r.Exec(ctx, ref, sandboxer.Cmd{Args: []string{"true"}})
			return err
		},
		"read": func(ctx context.Context, ref string) error { _, err := r.ReadFile(ctx, ref, "/x"); return err },
		"write": func(ctx context.Context, ref string) error {
			return r.WriteFile(ctx, ref, "/x", 0o644, strings.NewReader(""))
		},
		"stat": func(ctx context.Context, ref string) error { _, err := r.StatFile(ctx, ref, "/x"); return err },
		"list": func(ctx context.Context, ref string) error {
			for _, err := range r.ListFiles(ctx, ref, "/", "") {
				return err
			}
			return nil
		},
		"mkdir": func(ctx context.Context, ref string) error { return r.MakeDir(ctx, ref, "/x") },
		"move":  func(ctx context.Context, ref string) error { return r.MoveFile(ctx, ref, "/x", "/y") },
		"rm":    func(ctx context.Context, ref string) error { return r.RemoveFile(ctx, ref, "/x") },
		"dial":  func(ctx context.Context, ref string) error { _, err := r.Dial(ctx, ref, 80); return err },
		"stats": func(ctx context.Context, ref string) error { _, err := r.Stats(ctx, ref); return err },
		"events": func(ctx context.Context, ref string) error {
			_, err := r.Events(ctx, sandboxer.EventQuery{SandboxID: ref})
			return err
		},
		"follow": func(ctx context.Context, ref string) error {
			for _, err := range r.Follow(ctx, sandboxer.EventQuery{SandboxID: ref}) {
				return err
			}
			return nil
		},
	}
	reading := []string{"get", "wait", "read", "stat", "list", "stats", "events", "follow"}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			for _, ref := range []string{sb.ID, "mine", sb.ID[:4]} {
				err := call(rival, ref)
				wantErr(t, err, sandboxer.NotFound, fmt.Sprintf("there is no sandbox %q", ref))
				missing := call(rival, "nothing")
				if strings.ReplaceAll(fmt.Sprint(err), ref, "nothing") != fmt.Sprint(missing) {
					t.Errorf("%q differs from %q", err, missing)
				}
			}
			wantErr(t, call(context.Background(), sb.ID), sandboxer.Unauthenticated, "you are not logged in")
			if !slices.Contains(reading, name) {
				wantErr(t, call(as(sandboxer.DefaultTenant, sandboxer.ScopeRead), sb.ID), sandboxer.Denied, `needs the scope "write"`)
			}
			wantErr(t, call(as(sandboxer.DefaultTenant, "nothing"), sb.ID), sandboxer.Denied, "needs the scope")
		})
	}
	if got := r.get(sb.ID); got.State != sandboxer.Running {
		t.Errorf("after all that it is %s", got.State)
	}
	if items, _, err := r.List(rival, sandboxer.Query{}); err != nil || len(items) != 0 {
		t.Errorf("the rival sees %v, %v", items, err)
	}
	if items, _, err := r.List(rival, sandboxer.Query{Tenant: sandboxer.DefaultTenant}); err != nil || len(items) != 0 {
		t.Errorf("the rival sees %v, %v", items, err)
	}
	if items, _, err := r.List(admin, sandboxer.Query{Profile: "test"}); err != nil || len(items) != 1 {
		t.Errorf("the administrator sees %v, %v", items, err)
	}
	_, err := r.Events(rival, sandboxer.EventQuery{Tenant: sandboxer.DefaultTenant})
	wantErr(t, err, sandboxer.Denied, "you cannot see")
	if events, err := r.Events(rival, sandboxer.EventQuery{}); err != nil || len(events) != 0 {
		t.Errorf("the rival sees %v, %v", events, err)
	}
	_, err = r.Balance(rival, sandboxer.DefaultTenant)
	wantErr(t, err, sandboxer.Denied, "you cannot see")
	_, _, err = r.Entries(rival, sandboxer.EntryQuery{Tenant: sandboxer.DefaultTenant})
	wantErr(t, err, sandboxer.Denied, "you cannot see")

	for name, call := range map[string]func(context.Context) error{
		"grant":  func(ctx context.Context) error { return r.Grant(ctx, sandboxer.DefaultTenant, 1, "", "") },
		"keys":   func(ctx context.Context) error { _, err := r.Keys(ctx); return err },
		"revoke": func(ctx context.Context) error { return r.RevokeKey(ctx, "x") },
		"audit":  func(ctx context.Context) error { _, err := r.Audit(ctx); return err },
		"sweep":  func(ctx context.Context) error { _, err := r.Sweep(ctx); return err },
		"key": func(ctx context.Context) error {
			_, _, err := r.CreateKey(ctx, NewKey{Name: "x", Scopes: sandboxer.Scopes()})
			return err
		},
	} {
		wantErr(t, call(acme), sandboxer.Denied, `needs the scope "admin"`)
		wantErr(t, call(context.Background()), sandboxer.Unauthenticated, "")
		_ = name
	}
}

func TestRefs(t *testing.T) {
	r := newRig(t, nil)
	made := func(id, name string) *sandboxer.Sandbox {
		return r.create(sandboxer.CreateRequest{Inputs: map[string]string{"sandbox_id": id}, Name: name})
	}
	made("abc-1", "one")
	made("abc-2", "abc-1") // a name that is another's ID
	made("abd-1", "")
	for ref, want := range map[string]string{"abc-1": "abc-1", "abc-2": "abc-2", "one": "abc-1", "abd": "abd-1"} {
		if sb := r.get(ref); sb.ID != want {
			t.Errorf("%q means %s, want %s", ref, sb.ID, want)
		}
	}
	_, err := r.Get(acme, "abc")
	wantErr(t, err, sandboxer.Conflict, `"abc" means several sandboxes: abc-2 (abc-1, default), abc-1 (one, default)`)
	_, err = r.Get(acme, "ab")
	wantErr(t, err, sandboxer.NotFound, "")
	for _, bad := range []string{"", "..", "a/b", "A", strings.Repeat("x", 1000)} {
		_, err = r.Get(acme, bad)
		wantErr(t, err, sandboxer.NotFound, "there is no sandbox")
	}
	r.destroy("abc-2")
	if sb := r.get("abc"); sb.ID != "abc-1" {
		t.Errorf("of a living and an ended one, %s", sb.ID)
	}
	r.destroy("one")
	if sb := r.get("one"); sb.ID != "abc-1" || sb.State != sandboxer.Terminated {
		t.Errorf("an ended one by its name: %+v", sb)
	}
	_, _, err = r.List(acme, sandboxer.Query{States: []sandboxer.State{"runing"}})
	wantErr(t, err, sandboxer.Invalid, `did you mean "running"?`)
	_, _, err = r.List(acme, sandboxer.Query{Limit: 1001})
	wantErr(t, err, sandboxer.Invalid, "want 1 to 1000")
}

// TestUse is every way into a running sandbox.
func TestUse(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(sandboxer.CreateRequest{})
	if err := r.MakeDir(acme, sb.ID, "/workspace/d"); err != nil {
		t.Fatal(err)
	}
	if err := r.WriteFile(acme, sb.ID, "/workspace/d/f", 0o644, strings.NewReader("hello")); err != nil {
		t.Fatal(err)
	}
	if err := r.MoveFile(acme, sb.ID, "/workspace/d/f", "/workspace/d/g"); err != nil {
		t.Fatal(err)
	}
	if fi, err := r.StatFile(acme, sb.ID, "/workspace/d/g"); err != nil || fi.Size != 5 {
		t.Errorf("%+v, %v", fi, err)
	}
	var names []string
	for fi, err := range r.ListFiles(acme, sb.ID, "/workspace/d", "") {
		names = append(names, fi.Path)
		if err != nil {
			t.Error(err)
		}
	}
	if !slices.Equal(names, []string{"/workspace/d/g"}) {
		t.Errorf("listed %v", names)
	}
	f, err := r.ReadFile(acme, sb.ID, "/workspace/d/g")
	if err != nil {
		t.Fatal(err)
	}
	if _, busy := r.usage.last(sb.ID); !busy {
		t.Error("an open file is use")
	}
	b, err := io.ReadAll(f)
	if err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
	f.Close()
	f.Close()
	if at, busy := r.usage.last(sb.ID); busy || at.IsZero() {
		t.Error("a closed file is no use any more")
	}
	if err := r.RemoveFile(acme, sb.ID, "/workspace/d"); err != nil {
		t.Error(err)
	}
	_, err = r.ReadFile(acme, sb.ID, "/workspace/d/g")
	wantErr(t, err, sandboxer.NotFound, "")
	_, err = r.ReadFile(acme, sb.ID, "workspace")
	wantErr(t, err, sandboxer.Invalid, "not a clean absolute path")
	_, err = r.Dial(acme, sb.ID, 0)
	wantErr(t, err, sandboxer.Invalid, "is not a port")
	_, err = r.Dial(acme, sb.ID, 1)
	wantErr(t, err, sandboxer.Unavailable, "")
	if _, busy := r.usage.last(sb.ID); busy {
		t.Error("a failed use is over")
	}
	if s, err := r.Stats(acme, sb.ID); err != nil || s.At.IsZero() {
		t.Errorf("%+v, %v", s, err)
	}
	var out bytes.Buffer
	if x, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", "cat; exit 43"}, Stdin: strings.NewReader("in"), Stdout: &out}); err != nil || x.Code != 43 || out.String() != "in" {
		t.Errorf("%+v, %v, %q", x, err, out.String())
	}
	r.destroy(sb.ID)
	_, err = r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"true"}})
	wantErr(t, err, sandboxer.Conflict, "is terminated, not running (requested)")
	if at, _ := r.usage.last(sb.ID); !at.IsZero() {
		t.Error("memory keeps what has ended")
	}
}

func TestGrants(t *testing.T) {
	r := newRig(t, nil)
	for range 2 {
		if err := r.Grant(admin, sandboxer.DefaultTenant, 5*sandboxer.Credit, "invoice-1", "thanks"); err != nil {
			t.Fatal(err)
		}
	}
	wantErr(t, r.Grant(admin, sandboxer.DefaultTenant, 6*sandboxer.Credit, "invoice-1", ""), sandboxer.Conflict, "another grant")
	wantErr(t, r.Grant(admin, "rival", 5*sandboxer.Credit, "invoice-1", ""), sandboxer.Conflict, "another grant")
	wantErr(t, r.Grant(admin, sandboxer.DefaultTenant, 0, "", ""), sandboxer.Invalid, "changes nothing")
	wantErr(t, r.Grant(admin, sandboxer.DefaultTenant, -6*sandboxer.Credit, "", ""), sandboxer.NoCredit, "")
	if err := r.Grant(admin, sandboxer.DefaultTenant, -sandboxer.Credit, "", ""); err != nil {
		t.Error(err)
	}
	if c, err := r.Balance(acme, ""); err != nil || c != 4*sandboxer.Credit {
		t.Errorf("%s, %v", c, err)
	}
	items, _, err := r.Entries(acme, sandboxer.EntryQuery{})
	if err != nil || len(items) != 2 || items[0].Note != "thanks" {
		t.Errorf("%+v, %v", items, err)
	}
	r.sound(0)
}

// telling has something to tell an operator.
type telling struct{ *fake.Extension }

func (telling) Notices(context.Context) []string { return []string{"the paint is wet"} }

// What an extension has to tell is for who runs it.
func TestNoticesAreForAdministrators(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.wrap = func(f *fake.Extension) sandboxer.Extension { return telling{f} }
	})
	if es := r.Extensions(admin); len(es) != 1 || !slices.Equal(es[0].Notices, []string{"the paint is wet"}) {
		t.Errorf("an administrator is told %+v", es)
	}
	if es := r.Extensions(acme); len(es) != 1 || es[0].Notices != nil {
		t.Errorf("a tenant is told %+v", es)
	}
}

// TestCatalogue is what callers see of profiles and extensions.
func TestCatalogue(t *testing.T) {
	r := newRig(t, nil)
	if ps := r.Profiles(acme); len(ps) != 3 || ps[0].Env != nil {
		t.Errorf("%+v", ps)
	}
	if ps := r.Profiles(admin); ps[0].Env["FROM"] != "profile" {
		t.Errorf("%+v", ps)
	}
	if r.Profiles(context.Background()) != nil || r.Extensions(context.Background()) != nil {
		t.Error("nobody sees something")
	}
	if es := r.Extensions(acme); len(es) != 1 || es[0].ID != "ext.fake" {
		t.Errorf("%+v", es)
	}
	if o, err := r.Probe(acme, "fake"); err != nil || o.Free != -1 || len(o.Hosts) != 1 {
		t.Errorf("%+v, %v", o, err)
	}
	_, err := r.Probe(acme, "ext.fakee")
	wantErr(t, err, sandboxer.NotFound, `did you mean "ext.fake"?`)
}

package server

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/api"
)

// TestForeignMatrix asks every route that takes a sandbox or a snapshot for another tenant's,
// in each state that it can be in: byte for byte, and header for header, all are answered as
// one that never was; and a create under such an ID makes the caller's own.
func TestForeignMatrix(t *testing.T) {
	r := newRig(t)
	_, acme := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	root, _ := r.key("root", sandboxer.ScopeAdmin)
	rival, _ := r.key("rival", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	made := func(state, id string) *api.Sandbox {
		t.Helper()
		sb, err := acme.Create(t.Context(), api.CreateSandbox{Profile: "test", Name: state, Inputs: map[string]string{"sandbox_id": id}, NoWaiting: state == "creating"})
		if err != nil {
			t.Fatal(err)
		}
		return sb
	}
	// As long as one that never was, so that lengths can be compared, too.
	ids := map[string]string{"creating": "aaaaaaaa", "running": "bbbbbbbb", "paused": "cccccccc", "terminating": "dddddddd", "terminated": "eeeeeeee"}
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, ID: sandboxer.ObjectID("acme", ids["creating"]), Hang: true},
		fake.Fault{Verb: fake.VerbTeardown, ID: sandboxer.ObjectID("acme", ids["terminating"]), Kind: sandboxer.Unavailable})
	for state, id := range ids {
		made(state, id)
	}
	snap, err := acme.Snapshot(t.Context(), "running", api.CreateSnapshot{Name: "sealed"})
	if err != nil {
		t.Fatal(err)
	}
	dropped, err := acme.Snapshot(t.Context(), "running", api.CreateSnapshot{Name: "dropped"})
	if err == nil {
		_, err = acme.DropSnapshot(t.Context(), dropped.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := acme.Pause(t.Context(), "paused", api.PauseSandbox{}); err != nil {
		t.Fatal(err)
	}
	for _, state := range []string{"terminating", "terminated"} {
		if _, err := acme.Destroy(t.Context(), state, state == "terminated"); err != nil {
			t.Fatal(err)
		}
	}
	for state, id := range ids {
		if sb, err := acme.Get(t.Context(), id); err != nil || string(sb.State) != state {
			t.Fatalf("%s is %+v, %v", state, sb, err)
		}
	}

	// said is all that an answer says, save what belongs to the request.
	said := func(a answered, ref string) string {
		h := a.header.Clone()
		h.Del("X-Request-Id")
		h.Del("Date")
		p := a.Problem
		p.RequestID = ""
		b, _ := json.Marshal(p)
		return strings.ReplaceAll(fmt.Sprint(a.status, len(a.body)-len(a.RequestID), h, string(b)), unescaped(ref), "REF")
	}
	ask := func(op operation, pattern, ref string) string {
		op.pattern = strings.Replace(pattern, "{id}", ref, 1)
		path := op.path(ref)
		return said(r.send(op.method, path, rival.Token, op.contentType(), op.body, op.upgrade()...), ref)
	}
	for _, op := range operations(t) {
		if op.scope == sandboxer.ScopeAdmin || op.id == "execStream" { // refused before; answers inside (TestExecOfOthers)
			continue
		}
		sandbox, snapshot := strings.HasPrefix(op.pattern, "/v1/sandboxes/{id}"), strings.HasPrefix(op.pattern, "/v1/snapshots/{id}")
		if op.id == "diffSnapshots" || !sandbox && !snapshot {
			continue
		}
		t.Run(op.id, func(t *testing.T) {
			refs := map[string]string{snap.ID: "snap-zzzzzzzzzzzz", dropped.ID: "snap-zzzzzzzzzzzz", "sealed": "missed", "dropped": "missing"}
			if sandbox {
				refs = map[string]string{}
				for state, id := range ids {
					refs[id], refs[state] = "zzzzzzzz", strings.Repeat("z", len(state))
					refs["acme%2F"+id], refs[sandboxer.ObjectID("acme", id)] = "acme%2Fzzzzzzzz", sandboxer.ObjectID("acme", "zzzzzzzz")
				}
			}
			for ref, none := range refs {
				if got, want := ask(op, op.pattern, ref), ask(op, op.pattern, none); got != want || !strings.HasPrefix(got, "404 ") {
					t.Errorf("%s: %s\none that never was: %s", ref, got, want)
				}
			}
		})
	}

	// The rival's own under each ID: the answer is the same whatever the other tenant's state, as for an unused ID.
	want := ""
	for _, state := range append(slices.Sorted(maps.Keys(ids)), "none") {
		id := ids[state]
		if id == "" {
			id = "ffffffff"
		}
		for i, header := range [][]string{{"Idempotency-Key", "k-" + id}, nil, {"Prefer", "respond-async"}} {
			a := r.send("POST", "/v1/sandboxes", rival.Token, "application/json", `{"profile":"test","inputs":{"sandbox_id":"`+id+`"}}`, header...)
			var sb api.Sandbox
			if err := json.Unmarshal([]byte(a.body), &sb); err != nil || sb.ID != id || sb.Tenant != "rival" || sb.State != sandboxer.Running || sb.Found != (i > 0) {
				t.Errorf("create under the ID of one that is %s: %d %s, %v", state, a.status, a.body, err)
			}
		}
		sb, err := r.client(r.tcp, sandboxer.Secret(rival.Token)).Get(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		got := api.Sandbox{ID: "REF", Generation: sb.Generation, Name: sb.Name, State: sb.State, Host: sb.Host, Version: sb.Version, Message: sb.Message}
		if text := fmt.Sprintf("%+v", got); want == "" {
			want = text
		} else if text != want {
			t.Errorf("one's own under the ID of one that is %s: %s; want %s", state, text, want)
		}
	}
	for state, id := range ids {
		if sb, err := acme.Get(t.Context(), id); err != nil || string(sb.State) != state {
			t.Errorf("%s is %+v, %v, after the rival's", state, sb, err)
		}
		// A caller that sees both has to say which.
		for _, op := range operations(t) {
			if !strings.HasPrefix(op.pattern, "/v1/sandboxes/{id}") || op.id == "execStream" {
				continue
			}
			op.pattern = strings.Replace(op.pattern, "{id}", id, 1)
			a := r.send(op.method, op.path(id), root.Token, op.contentType(), op.body, op.upgrade()...)
			if a.status != http.StatusConflict || !strings.Contains(a.Detail, "acme/"+id) || !strings.Contains(a.Detail, "rival/"+id) {
				t.Errorf("%s of %s: %d %s", op.id, id, a.status, a.body)
			}
		}
		for _, whose := range []string{"acme", "rival"} {
			sb, err := r.admin.Get(t.Context(), whose+"/"+id)
			if err != nil || sb.ID != id || sb.Tenant != whose {
				t.Errorf("%s/%s: %+v, %v", whose, id, sb, err)
			}
		}
	}
	if l, err := r.client(r.tcp, sandboxer.Secret(rival.Token)).List(t.Context(), api.SandboxQuery{}); err != nil || len(l.Items) != len(ids)+1 {
		t.Errorf("the rival has %+v, %v", l, err)
	}
}

func unescaped(ref string) string { return strings.ReplaceAll(ref, "%2F", "/") }

// TestSizesAreOfContent: only administrators see what a snapshot shares with others in the
// store.
func TestSizesAreOfContent(t *testing.T) {
	as := func(scopes ...sandboxer.Scope) context.Context {
		return sandboxer.WithPrincipal(t.Context(), sandboxer.Principal{Tenant: "acme", Actor: "a", Scopes: scopes})
	}
	rec := func(stored int64) *sandboxer.SnapshotRecord {
		return &sandboxer.SnapshotRecord{ID: "snap-aaaaaaaaaaaa", Tenant: "acme", Kind: sandboxer.SnapshotPortable, State: sandboxer.SnapshotSealed,
			Portable: sandboxer.PortablePayload{Digest: "sha256:00", Bytes: stored, Size: 303_558, Files: 1}}
	}
	var seen []string
	for _, stored := range []int64{303_000, 69_943, 0} {
		b, err := json.Marshal(newSnapshot(as(sandboxer.ScopeRead, sandboxer.ScopeWrite), rec(stored)))
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, string(b))
		if got := newSnapshot(as(sandboxer.ScopeAdmin), rec(stored)); got.Stored != stored || got.Bytes != 303_558 {
			t.Errorf("an administrator sees %d and %d", got.Stored, got.Bytes)
		}
	}
	if one := slices.Compact(seen); len(one) != 1 {
		t.Errorf("a tenant sees that another stores the same: %q", one)
	}
}

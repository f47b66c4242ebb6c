package manager

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/access"
)

// TestBearer: a token opens the way to its own sandbox, as long as that lives, over pauses and a
// restart, and to nothing else.
func TestBearer(t *testing.T) {
	r := newRig(t, nil)
	ctx := t.Context()
	sb, other := r.create(sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": "mine"}}), r.create(sandboxer.CreateRequest{Profile: "test"})
	token := r.BearerToken(sb)
	for name, c := range map[string]struct {
		id    string
		token sandboxer.Secret
	}{
		"another sandbox's": {other.ID, token}, "no token": {sb.ID, ""}, "no ID": {"", token}, "the prefix": {sb.ID, access.BearerTokenPrefix},
		"shorter": {sb.ID, token[:len(token)-1]}, "longer": {sb.ID, token + "A"}, "changed": {sb.ID, token[:len(token)-3] + "AAA"},
		"another kind's": {sb.ID, r.Manager.ports.SignPort(access.PortClaim{ID: sb.ID, Generation: 1, Port: 80, Until: time.Now().Add(time.Hour)})},
	} {
		if b, _, err := r.Bearer(ctx, c.id, c.token); b != nil || sandboxer.KindOf(err) != sandboxer.Unauthenticated {
			t.Errorf("%s: %v", name, err)
		}
	}
	use := func(what string) {
		t.Helper()
		b, got, err := r.Bearer(ctx, sb.ID, token)
		if err != nil || got.ID != sb.ID || b.Principal().Tenant != sb.Tenant || b.Principal().Can(sandboxer.ScopeAdmin) {
			t.Fatalf("%s: %v, %v", what, got, err)
		}
		if err := b.WriteFile(ctx, "/workspace/x", 0o600, strings.NewReader(what)); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		f, err := b.ReadFile(ctx, "/workspace/x")
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if text, err := io.ReadAll(f); err != nil || string(text) != what {
			t.Errorf("%s: %q, %v", what, text, err)
		}
		f.Close()
		if now := r.get(sb.ID); r.BearerToken(now) != token {
			t.Errorf("%s: it has another token", what)
		}
	}
	use("running")
	if _, err := r.Pause(acme, sb.ID, PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	use("resumed by its bearer")
	if _, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
		t.Fatal(err)
	}
	use("of another object")
	r.close()
	r.open()
	use("after a restart")
	b, _, err := r.Bearer(ctx, sb.ID, token)
	if err != nil {
		t.Fatal(err)
	}
	r.destroy(sb.ID)
	next := r.create(sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": "mine"}})
	if next.ID != sb.ID || r.BearerToken(next) == token {
		t.Error("the next sandbox has the token of the one before")
	}
	if _, _, err := r.Bearer(ctx, sb.ID, token); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("the token of one that has ended: %v", err)
	}
	if _, err := b.Exec(ctx, sandboxer.Cmd{Args: []string{"true"}}); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("a bearer who came before it ended: %v", err)
	}
	if err := b.MakeDir(ctx, "/x"); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("a bearer who came before it ended: %v", err)
	}
	r.destroy(next.ID)
	r.destroy(other.ID)
	r.sound(0)
}

// TestBearerIsAUse: while a bearer's command runs the sandbox is in use, and idle from its end.
func TestBearerIsAUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) {
			ticking(s)
			s.profiles = append(s.profiles, idleProfile(time.Minute, sandboxer.ExpiryPause))
		})
		sb := r.create(sandboxer.CreateRequest{Profile: "idle"})
		b, _, err := r.Bearer(t.Context(), sb.ID, r.BearerToken(sb))
		if err != nil {
			t.Fatal(err)
		}
		v, err := b.use(t.Context(), r.Manager.Execs)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if s := r.get(sb.ID).State; s != sandboxer.Running {
			t.Errorf("in use for ten minutes it is %s", s)
		}
		v.End()
		time.Sleep(40 * time.Second)
		synctest.Wait()
		if s := r.get(sb.ID).State; s != sandboxer.Running {
			t.Errorf("40s after the use it is %s", s)
		}
		time.Sleep(40 * time.Second)
		synctest.Wait()
		if s := r.get(sb.ID).State; s != sandboxer.Paused {
			t.Errorf("80s after the use it is %s", s)
		}
		r.destroy(sb.ID)
		r.sound(0)
	})
}

// TestVouchedMounts: callers of a door may mount what the door vouches for, also when
// the sandbox goes on, and other callers may not.
func TestVouchedMounts(t *testing.T) {
	x := &mounter{}
	r := newRig(t, func(s *setup) {
		s.wrap = func(f *fake.Extension) sandboxer.Extension { x.Extension = f; return x }
	})
	p := sandboxer.PrincipalFrom(acme)
	p.Vouches = []string{sandboxer.RestrictedMounts}
	door := sandboxer.WithPrincipal(t.Context(), p)
	req := sandboxer.CreateRequest{Profile: "test", Mounts: []sandboxer.Mount{{Source: "/srv", Target: "/mnt/x"}}}
	if _, err := r.Create(acme, req); sandboxer.KindOf(err) != sandboxer.Denied {
		t.Errorf("for whom nobody stands: %v", err)
	}
	sb, err := r.Create(door, req)
	if err != nil {
		t.Fatal(err)
	}
	if got := x.got[len(x.got)-1]; !slices.Equal(got.Vouched, []string{sandboxer.RestrictedMounts}) {
		t.Errorf("the extension is told that somebody stands for %q", got.Vouched)
	}
	pause := func() {
		t.Helper()
		if _, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
			t.Fatal(err)
		}
	}
	pause()
	if _, err := r.Resume(acme, sb.ID, ResumeRequest{}); sandboxer.KindOf(err) != sandboxer.Denied {
		t.Errorf("resumed by somebody else: %v", err)
	}
	b, _, err := r.Bearer(t.Context(), sb.ID, r.BearerToken(sb))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.MakeDir(t.Context(), "/x"); sandboxer.KindOf(err) != sandboxer.Denied {
		t.Errorf("by a bearer for whom nobody stands: %v", err)
	}
	b.Vouch(sandboxer.RestrictedMounts)
	if err := b.MakeDir(t.Context(), "/x"); err != nil {
		t.Errorf("by a bearer: %v", err)
	}
	r.destroy(sb.ID)
	r.sound(0)
}

// FuzzBearer wants every token but the right one refused alike.
func FuzzBearer(f *testing.F) {
	r := newRig(f, func(s *setup) { quiet(s); s.idle = true })
	// Each process that fuzzes has a broker of its own: the ID, and with it the token, must be the same in all of them.
	sb := r.create(sandboxer.CreateRequest{Profile: "test", Thread: sandboxer.Thread{ID: "fuzz"}})
	right := r.BearerToken(sb).Reveal()
	for _, s := range []string{"", right, right + "=", access.BearerTokenPrefix, strings.ToUpper(right), right[:20]} {
		f.Add(sb.ID, s)
	}
	f.Fuzz(func(t *testing.T, id, token string) {
		_, _, err := r.Bearer(context.Background(), id, sandboxer.Secret(token))
		if good := id == sb.ID && token == right; good != (err == nil) || !good && sandboxer.KindOf(err) != sandboxer.Unauthenticated {
			t.Errorf("%q, %q: %v", id, token, err)
		}
	})
}

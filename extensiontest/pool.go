package extensiontest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// pool specifies sandboxes that are made before anybody asks for them.
func (s *suite) pool(t *testing.T) {
	warm := func(sp *sandboxer.Spec) {
		sp.Warm = true
		sp.Env["SANDBOXER_TEST_PROFILE"] = "profile"
		sp.Env["SANDBOXER_TEST_BOTH"] = "profile"
	}
	// order is the claim of sb by somebody.
	order := func(sb *sandbox) sandboxer.Spec {
		sp := sb.spec
		sp.Warm = false
		sp.Env = map[string]string{"SANDBOXER_TEST_BOTH": "claim", "SANDBOXER_TEST_CLAIM": "claim 'quoted'"}
		sp.Labels = map[string]string{"claimed": "yes"}
		return sp
	}
	claim := func(t *testing.T, sb *sandbox, sp sandboxer.Spec) *sandbox {
		t.Helper()
		h, err := sb.b.Claim(ctx(t), sb.h, sp)
		if err != nil {
			t.Fatalf("Claim(%s): %s", sp.ID, describe(err))
		}
		r, err := sb.b.WaitReady(ctx(t), h)
		if err != nil {
			t.Fatalf("WaitReady(%s): %s", sp.ID, describe(err))
		}
		return &sandbox{s: s, b: sb.b, h: h, reach: r, spec: sp}
	}
	const variables = `echo "$SANDBOXER_TEST_PROFILE/$SANDBOXER_TEST_BOTH/$SANDBOXER_TEST_CLAIM"`
	const claimed = "/claim/claim 'quoted'"
	looks := func(t *testing.T) {
		t.Helper()
		if !s.open(t).Can(sandboxer.CanExec) {
			t.Skip("cannot look inside: the extension has no exec")
		}
	}
	t.Run("the basis is stable", func(t *testing.T) {
		sp := s.spec()
		sp.Warm = true
		first, err := s.open(t).Basis(ctx(t), sp)
		if err != nil {
			t.Fatal(describe(err))
		}
		sp.ID = s.spec().ID
		if second, err := s.open(t).Basis(ctx(t), sp); err != nil || second != first {
			t.Errorf("the basis is %q for one sandbox and %q for the next, %v", first, second, err)
		}
	})
	t.Run("is given what it asked for", func(t *testing.T) {
		looks(t)
		sb := s.up(t, warm)
		sb.alive(t)
		got := claim(t, sb, order(sb))
		if out := got.sh(t, variables); out != claimed {
			t.Errorf("the environment after the claim is %q; want %q", out, claimed)
		}
		tty, _, _ := got.run(t, sandboxer.Cmd{Args: s.script("test \"$SANDBOXER_TEST_CLAIM\""), TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}})
		if tty.Code != 0 {
			t.Errorf("a command with a terminal does not have the claim's environment: %+v", tty)
		}
		if s.enforces(Hostname) {
			if name := got.sh(t, "hostname"); name != sb.spec.ID {
				t.Errorf("the host name is %q; want %q", name, sb.spec.ID)
			}
		}
		other := *got
		other.b, other.h = s.open(t), viaJSON(t, got.h)
		if out := other.sh(t, variables); out != claimed {
			t.Errorf("in another process of the broker the environment is %q; want %q", out, claimed)
		}
		other.alive(t)
	})
	t.Run("inputs come with the claim", func(t *testing.T) {
		looks(t)
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "hello"), []byte("from the claim"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		sp := s.spec()
		warm(&sp)
		order1 := sp
		order1.Inputs = map[string]string{"repo": dir}
		if err := s.open(t).Check(ctx(t), order1); err != nil {
			t.Skipf("the extension takes no directory as repo: %v", err)
		}
		sb := s.upSpec(t, s.open(t), sp)
		o := order(sb)
		o.Inputs = order1.Inputs
		if out := claim(t, sb, o).sh(t, "cat hello"); out != "from the claim" {
			t.Errorf("the workspace has %q", out)
		}
	})
	t.Run("the main command waits for the claim", func(t *testing.T) {
		looks(t)
		sb := s.up(t, warm, func(sp *sandboxer.Spec) {
			sp.Command = s.script(`echo "$SANDBOXER_TEST_BOTH" >>main; exec sleep 3600`)
		})
		time.Sleep(300 * time.Millisecond)
		if out := sb.sh(t, "cat main 2>/dev/null || true"); out != "" {
			t.Errorf("the command ran before anybody claimed the sandbox: %q", out)
		}
		got := claim(t, sb, order(sb))
		poll(t, "the command to run with the claim's environment", s.long(), func() bool {
			return got.sh(t, "cat main 2>/dev/null || true") == "claim"
		})
	})
	t.Run("a claim is idempotent", func(t *testing.T) {
		looks(t)
		sb := s.up(t, warm)
		got := claim(t, sb, order(sb))
		got.sh(t, "echo mine >kept")
		again := *got
		again.b, again.h = s.open(t), viaJSON(t, sb.h)
		if out := claim(t, &again, order(sb)).sh(t, "cat kept; "+variables); out != "mine\n"+claimed {
			t.Errorf("after the same claim again: %q", out)
		}
	})
	t.Run("the stamp is the claim's", func(t *testing.T) {
		sb := s.up(t, warm, func(sp *sandboxer.Spec) { sp.Stamp = []byte("nobody's") })
		if !sb.b.Can(sandboxer.CanDiscover) {
			t.Skip("the extension does not discover")
		}
		sp := order(sb)
		sp.Stamp = []byte("somebody's")
		claim(t, sb, sp)
		if f, err := s.open(t).Discover(ctx(t), sb.spec.ID); err != nil || string(f.Stamp) != "somebody's" {
			t.Errorf("discovered the stamp %q, %v; want that of the claim", f.Stamp, err)
		}
	})
	t.Run("is claimed by one", func(t *testing.T) {
		sb := s.up(t, warm)
		got := claim(t, sb, order(sb))
		rival := order(sb)
		rival.Env = map[string]string{"SANDBOXER_TEST_CLAIM": "rival"}
		_, err := s.open(t).Claim(ctx(t), sb.h, rival)
		wantKind(t, err, "the claim of another", sandboxer.Conflict)
		if got.b.Can(sandboxer.CanExec) {
			if out := got.sh(t, variables); strings.Contains(out, "rival") {
				t.Errorf("the environment is the rival's: %q", out)
			}
		}
	})
	t.Run("only warm ones are claimed", func(t *testing.T) {
		sb := s.up(t)
		_, err := sb.b.Claim(ctx(t), sb.h, order(sb))
		wantKind(t, err, "Claim of a sandbox that was made for somebody", sandboxer.Conflict)
		sb.alive(t)
	})
	t.Run("the fuse moves with the claim", func(t *testing.T) {
		sb := s.up(t, warm, func(sp *sandboxer.Spec) { sp.Fuse = time.Now().Add(5 * time.Second) })
		o := order(sb)
		o.Fuse = time.Now().Add(12 * time.Second)
		got := claim(t, sb, o)
		time.Sleep(time.Until(sb.spec.Fuse) + 2*time.Second)
		got.alive(t)
		poll(t, "the backend to destroy it", s.Settle+time.Minute, func() bool {
			_, err := sb.b.WaitReady(ctx(t), sb.h)
			return sandboxer.KindOf(err) == sandboxer.NotFound
		})
	})
	t.Run("a warm one is torn down as any other", func(t *testing.T) {
		sb := s.up(t, warm)
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		s.gone(t, sb.b, sb.spec)
		_, err := sb.b.Claim(ctx(t), sb.h, order(sb))
		wantKind(t, err, "Claim of what is gone", sandboxer.NotFound)
	})
	t.Run("unknown sandbox", func(t *testing.T) {
		h := s.unknown()
		sp := s.spec()
		sp.ID = h.SandboxID
		_, err := s.open(t).Claim(ctx(t), h, sp)
		wantKind(t, err, "Claim", sandboxer.NotFound)
	})
}

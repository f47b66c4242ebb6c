package extensiontest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// pool specifies sandboxes that are made before they are requested.
func (s *suite) pool(t *testing.T) {
	warm := func(sp *sandboxer.Spec) {
		sp.Warm = true
		sp.Env["SANDBOXER_TEST_PROFILE"] = "profile"
		sp.Env["SANDBOXER_TEST_BOTH"] = "profile"
	}
	// order is the spec by which an owner claims sb.
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
		if !s.opened.Can(sandboxer.CanExec) {
			t.Skip("cannot look inside: the extension has no exec")
		}
	}
	s.test(t, "the basis is stable", func(t *testing.T) {
		sp := s.spec()
		sp.Warm = true
		first, err := s.opened.Basis(ctx(t), sp)
		if err != nil {
			t.Fatal(describe(err))
		}
		sp.ID = s.spec().ID
		if second, err := s.open(t).Basis(ctx(t), sp); err != nil || second != first {
			t.Errorf("the basis is %q for one sandbox and %q for the next, %v", first, second, err)
		}
	})
	s.test(t, "is given what it asked for", func(t *testing.T) {
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
	s.test(t, "inputs come with the claim", func(t *testing.T) {
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
		if _, err := s.opened.Check(ctx(t), order1); err != nil {
			t.Skipf("the extension takes no directory as repo: %v", err)
		}
		sb := s.upSpec(t, s.opened, sp)
		o := order(sb)
		o.Inputs = order1.Inputs
		if out := claim(t, sb, o).sh(t, "cat hello"); out != "from the claim" {
			t.Errorf("the workspace has %q", out)
		}
	})
	s.test(t, "the main command waits for the claim", func(t *testing.T) {
		looks(t)
		sb := s.up(t, warm, func(sp *sandboxer.Spec) {
			sp.Command = s.script(`echo "$SANDBOXER_TEST_BOTH" >>main; exec sleep 3600`)
		})
		// Later commands have begun and ended.
		for range 3 {
			sb.sh(t, "true")
		}
		if out := sb.sh(t, "cat main 2>/dev/null || true"); out != "" {
			t.Errorf("the command ran before anybody claimed the sandbox: %q", out)
		}
		got := claim(t, sb, order(sb))
		poll(t, "the command to run with the claim's environment", s.long(), func() bool {
			return got.sh(t, "cat main 2>/dev/null || true") == "claim"
		})
	})
	s.test(t, "a claim is idempotent", func(t *testing.T) {
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
	s.test(t, "is claimed by one", func(t *testing.T) {
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
	s.test(t, "only warm ones are claimed", func(t *testing.T) {
		sb := s.up(t)
		_, err := sb.b.Claim(ctx(t), sb.h, order(sb))
		wantKind(t, err, "Claim of a sandbox that was made for somebody", sandboxer.Conflict)
		sb.alive(t)
	})
	s.test(t, "the fuse moves with the claim", func(t *testing.T) {
		var claimed *sandbox
		s.outlives(t, warm, func(sb *sandbox) {
			o := order(sb)
			o.Fuse = sb.spec.Fuse.Add(6 * time.Second)
			claimed = claim(t, sb, o)
		})
		poll(t, "the backend to destroy it", s.Settle+s.Patience, func() bool {
			_, err := claimed.b.WaitReady(ctx(t), claimed.h)
			return sandboxer.KindOf(err) == sandboxer.NotFound
		})
	})
	s.test(t, "a warm one is torn down as any other", func(t *testing.T) {
		sb := s.up(t, warm)
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Fatal(describe(err))
		}
		s.gone(t, sb.b, sb.spec)
		_, err := sb.b.Claim(ctx(t), sb.h, order(sb))
		wantKind(t, err, "Claim of what is gone", sandboxer.NotFound)
	})
	s.test(t, "unknown sandbox", func(t *testing.T) {
		h := s.unknown()
		sp := s.spec()
		sp.ID = h.SandboxID
		_, err := s.opened.Claim(ctx(t), h, sp)
		wantKind(t, err, "Claim", sandboxer.NotFound)
	})
}

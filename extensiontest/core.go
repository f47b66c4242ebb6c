package extensiontest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// core is what every extension must do, whatever else it can do. Behaviour inside the
// sandbox is tested where the extension has exec.
func (s *suite) core(t *testing.T) {
	inside := func(t *testing.T) {
		t.Helper()
		if !slices.Contains(s.Want, sandboxer.CanExec) {
			t.Skip("cannot look inside: the extension has no exec")
		}
	}

	s.test(t, "capabilities", func(t *testing.T) {
		b := s.opened
		for _, c := range s.Want {
			if !b.Can(c) {
				t.Errorf("the extension lacks %s, which the harness wants", c)
			}
		}
		for _, c := range b.Capabilities() {
			if !slices.Contains(s.Want, c) {
				t.Errorf("the extension has %s, which the harness does not want: add it to Want or disclaim it", c)
			}
		}
	})

	s.test(t, "what it says of itself", s.says)

	// Only an operator may choose values that affect more than the sandbox.
	s.test(t, "restricted inputs", func(t *testing.T) {
		if s.Inputs == nil {
			t.Fatal("the harness does not say which inputs the adapter declares")
		}
		b := s.opened
		refused := func(t *testing.T, what string, sp sandboxer.Spec, want ...sandboxer.Kind) {
			t.Helper()
			s.owe(t, b, sp)
			if _, err := b.Check(ctx(t), sp); !slices.Contains(want, sandboxer.KindOf(err)) {
				t.Errorf("%s, checked: %s; want %v", what, describe(err), want)
			}
			if _, err := b.Provision(ctx(t), sp); !slices.Contains(want, sandboxer.KindOf(err)) {
				t.Errorf("%s, provisioned: %s; want %v", what, describe(err), want)
			}
			if b.Can(sandboxer.CanDiscover) {
				if h, err := b.Discover(ctx(t), sp.ID); sandboxer.KindOf(err) != sandboxer.NotFound {
					t.Errorf("%s: something is there: %+v, %v", what, h, err)
				}
			}
		}
		for _, in := range s.Inputs {
			if !in.Restricted {
				continue
			}
			for _, v := range []string{"/etc", "somewhere", "root@192.0.2.1", "22"} {
				sp := s.spec()
				sp.Vouched = slices.DeleteFunc(sp.Vouched, func(n string) bool { return n == in.Name })
				sp.Inputs = maps.Clone(sp.Inputs)
				if sp.Inputs == nil {
					sp.Inputs = map[string]string{}
				}
				sp.Inputs[in.Name] = v
				refused(t, in.Name+"="+v, sp, sandboxer.Denied)
				sp.Profile.Builtin, sp.Profile.Inputs = true, sp.Inputs // which no operator of this installation wrote
				refused(t, in.Name+"="+v+" of a built-in profile", sp, sandboxer.Denied)
			}
		}
		sp := s.spec()
		sp.Vouched, sp.Host = nil, "root@127.0.0.1"
		refused(t, "a host that was not configured", sp, sandboxer.Denied, sandboxer.Invalid, sandboxer.Unsupported)
	})

	s.test(t, "provision is idempotent", func(t *testing.T) {
		sb := s.up(t)
		if sb.b.Can(sandboxer.CanExec) {
			sb.sh(t, "echo first >mark")
		}
		for _, b := range []int{1, 2} {
			again, err := s.open(t).Provision(ctx(t), sb.spec)
			if err != nil {
				t.Fatalf("Provision, call %d: %s", b+1, describe(err))
			}
			if again.Ref != sb.h.Ref || again.Host != sb.h.Host {
				t.Errorf("call %d returned %q on %q; the first returned %q on %q", b+1, again.Ref, again.Host, sb.h.Ref, sb.h.Host)
			}
			sb.h = again
		}
		if sb.b.Can(sandboxer.CanExec) {
			if got := sb.sh(t, "cat mark"); got != "first" {
				t.Errorf("the sandbox was made again: the file mark contains %q", got)
			}
		}
		if sb.b.Can(sandboxer.CanList) {
			s.eventually(t, "exactly one listed sandbox", func() bool { return len(listed(t, sb.b, sb.spec)) == 1 })
		}
	})

	s.test(t, "concurrent provision makes one", func(t *testing.T) {
		sp := s.spec()
		a, b := s.opened, s.open(t)
		s.owe(t, a, sp)
		var wg sync.WaitGroup
		handles, errs := make([]sandboxer.Handle, 8), make([]error, 8)
		for i := range handles {
			wg.Go(func() {
				on := a
				if i%2 == 1 {
					on = b
				}
				if handles[i], errs[i] = on.Provision(ctx(t), sp); errs[i] == nil {
					_, errs[i] = on.WaitReady(ctx(t), handles[i])
				}
			})
		}
		wg.Wait()
		for i := range handles {
			if errs[i] != nil {
				t.Errorf("call %d: %s", i, describe(errs[i]))
			} else if handles[i].Ref != handles[0].Ref {
				t.Errorf("call %d made %q, call 0 %q", i, handles[i].Ref, handles[0].Ref)
			}
		}
		if a.Can(sandboxer.CanList) {
			s.eventually(t, "exactly one listed sandbox", func() bool { return len(listed(t, a, sp)) == 1 })
		}
		if _, err := a.Teardown(ctx(t), handles[0]); err != nil {
			t.Fatalf("Teardown: %s", describe(err))
		}
		s.gone(t, b, sp)
	})

	s.test(t, "handle survives JSON and another process", func(t *testing.T) {
		sb := s.up(t)
		sb.b, sb.h = s.open(t), viaJSON(t, sb.h)
		sb.alive(t)
	})

	s.test(t, "handle is small", func(t *testing.T) {
		sb := s.up(t, func(sp *sandboxer.Spec) {
			sp.Env["BIG"] = strings.Repeat("x", 8<<10) // what the spec holds, the receipt need not
		})
		j, err := json.Marshal(sb.h)
		if err != nil || len(j) > 4<<10 {
			t.Errorf("handle of %d bytes, %v; want at most 4096", len(j), err)
		}
	})

	s.test(t, "closing leaves sandboxes alone", func(t *testing.T) {
		sb := s.up(t)
		t.Run("opened and closed", func(t *testing.T) {
			if _, err := s.open(t).WaitReady(ctx(t), sb.h); err != nil {
				t.Errorf("WaitReady: %s", describe(err))
			}
		})
		sb.alive(t)
	})

	s.test(t, "the order is not modified", func(t *testing.T) {
		fill := func(sp *sandboxer.Spec) {
			sp.ID, sp.Env, sp.Labels = "ct-unmodified", map[string]string{"A": "1"}, map[string]string{"l": "1"}
			sp.Inputs = map[string]string{}
			for k, v := range s.Spec.Inputs {
				sp.Inputs[k] = v
			}
		}
		sb := s.up(t, fill)
		want := s.spec()
		fill(&want)
		want.Fuse = sb.spec.Fuse
		if !reflect.DeepEqual(sb.spec, want) {
			t.Errorf("Provision changed its spec:\n got %+v\nwant %+v", sb.spec, want)
		}
	})

	s.test(t, "wait ready again", func(t *testing.T) {
		sb := s.up(t)
		r, err := sb.b.WaitReady(ctx(t), sb.h)
		if err != nil || !reflect.DeepEqual(r, sb.reach) {
			t.Errorf("the second WaitReady = %+v, %v; the first returned %+v", r, err, sb.reach)
		}
	})

	s.test(t, "wait ready of the unknown", func(t *testing.T) {
		_, err := s.opened.WaitReady(ctx(t), sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1})
		wantKind(t, err, "WaitReady", sandboxer.NotFound)
	})

	s.test(t, "teardown twice", func(t *testing.T) {
		sb := s.up(t)
		for i := range 2 {
			if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
				t.Fatalf("Teardown, call %d: %s", i+1, describe(err))
			}
			s.gone(t, sb.b, sb.spec)
		}
		_, err := sb.b.WaitReady(ctx(t), sb.h)
		wantKind(t, err, "WaitReady after Teardown", sandboxer.NotFound)
	})

	s.test(t, "teardown by ID and generation", func(t *testing.T) {
		sb := s.up(t)
		b := s.open(t)
		if _, err := b.Teardown(ctx(t), sandboxer.Handle{SandboxID: sb.spec.ID, Generation: 1}); err != nil {
			t.Fatalf("Teardown: %s", describe(err))
		}
		s.gone(t, sb.b, sb.spec)
	})

	s.test(t, "teardown by ID alone", func(t *testing.T) {
		sb := s.up(t, func(sp *sandboxer.Spec) { sp.Generation = 3 })
		b := s.open(t)
		if _, err := b.Teardown(ctx(t), sandboxer.Handle{SandboxID: sb.spec.ID}); err != nil {
			t.Fatalf("Teardown: %s", describe(err))
		}
		s.gone(t, sb.b, sb.spec)
	})

	s.test(t, "teardown of the unknown", func(t *testing.T) {
		b := s.opened
		for _, gen := range []int{0, 1, 7} {
			if _, err := b.Teardown(ctx(t), sandboxer.Handle{SandboxID: s.spec().ID, Generation: gen}); err != nil {
				t.Errorf("Teardown of generation %d: %s", gen, describe(err))
			}
		}
	})

	s.test(t, "concurrent teardown", func(t *testing.T) {
		sb := s.up(t)
		b := s.open(t)
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				on := sb.b
				if i%2 == 1 {
					on = b
				}
				if _, err := on.Teardown(ctx(t), sb.h); err != nil {
					t.Errorf("Teardown, call %d: %s", i, describe(err))
				}
			})
		}
		wg.Wait()
		s.gone(t, sb.b, sb.spec)
	})

	s.test(t, "teardown during wait ready", func(t *testing.T) {
		sp := s.spec()
		b, other := s.opened, s.open(t)
		s.owe(t, b, sp)
		h, err := b.Provision(ctx(t), sp)
		if err != nil {
			t.Fatalf("Provision: %s", describe(err))
		}
		done, c := make(chan error, 1), ctx(t)
		go func() {
			_, err := b.WaitReady(c, h)
			done <- err
		}()
		if _, err := other.Teardown(ctx(t), h); err != nil {
			t.Errorf("Teardown: %s", describe(err))
		}
		select {
		case err := <-done: // it may have been ready just before
			if err != nil {
				wantKind(t, err, "WaitReady during Teardown", sandboxer.NotFound, sandboxer.Failed, sandboxer.Unavailable)
			}
		case <-time.After(time.Minute):
			t.Fatal("WaitReady still waits a minute after Teardown")
		}
		s.gone(t, b, sp)
	})

	s.test(t, "teardown during exec", func(t *testing.T) {
		inside(t)
		sb := s.up(t)
		started, w := newSignalWriter()
		r := sb.start(t, sandboxer.Cmd{Args: s.script("echo started; sleep 3600"), Stdout: w})
		await(t, started, "the command to start")
		if _, err := s.open(t).Teardown(ctx(t), sb.h); err != nil {
			t.Fatalf("Teardown: %s", describe(err))
		}
		r.wait(t) // killed is a result, gone an error: both are true
		s.gone(t, sb.b, sb.spec)
	})

	s.test(t, "late teardown spares the newer generation", func(t *testing.T) {
		old := s.up(t)
		if _, err := old.b.Teardown(ctx(t), old.h); err != nil {
			t.Fatalf("Teardown: %s", describe(err))
		}
		sp := old.spec
		sp.Generation = 2
		sb := s.upSpec(t, old.b, sp)
		for _, h := range []sandboxer.Handle{old.h, {SandboxID: sp.ID, Generation: 1}} {
			if _, err := s.open(t).Teardown(ctx(t), h); err != nil {
				t.Errorf("late Teardown: %s", describe(err))
			}
			sb.alive(t)
		}
		if sb.b.Can(sandboxer.CanProbe) {
			if l, err := sb.b.IsAlive(ctx(t), old.h); err != nil || l != sandboxer.Gone {
				t.Errorf("IsAlive of the older generation = %s, %v; want gone", l, err)
			}
		}
	})

	s.test(t, "a new generation is empty", func(t *testing.T) {
		inside(t)
		old := s.up(t)
		old.sh(t, "echo old >mark")
		if _, err := old.b.Teardown(ctx(t), old.h); err != nil {
			t.Fatalf("Teardown: %s", describe(err))
		}
		sp := old.spec
		sp.Generation = 2
		sb := s.upSpec(t, old.b, sp)
		if got := sb.sh(t, "cat mark 2>/dev/null || echo none"); got != "none" {
			t.Errorf("the new generation has the old one's file: %q", got)
		}
	})

	s.test(t, "sandboxes are apart", func(t *testing.T) {
		inside(t)
		a := s.up(t)
		b := s.upSpec(t, a.b, s.spec()) // of the same process: it must not mix them up
		a.sh(t, "echo a >mark")
		if got := b.sh(t, "cat mark 2>/dev/null || echo none"); got != "none" {
			t.Errorf("one sandbox sees the other's file: %q", got)
		}
		if _, err := a.b.Teardown(ctx(t), a.h); err != nil {
			t.Fatalf("Teardown: %s", describe(err))
		}
		b.alive(t)
	})

	s.test(t, "a stranger's sandbox of the same ID", func(t *testing.T) {
		if s.Stranger == nil {
			t.Skip("the harness cannot open the backend for another owner")
		}
		sb := s.up(t)
		stranger := s.wrap(t, s.Stranger(t))
		if _, err := stranger.Teardown(ctx(t), sandboxer.Handle{SandboxID: sb.spec.ID}); err != nil {
			t.Errorf("the stranger's Teardown: %s", describe(err))
		}
		sb.alive(t)
		if stranger.Can(sandboxer.CanDiscover) {
			h, err := stranger.Discover(ctx(t), sb.spec.ID)
			if sandboxer.KindOf(err) != sandboxer.NotFound {
				t.Errorf("the stranger discovers %+v, %v; want not_found", h, err)
			}
		}
	})

	s.test(t, "canceled context changes nothing", func(t *testing.T) {
		sp := s.spec()
		ext := s.Open(t) // below the backend, which would stop it
		b := s.wrap(t, ext)
		s.owe(t, b, sp)
		c, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := ext.Provision(c, sp); err == nil {
			t.Error("Provision succeeded with a canceled context")
		}
		s.gone(t, b, sp)
		sb := s.upSpec(t, b, sp)
		if _, err := ext.Teardown(c, sb.h); err == nil {
			t.Error("Teardown succeeded with a canceled context")
		}
		sb.alive(t)
		if _, err := ext.WaitReady(c, sb.h); err == nil {
			t.Error("WaitReady succeeded with a canceled context")
		}
	})

	s.test(t, "an interrupted provision can be torn down", func(t *testing.T) {
		b := s.opened
		for _, after := range []time.Duration{0, 500 * time.Microsecond, 5 * time.Millisecond, 50 * time.Millisecond} {
			sp := s.spec()
			s.owe(t, b, sp)
			c, cancel := context.WithTimeout(t.Context(), after)
			_, err := b.Provision(c, sp)
			cancel()
			if err != nil {
				wantKind(t, err, "interrupted Provision", sandboxer.Timeout, sandboxer.Canceled)
			}
			if _, err := b.Teardown(ctx(t), sandboxer.Handle{SandboxID: sp.ID, Generation: 1}); err != nil {
				t.Errorf("Teardown: %s", describe(err))
			}
			s.gone(t, b, sp)
		}
	})

	s.test(t, "killed behind our back", func(t *testing.T) {
		if s.Kill == nil {
			t.Skip("the harness cannot kill a sandbox")
		}
		sb := s.up(t)
		s.Kill(t, sb.h)
		_, err := sb.b.WaitReady(ctx(t), sb.h)
		wantKind(t, err, "WaitReady", sandboxer.NotFound, sandboxer.Failed)
		if sb.b.Can(sandboxer.CanProbe) {
			if l, err := sb.b.IsAlive(ctx(t), sb.h); err != nil || l != sandboxer.Gone {
				t.Errorf("IsAlive = %s, %v; want gone", l, err)
			}
		}
		if sb.b.Can(sandboxer.CanExec) {
			_, err := sb.b.Exec(ctx(t), sb.h, sandboxer.Cmd{Args: s.script("true")})
			wantKind(t, err, "Exec", sandboxer.NotFound)
		}
		if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
			t.Errorf("Teardown: %s", describe(err))
		}
		s.gone(t, sb.b, sb.spec)
	})

	s.test(t, "env", func(t *testing.T) {
		inside(t)
		value := "two words, \"quotes\", $HOME, ü and\na second line"
		sb := s.up(t, func(sp *sandboxer.Spec) { sp.Env["PLAIN"], sp.Env["ODD"], sp.Env["EMPTY"] = "x", value, "" })
		if got := sb.sh(t, `printf '%s|%s|%s' "$PLAIN" "$ODD" "${EMPTY-unset}"`); got != "x|"+value+"|" {
			t.Errorf("environment = %q", got)
		}
	})

	s.test(t, "commands find their tools", func(t *testing.T) {
		inside(t)
		sb := s.up(t)
		if got := sb.sh(t, `[ -n "$PATH" ] && [ -n "$HOME" ] && cat /dev/null && echo yes`); got != "yes" {
			t.Errorf("PATH or HOME is missing inside: %q", got)
		}
	})

	s.test(t, "hostname is the ID", func(t *testing.T) {
		inside(t)
		if !s.enforces(Hostname) {
			t.Skip("the harness does not list hostname in Enforces")
		}
		sb := s.up(t)
		if got := sb.sh(t, "uname -n"); got != sb.spec.ID {
			t.Errorf("host name = %q; want %q", got, sb.spec.ID)
		}
	})

	s.test(t, "host name leads to itself", func(t *testing.T) {
		inside(t)
		if !s.enforces(OwnName) {
			t.Skip("the harness does not list own name in Enforces")
		}
		sb := s.up(t)
		if got := sb.sh(t, `grep -cE "^[0-9.]+[[:space:]](.*[[:space:]])?$(uname -n)([[:space:]]|$)" /etc/hosts || true`); got != "1" {
			t.Errorf("%s lines of /etc/hosts name an address for the sandbox's own host name; want 1", got)
		}
	})

	s.test(t, "text is UTF-8", func(t *testing.T) {
		inside(t)
		if !s.enforces(Locale) {
			t.Skip("the harness does not list locale in Enforces")
		}
		const look = `echo "$LANG"`
		sb := s.up(t)
		if got := sb.sh(t, look); got != "C.UTF-8" {
			t.Errorf("LANG = %q; want C.UTF-8", got)
		}
		if _, out, _ := sb.run(t, sandboxer.Cmd{Args: s.script(look), Env: map[string]string{"LANG": "POSIX"}}); strings.TrimSpace(out) != "POSIX" {
			t.Errorf("LANG = %q where the caller says POSIX", out)
		}
		sb = s.up(t, func(sp *sandboxer.Spec) { sp.Env = map[string]string{"LANG": "C"} })
		if got := sb.sh(t, look); got != "C" {
			t.Errorf("LANG = %q where the profile says C", got)
		}
	})

	for name, id := range map[string]string{
		"one character": string("bcdfghkmnpqrstvwxyz"[time.Now().UnixNano()%19]),
		"48 characters": sandboxer.NewID() + strings.Repeat("x-9y", 10),
		"hyphens":       sandboxer.NewID() + "--x---y",
		"digits":        strconv.FormatInt(time.Now().UnixNano(), 10),
	} {
		s.test(t, "ID of "+name, func(t *testing.T) {
			sb := s.up(t, func(sp *sandboxer.Spec) { sp.ID = id })
			sb.alive(t)
			if _, err := sb.b.Teardown(ctx(t), sandboxer.Handle{SandboxID: id, Generation: 1}); err != nil {
				t.Errorf("Teardown: %s", describe(err))
			}
			s.gone(t, sb.b, sb.spec)
		})
	}

	s.test(t, "IDs that begin alike are apart", func(t *testing.T) {
		a := s.up(t)
		b := s.up(t, func(sp *sandboxer.Spec) { sp.ID = a.spec.ID + "-g1" })
		if _, err := b.b.Teardown(ctx(t), sandboxer.Handle{SandboxID: a.spec.ID}); err != nil {
			t.Fatalf("Teardown: %s", describe(err))
		}
		b.alive(t)
		s.gone(t, b.b, a.spec)
	})

	s.test(t, "secrets stay inside", func(t *testing.T) {
		canary := "canary-" + sandboxer.NewID() + sandboxer.NewID()
		secret := func(sp *sandboxer.Spec) { sp.Env["TOKEN"] = canary }
		leak := func(where string, v any) {
			t.Helper()
			j, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(j), canary) {
				t.Errorf("%s contains the value of a variable: %s", where, j)
			}
		}
		leakErr := func(where string, err error) {
			t.Helper()
			if err != nil && strings.Contains(err.Error(), canary) {
				t.Errorf("%s contains the value of a variable: %v", where, err)
			}
		}
		sb := s.up(t, secret)
		leak("the handle", sb.h)
		leak("the reachability", sb.reach)
		if sb.b.Can(sandboxer.CanList) {
			for h, err := range sb.b.ListRunning(ctx(t), sb.spec.Owner) {
				leakErr("the listing's error", err)
				leak("a listed handle", h)
			}
		}
		if sb.b.Can(sandboxer.CanExec) {
			_, err := sb.b.Exec(ctx(t), sb.h, sandboxer.Cmd{
				Args: []string{"true"}, Dir: "/no/such/directory", Env: map[string]string{"TOKEN2": canary},
			})
			leakErr("Exec's error", err)
		}
		bad := s.spec()
		secret(&bad)
		bad.Image = s.MissingImage
		s.owe(t, sb.b, bad)
		h, err := sb.b.Provision(ctx(t), bad)
		leakErr("Provision's error", err)
		if err == nil {
			_, err = sb.b.WaitReady(ctx(t), h)
			leakErr("WaitReady's error", err)
		}
		report, err := sb.b.Teardown(ctx(t), sb.h)
		leakErr("Teardown's error", err)
		leak("the cleanup report", report)
	})

	s.test(t, "missing image", func(t *testing.T) {
		b, sp := s.opened, s.spec()
		sp.Image = s.MissingImage
		s.owe(t, b, sp)
		h, err := b.Provision(ctx(t), sp)
		if err == nil {
			_, err = b.WaitReady(ctx(t), h)
		}
		wantKind(t, err, "Provision and WaitReady with a missing image",
			sandboxer.Failed, sandboxer.Invalid, sandboxer.Unsupported)
		if _, err := b.Teardown(ctx(t), sandboxer.Handle{SandboxID: sp.ID, Generation: 1}); err != nil {
			t.Errorf("Teardown: %s", describe(err))
		}
		s.gone(t, b, sp)
	})

	s.test(t, "missing main command", func(t *testing.T) {
		b, sp := s.opened, s.spec()
		sp.Command = []string{"/no/such/command"}
		s.owe(t, b, sp)
		h, err := b.Provision(ctx(t), sp)
		if err == nil {
			_, err = b.WaitReady(ctx(t), h)
		}
		wantKind(t, err, "Provision and WaitReady with a missing main command",
			sandboxer.Failed, sandboxer.Invalid, sandboxer.Unsupported)
		if _, err := b.Teardown(ctx(t), sandboxer.Handle{SandboxID: sp.ID, Generation: 1}); err != nil {
			t.Errorf("Teardown: %s", describe(err))
		}
		s.gone(t, b, sp)
	})

	// Refused specs must be refused before anything exists.
	refused := func(name string, change func(*sandboxer.Spec), kinds ...sandboxer.Kind) {
		s.test(t, name, func(t *testing.T) {
			b, sp := s.opened, s.spec()
			change(&sp)
			s.owe(t, b, sp)
			h, err := b.Provision(ctx(t), sp)
			wantKind(t, err, "Provision", kinds...)
			if err == nil {
				t.Errorf("Provision returned %+v", h)
			}
			s.gone(t, b, sp)
		})
	}
	refused("unknown network mode is refused", func(sp *sandboxer.Spec) { sp.Network = sandboxer.NetworkPolicy{Mode: "sometimes"} },
		sandboxer.Invalid, sandboxer.Unsupported)
	refused("mount of a missing path is refused", func(sp *sandboxer.Spec) {
		sp.Mounts = []sandboxer.Mount{{Source: "/no/such/source", Target: "/mnt/x", ReadOnly: true}}
	}, sandboxer.Invalid, sandboxer.Unsupported)
	for _, l := range limits {
		if !s.enforces(l.feature) {
			refused(string(l.feature)+" limit is refused", l.set, sandboxer.Unsupported)
			continue
		}
		s.alone(t, string(l.feature)+" limit is enforced", func(t *testing.T) {
			inside(t)
			l.check(t, s.up(t, l.set))
		})
	}

	s.test(t, "network none is loopback only", func(t *testing.T) {
		inside(t)
		if !s.enforces(Network) {
			t.Skip("the harness does not list network in Enforces")
		}
		sb := s.up(t, func(sp *sandboxer.Spec) { sp.Network = sandboxer.NetworkPolicy{} })
		if got := sb.sh(t, `sed 1,2d /proc/net/dev | sed 's/:.*//; s/ //g' | grep -v '^lo$' || true`); got != "" {
			t.Errorf("interfaces besides loopback: %q", got)
		}
	})

	s.test(t, "network none is of all address families", func(t *testing.T) {
		inside(t)
		switch {
		case !s.enforces(Network):
			t.Skip("the harness does not list network in Enforces")
		case s.Socket == nil:
			t.Fatal("the harness has no Socket, by which families are tried")
		}
		sb := s.up(t, func(sp *sandboxer.Spec) { sp.Network = sandboxer.NetworkPolicy{} })
		made := func(family int) bool {
			x, _, _ := sb.run(t, sandboxer.Cmd{Args: s.Socket(family)})
			return x.Code == 0
		}
		for family := range 64 {
			switch family {
			case 1, 2, 10: // Unix and the two Internet ones: of the sandbox's own kernel, or network namespace
				if !made(family) {
					t.Errorf("no socket of family %d can be made", family)
				}
			case 16, 17: // Netlink and packets: of the network namespace, where they are
			default:
				if made(family) {
					t.Errorf("a socket of family %d, which no policy covers, can be made", family)
				}
			}
		}
	})

	s.alone(t, "leaves no goroutine and no file descriptor", func(t *testing.T) {
		s.closed() // what extensions that are open at the same time share goes with the last
		cycle := func(t *testing.T) {
			sb := s.upSpec(t, s.open(t), s.spec())
			if sb.b.Can(sandboxer.CanExec) {
				sb.sh(t, "echo x")
			}
			if sb.b.Can(sandboxer.CanList) {
				listed(t, sb.b, sb.spec)
			}
		}
		t.Run("warm up", cycle)
		// Files that a library leaves to the garbage collector are closed by it, too.
		files := func() int { runtime.GC(); return openFiles() }
		files()
		goroutines, fds := runtime.NumGoroutine(), files()
		for range 3 {
			t.Run("cycle", cycle)
		}
		poll(t, "the goroutines to end", s.long(), func() bool { return runtime.NumGoroutine() <= goroutines })
		poll(t, "the file descriptors to be closed", s.long(), func() bool { return files() <= fds })
		if t.Failed() {
			buf := make([]byte, 1<<20)
			t.Logf("goroutines: %d before, %d after; files: %d before, %d after\n%s",
				goroutines, runtime.NumGoroutine(), fds, openFiles(), buf[:runtime.Stack(buf, true)])
		}
	})
}

// childTime adds up the second line that the shell's times prints, the time of its
// children, "0m0.61s 0m0.02s".
func childTime(out string) (sum time.Duration, err error) {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for f := range strings.FieldsSeq(lines[len(lines)-1]) {
		d, err := time.ParseDuration(f)
		if err != nil {
			return 0, fmt.Errorf("times answered %q: %w", out, err)
		}
		sum += d
	}
	return sum, nil
}

// openFiles counts this process's file descriptors; 0 where it cannot.
func openFiles() int {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(fds)
}

// shows checks that a limit is visible in one of the places where programs look: a script prints a
// figure for each that exists.
func (sb *sandbox) shows(t *testing.T, limit int64, look string) {
	t.Helper()
	said := strings.Fields(sb.sh(t, look))
	if !slices.ContainsFunc(said, func(f string) bool {
		n, err := strconv.ParseInt(f, 10, 64)
		return err == nil && n > 0 && n <= limit
	}) {
		t.Errorf("programs inside see %q; the limit is %d", said, limit)
	}
}

// The places where programs look for limits on memory, in bytes, and on processors, in thousandths: the files of
// control groups of version 2 and 1, and how large the machine seems.
const (
	lookMemory = `cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null
while read name n _; do [ "$name" != MemTotal: ] || echo $((n * 1024)); done </proc/meminfo`
	lookCPU = `cat /sys/fs/cgroup/cpu.max 2>/dev/null | { read quota period && [ "$quota" != max ] && echo $((quota * 1000 / period)); }
cd /sys/fs/cgroup/cpu 2>/dev/null && echo $(($(cat cpu.cfs_quota_us) * 1000 / $(cat cpu.cfs_period_us)))
true`
)

// limits are every field of sandboxer.Limits, each with a script that looks from inside.
var limits = []struct {
	feature Feature
	set     func(*sandboxer.Spec)
	check   func(*testing.T, *sandbox)
}{
	{CPU, func(sp *sandboxer.Spec) { sp.Limits.MilliCPU = 200 }, func(t *testing.T, sb *sandbox) {
		sb.shows(t, 200, lookCPU)
		// Measured from outside where possible: the clocks of a guest whose
		// kernel is itself throttled are wrong. Only the upper bound is a
		// promise; a busy machine may give less.
		const spin = `(while :; do :; done) & sleep 3; kill $!; wait $!`
		began := time.Now()
		var cpu time.Duration
		if sb.b.Can(sandboxer.CanStats) {
			before := sb.stats(t)
			sb.run(t, sandboxer.Cmd{Args: sb.s.script(spin)})
			cpu = sb.stats(t).CPU - before.CPU
		} else {
			var err error
			if cpu, err = childTime(sb.sh(t, spin+"; times")); err != nil {
				t.Fatal(err)
			}
		}
		if most := time.Since(began)*3/10 + 200*time.Millisecond; cpu > most {
			t.Errorf("a busy loop got %s of CPU in %s; the limit is 0.2 CPU", cpu, time.Since(began))
		}
	}},
	{Memory, func(sp *sandboxer.Spec) { sp.Limits.MemoryBytes = memoryLimit }, func(t *testing.T, sb *sandbox) {
		sb.shows(t, memoryLimit, lookMemory)
		// Either the command dies or, where the guest's kernel is in the same memory, the
		// whole sandbox. The test exec/out of memory covers how that is reported.
		out, errs := new(strings.Builder), new(strings.Builder)
		x, err := sb.b.Exec(t.Context(), sb.h, sandboxer.Cmd{Stdout: out, Stderr: errs,
			Args: sb.s.script(hog)})
		if err == nil && x.Code == 0 && strings.TrimSpace(out.String()) == "400000000" {
			t.Errorf("a command kept 400 MB in memory (%+v, %q); the limit is 128 MiB", x, errs)
		}
		if err != nil && !strings.Contains(sandboxer.Message(err), "memory") {
			t.Errorf("the sandbox died of its memory limit, but the error is %s", describe(err))
		}
	}},
	{Disk, func(sp *sandboxer.Spec) { sp.Limits.DiskBytes = 64 << 20 }, func(t *testing.T, sb *sandbox) {
		out := sb.sh(t, `head -c 200000000 /dev/zero >big 2>/dev/null; wc -c <big; rm -f big`)
		if n, err := strconv.ParseInt(strings.TrimSpace(out), 10, 64); err != nil || n > 80<<20 {
			t.Errorf("a file of %q bytes was written; the limit is 64 MiB", out)
		}
		if got := sb.sh(t, "echo still >f && cat f"); got != "still" {
			t.Errorf("after the disk was full and emptied again: %q", got)
		}
	}},
	{PIDs, func(sp *sandboxer.Spec) { sp.Limits.PIDs = 32 }, func(t *testing.T, sb *sandbox) {
		// While it is full, a command may find no process for its own start.
		run := func(script string) (out string) {
			for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
				var stdout strings.Builder
				x, err := sb.b.Exec(ctx(t), sb.h, sandboxer.Cmd{Args: sb.s.script(script), Stdout: &stdout})
				switch {
				case err == nil && x.Code == 0:
					return stdout.String()
				case err != nil && sandboxer.KindOf(err) != sandboxer.Exhausted, time.Now().After(end):
					t.Fatalf("a command for a sandbox that was full of processes: %+v, %s", x, describe(err))
				}
			}
		}
		sb.run(t, sandboxer.Cmd{Args: sb.s.script(`i=0; while [ $i -lt 100 ]; do sleep 3 & echo $! >>started; i=$((i+1)); done; wait`)})
		// Counted without a fork: the started processes may still be there.
		out := run("n=0; while read l; do n=$((n+1)); done <started; echo $n")
		if n, err := strconv.Atoi(strings.TrimSpace(out)); err != nil || n == 0 || n > 32 {
			t.Errorf("%q processes ran at once; the limit is 32", out)
		}
		// A sandbox that is full of processes lacks nothing else, and lives on.
		const fill = `(while :; do sleep 5 & done); while :; do sleep 5 & done`
		if x, err := sb.b.Exec(ctx(t), sb.h, sandboxer.Cmd{Args: sb.s.script(fill)}); err != nil && sandboxer.KindOf(err) != sandboxer.Exhausted {
			t.Errorf("filling it with processes: %+v, %s", x, describe(err))
		}
		if sb.b.Can(sandboxer.CanFiles) {
			if err := sb.b.WriteFile(ctx(t), sb.h, "/tmp/while-full", 0o644, strings.NewReader("x")); err != nil && sandboxer.KindOf(err) != sandboxer.Exhausted {
				t.Errorf("a file for a full sandbox: %s", describe(err))
			}
		}
		run("true")
		sb.alive(t)
	}},
	{GPUs, func(sp *sandboxer.Spec) { sp.Limits.GPUs = 1 }, func(t *testing.T, sb *sandbox) { sb.alive(t) }},
}

func (sb *sandbox) stats(t *testing.T) sandboxer.Stats {
	t.Helper()
	st, err := sb.b.Stats(ctx(t), sb.h)
	if err != nil {
		t.Fatalf("Stats: %s", describe(err))
	}
	return st
}

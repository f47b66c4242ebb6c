package fake_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

func specOf(id string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: "me"}
}

var a1 = sandboxer.Handle{SandboxID: "a", Generation: 1}

func newWorld(t *testing.T) *fake.World {
	t.Helper()
	w := fake.NewWorld()
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return w
}

func mustProvision(t *testing.T, e *fake.Extension, spec sandboxer.Spec) sandboxer.Handle {
	t.Helper()
	h, err := e.Provision(t.Context(), spec)
	if err != nil {
		t.Fatalf("Provision(%s): %v", spec.ID, err)
	}
	return h
}

func ids(list []fake.Object) (out []string) {
	for _, o := range list {
		out = append(out, o.Spec.ID)
	}
	return out
}

func TestFaults(t *testing.T) {
	// Each case provisions "a" with the fault in place and looks at the first call, the
	// second, and what there is.
	for _, tt := range []struct {
		name          string
		fault         fake.Fault
		first, second sandboxer.Kind
		took          time.Duration // of the first call
		live          int           // after the first call
	}{
		{"none", fake.Fault{Verb: fake.VerbStats, Kind: sandboxer.Failed}, "", "", 0, 1},
		{"fail once", fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Exhausted, Times: 1}, sandboxer.Exhausted, "", 0, 0},
		{"fail always", fake.Fault{Verb: fake.VerbAny, Kind: sandboxer.Unavailable}, sandboxer.Unavailable, sandboxer.Unavailable, 0, 0},
		{"fail the second", fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Failed, Skip: 1}, "", sandboxer.Failed, 0, 1},
		{"another sandbox", fake.Fault{Verb: fake.VerbProvision, ID: "b", Kind: sandboxer.Failed}, "", "", 0, 1},
		{"slow", fake.Fault{Verb: fake.VerbProvision, Delay: time.Second, Times: 1}, "", "", time.Second, 1},
		{"hang", fake.Fault{Verb: fake.VerbProvision, Hang: true, Times: 1}, sandboxer.Timeout, "", time.Minute, 0},
		{"lost", fake.Fault{Verb: fake.VerbProvision, Lost: true, Times: 1}, sandboxer.Unavailable, "", 0, 1},
		{"lost with a kind", fake.Fault{Verb: fake.VerbProvision, Lost: true, Kind: sandboxer.Internal, Times: 1}, sandboxer.Internal, "", 0, 1},
		{"lost in silence", fake.Fault{Verb: fake.VerbProvision, Lost: true, Hang: true, Times: 1}, sandboxer.Timeout, "", time.Minute, 1},
		{"twice", fake.Fault{Verb: fake.VerbProvision, Twice: true, Times: 1}, "", "", 0, 2},
	} {
		for _, how := range []string{"config", "inject"} {
			t.Run(tt.name+"/"+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t)
					cfg := fake.Config{}
					if how == "config" {
						cfg.Faults = []fake.Fault{tt.fault}
					} else {
						w.Inject(tt.fault)
					}
					e := fake.New(w, cfg)
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					start := time.Now()
					_, err := e.Provision(ctx, specOf("a"))
					if got := sandboxer.KindOf(err); got != tt.first || time.Since(start) != tt.took {
						t.Errorf("first: %v (%s) after %s; want %q after %s", err, got, time.Since(start), tt.first, tt.took)
					}
					if n := len(w.Live()); n != tt.live {
						t.Errorf("%d objects; want %d", n, tt.live)
					}
					if _, err := e.Provision(t.Context(), specOf("a")); sandboxer.KindOf(err) != tt.second {
						t.Errorf("second: %v; want %q", err, tt.second)
					}
					w.Forgive()
					if _, err := e.Teardown(t.Context(), a1); how == "inject" && err != nil {
						t.Errorf("Teardown, all forgiven: %v", err)
					}
				})
			})
		}
	}
}

func TestLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.Inject(fake.Fault{Verb: fake.VerbProvision, Late: time.Minute, Times: 1})
		e := fake.New(w, fake.Config{})
		ctx, cancel := context.WithCancel(t.Context())
		_, err := e.Provision(ctx, specOf("a"))
		cancel() // nobody waits any more
		if sandboxer.KindOf(err) != sandboxer.Unavailable {
			t.Errorf("Provision: %v; want unavailable", err)
		}
		if _, err := e.Teardown(t.Context(), a1); err != nil || len(w.Live()) != 0 {
			t.Errorf("Teardown: %v, %d objects", err, len(w.Live()))
		}
		time.Sleep(2 * time.Minute)
		if got := ids(w.Live()); !slices.Equal(got, []string{"a"}) {
			t.Errorf("two minutes later there is %q; want the late one", got)
		}
		if faults := fake.Audit(w.Log(), false); len(faults) > 0 {
			t.Errorf("the broker is blamed for the fake's own doing: %q", faults)
		}
	})
}

func TestLies(t *testing.T) {
	w := newWorld(t)
	e := fake.New(w, fake.Config{})
	mustProvision(t, e, specOf("a"))
	lie := func(v fake.Verb) { w.Inject(fake.Fault{Verb: v, Lie: true, Times: 1}) }
	ctx := t.Context()

	lie(fake.VerbProvision)
	if h, err := e.Provision(ctx, specOf("b")); err != nil || h.SandboxID == "b" {
		t.Errorf("Provision = %+v, %v; want another's handle", h, err)
	}
	lie(fake.VerbTeardown)
	if _, err := e.Teardown(ctx, a1); err != nil || len(w.Live()) != 2 {
		t.Errorf("Teardown: %v, %d objects; want success and nothing done", err, len(w.Live()))
	}
	lie(fake.VerbProbe)
	if l, err := e.IsAlive(ctx, a1); err != nil || l != sandboxer.Gone {
		t.Errorf("IsAlive = %s, %v; want the opposite", l, err)
	}
	lie(fake.VerbDiscover)
	if _, err := e.Discover(ctx, "a"); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("Discover: %v; want not_found", err)
	}
	lie(fake.VerbList)
	for h, err := range e.ListRunning(ctx, "me") {
		t.Errorf("ListRunning yields %+v, %v; want nothing", h, err)
	}
	w.Inject(fake.Fault{Verb: fake.VerbList, Twice: true, Times: 1})
	n := 0
	for range e.ListRunning(ctx, "me") {
		n++
	}
	if n != 4 {
		t.Errorf("ListRunning yields %d; want both twice", n)
	}
	lie(fake.VerbExec)
	if x, err := e.Exec(ctx, a1, sandboxer.Cmd{Args: []string{"false"}}); err != nil || x.Code != 0 {
		t.Errorf("Exec = %+v, %v; want 0 without running it", x, err)
	}
}

func TestListDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		e := fake.New(w, fake.Config{ListDelay: time.Minute})
		listed := func() (n int) {
			for _, err := range e.ListRunning(t.Context(), "me") {
				if err != nil {
					t.Error(err)
				}
				n++
			}
			return n
		}
		mustProvision(t, e, specOf("a"))
		if n := listed(); n != 0 {
			t.Errorf("listed %d at once", n)
		}
		time.Sleep(time.Minute + time.Second)
		if n := listed(); n != 1 {
			t.Errorf("listed %d after the delay", n)
		}
		if _, err := e.Teardown(t.Context(), a1); err != nil {
			t.Error(err)
		}
		if n := listed(); n != 1 {
			t.Errorf("listed %d right after the teardown; want the old truth", n)
		}
		time.Sleep(time.Minute + time.Second)
		if n := listed(); n != 0 {
			t.Errorf("listed %d long after the teardown", n)
		}
	})
}

func TestFuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		e := fake.New(w, fake.Config{})
		for i, id := range []string{"a", "b", "c"} {
			s := specOf(id)
			s.Fuse = time.Now().Add(time.Duration(i+1) * time.Hour)
			mustProvision(t, e, s)
		}
		if err := e.Renew(t.Context(), a1, time.Now().Add(5*time.Hour)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(150 * time.Minute)
		if got := ids(w.Live()); !slices.Equal(got, []string{"a", "c"}) {
			t.Errorf("after 2.5 h there are %q; want a and c", got)
		}
		time.Sleep(time.Hour)
		if got := ids(w.Live()); !slices.Equal(got, []string{"a"}) {
			t.Errorf("after 3.5 h there are %q; want a", got)
		}
		time.Sleep(2 * time.Hour)
		if l, err := e.IsAlive(t.Context(), a1); err != nil || l != sandboxer.Gone {
			t.Errorf("after 5.5 h: %s, %v; want gone", l, err)
		}
	})
}

func TestCapacity(t *testing.T) {
	w := newWorld(t)
	e := fake.New(w, fake.Config{Capacity: 2})
	free := func(want int) {
		t.Helper()
		if o, err := e.Capacity(t.Context(), ""); err != nil || o.Free != want {
			t.Errorf("Capacity = %+v, %v; want %d free", o, err, want)
		}
	}
	free(2)
	mustProvision(t, e, specOf("a"))
	mustProvision(t, e, specOf("b"))
	mustProvision(t, e, specOf("b")) // the same again takes no room
	free(0)
	if _, err := e.Provision(t.Context(), specOf("c")); sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("the third: %v; want exhausted", err)
	}
	if _, err := e.Teardown(t.Context(), a1); err != nil {
		t.Error(err)
	}
	free(1)
	mustProvision(t, e, specOf("c"))
}

func TestMoney(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		e := fake.New(w, fake.Config{Setup: 1000, PerHour: 60_000})
		q, err := e.EstimateCost(t.Context(), specOf("a"), 90*time.Minute)
		if err != nil || q == nil || q.Amount != 91_000 || q.For(time.Hour) != 61_000 {
			t.Errorf("EstimateCost = %+v, %v", q, err)
		}
		h := mustProvision(t, e, specOf("a"))
		time.Sleep(30 * time.Minute)
		if u, err := e.MeterActual(t.Context(), h, 0); err != nil || u.Cost != 31_000 {
			t.Errorf("MeterActual = %+v, %v; want 31000", u, err)
		}
		if q, err := fake.New(w, fake.Config{}).EstimateCost(t.Context(), specOf("a"), time.Hour); q != nil || err != nil {
			t.Errorf("without a price: %+v, %v; want no quote", q, err)
		}
	})
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	e := fake.New(w, fake.Config{Images: []string{"demo"}, Hosts: []string{"h1", "h2"}})
	for _, tt := range []struct {
		name   string
		change func(*sandboxer.Spec)
		want   sandboxer.Kind
		says   string
	}{
		{"limits", func(s *sandboxer.Spec) { s.Limits.PIDs = 1 }, sandboxer.Unsupported, "limits"},
		{"mounts", func(s *sandboxer.Spec) { s.Mounts = []sandboxer.Mount{{Source: "/", Target: "/x"}} }, sandboxer.Denied, "does not offer that path"},
		{"allow", func(s *sandboxer.Spec) { s.Network.Mode = sandboxer.NetworkAllow }, sandboxer.Unsupported, "destinations"},
		{"network", func(s *sandboxer.Spec) { s.Network.Mode = "loud" }, sandboxer.Invalid, `"loud"`},
		{"image", func(s *sandboxer.Spec) { s.Image = "other" }, sandboxer.Failed, `no image "other"`},
		{"host", func(s *sandboxer.Spec) { s.Host = "h3" }, sandboxer.Invalid, "h1, h2"},
		{"workspace", func(s *sandboxer.Spec) { s.Workspace = "../etc" }, sandboxer.Invalid, "../etc"},
		{"repo", func(s *sandboxer.Spec) { s.Inputs = map[string]string{"repo": "/no/such"} }, sandboxer.Invalid, "/no/such"},
		{"user", func(s *sandboxer.Spec) { s.User = "no-such-user" }, sandboxer.Invalid, "no-such-user"},
		{"command", func(s *sandboxer.Spec) { s.Command = []string{"no-such-command"} }, sandboxer.Failed, "no-such-command"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := specOf("a")
			tt.change(&s)
			_, err := e.Provision(t.Context(), s)
			if sandboxer.KindOf(err) != tt.want || !strings.Contains(sandboxer.Message(err), tt.says) {
				t.Errorf("Provision: %v (%s); want %s with %q", err, sandboxer.KindOf(err), tt.want, tt.says)
			}
			_, err = e.RestoreFromSnapshot(t.Context(), s, sandboxer.Snapshot{SnapshotID: "s"})
			if sandboxer.KindOf(err) != tt.want && tt.name != "command" {
				t.Errorf("RestoreFromSnapshot: %v; want %s", err, tt.want)
			}
			if live := w.Live(); len(live) != 0 {
				t.Errorf("there is %q", ids(live))
			}
		})
	}
	if h := mustProvision(t, e, specOf("a")); h.Host != "h1" {
		t.Errorf("placed on %q; want the first host", h.Host)
	}
}

func TestConfig(t *testing.T) {
	open := func(text string) (sandboxer.Extension, error) {
		return fake.Adapter.Open(t.Context(), sandboxer.Env{
			Extension: "ext.fake", Owner: "me",
			Decode: func(v any) error {
				d, err := yaml.NewLoader(strings.NewReader(text), yaml.WithKnownFields())
				if err != nil {
					return err
				}
				return d.Load(v)
			},
		})
	}
	ext, err := open(`
capacity: 3
per_hour: 120000
list_delay: 1m30s
drop: [snapshot, exec]
agent: /usr/local/bin/sandboxer-agent
faults:
- {verb: provision, kind: unavailable, times: 1}
- {verb: teardown, lost: true, skip: 2, delay: 100ms}
`)
	if err != nil {
		t.Fatal(err)
	}
	e := ext.(*fake.Extension)
	defer e.Close()
	if got := e.Without(); !slices.Equal(got, []sandboxer.Capability{sandboxer.CanSnapshot, sandboxer.CanExec}) {
		t.Errorf("Without() = %q", got)
	}
	none := fake.New(fake.NewWorld(), fake.Config{Drop: []sandboxer.Capability{sandboxer.CanDial}})
	defer none.Close()
	if got := none.Without(); !slices.Equal(got, []sandboxer.Capability{sandboxer.CanDial, sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch}) {
		t.Errorf("Without() with no agent = %q", got)
	}
	if _, err := e.Provision(t.Context(), specOf("a")); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("Provision: %v; want the configured fault", err)
	}
	mustProvision(t, e, specOf("a"))
	if q, err := e.EstimateCost(t.Context(), specOf("a"), time.Hour); err != nil || q.Amount != 120_000 {
		t.Errorf("EstimateCost = %+v, %v", q, err)
	}

	for text, says := range map[string]string{
		"capacity: -1":                             "negative",
		"drop: [wings]":                            `"wings"`,
		"faults: [{verb: provide, lost: true}]":    `"provide"`,
		"faults: [{verb: exec, kind: sad}]":        `"sad"`,
		"faults: [{verb: exec, times: -1}]":        "negative",
		"colour: red":                              "colour",
		"server: /no/such/socket":                  "/no/such/socket",
		"faults: [{verb: exec, delay: sometimes}]": "sometimes",
	} {
		if ext, err := open(text); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, %v; want an error with %s", text, ext, err, says)
		}
	}
}

// Every exported field travels in JSON as in YAML, for the world's own process.
func TestFaultJSON(t *testing.T) {
	want := fake.Fault{Verb: fake.VerbExec, ID: "a", Times: 2, Skip: 1, Delay: time.Second, Kind: sandboxer.Failed,
		Hang: true, Lost: true, Late: time.Minute, Twice: true, Lie: true, Silent: true}
	j, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var got fake.Fault
	if err := json.Unmarshal(j, &got); err != nil || got != want {
		t.Errorf("%s becomes %+v, %v", j, got, err)
	}
}

func TestAudit(t *testing.T) {
	e := func(op fake.Op, id string, gen int) fake.Entry {
		return fake.Entry{Op: op, Owner: "me", SandboxID: id, Generation: gen}
	}
	for _, tt := range []struct {
		name string
		log  []fake.Entry
		over bool
		want int
	}{
		{"a life", []fake.Entry{e(fake.OpCreate, "a", 1), e(fake.OpFound, "a", 1), e(fake.OpRemove, "a", 1), e(fake.OpAbsent, "a", 1)}, true, 0},
		{"two generations", []fake.Entry{e(fake.OpCreate, "a", 1), e(fake.OpRemove, "a", 1), e(fake.OpCreate, "a", 2), e(fake.OpRemove, "a", 2)}, true, 0},
		{"still alive", []fake.Entry{e(fake.OpCreate, "a", 1)}, false, 0},
		{"left over", []fake.Entry{e(fake.OpCreate, "a", 1)}, true, 1},
		{"two at a time", []fake.Entry{e(fake.OpCreate, "a", 1), e(fake.OpCreate, "a", 1), e(fake.OpRemove, "a", 1), e(fake.OpRemove, "a", 1)}, true, 1},
		{"made again", []fake.Entry{e(fake.OpCreate, "a", 1), e(fake.OpRemove, "a", 1), e(fake.OpCreate, "a", 1), e(fake.OpRemove, "a", 1)}, true, 1},
		{"late", []fake.Entry{e(fake.OpAbsent, "a", 1), e(fake.OpLate, "a", 1), e(fake.OpRemove, "a", 1)}, true, 0},
		{"a crash of its own", []fake.Entry{e(fake.OpCreate, "a", 1), e(fake.OpKill, "a", 1), e(fake.OpRemove, "a", 1)}, true, 0},
		{"the world began again", []fake.Entry{e(fake.OpCreate, "a", 1), {Op: fake.OpStart}, e(fake.OpCreate, "a", 1), e(fake.OpRemove, "a", 1)}, true, 0},
	} {
		if got := fake.Audit(tt.log, tt.over); len(got) != tt.want {
			t.Errorf("%s: %q; want %d", tt.name, got, tt.want)
		}
	}
}

func TestMainCommand(t *testing.T) {
	w := newWorld(t)
	e := fake.New(w, fake.Config{})
	s := specOf("a")
	s.Command = []string{"sh", "-c", "echo begun >begun; exec sleep 1000"}
	h := mustProvision(t, e, s)
	if _, err := e.WaitReady(t.Context(), h); err != nil {
		t.Errorf("WaitReady: %v", err)
	}
	if st, err := e.Stats(t.Context(), h); err != nil || st.PIDs < 1 {
		t.Errorf("Stats = %+v, %v; want the main process", st, err)
	}
	s = specOf("b")
	s.Command = []string{"sh", "-c", "exit 3"}
	h = mustProvision(t, e, s)
	for end := time.Now().Add(time.Minute); ; {
		_, err := e.WaitReady(t.Context(), h)
		if sandboxer.KindOf(err) == sandboxer.Failed && strings.Contains(err.Error(), "exit 3") {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("WaitReady after the main process ended: %v", err)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestRepo(t *testing.T) {
	repo := t.TempDir()
	for name, text := range map[string]string{"README": "hello", "cmd/run.sh": "#!/bin/sh\necho ran"} {
		f := filepath.Join(repo, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(f), 0o755), os.WriteFile(f, []byte(text), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("README", filepath.Join(repo, "link")); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	e := fake.New(w, fake.Config{})
	s := specOf("a")
	s.Inputs = map[string]string{"repo": repo}
	h := mustProvision(t, e, s)
	var out strings.Builder
	x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "./cmd/run.sh && cat link && echo changed >README"}, Stdout: &out})
	if err != nil || x.Code != 0 || out.String() != "ran\nhello" {
		t.Errorf("got %+v, %v, %q", x, err, out.String())
	}
	if b, err := os.ReadFile(filepath.Join(repo, "README")); err != nil || string(b) != "hello" {
		t.Errorf("the original says %q, %v", b, err)
	}
}

func TestPausedSandboxRefusesCommands(t *testing.T) {
	w := newWorld(t)
	e := fake.New(w, fake.Config{})
	h := mustProvision(t, e, specOf("a"))
	if err := e.Pause(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	_, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
	if sandboxer.KindOf(err) != sandboxer.Conflict || sandboxer.HintOf(err) == "" {
		t.Errorf("Exec: %v; want a conflict with a hint", err)
	}
	if err := e.Resume(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
		t.Errorf("Exec after Resume: %+v, %v", x, err)
	}
}

// Both names of a file lead to it, and neither out of the sandbox.
func TestPaths(t *testing.T) {
	w := newWorld(t)
	e := fake.New(w, fake.Config{})
	h := mustProvision(t, e, specOf("a"))
	if err := e.WriteFile(t.Context(), h, "/workspace/f", 0o644, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	var pwd strings.Builder
	if _, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"pwd"}, Dir: "/workspace", Stdout: &pwd}); err != nil {
		t.Fatal(err)
	}
	if fi, err := e.StatFile(t.Context(), h, strings.TrimSpace(pwd.String())+"/f"); err != nil || fi.Size != 1 {
		t.Errorf("by the machine's name: %+v, %v", fi, err)
	}
	if _, err := e.StatFile(t.Context(), h, "/etc/passwd"); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("StatFile of the machine's file: %v; want not_found", err)
	}
	if _, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"ln", "-s", "/etc", "etc"}}); err != nil {
		t.Fatal(err)
	}
	if r, err := e.ReadFile(t.Context(), h, "/workspace/etc/passwd"); err == nil {
		r.Close()
		t.Error("a link leads out of the sandbox")
	}
}

// What was made for sandboxes is gone with the world, and nothing is made before it
// is needed.
func TestNothingIsLeft(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	w := fake.NewWorld()
	e := fake.New(w, fake.Config{})
	mustProvision(t, e, specOf("a"))
	if files, err := os.ReadDir(tmp); err != nil || len(files) != 0 {
		t.Errorf("an unused sandbox has files: %v, %v", files, err)
	}
	if _, err := e.Exec(t.Context(), a1, sandboxer.Cmd{Args: []string{"sh", "-c", "sleep 1000 & echo x >f"}}); err != nil {
		t.Error(err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if files, err := os.ReadDir(tmp); err != nil || len(files) != 0 {
		t.Errorf("left over: %v, %v", files, err)
	}
	if _, err := e.Provision(t.Context(), specOf("b")); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("Provision in a closed world: %v; want unavailable", err)
	}
}

// TestKilledForMemoryAndRemoved removes a sandbox that the memory limit killed before its command has ended.
func TestKilledForMemoryAndRemoved(t *testing.T) {
	w := newWorld(t)
	e := fake.New(w, fake.Config{Owner: "me"})
	mustProvision(t, e, specOf("a"))
	removed := make(chan error, 1)
	out := writerFunc(func(p []byte) (int, error) { // the command ends when its output is taken
		err := w.OOMKill("a")
		if err == nil {
			_, err = e.Teardown(t.Context(), a1)
		}
		removed <- err
		return len(p), nil
	})
	x, err := e.Exec(t.Context(), a1, sandboxer.Cmd{Args: []string{"sh", "-c", "echo; exec sleep 60"}, Stdout: out})
	if err := <-removed; err != nil {
		t.Fatal(err)
	}
	if err != nil || x != (sandboxer.Exit{Code: 137, Signal: "KILL", OOMKilled: true}) {
		t.Errorf("got %+v, %v", x, err)
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

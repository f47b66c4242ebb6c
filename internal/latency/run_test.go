package latency

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// world is a broker whose steps take a configured time, by the test's clock.
type world struct {
	accept, provision, ready, probe, exec, destroy time.Duration
	pause, resume, snapshot                        time.Duration
	// fault may fail step n (from 1) of a kind: create, probe, exec, destroy, list, events.
	fault func(step string, n int) error
	reuse bool // gives every sandbox away a second time
	warm  bool // everything is claimed from a pool

	mu      sync.Mutex
	steps   map[string]int
	live    map[string]*api.Sandbox
	used    map[string]bool
	most    int // alive at once
	orders  []api.CreateSandbox
	history map[string][]api.Event
	last    string
	saved   map[string]*api.Snapshot
	depth   sandboxer.PauseDepth
}

func newWorld() *world {
	const ms = time.Millisecond
	return &world{accept: 2 * ms, provision: 60 * ms, ready: 8 * ms, probe: 20 * ms, exec: 10 * ms, destroy: 30 * ms, pause: 5 * ms, resume: 7 * ms, snapshot: 40 * ms, saved: map[string]*api.Snapshot{},
		steps: map[string]int{}, live: map[string]*api.Sandbox{}, used: map[string]bool{}, history: map[string][]api.Event{}}
}

// one is what an undisturbed iteration takes until its command has ended.
func (w *world) one() time.Duration { return w.accept + w.provision + w.ready + w.probe + w.exec }

func (w *world) step(ctx context.Context, step string, d time.Duration) error {
	w.mu.Lock()
	w.steps[step]++
	n := w.steps[step]
	w.mu.Unlock()
	select {
	case <-time.After(d):
	case <-ctx.Done():
		return sandboxer.E(sandboxer.KindOf(ctx.Err()), ctx.Err(), "gave up")
	}
	if w.fault != nil {
		return w.fault(step, n)
	}
	return nil
}

func (w *world) Create(ctx context.Context, r api.CreateSandbox) (*api.Sandbox, error) {
	if err := w.step(ctx, "accept", w.accept); err != nil {
		return nil, err
	}
	w.mu.Lock()
	w.orders = append(w.orders, r)
	sb := &api.Sandbox{ID: fmt.Sprintf("sb%d", len(w.orders)), Extension: "ext.test", Labels: r.Labels, CreatedAt: time.Now()}
	if w.reuse && w.last != "" {
		sb.ID = w.last
	}
	w.last = sb.ID
	w.live[sb.ID] = sb
	w.most = max(w.most, len(w.live))
	from := sandboxer.Creating
	if w.warm {
		from = sandboxer.Warm
		sb.CreatedAt = sb.CreatedAt.Add(-time.Hour)
	}
	w.history[sb.ID] = append(w.history[sb.ID], api.Event{Type: sandboxer.EventState, From: from, To: sandboxer.Running})
	w.mu.Unlock()
	// From here on it exists, even if no caller waits.
	if err := w.step(ctx, "provision", w.provision); err != nil {
		return nil, err
	}
	sb.ProvisionedAt = time.Now()
	if err := w.step(ctx, "create", w.ready); err != nil {
		return nil, err
	}
	sb.ReadyAt = time.Now()
	return sb, nil
}

func (w *world) Run(ctx context.Context, ref string, e api.Exec) (*api.ExecResult, error) {
	if e.Args[0] == "sh" {
		if err := w.step(ctx, "probe", w.probe); err != nil {
			return nil, err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.used[ref] {
			return &api.ExecResult{Code: exitReused, Stdout: "/tmp/" + marker + "\n"}, nil
		}
		w.used[ref] = true
		return &api.ExecResult{}, nil
	}
	if err := w.step(ctx, "exec", w.exec); err != nil {
		var code exitCode
		if errors.As(err, &code) {
			return &api.ExecResult{Code: int(code), Stderr: "no such thing"}, nil
		}
		return nil, err
	}
	return &api.ExecResult{}, nil
}

type exitCode int

func (c exitCode) Error() string { return "exit" }

func (w *world) Destroy(ctx context.Context, ref string, _ bool) (*api.Sandbox, error) {
	if err := w.step(ctx, "destroy", w.destroy); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.live, ref)
	return &api.Sandbox{ID: ref}, nil
}

func (w *world) List(ctx context.Context, q api.SandboxQuery) (*api.List[api.Sandbox], error) {
	if err := w.step(ctx, "list", 0); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	l := &api.List[api.Sandbox]{}
	for _, sb := range w.live {
		if sb.Labels[Label] == q.Labels[Label] {
			l.Items = append(l.Items, *sb)
		}
	}
	return l, nil
}

func (w *world) Events(ctx context.Context, q api.EventQuery) (*api.List[api.Event], error) {
	if err := w.step(ctx, "events", 0); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return &api.List[api.Event]{Items: w.history[q.Sandbox]}, nil
}

func (w *world) Pause(ctx context.Context, ref string, p api.PauseSandbox) (*api.Sandbox, error) {
	w.depth = p.Depth
	return w.live[ref], w.step(ctx, "pause", w.pause)
}

func (w *world) Resume(ctx context.Context, ref string, _ api.ResumeSandbox) (*api.Sandbox, error) {
	return w.live[ref], w.step(ctx, "resume", w.resume)
}

func (w *world) Snapshot(ctx context.Context, ref string, s api.CreateSnapshot) (*api.Snapshot, error) {
	w.mu.Lock()
	snap := &api.Snapshot{ID: "snap-" + s.Name, Name: s.Name, Kind: sandboxer.SnapshotNative, Memory: true, Bytes: 4096}
	w.saved[snap.ID] = snap
	w.mu.Unlock()
	if err := w.step(ctx, "snapshot", w.snapshot); err != nil { // it is there all the same
		return nil, err
	}
	return snap, nil
}

func (w *world) Restore(ctx context.Context, ref string, r api.RestoreSnapshot) (*api.Sandbox, error) {
	if w.saved[ref] == nil {
		return nil, sandboxer.E(sandboxer.NotFound, nil, "no snapshot %s", ref)
	}
	return w.Create(ctx, api.CreateSandbox{Profile: "of " + ref, TTL: r.TTL, Labels: r.Labels})
}

func (w *world) Snapshots(ctx context.Context, q api.SnapshotQuery) (*api.List[api.Snapshot], error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := &api.List[api.Snapshot]{}
	for _, s := range w.saved {
		if s.Name == q.Name {
			l.Items = append(l.Items, *s)
		}
	}
	return l, nil
}

func (w *world) DropSnapshot(ctx context.Context, ref string) (*api.Snapshot, error) {
	if err := w.step(ctx, "drop", 0); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.saved, ref)
	return nil, nil
}

func targets(names ...string) (out []Target) {
	for _, n := range names {
		out = append(out, Target{Order: api.CreateSandbox{Profile: n}})
	}
	return out
}

func checked(t *testing.T, c Config) Config {
	t.Helper()
	if c.Targets == nil {
		c.Targets = targets("p")
	}
	if err := c.Check(); err != nil {
		t.Fatal(err)
	}
	return c
}

func same(n int, d time.Duration) Percentiles {
	v := millis(d)
	return Percentiles{N: n, Min: v, Median: v, P95: v, P99: v, Max: v}
}

// bubble runs f with a clock of its own.
func bubble(t *testing.T, f func(*testing.T, *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		f(t, w)
		if len(w.live)+len(w.saved) > 0 {
			t.Errorf("%d sandboxes and %d snapshots are left", len(w.live), len(w.saved))
		}
	})
}

func TestSequential(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		cpu := time.Duration(0)
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Sequential: 20, TTL: 3 * time.Minute}), Options{Cores: 2,
			CPU: func() time.Duration { cpu += time.Millisecond; return cpu }})
		if err != nil {
			t.Fatal(err)
		}
		s := res.Series[0]
		if len(res.Series) != 1 || s.Mode != Sequential || s.Profile != "p" || s.Extension != "ext.test" || s.Count != 20 || s.Succeeded != 20 || s.Success != 1 {
			t.Errorf("%+v", s)
		}
		if want := (Summary{Raw: same(20, w.one()), Trimmed: same(18, w.one())}); s.TTI != want {
			t.Errorf("time to interactive %+v, want %+v", s.TTI, want)
		}
		for name, tt := range map[string]struct {
			got  *Summary
			want time.Duration
		}{
			"create": {s.Spans.Create, w.accept + w.provision + w.ready}, "accept": {s.Spans.Accept, w.accept},
			"provision": {s.Spans.Provision, w.provision}, "ready": {s.Spans.Ready, w.ready},
			"probe": {s.Spans.Probe, w.probe}, "exec": {s.Spans.Exec, w.exec}, "destroy": {s.Spans.Destroy, w.destroy},
		} {
			if tt.got == nil || tt.got.Raw != same(20, tt.want) {
				t.Errorf("%s: %+v, want %s", name, tt.got, tt.want)
			}
		}
		if w.most != 1 {
			t.Errorf("%d sandboxes were alive at once", w.most)
		}
		if s.LastReady != 0 || s.PerSecond != 0 {
			t.Errorf("a wall clock of what takes turns: %+v", s)
		}
		if s.ClientCPU == nil || *s.ClientCPU != 20 {
			t.Errorf("client's processor time %v", s.ClientCPU)
		}
		if o := w.orders[0]; o.TTL != 3*time.Minute || o.Labels[Label] != "run1" {
			t.Errorf("ordered %+v", o)
		}
		if s.TTIWarm != nil || s.TTICold != nil || s.Warm != 0 {
			t.Errorf("warm sandboxes without a pool: %+v", s)
		}
	})
}

func TestTargetsTakeTurns(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		round := 0
		order := func(n int) []int { // there and back
			round++
			if round%2 == 1 {
				return []int{0, 1}
			}
			return []int{1, 0}
		}
		cfg := checked(t, Config{Targets: targets("a", "b"), Sequential: 3, Burst: []int{2}})
		if cfg.Sandboxes() != 10 {
			t.Errorf("%d sandboxes", cfg.Sandboxes())
		}
		res, err := Run(t.Context(), w, "run1", cfg, Options{Order: order})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, o := range w.orders {
			got = append(got, o.Profile)
		}
		if want := "a b b a a b b b a a"; strings.Join(got, " ") != want { // the bursts are apart
			t.Errorf("order %v, want %s", got, want)
		}
		var names []string
		for _, s := range res.Series {
			names = append(names, s.Profile+" "+string(s.Mode))
		}
		if want := []string{"a sequential", "b sequential", "b burst", "a burst"}; !slices.Equal(names, want) {
			t.Errorf("series %q", names)
		}
		if w.most != 2 {
			t.Errorf("%d sandboxes were alive at once", w.most)
		}
	})
}

func TestStaggered(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		const every = 25 * time.Millisecond
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Staggered: 4, Every: every}), Options{Cores: 2})
		if err != nil {
			t.Fatal(err)
		}
		s := res.Series[0]
		for i, it := range s.Iterations {
			if it.N != i+1 || it.Launch != millis(time.Duration(i)*every) || !it.OK {
				t.Errorf("iteration %d: %+v", i+1, it)
			}
		}
		if w.most < 2 {
			t.Error("they did not overlap")
		}
		last := 3*every + w.one()
		if s.FirstReady != millis(w.one()) || s.LastReady != millis(last) || s.LastDestroyed != millis(last+w.destroy) {
			t.Errorf("first ready %v, last ready %v, last destroyed %v", s.FirstReady, s.LastReady, s.LastDestroyed)
		}
		if want := 4 / last.Seconds(); s.PerSecond < want*0.999 || s.PerSecond > want*1.001 || s.PerCore != s.PerSecond/2 {
			t.Errorf("%v a second, %v per core; want %v", s.PerSecond, s.PerCore, want)
		}
		if res.Every.Std() != every {
			t.Errorf("every %s", res.Every)
		}
	})
}

func TestBurst(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Burst: []int{5, 50}, NoProbe: true, Command: []string{"node", "-v"}}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		s := res.Series[1]
		if w.most != 50 || s.Count != 50 || len(res.Series) != 2 {
			t.Errorf("%d alive at once; %d series, the second of %d", w.most, len(res.Series), s.Count)
		}
		if w.steps["probe"] != 0 || s.Spans.Probe != nil || res.Probe {
			t.Error("a probe nobody asked for")
		}
		all := w.one() - w.probe
		if s.TTI.Raw != same(50, all) || s.LastReady != millis(all) || s.LastDestroyed != millis(all+w.destroy) {
			t.Errorf("%+v, last ready %v, destroyed %v", s.TTI.Raw, s.LastReady, s.LastDestroyed)
		}
	})
}

// A failure counts, is not tried again, and is reported separately.
func TestFailures(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.fault = func(step string, n int) error {
			switch {
			case step == "accept" && (n == 1 || n == 2):
				return sandboxer.E(sandboxer.Exhausted, nil, "no room")
			case step == "probe" && n == 1:
				return sandboxer.E(sandboxer.Unavailable, nil, "cut off")
			case step == "exec" && n == 1:
				return exitCode(127)
			case step == "destroy" && n == 1:
				return sandboxer.E(sandboxer.Unavailable, nil, "stuck")
			}
			return nil
		}
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Sequential: 10}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		s := res.Series[0]
		if s.Count != 10 || s.Succeeded != 6 || s.Success != 0.6 || s.TTI.Raw.N != 6 {
			t.Errorf("%+v", s)
		}
		want := []Failure{
			{"create", sandboxer.Exhausted, "no room", 2}, {"probe", sandboxer.Unavailable, "cut off", 1},
			{"exec", sandboxer.Failed, "true ended with 127: no such thing", 1},
		}
		if !slices.Equal(s.Failures, want) {
			t.Errorf("failures %+v", s.Failures)
		}
		if w.steps["accept"] != 10 {
			t.Errorf("%d creates for 10 iterations", w.steps["accept"])
		}
		if s.Iterations[2].DestroyError != "stuck" || len(res.Left) > 0 {
			t.Errorf("destroying: %q; left %q", s.Iterations[2].DestroyError, res.Left)
		}
		// 60 % of what these times are worth
		if want := Score(0.6, s.TTI.Trimmed); s.Score != want {
			t.Errorf("score %v, want %v", s.Score, want)
		}
	})
}

func TestReuseFails(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.reuse = true
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Sequential: 3}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		s := res.Series[0]
		if s.Succeeded != 1 || s.Reused != 2 || !strings.Contains(s.Iterations[1].Error, "used before: it has /tmp/"+marker) || s.Iterations[1].Step != "probe" {
			t.Errorf("%+v", s)
		}
	})
}

func TestStepsHaveDeadlines(t *testing.T) {
	for step, set := range map[string]func(*world){
		"create": func(w *world) { w.provision = time.Hour },
		"probe":  func(w *world) { w.probe = time.Hour },
		"exec":   func(w *world) { w.exec = time.Hour },
	} {
		bubble(t, func(t *testing.T, w *world) {
			set(w)
			res, err := Run(t.Context(), w, "run1", checked(t, Config{Sequential: 1}), Options{})
			if err != nil {
				t.Fatal(err)
			}
			if it := res.Series[0].Iterations[0]; it.OK || it.Step != step || it.Kind != sandboxer.Timeout {
				t.Errorf("%s: %+v", step, it)
			}
		})
	}
}

func TestWarm(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.warm = true
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Sequential: 2, WarmOnly: true}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		s := res.Series[0]
		if s.Warm != 2 || s.Succeeded != 2 || s.Spans.Provision != nil || s.Spans.Create == nil {
			t.Errorf("claimed: %+v", s)
		}
	})
	bubble(t, func(t *testing.T, w *world) {
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Sequential: 2, WarmOnly: true}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		s := res.Series[0]
		if s.Warm != 0 || s.Succeeded != 0 || s.Failures[0] != (Failure{"claim", sandboxer.Exhausted, "the sandbox was not claimed from the warm pool", 2}) {
			t.Errorf("made: %+v", s)
		}
	})
	bubble(t, func(t *testing.T, w *world) {
		go func() { time.Sleep(150 * time.Millisecond); w.mu.Lock(); w.warm = true; w.mu.Unlock() }() // the second of two
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Sequential: 3}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		s := res.Series[0]
		if s.Warm+s.Spans.Provision.Raw.N != 3 || s.TTIWarm == nil || s.TTICold == nil || s.TTIWarm.Raw.N != s.Warm {
			t.Errorf("both: %+v", s)
		}
	})
}

// An interrupt at any moment leaves nothing, not even of creates without a waiting caller.
func TestInterrupted(t *testing.T) {
	for _, after := range []time.Duration{time.Millisecond, 30 * time.Millisecond, 75 * time.Millisecond, 105 * time.Millisecond, 240 * time.Millisecond} {
		for _, cfg := range []Config{{Sequential: 100}, {Staggered: 100, Every: 10 * time.Millisecond}, {Burst: []int{100}}, {Pause: 9}, {Restore: 9}} {
			bubble(t, func(t *testing.T, w *world) {
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				time.AfterFunc(after, stop)
				res, err := Run(ctx, w, "run1", checked(t, cfg), Options{})
				if err == nil && (cfg.Burst == nil || after < w.one()) {
					t.Errorf("after %s: no error", after)
				} else if err != nil && !strings.Contains(err.Error(), "nothing is left") {
					t.Errorf("after %s: %v", after, err)
				}
				if res == nil || len(res.Left) > 0 {
					t.Errorf("after %s: %+v", after, res)
				}
			})
		}
	}
}

func TestPause(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Pause: 3, Depth: sandboxer.PauseFreeze}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		s := res.Series[0]
		if s.Mode != Pause || s.Succeeded != 3 || s.TTI.Raw != same(3, w.resume+w.exec) || s.Spans.Pause.Raw != same(3, w.pause) ||
			s.Spans.Resume.Raw != same(3, w.resume) || s.Spans.Exec.Raw != same(3, w.exec) || w.depth != sandboxer.PauseFreeze || w.steps["probe"] != 0 {
			t.Errorf("%+v", s)
		}
	})
	// What cannot be paused is found out once.
	bubble(t, func(t *testing.T, w *world) {
		w.fault = func(step string, _ int) error {
			if step == "pause" {
				return sandboxer.E(sandboxer.Unsupported, nil, "no pause")
			}
			return nil
		}
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Pause: 3}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		if s := res.Series[0]; s.Count != 1 || s.Succeeded != 0 || s.Failures[0] != (Failure{"pause", sandboxer.Unsupported, "no pause", 1}) {
			t.Errorf("%+v", s)
		}
	})
}

func TestRestore(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		cfg := checked(t, Config{Targets: targets("a", "b"), Restore: 3})
		if cfg.Sandboxes() != 8 {
			t.Errorf("%d sandboxes", cfg.Sandboxes())
		}
		res, err := Run(t.Context(), w, "run1", cfg, Options{})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range res.Series {
			want := Saved{Kind: sandboxer.SnapshotNative, Memory: true, Bytes: 4096, Took: millis(w.snapshot)}
			if s.Mode != Restore || s.Count != 3 || s.Succeeded != 3 || s.TTI.Raw != same(3, w.one()-w.probe) || *s.Snapshot != want || s.Spans.Provision.Raw != same(3, w.provision) {
				t.Errorf("%+v", s)
			}
		}
		if len(w.orders) != 8 || w.orders[7].Labels[Label] != "run1" || w.orders[7].TTL != DefaultTTL {
			t.Errorf("orders %+v", w.orders)
		}
		if w.steps["drop"] != 2 {
			t.Errorf("%d snapshots dropped", w.steps["drop"])
		}
	})
	// A snapshot that cannot be made, and one that was made although that was not heard of.
	bubble(t, func(t *testing.T, w *world) {
		w.fault = func(step string, n int) error {
			if step == "snapshot" {
				return sandboxer.E(sandboxer.Unavailable, nil, "cut off")
			}
			return nil
		}
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Restore: 3}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		if s := res.Series[0]; s.Count != 1 || s.Succeeded != 0 || s.Failures[0].Step != "snapshot" {
			t.Errorf("%+v", s)
		}
	})
}

// What cannot be destroyed is named.
func TestLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.fault = func(step string, _ int) error {
			if step == "destroy" {
				return sandboxer.E(sandboxer.Unavailable, nil, "stuck")
			}
			return nil
		}
		res, err := Run(t.Context(), w, "run1", checked(t, Config{Sequential: 2}), Options{})
		slices.Sort(res.Left)
		if !slices.Equal(res.Left, []string{"sb1", "sb2"}) || !errors.Is(err, sandboxer.Timeout) ||
			!strings.Contains(sandboxer.HintOf(err), "sandboxer destroy --label sandboxer.bench=run1") {
			t.Errorf("left %q, %v (%s)", res.Left, err, sandboxer.HintOf(err))
		}
	})
}

func TestProgress(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.fault = func(step string, n int) error {
			if step == "exec" && n == 2 {
				return exitCode(1)
			}
			return nil
		}
		var got []Progress
		_, err := Run(t.Context(), w, "run1", checked(t, Config{Sequential: 2, Burst: []int{2}}), Options{Progress: func(p Progress) { got = append(got, p) }})
		want := []Progress{{"p", Sequential, 1, 0, 2}, {"p", Sequential, 2, 1, 2}, {"p", Burst, 1, 0, 2}, {"p", Burst, 2, 0, 2}}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

func TestCheck(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  Config
		says string
	}{
		{"nothing", Config{}, ""},
		{"the most", Config{Sequential: MaxIterations, Staggered: MaxIterations, Burst: []int{MaxBurst}, Every: MaxEvery, TTL: MaxTTL}, ""},
		{"a negative count", Config{Sequential: -1}, "-1 iterations"},
		{"too many", Config{Staggered: MaxIterations + 1}, "too many: percentiles do not get better"},
		{"a burst of nothing", Config{Burst: []int{0}}, "a burst of 0"},
		{"a burst too large", Config{Burst: []int{10, MaxBurst + 1}}, "measures itself"},
		{"a launch too soon", Config{Staggered: 1, Every: time.Microsecond}, "every 1µs"},
		{"a life too short", Config{TTL: time.Second}, "time to live of 1s"},
		{"a life too long", Config{TTL: 2 * time.Hour}, "time to live of 2h0m0s"},
	} {
		tt.cfg.Targets = targets("p")
		err := tt.cfg.Check()
		if tt.says == "" && err != nil || tt.says != "" && (!errors.Is(err, sandboxer.Invalid) || !strings.Contains(err.Error(), tt.says)) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	if err := (&Config{}).Check(); !errors.Is(err, sandboxer.Invalid) {
		t.Errorf("no targets: %v", err)
	}
	c := Config{Targets: targets("p")}
	if err := c.Check(); err != nil || c.Sequential != 100 || c.Staggered != 100 || !slices.Equal(c.Burst, []int{100}) ||
		c.Every != 200*time.Millisecond || !slices.Equal(c.Command, []string{"true"}) || c.TTL != DefaultTTL {
		t.Errorf("defaults %+v, %v", c, err)
	}
	if least := createTimeout + 2*commandTimeout + destroyTimeout; DefaultTTL < least {
		t.Errorf("a sandbox lives %s, an iteration may take %s", DefaultTTL, least)
	}
}

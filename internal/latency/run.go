package latency

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/measure"
)

// Progress is how far a series has come.
type Progress struct {
	Profile      string
	Mode         Mode
	Done, Failed int
	Count        int
}

// Options tune Run; the zero value works.
type Options struct {
	Cores    int                  // of the client's machine
	Clean    Broker               // for the last look: what may try again; the measured one if nil
	CPU      func() time.Duration // processor time of this process; nil if it is not known
	Progress func(Progress)       // called after every iteration, never twice at a time
	Order    func(n int) []int    // the order of the targets in one round; random if nil
}

// Run measures cfg, which was checked, under the run's ID, which labels every sandbox.
// In any case it then looks for sandboxes with that label and destroys them; those
// that remain are in Result.Left. When ctx ends, work stops, the same cleanup is done,
// and the error is ctx's; the Result, never nil, has what was measured until then.
func Run(ctx context.Context, b Broker, id string, cfg Config, o Options) (*Result, error) {
	if o.Clean == nil {
		o.Clean = b
	}
	if o.Order == nil {
		o.Order = rand.Perm
	}
	r := &run{Broker: b, Options: o, cfg: cfg, id: id}
	began := time.Now()
	res := &Result{
		SchemaVersion: api.SchemaVersion, ID: id, At: began.UTC().Truncate(time.Second), Command: cfg.Command, Probe: !cfg.NoProbe,
		TTL: api.Duration(cfg.TTL), WarmOnly: cfg.WarmOnly, Series: []Series{},
	}
	res.Client.Cores = o.Cores
	if cfg.Staggered > 0 {
		res.Every = api.Duration(cfg.Every)
	}
	for _, part := range r.parts() {
		if ctx.Err() != nil {
			break
		}
		res.Series = append(res.Series, part(ctx)...)
	}
	whole := ctx.Err() == nil
	// The final cleanup is done even if the caller does not wait for the result any more.
	cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	left, err := r.clean(cctx, !whole || r.strays)
	cancel()
	res.Left = left
	if whole {
		r.claims(ctx, res.Series)
	}
	for i := range res.Series {
		res.Series[i].close(o.Cores)
	}
	res.Took = api.Duration(time.Since(began).Round(time.Millisecond))
	if cerr := ctx.Err(); cerr != nil {
		return res, sandboxer.E(sandboxer.KindOf(cerr), errors.Join(cerr, err), "interrupted%s", leftText(left))
	}
	return res, err
}

func leftText(left []string) string {
	if len(left) == 0 {
		return "; nothing is left of it"
	}
	return "; left: " + strings.Join(left, ", ")
}

// run is one run.
type run struct {
	Broker
	Options
	cfg Config
	id  string

	mu     sync.Mutex // guards what follows and the calls of Progress
	strays bool       // a create failed in a way that may have left something

	snapshots []string // names of those that were asked for
}

// parts are the pieces of the run in their order.
func (r *run) parts() []func(context.Context) []Series {
	var out []func(context.Context) []Series
	if r.cfg.Sequential > 0 {
		out = append(out, r.sequential)
	}
	overlap := func(mode Mode, count int, every time.Duration) {
		out = append(out, func(ctx context.Context) []Series {
			var all []Series
			for _, i := range r.Order(len(r.cfg.Targets)) {
				if ctx.Err() == nil {
					all = append(all, r.overlapping(ctx, r.cfg.Targets[i], mode, count, every))
				}
			}
			return all
		})
	}
	if r.cfg.Staggered > 0 {
		overlap(Staggered, r.cfg.Staggered, r.cfg.Every)
	}
	for _, n := range r.cfg.Burst {
		overlap(Burst, n, 0)
	}
	if r.cfg.Pause > 0 {
		out = append(out, r.pause)
	}
	if r.cfg.Restore > 0 {
		out = append(out, r.restore)
	}
	return out
}

func (r *run) sequential(ctx context.Context) []Series {
	return r.turns(ctx, Sequential, r.cfg.Sequential, nil, r.iterate)
}

func (r *run) pause(ctx context.Context) []Series {
	return r.turns(ctx, Pause, r.cfg.Pause, nil, r.pauseOne)
}

func (r *run) restore(ctx context.Context) []Series {
	return r.turns(ctx, Restore, r.cfg.Restore, r.save, r.restoreOne)
}

// turns lets the targets take turns, count times. prepare, if it is not nil, is called once
// for each; a target that cannot be prepared, or does not support the mode, has
// no further turn.
func (r *run) turns(ctx context.Context, mode Mode, count int, prepare func(context.Context, *turn) Iteration, one func(context.Context, *turn) Iteration) []Series {
	series := make([]Series, len(r.cfg.Targets))
	turns := make([]turn, len(r.cfg.Targets))
	out := make([]bool, len(r.cfg.Targets))
	began := time.Now()
	note := func(i int, it Iteration) {
		s := &series[i]
		s.Iterations = append(s.Iterations, it)
		out[i] = it.Kind == sandboxer.Unsupported && mode != Sequential || it.Step == "snapshot"
		r.tell(s, count)
	}
	arms := make([]measure.Arm, len(r.cfg.Targets))
	for i, t := range r.cfg.Targets {
		series[i] = Series{Profile: t.Order.Profile, Mode: mode, Iterations: []Iteration{}}
		turns[i] = turn{Target: t, series: &series[i], began: began}
		arms[i] = measure.Arm{Name: t.Order.Profile, Sample: func(ctx context.Context, _ bool) error {
			if out[i] {
				return measure.ErrDone
			}
			turns[i].n++
			cpu := r.cpu()
			it := one(ctx, &turns[i])
			if err := ctx.Err(); err != nil {
				return err // what was cut off is no measurement
			}
			series[i].used(cpu, r.cpu())
			note(i, it)
			return nil
		}}
	}
	if prepare != nil {
		for i := range turns {
			it := prepare(ctx, &turns[i])
			defer r.drop(ctx, &turns[i])
			if ctx.Err() != nil {
				return series
			}
			if it.Error != "" {
				note(i, it)
			}
		}
	}
	// It ends early with ctx, which the caller checks.
	_, _ = measure.Plan{Rounds: count, Order: r.Order}.Interleave(ctx, arms...)
	return series
}

// turn is one iteration of one target.
type turn struct {
	Target
	n        int
	series   *Series
	began    time.Time
	snapshot string // of a restore series
}

// overlapping runs count iterations of t, launched every so often, or all at once.
func (r *run) overlapping(ctx context.Context, t Target, mode Mode, count int, every time.Duration) Series {
	s := Series{Profile: t.Order.Profile, Mode: mode, Iterations: []Iteration{}}
	cpu := r.cpu()
	began := time.Now()
	measure.Load{Count: count, Every: every}.Run(ctx, func(n int) error {
		it := r.iterate(ctx, &turn{Target: t, n: n + 1, series: &s, began: began})
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.mu.Lock()
		s.Iterations = append(s.Iterations, it)
		r.mu.Unlock()
		r.tell(&s, count)
		return nil
	})
	s.used(cpu, r.cpu())
	slices.SortFunc(s.Iterations, func(a, b Iteration) int { return a.N - b.N })
	return s
}

// cpu is the processor time of this process so far, or less than 0.
func (r *run) cpu() time.Duration {
	if r.CPU == nil {
		return -1
	}
	return r.CPU()
}

func (s *Series) used(before, after time.Duration) {
	if before < 0 || after < 0 {
		return
	}
	if s.ClientCPU == nil {
		s.ClientCPU = new(Millis)
	}
	*s.ClientCPU += millis(after - before)
}

func (r *run) tell(s *Series, count int) {
	if r.Progress == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	p := Progress{Profile: s.Profile, Mode: s.Mode, Done: len(s.Iterations), Count: count}
	for _, it := range s.Iterations {
		if !it.OK {
			p.Failed++
		}
	}
	r.Progress(p)
}

// parallel does work for each of list, a few at a time, even if the caller does not wait any more.
func parallel[T any](list []T, work func(T)) {
	measure.Load{Count: len(list), Width: 8}.Run(context.Background(), func(i int) error { work(list[i]); return nil })
}

// claims asks the history of every sandbox whether it was claimed from the warm pool. It is
// done at the end, so that it disturbs no measurement.
func (r *run) claims(ctx context.Context, series []Series) {
	var all []*Iteration
	for i := range series {
		for j := range series[i].Iterations {
			if it := &series[i].Iterations[j]; it.Sandbox != "" {
				all = append(all, it)
			}
		}
	}
	parallel(all, func(it *Iteration) {
		l, err := r.Clean.Events(ctx, api.EventQuery{Sandbox: it.Sandbox})
		if err == nil {
			it.Warm = slices.ContainsFunc(l.Items, func(ev api.Event) bool {
				return ev.Type == sandboxer.EventState && ev.From == sandboxer.Warm && ev.To == sandboxer.Running
			})
		}
		switch {
		case it.Warm: // what it took to make is not a part of the claim
			it.Split, it.Accept, it.Provision, it.Ready = false, 0, 0, 0
		case !r.cfg.WarmOnly || !it.OK:
		case err != nil:
			it.fail("claim", err)
		default:
			it.fail("claim", sandboxer.E(sandboxer.Exhausted, nil, "the sandbox was not claimed from the warm pool"))
		}
	})
}

// clean destroys the sandboxes and snapshots of the run and returns those that are left.
// With late it also waits for requests that may still be on their way to the server.
func (r *run) clean(ctx context.Context, late bool) (left []string, err error) {
	const pause = 200 * time.Millisecond
	looks := 1
	if late {
		looks = 3
	}
	for more := looks; more > 0; {
		if left, err = r.look(ctx); err != nil {
			return left, sandboxer.E(sandboxer.KindOf(err), err, "cannot determine whether anything is left of the run %s: %s", r.id, sandboxer.Message(err)).
				WithHint("check later: sandboxer ls --label %s=%s; the rest expires automatically", Label, r.id)
		}
		more--
		if len(left) > 0 {
			more = looks
			parallel(left, func(ref string) {
				if strings.HasPrefix(ref, snapshotPrefix) {
					_, _ = r.Clean.DropSnapshot(ctx, ref)
				} else {
					_, _ = r.Clean.Destroy(ctx, ref, true)
				}
			})
		}
		if more > 0 && measure.Sleep(ctx, pause) != nil {
			return left, sandboxer.E(sandboxer.Timeout, ctx.Err(), "%d sandboxes or snapshots of the run %s are not gone yet", len(left), r.id).
				WithHint("they expire automatically; to end them now: sandboxer destroy --label %s=%s", Label, r.id)
		}
	}
	return nil, nil
}

const snapshotPrefix = "snap-" // of IDs

// look lists what remains of the run.
func (r *run) look(ctx context.Context) (ids []string, err error) {
	q := api.SandboxQuery{Labels: map[string]string{Label: r.id}, Limit: sandboxer.MaxPage}
	for {
		l, err := r.Clean.List(ctx, q)
		if err != nil {
			return ids, err
		}
		for _, sb := range l.Items {
			ids = append(ids, sb.ID)
		}
		if q.Cursor = l.NextCursor; q.Cursor == "" {
			break
		}
	}
	for _, name := range r.snapshots {
		l, err := r.Clean.Snapshots(ctx, api.SnapshotQuery{Name: name})
		if err != nil {
			return ids, err
		}
		for _, s := range l.Items {
			ids = append(ids, s.ID)
		}
	}
	return ids, nil
}

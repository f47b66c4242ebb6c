package latency

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// The message and the exit code of the probe when the sandbox is not fresh.
const (
	marker     = ".sandboxer-bench"
	exitReused = 42
)

// probe leaves a marker in two places and looks for those of other runs.
func (r *run) probe(t Target) []string {
	dirs := "/tmp /var/tmp"
	if t.Shared {
		dirs = "."
	}
	// It looks at all places before it marks any: one may be a link to another. A place that
	// is not writable does not count; at least one must be.
	script := fmt.Sprintf(`n=1; for d in %[1]s; do f=$d/%[2]s; if [ -e "$f" ]; then echo "$f"; exit %[3]d; fi; done; `+
		`for d in %[1]s; do (echo %[4]s >"$d/%[2]s") 2>/dev/null && n=0; done; exit $n`, dirs, marker, exitReused, r.id)
	return []string{"sh", "-c", script}
}

// iterate makes, tries and destroys one sandbox.
func (r *run) iterate(ctx context.Context, t *turn) (it Iteration) {
	start := r.launch(t, &it)
	defer func() { it.goneAt = time.Since(t.began) }()
	if !r.create(ctx, t, &it) {
		return it
	}
	defer r.destroy(ctx, &it)
	begin := time.Now()
	if !r.cfg.NoProbe {
		probe := r.probe(t.Target)
		res, err := r.exec(ctx, it.Sandbox, probe)
		switch {
		case err != nil:
			it.fail("probe", err)
			return it
		case res.Code == exitReused:
			it.fail("probe", sandboxer.E(sandboxer.Failed, nil, "the sandbox was used before: it has %s", strings.TrimSpace(res.Stdout)))
			it.Reused = true
			return it
		case res.Code != 0:
			it.fail("probe", ended(probe, res))
			return it
		}
		it.Probe = millis(time.Since(begin))
	}
	r.command(ctx, t, &it, start)
	return it
}

// pauseOne makes one sandbox, uses it, and measures how long it takes to be used again
// after a pause.
func (r *run) pauseOne(ctx context.Context, t *turn) (it Iteration) {
	r.launch(t, &it)
	defer func() { it.goneAt = time.Since(t.began) }()
	if !r.create(ctx, t, &it) {
		return it
	}
	defer r.destroy(ctx, &it)
	if r.command(ctx, t, &it, time.Now()); !it.OK {
		return it
	}
	pctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	begin := time.Now()
	if _, err := r.Pause(pctx, it.Sandbox, api.PauseSandbox{Depth: r.cfg.Depth}); err != nil {
		it.fail("pause", err)
		return it
	}
	it.Pause = millis(time.Since(begin))
	rctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	start := time.Now()
	if _, err := r.Resume(rctx, it.Sandbox, api.ResumeSandbox{TTL: r.cfg.TTL}); err != nil {
		it.fail("resume", err)
		return it
	}
	it.Resume = millis(time.Since(start))
	r.command(ctx, t, &it, start)
	return it
}

// save makes the snapshot of a restore series.
func (r *run) save(ctx context.Context, t *turn) (it Iteration) {
	r.launch(t, &it)
	if !r.create(ctx, t, &it) {
		it.Step = "snapshot"
		return it
	}
	defer r.destroy(ctx, &it)
	if r.command(ctx, t, &it, time.Now()); !it.OK {
		it.Step = "snapshot"
		return it
	}
	// The final cleanup knows it before it exists.
	name := fmt.Sprintf("bench-%s-%d", r.id, len(r.snapshots)+1)
	r.snapshots = append(r.snapshots, name)
	sctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	begin := time.Now()
	snap, err := r.Snapshot(sctx, it.Sandbox, api.CreateSnapshot{Name: name, TTL: snapshotTTL})
	if err != nil {
		it.fail("snapshot", err)
		r.strays = true
		return it
	}
	t.snapshot = snap.ID
	t.series.Snapshot = &Saved{Kind: snap.Kind, Memory: snap.Memory, Bytes: snap.Bytes, Took: millis(time.Since(begin))}
	return it
}

// drop removes the snapshot of a restore series; the final cleanup makes sure of it.
func (r *run) drop(ctx context.Context, t *turn) {
	if t.snapshot == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyTimeout)
	defer cancel()
	_, _ = r.Clean.DropSnapshot(ctx, t.snapshot)
}

// restoreOne makes one sandbox of the snapshot, tries and destroys it.
func (r *run) restoreOne(ctx context.Context, t *turn) (it Iteration) {
	start := r.launch(t, &it)
	defer func() { it.goneAt = time.Since(t.began) }()
	made := r.make(ctx, t, &it, "restore", func(ctx context.Context) (*api.Sandbox, error) {
		return r.Restore(ctx, t.snapshot, api.RestoreSnapshot{TTL: r.cfg.TTL, Labels: map[string]string{Label: r.id}})
	})
	if !made {
		return it
	}
	defer r.destroy(ctx, &it)
	r.command(ctx, t, &it, start)
	return it
}

// launch begins an iteration.
func (r *run) launch(t *turn, it *Iteration) time.Time {
	start := time.Now()
	it.N, it.Launch = t.n, millis(start.Sub(t.began))
	return start
}

// create makes the sandbox of an iteration.
func (r *run) create(ctx context.Context, t *turn, it *Iteration) bool {
	order := t.Order
	order.TTL = r.cfg.TTL
	order.Labels = map[string]string{}
	maps.Copy(order.Labels, t.Order.Labels)
	order.Labels[Label] = r.id
	return r.make(ctx, t, it, "create", func(ctx context.Context) (*api.Sandbox, error) { return r.Create(ctx, order) })
}

func (r *run) make(ctx context.Context, t *turn, it *Iteration, step string, create func(context.Context) (*api.Sandbox, error)) bool {
	ctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	begin := time.Now()
	sb, err := create(ctx)
	if err != nil {
		it.fail(step, err)
		r.mu.Lock()
		r.strays = true // it may be on its way all the same
		r.mu.Unlock()
		return false
	}
	it.Sandbox, it.Create = sb.ID, millis(time.Since(begin))
	it.split(sb)
	r.mu.Lock()
	t.series.Extension = sb.Extension
	r.mu.Unlock()
	return true
}

// command runs the command, after which the sandbox has been interactive since start.
func (r *run) command(ctx context.Context, t *turn, it *Iteration, start time.Time) {
	begin := time.Now()
	res, err := r.exec(ctx, it.Sandbox, r.cfg.Command)
	if err == nil && res.Code != 0 {
		err = ended(r.cfg.Command, res)
	}
	if err != nil {
		it.fail("exec", err)
		return
	}
	done := time.Now()
	it.OK = true
	it.Exec, it.TTI, it.readyAt = millis(done.Sub(begin)), millis(done.Sub(start)), done.Sub(t.began)
}

func (r *run) exec(ctx context.Context, ref string, args []string) (*api.ExecResult, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	return r.Run(ctx, ref, api.Exec{Args: args, Timeout: api.Duration(commandTimeout)})
}

// ended describes a command that failed.
func ended(args []string, res *api.ExecResult) error {
	if res.TimedOut {
		return sandboxer.E(sandboxer.Timeout, nil, "%s did not end within %s", args[0], commandTimeout)
	}
	what := strings.TrimSpace(res.Stderr)
	if what != "" {
		what = ": " + what[:min(len(what), 200)]
	}
	return sandboxer.E(sandboxer.Failed, nil, "%s ended with %d%s", args[0], res.Code, what)
}

// destroy ends the sandbox of it, even if the run was interrupted.
func (r *run) destroy(ctx context.Context, it *Iteration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyTimeout)
	defer cancel()
	begin := time.Now()
	if _, err := r.Destroy(ctx, it.Sandbox, true); err != nil {
		it.DestroyError = sandboxer.Message(err)
		return
	}
	it.Destroy = millis(time.Since(begin))
}

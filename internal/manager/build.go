package manager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// resume builds a sandbox on which no job works any more, if it still needs that.
func (m *Manager) resume(ctx context.Context, j *job, id string, generation int) (*sandboxer.Sandbox, error) {
	sb, err := m.store.SandboxGeneration(ctx, id, generation)
	switch {
	case err != nil:
		return nil, err
	case sb.State == sandboxer.Creating:
		if _, err := m.backend(sb.Extension); err != nil { // it may come back: an engine that starts after us
			return nil, m.box(sb).scheduleRetry(ctx, err)
		}
		j.continued = true
		return m.box(sb).in(j).build(ctx)
	case sb.State == sandboxer.Paused && (sb.Pause.Undo || sb.Spec.Profile.AutoResume):
		return m.box(sb).in(j).beginResume(ctx, 0)
	case sb.State == sandboxer.Terminating, sb.State == sandboxer.Terminated:
		return nil, errEnded
	}
	return m.withLastUse(sb), nil
}

// build brings a sandbox that is in the database to running, or into its pool. It treats a new record in the same way as one
// that another process left half made: Provision is idempotent in the generation, so a lost answer is simply requested again.
func (wk work) build(ctx context.Context) (*sandboxer.Sandbox, error) {
	var reach sandboxer.Reachability
	for failed := map[string]error{}; ; {
		b, err := wk.m.backend(wk.sb.Extension)
		if err == nil {
			reach, err = wk.on(b).prepare(ctx)
		}
		if err == nil {
			break
		}
		if err = wk.goOn(ctx, failed, err); err != nil {
			return nil, wk.failCreate(ctx, err)
		}
		defer wk.m.extension(wk.sb.Extension).breaker.end(wk.j.trial)
	}
	if lifecycle.IsPooled(wk.sb) {
		return wk.addToPool(ctx, reach)
	}
	checkpoint := wk.sb.Pause.Snapshot
	if err := wk.setRunning(ctx, reach); err != nil {
		return nil, wk.failCreate(ctx, err)
	}
	if checkpoint != "" {
		wk.m.dropInternal(ctx, checkpoint)
	}
	wk.sb.Spec.Env = nil
	return wk.sb, nil
}

// prepare returns when the object of sb exists, is ready, and has its initial content.
func (wk backed) prepare(ctx context.Context) (sandboxer.Reachability, error) {
	// The object of a continued create may have died with the broker that made it, even where
	// Provision still finds it: its answer may not have been recorded.
	interrupted := (wk.sb.Handle.SandboxID != "" || wk.j.continued) && !lifecycle.IsFrozen(wk.sb)
	if err := wk.ensureObject(ctx); err != nil {
		return sandboxer.Reachability{}, err
	}
	reach, err := wk.awaitReady(ctx, wk.b)
	switch {
	case interrupted && isKind(err, sandboxer.NotFound):
		reach, err = wk.makeAgain(ctx)
	case !isKind(err, sandboxer.Timeout): // what does not start in time may be the request's
		wk.m.extension(wk.sb.Extension).heard(ctx, wk.j.trial, wk.sb, err)
	}
	if err == nil && isUnpacked(wk.b, wk.sb) {
		err = wk.unarchive(ctx, wk.b)
	}
	if err == nil && wantsAnswer(wk.sb) {
		err = wk.m.step(pAnswer, func() error { return wk.awaitAnswer(ctx, reach) })
	}
	return reach, err
}

// ensureObject makes the object of sb, unless it was made before.
func (wk backed) ensureObject(ctx context.Context) error {
	switch {
	case lifecycle.IsFrozen(wk.sb):
		return wk.unfreeze(ctx, wk.b)
	case lifecycle.IsClaimed(wk.sb):
		return wk.finishClaim(ctx)
	case wk.sb.Handle.SandboxID != "":
		return nil
	}
	return wk.provision(ctx)
}

func (bx box) awaitReady(ctx context.Context, b *backend.Backend) (reach sandboxer.Reachability, err error) {
	err = bx.m.step(pReady, func() (err error) { reach, err = b.WaitReady(ctx, bx.sb.Handle); return err })
	return reach, err
}

// makeAgain makes another object for sb, whose first one did not survive the interruption of
// its creation.
func (wk backed) makeAgain(ctx context.Context) (sandboxer.Reachability, error) {
	err := wk.update(ctx, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
		if sb.State != sandboxer.Creating {
			return errTerminating
		}
		sb.Handle, sb.AbsentSince = sandboxer.Handle{}, time.Time{} // it is not missed while another is made
		return nil
	})
	if err == nil {
		err = wk.provision(ctx)
	}
	if err != nil {
		return sandboxer.Reachability{}, err
	}
	return wk.awaitReady(ctx, wk.b)
}

// setRunning commits that sb runs: for the first time, claimed, or resumed.
func (wk work) setRunning(ctx context.Context, reach sandboxer.Reachability) error {
	handle, claimed := wk.sb.Handle, wk.sb.ProvisionedAt
	return wk.m.step(pRunning, func() error {
		return wk.move(ctx, sandboxer.Running, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) (err error) {
			sb.Reachability = reach
			sb.UsedAt = now()
			w.Events = append(w.Events, wk.j.told...)
			if lifecycle.IsPaused(sb) {
				if w.Snapshots, err = wk.m.box(sb).dropPauseSnapshot(ctx); err != nil {
					return err
				}
				sb.ResumedAt = sb.UsedAt
				sb.PausedFor += sb.ResumedAt.Sub(sb.Pause.At)
				sb.ExpiresAt = sb.ResumedAt.Add(sb.Pause.Left)
				sb.Pause, sb.Reason, sb.Message = sandboxer.Pause{}, "", ""
			} else {
				sb.ReadyAt = sb.UsedAt
				if sb.Pool != "" { // what finishClaim brought
					sb.Handle, sb.ProvisionedAt = handle, claimed
					sb.Reason = ""
				}
			}
			if reach.Host != "" {
				sb.Host = reach.Host
			}
			return nil
		})
	})
}

// specFor is the spec of sb as its extension gets it, with the parts that the record does not keep.
func (bx box) specFor(ctx context.Context) (sandboxer.Spec, error) {
	env, err := bx.openEnv()
	if err == nil {
		env, err = bx.withSecrets(ctx, env)
	}
	if err != nil {
		return sandboxer.Spec{}, err
	}
	spec := bx.sb.Spec
	spec.Env, spec.Tenant = env, bx.sb.Tenant
	return spec, nil
}

// provision makes the object of sb and stores its handle. If a host cannot take the sandbox now, it tries another one
// (tryOtherHost).
func (wk backed) provision(ctx context.Context) error {
	e := wk.m.extension(wk.sb.Extension)
	select {
	case e.creates <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-e.creates }()
	spec, err := wk.specFor(ctx)
	if err != nil {
		return err
	}
	report, done := wk.m.events.TrackProgress(events.Of(ctx, wk.sb, sandboxer.EventProgress, ""))
	defer done()
	ctx = sandboxer.WithProgress(ctx, report)
	if err := wk.ensurePlace(ctx, spec.Env); err != nil {
		return err
	}
	var h sandboxer.Handle
	for avoid := []string(nil); ; {
		if wk.b.Places() {
			spec.Place = wk.sb.Host
		}
		untried := wk.j.untried
		wk.j.untried = false
		if from := lifecycle.SourceOf(wk.sb); from != "" {
			h, err = wk.m.restore(ctx, wk.b, spec, from, lifecycle.IsNative(wk.sb))
		} else {
			err = wk.m.step(pProvision, func() (err error) { h, err = wk.b.ProvisionChecked(ctx, spec, wk.j.checked); return err })
		}
		if err == nil {
			break
		}
		var source *sourceError
		untouched := untried && (sandboxer.IsUntouched(err) || errors.As(err, &source))
		if untouched {
			if uerr := wk.commitUntouched(ctx); uerr != nil {
				return errors.Join(err, uerr)
			}
		}
		avoid = append(avoid, wk.sb.Host)
		if source != nil || ctx.Err() != nil || !wk.tryOtherHost(ctx, spec.Env, avoid, untouched, err) {
			if !errors.As(err, &source) {
				e.heard(ctx, wk.j.trial, wk.sb, err)
			}
			return err
		}
	}
	// The handle is stored even if a destroy came in between.
	keep := context.WithoutCancel(ctx)
	return wk.m.step(pHandle, func() error {
		return wk.update(keep, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != sandboxer.Creating && sb.State != sandboxer.Terminating {
				return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s", sb.Shown(), sb.State)
			}
			sb.Handle, sb.ProvisionedAt, sb.Untouched = h, now(), false
			if h.Host != "" {
				sb.Host = h.Host
			}
			step := "provisioned"
			if lifecycle.SourceOf(sb) != "" {
				step = "restored"
			}
			w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventStep, step))
			return nil
		})
	})
}

// failCreate ends a create that failed: it tears down the objects, releases the hold and returns the reason for the caller. If
// the create was stopped from outside, it does nothing: a destroy then does all that, or the next start continues the create.
func (wk work) failCreate(ctx context.Context, cause error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if wk.sb.State != sandboxer.Creating {
		return errTerminating
	}
	if lifecycle.IsPaused(wk.sb) {
		return wk.undoResume(ctx, cause)
	}
	kind := kindForCaller(cause)
	if kind == sandboxer.Internal {
		wk.m.log.ErrorContext(ctx, "create failed", "sandbox", wk.sb.ID, "generation", wk.sb.Generation, "err", cause)
	} else {
		wk.m.log.WarnContext(ctx, "create failed", "sandbox", wk.sb.ID, "generation", wk.sb.Generation, "err", cause)
	}
	answer := wrapError(kind, cause, "sandbox %s could not be created", wk.sb.Shown())
	return wk.endFailed(ctx, ending{reason: sandboxer.ReasonFailed, message: answer.Msg, fault: kind, hint: answer.Hint}, answer)
}

// kindForCaller is the kind of the error that the caller of the create gets for cause.
func kindForCaller(cause error) sandboxer.Kind {
	switch kind := sandboxer.KindOf(cause); kind {
	case sandboxer.NotFound: // the object, not what the caller named
		return sandboxer.Failed
	case sandboxer.Canceled: // not by this caller
		return sandboxer.Unavailable
	default:
		return kind
	}
}

// wrapError is an error that says what failed, and has the message, the hint and the retry time of cause.
func wrapError(kind sandboxer.Kind, cause error, format string, args ...any) *sandboxer.Error {
	e := sandboxer.E(kind, cause, "%s: %s", fmt.Sprintf(format, args...), sandboxer.Message(cause))
	e.Hint, e.RetryAfter = sandboxer.HintOf(cause), sandboxer.RetryAfterOf(cause)
	return e
}

// endFailed ends sb after a failure, in the job that failed, and returns answer, which describes the failure. If a destroy was
// faster, it returns the error that stopped the job. The sweep continues a teardown that cannot be finished now.
func (wk work) endFailed(ctx context.Context, why ending, answer error) error {
	if !wk.j.becomeTeardown() {
		return context.Cause(ctx)
	}
	err := wk.beginTeardown(ctx, why)
	if err == nil {
		err = wk.teardown(ctx)
	}
	if err != nil {
		wk.m.log.WarnContext(ctx, "teardown after a failure", "sandbox", wk.sb.ID, "failed", answer, "err", err)
	}
	return answer
}

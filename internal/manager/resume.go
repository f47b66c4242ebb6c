package manager

import (
	"context"
	"fmt"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
	"github.com/sand-boxer/sandboxer/internal/spec"
)

// Resume continues a paused sandbox, and returns it running: with the same ID, name, addresses and tokens. Resuming a running
// sandbox is success. Concurrent callers share one resume. If it fails the sandbox stays paused. Kinds: Conflict when the
// sandbox is neither paused nor running; NoCredit when the tenant cannot pay for more time; the backend's kind when it failed.
func (m *Manager) Resume(ctx context.Context, ref string, req ResumeRequest) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	if err := spec.CheckTTL(sb.Spec.Profile, req.TTL); err != nil {
		return nil, err
	}
	if req.TTL != 0 && sb.LivesByUse() {
		return nil, livesByUse(sb)
	}
	return m.box(sb).resumeOrWait(ctx, req.TTL)
}

// mayResume checks a paused sandbox against its profile as it is now, if there is one.
func (bx box) mayResume(ctx context.Context) error {
	prof, err := bx.m.profile(bx.sb.Profile)
	if err != nil || bx.sb.State != sandboxer.Paused {
		return nil
	}
	return bx.m.site().CheckStillAllowed(sandboxer.PrincipalFrom(ctx), prof, bx.sb.Spec, bx.sb.Secrets, "sandbox "+bx.sb.ID)
}

// resumeOrWait resumes sb. If a job does that already, or a pause is in progress, it waits for that first.
func (bx box) resumeOrWait(ctx context.Context, ttl time.Duration) (*sandboxer.Sandbox, error) {
	if err := bx.mayResume(ctx); err != nil {
		return nil, err
	}
	for {
		switch bx.sb.State {
		case sandboxer.Running:
			return bx.m.withLastUse(bx.sb), nil
		case sandboxer.Paused, sandboxer.Pausing:
		case sandboxer.Creating:
			if !lifecycle.IsPaused(bx.sb) {
				return nil, notRunning(bx.sb)
			}
		default:
			return nil, notRunning(bx.sb)
		}
		j, mine, err := bx.m.begin(ctx, bx.sb.ID, bx.sb.Generation, true, nil)
		if err != nil {
			return nil, err
		}
		if mine {
			own := *bx.sb
			j.run(func(ctx context.Context) (*sandboxer.Sandbox, error) {
				cur, err := bx.m.store.SandboxGeneration(ctx, own.ID, own.Generation)
				if err == nil && cur.State == sandboxer.Pausing {
					cur, err = bx.m.box(cur).in(j).finishPause(ctx)
				}
				if err != nil {
					return nil, err
				}
				switch cur.State {
				case sandboxer.Paused:
					return bx.m.box(cur).in(j).beginResume(ctx, ttl)
				case sandboxer.Creating:
					j.continued = true
					return bx.m.box(cur).in(j).build(ctx)
				case sandboxer.Running:
					return cur, nil
				}
				return nil, notRunning(cur)
			})
		}
		if err := j.waitFor(ctx, j.done); err != nil {
			return nil, err
		}
		if mine {
			return j.sb, j.err
		}
		was := bx.sb.State
		if bx.sb, err = bx.m.store.SandboxGeneration(ctx, bx.sb.ID, bx.sb.Generation); err != nil {
			return nil, err
		}
		if was == sandboxer.Paused && bx.sb.State == sandboxer.Paused && j.err != nil && bx.sb.Pause.Attempts > 0 {
			return nil, j.err // it was tried, for another caller
		}
	}
}

// beginResume commits the intent to resume sb, which is paused, and does it.
func (wk work) beginResume(ctx context.Context, ttl time.Duration) (*sandboxer.Sandbox, error) {
	resume := func(room *sandboxer.Room) error {
		return wk.m.step(pResuming, func() error {
			return wk.move(ctx, sandboxer.Creating, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
				w.Room = room
				prof := sb.Spec.Profile
				ran, left, ok := lifecycle.LifeLeft(sb, ttl)
				if !ok {
					return sandboxer.E(sandboxer.Invalid, nil, "sandbox %s has run for %s; profile %s allows %s", sb.Shown(), sandboxer.FormatDuration(ran.Round(time.Second)), sb.Profile, sandboxer.FormatDuration(lifecycle.MaxTTL(prof))).
						WithHint("restore a snapshot of it, which makes a sandbox with a lifetime of its own, or destroy it")
				}
				holdMore(ctx, sb, w, ran+left)
				if lifecycle.IsOverspent(sb) && !holdCost(ctx, sb, w) {
					return sandboxer.E(sandboxer.NoCredit, nil, "it has cost %s, and its request allows %s", sb.Usage.Cost, sb.MaxCost).
						WithHint("create another one that may cost more (--max-cost), or destroy it")
				}
				sb.Pause.Left = left
				sb.Reason = sandboxer.ReasonRequested
				if !lifecycle.HasReadyObject(sb) { // HasReadyObject: while it is still paused
					sb.Spec.Generation = lifecycle.ObjectGeneration(sb) + 1
					sb.Handle = sandboxer.Handle{}
					wk.m.box(sb).clearPlace()
					b, _ := wk.m.backend(sb.Extension) // building it says why there is none
					sb.Spec.Fuse = lifecycle.FirstFuse(prof, now(), now().Add(left), renews(b))
				} else if b, err := wk.m.backend(sb.Extension); err == nil && b.Can(sandboxer.CanRenew) && !sb.Spec.Fuse.IsZero() {
					sb.Spec.Fuse = lifecycle.GoesOnUntil(sb, now()).Add(lifecycle.MarginOf(prof)) // as unfreeze has it; it is moved again should that fail
				}
				return nil
			})
		})
	}
	var err error
	if wk.sb.TakesRoom() { // it is frozen where it is
		err = resume(nil)
	} else {
		err = wk.j.withRoom(ctx, roomRequest{extension: wk.sb.Extension, profile: wk.sb.Profile, tenant: wk.sb.Tenant}, resume)
	}
	switch {
	case err == nil:
	case cannotPay(err):
		return nil, sandboxer.E(sandboxer.NoCredit, err, "sandbox %s cannot be resumed: its tenant cannot pay for more time", wk.sb.Shown()).
			WithHint("resume it for a shorter time (--ttl), or have an administrator grant credits: sandboxer credits grant %s 10", wk.sb.Tenant)
	case isKind(err, sandboxer.NoCredit):
		return nil, sandboxer.E(sandboxer.NoCredit, err, "sandbox %s cannot be resumed: %s", wk.sb.Shown(), sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	default:
		return nil, err
	}
	return wk.build(ctx)
}

// unfreeze continues the frozen object of sb.
func (bx box) unfreeze(ctx context.Context, b *backend.Backend) error {
	until := lifecycle.GoesOnUntil(bx.sb, now())
	if !bx.sb.Spec.Fuse.IsZero() && b.Can(sandboxer.CanRenew) {
		// While it was frozen its fuse was days ahead. If no broker ran for that long, it has expired.
		err := bx.m.step(pRenew, func() error { return b.Renew(ctx, bx.sb.Handle, until.Add(lifecycle.MarginOf(bx.sb.Spec.Profile))) })
		if err != nil && !bx.sb.Pause.Undo { // after a failed pause its fuse is no earlier than before
			return err
		}
	}
	if !b.Can(sandboxer.CanPause) {
		return nil // it was never frozen
	}
	return bx.m.step(pUnfreeze, func() error { return b.Resume(ctx, bx.sb.Handle) })
}

// undoResume returns a sandbox that could not be resumed to paused: its new object is torn down, or frozen again, and the
// caller gets the reason.
func (wk work) undoResume(ctx context.Context, cause error) error {
	kind := kindForCaller(cause)
	wk.m.log.WarnContext(ctx, "resume failed", "sandbox", wk.sb.ID, "generation", lifecycle.ObjectGeneration(wk.sb), "err", cause)
	frozen := wk.sb.Pause.Depth == sandboxer.PauseFreeze || wk.sb.Pause.Undo
	answer := wrapError(kind, cause, "sandbox %s could not be resumed and stays paused", wk.sb.Shown())
	if frozen && wk.isGone(ctx, cause) { // there is nothing to go back to
		answer.Msg = fmt.Sprintf("sandbox %s could not be resumed: %s", wk.sb.Shown(), sandboxer.Message(cause))
		return wk.endFailed(ctx, ending{reason: sandboxer.ReasonLost, message: endMessages[sandboxer.ReasonLost]}, answer)
	}
	err := wk.m.step(pResumeFailed, func() error {
		return wk.move(ctx, sandboxer.Pausing, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			if frozen {
				sb.Pause.Depth, sb.Pause.Undo, sb.Pause.Snapshot, sb.Pause.As = sandboxer.PauseFreeze, false, "", ""
			}
			sb.Pause.Attempts++
			sb.Message = "it could not be resumed: " + sandboxer.Message(cause)
			return nil
		})
	})
	if err == nil {
		_, err = wk.finishPause(ctx)
	}
	if err != nil && ctx.Err() == nil { // the sweep goes on with it
		wk.m.log.WarnContext(ctx, "back to paused after a failed resume", "sandbox", wk.sb.ID, "err", err)
	}
	return answer
}

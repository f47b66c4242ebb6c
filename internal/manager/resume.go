package manager

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// Resume lets a paused sandbox go on, and returns it running: under the same ID, with
// the same name, addresses and tokens of its own. Resuming what runs is success. Those
// who ask at the same time share one resume. If it fails the sandbox stays paused.
// Kinds: Conflict when the sandbox is neither; NoCredit when more time has to be held
// than the tenant can pay; what the backend said when it failed.
func (m *Manager) Resume(ctx context.Context, ref string, req ResumeRequest) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	if err := checkTTL(sb.Spec.Profile, req.TTL); err != nil {
		return nil, err
	}
	if req.TTL != 0 && sb.LivesByUse() {
		return nil, livesByUse(sb)
	}
	return m.resumeOrWait(ctx, sb, req.TTL)
}

// mayResume holds a sandbox that is paused to its profile as it is now, if there is one.
func (m *Manager) mayResume(ctx context.Context, sb *sandboxer.Sandbox) error {
	prof, err := m.profile(sb.Profile)
	if err != nil || sb.State != sandboxer.Paused {
		return nil
	}
	return m.checkStillAllowed(sandboxer.PrincipalFrom(ctx), prof, sb.Spec, "sandbox "+sb.ID)
}

// resumeOrWait resumes sb, or waits for whoever does, and for a pause that is in progress.
func (m *Manager) resumeOrWait(ctx context.Context, sb *sandboxer.Sandbox, ttl time.Duration) (*sandboxer.Sandbox, error) {
	if err := m.mayResume(ctx, sb); err != nil {
		return nil, err
	}
	for {
		switch sb.State {
		case sandboxer.Running:
			return m.withLastUse(sb), nil
		case sandboxer.Paused, sandboxer.Pausing:
		case sandboxer.Creating:
			if !isPaused(sb) {
				return nil, notRunning(sb)
			}
		default:
			return nil, notRunning(sb)
		}
		j, mine, err := m.begin(ctx, sb.ID, sb.Generation, true, nil)
		if err != nil {
			return nil, err
		}
		if mine {
			own := *sb
			m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) {
				cur, err := m.store.SandboxGeneration(ctx, own.ID, own.Generation)
				if err == nil && cur.State == sandboxer.Pausing {
					cur, err = m.finishPause(ctx, j, cur)
				}
				if err != nil {
					return nil, err
				}
				switch cur.State {
				case sandboxer.Paused:
					return m.beginResume(ctx, j, cur, ttl)
				case sandboxer.Creating:
					j.continued = true
					return m.build(ctx, j, cur)
				case sandboxer.Running:
					return cur, nil
				}
				return nil, notRunning(cur)
			})
		}
		if err := m.waitFor(ctx, j, j.done); err != nil {
			return nil, err
		}
		if mine {
			return j.sb, j.err
		}
		was := sb.State
		if sb, err = m.store.SandboxGeneration(ctx, sb.ID, sb.Generation); err != nil {
			return nil, err
		}
		if was == sandboxer.Paused && sb.State == sandboxer.Paused && j.err != nil && sb.Pause.Attempts > 0 {
			return nil, j.err // it was tried, for somebody else
		}
	}
}

// beginResume commits the intent to resume sb, which is paused, and does it.
func (m *Manager) beginResume(ctx context.Context, j *job, sb *sandboxer.Sandbox, ttl time.Duration) (*sandboxer.Sandbox, error) {
	resume := func(room *sandboxer.Room) error {
		return m.step(pResuming, func() error {
			return m.move(ctx, sb, sandboxer.Creating, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
				w.Room = room
				prof := sb.Spec.Profile
				ran := sb.Pause.At.Sub(sb.CreatedAt) - sb.PausedFor
				left := cmp.Or(ttl, sb.Pause.Left)
				if left < time.Second && !sb.Pause.Undo { // its time was over: it gets a new one, as far as there is one
					left = min(ttlOf(prof), maxTTL(prof)-ran)
				}
				if ran+left > maxTTL(prof) && !sb.Pause.Undo || left <= 0 && !sb.Pause.Undo {
					return sandboxer.E(sandboxer.Invalid, nil, "sandbox %s has run for %s; profile %s allows %s", sb.Shown(), sandboxer.FormatDuration(ran.Round(time.Second)), sb.Profile, sandboxer.FormatDuration(maxTTL(prof))).
						WithHint("make a snapshot's copy of it, which has a life of its own, or destroy it")
				}
				holdMore(sb, w, ran+left)
				sb.Pause.Left = left
				sb.Reason = sandboxer.ReasonRequested
				if !hasReadyObject(sb) { // hasReadyObject: while it is still paused
					sb.Spec.Generation = objectGeneration(sb) + 1
					sb.Handle = sandboxer.Handle{}
					m.clearPlace(sb)
					b, _ := m.backend(sb.Extension) // building it says why there is none
					sb.Spec.Fuse = firstFuse(b, prof, now(), now().Add(left))
				} else if b, err := m.backend(sb.Extension); err == nil && b.Can(sandboxer.CanRenew) && !sb.Spec.Fuse.IsZero() {
					sb.Spec.Fuse = goesOnUntil(sb).Add(marginOf(prof)) // as unfreeze has it; it is moved again should that fail
				}
				return nil
			})
		})
	}
	var err error
	if sb.TakesRoom() { // it stands still where it is
		err = resume(nil)
	} else {
		err = m.withRoom(ctx, j, roomRequest{extension: sb.Extension, profile: sb.Profile, tenant: sb.Tenant}, resume)
	}
	if err != nil {
		if isKind(err, sandboxer.NoCredit) {
			err = sandboxer.E(sandboxer.NoCredit, err, "sandbox %s cannot go on: its tenant cannot pay for more time", sb.Shown()).
				WithHint("ask an administrator for credits, or resume it for a shorter time (--ttl)")
		}
		return nil, err
	}
	return m.build(ctx, j, sb)
}

// goesOnUntil is until when sb, that goes on now where it stood still, is to be kept at first.
func goesOnUntil(sb *sandboxer.Sandbox) time.Time {
	until := now().Add(sb.Pause.Left)
	if soon := now().Add(sb.Spec.Profile.Idle + fuseStep); sb.LivesByUse() && soon.Before(until) {
		until = soon
	}
	return until
}

// unfreeze lets the frozen object of sb go on.
func (m *Manager) unfreeze(ctx context.Context, b *backend.Backend, sb *sandboxer.Sandbox) error {
	until := goesOnUntil(sb)
	if !sb.Spec.Fuse.IsZero() && b.Can(sandboxer.CanRenew) {
		// While it stood still its fuse was days ahead. Where no broker was there for that long, it is over.
		err := m.step(pRenew, func() error { return b.Renew(ctx, sb.Handle, until.Add(marginOf(sb.Spec.Profile))) })
		if err != nil && !sb.Pause.Undo { // after a failed pause its fuse is no earlier than before
			return err
		}
	}
	if !b.Can(sandboxer.CanPause) {
		return nil // it was never frozen
	}
	return m.step(pUnfreeze, func() error { return b.Resume(ctx, sb.Handle) })
}

// undoResume takes a sandbox that could not be resumed back to where it was: what was
// made of it is torn down, or frozen again, and the caller gets the reason.
func (m *Manager) undoResume(ctx context.Context, j *job, sb *sandboxer.Sandbox, cause error) error {
	kind := kindForCaller(cause)
	m.log.WarnContext(ctx, "resume failed", "sandbox", sb.ID, "generation", objectGeneration(sb), "err", cause)
	frozen := sb.Pause.Depth == sandboxer.PauseFreeze || sb.Pause.Undo
	answer := wrapError(kind, cause, "sandbox %s could not be resumed and stays paused", sb.Shown())
	if frozen && m.isGone(ctx, sb, cause) { // there is nothing to go back to
		answer.Msg = fmt.Sprintf("sandbox %s could not be resumed: %s", sb.Shown(), sandboxer.Message(cause))
		return m.endFailed(ctx, j, sb, ending{reason: sandboxer.ReasonLost, message: endMessages[sandboxer.ReasonLost]}, answer)
	}
	err := m.step(pResumeFailed, func() error {
		return m.move(ctx, sb, sandboxer.Pausing, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			if frozen {
				sb.Pause.Depth, sb.Pause.Undo, sb.Pause.Snapshot, sb.Pause.As = sandboxer.PauseFreeze, false, "", ""
			}
			sb.Pause.Attempts++
			sb.Message = "it could not be resumed: " + sandboxer.Message(cause)
			return nil
		})
	})
	if err == nil {
		_, err = m.finishPause(ctx, j, sb)
	}
	if err != nil && ctx.Err() == nil { // the sweep goes on with it
		m.log.WarnContext(ctx, "back to paused after a failed resume", "sandbox", sb.ID, "err", err)
	}
	return answer
}

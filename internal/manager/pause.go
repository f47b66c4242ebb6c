package manager

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// Pause pauses a running sandbox, and returns it. The sandbox keeps its ID, name and record; running time and the time to live
// stop. Pausing a paused sandbox succeeds. If it cannot be paused, it keeps running. Kinds: Unsupported if the extension does
// not support that depth; Conflict if the sandbox does not run, or is paused to another depth.
func (m *Manager) Pause(ctx context.Context, ref string, req PauseRequest) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	for {
		switch sb.State {
		case sandboxer.Running, sandboxer.Pausing:
		case sandboxer.Paused:
			if req.Depth != "" && req.Depth != sb.Pause.Depth {
				return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is already paused, to the depth %s", sb.Shown(), sb.Pause.Depth).
					WithHint("resume it first")
			}
			return sb, nil
		default:
			return nil, notRunning(sb)
		}
		depth := sb.Pause.Depth
		if sb.State == sandboxer.Running {
			if depth, err = m.site().PauseDepth(sb, req.Depth, sandboxer.ReasonRequested); err != nil {
				return nil, err
			}
			if depth != sandboxer.PauseFreeze {
				if err := m.CheckSnapshotBytes(ctx, sb.Tenant); err != nil {
					return nil, err
				}
			}
		}
		j, mine, err := m.begin(ctx, sb.ID, sb.Generation, true, nil)
		if err != nil {
			return nil, err
		}
		if mine {
			own := *sb
			j.run(func(ctx context.Context) (*sandboxer.Sandbox, error) {
				return m.box(&own).in(j).beginPause(ctx, depth, sandboxer.ReasonRequested)
			})
		}
		if err := events.Wait(ctx, j.done); err != nil {
			return nil, err
		}
		if mine {
			return j.sb, j.err
		}
		if sb, err = m.store.SandboxGeneration(ctx, sb.ID, sb.Generation); err != nil {
			return nil, err
		}
	}
}

func maxPaused(p sandboxer.Profile) time.Duration {
	return cmp.Or(p.MaxPaused, sandboxer.DefaultMaxPaused)
}

// beginPause commits the intent to pause sb, unless that was done before, and does it.
func (wk work) beginPause(ctx context.Context, depth sandboxer.PauseDepth, cause sandboxer.Reason) (*sandboxer.Sandbox, error) {
	if wk.sb.State == sandboxer.Running {
		if err := wk.commitPausing(ctx, depth, cause); err != nil {
			return nil, err
		}
	}
	return wk.finishPause(ctx)
}

// commitPausing commits the intent to pause sb, with the record of the snapshot that it is
// paused to.
func (bx box) commitPausing(ctx context.Context, depth sandboxer.PauseDepth, cause sandboxer.Reason) error {
	var rec *sandboxer.SnapshotRecord
	if depth != sandboxer.PauseFreeze {
		b, err := bx.m.backend(bx.sb.Extension)
		if err != nil {
			return err
		}
		form := sandboxer.SnapshotNative
		if !b.Can(sandboxer.CanSnapshot) {
			form = sandboxer.SnapshotPortable
		}
		rec = newSnapshot(bx.sb, form, sandboxer.ForPause)
		if err := bx.sealFor(rec); err != nil {
			return err
		}
	}
	return bx.m.step(pPausing, func() error {
		return bx.move(ctx, sandboxer.Pausing, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			at := now()
			sb.Pause = sandboxer.Pause{Depth: depth, At: at, Left: max(0, sb.ExpiresAt.Sub(at)), Cause: cause}
			if rec != nil {
				sb.Pause.Snapshot = rec.ID
				if rec.Kind == sandboxer.SnapshotPortable {
					sb.Pause.As = rec.Kind
				}
				w.Snapshots = append(w.Snapshots, rec)
			}
			if rec != nil && cause == sandboxer.ReasonRequested { // pauses that no caller asked for are counted, and never refused
				w.Quota = bx.m.QuotaFor(sb.Tenant, sandboxer.QuotaSnapshots)
			}
			sb.Reason = cause
			sb.UsedAt = bx.m.withLastUse(sb).UsedAt
			sb.ExpiresAt = at.Add(maxPaused(sb.Spec.Profile))
			if b, err := bx.m.backend(sb.Extension); err == nil && depth == sandboxer.PauseFreeze && !b.Can(sandboxer.CanRenew) && !sb.Spec.Fuse.IsZero() {
				// The backend will remove it on its own.
				if removed := sb.Spec.Fuse.Add(-lifecycle.FuseMargin); removed.Before(sb.ExpiresAt) {
					sb.ExpiresAt = removed
				}
			}
			return nil
		})
	})
}

// finishPause does the work of pausing: for a sandbox whose pause has just begun, for one that another process left half
// paused, and for one that could not be resumed.
func (wk work) finishPause(ctx context.Context) (*sandboxer.Sandbox, error) {
	b, err := wk.m.backend(wk.sb.Extension)
	if err != nil {
		return nil, wk.scheduleRetry(ctx, err)
	}
	torn, err := wk.freezeOrSave(ctx, b)
	if err != nil {
		return wk.handleFailedPause(ctx, err, torn)
	}
	depth, fuse := wk.sb.Pause.Depth, wk.sb.Spec.Fuse
	err = wk.m.step(pPaused, func() error {
		return wk.move(ctx, sandboxer.Paused, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			sb.Pause.Depth, sb.Spec.Fuse = depth, fuse
			if sb.Pause.Depth != sandboxer.PauseFreeze {
				sb.Handle, sb.Reachability = sandboxer.Handle{}, sandboxer.Reachability{}
			}
			if sb.Pause.As == sandboxer.SnapshotPortable && sb.Pause.Attempts == 0 {
				sb.Message = "its processes ended, and only the files of its workspace are kept"
				w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventWarning, sb.Message))
			}
			sb.Pause.Undo = false
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	return wk.sb, nil
}

// freezeOrSave freezes sb, or saves and removes it. torn says that the removal has begun, which cannot be undone.
func (bx box) freezeOrSave(ctx context.Context, b *backend.Backend) (torn bool, err error) {
	if bx.sb.Pause.Depth == sandboxer.PauseFreeze {
		// A backend may keep a frozen sandbox longer than a running one: another installation does.
		err := bx.delayFuse(ctx, b, bx.sb.ExpiresAt)
		later := isKind(err, sandboxer.Invalid)
		if err != nil && !later {
			return false, err
		}
		if err := bx.m.step(pFreeze, func() error { return b.Pause(ctx, bx.sb.Handle) }); err != nil || !later {
			return false, err
		}
		return false, bx.delayFuse(ctx, b, bx.sb.ExpiresAt)
	}
	rec, err := bx.m.store.Snapshot(ctx, bx.sb.Pause.Snapshot)
	if err != nil {
		return false, err
	}
	if rec.State == sandboxer.SnapshotSaving {
		release, err := bx.m.pins.claim(rec.ID)
		if err != nil {
			return false, err
		}
		defer release()
		if err := bx.save(b, rec).paused(ctx); err != nil {
			return false, err
		}
	}
	if rec.State != sandboxer.SnapshotSealed {
		return false, sandboxer.E(sandboxer.Failed, nil, "its snapshot %s is %s", rec.ID, rec.State)
	}
	if !rec.Native.Memory {
		bx.sb.Pause.Depth = sandboxer.PauseFiles // as the commit that follows says
	}
	_, err = bx.teardownObject(ctx)
	return true, err
}

// paused saves sb to rec, which the caller has claimed, and seals rec. If the backend can, it freezes sb first and leaves it
// frozen, because changes between the snapshot and the teardown would be lost. An archive is made by programs inside, so sb
// must not be frozen for that.
func (sv save) paused(ctx context.Context) error {
	// A sandbox that may not live that long is saved within the time it has.
	if err := sv.delayFuse(ctx, sv.b, now().Add(lifecycle.StuckAfter)); err != nil && !isKind(err, sandboxer.Invalid) {
		return err
	}
	if sv.b.Can(sandboxer.CanPause) && (sv.rec.Kind == sandboxer.SnapshotNative || sv.b.Can(sandboxer.CanCheckpoint)) {
		if err := sv.m.step(pFreeze, func() error { return sv.b.Pause(ctx, sv.sb.Handle) }); err != nil {
			return err
		}
	}
	if err := sv.data(ctx); err != nil {
		return err
	}
	if !sv.rec.Native.Memory && sv.sb.Pause.Depth == sandboxer.PauseDisk {
		if sv.sb.Pause.Cause == sandboxer.ReasonRequested || sv.sb.Spec.Profile.PauseDepth != "" {
			e := sandboxer.E(sandboxer.Unsupported, nil, "extension %s saves files, not memory: the sandbox's processes would end", sv.sb.Extension)
			if sv.b.Can(sandboxer.CanPause) {
				return e.WithHint("pause to the depth freeze, or save only the files: --depth files")
			}
			return e.WithHint("save only the files: --depth files")
		}
	}
	return sv.m.step(pSealed, func() error {
		sv.rec.State, sv.rec.SealedAt = sandboxer.SnapshotSealed, now()
		if sv.sb.Pause.Cause == sandboxer.ReasonRequested && sv.sb.Pause.Attempts == 0 {
			return sv.m.putSnapshot(ctx, sv.rec, "sealed", sandboxer.QuotaSnapshotBytes)
		}
		return sv.m.putSnapshot(ctx, sv.rec, "sealed")
	})
}

// delayFuse moves the backend's own deadline to until or later, if it is earlier and can be moved.
func (bx box) delayFuse(ctx context.Context, b *backend.Backend, until time.Time) error {
	fuse := until.Add(lifecycle.FuseMargin)
	if !b.Can(sandboxer.CanRenew) || bx.sb.Spec.Fuse.IsZero() || !bx.sb.Spec.Fuse.Before(fuse) {
		return nil
	}
	if err := bx.m.step(pFuse, func() error { return b.Renew(ctx, bx.sb.Handle, fuse) }); err != nil {
		return err
	}
	bx.sb.Spec.Fuse = fuse
	return nil
}

// handleFailedPause handles a pause that failed. If a caller waits for it, the sandbox returns to running and the caller gets
// the reason. If the sandbox had expired, the pause is tried again, or the sandbox ends if that cannot help.
func (wk work) handleFailedPause(ctx context.Context, cause error, torn bool) (*sandboxer.Sandbox, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if wk.sb.State != sandboxer.Pausing {
		return nil, errEnded
	}
	kind := sandboxer.KindOf(cause)
	hopeless := slices.Contains([]sandboxer.Kind{sandboxer.Unsupported, sandboxer.Invalid, sandboxer.Failed, sandboxer.Denied}, kind)
	why := ending{reason: sandboxer.ReasonLost, message: endMessages[sandboxer.ReasonLost]}
	switch {
	case torn:
		return nil, wk.scheduleRetry(ctx, cause)
	case wk.isGone(ctx, cause): // however often it was tried
	case wk.sb.Pause.Attempts > 0:
		return nil, wk.scheduleRetry(ctx, cause)
	case wk.sb.Pause.Cause != sandboxer.ReasonRequested && kind == sandboxer.Unsupported && wk.mayFreeze():
		return wk.freezeInstead(ctx, cause)
	case wk.sb.Pause.Cause != sandboxer.ReasonRequested && (hopeless || time.Since(wk.sb.Pause.At) > lifecycle.StuckAfter):
		why = ending{reason: wk.sb.Pause.Cause, message: endMessages[wk.sb.Pause.Cause] + ", and it could not be paused: " + sandboxer.Message(cause)}
	case wk.sb.Pause.Cause != sandboxer.ReasonRequested:
		return nil, wk.scheduleRetry(ctx, cause)
	default:
		return nil, wk.undoPause(ctx, cause)
	}
	answer := sandboxer.E(sandboxer.Failed, cause, "sandbox %s could not be paused: %s", wk.sb.Shown(), sandboxer.Message(cause))
	return nil, wk.endFailed(ctx, why, answer)
}

// mayFreeze reports whether sb may be frozen instead of paused to disk, and its backend can freeze it.
func (bx box) mayFreeze() bool {
	b, err := bx.m.backend(bx.sb.Extension)
	return err == nil && bx.sb.Pause.Depth == sandboxer.PauseDisk && bx.sb.Spec.Profile.PauseDepth == "" && bx.m.site().CanPause(b, sandboxer.PauseFreeze)
}

// freezeInstead freezes a sandbox that cannot be saved for its pause, such as one that another version of its runtime started.
// That occupies memory and loses nothing.
func (wk work) freezeInstead(ctx context.Context, cause error) (*sandboxer.Sandbox, error) {
	wk.m.log.WarnContext(ctx, "a sandbox that cannot be saved is frozen instead", "sandbox", wk.sb.ID, "err", cause)
	err := wk.update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) (err error) {
		if sb.State != sandboxer.Pausing || sb.Pause.Depth != sandboxer.PauseDisk {
			return errEnded
		}
		if w.Snapshots, err = wk.m.box(sb).dropPauseSnapshot(ctx); err != nil {
			return err
		}
		sb.Pause.Depth, sb.Pause.Snapshot, sb.Pause.As = sandboxer.PauseFreeze, "", ""
		w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventStep, "it is frozen, and not saved to disk: "+sandboxer.Message(cause)))
		return nil
	})
	if err != nil {
		return nil, err
	}
	return wk.finishPause(ctx)
}

// isGone reports whether cause says that the object of sb does not exist, and a second probe
// confirms it.
func (bx box) isGone(ctx context.Context, cause error) bool {
	if !isKind(cause, sandboxer.NotFound) {
		return false
	}
	b, err := bx.m.backend(bx.sb.Extension)
	if err != nil || !b.Can(sandboxer.CanProbe) {
		return err == nil
	}
	alive, err := b.IsAlive(ctx, handleOf(bx.sb))
	return err == nil && (alive == sandboxer.Gone || alive == sandboxer.OOMKilled)
}

// undoPause returns sb, whose object still exists, to running after a failed pause.
func (wk work) undoPause(ctx context.Context, cause error) error {
	wk.m.log.WarnContext(ctx, "pause failed", "sandbox", wk.sb.ID, "err", cause)
	err := wk.m.step(pPaused, func() error {
		return wk.move(ctx, sandboxer.Paused, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) (err error) {
			if w.Snapshots, err = wk.m.box(sb).dropPauseSnapshot(ctx); err != nil {
				return err
			}
			sb.Pause.Undo = true
			sb.Message = "it could not be paused: " + sandboxer.Message(cause)
			return nil
		})
	})
	if err != nil {
		return err
	}
	answer := wrapError(sandboxer.KindOf(cause), cause, "sandbox %s could not be paused, and keeps running", wk.sb.Shown())
	if _, err := wk.beginResume(ctx, 0); err != nil {
		wk.m.log.WarnContext(ctx, "back to running after a failed pause", "sandbox", wk.sb.ID, "err", err)
		answer.Msg = fmt.Sprintf("sandbox %s could not be paused: %s", wk.sb.Shown(), sandboxer.Message(cause))
	}
	return answer
}

// dropPauseSnapshot returns the record of the snapshot to which sb was paused, now as one that is being dropped. It is
// committed with the change after which sb no longer needs it.
func (bx box) dropPauseSnapshot(ctx context.Context) ([]*sandboxer.SnapshotRecord, error) {
	if bx.sb.Pause.Snapshot == "" {
		return nil, nil
	}
	rec, err := bx.m.store.Snapshot(ctx, bx.sb.Pause.Snapshot)
	switch {
	case isKind(err, sandboxer.NotFound):
		return nil, nil
	case rec != nil && rec.Damaged != "": // the sandbox can be ended all the same
		if !rec.State.CanBecome(sandboxer.SnapshotDropping) {
			return nil, nil
		}
		rec = droppable(rec)
	case err != nil:
		return nil, err
	case !rec.State.CanBecome(sandboxer.SnapshotDropping):
		return nil, nil
	}
	rec.State = sandboxer.SnapshotDropping
	return []*sandboxer.SnapshotRecord{rec}, nil
}

// sweepPause is the sweep's pause: it begins one, or continues one that a former process
// left half done.
func (ps *pass) sweepPause(ctx context.Context, sb *sandboxer.Sandbox) error {
	release, err := ps.m.slot(ctx, sb.Extension)
	if err != nil {
		return err
	}
	defer release()
	j, mine, err := ps.m.begin(ctx, sb.ID, sb.Generation, true, nil)
	if err != nil || !mine {
		return err
	}
	j.run(func(ctx context.Context) (*sandboxer.Sandbox, error) {
		return ps.m.pauseExpired(ctx, j, sb.ID, sb.Generation)
	})
	<-j.done
	if j.err == nil {
		ps.count(func(r *SweepReport) { r.Paused++ })
	}
	return j.err
}

// pauseExpired pauses a sandbox that expired or is idle, or ends one that cannot be paused, if that
// is still due.
func (m *Manager) pauseExpired(ctx context.Context, j *job, id string, generation int) (*sandboxer.Sandbox, error) {
	cur, err := m.store.SandboxGeneration(ctx, id, generation)
	if err != nil {
		return nil, err
	}
	release, unused := m.usage.hold(id)
	defer release()
	a := m.decide(cur, sandboxer.Unknown, false)
	if a.Verb != lifecycle.Pause {
		return cur, nil
	}
	if cur.State == sandboxer.Pausing {
		release()
		return m.box(cur).in(j).finishPause(ctx)
	}
	cause := a.Reason
	if cause == sandboxer.ReasonIdle && !unused {
		return cur, nil
	}
	depth, err := m.site().PauseDepth(cur, "", cause)
	if err == nil {
		if err := m.box(cur).commitPausing(ctx, depth, cause); err != nil {
			return nil, err
		}
		release()
		return m.box(cur).in(j).finishPause(ctx)
	}
	if isKind(err, sandboxer.Unavailable) { // the backend may come back
		return nil, err
	}
	why := ending{reason: cause, message: endMessages[cause] + ", and it cannot be paused: " + sandboxer.Message(err)}
	if !j.becomeTeardown() {
		return nil, context.Cause(ctx)
	}
	if err := m.box(cur).beginTeardown(ctx, why); err != nil {
		return nil, err
	}
	release()
	return cur, m.box(cur).teardown(ctx)
}

// extendPaused extends how long a paused sandbox is kept.
func (bx box) extendPaused(ctx context.Context, w *sandboxer.Writes, until time.Time) error {
	longest := maxPaused(bx.sb.Spec.Profile)
	if until.Sub(now()) > longest {
		return sandboxer.E(sandboxer.Invalid, nil, "sandbox %s would stay paused for %s from now; profile %s allows %s", bx.sb.Shown(), until.Sub(now()).Round(time.Second), bx.sb.Profile, longest)
	}
	if lifecycle.HasReadyObject(bx.sb) {
		b, err := bx.m.backend(bx.sb.Extension)
		if err != nil {
			return err
		}
		if err := bx.delayFuse(ctx, b, until); err != nil {
			return err
		}
		if removed := bx.sb.Spec.Fuse.Add(-lifecycle.FuseMargin); !bx.sb.Spec.Fuse.IsZero() && removed.Before(until) {
			return sandboxer.E(sandboxer.Unsupported, nil, "extension %s removes sandbox %s automatically and cannot wait until then", bx.sb.Extension, bx.sb.Shown()).
				WithHint("at most until %s", removed.Format(time.RFC3339))
		}
	}
	bx.sb.ExpiresAt = until
	w.Events = append(w.Events, events.Of(ctx, bx.sb, sandboxer.EventExtend, "kept until "+until.Format(time.RFC3339)))
	return nil
}

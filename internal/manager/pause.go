package manager

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// Pause makes a running sandbox stand still, and returns it paused. It keeps its ID,
// name and place in the database; running time and the time to live stop. Pausing what is
// paused is success. If it cannot be paused it runs on. Kinds: Unsupported where the
// extension cannot go to that depth; Conflict when the sandbox does not run, or is
// paused to another depth.
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
				return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is paused already, to the depth %s", sb.Shown(), sb.Pause.Depth).
					WithHint("resume it first")
			}
			return sb, nil
		default:
			return nil, notRunning(sb)
		}
		depth := sb.Pause.Depth
		if sb.State == sandboxer.Running {
			if depth, err = m.depthFor(sb, req.Depth, sandboxer.ReasonRequested); err != nil {
				return nil, err
			}
			if depth != sandboxer.PauseFreeze {
				if err := m.checkSnapshotBytes(ctx, sb.Tenant); err != nil {
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
			m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) {
				return m.beginPause(ctx, j, &own, depth, sandboxer.ReasonRequested)
			})
		}
		if err := wait(ctx, j.done); err != nil {
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

// depthFor settles how deep sb is paused: as is asked, else as its profile says, else as its
// extension can.
func (m *Manager) depthFor(sb *sandboxer.Sandbox, asked sandboxer.PauseDepth, cause sandboxer.Reason) (sandboxer.PauseDepth, error) {
	b, err := m.backend(sb.Extension)
	if err != nil {
		return "", err
	}
	depth := cmp.Or(asked, sb.Spec.Profile.PauseDepth)
	if depth == "" {
		depth = m.defaultDepth(b, cause)
	}
	switch {
	case !slices.Contains(sandboxer.PauseDepths(), depth):
		return "", sandboxer.E(sandboxer.Invalid, nil, "%q is not a depth of pausing", depth).
			WithHint("the depths are: %s", join(sandboxer.PauseDepths()))
	case !m.canPauseSomehow(b):
		return "", backend.Lacks(sb.Extension, sandboxer.CanPause)
	case !m.canPause(b, depth):
		e := sandboxer.E(sandboxer.Unsupported, nil, "extension %s cannot pause to the depth %s", sb.Extension, depth)
		for _, d := range sandboxer.PauseDepths() {
			if m.canPause(b, d) {
				e.WithHint("try --depth %s", d)
				break
			}
		}
		return "", e
	}
	return depth, nil
}

// defaultDepth is the depth where nobody names one. Files by an archive come last, and only where the
// alternative is the end of the sandbox: whoever asks for a pause says so if processes may end for it.
func (m *Manager) defaultDepth(b *backend.Backend, cause sandboxer.Reason) sandboxer.PauseDepth {
	order := []sandboxer.PauseDepth{sandboxer.PauseFreeze, sandboxer.PauseDisk}
	if cause != sandboxer.ReasonRequested { // nobody is about to come back
		order = []sandboxer.PauseDepth{sandboxer.PauseDisk, sandboxer.PauseFreeze, sandboxer.PauseFiles}
	}
	for _, d := range order {
		if m.canPause(b, d) {
			return d
		}
	}
	return order[len(order)-1]
}

func (m *Manager) canPause(b *backend.Backend, depth sandboxer.PauseDepth) bool {
	switch depth {
	case sandboxer.PauseFreeze:
		return b.Can(sandboxer.CanPause)
	case sandboxer.PauseFiles:
		return b.Can(sandboxer.CanSnapshot) || m.canKeepFiles(b)
	}
	return b.Can(sandboxer.CanSnapshot)
}

func (m *Manager) canPauseSomehow(b *backend.Backend) bool {
	return slices.ContainsFunc(sandboxer.PauseDepths(), func(d sandboxer.PauseDepth) bool { return m.canPause(b, d) })
}

// canKeepFiles reports whether there are portable snapshots of the sandboxes of b.
func (m *Manager) canKeepFiles(b *backend.Backend) bool {
	return m.opts.SnapshotStore != nil && (b.Can(sandboxer.CanArchive) || b.Can(sandboxer.CanCheckpoint))
}

func maxPaused(p sandboxer.Profile) time.Duration {
	return cmp.Or(p.MaxPaused, sandboxer.DefaultMaxPaused)
}

// beginPause commits the intent to pause sb, unless that was done before, and does it.
func (m *Manager) beginPause(ctx context.Context, j *job, sb *sandboxer.Sandbox, depth sandboxer.PauseDepth, cause sandboxer.Reason) (*sandboxer.Sandbox, error) {
	if sb.State == sandboxer.Running {
		if err := m.commitPausing(ctx, sb, depth, cause); err != nil {
			return nil, err
		}
	}
	return m.finishPause(ctx, j, sb)
}

// commitPausing commits the intent to pause sb, with the record of the snapshot that it is
// paused to.
func (m *Manager) commitPausing(ctx context.Context, sb *sandboxer.Sandbox, depth sandboxer.PauseDepth, cause sandboxer.Reason) error {
	var rec *sandboxer.SnapshotRecord
	if depth != sandboxer.PauseFreeze {
		b, err := m.backend(sb.Extension)
		if err != nil {
			return err
		}
		form := sandboxer.SnapshotNative
		if !b.Can(sandboxer.CanSnapshot) {
			form = sandboxer.SnapshotPortable
		}
		rec = newSnapshot(sb, form, sandboxer.ForPause)
		if err := m.sealFor(sb, rec); err != nil {
			return err
		}
	}
	return m.step(pPausing, func() error {
		return m.move(ctx, sb, sandboxer.Pausing, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			at := now()
			sb.Pause = sandboxer.Pause{Depth: depth, At: at, Left: max(0, sb.ExpiresAt.Sub(at)), Cause: cause}
			if rec != nil {
				sb.Pause.Snapshot = rec.ID
				if rec.Kind == sandboxer.SnapshotPortable {
					sb.Pause.As = rec.Kind
				}
				w.Snapshots = append(w.Snapshots, rec)
			}
			if rec != nil && cause == sandboxer.ReasonRequested { // what is nobody's wish is counted, and never refused
				w.Quota = m.quotaFor(sb.Tenant, sandboxer.QuotaSnapshots)
			}
			sb.Reason = cause
			sb.UsedAt = m.withLastUse(sb).UsedAt
			sb.ExpiresAt = at.Add(maxPaused(sb.Spec.Profile))
			if b, err := m.backend(sb.Extension); err == nil && depth == sandboxer.PauseFreeze && !b.Can(sandboxer.CanRenew) && !sb.Spec.Fuse.IsZero() {
				// The backend will remove it by itself.
				if removed := sb.Spec.Fuse.Add(-fuseMargin); removed.Before(sb.ExpiresAt) {
					sb.ExpiresAt = removed
				}
			}
			return nil
		})
	})
}

// finishPause pays what pausing owes. It does the same for a sandbox whose pause has
// just begun, for one that another process left half paused, and for one that could
// not be resumed.
func (m *Manager) finishPause(ctx context.Context, j *job, sb *sandboxer.Sandbox) (*sandboxer.Sandbox, error) {
	b, err := m.backend(sb.Extension)
	if err != nil {
		return nil, m.scheduleRetry(ctx, sb, err)
	}
	torn, err := m.freezeOrSave(ctx, b, sb)
	if err != nil {
		return m.handleFailedPause(ctx, j, sb, err, torn)
	}
	depth, fuse := sb.Pause.Depth, sb.Spec.Fuse
	err = m.step(pPaused, func() error {
		return m.move(ctx, sb, sandboxer.Paused, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			sb.Pause.Depth, sb.Spec.Fuse = depth, fuse
			if sb.Pause.Depth != sandboxer.PauseFreeze {
				sb.Handle, sb.Reachability = sandboxer.Handle{}, sandboxer.Reachability{}
			}
			if sb.Pause.As == sandboxer.SnapshotPortable && sb.Pause.Attempts == 0 {
				sb.Message = "its processes ended, and nothing outside of its workspace is kept"
				w.Events = append(w.Events, event(ctx, sb, sandboxer.EventWarning, sb.Message))
			}
			sb.Pause.Undo = false
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	return sb, nil
}

// freezeOrSave freezes sb, or saves and removes it. torn says that the removal has begun,
// after which there is no way back.
func (m *Manager) freezeOrSave(ctx context.Context, b *backend.Backend, sb *sandboxer.Sandbox) (torn bool, err error) {
	if sb.Pause.Depth == sandboxer.PauseFreeze {
		// A backend may keep what stands still for longer than what runs: another installation does.
		err := m.delayFuse(ctx, b, sb, sb.ExpiresAt)
		later := isKind(err, sandboxer.Invalid)
		if err != nil && !later {
			return false, err
		}
		if err := m.step(pFreeze, func() error { return b.Pause(ctx, sb.Handle) }); err != nil || !later {
			return false, err
		}
		return false, m.delayFuse(ctx, b, sb, sb.ExpiresAt)
	}
	rec, err := m.store.Snapshot(ctx, sb.Pause.Snapshot)
	if err != nil {
		return false, err
	}
	if rec.State == sandboxer.SnapshotSaving {
		release, err := m.pins.claim(rec.ID)
		if err != nil {
			return false, err
		}
		defer release()
		if err := m.savePaused(ctx, b, sb, rec); err != nil {
			return false, err
		}
	}
	if rec.State != sandboxer.SnapshotSealed {
		return false, sandboxer.E(sandboxer.Failed, nil, "its snapshot %s is %s", rec.ID, rec.State)
	}
	if !rec.Native.Memory {
		sb.Pause.Depth = sandboxer.PauseFiles // as the commit that follows says
	}
	_, err = m.teardownObject(ctx, sb)
	return true, err
}

// savePaused saves sb to rec, which it is paused to and the caller has claimed, and seals that. Where the backend can, sb
// stands still from then on: what happened between the snapshot and the teardown would be lost. An archive
// is made by what is inside, which must not stand still for it.
func (m *Manager) savePaused(ctx context.Context, b *backend.Backend, sb *sandboxer.Sandbox, rec *sandboxer.SnapshotRecord) error {
	// What may not live for so long is saved within what it has.
	if err := m.delayFuse(ctx, b, sb, now().Add(stuckAfter)); err != nil && !isKind(err, sandboxer.Invalid) {
		return err
	}
	if b.Can(sandboxer.CanPause) && (rec.Kind == sandboxer.SnapshotNative || b.Can(sandboxer.CanCheckpoint)) {
		if err := m.step(pFreeze, func() error { return b.Pause(ctx, sb.Handle) }); err != nil {
			return err
		}
	}
	if err := m.saveData(ctx, b, sb, rec); err != nil {
		return err
	}
	if !rec.Native.Memory && sb.Pause.Depth == sandboxer.PauseDisk {
		if sb.Pause.Cause == sandboxer.ReasonRequested || sb.Spec.Profile.PauseDepth != "" {
			return sandboxer.E(sandboxer.Unsupported, nil, "extension %s saves files, not memory: the sandbox's processes would end", sb.Extension).
				WithHint("pause to the depth freeze, or say that files are enough: --depth files")
		}
	}
	return m.step(pSealed, func() error {
		rec.State, rec.SealedAt = sandboxer.SnapshotSealed, now()
		if sb.Pause.Cause == sandboxer.ReasonRequested && sb.Pause.Attempts == 0 {
			return m.putSnapshot(ctx, rec, "sealed", sandboxer.QuotaSnapshotBytes)
		}
		return m.putSnapshot(ctx, rec, "sealed")
	})
}

// delayFuse moves the backend's own deadline behind until, if it is before and can be
// moved.
func (m *Manager) delayFuse(ctx context.Context, b *backend.Backend, sb *sandboxer.Sandbox, until time.Time) error {
	fuse := until.Add(fuseMargin)
	if !b.Can(sandboxer.CanRenew) || sb.Spec.Fuse.IsZero() || !sb.Spec.Fuse.Before(fuse) {
		return nil
	}
	if err := m.step(pFuse, func() error { return b.Renew(ctx, sb.Handle, fuse) }); err != nil {
		return err
	}
	sb.Spec.Fuse = fuse
	return nil
}

// handleFailedPause deals with a pause that failed. Where somebody waits for it, the sandbox goes
// back to running and they get the reason; where its time was over it is tried again,
// or ended if that cannot help.
func (m *Manager) handleFailedPause(ctx context.Context, j *job, sb *sandboxer.Sandbox, cause error, torn bool) (*sandboxer.Sandbox, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if sb.State != sandboxer.Pausing {
		return nil, errTerminating
	}
	kind := sandboxer.KindOf(cause)
	hopeless := slices.Contains([]sandboxer.Kind{sandboxer.Unsupported, sandboxer.Invalid, sandboxer.Failed, sandboxer.Denied}, kind)
	why := ending{reason: sandboxer.ReasonLost, message: endMessages[sandboxer.ReasonLost]}
	switch {
	case torn:
		return nil, m.scheduleRetry(ctx, sb, cause)
	case m.isGone(ctx, sb, cause): // however often it was tried
	case sb.Pause.Attempts > 0:
		return nil, m.scheduleRetry(ctx, sb, cause)
	case sb.Pause.Cause != sandboxer.ReasonRequested && kind == sandboxer.Unsupported && m.mayFreeze(sb):
		return m.freezeInstead(ctx, j, sb, cause)
	case sb.Pause.Cause != sandboxer.ReasonRequested && (hopeless || time.Since(sb.Pause.At) > stuckAfter):
		why = ending{reason: sb.Pause.Cause, message: endMessages[sb.Pause.Cause] + ", and it could not be paused: " + sandboxer.Message(cause)}
	case sb.Pause.Cause != sandboxer.ReasonRequested:
		return nil, m.scheduleRetry(ctx, sb, cause)
	default:
		return nil, m.undoPause(ctx, j, sb, cause)
	}
	answer := sandboxer.E(sandboxer.Failed, cause, "sandbox %s could not be paused: %s", sb.Shown(), sandboxer.Message(cause))
	return nil, m.endFailed(ctx, j, sb, why, answer)
}

// mayFreeze reports whether nobody insists that sb is paused to disk, and its backend can
// freeze it.
func (m *Manager) mayFreeze(sb *sandboxer.Sandbox) bool {
	b, err := m.backend(sb.Extension)
	return err == nil && sb.Pause.Depth == sandboxer.PauseDisk && sb.Spec.Profile.PauseDepth == "" && m.canPause(b, sandboxer.PauseFreeze)
}

// freezeInstead pauses a sandbox by the backend's freeze that cannot be saved, such as one
// that another version of its runtime started: it takes memory and loses nothing.
func (m *Manager) freezeInstead(ctx context.Context, j *job, sb *sandboxer.Sandbox, cause error) (*sandboxer.Sandbox, error) {
	m.log.WarnContext(ctx, "a sandbox that cannot be saved is frozen instead", "sandbox", sb.ID, "err", cause)
	err := m.update(ctx, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) (err error) {
		if sb.State != sandboxer.Pausing || sb.Pause.Depth != sandboxer.PauseDisk {
			return errTerminating
		}
		if w.Snapshots, err = m.dropPauseSnapshot(ctx, sb); err != nil {
			return err
		}
		sb.Pause.Depth, sb.Pause.Snapshot, sb.Pause.As = sandboxer.PauseFreeze, "", ""
		w.Events = append(w.Events, event(ctx, sb, sandboxer.EventStep, "it is frozen, and not saved to disk: "+sandboxer.Message(cause)))
		return nil
	})
	if err != nil {
		return nil, err
	}
	return m.finishPause(ctx, j, sb)
}

// isGone reports whether cause says that the object of sb is not there, and a second look
// confirms it.
func (m *Manager) isGone(ctx context.Context, sb *sandboxer.Sandbox, cause error) bool {
	if !isKind(cause, sandboxer.NotFound) {
		return false
	}
	b, err := m.backend(sb.Extension)
	if err != nil || !b.Can(sandboxer.CanProbe) {
		return err == nil
	}
	alive, err := b.IsAlive(ctx, handleOf(sb))
	return err == nil && (alive == sandboxer.Gone || alive == sandboxer.OOMKilled)
}

// undoPause brings sb, whose object still stands, back to running after a failed pause.
func (m *Manager) undoPause(ctx context.Context, j *job, sb *sandboxer.Sandbox, cause error) error {
	m.log.WarnContext(ctx, "pause failed", "sandbox", sb.ID, "err", cause)
	err := m.step(pPaused, func() error {
		return m.move(ctx, sb, sandboxer.Paused, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) (err error) {
			if w.Snapshots, err = m.dropPauseSnapshot(ctx, sb); err != nil {
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
	answer := wrapError(sandboxer.KindOf(cause), cause, "sandbox %s could not be paused, and runs on", sb.Shown())
	if _, err := m.beginResume(ctx, j, sb, 0); err != nil {
		m.log.WarnContext(ctx, "back to running after a failed pause", "sandbox", sb.ID, "err", err)
		answer.Msg = fmt.Sprintf("sandbox %s could not be paused: %s", sb.Shown(), sandboxer.Message(cause))
	}
	return answer
}

// dropPauseSnapshot returns the record of the snapshot that sb was paused to, as one that is
// being dropped, to be committed with the change that makes it so.
func (m *Manager) dropPauseSnapshot(ctx context.Context, sb *sandboxer.Sandbox) ([]*sandboxer.SnapshotRecord, error) {
	if sb.Pause.Snapshot == "" {
		return nil, nil
	}
	rec, err := m.store.Snapshot(ctx, sb.Pause.Snapshot)
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

// sweepPause is the sweep's pause: it begins one, or goes on with what a former process
// left half paused.
func (m *Manager) sweepPause(ctx context.Context, t *tracker, sb *sandboxer.Sandbox) error {
	release, err := m.slot(ctx, sb.Extension)
	if err != nil {
		return err
	}
	defer release()
	j, mine, err := m.begin(ctx, sb.ID, sb.Generation, true, nil)
	if err != nil || !mine {
		return err
	}
	m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) {
		return m.pauseExpired(ctx, j, sb.ID, sb.Generation)
	})
	<-j.done
	if j.err == nil {
		t.count(func(r *SweepReport) { r.Paused++ })
	}
	return j.err
}

// pauseExpired pauses a sandbox whose time is over or that nobody uses, or ends one that cannot be paused, if that
// is still what it needs.
func (m *Manager) pauseExpired(ctx context.Context, j *job, id string, generation int) (*sandboxer.Sandbox, error) {
	cur, err := m.store.SandboxGeneration(ctx, id, generation)
	if err != nil {
		return nil, err
	}
	release, unused := m.usage.hold(id)
	defer release()
	a := decide(m.withLastUse(cur), sandboxer.Unknown, false, time.Now())
	if a.verb != verbPause {
		return cur, nil
	}
	if cur.State == sandboxer.Pausing {
		release()
		return m.finishPause(ctx, j, cur)
	}
	cause := a.reason
	if cause == sandboxer.ReasonIdle && !unused {
		return cur, nil
	}
	depth, err := m.depthFor(cur, "", cause)
	if err == nil {
		if err := m.commitPausing(ctx, cur, depth, cause); err != nil {
			return nil, err
		}
		release()
		return m.finishPause(ctx, j, cur)
	}
	if isKind(err, sandboxer.Unavailable) { // the backend may come back
		return nil, err
	}
	why := ending{reason: cause, message: endMessages[cause] + ", and it cannot be paused: " + sandboxer.Message(err)}
	if !m.becomeTeardown(j) {
		return nil, context.Cause(ctx)
	}
	if err := m.beginTeardown(ctx, cur, why); err != nil {
		return nil, err
	}
	release()
	return cur, m.teardown(ctx, cur)
}

// extendPaused moves how long a paused sandbox is kept.
func (m *Manager) extendPaused(ctx context.Context, sb *sandboxer.Sandbox, w *sandboxer.Writes, until time.Time) error {
	longest := maxPaused(sb.Spec.Profile)
	if until.Sub(now()) > longest {
		return sandboxer.E(sandboxer.Invalid, nil, "sandbox %s would stay paused for %s from now; profile %s allows %s", sb.Shown(), until.Sub(now()).Round(time.Second), sb.Profile, longest)
	}
	if hasReadyObject(sb) {
		b, err := m.backend(sb.Extension)
		if err != nil {
			return err
		}
		if err := m.delayFuse(ctx, b, sb, until); err != nil {
			return err
		}
		if removed := sb.Spec.Fuse.Add(-fuseMargin); !sb.Spec.Fuse.IsZero() && removed.Before(until) {
			return sandboxer.E(sandboxer.Unsupported, nil, "extension %s removes sandbox %s by itself and cannot be told to wait until then", sb.Extension, sb.Shown()).
				WithHint("at most until %s", removed.Format(time.RFC3339))
		}
	}
	sb.ExpiresAt = until
	w.Events = append(w.Events, event(ctx, sb, sandboxer.EventExtend, "kept until "+until.Format(time.RFC3339)))
	return nil
}

package manager

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/spec"
)

// MaxFork bounds the copies of one fork.
const MaxFork = 100

// forkGrace is how long a fork continues when no caller waits for it: a caller whose connection broke may repeat its request.
const forkGrace = 10 * time.Second

// A forkInProgress is a fork with an idempotency key, while it is made.
type forkInProgress struct {
	digest  string
	abandon context.CancelCauseFunc
	waiting int // callers; guarded by Manager.mu

	done chan struct{} // closed when the rest is set
	made []*sandboxer.Sandbox
	err  error
}

// Fork makes copies of a running sandbox, which keeps running. All copies come from one snapshot, which is dropped afterwards;
// they are made a few at a time. Either all are made or none: if one fails, or the caller leaves, the others are destroyed and
// the error says how many there were. Fork is safe to repeat: the same req.Key gives the same copies or a failure for a day,
// and a fork whose caller left is finished if it is requested again within forkGrace. Kinds: as Snapshot and Create; Exhausted
// when the extension has no room for all of them; Conflict also if the broker ended during a fork under the key.
func (m *Manager) Fork(ctx context.Context, ref string, req ForkRequest) ([]*sandboxer.Sandbox, error) {
	if req.Count < 1 || req.Count > MaxFork {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%d copies: want 1 to %d", req.Count, MaxFork).WithHint("fork several times for more")
	}
	if err := spec.CheckKey(req.Key); err != nil {
		return nil, err
	}
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	if req.Key == "" {
		return m.fork(ctx, sb, req, "")
	}
	f, err := m.joinFork(ctx, sb, req, m.mac(spec.ForkDigest(sb.ID, req)))
	if err != nil {
		return nil, err
	}
	defer m.leaveFork(f)
	if err := events.Wait(ctx, f.done); err != nil {
		return nil, err
	}
	return f.made, f.err
}

// joinFork begins the fork that req asks for, or takes part in the one in progress.
func (m *Manager) joinFork(ctx context.Context, sb *sandboxer.Sandbox, req ForkRequest, digest string) (*forkInProgress, error) {
	if err := m.enter(); err != nil {
		return nil, err
	}
	id := [2]string{sb.Tenant, req.Key}
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.forks[id]
	if f != nil {
		m.wg.Done()
		if f.digest != digest {
			return nil, sandboxer.E(sandboxer.Conflict, nil, "the idempotency key %q is used by another fork", req.Key).
				WithHint("use a new key for a new request")
		}
		f.waiting++
		return f, nil
	}
	f = &forkInProgress{digest: digest, waiting: 1, done: make(chan struct{})}
	work, abandon := context.WithCancelCause(context.WithoutCancel(ctx))
	f.abandon = abandon
	m.forks[id] = f
	go func() {
		defer m.wg.Done()
		defer abandon(nil)
		f.made, f.err = m.forkOnce(work, sb, req, digest)
		m.mu.Lock()
		delete(m.forks, id)
		m.mu.Unlock()
		close(f.done)
	}()
	return f, nil
}

// leaveFork ends the wait of one caller. A fork without callers for forkGrace is abandoned.
func (m *Manager) leaveFork(f *forkInProgress) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if f.waiting--; f.waiting > 0 {
		return
	}
	time.AfterFunc(forkGrace, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if f.waiting == 0 {
			f.abandon(sandboxer.E(sandboxer.Canceled, nil, "the client stopped waiting for the copies"))
		}
	})
}

// forkKey is the idempotency key of copy i; that of the first is the caller's own.
func forkKey(key string, i int) string {
	if i == 0 {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return fmt.Sprintf("fork:%x:%d", sum[:16], i)
}

// forkOnce answers with the copies that were made under req's key, or makes them. A fork that a former process did not finish
// cannot be finished: the saved state for the missing copies is gone.
func (m *Manager) forkOnce(ctx context.Context, sb *sandboxer.Sandbox, req ForkRequest, digest string) ([]*sandboxer.Sandbox, error) {
	var found []*sandboxer.Sandbox
	for i := range req.Count {
		k, err := m.store.IdempotencyKey(ctx, sb.Tenant, forkKey(req.Key, i))
		switch {
		case isKind(err, sandboxer.NotFound) || err == nil && time.Since(k.At) > keepKeys:
			continue
		case err != nil:
			return nil, err
		case !m.digestMatches(k.Digest, digest):
			return nil, sandboxer.E(sandboxer.Conflict, nil, "the idempotency key %q was used for another request, which made sandbox %s", req.Key, m.shownOf(ctx, k)).
				WithHint("use a new key for a new request")
		}
		copied, err := m.store.SandboxGeneration(ctx, k.SandboxID, k.Generation)
		if err != nil {
			return nil, err
		}
		found = append(found, copied)
	}
	if len(found) == 0 {
		return m.fork(ctx, sb, req, digest)
	}
	if len(found) < req.Count {
		m.destroyCopies(ctx, found)
		return nil, sandboxer.E(sandboxer.Conflict, nil, "the fork under the idempotency key %q was cut short, and what it had made is destroyed", req.Key).
			WithHint("use a new key to fork again")
	}
	for i := range found {
		copied, err := (&creation{m: m, Resolved: spec.Resolved{Tenant: sb.Tenant, Key: forkKey(req.Key, i), Digest: digest}}).replay(ctx)
		if err == nil && copied != nil {
			found[i] = copied
			continue
		}
		if now, e := m.store.SandboxGeneration(ctx, found[i].ID, found[i].Generation); e == nil && failure(now) != nil {
			m.destroyCopies(ctx, found)
		}
		if err == nil {
			err = errClaimLost
		}
		return nil, err
	}
	return found, nil
}

// destroyCopies destroys copies and returns how many of them are still there.
func (m *Manager) destroyCopies(ctx context.Context, made []*sandboxer.Sandbox) (left int) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	ctx, cancel := m.untilClosed(context.WithoutCancel(ctx))
	defer cancel(nil)
	for _, sb := range made {
		wg.Go(func() {
			if _, err := m.Destroy(ctx, sb.Ref()); err != nil {
				m.log.WarnContext(ctx, "destroy of a copy", "sandbox", sb.ID, "err", err)
				mu.Lock()
				left++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return left
}

// fork saves sb and makes the copies, until ctx ends.
func (m *Manager) fork(ctx context.Context, sb *sandboxer.Sandbox, req ForkRequest, digest string) ([]*sandboxer.Sandbox, error) {
	if err := m.box(sb).checkCapacity(ctx, req.Count); err != nil {
		return nil, err
	}
	rec, err := m.box(sb).takeSnapshot(ctx, SnapshotRequest{}, sandboxer.ForFork)
	if err != nil {
		return nil, err
	}
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.wg.Done()
	// A caller who leaves must not leave half a fork behind.
	bg, cancel := m.untilClosed(context.WithoutCancel(ctx))
	defer cancel(nil)
	unpin, err := m.pinSealed(bg, rec.ID)
	if err != nil {
		return nil, err
	}
	made, err := m.makeCopies(bg, ctx, rec, req, digest)
	unpin()
	m.dropInternal(bg, rec.ID)
	return made, err
}

// makeCopies restores req.Count sandboxes from rec, until the caller leaves.
func (m *Manager) makeCopies(ctx, caller context.Context, rec *sandboxer.SnapshotRecord, req ForkRequest, digest string) ([]*sandboxer.Sandbox, error) {
	all := make([]*sandboxer.Sandbox, req.Count)
	var (
		mu    sync.Mutex
		first error
		wg    sync.WaitGroup
		slots = make(chan struct{}, max(1, runtime.NumCPU()))
	)
	failed := func() bool {
		mu.Lock()
		defer mu.Unlock()
		if first == nil {
			first = context.Cause(caller)
		}
		return first != nil
	}
	for i := range all {
		slots <- struct{}{}
		if failed() {
			break
		}
		wg.Go(func() {
			defer func() { <-slots }()
			sb, err := m.restoreOne(ctx, rec, copyOf(req, i), copying{digest, rec.Extension, caller.Done()})
			mu.Lock()
			defer mu.Unlock()
			all[i] = sb
			first = cmp.Or(first, err)
		})
	}
	wg.Wait()
	if !failed() {
		return all, nil
	}
	all = slices.DeleteFunc(all, func(sb *sandboxer.Sandbox) bool { return sb == nil })
	left := m.destroyCopies(ctx, all)
	what := fmt.Sprintf("the %d that were made are destroyed again", len(all))
	if left > 0 {
		what = fmt.Sprintf("of the %d that were made, %d are still being destroyed", len(all), left)
	}
	kind := sandboxer.KindOf(first)
	free := true
	if req.Key != "" && mayPass(kind) {
		if free = m.freeFork(ctx, rec.Tenant, req, digest); !free {
			kind = sandboxer.Failed // under this key there is nothing to repeat
		}
	}
	err := wrapError(kind, first, "%d copies of sandbox %s could not be made, %s", req.Count, rec.ShownSandbox(), what)
	if !free {
		err.Hint, err.RetryAfter = "use a new key to fork again", 0
	}
	return nil, err
}

// freeFork frees the keys of a fork that failed once all of its copies have ended, and reports whether it did.
func (m *Manager) freeFork(ctx context.Context, tenant string, req ForkRequest, digest string) bool {
	var keys []sandboxer.IdempotencyKey
	for i := range req.Count {
		k, err := m.store.IdempotencyKey(ctx, tenant, forkKey(req.Key, i))
		if isKind(err, sandboxer.NotFound) || err == nil && !m.digestMatches(k.Digest, digest) {
			continue
		}
		if err != nil {
			return false
		}
		sb, err := m.store.SandboxGeneration(ctx, k.SandboxID, k.Generation)
		if err != nil || sb.State != sandboxer.Terminated {
			return false
		}
		keys = append(keys, k)
	}
	for _, k := range keys {
		if err := m.store.Write(ctx, sandboxer.Writes{FreeKey: &k}); err != nil {
			return false
		}
	}
	return true
}

// copyOf is the restore that makes copy i of a fork.
func copyOf(r ForkRequest, i int) RestoreRequest {
	one := RestoreRequest{TTL: r.TTL, Labels: r.Labels, Env: r.Env, MaxCost: r.MaxCost}
	if r.Key != "" {
		one.Key = forkKey(r.Key, i)
	}
	return one
}

// checkCapacity refuses copies for which the extension reports no room.
func (bx box) checkCapacity(ctx context.Context, count int) error {
	b, err := bx.m.backend(bx.sb.Extension)
	if err != nil || !b.Can(sandboxer.CanCapacity) {
		return err
	}
	capacity, err := b.Capacity(ctx, bx.sb.Host)
	if err != nil {
		return err
	}
	if capacity.Free >= 0 && capacity.Free < count {
		return sandboxer.E(sandboxer.Exhausted, nil, "%s has room for %d more sandboxes, not for %d", bx.sb.Extension, capacity.Free, count).
			WithHint("make fewer copies, or destroy other sandboxes first")
	}
	return nil
}

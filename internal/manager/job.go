package manager

import (
	"context"
	"sync"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
)

// A job is the one piece of work in flight on a sandbox ID, such as its creation or its teardown. It is the lock of the ID.
// Callers wait for it, and cancel it.
type job struct {
	m          *Manager
	id         string
	generation int       // guarded by Manager.mu: the generation it works on; 0 until that has a record
	making     bool      // guarded by Manager.mu: a job that makes ends by tearing down when it fails
	superseded bool      // guarded by Manager.mu: canceled in favour of a teardown
	request    *creation // what is being made; nil when the sweep resumes it
	ctx        context.Context
	cancel     context.CancelCauseFunc

	published   chan struct{} // closed when the record is committed, or the job has ended
	publishOnce sync.Once
	committed   *sandboxer.Sandbox // the record when known was closed; nil if there is none
	recorded    bool               // the job itself committed it, with the request's idempotency key
	untried     bool               // its place is committed, and no call to make anything there was sent
	checked     *backend.Checked   // what its request passed; nil: the spec is checked when its object is made
	continued   bool               // another job was making it before, and may have been cut short anywhere
	trial       *trial             // not nil: it finds out whether its backend works again
	told        []sandboxer.Event  // of its making, to be committed when it runs
	callers     int                // guarded by Manager.mu: the number of callers that wait for it, or did and got their result
	abandoned   chan struct{}      // closed when all of them have left
	done        chan struct{}      // closed when the job has ended
	sb          *sandboxer.Sandbox // its result, for those that wait on done
	err         error
}

// begin starts a job on id unless one is in flight, which it then returns instead.
// The caller must run the job it began, with run. The job gets the values of ctx, but does
// not end with it: work belongs to the manager.
func (m *Manager) begin(ctx context.Context, id string, generation int, making bool, o *creation) (j *job, mine bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, false, errClosing
	}
	if j := m.jobs[id]; j != nil {
		return j, false, nil
	}
	j = &job{m: m, id: id, generation: generation, making: making, request: o, published: make(chan struct{}), abandoned: make(chan struct{}), done: make(chan struct{})}
	j.ctx, j.cancel = m.untilClosed(context.WithoutCancel(ctx))
	m.jobs[id] = j
	m.wg.Add(1)
	return j, true, nil
}

// run does the work of j in a goroutine of the manager.
func (j *job) run(work func(context.Context) (*sandboxer.Sandbox, error)) {
	go func() {
		defer j.m.wg.Done()
		j.sb, j.err = work(j.ctx)
		if isKind(j.err, sandboxer.Canceled) && j.ctx.Err() != nil {
			j.err = context.Cause(j.ctx) // what stopped it, not where that showed
		}
		if j.err != nil && sandboxer.KindOf(j.err) == sandboxer.Internal {
			j.m.log.ErrorContext(j.ctx, "job failed", "sandbox", j.id, "err", j.err)
		}
		j.m.mu.Lock()
		delete(j.m.jobs, j.id)
		j.m.mu.Unlock()
		j.cancel(nil)
		j.publishOnce.Do(func() { close(j.published) })
		close(j.done)
	}()
}

// publishRecord gives the committed record to callers that do not wait for the end.
func (j *job) publishRecord(sb *sandboxer.Sandbox) {
	j.m.mu.Lock()
	defer j.m.mu.Unlock()
	j.generation = sb.Generation
	j.publishOnce.Do(func() {
		cp := *sb
		j.committed = &cp
		close(j.published)
	})
}

// goes notes that the record for c is committed, on the candidate of c, and that nothing was sent there yet.
func (j *job) goes(c *creation) {
	j.untried, j.checked, j.trial, j.continued = true, c.asked.checked, c.trial, false
}

// working reports whether a job is in flight on id.
func (m *Manager) working(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.jobs[id] != nil
}

// becomeTeardown turns j into a teardown: from now on a destroy waits for it instead of stopping it. It returns false if a
// teardown has canceled j already.
func (j *job) becomeTeardown() bool {
	j.m.mu.Lock()
	defer j.m.mu.Unlock()
	if j.superseded {
		return false
	}
	j.making = false
	return true
}

// cancelForTeardown cancels j if j is making that generation, in favour of its teardown, and returns the channel to wait for
// before the next look. A job that makes another generation continues.
func (j *job) cancelForTeardown(generation int) <-chan struct{} {
	j.m.mu.Lock()
	defer j.m.mu.Unlock()
	switch {
	case j.making && j.generation == 0:
		return j.published
	case j.making && j.generation == generation:
		j.superseded = true
		if j.request == nil { // it was pausing, resuming or saving what was there
			j.cancel(errEnded)
		} else {
			j.cancel(errTerminating)
		}
	}
	return j.done
}

// waitFor waits for ch, one of j's channels, on behalf of one caller that wants j's sandbox. When all such callers have left
// without it, j is abandoned.
func (j *job) waitFor(ctx context.Context, ch <-chan struct{}) error {
	j.m.mu.Lock()
	j.callers++
	j.m.mu.Unlock()
	err := events.Wait(ctx, ch)
	if err == nil {
		return nil
	}
	j.m.mu.Lock()
	defer j.m.mu.Unlock()
	if j.callers--; j.callers == 0 {
		select {
		case <-j.abandoned:
		default:
			close(j.abandoned)
		}
	}
	return err
}

// isMaking reports whether j still works towards a usable sandbox.
func (j *job) isMaking() bool {
	j.m.mu.Lock()
	defer j.m.mu.Unlock()
	return j.making && !j.superseded
}

var (
	errTerminating = sandboxer.E(sandboxer.Conflict, nil, "the sandbox ended while it was being created")
	errEnded       = sandboxer.E(sandboxer.Conflict, nil, "the sandbox ended meanwhile: it was destroyed, or it expired")
)

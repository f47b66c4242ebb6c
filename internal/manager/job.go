package manager

import (
	"context"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// A job is the one piece of work in flight on a sandbox ID: making it, or tearing it
// down. It is the keyed lock, what callers wait for, and what they cancel.
type job struct {
	id         string
	generation int              // guarded by Manager.mu: the generation it works on; 0 until that has a record
	making     bool             // guarded by Manager.mu: a job that makes ends by tearing down when it fails
	superseded bool             // guarded by Manager.mu: canceled in favour of a teardown
	request    *resolvedRequest // what is being made; nil when the sweep resumes it
	ctx        context.Context
	cancel     context.CancelCauseFunc

	published   chan struct{} // closed when the record is committed, or the job has ended
	publishOnce sync.Once
	committed   *sandboxer.Sandbox // the record when known was closed; nil if there is none
	recorded    bool               // the job itself committed it, with the request's idempotency key
	untried     bool               // its place is committed, and nobody was told to make anything there
	told        []sandboxer.Event  // of its making, to be committed when it runs
	callers     int                // guarded by Manager.mu: who waits for it, or did and has what he wanted
	abandoned   chan struct{}      // closed when all of them have left
	done        chan struct{}      // closed when the job has ended
	sb          *sandboxer.Sandbox // its result, for whoever waits on done
	err         error
}

// begin starts a job on id unless one is in flight, which it then returns instead.
// The caller must run the job it began, with run. Values of ctx go with the job, its
// end does not: work belongs to the manager.
func (m *Manager) begin(ctx context.Context, id string, generation int, making bool, o *resolvedRequest) (j *job, mine bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, false, errClosing
	}
	if j := m.jobs[id]; j != nil {
		return j, false, nil
	}
	j = &job{id: id, generation: generation, making: making, request: o, published: make(chan struct{}), abandoned: make(chan struct{}), done: make(chan struct{})}
	j.ctx, j.cancel = m.untilClosed(context.WithoutCancel(ctx))
	m.jobs[id] = j
	m.wg.Add(1)
	return j, true, nil
}

// run does the work of j in a goroutine of the manager.
func (m *Manager) run(j *job, work func(context.Context) (*sandboxer.Sandbox, error)) {
	go func() {
		defer m.wg.Done()
		j.sb, j.err = work(j.ctx)
		if isKind(j.err, sandboxer.Canceled) && j.ctx.Err() != nil {
			j.err = context.Cause(j.ctx) // what stopped it, not where that showed
		}
		if j.err != nil && sandboxer.KindOf(j.err) == sandboxer.Internal {
			m.log.ErrorContext(j.ctx, "job failed", "sandbox", j.id, "err", j.err)
		}
		m.mu.Lock()
		delete(m.jobs, j.id)
		m.mu.Unlock()
		j.cancel(nil)
		j.publishOnce.Do(func() { close(j.published) })
		close(j.done)
	}()
}

// publishRecord publishes the committed record to those who do not wait for the end.
func (m *Manager) publishRecord(j *job, sb *sandboxer.Sandbox) {
	m.mu.Lock()
	defer m.mu.Unlock()
	j.generation = sb.Generation
	j.publishOnce.Do(func() {
		cp := *sb
		j.committed = &cp
		close(j.published)
	})
}

// working reports whether a job is in flight on id.
func (m *Manager) working(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.jobs[id] != nil
}

// becomeTeardown makes j a teardown: from now on a destroy waits for it instead of stopping it.
// It reports false if j is superseded already.
func (m *Manager) becomeTeardown(j *job) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if j.superseded {
		return false
	}
	j.making = false
	return true
}

// cancelForTeardown makes way for the teardown of generation: it cancels j if j is making just
// that, and returns what to wait for before looking again. A job that makes another
// generation is left alone.
func (m *Manager) cancelForTeardown(j *job, generation int) <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case j.making && j.generation == 0:
		return j.published
	case j.making && j.generation == generation:
		j.superseded = true
		j.cancel(errTerminating)
	}
	return j.done
}

// waitFor waits for ch, which is one of j's, as one of those who want what j makes. When all of them have
// left without it, j is abandoned.
func (m *Manager) waitFor(ctx context.Context, j *job, ch <-chan struct{}) error {
	m.mu.Lock()
	j.callers++
	m.mu.Unlock()
	err := wait(ctx, ch)
	if err == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
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
func (m *Manager) isMaking(j *job) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return j.making && !j.superseded
}

var errTerminating = sandboxer.E(sandboxer.Conflict, nil, "the sandbox was ended while it was being created")

// wait returns when ch is closed or ctx ends.
func wait(ctx context.Context, ch <-chan struct{}) error {
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
		err := context.Cause(ctx)
		return sandboxer.E(sandboxer.KindOf(err), err, "stopped waiting")
	}
}

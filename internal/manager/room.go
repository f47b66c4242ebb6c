package manager

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

const (
	// maxWaiting and maxWaitingOfTenant bound the requests that wait for room on one extension.
	maxWaiting         = 1000
	maxWaitingOfTenant = 100
	// makeWayFor is how long a request waits, whatever its profile says, until a sandbox of a pool has ended to give it room.
	makeWayFor = time.Minute
)

// rooms are the requests that wait for room, in one line for each extension. The database knows how much room there is; the
// line only says which request tries next.
//
// mu guards the lines and the waiters in them. The store is never called while it is held.
type rooms struct {
	mu    sync.Mutex
	lines map[string]*line // by extension; none that is empty
}

// A line is served by one goroutine at a time. Tenants take turns; a tenant's requests are in the
// order in which they came.
type line struct {
	extension string
	tenants   []*waitingTenant // next is first
	waiting   int
	serving   bool
	again     bool // it is to be served once more: there may be room since
}

type waitingTenant struct {
	tenant  string
	waiters []*waiter
}

type waiter struct {
	tenant, profile string
	commit          func(*sandboxer.Room) error
	patience        time.Duration // what the profile says
	until           time.Time     // and when that is over

	trying bool            // commit is being called: a caller that leaves waits for that
	left   error           // why the caller left meanwhile
	giving <-chan struct{} // not nil: a sandbox of a pool makes way for it; closed when that has ended
	given  time.Time       // since when

	done chan struct{} // closed when err is set
	err  error
}

// isOver reports whether w has waited for as long as it may.
func (w *waiter) isOver(at time.Time) bool {
	return !at.Before(w.until) && (w.giving == nil || at.Sub(w.given) >= makeWayFor)
}

// A roomRequest says who wants room.
type roomRequest struct {
	extension, profile, tenant string
	leaving                    <-chan struct{} // closed when the caller no longer wants it; may be nil
}

// roomFor is the limit that the store checks for a change that gives a sandbox of the profile room on the extension; nil if
// there is no limit. The profile may be empty.
func (m *Manager) roomFor(extension, profile string) *sandboxer.Room {
	r := sandboxer.Room{Extension: extension, Profile: profile}
	if e := m.extension(extension); e != nil {
		r.ExtensionMax = e.Info.Max
	}
	if prof, err := m.profile(profile); profile != "" && err == nil {
		r.ProfileMax = prof.Max
	}
	if r.ExtensionMax == 0 && r.ProfileMax == 0 {
		return nil
	}
	return &r
}

// isFull reports whether err says that there is no room.
func isFull(err error) bool { return errors.As(err, new(*sandboxer.FullError)) }

// errAbandoned says that the last caller left that waited for a sandbox that waited for room.
var errAbandoned = sandboxer.E(sandboxer.Canceled, nil, "the client stopped waiting for the sandbox, and there was still no room for it")

// withRoom calls commit, which writes that a sandbox takes room, within the limits that it gets. If there is no room, withRoom
// waits as long as the profile says, and commit is called again: perhaps from another goroutine, but never twice at a time. It
// returns the result of the last commit. Kinds: Exhausted if there is no room; Canceled if all callers that wait for j have
// left.
func (j *job) withRoom(ctx context.Context, r roomRequest, commit func(*sandboxer.Room) error) error {
	room := j.m.roomFor(r.extension, r.profile)
	if room == nil {
		return commit(nil)
	}
	if !j.m.rooms.anybody(r.extension, "") { // it overtakes no other request
		if err := commit(room); !isFull(err) {
			return err
		}
	}
	w := &waiter{tenant: r.tenant, profile: r.profile, commit: commit, done: make(chan struct{})}
	if prof, err := j.m.profile(r.profile); err == nil {
		w.patience = prof.Wait
	}
	w.until = time.Now().Add(w.patience)
	if err := j.m.rooms.join(r.extension, w); err != nil {
		return err
	}
	j.m.serve(r.extension) // there may be room since
	over := time.NewTimer(w.patience)
	defer over.Stop()
	for {
		var why error
		select {
		case <-w.done:
			return w.err
		case <-over.C:
			j.m.serve(r.extension) // which refuses those that waited long enough
			over.Reset(makeWayFor)
			continue
		case <-ctx.Done():
			why = context.Cause(ctx)
		case <-j.abandoned:
			why = errAbandoned
		case <-r.leaving:
			why = errAbandoned
		}
		j.m.rooms.leave(r.extension, w, why)
		<-w.done
		return w.err
	}
}

// serve tries the line of the extension again: there may be room, or the time of a waiter ran out.
func (m *Manager) serve(extension string) {
	l := m.rooms.begin(extension)
	if l == nil {
		return
	}
	m.newPass().async(func() {
		for {
			m.serveOnce(l)
			if !m.rooms.end(l) {
				return
			}
		}
	})
}

// roomMade is called when a sandbox of the extension no longer takes room. Requests that wait for room come first, then pools
// that found none.
func (m *Manager) roomMade(extension string) {
	m.serve(extension)
	for _, p := range m.catalogue.Load().pools {
		if p.profile.Extension != extension {
			continue
		}
		p.mu.Lock()
		if p.full {
			p.retryAt = time.Time{}
			m.wakePools()
		}
		p.mu.Unlock()
	}
}

// serveAll serves all lines.
func (m *Manager) serveAll() {
	for _, id := range m.extensionIDs() {
		m.serve(id)
	}
}

// serveOnce lets every waiter in the line that may find room try, in turn, and refuses those whose time
// is over.
func (m *Manager) serveOnce(l *line) {
	m.rooms.clearEnded(l)
	full := map[string]error{} // by profile: why it has no room
	var why error              // why the extension has none
	for {
		w := m.rooms.next(l, full)
		if w == nil {
			break
		}
		err := w.commit(m.roomFor(l.extension, w.profile))
		var reason *sandboxer.FullError
		if !errors.As(err, &reason) {
			m.rooms.finish(l, w, err)
			continue
		}
		m.rooms.putBack(l, w)
		if reason.Of == l.extension {
			m.makeWay(l, full)
			why = err
			break
		}
		full[w.profile] = err
	}
	m.rooms.refuse(l, full, why)
}

// makeWay ends sandboxes that wait in pools of the extension: one for each waiter that lacks room on it and for which none is
// being ended yet.
func (m *Manager) makeWay(l *line, full map[string]error) {
	hopeful := m.rooms.hopeful(l, full)
	if len(hopeful) == 0 {
		return
	}
	ctx := sandboxer.WithPrincipal(m.ctx, sandboxer.Principal{Actor: poolActor})
	var pooled []*sandboxer.Sandbox
	err := m.records(ctx, sandboxer.Query{Extension: l.extension, States: []sandboxer.State{sandboxer.Warm, sandboxer.Creating}}, func(sb *sandboxer.Sandbox) {
		if sb.Damaged == "" && !lifecycle.MayBeClaimed(sb) && lifecycle.IsPooled(sb) {
			pooled = append(pooled, sb)
		}
	})
	if err != nil {
		m.log.WarnContext(ctx, "room for a request", "extension", l.extension, "err", err)
		return
	}
	// Those that are still being made are needed least.
	slices.SortStableFunc(pooled, func(a, b *sandboxer.Sandbox) int { return cmp.Compare(a.State, b.State) })
	for _, w := range hopeful {
		for len(pooled) > 0 {
			sb := pooled[0]
			pooled = pooled[1:]
			t := m.newPass()
			if !t.discardPooled(ctx, sb, "a request needs its room") {
				continue
			}
			over := t.done()
			m.rooms.giveWay(w, over)
			m.newPass().async(func() {
				if events.Wait(m.ctx, over) == nil {
					m.serve(l.extension)
				}
			})
			break
		}
	}
}

// anybody reports whether a request waits for room on the extension; with a profile, whether one of that profile does.
func (r *rooms) anybody(extension, profile string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.lines[extension]
	if l == nil || profile == "" {
		return l != nil
	}
	for _, t := range l.tenants {
		if slices.ContainsFunc(t.waiters, func(w *waiter) bool { return w.profile == profile }) {
			return true
		}
	}
	return false
}

// join puts w at the end of the line, unless that is too long. Exhausted.
func (r *rooms) join(extension string, w *waiter) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.lines[extension]
	if l == nil {
		l = &line{extension: extension}
	}
	of := l.of(w.tenant)
	switch {
	case l.waiting >= maxWaiting:
		return tooMany("%d requests wait for room on extension %s", l.waiting, extension)
	case of != nil && len(of.waiters) >= maxWaitingOfTenant:
		return tooMany("%d requests of tenant %s wait for room on extension %s", len(of.waiters), w.tenant, extension)
	case of == nil:
		of = &waitingTenant{tenant: w.tenant}
		l.tenants = append(l.tenants, of)
	}
	of.waiters = append(of.waiters, w)
	l.waiting++
	r.lines[extension] = l
	return nil
}

func tooMany(format string, args ...any) error {
	e := sandboxer.E(sandboxer.Exhausted, nil, format, args...)
	e.RetryAfter = 30 * time.Second
	return e.WithHint("try again later, or ask an administrator for more room (max)")
}

// of returns the part of the line that is a tenant's, or nil.
func (l *line) of(tenant string) *waitingTenant {
	i := slices.IndexFunc(l.tenants, func(t *waitingTenant) bool { return t.tenant == tenant })
	if i < 0 {
		return nil
	}
	return l.tenants[i]
}

// begin makes the caller the one that serves the line, until end. It returns nil if no request waits, or if another goroutine
// serves the line; that one then serves it once more.
func (r *rooms) begin(extension string) *line {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.lines[extension]
	if l == nil {
		return nil
	}
	l.again = true
	if l.serving {
		return nil
	}
	l.serving, l.again = true, false
	return l
}

// end ends begin, unless the line is to be served once more.
func (r *rooms) end(l *line) (again bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	again = l.again && l.waiting > 0
	l.serving, l.again = again, false
	return again
}

// next returns the waiter that may try now: the first of the tenant whose turn it is, except those of
// profiles that are full.
func (r *rooms) next(l *line, full map[string]error) *waiter {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range l.tenants {
		for _, w := range t.waiters {
			if full[w.profile] == nil {
				w.trying = true
				return w
			}
		}
	}
	return nil
}

// finish ends the wait of w with err. If w got room, the turn goes to the next tenant.
func (r *rooms) finish(l *line, w *waiter, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l.remove(r, w, err)
	if t := l.of(w.tenant); t != nil && err == nil {
		l.tenants = append(slices.DeleteFunc(l.tenants, func(o *waitingTenant) bool { return o == t }), t)
	}
}

// remove takes w out of the line and ends its wait. Call it with mu held.
func (l *line) remove(r *rooms, w *waiter, err error) {
	t := l.of(w.tenant)
	t.waiters = slices.DeleteFunc(t.waiters, func(o *waiter) bool { return o == w })
	if len(t.waiters) == 0 {
		l.tenants = slices.DeleteFunc(l.tenants, func(o *waitingTenant) bool { return o == t })
	}
	if l.waiting--; l.waiting == 0 && r.lines[l.extension] == l {
		delete(r.lines, l.extension)
	}
	w.err = err
	close(w.done)
}

// putBack ends a try of w that found no room.
func (r *rooms) putBack(l *line, w *waiter) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w.trying = false
	if w.left != nil {
		l.remove(r, w, w.left)
	}
}

// leave takes w out of the line, or does so after its present try, if that finds no room.
func (r *rooms) leave(extension string, w *waiter, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-w.done:
		return
	default:
	}
	if w.trying {
		w.left = why
		return
	}
	r.lines[extension].remove(r, w, why)
}

// hopeful are the waiters that lack only room on the extension, and for which no pooled sandbox is being ended yet.
func (r *rooms) hopeful(l *line, full map[string]error) (all []*waiter) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range l.tenants {
		for _, w := range t.waiters {
			if w.giving == nil && full[w.profile] == nil {
				all = append(all, w)
			}
		}
	}
	return all
}

// giveWay notes that a pooled sandbox is being ended for w, until over is closed.
func (r *rooms) giveWay(w *waiter, over <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w.giving, w.given = over, time.Now()
}

// clearEnded forgets the pooled sandboxes that have ended. It is called before the waiters try: one that ends while they do leaves
// room that none of them has seen, and the line is served again for it.
func (r *rooms) clearEnded(l *line) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range l.tenants {
		for _, w := range t.waiters {
			select {
			case <-w.giving:
				w.giving = nil
			default:
			}
		}
	}
}

// refuse ends the wait of each waiter that has no room and has waited long enough. full has the reasons by
// profile, and why, if it is not nil, the reason of the extension.
func (r *rooms) refuse(l *line, full map[string]error, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := time.Now()
	over := map[*waiter]error{}
	for _, t := range l.tenants {
		for _, w := range t.waiters {
			if err := cmp.Or(full[w.profile], why); err != nil && w.isOver(at) {
				over[w] = err
			}
		}
	}
	for w, err := range over {
		if w.patience > 0 {
			err = wrapError(sandboxer.Exhausted, err, "no room within %s", sandboxer.FormatDuration(w.patience))
		}
		l.remove(r, w, err)
	}
}

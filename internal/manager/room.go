package manager

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	// maxWaiting and maxWaitingOfTenant bound those who wait for room on one extension.
	maxWaiting         = 1000
	maxWaitingOfTenant = 100
	// makeWayFor is how long somebody waits, whatever his profile says, for a sandbox of a pool
	// to make way for him.
	makeWayFor = time.Minute
)

// rooms are those who wait for room, in one line for each extension. How much there is, the
// database knows; the line says only who tries next.
//
// mu guards the lines and the waiters in them. The store is never called under it.
type rooms struct {
	mu    sync.Mutex
	lines map[string]*line // by extension; none that is empty
}

// A line is served by one goroutine at a time. Tenants take turns; of one tenant, who came first
// is first.
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

	trying bool            // commit is being called: whoever leaves waits for that
	left   error           // why he left meanwhile
	giving <-chan struct{} // not nil: one of a pool makes way for him, until it is closed
	given  time.Time       // since when

	done chan struct{} // closed when err is set
	err  error
}

// isOver reports whether w has waited for as long as he may.
func (w *waiter) isOver(at time.Time) bool {
	if at.Before(w.until) {
		return false
	}
	select {
	case <-w.giving:
		return true
	default:
		return w.giving == nil || at.Sub(w.given) >= makeWayFor
	}
}

// A roomRequest says who wants room.
type roomRequest struct {
	extension, profile, tenant string
	leaving                    <-chan struct{} // closed when he does not want it any more; may be nil
}

// roomFor is what the store holds a change to after which a sandbox of the profile takes room on
// the extension; nil where nothing bounds it. The profile may be empty.
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

// errAbandoned says that the last one left who waited for a sandbox that waited for room.
var errAbandoned = sandboxer.E(sandboxer.Canceled, nil, "nobody waited for the sandbox any more, and it had found no room")

// withRoom calls commit, which writes that a sandbox takes room, within the bounds that it is given. If
// there is no room it waits for it, as long as the profile says, and calls commit again; then also from
// another goroutine, but never twice at a time. It returns what commit did the last time. Exhausted: there
// is no room; Canceled: those who wait for j have left.
func (m *Manager) withRoom(ctx context.Context, j *job, r roomRequest, commit func(*sandboxer.Room) error) error {
	room := m.roomFor(r.extension, r.profile)
	if room == nil {
		return commit(nil)
	}
	if !m.rooms.anybody(r.extension, "") { // nobody is overtaken
		if err := commit(room); !isFull(err) {
			return err
		}
	}
	w := &waiter{tenant: r.tenant, profile: r.profile, commit: commit, done: make(chan struct{})}
	if prof, err := m.profile(r.profile); err == nil {
		w.patience = prof.Wait
	}
	w.until = time.Now().Add(w.patience)
	if err := m.rooms.join(r.extension, w); err != nil {
		return err
	}
	m.serve(r.extension) // there may be room since
	over := time.NewTimer(w.patience)
	defer over.Stop()
	for {
		var why error
		select {
		case <-w.done:
			return w.err
		case <-over.C:
			m.serve(r.extension) // which refuses whoever waited long enough
			over.Reset(makeWayFor)
			continue
		case <-ctx.Done():
			why = context.Cause(ctx)
		case <-j.abandoned:
			why = errAbandoned
		case <-r.leaving:
			why = errAbandoned
		}
		m.rooms.leave(r.extension, w, why)
		<-w.done
		return w.err
	}
}

// serve has the line of the extension served: there may be room, or somebody's time is over.
func (m *Manager) serve(extension string) {
	l := m.rooms.begin(extension)
	if l == nil {
		return
	}
	m.async(newTracker(), func() {
		for {
			m.serveOnce(l)
			if !m.rooms.end(l) {
				return
			}
		}
	})
}

// roomMade is called when a sandbox of the extension takes no room any more: requests that wait for that
// go first, and then pools that found none.
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

// serveAll does that for all lines.
func (m *Manager) serveAll() {
	for _, id := range m.extensionIDs() {
		m.serve(id)
	}
}

// serveOnce lets everybody in the line try who may find room, in turn, and refuses those whose time is
// over.
func (m *Manager) serveOnce(l *line) {
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

// makeWay ends sandboxes that wait in pools of the extension, one for each who waits for room on it and has
// none yet that makes way for him.
func (m *Manager) makeWay(l *line, full map[string]error) {
	hopeful := m.rooms.hopeful(l, full)
	if len(hopeful) == 0 {
		return
	}
	ctx := sandboxer.WithPrincipal(m.ctx, sandboxer.Principal{Actor: poolActor})
	var pooled []*sandboxer.Sandbox
	err := m.records(ctx, sandboxer.Query{Extension: l.extension, States: []sandboxer.State{sandboxer.Warm, sandboxer.Creating}}, func(sb *sandboxer.Sandbox) {
		if sb.Damaged == "" && sb.Unconfirmed == "" && isPooled(sb) {
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
			t := newTracker()
			if !m.discardPooled(ctx, t, sb, "a request needs its room") {
				continue
			}
			over := t.done()
			m.rooms.giveWay(w, over)
			m.async(newTracker(), func() {
				if wait(m.ctx, over) == nil {
					m.serve(l.extension)
				}
			})
			break
		}
	}
}

// anybody reports whether somebody waits for room on the extension; with a profile, for one of that.
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

// begin makes the caller the one who serves the line, until end; nil if somebody does, who does it once
// more then, or nobody waits.
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

// next returns who may try now: the first of the tenant whose turn it is, but for those of profiles
// that are full.
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

// finish ends the wait of w with err. If he got room, it is the others' turn.
func (r *rooms) finish(l *line, w *waiter, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l.remove(r, w, err)
	if t := l.of(w.tenant); t != nil && err == nil {
		l.tenants = append(slices.DeleteFunc(l.tenants, func(o *waitingTenant) bool { return o == t }), t)
	}
}

// remove takes w out of the line and ends his wait. Call it with mu.
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

// leave takes w out of the line, or does so once he is done trying, if that finds no room.
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

// hopeful are those for whom room on the extension is all that is missing, and for whom nothing makes
// way yet.
func (r *rooms) hopeful(l *line, full map[string]error) (all []*waiter) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range l.tenants {
		for _, w := range t.waiters {
			given := w.giving == nil
			select {
			case <-w.giving:
				given = true
			default:
			}
			if given && full[w.profile] == nil {
				all = append(all, w)
			}
		}
	}
	return all
}

// giveWay notes that something makes way for w until over is closed.
func (r *rooms) giveWay(w *waiter, over <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w.giving, w.given = over, time.Now()
}

// refuse ends the wait of everybody who has no room and whose time is over: full says it of profiles, and
// why, if it is not nil, of the extension.
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

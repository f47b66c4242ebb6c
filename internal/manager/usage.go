package manager

import (
	"sync"
	"time"
)

// usage remembers when each sandbox was last used and how many callers use it now. Idle time is measured by it. It is in
// memory, and the sweep stores it now and then, so that use of a sandbox writes nothing. Older values are in the database.
//
// mu guards the map and the uses in it. The store is never called while it is held.
type usage struct {
	mu       sync.Mutex
	uses     map[string]*use // by sandbox ID
	releases uint64          // how many holds of any of them are over
}

type use struct {
	users int       // now
	last  time.Time // when one began or ended
	// held, if not nil, is closed when it may be used again (hold).
	held     chan struct{}
	released uint64 // usage.releases at the end of its last hold
}

func newUsage() *usage { return &usage{uses: map[string]*use{}} }

// seen returns the value that begin takes, for the moment before a record was read.
func (u *usage) seen() uint64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.releases
}

// begin notes that a caller begins to use the sandbox; end notes that it stops. No use begins if the sandbox is held, or was
// held since the caller called seen: the record may have changed, so the caller has to read it again when held is closed.
func (u *usage) begin(id string, seen uint64) (end func(), held <-chan struct{}) {
	u.mu.Lock()
	defer u.mu.Unlock()
	one := u.of(id)
	if one.held != nil {
		return nil, one.held
	}
	if one.released > seen {
		return nil, overHold
	}
	one.users++
	one.last = now()
	return sync.OnceFunc(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		one.users--
		one.last = now()
	}), nil
}

// overHold is a hold that is over.
var overHold = func() <-chan struct{} { c := make(chan struct{}); close(c); return c }()

// hold prevents new uses of the sandbox until release, so that its end or its pause for lack of use can be committed. hold
// fails, and does nothing, while the sandbox is in use or held.
func (u *usage) hold(id string) (release func(), ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	one := u.of(id)
	if one.users > 0 || one.held != nil {
		return func() {}, false
	}
	one.held = make(chan struct{})
	return sync.OnceFunc(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		close(one.held)
		u.releases++
		one.held, one.released = nil, u.releases
	}), true
}

// of returns the remembered use of the sandbox. Call it with mu held.
func (u *usage) of(id string) *use {
	one := u.uses[id]
	if one == nil {
		one = &use{}
		u.uses[id] = one
	}
	return one
}

// last returns when the sandbox was last used, as far as memory goes (zero: not at all), and
// whether it is in use now, in which case the time is now.
func (u *usage) last(id string) (at time.Time, busy bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	one := u.uses[id]
	switch {
	case one == nil:
		return time.Time{}, false
	case one.users > 0:
		return now(), true
	}
	return one.last, false
}

// ids returns the sandboxes that have something to remember.
func (u *usage) ids() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	ids := make([]string, 0, len(u.uses))
	for id := range u.uses {
		ids = append(ids, id)
	}
	return ids
}

// forget drops what is remembered of a sandbox that ended.
func (u *usage) forget(id string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.uses, id)
}

// forgetUnused drops sandboxes that are not in use and were not used for longer than age.
func (u *usage) forgetUnused(age time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for id, one := range u.uses {
		if one.users == 0 && one.held == nil && time.Since(one.last) > age {
			delete(u.uses, id)
		}
	}
}

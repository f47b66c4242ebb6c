package access

import (
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// AtOnce bounds the number of simultaneous operations of one kind. A field that is 0 sets no bound.
type AtOnce struct {
	Sandbox int // in one sandbox
	Key     int // for one API key or user
	Tenant  int // for all keys of one tenant
	Total   int // for everybody
}

// Shares bounds an operation to total, and reserves a sixteenth of that for tenants other than the one that uses most.
func Shares(total int) AtOnce {
	most := max(total-total/16, 1)
	return AtOnce{Sandbox: most, Key: most, Tenant: most, Total: total}
}

// A Limiter counts operations of one kind, such as commands, for each sandbox, key and tenant, and keeps them within bounds. A
// caller above a bound is refused immediately and does not wait.
//
// mu guards the counts, and nothing else happens while it is held: quota is called before.
type Limiter struct {
	what  string // plural, for messages
	bound AtOnce
	quota func(tenant string) (most int64, bounded bool) // nil: there is none

	mu        sync.Mutex
	total     int
	sandboxes map[string]int
	keys      map[string]int
	tenants   map[string]int
}

// NewLimiter returns a limiter of what, a plural noun for messages.
func NewLimiter(what string, bound AtOnce) *Limiter {
	return &Limiter{what: what, bound: bound, sandboxes: map[string]int{}, keys: map[string]int{}, tenants: map[string]int{}}
}

// Begin counts one more operation of p in a sandbox ("" for none), on account of tenant. Exhausted: a bound is reached.
func (l *Limiter) Begin(sandbox, tenant string, p sandboxer.Principal) (end func(), _ error) {
	key := p.Actor + "\x00" + p.Tenant
	var most int64
	var bounded bool
	if l.quota != nil {
		most, bounded = l.quota(tenant)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if have := int64(l.tenants[tenant]); bounded && have >= most {
		return nil, sandboxer.OverQuota(tenant, sandboxer.QuotaExecs, have, most, 0)
	}
	full := func(have, may int) bool { return may > 0 && have >= may }
	var who string
	var may int
	switch {
	case sandbox != "" && full(l.sandboxes[sandbox], l.bound.Sandbox):
		who, may = "sandbox "+sandbox, l.bound.Sandbox
	case full(l.keys[key], l.bound.Key):
		who, may = p.Actor, l.bound.Key
	case full(l.tenants[tenant], l.bound.Tenant):
		who, may = "tenant "+tenant, l.bound.Tenant
	case full(l.total, l.bound.Total):
		who, may = "this server", l.bound.Total
	}
	if who != "" {
		e := sandboxer.E(sandboxer.Exhausted, nil, "%s has %d %s at once, which is the maximum", who, may, l.what)
		e.RetryAfter = time.Second
		return nil, e.WithHint("try again when one has ended")
	}
	l.total++
	l.keys[key]++
	l.tenants[tenant]++
	if sandbox != "" {
		l.sandboxes[sandbox]++
	}
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.total--
		decrement(l.keys, key)
		decrement(l.tenants, tenant)
		if sandbox != "" {
			decrement(l.sandboxes, sandbox)
		}
	}), nil
}

// Of is the number of operations in progress on account of a tenant.
func (l *Limiter) Of(tenant string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tenants[tenant]
}

func decrement(m map[string]int, k string) {
	if m[k]--; m[k] <= 0 {
		delete(m, k)
	}
}

// A command needs about seven of the broker's file descriptors, a stream two.
const (
	execDescriptors   = 7
	streamDescriptors = 2
	mostExecs         = 512
	mostStreams       = 512
)

// DefaultExecs and DefaultStreams are chosen so that a process with nofile file descriptors does not run out of them, and a
// process with 256 MiB not out of memory. With 1,024 descriptors one user can have a hundred of each.
func DefaultExecs(nofile int) AtOnce {
	return Shares(min(max(nofile*3/4/execDescriptors, 16), mostExecs))
}

// DefaultStreams is for streams what DefaultExecs is for commands.
func DefaultStreams(nofile int) AtOnce {
	return Shares(min(64+nofile/16, mostStreams))
}

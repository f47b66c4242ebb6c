package manager

import (
	"sync"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// AtOnce bounds how much of one kind goes on at once. What a field leaves 0 is not
// bounded.
type AtOnce struct {
	Sandbox int // in one sandbox
	Key     int // for one API key or user
	Tenant  int // for all keys of one tenant
	Total   int // for everybody
}

// Shares bounds one kind to total, of which a sixteenth is kept for other tenants than
// the one that uses most.
func Shares(total int) AtOnce {
	most := max(total-total/16, 1)
	return AtOnce{Sandbox: most, Key: most, Tenant: most, Total: total}
}

// usage counts what goes on of one kind, such as commands. Whoever wants more than there
// may be is refused at once: nobody queues.
type usage struct {
	what  string // plural, for messages
	bound AtOnce
	quota func(tenant string) (most int64, bounded bool) // nil: there is none

	mu        sync.Mutex
	total     int
	sandboxes map[string]int
	keys      map[string]int
	tenants   map[string]int
}

func newUsage(what string, bound AtOnce) *usage {
	return &usage{what: what, bound: bound, sandboxes: map[string]int{}, keys: map[string]int{}, tenants: map[string]int{}}
}

// begin counts one more, in a sandbox ("" if in none), for p, on account of tenant.
// Exhausted: there are as many as there may be.
func (u *usage) begin(sandbox, tenant string, p sandboxer.Principal) (end func(), _ error) {
	key := p.Actor + "\x00" + p.Tenant
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.quota != nil {
		if most, bounded := u.quota(tenant); bounded && int64(u.tenants[tenant]) >= most {
			return nil, sandboxer.OverQuota(tenant, sandboxer.QuotaExecs, int64(u.tenants[tenant]), most, 0)
		}
	}
	full := func(have, may int) bool { return may > 0 && have >= may }
	var who string
	var may int
	switch {
	case sandbox != "" && full(u.sandboxes[sandbox], u.bound.Sandbox):
		who, may = "sandbox "+sandbox, u.bound.Sandbox
	case full(u.keys[key], u.bound.Key):
		who, may = p.Actor, u.bound.Key
	case full(u.tenants[tenant], u.bound.Tenant):
		who, may = "tenant "+tenant, u.bound.Tenant
	case full(u.total, u.bound.Total):
		who, may = "this server", u.bound.Total
	}
	if who != "" {
		e := sandboxer.E(sandboxer.Exhausted, nil, "%s has %d %s at once, as many as there may be", who, may, u.what)
		e.RetryAfter = time.Second
		return nil, e.WithHint("try again when one has ended")
	}
	u.total++
	u.keys[key]++
	u.tenants[tenant]++
	if sandbox != "" {
		u.sandboxes[sandbox]++
	}
	return sync.OnceFunc(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.total--
		less(u.keys, key)
		less(u.tenants, tenant)
		if sandbox != "" {
			less(u.sandboxes, sandbox)
		}
	}), nil
}

// of is how many go on on account of a tenant.
func (u *usage) of(tenant string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.tenants[tenant]
}

func less(m map[string]int, k string) {
	if m[k]--; m[k] <= 0 {
		delete(m, k)
	}
}

// Descriptors is how many file descriptors this process may have.
func Descriptors() int {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return 1024
	}
	return int(min(uint64(r.Cur), 1<<20))
}

// A command needs about seven of the broker's file descriptors, a stream two.
const (
	execDescriptors   = 7
	streamDescriptors = 2
	mostExecs         = 512
	mostStreams       = 512
)

// defaultExecs and defaultStreams are chosen so that a process that may have nofile file
// descriptors does not run out of them, and one of 256 MiB not of memory; with 1,024 there
// are a hundred of each for one user.
func defaultExecs(nofile int) AtOnce {
	return Shares(min(max(nofile*3/4/execDescriptors, 16), mostExecs))
}

func defaultStreams(nofile int) AtOnce {
	return Shares(min(64+nofile/16, mostStreams))
}

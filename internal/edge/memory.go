package edge

import (
	"context"
	"io"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// How much of callers' data may wait in memory at once: bodies in JSON, input that a
// command has not read, output that is answered in one piece.
const (
	mostWaiting       = 64 << 20
	mostWaitingTenant = mostWaiting * 3 / 4
	mostWaitingKey    = mostWaiting / 2
)

// memory accounts for callers' data in memory.
type memory struct {
	mu      sync.Mutex
	total   int
	keys    map[string]int
	tenants map[string]int
}

func newMemory() *memory { return &memory{keys: map[string]int{}, tenants: map[string]int{}} }

// take accounts for n bytes of p, and reports whether there is room for them.
func (m *memory) take(p sandboxer.Principal, n int) bool {
	key := p.Actor + "\x00" + p.Tenant
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.total+n > mostWaiting || m.keys[key]+n > mostWaitingKey || m.tenants[p.Tenant]+n > mostWaitingTenant {
		return false
	}
	m.total += n
	m.keys[key] += n
	m.tenants[p.Tenant] += n
	return true
}

func (m *memory) give(p sandboxer.Principal, n int) {
	key := p.Actor + "\x00" + p.Tenant
	m.mu.Lock()
	defer m.mu.Unlock()
	m.total -= n
	if m.keys[key] -= n; m.keys[key] <= 0 {
		delete(m.keys, key)
	}
	if m.tenants[p.Tenant] -= n; m.tenants[p.Tenant] <= 0 {
		delete(m.tenants, p.Tenant)
	}
}

// Held is what one request holds of the memory. A nil one accounts for nothing.
type Held struct {
	of *memory
	p  sandboxer.Principal

	mu   sync.Mutex
	n    int
	over bool
}

// Hold begins to account for callers' data in memory that belongs to the request of ctx,
// on behalf of who makes it. What it grows to is given back at the end of the request.
func Hold(ctx context.Context) *Held {
	c := callOf(ctx)
	h := &Held{of: c.edge.memory, p: sandboxer.PrincipalFrom(ctx)}
	c.holds = append(c.holds, h)
	return h
}

// Grow makes sure that the request holds n bytes at least. Exhausted: there is no room
// for them.
func (h *Held) Grow(n int) error {
	if h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if n <= h.n {
		return nil
	}
	if more := n - h.n; h.over || !h.of.take(h.p, more) {
		return exhausted("too much of what you sent, or are to be sent, waits in the server's memory already")
	}
	h.n = n
	return nil
}

// Reader accounts for what is read from r, all of which is kept.
func (h *Held) Reader(r io.Reader) io.Reader { return &metered{r: r, room: h} }

type metered struct {
	r    io.Reader
	room *Held
	n    int
}

func (m *metered) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	m.n += n
	if err := m.room.Grow(m.n); err != nil {
		return 0, err
	}
	return n, err
}

// end gives everything back.
func (h *Held) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = true
	h.of.give(h.p, h.n)
	h.n = 0
}

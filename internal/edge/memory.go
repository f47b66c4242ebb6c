package edge

import (
	"context"
	"io"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// The bounds of callers' data that wait in memory at once: bodies in JSON, input that a
// command has not read, output that is answered in one piece.
const (
	maxReserved       = 64 << 20
	maxReservedTenant = maxReserved * 3 / 4
	maxReservedKey    = maxReserved / 2
)

// memory accounts for callers' data in memory.
type memory struct {
	mu      sync.Mutex
	total   int
	keys    map[string]int
	tenants map[string]int
}

func newMemory() *memory { return &memory{keys: map[string]int{}, tenants: map[string]int{}} }

// reserve accounts for n bytes of p, and reports whether there is room for them.
func (m *memory) reserve(p sandboxer.Principal, n int) bool {
	key := p.Actor + "\x00" + p.Tenant
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.total+n > maxReserved || m.keys[key]+n > maxReservedKey || m.tenants[p.Tenant]+n > maxReservedTenant {
		return false
	}
	m.total += n
	m.keys[key] += n
	m.tenants[p.Tenant] += n
	return true
}

func (m *memory) release(p sandboxer.Principal, n int) {
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

// MemoryReservation is the memory that one request has reserved. A nil one accounts for nothing.
type MemoryReservation struct {
	of *memory
	p  sandboxer.Principal

	mu    sync.Mutex
	n     int
	ended bool
}

// ReserveMemory begins to account for callers' data in memory that belongs to the request of ctx,
// on behalf of its principal. At the end of the request the reservation is released.
func ReserveMemory(ctx context.Context) *MemoryReservation {
	c := callOf(ctx)
	h := &MemoryReservation{of: c.edge.memory, p: sandboxer.PrincipalFrom(ctx)}
	c.reservations = append(c.reservations, h)
	return h
}

// Grow makes sure that the request has reserved n bytes at least. Exhausted: there is no room
// for them.
func (h *MemoryReservation) Grow(n int) error {
	if h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if n <= h.n {
		return nil
	}
	if more := n - h.n; h.ended || !h.of.reserve(h.p, more) {
		return exhausted("too much of your data waits in the server's memory already")
	}
	h.n = n
	return nil
}

// Reader accounts for what is read from r, if the caller keeps all of it.
func (h *MemoryReservation) Reader(r io.Reader) io.Reader {
	return &reservedReader{r: r, reservation: h}
}

type reservedReader struct {
	r           io.Reader
	reservation *MemoryReservation
	n           int
}

func (m *reservedReader) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	m.n += n
	if err := m.reservation.Grow(m.n); err != nil {
		return 0, err
	}
	return n, err
}

// release gives everything back.
func (h *MemoryReservation) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ended = true
	h.of.release(h.p, h.n)
	h.n = 0
}

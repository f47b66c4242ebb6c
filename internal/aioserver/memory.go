package aioserver

import (
	"fmt"
	"strings"
	"sync"
	"unicode/utf8"
)

// How much of callers' data is kept in memory: outputs of commands, bodies, contents of files that
// are worked on.
const (
	maxMemory        = 256 << 20
	maxMemoryTenant  = 64 << 20
	maxMemorySandbox = 24 << 20
)

// account is whose memory it is.
type account struct{ tenant, sandbox string }

// memory accounts for callers' data.
type memory struct {
	mu        sync.Mutex
	total     int
	tenants   map[string]int
	sandboxes map[string]int
}

func newMemory() *memory { return &memory{tenants: map[string]int{}, sandboxes: map[string]int{}} }

// grow accounts for n more bytes, and reports whether there is room for them.
func (m *memory) grow(a account, n int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.total+n > maxMemory || m.tenants[a.tenant]+n > maxMemoryTenant || m.sandboxes[a.sandbox]+n > maxMemorySandbox {
		return false
	}
	m.total += n
	m.tenants[a.tenant] += n
	m.sandboxes[a.sandbox] += n
	return true
}

func (m *memory) shrink(a account, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.total -= n
	if m.tenants[a.tenant] -= n; m.tenants[a.tenant] <= 0 {
		delete(m.tenants, a.tenant)
	}
	if m.sandboxes[a.sandbox] -= n; m.sandboxes[a.sandbox] <= 0 {
		delete(m.sandboxes, a.sandbox)
	}
}

// maxHead and maxTail are how much of the beginning and of the end of an output is kept.
const (
	maxHead = 1 << 20
	maxTail = 1 << 20
)

// output keeps the beginning and the end of what a command writes, and takes all of it.
type output struct {
	memory  *memory
	who     account
	written func() // after each piece

	mu       sync.Mutex
	head     []byte
	tail     []byte // a ring once it does not grow any more
	next     int    // in tail, where the next byte goes
	full     bool   // tail does not grow any more
	total    int64
	changed  chan struct{} // closed by the next write, or the end
	released bool
}

func newOutput(m *memory, who account, written func()) *output {
	return &output{memory: m, who: who, written: written, changed: make(chan struct{})}
}

func (o *output) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	o.mu.Lock()
	n := len(p)
	o.total += int64(n)
	if len(o.tail) == 0 && !o.full { // nothing came after the head
		k := min(len(p), maxHead-len(o.head))
		if o.released || !o.memory.grow(o.who, k) {
			k, o.full = 0, true
		}
		o.head = append(o.head, p[:k]...)
		p = p[k:]
	}
	if !o.full {
		k := min(len(p), maxTail-len(o.tail))
		if o.released || !o.memory.grow(o.who, k) {
			k = 0
		}
		o.tail = append(o.tail, p[:k]...)
		o.full = len(o.tail) == maxTail || k < len(p)
		p = p[k:]
	}
	if size := len(o.tail); size > 0 && len(p) > 0 {
		if len(p) > size { // what of it is overwritten at once
			skip := len(p) - size
			o.next = (o.next + skip) % size
			p = p[skip:]
		}
		k := copy(o.tail[o.next:], p)
		copy(o.tail, p[k:])
		o.next = (o.next + len(p)) % size
	}
	close(o.changed)
	o.changed = make(chan struct{})
	o.mu.Unlock()
	o.written()
	return n, nil
}

// wait returns a channel that is closed when more than from bytes were written, or wake was called.
func (o *output) wait(from int64) <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.total > from {
		c := make(chan struct{})
		close(c)
		return c
	}
	return o.changed
}

// since returns what is kept of the output from a place on, and the place after it. What is not
// kept is left out, and said to be. Of a command that goes on a character that is cut is left
// for the next time.
func (o *output) since(from int64, running bool) (string, int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	from = min(max(from, 0), o.total)
	tailAt := o.total - int64(len(o.tail))
	var b strings.Builder
	if from < int64(len(o.head)) {
		b.Write(o.head[from:])
		from = int64(len(o.head))
	}
	if gap := tailAt - from; gap > 0 {
		fmt.Fprintf(&b, "\n[… %d bytes were not kept …]\n", gap)
		from = tailAt
	}
	ordered := append(append([]byte(nil), o.tail[o.next:]...), o.tail[:o.next]...)
	if from < o.total {
		b.Write(ordered[from-tailAt:])
	}
	s, next := b.String(), o.total
	if running {
		for i := 1; i < utf8.UTFMax && i <= len(s); i++ {
			if last := s[len(s)-i]; utf8.RuneStart(last) {
				if !utf8.FullRuneInString(s[len(s)-i:]) {
					s, next = s[:len(s)-i], next-int64(i)
				}
				break
			}
		}
	}
	return strings.ToValidUTF8(s, string(utf8.RuneError)), next
}

// release gives up what is kept.
func (o *output) release() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.memory.shrink(o.who, len(o.head)+len(o.tail))
	o.head, o.tail, o.next, o.full, o.released = nil, nil, 0, true, true
}

// shorten leaves characters out in the middle of s, so that at most most are left.
func shorten(s string, most int) string {
	n := utf8.RuneCountInString(s)
	if n <= most {
		return s
	}
	marker := fmt.Sprintf("\n[… %d characters are left out …]\n", n)
	room := most - utf8.RuneCountInString(marker)
	if room < 2 {
		return firstRunes(s, most)
	}
	head := firstRunes(s, room/2)
	tail := s[len(firstRunes(s, n-(room-room/2))):]
	return head + fmt.Sprintf("\n[… %d characters are left out …]\n", n-room) + tail
}

// firstRunes returns the first n characters of s, which has as many.
func firstRunes(s string, n int) string {
	i := 0
	for range n {
		_, k := utf8.DecodeRuneInString(s[i:])
		i += k
	}
	return s[:i]
}

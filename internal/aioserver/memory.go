package aioserver

import (
	"fmt"
	"strings"
	"sync"
	"unicode/utf8"
)

// The bounds of callers' data in memory: outputs of commands, bodies, answers, contents of files that
// are worked on. All of it is released at the end of its request.
const (
	maxMemory        = 256 << 20
	maxMemoryTenant  = 64 << 20
	maxMemorySandbox = 24 << 20
)

// account says whose memory it is.
type account struct{ tenant, sandbox string }

// purpose says what memory is for.
type purpose int

const (
	forRequests purpose = iota
	forOutputs          // of commands: at most half of each bound, so that requests find room while commands run
	purposes
)

type use [purposes]int

func (u use) sum() int { return u[forRequests] + u[forOutputs] }

// memory accounts for callers' data. Its lock is taken last.
type memory struct {
	mu        sync.Mutex
	all       use
	tenants   map[string]use
	sandboxes map[string]use
}

func newMemory() *memory {
	return &memory{tenants: map[string]use{}, sandboxes: map[string]use{}}
}

// grow accounts for n more bytes, and reports whether there is room for them.
func (m *memory) grow(a account, p purpose, n int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range []struct {
		used use
		most int
	}{{m.sandboxes[a.sandbox], maxMemorySandbox}, {m.tenants[a.tenant], maxMemoryTenant}, {m.all, maxMemory}} {
		if b.used.sum()+n > b.most || p == forOutputs && b.used[p]+n > b.most/2 {
			return false
		}
	}
	m.add(a, p, n)
	return true
}

func (m *memory) shrink(a account, p purpose, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.add(a, p, -n)
}

func (m *memory) add(a account, p purpose, n int) {
	m.all[p] += n
	for _, of := range []struct {
		uses map[string]use
		who  string
	}{{m.tenants, a.tenant}, {m.sandboxes, a.sandbox}} {
		u := of.uses[of.who]
		if u[p] += n; u == (use{}) {
			delete(of.uses, of.who)
		} else {
			of.uses[of.who] = u
		}
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

	mu    sync.Mutex
	head  []byte
	tail  []byte // a ring once it does not grow any more
	next  int    // in tail, where the next byte goes
	full  bool   // tail does not grow any more
	total int64
}

func newOutput(m *memory, who account, written func()) *output {
	return &output{memory: m, who: who, written: written}
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
		if !o.memory.grow(o.who, forOutputs, k) {
			k, o.full = 0, true
		}
		o.head = append(o.head, p[:k]...)
		p = p[k:]
	}
	if !o.full {
		k := min(len(p), maxTail-len(o.tail))
		if !o.memory.grow(o.who, forOutputs, k) {
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
	o.mu.Unlock()
	o.written()
	return n, nil
}

// text returns what is kept of the output, and how long all of it was. A line says what is left out.
func (o *output) text() (string, int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	var b strings.Builder
	b.Write(o.head)
	if gap := o.total - int64(len(o.head)+len(o.tail)); gap > 0 {
		fmt.Fprintf(&b, "\n[… %d bytes were not kept …]\n", gap)
	}
	b.Write(o.tail[o.next:])
	b.Write(o.tail[:o.next])
	return strings.ToValidUTF8(b.String(), string(utf8.RuneError)), o.total
}

// release drops what is kept. Later output is not kept.
func (o *output) release() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.memory.shrink(o.who, forOutputs, len(o.head)+len(o.tail))
	o.head, o.tail, o.next, o.full = nil, nil, 0, true
}

// printed is the output of a small script of ours, up to its bound. It is not accounted for: the script has to work
// even for a caller whose room is full.
type printed struct {
	most int

	mu sync.Mutex
	b  []byte
}

// maxPrinted bounds the output of such a script.
const maxPrinted = 64 << 10

func (p *printed) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.b = append(p.b, b[:min(len(b), p.most-len(p.b))]...)
	return len(b), nil
}

func (p *printed) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.ToValidUTF8(string(p.b), string(utf8.RuneError))
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

// firstRunes returns the first n characters of s, which has at least n.
func firstRunes(s string, n int) string {
	i := 0
	for range n {
		_, k := utf8.DecodeRuneInString(s[i:])
		i += k
	}
	return s[:i]
}

package aioserver

import (
	"container/list"
	"fmt"
	"strings"
	"sync"
	"unicode/utf8"
)

// How much of callers' data is in memory: outputs of commands, bodies, answers, contents of files that
// are worked on.
const (
	maxMemory        = 256 << 20
	maxMemoryTenant  = 64 << 20
	maxMemorySandbox = 24 << 20
)

// account is whose memory it is.
type account struct{ tenant, sandbox string }

// purpose is what memory is for.
type purpose int

const (
	forRequests purpose = iota // until they are answered
	forOutputs
	forTexts // of commands, and their inputs
	forEdits
	purposes
)

// eighths is how much of each bound there may be for a purpose: what is kept after a request leaves
// room for the next one.
var eighths = [purposes]int{forRequests: 8, forOutputs: 4, forTexts: 1, forEdits: 1}

type use [purposes]int

func (u use) sum() (n int) {
	for _, k := range u {
		n += k
	}
	return n
}

// memory accounts for callers' data. Its lock is taken last.
type memory struct {
	mu        sync.Mutex
	all       use
	tenants   map[string]use
	sandboxes map[string]use
	idle      *list.List // of *output: what makes room, oldest first
}

func newMemory() *memory {
	return &memory{tenants: map[string]use{}, sandboxes: map[string]use{}, idle: list.New()}
}

// grow accounts for n more bytes, and reports whether there is room for them. Idle outputs make room.
func (m *memory) grow(a account, p purpose, n int) bool {
	m.mu.Lock()
	for {
		ok, helps := m.fits(a, p, n)
		if ok {
			m.add(a, p, n)
		}
		var victim *output
		for e := m.idle.Front(); !ok && helps != nil && e != nil && victim == nil; e = e.Next() {
			if o := e.Value.(*output); helps(o) {
				victim = o
				m.idle.Remove(e)
				o.place = nil
			}
		}
		if victim == nil {
			m.mu.Unlock()
			return ok
		}
		m.mu.Unlock()
		victim.evict()
		m.mu.Lock()
	}
}

// fits reports whether n more bytes fit, and if they do not which idle outputs take their room. nil: none does.
func (m *memory) fits(a account, p purpose, n int) (bool, func(*output) bool) {
	for _, b := range []struct {
		used use
		most int
		has  func(*output) bool
	}{
		{m.sandboxes[a.sandbox], maxMemorySandbox, func(o *output) bool { return o.who.sandbox == a.sandbox }},
		{m.tenants[a.tenant], maxMemoryTenant, func(o *output) bool { return o.who.tenant == a.tenant }},
		{m.all, maxMemory, func(*output) bool { return true }},
	} {
		share := b.most * eighths[p] / 8
		switch {
		case n > share:
			return false, nil
		case b.used[p]+n > share && p != forRequests:
			return false, func(o *output) bool { return b.has(o) && o.idle[p] > 0 }
		case b.used.sum()+n > b.most:
			return false, func(o *output) bool { return b.has(o) && o.idle.sum() > 0 }
		}
	}
	return true, nil
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

	mu       sync.Mutex
	head     []byte
	tail     []byte // a ring once it does not grow any more
	next     int    // in tail, where the next byte goes
	full     bool   // tail does not grow any more
	total    int64
	changed  chan struct{} // closed by the next write, or the end
	released bool          // nothing more is kept
	text     string        // of the command
	texts    int           // bytes that are accounted for it

	// memory.mu guards these.
	place *list.Element // in memory.idle
	idle  use           // what it gives up there
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
		if o.released || !o.memory.grow(o.who, forOutputs, k) {
			k, o.full = 0, true
		}
		o.head = append(o.head, p[:k]...)
		p = p[k:]
	}
	if !o.full {
		k := min(len(p), maxTail-len(o.tail))
		if o.released || !o.memory.grow(o.who, forOutputs, k) {
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

// keepText has the text of the command kept with its output, if there is room for it.
func (o *output) keepText(text string) bool {
	if !o.memory.grow(o.who, forTexts, len(text)) {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text, o.texts = text, len(text)
	return true
}

func (o *output) command() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text
}

// rest says that the command has ended and nobody is about to answer the output: it makes room if others need that.
func (o *output) rest() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.released = true // a late write would wait for itself
	m := o.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	o.idle = use{forOutputs: len(o.head) + len(o.tail)}
	if o.texts > maxStub {
		o.idle[forTexts] = o.texts
	}
	if o.place == nil && o.idle.sum() > 0 {
		o.place = m.idle.PushBack(o)
	}
}

// wake takes rest back.
func (o *output) wake() {
	m := o.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	if o.place != nil {
		m.idle.Remove(o.place)
		o.place = nil
	}
}

// maxStub is how much is kept of the text of a command whose output has made room.
const maxStub = 1 << 10

// evict gives up an output that is at rest, and most of a long text.
func (o *output) evict() {
	o.mu.Lock()
	defer o.mu.Unlock()
	text := o.text
	if len(text) > maxStub {
		text = strings.ToValidUTF8(text[:maxStub], "") + "\n[…]"
	}
	n := min(o.texts, maxStub)
	texts := o.texts
	o.give()
	o.text, o.texts = strings.Clone(text), n
	o.memory.shrink(o.who, forTexts, texts-n)
}

// give gives up what is kept of the output, with o.mu held.
func (o *output) give() {
	o.memory.shrink(o.who, forOutputs, len(o.head)+len(o.tail))
	o.head, o.tail, o.next, o.full, o.released = nil, nil, 0, true, true
}

// release gives up what is kept.
func (o *output) release() {
	o.wake()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.give()
	o.memory.shrink(o.who, forTexts, o.texts)
	o.text, o.texts = "", 0
}

// printed is what a small script of ours prints, up to its bound. It is not accounted for: the script has to work
// also for a caller whose room is full.
type printed struct {
	most int

	mu sync.Mutex
	b  []byte
}

// maxPrinted is what they print at most.
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

// firstRunes returns the first n characters of s, which has as many.
func firstRunes(s string, n int) string {
	i := 0
	for range n {
		_, k := utf8.DecodeRuneInString(s[i:])
		i += k
	}
	return s[:i]
}

package agent

import (
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A pacer notices a program that writes much in small pieces. Forwarding each piece at
// once would cost more than the data itself; instead the pipe is enlarged, and read
// after a pause that lets it fill.
type pacer struct {
	since time.Time
	bytes int
	grown bool
	bulk  bool
}

const (
	bulkWindow = 10 * time.Millisecond
	bulkBytes  = 256 << 10 // within a window
	bulkPause  = 500 * time.Microsecond
)

// wants counts a read that emptied the pipe, n bytes, and reports, once, that the pipe should grow.
func (p *pacer) wants(n int, now time.Time) bool {
	if p.bulk {
		p.bulk = n >= 32<<10
		p.since, p.bytes = now, 0
		return false
	}
	if now.Sub(p.since) > bulkWindow {
		p.since, p.bytes = now, 0
	}
	p.bytes += n
	if p.bytes < bulkBytes {
		return false
	}
	p.bulk = true
	grow := !p.grown
	p.grown = true
	return grow
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// A subscriber reads the output of a process at its own pace.
type subscriber struct {
	p       *process
	pos     uint64
	dropped bool
	notify  chan struct{}
}

// subscribe attaches a reader: to output from now on, or with replay also to what is
// still kept.
func (p *process) subscribe(replay bool) *subscriber {
	s := &subscriber{p: p, notify: make(chan struct{}, 1)}
	p.mu.Lock()
	defer p.mu.Unlock()
	s.pos = p.out.end
	if replay {
		s.pos = p.out.base
	}
	p.subs[s] = struct{}{}
	notify(s.notify)
	notify(p.room) // a waiting pump must now obey the stall limit
	return s
}

func (s *subscriber) close() {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	delete(s.p.subs, s)
	notify(s.p.room)
}

var errTooSlow = sandboxer.E(sandboxer.Exhausted, nil, "this reader was too slow: others waited for it")

// next copies the next run of output into buf. With n == 0 there is none now: wait on
// s.notify, unless end says that none will come.
func (s *subscriber) next(buf []byte) (n int, src stream, end bool, err error) {
	p := s.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.dropped {
		return 0, 0, false, errTooSlow
	}
	if s.pos < p.out.end {
		n, src = p.out.read(s.pos, buf)
		s.pos += uint64(n)
		if p.blocked > 0 {
			notify(p.room)
		}
		return n, src, false, nil
	}
	return 0, 0, p.ended, nil
}

package agent

// A stream tells where a piece of output came from.
type stream uint8

const (
	stdout stream = iota
	stderr
	terminal
)

// A ring keeps the newest output of one process, at most max bytes of it, in the
// order in which it was read, with the stream of every piece. Positions count bytes
// since the process began and never wrap. It is not safe for concurrent use.
type ring struct {
	buf  []byte // grows up to max
	max  int
	base uint64 // position of the oldest byte kept
	end  uint64 // position after the newest byte
	segs []segment
}

// A segment is a run of bytes of one stream, up to position end; it begins at the end
// of the previous one.
type segment struct {
	end uint64
	src stream
}

const (
	ringFirst   = 4 << 10
	maxSegments = 8 << 10 // bounds the cost of output that alternates between streams
)

// space returns room for the next bytes: contiguous, and before anything at or after
// pinned. It is empty when everything that is kept is pinned.
func (r *ring) space(pinned uint64) []byte {
	if used := r.end - r.base; used == uint64(len(r.buf)) && len(r.buf) < r.max {
		r.grow()
	}
	if len(r.segs) >= maxSegments && pinned < r.segs[0].end {
		return nil
	}
	if pinned < r.base {
		pinned = r.base
	}
	free := uint64(len(r.buf)) - (r.end - pinned)
	at := r.end % uint64(len(r.buf))
	return r.buf[at:min(at+free, uint64(len(r.buf)))]
}

func (r *ring) grow() {
	n := min(max(4*len(r.buf), ringFirst), r.max)
	buf := make([]byte, n)
	for p := r.base; p < r.end; {
		c := r.at(p, r.end)
		at := p % uint64(n)
		k := copy(buf[at:], c)
		p += uint64(k)
	}
	r.buf = buf
}

// at returns the contiguous kept bytes from position p, at most to position end.
func (r *ring) at(p, end uint64) []byte {
	i := p % uint64(len(r.buf))
	return r.buf[i:min(i+end-p, uint64(len(r.buf)))]
}

// commit adds the first n bytes of what space returned.
func (r *ring) commit(n int, src stream) {
	r.end += uint64(n)
	if k := len(r.segs); k > 0 && r.segs[k-1].src == src {
		r.segs[k-1].end = r.end
	} else {
		r.segs = append(r.segs, segment{r.end, src})
	}
	if r.end-r.base > uint64(len(r.buf)) {
		r.base = r.end - uint64(len(r.buf))
	}
	drop := 0
	for drop < len(r.segs)-1 && (r.segs[drop].end <= r.base || len(r.segs)-drop > maxSegments) {
		r.base = max(r.base, r.segs[drop].end)
		drop++
	}
	if drop > 0 {
		r.segs = append(r.segs[:0], r.segs[drop:]...)
	}
}

// read copies output from position p into dst: a run of one stream. It returns the
// length and the stream.
func (r *ring) read(p uint64, dst []byte) (int, stream) {
	lo, hi := 0, len(r.segs)
	for lo < hi { // the first segment that ends after p
		if m := (lo + hi) / 2; r.segs[m].end <= p {
			lo = m + 1
		} else {
			hi = m
		}
	}
	if lo == len(r.segs) {
		return 0, stdout
	}
	n := 0
	for s := r.segs[lo]; n < len(dst) && p < s.end; {
		k := copy(dst[n:], r.at(p, s.end))
		n += k
		p += uint64(k)
	}
	return n, r.segs[lo].src
}

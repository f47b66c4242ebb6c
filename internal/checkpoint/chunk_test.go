package checkpoint

import (
	"math/rand/v2"
	"testing"
)

// TestCut compares where a cutter cuts with the definition, a byte at a time, at the end
// of the stream too.
func TestCut(t *testing.T) {
	src := rand.NewChaCha8([32]byte{1})
	r := rand.New(src)
	for _, normal := range []int{256, manifestChunk, chunkSize} {
		c := newCutter(normal)
		byTheBook := func(p []byte) int {
			var h uint64
			for i := c.least; i < min(len(p), c.most); i++ {
				condition := c.hard
				if i >= c.normal {
					condition = c.easy
				}
				if h = h<<1 + c.gear[p[i]]; h&condition == 0 {
					return i + 1
				}
			}
			return min(len(p), c.most)
		}
		data := make([]byte, 200*normal+r.IntN(normal))
		_, _ = src.Read(data[:len(data)*3/4]) // and zeros
		early, late := 0, 0
		for p := data; len(p) > 0; {
			n := c.cut(p)
			if want := byTheBook(p); n != want {
				t.Fatalf("%d: cut after %d bytes instead of %d, %d before the end", normal, n, want, len(p))
			}
			switch {
			case n <= c.normal:
				early++
			case n < c.most:
				late++
			}
			p = p[n:]
		}
		if early < 5 || late < 20 {
			t.Errorf("%d: %d cuts before and %d after the normal size: this compares little", normal, early, late)
		}
	}
}

package agent

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"
)

// TestRing compares the ring with the plain list of everything that was written.
func TestRing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := ring{max: rapid.SampledFrom([]int{4 << 10, 5000, 16 << 10}).Draw(t, "max")}
		var all []byte
		var srcs []stream
		pinned, next := uint64(0), byte(0)
		reading := rapid.Bool().Draw(t, "reading")
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			if !reading {
				pinned = r.end
			}
			switch rapid.IntRange(0, 2).Draw(t, "step") {
			case 0, 1:
				dst := r.space(pinned)
				if len(dst) == 0 {
					if !reading || int(r.end-pinned) < r.max {
						t.Fatalf("no space with %d bytes pinned of %d", r.end-pinned, r.max)
					}
					continue
				}
				n := min(rapid.IntRange(1, 3000).Draw(t, "n"), len(dst))
				src := stream(rapid.IntRange(0, 1).Draw(t, "src"))
				for i := range n {
					dst[i] = next
					all, srcs = append(all, next), append(srcs, src)
					next += 7
				}
				r.commit(n, src)
			case 2:
				buf := make([]byte, rapid.IntRange(1, 5000).Draw(t, "buf"))
				from := max(pinned, r.base)
				if reading && from != pinned {
					t.Fatalf("position %d was pinned, and is gone: the ring begins at %d", pinned, r.base)
				}
				n, src := r.read(from, buf)
				if n == 0 && from < r.end {
					t.Fatalf("nothing at %d of [%d, %d)", from, r.base, r.end)
				}
				if !bytes.Equal(buf[:n], all[from:from+uint64(n)]) {
					t.Fatalf("other bytes at %d", from)
				}
				for i := range n {
					if srcs[from+uint64(i)] != src {
						t.Fatalf("byte %d is said to be of stream %d", from+uint64(i), src)
					}
				}
				pinned = from + uint64(n)
			}
			if r.end != uint64(len(all)) || r.end-r.base > uint64(r.max) {
				t.Fatalf("keeps [%d, %d) of %d with room for %d", r.base, r.end, len(all), r.max)
			}
		}
	})
}

// TestRingAlternating bounds the cost of many tiny pieces.
func TestRingAlternating(t *testing.T) {
	r := ring{max: 1 << 20}
	for i := range 100_000 {
		dst := r.space(r.end)
		dst[0] = byte(i)
		r.commit(1, stream(i%2))
	}
	if len(r.segs) > maxSegments {
		t.Errorf("%d segments", len(r.segs))
	}
	if kept := r.end - r.base; kept != maxSegments {
		t.Errorf("keeps %d bytes; want %d", kept, maxSegments)
	}
	pinned := r.base
	for i := 0; ; i++ {
		dst := r.space(pinned)
		if len(dst) == 0 {
			break
		}
		if i > 1 {
			t.Fatal("space goes on over what is pinned")
		}
		r.commit(1, stream(i%2))
	}
}

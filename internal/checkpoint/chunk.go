package checkpoint

import (
	"encoding/binary"
	"math/bits"

	"github.com/zeebo/blake3"
)

// A cutter cuts a stream at positions that depend on its contents, so that equal stretches give equal
// chunks wherever they are: FastCDC with a gear hash, whose condition is harder before
// the normal size and easier after it. The format does not depend on where it cuts.
type cutter struct {
	least, normal, most int
	hard, easy          uint64
	gear                [256]uint64
}

// newCutter cuts into chunks of normal bytes, a power of two, on average, of half
// of it at least and four times it at most.
func newCutter(normal int) *cutter {
	c := &cutter{least: normal / 2, normal: normal, most: normal * 4}
	n := bits.TrailingZeros(uint(normal))
	// The upper bits of the hash depend on the last 64 bytes, the lower ones on fewer.
	c.hard = ^uint64(0) << (64 - n - 2)
	c.easy = ^uint64(0) << (64 - n + 2)
	var table [256 * 8]byte
	blake3.DeriveKey("sandboxer 2026 checkpoint gear table", nil, table[:])
	for i := range c.gear {
		c.gear[i] = binary.LittleEndian.Uint64(table[8*i:])
	}
	return c
}

// cut returns the length of the first chunk of p, which has c.most bytes or ends the
// stream.
func (c *cutter) cut(p []byte) int {
	n := min(len(p), c.most)
	if n <= c.least {
		return n
	}
	i, h, found := c.find(p[:max(c.least, min(n, c.normal))], c.least, 0, c.hard)
	if !found {
		i, _, _ = c.find(p[:n], i, h, c.easy)
	}
	return i
}

// find goes on with hash h at p[i], four bytes a turn, until it meets the condition, and
// returns the position after that byte, or else the end of p and the hash there.
func (c *cutter) find(p []byte, i int, h, condition uint64) (int, uint64, bool) {
	gear := &c.gear
	for ; i+4 <= len(p); i += 4 {
		b := p[i : i+4 : i+4]
		// The values of the bytes do not depend on the hash before them.
		s1 := gear[b[0]]
		s2 := s1<<1 + gear[b[1]]
		s3 := s2<<1 + gear[b[2]]
		s4 := s3<<1 + gear[b[3]]
		if (h<<1+s1)&condition == 0 {
			return i + 1, 0, true
		}
		if (h<<2+s2)&condition == 0 {
			return i + 2, 0, true
		}
		if (h<<3+s3)&condition == 0 {
			return i + 3, 0, true
		}
		if h = h<<4 + s4; h&condition == 0 {
			return i + 4, 0, true
		}
	}
	for ; i < len(p); i++ {
		if h = h<<1 + gear[p[i]]; h&condition == 0 {
			return i + 1, 0, true
		}
	}
	return i, h, false
}

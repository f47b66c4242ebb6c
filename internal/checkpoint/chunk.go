package checkpoint

import (
	"encoding/binary"
	"math/bits"

	"github.com/zeebo/blake3"
)

// A cutter cuts a stream where its contents say so, so that equal stretches give equal
// chunks wherever they are: FastCDC with a gear hash, whose condition is harder before
// the normal size and easier after it. Where it cuts is no part of the format.
type cutter struct {
	least, normal, most int
	hard, easy          uint64
	gear                [256]uint64
}

// newCutter cuts into chunks of normal bytes, a power of two, on the average, of half
// of it at the least and four times it at the most.
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
	var h uint64
	i := c.least
	for _, b := range p[i:max(i, min(n, c.normal))] {
		i++
		if h = h<<1 + c.gear[b]; h&c.hard == 0 {
			return i
		}
	}
	for _, b := range p[i:n] {
		i++
		if h = h<<1 + c.gear[b]; h&c.easy == 0 {
			return i
		}
	}
	return n
}

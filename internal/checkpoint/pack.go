package checkpoint

import (
	"encoding/binary"
	"encoding/hex"

	"github.com/zeebo/blake3"

	"github.com/sand-boxer/sandboxer"
)

// A pack is
//
//	"SBXPACK1"                       8 bytes
//	chunks, one after the other      each zstd, or as it is
//	index                            46 bytes for each chunk
//	footer                           48 bytes
//
// and its index object is "SBXPACK1", the same index and the same footer. Numbers are
// little-endian. An entry of the index is
//
//	id       32 bytes  BLAKE3 of the chunk as it was cut
//	offset    6 bytes  in the pack
//	stored    4 bytes  how many bytes the pack holds of it
//	size      4 bytes  how many it has; equal to stored: as it is, otherwise zstd
//
// and the footer is
//
//	count     8 bytes  of entries
//	digest   32 bytes  BLAKE3 of the index
//	magic     8 bytes  "SBXPACK1"
const (
	packMagic  = "SBXPACK1"
	packEntry  = 46
	packFooter = 48
	// packTarget is the size at which a pack is closed; one chunk may exceed it.
	packTarget = 32 << 20
	// maxPack bounds the size that a pack's index may claim.
	maxPack = 256 << 20
	// maxChunk bounds a chunk.
	maxChunk = 4 << 20
	// maxIndex bounds an index object: one of one-byte chunks would be larger.
	maxIndex = 64 << 20
)

// An id is the BLAKE3 digest of a chunk.
type id [32]byte

func (i id) String() string { return hex.EncodeToString(i[:]) }

// A place says where a chunk is.
type place struct {
	id     id
	offset int64
	stored uint32
	size   uint32
}

// appendIndex appends index and footer.
func appendIndex(b []byte, places []place) []byte {
	start := len(b)
	for _, p := range places {
		b = append(b, p.id[:]...)
		var off [8]byte
		binary.LittleEndian.PutUint64(off[:], uint64(p.offset))
		b = append(b, off[:6]...)
		b = binary.LittleEndian.AppendUint32(b, p.stored)
		b = binary.LittleEndian.AppendUint32(b, p.size)
	}
	sum := blake3.Sum256(b[start:])
	b = binary.LittleEndian.AppendUint64(b, uint64(len(places)))
	b = append(b, sum[:]...)
	return append(b, packMagic...)
}

// parseIndex reads an index object.
func parseIndex(name string, b []byte) ([]place, error) {
	bad := func(why string) ([]place, error) {
		return nil, sandboxer.E(sandboxer.Failed, nil, "the index of pack %s is damaged: %s", name, why).
			WithHint("restore it from a backup of the store; the footer of the pack has a copy")
	}
	if len(b) < len(packMagic)+packFooter || string(b[:8]) != packMagic || string(b[len(b)-8:]) != packMagic {
		return bad("it does not begin and end as one")
	}
	if len(b) > maxIndex {
		return bad("it is too large")
	}
	foot := b[len(b)-packFooter:]
	body := b[len(packMagic) : len(b)-packFooter]
	if count := binary.LittleEndian.Uint64(foot); count != uint64(len(body)/packEntry) || len(body)%packEntry != 0 {
		return bad("it does not have as many entries as it says")
	}
	if sum := blake3.Sum256(body); string(sum[:]) != string(foot[8:40]) {
		return bad("its digest does not fit")
	}
	places := make([]place, 0, len(body)/packEntry)
	end := int64(len(packMagic))
	for ; len(body) > 0; body = body[packEntry:] {
		var off [8]byte
		copy(off[:6], body[32:38])
		p := place{id: id(body[:32]), offset: int64(binary.LittleEndian.Uint64(off[:])),
			stored: binary.LittleEndian.Uint32(body[38:]), size: binary.LittleEndian.Uint32(body[42:])}
		if p.offset != end || p.size == 0 || p.size > maxChunk || p.stored == 0 || p.stored > p.size {
			return bad("an entry is impossible")
		}
		if end += int64(p.stored); end > maxPack {
			return bad("an entry is outside the pack")
		}
		places = append(places, p)
	}
	return places, nil
}

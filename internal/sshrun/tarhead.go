package sshrun

import (
	"archive/tar"
	"bytes"
	"strconv"
	"time"
)

const tarBlock = 512

// A tarHead makes the headers of a tar stream. Package tar's general way takes
// longer than to read a small file; so plain headers are made here.
type tarHead struct {
	buf  []byte
	rest bytes.Buffer
}

// of returns the header of e, whole blocks. It is valid until the next call.
func (h *tarHead) of(name string, e entry) ([]byte, error) {
	full := "./" + name
	kind, size := byte(tar.TypeReg), e.size
	switch e.typ {
	case 'd':
		kind, size, full = tar.TypeDir, 0, full+"/"
	case 'l':
		kind, size = tar.TypeSymlink, 0
	}
	if len(full) > 100 || len(e.target) > 100 || !ascii(full) || !ascii(e.target) || size >= 1<<33 || e.sec < 0 || e.sec >= 1<<33 || e.nsec < 0 || e.nsec >= 1e9 {
		h.rest.Reset()
		// A writer for each, since the data after the header does not pass through it.
		err := tar.NewWriter(&h.rest).WriteHeader(&tar.Header{Typeflag: kind, Name: full, Linkname: e.target, Size: size,
			Mode: int64(e.mode), ModTime: time.Unix(e.sec, e.nsec), Format: tar.FormatPAX})
		return h.rest.Bytes(), err
	}
	h.buf = h.buf[:0]
	if e.nsec != 0 {
		// The only value that a plain header has no room for.
		rec := strconv.AppendInt([]byte("30 mtime="), e.sec, 10)
		rec = append(rec, '.')
		rec = append(rec, strconv.Itoa(1e9 + int(e.nsec))[1:]...)
		rec = append(rec, '\n')
		copy(rec, strconv.Itoa(len(rec)))
		h.block("PaxHeaders", "", tar.TypeXHeader, 0o644, int64(len(rec)), 0)
		h.buf = append(h.buf, rec...)
		h.buf = append(h.buf, make([]byte, tarBlock-len(rec))...)
	}
	h.block(full, e.target, kind, e.mode, size, e.sec)
	return h.buf, nil
}

func (h *tarHead) block(name, link string, kind byte, mode uint32, size, sec int64) {
	var b [tarBlock]byte
	octal := func(field []byte, v int64) {
		for i := len(field) - 2; i >= 0; i-- {
			field[i] = '0' + byte(v&7)
			v >>= 3
		}
	}
	copy(b[0:100], name)
	octal(b[100:108], int64(mode))
	octal(b[108:116], 0)
	octal(b[116:124], 0)
	octal(b[124:136], size)
	octal(b[136:148], sec)
	copy(b[148:156], "        ")
	b[156] = kind
	copy(b[157:257], link)
	copy(b[257:265], "ustar\x0000")
	octal(b[329:337], 0)
	octal(b[337:345], 0)
	sum := int64(0)
	for _, c := range b {
		sum += int64(c)
	}
	octal(b[148:155], sum)
	h.buf = append(h.buf, b[:]...)
}

func ascii(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 || s[i] == 0 {
			return false
		}
	}
	return true
}

package checkpoint

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/safetar"
)

// maxTime is the last second that a tar header can hold: in the year 2242.
const maxTime = 1<<33 - 1

// headerRoom bounds the headers of one entry.
const headerRoom = 4 << 20

// An entry is one entry of an archive that has passed the rules.
type entry struct {
	name     string // clean
	kind     byte   // tar.TypeReg, TypeDir, TypeSymlink or TypeLink
	mode     uint32 // permission bits
	uid, gid int
	mtime    int64
	nsec     int64
	size     int64
	link     string // target of a symbolic link, verbatim; of a hard link: the clean name of the file
	xattrs   map[string]string
	implied  bool // a directory that the archive has no entry for, only entries below it

	listed  bool  // by canonicalise
	spooled int64 // where the contents lie in the spool
}

// A scanner reads an archive and refuses everything that breaks the rules. Entries
// come in the order of the archive. Directories that it only implies come before their
// content.
type scanner struct {
	checker *safetar.Checker
	keep    Keep
	in      *meter
	tr      *tar.Reader
	byName  map[string]*entry
	pending []*entry
	body    io.Reader
	changed Changes
}

func newScanner(ctx context.Context, r io.Reader, rules Rules, keep Keep) *scanner {
	in := &meter{ctx: ctx, r: r, limit: headerRoom}
	return &scanner{checker: safetar.NewChecker(rules), keep: keep, in: in, tr: tar.NewReader(in), byName: map[string]*entry{}}
}

// meter counts what is read, ends when ctx does, and refuses more than limit.
type meter struct {
	ctx   context.Context
	r     io.Reader
	n     int64
	limit int64
	err   error // of r, not an end
}

var errTooMuch = errors.New("more bytes than its entries account for")

func (m *meter) Read(p []byte) (int, error) {
	if m.err == nil {
		m.err = m.ctx.Err()
	}
	if m.err == nil && m.n >= m.limit {
		m.err = errTooMuch
	}
	if m.err != nil {
		return 0, m.err
	}
	n, err := m.r.Read(p[:min(int64(len(p)), m.limit-m.n)])
	m.n += int64(n)
	if err != nil && err != io.EOF {
		m.err = err
	}
	return n, err
}

// fault turns a read error into the error for the caller: the reader's own, or a
// refusal.
func (s *scanner) fault(err error) error {
	switch {
	case errors.Is(s.in.err, errTooMuch):
		return refuse("it has headers of more than %d bytes for one entry", headerRoom)
	case s.in.err != nil:
		return s.in.err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return refuse("it is cut short after %d bytes", s.in.n)
	}
	e := refuse("it is not a proper tar, at byte %d", s.in.n)
	e.Err = err
	return e
}

// next returns the next entry; its contents are s.body, which must be read to the end.
// io.EOF is the proper end.
func (s *scanner) next() (*entry, error) {
	for len(s.pending) == 0 {
		if err := s.read(); err != nil {
			return nil, err
		}
	}
	e := s.pending[0]
	s.pending = s.pending[1:]
	return e, nil
}

// read takes one entry of the archive into pending, or none if it is left out.
func (s *scanner) read() error {
	end := padded(s.in.n) // of the entry before: its contents have been read
	s.in.limit = end + headerRoom
	hdr, err := s.tr.Next()
	if errors.Is(err, tar.ErrInsecurePath) {
		err = nil // the checker says it better
	}
	if err == io.EOF {
		return s.end(end)
	}
	if err != nil {
		return s.fault(err)
	}
	return s.take(hdr)
}

// end is called where the archive says that it ends.
func (s *scanner) end(last int64) error {
	if s.in.n-last != 2*blockSize {
		return refuse("it is cut short after %d bytes: its end marker is missing", s.in.n)
	}
	// tar fills up its last record with zeros. Anything else would be an archive that
	// other programs may see and this one does not.
	s.in.limit = s.in.n + headerRoom
	buf := make([]byte, 32<<10)
	for {
		n, err := s.in.Read(buf)
		if slices.ContainsFunc(buf[:n], func(b byte) bool { return b != 0 }) {
			return refuse("something follows its end")
		}
		if err == io.EOF {
			return io.EOF
		}
		if errors.Is(err, errTooMuch) {
			return refuse("more than %d bytes follow its end", headerRoom)
		}
		if err != nil {
			return s.fault(err)
		}
	}
}

func (s *scanner) take(hdr *tar.Header) error {
	c, err := s.checker.Check(hdr)
	if err != nil {
		var e *sandboxer.Error
		if errors.As(err, &e) && e.Kind == sandboxer.Exhausted { // a checkpoint that is too large is no checkpoint
			over := *e
			over.Kind, err = sandboxer.Invalid, &over
		}
		return err
	}
	for _, dir := range c.Implied {
		s.add(&entry{name: dir, kind: tar.TypeDir, mode: 0o755, implied: true})
	}
	switch {
	case hdr.Typeflag == tar.TypeXGlobalHeader:
		return nil
	case c.Kind == 0:
		s.changed.Skipped++
		return nil
	case c.Again && c.Name == ".":
		return refuse("it has the root twice")
	case c.Again:
		return refuse("%q is in it twice", c.Name)
	case c.Name == ".":
		return nil // its name, mode and time are the target's own
	}
	e := &entry{name: c.Name, kind: c.Kind, mode: uint32(hdr.Mode & 0o777), link: c.Link}
	if e.kind == tar.TypeReg {
		e.size = hdr.Size
	}
	s.attributes(e, hdr)
	if c.Outside {
		s.changed.OutsideLinks++
	}
	if c.Late {
		// The directory is announced again, with what is now known of it.
		old := s.byName[e.name]
		e.listed = old.listed
		*old = *e
		s.pending = append(s.pending, old)
	} else {
		s.add(e)
	}
	s.in.limit = math.MaxInt64 // the body has its own end
	s.body = bodyOf{s}
	return nil
}

func (s *scanner) add(e *entry) {
	s.byName[e.name] = e
	s.pending = append(s.pending, e)
}

// bodyOf reads the contents of the current entry.
type bodyOf struct{ s *scanner }

func (b bodyOf) Read(p []byte) (int, error) {
	n, err := b.s.tr.Read(p)
	if err != nil && err != io.EOF {
		err = b.s.fault(err)
	}
	return n, err
}

// attributes takes over the kept parts of the rest of the header and counts the others.
func (s *scanner) attributes(e *entry, hdr *tar.Header) {
	if e.kind == tar.TypeSymlink {
		e.mode = 0o777
	}
	if hdr.Mode&0o7000 != 0 {
		s.changed.SetID++
	}
	if s.keep.Owners {
		e.uid, e.gid = max(hdr.Uid, 0), max(hdr.Gid, 0)
	}
	e.mtime, e.nsec = hdr.ModTime.Unix(), int64(hdr.ModTime.Nanosecond())
	if e.mtime < 0 || e.mtime > maxTime {
		e.mtime, e.nsec = min(max(e.mtime, 0), maxTime), 0
		s.changed.Times++
	}
	lost := false
	for k, v := range hdr.PAXRecords {
		name, ok := strings.CutPrefix(k, xattrRecord)
		switch {
		case ok && s.keep.Xattrs && strings.HasPrefix(name, "user."):
			if e.xattrs == nil {
				e.xattrs = map[string]string{}
			}
			e.xattrs[name] = v
		case strings.HasPrefix(k, "SCHILY.") && k != "SCHILY.dev" && k != "SCHILY.ino" && k != "SCHILY.nlink":
			lost = true
		}
	}
	if lost {
		s.changed.Attributes++
	}
}

// The canonical tar.

const (
	blockSize   = 512
	xattrRecord = "SCHILY.xattr."
)

// padded rounds n up to whole blocks.
func padded(n int64) int64 { return (n + blockSize - 1) &^ (blockSize - 1) }

// appendHeader appends the canonical header blocks of e to b. It is written out here
// rather than left to archive/tar because checkpoints are compared by their bytes: no
// other version of any library may ever write them differently.
func appendHeader(b []byte, e *entry) []byte {
	name := e.name
	if e.kind == tar.TypeDir {
		name += "/"
	}
	records := map[string]string{}
	short, prefix, ok := splitName(name)
	if !ok {
		records["path"] = name
	}
	link := e.link
	if len(link) > 100 {
		records["linkpath"] = link
		link = link[:100]
	}
	if e.nsec != 0 {
		records["mtime"] = timeRecord(e.mtime, e.nsec)
	}
	number := func(key string, v int64, digits int) int64 {
		if v >= 1<<(3*digits) {
			records[key] = itoa(v)
			return 0
		}
		return v
	}
	size, uid, gid := number("size", e.size, 11), number("uid", int64(e.uid), 7), number("gid", int64(e.gid), 7)
	for k, v := range e.xattrs {
		records[xattrRecord+k] = v
	}
	if len(records) > 0 {
		var body []byte
		for _, k := range slices.Sorted(maps.Keys(records)) {
			body = appendRecord(body, k, records[k])
		}
		b = appendBlock(b, block{name: "././@PaxHeader", mode: 0o644, size: int64(len(body)), kind: tar.TypeXHeader})
		b = append(b, body...)
		b = append(b, make([]byte, padded(int64(len(body)))-int64(len(body)))...)
	}
	return appendBlock(b, block{name: short, prefix: prefix, mode: e.mode, uid: uid, gid: gid, size: size, mtime: e.mtime, kind: e.kind, link: link})
}

type block struct {
	name, prefix, link    string
	mode                  uint32
	uid, gid, size, mtime int64
	kind                  byte
}

func appendBlock(b []byte, h block) []byte {
	var blk [blockSize]byte
	octal := func(at, digits int, v int64) {
		for i := digits - 1; i >= 0; i-- {
			blk[at+i] = '0' + byte(v&7)
			v >>= 3
		}
	}
	copy(blk[0:100], h.name)
	octal(100, 7, int64(h.mode))
	octal(108, 7, h.uid)
	octal(116, 7, h.gid)
	octal(124, 11, h.size)
	octal(136, 11, h.mtime)
	blk[156] = h.kind
	copy(blk[157:257], h.link)
	copy(blk[257:265], "ustar\x0000")
	octal(329, 7, 0)
	octal(337, 7, 0)
	copy(blk[345:500], h.prefix)
	sum := int64(8 * ' ')
	for _, c := range blk {
		sum += int64(c)
	}
	octal(148, 6, sum)
	blk[155] = ' '
	return append(b, blk[:]...)
}

// splitName fits name into the two fields of a header if that is possible; otherwise
// short is its beginning.
func splitName(name string) (short, prefix string, ok bool) {
	if len(name) <= 100 {
		return name, "", true
	}
	// The longest possible prefix: cut at the last slash that leaves something behind it.
	cut := strings.LastIndexByte(name[:min(len(name)-1, 156)], '/')
	if cut > 0 && len(name)-cut-1 <= 100 {
		return name[cut+1:], name[:cut], true
	}
	return name[:100], "", false
}

// appendRecord appends "<length> key=value\n", where the length includes itself.
func appendRecord(b []byte, key, value string) []byte {
	rest := len(key) + len(value) + 3
	n := rest + len(itoa(int64(rest)))
	n = rest + len(itoa(int64(n)))
	return append(b, itoa(int64(n))+" "+key+"="+value+"\n"...)
}

// timeRecord is a time without trailing zeros.
func timeRecord(sec, nsec int64) string {
	frac := itoa(1e9 + nsec)[1:]
	return itoa(sec) + "." + strings.TrimRight(frac, "0")
}

// fileOf is e as the manifest has it.
func fileOf(e *entry) File {
	f := File{Path: display(e.name), Mode: e.mode, Mtime: e.mtime, Nsec: e.nsec, Link: display(e.link)}
	if f.Path != e.name {
		f.Raw = []byte(e.name)
	}
	switch e.kind {
	case tar.TypeReg:
		f.Type, f.Size = TypeFile, e.size
	case tar.TypeDir:
		f.Type = TypeDir
	case tar.TypeSymlink:
		f.Type = TypeSymlink
	case tar.TypeLink:
		f.Type = TypeHardlink
	}
	return f
}

func itoa(v int64) string { return strconv.FormatInt(v, 10) }

package checkpoint

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"syscall"

	"github.com/zeebo/blake3"

	"github.com/sand-boxer/sandboxer"
)

// A sink takes the canonical tar and stores it.
type sink interface {
	io.Writer
	// space returns room for the next data, at least a byte, and fill takes over the
	// first n bytes of it, without a copy where possible.
	space() ([]byte, error)
	fill(n int) error
	// finish completes what was written and says where it is; the caller keeps the
	// digest. After an error, and instead of finish, abort gives up.
	finish() (part, error)
	abort()
}

// canonicaliser turns any tar into the canonical one.
//
// An archive in canonical order (that of `tar --sort=name`, and of a walk that sorts
// each directory) goes straight to the sink. At the first entry that is out of order
// it reads back what was written so far into a spool, adds the rest, and
// writes everything again in order. Memory is bounded by the number of entries, the
// spool by spoolBytes.
type canonicaliser struct {
	rules      Rules
	keep       Keep
	spoolDir   string
	spoolBytes int64
	newSink    func() sink
	reopen     func(part) (io.ReadCloser, error)
}

// canonical is the result for an archive.
type canonical struct {
	part    part
	files   []File
	bytes   int64
	changed Changes
}

const copySize = 256 << 10

// headSize is how much of an archive is read at once to find a header: most of a
// file's contents are then read to their destination, without a copy.
const headSize = 16 << 10

// zeros fill up blocks and mark the end.
var zeros [2 * blockSize]byte

func (c *canonicaliser) run(ctx context.Context, r io.Reader) (_ *canonical, err error) {
	s := newScanner(ctx, bufio.NewReaderSize(r, headSize), c.rules, c.keep)
	em := newEmitter(c.newSink())
	var sp *spool
	defer func() {
		if err != nil {
			em.abort()
		}
		if sp != nil {
			err = errors.Join(err, sp.close())
		}
	}()
	var all []*entry // what has been emitted or spooled
	for {
		e, err := s.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if sp == nil && len(all) > 0 && compareNames(all[len(all)-1].name, e.name) >= 0 {
			if sp, err = c.unwind(em, all); err != nil {
				return nil, err
			}
		}
		if sp != nil {
			err = sp.add(e, s.body)
		} else {
			err = em.emit(resolved(e, s.byName), s.body)
		}
		if err != nil {
			return nil, err
		}
		if !e.listed {
			e.listed = true
			all = append(all, e)
		}
	}
	if sp != nil {
		em = newEmitter(c.newSink())
		slices.SortFunc(all, func(a, b *entry) int { return compareNames(a.name, b.name) })
		for _, e := range regroup(all, s.byName) {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if err := em.emit(e, sp.contents(e)); err != nil {
				return nil, err
			}
		}
	}
	p, err := em.finish()
	if err != nil {
		return nil, err
	}
	return &canonical{part: p, files: em.files, bytes: s.checker.Bytes(), changed: s.changed}, nil
}

// resolved gives a hard link the attributes of its file, since both are one file.
func resolved(e *entry, byName map[string]*entry) *entry {
	if e.kind != tar.TypeLink {
		return e
	}
	l := *byName[e.link]
	l.name, l.kind, l.link, l.size = e.name, tar.TypeLink, e.link, 0
	return &l
}

// regroup makes the first name of each file, in canonical order, the one that carries
// its contents, and the others links to that one.
func regroup(sorted []*entry, byName map[string]*entry) []*entry {
	first := map[string]string{} // by the name that carried the contents in the archive
	for _, e := range sorted {
		if e.kind == tar.TypeLink {
			if _, ok := first[e.link]; !ok {
				first[e.link] = e.name
				if compareNames(e.link, e.name) < 0 {
					first[e.link] = e.link
				}
			}
		}
	}
	out := make([]*entry, len(sorted))
	for i, e := range sorted {
		file := e.name
		if e.kind == tar.TypeLink {
			file = e.link
		}
		lead, linked := first[file]
		if !linked {
			out[i] = e
			continue
		}
		x := *byName[file]
		x.name = e.name
		if e.name != lead {
			x.kind, x.link, x.size = tar.TypeLink, lead, 0
		}
		out[i] = &x
	}
	return out
}

// unwind moves what was emitted into a spool.
func (c *canonicaliser) unwind(em *emitter, all []*entry) (_ *spool, err error) {
	p, err := em.finish()
	if err != nil {
		return nil, err
	}
	sp, err := newSpool(c.spoolDir, c.spoolBytes)
	if err != nil {
		return nil, err
	}
	r, err := c.reopen(p)
	if err != nil {
		return nil, errors.Join(err, sp.close())
	}
	defer r.Close()
	var at int64
	for i, e := range all {
		if e.kind != tar.TypeReg {
			continue
		}
		data := em.files[i].Data
		if _, err = io.CopyN(io.Discard, r, data-at); err == nil {
			err = sp.add(e, io.LimitReader(r, e.size))
		}
		if err != nil {
			return nil, errors.Join(err, sp.close())
		}
		at = data + e.size
	}
	return sp, nil
}

// An emitter writes entries in the canonical form and keeps the index.
type emitter struct {
	sink  sink
	n     int64
	files []File
	tree  *blake3.Hasher // headers, and the digests of contents
	hash  *blake3.Hasher // the contents of one file
	head  []byte
	done  bool
}

func newEmitter(s sink) *emitter {
	return &emitter{sink: s, tree: blake3.New(), hash: blake3.New()}
}

// write writes anything except contents.
func (em *emitter) write(p []byte) error {
	_, _ = em.tree.Write(p)
	n, err := em.sink.Write(p)
	em.n += int64(n)
	return err
}

// emit writes e, whose contents body must have, all of them.
func (em *emitter) emit(e *entry, body io.Reader) error {
	f := fileOf(e)
	f.Offset = em.n
	em.head = appendHeader(em.head[:0], e)
	if err := em.write(em.head); err != nil {
		return err
	}
	if e.kind == tar.TypeReg {
		f.Data = em.n
		em.hash.Reset()
		for left := e.size; left > 0; {
			room, err := em.sink.space()
			if err != nil {
				return err
			}
			n, err := io.ReadAtLeast(body, room[:min(left, int64(len(room)))], 1)
			if err == io.EOF || err == io.ErrUnexpectedEOF {
				return refuse("%q has %d bytes less than its header says", e.name, left)
			}
			if err != nil {
				return err
			}
			left -= int64(n)
			em.n += int64(n)
			_, _ = em.hash.Write(room[:n])
			if err := em.sink.fill(n); err != nil {
				return err
			}
		}
		sum := [32]byte(em.hash.Sum(nil))
		_, _ = em.tree.Write(sum[:])
		f.Digest = digest(sum)
		if err := em.write(zeros[:padded(e.size)-e.size]); err != nil {
			return err
		}
	}
	em.files = append(em.files, f)
	return nil
}

func (em *emitter) finish() (part, error) {
	if err := em.write(zeros[:]); err != nil {
		return part{}, err
	}
	em.done = true
	p, err := em.sink.finish()
	p.Digest = digestOf(em.tree)
	return p, err
}

func (em *emitter) abort() {
	if !em.done {
		em.done = true
		em.sink.abort()
	}
}

// A spool holds contents until their order is known. Its file has no name: it vanishes with
// the process.
type spool struct {
	f    *os.File
	w    *bufio.Writer
	n    int64
	max  int64
	sync bool // what was written is in the file
}

func newSpool(dir string, limit int64) (*spool, error) {
	f, err := os.CreateTemp(dir, "spool-*")
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "there is no place to sort an archive")
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &spool{f: f, w: bufio.NewWriterSize(f, 1<<20), max: limit}, nil
}

func (sp *spool) add(e *entry, body io.Reader) error {
	if e.kind != tar.TypeReg {
		return nil
	}
	if e.size > sp.max-sp.n {
		return sandboxer.E(sandboxer.Exhausted, nil, "sorting the archive needs more than %d bytes of temporary space, which is the limit", sp.max).
			WithHint("make the archive in order (tar --sort=name), which needs none")
	}
	e.spooled = sp.n
	n, err := io.CopyN(sp.w, body, e.size)
	sp.n += n
	sp.sync = false
	if err == io.EOF {
		return refuse("%q has %d bytes less than its header says", e.name, e.size-n)
	}
	if errors.Is(err, syscall.ENOSPC) {
		return sandboxer.E(sandboxer.Exhausted, err, "the disk is full where the archive is sorted").
			WithHint("make room, or make the archive in order (tar --sort=name), which needs none")
	}
	return err
}

// contents reads the contents that add stored.
func (sp *spool) contents(e *entry) io.Reader {
	if !sp.sync {
		sp.sync = true
		if err := sp.w.Flush(); err != nil {
			return failing{err}
		}
	}
	return io.NewSectionReader(sp.f, e.spooled, e.size)
}

func (sp *spool) close() error { return sp.f.Close() }

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

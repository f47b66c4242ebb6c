package checkpoint

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"hash/maphash"
	"io"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/blake3"

	"github.com/sand-boxer/sandboxer"
)

// chunkSize is the normal size of a chunk of a payload, manifestChunk that of a
// manifest. A change costs about one chunk of each.
const (
	chunkSize     = 64 << 10
	manifestChunk = 8 << 10
)

// A packer stores chunks that the store does not have yet, in packs. One Save has one.
type packer struct {
	ctx  context.Context
	stop context.CancelCauseFunc
	s    *Store
	enc  *zstd.Encoder
	seed maphash.Seed

	buffers sync.Pool

	mu      sync.Mutex
	claimed map[id]bool // by this packer

	used  map[string]bool // packs with a chunk that is needed
	fresh map[string]bool // of these, those that this packer wrote
	bytes int64           // stored

	cur  *packWriter
	wait sync.WaitGroup
	errs chan error // the first of the packs that are being put
}

func (s *Store) newPacker(ctx context.Context) *packer {
	p := &packer{s: s, enc: s.enc, seed: maphash.MakeSeed(), claimed: map[id]bool{}, used: map[string]bool{}, fresh: map[string]bool{}, errs: make(chan error, 1)}
	p.ctx, p.stop = context.WithCancelCause(ctx)
	return p
}

// A packWriter streams one pack into the store.
type packWriter struct {
	name   string
	w      *handover
	n      int64
	places []place
	sums   []uint64 // of what is stored of each, and of the index at last
	put    chan error
}

// fail remembers the first error and stops everything.
func (p *packer) fail(err error) {
	if err != nil {
		select {
		case p.errs <- err:
		default:
		}
		p.stop(err)
	}
}

// prepared is a chunk on its way into a pack.
type prepared struct {
	id     id
	size   int
	stored []byte // nil: the store has it
	sum    uint64 // of stored
	pack   string // where the store has it
}

// prepare digests a chunk, and compresses it if it is new. A result that does not decompress to
// the chunk is not used. It is called concurrently.
func (p *packer) prepare(chunk []byte) prepared {
	c := prepared{id: blake3.Sum256(chunk), size: len(chunk)}
	if pack, ok := p.s.chunks.find(c.id); ok {
		c.pack = pack
		return c
	}
	p.mu.Lock()
	mine := !p.claimed[c.id]
	p.claimed[c.id] = true
	p.mu.Unlock()
	if mine {
		buf, _ := p.buffers.Get().(*[]byte)
		if buf == nil {
			buf = new([]byte)
		}
		c.stored = p.enc.EncodeAll(chunk, (*buf)[:0])
		if len(c.stored) >= len(chunk) || !p.restores(c.stored, chunk) {
			c.stored = append(c.stored[:0], chunk...)
		}
		c.sum = maphash.Bytes(p.seed, c.stored)
	}
	return c
}

// restores reports whether stored decompresses to chunk.
func (p *packer) restores(stored, chunk []byte) bool {
	buf, _ := p.buffers.Get().(*[]byte)
	if buf == nil {
		buf = new([]byte)
	}
	out, err := p.s.dec.DecodeAll(stored, slices.Grow((*buf)[:0], len(chunk)))
	defer p.buffers.Put(&out) // after it was compared
	return err == nil && bytes.Equal(out, chunk)
}

// add writes a prepared chunk. It is not called concurrently.
func (p *packer) add(c prepared) error {
	if c.stored == nil {
		if c.pack != "" {
			p.used[c.pack] = true
		}
		return nil
	}
	if p.cur == nil {
		p.open()
	}
	w := p.cur
	w.places = append(w.places, place{id: c.id, offset: w.n, stored: uint32(len(c.stored)), size: uint32(c.size)})
	w.sums = append(w.sums, c.sum)
	if err := w.write(c.stored); err != nil {
		return err
	}
	p.bytes += int64(len(c.stored))
	p.buffers.Put(&c.stored) // all of it was handed over
	if w.n >= packTarget {
		return p.close()
	}
	return nil
}

func (w *packWriter) write(b []byte) error {
	n, err := w.w.Write(b)
	w.n += int64(n)
	return err
}

func (p *packer) open() {
	pw := &packWriter{name: rand.Text(), w: newHandover(), put: make(chan error, 1)}
	p.cur = pw
	go func() {
		err := p.s.blobs.Put(p.ctx, packPrefix+pw.name, receiver{pw.w})
		pw.w.stop(err)
		pw.put <- err
	}()
	_ = pw.write([]byte(packMagic)) // its error is that of the next write
}

// close completes the current pack. The store makes it durable, and it is read back,
// while the next one is being filled; flush waits for all.
func (p *packer) close() error {
	w := p.cur
	if w == nil {
		return nil
	}
	p.cur = nil
	tail := appendIndex(nil, w.places)
	w.sums = append(w.sums, maphash.Bytes(p.seed, tail))
	if err := w.write(tail); err != nil {
		w.w.end(err)
		return errors.Join(err, <-w.put)
	}
	w.w.end(io.EOF)
	p.used[w.name], p.fresh[w.name] = true, true
	p.bytes += int64(len(tail))
	p.wait.Go(func() {
		err := <-w.put
		if err == nil {
			err = p.s.putBytes(p.ctx, indexPrefix+w.name, append([]byte(packMagic), tail...))
		}
		if err == nil {
			err = p.readBack(w, len(tail))
		}
		if err == nil {
			p.s.chunks.add(w.name, w.places)
		}
		p.fail(err)
	})
	return nil
}

// readBack reads a pack and compares every chunk with what was stored.
func (p *packer) readBack(w *packWriter, tail int) error {
	r, err := p.s.blobs.Get(p.ctx, packPrefix+w.name, 0, w.n)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return moved() // it was put so long ago that GC has taken it
	}
	if err != nil {
		return err
	}
	defer r.Close()
	buf := make([]byte, 0, 4*chunkSize) // grows where chunks are larger
	next := func(n int) error {
		buf = slices.Grow(buf[:0], n)[:n]
		if _, err := io.ReadFull(r, buf); err != nil {
			if err == io.EOF || err == io.ErrUnexpectedEOF {
				err = damaged(err, "pack %s is shorter than what was stored", w.name)
			}
			return err
		}
		return nil
	}
	if err := next(len(packMagic)); err != nil {
		return err
	}
	same := string(buf) == packMagic
	for i, sum := range w.sums {
		n := tail
		if i < len(w.places) {
			n = int(w.places[i].stored)
		}
		if err := next(n); err != nil {
			return err
		}
		same = same && maphash.Bytes(p.seed, buf) == sum
	}
	if !same {
		return damaged(nil, "pack %s does not hold what was stored", w.name)
	}
	return nil
}

// flush makes all added chunks durable, and verifies them.
func (p *packer) flush() error {
	err := p.close()
	p.wait.Wait()
	select {
	case first := <-p.errs:
		p.errs <- first
		err = errors.Join(first, err)
	default:
	}
	return err
}

// abandon gives up pending work. It may be called at any time, and more than once.
func (p *packer) abandon() {
	p.stop(context.Canceled)
	if p.cur != nil {
		p.cur.w.end(context.Canceled)
		<-p.cur.put
		p.cur = nil
	}
	p.wait.Wait()
}

// A chunkSink cuts what is written to it and gives the chunks to a packer, in order,
// while several processors prepare them. Chunks are stretches of the windows that the
// stream is read into; only the part that a window's end cuts off is copied.
type chunkSink struct {
	p      *packer
	cut    *cutter
	win    *window
	start  int // in win: what is not cut yet
	size   int64
	order  chan *chunkJob
	work   chan *chunkJob
	free   sync.Pool // of windows
	done   chan struct{}
	worker sync.WaitGroup

	ids []byte
	err error // of the packer; read after done
}

// A window holds a stretch of the stream until its last chunk is stored.
type window struct {
	buf   []byte
	users atomic.Int32 // chunks, and the sink as long as it fills it
}

func (k *chunkSink) release(w *window) {
	if w.users.Add(-1) == 0 {
		w.buf = w.buf[:0]
		k.free.Put(w)
	}
}

type chunkJob struct {
	win  *window
	data []byte
	c    prepared
	done chan struct{}
}

func newChunkSink(p *packer, cut *cutter) *chunkSink {
	n := runtime.GOMAXPROCS(0)
	k := &chunkSink{p: p, cut: cut, order: make(chan *chunkJob, 8*n), work: make(chan *chunkJob, 8*n), done: make(chan struct{})}
	k.free.New = func() any { return &window{buf: make([]byte, 0, 8*cut.most)} }
	k.win = k.newWindow()
	for range n {
		k.worker.Go(func() {
			for j := range k.work {
				if p.ctx.Err() == nil {
					j.c = p.prepare(j.data)
				}
				close(j.done)
			}
		})
	}
	go k.collect()
	return k
}

func (k *chunkSink) newWindow() *window {
	w := k.free.Get().(*window)
	w.users.Store(1)
	return w
}

func (k *chunkSink) collect() {
	defer close(k.done)
	for j := range k.order {
		<-j.done
		if k.err == nil {
			if k.err = context.Cause(k.p.ctx); k.err == nil {
				k.ids = append(k.ids, j.c.id[:]...)
				k.err = k.p.add(j.c)
			}
			k.p.fail(k.err)
		}
		k.release(j.win)
	}
}

// Write takes p. It fails after the packer has.
func (k *chunkSink) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		room, err := k.space()
		if err != nil {
			return len(p) - len(rest), err
		}
		n := copy(room, rest)
		rest = rest[n:]
		if err := k.fill(n); err != nil {
			return len(p) - len(rest), err
		}
	}
	return len(p), nil
}

// space fails after the packer has.
func (k *chunkSink) space() ([]byte, error) {
	if k.p.ctx.Err() != nil {
		return nil, context.Cause(k.p.ctx)
	}
	if w := k.win; len(w.buf) == cap(w.buf) {
		k.win = k.newWindow()
		k.win.buf = append(k.win.buf, w.buf[k.start:]...) // less than a chunk
		k.start = 0
		k.release(w)
	}
	b := k.win.buf
	return b[len(b):cap(b)], nil
}

func (k *chunkSink) fill(n int) error {
	k.win.buf = k.win.buf[:len(k.win.buf)+n]
	k.size += int64(n)
	k.drain(k.cut.most)
	return nil
}

// drain cuts until less than keep bytes are left.
func (k *chunkSink) drain(keep int) {
	for w := k.win; len(w.buf)-k.start >= max(keep, 1); {
		n := k.cut.cut(w.buf[k.start:])
		w.users.Add(1)
		j := &chunkJob{win: w, data: w.buf[k.start : k.start+n], done: make(chan struct{})}
		k.start += n
		k.order <- j
		k.work <- j
	}
}

func (k *chunkSink) end() {
	close(k.order)
	close(k.work)
	<-k.done
	k.worker.Wait()
}

// finish returns where everything will be once the packer is flushed.
func (k *chunkSink) finish() (part, error) {
	k.drain(0)
	k.end()
	return part{Size: k.size, Chunks: k.ids}, k.err
}

func (k *chunkSink) abort() {
	k.p.stop(context.Canceled)
	k.end()
}

package checkpoint

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/blake3"
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
	p := &packer{s: s, enc: s.enc, claimed: map[id]bool{}, used: map[string]bool{}, fresh: map[string]bool{}, errs: make(chan error, 1)}
	p.ctx, p.stop = context.WithCancelCause(ctx)
	return p
}

// A packWriter streams one pack into the store.
type packWriter struct {
	name   string
	w      *io.PipeWriter
	n      int64
	places []place
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
	pack   string // then: where
}

// prepare digests a chunk, and compresses it if it is new. It is called concurrently.
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
		if c.stored = p.enc.EncodeAll(chunk, (*buf)[:0]); len(c.stored) >= len(chunk) {
			c.stored = append(c.stored[:0], chunk...)
		}
	}
	return c
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
	if err := w.write(c.stored); err != nil {
		return err
	}
	p.bytes += int64(len(c.stored))
	p.buffers.Put(&c.stored) // the pipe has handed all of it over
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
	r, w := io.Pipe()
	pw := &packWriter{name: rand.Text(), w: w, put: make(chan error, 1)}
	p.cur = pw
	go func() {
		err := p.s.blobs.Put(p.ctx, packPrefix+pw.name, r)
		_ = r.CloseWithError(err)
		pw.put <- err
	}()
	_ = pw.write([]byte(packMagic)) // its error is that of the next write
}

// close completes the current pack. The store makes it durable while the next one is
// being filled; flush waits for all.
func (p *packer) close() error {
	w := p.cur
	if w == nil {
		return nil
	}
	p.cur = nil
	tail := appendIndex(nil, w.places)
	if err := w.write(tail); err != nil {
		_ = w.w.CloseWithError(err)
		return errors.Join(err, <-w.put)
	}
	_ = w.w.Close()
	p.used[w.name], p.fresh[w.name] = true, true
	p.bytes += int64(len(tail))
	p.wait.Go(func() {
		err := <-w.put
		if err == nil {
			err = p.s.putBytes(p.ctx, indexPrefix+w.name, append([]byte(packMagic), tail...))
		}
		if err == nil {
			p.s.chunks.add(w.name, w.places)
		}
		p.fail(err)
	})
	return nil
}

// flush makes everything durable that was added.
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

// abandon gives up what is under way. It may be called at any time, and more than once.
func (p *packer) abandon() {
	p.stop(context.Canceled)
	if p.cur != nil {
		_ = p.cur.w.CloseWithError(context.Canceled)
		<-p.cur.put
		p.cur = nil
	}
	p.wait.Wait()
}

// A chunkSink cuts what is written to it and gives the chunks to a packer, in order,
// while several processors prepare them.
type chunkSink struct {
	p      *packer
	cut    *cutter
	window []byte // not cut yet
	size   int64
	order  chan *chunkJob
	work   chan *chunkJob
	pool   sync.Pool
	done   chan struct{}
	worker sync.WaitGroup

	hash *blake3.Hasher // of everything
	ids  []byte
	err  error // of the packer; read after done
}

type chunkJob struct {
	data []byte
	c    prepared
	done chan struct{}
}

func newChunkSink(p *packer, cut *cutter) *chunkSink {
	n := runtime.GOMAXPROCS(0)
	k := &chunkSink{p: p, cut: cut, window: make([]byte, 0, 8*cut.most),
		order: make(chan *chunkJob, 4*n), work: make(chan *chunkJob, 4*n), done: make(chan struct{}), hash: blake3.New()}
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

func (k *chunkSink) collect() {
	defer close(k.done)
	for j := range k.order {
		if k.err == nil {
			_, _ = k.hash.Write(j.data)
		}
		<-j.done
		if k.err == nil {
			if k.err = context.Cause(k.p.ctx); k.err == nil {
				k.ids = append(k.ids, j.c.id[:]...)
				k.err = k.p.add(j.c)
			}
			k.p.fail(k.err)
		}
		k.pool.Put(&j.data)
	}
}

// Write takes p. It fails after the packer has.
func (k *chunkSink) Write(p []byte) (int, error) {
	if k.p.ctx.Err() != nil {
		return 0, context.Cause(k.p.ctx)
	}
	k.size += int64(len(p))
	for rest := p; len(rest) > 0; {
		n := min(len(rest), cap(k.window)-len(k.window))
		k.window = append(k.window, rest[:n]...)
		rest = rest[n:]
		if len(k.window) == cap(k.window) {
			k.drain(k.cut.most)
		}
	}
	return len(p), nil
}

// drain cuts until less than keep bytes are left.
func (k *chunkSink) drain(keep int) {
	w := k.window
	for len(w) >= max(keep, 1) {
		n := k.cut.cut(w)
		j := &chunkJob{done: make(chan struct{})}
		if b, ok := k.pool.Get().(*[]byte); ok {
			j.data = (*b)[:0]
		} else {
			j.data = make([]byte, 0, k.cut.most)
		}
		j.data = append(j.data, w[:n]...)
		w = w[n:]
		k.order <- j
		k.work <- j
	}
	k.window = k.window[:copy(k.window, w)]
}

func (k *chunkSink) end() {
	close(k.order)
	close(k.work)
	<-k.done
	k.worker.Wait()
}

func (k *chunkSink) finish() (part, error) {
	k.drain(0)
	k.end()
	if k.err != nil {
		return part{}, k.err
	}
	if err := k.p.flush(); err != nil {
		return part{}, err
	}
	return part{Digest: digestOf(k.hash), Size: k.size, Chunks: k.ids}, nil
}

func (k *chunkSink) abort() {
	k.p.stop(context.Canceled)
	k.end()
}

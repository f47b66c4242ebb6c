package checkpoint

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"time"

	"github.com/zeebo/blake3"

	"github.com/sand-boxer/sandboxer"
)

// SaveOptions say how Save treats an archive.
type SaveOptions struct {
	Rules Rules
	Keep  Keep
}

// Save makes the checkpoint id of the tar that r has, and returns its manifest once it
// is sealed: durable, read back and verified. r may be any tar that Rules allow; one
// in the order of `tar --sort=name` is stored as it is read, any other is sorted first,
// with temporary space for its files.
//
// If Save fails there is no such checkpoint, and GC removes what was stored of
// it. Kinds: Conflict if id exists or was dropped lately, Invalid for an archive that
// is refused, Exhausted when there is no room, Failed if what was read back is not what
// was written, Unavailable when it may work the next time. An error of r is returned
// unchanged.
func (s *Store) Save(ctx context.Context, id string, meta Meta, r io.Reader, o SaveOptions) (*Manifest, error) {
	if err := CheckID(id); err != nil {
		return nil, err
	}
	if meta.Parent != "" {
		if err := CheckID(meta.Parent); err != nil {
			return nil, err
		}
	}
	w, err := s.begin(ctx, id)
	if err != nil {
		return nil, err
	}
	defer w.end()
	widen(r)
	c, err := w.payload(r, o.Rules, o.Keep)
	if err != nil {
		return nil, err
	}
	m := &Manifest{Format: Format, ID: id, Kind: "portable", Created: time.Now().UTC().Truncate(time.Millisecond), Producer: s.o.Producer,
		Meta: meta, Payload: Payload{Digest: c.part.Digest, Size: c.part.Size, Bytes: c.bytes, Keep: o.Keep}, Changed: c.changed, Files: c.files}
	data, err := m.encode()
	if err != nil {
		return nil, err
	}
	return w.seal(m, data, c.part, s.id, sign(s.key, data))
}

// A writing is a checkpoint on its way into the store.
type writing struct {
	s   *Store
	ctx context.Context
	id  string
	p   *packer
}

// begin checks that id is free.
func (s *Store) begin(ctx context.Context, id string) (*writing, error) {
	for _, prefix := range []string{dropPrefix, checkpointPrefix} {
		_, err := s.blobs.Stat(ctx, prefix+id)
		if err == nil {
			return nil, taken(id)
		}
		if sandboxer.KindOf(err) != sandboxer.NotFound {
			return nil, err
		}
	}
	if err := s.chunks.refresh(ctx); err != nil {
		return nil, err
	}
	return &writing{s: s, ctx: ctx, id: id, p: s.newPacker(ctx)}, nil
}

func taken(id string) error {
	return sandboxer.E(sandboxer.Conflict, nil, "there is or was a checkpoint %s", id).WithHint("use another ID; IDs are not used again")
}

// end gives up unfinished work.
func (w *writing) end() { w.p.abandon() }

func (w *writing) payload(r io.Reader, rules Rules, keep Keep) (*canonical, error) {
	c := &canonicaliser{rules: rules, keep: keep, spoolDir: w.s.o.SpoolDir, spoolBytes: w.s.o.SpoolBytes,
		newSink: func() sink {
			if w.s.o.Encoding == Stream {
				k, err := w.s.newStreamSink(w.ctx)
				if err != nil {
					return brokenSink{err}
				}
				return k
			}
			return newChunkSink(w.p, w.s.cut)
		},
		reopen: func(p part) (io.ReadCloser, error) {
			if err := w.p.flush(); err != nil {
				return nil, err
			}
			return w.s.openAt(w.ctx, p, 0, p.Size)
		},
	}
	return c.run(w.ctx, r)
}

type brokenSink struct{ err error }

func (b brokenSink) Write([]byte) (int, error) { return 0, b.err }

func (b brokenSink) space() ([]byte, error) { return nil, b.err }

func (b brokenSink) fill(int) error { return b.err }

func (b brokenSink) finish() (part, error) { return part{}, b.err }

func (b brokenSink) abort() {}

// seal stores the manifest, verifies everything, and makes it a checkpoint.
func (w *writing) seal(m *Manifest, data []byte, payload part, signer KeyID, sig []byte) (*Manifest, error) {
	s := w.s
	man, err := w.manifest(data)
	if err != nil {
		return nil, err
	}
	if err := w.p.flush(); err != nil {
		return nil, err
	}
	rec := record{Format: recordFormat, ID: m.ID, Head: *m, Manifest: man, Payload: payload, Signer: signer, Signature: sig,
		Sealer: s.id, Seal: ed25519.Sign(s.key, sealed(m.ID, man.Digest))}
	rec.Head.Files = nil
	enc, err := json.Marshal(rec)
	if err != nil {
		return nil, err
	}
	if len(enc) > maxRecord {
		return nil, sandboxer.E(sandboxer.Exhausted, nil, "checkpoint %s is too large: its list of chunks has %d bytes", m.ID, len(enc))
	}
	// From here on a garbage collection keeps what the record names: either it sees
	// the pending record, or we see its marks.
	pending := pendingPrefix + m.ID + "/" + rand.Text()
	if err := s.putBytes(w.ctx, pending, enc); err != nil {
		return nil, err
	}
	since := time.Now()
	defer func() {
		late, stop := outlast(w.ctx)
		defer stop()
		_ = s.blobs.Delete(late, pending) // otherwise GC does it
	}()
	if err := w.kept(); err != nil {
		return nil, err
	}
	if err := w.readBack(man, payload, m.Files); err != nil {
		return nil, err
	}
	// The pending record held everything so far only if it still exists. It does not if
	// this took longer than the grace period, or the store's clock jumped.
	held := func() error {
		_, err := s.blobs.Stat(w.ctx, pending)
		if sandboxer.KindOf(err) == sandboxer.NotFound || err == nil && time.Since(since) > s.o.Grace/2 {
			return sandboxer.E(sandboxer.Unavailable, nil, "checkpoint %s took too long to verify", m.ID).
				WithHint("try again; if it is as large as that, set a longer grace period")
		}
		return err
	}
	if err := held(); err != nil {
		return nil, err
	}
	if err := s.putBytes(w.ctx, checkpointPrefix+m.ID, enc); err != nil {
		if sandboxer.KindOf(err) == sandboxer.Conflict {
			return nil, taken(m.ID)
		}
		return nil, err
	}
	if err := held(); err != nil {
		late, stop := outlast(w.ctx)
		defer stop()
		return nil, errors.Join(err, s.blobs.Delete(late, checkpointPrefix+m.ID))
	}
	m.Digest, m.Signer, m.Stored = man.Digest, signer, w.p.bytes+int64(len(enc))
	if payload.Stream != "" {
		if b, err := s.blobs.Stat(w.ctx, payload.Stream); err == nil {
			m.Stored += b.Size
		}
	}
	return m, nil
}

func (w *writing) manifest(data []byte) (part, error) {
	if w.s.o.Encoding == Stream {
		return part{Digest: digest(blake3.Sum256(data)), Size: int64(len(data)), Inline: w.s.enc.EncodeAll(data, nil)}, nil
	}
	k := newChunkSink(w.p, w.s.cutMan)
	if _, err := k.Write(data); err != nil {
		k.abort()
		return part{}, err
	}
	p, err := k.finish()
	p.Digest = digest(blake3.Sum256(data))
	return p, err
}

// kept checks that every pack in use exists and is not about to be deleted.
func (w *writing) kept() error {
	condemned, err := w.s.names(w.ctx, condemnedPrefix+packPrefix)
	if err != nil {
		return err
	}
	for name := range w.p.used {
		if condemned[name] {
			return moved()
		}
	}
	// In this order: a deletion ends with the removal of the mark, so a pack that is gone
	// and has no mark is missing here.
	for _, prefix := range []string{packPrefix, indexPrefix} {
		there, err := w.s.names(w.ctx, prefix)
		if err != nil {
			return err
		}
		for name := range w.p.used {
			if !there[name] {
				return moved()
			}
		}
	}
	return nil
}

func moved() error {
	return sandboxer.E(sandboxer.Unavailable, nil, "the store removes data that the new checkpoint has in common with dropped ones").WithHint("try again")
}

// readBack verifies what the packer has not: payloads that are streams, and the chunks
// that existed before.
func (w *writing) readBack(man, payload part, files []File) error {
	s := w.s
	var old part
	for _, p := range []part{man, payload} {
		for ids := p.Chunks; len(ids) > 0; ids = ids[32:] {
			a, ok := s.chunks.locate(id(ids[:32]))
			if !ok {
				return moved()
			}
			if !w.p.fresh[a.pack] {
				old.Chunks = append(old.Chunks, ids[:32]...)
				old.Size += int64(a.size)
			}
		}
	}
	var read []io.ReadCloser
	if old.Size > 0 {
		r, err := s.openAt(w.ctx, old, 0, old.Size)
		if err != nil {
			return err
		}
		read = append(read, r)
	}
	if payload.Stream != "" {
		r, err := s.openPayload(w.ctx, payload, files)
		if err != nil {
			return err
		}
		read = append(read, r)
	}
	buf := make([]byte, copySize)
	var first error
	for _, r := range read {
		if first == nil {
			_, first = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, buf)
		}
		first = errors.Join(first, r.Close())
	}
	return first
}

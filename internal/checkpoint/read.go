package checkpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"runtime"
	"strconv"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/blake3"

	"github.com/sand-boxer/sandboxer"
)

// A part says where one stream of bytes is in a store: as chunks, as one compressed
// object, or compressed in the record itself.
type part struct {
	Digest string `json:"digest"` // "blake3:…", of the bytes; of a payload: of its tree
	Size   int64  `json:"size"`
	Chunks []byte `json:"chunks,omitempty"` // IDs, 32 bytes each, one after the other
	Stream string `json:"stream,omitempty"` // name of an object
	Inline []byte `json:"inline,omitempty"` // zstd
}

// maxWindow bounds the memory that a compressed stream may ask for.
const maxWindow = 32 << 20

func damaged(cause error, format string, args ...any) error {
	return sandboxer.E(sandboxer.Failed, cause, format, args...).
		WithHint("the store has lost or changed data: restore it from a backup, or use another checkpoint")
}

// checkFormat refuses a document with another version of the known format (the version is at its end):
// one that a newer program wrote must not be called damaged. A document that does not name its format
// is for the reader to judge. Kinds: Unsupported.
func checkFormat(data []byte, what, known string) error {
	var head struct {
		Format string `json:"format"`
	}
	if json.Unmarshal(data, &head) != nil || head.Format == "" || head.Format == known {
		return nil
	}
	name, version, _ := strings.Cut(known, "/")
	has, hasVersion, _ := strings.Cut(head.Format, "/")
	ours, _ := strconv.Atoi(version)
	if n, err := strconv.Atoi(hasVersion); err == nil && has == name && n > ours {
		return sandboxer.E(sandboxer.Unsupported, nil, "%s was written by a newer sandboxer (format %.60s; this program knows %s)", what, head.Format, known).
			WithHint("upgrade this program, or use another snapshot")
	}
	return sandboxer.E(sandboxer.Unsupported, nil, "%s has the format %.60q; this program knows %q", what, head.Format, known).
		WithHint("use the program that made it, or another snapshot")
}

// open reads a part from its beginning; it verifies the digest at the part's end.
func (s *Store) open(ctx context.Context, p part) (io.ReadCloser, error) {
	r, err := s.openAt(ctx, p, 0, p.Size)
	if err != nil {
		return nil, err
	}
	return &verifier{r: r, part: p, hash: blake3.New()}, nil
}

// openAt reads n bytes of a part from offset off.
func (s *Store) openAt(ctx context.Context, p part, off, n int64) (io.ReadCloser, error) {
	if p.Chunks != nil || p.Size == 0 {
		return s.openChunks(ctx, p, off, n)
	}
	var src io.ReadCloser
	if p.Stream != "" {
		var err error
		if src, err = s.blobs.Get(ctx, p.Stream, 0, -1); err != nil {
			if sandboxer.KindOf(err) == sandboxer.NotFound {
				err = damaged(err, "an object of the checkpoint is missing")
			}
			return nil, err
		}
	} else {
		src = io.NopCloser(bytes.NewReader(p.Inline))
	}
	dec, err := zstd.NewReader(src, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(2))
	if err != nil {
		_ = src.Close()
		return nil, err
	}
	r := &unzstd{dec: dec, src: src, ctx: ctx}
	// Neither more nor less than announced.
	if _, err := io.CopyN(io.Discard, r, off); err != nil {
		_ = r.Close()
		return nil, damaged(err, "the checkpoint is shorter than its record says")
	}
	return limited{io.LimitReader(r, n+1), r}, nil
}

type limited struct {
	io.Reader
	io.Closer
}

type unzstd struct {
	ctx context.Context
	dec *zstd.Decoder
	src io.Closer
}

func (u *unzstd) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := u.dec.Read(p)
	if err != nil && err != io.EOF && sandboxer.KindOf(err) == sandboxer.Internal {
		err = damaged(err, "the checkpoint cannot be decompressed")
	}
	return n, err
}

func (u *unzstd) Close() error {
	u.dec.Close()
	return u.src.Close()
}

// verifier passes a part on and, instead of its end, reports an error if it does not match
// the record exactly.
type verifier struct {
	r    io.ReadCloser
	part part
	hash *blake3.Hasher
	n    int64
}

func (v *verifier) Read(p []byte) (int, error) {
	n, err := v.r.Read(p)
	_, _ = v.hash.Write(p[:n])
	if v.n += int64(n); v.n > v.part.Size {
		return 0, damaged(nil, "the checkpoint is longer than its record says")
	}
	if err == io.EOF {
		if v.n < v.part.Size {
			return n, damaged(nil, "the checkpoint is shorter than its record says")
		}
		if got := digestOf(v.hash); got != v.part.Digest {
			return n, damaged(nil, "the checkpoint has the digest %s instead of %s", got, v.part.Digest)
		}
	}
	return n, err
}

func (v *verifier) Close() error { return v.r.Close() }

// openPayload reads a payload from its beginning and verifies the digest of every file
// and, at its end, of the whole.
func (s *Store) openPayload(ctx context.Context, p part, files []File) (io.ReadCloser, error) {
	r, err := s.openAt(ctx, p, 0, p.Size)
	if err != nil {
		return nil, err
	}
	whole := func() (string, error) { return s.wholeDigest(ctx, p) }
	return &treeVerifier{r: r, part: p, files: files, tree: blake3.New(), hash: blake3.New(), whole: whole}, nil
}

// wholeDigest reads all of a part for the digest of its bytes. The first builds put the digest of
// the whole tar, and not that of its tree, into manifests of the same format.
func (s *Store) wholeDigest(ctx context.Context, p part) (string, error) {
	r, err := s.openAt(ctx, p, 0, p.Size)
	if err != nil {
		return "", err
	}
	hash := blake3.New()
	_, err = io.CopyBuffer(struct{ io.Writer }{hash}, struct{ io.Reader }{r}, make([]byte, copySize))
	return digestOf(hash), errors.Join(err, r.Close())
}

// treeVerifier is a verifier for a payload, whose digest is that of its tree: of the
// payload with the digest of each file in place of its contents.
type treeVerifier struct {
	r     io.ReadCloser
	part  part
	files []File // that are still to come
	tree  *blake3.Hasher
	hash  *blake3.Hasher // of the contents of the first of them
	whole func() (string, error)
	n     int64
}

func (v *treeVerifier) Read(p []byte) (int, error) {
	n, err := v.r.Read(p)
	for b := p[:n]; len(b) > 0; {
		for len(v.files) > 0 && v.files[0].Type != TypeFile {
			v.files = v.files[1:]
		}
		k := int64(len(b))
		switch {
		case len(v.files) == 0:
			_, _ = v.tree.Write(b)
		case v.n < v.files[0].Data:
			k = min(k, v.files[0].Data-v.n)
			_, _ = v.tree.Write(b[:k])
		default:
			f := &v.files[0]
			k = min(k, f.Data+f.Size-v.n)
			_, _ = v.hash.Write(b[:k])
			if v.n+k == f.Data+f.Size {
				sum := [32]byte(v.hash.Sum(nil))
				if digest(sum) != f.Digest {
					return 0, damaged(nil, "%q in the checkpoint was changed", f.Path)
				}
				_, _ = v.tree.Write(sum[:])
				v.hash.Reset()
				v.files = v.files[1:]
			}
		}
		b, v.n = b[k:], v.n+k
	}
	if v.n > v.part.Size {
		return 0, damaged(nil, "the checkpoint is longer than its record says")
	}
	if err == io.EOF {
		if v.n < v.part.Size {
			return n, damaged(nil, "the checkpoint is shorter than its record says")
		}
		if got := digestOf(v.tree); got != v.part.Digest {
			whole, werr := v.whole()
			if werr != nil {
				return n, werr
			}
			if whole == v.part.Digest {
				return n, err
			}
			return n, damaged(nil, "the checkpoint has the digest %s instead of %s", got, v.part.Digest)
		}
	}
	return n, err
}

func (v *treeVerifier) Close() error { return v.r.Close() }

// A chunkReader reads chunks ahead, a few stretches at a time, and verifies each.
type chunkReader struct {
	stop  context.CancelFunc
	queue chan *stretch
	ended chan struct{}
	cur   []byte
	rest  [][]byte
	skip  int64 // of the first chunk
	left  int64
	err   error
}

// A stretch is a run of adjacent chunks in a pack.
type stretch struct {
	chunks []at
	stored int64
	size   int64
	raw    [][]byte
	err    error
	done   chan struct{}
}

// stretchSize bounds a stretch, in memory.
const stretchSize = 2 << 20

func (s *Store) openChunks(ctx context.Context, p part, off, n int64) (io.ReadCloser, error) {
	if len(p.Chunks)%32 != 0 || off < 0 || n < 0 || off > p.Size-n {
		return nil, damaged(nil, "the record of the checkpoint has an impossible list of chunks")
	}
	// Another process wrote chunks that are not known yet.
	unknown := func() bool {
		for ids := p.Chunks; len(ids) > 0; ids = ids[32:] {
			if _, ok := s.chunks.locate(id(ids[:32])); !ok {
				return true
			}
		}
		return false
	}
	if unknown() {
		if err := s.chunks.refresh(ctx); err != nil {
			return nil, err
		}
	}
	var list []at
	var pos, skip int64
	for ids := p.Chunks; len(ids) > 0; ids = ids[32:] {
		a, ok := s.chunks.locate(id(ids[:32]))
		if !ok {
			return nil, damaged(nil, "chunk %s of the checkpoint is missing", id(ids[:32]))
		}
		if pos+int64(a.size) > off && pos < off+n {
			if len(list) == 0 {
				skip = off - pos
			}
			list = append(list, a)
		}
		pos += int64(a.size)
	}
	if pos != p.Size {
		return nil, damaged(nil, "the chunks of the checkpoint have %d bytes together, not %d", pos, p.Size)
	}
	ctx, stop := context.WithCancel(ctx)
	r := &chunkReader{stop: stop, queue: make(chan *stretch, runtime.GOMAXPROCS(0)), ended: make(chan struct{}), skip: skip, left: n}
	go func() {
		defer close(r.ended)
		defer close(r.queue)
		for len(list) > 0 && ctx.Err() == nil {
			t := &stretch{done: make(chan struct{})}
			for len(list) > 0 {
				a := list[0]
				if k := len(t.chunks); k > 0 {
					last := t.chunks[k-1]
					if a.pack != last.pack || a.offset != last.offset+int64(last.stored) || t.size+int64(a.size) > stretchSize {
						break
					}
				}
				t.chunks = append(t.chunks, a)
				t.stored += int64(a.stored)
				t.size += int64(a.size)
				list = list[1:]
			}
			select {
			case r.queue <- t:
				go s.load(ctx, t)
			case <-ctx.Done():
				return
			}
		}
	}()
	return r, nil
}

// load reads and verifies one stretch.
func (s *Store) load(ctx context.Context, t *stretch) {
	defer close(t.done)
	t.err = s.loadFrom(ctx, t)
	if sandboxer.KindOf(t.err) == sandboxer.NotFound {
		t.err = damaged(t.err, "a pack of the checkpoint is missing")
	}
}

func (s *Store) loadFrom(ctx context.Context, t *stretch) error {
	r, err := s.blobs.Get(ctx, packPrefix+t.chunks[0].pack, t.chunks[0].offset, t.stored)
	if err != nil {
		return err
	}
	defer r.Close()
	stored := make([]byte, t.stored)
	if _, err := io.ReadFull(r, stored); err != nil {
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			err = damaged(err, "a pack of the checkpoint is cut short")
		}
		return err
	}
	buf := make([]byte, 0, t.size)
	for _, a := range t.chunks {
		raw := stored[:a.stored:a.stored]
		stored = stored[a.stored:]
		if a.stored != a.size {
			from := len(buf)
			// The decoder is bounded by the capacity of its buffer: a chunk that grows
			// beyond its size fails.
			out, err := s.dec.DecodeAll(raw, buf[from:from:from+int(a.size)])
			if err != nil || len(out) != int(a.size) {
				return damaged(err, "chunk %s of the checkpoint cannot be decompressed", a.id)
			}
			raw, buf = out, buf[:from+int(a.size)]
		}
		if blake3.Sum256(raw) != a.id {
			return damaged(nil, "chunk %s of the checkpoint was changed", a.id)
		}
		t.raw = append(t.raw, raw)
	}
	return nil
}

func (r *chunkReader) Read(p []byte) (int, error) {
	if r.left == 0 && r.err == nil {
		r.err = io.EOF
	}
	for len(r.cur) == 0 && r.err == nil {
		switch {
		case len(r.rest) > 0:
			r.cur, r.rest = r.rest[0][r.skip:], r.rest[1:]
			r.skip = 0
		default:
			t, ok := <-r.queue
			if !ok {
				r.err = context.Canceled
				break
			}
			<-t.done
			r.rest, r.err = t.raw, t.err
		}
	}
	if r.err != nil {
		return 0, r.err
	}
	n := copy(p[:min(int64(len(p)), r.left)], r.cur)
	r.cur, r.left = r.cur[n:], r.left-int64(n)
	return n, nil
}

// Close waits until reading ahead has ended.
func (r *chunkReader) Close() error {
	r.stop()
	for t := range r.queue {
		<-t.done
	}
	<-r.ended
	return nil
}

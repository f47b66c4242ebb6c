package checkpoint

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/blake3"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// What a store is made of.
const (
	packPrefix       = "packs/"       // chunks
	indexPrefix      = "index/"       // where they are in a pack
	streamPrefix     = "streams/"     // payloads in the stream encoding
	pendingPrefix    = "pending/"     // <id>/<random>: complete, not verified yet
	checkpointPrefix = "checkpoints/" // <id>: sealed
	dropPrefix       = "drops/"       // <id>: dropped, to be deleted
	pinPrefix        = "pins/"        // <id>/<name>/<until>: needed by somebody
	condemnedPrefix  = "condemned/"   // <name of a pack or stream>: needed by nobody, to be deleted
	clockPrefix      = "clock/"       // asks the store for the time
)

// recordFormat is the version of the record of a checkpoint in a store.
const recordFormat = "sandboxer.checkpoint.record/1"

const maxRecord = 256 << 20

// An Encoding is how a store keeps payloads.
type Encoding string

// The encodings. Every store reads both.
const (
	Chunks Encoding = "chunks" // deduplicated across checkpoints
	Stream Encoding = "stream" // one zstd object each
)

// Options of a Store; the zero value will do.
type Options struct {
	Encoding   Encoding      // of new checkpoints; default Chunks
	Trusted    []KeyID       // signers accepted besides our own, here and on import
	SpoolDir   string        // for archives that are not in order; default os.TempDir
	SpoolBytes int64         // at most, for one archive; default 64 GiB
	Grace      time.Duration // how long what is not needed is kept; default 24 h
	Lease      time.Duration // how long a reader that stands still keeps its checkpoint; default 1 h
	Producer   string        // program and version, for the manifest
}

// A Store saves checkpoints and gives them back. It is safe for concurrent use; several
// may share one place.
type Store struct {
	blobs   Blobs
	key     ed25519.PrivateKey
	id      KeyID
	trusted map[KeyID]bool
	o       Options
	chunks  *chunkIndex
	enc     *zstd.Encoder
	dec     *zstd.Decoder
	cut     *cutter
	cutMan  *cutter
}

// New returns the store in blobs, which signs with key.
func New(blobs Blobs, key ed25519.PrivateKey, o Options) (*Store, error) {
	if len(key) != ed25519.PrivateKeySize {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "checkpoints need a key to be signed with").WithHint("use LoadKey")
	}
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.Grace, 24*time.Hour)
	def(&o.Lease, time.Hour)
	if o.SpoolBytes == 0 {
		o.SpoolBytes = 64 << 30
	}
	if o.SpoolDir == "" {
		o.SpoolDir = os.TempDir()
	}
	if o.Encoding == "" {
		o.Encoding = Chunks
	}
	if o.Encoding != Chunks && o.Encoding != Stream {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%.40q is no encoding of checkpoints", o.Encoding).WithHint("use chunks or stream")
	}
	s := &Store{blobs: blobs, key: key, id: ID(key), trusted: map[KeyID]bool{}, o: o, cut: newCutter(chunkSize), cutMan: newCutter(manifestChunk)}
	s.trusted[s.id] = true
	for _, k := range o.Trusted {
		if _, err := k.public(); err != nil {
			return nil, err
		}
		s.trusted[k] = true
	}
	s.chunks = newChunkIndex(s)
	var err error
	if s.enc, err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false)); err != nil {
		return nil, err
	}
	s.dec, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(maxChunk))
	return s, err
}

// Key returns the ID under which others know what this store signs.
func (s *Store) Key() KeyID { return s.id }

// A record is what checkpoints/<id> holds.
type record struct {
	Format    string   `json:"format"`
	ID        string   `json:"id"`
	Head      Manifest `json:"head"` // the manifest without its files, for lists
	Manifest  part     `json:"manifest"`
	Payload   part     `json:"payload"`
	Signer    KeyID    `json:"signer"`
	Signature []byte   `json:"signature"` // of the manifest
	Sealer    KeyID    `json:"sealer"`    // the store that verified it
	Seal      []byte   `json:"seal"`      // its signature of the manifest's digest
}

func sealed(id, manifestDigest string) []byte {
	return []byte(Format + " seal\x00" + id + "\x00" + manifestDigest)
}

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
// If Save fails there is no such checkpoint, and what was stored of it is removed by
// GC. Kinds: Conflict if id exists or was dropped lately, Invalid for an archive that
// is refused, Exhausted when there is no room, Failed if what was read back is not what
// was written, Unavailable when it may work the next time. An error of r is returned as
// it is.
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

// begin checks that id can be taken.
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

// end lets go of what is not finished.
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
func (b brokenSink) space() ([]byte, error)    { return nil, b.err }
func (b brokenSink) fill(int) error            { return b.err }
func (b brokenSink) finish() (part, error)     { return part{}, b.err }
func (b brokenSink) abort()                    {}

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
	// the pending record, or we see what it has condemned.
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
	// The pending record held everything so far only if it is still there. It is not if
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

// kept checks that every pack in use is there and not about to be deleted.
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
	// In this order: a deletion ends with the removal of the mark, so a pack without a
	// mark that is gone is missing here.
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
// that were there before.
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

// mark is what an object holds that says everything by its name.
var mark = []byte("1\n")

func (s *Store) putBytes(ctx context.Context, name string, data []byte) error {
	return s.blobs.Put(ctx, name, bytes.NewReader(data))
}

// record reads the record of a sealed checkpoint.
func (s *Store) record(ctx context.Context, id string) (*record, error) {
	if err := CheckID(id); err != nil {
		return nil, err
	}
	data, err := s.getBytes(ctx, checkpointPrefix+id, maxRecord)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		if list, _ := s.blobs.List(ctx, pendingPrefix+id+"/"); len(list) > 0 {
			return nil, sandboxer.E(sandboxer.NotFound, err, "checkpoint %s is not sealed", id).
				WithHint("it is being saved, or was when its broker ended; wait, or save another one")
		}
		return nil, sandboxer.E(sandboxer.NotFound, err, "there is no checkpoint %s", id)
	}
	if err != nil {
		return nil, err
	}
	return s.decodeRecord(id, data)
}

func (s *Store) decodeRecord(id string, data []byte) (*record, error) {
	if err := checkFormat(data, "the record of checkpoint "+id, recordFormat); err != nil {
		return nil, err
	}
	var head struct {
		Head json.RawMessage `json:"head"`
	}
	_ = json.Unmarshal(data, &head) // what is not JSON at all is refused below
	if err := checkFormat(head.Head, "the manifest of checkpoint "+id, Format); err != nil {
		return nil, err
	}
	rec := new(record)
	if err := strictjson.Decode(data, rec); err != nil || rec.ID != id || rec.Format != recordFormat || rec.Head.Format != Format {
		return nil, damaged(err, "the record of checkpoint %s cannot be read", id)
	}
	if rec.Payload.Size < 0 || rec.Manifest.Size <= 0 || rec.Manifest.Size > maxManifest || len(rec.Payload.Chunks)%32 != 0 || len(rec.Manifest.Chunks)%32 != 0 ||
		rec.Payload.Stream != "" && !strings.HasPrefix(rec.Payload.Stream, streamPrefix) || rec.Manifest.Stream != "" ||
		rec.Payload.Stream != path.Clean(rec.Payload.Stream) && rec.Payload.Stream != "" {
		return nil, damaged(nil, "the record of checkpoint %s is impossible", id)
	}
	if !s.trusted[rec.Sealer] {
		return nil, sandboxer.E(sandboxer.Denied, nil, "checkpoint %s was sealed by %s, which is not trusted here", id, rec.Sealer).
			WithHint("add the key to the trusted ones if it is yours")
	}
	pub, err := rec.Sealer.public()
	if err != nil {
		return nil, err
	}
	if !ed25519.Verify(pub, sealed(id, rec.Manifest.Digest), rec.Seal) {
		return nil, damaged(nil, "the seal of checkpoint %s does not fit it", id)
	}
	return rec, nil
}

// manifest reads and verifies the manifest that rec names, and the encoded form.
func (s *Store) manifest(ctx context.Context, rec *record) (*Manifest, []byte, error) {
	r, err := s.open(ctx, rec.Manifest)
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, nil, err
	}
	if err := verify(rec.Signer, data, rec.Signature); err != nil {
		return nil, nil, err
	}
	m, err := decodeManifest(data)
	if err != nil {
		return nil, nil, err
	}
	if m.ID != rec.ID || m.Payload.Digest != rec.Payload.Digest || m.Payload.Size != rec.Payload.Size {
		return nil, nil, damaged(nil, "the record of checkpoint %s belongs to another", rec.ID)
	}
	m.Signer = rec.Signer
	return m, data, nil
}

// Get returns the manifest of a sealed checkpoint. Kinds: NotFound, also for one that
// is not sealed or was dropped; Failed if it is damaged; Denied if its sealer is not
// trusted.
func (s *Store) Get(ctx context.Context, id string) (*Manifest, error) {
	m, _, _, release, err := s.use(ctx, id)
	if err != nil {
		return nil, err
	}
	return m, release()
}

// use pins id and reads its manifest.
func (s *Store) use(ctx context.Context, id string) (_ *Manifest, data []byte, _ *record, release func() error, err error) {
	// Before the pin, so that asking for what is not there leaves nothing.
	if _, err := s.record(ctx, id); err != nil {
		return nil, nil, nil, nil, err
	}
	name := "open-" + rand.Text()
	unpin := func() error { return s.letGo(ctx, id, name) }
	defer func() {
		if err != nil {
			_ = unpin()
		}
	}()
	if err := s.pin(ctx, id, name, time.Now().Add(s.o.Lease)); err != nil {
		return nil, nil, nil, nil, err
	}
	// After it: whoever dropped it before we pinned it may already be deleting.
	if _, err := s.blobs.Stat(ctx, dropPrefix+id); sandboxer.KindOf(err) != sandboxer.NotFound {
		if err == nil {
			err = sandboxer.E(sandboxer.NotFound, nil, "checkpoint %s was dropped", id)
		}
		return nil, nil, nil, nil, err
	}
	rec, err := s.record(ctx, id)
	if err != nil {
		return nil, nil, nil, nil, err
	}
	m, data, err := s.manifest(ctx, rec)
	return m, data, rec, unpin, err
}

// Open returns the manifest of a sealed checkpoint and its canonical tar. What is read
// was verified, and instead of the end comes an error if all of it together is not what
// was saved; whoever unpacks it removes what came of it then. Until the reader is
// closed, and an hour longer than anything was read if it never is (Options.Lease), the
// checkpoint is not deleted. The kinds are those of Get.
func (s *Store) Open(ctx context.Context, id string) (*Manifest, io.ReadCloser, error) {
	m, _, rec, release, err := s.use(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	r, err := s.openPayload(ctx, rec.Payload, m.Files)
	if err != nil {
		_ = release()
		return nil, nil, err
	}
	return m, s.lease(ctx, id, r, release), nil
}

// OpenFile returns one file of a checkpoint, verified as Open does it. name is its path
// in the manifest; a hard link is its file. Kinds: those of Get, Invalid if name is no
// file.
func (s *Store) OpenFile(ctx context.Context, id, name string) (*File, io.ReadCloser, error) {
	m, _, rec, release, err := s.use(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	f, err := m.file(name)
	if err != nil {
		_ = release()
		return nil, nil, err
	}
	r, err := s.openAt(ctx, rec.Payload, f.Data, f.Size)
	if err != nil {
		_ = release()
		return nil, nil, err
	}
	if _, isStream := r.(limited); isStream {
		r = limited{io.LimitReader(r, f.Size), r}
	}
	v := &verifier{r: r, part: part{Digest: f.Digest, Size: f.Size}, hash: blake3.New()}
	return f, s.lease(ctx, id, v, release), nil
}

// file finds the file called name.
func (m *Manifest) file(name string) (*File, error) {
	f, ok := m.find(path.Clean(strings.TrimPrefix(name, "/")))
	if ok && f.Type == TypeHardlink {
		f, ok = m.find(f.Link)
	}
	if !ok {
		return nil, sandboxer.E(sandboxer.NotFound, nil, "checkpoint %s has no %q", m.ID, name).WithHint("list its files")
	}
	if f.Type != TypeFile {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%q in checkpoint %s is a %s, not a file", name, m.ID, f.Type)
	}
	return f, nil
}

// A leased reader keeps its checkpoint from being deleted.
type leased struct {
	io.ReadCloser
	s       *Store
	ctx     context.Context
	id      string
	renewed time.Time
	release func() error
	closed  bool
}

func (s *Store) lease(ctx context.Context, id string, r io.ReadCloser, release func() error) io.ReadCloser {
	return &leased{ReadCloser: r, s: s, ctx: ctx, id: id, renewed: time.Now(), release: release}
}

func (l *leased) Read(p []byte) (int, error) {
	if time.Since(l.renewed) > l.s.o.Lease/2 {
		next := "open-" + rand.Text()
		if err := l.s.pin(l.ctx, l.id, next, time.Now().Add(l.s.o.Lease)); err != nil {
			return 0, err
		}
		old := l.release
		l.release = func() error { return l.s.letGo(l.ctx, l.id, next) }
		l.renewed = time.Now()
		if err := old(); err != nil {
			return 0, err
		}
	}
	return l.ReadCloser.Read(p)
}

// Close ends the lease.
func (l *leased) Close() error {
	if l.closed {
		return nil
	}
	l.closed = true
	err := l.ReadCloser.Close()
	if e := l.release(); err == nil {
		err = e
	}
	return err
}

// Pin keeps a sealed checkpoint until the given time, or until Unpin if that is zero,
// even when it is dropped meanwhile. name is whoever needs it; pinning again under the
// same name moves the time. Kinds: NotFound if there is no such checkpoint or it was
// dropped, Invalid for an improper name.
func (s *Store) Pin(ctx context.Context, id, name string, until time.Time) error {
	if err := CheckID(name); err != nil {
		return err
	}
	if _, err := s.record(ctx, id); err != nil {
		return err
	}
	if err := s.pin(ctx, id, name, until); err != nil {
		return err
	}
	_, err := s.blobs.Stat(ctx, dropPrefix+id)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil
	}
	if err == nil {
		err = sandboxer.E(sandboxer.NotFound, nil, "checkpoint %s was dropped", id)
	}
	_ = s.letGo(ctx, id, name)
	return err
}

// letGo is Unpin for a pin of our own, also when ctx is over; one that stays ends by itself.
func (s *Store) letGo(ctx context.Context, id, name string) error {
	late, stop := outlast(ctx)
	defer stop()
	return s.Unpin(late, id, name)
}

// lateness is how long what has to be put in order may go on when its context is over.
const lateness = 5 * time.Second

// outlast returns a context that goes on for a little longer than ctx.
func outlast(ctx context.Context) (context.Context, context.CancelFunc) {
	late, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var timer *time.Timer
	armed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		timer = time.AfterFunc(lateness, cancel)
		close(armed)
	})
	return late, func() {
		if !stop() {
			<-armed
			timer.Stop()
		}
		cancel()
	}
}

func (s *Store) pin(ctx context.Context, id, name string, until time.Time) error {
	prefix := pinPrefix + id + "/" + name + "/"
	old, err := s.blobs.List(ctx, prefix)
	if err != nil {
		return err
	}
	var at int64
	if !until.IsZero() {
		at = max(until.Unix(), 1)
	}
	obj := prefix + strconv.FormatInt(at, 10)
	if err := s.putBytes(ctx, obj, mark); err != nil && sandboxer.KindOf(err) != sandboxer.Conflict {
		return err
	}
	for _, b := range old {
		if b.Name != obj {
			if err := s.blobs.Delete(ctx, b.Name); err != nil {
				return err
			}
		}
	}
	return nil
}

// Unpin takes back a pin; one that does not exist is success.
func (s *Store) Unpin(ctx context.Context, id, name string) error {
	if err := CheckID(id); err != nil {
		return err
	}
	if err := CheckID(name); err != nil {
		return err
	}
	list, err := s.blobs.List(ctx, pinPrefix+id+"/"+name+"/")
	for _, b := range list {
		if e := s.blobs.Delete(ctx, b.Name); err == nil {
			err = e
		}
	}
	return err
}

// Drop forgets a checkpoint: at once it can no longer be opened, and GC deletes it
// after the grace period and the last pin. Dropping what does not exist is success.
func (s *Store) Drop(ctx context.Context, id string) error {
	if err := CheckID(id); err != nil {
		return err
	}
	if _, err := s.blobs.Stat(ctx, checkpointPrefix+id); err != nil {
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			return nil
		}
		return err
	}
	if err := s.putBytes(ctx, dropPrefix+id, mark); err != nil && sandboxer.KindOf(err) != sandboxer.Conflict {
		return err
	}
	return nil
}

// IDs returns the IDs of all checkpoints that were not dropped, in order, without looking at
// their records, which may be damaged.
func (s *Store) IDs(ctx context.Context) ([]string, error) {
	dropped, err := s.names(ctx, dropPrefix)
	if err != nil {
		return nil, err
	}
	ids, err := s.names(ctx, checkpointPrefix)
	if err != nil {
		return nil, err
	}
	return slices.Sorted(func(yield func(string) bool) {
		for id := range ids {
			if !dropped[id] && !yield(id) {
				return
			}
		}
	}), nil
}

// List returns the manifests of all sealed checkpoints that were not dropped, without
// their files, the newest first. Those whose records cannot be read are left out, and
// the error, which then comes with the list, names them.
func (s *Store) List(ctx context.Context) ([]*Manifest, error) {
	dropped, err := s.names(ctx, dropPrefix)
	if err != nil {
		return nil, err
	}
	ids, err := s.names(ctx, checkpointPrefix)
	if err != nil {
		return nil, err
	}
	var list []*Manifest
	var bad error
	for id := range ids {
		if dropped[id] {
			continue
		}
		rec, err := s.record(ctx, id)
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			continue // deleted meanwhile
		}
		if err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			bad = errors.Join(bad, err)
			continue
		}
		m := rec.Head
		m.Digest, m.Signer = rec.Manifest.Digest, rec.Signer
		list = append(list, &m)
	}
	slices.SortFunc(list, func(a, b *Manifest) int {
		if c := b.Created.Compare(a.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list, bad
}

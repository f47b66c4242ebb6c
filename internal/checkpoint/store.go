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
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/blake3"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// The prefixes of a store's objects.
const (
	packPrefix       = "packs/"       // chunks
	indexPrefix      = "index/"       // where they are in a pack
	streamPrefix     = "streams/"     // payloads in the stream encoding
	pendingPrefix    = "pending/"     // <id>/<random>: complete, not verified yet
	checkpointPrefix = "checkpoints/" // <id>: sealed
	dropPrefix       = "drops/"       // <id>: dropped, to be deleted
	pinPrefix        = "pins/"        // <id>/<name>/<until>: still needed
	condemnedPrefix  = "condemned/"   // <name of a pack or stream>: unneeded, to be deleted
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

// Options of a Store; the zero value is usable.
type Options struct {
	Encoding   Encoding      // of new checkpoints; default Chunks
	Trusted    []KeyID       // signers accepted besides our own, here and on import
	SpoolDir   string        // for archives that are not in order; default os.TempDir
	SpoolBytes int64         // at most, for one archive; default 64 GiB
	Grace      time.Duration // how long what is not needed is kept; default 24 h
	Lease      time.Duration // how long an idle reader keeps its checkpoint; default 1 h
	Producer   string        // program and version, for the manifest
}

// A Store saves checkpoints and returns them. It is safe for concurrent use; several
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
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%.40q is not an encoding of checkpoints", o.Encoding).WithHint("use chunks or stream")
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

// Key returns the ID by which others know this store's signature.
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

// mark is the content of an object whose name says everything.
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
	// Before the pin, so that a request for a missing checkpoint leaves nothing.
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
	// After the pin: a process that dropped it before that may already be deleting it.
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

// Open returns the manifest of a sealed checkpoint and its canonical tar. Everything
// read is verified, and instead of the end comes an error if all of it together is not what
// was saved; the caller must then remove what it unpacked. Until the reader is
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

// OpenFile returns one file of a checkpoint, verified as by Open. name is its path
// in the manifest; a hard link means its file. Kinds: those of Get, Invalid if name is no
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

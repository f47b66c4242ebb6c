package checkpoint

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// An exported checkpoint is one file: a zstd skippable frame with the manifest and its
// signature, and the payload as ordinary zstd frames. zstd and tar skip the former, so
// that the file is also a plain .tar.zst.
const skippableMagic = 0x184D2A5B

// envelope is what the skippable frame holds, compressed.
type envelope struct {
	Format    string `json:"format"`
	Manifest  []byte `json:"manifest"` // encoded, as it was signed
	Signer    KeyID  `json:"signer"`
	Signature []byte `json:"signature"`
}

const envelopeFormat = "sandboxer.checkpoint.export/1"

// Export writes the checkpoint id to w as one file. The kinds are those of Open; after
// an error the output is of no use.
func (s *Store) Export(ctx context.Context, id string, w io.Writer) (err error) {
	m, data, rec, release, err := s.use(ctx, id)
	if err != nil {
		return err
	}
	src, err := s.openPayload(ctx, rec.Payload, m.Files)
	if err != nil {
		return errors.Join(err, release())
	}
	r := s.lease(ctx, id, src, release)
	defer func() { err = errors.Join(err, r.Close()) }()
	env, err := json.Marshal(envelope{Format: envelopeFormat, Manifest: data, Signer: rec.Signer, Signature: rec.Signature})
	if err != nil {
		return err
	}
	body := s.enc.EncodeAll(env, nil)
	head := binary.LittleEndian.AppendUint32(nil, skippableMagic)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(body)))
	for _, b := range [][]byte{head, body} {
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	enc, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(2))
	if err != nil {
		return err
	}
	_, err = io.CopyBuffer(struct{ io.Writer }{enc}, struct{ io.Reader }{r}, make([]byte, copySize))
	return errors.Join(err, enc.Close())
}

// ImportOptions say what Import accepts.
type ImportOptions struct {
	Rules Rules
	// Accept are signers accepted this once, besides our own and the trusted ones.
	Accept []KeyID
	// Manifest bounds the bytes of the manifest, which is held in memory, and several
	// times over while it is read. 0 means DefaultManifest; at most 512 MiB.
	Manifest int64
}

// DefaultManifest is the bound on the manifest of an import: some 80,000 files.
const DefaultManifest = 16 << 20

// A manifest that is larger than freeManifest must not exceed manifestRatio times
// its compressed size: digests do not compress, and names hardly do.
const (
	freeManifest  = 1 << 20
	manifestRatio = 100
)

// Import takes a file that Export wrote, of this or of another installation, and
// returns the manifest of the checkpoint once it is sealed here, as Save does. ID and
// signature stay. Importing a checkpoint that exists already is success.
//
// Kinds: Denied for a signer that is neither trusted nor accepted, naming its key;
// Invalid for a file that is no export, was changed, or breaks Rules; Conflict if
// another checkpoint has the ID; and those of Save.
func (s *Store) Import(ctx context.Context, r io.Reader, o ImportOptions) (*Manifest, error) {
	read := &meter{ctx: ctx, r: r, limit: 1 << 62}
	in := bufio.NewReaderSize(read, copySize)
	env, err := readEnvelope(in, min(cmp.Or(o.Manifest, DefaultManifest), maxManifest))
	if err != nil {
		return nil, err
	}
	if !s.trusted[env.Signer] && !slices.Contains(o.Accept, env.Signer) {
		return nil, sandboxer.E(sandboxer.Denied, nil, "the checkpoint is signed by %s, which is not known here", env.Signer).
			WithHint("if that key belongs to the installation that you got it from, import it with --accept %s", env.Signer)
	}
	data := env.Manifest
	m, err := decodeManifest(data)
	if err != nil {
		return nil, err
	}
	m.Signer = env.Signer
	// It cannot have more entries than the manifest; each takes memory.
	o.Rules.Entries = min(o.Rules.WithDefaults().Entries, len(m.Files)+1)
	if have, err := s.Get(ctx, m.ID); err == nil {
		if have.Digest == m.Digest {
			return have, nil
		}
		return nil, taken(m.ID)
	} else if sandboxer.KindOf(err) != sandboxer.NotFound {
		return nil, err
	}
	// With one thread the decoder reads in ours, and bomb may read the meter.
	dec, err := zstd.NewReader(in, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	defer dec.Close()
	w, err := s.begin(ctx, m.ID)
	if err != nil {
		return nil, err
	}
	defer w.end()
	c, err := w.payload(&bomb{dec: dec, left: m.Payload.Size, ratio: maxRatio, in: read}, o.Rules, m.Payload.Keep)
	if err != nil {
		return nil, err
	}
	if c.part.Digest != m.Payload.Digest && c.part.Size == m.Payload.Size { // it may be of one of the first builds
		if err := w.p.flush(); err != nil {
			return nil, err
		}
		whole, err := s.wholeDigest(ctx, c.part)
		if err != nil {
			return nil, err
		}
		if whole == m.Payload.Digest {
			c.part.Digest = whole
		}
	}
	// Save would have made exactly this of it; if not, Save did not make the file.
	if c.part.Digest != m.Payload.Digest || c.part.Size != m.Payload.Size || c.bytes != m.Payload.Bytes || !reflect.DeepEqual(c.files, m.Files) && len(c.files)+len(m.Files) > 0 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the checkpoint was changed: its files are not those of its manifest")
	}
	return w.seal(m, data, c.part, env.Signer, env.Signature)
}

// readEnvelope reads the part before the payload. It verifies the signature; the caller
// decides about the signer before the manifest is read.
func readEnvelope(in io.Reader, limit int64) (*envelope, error) {
	bad := func(err error, why string) (*envelope, error) {
		var own *sandboxer.Error
		if errors.As(err, &own) || err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && sandboxer.KindOf(err) != sandboxer.Internal {
			return nil, err
		}
		return nil, sandboxer.E(sandboxer.Invalid, err, "this is no exported checkpoint: %s", why)
	}
	large := func() (*envelope, error) {
		return nil, refuse("its manifest has more than %d MiB", limit>>20).
			WithHint("an administrator may import it; or export it without directories of very many files, such as caches")
	}
	var head [8]byte
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return bad(err, "it is too short")
	}
	if binary.LittleEndian.Uint32(head[:]) != skippableMagic {
		return bad(nil, "it does not begin as one")
	}
	n := int64(binary.LittleEndian.Uint32(head[4:]))
	if n > limit {
		return large()
	}
	var packed bytes.Buffer // grows with what is really there
	if _, err := io.CopyN(&packed, in, n); err != nil {
		return bad(err, "it is cut short")
	}
	dec, err := zstd.NewReader(&packed, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	defer dec.Close()
	most := limit*4/3 + 1<<10 // base64, and what is around it
	dense := n*manifestRatio < most
	if dense {
		most = max(n*manifestRatio, freeManifest)
	}
	raw, err := io.ReadAll(io.LimitReader(dec, most+1))
	if err != nil {
		return bad(nil, "its manifest cannot be decompressed")
	}
	if int64(len(raw)) > most {
		if dense {
			return nil, refuse("its manifest becomes more than %d times what it was compressed", manifestRatio)
		}
		return large()
	}
	if err := checkFormat(raw, "the exported checkpoint", envelopeFormat); err != nil {
		return nil, err
	}
	env := new(envelope)
	if err := strictjson.Decode(raw, env); err != nil || env.Format != envelopeFormat {
		return bad(nil, "its manifest cannot be read")
	}
	if int64(len(env.Manifest)) > limit {
		return large()
	}
	return env, verify(env.Signer, env.Manifest, env.Signature)
}

// bomb reads decompressed data and refuses more than was announced, or than its
// compressed size can account for.
type bomb struct {
	dec   *zstd.Decoder
	in    *meter
	left  int64
	ratio int64
	out   int64
}

func (b *bomb) Read(p []byte) (int, error) {
	n, err := b.dec.Read(p)
	b.out += int64(n)
	if b.left -= int64(n); b.left < 0 {
		return 0, refuse("it has more bytes than its manifest says")
	}
	if b.out > freeOutput && b.out/b.ratio > b.in.n {
		return 0, refuse("more than %d bytes come out of each of its compressed bytes", b.ratio).WithHint("allow a higher ratio if you trust it")
	}
	if b.in.err != nil { // the decoder does not pass it on as it is
		return n, b.in.err
	}
	if err != nil && err != io.EOF {
		e := refuse("it cannot be decompressed")
		e.Err = err
		err = e
	}
	return n, err
}

package checkpoint

import (
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"io/fs"
	"strings"
	"time"

	"github.com/zeebo/blake3"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/safetar"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// Format is the version of the manifest. A program reads the versions it knows and
// refuses all others.
const Format = "sandboxer.checkpoint/1"

// maxManifest bounds an encoded manifest. A file takes about 200 bytes in it.
const maxManifest = 512 << 20

// A Manifest describes one checkpoint. It is written once, signed, and never changed.
type Manifest struct {
	Format   string    `json:"format"`
	ID       string    `json:"id"`
	Kind     string    `json:"kind"` // "portable": files that any extension can restore
	Created  time.Time `json:"created"`
	Producer string    `json:"producer,omitempty"` // program and version that saved it
	Meta
	Payload Payload `json:"payload"`
	Changed Changes `json:"changed,omitzero"`
	// Files is the index of the payload, in its order.
	Files []File `json:"files"`

	Digest string `json:"-"` // of the encoded manifest, "blake3:…"
	Signer KeyID  `json:"-"` // whose signature it carries
	Stored int64  `json:"-"` // bytes that Save or Import added to the store, compressed; 0 otherwise
}

// Meta is the caller's description of a checkpoint. All of it is optional.
type Meta struct {
	Source   Source   `json:"source,omitzero"`
	Root     string   `json:"root,omitempty"` // path in the source of the directory that was saved
	Parent   string   `json:"parent,omitempty"`
	Quiesced bool     `json:"quiesced"` // nothing was written meanwhile; otherwise crash-consistent
	Excludes []string `json:"excludes,omitempty"`
	Volumes  []string `json:"volumes,omitempty"` // whose contents are below sandboxer.VolumesDir
	Native   *Native  `json:"native,omitempty"`
}

// Source says where a checkpoint was taken.
type Source struct {
	Extension  string `json:"extension,omitempty"`
	Host       string `json:"host,omitempty"`
	Sandbox    string `json:"sandbox,omitempty"`
	Generation int    `json:"generation,omitempty"`
	Profile    string `json:"profile,omitempty"`
	Repo       string `json:"repo,omitempty"`
	Commit     string `json:"commit,omitempty"`
	Dirty      bool   `json:"dirty,omitempty"`
}

// Native points to a checkpoint of the same moment that the backend itself holds.
type Native struct {
	Provider string    `json:"provider"`
	ID       string    `json:"id"`
	Expires  time.Time `json:"expires,omitzero"`
}

// Payload describes the canonical tar.
type Payload struct {
	Digest string `json:"digest"` // of the tree, or, by the first builds, of the whole tar: "blake3:…"
	Size   int64  `json:"size"`   // of the whole tar, bytes
	Bytes  int64  `json:"bytes"`  // of the files in it
	Keep   Keep   `json:"keep,omitzero"`
}

// Keep says what a payload holds beyond names, kinds, permissions, times and contents.
type Keep struct {
	Owners bool `json:"owners,omitempty"` // numeric owners; otherwise all are 0
	Xattrs bool `json:"xattrs,omitempty"` // extended attributes of the namespace "user."
}

// Changes counts what Save left out or altered, so that nothing is lost silently.
type Changes struct {
	SetID        int `json:"set_id,omitempty"`        // set-user-ID, set-group-ID or sticky bits cleared
	Attributes   int `json:"attributes,omitempty"`    // entries that lost extended attributes or ACLs
	Times        int `json:"times,omitempty"`         // times before 1970 or after 2242, moved to the bound
	Skipped      int `json:"skipped,omitempty"`       // devices, FIFOs and sockets left out
	OutsideLinks int `json:"outside_links,omitempty"` // symbolic links that lead out of the root, kept
}

// File is one entry of a payload.
type File struct {
	Path   string `json:"path"`             // from the root, without "./"
	Raw    []byte `json:"raw,omitempty"`    // the path's bytes, when they are not UTF-8; Path is then an approximation
	Type   string `json:"type"`             // "file", "dir", "symlink" or "hardlink"
	Offset int64  `json:"offset"`           // in the payload, of the entry's first header
	Data   int64  `json:"data,omitempty"`   // in the payload, of the contents
	Size   int64  `json:"size,omitempty"`   // of the contents
	Mode   uint32 `json:"mode"`             // permission bits
	Mtime  int64  `json:"mtime"`            // seconds since 1970
	Nsec   int64  `json:"nsec,omitempty"`   // and nanoseconds
	Link   string `json:"link,omitempty"`   // target
	Digest string `json:"digest,omitempty"` // of the contents, "blake3:…"; files only
}

// The types of entries.
const (
	TypeFile     = "file"
	TypeDir      = "dir"
	TypeSymlink  = "symlink"
	TypeHardlink = "hardlink"
)

// Name returns the path's exact bytes.
func (f *File) Name() string {
	if f.Raw != nil {
		return string(f.Raw)
	}
	return f.Path
}

// ModTime returns the time of the last change.
func (f *File) ModTime() time.Time { return time.Unix(f.Mtime, f.Nsec).UTC() }

// FileMode returns the mode as package fs has it.
func (f *File) FileMode() fs.FileMode {
	m := fs.FileMode(f.Mode) & fs.ModePerm
	switch f.Type {
	case TypeDir:
		m |= fs.ModeDir
	case TypeSymlink:
		m |= fs.ModeSymlink
	}
	return m
}

const digestPrefix = "blake3:"

func digest(sum [32]byte) string { return digestPrefix + hex.EncodeToString(sum[:]) }

func digestOf(h *blake3.Hasher) string { return digestPrefix + hex.EncodeToString(h.Sum(nil)) }

func checkDigest(s string) error {
	hexa, ok := strings.CutPrefix(s, digestPrefix)
	if b, err := hex.DecodeString(hexa); !ok || err != nil || len(b) != 32 || strings.ToLower(hexa) != hexa {
		return sandboxer.E(sandboxer.Invalid, nil, "%.80q is not a digest of the form blake3:<64 hexadecimal digits>", s)
	}
	return nil
}

// CheckID reports, as an Invalid error, why id cannot name a checkpoint: letters,
// digits, '.', '_' and '-', at most 128, the first a letter or digit.
func CheckID(id string) error {
	bad := strings.IndexFunc(id, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r))
	})
	if id == "" || len(id) > 128 || bad >= 0 || strings.Contains("._-", id[:1]) {
		return sandboxer.E(sandboxer.Invalid, nil, "%.140q cannot be the ID of a checkpoint", id).
			WithHint("use letters, digits, '.', '_' and '-', at most 128, beginning with a letter or digit")
	}
	return nil
}

// encode returns the bytes that are signed.
func (m *Manifest) encode() ([]byte, error) {
	data, err := json.Marshal(m)
	if err == nil && len(data) > maxManifest {
		return nil, sandboxer.E(sandboxer.Exhausted, nil, "the index of checkpoint %s has %d bytes; %d is the limit", m.ID, len(data), maxManifest).
			WithHint("exclude directories with very many files, such as caches")
	}
	return data, err
}

// decodeManifest reads what encode wrote. It refuses a manifest that is not consistent in
// itself, even if its signature is good.
func decodeManifest(data []byte) (*Manifest, error) {
	bad := func(err error, format string, args ...any) (*Manifest, error) {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the manifest cannot be read: "+format, args...)
	}
	if len(data) > maxManifest {
		return bad(nil, "it has %d bytes; %d is the limit", len(data), maxManifest)
	}
	if err := checkFormat(data, "the manifest", Format); err != nil {
		return nil, err
	}
	m := new(Manifest)
	if err := strictjson.Decode(data, m); err != nil || m.Format != Format {
		return bad(err, "it does not have the fields of %s", Format)
	}
	if err := CheckID(m.ID); err != nil {
		return nil, err
	}
	if m.Parent != "" {
		if err := CheckID(m.Parent); err != nil {
			return nil, err
		}
	}
	if m.Kind != "portable" {
		return bad(nil, "its kind is %.40q; portable is the only one", m.Kind)
	}
	if err := checkDigest(m.Payload.Digest); err != nil {
		return nil, err
	}
	if m.Payload.Size < 0 || m.Payload.Bytes < 0 || m.Payload.Bytes > m.Payload.Size {
		return bad(nil, "its payload cannot have %d bytes with files of %d", m.Payload.Size, m.Payload.Bytes)
	}
	var end, sum int64
	for i := range m.Files {
		f := &m.Files[i]
		name, err := safetar.Rules{}.WithDefaults().CleanName(f.Name())
		if err != nil || name == "." || name != f.Name() || f.Path != display(name) || (f.Raw != nil) != (f.Path != name) {
			return bad(err, "entry %d has an invalid name", i)
		}
		if i > 0 && compareNames(m.Files[i-1].Name(), name) >= 0 {
			return bad(nil, "entry %d, %q, is out of order", i, f.Path)
		}
		if f.Offset < end || f.Offset%blockSize != 0 || f.Mode&^0o777 != 0 || f.Nsec < 0 || f.Nsec >= 1e9 || f.Mtime < 0 || f.Mtime > maxTime {
			return bad(nil, "entry %d, %q, has impossible attributes", i, f.Path)
		}
		switch f.Type {
		case TypeFile:
			if f.Size < 0 || f.Size > m.Payload.Size || f.Data < f.Offset+blockSize || f.Data > m.Payload.Size-f.Size || f.Link != "" {
				return bad(nil, "entry %d, %q, is outside the payload", i, f.Path)
			}
			if err := checkDigest(f.Digest); err != nil {
				return nil, err
			}
			end = f.Data + padded(f.Size)
			sum += f.Size
		case TypeDir, TypeSymlink, TypeHardlink:
			if f.Size != 0 || f.Data != 0 || f.Digest != "" || (f.Link != "") != (f.Type != TypeDir) {
				return bad(nil, "entry %d, %q, has impossible attributes", i, f.Path)
			}
			end = f.Offset + blockSize
		default:
			return bad(nil, "entry %d, %q, has the unknown type %.40q", i, f.Path, f.Type)
		}
		if end > m.Payload.Size {
			return bad(nil, "entry %d, %q, is outside the payload", i, f.Path)
		}
	}
	if sum != m.Payload.Bytes {
		return bad(nil, "its files have %d bytes together, not %d", sum, m.Payload.Bytes)
	}
	m.Digest = digest(blake3.Sum256(data))
	return m, nil
}

// find returns the entry called name.
func (m *Manifest) find(name string) (*File, bool) {
	lo, hi := 0, len(m.Files)
	for lo < hi {
		mid := (lo + hi) / 2
		if compareNames(m.Files[mid].Name(), name) < 0 {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo < len(m.Files) && m.Files[lo].Name() == name {
		return &m.Files[lo], true
	}
	return nil, false
}

// A KeyID is a public key in the form "ed25519:<64 hexadecimal digits>".
type KeyID string

// keyID returns the ID of a public key.
func keyID(pub ed25519.PublicKey) KeyID { return KeyID("ed25519:" + hex.EncodeToString(pub)) }

// public returns the key itself.
func (k KeyID) public() (ed25519.PublicKey, error) {
	hexa, ok := strings.CutPrefix(string(k), "ed25519:")
	b, err := hex.DecodeString(hexa)
	if !ok || err != nil || len(b) != ed25519.PublicKeySize || keyID(b) != k {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%.90q is not a key of the form ed25519:<64 hexadecimal digits>", string(k))
	}
	return b, nil
}

// signed returns what a signature covers: the format, so that it cannot be taken for a
// signature over something else, and the manifest.
func signed(manifest []byte) []byte {
	return append([]byte(Format+" manifest\x00"), manifest...)
}

func sign(key ed25519.PrivateKey, manifest []byte) []byte { return ed25519.Sign(key, signed(manifest)) }

func verify(k KeyID, manifest, sig []byte) error {
	pub, err := k.public()
	if err != nil {
		return err
	}
	if len(sig) != ed25519.SignatureSize || !ed25519.Verify(pub, signed(manifest), sig) {
		return sandboxer.E(sandboxer.Invalid, nil, "the manifest was changed after it was signed: the signature of %s does not fit it", k)
	}
	return nil
}

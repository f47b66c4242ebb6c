package images

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"
)

// errDamaged says that a stored layer has changed or is invalid.
var errDamaged = errors.New("it is damaged")

// IsDamaged reports whether a stored layer turned out to be damaged.
func IsDamaged(err error) bool { return errors.Is(err, errDamaged) }

// Layers returns the layers of img, which Pull has brought to paths.
func (img *Image) Layers(paths []string) []Layer {
	out := make([]Layer, len(paths))
	for i, p := range paths {
		out[i] = Layer{Open: func() (io.ReadCloser, error) { return openLayer(p) }, DiffID: img.Config.RootFS.DiffIDs[i].String()}
	}
	return out
}

// Mend removes those of the files at paths that no longer have the digest they are
// stored under, and reports whether there were any: then pulling again helps.
func (img *Image) Mend(paths []string) (mended bool, err error) {
	for i, p := range paths {
		f, err := os.Open(p)
		if errors.Is(err, os.ErrNotExist) {
			mended = true
			continue
		}
		if err != nil {
			return mended, err
		}
		sum := sha256.New()
		_, err = io.Copy(sum, f)
		f.Close()
		if err != nil || hex.EncodeToString(sum.Sum(nil)) != img.manifest.Layers[i].Digest.Hex {
			mended = true
			if err := os.Remove(p); err != nil {
				return mended, err
			}
		}
	}
	return mended, nil
}

// openLayer opens a layer, uncompressed. Its first bytes say how it is
// compressed: media types are often wrong, and cannot be checked.
func openLayer(path string) (io.ReadCloser, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	br := bufio.NewReaderSize(f, 1<<20)
	head, err := br.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		f.Close()
		return nil, err
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(br)
		if err != nil {
			f.Close()
			return nil, err
		}
		return opened{z, f, func() { z.Close() }}, nil
	case bytes.Equal(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20))
		if err != nil {
			f.Close()
			return nil, err
		}
		return opened{z, f, z.Close}, nil
	}
	return opened{br, f, func() {}}, nil
}

type opened struct {
	io.Reader
	f    *os.File
	done func()
}

func (o opened) Close() error {
	o.done()
	return o.f.Close()
}

// digest passes on what it reads and computes its digest.
type digest struct {
	r   io.Reader
	sum hash.Hash
}

func newDigest(r io.Reader) *digest { return &digest{r, sha256.New()} }

func (d *digest) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	d.sum.Write(p[:n])
	return n, err
}

func (d *digest) String() string { return "sha256:" + hex.EncodeToString(d.sum.Sum(nil)) }

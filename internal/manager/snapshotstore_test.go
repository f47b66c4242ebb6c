package manager

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// A dirStore keeps tars as they come, in a directory: what the rules of the manager
// need of a SnapshotStore, and no more.
type dirStore struct{ dir string }

func (v dirStore) name(id string) string { return filepath.Join(v.dir, id+".tar") }

func (v dirStore) Save(_ context.Context, rec *sandboxer.SnapshotRecord, r io.Reader) (p sandboxer.PortablePayload, err error) {
	f, err := os.Create(v.name(rec.ID))
	if err != nil {
		return p, err
	}
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, sum), r)
	if err := errors.Join(err, f.Close()); err != nil {
		return p, err
	}
	files, err := v.Files(context.Background(), rec.ID)
	return sandboxer.PortablePayload{Digest: "sha256:" + hex.EncodeToString(sum.Sum(nil)), Bytes: n, Size: n, Files: len(files),
		Quiesced: rec.Portable.Quiesced, Volumes: rec.Portable.Volumes}, err
}

func (v dirStore) Load(_ context.Context, id string) (io.ReadCloser, error) {
	f, err := os.Open(v.name(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, sandboxer.E(sandboxer.NotFound, err, "nothing is kept of %s", id)
	}
	return f, err
}

func (v dirStore) Files(_ context.Context, id string) (out []SnapshotFile, err error) {
	b, err := os.ReadFile(v.name(id))
	if err != nil {
		return nil, err
	}
	in := tar.NewReader(bytes.NewReader(b))
	for {
		hdr, err := in.Next()
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		data, err := io.ReadAll(in)
		if err != nil {
			return nil, err
		}
		f := SnapshotFile{Path: path.Clean(hdr.Name), Type: "file", Size: hdr.Size, Mode: hdr.Mode, Target: hdr.Linkname}
		switch sum := sha256.Sum256(data); hdr.Typeflag {
		case tar.TypeDir:
			f.Type = "dir"
		case tar.TypeSymlink:
			f.Type = "link"
		default:
			f.Digest = hex.EncodeToString(sum[:])
		}
		out = append(out, f)
	}
}

func (v dirStore) Export(ctx context.Context, id string, w io.Writer) error {
	r, err := v.Load(ctx, id)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = io.Copy(w, r)
	return err
}

func (v dirStore) Import(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader, _ []string) (sandboxer.PortablePayload, error) {
	rec.Profile, rec.Message = "profile.test", "imported"
	p, err := v.Save(ctx, rec, r)
	if err != nil {
		err = sandboxer.E(sandboxer.Invalid, err, "it is no snapshot")
	}
	return p, err
}

func (v dirStore) Drop(_ context.Context, id string) error {
	if err := os.Remove(v.name(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (v dirStore) Check(context.Context, string, bool) error { return nil }

func (v dirStore) List(context.Context) (ids []string, err error) {
	names, err := filepath.Glob(filepath.Join(v.dir, "*.tar"))
	for _, n := range names {
		ids = append(ids, strings.TrimSuffix(filepath.Base(n), ".tar"))
	}
	return ids, err
}

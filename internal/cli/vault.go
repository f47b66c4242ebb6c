package cli

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/checkpoint"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// vault is the manager's vault on a store of checkpoints in a local directory.
type vault struct {
	blobs *checkpoint.Dir
	store *checkpoint.Store
	spool string // where imports are looked at first
}

var _ manager.Vault = (*vault)(nil)

// openVault opens, or makes, the vault in dir.
func openVault(dir string) (*vault, error) {
	spool := filepath.Join(dir, "spool")
	if err := os.RemoveAll(spool); err != nil { // of a process that died
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot be cleared", spool)
	}
	if err := os.MkdirAll(spool, 0o700); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot be made", spool)
	}
	key, err := checkpoint.LoadKey(dir)
	if err != nil {
		return nil, err
	}
	blobs, err := checkpoint.OpenDir(filepath.Join(dir, "store"))
	if err != nil {
		return nil, err
	}
	store, err := checkpoint.New(blobs, key, checkpoint.Options{SpoolDir: spool, Producer: "sandboxer " + version()})
	if err != nil {
		blobs.Close()
		return nil, err
	}
	return &vault{blobs, store, spool}, nil
}

func (v *vault) Close() error { return v.blobs.Close() }

// tidy removes what nothing needs any more, now and then, until ctx ends.
func (v *vault) tidy(ctx context.Context, every time.Duration, failed func(error)) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if _, err := v.store.GC(ctx); err != nil && ctx.Err() == nil {
			failed(err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Save implements manager.Vault.
func (v *vault) Save(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader) (sandboxer.PortablePayload, error) {
	meta := checkpoint.Meta{Source: checkpoint.Source{
		Extension: rec.Extension, Host: rec.Host, Sandbox: rec.SandboxID, Generation: rec.Generation, Profile: rec.Profile,
	}, Root: rec.Spec.Workspace, Parent: rec.Parent}
	m, err := v.store.Save(ctx, rec.ID, meta, r, checkpoint.SaveOptions{})
	if err != nil {
		return sandboxer.PortablePayload{}, err
	}
	return payloadOf(m), nil
}

func payloadOf(m *checkpoint.Manifest) sandboxer.PortablePayload {
	return sandboxer.PortablePayload{Digest: m.Payload.Digest, Bytes: m.Stored, Size: m.Payload.Size, Files: len(m.Files), Quiesced: m.Quiesced}
}

// Load implements manager.Vault.
func (v *vault) Load(ctx context.Context, id string) (io.ReadCloser, error) {
	_, r, err := v.store.Open(ctx, id)
	return r, err
}

// Files implements manager.Vault.
func (v *vault) Files(ctx context.Context, id string) ([]manager.SnapshotFile, error) {
	m, err := v.store.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	out := make([]manager.SnapshotFile, len(m.Files))
	for i, f := range m.Files {
		out[i] = manager.SnapshotFile{Path: f.Path, Type: f.Type, Size: f.Size, Mode: int64(f.Mode), Target: f.Link, Digest: f.Digest}
	}
	return out, nil
}

// Export implements manager.Vault.
func (v *vault) Export(ctx context.Context, id string, w io.Writer) error {
	return v.store.Export(ctx, id, w)
}

// Import implements manager.Vault. The file is first imported, and thereby verified,
// into a store of its own: it keeps its ID there, and what comes of it here has the
// ID that the broker chose, as often as one file is imported.
func (v *vault) Import(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader, accept []string) (p sandboxer.PortablePayload, err error) {
	dir, err := os.MkdirTemp(v.spool, "import-")
	if err != nil {
		return p, sandboxer.E(sandboxer.Unavailable, err, "an import has no room")
	}
	defer os.RemoveAll(dir)
	blobs, err := checkpoint.OpenDir(filepath.Join(dir, "store"))
	if err != nil {
		return p, err
	}
	defer blobs.Close()
	key, err := checkpoint.LoadKey(filepath.Dir(v.spool))
	if err != nil {
		return p, err
	}
	own, err := checkpoint.New(blobs, key, checkpoint.Options{SpoolDir: dir, Encoding: checkpoint.Stream})
	if err != nil {
		return p, err
	}
	var keys []checkpoint.KeyID
	for _, a := range accept {
		keys = append(keys, checkpoint.KeyID(a))
	}
	m, err := own.Import(ctx, r, checkpoint.ImportOptions{Accept: keys})
	if err != nil {
		return p, err
	}
	_, tar, err := own.Open(ctx, m.ID)
	if err != nil {
		return p, err
	}
	defer tar.Close()
	meta := m.Meta
	meta.Parent, meta.Native = "", nil
	kept, err := v.store.Save(ctx, rec.ID, meta, tar, checkpoint.SaveOptions{Keep: m.Payload.Keep})
	if err != nil {
		return p, err
	}
	rec.Profile = m.Source.Profile
	rec.Message = "imported: " + m.ID + ", signed by " + string(m.Signer)
	return payloadOf(kept), nil
}

// Drop implements manager.Vault. The space is given back by tidy, a day later.
func (v *vault) Drop(ctx context.Context, id string) error {
	err := v.store.Drop(ctx, id)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil
	}
	return err
}

// List implements manager.Vault.
func (v *vault) List(ctx context.Context) ([]string, error) {
	all, err := v.store.List(ctx)
	var ids []string
	for _, m := range all {
		ids = append(ids, m.ID)
	}
	return ids, err
}

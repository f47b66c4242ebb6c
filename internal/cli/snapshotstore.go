package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/checkpoint"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// snapshotStore is the manager's store of snapshots on a store of checkpoints, in a local directory or in a
// bucket.
type snapshotStore struct {
	spool string // where imports are looked at first
	open  func(context.Context) (checkpoint.Blobs, error)
	close func() error

	mu      sync.Mutex        // held for no longer than it takes to look
	s       *checkpoint.Store // nil until the place was reached
	opening *opening          // in progress, nil if none is
}

// An opening is one attempt to open the place, which all callers that need it share.
type opening struct {
	done chan struct{} // closed when s and err are set
	s    *checkpoint.Store
	err  error
}

var _ manager.SnapshotStore = (*snapshotStore)(nil)

// openSnapshotStore opens, or makes, the store in dir. Checkpoints themselves are in the place
// that place opens, if it is not nil. It is opened when it is first needed, so that a server runs,
// and tears down, while an object store cannot be reached.
func openSnapshotStore(dir string, place func(context.Context) (checkpoint.Blobs, error)) (*snapshotStore, error) {
	spool := filepath.Join(dir, "spool")
	if err := os.RemoveAll(spool); err != nil { // of a process that died
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot be cleared", spool)
	}
	if err := os.MkdirAll(spool, 0o700); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot be made", spool)
	}
	if _, err := checkpoint.LoadKey(dir); err != nil {
		return nil, err
	}
	v := &snapshotStore{spool: spool, open: place, close: func() error { return nil }}
	if place == nil {
		blobs, err := checkpoint.OpenDir(filepath.Join(dir, "store"))
		if err != nil {
			return nil, err
		}
		v.open, v.close = func(context.Context) (checkpoint.Blobs, error) { return blobs, nil }, blobs.Close
	}
	return v, nil
}

func (v *snapshotStore) Close() error { return v.close() }

// store opens the place of the checkpoints. A caller that comes while it is being opened gets
// that result, or leaves when its own ctx ends.
func (v *snapshotStore) store(ctx context.Context) (*checkpoint.Store, error) {
	for {
		v.mu.Lock()
		if v.s != nil {
			defer v.mu.Unlock()
			return v.s, nil
		}
		o, mine := v.opening, v.opening == nil
		if mine {
			o = &opening{done: make(chan struct{})}
			v.opening = o
		}
		v.mu.Unlock()
		if mine {
			o.s, o.err = v.reach(ctx)
			v.mu.Lock()
			v.s, v.opening = o.s, nil
			v.mu.Unlock()
			close(o.done)
			return o.s, o.err
		}
		select {
		case <-o.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if kind := sandboxer.KindOf(o.err); kind != sandboxer.Canceled && kind != sandboxer.Timeout { // of the caller that opened it
			return o.s, o.err
		}
	}
}

func (v *snapshotStore) reach(ctx context.Context) (*checkpoint.Store, error) {
	key, err := checkpoint.LoadKey(filepath.Dir(v.spool))
	if err != nil {
		return nil, err
	}
	blobs, err := v.open(ctx)
	if err != nil {
		return nil, err
	}
	return checkpoint.New(blobs, key, checkpoint.Options{SpoolDir: v.spool, Producer: "sandboxer " + version()})
}

// tidy removes unneeded data, first after a while and then now and then,
// until ctx ends. A failed removal is tried again an hour later.
func (v *snapshotStore) tidy(ctx context.Context, after, every time.Duration, failed func(error)) {
	next := time.NewTimer(after)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		}
		s, err := v.store(ctx)
		if err == nil {
			_, err = s.GC(ctx)
		}
		next.Reset(every)
		if err != nil && ctx.Err() == nil {
			failed(err)
			next.Reset(min(every, time.Hour))
		}
	}
}

// Save implements manager.SnapshotStore.
func (v *snapshotStore) Save(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader) (sandboxer.PortablePayload, error) {
	meta := checkpoint.Meta{Source: checkpoint.Source{
		Extension: rec.Extension, Host: rec.Host, Sandbox: rec.SandboxID, Generation: rec.Generation, Profile: rec.Profile,
	}, Root: rec.Spec.Workspace, Parent: rec.Parent, Quiesced: rec.Portable.Quiesced, Volumes: rec.Portable.Volumes}
	s, err := v.store(ctx)
	if err != nil {
		return sandboxer.PortablePayload{}, err
	}
	// In a volume the owner is half of a file's content: databases insist on it.
	m, err := s.Save(ctx, rec.ID, meta, r, checkpoint.SaveOptions{Rules: checkpoint.Rules{SkipSpecial: true}, Keep: checkpoint.Keep{Owners: len(meta.Volumes) > 0}})
	if err != nil {
		return sandboxer.PortablePayload{}, err
	}
	if n := m.Changed.Skipped; n > 0 {
		left := fmt.Sprintf("%d sockets, pipes or devices are left out", n)
		rec.Message = strings.TrimPrefix(rec.Message+"; "+left, "; ")
	}
	return payloadOf(m), nil
}

func payloadOf(m *checkpoint.Manifest) sandboxer.PortablePayload {
	return sandboxer.PortablePayload{Digest: m.Payload.Digest, Bytes: m.Stored, Size: m.Payload.Size, Files: len(m.Files), Quiesced: m.Quiesced, Volumes: m.Volumes}
}

// Load implements manager.SnapshotStore.
func (v *snapshotStore) Load(ctx context.Context, id string) (io.ReadCloser, error) {
	s, err := v.store(ctx)
	if err != nil {
		return nil, err
	}
	_, r, err := s.Open(ctx, id)
	return r, err
}

func (v *snapshotStore) manifest(ctx context.Context, id string) (*checkpoint.Manifest, error) {
	s, err := v.store(ctx)
	if err != nil {
		return nil, err
	}
	return s.Get(ctx, id)
}

// Files implements manager.SnapshotStore.
func (v *snapshotStore) Files(ctx context.Context, id string) ([]manager.SnapshotFile, error) {
	m, err := v.manifest(ctx, id)
	if err != nil {
		return nil, err
	}
	out := make([]manager.SnapshotFile, len(m.Files))
	for i, f := range m.Files {
		out[i] = manager.SnapshotFile{Path: f.Path, Type: f.Type, Size: f.Size, Mode: int64(f.Mode), Target: f.Link, Digest: f.Digest}
	}
	return out, nil
}

// Export implements manager.SnapshotStore.
func (v *snapshotStore) Export(ctx context.Context, id string, w io.Writer) error {
	s, err := v.store(ctx)
	if err != nil {
		return err
	}
	return s.Export(ctx, id, w)
}

// Import implements manager.SnapshotStore. The file is first imported, and thereby verified,
// into a store of its own, where it keeps its ID. Its copy here has the
// ID that the broker chose, so the same file can be imported several times.
func (v *snapshotStore) Import(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader, accept []string) (p sandboxer.PortablePayload, err error) {
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
	o := checkpoint.ImportOptions{Accept: keys}
	if sandboxer.PrincipalFrom(ctx).Can(sandboxer.ScopeAdmin) {
		o.Manifest = math.MaxInt64 // as large as any that is saved here
	}
	m, err := own.Import(ctx, r, o)
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
	s, err := v.store(ctx)
	if err != nil {
		return p, err
	}
	kept, err := s.Save(ctx, rec.ID, meta, tar, checkpoint.SaveOptions{Keep: m.Payload.Keep})
	if err != nil {
		return p, err
	}
	rec.Profile = m.Source.Profile
	rec.Message = "imported: " + m.ID + ", signed by " + string(m.Signer)
	return payloadOf(kept), nil
}

// Drop implements manager.SnapshotStore. The space is given back by tidy, a day later.
func (v *snapshotStore) Drop(ctx context.Context, id string) error {
	s, err := v.store(ctx)
	if err != nil {
		return err
	}
	err = s.Drop(ctx, id)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil
	}
	return err
}

// List implements manager.SnapshotStore.
func (v *snapshotStore) List(ctx context.Context) ([]string, error) {
	s, err := v.store(ctx)
	if err != nil {
		return nil, err
	}
	return s.IDs(ctx)
}

// progressing discards what is read, and reports it as progress.
type progressing struct{ ctx context.Context }

func (p progressing) Write(b []byte) (int, error) {
	sandboxer.ReportProgress(p.ctx, sandboxer.Progress{})
	return len(b), nil
}

// Check implements manager.SnapshotStore.
func (v *snapshotStore) Check(ctx context.Context, id string, deep bool) error {
	s, err := v.store(ctx)
	if err != nil {
		return err
	}
	if deep {
		var r io.ReadCloser
		if _, r, err = s.Open(ctx, id); err == nil {
			_, err = io.Copy(progressing{ctx}, r)
			err = errors.Join(err, r.Close())
		}
	} else {
		_, err = s.Get(ctx, id)
	}
	if sandboxer.KindOf(err) != sandboxer.NotFound || err == nil {
		return err
	}
	ids, lerr := s.IDs(ctx)
	if lerr != nil {
		return lerr
	}
	if slices.Contains(ids, id) { // not dropped: something that it consists of
		return sandboxer.E(sandboxer.Failed, err, "a part of it is missing: %s", sandboxer.Message(err))
	}
	return err
}

package manager

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// The time limits of calls of the store of portable snapshots. A call that hangs must not block other work for ever; a call
// that takes long because of much data must not be cut off.
const (
	storeAsk  = time.Minute      // a question about names, and a drop
	storeRead = 5 * time.Minute  // reading, from the last piece on
	storeSave = 30 * time.Minute // saving, from the last piece that it took: it reads all of it back then
)

// storeName is what messages call the store of portable snapshots.
const storeName = "the store of portable snapshots"

var errStoreHangs = errors.New("it did not answer in time")

// A boundedStore is a SnapshotStore whose calls end, as long as it obeys their contexts.
type boundedStore struct{ v SnapshotStore }

// ask calls f, which may take as long as limit says.
func ask[T any](ctx context.Context, limit time.Duration, f func(context.Context) (T, error)) (T, error) {
	ctx, w := watchStore(ctx, limit)
	defer w.end()
	out, err := f(ctx)
	return out, w.cause(err)
}

// Save implements SnapshotStore.
func (b boundedStore) Save(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader) (sandboxer.PortablePayload, error) {
	ctx, w := watchStore(ctx, storeSave)
	defer w.end()
	p, err := b.v.Save(ctx, rec, watchedReader{r, w})
	return p, w.cause(err)
}

// Import implements SnapshotStore.
func (b boundedStore) Import(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader, accept []string) (sandboxer.PortablePayload, error) {
	ctx, w := watchStore(ctx, storeSave)
	defer w.end()
	p, err := b.v.Import(ctx, rec, watchedReader{r, w}, accept)
	return p, w.cause(err)
}

// Export implements SnapshotStore.
func (b boundedStore) Export(ctx context.Context, id string, to io.Writer) error {
	ctx, w := watchStore(ctx, storeRead)
	defer w.end()
	return w.cause(b.v.Export(ctx, id, watchedWriter{to, w}))
}

// Load implements SnapshotStore. The reader has to be closed.
func (b boundedStore) Load(ctx context.Context, id string) (io.ReadCloser, error) {
	ctx, w := watchStore(ctx, storeRead)
	r, err := b.v.Load(ctx, id)
	if err != nil {
		w.end()
		return nil, w.cause(err)
	}
	w.timer.Stop() // until the next read
	return loadReader{r, w}, nil
}

// Files implements SnapshotStore.
func (b boundedStore) Files(ctx context.Context, id string) ([]SnapshotFile, error) {
	return ask(ctx, storeRead, func(ctx context.Context) ([]SnapshotFile, error) { return b.v.Files(ctx, id) })
}

// List implements SnapshotStore.
func (b boundedStore) List(ctx context.Context) ([]string, error) {
	return ask(ctx, storeAsk, b.v.List)
}

// Drop implements SnapshotStore.
func (b boundedStore) Drop(ctx context.Context, id string) error {
	_, err := ask(ctx, storeAsk, func(ctx context.Context) (struct{}, error) { return struct{}{}, b.v.Drop(ctx, id) })
	return err
}

// Check implements SnapshotStore. A deep one moves while it reports progress.
func (b boundedStore) Check(ctx context.Context, id string, deep bool) error {
	ctx, w := watchStore(ctx, storeRead)
	defer w.end()
	return w.cause(b.v.Check(sandboxer.WithProgress(ctx, func(sandboxer.Progress) { w.moved() }), id, deep))
}

// A storeWatch ends a call that makes no progress.
type storeWatch struct {
	ctx   context.Context
	limit time.Duration
	timer *time.Timer
	stop  context.CancelCauseFunc
}

func watchStore(ctx context.Context, limit time.Duration) (context.Context, *storeWatch) {
	ctx, stop := context.WithCancelCause(ctx)
	return ctx, &storeWatch{ctx, limit, time.AfterFunc(limit, func() { stop(errStoreHangs) }), stop}
}

// moved starts the time again.
func (w *storeWatch) moved() {
	if w.ctx.Err() == nil {
		w.timer.Reset(w.limit)
	}
}

func (w *storeWatch) end() {
	w.timer.Stop()
	w.stop(nil)
}

// cause replaces err by an error that says that the store hangs, if that is the reason.
func (w *storeWatch) cause(err error) error {
	if err != nil && err != io.EOF && context.Cause(w.ctx) == errStoreHangs {
		return sandboxer.E(sandboxer.Unavailable, errStoreHangs, "%s cannot be reached: no answer within %s", storeName, w.limit).
			WithHint("check the store that snapshot_store names; try again later")
	}
	return err
}

// hung reports whether err says that the store did not answer, as opposed to a bad answer: then the next call would wait as
// long again.
func hung(err error, since time.Time) bool {
	return sandboxer.KindOf(err) == sandboxer.Unavailable && time.Since(since) >= storeAsk/2
}

// watchedReader is what the store reads from. Time that it waits for input does not count as hanging.
type watchedReader struct {
	r io.Reader
	w *storeWatch
}

func (r watchedReader) Read(p []byte) (int, error) {
	r.w.timer.Stop()
	n, err := r.r.Read(p)
	r.w.moved()
	return n, err
}

// watchedWriter is what the store writes to.
type watchedWriter struct {
	to io.Writer
	w  *storeWatch
}

func (r watchedWriter) Write(p []byte) (int, error) {
	r.w.timer.Stop()
	n, err := r.to.Write(p)
	r.w.moved()
	return n, err
}

// loadReader is what a caller reads from the store. Time counts only during a read.
type loadReader struct {
	io.ReadCloser
	w *storeWatch
}

func (l loadReader) Read(p []byte) (int, error) {
	l.w.moved()
	n, err := l.ReadCloser.Read(p)
	l.w.timer.Stop()
	return n, l.w.cause(err)
}

func (l loadReader) Close() error {
	err := l.ReadCloser.Close()
	l.w.end()
	return err
}

// A SnapshotStore keeps the portable form of snapshots: the files of a workspace, in a form
// of its own that any extension's sandbox can be filled from. Its methods are safe
// for concurrent use, and end soon after their context does.
type SnapshotStore interface {
	// Save keeps what the tar r holds under rec.ID, replacing what was begun there, and
	// what rec.Portable says of its contents already. It returns once all of it was read
	// back and its digest verified.
	Save(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader) (sandboxer.PortablePayload, error)
	// Load opens the tar kept under id. Reading fails with Failed where it is not what
	// was saved. NotFound: there is none.
	Load(ctx context.Context, id string) (io.ReadCloser, error)
	// Files lists what is kept under id, in the order of names.
	Files(ctx context.Context, id string) ([]SnapshotFile, error)
	// Export writes what is kept under id as one file that Import reads anywhere.
	Export(ctx context.Context, id string, w io.Writer) error
	// Import is Save from such a file. It completes rec with what the file says of its
	// origin. accept names signers to be trusted this once. Invalid: it is not such a
	// file, or not a whole one. Denied: its signer is not known here.
	Import(ctx context.Context, rec *sandboxer.SnapshotRecord, r io.Reader, accept []string) (sandboxer.PortablePayload, error)
	// Drop removes what is kept, or was begun, under id; absence is success.
	Drop(ctx context.Context, id string) error
	// List returns the IDs there is anything under, damaged or not.
	List(ctx context.Context) ([]string, error)
	// Check reads what is kept under id: what says which files there are, and, if deep is
	// set, all of their content, with progress reported. Failed: it is not what was saved.
	// NotFound: there is none.
	Check(ctx context.Context, id string, deep bool) error
}

// SnapshotFile is one file of a portable snapshot.
type SnapshotFile struct {
	Path   string `json:"path"` // relative to the workspace
	Type   string `json:"type"` // "file", "dir", "link"
	Size   int64  `json:"size"`
	Mode   int64  `json:"mode"`             // permission bits
	Target string `json:"target,omitempty"` // of a link
	Digest string `json:"digest,omitempty"` // of a file's content
}

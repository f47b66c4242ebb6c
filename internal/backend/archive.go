package backend

import (
	"context"
	"io"
	"sync/atomic"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/execfiles"
)

// eitherArchive uses exec if an Archiver cannot serve a sandbox: one without an agent,
// for example, or with one of a former version.
type eitherArchive struct {
	first sandboxer.Archiver
	exec  execfiles.Archive
}

// Archive implements sandboxer.Archiver.
func (a eitherArchive) Archive(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
	out := &noting{w: w}
	err := a.first.Archive(ctx, h, dir, out)
	if sandboxer.KindOf(err) == sandboxer.Unsupported && !out.moved.Load() {
		return a.exec.Archive(ctx, h, dir, w)
	}
	return err
}

// Unarchive implements sandboxer.Archiver.
func (a eitherArchive) Unarchive(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) error {
	in := &noting{r: r}
	err := a.first.Unarchive(ctx, h, dir, in)
	if sandboxer.KindOf(err) == sandboxer.Unsupported && !in.moved.Load() {
		return a.exec.Unarchive(ctx, h, dir, r)
	}
	return err
}

// noting notes that it was used.
type noting struct {
	w     io.Writer
	r     io.Reader
	moved atomic.Bool
}

func (n *noting) Write(p []byte) (int, error) { n.moved.Store(true); return n.w.Write(p) }
func (n *noting) Read(p []byte) (int, error)  { n.moved.Store(true); return n.r.Read(p) }

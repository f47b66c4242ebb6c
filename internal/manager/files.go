package manager

import (
	"context"
	"io"
	"io/fs"
	"iter"

	"github.com/sand-boxer/sandboxer"
)

// ReadFile opens a file in a running sandbox; the caller closes it.
func (m *Manager) ReadFile(ctx context.Context, ref, name string) (io.ReadCloser, error) {
	b, h, end, err := m.beginStream(ctx, sandboxer.ScopeRead, ref)
	if err != nil {
		return nil, err
	}
	r, err := b.ReadFile(ctx, h, name)
	if err != nil {
		end()
		return nil, m.probeOnError(h, err)
	}
	return &usedReader{r, end}, nil
}

type usedReader struct {
	io.ReadCloser
	end func()
}

func (r *usedReader) Close() error { defer r.end(); return r.ReadCloser.Close() }

// WriteFile creates or replaces a file in a running sandbox; see sandboxer.Filer.
func (m *Manager) WriteFile(ctx context.Context, ref, name string, mode fs.FileMode, r io.Reader) error {
	b, h, end, err := m.beginStream(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return err
	}
	defer end()
	return m.probeOnError(h, b.WriteFile(ctx, h, name, mode, r))
}

// StatFile describes a file in a running sandbox.
func (m *Manager) StatFile(ctx context.Context, ref, name string) (sandboxer.FileInfo, error) {
	b, h, end, err := m.beginStream(ctx, sandboxer.ScopeRead, ref)
	if err != nil {
		return sandboxer.FileInfo{}, err
	}
	defer end()
	fi, err := b.StatFile(ctx, h, name)
	return fi, m.probeOnError(h, err)
}

// ListFiles lists a directory of a running sandbox, not its subdirectories, in the
// order of names, from the one after after. An error is the last value.
func (m *Manager) ListFiles(ctx context.Context, ref, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		b, h, end, err := m.beginStream(ctx, sandboxer.ScopeRead, ref)
		if err != nil {
			yield(sandboxer.FileInfo{}, err)
			return
		}
		defer end()
		b.ListFiles(ctx, h, dir, after)(yield)
	}
}

// MakeDir makes a directory with its parents in a running sandbox.
func (m *Manager) MakeDir(ctx context.Context, ref, dir string) error {
	b, h, end, err := m.beginStream(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return err
	}
	defer end()
	return m.probeOnError(h, b.MakeDir(ctx, h, dir))
}

// MoveFile renames a file or directory in a running sandbox.
func (m *Manager) MoveFile(ctx context.Context, ref, from, to string) error {
	b, h, end, err := m.beginStream(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return err
	}
	defer end()
	return m.probeOnError(h, b.MoveFile(ctx, h, from, to))
}

// RemoveFile removes a file or a tree in a running sandbox; absence is success.
func (m *Manager) RemoveFile(ctx context.Context, ref, name string) error {
	b, h, end, err := m.beginStream(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return err
	}
	defer end()
	return m.probeOnError(h, b.RemoveFile(ctx, h, name))
}

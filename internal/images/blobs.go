package images

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// Pull fetches the missing layers of img, and returns their
// files. An interrupted fetch is continued, by this call or the next one of any process.
func (s *Store) Pull(ctx context.Context, img *Image) ([]string, error) {
	places, err := s.places(img.ref, img.access)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	unique := map[v1.Hash]v1.Descriptor{}
	paths := make([]string, len(img.manifest.Layers))
	var total int64
	for i, l := range img.manifest.Layers {
		paths[i] = s.blobPath(l.Digest, img.access)
		if _, ok := unique[l.Digest]; !ok {
			unique[l.Digest] = l
			total += l.Size
		}
	}
	fetched := &meter{step: "pulling " + img.Ref, total: total, hear: func(p sandboxer.Progress) { sandboxer.ReportProgress(ctx, p) }}
	slots := make(chan struct{}, parallel)
	var wg sync.WaitGroup
	for _, l := range unique {
		wg.Go(func() {
			select {
			case slots <- struct{}{}:
				defer func() { <-slots }()
			case <-ctx.Done():
				return
			}
			if err := s.blob(ctx, source{places, img.access}, l, fetched.part()); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	if ctx.Err() == nil {
		return paths, nil
	}
	err = context.Cause(ctx)
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return nil, err
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return nil, sandboxer.E(sandboxer.Exhausted, err, "image %q cannot be pulled: the disk is full", img.Ref)
	}
	return nil, s.explain(err, img.Ref, img.ref.Context(), img.access)
}

// meter adds up how much of several parts is done.
type meter struct {
	step  string
	total int64
	hear  func(sandboxer.Progress)

	mu   sync.Mutex
	done int64
}

// part returns a function that sets how much of one part is done.
func (m *meter) part() func(done int64) {
	var mine int64
	return func(done int64) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.done += done - mine
		mine = done
		m.hear(sandboxer.Progress{Step: m.step, Done: m.done, Total: m.total})
	}
}

func (s *Store) blobPath(h v1.Hash, access Access) string {
	return s.path("blobs", h.Hex+access.suffix())
}

// A source is where layers come from: the first place that has them.
type source struct {
	places []name.Repository
	access Access
}

// blob fetches one layer. The unfinished file is also the lock: a second caller
// waits for the first, and continues from its last byte if it dies.
func (s *Store) blob(ctx context.Context, from source, d v1.Descriptor, done func(int64)) error {
	final, partial := s.blobPath(d.Digest, from.access), s.path("partial", d.Digest.Hex+from.access.suffix())
	for {
		if fi, err := os.Stat(final); err == nil && fi.Size() == d.Size {
			touch(final)
			done(d.Size)
			return nil
		}
		f, err := os.OpenFile(partial, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return err
		}
		lock, err := filelock.TryFile(f, filelock.Exclusive)
		switch {
		case errors.Is(err, filelock.ErrReplaced): // the one before us just finished it
			f.Close()
			continue
		case errors.Is(err, filelock.ErrHeld):
			if fi, err := f.Stat(); err == nil {
				done(min(fi.Size(), d.Size))
			}
			f.Close()
			if err := s.pause(ctx, 0); err != nil {
				return err
			}
			continue
		case err != nil:
			f.Close()
			return err
		}
		err = s.finish(ctx, from, d, f, done, final)
		lock.Release()
		return err
	}
}

// finish completes the partial file f and moves it to its place.
func (s *Store) finish(ctx context.Context, from source, d v1.Descriptor, f *os.File, done func(int64), final string) error {
	err := s.download(ctx, from, d, f, done)
	if err == nil {
		err = wholefile.Publish(f.Name(), final)
	}
	if err == nil {
		return nil
	}
	var r refusal
	if errors.As(err, &r) || errors.Is(err, unix.ENOSPC) { // of no use to the next one, or in everybody's way
		os.Remove(f.Name())
	}
	return err
}

// download fills f with the blob, from its present end.
func (s *Store) download(ctx context.Context, from source, d v1.Descriptor, f *os.File, done func(int64)) error {
	sum := sha256.New()
	have, err := io.Copy(sum, f)
	if err != nil {
		return err
	}
	restart := func() error {
		have = 0
		sum.Reset()
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		return f.Truncate(0)
	}
	if have > d.Size {
		if err := restart(); err != nil {
			return err
		}
	}
	inherited := have > 0 // from an earlier pull; it may be damaged
	for failed, restarts, at := 0, 0, 0; ; {
		done(have)
		if have == d.Size {
			if hex.EncodeToString(sum.Sum(nil)) == d.Digest.Hex {
				return nil
			}
			if at < len(from.places)-1 && !inherited { // a mirror that lies
				at++
			} else if !inherited {
				return refusal{why: fmt.Sprintf("the registry sent a layer with the digest sha256:%x as %s", sum.Sum(nil), d.Digest)}
			}
			inherited = false
			if err := restart(); err != nil {
				return err
			}
			continue
		}
		n, err := s.some(ctx, from.places[at], from.access, d, have, &blobWriter{f: f, sum: sum, have: have, done: done})
		if n < 0 { // it does not continue, and sends all of it again
			if restarts++; restarts > attempts {
				return problem{"the connection breaks again and again, and the registry does not send the rest of a layer"}
			}
			if err := restart(); err != nil {
				return err
			}
			continue
		}
		have += n
		var disk diskError
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, &disk):
			return disk.err
		case err == nil || n > 0:
			failed = 0
			if err == nil {
				continue
			}
		}
		failed++
		if failed >= attempts || !temporary(err) || at < len(from.places)-1 {
			if at == len(from.places)-1 {
				return err
			}
			at, failed = at+1, 0
			continue
		}
		if err := s.pause(ctx, failed-1); err != nil {
			return err
		}
	}
}

// some fetches the blob from the byte at have on, and returns how much arrived before
// the connection ended; -1 if the registry cannot send only the rest and w must start
// over.
func (s *Store) some(ctx context.Context, repo name.Repository, access Access, d v1.Descriptor, have int64, w *blobWriter) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	idle := time.AfterFunc(2*s.opts.stall, func() { cancel(errStalled) })
	defer idle.Stop()
	h := http.Header{}
	if have > 0 {
		h.Set("Range", fmt.Sprintf("bytes=%d-%d", have, d.Size-1))
	}
	resp, err := s.get(ctx, repo, access, "blobs/"+d.Digest.String(), h)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusRequestedRangeNotSatisfiable && have == 0:
		return 0, refusal{why: "the registry does not send a layer"}
	case resp.StatusCode == http.StatusRequestedRangeNotSatisfiable,
		have > 0 && resp.StatusCode != http.StatusPartialContent,
		have > 0 && !strings.HasPrefix(resp.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", have)):
		return -1, nil
	}
	w.tick = func() { idle.Reset(s.opts.stall) }
	n, err := io.Copy(w, io.LimitReader(resp.Body, d.Size-have))
	if err == nil && n < d.Size-have {
		err = io.ErrUnexpectedEOF
	}
	if cause := context.Cause(ctx); err != nil && cause == errStalled {
		err = errStalled
	}
	return n, err
}

var errStalled error = problem{"the connection is stalled"}

// blobWriter writes to a partial file and keeps its digest.
type blobWriter struct {
	f    *os.File
	sum  hash.Hash
	have int64
	done func(int64)
	tick func()
}

// diskError is a failure of ours, not of a registry's.
type diskError struct{ err error }

func (e diskError) Error() string { return e.err.Error() }
func (e diskError) Unwrap() error { return e.err }

func (w *blobWriter) Write(p []byte) (int, error) {
	n, err := w.f.Write(p)
	w.sum.Write(p[:n])
	w.have += int64(n)
	w.done(w.have)
	w.tick()
	if err != nil {
		return n, diskError{err}
	}
	return n, nil
}

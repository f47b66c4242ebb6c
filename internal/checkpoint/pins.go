package checkpoint

import (
	"context"
	"crypto/rand"
	"io"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A leased reader keeps its checkpoint from being deleted.
type leased struct {
	io.ReadCloser
	s       *Store
	ctx     context.Context
	id      string
	renewed time.Time
	release func() error
	closed  bool
}

func (s *Store) lease(ctx context.Context, id string, r io.ReadCloser, release func() error) io.ReadCloser {
	return &leased{ReadCloser: r, s: s, ctx: ctx, id: id, renewed: time.Now(), release: release}
}

func (l *leased) Read(p []byte) (int, error) {
	if time.Since(l.renewed) > l.s.o.Lease/2 {
		next := "open-" + rand.Text()
		if err := l.s.pin(l.ctx, l.id, next, time.Now().Add(l.s.o.Lease)); err != nil {
			return 0, err
		}
		old := l.release
		l.release = func() error { return l.s.letGo(l.ctx, l.id, next) }
		l.renewed = time.Now()
		if err := old(); err != nil {
			return 0, err
		}
	}
	return l.ReadCloser.Read(p)
}

// Close ends the lease.
func (l *leased) Close() error {
	if l.closed {
		return nil
	}
	l.closed = true
	err := l.ReadCloser.Close()
	if e := l.release(); err == nil {
		err = e
	}
	return err
}

// Pin keeps a sealed checkpoint until the given time, or until Unpin if that is zero,
// even if it is dropped meanwhile. name says what needs it; pinning again under the
// same name moves the time. Kinds: NotFound if there is no such checkpoint or it was
// dropped, Invalid for an improper name.
func (s *Store) Pin(ctx context.Context, id, name string, until time.Time) error {
	if err := CheckID(name); err != nil {
		return err
	}
	if _, err := s.record(ctx, id); err != nil {
		return err
	}
	if err := s.pin(ctx, id, name, until); err != nil {
		return err
	}
	_, err := s.blobs.Stat(ctx, dropPrefix+id)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil
	}
	if err == nil {
		err = sandboxer.E(sandboxer.NotFound, nil, "checkpoint %s was dropped", id)
	}
	_ = s.letGo(ctx, id, name)
	return err
}

// letGo is Unpin for a pin of our own, even if ctx is over; a pin that remains expires.
func (s *Store) letGo(ctx context.Context, id, name string) error {
	late, stop := outlast(ctx)
	defer stop()
	return s.Unpin(late, id, name)
}

// lateness is how long cleanup may go on when its context is over.
const lateness = 5 * time.Second

// outlast returns a context that goes on for a little longer than ctx.
func outlast(ctx context.Context) (context.Context, context.CancelFunc) {
	late, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var timer *time.Timer
	armed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		timer = time.AfterFunc(lateness, cancel)
		close(armed)
	})
	return late, func() {
		if !stop() {
			<-armed
			timer.Stop()
		}
		cancel()
	}
}

func (s *Store) pin(ctx context.Context, id, name string, until time.Time) error {
	prefix := pinPrefix + id + "/" + name + "/"
	old, err := s.blobs.List(ctx, prefix)
	if err != nil {
		return err
	}
	var at int64
	if !until.IsZero() {
		at = max(until.Unix(), 1)
	}
	obj := prefix + strconv.FormatInt(at, 10)
	if err := s.putBytes(ctx, obj, mark); err != nil && sandboxer.KindOf(err) != sandboxer.Conflict {
		return err
	}
	for _, b := range old {
		if b.Name != obj {
			if err := s.blobs.Delete(ctx, b.Name); err != nil {
				return err
			}
		}
	}
	return nil
}

// Unpin removes a pin; absence is success.
func (s *Store) Unpin(ctx context.Context, id, name string) error {
	if err := CheckID(id); err != nil {
		return err
	}
	if err := CheckID(name); err != nil {
		return err
	}
	list, err := s.blobs.List(ctx, pinPrefix+id+"/"+name+"/")
	for _, b := range list {
		if e := s.blobs.Delete(ctx, b.Name); err == nil {
			err = e
		}
	}
	return err
}

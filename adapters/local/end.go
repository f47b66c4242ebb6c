//go:build linux

package local

import (
	"context"
	"iter"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/notices"
)

// Notify implements sandboxer.Notifier: it tells of sandboxes whose kernel has ended.
func (e *extension) Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
	if owner != e.env.Owner { // of whom it has none
		return new(notices.Hub).Listen(ctx), nil
	}
	all := e.ended.Listen(ctx)
	names, err := e.names()
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the state directory of %s cannot be read", e.env.Extension)
	}
	for _, name := range names { // those of an earlier process too
		_, _ = e.hold(name) // what cannot be held whoever asks finds out
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	return all, nil
}

// An ending is a process that is waited for without a goroutine.
type ending struct {
	f *os.File
	w *watch
}

// awaitEnd has it told when the kernel of b ends. Where that cannot be, because there are no descriptors left,
// whoever asks after the sandbox finds out.
func (e *extension) awaitEnd(b *liveSandbox) *ending {
	fd, err := unix.PidfdOpen(b.pid, 0)
	if err == unix.ESRCH {
		e.ended.Tell(b.rec.SandboxID)
	}
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), "process")
	w, err := e.poll.watch(f, func() { e.ended.Tell(b.rec.SandboxID) })
	if err == nil {
		if err = w.arm(); err != nil {
			w.stop()
		}
	}
	if err != nil {
		f.Close()
		return nil
	}
	return &ending{f, w}
}

func (n *ending) forget() {
	if n != nil {
		n.w.stop()
		n.f.Close()
	}
}

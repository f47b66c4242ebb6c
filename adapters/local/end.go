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

// awaitEnd has it told when the kernel of b ends, and has the kernel end with what serves it its files.
// Where a process cannot be waited for, because there are no descriptors left, whoever asks after the
// sandbox finds out. Call it with e.mu.
func (e *extension) awaitEnd(b *liveSandbox) {
	b.process = e.await(b.pid, func() { e.ended.Tell(b.rec.SandboxID) })
	if pid := int(b.c.GoferPid.Load()); pid > 0 {
		b.files = e.await(pid, b.endWithFiles)
	}
}

// await has done called when the process has ended; nil where that cannot be.
func (e *extension) await(pid int, done func()) *ending {
	fd, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH {
		done()
	}
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), "process")
	w, err := e.poll.watch(f, done)
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

// endWithFiles kills the kernel of a sandbox whose process that serves it its files has ended: it has no
// way back. gVisor does that too, but may miss it: it polls their connection by its number, which is
// another file's as soon as somebody else has noticed and closed it.
func (b *liveSandbox) endWithFiles() {
	if b.alive() {
		_ = unix.Kill(b.pid, unix.SIGKILL) // it may have just ended
	}
}

func (n *ending) forget() {
	if n != nil {
		n.w.stop()
		n.f.Close()
	}
}

//go:build linux

package local

import (
	"context"
	"errors"
	"io"
	"iter"
	"os"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/notices"
)

// Notify implements sandboxer.Notifier: it reports sandboxes whose kernel has ended.
func (e *extension) Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
	if owner != e.env.Owner { // another owner has no sandboxes here
		return new(notices.Hub).Listen(ctx), nil
	}
	all := e.ended.Listen(ctx)
	names, err := e.names()
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the state directory of %s cannot be read", e.env.Extension)
	}
	for _, name := range names { // also those of an earlier process
		_, _ = e.hold(name) // on an error the next call for the sandbox finds its end
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	return all, nil
}

// An ending watches for the end of a process without a goroutine.
type ending struct {
	f *os.File
	w *watch
}

// awaitEnd reports the end of b's kernel, and ends the kernel when the process that serves its files ends. If
// a process cannot be watched, because no descriptors are left, the next call for the sandbox finds its end.
// Call it with e.mu.
func (e *extension) awaitEnd(b *liveSandbox) {
	b.process = e.await(b.pid, func() { e.ended.Tell(b.rec.SandboxID) })
	if pid := int(b.c.GoferPid.Load()); pid > 0 {
		b.files = e.await(pid, b.endWithFiles)
	}
}

// await calls done when the process has ended; it returns nil if that is not possible.
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

// endWithFiles kills the kernel of a sandbox when the process that serves its files has ended: it cannot
// recover. gVisor does that too, but may miss it: it polls their connection by number, which is another file's
// once another part of it has noticed and closed it.
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

// lastWords is where the kernel of the sandbox called name writes why it ends, while it starts.
func (e *extension) lastWords(name string) string { return e.dir("box", name, "last-words") }

// causes are a kernel's messages when it ends because something is missing, and what to do about it.
var causes = []struct{ said, why, hint string }{
	{"cannot allocate memory", "it got no memory", "end other sandboxes, or give this one a higher memory limit"},
	{"out of memory", "it got no memory", "end other sandboxes, or give this one a higher memory limit"},
	{"failed to create new os thread", "it got no thread", "raise the server's limit: ulimit -u, or TasksMax in its unit"},
	{"resource temporarily unavailable", "it got no thread", "raise the server's limit: ulimit -u, or TasksMax in its unit"},
	{"too many open files", "it got no descriptor", "raise the server's limit: ulimit -n, or LimitNOFILE in its unit"},
	{"no space left on device", "the disk is full", "make room where the server keeps its data"},
}

// kernelEnded is the error of a start that failed: what and, if that is the cause, how the sandbox's kernel has
// ended. The kernel's message goes only to the log: a guest may have influenced it.
func (e *extension) kernelEnded(name string, err error, what string) *sandboxer.Error {
	said := sandboxer.E(sandboxer.Unavailable, err, "%s", what)
	ended := errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) ||
		strings.HasSuffix(err.Error(), io.EOF.Error()) // gVisor does not wrap it
	var words string
	if f, ferr := os.Open(e.lastWords(name)); ferr == nil {
		defer f.Close()
		data, _ := io.ReadAll(io.LimitReader(f, 2<<10))
		words = clean(string(data))
	}
	if words == "" && !ended {
		return said
	}
	how := "on its own, with a message"
	if words == "" {
		how = "without a message, perhaps killed by a signal"
	}
	if e.env.Log != nil {
		e.env.Log.Error("the kernel of a sandbox ended while it started", "extension", e.env.Extension, "sandbox", name, "ended", how, "said", words, "err", err)
	}
	if e.cgroups.usable() && e.cgroups.oomKilled(name) {
		said.Msg += ": its kernel was killed, because it used more memory than the sandbox's limit"
		return said.WithHint("give it a higher memory limit")
	}
	for _, c := range causes {
		if strings.Contains(strings.ToLower(words), c.said) {
			said.Msg += ": its kernel ended, because " + c.why
			return said.WithHint("%s", c.hint)
		}
	}
	said.Msg += ": its kernel ended " + how
	return said.WithHint("the server's log has more, under %s; dmesg lists processes that the machine killed", name)
}

// clean makes s fit for one line of a log.
func clean(s string) string {
	return strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, "?"), func(r rune) bool { return !unicode.IsGraphic(r) || unicode.IsSpace(r) }), " ")
}

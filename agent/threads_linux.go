package agent

import (
	"context"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/agent/proto/filesystem/filesystemconnect"
	"github.com/sand-boxer/sandboxer/agent/proto/process/processconnect"
)

// A container's limit of processes counts threads, including the agent's. Go ends a program that
// needs one more thread and gets none, so a container full of processes would end its agent, and
// with it the sandbox. Therefore the agent makes its threads before it starts anything, and the
// runtime keeps idle ones; and it bounds its concurrent calls of the kernel to the number of these
// threads. A call that waits for a disk holds its thread meanwhile, and so does a call that waits
// for nothing, on a busy machine. Waiting for a connection, a pipe or a terminal happens in the
// runtime's poller, and holds no thread.
//
// An agent above the limit (reserve) does none of this.

const (
	// ownThreads are those of the runtime, in addition to one for each processor that it uses: its
	// monitor, its poller, those for signals and for goroutines bound to a thread, and some for
	// uncounted uses.
	ownThreads = 6
	// callThreads are for calls that wait for nothing, if the limit leaves room; or one for every
	// second processor, if that is more.
	callThreads = 4
	// diskThreads are for calls that wait for a disk, if the limit leaves room.
	diskThreads = 14
	// relayProcs and relayThreads are what a connection to the agent uses, which is also a process
	// inside: no more, even on a machine with many processors.
	relayProcs   = 2
	relayThreads = 5
	// spareThreads are left for processes that connect to the agent, and for existing ones.
	spareThreads = relayThreads + 3
)

// A threadBudget is the agent's share of a limit of processes: processors, concurrent calls of each
// kind, and threads in all.
type threadBudget struct{ procs, calls, disk, all int }

// threadsWithin is the budget within a limit with this many free threads: at most seven sixteenths
// of the limit, since connections to the agent run inside, too. With less than nine threads some
// calls may get none.
func threadsWithin(limit, free, procs int) threadBudget {
	most := min(limit*7/16, free-spareThreads)
	b := threadBudget{procs: max(1, min(procs, most/7))}
	rest := most - b.procs - ownThreads
	b.calls = max(1, min(rest/3, max(callThreads, b.procs/2)))
	b.disk = max(1, min(rest-b.calls, diskThreads))
	b.all = min(b.procs+ownThreads+b.calls+b.disk, most)
	return b
}

// pidsLimit is the least limit of processes of our control group and its parents, as far as they are
// visible, and the least number left; 0 if there is none. In a container the group may have its
// outside name, although the visible root is the group itself.
func pidsLimit() (limit, left int) {
	b, _ := os.ReadFile("/proc/self/cgroup")
	for line := range strings.Lines(string(b)) {
		_, of, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, _ := strings.Cut(of, ":")
		if controllers != "" && controllers != "pids" {
			continue
		}
		root := filepath.Join("/sys/fs/cgroup", controllers)
		for group = filepath.Join("/", group); ; group = filepath.Dir(group) {
			dir := filepath.Join(root, group)
			if n := readInt(filepath.Join(dir, "pids.max")); n >= 0 {
				l := int(n - max(0, readInt(filepath.Join(dir, "pids.current"))))
				if limit == 0 {
					limit, left = int(n), l
				}
				limit, left = min(limit, int(n)), min(left, l)
			}
			if group == "/" {
				break
			}
		}
	}
	return limit, left
}

// makeThreads gives this process at least n threads, which stay.
func makeThreads(n int) {
	release := make(chan struct{})
	defer close(release)
	for range n {
		if threads() >= n {
			return
		}
		bound := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			close(bound)
			<-release
		}()
		<-bound
	}
}

// limitRelay keeps a connection to the agent within its threads.
func limitRelay() {
	runtime.GOMAXPROCS(min(runtime.GOMAXPROCS(0), relayProcs))
	makeThreads(relayThreads)
}

// waitable returns f, one of our standard streams, such that waiting for it holds no thread, until
// undo. Terminals stay as they are: other processes read them, too.
func waitable(f *os.File) (_ *os.File, undo func()) {
	fi, err := f.Stat()
	fd := int(f.Fd())
	if err != nil || fi.Mode()&(fs.ModeNamedPipe|fs.ModeSocket) == 0 {
		return f, func() {}
	}
	undo = func() { _ = unix.SetNonblock(fd, false) }
	switch is, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); {
	case err != nil:
		return f, func() {}
	case is&unix.O_NONBLOCK != 0: // also if both are one socket
		undo = func() {}
	case unix.SetNonblock(fd, true) != nil:
		return f, func() {}
	}
	return os.NewFile(uintptr(fd), f.Name()), undo
}

// limitThreads keeps the agent within its limit of processes, if there is one.
func (s *server) limitThreads() {
	limit, left := pidsLimit()
	if limit == 0 {
		return
	}
	b := threadsWithin(limit, left+threads(), runtime.GOMAXPROCS(0))
	runtime.GOMAXPROCS(b.procs)
	makeThreads(b.all)
	s.gates = gates{disk: make(gate, b.disk), calls: make(gate, b.calls)}
	s.procs.gates = s.gates
}

// threads is how many threads this process has.
func threads() int {
	all, _ := os.ReadDir("/proc/self/task")
	return len(all)
}

// gates bound the kernel calls that wait for a disk, and those that wait for nothing.
type gates struct{ disk, calls gate }

// A gate bounds how many goroutines are in kernel calls at once; nil is no bound. A goroutine inside
// must not wait for anything else, least of all for a caller, or for a lock that is held while
// entering.
type gate chan struct{}

func (g gate) enter() { _ = g.enterUntil(context.Background()) }

// enterUntil enters, unless ctx is done.
func (g gate) enterUntil(ctx context.Context) error {
	if g == nil {
		return ctx.Err()
	}
	select {
	case g <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	err := ctx.Err() // read once: ctx may end between two reads
	if err != nil {
		g.leave()
	}
	return err
}

func (g gate) leave() {
	if g != nil {
		<-g
	}
}

// waiting are the requests that wait for a process or for changes, and so enter only for a part of
// their work.
var waiting = map[string]bool{
	processconnect.ProcessStartProcedure:               true,
	processconnect.ProcessConnectProcedure:             true,
	processconnect.ProcessSendInputProcedure:           true,
	processconnect.ProcessStreamInputProcedure:         true,
	filesystemconnect.FilesystemWatchDirProcedure:      true,
	filesystemconnect.FilesystemRemoveWatcherProcedure: true,
	relayPath: true,
	"/health": true,
}

// handler runs all other requests within g, except while they read from their callers or write to
// them.
func (g gate) handler(next http.Handler) http.Handler {
	if g == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if waiting[r.URL.Path] {
			next.ServeHTTP(w, r)
			return
		}
		if g.enterUntil(r.Context()) != nil {
			return // the caller has gone
		}
		defer g.leave()
		r = r.WithContext(r.Context()) // a copy
		r.Body = gatedBody{r.Body, g}
		next.ServeHTTP(gatedWriter{w, g}, r)
	})
}

type gatedBody struct {
	io.ReadCloser
	gate gate
}

func (b gatedBody) Read(p []byte) (int, error) {
	b.gate.leave()
	defer b.gate.enter()
	return b.ReadCloser.Read(p)
}

// Close may read the rest of the body.
func (b gatedBody) Close() error {
	b.gate.leave()
	defer b.gate.enter()
	return b.ReadCloser.Close()
}

type gatedWriter struct {
	http.ResponseWriter
	gate gate
}

func (w gatedWriter) Write(p []byte) (int, error) {
	w.gate.leave()
	defer w.gate.enter()
	return w.ResponseWriter.Write(p)
}

func (w gatedWriter) Flush() {
	w.gate.leave()
	defer w.gate.enter()
	_ = http.NewResponseController(w.ResponseWriter).Flush()
}

// Unwrap is for http.ResponseController.
func (w gatedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// listener makes the connections of l read and write within g.
func (g gate) listener(l net.Listener) net.Listener {
	if g == nil {
		return l
	}
	return gatedListener{l, g}
}

type gatedListener struct {
	net.Listener
	calls gate
}

func (l gatedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.calls.conn(c), nil
}

// conn makes c read and write within g.
func (g gate) conn(c net.Conn) net.Conn {
	s, ok := c.(streamConn)
	if !ok || g == nil {
		return c
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return c
	}
	return &gatedConn{s, raw, g}
}

// A streamConn is a TCP or Unix connection.
type streamConn interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

type gatedConn struct {
	streamConn
	raw   syscall.RawConn
	calls gate
}

func (c *gatedConn) Read(p []byte) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	err = c.call("read", c.raw.Read, func(fd int) (err error) {
		n, err = unix.Read(fd, p)
		return err
	})
	if err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (c *gatedConn) Write(p []byte) (n int, err error) {
	for n < len(p) {
		var m int
		err := c.call("write", c.raw.Write, func(fd int) (err error) {
			m, err = unix.SendmsgN(fd, p[n:], nil, nil, unix.MSG_NOSIGNAL)
			return err
		})
		if err != nil {
			return n, err
		}
		n += m
	}
	return n, nil
}

// call makes a call once c is ready for it. It waits outside the gate.
func (c *gatedConn) call(name string, ready func(func(uintptr) bool) error, f func(fd int) error) error {
	var err error
	if rerr := ready(func(fd uintptr) bool {
		c.calls.enter()
		defer c.calls.leave()
		for {
			if err = f(int(fd)); err != unix.EINTR {
				return err != unix.EAGAIN
			}
		}
	}); rerr != nil {
		return rerr
	}
	return os.NewSyscallError(name, err)
}

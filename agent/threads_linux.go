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

// A container's limit of processes counts threads, and it holds for the agent too. Go ends a
// program that needs one more thread and gets none, so that whoever fills a container with
// processes would end its agent, and with it the sandbox. Therefore the agent makes its threads
// before it starts anything, of which the runtime keeps those that are idle, and is within no more
// calls of the kernel at once than these are enough for. A call that waits for a disk holds its
// thread meanwhile, and so does one that waits for nothing, on a busy machine. What waits for a
// connection, a pipe or a terminal does so in the runtime's poller, and holds none.
//
// Where the agent is above the limit (reserve), all this is left out.

const (
	// ownThreads are those of the runtime, beside one for each processor that it uses: its
	// monitor, its poller, those for signals and for what is bound to a thread, and some for
	// what is not counted here.
	ownThreads = 6
	// callThreads are for calls that wait for nothing, where the limit leaves room, and one for
	// every second processor where those are more.
	callThreads = 4
	// diskThreads are for calls that wait for a disk, where the limit leaves room.
	diskThreads = 14
	// relayProcs and relayThreads are what a connection to the agent uses, which is a process inside
	// too: no more, also on a machine of many processors.
	relayProcs   = 2
	relayThreads = 5
	// spareThreads are left to who leads to the agent, and to what is there already.
	spareThreads = relayThreads + 3
)

// A threadBudget is what the agent uses of a limit of processes: processors, calls of each kind at
// once, and threads in all.
type threadBudget struct{ procs, calls, disk, all int }

// threadsWithin is the budget within a limit, of which so many are free for the agent: at most
// seven of sixteen of it, since what leads to the agent is inside, too. With less than nine it is
// not enough for all that may come.
func threadsWithin(limit, free, procs int) threadBudget {
	most := min(limit*7/16, free-spareThreads)
	b := threadBudget{procs: max(1, min(procs, most/7))}
	rest := most - b.procs - ownThreads
	b.calls = max(1, min(rest/3, max(callThreads, b.procs/2)))
	b.disk = max(1, min(rest-b.calls, diskThreads))
	b.all = min(b.procs+ownThreads+b.calls+b.disk, most)
	return b
}

// pidsLimit is the least limit of processes of our control group and of those that it is in, as far
// as they can be seen, and how many are left at least; 0 where there is none. Inside of a container
// the name of the group may be that of outside, where the root is the group.
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

// makeThreads has this process have n threads at least, which stay.
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

// limitRelay keeps a connection to the agent within what it uses.
func limitRelay() {
	runtime.GOMAXPROCS(min(runtime.GOMAXPROCS(0), relayProcs))
	makeThreads(relayThreads)
}

// waitable is f, one of our standard streams, so that who waits for it holds no thread, until
// undone. Terminals stay as they are: others read from them too.
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
	case is&unix.O_NONBLOCK != 0: // also since both are one socket
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

// threads is how many this process has.
func threads() int {
	all, _ := os.ReadDir("/proc/self/task")
	return len(all)
}

// gates are those of calls of the kernel that wait for a disk, and of those that wait for nothing.
type gates struct{ disk, calls gate }

// A gate bounds how many goroutines are within calls of the kernel at once; nil is no bound. Who
// is within waits for nothing else, least of all for a caller, or for a lock under which others
// enter.
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
	err := ctx.Err() // once: it may end between two looks
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

// waiting are the requests that wait for a process or for changes, and so enter for a part of them.
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

// handler has all other requests be within g, but while they read from their callers or write to them.
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
			return // nobody is there any more
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

// Close may read what is left.
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

// listener has the connections of l read and write within g.
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

// conn has c read and write within g.
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

// A streamConn is a connection of TCP or of a Unix socket.
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

// call makes a call once c is ready for it. It waits outside of the gate.
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

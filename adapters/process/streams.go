package process

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/protocol"
)

// maxUnnamed bounds connections to the socket for streams that have not sent their token.
const maxUnnamed = 64

// An exchange is the Unix socket to which a child connects for streams. It is in a directory that only the
// child and the broker enter.
type exchange struct {
	dir      *os.File // opened without the right to read it: a path through it is short, and leads past directories that the child may not enter
	name     string
	listener net.Listener

	mu       sync.Mutex
	expected map[string]*expected
	conns    map[net.Conn]bool // all that are open
	unnamed  int
	closed   bool
}

// expected is a stream that has not arrived.
type expected struct {
	c     chan arrival
	timer *time.Timer
}

const streamsDir = "streams"

// lockTime is how long others may take to make their sockets in the same directory.
const lockTime = 30 * time.Second

// newExchange listens below dir. owner is a further account that may connect; nil for none.
func newExchange(dir string, owner *account) (_ *exchange, err error) {
	path := filepath.Join(dir, streamsDir)
	if err := os.Mkdir(path, 0o700); err != nil && !os.IsExist(err) {
		return nil, err
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	x := &exchange{dir: os.NewFile(uintptr(fd), path), name: "s" + sandboxer.NewID(), expected: map[string]*expected{}, conns: map[net.Conn]bool{}}
	defer func() {
		if err != nil {
			x.dir.Close()
		}
	}()
	// A new socket that is not listened on yet looks like one that was left.
	ctx, cancel := context.WithTimeout(context.Background(), lockTime)
	defer cancel()
	lock, err := filelock.Take(ctx, path+".lock", filelock.Exclusive)
	if err != nil {
		return nil, err
	}
	defer lock.Release()
	// While it is being made no other process can reach its names.
	if err := os.Chown(x.path("")+"/.", os.Geteuid(), os.Getegid()); err != nil {
		return nil, err
	}
	x.sweep()
	if err := os.Chmod(x.path(""), 0o700); err != nil {
		return nil, err
	}
	if x.listener, err = net.Listen("unix", x.path(x.name)); err != nil {
		return nil, err
	}
	x.listener.(*net.UnixListener).SetUnlinkOnClose(false) // by the path through the directory
	err = os.Chmod(x.path(x.name), 0o600)
	if owner != nil && err == nil {
		if err = os.Lchown(x.path(x.name), int(owner.uid), int(owner.gid)); err == nil {
			err = os.Chown(x.path("")+"/.", int(owner.uid), int(owner.gid))
		}
	}
	if err != nil {
		x.listener.Close()
		return nil, err
	}
	go x.accept()
	return x, nil
}

// path is the path of a file of the directory for this process.
func (x *exchange) path(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", x.dir.Fd(), name)
}

// forChild is the path of the socket for a child that has the directory as file descriptor 3.
func (x *exchange) forChild() string { return "/proc/self/fd/3/" + x.name }

// sweepTime bounds sweep, since the extension may change its directory.
const sweepTime = time.Second

// sweep removes sockets without a listener: those of brokers that were killed.
func (x *exchange) sweep() {
	entries, _ := os.ReadDir(x.path(""))
	until := time.Now().Add(sweepTime)
	for _, e := range entries {
		left := time.Until(until)
		if left <= 0 {
			return // the next start goes on
		}
		conn, err := net.DialTimeout("unix", x.path(e.Name()), left)
		if err == nil {
			conn.Close()
			continue
		}
		_ = os.Remove(x.path(e.Name()))
	}
}

func (x *exchange) accept() {
	for {
		conn, err := x.listener.Accept()
		if err != nil {
			if ne, ok := err.(interface{ Temporary() bool }); ok && ne.Temporary() {
				time.Sleep(10 * time.Millisecond) // too many files are open
				continue
			}
			return
		}
		x.mu.Lock()
		full := x.unnamed >= maxUnnamed || x.closed
		if !full {
			x.unnamed++
			x.conns[conn] = true
		}
		x.mu.Unlock()
		if full {
			conn.Close()
			continue
		}
		go x.named(conn)
	}
}

// named reads which stream conn is for.
func (x *exchange) named(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(protocol.TokenTime))
	r := protocol.NewReader(conn)
	token, err := protocol.ReadToken(r)
	x.mu.Lock()
	x.unnamed--
	want := x.expected[token]
	delete(x.expected, token) // it is good once
	x.mu.Unlock()
	gone := func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		delete(x.conns, conn)
	}
	if err != nil || want == nil {
		gone()
		conn.Close()
		return
	}
	want.timer.Stop()
	_ = conn.SetDeadline(time.Time{})
	s := protocol.NewStream(conn, r)
	s.OnClose = gone
	want.c <- arrival{s: s}
}

// expect implements streamer.
func (x *exchange) expect(token string) (<-chan arrival, func()) {
	c := make(chan arrival, 1)
	want := &expected{c: c}
	fail := func(format string, args ...any) {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.expected[token] == want {
			delete(x.expected, token)
			c <- arrival{err: sandboxer.E(sandboxer.Unavailable, nil, format, args...)}
		}
	}
	x.mu.Lock()
	if x.closed {
		c <- arrival{err: errStreamGone()}
	} else {
		want.timer = time.AfterFunc(protocol.TokenTime, func() {
			fail("the extension did not open the stream of a request within %s", protocol.TokenTime)
		})
		x.expected[token] = want
	}
	x.mu.Unlock()
	forget := func() {
		x.mu.Lock()
		if x.expected[token] == want {
			delete(x.expected, token)
			want.timer.Stop()
		}
		x.mu.Unlock()
		select {
		case a := <-c: // no request took it
			if a.s != nil {
				a.s.Close()
			}
		default:
		}
	}
	return c, forget
}

func errStreamGone() error {
	return sandboxer.E(sandboxer.Unavailable, nil, "the extension's process ended before it opened the stream of a request")
}

// close ends all connections over the socket: processes that the process started may have kept their ends.
func (x *exchange) close() {
	x.mu.Lock()
	x.closed = true
	for token, want := range x.expected {
		want.timer.Stop()
		delete(x.expected, token)
		want.c <- arrival{err: errStreamGone()}
	}
	for conn := range x.conns {
		conn.Close()
	}
	clear(x.conns)
	x.mu.Unlock()
	_ = os.Remove(x.path(x.name))
	x.listener.Close()
	x.dir.Close()
}

package process

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/protocol"
	"golang.org/x/sys/unix"
)

// maxUnnamed bounds connections to the socket for streams that have not said their token.
const maxUnnamed = 64

// An exchange is the Unix socket to which a child connects for streams. It is in a directory that only the
// child and the broker enter.
type exchange struct {
	dir      *os.File // opened without the right to read it: a path through it is short, and leads past directories that the child may not enter
	name     string
	listener net.Listener

	mu       sync.Mutex
	expected map[string]chan arrival
	unnamed  int
}

const streamsDir = "streams"

// newExchange listens below dir. owner is who may connect besides the broker; nil for nobody.
func newExchange(dir string, owner *account) (_ *exchange, err error) {
	path := filepath.Join(dir, streamsDir)
	if err := os.Mkdir(path, 0o700); err != nil && !os.IsExist(err) {
		return nil, err
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	x := &exchange{dir: os.NewFile(uintptr(fd), path), name: "s" + sandboxer.NewID(), expected: map[string]chan arrival{}}
	defer func() {
		if err != nil {
			x.dir.Close()
		}
	}()
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

// path is where something of the directory is for this process.
func (x *exchange) path(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", x.dir.Fd(), name)
}

// forChild is where the socket is for a child that has the directory as file descriptor 3.
func (x *exchange) forChild() string { return "/proc/self/fd/3/" + x.name }

// sweep removes sockets that nobody listens on: those of brokers that were killed.
func (x *exchange) sweep() {
	entries, _ := os.ReadDir(x.path(""))
	for _, e := range entries {
		conn, err := net.DialTimeout("unix", x.path(e.Name()), time.Second)
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
		full := x.unnamed >= maxUnnamed
		if !full {
			x.unnamed++
		}
		x.mu.Unlock()
		if full {
			conn.Close()
			continue
		}
		go x.named(conn)
	}
}

// named reads whose stream conn is.
func (x *exchange) named(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(protocol.TokenTime))
	r := protocol.NewReader(conn)
	token, err := protocol.ReadToken(r)
	x.mu.Lock()
	x.unnamed--
	c := x.expected[token]
	delete(x.expected, token) // it is good once
	x.mu.Unlock()
	if err != nil || c == nil {
		conn.Close()
		return
	}
	_ = conn.SetDeadline(time.Time{})
	c <- arrival{s: protocol.NewStream(conn, r)}
}

// expect implements streamer.
func (x *exchange) expect(token string) (<-chan arrival, func()) {
	c := make(chan arrival, 1)
	x.mu.Lock()
	x.expected[token] = c
	x.mu.Unlock()
	forget := func() {
		x.mu.Lock()
		if x.expected[token] == c {
			delete(x.expected, token)
		}
		x.mu.Unlock()
		select {
		case a := <-c: // nobody took it
			if a.s != nil {
				a.s.Close()
			}
		default:
		}
	}
	time.AfterFunc(protocol.TokenTime, func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.expected[token] == c {
			delete(x.expected, token)
			c <- arrival{err: sandboxer.E(sandboxer.Unavailable, nil, "the extension does not open the stream of a request within %s", protocol.TokenTime)}
		}
	})
	return c, forget
}

func (x *exchange) close() {
	_ = os.Remove(x.path(x.name))
	x.listener.Close()
	x.dir.Close()
}

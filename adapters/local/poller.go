//go:build linux

package local

import (
	"errors"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// A poller waits for many files in one goroutine. A file that may be silent for days,
// such as the output of a command, would otherwise hold a goroutine and its stack.
type poller struct {
	f   *os.File // the epoll
	raw syscall.RawConn

	small, large sync.Pool // buffers of smallCopy and copySize bytes, for active files

	mu    sync.Mutex
	last  uint64
	waits map[uint64]*watch
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // so that Go's poller accepts it
		unix.Close(fd)
		return nil, err
	}
	p := &poller{f: os.NewFile(uintptr(fd), "epoll"), waits: map[uint64]*watch{}}
	if p.raw, err = p.f.SyscallConn(); err != nil {
		return nil, errors.Join(err, p.f.Close())
	}
	return p, nil
}

// run reports readable files until the poller is closed.
func (p *poller) run() {
	events := make([]unix.EpollEvent, 64)
	for {
		n := 0
		var err error
		rerr := p.raw.Read(func(fd uintptr) bool {
			n, err = unix.EpollWait(int(fd), events, 0)
			return n != 0 && err != unix.EINTR
		})
		if rerr != nil {
			return
		}
		for _, ev := range events[:max(n, 0)] {
			p.mu.Lock()
			w := p.waits[uint64(uint32(ev.Fd))|uint64(uint32(ev.Pad))<<32]
			p.mu.Unlock()
			if w != nil {
				go w.ready()
			}
		}
	}
}

func (p *poller) close() { p.f.Close() }

// A watch is one file that a poller waits for.
type watch struct {
	of    *poller
	raw   syscall.RawConn
	ready func()

	id    uint64
	known bool // to the epoll
}

// watch prepares to wait for c. For each arm, ready is called once, in a goroutine of
// its own, when there is something to read or nothing more will come.
func (p *poller) watch(c syscall.Conn, ready func()) (*watch, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	w := &watch{of: p, raw: raw, ready: ready}
	p.mu.Lock()
	p.last++
	w.id = p.last
	p.waits[w.id] = w
	p.mu.Unlock()
	return w, nil
}

// arm is not safe for concurrent use.
func (w *watch) arm() error {
	op := unix.EPOLL_CTL_MOD
	if !w.known {
		op = unix.EPOLL_CTL_ADD
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLONESHOT, Fd: int32(uint32(w.id)), Pad: int32(uint32(w.id >> 32))}
	err := withFD(w.of.raw, func(epoll int) error {
		return withFD(w.raw, func(fd int) error { return unix.EpollCtl(epoll, op, fd, &ev) })
	})
	w.known = w.known || err == nil
	return err
}

// stop ends the wait, but not a running call of ready. Call it before the file is
// closed.
func (w *watch) stop() {
	w.of.mu.Lock()
	delete(w.of.waits, w.id)
	w.of.mu.Unlock()
	_ = withFD(w.of.raw, func(epoll int) error {
		return withFD(w.raw, func(fd int) error { return unix.EpollCtl(epoll, unix.EPOLL_CTL_DEL, fd, nil) })
	})
}

func withFD(raw syscall.RawConn, f func(fd int) error) (err error) {
	if cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

const (
	smallCopy = 4 << 10 // most commands write little
	copySize  = 256 << 10
)

func (p *poller) buffer(large bool) []byte {
	if large {
		if b, ok := p.large.Get().(*[copySize]byte); ok {
			return b[:]
		}
		return make([]byte, copySize)
	}
	if b, ok := p.small.Get().(*[smallCopy]byte); ok {
		return b[:]
	}
	return make([]byte, smallCopy)
}

func (p *poller) recycle(b []byte) {
	if len(b) == copySize {
		p.large.Put((*[copySize]byte)(b))
	} else {
		p.small.Put((*[smallCopy]byte)(b))
	}
}

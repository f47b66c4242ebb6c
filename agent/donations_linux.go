package agent

import (
	"context"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Donations are connections to an agent that the command donate hands over as open files. Each handover
// starts a program inside. So several connections are made at a time, more are made before they run
// out, and more at a time in a sandbox that uses many.
//
// Such a connection is a pair of pipes: it needs no network, and ends with either side.
type Donations struct {
	give func(context.Context, []*os.File) error

	mu     sync.Mutex
	spare  []*PipeConn
	batch  int     // how many were made last, or are being made
	making *making // nil while no more are being made
	closed bool
}

type making struct {
	done chan struct{}
	err  error // when done
}

const (
	firstBatch = 8
	lastBatch  = maxDonation / 2 // two descriptors each
	wideness   = 1 << 20         // of a pipe in use: the most that an ordinary user gets
)

// NewDonations returns Donations whose give runs "donate" inside the sandbox, with the files as its
// descriptors from 3 on. The files are closed when give returns.
func NewDonations(give func(context.Context, []*os.File) error) *Donations {
	return &Donations{give: give}
}

// Dial returns a connection to the agent. Its error is that of give.
func (d *Donations) Dial(ctx context.Context) (net.Conn, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		d.mu.Lock()
		if d.closed {
			d.mu.Unlock()
			return nil, net.ErrClosed
		}
		c := d.take()
		if len(d.spare) < d.least() && d.making == nil {
			d.batch = min(max(2*d.batch, firstBatch), lastBatch)
			m, n := &making{done: make(chan struct{})}, d.batch
			d.making = m
			go func() { // for all waiting callers, even if one of them leaves
				conns, err := d.make(context.Background(), n)
				d.made(m, conns, err)
			}()
		}
		m := d.making
		d.mu.Unlock()
		if c != nil {
			widen(c)
			return c, nil
		}
		select {
		case <-m.done:
			if m.err != nil {
				return nil, m.err
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Waiting returns the number of unused connections, and the number below which more are made.
func (d *Donations) Waiting() (spare, least int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.spare), d.least()
}

func (d *Donations) least() int { return max(d.batch, firstBatch) / 2 }

// Close closes the unused connections.
func (d *Donations) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, c := range d.spare {
		c.Close()
	}
	d.spare = nil
}

// take returns a connection that is still open; nil if there is none.
func (d *Donations) take() *PipeConn {
	for len(d.spare) > 0 {
		last := len(d.spare) - 1
		c := d.spare[last]
		d.spare = d.spare[:last]
		if isOpen(c) {
			return c
		}
		c.Close()
	}
	return nil
}

func (d *Donations) make(ctx context.Context, n int) (conns []*PipeConn, err error) {
	var files []*os.File
	defer func() {
		for _, f := range files {
			f.Close()
		}
		if err != nil {
			for _, c := range conns {
				c.Close()
			}
		}
	}()
	for range n {
		ours, theirs, err := Pipes()
		if err != nil {
			return conns, err
		}
		files = append(files, theirs[:]...)
		conns = append(conns, ours)
	}
	return conns, d.give(ctx, files)
}

func (d *Donations) made(m *making, conns []*PipeConn, err error) {
	d.mu.Lock()
	switch {
	case err != nil:
	case d.closed:
		for _, c := range conns {
			c.Close()
		}
	default:
		d.spare = append(d.spare, conns...)
	}
	d.making, m.err = nil, err
	d.mu.Unlock()
	close(m.done)
}

// widen enlarges the pipes of c. That takes kernel memory, so unused ones stay narrow.
func widen(c *PipeConn) {
	for _, f := range []*os.File{c.r, c.w} {
		if raw, err := f.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, wideness) })
		}
	}
}

// isOpen reports whether the peer of an unused connection is still there.
func isOpen(c *PipeConn) bool {
	open := true
	for _, f := range []*os.File{c.r, c.w} {
		raw, err := f.SyscallConn()
		if err != nil {
			return false
		}
		err = raw.Control(func(fd uintptr) {
			polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(polled, 0)
			open = open && err == nil && n == 0 // no unexpected data has come, and no end
		})
		if err != nil {
			return false
		}
	}
	return open
}

package agent

import (
	"context"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// A process may end before its output does: once the leader has ended, we still read
// its pipes, and what background programs write there, until they have been silent
// this long or have written more than a pipe holds.
const (
	quietAfterExit = 100 * time.Millisecond
	pipeBytes      = 1 << 20
)

// stallLimit is how long one reader of a process's output may hold up the others.
const stallLimit = 10 * time.Second

// A command is what start runs.
type command struct {
	args  []string
	env   []string // complete, in order of rising precedence
	mark  string   // value of markVar in env
	dir   string
	as    user
	size  *sandboxer.WinSize // non-nil asks for a terminal
	stdin bool
	tag   *string
	cfg   any // returned to the caller in a listing
}

// A process is one started command: its leader, its output and its end.
type process struct {
	command
	pid  int
	seq  uint64 // counts starts
	t    *table
	done chan struct{} // closed when the leader has ended

	in      *os.File      // write end of stdin, or the terminal's master; nil without
	inLock  chan struct{} // held while writing to in
	outputs sync.WaitGroup
	killed  int64        // memory kills in the group when it started
	killing sync.RWMutex // held, shared, while it and its children are killed

	mu      sync.Mutex
	ws      unix.WaitStatus // valid once done is closed
	memory  bool            // valid as ws: the memory limit killed it, or a child
	fuse    *time.Timer     // kills the process; nil without
	out     ring
	subs    map[*subscriber]struct{}
	room    chan struct{} // poked when a reader has advanced or left
	blocked int           // pumps that wait for room
	ended   bool          // nothing more is added to out
}

// pipes are the two sides of a command's streams.
type pipes struct {
	child  [3]uintptr
	unique []int // descriptors among child, each once
	in     *os.File
	out    []*os.File
}

func (p *pipes) closeChild() {
	for _, fd := range p.unique {
		unix.Close(fd)
	}
}

func (p *pipes) closeOurs() {
	if p.in != nil {
		p.in.Close()
	}
	for _, f := range p.out {
		f.Close()
	}
}

func (p *process) open() (_ *pipes, err error) {
	ps := &pipes{}
	defer func() {
		if err != nil {
			ps.closeChild()
			ps.closeOurs()
		}
	}()
	if p.size != nil {
		master, slave, err := openTerminal(*p.size, p.as)
		if err != nil {
			return nil, err
		}
		ps.in, ps.out = master, []*os.File{master}
		ps.unique = []int{slave}
		ps.child = [3]uintptr{uintptr(slave), uintptr(slave), uintptr(slave)}
		return ps, nil
	}
	// Only our ends are non-blocking: the flag is per end, and programs do not expect
	// it on theirs.
	add := func(fd int) uintptr {
		ps.unique = append(ps.unique, fd)
		return uintptr(fd)
	}
	ours := func(fd int, name string) (*os.File, error) {
		if err := unix.SetNonblock(fd, true); err != nil {
			unix.Close(fd)
			return nil, err
		}
		return os.NewFile(uintptr(fd), name), nil
	}
	var fd [2]int
	if p.stdin {
		if err := unix.Pipe2(fd[:], unix.O_CLOEXEC); err != nil {
			return nil, err
		}
		ps.child[0] = add(fd[0])
		if ps.in, err = ours(fd[1], "stdin"); err != nil {
			return nil, err
		}
	} else {
		null, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		ps.child[0] = add(null)
	}
	for i, name := range [...]string{"stdout", "stderr"} {
		if err := unix.Pipe2(fd[:], unix.O_CLOEXEC); err != nil {
			return nil, err
		}
		ps.child[1+i] = add(fd[1])
		f, err := ours(fd[0], name)
		if err != nil {
			return nil, err
		}
		ps.out = append(ps.out, f)
	}
	return ps, nil
}

// pump reads one output of p straight into its ring until end of file.
func (p *process) pump(f *os.File, src stream) {
	defer p.outputs.Done()
	if src != terminal { // the master is closed by finish: it is also the input
		defer f.Close()
	}
	rc, err := f.SyscallConn()
	if err != nil {
		return
	}
	var pace pacer
	var scratch []byte // for output after the end
	for {
		n, full, filled := 0, false, false
		var rerr error
		err := rc.Read(func(fd uintptr) bool {
			p.t.calls.enter()
			defer p.t.calls.leave()
			p.mu.Lock()
			defer p.mu.Unlock()
			dst := scratch
			if p.ended {
				if dst == nil {
					dst = make([]byte, 4<<10)
					scratch = dst
				}
			} else {
				if dst = p.out.space(p.pinned()); len(dst) == 0 {
					full = true
					p.blocked++
					return true
				}
			}
			for {
				n, rerr = unix.Read(int(fd), dst)
				if rerr != unix.EINTR {
					break
				}
			}
			if rerr == unix.EAGAIN {
				return false
			}
			filled = n == len(dst)
			if n > 0 && !p.ended {
				p.out.commit(n, src)
				p.pokeAll()
			}
			return true
		})
		switch {
		case full:
			p.waitRoom()
		case err != nil || rerr != nil || n <= 0: // a terminal that its last user closed fails with EIO
			return
		case src != terminal && !filled:
			if pace.wants(n, time.Now()) {
				_ = rc.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeBytes) })
			}
			if pace.bulk {
				time.Sleep(bulkPause)
			}
		}
	}
}

// pinned is the position from which output must be kept for a reader. p.mu is held.
func (p *process) pinned() uint64 {
	at := p.out.end
	for s := range p.subs {
		at = min(at, s.pos)
	}
	return at
}

func (p *process) pokeAll() {
	for s := range p.subs {
		notify(s.notify)
	}
}

// waitRoom blocks until a reader has made room. A reader that has not moved for
// stallLimit while others wait for it is dropped. The caller has counted itself in
// p.blocked.
func (p *process) waitRoom() {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer func() { p.blocked-- }()
	at, since := p.pinned(), time.Now()
	for !p.ended && len(p.out.space(p.pinned())) == 0 {
		if now := p.pinned(); now != at {
			at, since = now, time.Now()
		}
		var late <-chan time.Time
		var timer *time.Timer
		if len(p.subs) > 1 { // a single reader delays only the process
			timer = time.NewTimer(stallLimit - time.Since(since))
			late = timer.C
		}
		p.mu.Unlock()
		stalled := false
		select {
		case <-p.room:
		case <-late:
			stalled = true
		}
		if timer != nil {
			timer.Stop()
		}
		p.mu.Lock()
		if !stalled || len(p.subs) < 2 {
			continue
		}
		for s := range p.subs {
			if s.pos == at && at < p.out.end {
				s.dropped = true
				delete(p.subs, s)
				notify(s.notify)
			}
		}
	}
	notify(p.room) // the other pump may also wait
}

// killAt kills p and all that it started at this time, if p still runs.
func (p *process) killAt(at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fuse = time.AfterFunc(time.Until(at), p.killUnlessDone)
}

func (p *process) killUnlessDone() {
	p.t.disk.enter() // this looks at every process
	defer p.t.disk.leave()
	select {
	case <-p.done:
	default:
		_ = p.signal(unix.SIGKILL)
	}
}

// unread reports whether a stream has output that its pump, on a busy machine, has not
// read yet.
func unread(outs []*os.File) bool {
	for _, f := range outs {
		rc, err := f.SyscallConn()
		if err != nil {
			continue
		}
		n := 0
		_ = rc.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // closed: nothing
		if n > 0 {
			return true
		}
	}
	return false
}

// finish waits for the end of p and of its output, then lets readers see it.
func (p *process) finish(outs []*os.File) {
	<-p.done
	// Once its end is reported, everything that was killed with p must be dead, too.
	p.killing.Lock()
	//lint:ignore SA2001 whoever was killing is through, which is all that is wanted
	p.killing.Unlock()
	closed := make(chan struct{})
	go func() {
		p.outputs.Wait()
		if p.size != nil {
			p.in.Close()
		}
		close(closed)
	}()
	p.mu.Lock()
	if p.fuse != nil {
		p.fuse.Stop()
	}
	first := p.out.end
	last := first
	p.mu.Unlock()
	timer := time.NewTimer(quietAfterExit)
	defer timer.Stop()
wait:
	for {
		select {
		case <-closed:
			break wait
		case <-timer.C:
		}
		p.mu.Lock()
		now, blocked := p.out.end, p.blocked
		p.mu.Unlock()
		if blocked == 0 && (now == last && !unread(outs) || now-first > pipeBytes) {
			break
		}
		last = now
		timer.Reset(quietAfterExit)
	}
	if p.size == nil && p.in != nil {
		p.in.Close() // also ends a write that blocks without a reader
	}
	p.t.end(p) // a caller that gets its end below must not find it running
	p.mu.Lock()
	p.ended = true
	p.pokeAll()
	notify(p.room)
	p.mu.Unlock()
}

// write sends data to p's input and blocks while no process reads it.
func (p *process) write(ctx context.Context, data []byte) error {
	if p.in == nil {
		return sandboxer.E(sandboxer.Internal, nil, "process %d was started without an input", p.pid)
	}
	select {
	case p.inLock <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-p.inLock }()
	stop := context.AfterFunc(ctx, func() { _ = p.in.SetWriteDeadline(time.Unix(1, 0)) })
	_, err := p.in.Write(data)
	if !stop() {
		_ = p.in.SetWriteDeadline(time.Time{})
		if err != nil {
			return ctx.Err()
		}
	}
	if err != nil {
		return sandboxer.E(sandboxer.Conflict, err, "the input of process %d is closed", p.pid)
	}
	return nil
}

// closeStdin ends p's input.
func (p *process) closeStdin() error {
	switch {
	case p.size != nil:
		return sandboxer.E(sandboxer.Conflict, nil, "the input of a terminal cannot be closed").WithHint("send the byte 0x04 instead")
	case p.in == nil:
		return sandboxer.E(sandboxer.Internal, nil, "process %d was started without an input", p.pid)
	}
	p.in.Close() // a second close is no error
	return nil
}

// signal reaches everything that p started and that is still in its session; a KILL
// also reaches what left the session.
func (p *process) signal(sig unix.Signal) error {
	if sig != unix.SIGKILL {
		groups := map[int]bool{}
		stats, err := readProcesses()
		if err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "cannot signal process %d: the processes cannot be listed: %v", p.pid, err)
		}
		for _, s := range stats {
			if s.session == p.pid && !s.dead {
				groups[s.group] = true
			}
		}
		if len(groups) == 0 {
			groups[p.pid] = true
		}
		for g := range groups {
			if err := unix.Kill(-g, sig); err != nil && err != unix.ESRCH {
				return sandboxer.E(sandboxer.Denied, err, "cannot signal process %d: %v", p.pid, err)
			}
		}
		return nil
	}
	p.killing.RLock()
	defer p.killing.RUnlock()
	// Until a pass finds nothing alive: the members may be forking.
	buf := make([]byte, procs.Room)
	for range 100 {
		n, err := killFamily(func(s procStat) (bool, error) {
			if s.pid == p.pid || s.session == p.pid {
				return true, nil
			}
			return marked(s.pid, p.mark, buf)
		})
		if err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "the processes that process %d started cannot be listed: %v", p.pid, err)
		}
		if n == 0 {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

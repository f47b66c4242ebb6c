package agent

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// How the end of a process is told from the end of its output: once the leader has
// ended, what is in its pipes is still read, and what programs it left behind write,
// until they have been silent this long or have written more than a pipe holds.
const (
	quietAfterExit = 100 * time.Millisecond
	pipeBytes      = 1 << 20
)

// Bounds of what is remembered about processes that have ended, for late readers.
const (
	maxEnded      = 1024
	maxEndedBytes = 8 << 20
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
	cfg   any // what the caller wants to see again in a listing
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
	killed  int64        // processes that the memory limit had killed when it started
	killing sync.RWMutex // held, shared, by who kills it with all that it started

	mu      sync.Mutex
	ws      unix.WaitStatus // valid once done is closed
	memory  bool            // as ws: the memory limit killed it, or what it ran
	fuse    *time.Timer     // kills the process; nil without
	out     ring
	subs    map[*subscriber]struct{}
	room    chan struct{} // poked when a reader has advanced or left
	blocked int           // pumps that wait for room
	ended   bool          // nothing is added to out any more
}

// A table holds the processes of the agent and is the only one to wait for children.
type table struct {
	// starting is held shared between fork and entry into the table, and exclusively
	// while children are reaped: no child is reaped before it is known.
	starting sync.RWMutex

	mu      sync.Mutex
	procs   map[int]*process // not ended
	ended   map[int]*process
	order   []*process // ended, oldest first
	seq     uint64
	stopped bool

	tagging sync.Mutex // held while a program is started, with its tag as our own limit

	gates
	limited bool // our own CAP_SYS_RESOURCE is not for what we start
	ringMax int
	idle    chan struct{} // poked when a process has ended
}

func newTable(ringMax int) *table {
	return &table{procs: map[int]*process{}, ended: map[int]*process{}, ringMax: ringMax, idle: make(chan struct{}, 1)}
}

// start runs c and returns once it is running, with a subscriber that sees its
// output from the beginning.
func (t *table) start(c command) (*process, *subscriber, error) {
	file, err := lookPath(c.args[0], c.dir, c.env)
	if err != nil {
		return nil, nil, err
	}
	attr := &syscall.ProcAttr{
		Dir: c.dir,
		Env: c.env,
		Sys: &syscall.SysProcAttr{Setsid: true},
	}
	if os.Geteuid() == 0 && (c.as.uid != 0 || c.as.gid != 0) {
		attr.Sys.Credential = &syscall.Credential{Uid: c.as.uid, Gid: c.as.gid, Groups: c.as.groups}
	}
	p := &process{
		command: c, t: t, done: make(chan struct{}), inLock: make(chan struct{}, 1),
		subs: map[*subscriber]struct{}{}, room: make(chan struct{}, 1), out: ring{max: t.ringMax}, killed: oomKills(),
	}
	fds, err := p.open()
	if err != nil {
		return nil, nil, sandboxer.E(sandboxer.Exhausted, err, "cannot make the streams of the command: %v", err)
	}
	attr.Files = fds.child[:]
	attr.Sys.Setctty = c.size != nil
	sub := &subscriber{p: p, notify: make(chan struct{}, 1)}
	p.subs[sub] = struct{}{}

	t.starting.RLock()
	t.mu.Lock()
	stopped := t.stopped
	t.mu.Unlock()
	if stopped {
		err = sandboxer.E(sandboxer.Unavailable, nil, "the sandbox is shutting down")
	} else {
		p.pid, err = t.tagged(c.mark, func() (int, error) { return t.forkExec(file, c.args, attr) })
	}
	if err == nil {
		t.mu.Lock()
		t.forget(p.pid) // the number may have had an owner before
		t.seq++
		p.seq = t.seq
		t.procs[p.pid] = p
		t.mu.Unlock()
	}
	t.starting.RUnlock()
	fds.closeChild()
	if err != nil {
		fds.closeOurs()
		return nil, nil, startError(err, c, file)
	}
	p.in = fds.in
	p.outputs.Add(len(fds.out))
	for i, f := range fds.out {
		src := stream(i)
		if c.size != nil {
			src = terminal
		}
		go p.pump(f, src)
	}
	go p.finish(fds.out)
	return p, sub, nil
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
	// Only our ends are non-blocking: the flag belongs to the end, and programs do not
	// expect it on theirs.
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

// startError says why a command did not start, with the exit code that shells give.
func startError(err error, c command, file string) error {
	var e *sandboxer.Error
	if errors.As(err, &e) {
		return err
	}
	switch {
	case errors.Is(err, unix.EPERM):
		return sandboxer.E(sandboxer.Invalid, err, "cannot run as user %s: not permitted", c.as.name)
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM):
		return sandboxer.E(sandboxer.Exhausted, err, "cannot start %s: %v", c.args[0], err)
	}
	se := sandboxer.StartErrorOf(c.args[0], err)
	switch {
	case se == nil:
		return &sandboxer.StartError{Name: c.args[0], Code: sandboxer.ExitNotExecutable, Why: err.Error()}
	case se.Code == sandboxer.ExitNotFound: // the file was found a moment ago
		se.Why = "the interpreter or loader that it names does not exist"
	case errors.Is(err, unix.EACCES):
		se.Why += " (as user " + c.as.name + ", in " + c.dir + ")"
	case errors.Is(err, unix.ENOEXEC) && file != c.args[0]:
		se.Why += " (" + file + ")"
	}
	return se
}

// lookPath finds the program that name means to a process in dir with env.
func lookPath(name, dir string, env []string) (string, error) {
	if name == "" {
		return "", sandboxer.E(sandboxer.Invalid, nil, "no command given")
	}
	if strings.Contains(name, "/") {
		file := name
		if !filepath.IsAbs(file) {
			file = filepath.Join(dir, file)
		}
		if err := executable(name, file); err != nil {
			return "", err
		}
		return file, nil
	}
	denied := false
	for d := range strings.SplitSeq(getenv(env, "PATH"), ":") {
		if d == "" {
			d = "."
		}
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		file := filepath.Join(d, name)
		switch err := executable(name, file); {
		case err == nil:
			return file, nil
		case err.Code == sandboxer.ExitNotExecutable:
			denied = true
		}
	}
	if denied {
		return "", sandboxer.StartErrorOf(name, unix.EACCES)
	}
	return "", sandboxer.StartErrorOf(name, unix.ENOENT)
}

// executable returns what keeps the command called name, which is that file, from being one.
func executable(name, file string) *sandboxer.StartError {
	fi, err := os.Stat(file)
	switch {
	case errors.Is(err, os.ErrPermission), err == nil && !fi.IsDir() && fi.Mode()&0o111 == 0:
		return sandboxer.StartErrorOf(name, unix.EACCES)
	case err != nil:
		return sandboxer.StartErrorOf(name, unix.ENOENT)
	case fi.IsDir():
		return sandboxer.StartErrorOf(name, unix.EISDIR)
	}
	return nil
}

func getenv(env []string, key string) string {
	for i := len(env) - 1; i >= 0; i-- {
		if v, ok := strings.CutPrefix(env[i], key+"="); ok {
			return v
		}
	}
	return ""
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
	var scratch []byte // takes what is written after the end
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
		case err != nil || rerr != nil || n <= 0: // a terminal whose last user left fails with EIO
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

// A pacer notices a program that writes much in small pieces. Handing on each piece as
// it comes would cost more than carrying it; instead the pipe is made large, and read
// after a pause in which it fills.
type pacer struct {
	since time.Time
	bytes int
	grown bool
	bulk  bool
}

const (
	bulkWindow = 10 * time.Millisecond
	bulkBytes  = 256 << 10 // within a window
	bulkPause  = 500 * time.Microsecond
)

// wants accounts for a read that got all there was, n bytes, and reports, once, that the pipe should grow.
func (p *pacer) wants(n int, now time.Time) bool {
	if p.bulk {
		p.bulk = n >= 32<<10
		p.since, p.bytes = now, 0
		return false
	}
	if now.Sub(p.since) > bulkWindow {
		p.since, p.bytes = now, 0
	}
	p.bytes += n
	if p.bytes < bulkBytes {
		return false
	}
	p.bulk = true
	grow := !p.grown
	p.grown = true
	return grow
}

// pinned is the position from which output must be kept because a reader has not had
// it. p.mu is held.
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

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
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
		if len(p.subs) > 1 { // alone, a reader holds up nobody but the process
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
	notify(p.room) // the other pump may wait too
}

// killAt kills p, if it still runs then, with all that it started.
func (p *process) killAt(at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fuse = time.AfterFunc(time.Until(at), p.killUnlessDone)
}

func (p *process) killUnlessDone() {
	p.t.disk.enter() // to look at every process there is
	defer p.t.disk.leave()
	select {
	case <-p.done:
	default:
		_ = p.signal(unix.SIGKILL)
	}
}

// unread reports whether output waits in a stream that its pump, starved on a busy
// machine, has not come to.
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
	// Who is told of the end may rely on it that what was killed with p is dead, too.
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
		p.in.Close() // also ends a write that blocks because nobody reads
	}
	p.t.end(p) // whoever is told its end below does not find it running any more
	p.mu.Lock()
	p.ended = true
	p.pokeAll()
	notify(p.room)
	p.mu.Unlock()
}

// end moves p to those that have ended.
func (t *table) end(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.procs[p.pid] == p {
		delete(t.procs, p.pid)
	}
	t.forget(p.pid)
	t.ended[p.pid] = p
	t.order = append(t.order, p)
	kept := 0
	for i := len(t.order) - 1; i >= 0; i-- {
		q := t.order[i]
		q.mu.Lock()
		kept += len(q.out.buf)
		q.mu.Unlock()
		if len(t.order)-i > maxEnded {
			for _, q := range t.order[:i+1] {
				delete(t.ended, q.pid)
			}
			t.order = append([]*process(nil), t.order[i+1:]...)
			break
		}
		if kept > maxEndedBytes {
			q.mu.Lock()
			if len(q.subs) == 0 {
				q.out.buf, q.out.segs, q.out.base = nil, nil, q.out.end
			}
			q.mu.Unlock()
		}
	}
	notify(t.idle)
}

// forget drops what is known of an ended process with this number. t.mu is held.
func (t *table) forget(pid int) {
	old, ok := t.ended[pid]
	if !ok {
		return
	}
	delete(t.ended, pid)
	for i, q := range t.order {
		if q == old {
			t.order = append(t.order[:i], t.order[i+1:]...)
			return
		}
	}
}

// find returns a process by number, or if pid is 0 the newest one with the tag; of
// those that have ended only when ended is true.
func (t *table) find(pid int, tag string, ended bool) *process {
	t.mu.Lock()
	defer t.mu.Unlock()
	if pid != 0 {
		p := t.procs[pid]
		if p == nil && ended {
			p = t.ended[pid]
		}
		return p
	}
	var newest *process
	for _, p := range t.procs {
		if p.tag != nil && *p.tag == tag && (newest == nil || p.seq > newest.seq) {
			newest = p
		}
	}
	if newest != nil {
		return newest
	}
	if ended {
		for i := len(t.order) - 1; i >= 0; i-- {
			if p := t.order[i]; p.tag != nil && *p.tag == tag {
				return p
			}
		}
	}
	return nil
}

// running lists the processes that have not ended, oldest first.
func (t *table) running() []*process {
	t.mu.Lock()
	defer t.mu.Unlock()
	ps := make([]*process, 0, len(t.procs))
	for _, p := range t.procs {
		ps = append(ps, p)
	}
	slices.SortFunc(ps, func(a, b *process) int { return cmp.Compare(a.seq, b.seq) })
	return ps
}

// reap collects every child that has ended, ours and those handed down to us.
func (t *table) reap() {
	for {
		t.starting.Lock()
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		var p *process
		if err == nil && pid > 0 {
			t.mu.Lock()
			p = t.procs[pid]
			t.mu.Unlock()
		}
		t.starting.Unlock()
		if p != nil {
			select {
			case <-p.done: // a later owner of the number, handed down to us
			default:
				p.ws = ws
				if p.killed >= 0 && (ws.Signaled() && ws.Signal() == unix.SIGKILL || ws.Exited() && ws.ExitStatus() == 137) {
					p.memory = oomKills() > p.killed
				}
				close(p.done)
			}
		}
		if err != unix.EINTR && (err != nil || pid <= 0) {
			return
		}
	}
}

// write sends data to p's input and blocks while nobody reads it.
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
	p.in.Close() // twice is no error to the caller
	return nil
}

// A subscriber reads the output of a process at its own pace.
type subscriber struct {
	p       *process
	pos     uint64
	dropped bool
	notify  chan struct{}
}

// subscribe attaches a reader: to what comes next, or with replay also to what is
// still kept.
func (p *process) subscribe(replay bool) *subscriber {
	s := &subscriber{p: p, notify: make(chan struct{}, 1)}
	p.mu.Lock()
	defer p.mu.Unlock()
	s.pos = p.out.end
	if replay {
		s.pos = p.out.base
	}
	p.subs[s] = struct{}{}
	notify(s.notify)
	notify(p.room) // a pump that waits must now mind the stall limit
	return s
}

func (s *subscriber) close() {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	delete(s.p.subs, s)
	notify(s.p.room)
}

var errTooSlow = sandboxer.E(sandboxer.Exhausted, nil, "this reader was too slow: others waited for it")

// next copies the next run of output into buf. With n == 0 there is none now: wait on
// s.notify, unless end says that none will come.
func (s *subscriber) next(buf []byte) (n int, src stream, end bool, err error) {
	p := s.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.dropped {
		return 0, 0, false, errTooSlow
	}
	if s.pos < p.out.end {
		n, src = p.out.read(s.pos, buf)
		s.pos += uint64(n)
		if p.blocked > 0 {
			notify(p.room)
		}
		return n, src, false, nil
	}
	return 0, 0, p.ended, nil
}

// signal reaches everything that p started and that is still in its session; a KILL
// reaches also what left the session.
func (p *process) signal(sig unix.Signal) error {
	if sig != unix.SIGKILL {
		groups := map[int]bool{}
		stats, err := readProcesses()
		if err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "cannot signal process %d: the processes cannot be looked at: %v", p.pid, err)
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
			return sandboxer.E(sandboxer.Unavailable, err, "what process %d started cannot be looked at: %v", p.pid, err)
		}
		if n == 0 {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// markVar names the variable by which a process that moved to a session of its own is
// still known as started by one of ours.
const markVar = "SANDBOXER_PROCESS"

func marked(pid int, mark string, buf []byte) (bool, error) {
	if mark == "" {
		return false, nil
	}
	env, err := procs.Environ(pid, buf)
	if err != nil {
		return false, err
	}
	for kv := range strings.SplitSeq(string(env), "\x00") {
		if v, ok := strings.CutPrefix(kv, markVar+"="); ok {
			return v == mark, nil
		}
	}
	tag, err := taggedAs(pid)
	return tag == tagOf(mark), err
}

// procStat is a line of the system's process list.
type procStat struct {
	pid, parent, group, session int
	dead                        bool
	ticks                       int64 // processor time
	pages                       int64 // resident
}

// readProcesses lists the processes that can be seen; on an error, those that it came to.
func readProcesses() (out []procStat, err error) {
	pids, err := procs.All()
	for _, pid := range pids {
		f, serr := procs.Stat(pid)
		if s, ok := parseStat(pid, f); ok {
			out = append(out, s)
		}
		err = cmp.Or(err, serr)
	}
	return out, err
}

// parseStat reads what procs.Stat returns.
func parseStat(pid int, f []string) (procStat, bool) {
	if len(f) < 22 {
		return procStat{}, false
	}
	num := func(i int) int64 {
		n, _ := strconv.ParseInt(f[i], 10, 64)
		return n
	}
	return procStat{
		pid: pid, dead: f[0] == "Z" || f[0] == "X",
		parent: int(num(1)), group: int(num(2)), session: int(num(3)),
		ticks: num(11) + num(12), pages: num(21),
	}, true
}

// stop refuses new processes and ends all: politely, then after grace by force.
func (t *table) stop(grace time.Duration) {
	t.mu.Lock()
	t.stopped = true
	t.mu.Unlock()
	t.starting.Lock()
	//lint:ignore SA2001 whoever was starting is in the table now, which is all that is wanted
	t.starting.Unlock()
	for _, p := range t.running() {
		_ = p.signal(unix.SIGTERM)
		if p.size != nil {
			_ = p.signal(unix.SIGHUP) // interactive shells ignore the other
		}
		_ = p.signal(unix.SIGCONT)
	}
	if t.waitEmpty(grace) {
		t.killRest()
		return
	}
	t.killRest()
	t.waitEmpty(time.Second)
}

func (t *table) waitEmpty(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		if len(t.running()) == 0 {
			return true
		}
		select {
		case <-t.idle:
		case <-timer.C:
			return false
		}
	}
}

// killRest kills all that is left of the processes and of what they left behind.
func (t *table) killRest() {
	if os.Getpid() == 1 {
		_ = unix.Kill(-1, unix.SIGKILL)
		return
	}
	t.mu.Lock()
	ps := append([]*process(nil), t.order...)
	t.mu.Unlock()
	sessions := map[int]bool{}
	for _, p := range append(ps, t.running()...) {
		sessions[p.pid] = true
	}
	for range 100 {
		stats, err := readProcesses()
		in := map[int]bool{os.Getpid(): true}
		for changed := true; changed; {
			changed = false
			for _, s := range stats {
				if !in[s.pid] && (in[s.parent] || sessions[s.session]) {
					in[s.pid], changed = true, true
				}
			}
		}
		alive := err != nil
		for _, s := range stats {
			if in[s.pid] && s.pid != os.Getpid() && !s.dead {
				alive = true
				_ = unix.Kill(s.pid, unix.SIGKILL)
			}
		}
		if !alive {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// openTerminal makes a pseudo-terminal that belongs to its user. The slave is returned
// as a bare descriptor, because it goes to the child only.
func openTerminal(size sandboxer.WinSize, as user) (master *os.File, slave int, err error) {
	m, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENOENT) {
		m, err = unix.Open("/dev/pts/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		return nil, -1, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	defer func() {
		if err != nil {
			unix.Close(m)
		}
	}()
	if err := unix.IoctlSetPointerInt(m, unix.TIOCSPTLCK, 0); err != nil {
		return nil, -1, os.NewSyscallError("TIOCSPTLCK", err)
	}
	n, err := unix.IoctlGetUint32(m, unix.TIOCGPTN)
	if err != nil {
		return nil, -1, os.NewSyscallError("TIOCGPTN", err)
	}
	name := "/dev/pts/" + strconv.FormatUint(uint64(n), 10)
	slave, err = unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, -1, &os.PathError{Op: "open", Path: name, Err: err}
	}
	if os.Geteuid() == 0 && as.uid != 0 {
		_ = unix.Fchown(slave, int(as.uid), -1) // programs such as screen and gpg want to own it
	}
	if err := setSize(m, size); err != nil {
		unix.Close(slave)
		return nil, -1, err
	}
	return os.NewFile(uintptr(m), name), slave, nil
}

func setSize(fd int, s sandboxer.WinSize) error {
	return os.NewSyscallError("TIOCSWINSZ", unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: s.Cols, Row: s.Rows}))
}

// resize changes the size of p's terminal; the kernel tells its programs.
func (p *process) resize(s sandboxer.WinSize) error {
	if p.size == nil {
		return sandboxer.E(sandboxer.Conflict, nil, "process %d has no terminal", p.pid)
	}
	rc, err := p.in.SyscallConn()
	if err == nil {
		if e := rc.Control(func(fd uintptr) { err = setSize(int(fd), s) }); e != nil {
			err = e
		}
	}
	if err != nil && !errors.Is(err, os.ErrClosed) {
		return sandboxer.E(sandboxer.Internal, err, "cannot resize the terminal of process %d", p.pid)
	}
	return nil
}

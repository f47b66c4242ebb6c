package agent

import (
	"cmp"
	"os"
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

// Bounds on ended processes that are kept for late readers.
const (
	maxEnded      = 1024
	maxEndedBytes = 8 << 20
)

// A table holds the processes of the agent. Nothing else waits for children.
type table struct {
	// starting is held shared between fork and entry into the table, and exclusively
	// while children are reaped: so every child is known before it is reaped.
	starting sync.RWMutex

	mu      sync.Mutex
	procs   map[int]*process // not ended
	ended   map[int]*process
	order   []*process // ended, oldest first
	seq     uint64
	stopped bool

	tagging sync.Mutex // held while a program starts with its tag as our own limit

	gates
	limited bool // programs start without our own CAP_SYS_RESOURCE
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
		t.forget(p.pid) // an earlier process may have had this number
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

// end moves p to the ended processes.
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

// forget drops an ended process with this number. t.mu is held.
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

// find returns a process by number, or if pid is 0 the newest one with the tag; ended
// processes only if ended is true.
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

// reap collects every child that has ended, ours and adopted ones.
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
			case <-p.done: // a later, adopted process with the same number
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

// markVar names the variable that marks a process as started by one of our commands,
// even after it moved to a session of its own.
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

// procStat is an entry of the system's process list.
type procStat struct {
	pid, parent, group, session int
	dead                        bool
	ticks                       int64 // processor time
	pages                       int64 // resident
}

// readProcesses lists the processes that are visible; on an error, those that it has
// read.
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

// stop refuses new processes and ends all: with a signal, then after grace by force.
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
			_ = p.signal(unix.SIGHUP) // interactive shells ignore SIGTERM
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

// killRest kills the remaining processes and everything that they left behind.
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

//go:build linux

package local

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"crypto/rand"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/specutils"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// of returns this process's hold on h's sandbox.
func (e *engine) of(h sandboxer.Handle) (*box, error) {
	name, err := e.find(h)
	if err != nil {
		return nil, err
	}
	return e.hold(name)
}

// alone is of for who is about to change the sandbox: until unlock nobody else does.
func (e *engine) alone(ctx context.Context, h sandboxer.Handle) (_ *box, unlock func(), err error) {
	name, err := e.find(h)
	if err != nil {
		return nil, nil, err
	}
	unlock, err = e.lock(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	b, err := e.hold(name)
	if err != nil {
		unlock()
		return nil, nil, err
	}
	return b, unlock, nil
}

// thawed is of for what takes a running kernel.
func (e *engine) thawed(h sandboxer.Handle) (*box, error) {
	b, err := e.of(h)
	if err == nil && e.frozen(b.name) != "" {
		return nil, sandboxer.E(sandboxer.Conflict, nil, "the sandbox is frozen").WithHint("thaw it first: sandboxer resume %s", h.SandboxID)
	}
	return b, err
}

// Exec implements sandboxer.Execer. Commands without a terminal are started by
// gVisor directly, with pipes of ours as their streams; terminals belong to the
// agent, inside, where job control and signals are the guest kernel's own.
func (e *engine) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	b, err := e.thawed(h)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	if cmd.Dir == "" {
		cmd.Dir = b.rec.Workspace
	} else if cmd.Dir != b.rec.Workspace {
		// gVisor starts a command in a file if told so.
		if fi, err := b.stat(ctx, cmd.Dir); err == nil && !fi.Mode.IsDir() && fi.Mode&fs.ModeSymlink == 0 {
			return sandboxer.Exit{}, sandboxer.E(sandboxer.Invalid, nil, "working directory %s is not a directory", cmd.Dir)
		}
	}
	if cmd.User == "" {
		cmd.User = b.rec.User
	}
	var x sandboxer.Exit
	kills := e.oomKills(b)
	if cmd.TTY != nil {
		if err = b.ask(ctx, b.ctl.ping); errors.Is(err, errUnresponsive) {
			return x, err
		}
		cmd.Env = b.givenEnv(cmd.Env)
		err = b.within(ctx, true, func(ctx context.Context) (err error) { x, err = b.agent.Exec(ctx, cmd); return err })
	} else {
		x, err = b.exec(ctx, cmd)
	}
	// Whose gofer or kernel is ending has its commands killed first. Nobody but the memory
	// limit and the sandbox's own processes kills otherwise.
	if killed := err == nil && x.Signal == "KILL"; err != nil && !b.alive() || errors.Is(err, sandboxer.Unavailable) && !b.goferAlive() || killed && b.dying() {
		e.drop(b.name)
		// What gVisor keeps for a guest is in the sandbox's group as its processes are,
		// and the largest of them is the first to be killed: then all ends with it.
		if sandboxer.KindOf(err) != sandboxer.Canceled && ctx.Err() == nil && e.oomKills(b) > kills {
			return sandboxer.Exit{Code: 128 + int(unix.SIGKILL), Signal: "KILL", OOMKilled: true}, nil
		}
		if killed || sandboxer.KindOf(err) != sandboxer.Canceled && ctx.Err() == nil {
			return sandboxer.Exit{}, errLost
		}
		return x, e.gone(b.name)
	}
	if err == nil && x.Code == 128+int(unix.SIGKILL) && e.oomKills(b) > kills {
		x.OOMKilled = true
	}
	return x, err
}

// errLost is the end of a command whose sandbox ended under it.
var errLost = sandboxer.E(sandboxer.NotFound, nil, "the sandbox was lost while the command ran: its processes on this machine have ended").
	WithHint("create a new one, or restore a snapshot")

// dying reports whether the sandbox is ending, and waits until it has.
func (b *box) dying() bool {
	ctx, cancel := context.WithTimeout(context.Background(), pulseEvery)
	defer cancel()
	state, err := b.ctl.state(ctx)
	if err == nil && state != boot.RuntimeStateStopped && b.goferAlive() {
		return false
	}
	// One without a first process or files has no way back, however long its kernel takes to
	// end on a busy machine.
	return b.ended() || err == nil || !b.goferAlive()
}

// goferAlive reports whether the process is there that serves the sandbox its files.
func (b *box) goferAlive() bool {
	pid := int(b.c.GoferPid.Load())
	if pid <= 0 {
		return true // it has none
	}
	return !procs.Ended(pid)
}

// filesHang reports whether that process is there and stopped.
func (b *box) filesHang() bool {
	pid := int(b.c.GoferPid.Load())
	if pid <= 0 {
		return false
	}
	f, _ := procs.Stat(pid)
	return len(f) > 0 && (f[0] == "T" || f[0] == "t")
}

// oomKills returns how often the kernel killed for memory in b so far; 0 if there is
// no limit.
func (e *engine) oomKills(b *box) int64 {
	if b.rec.Limits.MemoryBytes == 0 {
		return 0
	}
	return e.cgroups.oomKills(b.name)
}

// execTag is what also tells a command's processes, however they detach: bits of their
// bounding set of capabilities above those that there are. All that they start has them,
// and nothing inside can drop them. 22 bits are enough to tell commands that run at a time.
func execTag(mark string) uint64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, mark)
	return h.Sum64()>>42 | 1<<22
}

func (b *box) exec(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	who, err := b.user(ctx, cmd.User)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	mark := rand.Text()
	args := &control.ExecArgs{
		Argv:             cmd.Args,
		Envv:             b.environ(cmd.Env, who, mark),
		WorkingDirectory: cmd.Dir,
		KUID:             auth.KUID(who.uid),
		KGID:             auth.KGID(who.gid),
		NoNewPrivileges:  true,
		Capabilities:     capabilities(guestCapabilities, who.uid == 0),
	}
	begun, err := b.startSlot(ctx)
	if err != nil {
		return sandboxer.Exit{}, b.lost(ctx, err, "waiting to start the command")
	}
	defer begun()
	s, err := newStreams(b.poll, cmd)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	args.FilePayload = control.NewFilePayload(s.guest, nil)
	args.Capabilities.BoundingCaps |= auth.CapabilitySet(execTag(mark) << agent.TagShift)
	// What is being started when its caller leaves had better be started: it is known then.
	sctx, cancel := lag(ctx, startLag)
	pid, err := b.execute(sctx, args)
	cancel()
	s.closeGuest()
	begun()
	if _, said := errors.AsType[remoteError](err); said {
		s.abort()
		return b.notStarted(ctx, cmd, err)
	}
	if err != nil { // it may start all the same
		s.abort()
		b.owe(mark, 0)
		return sandboxer.Exit{}, b.lost(ctx, err, "starting the command")
	}
	s.start(cmd)

	wctx, leave := context.WithCancel(context.WithoutCancel(ctx))
	defer leave() // gives back what the waiting takes
	ended := b.await(wctx, pid)
	signals := cmd.Signals
	for {
		select {
		case r := <-ended:
			if r.err != nil {
				s.abort()
				if errors.Is(r.err, errUnresponsive) {
					b.owe(mark, pid)
					return sandboxer.Exit{}, errUnresponsive
				}
				return sandboxer.Exit{}, b.lost(wctx, r.err, "observing the command's end")
			}
			if err := s.finish(); err != nil {
				return sandboxer.Exit{}, err
			}
			return exitOf(r.status), nil
		case sig, ok := <-signals:
			if !ok {
				signals = nil
				continue
			}
			if n, ok := sig.(syscall.Signal); ok {
				_ = b.signal(ctx, pid, n) // it may have just ended
			}
		case <-s.broken: // nobody reads the output any more
			b.end(mark, pid, ended)
			return sandboxer.Exit{}, s.finish()
		case <-ctx.Done():
			b.end(mark, pid, ended)
			s.abort()
			return sandboxer.Exit{}, sandboxer.E(sandboxer.KindOf(ctx.Err()), ctx.Err(), "the command was ended because its caller left or its time was up")
		}
	}
}

// startLag is how much longer than its caller a command may take to be started.
const startLag = time.Second

// environ is the environment of a command: the sandbox's, the user's, the caller's.
func (b *box) environ(extra map[string]string, who identity, mark string) []string {
	b.mu.Lock()
	env := slices.Clone(b.env)
	b.mu.Unlock()
	if who.name != "" {
		env = mergeEnv(env, []string{"USER=" + who.name, "LOGNAME=" + who.name})
	}
	if who.uid != 0 || !slices.ContainsFunc(env, func(kv string) bool { return strings.HasPrefix(kv, "HOME=") }) {
		env = mergeEnv(env, []string{"HOME=" + who.home})
	}
	for k, v := range extra {
		env = mergeEnv(env, []string{k + "=" + v})
	}
	return append(env, procs.ExecVar+"="+mark)
}

func capabilities(names []string, root bool) *auth.TaskCapabilities {
	set := &specs.LinuxCapabilities{Bounding: names}
	if root {
		set.Effective, set.Permitted = names, names
	}
	caps, err := specutils.Capabilities(false, set)
	if err != nil {
		return &auth.TaskCapabilities{} // none; the names above are constants that gVisor knows
	}
	return caps
}

// notStarted turns gVisor's refusal to start a command into what a shell would say.
func (b *box) notStarted(ctx context.Context, cmd sandboxer.Cmd, err error) (sandboxer.Exit, error) {
	if !b.alive() {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.NotFound, err, "the sandbox ended")
	}
	if strings.Contains(err.Error(), "try again") {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Exhausted, err, "the command could not be started: the sandbox has as many processes as its limit allows").
			WithHint("end some of them, or raise limits.pids in the profile")
	}
	if cmd.Dir != "" {
		if fi, serr := b.stat(ctx, cmd.Dir); errors.Is(serr, sandboxer.NotFound) || serr == nil && !fi.Mode.IsDir() && fi.Mode&fs.ModeSymlink == 0 {
			return sandboxer.Exit{}, sandboxer.E(sandboxer.Invalid, err, "working directory %s does not exist in the sandbox", cmd.Dir)
		}
	}
	if se := sandboxer.StartErrorOf(cmd.Args[0], err); se != nil {
		return se.Exit(cmd), nil
	}
	return sandboxer.Exit{}, sandboxer.E(sandboxer.Unavailable, err, "the command could not be started")
}

func exitOf(ws unix.WaitStatus) sandboxer.Exit {
	if ws.Signaled() {
		return sandboxer.Exit{Code: 128 + int(ws.Signal()), Signal: strings.TrimPrefix(unix.SignalName(ws.Signal()), "SIG")}
	}
	return sandboxer.Exit{Code: ws.ExitStatus()}
}

// An outcome is the end of a command, or why that was not seen.
type outcome struct {
	status unix.WaitStatus
	err    error
}

// killTime is how long the end of a command and of what it started may take.
const killTime = time.Minute

// end kills a command and everything it started, and waits until it has ended, but not for
// long: who cannot get at the sandbox's files, say, can end it no more than begin. In a
// sandbox that does not respond that is done when it does so again.
func (b *box) end(mark string, pid int32, ended <-chan outcome) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.Background(), killTime)
		defer cancel()
		if b.kill(ctx, mark, pid) != nil {
			b.owe(mark, pid)
			return
		}
		select {
		case <-ended:
		case <-ctx.Done():
		}
	}()
	select {
	case <-done:
	case <-time.After(4 * b.pulse.period()):
	}
}

// owe notes that what carries mark is to be killed, pid first if that is known.
func (b *box) owe(mark string, pid int32) {
	b.mu.Lock()
	if b.owed == nil {
		b.owed = map[string]int32{}
	}
	b.owed[mark] = pid
	b.mu.Unlock()
	if !b.pulse.unresponsive() {
		b.killOwed()
	}
}

// killOwed kills what is to be killed yet, one after the other.
func (b *box) killOwed() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.killing || len(b.owed) == 0 {
		return
	}
	b.killing = true
	go func() {
		for {
			b.mu.Lock()
			mark, pid, left := "", int32(0), false
			for mark, pid = range b.owed {
				left = true
				break
			}
			if !left {
				b.killing = false
				b.mu.Unlock()
				return
			}
			b.mu.Unlock()
			ctx, cancel := context.WithTimeout(context.Background(), killTime)
			err := b.kill(ctx, mark, pid)
			cancel()
			b.mu.Lock()
			if errors.Is(err, errUnresponsive) { // hear calls this again
				b.killing = false
				b.mu.Unlock()
				return
			}
			delete(b.owed, mark)
			b.mu.Unlock()
		}
	}()
}

// kill ends a command and everything it started. What carries its mark, or belongs to
// its session, is found inside, by the agent's program: a process may have left the
// tree, but takes its environment along. What multiplies faster than it can be looked
// at has to stand still for that, and everybody else inside with it. An error says that
// the kernel inside did not answer.
func (b *box) kill(ctx context.Context, mark string, pid int32) error {
	if pid > 0 {
		// Stopped, it has no more children, and those that it has are still known as its own.
		if err := b.told(b.signal(ctx, pid, unix.SIGSTOP)); err != nil {
			return err
		}
		defer func() { _ = b.signal(context.WithoutCancel(ctx), pid, unix.SIGKILL) }()
	}
	k := &kill{mark: mark, session: pid, done: make(chan error, 1)}
	b.mu.Lock()
	b.toKill = append(b.toKill, k)
	b.mu.Unlock()
	// They take turns: of many programs that look at once none is done in time, and then
	// everybody would stand still for each of them. Whose turn it is kills for all who wait.
	select {
	case err := <-k.done:
		return err
	case b.killers <- struct{}{}:
	}
	for {
		b.mu.Lock()
		batch := b.toKill[:min(len(b.toKill), mostKills)]
		b.toKill = slices.Clone(b.toKill[len(batch):])
		b.mu.Unlock()
		if len(batch) == 0 {
			break
		}
		err := b.killAll(ctx, batch)
		for _, k := range batch {
			k.done <- err
		}
		if slices.Contains(batch, k) {
			break
		}
	}
	<-b.killers
	return <-k.done
}

// A kill is what kill waits for: the end of what carries mark or belongs to a session.
type kill struct {
	mark    string
	session int32
	done    chan error
}

// mostKills is how many of them one program is started for: they have a hundred bytes each among
// its arguments, for which there is room for ten times as many.
const mostKills = 1500

// killAll kills for all of batch.
func (b *box) killAll(ctx context.Context, batch []*kill) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime) // for its turn
	defer cancel()
	var killer atomic.Int32
	done := make(chan error, 1)
	go func() { done <- b.killMarked(ctx, batch, &killer) }()
	select {
	case err := <-done:
		return err
	case <-time.After(killPatience(len(batch))):
	}
	// One after the other: two would stop each other's killers, and the first to be done
	// would let what the other looks for go on.
	b.still.Lock()
	defer b.still.Unlock()
	// A kernel that hangs would do it when it goes on, and nobody would continue them then.
	if b.ask(ctx, b.ctl.ping) != nil {
		return <-done
	}
	if err := b.standStill(ctx, true); err != nil {
		return <-done
	}
	// Who was being born is not among those who were stopped.
	again := time.NewTicker(killPatience(1) / 4)
	defer again.Stop()
	var err error
	for stopped := false; !stopped; {
		_ = b.signalAll(ctx, unix.SIGSTOP)
		if n := killer.Load(); n != 0 {
			_ = b.signal(ctx, n, unix.SIGCONT)
		}
		select {
		case err = <-done:
			stopped = true
		case <-again.C:
		}
	}
	_ = b.standStill(context.WithoutCancel(ctx), false) // if that fails, the next hold on the sandbox does it
	return err
}

// told drops what the kernel inside had to say against a call: it answered.
func (b *box) told(err error) error {
	if _, said := errors.AsType[remoteError](err); said {
		return nil
	}
	return err
}

// killPatience is how long what so many commands started may take to be found.
func killPatience(commands int) time.Duration {
	return time.Second + time.Duration(commands)*10*time.Millisecond
}

func (b *box) signalAll(ctx context.Context, sig unix.Signal) error {
	return b.ask(ctx, func(ctx context.Context) error { return b.ctl.signalAll(ctx, sig) })
}

// standStill notes that every process inside is being stopped, which is the caller's to do;
// or ends that.
func (b *box) standStill(ctx context.Context, on bool) error {
	if on {
		return os.WriteFile(b.stopped, nil, 0o600)
	}
	if err := b.signalAll(ctx, unix.SIGCONT); err != nil {
		return err
	}
	return os.Remove(b.stopped)
}

// killMarked runs the agent's program that kills what carries the marks or belongs to the
// sessions, and stores its process ID in killer.
func (b *box) killMarked(ctx context.Context, batch []*kill, killer *atomic.Int32) error {
	run := func(batch []*kill) (unix.WaitStatus, error) {
		args := []string{agentPath, "kill-marked"}
		for _, k := range batch {
			session := k.session
			if session <= 0 {
				session = 1 << 30 // nobody's
			}
			args = append(args, procs.ExecVar+"="+k.mark, fmt.Sprint(session))
			if b.rec.AgentMount { // the agent of a sandbox from before knows no tags
				args = append(args, strconv.FormatUint(execTag(k.mark), 16))
			}
		}
		pid, err := b.executeOwn(ctx, killerCapabilities, nil, args...)
		if err != nil {
			return 0, err
		}
		killer.Store(pid)
		var ws unix.WaitStatus
		err = b.ask(ctx, func(ctx context.Context) (err error) { ws, err = b.ctl.waitPID(ctx, pid); return err })
		return ws, err
	}
	if len(batch) == 1 || b.rec.AgentMount {
		ws, err := run(batch)
		if err != nil || len(batch) == 1 || ws.ExitStatus() != 2 {
			return b.told(err)
		}
	}
	for _, k := range batch { // the agent of a former build kills for one at a time
		if _, err := run([]*kill{k}); b.told(err) != nil {
			return err
		}
	}
	return nil
}

// CAP_SYS_RESOURCE: where the process limit is reached, the killer needs a few threads
// all the same.
var killerCapabilities = []string{"CAP_KILL", "CAP_SYS_RESOURCE", "CAP_SYS_PTRACE", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH"}

// streams connect a command's files with the caller's readers and writers.
type streams struct {
	guest  map[int]*os.File // the command's ends
	stdin  *os.File         // our ends; nil where there is none
	out    []*outStream
	broken chan struct{} // closed when a writer fails
	fail   func()        // closes broken
}

// An outStream is one stream of a command's output. Nothing of this process stays with it
// while nothing comes.
type outStream struct {
	poll  *poller
	f     *os.File
	raw   syscall.RawConn
	watch *watch
	w     io.Writer
	fail  func() // called when w does

	over atomic.Bool // what comes is the affair of finish now
	mu   sync.Mutex  // held while it flows
	eof  bool
	err  error
}

const (
	pipeSize = 1 << 20 // what an ordinary user may ask for; fewer switches between writer and reader

	// A stream that has moved busyOutput and stops is waited for as long as lingerOutput: more
	// will come soon.
	busyOutput   = 64 << 10
	lingerOutput = 10 * time.Millisecond
)

func newStreams(poll *poller, cmd sandboxer.Cmd) (*streams, error) {
	s := &streams{guest: map[int]*os.File{}, broken: make(chan struct{})}
	s.fail = sync.OnceFunc(func() { close(s.broken) })
	ok := false
	defer func() {
		if !ok {
			s.closeGuest()
			s.abort()
		}
	}()
	if cmd.Stdin != nil {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "no pipe for the command's input")
		}
		s.guest[0], s.stdin = r, w
	}
	for i, w := range []io.Writer{cmd.Stdout, cmd.Stderr} {
		if w == nil {
			continue
		}
		r, g, err := os.Pipe()
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "no pipe for the command's output")
		}
		_, _ = unix.FcntlInt(g.Fd(), unix.F_SETPIPE_SZ, pipeSize)
		s.guest[i+1] = g
		o := &outStream{poll: poll, f: r, w: w, fail: s.fail}
		s.out = append(s.out, o)
		if o.raw, err = r.SyscallConn(); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "no pipe for the command's output")
		}
	}
	for i := range 3 {
		if s.guest[i] == nil {
			null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
			if err != nil {
				return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot be opened", os.DevNull)
			}
			s.guest[i] = null
		}
	}
	ok = true
	return s, nil
}

func (s *streams) closeGuest() {
	for _, f := range s.guest {
		f.Close()
	}
	s.guest = nil
}

// start begins to copy.
func (s *streams) start(cmd sandboxer.Cmd) {
	if s.stdin != nil {
		// Not waited for: a reader may block for ever, and is the caller's to end.
		go feed(s.stdin, cmd.Stdin)
	}
	for _, o := range s.out {
		o.mu.Lock() // a stream that flows already waits for its watch
		var err error
		if o.watch, err = o.poll.watch(o.f, o.flow); err == nil {
			err = o.watch.arm()
		}
		o.mu.Unlock()
		if err != nil {
			go o.flow()
		}
	}
}

// feed copies a command's input. Its buffer is small while little comes.
func feed(w *os.File, r io.Reader) {
	defer w.Close()
	small := make([]byte, 512)
	buf := small
	for {
		n, err := r.Read(buf)
		if _, werr := w.Write(buf[:n]); err != nil || werr != nil {
			return
		}
		switch {
		case n < len(buf):
			buf = small
		case n == len(small):
			buf = make([]byte, 32<<10)
		}
	}
}

// flow passes on what is there, and has the poller wait for more.
func (o *outStream) flow() {
	o.mu.Lock()
	defer o.mu.Unlock()
	buf := o.poll.buffer(false)
	defer func() { o.poll.recycle(buf) }()
	for moved, linger, stay := 0, false, false; !o.over.Load() && !o.eof && o.err == nil; {
		var n int
		var err error
		if linger {
			linger = false
			n, err = o.f.Read(buf)
		} else {
			n, err = o.ready(buf)
		}
		o.pass(buf[:n], err)
		moved += n
		switch {
		case n > 0:
			if n == len(buf) && n < copySize {
				o.poll.recycle(buf)
				buf = o.poll.buffer(true)
			}
		case err == unix.EAGAIN && moved >= busyOutput:
			moved = 0
			linger = o.f.SetReadDeadline(time.Now().Add(lingerOutput)) == nil // before it looks whether it is over
		case o.eof || o.err != nil:
		case stay || o.watch == nil || o.watch.arm() != nil: // there is no poller for it
			stay = true
			linger = o.f.SetReadDeadline(time.Time{}) == nil
		default:
			return
		}
	}
	if o.err != nil {
		o.fail()
	}
}

// ready reads without waiting.
func (o *outStream) ready(buf []byte) (n int, err error) {
	cerr := o.raw.Control(func(fd uintptr) {
		for n, err = -1, unix.EINTR; err == unix.EINTR; {
			n, err = unix.Read(int(fd), buf)
		}
	})
	if cerr != nil {
		return 0, cerr
	}
	if n == 0 && err == nil {
		err = io.EOF
	}
	return max(n, 0), err
}

// pass gives to the caller what was read. An error other than that nothing came is the end.
func (o *outStream) pass(p []byte, err error) {
	if len(p) > 0 {
		if _, err := o.w.Write(p); err != nil {
			o.err = sandboxer.E(sandboxer.Canceled, err, "nobody reads the command's output any more")
		}
	}
	o.eof = o.eof || err != nil && err != unix.EAGAIN && !errors.Is(err, os.ErrDeadlineExceeded)
}

// rest moves output until its end. A command may leave something behind that keeps
// the stream open; now that the command itself has ended, only what is already in the
// pipe is taken.
func (o *outStream) rest() {
	o.over.Store(true)
	_ = o.f.SetReadDeadline(time.Unix(1, 0)) // whoever lingers sees it
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.eof || o.err != nil {
		return
	}
	buf := o.poll.buffer(false)
	defer func() { o.poll.recycle(buf) }()
	_ = o.f.SetReadDeadline(time.Now().Add(drainTime))
	for late := false; !o.eof && o.err == nil; {
		var n int
		var err error
		if late {
			n, err = o.ready(buf)
		} else {
			n, err = o.f.Read(buf)
		}
		o.pass(buf[:n], err)
		if late && n == 0 {
			return
		}
		late = late || errors.Is(err, os.ErrDeadlineExceeded)
		if n == len(buf) && n < copySize {
			o.poll.recycle(buf)
			buf = o.poll.buffer(true)
		}
	}
}

func (o *outStream) close() {
	o.over.Store(true)
	if o.watch != nil {
		o.watch.stop()
	}
	o.f.Close()
}

// drainTime is how long after a command's end its output may still be on its way
// from other processes that share the stream.
const drainTime = 20 * time.Millisecond

// finish waits until the output of an ended command is delivered.
func (s *streams) finish() error {
	if s.stdin != nil {
		s.stdin.Close()
	}
	var err error
	for _, o := range s.out {
		o.rest()
		o.close()
		err = errors.Join(err, o.err)
	}
	return err
}

// abort closes our ends.
func (s *streams) abort() {
	if s.stdin != nil {
		s.stdin.Close()
	}
	for _, o := range s.out {
		o.close()
	}
}

// IsAlive implements sandboxer.Prober. Its process says that a sandbox is there; whether
// it is of any use, its kernel does.
func (e *engine) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	b, err := e.of(h)
	switch {
	case err == nil:
		err := b.pulse.check(ctx, b.pulse.period())
		switch {
		case err == nil && b.alive():
			return sandboxer.Alive, nil
		case err == nil: // it ended while it was asked
			e.drop(b.name)
			return sandboxer.Gone, nil
		case errors.Is(err, errUnresponsive) && b.pulse.quiet():
			return sandboxer.Alive, nil
		case errors.Is(err, errUnresponsive):
			b.pulse.doubt() // calls meet what was said of it
			return sandboxer.Unresponsive, nil
		}
		return sandboxer.Unknown, err
	case errors.Is(err, errDamaged):
		// Its processes may be well, but nobody can get at them any more.
		if name, ferr := e.find(h); ferr == nil {
			pids, perr := e.processes(name)
			if perr != nil {
				return sandboxer.Unknown, perr
			}
			if len(pids) > 0 {
				return sandboxer.Unresponsive, nil
			}
		}
		return sandboxer.Gone, nil
	case errors.Is(err, sandboxer.NotFound):
		if name, ferr := e.find(h); ferr == nil && e.cgroups.oomKilled(name) {
			return sandboxer.OOMKilled, nil
		}
		return sandboxer.Gone, nil
	}
	return sandboxer.Unknown, err
}

// Discover implements sandboxer.Discoverer.
func (e *engine) Discover(_ context.Context, id string) (sandboxer.Found, error) {
	name, err := e.find(sandboxer.Handle{SandboxID: id})
	if err != nil {
		return sandboxer.Found{}, err
	}
	if _, err := e.hold(name); err != nil {
		return sandboxer.Found{}, err
	}
	rec, err := e.record(name)
	if err != nil || !rec.Ready || rec.Owner != e.env.Owner {
		return sandboxer.Found{}, sandboxer.E(sandboxer.NotFound, err, "there is no complete sandbox %s on this machine", id)
	}
	h := sandboxer.Handle{SandboxID: id, Generation: rec.Generation, Host: "localhost", Ref: name}
	return sandboxer.Found{Handle: h, Stamp: rec.Stamp, Fuse: rec.Fuse}, nil
}

// Renew implements sandboxer.Renewer. The fuse is in the sandbox's first process: it
// needs no broker to blow. What remains then, the next broker clears.
func (e *engine) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return err
	}
	defer unlock()
	name := b.name
	rec, err := e.record(name)
	if err != nil {
		return err
	}
	rec.Fuse = until
	if err := e.writeRecord(name, rec); err != nil {
		return diskError(err, "writing the sandbox's record")
	}
	if e.frozen(name) != "" {
		return nil // it is lit when the sandbox is thawed
	}
	return b.setFuse(ctx, until)
}

// setFuse tells the sandbox's first process its fuse: a zero time means none.
func (b *box) setFuse(ctx context.Context, until time.Time) error {
	b.mu.Lock()
	b.fuse = until
	b.mu.Unlock()
	for {
		awake, err := b.agentAwake(ctx)
		if err != nil {
			return err
		}
		if awake {
			return b.within(ctx, false, func(ctx context.Context) error { return b.agent.Init(ctx, agent.Settings{Fuse: &until}) })
		}
		ws, err := b.run(ctx, ownCapabilities, nil, pausePath, "fuse", strconv.FormatInt(fuseSeconds(until), 10))
		if err = b.lost(ctx, err, "moving the sandbox's fuse"); err != nil {
			return err
		}
		if ws != 0 {
			return sandboxer.E(sandboxer.Unavailable, nil, "moving the sandbox's fuse failed: status %#x", uint32(ws))
		}
		// The agent may have woken meanwhile, and does not heed that signal.
		if awake, err = b.agentAwake(ctx); err != nil || !awake {
			return err
		}
	}
}

// agentAwake reports whether the sandbox's first process is the agent by now.
func (b *box) agentAwake(ctx context.Context) (bool, error) {
	if b.awake.Load() {
		return true, nil
	}
	first, err := b.readSmall(ctx, "/proc/1/cmdline")
	if err != nil {
		return false, err
	}
	if strings.HasPrefix(first, pausePath+"\x00") {
		return false, nil
	}
	b.awake.Store(true)
	return true, nil
}

// Capacity implements sandboxer.CapacityReporter. Free counts memory, as it is now: sandboxes
// that grow later can still exceed the machine's, where their limits allow it.
func (e *engine) Capacity(_ context.Context, host string) (sandboxer.HostCapacity, error) {
	if host != "" && host != "localhost" {
		return sandboxer.HostCapacity{}, sandboxer.E(sandboxer.NotFound, nil, "%s has no host %q", e.env.Extension, host)
	}
	mode := "root"
	if !e.asRoot {
		mode = "ordinary user"
	}
	o := sandboxer.HostCapacity{Free: -1, Hosts: []string{"localhost"}, Attrs: map[string]string{"platform": "systrap", "runs_as": mode}}
	if !e.cgroups.usable() {
		o.Attrs["limits"] = e.cgroups.why
	}
	left := e.memory.room()
	if left < 0 {
		return o, nil
	}
	names, err := e.names()
	if err != nil {
		return o, sandboxer.E(sandboxer.Internal, err, "the state directory of %s cannot be read", e.env.Extension)
	}
	size := e.memory.size(names)
	o.Free = int(left / size)
	o.Attrs["memory"] = fmt.Sprintf("%d MiB for sandboxes, counted with %d MiB each", left>>20, size>>20)
	return o, nil
}

// Stats implements sandboxer.StatsReader.
func (e *engine) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	b, err := e.of(h)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	s := sandboxer.Stats{At: time.Now().UTC(), DiskBytes: -1, DiskLimit: b.rec.Limits.DiskBytes, PIDs: -1, RxBytes: -1, TxBytes: -1}
	s.CPU, s.MemoryBytes, s.MemoryLimit = e.cgroups.usage(b.name)
	var procs []*control.Process
	err = b.ask(ctx, func(ctx context.Context) (err error) { procs, err = b.ctl.processes(ctx); return err })
	if errors.Is(err, errUnresponsive) {
		return sandboxer.Stats{}, err
	}
	if err == nil {
		s.PIDs = 0
		for _, p := range procs {
			s.PIDs += int64(max(1, len(p.Threads)))
		}
	}
	if e.frozen(b.name) != "" {
		return s, nil // the agent does not answer
	}
	var in sandboxer.Stats
	err = b.within(ctx, false, func(ctx context.Context) (err error) { in, err = b.agent.Stats(ctx); return err })
	if errors.Is(err, errUnresponsive) {
		return sandboxer.Stats{}, err
	}
	if err == nil {
		s.DiskBytes = in.DiskBytes
		if s.CPU < 0 {
			s.CPU = in.CPU
		}
		if s.MemoryBytes < 0 {
			s.MemoryBytes = in.MemoryBytes
		}
	}
	return s, nil
}

// openAgent is the way to the agent of h's sandbox for one call (agent.Capabilities).
func (e *engine) openAgent(ctx context.Context, h sandboxer.Handle, long bool) (agent.Call, error) {
	b, err := e.thawed(h)
	if err != nil {
		return agent.Call{}, err
	}
	ctx, done, err := b.pulse.attend(ctx, long)
	if err != nil {
		return agent.Call{}, err
	}
	end := func(err error) error {
		if err != nil && context.Cause(ctx) == errUnresponsive {
			err = errUnresponsive
		}
		done()
		return err
	}
	return agent.Call{Agent: b.agent, Ctx: ctx, End: end, Env: b.givenEnv(nil), Dir: b.rec.Workspace, User: b.rec.User}, nil
}

// within makes a call of the agent's, which ends also where the sandbox does not respond. A
// command is one that runs as long as it likes.
func (b *box) within(ctx context.Context, command bool, f func(context.Context) error) error {
	ctx, done, err := b.pulse.attend(ctx, command)
	if err != nil {
		return err
	}
	defer done()
	if err = f(ctx); err != nil && context.Cause(ctx) == errUnresponsive {
		return errUnresponsive
	}
	return err
}

func (b *box) stat(ctx context.Context, name string) (fi sandboxer.FileInfo, err error) {
	err = b.within(ctx, false, func(ctx context.Context) (err error) { fi, err = b.agent.StatFile(ctx, name); return err })
	return fi, err
}

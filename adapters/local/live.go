//go:build linux

package local

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

// A liveSandbox is this process's hold on one running sandbox.
type liveSandbox struct {
	name  string
	rec   record               // as read at first; its network may have changed since
	c     *container.Container // for its end only: its methods are not safe for concurrent use
	ctl   *controller          // all calls into the kernel
	poll  *poller
	pulse *pulse
	pid   int               // of the sentry
	env   []string          // environment of commands; guarded by mu
	given map[string]string // variables that a claim added, unknown to the agent; guarded by mu
	fuse  time.Time         // fuse as this process last set or read it; guarded by mu
	agent *agent.Client

	awake atomic.Bool // the agent is known to run

	starts chan struct{} // slots for starting commands

	still   sync.Mutex    // held by the kill that has stopped every process inside
	killers chan struct{} // slots of kills that look for processes at once
	toKill  []*kill       // kills that wait for a slot; guarded by mu
	stopped string        // file that exists while processes are stopped (standStill)

	owed    map[string]int32 // commands still to be killed: mark → process ID; guarded by mu
	killing bool             // killOwed is running; guarded by mu

	frozen chan struct{} // closed while every task inside is paused (Pause); guarded by mu

	donations *agent.Donations // connections to its agent

	mu  sync.Mutex
	net *usernet.Net // nil without network

	process *ending // of the kernel; nil if its end cannot be waited for
	files   *ending // of the process that serves its files, likewise

	users sync.Map // user name → users.User, read from the sandbox's /etc/passwd
}

// hold returns the running sandbox called name. Kinds: NotFound when there is none.
func (e *extension) hold(name string) (*liveSandbox, error) {
	e.mu.Lock()
	b := e.boxes[name]
	e.mu.Unlock()
	if b != nil {
		if b.alive() {
			return b, nil
		}
		e.drop(name)
		return nil, e.gone(name)
	}
	c, err := e.load(name)
	if err != nil {
		return nil, err
	}
	if c == nil || c.Status != container.Running || !alive(name, c.SandboxPid()) {
		return nil, e.gone(name)
	}
	rec, err := e.record(name)
	if err != nil {
		return nil, err
	}
	return e.keep(name, rec, c), nil
}

// gone explains why there is no running sandbox called name.
func (e *extension) gone(name string) error {
	if e.cgroups.oomKilled(name) {
		return sandboxer.E(sandboxer.NotFound, nil, "the sandbox was killed because it used more memory than its limit").
			WithHint("raise limits.memory in the profile")
	}
	return sandboxer.E(sandboxer.NotFound, nil, "the sandbox is not running on this machine")
}

// load reads gVisor's state of name; nil if there is none. gVisor's own function waits for any
// process that is changing the state, asks the sandbox without a time limit whether it exists,
// and leaves a lock file, even for a sandbox that has just been removed.
func (e *extension) load(name string) (*container.Container, error) {
	for try := 1; ; try++ {
		data, err := os.ReadFile(e.dir("run", name+"_sandbox:"+name+".state"))
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		c := &container.Container{}
		if err == nil {
			err = json.Unmarshal(data, c)
		}
		if err == nil && (c.Sandbox == nil || c.Spec == nil || c.Spec.Process == nil) {
			err = errors.New("it is incomplete")
		}
		switch {
		case err == nil:
			c.Sandbox.SetRootDir(e.dir("run"))
			return c, nil
		case try == loadTries:
			return nil, damaged(err, "gVisor's state of sandbox "+name)
		}
		time.Sleep(10 * time.Millisecond) // it may still be written
	}
}

const loadTries = 5

// keep remembers a running sandbox.
func (e *extension) keep(name string, rec record, c *container.Container) *liveSandbox {
	b := &liveSandbox{name: name, rec: rec, c: c, ctl: newController(c.Sandbox, name), poll: e.poll, pid: c.SandboxPid(), stopped: e.dir("box", name, "stopped"), starts: make(chan struct{}, startsAtOnce), killers: make(chan struct{}, 2), frozen: make(chan struct{})}
	if e.frozen(name) != "" {
		close(b.frozen)
	}
	b.pulse = &pulse{ask: b.look, back: func() { e.catchUp(b) }, every: pulseEvery, patience: commandPatience}
	b.env, b.fuse = c.Spec.Process.Env, rec.Fuse
	if rec.Claim != "" {
		if given, err := e.claimedEnv(name); err == nil {
			b.give(given)
		} else if e.env.Log != nil {
			e.env.Log.Warn("the environment of a claimed sandbox cannot be read", "sandbox", name, "err", err)
		}
	}
	b.donations = agent.NewDonations(b.donate)
	b.agent = agent.NewClient(agent.ClientOptions{Dial: b.donations.Dial, User: rec.User})
	if _, err := os.Stat(b.stopped); err == nil { // a broker died during a kill
		ctx, cancel := context.WithTimeout(context.Background(), pulseEvery)
		err := b.standStill(ctx, false)
		if err != nil && e.env.Log != nil {
			e.env.Log.Warn("the processes of a sandbox cannot be resumed", "sandbox", name, "err", err)
		}
		if err != nil {
			b.pulse.doubt() // when it answers, catchUp does it
		}
		cancel()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if old := e.boxes[name]; old != nil {
		return old
	}
	e.boxes[name] = b
	e.awaitEnd(b)
	return b
}

// catchUp makes up for calls that failed while the kernel inside did not answer.
func (e *extension) catchUp(b *liveSandbox) {
	e.aside(func() {
		b.still.Lock()
		defer b.still.Unlock()
		if _, err := os.Stat(b.stopped); err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(e.ctx, killTime)
		defer cancel()
		// Twice: it may still carry out a call from the time when it hung.
		if b.signalAll(ctx, unix.SIGCONT) != nil {
			return
		}
		select {
		case <-time.After(killPatience(1)):
		case <-ctx.Done():
			return
		}
		if err := b.standStill(ctx, false); err != nil {
			e.warn("the processes of a sandbox cannot be resumed", fmt.Errorf("sandbox %s: %w", b.name, err))
		}
	})
	b.killOwed()
	e.replug(b.name)
}

// drop forgets a sandbox that a call found ended, and reports the end: what watched for it may not have seen it yet,
// and never will.
func (e *extension) drop(name string) {
	if b := e.forget(name); b != nil {
		e.ended.Tell(b.rec.SandboxID)
	}
}

// forget closes what is held of a sandbox, and returns it; nil if nothing is.
func (e *extension) forget(name string) *liveSandbox {
	e.mu.Lock()
	b := e.boxes[name]
	delete(e.boxes, name)
	e.mu.Unlock()
	if b != nil {
		b.close()
	}
	return b
}

func (b *liveSandbox) close() {
	b.agent.Close()
	b.donations.Close()
	b.mu.Lock()
	n := b.net
	b.net = nil
	b.mu.Unlock()
	b.process.forget()
	b.files.forget()
	if n != nil {
		n.Close()
	}
}

func (b *liveSandbox) alive() bool { return alive(b.name, b.pid) }

// ask makes a short call into the sandbox's kernel. It also ends, with errUnresponsive, if
// the kernel does not answer.
func (b *liveSandbox) ask(ctx context.Context, f func(context.Context) error) error {
	ctx, done, err := b.pulse.attend(ctx, false)
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := context.WithTimeoutCause(ctx, askTime, errUnresponsive)
	defer cancel()
	return b.heed(f(ctx))
}

// askTime is how long a call may take if the kernel answers others.
const askTime = 2 * time.Minute

// heed notes an answer of the kernel. A call without one returns why.
func (b *liveSandbox) heed(err error) error {
	if _, said := errors.AsType[remoteError](err); (said || err == nil) && !b.filesHang() {
		b.pulse.hear()
	}
	if errors.Is(err, errUnresponsive) {
		return errUnresponsive
	}
	return err
}

// look asks whether the sandbox can work: its kernel answers, and the process that serves its
// files is not stopped. A process that needs a file that the kernel has not cached would wait
// for that, without any sign from the kernel.
func (b *liveSandbox) look(ctx context.Context) error {
	if err := b.ctl.ping(ctx); err != nil {
		return err
	}
	for b.filesHang() {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// startsAtOnce is how many commands of a sandbox start at once. Each takes three more file
// descriptors until it has started.
const startsAtOnce = 16

// startSlot waits for its turn to start a command; the caller must call done after that, and
// may call it again.
func (b *liveSandbox) startSlot(ctx context.Context) (done func(), _ error) {
	done = sync.OnceFunc(func() { <-b.starts })
	select {
	case b.starts <- struct{}{}:
		return done, nil
	default:
	}
	ctx, leave, err := b.pulse.attend(ctx, false) // the commands that are starting may hang
	if err != nil {
		return nil, err
	}
	defer leave()
	select {
	case b.starts <- struct{}{}:
		return done, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// execute starts a command and returns its process ID inside. It passes the files on as they
// are: unlike gVisor's own function it does not change their owner, since one may be the
// machine's /dev/null.
func (b *liveSandbox) execute(ctx context.Context, args *control.ExecArgs) (pid int32, err error) {
	err = b.ask(ctx, func(ctx context.Context) (err error) { pid, err = b.ctl.execute(ctx, args); return err })
	return pid, err
}

// await waits for the end of a started command, once. The wait takes no goroutine.
func (b *liveSandbox) await(ctx context.Context, pid int32) <-chan outcome {
	ended := make(chan outcome, 1)
	ctx, done, err := b.pulse.attend(ctx, true)
	if err != nil {
		ended <- outcome{err: err}
		return ended
	}
	go b.ctl.awaitPID(ctx, b.poll, pid, func(ws unix.WaitStatus, err error) {
		ended <- outcome{ws, b.heed(err)}
		done()
	})
	return ended
}

// run runs a program of ours to its end; executeOwn starts it.
func (b *liveSandbox) run(ctx context.Context, may []string, files map[int]*os.File, args ...string) (ws unix.WaitStatus, err error) {
	pid, err := b.executeOwn(ctx, may, files, args...)
	if err == nil {
		err = b.ask(ctx, func(ctx context.Context) (err error) { ws, err = b.ctl.waitPID(ctx, pid); return err })
	}
	return ws, err
}

func (b *liveSandbox) signal(ctx context.Context, pid int32, sig unix.Signal) error {
	return b.ask(ctx, func(ctx context.Context) error { return b.ctl.signal(ctx, pid, sig) })
}

// executeOwn starts a program of ours with capabilities of its own, above the limit of processes,
// with the given files open and nothing for the other standard streams.
func (b *liveSandbox) executeOwn(ctx context.Context, may []string, files map[int]*os.File, args ...string) (pid int32, err error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	open := map[int]*os.File{0: null, 1: null, 2: null}
	maps.Copy(open, files)
	return b.execute(ctx, &control.ExecArgs{
		Argv: args, Envv: []string{"PATH=" + defaultPath}, WorkingDirectory: "/",
		NoNewPrivileges: true, Capabilities: capabilities(may, true),
		FilePayload: control.NewFilePayload(open, nil),
	})
}

// alive reports whether pid is the sentry of the sandbox called name: a process that is
// not a zombie and has the sandbox's name, so that a reused number is not mistaken for it.
func alive(name string, pid int) bool {
	if pid <= 0 {
		return false
	}
	if procs.Ended(pid) {
		return false
	}
	data, err := procs.Args(pid, make([]byte, 4<<10))
	if err != nil {
		return true // a process that cannot be checked, for want of descriptors, is not gone
	}
	return bytes.HasPrefix(data, []byte("runsc-sandbox\x00")) &&
		bytes.HasSuffix(bytes.TrimRight(data, "\x00"), []byte("\x00"+name))
}

// start starts a created container with its network links. gVisor would take them from
// a network namespace; ours are given directly, and for that Start must find nothing to
// do.
func start(ctx context.Context, c *container.Container, conf *config.Config, link *os.File) error {
	args := interfaces(link, "eth0")
	if err := newController(c.Sandbox, c.ID).call(ctx, boot.ContMgrSetNetworkArgs, args, nil, args.Files...); err != nil {
		return fmt.Errorf("giving the sandbox its network: %w", err)
	}
	c2 := *conf
	c2.Network = config.NetworkHost
	return c.Start(&c2)
}

// restore starts a created container from the snapshot at image, with its network links.
func restore(c *container.Container, conf *config.Config, image string, link *os.File) error {
	args := interfaces(link, "eth0")
	args.IsRestore = true
	return c.Restore(conf, image, false, true, args)
}

// plug gives a running sandbox a new network interface: it has none, or one that has lost its
// other end for good.
func (b *liveSandbox) plug(ctx context.Context, link *os.File, name string) error {
	// A kernel that hangs carries out the call when it continues, with a link that has been
	// abandoned by then.
	if err := b.ask(ctx, b.ctl.ping); err != nil {
		return err
	}
	args := interfaces(link, name)
	args.LoopbackLinks = nil
	for i := range args.FDBasedLinks {
		args.FDBasedLinks[i].PreConfigured = true
		args.FDBasedLinks[i].IsPacket = []bool{false}
		args.FDBasedLinks[i].ProcessorsPerChannel = 1
	}
	return b.ask(ctx, func(ctx context.Context) error {
		return b.ctl.call(ctx, "Network.CreateLinksAndRoutes", args, nil, args.Files...)
	})
}

// readSmall reads a file of at most 1 MiB through gVisor's control socket. Kinds: Invalid when
// the sandbox says that it cannot be read, NotFound when it has ended.
func (b *liveSandbox) readSmall(ctx context.Context, name string) (string, error) {
	f, err := memoryFile("sandboxer")
	if err != nil {
		return "", sandboxer.E(sandboxer.Unavailable, err, "no memory for a file of the sandbox")
	}
	defer f.Close()
	err = b.ask(ctx, func(ctx context.Context) error { return b.ctl.readFile(ctx, name, maxSmall, f) })
	_, said := errors.AsType[remoteError](err)
	switch {
	case said:
		return "", sandboxer.E(sandboxer.Invalid, err, "%s cannot be read inside the sandbox", name)
	case err != nil:
		return "", b.lost(ctx, err, "reading "+name+" inside the sandbox")
	}
	data, err := io.ReadAll(io.NewSectionReader(f, 0, maxSmall))
	return string(data), err
}

const maxSmall = 1 << 20

// memoryFile returns a file in memory, without a name.
func memoryFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// lost gives a kind to a call that the kernel inside did not answer: NotFound if the sandbox
// has ended, which may show in its process a moment later.
func (b *liveSandbox) lost(ctx context.Context, err error, what string) error {
	if _, ok := errors.AsType[*sandboxer.Error](err); ok || err == nil {
		return err
	}
	if cause := context.Cause(ctx); cause != nil {
		return sandboxer.E(sandboxer.KindOf(cause), cause, "%s did not finish in time", what)
	}
	if b.ended() {
		return sandboxer.E(sandboxer.NotFound, err, "the sandbox ended")
	}
	return sandboxer.E(sandboxer.Unavailable, err, "%s failed", what)
}

// ended reports whether the sandbox's kernel is gone. Its process may need a moment after its
// last connection has broken.
func (b *liveSandbox) ended() bool {
	for end := time.Now().Add(time.Second); b.alive(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// goferAlive reports whether the process that serves the sandbox's files exists.
func (b *liveSandbox) goferAlive() bool {
	pid := int(b.c.GoferPid.Load())
	if pid <= 0 {
		return true // it has none
	}
	return !procs.Ended(pid)
}

// filesHang reports whether that process exists and is stopped.
func (b *liveSandbox) filesHang() bool {
	pid := int(b.c.GoferPid.Load())
	if pid <= 0 {
		return false
	}
	f, _ := procs.Stat(pid)
	return len(f) > 0 && (f[0] == "T" || f[0] == "t")
}

// of returns this process's hold on h's sandbox.
func (e *extension) of(h sandboxer.Handle) (*liveSandbox, error) {
	name, err := e.find(h)
	if err != nil {
		return nil, err
	}
	return e.hold(name)
}

// alone is of for a call that changes the sandbox: until unlock no other call does.
func (e *extension) alone(ctx context.Context, h sandboxer.Handle) (_ *liveSandbox, unlock func(), err error) {
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

// thawed is of for a call that needs a running kernel.
func (e *extension) thawed(h sandboxer.Handle) (*liveSandbox, error) {
	b, err := e.of(h)
	if err == nil && e.frozen(b.name) != "" {
		return nil, sandboxer.E(sandboxer.Conflict, nil, "the sandbox is frozen").WithHint("thaw it first: sandboxer resume %s", h.SandboxID)
	}
	return b, err
}

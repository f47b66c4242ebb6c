//go:build linux

package local

import (
	"context"
	"crypto/rand"
	"errors"
	"hash/fnv"
	"io"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/users"
)

// Exec implements sandboxer.Execer. gVisor starts commands without a terminal
// directly, with our pipes as their streams; the agent runs those with a terminal,
// inside, where job control and signals belong to the guest kernel.
func (e *extension) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	b, err := e.thawed(h)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	if cmd.Dir == "" {
		cmd.Dir = b.rec.Workspace
	} else if cmd.Dir != b.rec.Workspace {
		// gVisor accepts a file as working directory.
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
	// A sandbox whose gofer or kernel is ending has its commands killed first. Otherwise
	// only the memory limit and the sandbox's own processes kill.
	if killed := err == nil && x.Signal == "KILL"; err != nil && !b.alive() || errors.Is(err, sandboxer.Unavailable) && !b.goferAlive() || killed && b.dying() {
		e.drop(b.name)
		// gVisor's memory for a guest counts in the sandbox's group like its processes, and
		// the kernel kills the largest of these first: then everything ends with it.
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
var errLost = sandboxer.E(sandboxer.NotFound, nil, "the sandbox ended while the command ran: its processes on this machine are gone").
	WithHint("create a new one, or restore a snapshot")

// dying reports whether the sandbox is ending, and waits until it has.
func (b *liveSandbox) dying() bool {
	ctx, cancel := context.WithTimeout(context.Background(), pulseEvery)
	defer cancel()
	state, err := b.ctl.state(ctx)
	if err == nil && state != boot.RuntimeStateStopped && b.goferAlive() {
		return false
	}
	// A sandbox without its first process or its files cannot recover, however long its
	// kernel takes to end on a busy machine.
	return b.ended() || err == nil || !b.goferAlive()
}

// oomKills returns how often the kernel has killed for memory in b; 0 if there is no
// limit.
func (e *extension) oomKills(b *liveSandbox) int64 {
	if b.rec.Limits.MemoryBytes == 0 {
		return 0
	}
	return e.cgroups.oomKills(b.name)
}

// execTag also identifies a command's processes, however they detach: bits of their bounding
// set above all existing capabilities. All their descendants have the bits, and nothing
// inside can drop them. 22 bits distinguish the commands that run at a time.
func execTag(mark string) uint64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, mark)
	return h.Sum64()>>42 | 1<<22
}

func (b *liveSandbox) exec(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	who, err := b.user(ctx, cmd.User)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	mark := rand.Text()
	args := &control.ExecArgs{
		Argv:             cmd.Args,
		Envv:             b.environ(cmd.Env, who, mark),
		WorkingDirectory: cmd.Dir,
		KUID:             auth.KUID(who.UID),
		KGID:             auth.KGID(who.GID),
		NoNewPrivileges:  true,
		Capabilities:     capabilities(guestCapabilities, who.UID == 0),
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
	// A command that is starting when its caller leaves should finish starting: then it is
	// known.
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
	defer leave() // releases the resources of the wait
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
				return sandboxer.Exit{}, b.lost(wctx, r.err, "waiting for the command to end")
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
		case <-s.broken: // the output has no reader any more
			b.end(mark, pid, ended)
			return sandboxer.Exit{}, s.finish()
		case <-ctx.Done():
			b.end(mark, pid, ended)
			s.abort()
			return sandboxer.Exit{}, sandboxer.E(sandboxer.KindOf(ctx.Err()), ctx.Err(), "the command was killed because its caller disconnected or its time limit passed")
		}
	}
}

// startLag is how much longer than its caller the start of a command may take.
const startLag = time.Second

// environ is the environment of a command: the sandbox's, the user's, the caller's.
func (b *liveSandbox) environ(extra map[string]string, who users.User, mark string) []string {
	b.mu.Lock()
	env := slices.Clone(b.env)
	b.mu.Unlock()
	if who.Name != "" {
		env = mergeEnv(env, []string{"USER=" + who.Name, "LOGNAME=" + who.Name})
	}
	if who.UID != 0 || !slices.ContainsFunc(env, func(kv string) bool { return strings.HasPrefix(kv, "HOME=") }) {
		env = mergeEnv(env, []string{"HOME=" + who.Home})
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

// notStarted turns gVisor's refusal to start a command into a shell's answer.
func (b *liveSandbox) notStarted(ctx context.Context, cmd sandboxer.Cmd, err error) (sandboxer.Exit, error) {
	if !b.alive() {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.NotFound, err, "the sandbox ended")
	}
	if strings.Contains(err.Error(), "try again") {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Exhausted, err, "the command could not be started: the sandbox has reached its limit of processes").
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

// user resolves a user name or "uid[:gid]" by the sandbox's own /etc/passwd.
func (b *liveSandbox) user(ctx context.Context, name string) (users.User, error) {
	if isRoot(name) {
		return root, nil
	}
	if v, ok := b.users.Load(name); ok {
		return v.(users.User), nil
	}
	passwd, err := b.readSmall(ctx, "/etc/passwd")
	if err != nil {
		return users.User{}, err
	}
	u, err := users.Find(name, strings.NewReader(passwd), nil)
	if err == nil {
		b.users.Store(name, u)
	}
	return u, err
}

func isRoot(name string) bool { return name == "" || name == "root" || name == "0" || name == "0:0" }

var root = users.User{Home: "/root", Name: "root"}

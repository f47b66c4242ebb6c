//go:build linux

package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/procs"
)

// killTime is how long the end of a command and of its child processes may take.
const killTime = time.Minute

// end kills a command and everything it started, and waits a little for its end: in a sandbox
// whose files cannot be reached, say, a command can neither start nor end. If the sandbox does
// not respond, or is frozen, the command is killed once it responds again, or is thawed.
func (b *liveSandbox) end(mark string, pid int32, ended <-chan outcome) {
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
	case <-b.freeze():
	case <-time.After(b.pulse.period()): // the caller has left; the kill continues without it
	}
}

// freeze returns a channel that is closed once the sandbox is frozen.
func (b *liveSandbox) freeze() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.frozen
}

// setFrozen notes whether the sandbox is frozen. Kills that fail meanwhile happen once it is thawed.
func (b *liveSandbox) setFrozen(on bool) {
	b.mu.Lock()
	switch is := isClosed(b.frozen); {
	case on && !is:
		close(b.frozen)
	case is && !on:
		b.frozen = make(chan struct{})
	}
	b.mu.Unlock()
	if !on && !b.pulse.unresponsive() {
		b.killOwed()
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// owe notes that the processes with mark must be killed, pid first if that is known.
func (b *liveSandbox) owe(mark string, pid int32) {
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

// killOwed makes the kills that are still owed, one after the other.
func (b *liveSandbox) killOwed() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.killing || len(b.owed) == 0 || isClosed(b.frozen) {
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
			if !left || isClosed(b.frozen) {
				b.killing = false
				b.mu.Unlock()
				return
			}
			b.mu.Unlock()
			ctx, cancel := context.WithTimeout(context.Background(), killTime)
			err := b.kill(ctx, mark, pid)
			cancel()
			b.mu.Lock()
			if errors.Is(err, errUnresponsive) || err != nil && isClosed(b.frozen) { // hear, or setFrozen, calls this again
				b.killing = false
				b.mu.Unlock()
				return
			}
			delete(b.owed, mark)
			b.mu.Unlock()
		}
	}()
}

// kill ends a command and everything it started. The agent's program, inside, finds the
// processes with its mark, or of its session: a process may have left the tree, but keeps its
// environment. If processes multiply faster than it can look at them, every process inside is
// stopped meanwhile. An error means that the kernel inside did not answer.
func (b *liveSandbox) kill(ctx context.Context, mark string, pid int32) error {
	if pid > 0 {
		// A stopped process makes no more children, and its present ones can still be
		// recognised.
		if err := b.told(b.signal(ctx, pid, unix.SIGSTOP)); err != nil {
			return err
		}
		defer func() { _ = b.signal(context.WithoutCancel(ctx), pid, unix.SIGKILL) }()
	}
	k := &kill{mark: mark, session: pid, done: make(chan error, 1)}
	b.mu.Lock()
	b.toKill = append(b.toKill, k)
	b.mu.Unlock()
	// Kills take turns: many programs that look at once would all be late, and each of them
	// would stop every process inside. Each turn kills for all that wait.
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

// A kill is one request to kill: of the processes with mark or of a session.
type kill struct {
	mark    string
	session int32
	done    chan error
}

// mostKills is how many kills one program gets: each is a hundred bytes of its arguments, and
// there is room for ten times as many.
const mostKills = 1500

// killAll kills for all of batch.
func (b *liveSandbox) killAll(ctx context.Context, batch []*kill) error {
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
	if isClosed(b.freeze()) {
		return <-done // every process is already stopped, including the killer
	}
	// One after the other: two would stop each other's killers, and the first to finish would
	// continue what the other looks for.
	b.still.Lock()
	defer b.still.Unlock()
	// A kernel that hangs would stop them later, and no call would continue them then.
	if b.ask(ctx, b.ctl.ping) != nil {
		return <-done
	}
	if err := b.standStill(ctx, true); err != nil {
		return <-done
	}
	// Processes that were being made are not among the stopped ones.
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

// told drops the kernel's own error: it answered.
func (b *liveSandbox) told(err error) error {
	if _, said := errors.AsType[remoteError](err); said {
		return nil
	}
	return err
}

// killPatience is how long it may take to find the processes of this many commands.
func killPatience(commands int) time.Duration {
	return time.Second + time.Duration(commands)*10*time.Millisecond
}

func (b *liveSandbox) signalAll(ctx context.Context, sig unix.Signal) error {
	return b.ask(ctx, func(ctx context.Context) error { return b.ctl.signalAll(ctx, sig) })
}

// standStill notes that the caller is about to stop every process inside; or continues them, and
// removes the note.
func (b *liveSandbox) standStill(ctx context.Context, on bool) error {
	if on {
		return os.WriteFile(b.stopped, nil, 0o600)
	}
	if err := b.signalAll(ctx, unix.SIGCONT); err != nil {
		return err
	}
	return os.Remove(b.stopped)
}

// killMarked runs the agent's program that kills the processes with the marks or of the
// sessions, and stores its process ID in killer.
func (b *liveSandbox) killMarked(ctx context.Context, batch []*kill, killer *atomic.Int32) error {
	run := func(batch []*kill) (unix.WaitStatus, error) {
		args := []string{agentPath, "kill-marked"}
		for _, k := range batch {
			session := k.session
			if session <= 0 {
				session = 1 << 30 // no process has it
			}
			args = append(args, procs.ExecVar+"="+k.mark, fmt.Sprint(session))
			if b.rec.AgentMount { // the agent of an older sandbox knows no tags
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
	for _, k := range batch { // the agent of an earlier build makes one kill at a time
		if _, err := run([]*kill{k}); b.told(err) != nil {
			return err
		}
	}
	return nil
}

// CAP_SYS_RESOURCE: the killer needs a few threads even if the process limit is reached.
var killerCapabilities = []string{"CAP_KILL", "CAP_SYS_RESOURCE", "CAP_SYS_PTRACE", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH"}

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

// killTime is how long the end of a command and of what it started may take.
const killTime = time.Minute

// end kills a command and everything it started, and waits until it has ended, but not for
// long: who cannot get at the sandbox's files, say, can end it no more than begin. In a
// sandbox that does not respond, or is frozen, that is done when it does so again, or is thawed.
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
	case <-time.After(4 * b.pulse.period()):
	}
}

// freeze returns what is closed once the sandbox is frozen.
func (b *liveSandbox) freeze() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.frozen
}

// setFrozen notes whether the sandbox is frozen. What could not be killed meanwhile is once it is thawed.
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

// owe notes that what carries mark is to be killed, pid first if that is known.
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

// killOwed kills what is to be killed yet, one after the other.
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

// kill ends a command and everything it started. What carries its mark, or belongs to
// its session, is found inside, by the agent's program: a process may have left the
// tree, but takes its environment along. What multiplies faster than it can be looked
// at has to stand still for that, and everybody else inside with it. An error says that
// the kernel inside did not answer.
func (b *liveSandbox) kill(ctx context.Context, mark string, pid int32) error {
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
		return <-done // everybody stands still already, and so does who looks for them
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
func (b *liveSandbox) told(err error) error {
	if _, said := errors.AsType[remoteError](err); said {
		return nil
	}
	return err
}

// killPatience is how long what so many commands started may take to be found.
func killPatience(commands int) time.Duration {
	return time.Second + time.Duration(commands)*10*time.Millisecond
}

func (b *liveSandbox) signalAll(ctx context.Context, sig unix.Signal) error {
	return b.ask(ctx, func(ctx context.Context) error { return b.ctl.signalAll(ctx, sig) })
}

// standStill notes that every process inside is being stopped, which is the caller's to do;
// or ends that.
func (b *liveSandbox) standStill(ctx context.Context, on bool) error {
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
func (b *liveSandbox) killMarked(ctx context.Context, batch []*kill, killer *atomic.Int32) error {
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

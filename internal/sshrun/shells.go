package sshrun

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A shell waits on a host for a script, as [boot] leaves it: a command that finds one avoids the
// round trips and the processes that it takes to get there. Mostly another command follows
// soon, so each command makes a shell ready for the next.
type shell struct {
	*session
	l   *link
	run string // its SANDBOXER_RUN
	old *time.Timer
}

const (
	// shellTime is how long a shell waits. A connection that falls silent loses what was
	// sent over it, where starting a session would have failed and been repeated:
	// so it must not be long.
	shellTime = 3 * time.Second
	// shellsWaiting is how many may wait at once.
	shellsWaiting = 2
)

// roomy reports whether l has a session to spare.
func (l *link) roomy() bool { return l.sessions+1 <= l.limit/2 }

// ready ensures that n shells wait, or are about to, on a host that has ever begun a
// command. It starts new ones on l in the background.
func (h *Host) ready(l *link, n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.starting+len(h.shells) < n {
		if h.closed || h.quickest == 0 || h.sparing || !l.roomy() || !l.alive() {
			return
		}
		h.starting++
		l.sessions++
		if !h.pool.task(func() { h.startShell(l) }) {
			h.starting--
			l.sessions--
			return
		}
	}
}

func (h *Host) startShell(l *link) {
	ctx, cancel := context.WithTimeout(h.pool.ctx, h.pool.opts.ConnectTimeout)
	defer cancel()
	sh := &shell{l: l, run: token()}
	var err error
	sh.session, err = l.start(ctx, boot(sh.run, false, false), nil)
	h.mu.Lock()
	h.starting--
	if err == nil && !h.closed && !h.sparing && l.alive() {
		h.shells = append(h.shells, sh)
		sh.old = time.AfterFunc(shellTime, func() { h.dismiss(sh) })
		h.wake()
		h.mu.Unlock()
		return
	}
	h.sparing = h.sparing || errors.Is(err, errFull)
	h.mu.Unlock()
	if err == nil {
		sh.close()
	}
	h.release(l, false)
}

// takeShell returns a waiting shell, with its session on its connection, or nil. It waits for
// a shell that is just being started: that is faster than starting another. A shell is of no use
// where a terminal is wanted.
func (h *Host) takeShell(ctx context.Context, tty *sandboxer.WinSize) *shell {
	if tty != nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		for len(h.shells) > 0 {
			sh := h.shells[0]
			h.shells = h.shells[1:]
			sh.old.Stop()
			select {
			case <-sh.exit(): // it did not wait
			default:
				if sh.l.alive() {
					return sh
				}
			}
			h.part(sh)
		}
		if h.starting <= h.awaiting || ctx.Err() != nil {
			return nil
		}
		h.awaiting++
		changed := h.changed
		h.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		h.mu.Lock()
		h.awaiting--
	}
}

// part gives up a shell that is not listed any more. The caller holds h.mu.
func (h *Host) part(sh *shell) {
	sh.old.Stop()
	sh.l.sessions--
	h.released(sh.l)
	if !h.pool.task(sh.close) {
		go sh.close() // it ends with its connection, which is being closed
	}
	h.wake()
}

// dismiss gives up an unused shell.
func (h *Host) dismiss(sh *shell) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := slices.Index(h.shells, sh); i >= 0 {
		h.shells = slices.Delete(h.shells, i, i+1)
		h.part(sh)
	}
}

// dismissAll gives up all shells that wait on l, or anywhere if l is nil, and reports whether
// there were any. The caller holds h.mu.
func (h *Host) dismissAll(l *link) bool {
	n := len(h.shells)
	h.shells = slices.DeleteFunc(h.shells, func(sh *shell) bool {
		if l != nil && sh.l != l {
			return false
		}
		h.part(sh)
		return true
	})
	return len(h.shells) < n
}

// tight lets no shell wait on the host from now on, and reports whether that frees a session.
func (h *Host) tight() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	had := h.starting > 0 || h.dismissAll(nil)
	h.sparing = true
	return had
}

//go:build linux

package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/container"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// Teardown implements sandboxer.Extension.
func (e *extension) Teardown(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
	var report sandboxer.CleanupReport
	gens := []int{h.Generation}
	if h.Generation == 0 {
		var err error
		if gens, err = e.generations(h.SandboxID); err != nil {
			return report, err
		}
	}
	for _, g := range gens {
		name := boxName(h.SandboxID, g)
		removed, err := func() ([]string, error) {
			unlock, err := e.lock(ctx, name)
			if err != nil {
				return nil, err
			}
			defer unlock()
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			e.stopMain(ctx, name)
			if rec, err := e.record(name); err == nil {
				for _, m := range rec.Mounts {
					report.Kept = append(report.Kept, m.Source+", which was mounted")
				}
			}
			return e.remove(name)
		}()
		report.Removed = append(report.Removed, removed...)
		if err != nil {
			return report, err
		}
	}
	return report, nil
}

// remove ends everything that has this name, in whatever state: gVisor's container,
// processes that no state mentions, control groups, and last the directory, which shows
// that something may be left.
func (e *extension) remove(name string) (removed []string, err error) {
	held := e.forget(name)
	e.memory.forget(name)
	var c *container.Container
	if held != nil {
		c = held.c // it knows whether the processes are our children
	} else {
		c, err = e.load(name)
	}
	// A sandbox whose processes this one knows and has seen end has left none.
	// Otherwise check every process of the machine.
	stray := held == nil
	switch {
	case err != nil:
		e.warn("removing unreadable state of gVisor", fmt.Errorf("sandbox %s: %w", name, err))
	case c != nil:
		if err := destroy(c); err != nil {
			// The code below ends the processes, and removes what remains of its state.
			stray = true
			if e.env.Log != nil {
				e.env.Log.Debug("gVisor's own cleanup failed", "sandbox", name, "err", err)
			}
		}
		removed = append(removed, "sandbox "+name)
	}
	if stray {
		pids, err := e.processes(name)
		if err != nil {
			return removed, sandboxer.E(sandboxer.Unavailable, err, "the processes of sandbox %s cannot be listed", name)
		}
		if len(pids) > 0 {
			if err := killAll(pids); err != nil {
				return removed, sandboxer.E(sandboxer.Unavailable, err, "a process of sandbox %s did not end", name)
			}
			removed = append(removed, fmt.Sprintf("%d stray processes", len(pids)))
		}
	}
	files, err := os.ReadDir(e.dir("run")) // not Glob, which returns nothing if it cannot read
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return removed, sandboxer.E(sandboxer.Unavailable, err, "gVisor's state of sandbox %s cannot be listed", name)
	}
	for _, f := range files {
		if stateOf(f.Name(), name) {
			if err := os.RemoveAll(e.dir("run", f.Name())); err != nil {
				return removed, sandboxer.E(sandboxer.Unavailable, err, "gVisor's state of sandbox %s cannot be removed", name)
			}
		}
	}
	gone, err := e.cgroups.remove(name)
	if err != nil {
		return removed, sandboxer.E(sandboxer.Unavailable, err, "the control groups of sandbox %s cannot be removed", name)
	}
	if gone {
		removed = append(removed, "control groups")
	}
	dir := e.dir("box", name)
	if e.ids != nil {
		if err := e.forgetIDs(name, held); err != nil {
			return removed, sandboxer.E(sandboxer.Unavailable, err, "the user IDs of sandbox %s cannot be released", name)
		}
	}
	if _, err := os.Lstat(dir); err == nil {
		if err := os.RemoveAll(dir); err != nil {
			return removed, sandboxer.E(sandboxer.Unavailable, err, "the directory of sandbox %s cannot be removed", name)
		}
		removed = append(removed, "directory")
	}
	return removed, nil
}

// forgetIDs gives back the user IDs of a sandbox that has only its directory left.
func (e *extension) forgetIDs(name string, held *liveSandbox) error {
	if err := e.ids.unshowAll(name); err != nil {
		return err
	}
	var base uint32
	if held != nil {
		base = held.rec.IDBase
	} else if rec, err := e.record(name); err == nil {
		base = rec.IDBase
	} else if !errors.Is(err, fs.ErrNotExist) {
		return e.ids.giveBackAll(e.dir("box", name)) // the record is damaged
	}
	if base == 0 {
		return nil
	}
	return e.ids.giveBack(e.dir("box", name), base)
}

// destroy ends a container and reaps its processes if they are our children.
func destroy(c *container.Container) error {
	var pids []int
	if c.Sandbox != nil {
		pids = append(pids, c.SandboxPid())
	}
	pids = append(pids, int(c.GoferPid.Load()))
	err := c.Destroy()
	for _, pid := range pids {
		if pid > 0 {
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
		}
	}
	return err
}

// stateOf reports whether file, in gVisor's state directory, belongs to name: a
// state or lock file "<name>_sandbox:<name>.…" or a socket "runsc-<name>.sock".
func stateOf(file, name string) bool {
	return strings.HasPrefix(file, name+"_sandbox:"+name+".") || strings.HasPrefix(file, "runsc-"+name+".")
}

// killAll kills processes and waits until they are gone, or are zombies of another
// parent.
func killAll(pids []int) error {
	for _, pid := range pids {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	deadline := time.Now().Add(10 * time.Second)
	for _, pid := range pids {
		for {
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil) // if it is our child
			if procs.Ended(pid) {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("process %d still exists", pid)
			}
			time.Sleep(time.Millisecond)
		}
	}
	return nil
}

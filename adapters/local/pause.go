//go:build linux

package local

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// Pause implements sandboxer.Pauser: the sandbox's kernel stops all its tasks. gVisor
// counts pauses, so each step is recorded: after a broker died in between, there must
// not be two.
func (e *extension) Pause(ctx context.Context, h sandboxer.Handle) error {
	return e.freezer(ctx, h, func(b *liveSandbox) error {
		frozen, err := e.isFrozen(ctx, b)
		if err != nil || frozen {
			return err
		}
		if err := b.ask(ctx, b.ctl.ping); err != nil { // before anything is recorded
			return b.failed(ctx, err, "freezing the sandbox")
		}
		if err := e.setFrozen(b.name, stepFreezing); err != nil {
			return err
		}
		if err := b.ask(ctx, b.ctl.pause); err != nil {
			return b.failed(ctx, err, "freezing the sandbox")
		}
		return e.setFrozen(b.name, stepFrozen)
	})
}

// Resume implements sandboxer.Pauser.
func (e *extension) Resume(ctx context.Context, h sandboxer.Handle) error {
	return e.freezer(ctx, h, func(b *liveSandbox) error {
		frozen, err := e.isFrozen(ctx, b)
		if err != nil || !frozen {
			return err
		}
		if err := e.setFrozen(b.name, stepThawing); err != nil {
			return err
		}
		if err := b.ask(ctx, b.ctl.resume); err != nil {
			return b.failed(ctx, err, "thawing the sandbox")
		}
		if err := e.setFrozen(b.name, ""); err != nil {
			return err
		}
		rec, err := e.record(b.name)
		if err != nil {
			return err
		}
		return b.setFuse(ctx, rec.Fuse) // which was suspended meanwhile
	})
}

func (e *extension) freezer(ctx context.Context, h sandboxer.Handle, do func(*liveSandbox) error) error {
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return err
	}
	defer unlock()
	return do(b)
}

// The steps of freezing, in the file "frozen" of a sandbox's directory, which is absent
// while it runs.
const (
	stepFreezing = "freezing"
	stepFrozen   = "frozen"
	stepThawing  = "thawing"
)

// frozen returns the step of freezing that the sandbox is in; "" while it runs.
func (e *extension) frozen(name string) string {
	data, err := os.ReadFile(e.dir("box", name, "frozen"))
	if err != nil {
		return ""
	}
	return string(data)
}

func (e *extension) setFrozen(name, step string) error {
	p := e.dir("box", name, "frozen")
	e.mu.Lock()
	b := e.boxes[name]
	e.mu.Unlock()
	if b != nil && step != "" {
		b.setFrozen(true)
	}
	if step == "" {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return diskError(err, "recording that the sandbox runs")
		}
		if b != nil {
			b.setFrozen(false)
		}
		return nil
	}
	if err := wholefile.Replace(p, []byte(step)); err != nil {
		return diskError(err, "recording that the sandbox is frozen")
	}
	return nil
}

// isFrozen reports whether the sandbox is frozen; if a broker died during freezing or
// thawing, it asks the kernel.
func (e *extension) isFrozen(ctx context.Context, b *liveSandbox) (bool, error) {
	switch e.frozen(b.name) {
	case "":
		return false, nil
	case stepFrozen:
		return true, nil
	}
	runs, err := b.runs(ctx)
	if err != nil {
		return false, err
	}
	step := stepFrozen
	if runs {
		step = ""
	}
	return !runs, e.setFrozen(b.name, step)
}

// runs reports whether the sandbox's kernel runs new processes.
func (b *liveSandbox) runs(ctx context.Context) (bool, error) {
	pid, err := b.executeOwn(ctx, ownCapabilities, nil, pausePath) // ends at once
	if err != nil {
		return false, b.failed(ctx, err, "asking whether the sandbox is frozen")
	}
	wctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	_, err = b.ctl.waitPID(wctx, pid)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return false, nil
	}
	return err == nil, b.lost(ctx, err, "asking whether the sandbox is frozen")
}

// Package filelock has locks between processes: the holder of a lock has a file locked with
// flock(2), and loses the lock when the process ends, however it ends. Two locks taken by one
// process exclude each other, too.
//
// The holder may remove the locked file. A lock counts only if its file is
// still the one at that name afterwards; otherwise two would hold it, one of them a file that
// no process finds any more.
package filelock

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"
)

// A Kind says who may hold a lock at the same time.
type Kind int

const (
	Exclusive Kind = iota // no other holder
	Shared                // others that share it
)

var (
	// ErrHeld is the error for a lock that has another holder.
	ErrHeld = errors.New("the lock is already held")
	// ErrReplaced is the error for a lock whose file was removed or replaced
	// while it was being taken. Opening it and trying again may help.
	ErrReplaced = errors.New("the file of the lock no longer exists")
)

// A Lock is a lock that is held.
type Lock struct{ f *os.File }

// Take locks the file at name, which it makes if it is missing, for its owner alone, as soon as
// no other holder prevents that. It gives up with ctx's error. Another error is one of the file
// system's, or of a process or machine that has too many files open.
func Take(ctx context.Context, name string, k Kind) (*Lock, error) {
	var l *Lock
	err := Wait(ctx, func() (err error) {
		l, err = Try(name, k)
		return err
	})
	return l, err
}

// Try is Take without waiting: ErrHeld if the lock has another holder.
func Try(name string, k Kind) (*Lock, error) {
	for {
		f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		l, err := TryFile(f, k)
		if err == nil {
			return l, nil
		}
		f.Close()
		if !errors.Is(err, ErrReplaced) {
			return nil, err
		}
	}
}

// TryFile locks a file or directory that the caller has opened by its name; a Lock owns it from
// then on. ErrHeld if the lock has another holder, ErrReplaced if it is not at its name any
// more; the file remains the caller's after an error, and is not locked.
func TryFile(f *os.File, k Kind) (*Lock, error) {
	if err := lock(f, k); err != nil {
		return nil, err
	}
	l := &Lock{f}
	held, err := f.Stat()
	if err != nil {
		l.unlock()
		return nil, err
	}
	there, err := os.Stat(f.Name())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		l.unlock()
		return nil, err
	}
	if err != nil || !os.SameFile(held, there) {
		l.unlock()
		return nil, ErrReplaced
	}
	return l, nil
}

// The pauses between two attempts grow from the first to the last.
const (
	firstStep = time.Millisecond
	lastStep  = 32 * time.Millisecond
)

// Wait calls try until it returns anything but ErrHeld and ErrReplaced, or ctx ends, whose
// error it returns then. Between two calls nothing is open. The kernel could do the waiting,
// but that takes a thread for each waiting caller, and cannot be ended.
func Wait(ctx context.Context, try func() error) error {
	for step := firstStep; ; step = min(2*step, lastStep) {
		if err := try(); !errors.Is(err, ErrHeld) && !errors.Is(err, ErrReplaced) {
			return err
		}
		t := time.NewTimer(step)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
	}
}

// File is the file that is locked. It is closed with the lock.
func (l *Lock) File() *os.File { return l.f }

// Release releases the lock, and leaves the file. It may be called once.
func (l *Lock) Release() {
	// Closing is not enough: a child that has not become its program yet has the file open, too.
	l.unlock()
	l.f.Close()
}

// Remove removes the file and releases the lock; a waiting caller makes the file again. The
// lock must be exclusive.
func (l *Lock) Remove() {
	_ = os.Remove(l.f.Name()) // first: a file that another process has locked must stay
	l.Release()
}

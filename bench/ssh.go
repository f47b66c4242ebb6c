//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer/internal/measure"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// harness lets the bench use what tests start their servers with.
type harness struct {
	b    *bench
	undo []func()
}

type stopped struct{ error }

func (h *harness) Helper()          {}
func (h *harness) Failed() bool     { return false }
func (h *harness) Cleanup(f func()) { h.undo = append(h.undo, f) }
func (h *harness) TempDir() string {
	dir, err := os.MkdirTemp(h.b.base, "ssh")
	if err != nil {
		panic(stopped{err})
	}
	return dir
}
func (h *harness) Skip(args ...any)                  { panic(stopped{errors.New(fmt.Sprint(args...))}) }
func (h *harness) Fatal(args ...any)                 { panic(stopped{errors.New(fmt.Sprint(args...))}) }
func (h *harness) Fatalf(format string, args ...any) { panic(stopped{fmt.Errorf(format, args...)}) }
func (h *harness) Logf(string, ...any)               {}

const (
	sshRun   = "ssh: a script that does nothing, "
	sshCalm  = "ssh: a script 10 ms after the one before, "
	sshExec  = "ssh: a program that does nothing, "
	sshFull  = "ssh: tree of 5,000 files, all of it, "
	sshSome  = "ssh: tree of 5,000 files, 10 changed, "
	sshFar   = ", 40 ms away"
	viaRsync = "rsync over the same kind of connection"
	viaMux   = "openssh"
)

// withSSH calls do with what starts the servers of tests, which end after it. What they lack on
// this machine leaves out the step.
func (b *bench) withSSH(step string, do func(h *harness) error) error {
	h := &harness{b: b}
	defer func() {
		for i := len(h.undo) - 1; i >= 0; i-- {
			h.undo[i]()
		}
	}()
	defer func() {
		if p := recover(); p != nil {
			s, ok := p.(stopped)
			if !ok {
				panic(p)
			}
			b.r.skip("%s: %v", step, s.error)
		}
	}()
	return do(h)
}

// login opens a connection of ssh that stays, as people do who work on a host, and returns how
// ssh is called that uses it.
func (h *harness) login(ctx context.Context, t sshrun.Target) ([]string, error) {
	ssh := []string{"ssh", "-F", "none", "-i", t.IdentityFile, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
		"-o", "LogLevel=ERROR", "-S", h.b.path("m" + strconv.Itoa(t.Port)), "-p", strconv.Itoa(t.Port)}
	if _, _, _, err := command(ctx, nil, append(slices.Clone(ssh), "-M", "-N", "-f", t.Addr)...); err != nil {
		return nil, err
	}
	h.Cleanup(func() {
		_, _, _, _ = command(context.WithoutCancel(ctx), nil, append(slices.Clone(ssh), "-O", "exit", t.Addr)...)
	})
	return ssh, nil
}

// overSSH measures commands and copies to a host on loopback, near and 40 ms away,
// beside rsync over a multiplexed connection of ssh.
func (b *bench) overSSH(ctx context.Context) error {
	return b.withSSH(sshStep, func(h *harness) error { return b.commandsAndCopies(ctx, h) })
}

func (b *bench) commandsAndCopies(ctx context.Context, h *harness) error {
	s := sshtest.Start(h, sshtest.Options{})
	near := s.Target()
	far := near
	far.Name, far.Port = "far", sshtest.NewRelay(h, s.Port, 20*time.Millisecond).Port

	// Memory, where there is some: what a disk takes is not what is compared.
	where := "/dev/shm"
	if _, err := os.Stat(where); err != nil {
		where = b.base
	}
	dir, err := os.MkdirTemp(where, "sb")
	if err != nil {
		return err
	}
	h.Cleanup(func() { os.RemoveAll(dir) })
	tree := filepath.Join(dir, "tree")
	files := b.count(100, 2)
	if err := sshTree(tree, files); err != nil {
		return err
	}

	var commands []Arm
	type way struct {
		name string
		push func(ctx context.Context, to string) error
	}
	ways := func(t sshrun.Target) (ws []way, err error) {
		pool, err := sshrun.New(sshrun.Options{Dir: b.path("s"), Config: "none"})
		if err != nil {
			return nil, err
		}
		h.Cleanup(func() { pool.Close() })
		host, err := pool.Host(t)
		if err != nil {
			return nil, err
		}
		for range 3 {
			if _, err := host.Output(ctx, "true"); err != nil {
				return nil, err
			}
		}
		if t.Name == near.Name {
			commands = append(commands, Arm{Name: viaMux, To: b.to, Sample: sshCommands(host)})
		}
		ws = append(ws, way{viaMux, func(ctx context.Context, to string) error {
			_, err := host.Push(ctx, tree, to, sshrun.SyncOptions{Delete: true})
			return err
		}})
		if _, err := exec.LookPath("rsync"); err != nil {
			b.r.skip("rsync: %v", err)
			return ws, nil
		}
		ssh, err := h.login(ctx, t)
		if err != nil {
			return nil, err
		}
		return append(ws, way{viaRsync, func(ctx context.Context, to string) error {
			_, _, _, err := command(ctx, nil, "rsync", "-a", "--delete", "-e", sshrun.Quote(ssh...), tree+"/", t.Addr+":"+to+"/")
			return err
		}}), nil
	}
	for _, at := range []struct {
		t           sshrun.Target
		suffix      string
		full, again int
	}{{near, "", 11, 15}, {far, sshFar, 2, 6}} {
		ws, err := ways(at.t)
		if err != nil {
			return err
		}
		if at.suffix == "" {
			if _, err := interleave(ctx, b.plan(b.rounds), commands...); err != nil {
				return err
			}
		}
		plan := func(rounds int) measure.Plan {
			if b.quick {
				rounds = 1
			}
			return measure.Plan{Rounds: rounds, Within: b.within, Each: turnTimeout}
		}
		to := func(w way) string { return filepath.Join(dir, "to-"+strings.Fields(w.name)[0]) }
		var full, again []Arm
		for _, w := range ws {
			full = append(full, Arm{Name: w.name, To: b.to, Sample: func(ctx context.Context, set *Set) error {
				if err := os.RemoveAll(to(w)); err != nil {
					return err
				}
				start := time.Now()
				err := w.push(ctx, to(w))
				set.Took(sshFull+w.name+at.suffix, time.Since(start))
				return err
			}})
			again = append(again, Arm{Name: w.name, To: b.to, Sample: func(ctx context.Context, set *Set) error {
				start := time.Now()
				err := w.push(ctx, to(w))
				set.Took(sshSome+w.name+at.suffix, time.Since(start))
				return err
			}})
		}
		if _, err := interleave(ctx, plan(at.full), full...); err != nil {
			return err
		}
		changed := plan(at.again)
		changed.Round = func(i int) error {
			for n := range 10 {
				f := filepath.Join(tree, fmt.Sprintf("d%02d", n*5), fmt.Sprintf("f%03d", i%files))
				if err := os.WriteFile(f, fmt.Appendf(nil, "%d %s changed", i, time.Now()), 0o644); err != nil {
					return err
				}
			}
			return nil
		}
		if _, err := interleave(ctx, changed, again...); err != nil {
			return err
		}
	}
	return nil
}

// sshCommands samples commands: some one right after the other, and some after a pause, in which
// the shell for the next one gets ready.
func sshCommands(host *sshrun.Host) func(context.Context, *Set) error {
	return func(ctx context.Context, to *Set) error {
		timed := func(name string, cmd sshrun.Cmd) error {
			start := time.Now()
			_, err := host.Run(ctx, cmd)
			to.Took(name+viaMux, time.Since(start))
			return err
		}
		for range 4 {
			if err := errors.Join(timed(sshRun, sshrun.Cmd{Script: "true"}), timed(sshExec, sshrun.Cmd{Args: []string{"true"}})); err != nil {
				return err
			}
		}
		for range 2 {
			if err := errors.Join(measure.Sleep(ctx, 10*time.Millisecond), timed(sshCalm, sshrun.Cmd{Script: "true"})); err != nil {
				return err
			}
		}
		return nil
	}
}

// sshTree makes 50 directories with so many files of 40 kB each. Half of the files cannot be compressed.
func sshTree(dir string, files int) error {
	random := rand.NewChaCha8([32]byte{1})
	noise := make([]byte, 40<<10)
	for d := range 50 {
		sub := filepath.Join(dir, fmt.Sprintf("d%02d", d))
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return err
		}
		for f := range files {
			random.Read(noise)
			data := noise
			if f%2 == 1 {
				data = []byte(strings.Repeat(fmt.Sprintf("line %d of file %d in %d\n", f*7, f, d), 1600))[:40<<10]
			}
			if err := os.WriteFile(filepath.Join(sub, fmt.Sprintf("f%03d", f)), data, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) sshBars() {
	m := b.r.median
	b.r.most(sshRun+viaMux, m(sshRun+viaMux), 3, "ms")
	for _, suffix := range []string{"", sshFar} {
		b.r.most(sshFull+viaMux+suffix+" / rsync", m(sshFull+viaMux+suffix)/m(sshFull+viaRsync+suffix), 0.8, "x")
		b.r.most(sshSome+viaMux+suffix+" / rsync", m(sshSome+viaMux+suffix)/m(sshSome+viaRsync+suffix), 0.6, "x")
	}
}

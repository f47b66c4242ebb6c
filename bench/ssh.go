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
	"strconv"
	"strings"
	"time"

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
	viaOwn   = "native"
)

// overSSH measures commands and copies to a host on loopback, near and 40 ms away,
// beside rsync over a multiplexed connection of ssh.
func (b *bench) overSSH(ctx context.Context) (err error) {
	h := &harness{b: b}
	defer func() {
		if p := recover(); p != nil {
			s, ok := p.(stopped)
			if !ok {
				panic(p)
			}
			b.r.skip("what goes over ssh: %v", s.error)
		}
		for i := len(h.undo) - 1; i >= 0; i-- {
			h.undo[i]()
		}
	}()
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
	if err := sshTree(tree); err != nil {
		return err
	}

	type way struct {
		name string
		push func(ctx context.Context, to string) error
	}
	ways := func(t sshrun.Target) (ws []way, err error) {
		for _, transport := range []string{viaMux, viaOwn} {
			pool, err := sshrun.New(sshrun.Options{Dir: b.path("s"), Transport: transport, Config: "none"})
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
				for range b.rounds * 4 {
					start := time.Now()
					if _, err := host.Run(ctx, sshrun.Cmd{Script: "true"}); err != nil {
						return nil, err
					}
					b.r.took(sshRun+transport, time.Since(start))
					start = time.Now()
					if _, err := host.Run(ctx, sshrun.Cmd{Args: []string{"true"}}); err != nil {
						return nil, err
					}
					b.r.took(sshExec+transport, time.Since(start))
				}
				for range b.rounds * 2 {
					time.Sleep(10 * time.Millisecond)
					start := time.Now()
					if _, err := host.Run(ctx, sshrun.Cmd{Script: "true"}); err != nil {
						return nil, err
					}
					b.r.took(sshCalm+transport, time.Since(start))
				}
			}
			ws = append(ws, way{transport, func(ctx context.Context, to string) error {
				_, err := host.Push(ctx, tree, to, sshrun.SyncOptions{Delete: true})
				return err
			}})
		}
		if _, err := exec.LookPath("rsync"); err != nil {
			b.r.skip("rsync: %v", err)
			return ws, nil
		}
		socket := b.path("m" + strconv.Itoa(t.Port))
		login := []string{"-F", "none", "-i", t.IdentityFile, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
			"-o", "LogLevel=ERROR", "-S", socket, "-p", strconv.Itoa(t.Port)}
		if out, err := exec.CommandContext(ctx, "ssh", append(login, "-M", "-N", "-f", t.Addr)...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%w: %s", err, out)
		}
		h.Cleanup(func() { exec.Command("ssh", append(login, "-O", "exit", t.Addr)...).Run() })
		return append(ws, way{viaRsync, func(ctx context.Context, to string) error {
			out, err := exec.CommandContext(ctx, "rsync", "-a", "--delete", "-e", sshrun.Quote(append([]string{"ssh"}, login...)...), tree+"/", t.Addr+":"+to+"/").CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
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
		rounds := func(n int) int {
			if b.quick {
				return 1
			}
			return n
		}
		for range rounds(at.full) {
			for _, w := range ws {
				to := filepath.Join(dir, "to-"+strings.Fields(w.name)[0])
				if err := os.RemoveAll(to); err != nil {
					return err
				}
				start := time.Now()
				if err := w.push(ctx, to); err != nil {
					return fmt.Errorf("%s: %w", w.name, err)
				}
				b.r.took(sshFull+w.name+at.suffix, time.Since(start))
			}
		}
		for i := range rounds(at.again) {
			for n := range 10 {
				f := filepath.Join(tree, fmt.Sprintf("d%02d", n*5), fmt.Sprintf("f%03d", i%100))
				if err := os.WriteFile(f, fmt.Appendf(nil, "%d %s changed", i, time.Now()), 0o644); err != nil {
					return err
				}
			}
			for _, w := range ws {
				start := time.Now()
				if err := w.push(ctx, filepath.Join(dir, "to-"+strings.Fields(w.name)[0])); err != nil {
					return fmt.Errorf("%s: %w", w.name, err)
				}
				b.r.took(sshSome+w.name+at.suffix, time.Since(start))
			}
		}
	}
	return nil
}

// sshTree makes 5,000 files of 200 MB together, half of which cannot be compressed.
func sshTree(dir string) error {
	random := rand.NewChaCha8([32]byte{1})
	noise := make([]byte, 40<<10)
	for d := range 50 {
		sub := filepath.Join(dir, fmt.Sprintf("d%02d", d))
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return err
		}
		for f := range 100 {
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
	for _, way := range []string{viaMux, viaOwn} {
		b.r.most(sshRun+way, m(sshRun+way), 3, "ms")
		for _, suffix := range []string{"", sshFar} {
			b.r.most(sshFull+way+suffix+" / rsync", m(sshFull+way+suffix)/m(sshFull+viaRsync+suffix), 0.8, "x")
			b.r.most(sshSome+way+suffix+" / rsync", m(sshSome+way+suffix)/m(sshSome+viaRsync+suffix), 0.6, "x")
		}
	}
}

//go:build linux

package vmpacker

import (
	"context"
	"errors"
	"os/exec"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// TestSlowLogin: a starting machine, here a server behind a connection that is silent for some seconds, gets one login,
// however long that takes, and not one after another with the usual time limit.
func TestSlowLogin(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	relay := sshtest.NewRelay(t, s.Port, 0)
	pool, err := sshrun.New(sshrun.Options{ConnectTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.Close() })
	to := s.Target()
	to.Port = relay.Port
	other := to
	other.Name = "other"
	elsewhere, err := pool.Host(other)
	if err != nil {
		t.Fatal(err)
	}
	p := &place{ID: "slow", Generation: 1, Owner: sandboxer.NewID(), Kind: managed, Target: to}
	qemu := exec.Command("sh", "-c", "while :; do sleep 1; done", p.label())
	if err := qemu.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { qemu.Process.Kill(); qemu.Wait() })

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	attempts, thawed := 0, make(chan struct{})
	e := &extension{pool: pool, env: sandboxer.Env{Dir: t.TempDir()}}
	h, waited, err := e.awaitMachine(sandboxer.WithProgress(ctx, func(p sandboxer.Progress) {
		if p.Step != "waiting for the machine to let us in" {
			return
		}
		if attempts++; attempts > 1 {
			return
		}
		relay.Freeze()
		go func() {
			defer close(thawed)
			defer relay.Thaw()
			for range 2 { // each is given up after a second
				if _, err := elsewhere.Output(ctx, ":"); !errors.Is(err, sshrun.ErrUnreachable) {
					t.Errorf("while the line stands still: %v", err)
				}
			}
		}()
	}), p)
	if err != nil || h == nil || attempts != 1 {
		t.Errorf("after %d logins: %v, waiting for %q", attempts, err, waited)
	}
	<-thawed
}

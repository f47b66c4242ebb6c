//go:build linux

package local

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// TestNetworkWhileFrozen changes the policy of a frozen sandbox: once it is thawed the new
// one is in force, even if it had no network before, and if another broker thaws it.
func TestNetworkWhileFrozen(t *testing.T) {
	needsGVisor(t)
	w := outside(t)
	one, two := w.host+":80", w.host+":81"
	greet(t, w.run, one)
	greet(t, w.run, two)
	dir := shortDir(t)
	e := openIn(t, dir, ours("test"))
	h := up(t, e, sandboxer.Spec{}) // starts without a network
	freeze := func() {
		t.Helper()
		if err := e.Pause(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
	thawed := func(what, answerOne, answerTwo string) {
		t.Helper()
		if err := e.Resume(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		got := reaches(t, e, h, "tcp:"+one, "tcp:"+two)
		if got["tcp:"+one] != answerOne || got["tcp:"+two] != answerTwo {
			t.Errorf("%s: %v; want %s and %s", what, got, answerOne, answerTwo)
			for _, addr := range []string{one, two} { // whose fault is it?
				c, err := net.DialTimeout("tcp", addr, 5*time.Second)
				if err == nil {
					c.Close()
				}
				t.Logf("from outside the sandbox, %s: %v", addr, err)
			}
			t.Logf("commands see: %s", sh(t, e, h, "cat /proc/net/dev /proc/net/route; true"))
		}
	}
	const hello, refused = "hello", "refused"

	freeze()
	setNetwork(t, e, h, allow(one))
	thawed("a network from none", hello, refused)
	open := hold(t, e, h, one)
	freeze()
	setNetwork(t, e, h, allow(two))
	thawed("another destination", refused, hello)
	select {
	case line := <-open.lines:
		if line == "connected" {
			t.Error("an open connection was made anew")
		}
	case <-time.After(time.Minute):
		t.Error("an open connection outlived the policy that let it")
	}
	freeze()
	setNetwork(t, e, h, sandboxer.NetworkPolicy{})
	thawed("none", refused, refused)

	setNetwork(t, e, h, allow(one))
	freeze()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	e = openIn(t, dir, ours("test"))
	t.Cleanup(func() { e.Close() })
	setNetwork(t, e, h, allow(two))
	thawed("another broker", refused, hello)
}

// TestCancelForkBomb cancels a command that has used up every process of the sandbox: its
// child processes are gone soon, and the sandbox is usable.
func TestCancelForkBomb(t *testing.T) {
	e := openTest(t)
	if !e.cgroups.usable() {
		t.Skip(e.cgroups.why)
	}
	h := up(t, e, sandboxer.Spec{Limits: sandboxer.Limits{PIDs: 64, MemoryBytes: 512 << 20}})
	const script = `cat >/tmp/f <<'E'
#!/bin/sh
while :; do setsid /tmp/f & setsid /tmp/f & sleep 1; done
E
chmod +x /tmp/f; /tmp/f 2>/dev/null & exec sleep 1000`
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", script}})
		ended <- err
	}()
	full := time.Now().Add(time.Minute)
	for most := int64(0); most < 60; time.Sleep(20 * time.Millisecond) {
		st, err := e.Stats(t.Context(), h)
		if err != nil {
			t.Fatal(err)
		}
		if most = st.PIDs; time.Now().After(full) {
			t.Fatalf("it has %d processes only", most)
		}
	}
	begin := time.Now()
	cancel()
	if err := <-ended; sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("the command ended with %v", err)
	}
	t.Logf("cancelled in %v", time.Since(begin))
	for left := ""; ; time.Sleep(20 * time.Millisecond) { // the dead processes have to be reaped, too
		var out bytes.Buffer
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", `ls -d /proc/[0-9]* | wc -l`}, Stdout: &out})
		if left = strings.TrimSpace(out.String()); err == nil && x.Code == 0 && len(left) == 1 {
			break
		}
		if time.Since(begin) > time.Minute {
			t.Fatalf("afterwards: %q processes, %+v, %v", left, x, err)
		}
	}
	if _, err := os.Stat(e.dir("box", boxName(h.SandboxID, 1), "stopped")); err == nil {
		t.Error("the sandbox is noted as standing still")
	}
}

// TestBrokerDiesAmidKill: a broker that has stopped every process to end one of them, and dies,
// leaves them stopped. The next one to hold the sandbox continues them.
func TestBrokerDiesAmidKill(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	e := openIn(t, dir, ours("test"))
	defer e.Close()
	h, err := e.Provision(t.Context(), sandboxer.Spec{ID: "kill", Generation: 1, Owner: ours("test")})
	if err != nil {
		t.Fatal(err)
	}
	ticks := make(chan struct{})
	says, said := io.Pipe()
	go func() {
		defer said.Close()
		_, _ = e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "while echo tick; do sleep 0.1; done"}, Stdout: said})
	}()
	go func() {
		defer close(ticks)
		for r := bufio.NewScanner(says); r.Scan(); {
			select {
			case ticks <- struct{}{}:
			case <-t.Context().Done():
				return
			}
		}
	}()
	<-ticks
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.standStill(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if err := b.signalAll(t.Context(), unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for still := false; !still; {
		select {
		case <-ticks: // from before
		case <-time.After(time.Second):
			still = true
		}
	}
	next := openIn(t, dir, ours("test"))
	defer next.Close()
	defer next.Teardown(context.WithoutCancel(t.Context()), h)
	if x, err := next.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
		t.Fatalf("%+v, %v", x, err)
	}
	select {
	case <-ticks:
	case <-time.After(time.Minute):
		t.Error("the sandbox's processes still stand still")
	}
	if _, err := os.Stat(b.stopped); err == nil {
		t.Error("the sandbox is still noted as standing still")
	}
}

// At its process limit a sandbox reports that, and continues: the agent, which its own
// commands do not need, still starts and answers, but starts nothing above the limit either.
func TestAtTheProcessLimit(t *testing.T) {
	e := openTest(t)
	if !e.cgroups.usable() {
		t.Skip(e.cgroups.why)
	}
	h := up(t, e, sandboxer.Spec{Limits: sandboxer.Limits{PIDs: 32}})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	says, said := io.Pipe()
	running.Go(func() {
		script := "i=0; while [ $i -lt 28 ]; do sleep 1000 & i=$((i+1)); done; echo there they are; wait"
		x, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Stdout: said})
		said.CloseWithError(fmt.Errorf("%+v, %w", x, err))
	})
	if _, err := bufio.NewReader(says).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	full := false
	for deadline := time.Now().Add(time.Minute); !full && time.Now().Before(deadline); {
		refused := make(chan error, 1)
		running.Go(func() {
			_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sleep", "1000"}, Dir: "/"})
			refused <- err
		})
		select {
		case err := <-refused:
			if sandboxer.KindOf(err) != sandboxer.Exhausted || !strings.Contains(err.Error(), "limit") {
				t.Errorf("a command too many: %v", err)
			}
			full = true
		case <-time.After(time.Second): // it runs
		}
	}
	if !full {
		t.Fatal("no command was refused")
	}
	if err := e.WriteFile(t.Context(), h, "/tmp/said", 0o644, strings.NewReader("still here")); err != nil {
		t.Errorf("writing a file: %v", err)
	}
	shell := sandboxer.Cmd{Args: []string{"sh", "-c", "exec grep -E 'Cap(Eff|Prm|Bnd)' /proc/self/status"}, TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}}
	if x, err := e.Exec(t.Context(), h, shell); sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("a terminal too many: %+v, %v", x, err)
	}
	if err := e.Renew(t.Context(), h, time.Now().Add(time.Hour)); err != nil {
		t.Errorf("renewing: %v", err)
	}
	if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Alive || err != nil {
		t.Errorf("afterwards IsAlive is %s, %v", l, err)
	}
	cancel() // makes room again
	running.Wait()
	var out bytes.Buffer
	shell.Stdout = &out
	for deadline := time.Now().Add(time.Minute); ; { // the ended ones may not be reaped yet
		out.Reset()
		x, err := e.Exec(t.Context(), h, shell)
		if err == nil && x.Code == 0 {
			break
		}
		if sandboxer.KindOf(err) != sandboxer.Exhausted || time.Now().After(deadline) {
			t.Fatalf("a terminal: %+v, %v, %s", x, err, out.String())
		}
	}
	sets := 0
	for line := range strings.Lines(out.String()) {
		name, v, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		sets++
		if n, err := strconv.ParseUint(strings.TrimSpace(v), 16, 64); err != nil || n&(1<<unix.CAP_SYS_RESOURCE) != 0 {
			t.Errorf("a program of the agent's has %s %s: it could exceed the limit", name, v)
		}
	}
	if sets != 3 {
		t.Errorf("capabilities: %q", out.String())
	}
}

// TestCommandWhileFrozen: a caller that leaves a command while the sandbox is frozen does not wait until
// it is thawed, and then the command is gone.
func TestCommandWhileFrozen(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	b.pulse.mu.Lock()
	b.pulse.every = time.Hour // after this a kill that fails is abandoned
	b.pulse.mu.Unlock()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	began, said := io.Pipe()
	defer began.Close()
	left := make(chan error, 1)
	go func() {
		_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo began; exec sleep 1234567"}, Stdout: said})
		left <- err
	}()
	if _, err := io.ReadFull(began, make([]byte, len("began\n"))); err != nil {
		t.Fatal(err)
	}
	if err := e.Pause(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	leave()
	select {
	case err := <-left:
		if err == nil {
			t.Error("the command ended well")
		}
	case <-time.After(time.Minute):
		t.Fatal("the caller who left waits for a frozen sandbox")
	}
	if err := e.Resume(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, e, h, `i=0; while pgrep -f "^sleep 123456[7]" >/dev/null && [ $((i += 1)) -le 600 ]; do sleep 0.1; done; pgrep -cf "^sleep 123456[7]"; true`); got != "0" {
		t.Errorf("after the thaw there are %s of the command's processes", got)
	}
}

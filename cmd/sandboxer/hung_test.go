//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/procs/procstest"
)

// stopsWithin is how long a server that is told to stop may take here. It says five seconds;
// the rest is for a machine that is busy.
const stopsWithin = 20 * time.Second

// TestStopsBesideHungSandboxes stops the server while commands, terminals and transfers are
// under way in ten sandboxes that hang: of half the kernel stands still, of the others what
// serves them files. The next server finds them all, says which do not respond, destroys
// those it is told to, and works with the others when they go on.
func TestStopsBesideHungSandboxes(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: what an ordinary user may do depends on the kernel's settings")
	}
	dir, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = unix.Unmount(filepath.Join(dir, "home/data/extensions/ext.local/run/null-netns"), unix.MNT_DETACH)
		os.RemoveAll(dir)
	})
	bin := programs(t)
	home := filepath.Join(dir, "home")
	if err := os.Mkdir(home, 0o755); err != nil {
		t.Fatal(err)
	}
	log := &lockedBuffer{}
	var server *exec.Cmd
	var ended chan error
	c, err := api.New("unix://"+home+"/sock", api.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	start := func() {
		t.Helper()
		server = exec.Command(filepath.Join(bin, "sandboxer"), "serve", "--socket", home+"/sock")
		server.Env = append(os.Environ(), "SANDBOXER_HOME="+home)
		server.Stderr = log
		if err := server.Start(); err != nil {
			t.Fatal(err)
		}
		ended = make(chan error, 1)
		go func(cmd *exec.Cmd, ended chan error) { ended <- cmd.Wait(); close(ended) }(server, ended)
		for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			if _, err := c.Status(t.Context()); err == nil {
				return
			} else if time.Now().After(end) {
				t.Fatalf("the server does not answer: %v\n%s", err, log.String())
			}
		}
	}
	clean := true
	stop := func() {
		t.Helper()
		began := time.Now()
		if err := server.Process.Signal(unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-ended:
			t.Logf("the server took %v to stop", time.Since(began).Round(time.Millisecond))
			// Clearing up after the last sandbox has an end, too, which a busy machine may reach.
			if clean = err == nil; !clean && !strings.Contains(log.String(), "did not close within") && !strings.Contains(log.String(), "exiting before all work has stopped") {
				t.Errorf("the server: %v\n%s", err, log.String())
			}
		case <-time.After(stopsWithin):
			t.Errorf("the server does not stop in %v\n%s", stopsWithin, log.String())
			_ = server.Process.Kill()
			<-ended
		}
	}
	start()
	t.Cleanup(func() {
		_ = server.Process.Kill()
		<-ended // closed once it has ended
	})

	const n = 10
	var ids []string
	for i := range n {
		r := api.CreateSandbox{Profile: "local"}
		if i < n/2 { // whom the next server will want to give a network
			r.Profile = "local-public"
		}
		sb, err := c.Create(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.ID)
		if _, err := c.Wait(t.Context(), sb.ID, sandboxer.Running); err != nil {
			t.Fatal(err)
		}
		if err := c.WriteFile(t.Context(), sb.ID, "/tmp/x", 0o644, strings.NewReader("x")); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var calls sync.WaitGroup
	for _, id := range ids { // a command and a terminal that run when it begins to hang
		for _, size := range []*sandboxer.WinSize{nil, {Cols: 80, Rows: 24}} {
			out, in := io.Pipe()
			calls.Go(func() {
				_, err := c.Exec(ctx, id, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; exec sleep 1000"}, Stdout: in, TTY: size})
				if err == nil {
					t.Errorf("a command in sandbox %s ended by itself", id)
				}
				in.CloseWithError(io.EOF)
			})
			if _, err := io.ReadFull(out, make([]byte, 3)); err != nil {
				t.Fatal(err)
			}
			go io.Copy(io.Discard, out)
		}
	}
	var goOn []func()
	for i, id := range ids {
		sentry, gofer := processesOf(t, home, id)
		pid := sentry
		if i%2 == 1 {
			pid = gofer
		}
		goOn = append(goOn, sync.OnceFunc(func() { _ = unix.Kill(pid, unix.SIGCONT) }))
		t.Cleanup(goOn[i])
		procstest.Stop(t, pid)
	}
	before := descriptors(t, server.Process.Pid)
	for i, id := range ids {
		calls.Go(func() { _, _ = c.Run(ctx, id, api.Exec{Args: []string{"find", "/usr/share"}}) })
		calls.Go(func() {
			_, _ = c.Exec(ctx, id, sandboxer.Cmd{Args: []string{"sh"}, Stdin: strings.NewReader("exit\n"), Stdout: io.Discard, TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}})
		})
		calls.Go(func() { _, _ = c.Stats(ctx, id) })
		calls.Go(func() { _ = c.WriteFile(ctx, id, "/tmp/y", 0o644, bytes.NewReader(make([]byte, 4<<20))) })
		if i == 0 {
			calls.Go(func() { _, _ = c.Pause(ctx, id, api.PauseSandbox{}) })
		}
	}
	// Each call into those whose kernel stands still has a connection on either side.
	until(t, "the calls are under way", func() bool { return descriptors(t, server.Process.Pid) >= before+2*(4*n/2) })
	stop()
	calls.Wait()

	start()
	var list *api.List[api.Sandbox]
	until(t, "the next server tells which do not respond", func() bool {
		if list, err = c.List(t.Context(), api.SandboxQuery{}); err != nil {
			t.Fatal(err)
		}
		told := 0
		for _, sb := range list.Items {
			if !sb.Unresponsive.IsZero() {
				told++
			}
		}
		return told >= n/2-1 // the one that was to be paused is pausing
	})
	if len(list.Items) != n {
		t.Errorf("there are %d sandboxes; want %d", len(list.Items), n)
	}
	for _, id := range ids[:2] { // one that is to be paused and hangs, one without its files
		sb, err := c.Destroy(t.Context(), id, true)
		if err != nil || sb.State != sandboxer.Terminated {
			t.Errorf("destroying one that hangs: %+v, %v", sb, err)
		}
	}
	for i, id := range ids[2:] {
		goOn[i+2]()
		until(t, "sandbox "+id+" goes on", func() bool {
			x, err := c.Run(t.Context(), id, api.Exec{Args: []string{"cat", "/tmp/x"}})
			return err == nil && x.Stdout == "x"
		})
		if i+2 < n/2 {
			until(t, "sandbox "+id+" has its network again", func() bool {
				// Its gateway refuses; nobody would where the link has no other end.
				x, err := c.Run(t.Context(), id, api.Exec{Args: []string{"timeout", "5", "bash", "-c", "exec 3<>/dev/tcp/10.0.2.2/9"}})
				return err == nil && x.Code == 1 && strings.Contains(x.Stderr, "refused")
			})
		}
	}
	until(t, "all respond", func() bool {
		list, err := c.List(t.Context(), api.SandboxQuery{})
		if err != nil {
			t.Fatal(err)
		}
		for _, sb := range list.Items {
			if sb.State == sandboxer.Running && !sb.Unresponsive.IsZero() {
				return false
			}
		}
		return true
	})
	for _, id := range ids[2:] {
		if _, err := c.Destroy(t.Context(), id, true); err != nil {
			t.Error(err)
		}
	}
	stop()
	for _, left := range remains(t, home) {
		if !clean && strings.HasPrefix(left, "mount ") {
			continue
		}
		t.Errorf("left behind: %s", left)
	}
}

// until waits for what has to become true.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !f(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func descriptors(t *testing.T, pid int) int {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// A lockedBuffer keeps what a server says, also while it does.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// processesOf returns gVisor's processes of a sandbox.
func processesOf(t *testing.T, home, id string) (sentry, gofer int) {
	t.Helper()
	buf := make([]byte, 4<<10)
	all, err := procs.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range all {
		args, _ := procs.Args(pid, buf)
		if !bytes.Contains(args, []byte(home)) || !bytes.Contains(args, []byte("\x00"+id+"-g")) {
			continue
		}
		switch {
		case bytes.HasPrefix(args, []byte("runsc-sandbox\x00")):
			sentry = pid
		case bytes.HasPrefix(args, []byte("runsc-gofer\x00")):
			gofer = pid
		}
	}
	if sentry == 0 || gofer == 0 {
		t.Fatalf("processes of sandbox %s: %d, %d", id, sentry, gofer)
	}
	return sentry, gofer
}

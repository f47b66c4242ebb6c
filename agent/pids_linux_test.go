package agent

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent/proto/filesystem/filesystemconnect"
)

// pidsGroup makes a control group, and returns its directory and a function that sets its limit of
// processes.
func pidsGroup(t *testing.T) (dir string, limit func(n int)) {
	t.Helper()
	parent := "/sys/fs/cgroup/pids"
	if b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil && strings.Contains(string(b), "pids") {
		parent = "/sys/fs/cgroup"
		_ = os.WriteFile("/sys/fs/cgroup/cgroup.subtree_control", []byte("+pids"), 0o600) // or it is enabled already
	}
	dir = filepath.Join(parent, fmt.Sprintf("sbx-agent-%d", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skipf("no control groups can be made here: %v", err)
	}
	t.Cleanup(func() {
		eventually(t, "the control group stays", func() bool { return os.Remove(dir) == nil })
	})
	if err := os.WriteFile(filepath.Join(dir, "pids.max"), []byte("32"), 0o600); err != nil {
		t.Skipf("control groups cannot be bounded here: %v", err)
	}
	return dir, func(n int) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "pids.max"), fmt.Append(nil, n), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// runIn is run, in a control group.
func (p *place) runIn(group string) RunFunc {
	return func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
		there := *p
		there.program = "/bin/sh"
		return there.run(ctx, append([]string{"-c", `echo $$ >"$0" && exec "$@"`, filepath.Join(group, "cgroup.procs"), p.program}, args...), in, out, errs)
	}
}

// TestFullOfProcesses: the limit of processes of a container applies to the agent, and to
// connections to it, as well as to its commands. Both continue to serve while there is no room
// for a single further thread.
func TestFullOfProcesses(t *testing.T) {
	group, limit := pidsGroup(t)
	p := abstract(t)
	run := p.runIn(group)
	attached := NewClient(ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) {
		return DialAttached(ctx, run, "attach", "--socket", p.socket)
	}})
	t.Cleanup(func() { attached.Close() })
	ctx := t.Context()
	if _, err := attached.Exec(ctx, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
		t.Fatal(err)
	}
	agent := p.agent()
	direct := NewClient(ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", p.socket)
	}})
	t.Cleanup(func() { direct.Close() })

	limit(0)
	dir := t.TempDir()
	content := strings.Repeat("x", 256<<10)
	call := func(c *Client, dir string) error {
		name := filepath.Join(dir, "f")
		if err := c.WriteFile(ctx, name, 0o644, strings.NewReader(content)); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		f, err := c.ReadFile(ctx, name)
		if err != nil {
			return fmt.Errorf("read: %w", err)
		}
		got, err := io.ReadAll(f)
		f.Close()
		if err != nil || string(got) != content {
			return fmt.Errorf("read: %d bytes, %w", len(got), err)
		}
		if _, err := c.Stats(ctx); err != nil {
			return fmt.Errorf("stats: %w", err)
		}
		for _, err := range c.ListFiles(ctx, dir, "") {
			if err != nil {
				return fmt.Errorf("list: %w", err)
			}
		}
		if err := c.Archive(ctx, dir, io.Discard); err != nil {
			return fmt.Errorf("archive: %w", err)
		}
		if _, err := c.Exec(ctx, sandboxer.Cmd{Args: []string{"true"}}); sandboxer.KindOf(err) != sandboxer.Exhausted {
			return fmt.Errorf("exec: %w; want exhausted", err)
		}
		return nil
	}
	for i := range 5 {
		if err := call(attached, filepath.Join(dir, "attached")); err != nil {
			t.Fatalf("by way of attach, %d: %v", i, err)
		}
	}
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			for j := range 3 {
				if err := call(direct, filepath.Join(dir, fmt.Sprint(i))); err != nil {
					t.Errorf("%d of 50, %d: %v", i, j, err)
					return
				}
			}
			w, err := direct.Watch(ctx, dir, true) // a call that ends its connection
			if err != nil {
				t.Errorf("%d of 50, watch: %v", i, err)
				return
			}
			w.Close()
		})
	}
	all.Wait()
	// A caller that sends less than it announced blocks no other.
	for range 20 {
		c, err := direct.opts.Dial(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "POST "+filesystemconnect.FilesystemStatProcedure+" HTTP/1.1\r\nHost: sandbox\r\nContent-Type: application/json\r\nContent-Encoding: nope\r\nContent-Length: 10\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := direct.StatFile(ctx, dir); err != nil {
		t.Errorf("after those who send too little: %v", err)
	}
	stranded := NewClient(ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) {
		return DialAttached(ctx, run, "attach", "--socket", p.socket)
	}})
	defer stranded.Close()
	if err := stranded.Health(ctx); sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("by way of another attach: %v; want exhausted", err)
	}
	limit(32)
	if _, err := attached.Exec(ctx, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
		t.Errorf("with room: %v", err)
	}
	if pid := p.agent(); pid != agent {
		t.Errorf("the agent is %d; want %d, which it was", pid, agent)
	}
}

// TestLateAgent: an agent that starts after other processes works with the remaining threads.
func TestLateAgent(t *testing.T) {
	group, _ := pidsGroup(t)
	p := abstract(t)
	for range 16 {
		cmd := exec.Command("/bin/sh", "-c", `echo $$ >"$0" && exec sleep 1000`, filepath.Join(group, "cgroup.procs"))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	}
	eventually(t, "not all are in the group", func() bool { return readInt(filepath.Join(group, "pids.current")) == 16 })
	c := NewClient(ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) {
		return DialAttached(ctx, p.runIn(group), "attach", "--socket", p.socket)
	}})
	defer c.Close()
	if x, err := c.Exec(t.Context(), sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
		t.Errorf("%+v, %v", x, err)
	}
}

func TestThreadsWithin(t *testing.T) {
	for _, c := range []struct {
		limit, free, procs int
		want               threadBudget
	}{
		{32, 32, 2, threadBudget{procs: 2, calls: 2, disk: 4, all: 14}},
		{32, 32, 64, threadBudget{procs: 2, calls: 2, disk: 4, all: 14}},
		{32, 16, 2, threadBudget{procs: 1, calls: 1, disk: 1, all: 8}}, // which it has without making any
		{32, 8, 2, threadBudget{procs: 1, calls: 1, disk: 1, all: 0}},
		{1, 1, 64, threadBudget{procs: 1, calls: 1, disk: 1, all: -7}},
		{2048, 2048, 2, threadBudget{procs: 2, calls: 4, disk: 14, all: 26}},
		{2048, 2000, 64, threadBudget{procs: 64, calls: 32, disk: 14, all: 116}},
	} {
		if got := threadsWithin(c.limit, c.free, c.procs); got != c.want {
			t.Errorf("%d free of %d, on %d processors: %+v; want %+v", c.free, c.limit, c.procs, got, c.want)
		}
	}
}

// TestGate: a call that was abandoned while it waited does nothing, and a call that waits for its
// caller lets others in.
func TestGate(t *testing.T) {
	g := make(gate, 1)
	g.enter()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	h := g.handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("it was served") }))
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, "GET", "/files", nil))
	g.leave()
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, "GET", "/files", nil))
	if len(g) != 0 {
		t.Fatal("it is held by who gave up")
	}

	// The command's caller has left: it is killed within the gate, as that reads all processes.
	tab := newTable(1 << 10)
	tab.disk = g
	p := &process{t: tab, done: make(chan struct{})}
	close(p.done)
	g.enter()
	killed := make(chan struct{})
	go func() { p.killUnlessDone(); close(killed) }()
	select {
	case <-killed:
		t.Error("it did not wait")
	case <-time.After(50 * time.Millisecond):
	}
	g.leave()
	<-killed
}

// An endingContext ends after its first Err call.
type endingContext struct {
	context.Context
	asked bool
}

func (c *endingContext) Err() error {
	if !c.asked {
		c.asked = true
		return nil
	}
	return context.Canceled
}

// TestGateAtTheLastMoment: a call whose context ends while it enters is inside, or holds nothing.
func TestGateAtTheLastMoment(t *testing.T) {
	g := make(gate, 1)
	if err := g.enterUntil(&endingContext{Context: t.Context()}); (err == nil) != (len(g) == 1) {
		t.Errorf("%v, and %d within", err, len(g))
	}
}

package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
	"github.com/sand-boxer/sandboxer/internal/procnet"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

var docker = &enginetest.Docker{}

func TestMain(m *testing.M) {
	code := m.Run()
	docker.Stop()
	enginetest.StopPodman()
	os.Exit(code)
}

// kinds are the engines of tests, and the environment in which their programs reach them.
var kinds = map[string]func(t testing.TB) (image string, env []string){
	"docker": func(t testing.TB) (string, []string) { return enginetest.Image, []string{docker.Start(t)} },
	"podman": func(t testing.TB) (string, []string) {
		return "localhost/" + enginetest.Image, enginetest.Podman(t)
	},
}

// there is an engine on another machine, over SSH: this one in truth.
func there(t testing.TB, program string, env []string) *Engine {
	t.Helper()
	s := sshtest.Start(t, sshtest.Options{Silent: true, Env: env})
	pool, err := sshrun.New(sshrun.Options{Config: "none"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.Close() })
	h, err := pool.Host(s.Target())
	if err != nil {
		t.Fatal(err)
	}
	return &Engine{Program: program, Host: h}
}

// A rig is an engine, and what tests make with its program.
type rig struct {
	*Engine
	name  string // of the sandbox, and of its installation
	image string
	env   []string
	dir   string // where the program leaves files of its own
}

// do runs the engine's program on this machine, which is every host of these tests.
func (r *rig) do(t testing.TB, args ...string) string {
	t.Helper()
	out, err := r.try(nil, args...)
	if err != nil {
		t.Fatalf("%s %q: %v", r.Program, args, err)
	}
	return out
}

func (r *rig) try(stdin io.Reader, args ...string) (string, error) {
	cmd := exec.Command(r.Program, args...)
	cmd.Env, cmd.Stdin, cmd.Dir = append(os.Environ(), r.env...), stdin, r.dir
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, &said)
	}
	return strings.TrimSpace(string(out)), err
}

// start starts a container of a service of the sandbox, and returns its ID.
func (r *rig) start(t testing.TB, service string, more ...string) string {
	t.Helper()
	args := append([]string{"run", "-d", "--name", r.name + "-" + service + "-" + rand.Text(), "--label", LabelName + "=" + r.name, "--label", LabelOwner + "=" + r.name, "--label", LabelService + "=" + service}, more...)
	if !slices.Contains(more, r.image) && !slices.Contains(more, "--") {
		args = append(args, r.image, "sleep", "86400")
	}
	id := r.do(t, slices.DeleteFunc(args, func(s string) bool { return s == "--" })...)
	t.Cleanup(func() { _, _ = r.try(nil, "rm", "-f", "-v", id) })
	return id
}

// everywhere runs a test with each engine, over SSH.
func everywhere(t *testing.T, test func(t *testing.T, r *rig)) {
	for kind, start := range kinds {
		t.Run(kind+"/ssh", func(t *testing.T) {
			t.Parallel()
			image, env := start(t)
			r := &rig{Engine: there(t, kind, env), image: image, env: env, dir: t.TempDir(), name: strings.ToLower(strings.ReplaceAll(fmt.Sprintf("sbx-%s-g%d", t.Name(), time.Now().UnixNano()), "/", "-"))}
			r.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
			test(t, r)
		})
	}
}

// run runs a command and returns what it wrote, in this order.
func (r *rig) run(t testing.TB, id string, cmd sandboxer.Cmd) (exit sandboxer.Exit, out, errs string, err error) {
	t.Helper()
	var o, e strings.Builder
	cmd.Stdout, cmd.Stderr = &o, &e
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	exit, err = r.Exec(ctx, id, cmd)
	return exit, o.String(), e.String(), err
}

func sh(script string) sandboxer.Cmd { return sandboxer.Cmd{Args: []string{"sh", "-c", script}} }

// waitFor waits until f is true.
func waitFor(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 30 s", what)
		}
	}
}

// Containers of a sandbox are found by its label, described, paused and listed; containers without the label
// belong to no sandbox.
func TestContainers(t *testing.T) {
	everywhere(t, func(t *testing.T, r *rig) {
		ctx := t.Context()
		if at, list, err := r.Containers(ctx, r.name); err != nil || len(list) > 0 || time.Since(at).Abs() > time.Minute {
			t.Errorf("before: %v at %s, %v", list, at, err)
		}
		if id, err := r.Find(ctx, r.name, "web"); id != "" || err != nil {
			t.Errorf("Find before: %q, %v", id, err)
		}
		web := r.start(t, "web", "-e", "SECRET=very secret", "--memory", "64m")
		r.start(t, "other")
		_, list, err := r.Containers(ctx, r.name)
		if err != nil || len(list) != 2 {
			t.Fatalf("%+v, %v", list, err)
		}
		i := slices.IndexFunc(list, func(c Container) bool { return c.Service() == "web" })
		c := &list[i]
		if c.ID != web || !c.State.Running || c.State.Pid <= 0 || c.Health() != "" || c.HostConfig.Memory != 64<<20 || c.Redact("it is very secret") != "it is …" {
			t.Errorf("the container: %+v", c)
		}
		if id, err := r.Find(ctx, r.name, "web"); id != web || err != nil || !r.hasShell(id) {
			t.Errorf("Find = %q, %v", id, err)
		}
		if id, err := r.Find(ctx, r.name, ""); id == "" || err != nil {
			t.Errorf("Find of any = %q, %v", id, err)
		}
		state := func(want bool) {
			t.Helper()
			_, list, err := r.Containers(ctx, r.name)
			if err != nil || len(list) != 2 || list[0].State.Paused != want && list[0].State.Status != "paused" || list[1].State.Running == (want && r.Program == "podman") {
				t.Errorf("paused %t: %+v, %v", want, list, err)
			}
		}
		if err := r.Pause(ctx, r.name); err != nil {
			t.Fatal(err)
		}
		state(true)
		if _, _, _, err := r.run(t, web, sh("true")); !errors.Is(err, ErrPaused) || sandboxer.KindOf(err) != sandboxer.Conflict {
			t.Errorf("a command while it is paused: %v", err)
		}
		if err := errors.Join(r.Pause(ctx, r.name), r.Unpause(ctx, r.name), r.Unpause(ctx, r.name)); err != nil {
			t.Errorf("again: %v", err)
		}
		state(false)

		// A volume alone, and a network alone, are something of a sandbox.
		r.do(t, "volume", "create", "--label", LabelName+"="+r.name+"v", "--label", LabelOwner+"="+r.name, r.name+"v")
		t.Cleanup(func() { _, _ = r.try(nil, "volume", "rm", r.name+"v") })
		r.do(t, "network", "create", "--internal", "--label", LabelName+"="+r.name+"n", "--label", LabelOwner+"="+r.name, r.name+"n")
		t.Cleanup(func() { _, _ = r.try(nil, "network", "rm", r.name+"n") })
		if got, err := r.Inventory(ctx, r.name); err != nil || !slices.Equal(got, []string{r.name, r.name + "n", r.name + "v"}) {
			t.Errorf("Inventory = %q, %v", got, err)
		}
		if got, err := r.Inventory(ctx, r.name+"x"); err != nil || len(got) > 0 {
			t.Errorf("Inventory of nobody = %q, %v", got, err)
		}
		loud := r.start(t, "loud", r.image, "echo", "one\ntwo\nthree")
		var said string
		waitFor(t, "what a container said", func() bool {
			var err error
			if said, err = r.Logs(ctx, loud, 2); err != nil {
				t.Fatal(err)
			}
			return strings.Contains(said, "three")
		})
		if strings.Contains(said, "one") {
			t.Errorf("Logs = %q", said)
		}
	})
}

// A command in a container does what one here does: streams, status, environment, directory,
// user, bytes that are no text; and a command that cannot be started is distinguished from one that failed.
func TestExec(t *testing.T) {
	everywhere(t, func(t *testing.T, r *rig) {
		id := r.start(t, "web", "-w", "/work")
		if found, err := r.Find(t.Context(), r.name, "web"); err != nil || found != id {
			t.Fatalf("Find = %q, %v", found, err)
		}
		with := func(c sandboxer.Cmd, f func(*sandboxer.Cmd)) sandboxer.Cmd { f(&c); return c }
		for name, c := range map[string]struct {
			cmd  sandboxer.Cmd
			code int
			out  string
			errs string
		}{
			"streams and status": {cmd: sh("echo out; echo err >&2; exit 3"), code: 3, out: "out\n", errs: "err\n"},
			"input":              {cmd: with(sandboxer.Cmd{Args: []string{"cat"}}, func(c *sandboxer.Cmd) { c.Stdin = strings.NewReader("in") }), out: "in"},
			"no input":           {cmd: sandboxer.Cmd{Args: []string{"cat"}}},
			"environment":        {cmd: with(sh(`echo "$A,$DOCKER_HOST,$PATH"`), func(c *sandboxer.Cmd) { c.Env = map[string]string{"A": "a'b", "DOCKER_HOST": "x", "PATH": "/bin:/y"} }), out: "a'b,x,/bin:/y\n"},
			"directory and user": {cmd: with(sh("pwd; id -u"), func(c *sandboxer.Cmd) { c.Dir, c.User = "/tmp", "nobody" }), out: "/tmp\n65534\n"},
			"bytes":              {cmd: sandboxer.Cmd{Args: []string{"printf", "%s", "\xff\x01é"}}, out: "\xff\x01é"},
			"looks like refused": {cmd: sh("echo 'Error: no such container' >&2; exit 4"), code: 4, errs: "Error: no such container\n"},
			"misses an engine":   {cmd: sh("echo 'Cannot connect to the Docker daemon at x' >&2; exit 1"), code: 1, errs: "Cannot connect to the Docker daemon at x\n"},
			"a signal":           {cmd: sh("kill -9 $$"), code: 137},
			"one that is not":    {cmd: sandboxer.Cmd{Args: []string{"/no/such"}}, code: 127, errs: "/no/such"},
			"one that cannot":    {cmd: sandboxer.Cmd{Args: []string{"/etc/passwd"}}, code: 126, errs: "/etc/passwd"},
		} {
			exit, out, errs, err := r.run(t, id, c.cmd)
			if err != nil || exit.Code != c.code || out != c.out || c.code < 126 && errs != c.errs || !strings.Contains(errs, c.errs) || exit.OOMKilled {
				t.Errorf("%s: %+v, %q, %q, %v", name, exit, out, errs, err)
			}
		}
		for name, cmd := range map[string]sandboxer.Cmd{
			"no such directory": with(sh("true"), func(c *sandboxer.Cmd) { c.Dir = "/no/such" }),
			"no such user":      with(sh("true"), func(c *sandboxer.Cmd) { c.User = "stranger" }),
		} {
			if _, out, _, err := r.run(t, id, cmd); sandboxer.KindOf(err) != sandboxer.Invalid || out != "" {
				t.Errorf("%s: %q, %v", name, out, err)
			}
		}
		if _, err := r.Exec(t.Context(), id, sandboxer.Cmd{Args: []string{"cat", "/bin/busybox"}, Stdout: refusing{}}); !errors.Is(err, errRefuses) {
			t.Errorf("a reader that leaves: %v", err)
		}

		r.do(t, "kill", id)
		ends := []string{"exited"}
		if r.Program == "podman" { // until a process of Podman has cleaned up after it, and for good if that process fails
			ends = append(ends, "stopped")
		}
		waitFor(t, "its end", func() bool { return slices.Contains(ends, r.do(t, "inspect", "--format", "{{.State.Status}}", id)) })
		var ended *EndedError
		if _, _, _, err := r.run(t, id, sh("true")); !errors.As(err, &ended) || !slices.Contains(ends, ended.Status) || sandboxer.KindOf(err) != sandboxer.NotFound {
			t.Errorf("in one that ended: %v", err)
		}
		r.do(t, "rm", "-f", id)
		if _, _, _, err := r.run(t, id, sh("true")); !errors.Is(err, ErrNotFound) || sandboxer.KindOf(err) != sandboxer.NotFound {
			t.Errorf("in one that is gone: %v", err)
		}
	})
}

var errRefuses = errors.New("no more")

type refusing struct{}

func (refusing) Write([]byte) (int, error) { return 0, errRefuses }

// What is typed into a terminal, and the end of one without an input, reach the command unchanged, also if they are
// there before the engine's program has begun.
func TestTypedEarly(t *testing.T) {
	everywhere(t, func(t *testing.T, r *rig) {
		slow := filepath.Join(t.TempDir(), "engine")
		if err := os.WriteFile(slow, []byte("#!/bin/sh\nsleep 2\nexec "+r.Program+" \"$@\"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		id := r.start(t, "web")
		late := &rig{Engine: &Engine{Program: slow, Env: r.Env, Host: r.Host}}
		terminal := &sandboxer.WinSize{Cols: 80, Rows: 24}
		exit, out, _, err := late.run(t, id, sandboxer.Cmd{Args: []string{"sh", "-c", "cat; sleep 1; echo slept"}, TTY: terminal})
		if err != nil || exit.Code != 0 || out != "slept\r\n" {
			t.Errorf("without an input: %+v, %q, %v; want slept alone", exit, out, err)
		}
		in, feed := io.Pipe() // its end would hang up
		defer feed.Close()
		go func() { _, _ = feed.Write([]byte("typed\r")) }()
		exit, out, _, err = late.run(t, id, sandboxer.Cmd{Args: []string{"sh", "-c", "stty -echo; read l; echo got $l"}, TTY: terminal, Stdin: in})
		if out = strings.TrimPrefix(out, "typed\r\n"); err != nil || exit.Code != 0 || out != "got typed\r\n" { // it may be echoed before stty, once
			t.Errorf("with an input: %+v, %q, %v; want got typed, echoed at most once", exit, out, err)
		}
	})
}

// Who leaves takes the command along, with what it started, left its session and dropped its environment;
// signals reach the command, and a terminal has its size and its changes.
func TestExecEnds(t *testing.T) {
	everywhere(t, func(t *testing.T, r *rig) {
		id := r.start(t, "web")
		if _, err := r.Find(t.Context(), r.name, "web"); err != nil {
			t.Fatal(err)
		}
		sleeps := func() int {
			_, out, _, err := r.run(t, id, sh(`n=0; for f in /proc/[0-9]*/cmdline; do case $(tr '\0' ' ' <$f) in "sleep 8361 "|"/bin/sleep 8361 ") n=$((n+1));; esac; done 2>/dev/null; echo $n`))
			n, aerr := strconv.Atoi(strings.TrimSpace(out))
			if err != nil || aerr != nil {
				t.Fatal(err, aerr)
			}
			return n
		}
		ctx, cancel := context.WithCancel(t.Context())
		began := newBeginning()
		ended := make(chan error, 1)
		go func() {
			cmd := sh("sleep 8361 & setsid sleep 8361 & env -i /bin/sleep 8361 & echo begun; wait")
			cmd.Stdout = began
			_, err := r.Exec(ctx, id, cmd)
			ended <- err
		}()
		<-began.c
		waitFor(t, "what it starts", func() bool { return sleeps() == 3 })
		cancel()
		if err := <-ended; sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Errorf("a command that was given up: %v", err)
		}
		if n := sleeps(); n != 0 {
			t.Errorf("%d processes are left", n)
		}

		signals := make(chan os.Signal, 1)
		began = newBeginning()
		done := make(chan struct{})
		var exit sandboxer.Exit
		var err error
		go func() {
			defer close(done)
			cmd := sh("trap 'exit 7' TERM; echo begun; while :; do sleep 0.05; done")
			cmd.Stdout, cmd.Signals = began, signals
			exit, err = r.Exec(t.Context(), id, cmd)
		}()
		<-began.c
		signals <- syscall.SIGTERM
		<-done
		if err != nil || exit.Code != 7 {
			t.Errorf("after a signal: %+v, %v", exit, err)
		}

		var screen safeBuilder
		sizes := make(chan sandboxer.WinSize)
		go func() {
			waitFor(t, "a prompt", func() bool { return strings.Contains(screen.String(), "ready") })
			sizes <- sandboxer.WinSize{Cols: 99, Rows: 33}
		}()
		cmd := sh(`stty size; echo ready; while [ "$(stty size)" != "33 99" ]; do sleep 0.05; done; echo changed; exit 5`)
		cmd.TTY, cmd.Stdout, cmd.Resize = &sandboxer.WinSize{Cols: 77, Rows: 22}, &screen, sizes
		tctx, tcancel := context.WithTimeout(t.Context(), time.Minute)
		defer tcancel()
		exit, err = r.Exec(tctx, id, cmd)
		if got := screen.String(); err != nil || exit.Code != 5 || !strings.Contains(got, "22 77") || !strings.Contains(got, "changed") {
			t.Errorf("a terminal: %+v, %q, %v", exit, got, err)
		}
		if exit, out, _, err := r.run(t, id, sandboxer.Cmd{Args: []string{"cat"}, TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}}); err != nil || exit.Code != 0 {
			t.Errorf("a terminal at which nobody types: %+v, %q, %v", exit, out, err)
		}
	})
}

// beginning is an output that tells of its first byte.
type beginning struct {
	once sync.Once
	c    chan struct{}
}

func newBeginning() *beginning { return &beginning{c: make(chan struct{})} }

func (b *beginning) Write(p []byte) (int, error) {
	b.once.Do(func() { close(b.c) })
	return len(p), nil
}

type safeBuilder struct {
	mu sync.Mutex
	b  strings.Builder
}

func (s *safeBuilder) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuilder) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// In an image without a shell commands run as well, and end from the host.
func TestExecWithoutShell(t *testing.T) {
	everywhere(t, func(t *testing.T, r *rig) {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		in := tar.NewReader(bytes.NewReader(enginetest.BusyboxTar(t)))
		for {
			hdr, err := in.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if hdr.Name == "bin/echoer" || hdr.Name == "bin/" {
				if err := w.WriteHeader(hdr); err != nil {
					t.Fatal(err)
				}
				if _, err := io.Copy(w, in); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.try(&b, "import", "-", r.name+":bare"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = r.try(nil, "rmi", "-f", r.name+":bare") })
		r.start(t, "bare", "--network", "none", "--", r.name+":bare", "/bin/echoer", "127.0.0.1:4000")
		id, err := r.Find(t.Context(), r.name, "bare")
		if err != nil || id == "" || r.hasShell(id) {
			t.Fatalf("Find = %q, %v; has a shell: %t", id, err, r.hasShell(id))
		}
		if exit, _, errs, err := r.run(t, id, sandboxer.Cmd{Args: []string{"sh"}}); err != nil || exit.Code != 127 {
			t.Errorf("a shell: %+v, %q, %v", exit, errs, err)
		}
		_, list, err := r.Containers(t.Context(), r.name)
		if err != nil || len(list) != 1 {
			t.Fatal(list, err)
		}
		open := func(port int) bool {
			all, err := r.Listeners(t.Context(), list)
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range all[id] {
				if l.Port == port {
					return true
				}
			}
			return false
		}
		waitFor(t, "the container's own port", func() bool { return open(4000) })
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, err := r.Exec(ctx, id, sandboxer.Cmd{Args: []string{"/bin/echoer", "127.0.0.1:4001"}})
			ended <- err
		}()
		waitFor(t, "the command's port", func() bool { return open(4001) })
		cancel()
		if err := <-ended; sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Errorf("given up: %v", err)
		}
		waitFor(t, "the command's end", func() bool { return !open(4001) })
		r.Forget(r.name)
		if !r.hasShell(id) {
			t.Error("what was forgotten is known")
		}
	})
}

// Ports are listed, and reached wherever they listen; a stream is the input and output of a command.
func TestDial(t *testing.T) {
	everywhere(t, func(t *testing.T, r *rig) {
		network := r.name + "n"
		r.do(t, "network", "create", network)
		t.Cleanup(func() { _, _ = r.try(nil, "network", "rm", network) })
		id := r.start(t, "web", "--network", network, r.image, "sh", "-c", "echoer 0.0.0.0:5000 & exec echoer 127.0.0.1:5001")
		_, list, err := r.Containers(t.Context(), r.name)
		if err != nil || len(list) != 1 {
			t.Fatal(list, err)
		}
		c := &list[0]
		if own, _ := c.Addrs(5000); len(own) != 1 {
			t.Errorf("its addresses: %q", own)
		}
		waitFor(t, "its ports", func() bool {
			all, err := r.Listeners(t.Context(), list)
			if err != nil {
				t.Fatal(err)
			}
			wide, loopback := false, false
			for _, l := range all[id] {
				wide, loopback = wide || l.Port == 5000 && !l.Loopback, loopback || l.Port == 5001 && l.Loopback
			}
			return wide && loopback
		})
		for _, port := range []int{5000, 5001} {
			conn, err := r.Dial(t.Context(), Endpoint{Container: c, Network: c, Port: port, Name: "the service web"})
			if err != nil {
				t.Errorf("port %d: %v", port, err)
				continue
			}
			if got, err := echo(conn); got != "hello" || err != nil {
				t.Errorf("port %d: %q, %v", port, got, err)
			}
			conn.Close()
		}
		if _, err := r.Dial(t.Context(), Endpoint{Container: c, Network: c, Port: 5002, Name: "the service web"}); sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(err.Error(), "nothing listens on port 5002 of the service web") {
			t.Errorf("a port where nobody listens: %v", err)
		}

		// A way inside goes before the tools of the image, which stay where it leads nowhere.
		own, other := net.Pipe()
		defer other.Close()
		for _, want := range []error{nil, errors.New("no agent")} {
			asked := 0
			conn, err := r.Dial(t.Context(), Endpoint{Container: c, Network: c, Port: 5001, Name: "the service web", Inside: func(context.Context) (net.Conn, error) {
				asked++
				if want != nil {
					return nil, want
				}
				return own, nil
			}})
			if err != nil || asked != 1 || (conn == own) != (want == nil) {
				t.Fatalf("inside %v: %v, %v, asked %d times", want, conn, err, asked)
			}
			if want != nil {
				if got, err := echo(conn); got != "hello" || err != nil {
					t.Errorf("by nc: %q, %v", got, err)
				}
			}
			conn.Close()
		}

		s, err := r.Stream(t.Context(), id, sandboxer.Cmd{Args: []string{"sh", "-c", `echo "$A $(pwd)"; exec cat`}, Env: map[string]string{"A": "a"}, Dir: "/tmp"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(s, "in"); err != nil {
			t.Error(err)
		}
		if err := s.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Error(err)
		}
		if got, err := io.ReadAll(s); string(got) != "a /tmp\nin" {
			t.Errorf("a stream: %q, %v", got, err)
		}
		s.Close()
		if _, err := r.Stream(t.Context(), "no-such-container", sandboxer.Cmd{Args: []string{"cat"}}); sandboxer.KindOf(err) != sandboxer.Failed {
			t.Errorf("a stream to nowhere: %v", err)
		}
	})
}

func echo(c io.ReadWriter) (string, error) {
	if _, err := io.WriteString(c, "hello"); err != nil {
		return "", err
	}
	b := make([]byte, 5)
	n, err := io.ReadFull(c, b)
	return string(b[:n]), err
}

// The use of containers is measured together; a kill for memory is distinguished from
// other kills.
func TestStats(t *testing.T) {
	everywhere(t, func(t *testing.T, r *rig) {
		id := r.start(t, "web", "--memory", "48m", "--memory-swap", "48m")
		r.start(t, "other")
		if _, err := r.Find(t.Context(), r.name, "web"); err != nil {
			t.Fatal(err)
		}
		_, list, err := r.Containers(t.Context(), r.name)
		if err != nil || len(list) != 2 {
			t.Fatal(list, err)
		}
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "file"), make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		st, err := r.Stats(t.Context(), list, dir)
		if err != nil || st.PIDs < 2 || st.MemoryBytes <= 0 || st.CPU <= 0 || st.MemoryLimit != 0 || st.DiskBytes < 1<<20 {
			t.Errorf("Stats of all: %+v, %v", st, err)
		}
		one := slices.DeleteFunc(slices.Clone(list), func(c Container) bool { return c.ID != id })
		if st, err := r.Stats(t.Context(), one, ""); err != nil || st.MemoryLimit != 48<<20 || st.DiskBytes != -1 || st.PIDs < 1 {
			t.Errorf("Stats of one: %+v, %v", st, err)
		}
		if exit, _, errs, err := r.run(t, id, sandboxer.Cmd{Args: []string{"tail", "/dev/zero"}}); err != nil || exit.Code != 137 || !exit.OOMKilled {
			t.Errorf("beyond its memory: %+v, %q, %v", exit, errs, err)
		}
		if exit, _, _, err := r.run(t, id, sh("kill -9 $$")); err != nil || exit.Code != 137 || exit.OOMKilled {
			t.Errorf("killed otherwise: %+v, %v", exit, err)
		}
	})
}

// An engine that is not there is distinguished from one that hangs, and from a host that is away.
func TestEngineAwayOrHung(t *testing.T) {
	image, env := kinds["docker"](t)
	en := there(t, "docker", env)
	r := &rig{Engine: en, image: image, env: env, name: fmt.Sprintf("sbx-hung-g%d", time.Now().UnixNano())}
	en.Watch = NewWatch(t.Context(), WatchOptions{Program: "docker", Env: en.Env, Name: "localhost", Host: func() (Host, error) { return en.Host, nil }, Every: time.Second})
	defer en.Watch.Close()
	id := r.start(t, "web")
	began := newBeginning()
	ended := make(chan error, 1)
	go func() {
		cmd := sh("echo begun; exec sleep 8362")
		cmd.Stdout = began
		_, err := en.Exec(t.Context(), id, cmd)
		ended <- err
	}()
	<-began.c
	resume := docker.Hang(t)
	if err := <-ended; !errors.Is(err, ErrHangs) {
		t.Errorf("a command under way: %v", err)
	}
	if _, _, err := en.Containers(t.Context(), r.name); !errors.Is(err, ErrHangs) || sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("Containers: %v", err)
	}
	if !en.Watch.Hangs() {
		t.Error("it is said to answer")
	}
	resume()
	waitFor(t, "an answer", func() bool { _, _, err := en.Containers(t.Context(), r.name); return err == nil })
	waitFor(t, "the end of the command", func() bool {
		_, out, _, err := r.run(t, id, sh(`cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' ' ' | grep -c "sleep 8362 " || :`))
		return err == nil && !strings.Contains(out, "sleep 8362")
	})

	away := there(t, "docker", []string{"DOCKER_HOST=unix://" + filepath.Join(t.TempDir(), "none")})
	if _, _, err := away.Containers(t.Context(), "x"); !errors.Is(err, ErrAbsent) || sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("an engine that is not there: %v", err)
	}
	if _, err := away.Exec(t.Context(), id, sh("true")); !errors.Is(err, ErrAbsent) || sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("a command there: %v", err)
	}
}

// An image that was imported has its program and its labels, and is listed by them.
func TestImages(t *testing.T) {
	everywhere(t, func(t *testing.T, r *rig) {
		if list, err := r.Images(t.Context(), map[string]string{LabelOwner: r.name}); err != nil || len(list) > 0 {
			t.Errorf("before: %+v, %v", list, err)
		}
		id, err := r.Import(t.Context(), bytes.NewReader(enginetest.BusyboxTar(t)), map[string]string{LabelOwner: r.name, "a.b": "c"}, "/bin/echo")
		if err != nil || id == "" {
			t.Fatalf("Import = %q, %v", id, err)
		}
		t.Cleanup(func() { _, _ = r.try(nil, "rmi", "-f", id) })
		// One has the same owner, the other the same label besides: neither is asked for.
		for _, labels := range []map[string]string{{LabelOwner: r.name, "a.b": "d"}, {LabelOwner: r.name + "x", "a.b": "c"}} {
			other, err := r.Import(t.Context(), bytes.NewReader(enginetest.BusyboxTar(t)), labels, "/bin/false")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _, _ = r.try(nil, "rmi", "-f", other) })
		}
		list, err := r.Images(t.Context(), map[string]string{LabelOwner: r.name, "a.b": "c"})
		if err != nil || len(list) != 1 || !strings.HasSuffix(id, strings.TrimPrefix(list[0].ID, "sha256:")) || list[0].Size <= 0 || time.Since(list[0].Created).Abs() > time.Hour || list[0].Config.Labels["a.b"] != "c" {
			t.Errorf("Images = %+v, %v; want %s", list, err, id)
		}
		if out := r.do(t, "run", "--rm", id, "said"); out != "said" {
			t.Errorf("it says %q", out)
		}
		if _, err := r.Import(t.Context(), strings.NewReader(""), map[string]string{"a": "b c"}, "/x"); sandboxer.KindOf(err) != sandboxer.Internal {
			t.Errorf("a label that is none: %v", err)
		}
		if _, err := ParseImages("what?"); err == nil {
			t.Error("what is not JSON is read")
		}
	})
}

// Many connections over IPv4 hide no listener of IPv6.
func TestListenersAmongConnections(t *testing.T) {
	t.Parallel()
	v6, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("there is no IPv6: %v", err)
	}
	defer v6.Close()
	v4, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer v4.Close()
	for range 600 {
		c, err := net.Dial("tcp", v4.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	here := Container{ID: "here"}
	here.State.Running, here.State.Pid = true, os.Getpid()
	all, err := there(t, "docker", nil).Listeners(t.Context(), []Container{here})
	port := v6.Addr().(*net.TCPAddr).Port
	if err != nil || !slices.ContainsFunc(all["here"], func(l procnet.Listener) bool { return l.Port == port && l.Loopback }) {
		t.Errorf("Listeners = %v, %v; want port %d", all["here"], err, port)
	}
}

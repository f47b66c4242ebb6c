//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// soon is how long something may take that must happen.
const soon = 2 * time.Minute

// An installation is a server of the programs as they are built, with a directory of its own.
type installation struct {
	*testing.T
	bin, home string
	env       []string
	address   string // of its TCP listener
	server    *exec.Cmd
	log       bytes.Buffer
	client    *api.Client // over the Unix socket
}

// serve starts a server that may have so many file descriptors, in control groups where
// groups are named (by controller).
func serve(t *testing.T, bin string, nofile int, groups []string, env ...string) *installation {
	t.Helper()
	home, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	in := &installation{T: t, bin: bin, home: home, address: l.Addr().String()}
	l.Close()
	in.env = append(append(os.Environ(), "SANDBOXER_HOME="+home, "SANDBOXER_PROGRESS=none", "SANDBOXER_LISTEN="+in.address), env...)
	// It joins its groups itself, so that nothing of it is outside of them.
	in.server = exec.Command("sh", append([]string{"-c", `n=$1; shift; ulimit -n $n && for g; do echo $$ >$g/cgroup.procs || exit; done; exec "$0" serve`, filepath.Join(bin, "sandboxer"), strconv.Itoa(nofile)}, groups...)...)
	in.server.Env, in.server.Stderr = in.env, &in.log
	if err := in.server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if ids, err := in.command("ls", "-q").Output(); err == nil && len(bytes.Fields(ids)) > 0 {
			_ = in.run(append([]string{"destroy"}, strings.Fields(string(ids))...)...)
		}
		_ = in.run("down")
		late := time.AfterFunc(soon, func() { _ = in.server.Process.Kill() })
		defer late.Stop()
		_ = in.server.Wait()
		for _, left := range remains(t, home) {
			t.Errorf("left behind: %s", left)
		}
		if t.Failed() {
			t.Log(in.log.String())
		}
	})
	for end := time.Now().Add(soon); in.run("status") != nil; {
		if time.Now().After(end) {
			t.Fatal("the server does not answer")
		}
	}
	if in.client, err = api.New("unix://"+home+"/api.sock", api.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(in.client.Close)
	return in
}

func (in *installation) command(args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(in.bin, "sandboxer"), args...)
	cmd.Env = in.env
	return cmd
}

func (in *installation) run(args ...string) error { return in.command(args...).Run() }

func (in *installation) must(args ...string) string {
	in.Helper()
	var out, errs bytes.Buffer
	cmd := in.command(args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		in.Fatalf("sandboxer %s: %v\n%s%s", strings.Join(args, " "), err, out.String(), errs.String())
	}
	return strings.TrimSpace(out.String())
}

// inTime is must for what may be refused at first: until the server has noticed who left.
func (in *installation) inTime(args ...string) string {
	in.Helper()
	for end := time.Now().Add(soon); ; time.Sleep(100 * time.Millisecond) {
		var errs bytes.Buffer
		cmd := in.command(args...)
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err == nil {
			return strings.TrimSpace(string(out))
		}
		if time.Now().After(end) {
			in.Fatalf("sandboxer %s: %v\n%s%s", strings.Join(args, " "), err, out, errs.String())
		}
	}
}

// status returns a number from the server's /proc/PID/status.
func (in *installation) status(key string) int {
	in.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", in.server.Process.Pid))
	if err != nil {
		in.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "\n"+key+":")
	n, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		in.Fatal(err)
	}
	return n
}

// execs starts n commands at once, returns when each runs or was refused, and counts
// both. They end with stop.
func (in *installation) execs(id string, n int) (running, refused int, stop func()) {
	in.Helper()
	ctx, cancel := context.WithCancel(in.Context())
	begun := make(chan error, 2*n)
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			var once sync.Once
			told := writer(func(p []byte) (int, error) { once.Do(func() { begun <- nil }); return len(p), nil })
			_, err := in.client.Exec(ctx, id, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; exec sleep 10000"}, Stdout: told})
			once.Do(func() { begun <- cmpErr(err) })
		})
	}
	for range n {
		select {
		case err := <-begun:
			switch {
			case err == nil:
				running++
			case errors.Is(err, sandboxer.Exhausted) && sandboxer.RetryAfterOf(err) > 0 && strings.Contains(err.Error(), " at once"): // not for want of descriptors
				refused++
			default:
				in.Errorf("a command: %v", err)
			}
		case <-time.After(2 * soon):
			in.Fatalf("%d commands run and %d were refused, of %d", running, refused, n)
		}
	}
	return running, refused, func() { cancel(); wg.Wait() }
}

func cmpErr(err error) error {
	if err == nil {
		return errors.New("it ended by itself")
	}
	return err
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// TestServerUnderLoad drives a server as it is built, on real sandboxes, to its bounds.
func TestServerUnderLoad(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes control groups")
	}
	dir := programs(t)
	t.Run("many commands", func(t *testing.T) { manyCommands(t, dir) })
	t.Run("the defaults", func(t *testing.T) { defaultsHold(t, dir) })
	t.Run("dead while frozen", func(t *testing.T) { deadWhileFrozen(t, dir) })
}

// requests starts n commands at once that are answered in one piece, and returns when each
// runs. They end with stop.
func (in *installation) requests(id string, n int) (stop func()) {
	in.Helper()
	ctx, cancel := context.WithCancel(in.Context())
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			x, err := in.client.Run(ctx, id, api.Exec{Args: []string{"sh", "-c", "echo on >>/tmp/requests; exec sleep 10000"}, Timeout: api.Duration(time.Hour)})
			if ctx.Err() == nil {
				in.Errorf("a request: %+v, %v", x, err)
			}
		})
	}
	for end := time.Now().Add(2 * soon); ; time.Sleep(100 * time.Millisecond) {
		x, err := in.client.Run(ctx, id, api.Exec{Args: []string{"sh", "-c", "wc -l </tmp/requests"}})
		if err == nil && strings.TrimSpace(x.Stdout) == strconv.Itoa(n) {
			return func() { cancel(); wg.Wait() }
		}
		if time.Now().After(end) {
			cancel()
			in.Fatalf("of %d requests run: %+v, %v", n, x, err)
		}
	}
}

// With bounds and descriptors raised for it, a thousand commands at once (200 for a change), half of them
// streams, take neither threads nor much memory: 40 MB and 60 kB for each. Pages of the program's file do not count: how many of
// its 80 MB are mapped is up to the kernel.
func manyCommands(t *testing.T, bin string) {
	in := serve(t, bin, 16384, nil, "SANDBOXER_MAX_EXECS=1100")
	id := in.must("create", "--profile", "local", "-q")
	before, base := in.status("Threads"), in.status("VmRSS")
	n := 200
	if whole() {
		n = 1000
	}
	running, _, stop := in.execs(id, n/2)
	defer stop()
	defer in.requests(id, n/2)()
	most := (40_000_000 + 60_000*n) >> 10
	anon := in.status("RssAnon")
	for end := time.Now().Add(soon); anon > most && time.Now().Before(end); anon = in.status("RssAnon") { // what starting them took
		time.Sleep(100 * time.Millisecond)
	}
	threads := in.status("Threads")
	t.Logf("%d commands: %d threads (%d before), %d KiB, %d at most; before %d, anon %d, file %d", n, threads, before, in.status("VmRSS"), in.status("VmHWM"), base, anon, in.status("RssFile"))
	if running != n/2 {
		t.Errorf("%d of %d streams run", running, n/2)
	}
	if threads > 64 {
		t.Errorf("%d threads; want at most 64", threads)
	}
	if anon > most {
		t.Errorf("%d KiB of memory without files; want at most %d", anon, most)
	}
}

// cgroups makes control groups of a name of the test's own that bound processes and
// memory.
func cgroups(t *testing.T, pids, memory string) (dirs []string) {
	t.Helper()
	name := fmt.Sprintf("sbx-test-%d", os.Getpid())
	files := map[string]map[string]string{"/sys/fs/cgroup/pids": {"pids.max": pids}, "/sys/fs/cgroup/memory": {"memory.limit_in_bytes": memory}}
	if b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil && strings.Contains(string(b), "pids") {
		files = map[string]map[string]string{"/sys/fs/cgroup": {"pids.max": pids, "memory.max": memory}}
	}
	for parent, settings := range files {
		d := filepath.Join(parent, name)
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Skipf("no control groups can be made here: %v", err)
		}
		t.Cleanup(func() {
			for end := time.Now().Add(soon); os.Remove(d) != nil && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			}
		})
		for k, v := range settings {
			if err := os.WriteFile(filepath.Join(d, k), []byte(v), 0o600); err != nil {
				t.Skipf("control groups cannot be bounded here: %v", err)
			}
		}
		dirs = append(dirs, d)
	}
	return dirs
}

// With 300 tasks, 1,024 descriptors and 256 MiB the defaults hold: what is too much is
// told so and when to come back, and the server lives and serves whoever comes after.
func defaultsHold(t *testing.T, bin string) {
	in := serve(t, bin, 1024, cgroups(t, "300", "268435456"))
	id, other := in.must("create", "--profile", "local", "-q"), in.must("create", "--profile", "local", "-q")
	key := in.must("key", "create", "load", "-q")
	tr := &http.Transport{MaxIdleConnsPerHost: -1}
	defer tr.CloseIdleConnections()
	get := func(ctx context.Context, path, accept string) (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://"+in.address+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		req.Header.Set("Accept", accept)
		return tr.RoundTrip(req)
	}
	serves := func(when string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		if _, err := in.client.Get(ctx, other); err != nil {
			t.Errorf("%s, over the Unix socket: %v", when, err)
		}
	}

	end := in.fill("event streams", 500, func(ctx context.Context, open func()) error {
		resp, err := get(ctx, "/v1/events?after=0", "text/event-stream")
		if err != nil { // refused before it was read
			return sandboxer.E(sandboxer.Exhausted, err, "refused")
		}
		return hold(ctx, resp, open)
	})
	running, refused, stop := in.execs(id, 200)
	t.Logf("%d commands run, %d were refused; %d threads, %d KiB", running, refused, in.status("Threads"), in.status("VmRSS"))
	if running < 100 || refused == 0 {
		t.Errorf("%d commands run and %d were refused, of 200; want 100 at least, and a bound", running, refused)
	}
	serves("with all commands and streams")
	begun := time.Now()
	in.must("destroy", other)
	took := time.Since(begun)
	t.Logf("destroy took %s", took)
	if took > 5*time.Second { // it took 45 beside 500 streams
		t.Errorf("destroy took %s beside all commands and streams", took)
	}
	other = id
	end()
	stop()
	portsToTheirBound(in, id, key, get, serves)

	// Connections that say nothing, and bodies that stop half-way, of somebody with a key.
	var held []net.Conn
	defer func() {
		for _, c := range held {
			c.Close()
		}
	}()
	say := map[string]string{
		"silence": "",
		"a command that is not named": "GET /v1/sandboxes/" + id + "/exec HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" +
			"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: c2FuZGJveGVyIHRlc3QhIQ==\r\nSec-WebSocket-Protocol: " + api.ExecProtocol + "\r\nAuthorization: Bearer " + key + "\r\n\r\n",
		"half a body": "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer " + key + "\r\nContent-Length: 1000000\r\n\r\n{\"profile\":",
	}
	for what, words := range say {
		for range 1500 {
			c, err := net.DialTimeout("tcp", in.address, soon)
			if err != nil {
				continue // its backlog is full: not our matter
			}
			held = append(held, c)
			_, _ = io.WriteString(c, words)
		}
		serves("with 1500 connections of " + what)
		t.Logf("1500 connections of %s: %d threads, %d KiB", what, in.status("Threads"), in.status("VmRSS"))
	}
	for _, c := range held {
		c.Close()
	}
	held = nil

	if out := in.inTime("exec", id, "--", "echo", "well"); out != "well" {
		t.Errorf("afterwards a command says %q", out)
	}
	in.must("destroy", id)
	if out := in.must("audit"); !strings.Contains(out, " 0 violations") {
		t.Errorf("audit says %s", out)
	}
	if in.server.ProcessState != nil {
		t.Error("the server has ended")
	}
}

// portsToTheirBound opens connections to a program whose answers do not end, and sends it
// requests through the proxy, until no more are taken.
func portsToTheirBound(in *installation, id, key string, get func(ctx context.Context, path, accept string) (*http.Response, error), serves func(when string)) {
	in.Helper()
	const port = 8000
	in.inTime("exec", id, "--", "perl", "-MIO::Socket::INET", "-e", fmt.Sprintf(`
		$l = IO::Socket::INET->new(LocalAddr => "127.0.0.1", LocalPort => %d, Listen => 1024) or die; exit if fork;
		close STDIN; close STDOUT; close STDERR;
		while ($c = $l->accept) { sysread $c, $b, 65536; syswrite $c, "HTTP/1.1 200 OK\r\n\r\n."; push @c, $c }`, port))
	in.must("port", "open", id, strconv.Itoa(port))
	remote, err := api.New("http://"+in.address, api.Options{Token: sandboxer.Secret(key), NoRetry: true})
	if err != nil {
		in.Fatal(err)
	}
	defer remote.Close()

	for way, use := range map[string]func(ctx context.Context, open func()) error{
		"connections to a port": func(ctx context.Context, open func()) error {
			c, err := remote.Dial(ctx, id, port)
			if err != nil {
				return err
			}
			defer c.Close()
			if _, err := io.WriteString(c, "x"); err != nil {
				return err
			}
			if _, err := io.ReadFull(c, make([]byte, 12)); err != nil {
				return err
			}
			open()
			<-ctx.Done()
			return nil
		},
		"requests to a port": func(ctx context.Context, open func()) error {
			resp, err := get(ctx, fmt.Sprintf("/p/%s/%d/", id, port), "*/*")
			if err != nil {
				return err
			}
			return hold(ctx, resp, open)
		},
	} {
		end := in.fill(way, 400, use)
		serves("with all " + way)
		end()
	}
}

// fill has n callers use the server at once, each until ctx ends; they call open once they
// are let in. It returns when each was let in or refused; a hundred must be let in, and some
// refused. They leave with end.
func (in *installation) fill(what string, n int, use func(ctx context.Context, open func()) error) (end func()) {
	in.Helper()
	ctx, cancel := context.WithCancel(in.Context())
	var wg sync.WaitGroup
	end = func() { cancel(); wg.Wait() }
	in.Cleanup(end) // also when it fails
	var opened, full atomic.Int64
	told := make(chan struct{}, n)
	atOnce := make(chan struct{}, 16) // an address may not have many connections of strangers
	for range n {
		wg.Go(func() {
			atOnce <- struct{}{}
			answered := sync.OnceFunc(func() { told <- <-atOnce })
			defer answered()
			if err := use(ctx, func() { opened.Add(1); answered() }); ctx.Err() == nil {
				full.Add(1)
				if !errors.Is(err, sandboxer.Exhausted) {
					in.Errorf("%s: %v", what, err)
				}
			}
		})
	}
	for range n {
		select {
		case <-told:
		case <-time.After(soon):
			in.Fatalf("%d %s are open and %d were refused, of %d", opened.Load(), what, full.Load(), n)
		}
	}
	in.Logf("%d %s are open, %d were refused; %d threads, %d KiB", opened.Load(), what, full.Load(), in.status("Threads"), in.status("VmRSS"))
	if opened.Load() < 100 || full.Load() == 0 {
		in.Errorf("%d %s are open and %d were refused, of %d; want 100 at least, and a bound", opened.Load(), what, full.Load(), n)
	}
	return end
}

// hold is what fill's callers do with an answer: they take what comes of it until ctx ends.
func hold(ctx context.Context, resp *http.Response, open func()) error {
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusOK:
		open()
		_, err := io.Copy(io.Discard, resp.Body)
		return err
	case resp.StatusCode == http.StatusTooManyRequests && resp.Header.Get("Retry-After") != "":
		return sandboxer.E(sandboxer.Exhausted, nil, "refused")
	}
	return errors.New(resp.Status)
}

// A sandbox whose processes were killed while it was frozen is lost when somebody
// resumes it, or at the next looks, and nothing of it is left.
func deadWhileFrozen(t *testing.T, bin string) {
	in := serve(t, bin, 4096, nil)
	for _, part := range []string{"runsc-gofer", "runsc-sandbox"} {
		id := in.must("create", "--profile", "local", "-q", "--ttl", "1h")
		in.must("exec", id, "--", "true")
		in.must("pause", id, "--depth", "freeze")
		killed := 0
		files, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil || !bytes.HasPrefix(b, []byte(part+"\x00")) || !bytes.Contains(b, []byte(id)) || !bytes.Contains(b, []byte(in.home)) {
				continue
			}
			pid, err := strconv.Atoi(strings.Split(f, "/")[2])
			if err == nil && syscall.Kill(pid, syscall.SIGKILL) == nil {
				killed++
			}
		}
		if killed == 0 {
			t.Fatalf("there is no %s of sandbox %s", part, id)
		}
		err = in.run("resume", id)
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		sb, werr := in.client.Wait(ctx, id, sandboxer.Terminated)
		cancel()
		if werr != nil || sb.Reason != sandboxer.ReasonLost {
			t.Errorf("%s killed: resume: %v; then %+v, %v", part, err, sb, werr)
		}
	}
	if out := in.must("audit"); !strings.Contains(out, " 0 violations") {
		t.Errorf("audit says %s", out)
	}
}

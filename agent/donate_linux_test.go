package agent

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// stop stops a process and returns once it is stopped.
func stop(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped(t, pid)
}

func stopped(t *testing.T, pid int) {
	t.Helper()
	eventually(t, "it does not stop", func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		_, after, ok := bytes.Cut(b, []byte(") "))
		return ok && bytes.HasPrefix(after, []byte("T"))
	})
}

// turns is how often the threads of a process have gone to sleep.
func turns(pid int) (n int) {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	for _, f := range threads {
		b, _ := os.ReadFile(f)
		for line := range strings.Lines(string(b)) {
			var v int
			if _, err := fmt.Sscanf(line, "voluntary_ctxt_switches: %d", &v); err == nil {
				n += v
			}
		}
	}
	return n
}

// unixPair returns both ends of a Unix connection.
func unixPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		out[i] = c.(*net.UnixConn)
	}
	return out[0], out[1]
}

// TestSlowToBegin: the wait for a starting agent is counted in the waiting process's own
// turns, so that a paused machine uses none of it.
func TestSlowToBegin(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	c := exec.Command(os.Args[0], "donate", path, "2")
	c.Env = append(os.Environ(), "AGENT_TEST_RUN=1", "GORACE=atexit_sleep_ms=0")
	c.ExtraFiles = []*os.File{r, w}
	var said bytes.Buffer
	c.Stderr = &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	t.Cleanup(func() { _ = c.Process.Kill() })
	tries := func() {
		t.Helper()
		from := turns(c.Process.Pid)
		eventually(t, "it does not try", func() bool { return len(ended) > 0 || turns(c.Process.Pid) > from+50 })
	}
	tries()
	stop(t, c.Process.Pid)
	time.Sleep(12 * time.Second) // longer than any deadline
	if err := c.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	tries()
	l, err := listenDonated(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := <-ended; err != nil {
		t.Fatalf("%v: %s", err, said.String())
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

// TestLateMessage: a message that was sent in time is accepted even if it is read late.
func TestLateMessage(t *testing.T) {
	ours, theirs := unixPair(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if _, _, err := theirs.WriteMsgUnix([]byte{0}, unix.UnixRights(int(r.Fd()), int(w.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	conns := receiveConns(ours, time.Unix(1, 0))
	if len(conns) != 1 {
		t.Fatalf("%d connections", len(conns))
	}
	conns[0].Close()
	if conns := receiveConns(ours, time.Unix(1, 0)); len(conns) != 0 {
		t.Errorf("%d connections of no message", len(conns))
	}
}

// TestDonatedConnectionsWait: a handed-over connection may be used at any time later; on
// an ordinary one, a request must come soon.
func TestDonatedConnectionsWait(t *testing.T) {
	s := newServer(settings{}, nil, 4<<10, slog.New(slog.DiscardHandler))
	dir := t.TempDir()
	donated, err := listen(donatePrefix + filepath.Join(dir, "d"))
	if err != nil {
		t.Fatal(err)
	}
	made, err := listen("unix:" + filepath.Join(dir, "u"))
	if err != nil {
		t.Fatal(err)
	}
	servers := s.servers(time.Millisecond)
	t.Cleanup(func() {
		for _, hs := range []*http.Server{servers.made, servers.donated} {
			_ = hs.Close()
		}
	})
	for _, l := range []net.Listener{donated, made} {
		go func() { _ = servers.serve(l) }()
	}
	ours, theirs, err := Pipes()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	c, err := net.Dial("unix", filepath.Join(dir, "d"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, _, err := c.(*net.UnixConn).WriteMsgUnix([]byte{0}, unix.UnixRights(int(theirs[0].Fd()), int(theirs[1].Fd())), nil); err != nil {
		t.Fatal(err)
	}
	theirs[0].Close()
	theirs[1].Close()
	for range 10 {
		c, err := net.Dial("unix", filepath.Join(dir, "u"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, c) // until it is closed
		c.Close()
	}
	if _, err := io.WriteString(ours, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if n, err := ours.Read(make([]byte, 8)); err != nil || n == 0 {
		t.Errorf("%d bytes of an answer, %v", n, err)
	}
}

// TestStandingStillIsNoPatience pauses a process for longer than its time limit: that
// counts for next to nothing.
func TestStandingStillIsNoPatience(t *testing.T) {
	const patience = 8 * time.Second
	if os.Getenv("AGENT_TEST_STANDS_STILL") != "" {
		late := make(chan struct{})
		after(patience, func() { close(late) })
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		fmt.Println("goes on")
		<-late
		fmt.Println("late")
		return
	}
	t.Parallel()
	c := exec.Command(os.Args[0], "-test.run=^TestStandingStillIsNoPatience$", "-test.v")
	c.Env = append(os.Environ(), "AGENT_TEST_STANDS_STILL=1")
	var said awaited
	c.Stdout = &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	stopped(t, c.Process.Pid)
	time.Sleep(patience + time.Second)
	began := time.Now()
	if err := c.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	said.wait(t, "late")
	if d := time.Since(began); d < patience/4 {
		t.Errorf("its patience was over %v after it went on", d)
	}
}

// A process is woken only once it waits: before that the signal would end it.
func TestWakesWhoSleeps(t *testing.T) {
	begin := func(args ...string) (*exec.Cmd, <-chan error) {
		t.Helper()
		cmd := exec.Command(args[0], args[1:]...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		return cmd, ended
	}
	nobody := filepath.Join(t.TempDir(), "nobody")
	busy, ended := begin("sh", "-c", "while :; do :; done")
	for end := time.Now().Add(time.Minute); asleep(busy.Process.Pid); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("what never waits is taken to wait")
		}
	}
	if conn, err := dialSoon(nobody, busy.Process.Pid, 100); err == nil {
		conn.Close()
		t.Error("nobody listens")
	}
	select {
	case err := <-ended:
		t.Errorf("it was told while it ran: %v", err)
	default:
	}
	sleeper, ended := begin("sleep", "1000")
	for !asleep(sleeper.Process.Pid) {
		time.Sleep(time.Millisecond)
	}
	if conn, err := dialSoon(nobody, sleeper.Process.Pid, 100); err == nil {
		conn.Close()
		t.Error("nobody listens")
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("who sleeps was told nothing")
	}
}

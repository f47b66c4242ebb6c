package sshrun_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

func TestWhatGoesWrong(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	_, otherKey, _ := sshtest.NewKey(t, t.TempDir(), "other")
	otherID, _, _ := sshtest.NewKey(t, t.TempDir(), "stranger")
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	closed, _ := net.Listen("tcp", "127.0.0.1:0")
	closed.Close()
	empty := filepath.Join(t.TempDir(), "known_hosts")
	os.WriteFile(empty, nil, 0o600)
	changed := filepath.Join(t.TempDir(), "known_hosts")
	os.WriteFile(changed, fmt.Appendf(nil, "[127.0.0.1]:%d %s\n", s.Port, otherKey), 0o600)

	tests := []struct {
		name   string
		change func(*sshrun.Target)
		known  string
		want   error
		says   string
	}{
		{"nobody listens", func(t *sshrun.Target) { t.Port = closed.Addr().(*net.TCPAddr).Port }, "", sshrun.ErrUnreachable, "cannot be reached"},
		{"silence", func(t *sshrun.Target) { t.Port = silent.Addr().(*net.TCPAddr).Port }, "", sshrun.ErrUnreachable, "no answer within 1.5s"},
		{"another key than pinned", func(t *sshrun.Target) { t.HostKeys = []string{otherKey} }, "", sshrun.ErrHostKey, "another key"},
		{"unknown key", func(t *sshrun.Target) { t.HostKeys = nil }, empty, sshrun.ErrHostKey, "not trusted"},
		{"changed key", func(t *sshrun.Target) { t.HostKeys = nil }, changed, sshrun.ErrHostKey, "another key"},
		{"not let in", func(t *sshrun.Target) { t.IdentityFile = otherID }, "", sshrun.ErrAuth, "refuses the configured login"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			timeout := time.Minute
			if tt.name == "silence" {
				timeout = 1500 * time.Millisecond
			}
			h := newPool(t, sshrun.Options{ConnectTimeout: timeout, KnownHosts: tt.known})
			target := s.Target()
			tt.change(&target)
			_, err := host(t, h, target).Output(t.Context(), "true")
			if !errors.Is(err, tt.want) || sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(sandboxer.Message(err), tt.says) {
				t.Errorf("%v (kind %s), want %v and %q", err, sandboxer.KindOf(err), tt.want, tt.says)
			}
			if sandboxer.HintOf(err) == "" {
				t.Error("no hint")
			}
		})
	}
}

// A machine without an ssh program reaches no host. It says what to install.
func TestNoSSH(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := sshrun.New(sshrun.Options{Dir: shortDir(t)})
	if sandboxer.KindOf(err) != sandboxer.NotFound || !strings.Contains(sandboxer.Message(err), "no ssh program on this machine") || !strings.Contains(sandboxer.HintOf(err), "openssh-client") {
		t.Errorf("%v, hint %q", err, sandboxer.HintOf(err))
	}
}

func TestScanThenPin(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	p := newPool(t, sshrun.Options{})
	target := s.Target()
	target.HostKeys = nil
	keys, err := p.Scan(t.Context(), target)
	if err != nil || !slices.Equal(keys, []string{s.HostKey}) {
		t.Fatalf("keys %q, %v; want %q", keys, err, s.HostKey)
	}
	target.HostKeys = keys
	if _, err := host(t, p, target).Output(t.Context(), "true"); err != nil {
		t.Error(err)
	}
}

func TestCutMidway(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	relay := sshtest.NewRelay(t, s.Port, 0)
	target := s.Target()
	target.Port = relay.Port
	h := host(t, newPool(t, sshrun.Options{KeepAlive: time.Second}), target)
	cuts := []struct {
		name string
		cut  func()
	}{
		{"server process killed", s.Cut},
		{"connection closed", relay.Cut},
		{"packets dropped", relay.Freeze},
	}
	for _, c := range cuts {
		t.Run(c.name, func(t *testing.T) {
			mark := filepath.Join(t.TempDir(), "pid")
			done := make(chan error, 1)
			go func() {
				_, err := h.Run(t.Context(), sshrun.Cmd{Script: `echo $$ >"$1.t"; mv "$1.t" "$1"; exec setsid sleep 1000`, Args: []string{mark}})
				done <- err
			}()
			waitFor(t, func() bool { _, err := os.Stat(mark); return err == nil })
			c.cut()
			select {
			case err := <-done:
				if !errors.Is(err, sshrun.ErrLost) {
					t.Errorf("%v, want ErrLost", err)
				}
			case <-time.After(time.Minute):
				t.Fatal("the loss was not noticed")
			}
			relay.Thaw()
			if _, err := h.Output(t.Context(), "true"); err != nil {
				t.Errorf("afterwards: %v", err)
			}
			// The kill that could not be done then is made up for now.
			data, _ := os.ReadFile(mark)
			waitFor(t, func() bool { return !alive(strings.TrimSpace(string(data))) })
		})
	}
}

// A connection that may be silent for longer outlives one that may not.
func TestSilence(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	relay := sshtest.NewRelay(t, s.Port, 0)
	dir := t.TempDir()
	begin := func(name string, silence time.Duration) <-chan error {
		target := s.Target()
		target.Port, target.Silence = relay.Port, silence
		h := host(t, newPool(t, sshrun.Options{KeepAlive: time.Second}), target)
		done := make(chan error, 1)
		began := filepath.Join(dir, name)
		go func() {
			out, err := h.Run(t.Context(), sshrun.Cmd{Script: `: >"$1"; until [ -e "$2" ]; do sleep 0.1; done; exit 7`, Args: []string{began, filepath.Join(dir, "end")}})
			if err == nil && out.Code != 7 {
				err = fmt.Errorf("it exited with %d", out.Code)
			}
			done <- err
		}()
		waitFor(t, func() bool { _, err := os.Stat(began); return err == nil })
		return done
	}
	short, long := begin("short", 0), begin("long", time.Hour)
	relay.Freeze()
	if err := <-short; !errors.Is(err, sshrun.ErrLost) {
		t.Errorf("%v, want ErrLost", err)
	}
	relay.Thaw()
	if err := os.WriteFile(filepath.Join(dir, "end"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := <-long; err != nil {
		t.Error(err)
	}
}

func TestServerLimits(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{Config: "MaxSessions 2\nMaxStartups 1:100:1"})
	target := s.Target()
	target.Handshakes = 4
	h := host(t, newPool(t, sshrun.Options{}), target)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			out, err := h.Output(t.Context(), `echo "$1"`, strconv.Itoa(i))
			if err != nil || string(out) != strconv.Itoa(i)+"\n" {
				t.Errorf("%d: %q, %v", i, out, err)
			}
		})
	}
	wg.Wait()
	if n := len(s.Children()); n > 2*4 {
		t.Errorf("%d server processes for 4 connections", n)
	}
}

func TestUnreachableFailsEverybodyAtOnce(t *testing.T) {
	leaveNothing(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	h := host(t, newPool(t, sshrun.Options{ConnectTimeout: time.Second}),
		sshrun.Target{Addr: "x@127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port})
	start := time.Now()
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, err := h.Output(t.Context(), "true"); !errors.Is(err, sshrun.ErrUnreachable) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if d := time.Since(start); d > 20*time.Second { // one after the other it is 50
		t.Errorf("it took %s", d)
	}
}

// TestLogin: a login may take longer than ConnectTimeout where the caller gives it more time, and is not begun again
// meanwhile. It ends with the caller.
func TestLogin(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	relay := sshtest.NewRelay(t, s.Port, 0)
	to := func(name string) sshrun.Target {
		to := s.Target()
		to.Name, to.Port = name, relay.Port
		return to
	}
	p := newPool(t, sshrun.Options{ConnectTimeout: time.Second})
	slow, other, left := host(t, p, to("slow")), host(t, p, to("other")), host(t, p, to("left"))
	relay.Freeze()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	off, leave := context.WithCancel(ctx)
	done, ended := make(chan error, 1), make(chan error, 1)
	go func() { done <- slow.Login(ctx) }()
	go func() { ended <- left.Login(off) }()
	for range 2 {
		if _, err := other.Output(ctx, ":"); !errors.Is(err, sshrun.ErrUnreachable) { // after a second
			t.Errorf("without a login: %v", err)
		}
	}
	select {
	case err := <-done:
		t.Fatalf("it gave up: %v", err)
	default:
	}
	leave()
	if err := <-ended; sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("canceled: %v", err)
	}
	relay.Thaw()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	relay.Freeze() // another login would be one too many
	if err := slow.Login(ctx); err != nil {
		t.Errorf("with a connection: %v", err)
	}
	relay.Thaw()
	if out, err := slow.Output(ctx, "echo on"); err != nil || string(out) != "on\n" {
		t.Errorf("%q, %v", out, err)
	}
	closed := s.Target()
	closed.Port = 1
	if err := host(t, p, closed).Login(ctx); !errors.Is(err, sshrun.ErrUnreachable) {
		t.Errorf("where nobody listens: %v", err)
	}
}

func TestOddLoginShells(t *testing.T) {
	leaveNothing(t)
	for _, shell := range []string{"fish", "tcsh", "dash", "bash", "busybox"} {
		t.Run(shell, func(t *testing.T) {
			path, err := exec.LookPath(shell)
			if err != nil {
				t.Skip("there is no " + shell)
			}
			if shell == "busybox" {
				path += " sh"
			}
			// What sshd does with a login shell: SHELL -c COMMAND.
			s := sshtest.Start(t, sshtest.Options{Config: "ForceCommand exec " + path + ` -c "$SSH_ORIGINAL_COMMAND"`})
			h := host(t, newPool(t, sshrun.Options{}), s.Target())
			var out bytes.Buffer
			exit, err := h.Run(t.Context(), sshrun.Cmd{Script: `printf '%s' "$A$1"; exit 3`, Args: []string{"!! 'x' \\n"}, Env: map[string]string{"A": "a\nb"}, Stdout: &out})
			if err != nil || exit.Code != 3 || out.String() != "a\nb!! 'x' \\n" {
				t.Errorf("exit %+v, %v, output %q", exit, err, out.String())
			}
			out.Reset()
			if _, err := h.Run(t.Context(), sshrun.Cmd{Args: []string{"tty"}, TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}, Stdout: &out}); err != nil || !strings.HasPrefix(out.String(), "/dev/pts/") {
				t.Errorf("terminal: %q, %v", out.String(), err)
			}
		})
	}
}

func TestNoisyShell(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{Config: `ForceCommand echo "Welcome!"; printf "no newline"; echo careful >&2; set -x; eval "$SSH_ORIGINAL_COMMAND"`})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	var out, errOut bytes.Buffer
	if _, err := h.Run(t.Context(), sshrun.Cmd{Script: "echo out; echo err >&2", Stdout: &out, Stderr: &errOut}); err != nil {
		t.Fatal(err)
	}
	if out.String() != "out\n" || errOut.String() != "err\n" {
		t.Errorf("out %q, err %q", out.String(), errOut.String())
	}
}

func TestNoShell(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{Config: `ForceCommand echo "This account is not available."; exit 1`})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	_, err := h.Output(t.Context(), "true")
	if !errors.Is(err, sshrun.ErrShell) || !strings.Contains(err.Error(), "not available") {
		t.Errorf("%v", err)
	}
}

func TestJump(t *testing.T) {
	leaveNothing(t)
	far, near := sshtest.Start(t, sshtest.Options{}), sshtest.Start(t, sshtest.Options{})
	dir := t.TempDir()
	known := filepath.Join(dir, "known_hosts")
	os.WriteFile(known, fmt.Appendf(nil, "[127.0.0.1]:%d %s\n[127.0.0.1]:%d %s\n", far.Port, far.HostKey, near.Port, near.HostKey), 0o600)
	config := filepath.Join(dir, "config")
	os.WriteFile(config, fmt.Appendf(nil, `Host far
  HostName 127.0.0.1
  Port %d
  User %s
  IdentityFile %s
  ProxyJump near
Host near
  HostName 127.0.0.1
  Port %d
  User %s
  IdentityFile %s
Host *
  UserKnownHostsFile %s
`, far.Port, far.User, far.Identity, near.Port, near.User, near.Identity, known), 0o600)
	h := host(t, newPool(t, sshrun.Options{Config: config}), sshrun.Target{Addr: "far"})
	out, err := h.Output(t.Context(), `echo $HOME`)
	if err != nil || strings.TrimSpace(string(out)) != far.Dir {
		t.Errorf("%q, %v", out, err)
	}
	if !strings.Contains(near.Log(), "Accepted publickey") {
		t.Error("it did not go through the other server")
	}
	// The one in between is held to its key as well.
	os.WriteFile(known, fmt.Appendf(nil, "[127.0.0.1]:%d %s\n[127.0.0.1]:%d %s\n", far.Port, far.HostKey, near.Port, far.HostKey), 0o600)
	h = host(t, newPool(t, sshrun.Options{Config: config}), sshrun.Target{Addr: "far"})
	if _, err := h.Output(t.Context(), "true"); err == nil {
		t.Error("a jump host with another key was accepted")
	}
}

func TestCertificates(t *testing.T) {
	leaveNothing(t)
	dir := t.TempDir()
	_, caLine, ca := sshtest.NewKey(t, dir, "ca")
	s := sshtest.Start(t, sshtest.Options{Authorized: "cert-authority " + caLine})
	target := s.Target()
	if _, err := host(t, newPool(t, sshrun.Options{}), target).Output(t.Context(), "true"); !errors.Is(err, sshrun.ErrAuth) {
		t.Fatalf("without a certificate: %v", err)
	}
	cert := &ssh.Certificate{Key: s.Signer.PublicKey(), CertType: ssh.UserCert, KeyId: "t", ValidPrincipals: []string{s.User},
		ValidBefore: ssh.CertTimeInfinity, Permissions: ssh.Permissions{Extensions: map[string]string{"permit-pty": "", "permit-port-forwarding": ""}}}
	if err := cert.SignCert(rand.Reader, ca); err != nil {
		t.Fatal(err)
	}
	os.WriteFile(s.Identity+"-cert.pub", ssh.MarshalAuthorizedKey(cert), 0o600)
	if _, err := host(t, newPool(t, sshrun.Options{}), target).Output(t.Context(), "true"); err != nil {
		t.Errorf("with a certificate: %v", err)
	}
}

func TestAgent(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{})
	pem, err := os.ReadFile(s.Identity)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ssh.ParseRawPrivateKey(pem)
	if err != nil {
		t.Fatal(err)
	}
	ring := agent.NewKeyring()
	if err := ring.Add(agent.AddedKey{PrivateKey: key}); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(shortDir(t), "agent"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go agent.ServeAgent(ring, c)
		}
	}()
	t.Setenv("SSH_AUTH_SOCK", l.Addr().String())
	target := s.Target()
	target.IdentityFile = ""
	if _, err := host(t, newPool(t, sshrun.Options{}), target).Output(t.Context(), "true"); err != nil {
		t.Error(err)
	}
}

// TestKilled has this program killed while it holds connections and looks that
// nothing of it stays, at the latest when the next one starts.
func TestKilled(t *testing.T) {
	if dir := os.Getenv("SSHRUN_TEST_HOLD"); dir != "" {
		hold(dir)
	}
	s := sshtest.Start(t, sshtest.Options{})
	dir := shortDir(t)
	target := s.Target()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestKilled$")
	cmd.Env = append(os.Environ(), "SSHRUN_TEST_HOLD="+dir,
		"SSHRUN_TEST_TARGET="+strings.Join([]string{target.Addr, strconv.Itoa(target.Port), target.IdentityFile, target.HostKeys[0]}, "|"))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 2)
	out.Read(buf)
	if string(buf) != "ok" {
		t.Fatalf("the other process said %q", buf)
	}
	if n := len(mastersOf(t, dir)); n == 0 {
		t.Error("no master is there to begin with")
	}
	cmd.Process.Kill()
	cmd.Wait()
	p, err := sshrun.New(sshrun.Options{Dir: dir, Config: "none"})
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return len(mastersOf(t, dir)) == 0 })
	left, _ := filepath.Glob(filepath.Join(dir, "*", "c[0-9]*"))
	if len(left) > 0 {
		t.Errorf("sockets left: %q", left)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left after Close: %v", left)
	}
}

func hold(dir string) {
	f := strings.Split(os.Getenv("SSHRUN_TEST_TARGET"), "|")
	port, _ := strconv.Atoi(f[1])
	p, err := sshrun.New(sshrun.Options{Dir: dir, Config: "none"})
	if err == nil {
		var h *sshrun.Host
		if h, err = p.Host(sshrun.Target{Addr: f[0], Port: port, IdentityFile: f[2], HostKeys: f[3:]}); err == nil {
			_, err = h.Output(context.Background(), "true")
		}
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Print("ok")
	select {}
}

// mastersOf returns the processes that have a name below dir in their arguments.
func mastersOf(t testing.TB, dir string) (pids []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil && bytes.HasPrefix(data, []byte("/usr/bin/ssh\x00")) && bytes.Contains(data, []byte(dir)) {
			pids = append(pids, strings.Split(f, "/")[2])
		}
	}
	return pids
}

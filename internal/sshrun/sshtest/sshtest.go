// Package sshtest starts real SSH servers, on loopback ports, for tests: each in a
// directory of the test's, with keys of its own, ended by its process when the test
// ends. Between it and the client a [Relay] can be put that is slow, falls silent or
// cuts.
package sshtest

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// Options change a server from one that admits the current user by one key.
type Options struct {
	// Config is put before the rest of sshd_config.
	Config string
	// Tools, if not empty, is a directory that the server and its commands see in
	// place of /usr/bin. It needs root and Linux.
	Tools string
	// Env is added to the environment of commands, name=value.
	Env []string
	// Authorized replaces the authorized keys.
	Authorized string
	// Silent leaves the log out of what a failing test shows.
	Silent bool
}

// A Server is a running sshd.
type Server struct {
	Dir        string // also the HOME of its commands, so that no user's rc files count
	User       string
	Port       int
	HostKey    string // as an authorized_keys line
	HostSigner ssh.Signer
	Identity   string // the private key's file
	Signer     ssh.Signer
	PID        int

	t    T
	cmd  *exec.Cmd
	log  *lines
	once sync.Once
}

// Start starts a server, or skips the test where there is no sshd.
func Start(t T, o Options) *Server {
	t.Helper()
	sshd, err := exec.LookPath("sshd")
	if err != nil {
		if sshd, err = exec.LookPath("/usr/sbin/sshd"); err != nil {
			t.Skip("there is no sshd on this machine (scripts/setup.sh installs it)")
		}
	}
	if o.Tools != "" && os.Getuid() != 0 {
		t.Skip("other tools for a server need root")
	}
	if os.Getuid() == 0 {
		// sshd as root needs this empty directory.
		if err := os.MkdirAll("/run/sshd", 0o755); err != nil {
			t.Fatal(err)
		}
	}
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{Dir: t.TempDir(), User: me.Username, t: t, log: &lines{}}
	var hostFile string
	hostFile, s.HostKey, s.HostSigner = NewKey(t, s.Dir, "host")
	var mine string
	s.Identity, mine, s.Signer = NewKey(t, s.Dir, "id")
	if o.Authorized == "" {
		o.Authorized = mine
	}
	write(t, filepath.Join(s.Dir, "authorized"), o.Authorized+"\n")
	for try := 0; ; try++ {
		s.Port = freePort(t)
		write(t, filepath.Join(s.Dir, "sshd_config"), fmt.Sprintf(`%s
ListenAddress 127.0.0.1
Port %d
HostKey %s
AuthorizedKeysFile %s
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
LogLevel VERBOSE
SetEnv %s
`, o.Config, s.Port, hostFile, filepath.Join(s.Dir, "authorized"), strings.Join(append([]string{"HOME=" + s.Dir}, o.Env...), " ")))
		args := []string{sshd, "-D", "-e", "-f", filepath.Join(s.Dir, "sshd_config")}
		if o.Tools != "" {
			args = append([]string{"unshare", "-m", "--propagation", "private", "sh", "-c", `mount --bind "$0" /usr/bin && exec "$@"`, o.Tools}, args...)
		}
		s.cmd = exec.Command(args[0], args[1:]...)
		s.cmd.Stderr = s.log
		s.cmd.Env = append(os.Environ(), "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
		s.cmd.WaitDelay = time.Second
		s.cmd.SysProcAttr = attr()
		if err := s.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		s.PID = s.cmd.Process.Pid
		if s.listening() {
			break
		}
		s.cmd.Process.Kill()
		s.cmd.Wait()
		if try == 3 {
			t.Fatalf("sshd does not listen:\n%s", s.log)
		}
	}
	t.Cleanup(func() {
		s.Stop()
		if t.Failed() && !o.Silent {
			t.Logf("sshd said:\n%s", s.log)
		}
	})
	return s
}

func (s *Server) listening() bool {
	for range 500 {
		if strings.Contains(s.log.String(), fmt.Sprintf("listening on 127.0.0.1 port %d", s.Port)) {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

// Stop ends the server and every connection of it.
func (s *Server) Stop() {
	s.once.Do(func() {
		for _, pid := range s.Children() {
			kill(pid)
		}
		s.cmd.Process.Kill()
		s.cmd.Wait()
	})
}

// Cut ends every connection of the server at once, as the kernel would on a crash of
// the processes that serve them. Commands of the connections live on.
func (s *Server) Cut() {
	for _, pid := range s.Children() {
		kill(pid)
	}
}

// Children returns the processes of the server that serve connections.
func (s *Server) Children() (pids []int) {
	return descendants(s.PID, "sshd")
}

// Log returns what the server said so far.
func (s *Server) Log() string { return s.log.String() }

// Target is the target for the server, with its key pinned.
func (s *Server) Target() sshrun.Target {
	return sshrun.Target{Name: "test-host", Addr: s.User + "@127.0.0.1", Port: s.Port, IdentityFile: s.Identity, HostKeys: []string{s.HostKey}}
}

// NewKey makes an Ed25519 key and returns its file, the public half as an
// authorized_keys line (which is in file.pub too), and the signer.
func NewKey(t T, dir, name string) (file, line string, signer ssh.Signer) {
	t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(private, "")
	if err != nil {
		t.Fatal(err)
	}
	if signer, err = ssh.NewSignerFromKey(private); err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(dir, name)
	line = strings.TrimSpace(string(ssh.MarshalAuthorizedKey(signer.PublicKey())))
	write(t, file, string(pem.EncodeToMemory(block)))
	write(t, file+".pub", line+"\n")
	return file, line, signer
}

func write(t T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func freePort(t T) int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// T is the part of a test that is used here; a testing.TB is one.
type T interface {
	Helper()
	TempDir() string
	Cleanup(func())
	Failed() bool
	Skip(...any)
	Fatal(...any)
	Fatalf(string, ...any)
	Logf(string, ...any)
}

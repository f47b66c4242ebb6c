//go:build unix

package sshrun

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/filelock"
)

// openSSH is the driver that keeps ssh master processes.
type openSSH struct {
	program string
	opts    Options
	log     *slog.Logger
	dir     string         // of this pool alone
	lock    *filelock.Lock // held while the pool lives; who gets it finds an abandoned directory

	// unixStdio is whether ssh forwards unix sockets to descriptors: since 9.4.
	unixStdio bool
	modern    bool // whether a list of ciphers can be put before ssh's own: since 8.2

	mu   sync.Mutex
	last int
}

// maxSocket is how long the name of a control socket may be: ssh binds it under a
// name that is 17 bytes longer first, and 104 is the least of what systems admit.
const maxSocket = 104 - 17 - 1 - len("u1234")

func newOpenSSH(program string, opts Options, log *slog.Logger) (driver, error) {
	base := opts.Dir
	if base == "" {
		base = filepath.Join("/tmp", "sandboxer-ssh-"+strconv.Itoa(os.Getuid()))
		if run := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(run) {
			base = filepath.Join(run, "sandboxer-ssh")
		}
	}
	if err := ownDir(base); err != nil {
		return nil, err
	}
	d := &openSSH{program: program, opts: opts, log: log}
	said, err := exec.Command(program, "-V").CombinedOutput()
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the ssh program %s does not tell its version", program)
	}
	var major, minor int
	fmt.Sscanf(string(said), "OpenSSH_%d.%d", &major, &minor)
	d.unixStdio = major > 9 || major == 9 && minor >= 4
	d.modern = major > 8 || major == 8 && minor >= 2
	if err := d.claim(base); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "no directory for control sockets of ssh could be made in %s", base)
	}
	if longest := len(d.socket(99999)); longest > maxSocket {
		os.RemoveAll(d.dir)
		return nil, invalid("directory %s is too long a name for control sockets of ssh: %d bytes where %d are possible", base, longest, maxSocket)
	}
	if err := os.WriteFile(d.config(), d.settings(), 0o600); err != nil {
		d.close()
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the configuration for ssh could not be written to %s", d.dir)
	}
	d.sweep(base)
	return d, nil
}

// ownDir makes sure of a directory that nobody else can put anything into.
func ownDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "directory %s for control sockets of ssh cannot be made", dir)
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "directory %s for control sockets of ssh cannot be used", dir)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !fi.IsDir() || !ok || int(st.Uid) != os.Getuid() || fi.Mode().Perm()&0o077 != 0 {
		return sandboxer.E(sandboxer.Denied, nil, "%s must be a directory of ours alone (mode 0700), for control sockets of ssh", dir)
	}
	return nil
}

// claim makes the pool's directory and locks it. The lock is taken on a file beside
// the final name, so that no sweep sees the directory without it.
func (d *openSSH) claim(base string) error {
	for {
		name := token()[:6]
		lock, err := os.OpenFile(filepath.Join(base, name+".lock"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			return err
		}
		held, err := filelock.TryFile(lock, filelock.Exclusive)
		if err != nil {
			lock.Close()
			if errors.Is(err, filelock.ErrHeld) || errors.Is(err, filelock.ErrReplaced) {
				continue // a sweep was quicker, and is about to remove it or has
			}
			return err
		}
		d.dir, d.lock = filepath.Join(base, name), held
		return os.Mkdir(d.dir, 0o700)
	}
}

// sweep ends what pools left whose process has died: masters, sockets, directories.
func (d *openSSH) sweep(base string) {
	locks, _ := filepath.Glob(filepath.Join(base, "*.lock"))
	for _, name := range locks {
		if name == d.lock.File().Name() {
			continue
		}
		file, err := os.OpenFile(name, os.O_RDWR, 0) // one that is gone is not made again
		if err != nil {
			continue
		}
		lock, err := filelock.TryFile(file, filelock.Exclusive)
		if err != nil {
			file.Close()
			continue
		}
		dir := strings.TrimSuffix(name, ".lock")
		files, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // not Glob, which finds nothing where it cannot look
			lock.Release()
			continue
		}
		for _, f := range files {
			s := filepath.Join(dir, f.Name())
			if ok, _ := filepath.Match("c[0-9]*", f.Name()); !ok {
				continue
			}
			if pid := masterPID(s); pid > 0 {
				d.log.Info("ending an ssh connection of a process that died", "pid", pid)
				endMaster(s, pid)
			}
		}
		os.RemoveAll(dir)
		lock.Remove()
	}
}

// endMaster ends the process that answered on socket. Only what answers there is
// ever signalled: a number found in a file might be somebody else's by now.
func endMaster(socket string, pid int) {
	if m, err := dialMux(socket); err == nil {
		m.ask(muxTerminate, muxOK)
		m.Close()
	}
	for range 50 {
		if masterPID(socket) != pid {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	syscall.Kill(pid, syscall.SIGKILL)
}

func (d *openSSH) socket(n int) string { return filepath.Join(d.dir, "c"+strconv.Itoa(n)) }
func (d *openSSH) config() string      { return filepath.Join(d.dir, "config") }

// settings is a configuration that has ours before the user's: the first value of an
// option counts. It is a file, and not options on the command line, so that the ssh
// which a ProxyJump starts reads it too.
func (d *openSSH) settings() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `Host *
  BatchMode yes
  StrictHostKeyChecking yes
  UpdateHostKeys no
  ForwardAgent no
  ForwardX11 no
  ClearAllForwardings yes
  PermitLocalCommand no
  ControlMaster no
  ControlPath none
  ControlPersist no
  RequestTTY no
  ForkAfterAuthentication no
  EscapeChar none
  LogLevel INFO
  ConnectTimeout %d
  ServerAliveInterval %d
  ServerAliveCountMax 3
`, seconds(d.opts.ConnectTimeout), seconds(d.opts.KeepAlive))
	if d.opts.KnownHosts != "" {
		fmt.Fprintf(&b, "  UserKnownHostsFile %q\n  GlobalKnownHostsFile none\n", d.opts.KnownHosts)
	}
	for _, f := range d.included() {
		fmt.Fprintf(&b, "Match all\nInclude %q\n", f)
	}
	if d.modern {
		// Last, so that it counts only where the user has no wish of their own: with a
		// processor's help it is much the quicker one, and ssh prefers another.
		b.WriteString("Match all\n  Ciphers ^aes128-gcm@openssh.com,aes256-gcm@openssh.com\n")
	}
	return b.Bytes()
}

func (d *openSSH) included() []string { return configFiles(d.opts.Config) }

func seconds(t time.Duration) int { return int(max(1, (t+time.Second-1)/time.Second)) }

func (d *openSSH) args(t Target, keysFile string) []string {
	args := []string{"-F", d.config()}
	if t.Port != 0 {
		args = append(args, "-p", strconv.Itoa(t.Port))
	}
	if t.Silence > 0 {
		args = append(args, "-o", "ServerAliveCountMax="+strconv.Itoa(max(1, seconds(t.Silence)/seconds(d.opts.KeepAlive))))
	}
	if t.IdentityFile != "" {
		args = append(args, "-i", t.IdentityFile, "-o", "IdentitiesOnly=yes")
	}
	if t.ProxyJump != "" {
		args = append(args, "-J", t.ProxyJump)
	}
	if keysFile != "" {
		args = append(args, "-o", "HostKeyAlias=pinned", "-o", "UserKnownHostsFile="+keysFile, "-o", "GlobalKnownHostsFile=none")
		if len(t.HostKeys) > 0 {
			args = append(args, "-o", "CheckHostIP=no", "-o", "HostKeyAlgorithms="+strings.Join(keyAlgorithms(t.HostKeys), ","))
		}
	}
	return args
}

// A master is an ssh process that holds one connection.
type master struct {
	program   string
	socket    string
	unixStdio bool
	pid       int
	gone      chan struct{}
	said      *tailBuffer
	end       sync.Once

	mu       sync.Mutex
	forwards map[string]string // sockets there to sockets here, both by name
}

func (d *openSSH) connect(ctx context.Context, t Target) (conn, error) {
	d.mu.Lock()
	d.last++
	socket := d.socket(d.last)
	d.mu.Unlock()
	pins := ""
	if len(t.HostKeys) > 0 {
		pins = filepath.Join(d.dir, "k"+strings.TrimPrefix(filepath.Base(socket), "c"))
		var b bytes.Buffer
		for _, k := range t.HostKeys {
			fmt.Fprintf(&b, "pinned %s\n", k)
		}
		if err := os.WriteFile(pins, b.Bytes(), 0o600); err != nil {
			return nil, err
		}
	}
	args := append(d.args(t, pins), "-M", "-S", socket, "-N", "-T", "--", t.Addr)
	m := &master{program: d.program, socket: socket, unixStdio: d.unixStdio, gone: make(chan struct{}), said: &tailBuffer{}}
	started := make(chan error)
	go m.run(exec.Command(d.program, args...), started, pins)
	if err := <-started; err != nil {
		return nil, err
	}
	tick := time.NewTicker(4 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-m.gone:
			said := m.said.String()
			what := classify(said)
			if what == errDropped {
				return nil, fmt.Errorf("%w: %s", errDropped, tidy(said))
			}
			detail := tidy(said)
			if strings.Contains(said, "HAS CHANGED") {
				detail = "HOST IDENTIFICATION HAS CHANGED " + detail
			}
			return nil, t.fault(what, detail)
		case <-ctx.Done():
			m.close()
			return nil, fmt.Errorf("%w %s", ctx.Err(), tidy(m.said.String()))
		case <-tick.C:
		}
		if _, err := os.Lstat(socket); err != nil {
			continue
		}
		if masterPID(socket) == m.pid {
			return m, nil
		}
	}
}

// run starts the process and waits for it. On Linux it dies with the thread that
// started it, and so with us, however we end; therefore the thread stays.
func (c *master) run(cmd *exec.Cmd, started chan<- error, pins string) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.Stderr = c.said
	cmd.SysProcAttr = masterAttr()
	// Nobody is there to be asked, in a window neither.
	cmd.Env = append(os.Environ(), "SSH_ASKPASS_REQUIRE=never", "LC_ALL=C")
	cmd.WaitDelay = time.Second
	err := cmd.Start()
	if err == nil {
		c.pid = cmd.Process.Pid
	}
	started <- err
	if err != nil {
		return
	}
	cmd.Wait()
	os.Remove(c.socket)
	for _, f := range c.forwards {
		os.Remove(f)
	}
	if pins != "" {
		os.Remove(pins)
	}
	close(c.gone)
}

func (c *master) done() <-chan struct{} { return c.gone }
func (c *master) reason() string        { return tidy(c.said.String()) }

func (c *master) close() {
	c.end.Do(func() {
		select {
		case <-c.gone:
			return
		default:
		}
		syscall.Kill(c.pid, syscall.SIGTERM)
		select {
		case <-c.gone:
		case <-time.After(2 * time.Second):
			syscall.Kill(c.pid, syscall.SIGKILL)
		}
	})
	<-c.gone
}

func (d *openSSH) scan(ctx context.Context, t Target) ([]string, error) {
	f, err := os.CreateTemp(d.dir, "scan")
	if err != nil {
		return nil, err
	}
	f.Close()
	defer os.Remove(f.Name())
	args := append(d.args(t, f.Name()), "-o", "StrictHostKeyChecking=accept-new", "-o", "HashKnownHosts=no",
		"-o", "PreferredAuthentications=none", "-T", "--", t.Addr, "true")
	cmd := exec.CommandContext(ctx, d.program, args...)
	said := &tailBuffer{}
	cmd.Stderr, cmd.WaitDelay = said, time.Second
	cmd.Env = append(os.Environ(), "SSH_ASKPASS_REQUIRE=never", "LC_ALL=C")
	cmd.Run()
	data, err := os.ReadFile(f.Name())
	if err != nil {
		return nil, err
	}
	var keys []string
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) >= 3 && f[0] == "pinned" {
			keys = append(keys, f[1]+" "+f[2])
		}
	}
	if len(keys) == 0 {
		what := classify(said.String())
		if what == errDropped {
			what = ErrUnreachable
		}
		return nil, t.fault(what, tidy(cmp.Or(said.String(), "it showed no key")))
	}
	return keys, nil
}

func (d *openSSH) close() error {
	err := os.RemoveAll(d.dir)
	// The lock's name goes while it is held: a sweep that opens it later finds none.
	err = errors.Join(err, os.Remove(d.lock.File().Name()))
	d.lock.Release()
	return err
}

// sshCommand is how another program uses the connection c by way of ssh.
func sshCommand(c conn) (string, bool) {
	m, ok := c.(*master)
	if !ok {
		return "", false
	}
	return Quote(m.program, "-F", "none", "-S", m.socket, "-o", "ControlMaster=no", "-o", "BatchMode=yes", "-o", "ProxyCommand=false"), true
}

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
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/subprocess"
)

// openSSH makes connections with the ssh program, and keeps its master processes.
type openSSH struct {
	program string
	opts    Options
	log     *slog.Logger
	dir     string         // of this pool alone
	lock    *filelock.Lock // held while the pool lives; a process that gets it finds an abandoned directory

	// unixStdio is whether ssh forwards unix sockets to descriptors: since 9.4.
	unixStdio bool
	modern    bool // whether a list of ciphers can be put before ssh's own: since 8.2

	mu   sync.Mutex
	last int
}

// maxSocket is how long the name of a control socket may be: ssh binds it under a
// name that is 17 bytes longer first, and 104 is the smallest limit of any system.
const maxSocket = 104 - 17 - 1 - len("u1234")

func newOpenSSH(opts Options, log *slog.Logger) (*openSSH, error) {
	program, err := exec.LookPath("ssh")
	if err != nil {
		return nil, sandboxer.E(sandboxer.NotFound, err, "there is no ssh program on this machine, and hosts over SSH need one").
			WithHint("install it: apt-get install openssh-client")
	}
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
	said, err := subprocess.Command(context.Background(), subprocess.SSH, program, "-V").CombinedOutput()
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the ssh program %s does not print its version", program)
	}
	var major, minor int
	fmt.Sscanf(string(said), "OpenSSH_%d.%d", &major, &minor)
	d.unixStdio = major > 9 || major == 9 && minor >= 4
	d.modern = major > 8 || major == 8 && minor >= 2
	if err := d.claim(base); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "cannot make a directory for control sockets of ssh in %s", base)
	}
	if longest := len(d.socket(99999)); longest > maxSocket {
		os.RemoveAll(d.dir)
		return nil, invalid("the path %s is too long for control sockets of ssh: %d bytes, at most %d are possible", base, longest, maxSocket)
	}
	if err := os.WriteFile(d.config(), d.settings(), 0o600); err != nil {
		d.close()
		return nil, sandboxer.E(sandboxer.Unavailable, err, "cannot write the configuration for ssh to %s", d.dir)
	}
	d.sweep(base)
	return d, nil
}

// ownDir ensures that a directory exists into which no other user can put anything.
func ownDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "cannot make the directory %s for control sockets of ssh", dir)
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "cannot use the directory %s for control sockets of ssh", dir)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !fi.IsDir() || !ok || int(st.Uid) != os.Getuid() || fi.Mode().Perm()&0o077 != 0 {
		return sandboxer.E(sandboxer.Denied, nil, "%s, the directory for control sockets of ssh, must belong to this account alone (mode 0700)", dir)
	}
	return nil
}

// claim makes the pool's directory and locks it. The lock is taken on a file next to
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

// sweep ends what pools of dead processes left: masters, sockets, directories.
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

// endMaster ends the process that answered on socket. Only a process that answers there is
// ever signalled: a number found in a file might belong to another process by now.
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

// settings is a configuration with our options before the user's: the first value of an
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
	for _, f := range configFiles(d.opts.Config) {
		fmt.Fprintf(&b, "Match all\nInclude %q\n", f)
	}
	if d.modern {
		// Last, so that it counts only where the user sets nothing else: with a
		// processor's help it is much faster, and ssh prefers another.
		b.WriteString("Match all\n  Ciphers ^aes128-gcm@openssh.com,aes256-gcm@openssh.com\n")
	}
	return b.Bytes()
}

// configFiles are the files of an ssh configuration that exist, in their order.
func configFiles(config string) []string {
	files := []string{config}
	switch config {
	case "none":
		return nil
	case "":
		files = []string{"/etc/ssh/ssh_config"}
		if home, err := os.UserHomeDir(); err == nil {
			files = []string{filepath.Join(home, ".ssh", "config"), files[0]}
		}
	}
	return slices.DeleteFunc(files, func(f string) bool { _, err := os.Stat(f); return config == "" && err != nil })
}

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
	socket    string
	unixStdio bool
	pid       int
	gone      chan struct{}
	said      *capture.Last
	end       sync.Once

	mu       sync.Mutex
	forwards map[string]string // sockets there to sockets here, both by name
}

// connect returns a connection that is logged in. Its errors are faults of t, or wrap
// errDropped.
func (d *openSSH) connect(ctx context.Context, t Target) (*master, error) {
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
	args := d.args(t, pins)
	if end, ok := ctx.Deadline(); ok { // which may be later than ssh would wait for
		args = append(args, "-o", "ConnectTimeout="+strconv.Itoa(seconds(time.Until(end))))
	}
	args = append(args, "-M", "-S", socket, "-N", "-T", "--", t.Addr)
	m := &master{socket: socket, unixStdio: d.unixStdio, gone: make(chan struct{}), said: &capture.Last{Max: 4 << 10}}
	started := make(chan error)
	go m.run(subprocess.Command(context.WithoutCancel(ctx), subprocess.SSH, d.program, args...), started, pins)
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
func (c *master) run(cmd *subprocess.Cmd, started chan<- error, pins string) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.Stderr = c.said
	cmd.SysProcAttr = masterAttr()
	// There is no user to ask, not even in a window.
	cmd.Env = append(cmd.Env, "SSH_ASKPASS_REQUIRE=never", "LC_ALL=C")
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

// done is closed when the connection is gone.
func (c *master) done() <-chan struct{} { return c.gone }

// reason is why the connection is gone, if that is known.
func (c *master) reason() string { return tidy(c.said.String()) }

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

// scan returns the keys that the host shows, as authorized_keys lines.
func (d *openSSH) scan(ctx context.Context, t Target) ([]string, error) {
	f, err := os.CreateTemp(d.dir, "scan")
	if err != nil {
		return nil, err
	}
	f.Close()
	defer os.Remove(f.Name())
	args := append(d.args(t, f.Name()), "-o", "StrictHostKeyChecking=accept-new", "-o", "HashKnownHosts=no",
		"-o", "PreferredAuthentications=none", "-T", "--", t.Addr, "true")
	cmd := subprocess.Command(ctx, subprocess.SSH, d.program, args...)
	said := &capture.Last{Max: 4 << 10}
	cmd.Stderr, cmd.WaitDelay = said, time.Second
	cmd.Env = append(cmd.Env, "SSH_ASKPASS_REQUIRE=never", "LC_ALL=C")
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
	// The lock file is removed while the lock is held: a sweep that opens it later finds none.
	err = errors.Join(err, os.Remove(d.lock.File().Name()))
	d.lock.Release()
	return err
}

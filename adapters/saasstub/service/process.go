package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/subprocess"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// role is the name by which this program is started to be the service.
const role = "sandboxer-saas-stub"

// IsChild reports whether this process was started to be the service. Main does not return then.
func IsChild() bool { return len(os.Args) > 0 && filepath.Base(os.Args[0]) == role }

// idleTime is how long the service goes on without a sandbox.
const idleTime = time.Minute

// Main is the program of the service. Its argument is its directory.
func Main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "want one argument, a directory")
		os.Exit(2)
	}
	if err := run(context.Background(), os.Args[1], idleTime); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// run serves dir until there has been no sandbox for idle, dir is removed, or ctx is done. If another process serves
// dir, it returns at once.
func run(ctx context.Context, dir string, idle time.Duration) error {
	lockName := filepath.Join(dir, lockFile)
	lock, err := filelock.Try(lockName, filelock.Exclusive)
	if errors.Is(err, filelock.ErrHeld) {
		return nil
	} else if err != nil {
		return err
	}
	defer lock.Release()
	if err := lock.File().Truncate(0); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(lock.File(), os.Getpid()); err != nil { // for people
		return err
	}
	held, err := lock.File().Stat()
	if err != nil {
		return err
	}
	s, err := newServer(dir, time.Now)
	if err != nil {
		return err
	}
	socket, done, err := socketIn(dir)
	if err != nil {
		return err
	}
	defer done()
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	web := &http.Server{Handler: s.handler(), ReadTimeout: 10 * time.Second, MaxHeaderBytes: 16 << 10}
	var served sync.WaitGroup
	served.Go(func() { err = web.Serve(l) })
	for tick := time.NewTicker(max(idle/12, time.Millisecond)); ; {
		select {
		case <-tick.C:
			there, err := os.Stat(lockName)
			if s.idleFor() < idle && err == nil && os.SameFile(there, held) {
				continue
			}
		case <-ctx.Done():
		}
		tick.Stop()
		break
	}
	ending, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if web.Shutdown(ending) != nil {
		_ = web.Close()
	}
	served.Wait()
	if errors.Is(err, http.ErrServerClosed) {
		err = nil
	}
	return err
}

// socketIn returns a path of the service's socket that is short enough for the kernel, until done is called.
func socketIn(dir string) (path string, done func(), err error) {
	path = filepath.Join(dir, socketFile)
	if len(path) < 104 || runtime.GOOS != "linux" {
		return path, func() {}, nil
	}
	f, err := os.Open(dir)
	if err != nil {
		return "", nil, err
	}
	return filepath.Join("/proc/self/fd", strconv.Itoa(int(f.Fd())), socketFile), func() { f.Close() }, nil
}

// A Launcher reaches the service of a directory, and starts it when it does not run.
type Launcher struct {
	Dir string // absolute; the service's own
}

// Configure makes the directory, and writes the settings of the service.
func (l Launcher) Configure(set Settings) error {
	if err := os.MkdirAll(l.Dir, 0o700); err != nil {
		return err
	}
	data, err := json.Marshal(set)
	if err != nil {
		return err
	}
	return wholefile.Replace(filepath.Join(l.Dir, settingsFile), data)
}

func (l Launcher) connect(ctx context.Context) (net.Conn, error) {
	socket, done, err := socketIn(l.Dir)
	if err != nil {
		return nil, err
	}
	defer done()
	return new(net.Dialer).DialContext(ctx, "unix", socket)
}

// absent reports whether err, of connect, says that no service runs.
func absent(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}

// Running reports whether the service runs.
func (l Launcher) Running(ctx context.Context) bool {
	c, err := l.connect(ctx)
	if err == nil {
		c.Close()
	}
	return err == nil || !absent(err)
}

// Empty reports whether the service does not run and would have nothing: no sandbox, and no snapshot. It need not be
// started for a question then.
func (l Launcher) Empty(ctx context.Context) bool {
	if l.Running(ctx) {
		return false
	}
	s, err := readState(l.Dir)
	return err == nil && s.empty()
}

// startTime is how long the service may take to start.
const startTime = 10 * time.Second

// Dial connects to the service, and starts it before if it does not run. The network and address are ignored.
func (l Launcher) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	c, err := l.connect(ctx)
	if err == nil || !absent(err) {
		return c, err
	}
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	lock, err := filelock.Take(ctx, filepath.Join(l.Dir, startFile), filelock.Exclusive)
	if err != nil {
		return nil, err
	}
	defer lock.Release()
	if c, err := l.connect(ctx); err == nil || !absent(err) {
		return c, err // another process started it
	}
	ended, err := l.start()
	if err != nil {
		return nil, err
	}
	for tick := time.NewTicker(5 * time.Millisecond); ; {
		c, err := l.connect(ctx)
		if err == nil || !absent(err) {
			tick.Stop()
			return c, err
		}
		select {
		case <-tick.C:
			continue
		case <-ended: // one that found another at work ends, too, and the other may just be ending
			err = fmt.Errorf("the service ended at its start: %s", l.log())
		case <-ctx.Done():
			err = fmt.Errorf("the service does not start: %w", ctx.Err())
		}
		tick.Stop()
		return nil, err
	}
}

// start starts the service. It outlives this process; ended is closed when it ends before.
func (l Launcher) start() (ended <-chan struct{}, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(l.Dir, logFile), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := subprocess.Command(context.Background(), subprocess.Tool, self, l.Dir)
	cmd.Args[0] = role
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	over := make(chan struct{})
	go func() {
		_ = cmd.Wait() // its log says how it ended
		close(over)
	}()
	return over, nil
}

// log is the end of what the service wrote.
func (l Launcher) log() string {
	f, err := os.Open(filepath.Join(l.Dir, logFile))
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	end := &capture.Last{Max: 1000}
	_, _ = io.Copy(end, f)
	return capture.Text(end.String(), 1000)
}

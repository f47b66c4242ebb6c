//go:build unix

package filelock

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Of this program started again: what it does, and with which file.
const (
	envRole = "FILELOCK_ROLE"
	envFile = "FILELOCK_FILE"
)

func TestMain(m *testing.M) {
	switch os.Getenv(envRole) {
	case "":
		os.Exit(m.Run())
	case "hold":
		hold(os.Getenv(envFile))
	case "count":
		count(os.Getenv(envFile))
	}
}

func fatal(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// hold takes the lock, says so, and keeps it until it is signalled to release it.
func hold(file string) {
	l, err := Take(context.Background(), file, Exclusive)
	fatal(err)
	fmt.Println("held")
	_, _ = io.Copy(io.Discard, os.Stdin)
	l.Release()
}

// rounds is how often each of count's processes counts.
const rounds = 200

// count raises the number in file+".n" under a lock that is removed each time.
func count(file string) {
	for range rounds {
		l, err := Take(context.Background(), file, Exclusive)
		fatal(err)
		data, err := os.ReadFile(file + ".n")
		fatal(err)
		n, err := strconv.Atoi(string(data))
		fatal(err)
		fatal(os.WriteFile(file+".n", []byte(strconv.Itoa(n+1)), 0o600))
		l.Remove()
	}
}

func again(t *testing.T, role, file string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), envRole+"="+role, envFile+"="+file)
	return cmd
}

// holder starts a process that holds the lock.
func holder(t *testing.T, file string) (cmd *exec.Cmd, release io.Closer) {
	t.Helper()
	cmd = again(t, "hold", file)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	if said, err := bufio.NewReader(out).ReadString('\n'); said != "held\n" {
		t.Fatalf("the holder said %q, %v", said, err)
	}
	return cmd, in
}

// patience bounds what does not come when something is wrong.
const patience = time.Minute

func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// TestHolderDies: what a process held that was killed is free.
func TestHolderDies(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	cmd, _ := holder(t, file)
	for _, k := range []Kind{Exclusive, Shared} {
		if _, err := Try(file, k); !errors.Is(err, ErrHeld) {
			t.Fatalf("kind %d was taken from a living holder: %v", k, err)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	l, err := Take(soon(t), file, Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	if l.File().Name() != file {
		t.Errorf("the file locked is %s", l.File().Name())
	}
	l.Release()
}

// TestReleased: who waits gets it when another process gives it up.
func TestReleased(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	_, release := holder(t, file)
	got := make(chan error, 1)
	ctx := soon(t)
	go func() {
		l, err := Take(ctx, file, Shared)
		if err == nil {
			l.Release()
		}
		got <- err
	}()
	release.Close()
	if err := <-got; err != nil {
		t.Fatal(err)
	}
}

// TestCancelled: who waits and is called back leaves at once, and has nothing.
func TestCancelled(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	_, release := holder(t, file)
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan error, 1)
	tried := make(chan struct{}, 1)
	go func() {
		got <- Wait(ctx, func() error {
			_, err := Try(file, Exclusive)
			select {
			case tried <- struct{}{}:
			default:
			}
			return err
		})
	}()
	<-tried
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that was cancelled: %v", err)
	}
	release.Close()
	l, err := Take(soon(t), file, Exclusive)
	if err != nil {
		t.Fatalf("whoever was called back has it: %v", err)
	}
	l.Release()
	ended, stop := context.WithCancel(t.Context())
	stop()
	if l, err = Take(ended, file, Exclusive); err != nil { // what need not be waited for is there
		t.Fatal(err)
	}
	if _, err := Take(ended, file, Exclusive); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
	l.Release()
}

// TestRemoved has processes and goroutines count under a lock whose file each of them removes.
// Without the check of the file at the name, two would hold it at a time.
func TestRemoved(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	if err := os.WriteFile(file+".n", []byte("0"), 0o600); err != nil {
		t.Fatal(err)
	}
	const processes = 4
	var wg sync.WaitGroup
	for range processes {
		cmd := again(t, "count", file)
		wg.Go(func() {
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	wg.Wait()
	if data, err := os.ReadFile(file + ".n"); err != nil || string(data) != strconv.Itoa(processes*rounds) {
		t.Errorf("they counted to %s, %v; want %d", data, err, processes*rounds)
	}
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file of a lock that was removed: %v", err)
	}
}

// TestTryFile: a file that is not at its name any more is not a lock, whatever is there now.
func TestTryFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dir")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	l, err := TryFile(d, Exclusive)
	if err != nil {
		t.Fatalf("a directory: %v", err)
	}
	l.Remove()
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory is there: %v", err)
	}
	file := dir
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, replace := range []func() error{
		func() error { return os.Remove(file) },
		func() error { return os.WriteFile(file, nil, 0o600) },
	} {
		if err := replace(); err != nil {
			t.Fatal(err)
		}
		if _, err := TryFile(f, Exclusive); !errors.Is(err, ErrReplaced) {
			t.Errorf("a file that is gone: %v", err)
		}
	}
	other, err := Try(file, Exclusive) // the attempts have left nothing locked
	if err != nil {
		t.Fatal(err)
	}
	defer other.Release()
	if _, err := Try(filepath.Join(file, "below"), Exclusive); err == nil || errors.Is(err, ErrHeld) {
		t.Errorf("below a file: %v", err)
	}
}

// TestShared: several share it, and keep out who wants it alone.
func TestShared(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	var held []*Lock
	for range 3 {
		l, err := Try(file, Shared)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, l)
	}
	for _, l := range held {
		if _, err := Try(file, Exclusive); !errors.Is(err, ErrHeld) {
			t.Errorf("while it is shared: %v", err)
		}
		l.Release()
	}
	l, err := Try(file, Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
}

// TestReleaseFromChild: a lock is free when it is given up, though another description of
// the same open file lives on, as in a child between fork and exec.
func TestReleaseFromChild(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	l, err := Try(file, Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Dup(int(l.File().Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	l.Release()
	if l, err = Try(file, Exclusive); err != nil {
		t.Fatal(err)
	}
	l.Release()
}

// TestDescriptors: a waiting caller has no file open between two looks, and one that cannot open another
// gets an error.
func TestDescriptors(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	holder(t, file)
	open := func() int {
		entries, err := os.ReadDir("/dev/fd")
		if err != nil {
			t.Skip(err)
		}
		n := 0
		for _, d := range entries {
			if at, err := os.Readlink("/dev/fd/" + d.Name()); err == nil && strings.HasSuffix(at, "/lock") {
				n++
			}
		}
		return n
	}
	ctx, cancel := context.WithCancel(t.Context())
	looks := 0
	_ = Wait(ctx, func() error {
		if looks++; looks == 3 {
			cancel()
		}
		_, err := Try(file, Exclusive)
		if n := open(); n != 0 {
			t.Errorf("%d descriptors of the lock are open between two looks", n)
		}
		return err
	})
	if looks != 3 {
		t.Errorf("it was looked at %d times", looks)
	}

	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	none := before
	none.Cur = 0
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Skip(err)
	}
	_, err := Take(ctx, file, Exclusive)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("without descriptors: %v", err)
	}
}

package procs_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/procs"
)

func TestMain(m *testing.M) {
	if n, err := strconv.Atoi(os.Getenv("PROCS_TEST_STRANGERS")); err == nil {
		if err := beStrangers(n); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// beStrangers prints the numbers of n processes that show no arguments, like those in
// which a gVisor runs the programs of its guests, and keeps them until the input ends.
func beStrangers(n int) error {
	// They end with the thread that made them.
	runtime.LockOSThread()
	const argStart = 48 - 3
	f, err := procs.Stat(os.Getpid())
	if err != nil {
		return err
	}
	args, err := strconv.ParseUint(f[argStart], 10, 64)
	if err != nil {
		return err
	}
	page := uintptr(args) &^ uintptr(os.Getpagesize()-1)
	for range n {
		pid, errno := idle(page, uintptr(os.Getpagesize()))
		if errno != 0 {
			return fmt.Errorf("fork: %w", errno)
		}
		fmt.Println(pid)
	}
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1))
	return nil
}

// idle forks a process that has given up the page that its arguments begin in and does
// nothing, without the parts of Go that it would have to bring along.
//
//go:norace
//go:nosplit
func idle(page, size uintptr) (pid uintptr, errno syscall.Errno) {
	pid, _, errno = syscall.RawSyscall(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0)
	if pid == 0 && errno == 0 {
		syscall.RawSyscall(syscall.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGKILL), 0)
		syscall.RawSyscall(syscall.SYS_MUNMAP, page, size, 0)
		for {
			syscall.RawSyscall6(syscall.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
		}
	}
	return pid, errno
}

// strangers starts n processes of root's without arguments and makes this process, until
// the test ends, one of the user nobody.
func strangers(t testing.TB, n int) (pids []int) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be somebody else afterwards")
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("PROCS_TEST_STRANGERS=%d", n))
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
	lines := bufio.NewScanner(out)
	for lines.Scan() && lines.Text() != "ready" {
		pid, err := strconv.Atoi(lines.Text())
		if err != nil {
			t.Fatal(lines.Text())
		}
		pids = append(pids, pid)
	}
	if len(pids) != n {
		t.Fatalf("%d of %d processes", len(pids), n)
	}
	for _, pid := range pids {
		for end := time.Now().Add(time.Minute); ; {
			args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if err != nil || time.Now().After(end) {
				t.Fatalf("process %d still shows %q, %v", pid, args, err)
			}
			if len(args) == 0 {
				break
			}
		}
	}
	t.Cleanup(func() {
		if err := syscall.Seteuid(0); err != nil {
			t.Fatal(err)
		}
	})
	if err := syscall.Seteuid(65534); err != nil {
		t.Fatal(err)
	}
	return pids
}

// A process that may not be looked at is not waited for: for another user's process it is
// not visible whether it is in the middle of an execve.
func TestStrangers(t *testing.T) {
	io, err := os.Open("/proc/self/io") // counts the reads of this process
	if err != nil {
		t.Skip(err)
	}
	defer io.Close()
	reads := func() int {
		b := make([]byte, 1<<10)
		n, err := io.ReadAt(b, 0)
		if n == 0 {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b[:n])) {
			if v, ok := strings.CutPrefix(line, "syscr: "); ok {
				n, _ := strconv.Atoi(strings.TrimSpace(v))
				return n
			}
		}
		t.Fatalf("no syscr in %q", b[:n])
		return 0
	}
	buf := make([]byte, procs.Room)
	for _, pid := range strangers(t, 3) {
		before := reads()
		if args, err := procs.Args(pid, buf); err != nil || len(args) > 0 {
			t.Errorf("it has the arguments %q, %v", args, err)
		}
		if env, err := procs.Environ(pid, buf); err != nil || len(env) > 0 {
			t.Errorf("its environment was read: %v", err)
		}
		if n := reads() - before; n > 20 {
			t.Errorf("a process that may not be looked at was read %d times", n)
		}
	}
}

func BenchmarkStrangers(b *testing.B) {
	pids := strangers(b, 200)
	buf := make([]byte, 4<<10)
	for b.Loop() {
		for _, pid := range pids {
			if args, err := procs.Args(pid, buf); err != nil || len(args) > 0 {
				b.Fatalf("it has the arguments %q, %v", args, err)
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*len(pids)), "µs/process")
}

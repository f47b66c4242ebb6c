package pause

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func program(t *testing.T) string {
	t.Helper()
	if Program == nil {
		t.Skip("no program for this architecture")
	}
	p := filepath.Join(t.TempDir(), "pause")
	if err := os.WriteFile(p, Program, 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

// start starts pause and returns once it waits.
func start(t *testing.T, out io.Writer, args ...string) *exec.Cmd {
	t.Helper()
	c := exec.Command(program(t), args...)
	c.Stdout = out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	waits(t, c.Process.Pid)
	return c
}

// waits returns when pid ignores SIGCHLD and sleeps, as pause does.
func waits(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		ignores, sleeps := false, false
		for line := range strings.Lines(string(data)) {
			if v, ok := strings.CutPrefix(line, "SigIgn:"); ok {
				n, _ := strconv.ParseUint(strings.TrimSpace(v), 16, 64)
				ignores = n&(1<<(syscall.SIGCHLD-1)) != 0
			}
			sleeps = sleeps || strings.HasPrefix(line, "State:\tS")
		}
		if ignores && sleeps {
			return
		}
	}
	t.Fatal("pause does not wait")
}

func TestBecomesTheAgent(t *testing.T) {
	var out bytes.Buffer
	c := start(t, &out, "0", "/bin/sh", "-c", `grep -E '^Sig(Blk|Ign)' /proc/self/status; echo "$0 $PAUSE_TEST"`, "agent")
	if err := c.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Fatal(err)
	}
	const usr = 1<<(syscall.SIGUSR1-1) | 1<<(syscall.SIGUSR2-1)
	for line := range strings.Lines(out.String()) {
		name, v, ok := strings.Cut(line, ":")
		want := uint64(0)
		if name == "SigIgn" {
			want = usr
		}
		if n, err := strconv.ParseUint(strings.TrimSpace(v), 16, 64); ok && (err != nil || n&(usr|1<<(syscall.SIGTERM-1)|1<<(syscall.SIGCHLD-1)) != want) {
			t.Errorf("%s is %s: the agent inherited how pause waits", name, v)
		}
	}
	if !strings.HasSuffix(out.String(), "agent \n") {
		t.Errorf("the agent said %q", out.String())
	}
}

// TestManySignals: signals before the agent catches them do not end it.
func TestManySignals(t *testing.T) {
	var out bytes.Buffer
	c := start(t, &out, "0", "/bin/sh", "-c", `kill -USR1 $$; kill -USR2 $$; echo lives`)
	if err := c.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil || out.String() != "lives\n" {
		t.Errorf("%v, said %q", err, out.String())
	}
}

// TestHandsOnItsFuse: the agent starts with the current fuse, not with the original one.
func TestHandsOnItsFuse(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a PID namespace")
	}
	p := program(t)
	for _, tt := range []struct{ first, moved, want string }{
		{"0", "", "0"},
		{"4102444800", "", "4102444800"},
		{"1", "4102444800", "4102444800"},
		{"4102444800", "0", "0"},
	} {
		var out bytes.Buffer
		c := exec.Command(p, tt.first, "/bin/sh", "-c", `echo "$@"`, "agent", "@", "x@", "@x", "", "@")
		c.Stdout = &out
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Process.Kill() })
		waits(t, c.Process.Pid)
		if tt.moved != "" {
			// Both signals have arrived before it handles either.
			if err := c.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command("nsenter", "-t", strconv.Itoa(c.Process.Pid), "-p", p, "fuse", tt.moved).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		if err := errors.Join(c.Process.Signal(syscall.SIGUSR1), c.Process.Signal(syscall.SIGCONT)); err != nil {
			t.Fatal(err)
		}
		err := c.Wait()
		want := fmt.Sprintf("%020s", tt.want)
		if want += " x@ @x  " + want + "\n"; err != nil || out.String() != want {
			t.Errorf("first %s, moved to %q: %v, %q; want %q", tt.first, tt.moved, err, out.String(), want)
		}
	}
}

func TestStaysWhenTheAgentCannotStart(t *testing.T) {
	c := start(t, nil, "0", "/does/not/exist")
	_ = c.Process.Signal(syscall.SIGUSR1)
	time.Sleep(50 * time.Millisecond)
	waits(t, c.Process.Pid)
	_ = c.Process.Signal(syscall.SIGTERM)
	if err := c.Wait(); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
}

func TestFuse(t *testing.T) {
	t.Parallel()
	began := time.Now()
	c := exec.Command(program(t), strconv.FormatInt(began.Unix()+2, 10), "/bin/false")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if d := time.Since(began); d < grace+900*time.Millisecond {
		t.Errorf("it ended after %v", d)
	}
}

// TestMovedFuse: process 1 of a PID namespace accepts a new fuse, even after the earlier
// one has expired.
func TestMovedFuse(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: a PID namespace")
	}
	p := program(t)
	for _, former := range []string{"0", "1", strconv.FormatInt(time.Now().Unix()+3600, 10)} {
		c := exec.Command(p, former, "/bin/false")
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		waits(t, c.Process.Pid)
		began := time.Now()
		out, err := exec.Command("nsenter", "-t", strconv.Itoa(c.Process.Pid), "-p", p, "fuse", strconv.FormatInt(began.Unix()+2, 10)).CombinedOutput()
		if err != nil {
			_ = c.Process.Kill()
			t.Fatalf("%v: %s", err, out)
		}
		if err := c.Wait(); err != nil {
			t.Error(err)
		}
		if d := time.Since(began); d < grace+900*time.Millisecond || d > 10*grace {
			t.Errorf("moved from %s, it ended after %v", former, d)
		}
	}
}

const grace = 10 * time.Second

// TestFuseOfOneThatBegins: a process 1 that does not wait yet would lose a new fuse, and in a
// sandbox the signal would end it. The sender checks first whether it waits.
func TestFuseOfOneThatBegins(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces")
	}
	p := program(t)
	c := exec.Command("sh", "-c", `trap 'exec "$0" 0 /bin/false' HUP; echo; while :; do :; done`, p)
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	t.Cleanup(func() { _ = c.Process.Kill() })
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	moved := make(chan error, 1)
	at := strconv.FormatInt(time.Now().Unix()+1, 10)
	go func() {
		said, err := exec.Command("nsenter", "-t", strconv.Itoa(c.Process.Pid), "-p", "unshare", "-m", "sh", "-c",
			`mount -t proc proc /proc && exec "$0" fuse "$1"`, p, at).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, said)
		}
		moved <- err
	}()
	select {
	case err := <-moved:
		t.Fatalf("it was told while it began: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	if err := c.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	go func() { ended <- c.Wait() }()
	if err := <-moved; err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("its fuse was lost")
	}
}

func TestUsage(t *testing.T) {
	err := exec.Command(program(t), "0").Run()
	if e, ok := err.(*exec.ExitError); !ok || e.ExitCode() != 2 {
		t.Errorf("without an agent: %v; want exit code 2", err)
	}
}

// TestGenerated assembles the sources, ours and those of package umount, and compares the
// code with the committed programs.
func TestGenerated(t *testing.T) {
	for _, tool := range []string{"x86_64-linux-gnu-as", "aarch64-linux-gnu-as"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is missing (binutils)", tool)
		}
	}
	script, err := filepath.Abs("generate.sh")
	if err != nil {
		t.Fatal(err)
	}
	for _, sources := range []string{".", "../runner/umount"} {
		dir := t.TempDir()
		c := exec.Command("sh", script, dir)
		c.Dir = sources
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for _, arch := range []string{"amd64", "arm64"} {
			if !bytes.Equal(code(t, filepath.Join(dir, arch+".elf")), code(t, filepath.Join(sources, arch+".elf"))) {
				t.Errorf("%s: %s.elf does not come from %s.asm: go generate ./adapters/local/...", sources, arch, arch)
			}
		}
	}
}

func TestDonate(t *testing.T) { donates(t, program(t)) }

// donates checks that a program hands over open files, and reports why if it cannot.
func donates(t *testing.T, program ...string) {
	t.Helper()
	run := func(files []*os.File, args ...string) int {
		c := exec.Command(program[0], slices.Concat(program[1:], []string{"donate"}, args)...)
		c.ExtraFiles = files
		if err := c.Run(); err != nil && c.ProcessState == nil {
			t.Fatal(err)
		}
		return c.ProcessState.ExitCode()
	}
	dir, err := os.MkdirTemp("", "donate") // short, like the address of a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	longest := dir + "/" + strings.Repeat("s", 107-len(dir)-1)
	for _, path := range []string{dir + "/s", longest} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{1, 2, 64} {
			var files []*os.File
			for i := range n {
				f, err := os.Create(filepath.Join(dir, fmt.Sprint("f", i)))
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				files = append(files, f)
			}
			if code := run(files, path, fmt.Sprint(n), "1"); code != int(syscall.EPERM) {
				t.Errorf("%d to %s of another process: exit code %d", n, path, code)
			}
			if c, err := l.AcceptUnix(); err != nil {
				t.Fatal(err)
			} else {
				if got, m, _, _, err := c.ReadMsgUnix(make([]byte, 9), make([]byte, 99)); got > 0 || m > 0 {
					t.Errorf("another process is given %d bytes, %d of files, %v", got, m, err)
				}
				c.Close()
			}
			args := []string{path, fmt.Sprint(n)}
			if n > 1 {
				args = append(args, fmt.Sprint(os.Getpid()))
			}
			if code := run(files, args...); code != 0 {
				t.Fatalf("%d to %s: exit code %d", n, path, code)
			}
			c, err := l.AcceptUnix()
			if err != nil {
				t.Fatal(err)
			}
			oob := make([]byte, 4096)
			got, m, _, _, err := c.ReadMsgUnix(make([]byte, 9), oob)
			if err != nil || got != 1 {
				t.Fatalf("%d bytes, %v", got, err)
			}
			messages, err := unix.ParseSocketControlMessage(oob[:m])
			if err != nil || len(messages) != 1 {
				t.Fatalf("%d messages, %v", len(messages), err)
			}
			fds, err := unix.ParseUnixRights(&messages[0])
			if err != nil || len(fds) != n {
				t.Fatalf("%d descriptors, %v; want %d", len(fds), err, n)
			}
			for i, fd := range fds {
				f := os.NewFile(uintptr(fd), "")
				have, err := f.Stat()
				want, err2 := files[i].Stat()
				if err != nil || err2 != nil || !os.SameFile(have, want) {
					t.Errorf("%d of %d is another file: %v %v", i, n, err, err2)
				}
				f.Close()
			}
			c.Close()
		}
		l.Close()
	}
	for _, bad := range []struct {
		path, count string
		code        int
	}{
		{dir + "/nobody", "1", int(syscall.ENOENT)},
		{longest, "9", int(syscall.EBADF)}, // a process listens, no descriptor is open
		{longest + "s", "1", 2},
		{dir + "/s", "0", 2},
		{dir + "/s", "65", 2},
		{dir + "/s", "", 2},
	} {
		if bad.code == int(syscall.EBADF) {
			l, err := net.Listen("unix", bad.path)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
		}
		if code := run(nil, bad.path, bad.count); code != bad.code {
			t.Errorf("donate %s %q: exit code %d, want %d", bad.path, bad.count, code, bad.code)
		}
	}
	if code := run(nil, dir); code != 2 {
		t.Errorf("without a count: exit code %d", code)
	}
}

// TestOtherArchitecture runs the program of the other architecture, emulated.
func TestOtherArchitecture(t *testing.T) {
	t.Parallel()
	emulator, arch := "qemu-aarch64-static", "arm64"
	if runtime.GOARCH == "arm64" {
		emulator, arch = "qemu-x86_64-static", "amd64"
	}
	if _, err := exec.LookPath(emulator); err != nil {
		t.Skipf("%s is missing", emulator)
	}
	p, err := filepath.Abs(arch + ".elf")
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(emulator, p, "4102444800", "/bin/echo", "became", "@")
	var out bytes.Buffer
	c.Stdout = &out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill() })
	waits(t, c.Process.Pid)
	_ = c.Process.Signal(syscall.SIGUSR1)
	if err := c.Wait(); err != nil || out.String() != "became 00000000004102444800\n" {
		t.Errorf("%v, said %q", err, out.String())
	}
	donates(t, emulator, p)
	if os.Geteuid() == 0 { // for a process 1 that ignores it
		c := exec.Command("unshare", "-fp", "sh", "-c", `"$0" "$1" fuse 4102444800; exit $?`, emulator, p)
		if err := c.Run(); err != nil {
			t.Errorf("telling another fuse: %v", err)
		}
	}
	began := time.Now()
	if err := exec.Command(emulator, p, "1", "/bin/false").Run(); err != nil || time.Since(began) < grace {
		t.Errorf("with a burnt fuse: %v after %v", err, time.Since(began))
	}
}

func code(t *testing.T, file string) []byte {
	t.Helper()
	f, err := elf.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD {
			b, err := io.ReadAll(p.Open())
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
	}
	t.Fatalf("%s has no code", file)
	return nil
}

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/adapters/saasstub/service"
	"github.com/sand-boxer/sandboxer/extension"
)

// noRaceSleep spares the second that the race detector otherwise waits at the end of
// every process.
const noRaceSleep = "atexit_sleep_ms=0"

// TestMain makes the test binary a sandboxer whose only adapter is the fake. A
// server that a command starts in the background is the test binary again.
func TestMain(m *testing.M) {
	if service.IsChild() { // of sandboxer-real
		service.Main()
	}
	testscript.Main(m, map[string]func(){
		"sandboxer": func() { os.Exit(testProgram().main()) },
		"sandboxer-all": func() {
			os.Exit(program{adapters: append(adapters.All(), fake.Adapter), builtin: testCatalogue()}.main())
		},
		"sandboxer-real": func() { os.Exit(program{adapters: adapters.All(), builtin: sandboxer.Builtin}.main()) },
		"echoserver":     echoServer,
		"fakeworld":      fakeWorld,
		"fakeextension":  func() { extension.Main(fake.Adapter) },
	})
}

func testProgram() program {
	return program{adapters: []sandboxer.Adapter{fake.Adapter}, builtin: testCatalogue()}
}

// testCatalogue is the built-in catalogue of the program under test.
func testCatalogue() fs.FS {
	file := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }
	return fstest.MapFS{
		"extensions/ext.fake.yaml": file(`
id: ext.fake
title: The fake
handler: fake
capabilities: {isolation_levels: [process], pricing_model: self-hosted}
`),
		"profiles/profile.local.yaml": file(`
id: profile.local
title: A directory of this machine
extension: ext.fake
isolation: process
ttl: 30m
`),
	}
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 filepath.Join("testdata", "script"),
		RequireExplicitExec: true,
		UpdateScripts:       os.Getenv("UPDATE_SCRIPTS") != "",
		Setup: func(e *testscript.Env) error {
			// A socket's path is short, and a script's directory may not be.
			home, err := os.MkdirTemp("", "sbx")
			if err != nil {
				return err
			}
			e.Setenv("SANDBOXER_HOME", home)
			e.Setenv("SANDBOXER_PROGRESS", "none")
			e.Setenv("TZ", "UTC")
			e.Setenv("GORACE", noRaceSleep)
			e.Defer(func() {
				stopServer(t, filepath.Join(home, "two")) // of scripts with two
				stopServer(t, home)
				removeHome(t, home)
			})
			return nil
		},
		Condition: func(cond string) (bool, error) {
			if cond == "root" {
				return os.Getuid() == 0, nil
			}
			return false, fmt.Errorf("unknown condition %q", cond)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code":     cmdCode,
			"capture":  cmdCapture,
			"freeport": cmdFreePort,
			"waitfor":  cmdWaitFor,
			"talk":     cmdTalk,
			"tofile":   cmdToFile,
			"sleepms":  cmdSleep,
			"expand":   cmdExpand,
			"mkcert":   cmdMkCert,
			"hup":      cmdHangUp,
			"bucket":   cmdBucket,
		},
	})
}

// stopServer ends the server that a script started and left running.
func stopServer(t *testing.T, home string) {
	b, err := os.ReadFile(filepath.Join(home, "data", "lock"))
	if err != nil {
		return
	}
	first, _, _ := strings.Cut(string(b), "\n")
	pid, err := strconv.Atoi(first)
	if err != nil || pid == os.Getpid() {
		return
	}
	cmdline, _ := os.ReadFile("/proc/" + first + "/cmdline")
	if !strings.HasPrefix(string(cmdline), "sandboxer\x00") {
		return // somebody else has the number by now
	}
	_ = syscall.Kill(pid, syscall.SIGTERM)
	deadline := time.Now().Add(time.Minute)
	for time.Now().Before(deadline) {
		if syscall.Kill(pid, 0) != nil || isZombie(pid) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	t.Errorf("the server of %s did not end in time and was killed", home)
}

// removeHome removes the directory of servers that have ended. It fails where one of them left a mount there.
func removeHome(t *testing.T, home string) {
	if err := os.RemoveAll(home); err != nil {
		t.Errorf("a server left something behind: %v", err)
	}
}

// cmdHangUp sends SIGHUP to the server that runs.
func cmdHangUp(ts *testscript.TestScript, neg bool, args []string) {
	b, err := os.ReadFile(filepath.Join(ts.Getenv("SANDBOXER_HOME"), "data", "lock"))
	ts.Check(err)
	first, _, _ := strings.Cut(string(b), "\n")
	pid, err := strconv.Atoi(first)
	ts.Check(err)
	ts.Check(syscall.Kill(pid, syscall.SIGHUP))
}

// cmdCode runs a command and checks its exit code: code 3 sandboxer get nope
func cmdCode(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N command...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	if err != nil {
		var ok bool
		if got, ok = exitStatus(err); !ok {
			ts.Fatalf("%v", err)
		}
	}
	if got != want {
		ts.Fatalf("exit code %d; want %d", got, want)
	}
}

func exitStatus(err error) (int, bool) {
	var x *exec.ExitError
	if !errors.As(err, &x) {
		return 0, false
	}
	if ws, ok := x.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal()), true
	}
	return x.ExitCode(), true
}

// cmdCapture puts the last stdout, without its final newline, into a variable.
func cmdCapture(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: capture NAME")
	}
	ts.Setenv(args[0], strings.TrimSuffix(ts.ReadFile("stdout"), "\n"))
}

// cmdToFile writes a variable to a file: tofile NAME FILE
func cmdToFile(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: tofile NAME FILE")
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), []byte(ts.Getenv(args[0])+"\n"), 0o600))
}

// cmdFreePort puts the number of a free TCP port into a variable.
func cmdFreePort(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: freeport NAME")
	}
	// None of those that the kernel gives to anybody: it has to be free a while later.
	for {
		port := strconv.Itoa(20_000 + rand.IntN(12_000))
		if l, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			l.Close()
			ts.Setenv(args[0], port)
			return
		}
	}
}

// cmdWaitFor repeats a command until it succeeds.
func cmdWaitFor(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: waitfor command...")
	}
	deadline := time.Now().Add(time.Minute)
	for ts.Exec(args[0], args[1:]...) != nil {
		if time.Now().After(deadline) {
			ts.Fatalf("%s does not succeed", strings.Join(args, " "))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// cmdSleep keeps two signals apart: the kernel merges those of one kind.
func cmdSleep(ts *testscript.TestScript, neg bool, args []string) {
	n, err := strconv.Atoi(args[0])
	ts.Check(err)
	time.Sleep(time.Duration(n) * time.Millisecond)
}

// cmdTalk says something to a local port and wants to hear it again.
func cmdTalk(ts *testscript.TestScript, neg bool, args []string) {
	const words = "is there anybody\n"
	say := func() error {
		c, err := net.Dial("tcp", "127.0.0.1:"+args[0])
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := io.WriteString(c, words); err != nil {
			return err
		}
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			return err
		}
		b, err := io.ReadAll(c)
		if err == nil && string(b) != words {
			err = fmt.Errorf("heard %q; want %q", b, words)
		}
		return err
	}
	deadline := time.Now().Add(time.Minute)
	for {
		err := say()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("port %s: %v", args[0], err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// echoServer runs inside a sandbox and repeats what it hears on a port.
func echoServer() {
	l, err := net.Listen("tcp", "127.0.0.1:"+os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for {
		c, err := l.Accept()
		if err != nil {
			os.Exit(1)
		}
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, c)
		}()
	}
}

// fakeWorld is a backend in a process of its own: what it has outlives any server.
func fakeWorld() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := fake.Serve(ctx, fake.ServeOptions{Socket: os.Args[1]}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// cmdExpand copies a file with the script's variables put in: expand FROM TO
func cmdExpand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: expand FROM TO")
	}
	text := os.Expand(ts.ReadFile(args[0]), ts.Getenv)
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), []byte(text), 0o644))
}

// selfCommand is the program under test in a process of its own.
func selfCommand(home string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Args[0] = "sandboxer"
	cmd.Env = append(os.Environ(), "SANDBOXER_HOME="+home, "TERM=xterm", "CI=", "GORACE="+noRaceSleep, "NO_COLOR=1")
	return cmd
}

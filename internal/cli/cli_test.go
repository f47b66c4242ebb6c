package cli

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestMain makes the test binary a sandboxer whose only adapter is the fake. A
// server that a command starts in the background is the test binary again.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"sandboxer": func() { os.Exit(testProgram().main()) },
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
			e.Defer(func() {
				stopServer(t, home)
				os.RemoveAll(home)
			})
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code":    cmdCode,
			"capture": cmdCapture,
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
	deadline := time.Now().Add(20 * time.Second)
	for time.Now().Before(deadline) {
		if syscall.Kill(pid, 0) != nil || isZombie(pid) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	t.Errorf("the server of %s did not end in time and was killed", home)
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
	type coder interface{ ExitCode() int }
	for err != nil {
		if c, ok := err.(coder); ok {
			return c.ExitCode(), true
		}
		u, ok := err.(interface{ Unwrap() error })
		if !ok {
			return 0, false
		}
		err = u.Unwrap()
	}
	return 0, false
}

// cmdCapture puts the last stdout, without its final newline, into a variable.
func cmdCapture(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: capture NAME")
	}
	ts.Setenv(args[0], strings.TrimSuffix(ts.ReadFile("stdout"), "\n"))
}

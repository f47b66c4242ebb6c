package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/spf13/cobra"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
)

func TestExitCodes(t *testing.T) {
	want := map[sandboxer.Kind]int{
		sandboxer.Invalid: 2, sandboxer.Unauthenticated: 4, sandboxer.Denied: 4, sandboxer.NotFound: 3, sandboxer.Conflict: 5,
		sandboxer.NoCredit: 6, sandboxer.Exhausted: 6, sandboxer.Unsupported: 7, sandboxer.Unavailable: 8, sandboxer.Timeout: 8,
		sandboxer.Failed: 9, sandboxer.Canceled: 130, sandboxer.Internal: 1,
	}
	plain, guest := &cobra.Command{}, &cobra.Command{Annotations: map[string]string{guestCommand: "yes"}}
	for _, k := range sandboxer.Kinds() {
		if _, known := kinds[k]; !known {
			t.Errorf("kind %s has no exit code", k)
		}
		err := fmt.Errorf("while testing: %w", sandboxer.E(k, nil, "told to"))
		if got := exitCode(plain, err); got != want[k] {
			t.Errorf("exit code for %s = %d; want %d", k, got, want[k])
		}
		own := exitOwn
		if k == sandboxer.Canceled {
			own = 130
		}
		if got := exitCode(guest, err); got != own {
			t.Errorf("exit code of run for %s = %d; want %d", k, got, own)
		}
		if p := problemOf(err); p.Code != k || p.Status == 0 || p.Title == "" || p.Detail != "told to" {
			t.Errorf("problem document for %s = %+v", k, p)
		}
	}
	for _, tt := range []struct {
		err  error
		want int
	}{
		{nil, 0}, {&exitError{43, nil}, 43}, {errors.New("anything"), 1}, {context.Canceled, 130}, {context.DeadlineExceeded, 8},
	} {
		if got := exitCode(plain, tt.err); got != tt.want {
			t.Errorf("exit code for %v = %d; want %d", tt.err, got, tt.want)
		}
	}
}

func TestParseSize(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want int64 // 0: refused
	}{
		{"512MiB", 512 << 20}, {"2GiB", 2 << 30}, {"1.5GiB", 3 << 29}, {"1 GiB", 1 << 30}, {"512m", 512 << 20}, {"2g", 2 << 30}, {"2G", 2 << 30},
		{"1kB", 1000}, {"1KB", 1000}, {"1MB", 1e6}, {"100", 0}, {"512", 0}, {"100B", 100}, {"1TiB", 1 << 40},
		{"0", 0}, {"-1", 0}, {"GiB", 0}, {"1XB", 0}, {"1GiBB", 0}, {"0.5B", 0}, {"1e9", 0}, {"NaN", 0}, {"Inf", 0}, {"1i", 0}, {"9999999TiB", 0}, {"0x10", 0}, {"1 2", 0},
	} {
		got, err := parseSize("--memory", tt.in)
		if got != tt.want || (err == nil) != (tt.want > 0) {
			t.Errorf("parseSize(%q) = %d, %v; want %d", tt.in, got, err, tt.want)
		}
	}
}

func TestParseDuration(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want time.Duration // 0: refused
	}{
		{"30m", 30 * time.Minute}, {"1h30m", 90 * time.Minute}, {"2d", 48 * time.Hour}, {"1d12h", 36 * time.Hour}, {"1.5h", 90 * time.Minute},
		{"", 0}, {"0s", 0}, {"-1h", 0}, {"+1h", 0}, {"1d-1h", 0}, {"d", 0}, {"1", 0}, {"soon", 0}, {"99999d", 0},
	} {
		got, err := parseDuration("--ttl", tt.in)
		if got != tt.want || (err == nil) != (tt.want > 0) {
			t.Errorf("parseDuration(%q) = %s, %v; want %s", tt.in, got, err, tt.want)
		}
	}
}

func TestParsePlace(t *testing.T) {
	for in, want := range map[string]place{
		"-": {stdio: true}, "a.txt": {path: "a.txt"}, "./a:b": {path: "./a:b"}, "/x:y": {path: "/x:y"}, "box:": {ref: "box"},
		"box:/etc/x": {ref: "box", path: "/etc/x"}, "box:a:b": {ref: "box", path: "a:b"}, ":x": {path: ":x"},
	} {
		if got := parsePlace(in); got != want {
			t.Errorf("parsePlace(%q) = %+v; want %+v", in, got, want)
		}
	}
}

// TestOptions checks what flags become, without doing it.
func TestOptions(t *testing.T) {
	f := testFactory(t)
	var got *createOptions
	c := newCmdCreate(f, func(_ context.Context, o *createOptions) error { got = o; return nil })
	c.SetArgs(strings.Fields("mine --cpus 0.5 --memory 1GiB --pids 9 --net allow:a.example,b.example:443 --ttl 1h --label a=b -e A=1 --max-cost 0.25 --wait none -- sleep 9"))
	if err := c.Execute(); err != nil {
		t.Fatal(err)
	}
	req := got.req
	want := api.CreateSandbox{Profile: "mine", Limits: sandboxer.Limits{MilliCPU: 500, MemoryBytes: 1 << 30, PIDs: 9},
		Network: &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"a.example", "b.example:443"}},
		TTL:     time.Hour, Labels: map[string]string{"a": "b"}, Env: map[string]string{"A": "1"}, MaxCost: 250_000, Command: []string{"sleep", "9"}}
	if fmt.Sprintf("%+v %v", req, *req.Network) != fmt.Sprintf("%+v %v", want, *want.Network) && !equalRequests(req, want) {
		t.Errorf("request = %+v; want %+v", req, want)
	}
	if got.wait != "none" {
		t.Errorf("wait = %q; want none", got.wait)
	}

	t.Setenv("HOME", "/home/u")
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	c = newCmdCreate(f, func(_ context.Context, o *createOptions) error { got = o; return nil })
	c.SetArgs(strings.Fields("--thread a@b/c/t-1 --consumer me --consumer-kind ci --consumer-meta a=b=c --mount .:/here --mount testdata/../testdata:/data/:ro --mount /x/../y:/z"))
	if err := c.Execute(); err != nil {
		t.Fatal(err)
	}
	req = got.req
	if want := (sandboxer.Thread{User: "a@b/c", ID: "t-1"}); req.Thread != want {
		t.Errorf("thread = %+v; want %+v", req.Thread, want)
	}
	if want := (sandboxer.Consumer{ID: "me", Kind: "ci", Meta: map[string]string{"a": "b=c"}}); !reflect.DeepEqual(req.Consumer, want) {
		t.Errorf("consumer = %+v; want %+v", req.Consumer, want)
	}
	if want := []sandboxer.Mount{{Source: here, Target: "/here"}, {Source: filepath.Join(here, "testdata"), Target: "/data", ReadOnly: true},
		{Source: "/y", Target: "/z"}}; !slices.Equal(req.Mounts, want) {
		t.Errorf("mounts = %+v; want %+v", req.Mounts, want)
	}
	// A server elsewhere has its own files.
	o := &requestOptions{mounts: []string{"/y:/z"}}
	if err := o.build(f); err != nil {
		t.Fatal(err)
	}
	if r, err := o.requestFor(&session{}); err != nil || len(r.Mounts) != 1 {
		t.Errorf("an absolute source for a server elsewhere: %+v, %v", r.Mounts, err)
	}
	t.Setenv("HOME", t.TempDir())
	if err := os.Mkdir(filepath.Join(os.Getenv("HOME"), "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, src := range []string{".", "~/x"} {
		want := "--mount: " + src + " is a path of this machine, and the server is on another"
		o := &requestOptions{mounts: []string{src + ":/z"}}
		if err := o.build(f); err != nil {
			t.Fatal(err)
		}
		if _, err := o.requestFor(&session{local: true}); err != nil {
			t.Errorf("a source of this machine for a server of it: %v", err)
		}
		for _, addr := range []string{"http://127.0.0.1:8080", "https://localhost:8443", "http://[::1]:80"} {
			if _, err := o.requestFor(&session{addr: addr}); err != nil {
				t.Errorf("a source of this machine for the server at %s: %v", addr, err)
			}
		}
		if _, err := o.requestFor(&session{addr: "https://127.0.0.1.example.com"}); sandboxer.Message(err) != want {
			t.Errorf("a source of this machine for a server with a name: %v; want %s", err, want)
		}
		if _, err := o.requestFor(&session{}); sandboxer.Message(err) != want {
			t.Errorf("a source of this machine for a server elsewhere: %v; want %s", err, want)
		}
	}
	t.Setenv("HOME", "/home/u")
	if _, _, err := parseMounts([]string{"~/no-such:/z"}); !strings.Contains(fmt.Sprint(err), "/home/u/no-such") {
		t.Errorf("a source at home: %v", err)
	}

	// An image is distinguished from a profile by its form.
	for arg, want := range map[string][2]string{
		"python": {"python", ""}, "python:3.13": {"profile.local", "python:3.13"}, "./root": {"profile.local", "./root"}, "": {"profile.local", ""},
	} {
		o := &createOptions{f: f}
		o.offer = arg
		err := o.build(f)
		r := o.req
		if err != nil || r.Profile != want[0] || r.Image != want[1] {
			t.Errorf("create %q asks for profile %q, image %q, %v; want %q", arg, r.Profile, r.Image, err, want)
		}
	}
}

func equalRequests(a, b api.CreateSandbox) bool {
	an, bn := a.Network, b.Network
	a.Network, b.Network = nil, nil
	return fmt.Sprintf("%+v", a) == fmt.Sprintf("%+v", b) && an.Mode == bn.Mode && slices.Equal(an.Allow, bn.Allow)
}

// TestStats: a value that could not be measured is called unknown.
func TestStats(t *testing.T) {
	rows := statsView("x").detail(&api.Stats{CPU: -1, MemoryBytes: -1, MemoryLimit: 1 << 20, DiskBytes: -1, PIDs: -1, RxBytes: -1, TxBytes: 0})
	want := [][2]string{{"cpu time", "unknown"}, {"memory", "unknown of 1MiB"}, {"disk", "unknown"}, {"processes", "unknown"}, {"received", "unknown"}, {"sent", "0B"}}
	if !slices.Equal(rows, want) {
		t.Errorf("stats = %q; want %q", rows, want)
	}
}

// TestParseMounts: mounts are written as here or as other tools have them.
func TestParseMounts(t *testing.T) {
	for in, want := range map[string]sandboxer.Mount{
		"/a:/b":                              {Source: "/a", Target: "/b"},
		"/a:/b:ro":                           {Source: "/a", Target: "/b", ReadOnly: true},
		"/a:/b:rw":                           {Source: "/a", Target: "/b"},
		"/a=b:/c":                            {Source: "/a=b", Target: "/c"},
		"type=bind,source=/a,target=/b":      {Source: "/a", Target: "/b"},
		"type=bind,src=/a,dst=/b,readonly":   {Source: "/a", Target: "/b", ReadOnly: true},
		"source=/a:b,destination=/b,ro=true": {Source: "/a:b", Target: "/b", ReadOnly: true},
		`type=bind,"source=/a,b",target=/b/,readonly=false`: {Source: "/a,b", Target: "/b"},
	} {
		if got, _, err := parseMounts([]string{in}); err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("%q = %+v, %v; want %+v", in, got, err, want)
		}
	}
	for in, want := range map[string]string{
		"":                              "is neither",
		"/a":                            "is neither",
		"/a:/b:rx":                      "is neither",
		"/a:b":                          "not an absolute path inside",
		"type=volume,source=a,target=b": "not a type of mount",
		"type=bind,source=/a":           "has no source or no target",
		"type=bind,source=/a,source=/b,target=/c":         "given twice",
		"type=bind,source=/a,target=/b,propagation=slave": "there is no",
		"type=bind,source=/a,target=/b,readonly=maybe":    "neither true nor false",
		`type=bind,"source=/a`:                            "not a list",
	} {
		if _, _, err := parseMounts([]string{in}); sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(sandboxer.Message(err), want) {
			t.Errorf("%q: %v; want %q", in, err, want)
		}
	}
}

// TestMountsText: mounts are shown one a line.
func TestMountsText(t *testing.T) {
	got := mountsText([]sandboxer.Mount{{Source: "/a", Target: "/b"}, {Source: "/c", Target: "/d", ReadOnly: true}})
	if want := "/a on /b\n/c on /d, read-only"; got != want {
		t.Errorf("mounts = %q; want %q", got, want)
	}
}

// testFactory is one of a program that has nothing but a home of its own.
func testFactory(t *testing.T) *factory {
	t.Helper()
	home := t.TempDir()
	return &factory{program: testProgram(), io: systemStreams(), env: func(name string) (string, bool) {
		if name == "SANDBOXER_HOME" {
			return home, true
		}
		return "", false
	}}
}

// TestPlaces checks where things are kept, for root and for others.
func TestPlaces(t *testing.T) {
	env := map[string]string{}
	f := testFactory(t)
	f.env = func(n string) (string, bool) { v, ok := env[n]; return v, ok }
	env["HOME"] = "/home/u"
	p, err := f.places()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"data_dir": "/var/lib/sandboxer", "log_dir": "/var/log/sandboxer", "socket": "/run/sandboxer/api.sock"}
	if os.Geteuid() != 0 {
		want = map[string]string{"data_dir": "/home/u/.local/share/sandboxer", "log_dir": "/home/u/.local/state/sandboxer", "socket": "/home/u/.local/share/sandboxer/api.sock"}
	}
	for k, v := range want {
		if p.defaults[k] != v {
			t.Errorf("%s = %q; want %q", k, p.defaults[k], v)
		}
	}
	env["SANDBOXER_HOME"] = "/x"
	if p, err = f.places(); err != nil || p.defaults["data_dir"] != "/x/data" || p.defaults["socket"] != "/x/api.sock" || len(p.config) != 1 || p.config[0].Path != "/x" {
		t.Errorf("with SANDBOXER_HOME: %+v, %v", p, err)
	}
}

// TestClean checks that nothing of unknown origin can steer a terminal.
func TestClean(t *testing.T) {
	if got := clean("a\x1b]0;owned\x07b\nc\u202ed\té"); strings.ContainsAny(got, "\x1b\x07\n\t\u202e") || !strings.HasSuffix(got, "é") {
		t.Errorf("clean = %q", got)
	}
}

// TestParsers feeds the parsers text that no user would type. It is no fuzz target because
// gVisor, which this package links, cannot be built with coverage for one.
func TestParsers(t *testing.T) {
	seeds := rapid.SampledFrom([]string{"512MiB", "1d12h", "allow:a,b", "A=1", "profile: x\nmax_cost: 1", "a: [", "a: &x [*x]", "\xff", "api_key: x", "!!binary x", "- ", "? :", "%"})
	text := rapid.OneOf(rapid.String(), seeds, rapid.Map(rapid.SliceOfN(rapid.OneOf(seeds, rapid.StringN(0, 4, -1)), 0, 6), func(p []string) string { return strings.Join(p, "") }),
		rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string { return string(b) }))
	rapid.Check(t, func(t *rapid.T) {
		s := text.Draw(t, "text")
		if n, err := parseSize("--x", s); err == nil && s != "" && n <= 0 {
			t.Errorf("parseSize(%q) = %d", s, n)
		}
		if d, err := parseDuration("--x", s); err == nil && d <= 0 {
			t.Errorf("parseDuration(%q) = %s", s, d)
		}
		if n, err := parseNetwork(s); err == nil && s != "" && n.Mode == "" {
			t.Errorf("parseNetwork(%q) = %+v", s, n)
		}
		parsePlace(s)
		if strings.ContainsFunc(clean(s), func(r rune) bool { return r < ' ' || r == 0x7f }) {
			t.Errorf("clean(%q) = %q", s, clean(s))
		}
		if _, faults := parseConfig("config.yaml", []byte(s)); len(faults) > 0 && faults.Error() == "" {
			t.Errorf("the faults of %q have no words", s)
		}
		_, _ = environment(func(string) (string, bool) { return "", false }, []string{s}, nil)
	})
}

// A terminal is a sandboxer running on a terminal of its own.
type terminal struct {
	t    *testing.T
	tty  *os.File
	seen strings.Builder
	out  chan string
	wait func() int
}

func onTerminal(t *testing.T, home string, args ...string) *terminal {
	t.Helper()
	cmd := selfCommand(home, args...)
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 40, Cols: 100})
	if err != nil {
		t.Fatal(err)
	}
	x := &terminal{t: t, tty: tty, out: make(chan string, 100)}
	go func() {
		defer close(x.out)
		buf := make([]byte, 4096)
		for {
			n, err := tty.Read(buf)
			if n > 0 {
				x.out <- string(buf[:n])
			}
			if err != nil {
				return
			}
		}
	}()
	x.wait = func() int {
		for s := range x.out {
			x.seen.WriteString(s)
		}
		_ = cmd.Wait()
		return cmd.ProcessState.ExitCode()
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		tty.Close()
	})
	return x
}

// expect waits until text was shown since the last expect.
func (x *terminal) expect(text string) {
	x.t.Helper()
	deadline := time.After(time.Minute)
	for {
		if before, after, found := strings.Cut(x.seen.String(), text); found {
			_ = before
			x.seen.Reset()
			x.seen.WriteString(after)
			return
		}
		select {
		case s, open := <-x.out:
			if !open {
				x.t.Fatalf("the terminal ended without showing %q; it showed %q", text, x.seen.String())
			}
			x.seen.WriteString(s)
		case <-deadline:
			x.t.Fatalf("the terminal does not show %q; it shows %q", text, x.seen.String())
		}
	}
}

func (x *terminal) typed(s string) {
	x.t.Helper()
	if _, err := io.WriteString(x.tty, s); err != nil {
		x.t.Fatal(err)
	}
}

func TestTerminal(t *testing.T) {
	home, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stopServer(t, home)
		removeHome(t, home)
	})
	run := func(args ...string) string {
		t.Helper()
		cmd := selfCommand(home, args...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
		return string(out)
	}

	t.Run("welcome", func(t *testing.T) {
		x := onTerminal(t, home)
		x.expect("No server runs on this machine.")
		x.expect("Next:")
		x.expect("sandboxer run --input repo=. -- ls -l")
		if code := x.wait(); code != 0 {
			t.Errorf("exit code %d; want 0", code)
		}
	})

	t.Run("create shows one line", func(t *testing.T) {
		x := onTerminal(t, home, "create", "--name", "box")
		x.expect("started a server")
		x.expect("✓")
		x.expect("ready in ")
		x.expect("expires ")
		if code := x.wait(); code != 0 {
			t.Errorf("exit code %d; want 0", code)
		}
	})

	t.Run("shell", func(t *testing.T) {
		x := onTerminal(t, home, "shell", "box")
		x.typed("stty size; echo mark-$((40+2))\n")
		x.expect("40 100")
		x.expect("mark-42")
		if err := pty.Setsize(x.tty, &pty.Winsize{Rows: 24, Cols: 77}); err != nil {
			t.Fatal(err)
		}
		x.typed("until stty size | grep -q '24 77'; do sleep 0.05; done; echo resized-$((40+2))\n")
		x.expect("resized-42")
		// Ctrl-C is the command's, not ours.
		x.typed("sleep 1000; echo after-$?\n")
		time.Sleep(300 * time.Millisecond) // until the shell has started it; the key must find it there
		x.typed("\x03")
		x.typed("echo alive-$((40+2))\n")
		x.expect("alive-42")
		x.typed("exit 7\n")
		if code := x.wait(); code != 7 {
			t.Errorf("exit code %d; want 7", code)
		}
	})

	t.Run("exec without -t where stdout is no terminal", func(t *testing.T) {
		if got := run("exec", "box", "--", "sh", "-c", "test -t 1 || echo plain"); got != "plain\n" {
			t.Errorf("got %q; want plain", got)
		}
	})

	t.Run("names cannot steer the terminal", func(t *testing.T) {
		run("files", "mkdir", "box", "evil\x1b[31m")
		if got := run("files", "ls", "box"); strings.Contains(got, "\x1b") || !strings.Contains(got, "evil") {
			t.Errorf("files ls shows %q", got)
		}
	})

	t.Run("destroy asks", func(t *testing.T) {
		run("create", "--input", "sandbox_id=one", "-q")
		run("create", "--input", "sandbox_id=two", "-q")
		x := onTerminal(t, home, "destroy", "one", "two")
		x.expect("Destroy 2 sandboxes (one, two)? [y/N] ")
		x.typed("n\n")
		x.expect("nothing was destroyed")
		if code := x.wait(); code != 130 {
			t.Errorf("exit code after no = %d; want 130", code)
		}
		x = onTerminal(t, home, "destroy", "one", "two")
		x.expect("[y/N] ")
		x.typed("y\n")
		x.expect("destroyed one in ")
		if code := x.wait(); code != 0 {
			t.Errorf("exit code after yes = %d; want 0", code)
		}
		if got := run("ls", "-q", "--name", "one"); got != "" {
			t.Errorf("still there: %q", got)
		}
	})

	t.Run("run opens a shell", func(t *testing.T) {
		x := onTerminal(t, home, "run")
		x.expect("ready in ")
		x.typed("echo in-$((40+2)); exit 3\n")
		x.expect("in-42")
		x.expect("destroyed after")
		if code := x.wait(); code != 3 {
			t.Errorf("exit code %d; want 3", code)
		}
	})
	run("destroy", "box")
	if got := run("audit"); !strings.Contains(got, " 0 violations") {
		t.Errorf("audit: %s", got)
	}
}

// TestEmbed checks that a broker in this process leaves nothing when it is closed: no
// goroutine, no socket, and the data directory free for the next.
func TestEmbed(t *testing.T) {
	f := testFactory(t)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	before := sockets(t)
	s, err := f.embed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Status(t.Context()); err != nil {
		t.Error(err)
	}
	if err := s.close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if s, err = f.embed(t.Context()); err != nil {
		t.Fatalf("a second time: %v", err)
	}
	if err := s.close(); err != nil {
		t.Errorf("close: %v", err)
	}
	for _, name := range sockets(t) {
		if !slices.Contains(before, name) && ours(name) {
			t.Errorf("%s was left", name)
		}
	}
}

func sockets(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(os.TempDir(), "sandboxer-*", "api.sock"))
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// ours reports that no server answers at a socket: another test's would.
func ours(name string) bool { return !answers(context.Background(), name) }

// TestRegularBackups runs the loop of a server's backups.
func TestRegularBackups(t *testing.T) {
	dir := t.TempDir()
	s, err := sqlstore.OpenSQLite(t.Context(), dir, sqlstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	backUpRegularly(t.Context(), log, dir, 0, 3) // never
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); backUpRegularly(ctx, log, dir, time.Millisecond, 2) }()
	first := ""
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		all := sqlstore.Backups(dir)
		if len(all) > 0 && first == "" {
			first = all[len(all)-1].File
		}
		if len(all) >= 2 && all[len(all)-1].File != first {
			break // the oldest has made way
		}
		if time.Now().After(deadline) {
			t.Fatalf("backups: %v", all)
		}
	}
	cancel()
	<-done
	if n := len(sqlstore.Backups(dir)); n > 3 { // two, and one cut short after it was published
		t.Errorf("%d backups are kept; want 2", n)
	}
	before := len(sqlstore.Backups(dir))
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	backUpRegularly(ctx, log, dir, time.Hour, 9) // the newest is young enough
	if n := len(sqlstore.Backups(dir)); n != before {
		t.Errorf("%d backups after a start; want the %d there were", n, before)
	}
}

// TestFailingExtension: the list says until when routes leave an extension alone, and the reason comes first if
// it could not even be opened.
func TestFailingExtension(t *testing.T) {
	e := &api.Extension{ID: "ext.x", FailingUntil: time.Now().Add(time.Minute)}
	if got := strings.Join(extensionView().row(e), "|"); !strings.Contains(got, "it failed several times in a row; routes skip it until ") {
		t.Errorf("the list has %q", got)
	}
	e.Problem = "the disk is full"
	if got := strings.Join(extensionView().row(e), "|"); !strings.Contains(got, "|the disk is full|") {
		t.Errorf("the list has %q", got)
	}
}

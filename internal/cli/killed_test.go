package cli

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// kills are the calls of an extension, each with the command that leads to it. K stands for the sandbox, which is there
// but where make says that the command itself makes it, and P for a port of this machine, which is connected to.
var kills = []struct {
	verb    fake.Verb
	profile string // default killed
	setup   []string
	do      string
	make    bool
	start   bool   // the server's start leads to it
	running bool   // what do starts says something, and is killed then instead of at its beginning
	again   string // what works afterwards; default the command
}{
	{verb: fake.VerbPlace, make: true},
	{verb: fake.VerbQuote, make: true},
	{verb: fake.VerbProvision, make: true},
	{verb: fake.VerbWaitReady, make: true},
	{verb: fake.VerbBasis, profile: "pooled", start: true},
	{verb: fake.VerbClaim, profile: "pooled", make: true, again: "get K"},
	{verb: fake.VerbList, start: true},
	{verb: fake.VerbProbe, start: true},
	{verb: fake.VerbNotify, start: true},
	{verb: fake.VerbListSnapshots, start: true},
	{verb: fake.VerbExec, do: "exec K -- true"},
	{verb: fake.VerbExec, do: "exec K -- tail -f /proc/self/comm", running: true, again: "get K"},
	{verb: fake.VerbFiles, do: "files ls K /workspace"},
	{verb: fake.VerbCheckpoint, do: "snapshot create K --name s --portable"},
	{verb: fake.VerbProvisionFrom, setup: []string{"snapshot create K --name s --portable"}, do: "restore s --kind portable"},
	{verb: fake.VerbArchive, profile: "plain", do: "snapshot create K --name s --portable"},
	{verb: fake.VerbUnarchive, profile: "plain", setup: []string{"snapshot create K --name s --portable"}, do: "restore s --kind portable"},
	{verb: fake.VerbSnapshot, do: "snapshot create K --name s --native"},
	{verb: fake.VerbRestore, setup: []string{"snapshot create K --name s --native"}, do: "restore s --kind native"},
	{verb: fake.VerbDropSnapshot, setup: []string{"snapshot create K --name s --native"}, do: "snapshot rm s", again: "snapshot ls"},
	{verb: fake.VerbPause, do: "pause K --depth freeze"},
	{verb: fake.VerbResume, setup: []string{"pause K --depth freeze"}, do: "resume K"},
	{verb: fake.VerbRenew, do: "extend K --ttl +1h"},
	{verb: fake.VerbNetwork, do: "network set K --mode none"},
	{verb: fake.VerbCapacity, do: "extension probe ext.killed"},
	{verb: fake.VerbStats, do: "stats K"},
	{verb: fake.VerbDial, do: "port forward K P:7", again: "get K"},
	{verb: fake.VerbTeardown, do: "destroy K --yes", again: "ls --all"},
}

// TestServerKilledInEveryCall kills the server while it waits for each call of an extension in a process of its own, before
// the call has done anything, and the two of them after it has: the next server finishes what was begun, does
// nothing twice, and leaves nothing. Each call has one of the two, in turn; with SANDBOXER_TEST_WHOLE=1 it has both.
func TestServerKilledInEveryCall(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a hundred servers")
	}
	for i, k := range kills {
		for _, both := range []bool{false, true} {
			if both != (i%2 == 0) && os.Getenv("SANDBOXER_TEST_WHOLE") == "" {
				continue
			}
			name := string(k.verb)
			if k.running {
				name += " running"
			}
			t.Run(fmt.Sprintf("%s/both=%t", name, both), func(t *testing.T) {
				t.Parallel()
				profile := cmp.Or(k.profile, "killed")
				r := newKilledRig(t, profile == "pooled")
				create := "create --profile " + profile + " --ttl 1h --input sandbox_id=K"
				if k.verb == fake.VerbClaim { // which whoever chooses an ID does without
					create = "create --profile pooled --ttl 1h --name K"
				}
				do := k.do
				switch {
				case k.make:
					do = create
				case k.start:
					do = ""
				}
				if !k.make {
					r.must(create)
				}
				for _, line := range k.setup {
					r.must(line)
				}
				if k.verb == fake.VerbClaim { // somebody has to be there to claim
					r.until(func() bool { live, _ := r.world.Live(t.Context()); return len(live) > 0 })
					r.must("pool ls")
				}
				if k.start {
					r.kill(false)
				}
				r.killIn(k.verb, do, k.running, both)
				r.serve()
				if again := cmp.Or(k.again, do); again != "" {
					r.insist(again)
				}
				if !strings.HasPrefix(k.do, "destroy") {
					if k.verb == fake.VerbPause {
						r.insist("resume K")
					}
					r.insist("exec K -- true")
				}
				r.over()
			})
		}
	}
}

type killedRig struct {
	t      *testing.T
	home   string
	pooled bool // there are warm sandboxes
	world  *fake.Remote
	server *exec.Cmd    // nil while none runs
	log    bytes.Buffer // of the servers, one after the other
}

// begin starts a server, which need not answer yet.
func (r *killedRig) begin() {
	r.t.Helper()
	cmd := r.command("serve")
	cmd.Stdout, cmd.Stderr = &r.log, &r.log
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.server = cmd
}

// serve starts a server, and returns when it answers.
func (r *killedRig) serve() {
	r.t.Helper()
	r.begin()
	if !r.until(func() bool {
		c, err := net.Dial("unix", filepath.Join(r.home, "api.sock"))
		if err == nil {
			c.Close()
		}
		return err == nil
	}) {
		r.t.Fatal("the server does not answer")
	}
}

func newKilledRig(t *testing.T, pooled bool) *killedRig {
	home, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	r := &killedRig{t: t, home: home, pooled: pooled, world: fake.Connect(filepath.Join(home, "world"))}
	ctx, stop := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- fake.Serve(ctx, fake.ServeOptions{Socket: filepath.Join(home, "world"), Ready: func() { close(ready) }})
	}()
	t.Cleanup(func() {
		r.end()
		r.kill(true)
		if t.Failed() {
			t.Log(r.log.String())
		}
		r.world.Close()
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		removeHome(t, home)
	})
	<-ready
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(home, "fakeextension")
	if err := os.Symlink(self, program); err != nil {
		t.Fatal(err)
	}
	file := func(name, text string) {
		t.Helper()
		name = filepath.Join(home, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"killed", "plain"} {
		config := "  server: " + home + "/world\n  per_hour: 0.01\n  hosts: [one, two]\n"
		if name == "plain" {
			config += "  drop: [checkpoint]\n"
		}
		file("extensions/ext."+name+".yaml", "id: ext."+name+"\ncommand: ["+program+"]\ncapabilities: {isolation_levels: [process], pricing_model: metered}\nconfig:\n"+config)
		file("profiles/profile."+name+".yaml", "id: profile."+name+"\ntitle: x\nextension: ext."+name+"\nisolation: process\nttl: 1h\nmax_ttl: 8h\nnetwork: public\n")
	}
	if pooled {
		file("profiles/profile.pooled.yaml", "id: profile.pooled\ntitle: x\nextension: ext.killed\nisolation: process\nttl: 1h\nmax_ttl: 8h\npool: {size: 1}\n")
	}
	r.serve()
	r.must("credits grant default 100")
	return r
}

func (r *killedRig) command(line string) *exec.Cmd {
	cmd := selfCommand(r.home, strings.Fields(strings.ReplaceAll(line, "K", "k-1"))...)
	cmd.Args[0] = "sandboxer-real" // which has what runs programs
	return cmd
}

func (r *killedRig) must(line string) {
	r.t.Helper()
	if out, err := r.command(line).CombinedOutput(); err != nil {
		r.t.Fatalf("%s: %v\n%s", line, err, out)
	}
}

// until waits until ok is true.
func (r *killedRig) until(ok func() bool) bool {
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// insist repeats a command until it succeeds.
func (r *killedRig) insist(line string) {
	r.t.Helper()
	var out []byte
	var err error
	if !r.until(func() bool { out, err = r.command(line).CombinedOutput(); return err == nil }) {
		r.t.Errorf("afterwards: %s: %v\n%s", line, err, out)
	}
}

// met returns the number of the log's entry that says that a call met the fault of verb, and that of the last one; 0
// if there is none.
func (r *killedRig) met(verb fake.Verb) (fault, last int) {
	log, err := r.world.Log(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range log {
		if e.Op == fake.OpFault && e.Note == string(verb) {
			fault = e.Seq
		}
		last = e.Seq
	}
	return fault, last
}

// does are the verbs whose effects are in the world's log.
var does = map[fake.Verb]bool{fake.VerbProvision: true, fake.VerbTeardown: true, fake.VerbSnapshot: true, fake.VerbRestore: true, fake.VerbDropSnapshot: true,
	fake.VerbPause: true, fake.VerbResume: true, fake.VerbRenew: true, fake.VerbNetwork: true, fake.VerbClaim: true, fake.VerbProvisionFrom: true}

// killIn has a command lead to a call of verb, which does not answer, and kills the server; or, after the call has
// done what it was asked for, the server and its extensions. With running the call does its work, and is in the middle
// of it when its output begins.
func (r *killedRig) killIn(verb fake.Verb, line string, running, both bool) {
	r.t.Helper()
	if !running {
		if err := r.world.Inject(r.t.Context(), fake.Fault{Verb: verb, Hang: true, Lost: both, Times: 1}); err != nil {
			r.t.Fatal(err)
		}
	}
	out, err := os.Create(filepath.Join(r.home, "out"))
	if err != nil {
		r.t.Fatal(err)
	}
	defer out.Close()
	said := func() string {
		data, err := os.ReadFile(out.Name())
		if err != nil {
			r.t.Error(err)
		}
		return string(data)
	}
	ended := make(chan error, 1)
	line, stop := r.connect(line)
	defer stop()
	cmd := r.command(line)
	if line == "" {
		r.begin()
		ended <- nil
	} else {
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			r.t.Fatal(err)
		}
		go func() { ended <- cmd.Wait() }()
	}
	reached := false
	r.until(func() bool {
		over := line != "" && len(ended) > 0
		if running {
			reached = strings.Contains(said(), "tail\n")
			return reached || over
		}
		fault, last := r.met(verb)
		reached = fault > 0 && (!both || !does[verb] || last > fault)
		return reached || over
	})
	if !reached {
		if line != "" {
			_ = cmd.Process.Kill()
		}
		<-ended
		r.t.Fatalf("%s does not lead to %s\n%s", line, verb, said())
	}
	left := r.kill(both)
	if line != "" {
		_ = cmd.Process.Kill() // it may wait for another server
	}
	<-ended
	if !r.until(func() bool {
		for _, pid := range left {
			if !procs.Ended(pid) {
				return false
			}
		}
		return true
	}) {
		r.t.Errorf("processes of the extension outlive the server: %v", left)
	}
}

// connect puts a port in the place of P in line, if it is there, and connects to it until stop.
func (r *killedRig) connect(line string) (_ string, stop func()) {
	r.t.Helper()
	if !strings.Contains(line, "P:") {
		return line, func() {}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	addr := l.Addr().(*net.TCPAddr)
	l.Close()
	ctx, cancel := context.WithCancel(r.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if c, err := new(net.Dialer).DialContext(ctx, "tcp", addr.String()); err == nil {
				<-ctx.Done()
				c.Close()
			}
			time.Sleep(time.Millisecond)
		}
	}()
	return strings.ReplaceAll(line, "P:", strconv.Itoa(addr.Port)+":"), func() { cancel(); <-done }
}

// end ends the server, if one runs, as an operator does: it takes what it mounted with it.
func (r *killedRig) end() {
	server := r.server
	if server == nil {
		return
	}
	_ = server.Process.Signal(syscall.SIGTERM)
	late := time.AfterFunc(time.Minute, func() { _ = server.Process.Kill() })
	_ = server.Wait()
	late.Stop()
	r.server = nil
}

// kill kills the server, if one runs, and returns the processes of its extensions, which it kills as well
// if both is set.
func (r *killedRig) kill(both bool) (extensions []int) {
	names, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil || !strings.HasPrefix(string(data), filepath.Join(r.home, "fakeextension")+"\x00") {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name))); err == nil {
			extensions = append(extensions, pid)
		}
	}
	if r.server != nil {
		_ = r.server.Process.Kill()
		_ = r.server.Wait()
		r.server = nil
	}
	for _, pid := range extensions {
		if both {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	return extensions
}

// over destroys all there is, and has everybody look for what is left.
func (r *killedRig) over() {
	r.t.Helper()
	r.insist("destroy --all --yes")
	out, err := r.command("snapshot ls -q").Output()
	if err != nil {
		r.t.Error(err)
	}
	for _, id := range strings.Fields(string(out)) {
		r.insist("snapshot rm " + id)
	}
	if r.pooled {
		r.insist("pool drain pooled")
		if err := os.Remove(filepath.Join(r.home, "profiles", "profile.pooled.yaml")); err != nil {
			r.t.Error(err)
		}
		r.insist("reload")
	}
	if !r.until(func() bool {
		live, err := r.world.Live(r.t.Context())
		return err == nil && len(live) == 0
	}) {
		live, err := r.world.Live(r.t.Context())
		r.t.Errorf("left over: %+v, %v", live, err)
	}
	r.insist("reconcile")
	if out, err := r.command("audit").CombinedOutput(); err != nil || !strings.Contains(string(out), " 0 violations") {
		r.t.Errorf("audit: %v\n%s", err, out)
	}
	log, err := r.world.Log(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, fault := range fake.Audit(log, true) {
		r.t.Errorf("world: %s", fault)
	}
}

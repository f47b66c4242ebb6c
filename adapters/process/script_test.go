package process_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/process"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// The example in the documentation passes the suite as far as it claims.
func TestConformanceOfScript(t *testing.T) {
	file, err := filepath.Abs("../../docs/examples/extension-sh/directories.sh")
	if err != nil {
		t.Fatal(err)
	}
	dir, root := t.TempDir(), t.TempDir()
	open := func(owner string) func(*testing.T) sandboxer.Extension {
		return func(t *testing.T) sandboxer.Extension {
			e, err := openProgram(t, dir, owner, script(self(t), file), map[string]any{"root": root})
			if err != nil {
				t.Fatal(err)
			}
			return e
		}
	}
	extensiontest.RunWire(t, extensiontest.Harness{
		Inputs: []sandboxer.Input{{Name: "motd", Restricted: true}},
		Open:   open("conformance"), Stranger: open("stranger"),
		Want: []sandboxer.Capability{sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList},
		Kill: func(t *testing.T, h sandboxer.Handle) { os.RemoveAll(filepath.Join(root, "conformance", h.SandboxID)) },
	})
	if left, _ := filepath.Glob(root + "/*/*"); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}

// script is a program that serves a script of sh: this test binary plays `sandboxer extension serve-script`.
func script(self string, args ...string) sandboxer.Program {
	return sandboxer.Program{Command: append([]string{self, "script", "/bin/sh"}, args...)}
}

// scripted opens a script of sh.
func scripted(t *testing.T, text string, config map[string]any) *backend.Backend {
	t.Helper()
	e, err := openProgram(t, t.TempDir(), "o", script(self(t), "-c", text, "sh"), config)
	if err != nil {
		t.Fatal(err)
	}
	b := backend.New("ext.test", e, backend.Options{Close: time.Minute})
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func specOf(id string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: "o"}
}

// What a script gets, and what is made of what it says.
func TestScriptAnswers(t *testing.T) {
	const verbs = `case $1 in describe) exit 64 ;; esac; `
	b := scripted(t, verbs+`echo "a=$SANDBOXER_ID $SANDBOXER_GENERATION $SANDBOXER_HOST $SANDBOXER_OWNER $SANDBOXER_INPUT_MY_KEY $SANDBOXER_CONFIG_RATE"; echo ref=r; echo b==`, map[string]any{"rate": 1.5})
	spec := specOf("x1")
	spec.Inputs, spec.Vouched = map[string]string{"my-key": "v'\"; rm"}, []string{"my-key"}
	h, err := b.Provision(t.Context(), spec)
	if want := `{"a":"x1 1 localhost o v'\"; rm 1.5","b":"="}`; err != nil || string(h.Data) != want || h.Ref != "r" || h.Host != "localhost" {
		t.Errorf("Provision = %+v %s, %v\nwant %s", h, h.Data, err, want)
	}
	for text, want := range map[string]string{
		`echo kind=exhausted; echo message=full; echo retry_after_ms=5; exit 1`: "exhausted: full",
		`echo >&2 why; exit 3`:                  "failed: ext.test: provision failed (exit status 3): why",
		`exit 64`:                               "unsupported: ext.test does not support provision",
		`echo kind=odd; echo message=m; exit 1`: "internal: internal error: m",
		`echo no such line`:                     `internal: internal error: the answer of ext.test to provision cannot be read: this line is not key=value: no such line`,
		`echo '{"sandbox_id": "other", "generation": 1}'`:    "internal: the extension returned a handle of other/1 for x2/1",
		`echo '{"sandbox_id": "x2", "sandbox_id": "x2"}'`:    "internal: internal error: the answer of ext.test to provision cannot be read",
		`printf '{"sandbox_id": "x2", "generation": 1e308}'`: "internal: the extension's answer to provision cannot be read",
		`printf 'a=\377\n'`:         "",
		`head -c 2000000 /dev/zero`: "unavailable: /bin/sh was ended: its answer is longer than 1048576 bytes",
		`kill -9 $$`:                "unavailable: /bin/sh has ended (signal: killed)",
		`(sleep 8411 & ) ; SANDBOXER_EXTENSION_PROCESS=$SANDBOXER_EXTENSION_MARK setsid sleep 8411 & echo sandbox_id=x2`: "",
		`echo '{"kind": "denied", "message": "no", "hint": "ask"}'; exit 1`:                                              "denied: no",
		`head -c 100 /dev/zero | tr '\0' x >&2; echo >&2; sleep 0.1; exit 1`:                                             "failed: ext.test: provision failed (exit status 1): xxxx",
		`exec >&-; exit 0`: "",
	} {
		b := scripted(t, verbs+text, nil)
		_, err := b.Provision(t.Context(), specOf("x2"))
		got := ""
		if err != nil {
			got = fmt.Sprintf("%s: %s", sandboxer.KindOf(err), err)
		}
		if want == "" && err != nil || !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s\nwant %s", text, got, want)
		}
	}
	if left, err := procs.WithArg("8411"); err != nil || len(left) > 0 {
		t.Errorf("what scripts left running: %v, %v", left, err)
	}
}

// What a script keeps between sandboxes is listed and removed as in any other extension.
func TestCachesOfScripts(t *testing.T) {
	const says = `case $1 in
describe) echo capabilities=caches ;;
caches) echo "cache=7 a b of $SANDBOXER_HOST"; echo cache=0 c ;;
prune_caches) %s ;;
*) exit 64 ;;
esac`
	list := func(of []sandboxer.Cache) (out []string) {
		for _, c := range of {
			out = append(out, fmt.Sprintf("%s: %s, %d", c.Host, c.Name, c.Bytes))
		}
		return out
	}
	b := scripted(t, fmt.Sprintf(says, `echo '{"values": [{"host": "far", "name": "c", "bytes": 1}]}'`), nil)
	there, err := b.Caches(t.Context(), "far")
	if got, want := list(there), []string{"far: a b of far, 7", "far: c, 0"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("Caches = %q, %v; want %q", got, err, want)
	}
	gone, err := b.PruneCaches(t.Context(), "")
	if got, want := list(gone), []string{"far: c, 1"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("PruneCaches = %q, %v; want %q", got, err, want)
	}
	for text, want := range map[string]string{"echo cache=x y": "cannot be read", "echo cache=5": "want cache=BYTES NAME", "echo kind=denied; echo message=no; exit 1": "no"} {
		if got, err := scripted(t, fmt.Sprintf(says, text), nil).PruneCaches(t.Context(), ""); len(got) > 0 || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v; want %s", text, got, err, want)
		}
	}
}

// A value that a script cannot get as a variable is refused, and not left out.
func TestVariablesOfScripts(t *testing.T) {
	b := scripted(t, `case $1 in describe) exit 64 ;; esac`, nil)
	for _, c := range []struct {
		inputs map[string]string
		want   string
	}{
		{map[string]string{"a-b": "1", "a_b": "2"}, "SANDBOXER_INPUT_A_B"},
		{map[string]string{"long": strings.Repeat("x", 200<<10)}, "SANDBOXER_INPUT_LONG cannot be passed to a script: it has more than 122880 bytes"},
		{map[string]string{"nul": "a\x00b"}, "NUL"},
	} {
		spec := specOf("v1")
		spec.Inputs = c.inputs
		for k := range c.inputs {
			spec.Vouched = append(spec.Vouched, k)
		}
		if _, err := b.Provision(t.Context(), spec); sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v; want %s", err, c.want)
		}
	}
}

// A handle may hold what no variable can: the script reads it.
func TestHandlesOfScripts(t *testing.T) {
	b := scripted(t, `case $1 in describe) exit 64 ;; provision) echo '{"sandbox_id": "h1", "generation": 1, "data": [1, {"a": null}]}' ;;
teardown) case $(cat) in *'"data":[1,{"a":null}]'*) echo removed=h1 ;; esac ;; esac`, nil)
	h, err := b.Provision(t.Context(), specOf("h1"))
	if err != nil {
		t.Fatal(err)
	}
	if r, err := b.Teardown(t.Context(), h); err != nil || !slices.Equal(r.Removed, []string{"h1"}) {
		t.Errorf("Teardown = %+v, %v", r, err)
	}
}

// A script with a capability that needs streams is refused when it is opened.
func TestScriptsHaveNoStreams(t *testing.T) {
	for _, says := range []string{"echo capabilities=probe,exec", `echo '{"capabilities": ["dial"]}'`} {
		_, err := openProgram(t, t.TempDir(), "o", script(self(t), "-c", says, "sh"), nil)
		if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(err.Error(), "a script cannot have the capability") {
			t.Errorf("%s: %v", says, err)
		}
	}
}

// A call that is cancelled ends its script, and all that it started, at once.
func TestScriptIsCanceled(t *testing.T) {
	for name, does := range map[string]string{
		"a helper":             `trap '' TERM INT; SANDBOXER_EXTENSION_PROCESS=$SANDBOXER_EXTENSION_MARK setsid sleep 8412 & sleep 8412 & wait`,
		"a session of its own": `exec setsid sh -c 'sleep 8412 & sleep 8412'`,
	} {
		t.Run(name, func(t *testing.T) {
			b := scripted(t, "case $1 in describe) exit 64 ;; esac; "+does, nil)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() { _, err := b.Provision(ctx, specOf("x3")); ended <- err }()
			for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
				if pids, err := procs.WithArg("8412"); err == nil && len(pids) == 2 {
					break
				}
				if time.Now().After(end) {
					t.Fatal("the script does not start what it is to start")
				}
			}
			cancel()
			if err := <-ended; sandboxer.KindOf(err) != sandboxer.Canceled {
				t.Errorf("Provision: %v", err)
			}
			if left, err := procs.WithArg("8412"); err != nil || len(left) > 0 {
				t.Errorf("still running: %v, %v", left, err)
			}
		})
	}
}

// A script is not started for a call whose caller does not wait any more.
func TestCanceledCallsStartNothing(t *testing.T) {
	dir := t.TempDir()
	e, err := openSecret(t, dir, script(self(t), "-c", `case $1 in describe) exit 64 ;; esac; echo $1 >>began`, "sh"))
	if err != nil {
		t.Fatal(err)
	}
	defer e.(interface{ Close() error }).Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 { // it was a matter of luck
		if _, err := e.Teardown(ctx, sandboxer.Handle{SandboxID: "x5", Generation: 1}); sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Errorf("Teardown: %v", err)
		}
	}
	if _, err := e.WaitReady(t.Context(), sandboxer.Handle{SandboxID: "x5", Generation: 1}); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "began")); string(data) != "wait_ready\n" {
		t.Errorf("what was started: %q, %v", data, err)
	}
}

// Secrets are in what a script reads, and nowhere else.
func TestSecretsOfScripts(t *testing.T) {
	t.Setenv("HUSH", "hush-hush-hush")
	e, err := openSecret(t, t.TempDir(), script(self(t), "-c",
		`case $1 in describe) exit 64 ;; esac
in=$(cat) h=hush; h=$h-$h-$h
case $in in *$h*) ;; *) echo message=no secret; exit 1 ;; esac
if env | grep -q hush; then echo message=in the environment; exit 1; fi
if cat /proc/$$/cmdline /proc/$PPID/cmdline | grep -q $h; then echo message=in the arguments; exit 1; fi
if grep -q hush /proc/$PPID/environ; then echo message=in the environment of what started it; exit 1; fi
case $1 in wait_ready) echo "this is $h$h"; exit ;; esac
echo >&2 it is $h; echo message=it is $h; exit 1`, "sh"))
	if err != nil {
		t.Fatal(err)
	}
	defer e.(interface{ Close() error }).Close()
	_, err = e.Provision(t.Context(), specOf("x4"))
	if err == nil || err.Error() != "it is [redacted]" {
		t.Errorf("Provision: %v", err)
	}
	// It is shown what of an answer cannot be read.
	_, err = e.WaitReady(t.Context(), sandboxer.Handle{SandboxID: "x4", Generation: 1})
	if err == nil || !strings.Contains(err.Error(), `not key=value: this is [redacted]`) || strings.Contains(fmt.Sprintf("%+v", err), "hush") {
		t.Errorf("WaitReady: %+v", err)
	}
}

// broker is a broker that waits for a call of a script for ever.
func broker(dir string) {
	e, err := process.Adapter.Open(context.Background(), sandboxer.Env{
		Extension: "ext.test", Owner: "o", Dir: dir,
		Config: func(bool) (json.RawMessage, error) { return json.RawMessage("{}"), nil },
		Program: script(os.Args[0], "-c",
			`case $1 in describe) exit 64 ;; esac; SANDBOXER_EXTENSION_PROCESS=$SANDBOXER_EXTENSION_MARK setsid sleep 8413 & (sleep 8413 & sleep 8413); wait`, "sh"),
	})
	if err == nil {
		_, err = e.Provision(context.Background(), specOf("x5"))
	}
	panic(fmt.Sprint("the call ended: ", err))
}

// A broker that is killed in the middle of a call leaves nothing of it running, also not what the script has started.
func TestScriptDiesWithBroker(t *testing.T) {
	cmd := exec.Command(self(t), "broker", t.TempDir())
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	await := func(n int) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			pids, err := procs.WithArg("8413")
			if err == nil && len(pids) == n {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("running: %v, %v; want %d", pids, err, n)
				return
			}
		}
	}
	await(3)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	await(0)
}

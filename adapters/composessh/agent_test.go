package composessh

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// made is a sandbox that is up.
func (r *rig) made(t *testing.T, e *extension, id string) sandboxer.Handle {
	t.Helper()
	spec := sandboxer.Spec{ID: id, Generation: 1, Owner: e.env.Owner, Place: "host-1", Inputs: map[string]string{"repo": repo(t, single, nil)}}
	h, err := e.Provision(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := e.Teardown(context.WithoutCancel(t.Context()), h); err != nil {
			t.Error(err)
		}
	})
	if _, err := e.WaitReady(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	return h
}

// said is what a command prints, which must end with that code.
func said(t *testing.T, e *extension, h sandboxer.Handle, code int, args ...string) string {
	t.Helper()
	out := &capture.First{Max: 1 << 20}
	exit, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: args, Stdout: out, Stderr: out})
	if err != nil || exit.Code != code {
		t.Fatalf("%q: %+v, %v: %s; want %d", args, exit, err, out, code)
	}
	return out.String()
}

// TestAgentInService: commands go by the agent, whose program no process inside can replace; where it
// cannot run, the engine runs them.
func TestAgentInService(t *testing.T) {
	t.Run("docker", func(t *testing.T) { testAgentInService(t, current(t)) })
	t.Run("podman", func(t *testing.T) { testAgentInService(t, "podman-compose") })
}

func testAgentInService(t *testing.T, compose string) {
	t.Parallel()
	r := newRig(t, compose, 1)
	e := r.open(t, "agent-"+r.program)
	e.settle = -time.Second
	t.Cleanup(func() { e.Close() })
	h := r.made(t, e, "by")
	// It is the parent of what it starts.
	if got := said(t, e, h, 0, "sh", "-c", `tr '\0' ' ' </proc/$PPID/cmdline`); !strings.HasPrefix(got, agentPath+" init ") {
		t.Errorf("a command was started by %q", got)
	}
	for _, try := range []string{"echo x >" + agentPath, "rm " + agentPath, "mv /.sandboxer /tmp/x", "rmdir /.sandboxer", "mkdir /.sandboxer/more", "chmod 777 " + agentPath} {
		if exit, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", try}}); err != nil || exit.Code == 0 {
			t.Errorf("%s: %+v, %v", try, exit, err)
		}
	}
	// What the agent's wire cannot say, the engine says.
	for _, cmd := range []sandboxer.Cmd{{Args: []string{"echo", "a\xff"}}, {Args: []string{"sh", "-c", "echo $V"}, Env: map[string]string{"V": "a\xff"}}} {
		var out bytes.Buffer
		cmd.Stdout = &out
		if exit, err := e.Exec(t.Context(), h, cmd); err != nil || exit.Code != 0 || !strings.HasPrefix(out.String(), "a") {
			t.Errorf("%q: %+v, %v: %q", cmd.Args, exit, err, &out)
		}
	}
	// With input the engine runs a command, which takes no second connection.
	var out bytes.Buffer
	if _, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader("in"), Stdout: &out}); err != nil || out.String() != "in" {
		t.Errorf("cat: %q, %v", &out, err)
	}

	programs, _ := filepath.Glob(filepath.Join(r.servers[0].Dir, ".sandboxer/compose/.agent/*/sandboxer-agent"))
	if len(programs) != 1 {
		t.Fatalf("agents on the host: %q", programs)
	}
	caches, err := e.Caches(t.Context(), "host-1")
	if err != nil || len(caches) != 1 || caches[0].Bytes < 1<<20 || !strings.HasPrefix(caches[0].Name, "sandboxer-agent/") {
		t.Errorf("caches %+v, %v", caches, err)
	}
	if caches, err := e.PruneCaches(t.Context(), "host-1"); err != nil || len(caches) != 0 {
		t.Errorf("pruned while it is in use: %+v, %v", caches, err)
	}

	other := r.made(t, e, "broken")
	if err := os.Chmod(programs[0], 0o644); err != nil { // in every sandbox that has it
		t.Fatal(err)
	}
	for range 2 {
		if got := said(t, e, other, 0, "echo", "still"); got != "still\n" {
			t.Errorf("without an agent: %q", got)
		}
	}
	if _, err := e.StartProcess(t.Context(), other, sandboxer.ProcessSpec{Args: []string{"true"}}); sandboxer.KindOf(err) != sandboxer.Unsupported {
		t.Errorf("StartProcess without an agent: %v", err)
	}
}

// TestUnusedAgents: agents that no sandbox names are removed, except the newest, and so are incomplete ones.
func TestUnusedAgents(t *testing.T) {
	root := t.TempDir()
	used, unused, newest := strings.Repeat("a", 64), strings.Repeat("b", 64), strings.Repeat("c", 64)
	put := func(name, text string) string {
		t.Helper()
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		return file
	}
	for _, d := range []string{used, unused, newest, "." + unused} {
		put(".agent/"+d+"/sandboxer-agent", "x")
	}
	old := time.Now().Add(-2 * time.Hour)
	for _, f := range []string{put(".agent/"+newest+"/.sbx-cut", "half"), filepath.Join(root, ".agent/."+unused)} {
		if err := os.Chtimes(f, old, old); err != nil {
			t.Fatal(err)
		}
	}
	put(".agent/"+newest+"/.sbx-coming", "half")
	meta := put("sbx-o-one-g1/meta.json", `{"v":1,"agent":"`+used+`"}`)
	run := func(newest string) (left []string) {
		t.Helper()
		if out, err := exec.Command("sh", "-c", unusedAgents, "sh", root, "", "", newest).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		files, err := filepath.Glob(filepath.Join(root, ".agent", "*", "*"))
		hidden, _ := filepath.Glob(filepath.Join(root, ".agent", ".*", "*"))
		more, _ := filepath.Glob(filepath.Join(root, ".agent", "*", ".sbx*"))
		for _, f := range slices.Concat(files, hidden, more) {
			name, _ := filepath.Rel(filepath.Join(root, ".agent"), f)
			left = append(left, name[:1]+filepath.Base(name))
		}
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(left)
		return slices.Compact(left)
	}
	if left := run(newest); !slices.Equal(left, []string{"asandboxer-agent", "c.sbx-coming", "csandboxer-agent"}) {
		t.Errorf("left %q", left)
	}
	if err := os.Remove(meta); err != nil {
		t.Fatal(err)
	}
	if left := run(""); len(left) != 0 {
		t.Errorf("with no sandbox and no agent of ours: %q", left)
	}
}

//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/api"
)

// A use of a sandbox never ends by itself.
type use struct {
	name string
	// do calls amid when it is in the middle of it, and returns what its client is told.
	do func(r *containersRig, id string, amid func()) error
	// after holds when the next server is there; nil for what leaves nothing.
	after func(r *containersRig, id string) error
}

// large is the size of a file that no buffers on the way can hold.
const large = 8 << 20

// uses are all that a server can be amid of without a request to the engine that changes something.
var uses = []use{
	{name: "a silent command", do: func(r *containersRig, id string, amid func()) error {
		return r.exec(id, sandboxer.Cmd{Args: []string{"sh", "-c", "setsid sleep 1001 & echo on; exec sleep 1002"}, Stdout: &upTo{n: 1, then: amid}})
	}},
	{name: "a terminal", do: func(r *containersRig, id string, amid func()) error {
		return r.exec(id, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; exec sleep 1003"}, TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}, Stdout: &upTo{n: 1, then: amid}})
	}},
	{name: "output", do: func(r *containersRig, id string, amid func()) error {
		return r.exec(id, sandboxer.Cmd{Args: []string{"yes", "output"}, Stdout: &upTo{n: 1 << 20, then: func() { amid(); <-r.killed }}})
	}},
	{name: "input", do: func(r *containersRig, id string, amid func()) error {
		return r.exec(id, sandboxer.Cmd{Args: []string{"cat"}, Stdin: endless{}, Stdout: &upTo{n: 1 << 20, then: func() { amid(); <-r.killed }}})
	}},
	{name: "a command by the agent's wire", do: func(r *containersRig, id string, amid func()) error {
		c := r.agent(id)
		defer c.Close()
		_, err := c.Exec(r.t.Context(), sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; exec sleep 1004"}, Stdout: &upTo{n: 1, then: amid}})
		return err
	}},
	{name: "upload", do: func(r *containersRig, id string, amid func()) error {
		ended := make(chan error, 1)
		go func() { ended <- r.c.WriteFile(r.t.Context(), id, "/workspace/upload", 0, &trickle{}) }()
		for {
			select {
			case err := <-ended:
				return err
			case <-time.After(10 * time.Millisecond):
			}
			for f, err := range r.c.ListFiles(r.t.Context(), id, "/workspace") {
				if err != nil {
					break
				}
				if strings.HasPrefix(path.Base(f.Path), ".sandboxer-") && f.Size > 0 { // the content on its way
					amid()
					return <-ended
				}
			}
		}
	}, after: func(r *containersRig, id string) error {
		if err := r.c.WriteFile(r.t.Context(), id, "/workspace/upload", 0, strings.NewReader("whole\n")); err != nil {
			return err
		}
		return r.says(id, "whole\n", "cat", "upload")
	}},
	{name: "download", do: func(r *containersRig, id string, amid func()) error {
		f, err := r.c.ReadFile(r.t.Context(), id, "/workspace/large")
		if err != nil {
			return err
		}
		defer f.Close()
		if _, err = io.ReadFull(f, make([]byte, 64<<10)); err == nil {
			amid()
			<-r.killed // else it would be done
			_, err = io.Copy(io.Discard, f)
		}
		return err
	}, after: func(r *containersRig, id string) error {
		f, err := r.c.ReadFile(r.t.Context(), id, "/workspace/large")
		if err != nil {
			return err
		}
		defer f.Close()
		n, err := io.Copy(io.Discard, f)
		if err == nil && n != large {
			err = fmt.Errorf("the file has %d bytes", n)
		}
		return err
	}},
	{name: "a port", do: func(r *containersRig, id string, amid func()) error {
		c, err := r.c.Dial(r.t.Context(), id, 1005)
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err = io.ReadFull(c, make([]byte, 1)); err == nil {
			amid()
			_, err = io.Copy(io.Discard, c)
		}
		if err != nil { // connections tell no kind
			err = sandboxer.E(sandboxer.Unavailable, err, "the connection broke")
		}
		return err
	}},
}

// unended is what runs in the sandbox before any use, and after it.
var unended = []string{"nc -ll -p 1005 -e yes", "sleep 2001", "sleep 2002"}

// upTo calls then when n bytes were written.
type upTo struct {
	n    int
	then func()
}

func (w *upTo) Write(p []byte) (int, error) {
	if w.n > 0 && w.n <= len(p) {
		w.then()
	}
	w.n -= len(p)
	return len(p), nil
}

// endless is an input without an end.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// A trickle is a file of which nearly nothing more comes.
type trickle struct{ begun bool }

func (t *trickle) Read(p []byte) (int, error) {
	if t.begun {
		time.Sleep(10 * time.Millisecond)
		return copy(p, "x"), nil
	}
	t.begun = true
	return len(p), nil
}

func (r *containersRig) exec(id string, cmd sandboxer.Cmd) error {
	x, err := r.c.Exec(r.t.Context(), id, cmd)
	if err == nil {
		err = fmt.Errorf("it ended with %d", x.Code)
	}
	return err
}

// agent is a client of the agent in a sandbox, by way of the server.
func (r *containersRig) agent(id string) *agent.Client {
	return agent.NewClient(agent.ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) { return r.c.DialAgent(ctx, id) }})
}

// inside lists what runs in a sandbox beside the agent, by the engine.
func (r *containersRig) inside(id string) (list []string, connections int, _ error) {
	r.t.Helper()
	containers := r.on("container", "dev.sandboxer.docker.id="+id)
	if len(containers) != 1 {
		return nil, 0, fmt.Errorf("there are containers %q of %s", containers, id)
	}
	cmd := exec.Command("docker", "top", containers[0], "-eo", "pid,args") // it wants the first
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+r.host)
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return nil, 0, fmt.Errorf("docker top: %w: %s", err, said.String())
	}
	for line := range strings.Lines(string(out)) {
		_, line, _ = strings.Cut(strings.TrimSpace(line), " ")
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, "/.sandboxer/sandboxer-agent connect "):
			connections++
		case line != "COMMAND" && !strings.HasPrefix(line, "/.sandboxer/sandboxer-agent init "):
			list = append(list, line)
		}
	}
	slices.Sort(list)
	return list, connections, nil
}

// TestContainersKilledInUse kills the server by SIGKILL while clients use a sandbox: commands run, with output, input and a terminal,
// files are on their way, a port and the agent are connected to, and an archive is being saved; all of it at once, and in the whole run one after the other, too. Every client is told
// that it failed. With the next server the sandbox is there, what was begun has ended inside with all that it had started, no connection is left
// behind, and what clients did not wait for goes on.
func TestContainersKilledInUse(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	t.Parallel()
	r := newContainersRig(t, &containersEngine)
	const id = "used"
	if _, err := r.create(id, ""); err != nil {
		t.Fatal(err)
	}
	// What nobody waits for: a process, what a command left behind, and a server that never ends.
	c := r.agent(id)
	if _, err := c.Start(t.Context(), sandboxer.ProcessSpec{Args: []string{"sh", "-c", "echo begun; exec sleep 2001"}, Tag: "kept"}); err != nil {
		t.Fatal(err)
	}
	c.Close()
	for _, script := range []string{
		fmt.Sprintf("head -c %d /dev/urandom >large", large),
		"sleep 2002 >/dev/null 2>&1 &",
		"nc -ll -p 1005 -e yes >/dev/null 2>&1 & until nc 127.0.0.1 1005 </dev/null 2>/dev/null | grep -qm1 y; do :; done",
	} {
		if err := r.says(id, "", "sh", "-c", script); err != nil {
			t.Fatal(err)
		}
	}
	for _, frozen := range []bool{false, true} {
		r.inUse(id, uses, frozen)
		if whole() {
			for _, u := range uses {
				r.inUse(id, []use{u}, frozen)
			}
		}
	}

	// An archive is being saved.
	save := use{name: "a snapshot", do: func(r *containersRig, id string, amid func()) error {
		ended := make(chan error, 1)
		go func() {
			_, err := r.c.Snapshot(t.Context(), id, api.CreateSnapshot{Name: "of-" + id, Kind: sandboxer.SnapshotPortable})
			ended <- err
		}()
		for {
			select {
			case err := <-ended:
				return err
			default:
			}
			if s, err := r.c.GetSnapshot(t.Context(), "of-"+id); err == nil && s.State == sandboxer.SnapshotSaving {
				amid()
				return <-ended
			}
		}
	}, after: func(r *containersRig, id string) error {
		r.until("what was half saved is no snapshot", func() error {
			if _, err := r.c.Sweep(t.Context()); err != nil {
				return err
			}
			s, err := r.c.GetSnapshot(t.Context(), "of-"+id)
			if err == nil && s.State == sandboxer.SnapshotSealed {
				t.Fatalf("what was half saved is a snapshot: %+v", s)
			}
			if err == nil && s.State != sandboxer.SnapshotDropped {
				return fmt.Errorf("it is %s", s.State)
			}
			return nil
		})
		s, err := r.c.Snapshot(t.Context(), id, api.CreateSnapshot{Name: "again-" + id, Kind: sandboxer.SnapshotPortable})
		if err == nil && s.State != sandboxer.SnapshotSealed {
			err = fmt.Errorf("it is %s: %s", s.State, s.Message)
		}
		if err == nil {
			_, err = r.c.DropSnapshot(t.Context(), "again-"+id)
		}
		return err
	}}
	r.inUse(id, []use{save}, false)
	if _, err := r.c.Destroy(t.Context(), id, true); err != nil {
		t.Error(err)
	}
	r.nothing()
}

// inUse kills the server amid uses of a sandbox, which is perhaps frozen then.
func (r *containersRig) inUse(id string, uses []use, frozen bool) {
	r.t.Helper()
	r.killed = make(chan struct{})
	ended := make([]chan error, len(uses))
	for i, u := range uses {
		ended[i] = make(chan error, 1)
		amid := make(chan struct{})
		go func() { ended[i] <- u.do(r, id, func() { close(amid) }) }()
		select {
		case <-amid:
		case err := <-ended[i]:
			r.t.Fatalf("%s: %v", u.name, err)
		case <-time.After(2 * time.Minute):
			r.t.Fatalf("%s does not begin", u.name)
		}
	}
	if frozen {
		if _, err := r.c.Pause(r.t.Context(), id, api.PauseSandbox{Depth: sandboxer.PauseFreeze}); err != nil {
			r.t.Fatal(err)
		}
	}
	r.kill()
	close(r.killed)
	for i, u := range uses {
		select {
		case err := <-ended[i]:
			if sandboxer.KindOf(err) != sandboxer.Unavailable {
				r.t.Errorf("%s: the client of a server that was killed is told: %v", u.name, err)
			}
		case <-time.After(2 * time.Minute):
			r.t.Fatalf("%s does not end with the server", u.name)
		}
	}
	began := time.Now()
	r.start()
	if frozen {
		if sb, err := r.c.Get(r.t.Context(), id); err != nil || sb.State != sandboxer.Paused {
			r.t.Errorf("what was frozen is %+v, %v", sb, err)
		}
		if _, err := r.c.Resume(r.t.Context(), id, api.ResumeSandbox{}); err != nil {
			r.t.Fatal(err)
		}
	}
	if sb, err := r.c.Get(r.t.Context(), id); err != nil || sb.State != sandboxer.Running || sb.Generation != 1 {
		r.t.Errorf("after the kill the sandbox is %+v, %v", sb, err)
	}
	if err := r.mine(id); err != nil {
		r.t.Error(err)
	}
	for _, u := range uses {
		if u.after != nil {
			if err := u.after(r, id); err != nil {
				r.t.Errorf("%s, once more: %v", u.name, err)
			}
		}
	}
	r.until("all that was begun has ended inside", func() error {
		list, connections, err := r.inside(id)
		if err == nil && (!slices.Equal(list, unended) || connections > 1) {
			return fmt.Errorf("there is %q, and want %q; %d connections", list, unended, connections)
		}
		return err
	})
	// Whoever comes back to a process finds what it said.
	ctx, cancel := context.WithTimeout(r.t.Context(), 2*time.Minute)
	defer cancel()
	c := r.agent(id)
	defer c.Close()
	list, err := c.Processes(ctx)
	if err != nil || len(list) != 1 || list[0].Tag != "kept" {
		r.t.Fatalf("processes are %+v, %v", list, err)
	}
	var said bytes.Buffer
	if _, err := c.Attach(ctx, list[0].PID, sandboxer.ProcessStreams{Replay: true, Stdout: io.MultiWriter(&said, &upTo{n: 6, then: cancel})}); ctx.Err() == nil || said.String() != "begun\n" {
		r.t.Errorf("the process says %q, %v", said.String(), err)
	}
	r.sound()
	r.t.Logf("killed amid %d uses, frozen=%t: well again after %v", len(uses), frozen, time.Since(began).Round(time.Millisecond))
}

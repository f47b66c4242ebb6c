//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
)

// What takes long runs in part, and whole with SANDBOXER_TEST_WHOLE=1. It is read
// while a test runs: the cache of go test does not see what is read before.
func whole() bool { return os.Getenv("SANDBOXER_TEST_WHOLE") != "" }

// containersEngine is for who does not kill it.
var containersEngine enginetest.Docker

// A containersRig is an installation that makes containers on an engine, by way of a gate. Its server is killed, and another one started.
type containersRig struct {
	t      testing.TB
	dir    string
	bin    string
	docker *enginetest.Docker
	host   string // of the engine
	gate   *enginetest.Gate
	c      *api.Client
	log    *lockedBuffer
	server *exec.Cmd
	owner  string

	engineKilled bool
	killed       chan struct{} // closed when the server has been killed amid uses
}

func newContainersRig(t *testing.T, docker *enginetest.Docker) *containersRig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, for an engine of its own")
	}
	dir, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil && !t.Failed() { // a server that was killed leaves its mounts
			t.Errorf("the server left something behind: %v", err)
		}
	})
	r := &containersRig{t: t, dir: dir, bin: programs(t), docker: docker, host: strings.TrimPrefix(docker.Start(t), "DOCKER_HOST="), log: &lockedBuffer{}}
	r.gate = enginetest.NewGate(t, filepath.Join(dir, "engine"), r.host)
	for name, text := range map[string]string{
		"extensions/ext.docker.yaml": "id: ext.docker\nhandler: docker\ncapabilities: {isolation_levels: [container], pricing_model: self-hosted}\n" +
			"config:\n  capacity: 1000\n  memory: 64MiB\n  engines:\n    here: {address: \"unix://" + dir + "/engine\"}\n",
		"profiles/profile.box.yaml": "id: profile.box\ntitle: x\nextension: ext.docker\nisolation: container\nimage: engine:" + enginetest.Image +
			"\nttl: 1h\nmax_ttl: 8h\nnetwork: none\nauto_resume: true\n",
		"profiles/profile.idle.yaml": "id: profile.idle\ntitle: x\nextension: ext.docker\nisolation: container\nimage: engine:" + enginetest.Image +
			"\nttl: 1h\nmax_ttl: 8h\nnetwork: none\nauto_resume: true\nidle: 1s\non_idle: pause\n",
	} {
		name = filepath.Join(dir, "home", name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if r.c, err = api.New("unix://"+dir+"/home/sock", api.Options{NoRetry: true}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.c.Close)
	r.start()
	t.Cleanup(func() {
		if r.server != nil && !t.Failed() {
			r.stop()
		}
		r.kill()
		if t.Failed() {
			t.Logf("the servers of %s:\n%s", r.owner, r.log)
		}
	})
	return r
}

// start starts a server, and returns when it answers.
func (r *containersRig) start() {
	r.t.Helper()
	r.server = exec.Command(filepath.Join(r.bin, "sandboxer"), "serve", "--socket", r.dir+"/home/sock")
	r.server.Env = append(os.Environ(), "SANDBOXER_HOME="+r.dir+"/home")
	r.server.Stderr = r.log
	if err := r.server.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.until("the server answers", func() error {
		st, err := r.c.Status(r.t.Context())
		if err == nil {
			r.owner = st.Owner
		}
		return err
	})
}

// kill ends the server by SIGKILL.
func (r *containersRig) kill() {
	if r.server != nil {
		_ = r.server.Process.Kill()
		_ = r.server.Wait()
		r.server = nil
	}
}

// stop lets the server end.
func (r *containersRig) stop() {
	r.t.Helper()
	_ = r.server.Process.Signal(os.Interrupt)
	if err := r.server.Wait(); err != nil {
		r.t.Errorf("the server: %v", err)
	}
	r.server = nil
}

// until repeats f until it succeeds.
func (r *containersRig) until(what string, f func() error) {
	r.t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			r.t.Fatalf("never: %s: %v\n%s", what, err, r.log)
		}
	}
}

// create makes a sandbox under an ID, whose environment says whose it is.
func (r *containersRig) create(id, key string) (*api.Sandbox, error) {
	sb, err := r.c.Create(r.t.Context(), api.CreateSandbox{Profile: "box", Key: key, Inputs: map[string]string{"sandbox_id": id}, Env: map[string]string{"WHOSE": r.dir}})
	if err == nil && (sb.ID != id || sb.State != sandboxer.Running) {
		err = fmt.Errorf("it is %s, %s: %s", sb.ID, sb.State, sb.Message)
	}
	return sb, err
}

// says runs a command in a sandbox, and wants this of it.
func (r *containersRig) says(id, want string, args ...string) error {
	ctx, cancel := context.WithTimeout(r.t.Context(), 2*time.Minute)
	defer cancel()
	x, err := r.c.Run(ctx, id, api.Exec{Args: args})
	if err == nil && (x.Code != 0 || x.Stdout != want) {
		err = fmt.Errorf("%q in %s ended with %d, and said %q and %q; want %q", args, id, x.Code, x.Stdout, x.Stderr, want)
	}
	return err
}

// mine reports whether a sandbox works, and is this installation's.
func (r *containersRig) mine(id string) error {
	return r.says(id, r.dir+"\n", "sh", "-c", "echo $WHOSE")
}

// on lists what the engine has that is labelled as this installation's, and with more labels if there are.
func (r *containersRig) on(what string, labels ...string) []string {
	r.t.Helper()
	args := []string{what, "ls", "-q", "--filter", "label=dev.sandboxer.docker.owner=" + r.owner}
	if what == "container" {
		args = append(args, "-a")
	}
	for _, l := range labels {
		args = append(args, "--filter", "label="+l)
	}
	return docker(r.t, "DOCKER_HOST="+r.host, args...)
}

// docker runs docker on an engine, which is as the environment has it, and returns the words of the output.
func docker(t testing.TB, engine string, args ...string) []string {
	t.Helper()
	cmd := exec.Command("docker", args...)
	var errs bytes.Buffer
	cmd.Env, cmd.Stderr = append(os.Environ(), engine), &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("docker %q: %v: %s", args, err, &errs)
	}
	return strings.Fields(string(out))
}

// sound wants the database to agree with itself and with the engine.
func (r *containersRig) sound() {
	r.t.Helper()
	var a *api.Audit
	r.until("an audit without violations", func() error {
		if _, err := r.c.Sweep(r.t.Context()); err != nil {
			return err
		}
		var err error
		if a, err = r.c.Audit(r.t.Context()); err == nil && len(a.Violations) > 0 {
			err = fmt.Errorf("%+v", a.Violations)
		}
		return err
	})
}

// nothing wants nothing to be left: not in the database, not on the engine, no process and no mount.
func (r *containersRig) nothing() {
	r.t.Helper()
	r.sound()
	list, err := r.c.List(r.t.Context(), api.SandboxQuery{})
	if err != nil || len(list.Items) > 0 {
		r.t.Errorf("sandboxes are left: %+v, %v", list, err)
	}
	snaps, err := r.c.Snapshots(r.t.Context(), api.SnapshotQuery{All: true})
	if err != nil || len(snaps.Items) > 0 {
		r.t.Errorf("snapshots are left: %+v, %v", snaps, err)
	}
	if left := r.on("container", "dev.sandboxer.docker.id"); len(left) > 0 {
		r.t.Errorf("containers are left: %v", left)
	}
	if left := r.on("image"); len(left) > 0 {
		r.t.Errorf("images are left: %v", left)
	}
	// What sandboxes share goes when the server ends, if the engine does it in time, and then the note of it; the next one makes up for it.
	r.stop()
	r.until("there is nothing that sandboxes of this installation share", func() error {
		if left := slices.Concat(r.on("container"), r.on("volume"), r.notes()); len(left) > 0 {
			r.start()
			r.stop()
			return fmt.Errorf("left: %v", left)
		}
		return nil
	})
	for _, path := range append(r.notes(), r.files("mount")...) {
		r.t.Errorf("a file is left: %s", path)
	}
	for _, left := range remains(r.t.(*testing.T), r.dir) {
		r.t.Errorf("left behind: %s", left)
	}
}

// notes lists the files of the extension's notes. Files of locks stay.
func (r *containersRig) notes() []string {
	r.t.Helper()
	return slices.DeleteFunc(r.files("notes"), func(path string) bool { return strings.Contains(path, "/notes/lock/") })
}

// files lists what a server keeps in one of the extension's directories.
func (r *containersRig) files(dir string) (files []string) {
	r.t.Helper()
	if err := filepath.WalkDir(filepath.Join(r.dir, "home/data/extensions/ext.docker", dir), func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, path)
		}
		return err
	}); err != nil {
		r.t.Error(err)
	}
	return files
}

// A phase of a container's life, as a client has it who repeats what fails.
type phase struct {
	name string
	do   func(r *containersRig, id string) error
}

// life is all that can become of a container.
var life = []phase{
	{"create", func(r *containersRig, id string) error {
		sb, err := r.create(id, "key-"+id)
		if err == nil && sb.Generation != 1 {
			err = fmt.Errorf("it is generation %d", sb.Generation)
		}
		return err
	}},
	{"exec", func(r *containersRig, id string) error {
		return r.says(id, r.dir+"\n", "sh", "-c", "echo $WHOSE | tee file")
	}},
	{"pause", func(r *containersRig, id string) error {
		sb, err := r.c.Pause(r.t.Context(), id, api.PauseSandbox{Depth: sandboxer.PauseFreeze})
		if err != nil {
			if sb, gerr := r.c.Get(r.t.Context(), id); gerr == nil && sb.State == sandboxer.Paused {
				return nil
			}
			return err
		}
		if sb.State != sandboxer.Paused {
			return fmt.Errorf("it is %s", sb.State)
		}
		return nil
	}},
	{"resume", (*containersRig).resume},
	{"pause to files", func(r *containersRig, id string) error {
		if sb, err := r.c.Get(r.t.Context(), id); err == nil && sb.State == sandboxer.Paused {
			return nil
		}
		_, err := r.c.Pause(r.t.Context(), id, api.PauseSandbox{Depth: sandboxer.PauseFiles})
		return err
	}},
	{"resume from files", (*containersRig).resume},
	{"snapshot", func(r *containersRig, id string) error {
		if s, err := r.c.GetSnapshot(r.t.Context(), "of-"+id); err == nil && s.State == sandboxer.SnapshotSealed {
			return nil
		} else if err == nil { // half made
			if _, err := r.c.Sweep(r.t.Context()); err != nil {
				return err
			}
		}
		s, err := r.c.Snapshot(r.t.Context(), id, api.CreateSnapshot{Name: "of-" + id, Kind: sandboxer.SnapshotNative})
		if err == nil && s.State != sandboxer.SnapshotSealed {
			err = fmt.Errorf("it is %s: %s", s.State, s.Message)
		}
		return err
	}},
	{"restore", func(r *containersRig, id string) error {
		sb, err := r.c.Restore(r.t.Context(), "of-"+id, api.RestoreSnapshot{Key: "key-copy-" + id, Name: "copy-" + id, Kind: sandboxer.SnapshotNative})
		if err != nil {
			return err
		}
		return r.says(sb.ID, r.dir+"\n", "cat", "file")
	}},
	{"drop", func(r *containersRig, id string) error {
		_, err := r.c.DropSnapshot(r.t.Context(), "of-"+id)
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			err = nil
		}
		return err
	}},
	{"teardown", func(r *containersRig, id string) error {
		for _, name := range []string{id, "copy-" + id} {
			if _, err := r.c.Destroy(r.t.Context(), name, true); err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
				return err
			}
		}
		return nil
	}},
}

func (r *containersRig) resume(id string) error {
	if sb, err := r.c.Get(r.t.Context(), id); err != nil || sb.State != sandboxer.Running {
		if _, err := r.c.Resume(r.t.Context(), id, api.ResumeSandbox{}); err != nil {
			return err
		}
	}
	return r.says(id, r.dir+"\n", "cat", "file")
}

// amid has p lead to its n-th request to the engine that changes something, before or after that has its effect, and calls
// then. It returns what the request was, "" where p has no more so many.
func (r *containersRig) amid(p phase, id string, n int, after bool, then func()) string {
	held := r.gate.Hold(n, after)
	ended := make(chan error, 1)
	go func() { ended <- p.do(r, id) }()
	var what string
	select {
	case what = <-held:
		then()
		r.gate.Open()
		r.goOn()
		select {
		case <-ended: // whatever it is
		case <-time.After(5 * time.Minute):
			r.t.Fatalf("%s does not end, which was held at %s", p.name, what)
		}
	case err := <-ended:
		r.gate.Open()
		if err != nil {
			r.until(p.name, func() error { return p.do(r, id) })
		}
	case <-time.After(5 * time.Minute):
		r.t.Fatalf("%s does not end", p.name)
	}
	return what
}

// TestContainersKilled has two installations on one engine, with sandboxes of the same IDs, whose servers are killed
// by SIGKILL at each request to the engine that changes something, before it has its effect and after, through the whole
// life of a container. Each next server finishes what was begun: the client that repeats itself gets what it
// asked for, nothing is lost, nothing is left, and neither ever touches what is the other's.
func TestContainersKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	t.Parallel()
	for which, name := range []string{"one", "another"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newContainersRig(t, &containersEngine)
			kills := 0
			for round := range 100 {
				id, here := fmt.Sprintf("box-%d", round), 0
				for i, p := range life {
					n, after := round/2+1, round%2 == 1
					if !whole() { // each phase at another step, and of the other installation on the other side
						n, after = 1+i%3, (i+which)%2 == 1
					}
					what := r.amid(p, id, n, after, r.kill)
					if what == "" {
						continue
					}
					here++
					began := time.Now()
					r.until(p.name+" after a kill", func() error { return p.do(r, id) })
					t.Logf("killed amid %s, step %d (%s), after=%t: well again after %v", p.name, n, what, after, time.Since(began).Round(time.Millisecond))
				}
				r.sound()
				kills += here
				if here == 0 || !whole() && round == 0 {
					break
				}
			}
			t.Logf("killed %d times", kills)
			if kills < len(life)/2 {
				t.Errorf("the server was killed %d times only", kills)
			}
			r.nothing()
		})
	}
}

// goOn starts what was killed.
func (r *containersRig) goOn() {
	r.t.Helper()
	if r.engineKilled {
		r.docker.Again(r.t)
		r.engineKilled = false
	}
	if r.server == nil {
		r.start()
	}
}

// killEngine kills the engine by SIGKILL, and starts it again when amid goes on.
func (r *containersRig) killEngine() {
	r.docker.Kill(r.t)
	r.engineKilled = true
}

// TestContainersEngineKilled kills the engine by SIGKILL, with the process that runs its containers, amid creates, commands and
// teardowns, alone and together with the server. Its containers die with it. Nobody is told of a success that was none, what died is known
// to be gone, the same ID can be made again at once, and nothing is left.
func TestContainersEngineKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	t.Parallel()
	docker := &enginetest.Docker{} // nobody else's
	t.Cleanup(docker.Stop)
	r := newContainersRig(t, docker)
	kill := map[bool]func(){false: r.killEngine, true: func() { r.killEngine(); r.kill() }}
	// again has a sandbox that works under an ID, whatever became of the one that there was.
	again := func(id string) {
		t.Helper()
		tries := 0
		r.until("sandbox "+id+" is made again", func() error {
			tries++
			if _, err := r.create(id, fmt.Sprintf("%s-again-%d", id, tries)); err != nil {
				return err
			}
			return r.mine(id)
		})
	}
	create, teardown := phase{"create", func(r *containersRig, id string) error {
		_, err := r.create(id, "")
		return err
	}}, phase{"teardown", func(r *containersRig, id string) error {
		_, err := r.c.Destroy(r.t.Context(), id, true)
		return err
	}}
	steps := 100
	if !whole() {
		steps = 1
	}
	for n := range steps {
		if whole() {
			n++
		} else {
			n = 3 // the start of the container
		}
		here := 0
		for _, after := range []bool{false, true} {
			for _, both := range []bool{false, true} {
				if !whole() && !(after && both) {
					continue
				}
				id := fmt.Sprintf("new-%d-%t-%t", n, after, both)
				what := r.amid(create, id, n, after, kill[both])
				if what != "" {
					here++
					t.Logf("killed amid create, step %d (%s), after=%t, both=%t", n, what, after, both)
				}
				again(id)
				n, both := n, both
				if !whole() {
					n, both = 1, !both // it has no more
				}
				if what = r.amid(teardown, id, n, after, kill[both]); what != "" {
					here++
					t.Logf("killed amid teardown, step %d (%s), after=%t, both=%t", n, what, after, both)
				}
				r.until("teardown", func() error { return teardown.do(r, id) })
			}
		}
		if here == 0 {
			break
		}
	}
	for _, both := range []bool{false, true} {
		if both && !whole() {
			break
		}
		id := fmt.Sprintf("busy-%t", both)
		again(id)
		out, in := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			x, err := r.c.Exec(t.Context(), id, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; exec sleep 1000"}, Stdout: in})
			if err == nil && x.Code != 0 {
				err = fmt.Errorf("it ended with %d", x.Code)
			}
			in.CloseWithError(io.EOF)
			ended <- err
		}()
		if _, err := io.ReadFull(out, make([]byte, 3)); err != nil {
			t.Fatal(err, <-ended)
		}
		kill[both]()
		r.goOn()
		select {
		case err := <-ended:
			if err == nil {
				t.Error("a command whose engine was killed is said to have succeeded")
			}
		case <-time.After(2 * time.Minute):
			t.Fatal("a command whose engine was killed does not end")
		}
		r.until("what died is known to be gone", func() error {
			sb, err := r.c.Get(t.Context(), id)
			if err == nil && sb.State != sandboxer.Terminated {
				err = fmt.Errorf("it is %s", sb.State)
			}
			return err
		})
		again(id)
		r.until("teardown", func() error { return teardown.do(r, id) })
	}
	r.nothing()
}

// TestContainersLives makes, uses and destroys a thousand containers, or some with one server, and wants nothing to be left of them: no container,
// volume or image, no live record, and no descriptor, process or goroutine of the server.
func TestContainersLives(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	t.Parallel()
	r := newContainersRig(t, &containersEngine)
	n := 20
	if whole() {
		n = 1000
	}
	lives := func(n int) {
		t.Helper()
		next := make(chan int)
		var work sync.WaitGroup
		for range 4 {
			work.Go(func() {
				for i := range next {
					sb, err := r.c.Create(t.Context(), api.CreateSandbox{Profile: "box", Env: map[string]string{"WHOSE": r.dir}})
					if err == nil {
						err = r.mine(sb.ID)
					}
					if err == nil {
						_, err = r.c.Destroy(t.Context(), sb.ID, true)
					}
					if err != nil {
						t.Errorf("life %d: %v", i, err)
					}
				}
			})
		}
		for i := range n {
			next <- i
		}
		close(next)
		work.Wait()
	}
	// opened counts the server's descriptors, but for those of its database: that opens more when it is asked more at a time, up to a
	// bound, and keeps them.
	opened := func() (n int) {
		t.Helper()
		dir := fmt.Sprintf("/proc/%d/fd", r.server.Process.Pid)
		fds, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			to, err := os.Readlink(filepath.Join(dir, fd.Name()))
			if err == nil && !strings.HasPrefix(filepath.Base(to), "sandboxer.db") { // else it has been closed
				n++
			}
		}
		return n
	}
	// figures are what the server has when it rests, which is when it has at most so many descriptors; it is ended to tell how many goroutines.
	figures := func(most int) (files, children, goroutines int) {
		t.Helper()
		r.c.Close()
		pid := r.server.Process.Pid
		r.until("the server has let go of what lives had open", func() error {
			if files = opened(); files > most {
				return fmt.Errorf("it has %d descriptors; want at most %d", files, most)
			}
			return nil
		})
		lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // each thread has those that it made
		if err != nil || len(lists) == 0 {
			t.Fatalf("there are no lists of children: %v", err)
		}
		for _, list := range lists {
			data, err := os.ReadFile(list)
			if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) { // the thread has ended
				t.Fatal(err)
			}
			children += len(strings.Fields(string(data)))
		}
		before := strings.Count(r.log.String(), "\ngoroutine ")
		_ = r.server.Process.Signal(unix.SIGQUIT) // has it tell
		_ = r.server.Wait()
		r.server = nil
		return files, children, strings.Count(r.log.String(), "\ngoroutine ") - before
	}
	lives(4)
	// What may be there at one look and not at the other: up to four connections to the engine, which are kept for half a minute after
	// their last use, each with two goroutines. What more there is goes, and is waited for. What stays of every life is found.
	const kept = 4
	f, c, g := figures(math.MaxInt)
	r.start()
	lives(n)
	f2, c2, g2 := figures(f + kept)
	t.Logf("after 4 lives the server has %d descriptors, %d children and %d goroutines, after %d lives %d, %d and %d", f, c, g, n, f2, c2, g2)
	if c2 > c+kept || g2 > g+3*kept { // two for each, and those of what the server has just begun by itself
		t.Error("something is left of lives")
	}
	r.start()
	r.nothing()
}

// TestContainersRaces has who creates, destroys, pauses, resumes and uses containers of one ID meet, each pair a hundred times, or
// some.
func TestContainersRaces(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	t.Parallel()
	r := newContainersRig(t, &containersEngine)
	rounds := 3
	if whole() {
		rounds = 100
	}
	// all runs n calls at once.
	all := func(n int, f func(i int)) {
		var work sync.WaitGroup
		for i := range n {
			work.Go(func() { f(i) })
		}
		work.Wait()
	}
	for round := range rounds {
		id := fmt.Sprintf("race-%d", round)
		// Creates of one ID are one create, with one answer.
		made, errs, found := make([]*api.Sandbox, 8), make([]error, 8), 0
		all(len(made), func(i int) { made[i], errs[i] = r.create(id, "") })
		for i, sb := range made {
			switch {
			case errs[i] != nil:
				t.Fatalf("round %d: create %d: %v", round, i, errs[i])
			case sb.Generation != 1 || sb.Ref != made[0].Ref:
				t.Errorf("round %d: one create got generation %d, %s; another %s", round, sb.Generation, sb.Ref, made[0].Ref)
			case sb.Found:
				found++
			}
		}
		if there := r.on("container", "dev.sandboxer.docker.id="+id); len(there) != 1 || found != len(made)-1 {
			t.Errorf("round %d: there are containers %v, and %d creates say that there was one", round, there, found)
		}

		// Destroys of one sandbox are one, and who creates after any of them was taken waits for its end, never gets what ends, and
		// keeps what it got.
		ended := make([]*api.Sandbox, 3)
		all(len(ended), func(i int) { ended[i], errs[i] = r.c.Destroy(t.Context(), id, false) })
		for i, sb := range ended {
			if errs[i] != nil || sb.Generation != 1 {
				t.Fatalf("round %d: destroy %d: %+v, %v", round, i, sb, errs[i])
			}
		}
		all(2, func(i int) { made[i], errs[i] = r.create(id, "") })
		for i := range 2 {
			if errs[i] != nil || made[i].Generation != 2 {
				t.Fatalf("round %d: a create after a destroy: %+v, %v", round, made[i], errs[i])
			}
		}
		if err := r.mine(id); err != nil {
			t.Errorf("round %d: after a destroy and a create: %v", round, err)
		}

		// Who uses what is being paused finds it running, or has it go on. A command that a pause meets stands still until somebody
		// resumes, who may have come before: so it is done again.
		met := make(chan struct{})
		go func() {
			defer close(met)
			all(6, func(i int) {
				switch i % 3 {
				case 0:
					_, errs[i] = r.c.Pause(t.Context(), id, api.PauseSandbox{Depth: sandboxer.PauseFreeze})
				case 1:
					_, errs[i] = r.c.Resume(t.Context(), id, api.ResumeSandbox{})
				case 2:
					errs[i] = r.mine(id)
				}
			})
		}()
		for on := true; on; {
			select {
			case <-met:
				on = false
			case <-time.After(time.Second):
				_, _ = r.c.Resume(t.Context(), id, api.ResumeSandbox{}) // there may be nothing to resume
			}
		}
		for i, err := range errs[:6] {
			if k := sandboxer.KindOf(err); err != nil && k != sandboxer.Conflict && !(i%3 == 0 && k == sandboxer.Unavailable) {
				t.Errorf("round %d: call %d: %v", round, i, err)
			}
		}
		r.until("it goes on", func() error {
			if err := r.mine(id); err != nil {
				return err
			}
			return nil
		})

		// A create that meets a destroy gets what was there before it, or what comes after; a pause that meets one changes nothing
		// about it.
		all(3, func(i int) {
			switch i {
			case 0:
				_, errs[i] = r.c.Destroy(t.Context(), id, true)
			case 1:
				made[0], errs[i] = r.create(id, "")
			case 2:
				_, errs[i] = r.c.Pause(t.Context(), id, api.PauseSandbox{Depth: sandboxer.PauseFreeze})
			}
		})
		if errs[0] != nil {
			t.Errorf("round %d: a destroy beside others: %v", round, errs[0])
		}
		if errs[1] == nil && made[0].Generation == 3 {
			if err := r.mine(id); err != nil {
				t.Errorf("round %d: what was created beside a destroy: %v", round, err)
			}
		}
		if _, err := r.c.Destroy(t.Context(), id, true); err != nil {
			t.Errorf("round %d: the last destroy: %v", round, err)
		}
		if there := r.on("container", "dev.sandboxer.docker.id="+id); len(there) != 0 {
			t.Errorf("round %d: containers are left: %v", round, there)
		}
	}

	// Who comes at the moment in which an idle sandbox is paused has it go on.
	boxes := 2
	if whole() {
		boxes, rounds = 10, 10
	}
	all(boxes, func(i int) {
		sb, err := r.c.Create(t.Context(), api.CreateSandbox{Profile: "idle", Env: map[string]string{"WHOSE": r.dir}})
		if err != nil {
			t.Error(err)
			return
		}
		for round := range rounds {
			time.Sleep(950*time.Millisecond + time.Duration(rand.Int64N(int64(100*time.Millisecond)))) // the moment is what is tested
			if err := r.mine(sb.ID); err != nil {
				t.Errorf("idle sandbox %d, round %d: %v", i, round, err)
			}
		}
		if _, err := r.c.Destroy(t.Context(), sb.ID, true); err != nil {
			t.Error(err)
		}
	})
	r.nothing()
}

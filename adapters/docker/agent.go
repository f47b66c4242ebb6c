package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

const (
	agentFile   = "sandboxer-agent"
	agentDir    = "/.sandboxer" // where containers have the volume
	agentPath   = agentDir + "/" + agentFile
	agentSocket = "@sandboxer-agent"
	agentUser   = "0:0" // its socket lets in nobody else

	// agentIdle is how long a connection waits for the next call: it takes a process in the
	// container. There is at most one.
	agentIdle = time.Minute
	// agentDials is how many connections to one agent are opened at once; further calls wait.
	agentDials = 8
	// connectTime is how long a connection may take to come.
	connectTime = time.Minute
	// maxHung is how many of one sandbox may not have come, one after the other, beside those under way. Each may have left a thread of the engine
	// waiting for good; then one is tried every hungPause, since an engine may have been slow for another reason.
	maxHung   = 3
	hungPause = 10 * time.Minute
)

// An agentClient is kept for the next calls.
type agentClient struct {
	*agent.Client
	container string
	hung      hangs
}

// hangs counts the connections to an agent that did not come, since one did, while the engine answered otherwise.
type hangs struct {
	mu   sync.Mutex
	n    int
	last time.Time // when the last of them was begun
}

// refuse reports whether no further connection is to be tried. At most one in hungPause is then.
func (h *hangs) refuse(now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.n < maxHung {
		return false
	}
	if now.Sub(h.last) < hungPause {
		return true
	}
	h.last = now
	return false
}

func (h *hangs) came() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.n = 0
}

func (h *hangs) hung(began time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.n, h.last = h.n+1, began
}

// agentIn is the client of the agent in a container.
func (e *extension) agentIn(h *host, name, container string) *agentClient {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := e.agents[name]; c != nil {
		if c.container == container {
			return c
		}
		c.Close()
	}
	c := &agentClient{container: container}
	c.Client = agent.NewClient(agent.ClientOptions{IdleConns: 1, IdleTime: agentIdle, Dials: agentDials, DialsWait: true, Dial: func(ctx context.Context) (net.Conn, error) {
		return e.connect(ctx, h, c)
	}})
	if e.ctx.Err() == nil {
		e.agents[name] = c
	}
	return c
}

// connect opens a connection to an agent: a command that the engine starts. Before it starts one, an engine opens the container's
// /etc/passwd and /etc/group, whatever they are and whoever is to run it, and at a named pipe that root inside has put there it waits without an
// end. (Docker's engine leaves it out for a container without a user. But then the runtime waits at the pipe, while the engine holds a lock that
// destroying the container needs, too.) Podman can be asked before, which opens nothing. Docker's engine would mount the
// container's volumes for that, at places that root inside can lead elsewhere; there the number of connections that hang is bounded.
func (e *extension) connect(ctx context.Context, h *host, c *agentClient) (net.Conn, error) {
	if c.hung.refuse(time.Now()) {
		return nil, sandboxer.E(sandboxer.Failed, nil, "%d connections to the sandbox's agent did not come, though the engine %s answers: root inside may have made /etc/passwd or /etc/group something that is read without an end", maxHung, h.name).
			WithHint("destroy the sandbox; what is outside of it is not harmed")
	}
	within, done, err := h.api.Attend(ctx)
	if err != nil {
		return nil, err
	}
	podman, err := h.podman(within)
	if podman {
		var file string
		if file, err = h.endless(within, c.container); file != "" {
			err = sandboxer.E(sandboxer.Failed, nil, "root inside the sandbox has made %s something that is no file, and the engine %s would read it without an end", file, h.name).
				WithHint("destroy the sandbox; what is outside of it is not harmed")
		}
	}
	if err != nil {
		return nil, done(err)
	}
	began := time.Now()
	limited, cancel := context.WithTimeout(within, e.connectTime)
	defer cancel()
	conn, err := agent.DialAttached(limited, func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
		return h.api.Exec(ctx, c.container, agentUser, args, in, out, errs)
	}, agentPath, "connect", "--socket="+agentSocket, "--pid=1")
	given := err != nil && limited.Err() != nil
	err = done(err)
	switch {
	case err == nil:
		c.hung.came()
	case given && !errors.Is(err, engine.ErrHangs) && time.Since(began) >= e.connectTime/6: // who left sooner may have been impatient
		c.hung.hung(began)
	}
	return conn, err
}

// dropAgent ends the idle connections to the agent of a sandbox.
func (e *extension) dropAgent(name string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := e.agents[name]; c != nil {
		c.Close()
		delete(e.agents, name)
	}
}

// running returns the sandbox of h, which must run. Kinds: NotFound for one that is gone or has ended,
// Conflict for one that is paused.
func (e *extension) running(ctx context.Context, h sandboxer.Handle) (*box, error) {
	b, err := e.find(ctx, h)
	if err == nil {
		err = e.runs(ctx, b)
	}
	return b, err
}

func (e *extension) runs(ctx context.Context, b *box) error {
	switch b.state {
	case "running":
		return nil
	case "paused":
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is paused", b.id).WithHint("resume it: sandboxer resume %s", b.id)
	}
	c, err := b.host.api.InspectContainer(ctx, b.container)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return sandboxer.E(sandboxer.NotFound, err, "there is no sandbox %s", b.id)
	case err != nil:
		return err
	case c.State.Running && !c.State.Paused: // by now
		return nil
	case outOfMemory(c):
		return sandboxer.E(sandboxer.NotFound, nil, "sandbox %s used more memory than its limit and was killed", b.id)
	}
	return sandboxer.E(sandboxer.NotFound, nil, "sandbox %s has ended (its container is %s, code %d)", b.id, c.State.Status, c.State.ExitCode)
}

// outOfMemory reports whether the memory limit killed the container as a whole. The engine notes that it killed
// anything; the agent ends with another code unless it was killed itself.
func outOfMemory(c engine.ContainerDetail) bool {
	return !c.State.Running && c.State.OOMKilled && c.State.ExitCode == 137
}

// openAgent is the way to the agent of h's sandbox for one call (agent.Capabilities). The engine is asked
// first: what is paused would let a call wait.
func (e *extension) openAgent(ctx context.Context, h sandboxer.Handle, _ bool) (agent.Call, error) {
	b, err := e.running(ctx, h)
	if err != nil {
		return agent.Call{}, err
	}
	m, err := readMade(b.labels)
	if err != nil {
		return agent.Call{}, err
	}
	if err := e.await(ctx, b); err != nil {
		return agent.Call{}, err
	}
	return e.call(ctx, b, m)
}

func (e *extension) call(ctx context.Context, b *box, m made) (agent.Call, error) {
	within, done, err := b.host.api.Attend(ctx)
	if err != nil {
		return agent.Call{}, err
	}
	end := func(err error) error {
		switch err = done(err); sandboxer.KindOf(err) {
		case sandboxer.Unavailable, sandboxer.Timeout, sandboxer.NotFound, sandboxer.Conflict: // the container may have ended, or stand still
			if ctx.Err() != nil || errors.Is(err, engine.ErrHangs) {
				break
			}
			now, why := e.find(ctx, sandboxer.Handle{SandboxID: b.id, Generation: b.generation, Host: b.host.name})
			if why == nil {
				why = e.runs(ctx, now)
			}
			if why != nil && !errors.Is(why, engine.ErrHangs) {
				err = why
			}
		}
		return err
	}
	return agent.Call{Agent: e.agentIn(b.host, e.name(b.id, b.generation), b.container).Client, Ctx: within, End: end, Dir: m.Workspace, User: m.User}, nil
}

// Exec implements sandboxer.Execer: the agent's. Where the whole sandbox is killed for memory with the command, the
// engine tells it.
func (e *extension) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	call, err := e.openAgent(ctx, h, true)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	if cmd.Dir == "" {
		cmd.Dir = call.Dir
	}
	if cmd.User == "" {
		cmd.User = call.User
	}
	exit, err := call.Agent.Exec(call.Ctx, cmd)
	if err != nil && ctx.Err() == nil { // the sandbox may have been killed with it
		if now, ferr := e.find(ctx, h); ferr == nil && now.state == "exited" {
			if c, ierr := now.host.api.InspectContainer(ctx, now.container); ierr == nil && outOfMemory(c) {
				_ = call.End(nil)
				return sandboxer.Exit{Code: 137, Signal: "KILL", OOMKilled: true}, nil
			}
		}
	}
	return exit, call.End(err)
}

// agentFor finds the agent for an engine.
func (e *extension) agentFor(info engine.Info) (program.Program, error) {
	p, err := e.programs.Find(agentFile, info.Arch(), e.cfg.Agent)
	if err != nil {
		return p, sandboxer.E(sandboxer.Unsupported, err, "no sandbox can be made there: %s", sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	}
	return p, nil
}

// agentVolume is the volume with an agent.
func (e *extension) agentVolume(digest string) string {
	return e.agentVolumes() + digest[:12]
}

// agentVolumes is what the names of all of this extension's begin with.
func (e *extension) agentVolumes() string {
	sum := sha256.Sum256([]byte(e.env.Owner + "\x00" + e.env.Extension))
	return "sandboxer-agent-" + hex.EncodeToString(sum[:])[:12] + "-"
}

// volumesOn lists the volumes with agents on a host. An engine that is killed forgets the labels of volumes that it
// made shortly before; those are known by their names, which say whose they are, too.
func (e *extension) volumesOn(ctx context.Context, h *host) (ours []engine.APIVolume, err error) {
	all, err := h.api.ListVolumes(ctx, e.agentVolumes())
	for _, v := range all {
		if strings.HasPrefix(v.Name, e.agentVolumes()) && (len(v.Labels) == 0 || v.Labels[labelOwner] == e.env.Owner && v.Labels[labelExtension] == e.env.Extension) {
			ours = append(ours, v)
		}
	}
	return ours, err
}

// bringAgent brings the agent into its volume, unless it is there and whole. The caller holds the host's lock,
// shared, and image is any that the engine has. Nothing runs for it: a container that is never
// started has the volume, and takes an archive.
func (e *extension) bringAgent(ctx context.Context, h *host, p program.Program, image string) (v engine.APIVolume, err error) {
	none := engine.APIVolume{}
	volume := e.agentVolume(p.Digest)
	labels := e.ours()
	labels[labelAgent] = p.Digest
	if err := e.expectAgent(h); err != nil {
		return none, err
	}
	find := func() (whole bool, mark string, err error) {
		v, err = h.api.CreateVolume(ctx, volume, labels) // or find
		for k, want := range labels {
			if err == nil && len(v.Labels) > 0 && v.Labels[k] != want { // with none it is ours: volumesOn
				err = sandboxer.E(sandboxer.Conflict, nil, "the engine %s has a volume %s that is somebody else's", h.name, volume).
					WithHint("remove it, if nobody needs it: docker volume rm %s", volume)
			}
		}
		mark = p.Digest + " " + v.CreatedAt + " etc" // an operator may have removed the one that was filled; etcFiles came later
		noted, _ := os.ReadFile(e.agentNote(h))
		return err == nil && string(noted) == mark, mark, err
	}
	if whole, _, err := find(); whole || err != nil {
		return v, err
	}
	// One that brings it is enough, of all processes of this installation.
	l, err := e.lock(ctx, "agent-"+h.name, filelock.Exclusive)
	if err != nil {
		return none, err
	}
	defer l.Release()
	whole, mark, err := find()
	if whole || err != nil {
		return v, err
	}
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "bringing sandboxer-agent to " + h.name})
	if err := e.removeFillers(ctx, h); err != nil { // of one that died
		return none, err
	}
	id, err := e.create(ctx, h, volume+"-fill", engine.ContainerConfig{Image: image, Env: []string{}, Entrypoint: []string{agentPath}, Cmd: []string{"help"}, Labels: labels,
		HostConfig: engine.HostConfig{NetworkMode: "none", Mounts: []engine.MountConfig{{Type: "volume", Source: volume, Target: agentDir, VolumeOptions: &engine.VolumeOptions{NoCopy: true}}}}})
	if err != nil {
		return none, err
	}
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
		defer cancel()
		if rerr := h.api.RemoveContainer(undo, id); rerr != nil && sandboxer.KindOf(rerr) != sandboxer.NotFound {
			err = errors.Join(err, rerr)
		}
	}()
	if err := h.startable(ctx, id, image, false); err != nil {
		return none, err
	}
	if !e.hasAgent(ctx, h, id, p.Digest) || !e.hasEtc(ctx, h, id) {
		data, err := os.ReadFile(p.Path)
		if err != nil {
			return none, sandboxer.E(sandboxer.Unavailable, err, "the program of the agent cannot be read")
		}
		if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != p.Digest {
			return none, sandboxer.E(sandboxer.Unavailable, nil, "the program of the agent has changed just now").WithHint("try again")
		}
		var packed bytes.Buffer
		w := tar.NewWriter(&packed)
		err = putFile(w, agentFile, 0o755, data)
		for _, f := range etcFiles {
			err = errors.Join(err, putFile(w, etcDir+"/"+f.name, 0o644, []byte(f.text)))
		}
		if err := errors.Join(err, w.Close()); err != nil {
			return none, sandboxer.E(sandboxer.Internal, err, "the agent cannot be packed")
		}
		if err := h.api.PutArchive(ctx, id, agentDir, &packed); err != nil {
			return none, err
		}
		if !e.hasAgent(ctx, h, id, p.Digest) || !e.hasEtc(ctx, h, id) {
			return none, sandboxer.E(sandboxer.Unavailable, ctx.Err(), "the agent is not whole on the engine %s after it was brought there", h.name).WithHint("try again")
		}
	}
	if err := wholefile.Replace(e.agentNote(h), []byte(mark)); err != nil {
		return none, sandboxer.E(sandboxer.Unavailable, err, "it cannot be written down which agent the engine %s has", h.name)
	}
	return v, nil
}

// agentNote is the file that says which volume of a host has a whole agent. It is there, and empty, before there is any volume: so
// whoever comes after one that died knows that there may be something to remove.
func (e *extension) agentNote(h *host) string { return e.dir("agent", h.name) }

// expectAgent notes that there may be a volume on h from now on.
func (e *extension) expectAgent(h *host) error {
	f, err := os.OpenFile(e.agentNote(h), os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "it cannot be written down that the engine %s gets an agent", h.name)
	}
	return nil
}

// forgetAgent has the next sandbox on h look whether the volume is whole.
func (e *extension) forgetAgent(h *host) error {
	if err := os.Truncate(e.agentNote(h), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Unavailable, err, "it cannot be forgotten which agent the engine %s had", h.name)
	}
	return nil
}

// removeFillers removes containers that fill volumes. The caller knows that nobody fills any.
func (e *extension) removeFillers(ctx context.Context, h *host) error {
	list, err := h.api.ListContainers(ctx, map[string]string{labelOwner: e.env.Owner, labelExtension: e.env.Extension, labelAgent: ""})
	for _, c := range list {
		if err == nil {
			if err = h.api.RemoveContainer(ctx, c.ID); sandboxer.KindOf(err) == sandboxer.NotFound {
				err = nil
			}
		}
	}
	return err
}

// hasAgent reports whether the agent with that digest is in the volume that the container has.
func (e *extension) hasAgent(ctx context.Context, h *host, id, digest string) bool {
	return e.hasFile(ctx, h, id, agentPath, 0o755, digest)
}

// hasEtc reports whether etcFiles are in the volume that the container has.
func (e *extension) hasEtc(ctx context.Context, h *host, id string) bool {
	for _, f := range etcFiles {
		sum := sha256.Sum256([]byte(f.text))
		if !e.hasFile(ctx, h, id, agentDir+"/"+etcDir+"/"+f.name, 0o644, hex.EncodeToString(sum[:])) {
			return false
		}
	}
	return true
}

func (e *extension) hasFile(ctx context.Context, h *host, id, path string, mode int64, digest string) bool {
	err := h.api.GetArchive(ctx, id, path, func(r io.Reader) error {
		tr := tar.NewReader(r)
		head, err := tr.Next()
		if err != nil {
			return err
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, tr); err != nil {
			return err
		}
		if head.Mode&0o777 != mode || hex.EncodeToString(sum.Sum(nil)) != digest {
			return errors.New("it is another file")
		}
		return nil
	})
	return err == nil
}

func putFile(w *tar.Writer, name string, mode int64, data []byte) error {
	err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(data))})
	if err == nil {
		_, err = w.Write(data)
	}
	return err
}

// sweepSoon removes, in a while, what no sandbox of a host needs any more.
func (e *extension) sweepSoon(h *host) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ctx.Err() != nil {
		return
	}
	if t := e.sweeps[h.name]; t != nil {
		t.Reset(sweepTime)
		return
	}
	e.sweeps[h.name] = time.AfterFunc(sweepTime, func() {
		e.mu.Lock()
		if e.ctx.Err() != nil {
			e.mu.Unlock()
			return
		}
		e.work.Add(1)
		delete(e.sweeps, h.name)
		e.mu.Unlock()
		defer e.work.Done()
		e.sweep(e.ctx, h)
	})
}

// sweep removes images beyond the bound, and, where there is no sandbox, volumes with agents and names of images of
// restored ones. Whoever makes a sandbox there is not disturbed; then it is done the next time.
func (e *extension) sweep(ctx context.Context, h *host) {
	l, err := filelock.Try(e.dir("lock", "host-"+h.name), filelock.Exclusive)
	if err != nil {
		return
	}
	defer l.Release()
	if err := e.sweepLocked(ctx, h); err != nil && ctx.Err() == nil {
		e.log.Warn("what sandboxes shared stays on an engine", "extension", e.env.Extension, "engine", h.name, "err", err)
	}
}

func (e *extension) sweepLocked(ctx context.Context, h *host) error {
	if _, err := e.pruneLocked(ctx, h, e.cfg.Images.Keep); err != nil {
		return err
	}
	boxes, err := e.on(ctx, h, "", 0)
	if err != nil || len(boxes) > 0 {
		return err
	}
	if err := e.removeFillers(ctx, h); err != nil {
		return err
	}
	volumes, err := e.volumesOn(ctx, h)
	if err != nil {
		return err
	}
	if err := e.forgetAgent(h); err != nil {
		return err
	}
	var errs []error
	for _, v := range volumes {
		if err := h.api.RemoveVolume(ctx, v.Name); err != nil && sandboxer.KindOf(err) != sandboxer.NotFound && sandboxer.KindOf(err) != sandboxer.Conflict {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(append(errs, e.removeRestored(ctx, h, ""))...); err != nil {
		return err
	}
	if left, err := e.volumesOn(ctx, h); err != nil || len(left) > 0 { // a container of somebody else's may have one
		return err
	}
	if err := os.Remove(e.agentNote(h)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Unavailable, err, "it cannot be forgotten which agent the engine %s had", h.name)
	}
	return nil
}

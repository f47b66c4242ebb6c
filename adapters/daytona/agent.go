package daytona

import (
	"cmp"
	"context"
	"crypto/rand"
	"net/http"
	"net/url"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/hosted"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/program"
)

// The agent is uploaded through the toolbox, started in one of its sessions, and reached through the preview of its port, with a
// token that is made inside. The next process of the broker reads the token there.

const (
	agentDir   = "/tmp/.sandboxer" // any user can write there
	agentPort  = 9317              // of the ports that Daytona shows, 3000 to 9999
	scriptTime = 30 * time.Second
	lookAfter  = 2 * time.Second // while its agent does not answer, the sandbox may end
)

// openAgent connects one call to the agent of h's sandbox (agent.Capabilities).
func (x *extension) openAgent(ctx context.Context, h sandboxer.Handle, _ bool) (agent.Call, error) {
	ctx, h, err := x.On(ctx, h)
	if err != nil {
		return agent.Call{}, err
	}
	name := hosted.InAccount(ctx, h.Ref)
	c := x.agents.Kept(name)
	if c == nil {
		if c, _, err = x.enter(ctx, h); err != nil {
			return agent.Call{}, err
		}
	}
	why := func() error {
		o, err := x.look(ctx, h.Ref)
		return cmp.Or(err, o.why())
	}
	within, done := hosted.Attend(ctx, c.Health, why, func() { x.agents.Drop(name) })
	return agent.Call{Agent: c, Ctx: within, Done: done, Why: why}, nil
}

// A toolbox is that of a sandbox.
type toolbox struct{ *hosted.Client }

// toolbox reaches the toolbox. What it says of a missing path is not taken for a word about the sandbox.
func (x *extension) toolbox(o object) (b toolbox, sh inside.Shell) {
	busy := map[int]sandboxer.Kind{http.StatusTooManyRequests: sandboxer.Exhausted}
	b = toolbox{&hosted.Client{Base: strings.TrimRight(o.Toolbox, "/") + "/" + url.PathEscape(o.ID), Keys: x.Keys, Refusals: busy}}
	return b, inside.Shell{Dir: agentDir, Run: b.script, Write: b.write}
}

// script runs a script without single quotes (inside.Shell). The toolbox merges its outputs.
func (b toolbox) script(ctx context.Context, what, script string, args ...string) (string, error) {
	command := "/bin/sh -c " + inside.Quoted(append([]string{script, "sh"}, args...)...)
	res, _, err := hosted.Send[struct {
		Code   int    `json:"exitCode"`
		Result string `json:"result"`
	}](ctx, b.Client, hosted.Request{Method: http.MethodPost, Path: "/process/execute", Body: map[string]any{"command": command, "timeout": int(scriptTime / time.Second)}, Within: scriptTime})
	if err == nil && res.Code != 0 {
		err = sandboxer.E(sandboxer.Failed, nil, "%s failed in the sandbox (exit %d): %s", what, res.Code, capture.Text(res.Result, maxText)).
			WithHint("use a snapshot or an image with a shell, coreutils, and room in /tmp")
	}
	return res.Result, err
}

// write writes a file (inside.Shell).
func (b toolbox) write(ctx context.Context, name string, f *os.File, size int64) error {
	form := &hosted.Form{Field: "files[0].path", Value: name, FileField: "files[0].file", Name: path.Base(name), File: f, Size: size}
	_, _, err := hosted.Send[struct{}](ctx, b.Client, hosted.Request{Method: http.MethodPost, Path: "/files/bulk-upload", Body: form, Within: 5 * time.Minute})
	return err
}

// run runs a command in the background, in a session of its own.
func (b toolbox) run(ctx context.Context, command string) error {
	session := "sandboxer-" + rand.Text()
	_, err := hosted.Call[struct{}](ctx, b.Client, http.MethodPost, "/process/session", map[string]any{"sessionId": session})
	if err == nil {
		_, err = hosted.Call[struct{}](ctx, b.Client, http.MethodPost, "/process/session/"+session+"/exec", map[string]any{"command": command, "runAsync": true})
	}
	return err
}

// agentOf is the client of the agent in a sandbox.
func (x *extension) agentOf(ctx context.Context, o object, token string) (*agent.Client, error) {
	p, err := hosted.Call[struct {
		URL   string `json:"url"`
		Token string `json:"token"`
	}](ctx, x.client, http.MethodGet, at(o.ID)+"/ports/"+strconv.Itoa(agentPort)+"/preview-url", nil)
	if err = cmp.Or(err, x.link(p.URL)); err != nil {
		return nil, err
	}
	return x.agents.Get(hosted.InAccount(ctx, o.ID), p.URL+" "+p.Token+" "+token, agent.ClientOptions{
		BaseURL: p.URL, Token: token, Dial: hosted.Dial(p.URL),
		Header: http.Header{"X-Daytona-Preview-Token": {p.Token}, "X-Daytona-Skip-Preview-Warning": {"true"}},
	}), nil
}

// enter returns the client of the agent of a complete sandbox, and its workspace.
func (x *extension) enter(ctx context.Context, h sandboxer.Handle) (*agent.Client, string, error) {
	o, err := x.running(ctx, h.Ref)
	if err = cmp.Or(err, x.link(o.Toolbox)); err != nil {
		return nil, "", err
	}
	_, sh := x.toolbox(o)
	token, workspace, err := sh.Entered(ctx, sh.Done(h.SandboxID, h.Generation))
	if err != nil {
		return nil, "", err
	}
	c, err := x.agentOf(ctx, o, token)
	return c, workspace, err
}

// complete brings the agent, the workspace and the main command into the sandbox of h. It can be repeated.
func (x *extension) complete(ctx context.Context, h sandboxer.Handle, spec sandboxer.Spec, restored bool) error {
	o, err := x.running(ctx, h.Ref)
	if err == nil && o.short(spec.Fuse, o.CreatedAt) {
		_, err = x.extend(ctx, o.ID, spec.Fuse)
	}
	if err = cmp.Or(err, x.link(o.Toolbox)); err != nil {
		return err
	}
	unlock, err := x.Env.Notes.Lock(ctx, spec.ID) // a teardown waits
	if err != nil {
		return err
	}
	defer unlock()
	b, sh := x.toolbox(o)
	done := sh.Done(spec.ID, spec.Generation)
	ready, err := sh.Bring(ctx, done, func(arch string) (program.Program, error) {
		return x.programs.Find(inside.AgentFile, arch, x.cfg.Agent)
	})
	if err != nil || ready {
		return err
	}
	token, home, err := sh.Secret(ctx, done)
	if err != nil {
		return err
	}
	c, err := x.agentOf(ctx, o, token)
	if err != nil {
		return err
	}
	contents := inside.Contents{Spec: spec, Workspace: cmp.Or(spec.Workspace, strings.TrimRight(home, "/")+"/workspace"), Port: agentPort}
	if !restored {
		contents.Repo = spec.Inputs[inputRepo]
	}
	return sh.Complete(ctx, c, done, contents, b.run)
}

// WaitReady implements sandboxer.Extension. Provision makes a sandbox whole, or does not.
func (x *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (r sandboxer.Reachability, err error) {
	if ctx, h, err = x.On(ctx, h); err != nil {
		return r, err
	}
	c, workspace, err := x.enter(ctx, h)
	if err != nil {
		return r, err
	}
	r = sandboxer.Reachability{RemoteDir: workspace, Extra: map[string]string{"daytona_sandbox": h.Ref}}
	for {
		short, cancel := context.WithTimeout(ctx, lookAfter)
		err = c.WaitReady(short)
		cancel()
		if sandboxer.KindOf(err) != sandboxer.Unavailable || ctx.Err() != nil {
			return r, err
		}
		if _, err := x.running(ctx, h.Ref); err != nil { // it may have ended meanwhile
			return r, err
		}
	}
}

package inside

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/program"
)

// AgentFile is the name of the agent's program.
const AgentFile = "sandboxer-agent"

// A Shell is a way into a sandbox that a backend has without the agent, such as its own exec. It brings the agent in. Root
// inside can replace the agent, which harms only that sandbox.
type Shell struct {
	Dir string // for the agent's program; the sandbox of a snapshot may have it already
	// Run runs a script of ours by /bin/sh with arguments, and returns what it prints, a few words. Kind: Failed if its code is
	// not 0.
	Run func(ctx context.Context, what, script string, args ...string) (string, error)
	// Write writes the content of f, which has size bytes, to a file.
	Write func(ctx context.Context, name string, f *os.File, size int64) error
}

// Done is the path of the file that is written last into a sandbox: if it exists, the sandbox is complete.
func (s Shell) Done(id string, generation int) string {
	return s.Dir + "/" + id + ".g" + strconv.Itoa(generation)
}

// look prints the state of a sandbox: "ready" if it is complete; otherwise its machine type and the digest of its agent's
// program.
const look = `umask 022
[ -e "$1" ] && { echo ready; exit; }
mkdir -p "$2" && { uname -m 2>/dev/null || echo; [ -x "$2/sandboxer-agent" ] && cat "$2/digest" 2>/dev/null; exit 0; }`

// take installs the program, of $3 bytes, from the place where it was written.
const take = `umask 022
n=$1/new && [ "$(wc -c <"$n")" -eq "$3" ] && chmod 755 "$n" && mv -f "$n" "$1/sandboxer-agent" && echo "$2" >"$1/digest"`

// Bring copies the agent's program into a sandbox, unless it is there. find returns the program for an architecture, "" if that
// is not known. ready means that the file done exists, so that the sandbox is complete. Kinds: those of Run, Write and find.
func (s Shell) Bring(ctx context.Context, done string, find func(arch string) (program.Program, error)) (ready bool, err error) {
	has, err := s.Run(ctx, "looking for sandboxer-agent", look, done, s.Dir)
	if err != nil || strings.TrimSpace(has) == "ready" {
		return err == nil, err
	}
	machine, digest, _ := strings.Cut(has, "\n")
	machine = strings.TrimSpace(machine)
	prog, err := find(cmp.Or(map[string]string{"x86_64": "amd64", "aarch64": "arm64"}[machine], capture.Text(machine, 50)))
	if err != nil || strings.TrimSpace(digest) == prog.Digest {
		return false, err
	}
	unreadable := func(err error) error {
		return sandboxer.E(sandboxer.Unavailable, err, "the program of the agent cannot be read")
	}
	f, err := os.Open(prog.Path)
	if err != nil {
		return false, unreadable(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return false, unreadable(err)
	}
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "copying sandboxer-agent into the sandbox"})
	if err := s.Write(ctx, s.Dir+"/new", f, fi.Size()); err != nil {
		return false, err
	}
	_, err = s.Run(ctx, "copying sandboxer-agent", take, s.Dir, prog.Digest, strconv.FormatInt(fi.Size(), 10))
	return false, err
}

// Secret returns the token of the agent of a sandbox, and the directory in which scripts run. A script makes the token inside,
// once, so that it is in no argument and in no record of the backend.
func (s Shell) Secret(ctx context.Context, done string) (token, dir string, err error) {
	return cut(s.Run(ctx, "making a token", `umask 077
[ -s "$1.token" ] || { head -c 24 /dev/urandom | od -An -tx1 | tr -d " \n"; echo; } >"$1.token"
cat "$1.token" && pwd`, done))
}

// Entered returns the token of the agent of a complete sandbox, and the content of the file done. Kind: Failed if the sandbox
// is not complete.
func (s Shell) Entered(ctx context.Context, done string) (token, says string, err error) {
	return cut(s.Run(ctx, "looking for the agent", `cat "$1.token" "$1"`, done))
}

func cut(said string, err error) (token, rest string, _ error) {
	token, rest, _ = strings.Cut(strings.TrimSuffix(said, "\n"), "\n")
	if err == nil && (token == "" || len(token) > 100 || strings.ContainsAny(token, " \r\t")) {
		err = sandboxer.E(sandboxer.Failed, nil, "the sandbox has no token of its agent").WithHint("destroy it and create it again")
	}
	return token, rest, err
}

// Contents are the things that Complete brings into a sandbox, in addition to the agent.
type Contents struct {
	sandboxer.Spec
	Workspace string
	Repo      string // directory of the server's machine for the workspace; empty for none
	Port      int    // where the agent listens: the backend shows it
}

const startTime = 30 * time.Second // for the agent to answer

// Complete completes a sandbox that has the agent's program and its token (Bring, Secret). It starts the agent, sets the
// environment, fills the workspace, starts the main command, and at last writes the file done with the path of the workspace. c
// reaches the agent, and run runs a shell command in the background inside. Complete can be repeated. Kinds: those of run and
// of the agent; Unavailable if the agent does not answer.
func (s Shell) Complete(ctx context.Context, c *agent.Client, done string, o Contents, run func(ctx context.Context, command string) error) error {
	if err := c.Health(ctx); err != nil {
		if err := s.start(ctx, c, done, o, run); err != nil {
			return err
		}
	}
	err := c.Init(ctx, agent.Settings{Env: o.Env, Workdir: &o.Workspace})
	if err == nil && o.Repo != "" {
		_, err = Pack(o.Repo, func(r io.Reader) error { return c.Unarchive(ctx, o.Workspace, r) })
	}
	if err == nil {
		err = StartOnce(ctx, c, sandboxer.ProcessSpec{Args: o.Command})
	}
	if err == nil {
		err = c.WriteFile(ctx, done, 0o600, strings.NewReader(o.Workspace+"\n"))
	}
	return err
}

// start starts the agent and waits until it answers. Meanwhile it ignores answers of a proxy in between. It runs the command once
// more if that did not begin.
func (s Shell) start(ctx context.Context, c *agent.Client, done string, o Contents, run func(context.Context, string) error) error {
	if err := run(ctx, s.serve(done, o)); err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	late := time.After(startTime / 6)
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := c.Health(bounded)
		if err == nil {
			return nil
		}
		select {
		case <-bounded.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			said, _ := s.Run(ctx, "looking for the reason", `if [ -e "$1" ]; then tail -c 500 "$1"; else echo "the command that starts it did not run"; fi`, done+".log")
			return sandboxer.E(sandboxer.Unavailable, err, "the agent in the sandbox does not answer: %s", capture.Text(strings.TrimSpace(said), 500)).
				WithHint("check that programs may run in %s, and that nothing else uses port %d", s.Dir, o.Port)
		case <-late:
			// A backend that runs commands in the background may lose one. One that ran has made its log, and a second agent
			// would find the port in use.
			if _, err := s.Run(bounded, "looking for the log of the agent", `[ -e "$1" ]`, done+".log"); sandboxer.KindOf(err) == sandboxer.Failed {
				if err := run(bounded, s.serve(done, o)); err != nil {
					return err
				}
			}
		case <-time.After(pause):
		}
	}
}

// serve is the shell command that runs the agent with its token. The parentheses make a subshell for exec, so that the shell
// itself stays.
func (s Shell) serve(done string, o Contents) string {
	return fmt.Sprintf(`(cd / && mkdir -p %[1]s && read -r SANDBOXER_AGENT_TOKEN <%[2]s && export SANDBOXER_AGENT_TOKEN && exec %[3]s init --untraced --listen 0.0.0.0:%[4]d --workdir %[1]s) >%[5]s 2>&1 </dev/null`,
		Quoted(o.Workspace), Quoted(done+".token"), Quoted(s.Dir+"/"+AgentFile), o.Port, Quoted(done+".log"))
}

// StartOnce is like Start, but does nothing if an earlier call started the main command.
func StartOnce(ctx context.Context, c *agent.Client, p sandboxer.ProcessSpec) error {
	if len(p.Args) == 0 {
		return nil
	}
	running, err := c.Processes(ctx)
	if err != nil || slices.ContainsFunc(running, func(p sandboxer.Process) bool { return p.Tag == agent.MainTag }) {
		return err
	}
	return Start(ctx, c, p)
}

// Quoted quotes arguments for a shell.
func Quoted(args ...string) string {
	q := make([]string, len(args))
	for i, a := range args {
		q[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	return strings.Join(q, " ")
}

package inside

import (
	"context"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/program"
)

// AgentFile is the name of the agent's program.
const AgentFile = "sandboxer-agent"

// A Shell is a backend's own way into a sandbox that does not begin with the agent. The agent gets there by it. Root inside can
// replace the agent, which harms nothing but the sandbox.
type Shell struct {
	Dir string // for the agent's program; the sandbox of a snapshot may have it already
	// Run runs a script of ours by /bin/sh with arguments, and returns what it prints, a few words. Kind: Failed if its code is
	// not 0.
	Run func(ctx context.Context, what, script string, args ...string) (string, error)
	// Write writes the content of f, which has size bytes, to a file.
	Write func(ctx context.Context, name string, f *os.File, size int64) error
}

// Done is the path of a file that is written last into a sandbox: one with it is complete.
func (s Shell) Done(id string, generation int) string {
	return s.Dir + "/" + id + ".g" + strconv.Itoa(generation)
}

// look says what is in a sandbox: "ready" if it is complete; else its machine, and the digest of the program that it has.
const look = `umask 022
[ -e "$1" ] && { echo ready; exit; }
mkdir -p "$2" && { uname -m 2>/dev/null || echo; [ -x "$2/sandboxer-agent" ] && cat "$2/digest" 2>/dev/null; exit 0; }`

// take takes the program, of $3 bytes, from where it was written.
const take = `umask 022
n=$1/new && [ "$(wc -c <"$n")" -eq "$3" ] && chmod 755 "$n" && mv -f "$n" "$1/sandboxer-agent" && echo "$2" >"$1/digest"`

// Bring brings the agent's program into a sandbox, unless it is there. find finds it for a machine in the words of uname, "" if
// that is not known. ready: the file done exists, and nothing is left to do. Kinds: those of Run, Write and find.
func (s Shell) Bring(ctx context.Context, done string, find func(machine string) (program.Program, error)) (ready bool, err error) {
	has, err := s.Run(ctx, "looking for sandboxer-agent", look, done, s.Dir)
	if err != nil || strings.TrimSpace(has) == "ready" {
		return err == nil, err
	}
	machine, digest, _ := strings.Cut(has, "\n")
	prog, err := find(strings.TrimSpace(machine))
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

// StartOnce is Start, unless an earlier call started the main command.
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

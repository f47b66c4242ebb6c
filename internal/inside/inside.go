// Package inside has what adapters decide about the inside of a sandbox with the agent: how the agent gets there, what root may do,
// what cannot be asked for, how a workspace is filled, and what the main command is.
package inside

import (
	"context"
	"path"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
)

const (
	// AgentDir is a read-only mount with the agent's program. A sandbox writes elsewhere: root inside cannot put
	// another program in its place.
	AgentDir  = "/.sandboxer"
	AgentPath = AgentDir + "/sandboxer-agent"
	// Workspace is the default workspace of a sandbox.
	Workspace = "/workspace"
	// MinPIDs is the least limit of processes: the agent's threads, and those of what reaches it.
	MinPIDs = 32
)

// Capabilities are those of Linux that root inside a sandbox has, by their names without CAP_: what container engines
// grant, without raw sockets and device nodes. SYS_ADMIN and SYS_RESOURCE are absent, so that the limit of processes
// holds for root, too.
func Capabilities() []string {
	return []string{"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
}

// Check refuses what no sandbox with the agent can have. Kind: Invalid.
func Check(spec sandboxer.Spec) error {
	if n := spec.Limits.PIDs; n > 0 && n < MinPIDs {
		return sandboxer.E(sandboxer.Invalid, nil, "a limit of %d processes is too small for the agent; the least is %d", n, MinPIDs)
	}
	for k := range spec.Env {
		if strings.HasPrefix(k, agent.EnvPrefix) {
			return sandboxer.E(sandboxer.Invalid, nil, "environment variable %s is the agent's own", k)
		}
	}
	if ws := spec.Workspace; ws != "" && (!path.IsAbs(ws) || path.Clean(ws) != ws || ws == "/" || Reserved(ws)) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the workspace: want a clean absolute path outside /dev, /proc, /sys and %s", ws, AgentDir)
	}
	return nil
}

// Reserved reports whether a clean path is not one of the sandbox's own files.
func Reserved(p string) bool {
	return slices.ContainsFunc([]string{"/dev", "/proc", "/sys", AgentDir}, func(r string) bool { return p == r || strings.HasPrefix(p, r+"/") })
}

// CheckImageEnv refuses variables of the image ref that no sandbox can have. Kind: Failed.
func CheckImageEnv(ref string, env []string) error {
	for _, kv := range env {
		if k, _, ok := strings.Cut(kv, "="); !ok || k == "" || strings.ContainsRune(kv, 0) || strings.HasPrefix(k, agent.EnvPrefix) {
			return sandboxer.E(sandboxer.Failed, nil, "image %q: its environment variable %q is not possible", ref, k)
		}
	}
	return nil
}

// An Image has the parts of an image's configuration about its main command.
type Image struct {
	Entrypoint, Cmd []string
	WorkingDir      string
}

// Main is the main command of a sandbox: the image's entry point with command, or, as engines do it, with the image's own
// command if there is none. Its directory is the image's, or the workspace if nothing of the image is in it.
func (i Image) Main(command []string, workspace string) (args []string, dir string) {
	args = slices.Clone(i.Entrypoint)
	switch {
	case len(command) == 0:
		args = append(args, i.Cmd...)
	case len(args) == 0:
		return command, workspace
	default:
		args = append(args, command...)
	}
	return args, path.Clean("/" + i.WorkingDir)
}

// Start starts the main command as a child of the agent, which outlives this program. Without arguments there is none.
func Start(ctx context.Context, c *agent.Client, p sandboxer.ProcessSpec) error {
	if len(p.Args) == 0 {
		return nil
	}
	p.Tag = agent.MainTag
	if _, err := c.Start(ctx, p); err != nil {
		return sandboxer.E(FailedUnless(err), err, "the sandbox's command %q could not be started: %s", p.Args[0], sandboxer.Message(err))
	}
	return nil
}

// FailedUnless is the kind of an error that the request caused, unless the sandbox or the caller did.
func FailedUnless(err error) sandboxer.Kind {
	switch k := sandboxer.KindOf(err); k {
	case sandboxer.Unavailable, sandboxer.Canceled, sandboxer.Timeout:
		return k
	}
	return sandboxer.Failed
}

// Package inside prepares the inside of a sandbox that runs the agent, the same for every adapter: it brings the agent in,
// limits what root may do, refuses specs that no such sandbox can keep, fills the workspace and starts the main command.
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
	// AgentDir is a read-only mount with the agent's program, so that root inside cannot replace the program.
	AgentDir  = "/.sandboxer"
	AgentPath = AgentDir + "/sandboxer-agent"
	// Workspace is the default workspace of a sandbox.
	Workspace = "/workspace"
	// MinPIDs is the smallest allowed limit of processes: the agent's threads, and the processes that connect to it.
	MinPIDs = 32
)

// Capabilities are the Linux capabilities of root inside a sandbox, without CAP_: those that container engines grant, except
// raw sockets and device nodes. SYS_ADMIN and SYS_RESOURCE are left out, so that the limit of processes holds for root, too.
func Capabilities() []string {
	return []string{"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
}

// Check refuses specs that no sandbox with the agent can keep. Kind: Invalid.
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

// CheckImageEnv refuses environment variables of the image ref that no sandbox can have. Kind: Failed.
func CheckImageEnv(ref string, env []string) error {
	for _, kv := range env {
		if k, _, ok := strings.Cut(kv, "="); !ok || k == "" || strings.ContainsRune(kv, 0) || strings.HasPrefix(k, agent.EnvPrefix) {
			return sandboxer.E(sandboxer.Failed, nil, "image %q: its environment variable %q is not possible", ref, k)
		}
	}
	return nil
}

// An Image is the part of an image's configuration that concerns the main command.
type Image struct {
	Entrypoint, Cmd []string
	WorkingDir      string
}

// Main is the main command of a sandbox, as engines compute it: the image's entry point with command, or with the image's own
// command if command is empty. Its directory is that of the image, or the workspace if no part of the command is from the
// image.
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

// FailedUnless returns Failed, or the kind of err if that is Unavailable, Canceled or Timeout: such an error does not come from
// the request.
func FailedUnless(err error) sandboxer.Kind {
	switch k := sandboxer.KindOf(err); k {
	case sandboxer.Unavailable, sandboxer.Canceled, sandboxer.Timeout:
		return k
	}
	return sandboxer.Failed
}

// Package engine speaks to a container engine, Docker or Podman: it describes containers, runs commands in them, reaches their ports, measures,
// pauses and lists them. Adapters decide what a sandbox is made of, and how it is made.
//
// The package speaks to an engine by the engine's own program, docker or podman, through scripts for sh that
// take one round trip each. Podman has no API without a service, adapters need the program
// for compose anyway, and it knows contexts, credentials and sockets as its users set them
// up (docs/design/adr/0022-engine-by-its-program.md). The program runs on a [Host], a
// *sshrun.Host. If an engine's API can be reached, an [API] speaks
// that, without a program (docs/design/adr/0027-engine-by-its-api.md).
//
// Objects of a sandbox have the label [LabelName] with the sandbox's external name, and names that begin with it (OwnNames). The label alone
// does not prove it, because images copy labels.
package engine

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"net"
	"sync"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// Labels of containers, networks, volumes and images.
const (
	LabelName    = "dev.sandboxer.name"    // the external name of the sandbox
	LabelOwner   = "dev.sandboxer.owner"   // the installation
	LabelService = "dev.sandboxer.service" // which of the sandbox's services a container is of
)

// A Host is where an engine's program runs. Its methods are as those of *sshrun.Host.
type Host interface {
	// Name is what messages call it.
	Name() string
	// Run runs a command to its end. When ctx ends, it ends the command and all that it started.
	Run(ctx context.Context, c sshrun.Cmd) (sandboxer.Exit, error)
	// Ask is Run for short questions, which get through even if commands use all other
	// sessions.
	Ask(ctx context.Context, c sshrun.Cmd) (sandboxer.Exit, error)
	// Capture is Run for a command whose output may have at most most bytes.
	Capture(ctx context.Context, c sshrun.Cmd, most int) ([]byte, sandboxer.Exit, error)
	// Kill ends every process that has the variable name with that value in its environment.
	Kill(ctx context.Context, name, value string) error
	// Dial opens a stream as seen from the host.
	Dial(ctx context.Context, network, addr string) (net.Conn, error)
}

// An Engine is one engine on one host. It remembers what it found out about containers, so
// that commands take one round trip; Forget drops that. Its methods are safe for concurrent use.
type Engine struct {
	Program string            // docker or podman
	Env     map[string]string // of the program, such as DOCKER_HOST and CONTAINER_HOST
	Host    Host
	Watch   *Watch       // nil for an engine that is not watched
	Log     *slog.Logger // nil for none
	// Failed makes the error for a script that failed, from its output. nil means Failure.
	Failed func(said string) error

	mu         sync.Mutex
	containers map[string]map[string]string // IDs, by the name of the sandbox and service
	noShell    map[string]bool              // containers without a shell, by ID
	oomKills   map[string]int               // processes killed for memory, by container, as last seen
}

// Script runs a script that needs the engine, with args as its $1 and so on, and returns
// its output. env is added to the engine's own environment. Unavailable, with ErrHangs as the cause: the engine
// does not answer. A non-zero exit is an error of the kind that fits the script's output.
func (en *Engine) Script(ctx context.Context, env map[string]string, stdin io.Reader, script string, args ...string) (string, error) {
	ctx, done, err := en.Watch.Attend(ctx)
	if err != nil {
		return "", err
	}
	out, err := en.HostScript(ctx, env, stdin, script, args...)
	if err == nil {
		en.Watch.Answered()
	}
	return out, done(err)
}

// HostScript is Script for a script that needs the host alone: it does not end when the engine
// hangs.
func (en *Engine) HostScript(ctx context.Context, env map[string]string, stdin io.Reader, script string, args ...string) (string, error) {
	said := &capture.Last{Max: MaxSaid}
	cmd := sshrun.Cmd{Script: script, Args: args, Env: en.with(env), Stdin: stdin, Stderr: said}
	if len(env) > 0 {
		// Host.Kill finds a sandbox's processes by their environment, which others see
		// as it was when the process started.
		cmd.Script, cmd.Args = "", append([]string{"/bin/sh", "-c", script, "sh"}, args...)
	}
	out, exit, err := en.Host.Capture(ctx, cmd, sshrun.MaxAnswer)
	if err == nil && exit.Code != 0 {
		text := Said(said.String(), exit)
		if en.Failed != nil {
			err = en.Failed(text)
		} else {
			err = Failure(en.Host.Name(), "a step", text, text)
		}
	}
	return string(out), err
}

// Command runs the engine's program, or another that needs the engine, as Host.Run does.
// Unavailable, with ErrHangs as the cause: the engine does not answer.
func (en *Engine) Command(ctx context.Context, c sshrun.Cmd) (sandboxer.Exit, error) {
	ctx, done, err := en.Watch.Attend(ctx)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	c.Env = en.with(c.Env)
	exit, err := en.Host.Run(ctx, c)
	return exit, done(err)
}

// with returns env combined with the engine's own.
func (en *Engine) with(env map[string]string) map[string]string {
	all := map[string]string{}
	maps.Copy(all, en.Env)
	maps.Copy(all, env)
	return all
}

func (en *Engine) log() *slog.Logger { return logger(en.Log, en.Host.Name()) }

func logger(log *slog.Logger, host string) *slog.Logger {
	if log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return log.With("host", host)
}

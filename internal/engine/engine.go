// Package engine speaks to a container engine, Docker or Podman, on this machine or on
// another: it describes containers, runs commands in them, reaches their ports, measures,
// pauses and lists them. What a sandbox is made of, and how it is made, is for adapters.
//
// An engine is spoken to by its own program, docker or podman, through scripts for sh that
// take one round trip each. Podman has no API without a service, adapters need the program
// for compose anyway, and it knows contexts, credentials and sockets as its users set them
// up (docs/adr/0022-engine-by-its-program.md). Where the program runs is a [Host]: *sshrun.Host
// for another machine, [Local] for this one. Where an engine's API can be reached, an [API] speaks
// that, without a program (docs/adr/0027-engine-by-its-api.md).
//
// What belongs to a sandbox is told by labels: [LabelName] has the sandbox's external name.
package engine

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"net"
	"strings"
	"sync"

	"github.com/sand-boxer/sandboxer"
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
	// Run runs a command to its end, and ends it, with all that it started, when ctx ends.
	Run(ctx context.Context, c sshrun.Cmd) (sandboxer.Exit, error)
	// Ask is Run for short questions, which get through also where commands have taken all
	// the room that there is for them.
	Ask(ctx context.Context, c sshrun.Cmd) (sandboxer.Exit, error)
	// Capture is Run for a command of which at most that many bytes of output are wanted.
	Capture(ctx context.Context, c sshrun.Cmd, most int) ([]byte, sandboxer.Exit, error)
	// Kill ends every process that has the variable name with that value in its environment.
	Kill(ctx context.Context, name, value string) error
	// Dial opens a stream as seen from the host.
	Dial(ctx context.Context, network, addr string) (net.Conn, error)
}

// An Engine is one engine on one host. It remembers what it found out about containers, so
// that commands take one round trip; Forget drops that. Its methods may be called at once.
type Engine struct {
	Program string            // docker or podman
	Env     map[string]string // of the program, such as DOCKER_HOST and CONTAINER_HOST
	Host    Host
	Watch   *Watch       // nil for an engine that is not watched
	Log     *slog.Logger // nil for none
	// Failed makes the error of a script that ended badly and said that. nil means Failure.
	Failed func(said string) error

	mu         sync.Mutex
	containers map[string]map[string]string // IDs, by the name of the sandbox and service
	noShell    map[string]bool              // containers without a shell, by ID
	oomKills   map[string]int               // processes killed for memory, by container, as last seen
}

// Script runs a script that needs the engine, with args as its $1 and so on, and returns
// what it prints. env is beside the engine's own. Unavailable, with ErrHangs as the cause: the engine
// does not answer. A non-zero exit is an error of the kind that fits what the script said.
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

// HostScript is Script for one that needs the host alone: an engine that does not answer does
// not end it.
func (en *Engine) HostScript(ctx context.Context, env map[string]string, stdin io.Reader, script string, args ...string) (string, error) {
	var said strings.Builder
	cmd := sshrun.Cmd{Script: script, Args: args, Env: en.with(env), Stdin: stdin, Stderr: Last(&said)}
	if len(env) > 0 {
		// What works at a sandbox is found by its environment (Host.Kill), which others see
		// as a process was started with it.
		cmd.Script, cmd.Args = "", append([]string{"/bin/sh", "-c", script, "sh"}, args...)
	}
	out, exit, err := en.Host.Capture(ctx, cmd, sshrun.MaxAnswer)
	if err == nil && exit.Code != 0 {
		if en.Failed != nil {
			err = en.Failed(said.String())
		} else {
			err = Failure(en.Host.Name(), "a step", said.String(), said.String())
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

// with returns env beside the engine's own.
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

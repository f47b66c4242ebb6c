package engine

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/marked"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// ErrNotFound is the cause of Exec's error when there is no such container.
var ErrNotFound = errors.New("the container is not there")

// ErrPaused is the cause of Exec's error when the container is frozen.
var ErrPaused = errors.New("the container is paused")

// An EndedError is the cause of Exec's error when the container's main process does not run.
type EndedError struct{ Status string } // exited, created, …

func (e *EndedError) Error() string { return "the container is " + e.Status }

// exhaustedTime is how long a command is retried that could not start because no process was left.
const exhaustedTime = 5 * time.Second

// Exec runs a command in a container, as sandboxer.Execer describes: a non-zero exit is
// a result, 127 is a command that does not exist and 126 one that cannot be executed, and when ctx
// ends the command is killed with what it started. Exec finds processes to kill by their environment and by a
// tag; that takes a shell and grep inside, or an account that may kill them from the host.
//
// Exec ignores cmd.Service. NotFound: the container is not there (ErrNotFound) or
// does not run (*EndedError). Conflict: it is paused (ErrPaused). Exhausted: it has no process left. Invalid: the user or the
// directory does not exist. Unavailable: the engine is not there, or hangs (ErrHangs).
func (en *Engine) Exec(ctx context.Context, id string, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	for end := time.Now().Add(exhaustedTime); ; {
		within, done, err := en.Watch.Attend(ctx)
		if err != nil {
			return sandboxer.Exit{}, err
		}
		exit, err := en.exec(within, id, cmd)
		err = done(err)
		// A sandbox that uses all its processes may have a free one soon. Nothing ran yet, and no
		// input was read.
		if sandboxer.KindOf(err) != sandboxer.Exhausted || cmd.Stdin != nil || cmd.TTY != nil || !time.Now().Before(end) {
			return exit, err
		}
		select {
		case <-ctx.Done():
			return exit, ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// exec runs cmd in the container id, until ctx ends.
func (en *Engine) exec(ctx context.Context, id string, cmd sandboxer.Cmd) (exit sandboxer.Exit, err error) {
	cookie := rand.Text()
	args, env := en.execArgs(id, cookie, cmd)

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := &guard{w: cmd.Stdout, failed: cancel, wrote: en.Watch.Answered}
	errs := &guard{w: cmd.Stderr, failed: cancel, wrote: en.Watch.Answered}
	if cmd.Signals != nil {
		stop := make(chan struct{})
		done := make(chan struct{})
		defer func() { close(stop); <-done }()
		go func() { defer close(done); en.forward(ctx, id, cookie, cmd.Signals, stop) }()
	}
	rc := sshrun.Cmd{Args: args, Env: env, TTY: cmd.TTY, Raw: true, Stdin: cmd.Stdin, Stdout: out, Stderr: errs}
	if cmd.Resize != nil {
		began := make(chan struct{})
		begin := sync.OnceFunc(func() { close(began) })
		out.wrote = func() { begin(); en.Watch.Answered() }
		rc.Resize = repeatFirstSizes(ctx, cmd.Resize, began)
	}
	type end struct {
		exit sandboxer.Exit
		err  error
	}
	ended := make(chan end, 1)
	go func() {
		exit, err := en.Host.Run(ctx, rc)
		ended <- end{exit, err}
	}()
	select {
	case e := <-ended:
		exit, err = e.exit, e.err
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		en.killCommand(ctx, id, cookie)
		// A caller that does not read the output must not keep this from returning.
		select {
		case e := <-ended:
			err = e.err
		case <-time.After(2 * time.Second):
		}
		if c := context.Cause(ctx); errors.Is(c, errWriter) {
			return sandboxer.Exit{}, c
		}
		if err == nil {
			err = ctx.Err()
		}
	}
	if err != nil {
		return sandboxer.Exit{}, err
	}
	err = refusal(cmd.Args[0], exit, out.held()+errs.held(), cmd.Dir, cmd.User)
	var refused *sandboxer.StartError
	switch {
	case errors.Is(err, ErrAbsent): // a command may say the same of an engine inside
		if _, err := en.Script(ctx, nil, nil, `"$1" version >/dev/null`, en.Program); err != nil {
			return sandboxer.Exit{}, err
		}
	case errors.Is(err, ErrNotFound):
		if err := en.State(ctx, id); err != nil {
			return sandboxer.Exit{}, err
		}
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Unavailable, nil, "container %s runs, but the engine starts no command in it", id)
	case errors.As(err, &refused):
		return refused.Exit(cmd), nil
	case err != nil:
		return sandboxer.Exit{}, err
	}
	out.release()
	errs.release()
	if exit.Code == 137 {
		exit.OOMKilled = en.KilledForMemory(ctx, id)
	}
	return exit, nil
}

// execArgs is the engine's program with the arguments that run cmd in the container id, marked by cookie, and
// the program's environment.
func (en *Engine) execArgs(id, cookie string, cmd sandboxer.Cmd) (args []string, env map[string]string) {
	args = []string{en.Program, "exec"}
	if cmd.Stdin != nil || cmd.TTY != nil { // a terminal without an input gets its end
		args = append(args, "-i")
	}
	if cmd.TTY != nil {
		args = append(args, "-t")
	}
	if cmd.User != "" {
		args = append(args, "-u", cmd.User)
	}
	if cmd.Dir != "" {
		args = append(args, "-w", cmd.Dir)
	}
	env = en.with(nil)
	args = append(args, Variables("-e", cmd.Env, env)...)
	args = append(args, "-e", procs.ExecVar+"="+cookie, id)
	switch {
	case cmd.TTY != nil:
		// The engine sets the size of a terminal a little after the command began.
		args = append(args, "sh", "-c", marked.Tagging(marked.Tag(cookie))+`stty rows "$1" cols "$2" 2>/dev/null; shift 2; exec "$@"`, "sh", strconv.Itoa(int(cmd.TTY.Rows)), strconv.Itoa(int(cmd.TTY.Cols)))
	case en.hasShell(id):
		args = append(args, "sh", "-c", marked.Tagging(marked.Tag(cookie))+`exec "$@"`, "sh")
	}
	return append(args, carried(cmd.Args)...), env
}

// carried returns args in a form that reaches a container unchanged. An engine's API is
// JSON, which changes bytes that are not UTF-8; a shell inside restores them
// with printf's %b.
func carried(args []string) []string {
	if !slices.ContainsFunc(args, func(a string) bool { return !utf8.ValidString(a) }) {
		return args
	}
	out := []string{"sh", "-c", `i=$#; while [ "$i" -gt 0 ]; do a=$(printf %b. "$1"); shift; set -- "$@" "${a%.}"; i=$((i-1)); done; exec "$@"`, "sh"}
	for _, a := range args {
		var b strings.Builder
		for _, c := range []byte(a) {
			if c == '\\' || c < ' ' || c > '~' {
				fmt.Fprintf(&b, `\0%03o`, c)
			} else {
				b.WriteByte(c)
			}
		}
		out = append(out, b.String())
	}
	return out
}

// State is nil for a container that runs, and otherwise says why no command can run in it, as
// Exec does.
func (en *Engine) State(ctx context.Context, id string) error {
	out, err := en.Script(ctx, nil, nil, `"$1" inspect --format '{{.State.Status}} {{.State.Paused}}' "$2" 2>/dev/null || "$1" version >/dev/null`, en.Program, id)
	switch {
	case err != nil:
		return err
	case strings.Contains(out, "paused") || strings.Contains(out, "true"):
		return sandboxer.E(sandboxer.Conflict, ErrPaused, "container %s is paused", id)
	case strings.TrimSpace(out) == "":
		return sandboxer.E(sandboxer.NotFound, ErrNotFound, "container %s no longer exists", id)
	}
	status := strings.Fields(out)[0]
	if status == "running" {
		return nil
	}
	ended := &EndedError{status}
	return sandboxer.E(sandboxer.NotFound, ended, "the main program of container %s has ended (%s)", id, ended.Status)
}

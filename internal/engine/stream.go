package engine

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// Stream starts a command in a container, which must have a shell, and returns its standard
// input and output as a connection. cmd has no streams, terminal or signals of its own, and its error output
// is dropped. The command outlives ctx; Close of the connection ends the engine's program and closes the
// command's input, by which it must know that it is to end. CloseWrite closes the input alone. Failed: the
// command could not be started. Unavailable: the engine is not there, or hangs (ErrHangs).
func (en *Engine) Stream(ctx context.Context, id string, cmd sandboxer.Cmd) (net.Conn, error) {
	within, done, err := en.Watch.Attend(ctx)
	if err != nil {
		return nil, err
	}
	args := []string{en.Program, "exec", "-i"}
	if cmd.User != "" {
		args = append(args, "-u", cmd.User)
	}
	if cmd.Dir != "" {
		args = append(args, "-w", cmd.Dir)
	}
	env := en.with(nil)
	args = append(args, Variables("-e", cmd.Env, env)...)
	// An engine that cannot start the program says so in the stream. What comes after
	// the mark is the stream's own.
	args = append(args, id, "sh", "-c", `printf '\006'; exec "$@"`, "sh")
	c, err := en.stream(within, append(args, carried(cmd.Args)...), env)
	return c, done(err)
}

// stream opens a stream by way of a command, which first writes a mark.
func (en *Engine) stream(ctx context.Context, args []string, env map[string]string) (net.Conn, error) {
	mine, theirs := net.Pipe()
	input, feed := net.Pipe()
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer cancel()
		_, _ = en.Host.Run(run, sshrun.Cmd{Args: args, Env: env, Stdin: input, Stdout: theirs}) // its output ends, and that is all that is told
		theirs.Close()
		input.Close()
	}()
	s := &stream{Conn: mine, w: feed, end: cancel}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	var first [1]byte
	if _, err := io.ReadFull(mine, first[:]); err != nil || first[0] != '\006' || !stop() {
		s.Close()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, sandboxer.E(sandboxer.Failed, err, "a command could not be started in a container on host %s", en.Host.Name())
	}
	return s, nil
}

// A stream is the input and output of a command.
type stream struct {
	net.Conn          // what it says
	w        net.Conn // what it hears
	end      func()
}

func (s *stream) Write(p []byte) (int, error) { return s.w.Write(p) }

// CloseWrite ends what the other side hears.
func (s *stream) CloseWrite() error { return s.w.Close() }

func (s *stream) Close() error {
	err := errors.Join(s.w.Close(), s.Conn.Close())
	s.end()
	return err
}

func (s *stream) SetDeadline(at time.Time) error {
	return errors.Join(s.w.SetDeadline(at), s.Conn.SetDeadline(at))
}

func (s *stream) SetWriteDeadline(at time.Time) error { return s.w.SetWriteDeadline(at) }

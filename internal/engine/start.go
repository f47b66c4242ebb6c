package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// openings are how the engines' own messages begin.
var openings = []string{"OCI runtime exec failed", "unable to find user ", "Error response from daemon: ", "Error: ", "unable to start container process", "unable to upgrade to tcp",
	"Cannot connect to the Docker daemon", "failed to connect to the docker API", "Cannot connect to Podman"}

// refusal distinguishes an engine's failure to start the command called name from the command's own.
func refusal(name string, exit sandboxer.Exit, said, dir, user string) error {
	if said == "" || exit.Code != 1 && exit.Code != 125 && exit.Code != 126 && exit.Code != 127 && exit.Code != 255 {
		return nil
	}
	low := strings.ToLower(said)
	has := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(low, w) })
	}
	if has("cannot connect to the docker daemon", "failed to connect to the docker api", "cannot connect to podman") {
		return ErrAbsent
	}
	oci := has("oci runtime", "unable to start container process", "crun:", "runc:")
	switch {
	case has("no such container", "no container with", "is not running", "is paused", "only create exec sessions on running", "container state improper"):
		return ErrNotFound
	case has("unable to find user", "no matching entries in passwd", "unable to find group"):
		return sandboxer.E(sandboxer.Invalid, nil, "there is no user %q in the sandbox", user)
	case oci && has("chdir to cwd", "workdir"):
		return sandboxer.E(sandboxer.Invalid, nil, "%s is not a directory of the sandbox, or its user may not enter it", dir)
	}
	if se := sandboxer.StartErrorOf(name, errors.New(said)); oci && se != nil {
		return se
	}
	switch {
	case oci && has("resource temporarily unavailable", "cannot fork", "try again", "read init-p", "errno 11", "newosproc"):
		return sandboxer.E(sandboxer.Exhausted, errors.New(said), "the sandbox has reached its limit of processes, and cannot start a command")
	case oci && has("procready", "broken pipe", "unexpected eof", "cannot allocate", "cgroup"):
		return ErrNotFound // it ended just then
	}
	return nil
}

var errWriter = errors.New("the output could not be written")

// A guard passes on what is written to it, except an opening line that may be the
// engine's message instead of the command's: that waits until more comes or all ends.
type guard struct {
	w      io.Writer
	buf    []byte
	open   bool
	failed context.CancelCauseFunc
	wrote  func() // called with every output, if set
}

func (g *guard) Write(p []byte) (int, error) {
	if g.wrote != nil {
		g.wrote()
	}
	if !g.open {
		g.buf = append(g.buf, p...)
		line := strings.IndexByte(string(g.buf), '\n')
		if (line < 0 || line >= len(g.buf)-2) && len(g.buf) < 8<<10 && slices.ContainsFunc(openings, func(o string) bool {
			n := min(len(o), len(g.buf))
			return string(g.buf[:n]) == o[:n]
		}) {
			return len(p), nil
		}
		return len(p), g.release()
	}
	if g.w == nil {
		return len(p), nil
	}
	n, err := g.w.Write(p)
	if err != nil {
		g.failed(fmt.Errorf("%w: %w", errWriter, err))
	}
	return n, err
}

func (g *guard) release() error {
	g.open = true
	if g.w == nil || len(g.buf) == 0 {
		return nil
	}
	b := g.buf
	g.buf = nil
	if _, err := g.w.Write(b); err != nil {
		g.failed(fmt.Errorf("%w: %w", errWriter, err))
		return err
	}
	return nil
}

func (g *guard) held() string {
	if g.open {
		return ""
	}
	return string(g.buf)
}

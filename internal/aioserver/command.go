package aioserver

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	maxCommand  = 1 << 20  // bytes
	maxArgument = 96 << 10 // bytes of a command that are an argument: Linux takes 128 KiB
)

// command is one command of a session.
type command struct {
	text string
	out  *output // of a shell session: both
	err  *output // nil in a shell session
	stop context.CancelCauseFunc
	done chan struct{} // closed when it has ended

	end  error // why it was stopped, or not observed; nil if it came to its end
	exit sandboxer.Exit
}

// Reasons to stop a command.
var (
	errHardLimit = errors.New("the command took longer than it may")
	errNoChange  = errors.New("the command wrote nothing for longer than it may")
	errKilled    = errors.New("the command was ended")
)

// commandSpec says what run runs.
type commandSpec struct {
	text      string
	dir       string // "": that of the session
	keepDir   bool   // dir is that of later commands, too
	env       map[string]string
	unset     []string
	hard      time.Duration
	noChange  *time.Duration // nil: that of the session
	separated bool           // stderr is kept apart
}

// execute runs a command in a session of a kind, until it ends, a limit is reached, the session is closed or the caller
// leaves. A shell session with an ID must exist; others are made. The command's output is kept until the end of
// the call.
func (c *call) execute(k kind, id string, spec commandSpec) (*command, string, error) {
	if len(spec.text) > maxCommand {
		return nil, "", bad("command", "it is longer than %d bytes", maxCommand)
	}
	if strings.ContainsRune(spec.text, 0) {
		return nil, "", bad("command", "it has a NUL byte")
	}
	shell, err := c.findShell()
	if err != nil {
		return nil, "", err
	}
	s := c.s
	ctx, stop := context.WithCancelCause(c.ctx())
	defer stop(nil)
	cmd := &command{text: spec.text, stop: stop, done: make(chan struct{})}
	defer close(cmd.done)

	s.mu.Lock()
	var se *session
	if k == shellKind && id != "" {
		se, err = c.find(k, id)
	} else {
		se, err = c.open(k, id, func(*session) {})
	}
	if err != nil {
		s.mu.Unlock()
		return nil, "", err
	}
	if spec.keepDir {
		se.dir = spec.dir
	}
	noChange := se.noChange
	if spec.noChange != nil {
		noChange = *spec.noChange
	}
	silence := newSilence(noChange, func() { stop(errNoChange) })
	job, state := c.job(se, spec, cmd, shell, silence.broken)
	se.running[cmd] = true
	se.count++
	s.work.Add(1)
	s.mu.Unlock()
	defer s.work.Done()
	defer context.AfterFunc(s.ctx, func() { stop(sandboxer.E(sandboxer.Unavailable, nil, "the server ends")) })()

	var exit sandboxer.Exit
	if err = s.opts.Sandboxes.Awake(ctx, c.sb.ID); err == nil {
		if spec.hard > 0 {
			defer time.AfterFunc(spec.hard, func() { stop(errHardLimit) }).Stop()
		}
		silence.broken() // it begins now
		exit, err = s.opts.Sandboxes.Exec(ctx, c.sb.ID, job)
	}
	cause := context.Cause(ctx)
	stop(nil)
	var ended shellState
	if state != nil {
		var said []byte
		if ended, said = state.end(); len(said) > 0 {
			cmd.out.Write(said)
		}
	}
	if exit.OOMKilled { // which its code alone does not tell
		said := cmd.err
		if said == nil {
			said = cmd.out
		}
		io.WriteString(said, "sandboxer: killed for its use of memory: the sandbox has a limit\n")
	}
	silence.stop() // which every output begins again
	if err != nil && cause != nil {
		err = cause
	}
	cmd.exit, cmd.end = exit, err

	s.mu.Lock()
	defer s.mu.Unlock()
	delete(se.running, cmd)
	se.used = time.Now()
	if sandboxer.KindOf(err) == sandboxer.Invalid && job.Dir != "" && job.Dir == se.dir {
		// Most probably the directory does not exist any more: that must not end the session.
		se.dir = ""
		cmd.end = sandboxer.E(sandboxer.Invalid, err, "%s", sandboxer.Message(err)).WithHint("the next command of the session begins in the initial state")
	}
	if err == nil && ended.ok {
		se.keep(ended)
	}
	if err != nil && c.ctx().Err() != nil {
		return nil, "", c.ctx().Err()
	}
	return cmd, se.id, cmd.failure()
}

// job returns the command for a session, with Server.mu held. The reports of the shell of a shell session go
// to the stateReader, which is nil for others.
func (c *call) job(se *session, spec commandSpec, cmd *command, shell string, written func()) (sandboxer.Cmd, *stateReader) {
	job := sandboxer.Cmd{Env: maps.Clone(se.env), Dir: se.dir}
	if spec.dir != "" {
		job.Dir = spec.dir
	}
	if job.Env == nil {
		job.Env = map[string]string{}
	}
	unset := slices.Concat(se.unset, spec.unset)
	for k, v := range spec.env {
		job.Env[k] = v
		unset = slices.DeleteFunc(unset, func(name string) bool { return name == k })
	}
	cmd.out = c.output(written)
	job.Stdout = cmd.out
	var state *stateReader
	if spec.separated {
		cmd.err = c.output(written)
		job.Stderr = cmd.err
	} else {
		state = &stateReader{memory: c.s.memory, who: c.who}
		job.Stderr = state
	}
	job.Args = shellArgs(shell, spec.text, script{unset: unset, reports: !spec.separated})
	if len(spec.text) > maxArgument {
		job.Stdin = strings.NewReader(spec.text)
	}
	return job, state
}

// The names of commands' states. Bash sessions use other names than shell sessions.
const (
	statusCompleted  = "completed"
	statusNoChange   = "no_change_timeout"
	statusHardLimit  = "hard_timeout"
	statusTerminated = "terminated"
	statusTimedOut   = "timed_out"
	statusKilled     = "killed"
)

// status returns how a command has ended and, if it ran to its end, its exit code.
func (cmd *command) status(k kind) (status string, code *int) {
	words := map[kind][3]string{shellKind: {statusHardLimit, statusNoChange, statusTerminated}, bashKind: {statusTimedOut, statusTimedOut, statusKilled}}[k]
	switch {
	case errors.Is(cmd.end, errHardLimit):
		return words[0], nil
	case errors.Is(cmd.end, errNoChange):
		return words[1], nil
	case cmd.end != nil:
		return words[2], nil
	}
	return statusCompleted, &cmd.exit.Code
}

// failure is why a command could not be run, or observed to its end; nil if its end is
// an answer.
func (cmd *command) failure() error {
	for _, known := range []error{nil, errHardLimit, errNoChange, errKilled} {
		if cmd.end == known {
			return nil
		}
	}
	return commandError(cmd.end)
}

// commandError is err, of a command, with the status of an ended sandbox if the sandbox has ended.
func commandError(err error) error {
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return &statusError{error: sandboxer.E(sandboxer.NotFound, err, "the sandbox has ended").WithHint("ask for a new one"), status: http.StatusGone}
	}
	return err
}

// output returns a new output that is kept until the end of the call.
func (c *call) output(written func()) *output {
	o := newOutput(c.s.memory, c.who, written)
	c.outputs = append(c.outputs, o)
	return o
}

// said returns the kept part of an output, at most most characters if that is not 0, and how long all of it was. It reserves
// room for it in the answer, which has it times times. Without room the output is left out: the command has run, and must
// not run again because of that.
func (c *call) said(o *output, most, times int) (string, int64) {
	c.s.reading.Lock()
	s, total := o.text()
	if most > 0 {
		s = shorten(s, most)
	}
	if times*encodedSize(s) > maxEncoded/2 {
		s = shorten(s, maxEncoded/2/6/times)
	}
	c.s.reading.Unlock()
	err := c.reserve(len(s))
	if err == nil {
		err = c.foresee(s, times)
	}
	if err != nil {
		s = "\n[… the output is left out: " + sandboxer.Message(err) + " …]\n"
	}
	return s, total
}

// workDir checks the directory that a command, or a session, is to begin in. If it does not exist,
// and strict is not set, it returns "".
func (c *call) workDir(dir string, strict bool) (string, error) {
	if dir == "" {
		return "", nil
	}
	dir, err := cleanPath("exec_dir", dir)
	if err != nil {
		return "", err
	}
	fi, err := c.s.opts.Sandboxes.StatFile(c.ctx(), c.sb.ID, dir)
	switch {
	case err == nil && (fi.Mode.IsDir() || fi.Mode.Type() == fs.ModeSymlink):
		return dir, nil
	case err == nil || sandboxer.KindOf(err) == sandboxer.NotFound || sandboxer.KindOf(err) == sandboxer.Invalid:
		if strict {
			return "", sandboxer.E(sandboxer.Invalid, err, "exec_dir: %s is not a directory inside the sandbox", dir)
		}
		return "", nil
	}
	return "", err
}

// workspace asks where commands begin by default.
func (c *call) workspace() (string, error) {
	out := &printed{most: maxPrinted}
	x, err := c.s.opts.Sandboxes.Exec(c.ctx(), c.sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", "pwd"}, Stdout: out})
	if err != nil {
		return "", commandError(err)
	}
	if dir := strings.TrimSuffix(out.String(), "\n"); x.Code == 0 && strings.HasPrefix(dir, "/") && len(dir) <= maxPath {
		return dir, nil
	}
	return "", sandboxer.E(sandboxer.Failed, nil, "the shell inside the sandbox does not say where it is: it ended with %d", x.Code).
		WithHint("use an image with sh")
}

// findShell returns the path of the sandbox's shell: a path, since a session may change PATH,
// and must find a shell to change it back.
func (c *call) findShell() (string, error) {
	s := c.s
	s.mu.Lock()
	st, err := s.state(c)
	if err != nil {
		s.mu.Unlock()
		return "", err
	}
	shell := st.shell
	s.mu.Unlock()
	if shell != "" {
		return shell, nil
	}
	out := &printed{most: maxPrinted}
	x, err := s.opts.Sandboxes.Exec(c.ctx(), c.sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", "command -v bash || command -v sh"}, Stdout: out})
	if err != nil {
		return "", commandError(err)
	}
	shell = "sh"
	if at := strings.TrimSuffix(out.String(), "\n"); x.Code == 0 && path.IsAbs(at) && len(at) <= maxPath && !strings.Contains(at, "\n") {
		shell = at
	}
	s.mu.Lock()
	st.shell = shell
	s.mu.Unlock()
	return shell, nil
}

// silence reports when nothing was written for a while.
type silence struct {
	limit time.Duration
	timer *time.Timer
}

func newSilence(limit time.Duration, f func()) *silence {
	si := &silence{limit: limit}
	if limit > 0 {
		si.timer = time.AfterFunc(maxLimit, f)
	}
	return si
}

func (si *silence) broken() {
	if si.timer != nil {
		si.timer.Reset(si.limit)
	}
}

func (si *silence) stop() {
	if si.timer != nil {
		si.timer.Stop()
	}
}

package aioserver

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// bashChars is how many characters of an output are answered where nobody says it.
const bashChars = 50_000

type bashExec struct {
	SessionID       string             `json:"session_id"`
	Command         *string            `json:"command"`
	ExecDir         string             `json:"exec_dir"`
	Env             map[string]*string `json:"env"`
	AsyncMode       bool               `json:"async_mode"`
	Timeout         *seconds           `json:"timeout"`
	HardTimeout     *seconds           `json:"hard_timeout"`
	MaxOutputLength *int               `json:"max_output_length"`
}

type bashResult struct {
	SessionID    string `json:"session_id"`
	CommandID    string `json:"command_id"`
	Command      string `json:"command"`
	Status       string `json:"status"`
	Stdout       string `json:"stdout"`
	Stderr       string `json:"stderr"`
	ExitCode     *int   `json:"exit_code"`
	Offset       int64  `json:"offset"`
	StderrOffset int64  `json:"stderr_offset"`
}

// bashExec never answers 404: clients take that for an image without this path, and never ask again.
func (c *call) bashExec() error {
	err := c.runBash()
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		gone := sandboxer.E(sandboxer.NotFound, err, "%s", sandboxer.Message(err))
		return &statusError{error: gone.WithHint("%s", sandboxer.HintOf(err)), status: http.StatusGone}
	}
	return err
}

// environment checks the variables of a request. Those without a value are to be unset.
func environment(vars map[string]*string) (env map[string]string, unset []string, _ error) {
	env = map[string]string{}
	size := 0
	for k, v := range vars {
		size += len(k)
		switch {
		case k == "" || strings.ContainsAny(k, "=\x00"):
			return nil, nil, bad("env", "%q is no name of a variable", k)
		case v == nil && !variable.MatchString(k):
			return nil, nil, bad("env", "a shell cannot unset %q", k)
		case v == nil:
			unset = append(unset, k)
		case strings.ContainsRune(*v, 0):
			return nil, nil, bad("env", "the value of %q has a NUL byte", k)
		default:
			env[k] = *v
			size += len(*v)
		}
	}
	if size > maxSessionEnv {
		return nil, nil, bad("env", "it is larger than %d bytes", maxSessionEnv)
	}
	return env, unset, nil
}

func (c *call) runBash() error {
	var in bashExec
	if err := c.decode(&in); err != nil {
		return err
	}
	most := bashChars
	if in.MaxOutputLength != nil {
		most = *in.MaxOutputLength
	}
	wait, err1 := limit("timeout", in.Timeout)
	hard, err2 := limit("hard_timeout", in.HardTimeout)
	env, unset, err3 := environment(in.Env)
	if err := errors.Join(err1, err2, err3, checkSessionID("session_id", in.SessionID)); err != nil {
		return err
	}
	switch {
	case in.Command == nil:
		return bad("command", "it is missing")
	case most < 0:
		return bad("max_output_length", "want 0 or more characters")
	}
	dir, err := c.workDir(in.ExecDir, true)
	if err != nil {
		return err
	}
	if err := c.foresee(*in.Command, 1); err != nil {
		return err
	}
	open := func() (*session, error) { // made where there is none
		se, _, err := c.openSession(bashKind, "session_id", in.SessionID, func(*session) {})
		return se, err
	}
	cmd, se, err := c.startIn(open, func(se *session) commandSpec {
		if dir != "" { // that of later commands, too
			se.dir = dir
		}
		return commandSpec{text: *in.Command, env: env, unset: unset, input: in.AsyncMode, hard: hard, separated: true}
	})
	if err != nil {
		return err
	}
	if done, err := c.waitFor(cmd, in.AsyncMode, wait); err != nil {
		return err
	} else if done {
		if err := cmd.failure(); err != nil {
			return err
		}
	}
	out := bashResult{SessionID: se.id, CommandID: cmd.id, Command: cmd.out.command()}
	out.Status, out.ExitCode = c.status(cmd, bashKind)
	if in.AsyncMode {
		most = 0
	}
	out.Stdout, out.Offset = c.readEnd(cmd.out, out.ExitCode == nil, most, 1)
	out.Stderr, out.StderrOffset = c.readEnd(cmd.err, out.ExitCode == nil, most, 1)
	return c.answer(out)
}

type bashOutput struct {
	SessionID    string   `json:"session_id"`
	CommandID    string   `json:"command_id"`
	Offset       int64    `json:"offset"`
	StderrOffset int64    `json:"stderr_offset"`
	Wait         bool     `json:"wait"`
	WaitTimeout  *seconds `json:"wait_timeout"`

	Input  *string `json:"input"`  // of write
	Signal string  `json:"signal"` // of kill
}

// bashOf decodes a request about a session, and finds it with the command that is meant: the last one
// if none is named, which may be nil.
func (c *call) bashOf(in *bashOutput) (*session, *command, error) {
	if err := c.decode(in); err != nil {
		return nil, nil, err
	}
	if in.SessionID == "" {
		return nil, nil, bad("session_id", "it is missing")
	}
	se, err := c.session(bashKind, in.SessionID)
	if err != nil {
		return nil, nil, err
	}
	if in.CommandID == "" {
		return se, c.lastCommand(se), nil
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	i := slices.IndexFunc(se.commands, func(cmd *command) bool { return cmd.id == in.CommandID })
	if i < 0 {
		return nil, nil, sandboxer.E(sandboxer.NotFound, nil, "Command not found")
	}
	return se, c.hold(se.commands[i]), nil
}

type bashCommand struct {
	CommandID string `json:"command_id"`
	Command   string `json:"command"`
	Status    string `json:"status"`
	ExitCode  *int   `json:"exit_code"`
}

// defOutputWait is how long new output is waited for where nobody says it.
const defOutputWait = 30 * time.Second

func (c *call) bashOutput() error {
	var in bashOutput
	se, cmd, err := c.bashOf(&in)
	if err != nil {
		return err
	}
	most, err := limit("wait_timeout", in.WaitTimeout)
	if err != nil {
		return err
	}
	if in.WaitTimeout == nil {
		most = defOutputWait
	}
	out := struct {
		SessionID    string       `json:"session_id"`
		Stdout       string       `json:"stdout"`
		Stderr       string       `json:"stderr"`
		Offset       int64        `json:"offset"`
		StderrOffset int64        `json:"stderr_offset"`
		Command      *bashCommand `json:"command"`
	}{SessionID: se.id}
	if cmd == nil {
		return c.answer(out)
	}
	if in.Wait {
		if err := c.awaitOutput(cmd, in.Offset, in.StderrOffset, most); err != nil {
			return err
		}
	}
	status, code := c.status(cmd, bashKind) // before the outputs: what is complete has all of them
	out.Command = &bashCommand{cmd.id, cmd.out.command(), status, code}
	if out.Stdout, out.Offset, err = c.read(cmd.out, in.Offset, status == statusRunning, 0, 1); err != nil {
		return err
	}
	if out.Stderr, out.StderrOffset, err = c.read(cmd.err, in.StderrOffset, status == statusRunning, 0, 1); err != nil {
		return err
	}
	return c.answer(out)
}

// awaitOutput waits for output beyond what the caller has, or the end.
func (c *call) awaitOutput(cmd *command, stdout, stderr int64, most time.Duration) error {
	t := time.NewTimer(most)
	defer t.Stop()
	select {
	case <-cmd.out.wait(stdout):
	case <-cmd.err.wait(stderr):
	case <-cmd.done:
	case <-t.C:
	case <-c.ctx().Done():
		return c.ctx().Err()
	}
	return nil
}

func (c *call) bashWrite() error {
	var in bashOutput
	_, cmd, err := c.bashOf(&in)
	if err != nil {
		return err
	}
	if in.Input == nil {
		return bad("input", "it is missing")
	}
	if err := c.write(cmd, *in.Input); err != nil {
		return err
	}
	return c.say("Input written", nil)
}

func (c *call) bashKill() error {
	var in bashOutput
	se, _, err := c.bashOf(&in)
	if err != nil {
		return err
	}
	sig, ok := map[string]syscall.Signal{"": syscall.SIGTERM, "TERM": syscall.SIGTERM, "KILL": syscall.SIGKILL, "INT": syscall.SIGINT}[strings.TrimPrefix(in.Signal, "SIG")]
	if !ok {
		return bad("signal", "want SIGTERM, SIGKILL or SIGINT")
	}
	c.s.mu.Lock()
	commands := slices.DeleteFunc(slices.Clone(se.commands), (*command).isDone)
	c.s.mu.Unlock()
	for _, cmd := range commands {
		c.kill(cmd, sig)
	}
	for _, cmd := range commands {
		if err := c.watch(cmd.done, defWait); err != nil {
			return err
		}
	}
	return c.say("Signal sent", nil)
}

type bashSession struct {
	SessionID      string    `json:"session_id"`
	Status         string    `json:"status"`
	WorkingDir     string    `json:"working_dir"`
	CreatedAt      time.Time `json:"created_at"`
	LastUsedAt     time.Time `json:"last_used_at"`
	CurrentCommand *string   `json:"current_command"`
	CommandCount   int       `json:"command_count"`
}

// stamp is a time as clients read it, to the microsecond.
func stamp(t time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }

// describe is for who holds Server.mu.
func (se *session) describe() bashSession {
	info := bashSession{SessionID: se.id, Status: "ready", WorkingDir: se.dir, CreatedAt: stamp(se.created), LastUsedAt: stamp(se.used), CommandCount: se.count}
	if cmd := se.last(); cmd != nil && !cmd.isDone() {
		info.CurrentCommand = text(cmd.out.command())
	}
	return info
}

func (c *call) bashSessions() error {
	out := []bashSession{}
	if err := c.eachSession(bashKind, func(se *session) { out = append(out, se.describe()) }); err != nil {
		return err
	}
	slices.SortFunc(out, func(a, b bashSession) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return c.answer(out)
}

func (c *call) bashCreate() error {
	var in struct {
		SessionID    string `json:"session_id"`
		ExecDir      string `json:"exec_dir"`
		SnapshotPath string `json:"snapshot_path"`
	}
	if err := c.decode(&in); err != nil {
		return err
	}
	if in.SnapshotPath != "" {
		p, err := cleanPath("snapshot_path", in.SnapshotPath)
		if err != nil {
			return err
		}
		in.SnapshotPath = p
	}
	dir, err := c.workDir(in.ExecDir, true)
	if err != nil {
		return err
	}
	if dir == "" {
		if dir, err = c.workspace(); err != nil {
			return err
		}
	}
	se, _, err := c.openSession(bashKind, "session_id", in.SessionID, func(se *session) { se.dir, se.snapshot = dir, in.SnapshotPath })
	if err != nil {
		return err
	}
	c.s.mu.Lock()
	out := se.describe()
	c.s.mu.Unlock()
	return c.answer(out)
}

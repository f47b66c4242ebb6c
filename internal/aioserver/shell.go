package aioserver

import (
	"errors"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// shellChars is how many characters of an output of a shell session are answered.
const shellChars = 30_000

// What the states of commands are called. Bash sessions have other words than shell sessions.
const (
	statusRunning    = "running"
	statusCompleted  = "completed"
	statusNoChange   = "no_change_timeout"
	statusHardLimit  = "hard_timeout"
	statusTerminated = "terminated"
	statusTimedOut   = "timed_out"
	statusKilled     = "killed"
)

// status returns the state of a command and, once it has come to its end, its exit code.
func (c *call) status(cmd *command, k kind) (status string, code *int) {
	if !cmd.isDone() {
		return statusRunning, nil
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	words := map[bool][4]string{
		false: {statusHardLimit, statusNoChange, statusTerminated},
		true:  {statusTimedOut, statusTimedOut, statusKilled},
	}[k == bashKind]
	switch {
	case errors.Is(cmd.end, errHardLimit):
		return words[0], nil
	case errors.Is(cmd.end, errNoChange):
		return words[1], nil
	case cmd.end != nil, cmd.killed && cmd.exit.Signal != "":
		return words[2], nil
	}
	return statusCompleted, &cmd.exit.Code
}

// failure is why a command could not be run, or observed to its end; nil if it ended in a way that is
// an answer.
func (cmd *command) failure() error {
	for _, known := range []error{nil, errHardLimit, errNoChange, errKilled} {
		if cmd.end == known {
			return nil
		}
	}
	if sandboxer.KindOf(cmd.end) == sandboxer.NotFound {
		return &statusError{error: sandboxer.E(sandboxer.NotFound, cmd.end, "the sandbox has ended").WithHint("ask for a new one"), status: http.StatusGone}
	}
	return cmd.end
}

// workDir looks at the directory that a command, or a session, is to begin in. Where nobody insists on it
// and there is none, it returns "".
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

// findShell returns what runs commands in the sandbox: where it is, since a session may change by what path programs are found,
// and has to have a shell for changing that again.
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
		return "", (&command{end: err}).failure()
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

type shellExec struct {
	ID               string   `json:"id"`
	Command          *string  `json:"command"`
	ExecDir          string   `json:"exec_dir"`
	AsyncMode        bool     `json:"async_mode"`
	Timeout          *seconds `json:"timeout"`
	Strict           bool     `json:"strict"`
	NoChangeTimeout  *seconds `json:"no_change_timeout"`
	HardTimeout      *seconds `json:"hard_timeout"`
	PreserveSymlinks bool     `json:"preserve_symlinks"` // what pwd shows is what was asked for, always
	Truncate         *bool    `json:"truncate"`
}

type consoleRecord struct {
	PS1     string `json:"ps1"`
	Command string `json:"command"`
	Output  string `json:"output"`
}

type shellResult struct {
	SessionID string          `json:"session_id"`
	Command   string          `json:"command"`
	Status    string          `json:"status"`
	Output    string          `json:"output"`
	Console   []consoleRecord `json:"console"`
	ExitCode  *int            `json:"exit_code"`
}

// limit returns a time limit that may be left out.
func limit(name string, s *seconds) (time.Duration, error) {
	if s == nil {
		return 0, nil
	}
	return s.duration(name)
}

func (c *call) shellExec() error {
	var in shellExec
	if err := c.decode(&in); err != nil {
		return err
	}
	if in.Command == nil {
		return bad("command", "it is missing")
	}
	wait, err1 := limit("timeout", in.Timeout)
	silent, err2 := limit("no_change_timeout", in.NoChangeTimeout)
	hard, err3 := limit("hard_timeout", in.HardTimeout)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	open := c.implicit(shellKind)
	if in.ID != "" {
		open = func() (*session, error) { return c.session(shellKind, in.ID) }
		if _, err := open(); err != nil {
			return err
		}
	}
	dir, err := c.workDir(in.ExecDir, in.Strict)
	if err != nil {
		return err
	}
	if err := c.foresee(*in.Command, 2); err != nil {
		return err
	}
	spec := commandSpec{text: *in.Command, dir: dir, input: in.AsyncMode, hard: hard}
	cmd, se, err := c.startIn(open, func(se *session) commandSpec {
		spec.noChange = silent
		if in.NoChangeTimeout == nil {
			spec.noChange = se.noChange
		}
		return spec
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
	most := shellChars
	if in.Truncate != nil && !*in.Truncate {
		most = 0
	}
	status, code := c.status(cmd, shellKind)
	said, _ := c.readEnd(cmd.out, status == statusRunning, most, 2)
	return c.answer(shellAnswer(se, cmd, status, code, said))
}

// implicit makes a session that nobody has named.
func (c *call) implicit(k kind) func() (*session, error) {
	return func() (*session, error) {
		se, _, err := c.openSession(k, "id", "", func(*session) {})
		return se, err
	}
}

// startIn starts a command in a session. One that nobody uses may be gone at once: then it is asked for again.
// spec is called with Server.mu held.
func (c *call) startIn(open func() (*session, error), spec func(*session) commandSpec) (*command, *session, error) {
	for try := 0; ; try++ {
		se, err := open()
		if err != nil {
			return nil, nil, err
		}
		c.s.mu.Lock()
		with := spec(se)
		c.s.mu.Unlock()
		cmd, err := c.start(se, with)
		if err == errNoSession && try < 10 {
			continue
		}
		return cmd, se, err
	}
}

// waitFor waits for a command as long as the caller does, and reports whether it has ended.
func (c *call) waitFor(cmd *command, async bool, most time.Duration) (bool, error) {
	if async {
		return cmd.isDone(), nil
	}
	return c.wait(cmd, most)
}

func shellAnswer(se *session, cmd *command, status string, code *int, said string) shellResult {
	text := cmd.out.command()
	return shellResult{
		SessionID: se.id, Command: text, Status: status, Output: said, ExitCode: code,
		Console: []consoleRecord{{PS1: "$ ", Command: text, Output: said}},
	}
}

type shellCreate struct {
	ID               string   `json:"id"`
	ExecDir          string   `json:"exec_dir"`
	NoChangeTimeout  *seconds `json:"no_change_timeout"`
	PreserveSymlinks bool     `json:"preserve_symlinks"`
}

type shellCreated struct {
	SessionID  string `json:"session_id"`
	WorkingDir string `json:"working_dir"`
}

func (c *call) shellCreate() error {
	var in shellCreate
	if err := c.decode(&in); err != nil {
		return err
	}
	silent, err := limit("no_change_timeout", in.NoChangeTimeout)
	if err != nil {
		return err
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
	se, _, err := c.openSession(shellKind, "id", in.ID, func(se *session) { se.dir, se.noChange = dir, silent })
	if err != nil {
		return err
	}
	c.s.mu.Lock()
	out := shellCreated{se.id, se.dir}
	c.s.mu.Unlock()
	return c.answer(out)
}

// workspace asks where commands begin that nobody has said it of.
func (c *call) workspace() (string, error) {
	out := &printed{most: maxPrinted}
	x, err := c.s.opts.Sandboxes.Exec(c.ctx(), c.sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", "pwd"}, Stdout: out})
	if err != nil {
		return "", (&command{end: err}).failure()
	}
	if dir := strings.TrimSuffix(out.String(), "\n"); x.Code == 0 && strings.HasPrefix(dir, "/") && len(dir) <= maxPath {
		return dir, nil
	}
	return "", sandboxer.E(sandboxer.Failed, nil, "the shell inside the sandbox does not say where it is: it ended with %d", x.Code).
		WithHint("use an image with sh")
}

type shellID struct {
	ID              string   `json:"id"`
	Seconds         *seconds `json:"seconds"`
	MaxWaitSeconds  *seconds `json:"max_wait_seconds"`
	Input           *string  `json:"input"`
	PressEnter      bool     `json:"press_enter"`
	NoChangeTimeout *seconds `json:"no_change_timeout"`
}

// shellOf decodes a request about a session, and finds it with its last command, which may be nil.
func (c *call) shellOf(in *shellID) (*session, *command, error) {
	if err := c.decode(in); err != nil {
		return nil, nil, err
	}
	if in.ID == "" {
		return nil, nil, bad("id", "it is missing")
	}
	se, err := c.session(shellKind, in.ID)
	if err != nil {
		return nil, nil, err
	}
	return se, c.lastCommand(se), nil
}

func (c *call) shellView() error {
	var in shellID
	se, cmd, err := c.shellOf(&in)
	if err != nil {
		return err
	}
	if cmd == nil {
		return c.answer(shellResult{SessionID: se.id, Status: statusCompleted, Console: []consoleRecord{}})
	}
	status, code := c.status(cmd, shellKind)
	said, _, err := c.read(cmd.out, 0, status == statusRunning, 0, 2)
	if err != nil {
		return err
	}
	return c.answer(shellAnswer(se, cmd, status, code, said))
}

// defWait is how long a command is waited for where nobody says it.
const defWait = 60 * time.Second

func (c *call) shellWait() error {
	var in shellID
	_, cmd, err := c.shellOf(&in)
	if err != nil {
		return err
	}
	most, err1 := limit("seconds", in.Seconds)
	longest, err2 := limit("max_wait_seconds", in.MaxWaitSeconds)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	switch {
	case in.Seconds == nil && in.MaxWaitSeconds == nil:
		most = defWait
	case in.Seconds == nil:
		most = longest
	case in.MaxWaitSeconds != nil:
		most = min(most, longest)
	}
	status := statusCompleted
	if cmd != nil {
		if err := c.watch(cmd.done, most); err != nil {
			return err
		}
		status, _ = c.status(cmd, shellKind)
	}
	return c.answer(map[string]string{"status": status})
}

// watch waits for something, for at most most. The caller who leaves ends nothing.
func (c *call) watch(done <-chan struct{}, most time.Duration) error {
	t := time.NewTimer(most)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	case <-c.ctx().Done():
		return c.ctx().Err()
	}
	return nil
}

// write writes to the input of a command.
func (c *call) write(cmd *command, input string) error {
	switch {
	case cmd == nil || cmd.isDone():
		return sandboxer.E(sandboxer.Conflict, nil, "no command runs in this session")
	case cmd.input == nil:
		return sandboxer.E(sandboxer.Conflict, nil, "the input of this command is empty, as that of all which somebody waits for").
			WithHint("start it with async_mode, and write to it then")
	}
	return cmd.input.write(input)
}

func (c *call) shellWrite() error {
	var in shellID
	_, cmd, err := c.shellOf(&in)
	if err != nil {
		return err
	}
	if in.Input == nil {
		return bad("input", "it is missing")
	}
	if in.PressEnter {
		*in.Input += "\n"
	}
	if err := c.write(cmd, *in.Input); err != nil {
		return err
	}
	status, _ := c.status(cmd, shellKind)
	return c.answer(map[string]string{"status": status})
}

func (c *call) shellKill() error {
	var in shellID
	_, cmd, err := c.shellOf(&in)
	if err != nil {
		return err
	}
	out := struct {
		Status     string `json:"status"`
		ExitCode   *int   `json:"exit_code"`
		Returncode *int   `json:"returncode"`
	}{Status: statusTerminated}
	if cmd != nil {
		if !cmd.isDone() {
			c.kill(cmd, syscall.SIGKILL)
		}
		if err := c.watch(cmd.done, defWait); err != nil {
			return err
		}
		out.Status, out.ExitCode = c.status(cmd, shellKind)
		out.Returncode = out.ExitCode
	}
	return c.answer(out)
}

func (c *call) shellUpdate() error {
	var in shellID
	se, _, err := c.shellOf(&in)
	if err != nil {
		return err
	}
	silent, err := limit("no_change_timeout", in.NoChangeTimeout)
	if err != nil {
		return err
	}
	if in.NoChangeTimeout != nil {
		c.s.mu.Lock()
		se.noChange = silent
		c.s.mu.Unlock()
	}
	return c.say("Session updated", nil)
}

type shellInfo struct {
	WorkingDir     string    `json:"working_dir"`
	CreatedAt      time.Time `json:"created_at"`
	LastUsedAt     time.Time `json:"last_used_at"`
	AgeSeconds     int       `json:"age_seconds"`
	Status         string    `json:"status"`
	CurrentCommand *string   `json:"current_command"`
}

func (c *call) shellSessions() error {
	out := struct {
		Sessions map[string]shellInfo `json:"sessions"`
	}{map[string]shellInfo{}}
	err := c.eachSession(shellKind, func(se *session) {
		info := shellInfo{WorkingDir: se.dir, CreatedAt: stamp(se.created), LastUsedAt: stamp(se.used), AgeSeconds: int(time.Since(se.created).Seconds()), Status: "ready"}
		if cmd := se.last(); cmd != nil && !cmd.isDone() {
			info.Status, info.CurrentCommand = statusRunning, text(cmd.out.command())
		}
		out.Sessions[se.id] = info
	})
	if err != nil {
		return err
	}
	return c.answer(out)
}

// eachSession calls f with every session, which must not call the server.
func (c *call) eachSession(k kind, f func(*session)) error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	st, err := c.s.state(c)
	if err != nil {
		return err
	}
	for _, se := range st.sessions[k] {
		f(se)
	}
	return nil
}

func (c *call) shellStats() error {
	out := struct {
		Total   int     `json:"total_sessions"`
		Active  int     `json:"active_sessions"`
		Idle    int     `json:"idle_sessions"`
		Max     int     `json:"max_sessions"`
		Timeout int     `json:"session_timeout"`
		Ratio   float64 `json:"usage_ratio"`
	}{Max: maxSessions, Timeout: int(sessionIdle.Seconds())}
	named := 0
	err := c.eachSession(shellKind, func(se *session) {
		out.Total++
		if !se.implicit {
			named++
		}
		if se.running() || time.Since(se.used) < 5*time.Minute {
			out.Active++
		} else {
			out.Idle++
		}
	})
	if err != nil {
		return err
	}
	out.Ratio = float64(named) / maxSessions
	return c.answer(out)
}

// closeSession ends a session with its commands, or all of a kind if id is "", and waits for that.
func (c *call) closeSession(k kind, id string) error {
	c.s.mu.Lock()
	st, err := c.s.state(c)
	var commands []*command
	if err == nil {
		if se := st.sessions[k][id]; se == nil && id != "" {
			err = errNoSession
		}
		for _, se := range st.sessions[k] {
			if id == "" || se.id == id {
				commands = append(commands, se.commands...)
				c.s.endSession(st, se)
			}
		}
	}
	c.s.mu.Unlock()
	if err != nil {
		return err
	}
	for _, cmd := range commands {
		if err := c.watch(cmd.done, defWait); err != nil {
			return err
		}
	}
	return c.say("Session closed", nil)
}

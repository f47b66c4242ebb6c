package aioserver

import (
	"errors"
	"time"
)

// shellChars is how many characters of an output of a shell session are answered.
const shellChars = 30_000

type shellExec struct {
	ID               string   `json:"id"`
	Command          *string  `json:"command"`
	ExecDir          string   `json:"exec_dir"`
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
	silent, err1 := limit("no_change_timeout", in.NoChangeTimeout)
	hard, err2 := limit("hard_timeout", in.HardTimeout)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if in.ID != "" { // before anything runs inside
		c.s.mu.Lock()
		_, err := c.find(shellKind, in.ID)
		c.s.mu.Unlock()
		if err != nil {
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
	spec := commandSpec{text: *in.Command, dir: dir, hard: hard}
	if in.NoChangeTimeout != nil {
		spec.noChange = &silent
	}
	cmd, session, err := c.execute(shellKind, in.ID, spec)
	if err != nil {
		return err
	}
	most := shellChars
	if in.Truncate != nil && !*in.Truncate {
		most = 0
	}
	status, code := cmd.status(shellKind)
	said, _ := c.said(cmd.out, most, 2)
	return c.answer(shellResult{
		SessionID: session, Command: cmd.text, Status: status, Output: said, ExitCode: code,
		Console: []consoleRecord{{PS1: "$ ", Command: cmd.text, Output: said}},
	})
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
	se, err := c.createSession(shellKind, "id", in.ID, in.ExecDir, silent)
	if err != nil {
		return err
	}
	return c.answer(shellCreated{se.id, se.dir})
}

package aioserver

import (
	"crypto/rand"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// bashChars is how many characters of an output are answered by default.
const bashChars = 50_000

type bashExec struct {
	SessionID       string             `json:"session_id"`
	Command         *string            `json:"command"`
	ExecDir         string             `json:"exec_dir"`
	Env             map[string]*string `json:"env"`
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
			return nil, nil, bad("env", "%q is not the name of a variable", k)
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
	hard, err1 := limit("hard_timeout", in.HardTimeout)
	env, unset, err2 := environment(in.Env)
	if err := errors.Join(err1, err2, checkSessionID("session_id", in.SessionID)); err != nil {
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
	cmd, session, err := c.execute(bashKind, in.SessionID, commandSpec{text: *in.Command, dir: dir, keepDir: dir != "", env: env, unset: unset, hard: hard, separated: true})
	if err != nil {
		return err
	}
	out := bashResult{SessionID: session, CommandID: strings.ToLower(rand.Text()), Command: cmd.text}
	out.Status, out.ExitCode = cmd.status(bashKind)
	out.Stdout, out.Offset = c.said(cmd.out, most, 1)
	out.Stderr, out.StderrOffset = c.said(cmd.err, most, 1)
	return c.answer(out)
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

func (c *call) bashCreate() error {
	var in struct {
		SessionID string `json:"session_id"`
		ExecDir   string `json:"exec_dir"`
	}
	if err := c.decode(&in); err != nil {
		return err
	}
	se, err := c.createSession(bashKind, "session_id", in.SessionID, in.ExecDir, 0)
	if err != nil {
		return err
	}
	return c.answer(bashSession{SessionID: se.id, Status: "ready", WorkingDir: se.dir, CreatedAt: stamp(se.created), LastUsedAt: stamp(se.used), CommandCount: se.count})
}

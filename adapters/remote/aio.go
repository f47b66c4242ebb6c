package remote

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/execfiles"
)

// aio is the extension of kind aio: a site with agent-infra's in-sandbox API. Content of files goes by that API's own
// calls; the rest is done by commands (aioexec.go).
type aio struct{ *site }

var _ interface {
	sandboxer.Extension
	sandboxer.Execer
	sandboxer.Filer
} = aio{}

const (
	// maxGuest bounds an answer that is held in memory.
	maxGuest = 1 << 20
	// maxWrite bounds a file that is written: the API takes it in one piece.
	maxWrite = 64 << 20
	// scriptTime bounds a script: removing a large tree takes a while.
	scriptTime = 5 * time.Minute
)

// at returns where the sandbox of h is, and what asks it.
func (a aio) at(h sandboxer.Handle) (*url.URL, *http.Client, error) {
	l, err := a.find(h)
	if err != nil {
		return nil, nil, err
	}
	u, err := parseURL(l.URL)
	if err != nil {
		return nil, nil, err
	}
	return u, a.client(u), nil
}

// send sends a request and returns the answer if it is a success. A body is sent as it is if it is an io.Reader, and else as JSON. What
// the guest says of a failure is shown as far as it is fit for that.
func (a aio) send(ctx context.Context, h sandboxer.Handle, method, where string, query url.Values, body any) (*http.Response, error) {
	u, c, err := a.at(h)
	if err != nil {
		return nil, err
	}
	r, whole := body.(io.Reader)
	if body != nil && !whole {
		data, err := json.Marshal(body)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Internal, err, "the request cannot be encoded")
		}
		r = bytes.NewReader(data)
	}
	u = u.JoinPath(where)
	u.RawQuery = query.Encode()
	req, err := http.NewRequestWithContext(ctx, method, u.String(), r)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the request cannot be made")
	}
	req.Header.Set("User-Agent", "sandboxer")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.Do(req)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s does not answer", u.Host)
	case resp.StatusCode/100 == 2:
		return resp, nil
	}
	defer resp.Body.Close()
	data, _ := io.ReadAll(io.LimitReader(resp.Body, maxGuest))
	var e envelope
	_ = json.Unmarshal(data, &e) // what is none says nothing
	return nil, sandboxer.E(kindOfStatus(resp.StatusCode), nil, "the sandbox answers %d to %s: %s", resp.StatusCode, where, shown(e.Message))
}

func kindOfStatus(status int) sandboxer.Kind {
	switch status {
	case http.StatusBadRequest, http.StatusUnprocessableEntity:
		return sandboxer.Invalid
	case http.StatusUnauthorized, http.StatusForbidden:
		return sandboxer.Denied
	case http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented:
		return sandboxer.Unsupported // its paths are ours to know
	case http.StatusTooManyRequests, http.StatusInsufficientStorage:
		return sandboxer.Exhausted
	}
	return sandboxer.Unavailable
}

// maxShown bounds what is shown of what a guest says, and the directory that it names as its home.
const maxShown = 200

// shown is what a guest says, fit to be shown.
func shown(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(s[:min(len(s), maxShown)], "?"))
	if s = strings.TrimSpace(s); s == "" {
		return "it does not say why"
	}
	return s
}

// envelope is how that API answers.
type envelope struct {
	Success *bool           `json:"success"`
	Message string          `json:"message"`
	Data    json.RawMessage `json:"data"`
}

// readEnvelope reads an answer to a request that went well by its status; some images say in it that it did not.
func readEnvelope(data []byte) (json.RawMessage, error) {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, sandboxer.E(sandboxer.Failed, err, "the sandbox answers with something that is not of its API")
	}
	if e.Success != nil && !*e.Success {
		return nil, sandboxer.E(sandboxer.Failed, nil, "the sandbox says that it did not do it: %s", shown(e.Message))
	}
	return e.Data, nil
}

// readHome reads where an answer to GET /v1/sandbox says that the sandbox's files are; "" if it does not.
func readHome(data []byte) string {
	var said struct {
		Home string `json:"home_dir"`
	}
	if json.Unmarshal(data, &said) != nil || !path.IsAbs(said.Home) || path.Clean(said.Home) != said.Home || len(said.Home) > maxShown || shown(said.Home) != said.Home {
		return ""
	}
	return said.Home
}

var errTooLong = errors.New("it is too long")

// post sends body and returns what the answer has for data.
func (a aio) post(ctx context.Context, h sandboxer.Handle, where string, body any) (json.RawMessage, error) {
	return a.postUpTo(ctx, h, where, body, maxGuest)
}

// postUpTo is post for an answer of at most so many bytes.
func (a aio) postUpTo(ctx context.Context, h sandboxer.Handle, where string, body any, most int64) (json.RawMessage, error) {
	resp, err := a.send(ctx, h, http.MethodPost, where, nil, body)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, most+1))
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the sandbox's answer to %s broke off", where)
	case int64(len(data)) > most:
		return nil, sandboxer.E(sandboxer.Failed, errTooLong, "the sandbox's answer to %s is too long", where)
	}
	return readEnvelope(data)
}

// bashAnswer is what the API says of a command, in either of its forms.
type bashAnswer struct {
	SessionID    string `json:"session_id"`
	CommandID    string `json:"command_id"`
	Stdout       string `json:"stdout"`
	Stderr       string `json:"stderr"`
	Status       string `json:"status"`
	ExitCode     *int   `json:"exit_code"`
	Offset       int64  `json:"offset"`
	StderrOffset int64  `json:"stderr_offset"`
	Command      struct {
		Status   string `json:"status"`
		ExitCode *int   `json:"exit_code"`
	} `json:"command"`
}

// readBash reads what the API says of a command.
func readBash(data []byte) (x bashAnswer, err error) {
	// Of an exec the command is its text, and what is told of it is beside.
	var exec struct {
		Command json.RawMessage `json:"command"`
	}
	if err = json.Unmarshal(data, &exec); err == nil && (len(exec.Command) == 0 || exec.Command[0] == '"') {
		var flat struct {
			bashAnswer
			Command string `json:"command"`
		}
		err = json.Unmarshal(data, &flat)
		x = flat.bashAnswer
		x.Command.Status, x.Command.ExitCode = x.Status, x.ExitCode
	} else if err == nil {
		err = json.Unmarshal(data, &x)
	}
	if err == nil && (x.Offset < 0 || x.StderrOffset < 0) {
		err = errors.New("an offset is none")
	}
	if err != nil {
		return bashAnswer{}, sandboxer.E(sandboxer.Failed, err, "the sandbox speaks of a command in a way that cannot be read")
	}
	return x, nil
}

// sync runs a short script to its end.
func (a aio) sync(ctx context.Context, h sandboxer.Handle, text string, env map[string]string) (bashAnswer, error) {
	data, err := a.post(ctx, h, "v1/bash/exec", map[string]any{"command": text, "env": env, "hard_timeout": scriptTime.Seconds(), "max_output_length": 0})
	if err != nil {
		return bashAnswer{}, err
	}
	x, err := readBash(data)
	if err == nil && x.Command.ExitCode == nil {
		err = sandboxer.E(sandboxer.Failed, nil, "the sandbox does not say how a command ended (%s)", shown(x.Command.Status))
	}
	return x, err
}

// small runs a short script whose exit code says nothing.
func (a aio) small(ctx context.Context, h sandboxer.Handle, text string) error {
	_, err := a.sync(ctx, h, text, nil)
	return err
}

// long runs a script in a session, with variables, for as long as that takes, and returns its exit code.
func (a aio) long(ctx context.Context, h sandboxer.Handle, session, text string, env map[string]string) (int, error) {
	data, err := a.post(ctx, h, "v1/bash/exec", map[string]any{"session_id": session, "command": text, "env": env, "timeout": pollTime.Seconds()})
	if err != nil {
		return 0, err
	}
	x, err := readBash(data)
	for id := x.CommandID; err == nil && (x.Command.Status == "running" || x.Command.Status == "pending"); {
		began := time.Now()
		if data, err = a.post(ctx, h, "v1/bash/output", map[string]any{"session_id": session, "command_id": id, "wait": true, "wait_timeout": pollTime.Seconds()}); err == nil {
			x, err = readBash(data)
		}
		if err == nil && time.Since(began) < 10*time.Millisecond && !pause(ctx, idlePause) { // it does not wait
			err = ctx.Err()
		}
	}
	if err == nil && x.Command.ExitCode == nil {
		err = sandboxer.E(sandboxer.Failed, nil, "the sandbox does not say how a command ended (%s)", shown(x.Command.Status))
	}
	if err != nil {
		return 0, err
	}
	return *x.Command.ExitCode, nil
}

// idlePause is between two questions of what runs to a far side that does not wait with its answer.
const idlePause = 20 * time.Millisecond

// pause lets some time pass, and says whether ctx goes on.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// brief is an Execer for scripts of package execfiles that have no input and say little: one request each.
type brief struct{ aio }

// Exec implements sandboxer.Execer.
func (b brief) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	var text strings.Builder
	text.WriteString("command -v base64 >/dev/null || exit " + strconv.Itoa(execfiles.ExitNoTools) + "\n")
	words := argWords(&text, cmd.Args)
	fmt.Fprintf(&text, "cd %s || exit\nexec 4>&1\nsbx=$( { { ( exec %s ) 3>&- 4>&- </dev/null; echo $? >&3; } | base64 -w0 >&4; } 3>&1 )\nexit \"$sbx\"\n", quoted(cmd.Dir), words)
	x, err := b.sync(ctx, h, text.String(), cmd.Env)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	out, err := base64.StdEncoding.DecodeString(strings.TrimSpace(x.Stdout))
	if err == nil && cmd.Stdout != nil {
		_, err = cmd.Stdout.Write(out)
	}
	if err == nil && cmd.Stderr != nil {
		_, err = io.WriteString(cmd.Stderr, x.Stderr)
	}
	if err != nil {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Failed, err, "what the sandbox says of its files cannot be read")
	}
	return exitOf(*x.Command.ExitCode), nil
}

func (a aio) files() execfiles.Files { return execfiles.Files{Exec: brief{a}} }

// download opens the file at a path, which is there.
func (a aio) download(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
	resp, err := a.send(ctx, h, http.MethodGet, "v1/file/download", url.Values{"path": {name}}, nil)
	if err != nil {
		return nil, err
	}
	return content{resp.Body, name}, nil
}

// content gives an error in the middle of a file a kind.
type content struct {
	io.ReadCloser
	name string
}

func (c content) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		kind := sandboxer.KindOf(err)
		if kind == sandboxer.Internal {
			kind = sandboxer.Unavailable
		}
		err = sandboxer.E(kind, err, "reading %s broke off", c.name)
	}
	return n, err
}

// ReadFile implements sandboxer.Filer.
func (a aio) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
	if err := a.files().Readable(ctx, h, name); err != nil {
		return nil, err
	}
	return a.download(ctx, h, name)
}

// WriteFile implements sandboxer.Filer. The content comes under a name of its own first.
func (a aio) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	draft := "/tmp/.sandboxer-" + rand.Text()
	sent, err := a.upload(ctx, h, name, draft, r)
	if err == nil {
		err = a.files().Adopt(ctx, h, draft, name, mode, sent)
	}
	if err != nil {
		c, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_ = a.small(c, h, "rm -f "+draft) // there is an error already
	}
	return err
}

// upload writes what r has to the file draft, as it comes, and returns how much that was. It is for the file name.
func (a aio) upload(ctx context.Context, h sandboxer.Handle, name, draft string, r io.Reader) (int64, error) {
	begin, err := json.Marshal(map[string]string{"file": draft, "encoding": "base64"})
	if err != nil {
		return 0, sandboxer.E(sandboxer.Internal, err, "the request cannot be encoded")
	}
	body, to := io.Pipe()
	in := &source{r: r}
	ended := make(chan error, 1)
	go func() {
		_, err := to.Write(append(begin[:len(begin)-1], `,"content":"`...))
		if err == nil {
			text := base64.NewEncoder(base64.StdEncoding, to)
			_, err = io.Copy(text, in)
			err = errors.Join(err, text.Close())
		}
		if err == nil {
			_, err = io.WriteString(to, `"}`)
		}
		to.CloseWithError(err) // without one it ends well
		ended <- err
	}()
	_, err = a.post(ctx, h, "v1/file/write", body)
	body.Close()       // what was not sent is not wanted
	stopped := <-ended // r is the caller's
	switch {
	case in.n > maxWrite:
		return 0, sandboxer.E(sandboxer.Unsupported, nil, "%s: the sandbox's API takes a file in one piece, and this one has more than %d MiB", name, maxWrite>>20)
	case in.err != nil:
		kind := sandboxer.KindOf(in.err)
		if kind == sandboxer.Internal {
			kind = sandboxer.Invalid
		}
		return 0, sandboxer.E(kind, in.err, "%s: its new content could not be read", name)
	case err == nil && stopped != nil:
		return 0, sandboxer.E(sandboxer.Unavailable, stopped, "%s: the sandbox did not take all of its new content", name)
	}
	return in.n, err
}

// source is the new content of a file, which fails beyond maxWrite.
type source struct {
	r   io.Reader
	n   int64
	err error // of r
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.n += int64(n)
	if err != nil && err != io.EOF {
		s.err = err
	}
	if s.n > maxWrite {
		return 0, errTooLong
	}
	return n, err
}

// StatFile implements sandboxer.Filer.
func (a aio) StatFile(ctx context.Context, h sandboxer.Handle, name string) (sandboxer.FileInfo, error) {
	return a.files().StatFile(ctx, h, name)
}

// ListFiles implements sandboxer.Filer. A list may be of any length, so that it comes as the output of any command.
func (a aio) ListFiles(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return execfiles.Files{Exec: a}.ListFiles(ctx, h, dir, after)
}

// MakeDir implements sandboxer.Filer.
func (a aio) MakeDir(ctx context.Context, h sandboxer.Handle, dir string) error {
	return a.files().MakeDir(ctx, h, dir)
}

// MoveFile implements sandboxer.Filer.
func (a aio) MoveFile(ctx context.Context, h sandboxer.Handle, from, to string) error {
	return a.files().MoveFile(ctx, h, from, to)
}

// RemoveFile implements sandboxer.Filer.
func (a aio) RemoveFile(ctx context.Context, h sandboxer.Handle, name string) error {
	return a.files().RemoveFile(ctx, h, name)
}

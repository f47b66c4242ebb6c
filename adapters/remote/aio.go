package remote

import (
	"bufio"
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
	"github.com/sand-boxer/sandboxer/api"
)

// aio is the extension of kind aio: a site with agent-infra's in-sandbox API, of which it uses what files take. Content
// goes by that API's own calls; the rest is done by scripts, which want bash, find, sort and base64 of GNU inside. Commands of
// callers are not: the API has no terminal, no end of input, no signals, and cuts output.
type aio struct{ *site }

var _ interface {
	sandboxer.Extension
	sandboxer.Filer
} = aio{}

const (
	// maxGuest bounds an answer that is held in memory, and maxRecord what is said of one file.
	maxGuest  = 1 << 20
	maxRecord = 64 << 10
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
	resp, err := a.send(ctx, h, http.MethodPost, where, nil, body)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxGuest+1))
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the sandbox's answer to %s broke off", where)
	case len(data) > maxGuest:
		return nil, sandboxer.E(sandboxer.Failed, errTooLong, "the sandbox's answer to %s is too long", where)
	}
	return readEnvelope(data)
}

// How the scripts end, besides 0 and what their tools say.
const (
	exitMissing  = 44
	exitIsDir    = 45
	exitNotDir   = 46
	exitDenied   = 47
	exitNoTools  = 48
	exitNoParent = 49
	exitNotFile  = 50
)

// Names travel in the environment, in base64: they are bytes, and never part of a script. The x keeps line ends at
// the end of a name.
const scriptBegin = `( set -o pipefail; export LC_ALL=C
command -v base64 >/dev/null && command -v find >/dev/null && command -v sort >/dev/null || exit 48
decode() { printf %s "$1" | base64 -d; printf x; }
a=$(decode "$SBX_A"); a=${a%x}; b=$(decode "$SBX_B"); b=${b%x}
`

// script runs one about the file name, and returns what it wrote.
func (a aio) script(ctx context.Context, h sandboxer.Handle, name, text string, names ...string) (string, error) {
	env := map[string]string{"SBX_A": "", "SBX_B": ""}
	for i, n := range names {
		env["SBX_"+string(rune('A'+i))] = base64.StdEncoding.EncodeToString([]byte(n))
	}
	data, err := a.post(ctx, h, "v1/bash/exec", map[string]any{"command": scriptBegin + text + "\n)", "env": env, "hard_timeout": scriptTime.Seconds()})
	if err != nil {
		return "", err
	}
	var x struct {
		Stdout   string `json:"stdout"`
		Stderr   string `json:"stderr"`
		Status   string `json:"status"`
		ExitCode *int   `json:"exit_code"`
	}
	if err := json.Unmarshal(data, &x); err != nil || x.ExitCode == nil {
		return "", sandboxer.E(sandboxer.Failed, err, "the sandbox does not say how a command ended (%s)", shown(x.Status))
	}
	if *x.ExitCode != 0 {
		return "", scriptError(name, *x.ExitCode, x.Stderr)
	}
	return x.Stdout, nil
}

// scriptError gives the end of a script about the file name a kind.
func scriptError(name string, code int, stderr string) error {
	says := func(texts ...string) bool {
		for _, s := range texts {
			if strings.Contains(stderr, s) {
				return true
			}
		}
		return false
	}
	said := errors.New(shown(stderr))
	switch {
	case code == exitMissing:
		return sandboxer.E(sandboxer.NotFound, nil, "%s does not exist", name)
	case code == exitNoParent:
		return sandboxer.E(sandboxer.NotFound, nil, "the directory that %s should be moved to does not exist", name)
	case code == exitIsDir:
		return sandboxer.E(sandboxer.Invalid, nil, "%s: there is a directory where a file is expected", name)
	case code == exitNotDir:
		return sandboxer.E(sandboxer.Invalid, nil, "%s: there is a file where a directory is expected", name)
	case code == exitNotFile:
		return sandboxer.E(sandboxer.Invalid, nil, "%s is not a regular file", name)
	case code == exitDenied:
		return sandboxer.E(sandboxer.Denied, nil, "%s may not be read inside the sandbox", name)
	case code == exitNoTools, says("-printf"): // busybox's find does not know it
		return sandboxer.E(sandboxer.Unsupported, nil, "the sandbox's image lacks the tools that working on its files takes").WithHint("use an image with GNU's find and coreutils")
	case says("No space left", "quota exceeded"):
		return sandboxer.E(sandboxer.Exhausted, said, "%s: the sandbox's disk is full", name)
	case says("Permission denied", "Operation not permitted", "Read-only file system"):
		return sandboxer.E(sandboxer.Denied, said, "%s may not be changed inside the sandbox", name)
	case says("Not a directory", "File exists", "Is a directory", "File name too long"):
		return sandboxer.E(sandboxer.Invalid, said, "%s: a part of the path is not a directory, or too long", name)
	}
	return sandboxer.E(sandboxer.Failed, said, "%s: the shell inside the sandbox ended with %d", name, code)
}

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
	_, err := a.script(ctx, h, name, `[ -e "$a" ] || exit 44
[ -d "$a" ] && exit 45
[ -f "$a" ] || exit 50
[ -r "$a" ] || exit 47`, name)
	if err != nil {
		return nil, err
	}
	return a.download(ctx, h, name)
}

// WriteFile implements sandboxer.Filer. The content comes under a name of its own first.
func (a aio) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	draft := "/tmp/.sandboxer-" + rand.Text()
	sent, err := a.upload(ctx, h, name, draft, r)
	var out string
	if err == nil {
		out, err = a.script(ctx, h, name, `[ -d "$a" ] && exit 45
mkdir -p "${a%/*}/" && chmod `+fmt.Sprintf("%o", mode.Perm())+` "$b" && mv -f "$b" "$a" && wc -c <"$a"`, name, draft)
	}
	if err != nil {
		c, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, _ = a.script(c, h, name, `rm -f "$a"`, draft) // there is an error already
		return err
	}
	if out = strings.TrimSpace(out); out != strconv.FormatInt(sent, 10) {
		return sandboxer.E(sandboxer.Failed, nil, "%s: %d bytes were sent, %s arrived", name, sent, shown(out))
	}
	return nil
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

// recordFormat is what find says of a file after its name: fields that have no slash, and last the target of a link.
const recordFormat = `/%m/%y/%s/%T@/%u/%g/%l\0`

// parseRecord reads what recordFormat says, without the NUL at its end, and what is before it.
func parseRecord(rec string) (name string, fi sandboxer.FileInfo, err error) {
	f := strings.SplitN(rec, "/", 8)
	if len(f) < 8 {
		return "", fi, errors.New("too few fields")
	}
	types := map[string]fs.FileMode{"f": 0, "d": fs.ModeDir, "l": fs.ModeSymlink, "p": fs.ModeNamedPipe, "s": fs.ModeSocket, "b": fs.ModeDevice, "c": fs.ModeDevice | fs.ModeCharDevice}
	bits, err := api.ParseMode(f[1])
	if err != nil {
		return "", fi, err
	}
	kind, ok := types[f[2]]
	size, err := strconv.ParseInt(f[3], 10, 64)
	seconds, _, _ := strings.Cut(f[4], ".")
	mtime, terr := strconv.ParseInt(seconds, 10, 64)
	if err != nil || terr != nil || !ok || size < 0 {
		return "", fi, errors.New("a field is none")
	}
	return f[0], sandboxer.FileInfo{Size: size, Mode: bits | kind, ModTime: time.Unix(mtime, 0), Owner: f[5], Group: f[6], Target: f[7]}, nil
}

// parseEntry is parseRecord of what lies in a directory, with its name.
func parseEntry(rec string) (name string, fi sandboxer.FileInfo, err error) {
	if name, fi, err = parseRecord(rec); err == nil && (name == "" || name == "." || name == "..") {
		err = errors.New("the name is none")
	}
	return name, fi, err
}

// StatFile implements sandboxer.Filer.
func (a aio) StatFile(ctx context.Context, h sandboxer.Handle, name string) (sandboxer.FileInfo, error) {
	out, err := a.script(ctx, h, name, `[ -e "$a" ] || [ -L "$a" ] || exit 44
find "$a" -maxdepth 0 -printf '`+recordFormat+`' | base64 -w0`, name)
	if err != nil {
		return sandboxer.FileInfo{}, err
	}
	rec, err := base64.StdEncoding.DecodeString(strings.TrimSpace(out))
	_, fi, perr := parseRecord(strings.TrimSuffix(string(rec), "\x00"))
	if err = errors.Join(err, perr); err != nil {
		return sandboxer.FileInfo{}, sandboxer.E(sandboxer.Failed, err, "%s: the sandbox describes it in a way that cannot be read", name)
	}
	fi.Path = name
	return fi, nil
}

// ListFiles implements sandboxer.Filer. The list is made in a file inside, and read as it comes.
func (a aio) ListFiles(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		list := "/tmp/.sandboxer-" + rand.Text()
		defer func() {
			c, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			_, _ = a.script(c, h, dir, `rm -f "$a"`, list) // it is the guest's disk
		}()
		_, err := a.script(ctx, h, dir, `[ -d "$a" ] || { [ -e "$a" ] && exit 46; exit 44; }
cd "$a" 2>/dev/null && [ -r . ] || exit 47
find . -mindepth 1 -maxdepth 1 -printf '%f`+recordFormat+`' | sort -z -t/ -k1,1 >"$b"`, dir, list)
		var r io.ReadCloser
		if err == nil {
			r, err = a.download(ctx, h, list)
		}
		if err != nil {
			yield(sandboxer.FileInfo{}, err)
			return
		}
		defer r.Close()
		in := bufio.NewReaderSize(r, maxRecord)
		for {
			rec, err := in.ReadSlice(0)
			if err == io.EOF && len(rec) == 0 {
				return
			}
			var fi sandboxer.FileInfo
			name := ""
			if err == nil {
				name, fi, err = parseEntry(string(rec[:len(rec)-1]))
			}
			if err != nil {
				if k := sandboxer.KindOf(err); k == sandboxer.Internal || k == sandboxer.Invalid {
					err = sandboxer.E(sandboxer.Failed, err, "%s: the sandbox lists it in a way that cannot be read", dir)
				}
				yield(sandboxer.FileInfo{}, err)
				return
			}
			if name <= after {
				continue
			}
			fi.Path = path.Join(dir, name)
			if !yield(fi, nil) {
				return
			}
		}
	}
}

// MakeDir implements sandboxer.Filer.
func (a aio) MakeDir(ctx context.Context, h sandboxer.Handle, dir string) error {
	_, err := a.script(ctx, h, dir, `[ -e "$a" ] && [ ! -d "$a" ] && exit 46
mkdir -p "$a"`, dir)
	return err
}

// MoveFile implements sandboxer.Filer. mv would move into a directory that exists.
func (a aio) MoveFile(ctx context.Context, h sandboxer.Handle, from, to string) error {
	_, err := a.script(ctx, h, from, `[ -e "$a" ] || [ -L "$a" ] || exit 44
[ -d "$b" ] && exit 45
[ -d "$a" ] && [ ! -L "$a" ] && [ -e "$b" ] && exit 46
[ -d "${b%/*}/" ] || exit 49
mv -f "$a" "$b"`, from, to)
	return err
}

// RemoveFile implements sandboxer.Filer.
func (a aio) RemoveFile(ctx context.Context, h sandboxer.Handle, name string) error {
	if name == "/" {
		return sandboxer.E(sandboxer.Invalid, nil, "the sandbox's root cannot be removed")
	}
	_, err := a.script(ctx, h, name, `rm -rf "$a"`, name)
	return err
}

package aioserver

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"errors"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
)

// The bounds of files.
const (
	maxEncoded = 12 << 20  // bytes of a text in JSON that is answered: control characters take six
	maxText    = 8 << 20   // bytes of a file that is answered in one piece
	maxContent = 256 << 20 // bytes of a file that comes in JSON
	smallSpool = 1 << 20   // bytes of it that need no file to wait in

	maxSpools       = 16 // of those which need one, at once
	maxSpoolsTenant = 12

	maxSpooled       = 1 << 30 // bytes of all of them
	maxSpooledTenant = 768 << 20
)

// on notes the operation and the file for an error.
func (c *call) on(operation, field, p string) (string, error) {
	name, err := cleanPath(field, p)
	c.operation, c.path = operation, p
	if err != nil {
		c.operation = ""
	}
	return name, err
}

func fileFailure(status int, errorType string, kind sandboxer.Kind, cause error, format string, args ...any) error {
	return &statusError{error: sandboxer.E(kind, cause, format, args...), status: status, errorType: errorType}
}

// readText returns a whole file, which has to be text.
func (c *call) readText(name string) (string, error) {
	f, err := c.s.opts.Sandboxes.ReadFile(c.ctx(), c.sb.ID, name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	var b strings.Builder
	if _, err := io.Copy(&b, &reservingReader{c, io.LimitReader(f, maxText+1)}); err != nil {
		return "", err
	}
	if b.Len() > maxText {
		return "", tooLong(name)
	}
	if !utf8.ValidString(b.String()) {
		return "", notText(name)
	}
	return b.String(), nil
}

func tooLong(name string) error {
	e := sandboxer.E(sandboxer.Invalid, nil, "%s is longer than the %d bytes that are answered in one piece", name, maxText)
	return &statusError{error: e.WithHint("read some of its lines, or get it by /v1/file/download"), status: http.StatusRequestEntityTooLarge, errorType: "invalid_target"}
}

func notText(name string) error {
	e := sandboxer.E(sandboxer.Failed, nil, "%s is not text in UTF-8", name)
	return &statusError{error: e.WithHint("get it by /v1/file/download"), errorType: "decode_error"}
}

// mode returns the permission bits that a file keeps when it is written.
func (c *call) mode(name string) (fs.FileMode, error) {
	fi, err := c.s.opts.Sandboxes.StatFile(c.ctx(), c.sb.ID, name)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return 0o644, nil
	case err != nil:
		return 0, err
	case fi.Mode.IsRegular():
		return fi.Mode.Perm(), nil
	}
	return 0o644, nil
}

func (c *call) fileRead() error {
	var in struct {
		File      string `json:"file"`
		StartLine *int   `json:"start_line"`
		EndLine   *int   `json:"end_line"`
	}
	if err := c.decode(&in); err != nil {
		return err
	}
	name, err := c.on("read", "file", in.File)
	if err != nil {
		return err
	}
	var content string
	if in.StartLine == nil && in.EndLine == nil {
		content, err = c.readText(name)
	} else {
		content, err = c.readLines(name, in.StartLine, in.EndLine)
	}
	if err != nil {
		return err
	}
	if encodedSize(content) > maxEncoded {
		return tooLong(name)
	}
	if err := c.foresee(content, 1); err != nil {
		return err
	}
	return c.answer(map[string]string{"content": content, "file": in.File})
}

// readLines returns the lines from start, which counts from 0, to before end, without the last line end.
// It does not keep the lines before and after.
func (c *call) readLines(name string, start, end *int) (string, error) {
	from, to := 0, -1
	if start != nil {
		from = *start
	}
	if end != nil {
		to = *end
	}
	if from < 0 || end != nil && to < from {
		return "", bad("start_line", "want 0 or more, and end_line not before it")
	}
	f, err := c.s.opts.Sandboxes.ReadFile(c.ctx(), c.sb.ID, name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	r := bufio.NewReaderSize(f, 64<<10)
	var b strings.Builder
	for line := 0; to < 0 || line < to; {
		part, err := r.ReadSlice('\n')
		if line >= from {
			if b.Len()+len(part) > maxText {
				return "", tooLong(name)
			}
			if err := c.reserve(len(part)); err != nil {
				return "", err
			}
			b.Write(part)
		}
		if err == nil {
			line++
		} else if err == io.EOF {
			break
		} else if err != bufio.ErrBufferFull {
			return "", err
		}
	}
	if !utf8.ValidString(b.String()) {
		return "", notText(name)
	}
	return strings.TrimSuffix(b.String(), "\n"), nil
}

// fileDownload streams a file.
func (c *call) fileDownload() error {
	q := c.r.URL.Query()
	name, err := c.on("download", "path", q.Get("path"))
	if err != nil {
		return err
	}
	if p := q.Get("change_policy"); p != "" && p != "ignore" {
		return unservedOption(c.r.URL.Path, "change_policy")
	}
	f, err := c.s.opts.Sandboxes.ReadFile(c.ctx(), c.sb.ID, name)
	if err != nil {
		return err
	}
	defer f.Close()
	// The first piece is read before anything is answered: an error there still gets its answer.
	buf := make([]byte, 128<<10)
	n, err := io.ReadAtLeast(f, buf, 1)
	if err != nil && err != io.EOF {
		return err
	}
	h := c.w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": path.Base(name)}))
	c.w.WriteHeader(http.StatusOK)
	if c.r.Method == http.MethodHead {
		return nil
	}
	if _, err = c.w.Write(buf[:n]); err == nil {
		_, err = io.CopyBuffer(struct{ io.Writer }{c.w}, struct{ io.Reader }{f}, buf)
	}
	if err != nil {
		if f := c.s.opts.Failed; f != nil {
			f(c.ctx(), err)
		}
		http.NewResponseController(c.w).Flush()
		panic(http.ErrAbortHandler) // the client must not take the part for the whole
	}
	return nil
}

type countingReader struct {
	r io.Reader
	n int64
}

func (r *countingReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.n += int64(n)
	return n, err
}

// writeRequest has the fields of a write other than the content, which is spooled.
type writeRequest struct {
	File            string  `json:"file"`
	Content         *string `json:"content"`
	Encoding        string  `json:"encoding"`
	Append          bool    `json:"append"`
	LeadingNewline  bool    `json:"leading_newline"`
	TrailingNewline bool    `json:"trailing_newline"`
	Sudo            bool    `json:"sudo"`
}

// fileWrite writes a file that comes in JSON. The encoding of its content may follow the content, so
// the content waits until all of the request was read.
func (c *call) fileWrite() error {
	sp := &spool{c: c}
	defer sp.close()
	// Six bytes of JSON may be one of the content.
	in, err := readWrite(http.MaxBytesReader(c.w, c.r.Body, 6*maxContent), sp)
	if err != nil {
		return bodyError(err)
	}
	if in.Content == nil {
		return bad("content", "it is missing")
	}
	if in.Sudo {
		return unservedOption(c.r.URL.Path, "sudo")
	}
	name, err := c.on("write", "file", in.File)
	if err != nil {
		return err
	}
	var content io.Reader
	switch in.Encoding {
	case "", "utf-8", "utf8", "raw":
		if content, err = sp.plain(); err != nil {
			return err
		}
		if in.LeadingNewline {
			content = io.MultiReader(strings.NewReader("\n"), content)
		}
		if in.TrailingNewline {
			content = io.MultiReader(content, strings.NewReader("\n"))
		}
	case "base64":
		// The content is checked before the file is touched.
		r, err := sp.reader()
		if err != nil {
			return err
		}
		switch n, err := io.Copy(io.Discard, base64.NewDecoder(base64.StdEncoding, r)); {
		case err != nil:
			return bad("content", "it is no base64")
		case n > maxContent:
			return bodyError(&http.MaxBytesError{Limit: maxContent})
		}
		if r, err = sp.reader(); err != nil {
			return err
		}
		content = base64.NewDecoder(base64.StdEncoding, r)
	default:
		return bad("encoding", "want utf-8 or base64")
	}
	counted := &countingReader{r: content}
	if in.Append {
		err = c.append(name, counted)
	} else {
		var mode fs.FileMode
		if mode, err = c.mode(name); err == nil {
			err = c.s.opts.Sandboxes.WriteFile(c.ctx(), c.sb.ID, name, mode, counted)
		}
	}
	if err != nil {
		return err
	}
	return c.answer(map[string]any{"file": in.File, "bytes_written": counted.n})
}

// append adds to a file by a command, since any other way would read all of it.
func (c *call) append(name string, r io.Reader) error {
	said := &printed{most: maxPrinted}
	const script = `[ -d "$1" ] && exit 45; d=${1%/*}/; [ -d "$d" ] || mkdir -p "$d" || exit; cat >>"$1"`
	x, err := c.s.opts.Sandboxes.Exec(c.ctx(), c.sb.ID, sandboxer.Cmd{
		Args: []string{"sh", "-c", script, "sh", name}, Env: map[string]string{"LC_ALL": "C"}, Dir: "/", Stdin: r, Stderr: said,
	})
	if err != nil || x.Code == 0 {
		return err
	}
	text := said.String()
	cause := errors.New(strings.TrimSpace(shorten(text, 200)))
	says := func(s string) bool { return strings.Contains(text, s) }
	switch {
	case x.Code == 45:
		return sandboxer.E(sandboxer.Invalid, nil, "%s is a directory", name)
	case says("No space left"), says("quota exceeded"):
		return sandboxer.E(sandboxer.Exhausted, cause, "%s: the sandbox's disk is full", name)
	case says("an't fork"), says("annot fork"), says("Resource temporarily unavailable"):
		return sandboxer.E(sandboxer.Exhausted, cause, "%s: the sandbox has reached its limit of processes", name)
	case says("Permission denied"), says("Operation not permitted"):
		return sandboxer.E(sandboxer.Denied, cause, "%s may not be written inside the sandbox", name)
	case says("Read-only file system"):
		return fileFailure(http.StatusForbidden, "read_only_filesystem", sandboxer.Denied, cause, "%s is in a read-only file system", name)
	}
	return sandboxer.E(sandboxer.Failed, cause, "%s: the shell inside the sandbox ended with %d", name, x.Code)
}

// spool keeps a content until all of a request was read: a small one in memory, others in a file
// without a name.
type spool struct {
	c    *call
	b    []byte
	file *os.File
	n    int64

	begun   bool  // counted by the server
	counted int64 // bytes of the file, so
}

// beginSpool counts one more content that waits in a file.
func (s *Server) beginSpool(tenant string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.spools[""] >= maxSpools || s.spools[tenant+"/"] >= maxSpoolsTenant {
		e := sandboxer.E(sandboxer.Exhausted, nil, "too many large files are being written at once")
		e.RetryAfter = time.Second
		return e.WithHint("try again")
	}
	s.spools[""]++
	s.spools[tenant+"/"]++
	return nil
}

// growSpool counts n more bytes that wait in files.
func (s *Server) growSpool(tenant string, n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.spooled[""]+n > maxSpooled || s.spooled[tenant+"/"]+n > maxSpooledTenant {
		e := sandboxer.E(sandboxer.Exhausted, nil, "too much of large files is being written at once")
		e.RetryAfter = time.Second
		return e.WithHint("try again")
	}
	s.spooled[""] += n
	s.spooled[tenant+"/"] += n
	return nil
}

func (s *Server) endSpool(tenant string, n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, who := range []string{"", tenant + "/"} {
		if s.spooled[who] -= n; s.spooled[who] == 0 {
			delete(s.spooled, who)
		}
	}
	for _, who := range []string{"", tenant + "/"} {
		if s.spools[who]--; s.spools[who] == 0 {
			delete(s.spools, who)
		}
	}
}

func (s *spool) Write(p []byte) (int, error) {
	if s.n += int64(len(p)); s.n > maxContent+maxContent/2 { // of base64
		return 0, &http.MaxBytesError{Limit: maxContent}
	}
	if s.file == nil && len(s.b)+len(p) <= smallSpool {
		if err := s.c.reserve(len(p)); err != nil {
			return 0, err
		}
		s.b = append(s.b, p...)
		return len(p), nil
	}
	if s.file == nil {
		if err := s.c.s.beginSpool(s.c.who.tenant); err != nil {
			return 0, err
		}
		s.begun = true
		f, err := os.CreateTemp(s.c.s.opts.SpoolDir, "sandboxer-spool-")
		if err != nil {
			return 0, spoolError(err)
		}
		s.file = f
		if err := os.Remove(f.Name()); err != nil {
			return 0, spoolError(err)
		}
		if err := s.grow(len(s.b)); err != nil {
			return 0, err
		}
		if _, err := f.Write(s.b); err != nil {
			return 0, spoolError(err)
		}
		s.b = nil
	}
	if err := s.grow(len(p)); err != nil {
		return 0, err
	}
	n, err := s.file.Write(p)
	return n, spoolError(err)
}

func (s *spool) grow(n int) error {
	if err := s.c.s.growSpool(s.c.who.tenant, int64(n)); err != nil {
		return err
	}
	s.counted += int64(n)
	return nil
}

func spoolError(err error) error {
	if err == nil {
		return nil
	}
	return sandboxer.E(sandboxer.Unavailable, err, "the server cannot keep what you sent until all of it has arrived")
}

// reader reads it from its beginning.
func (s *spool) reader() (io.Reader, error) {
	if s.file == nil {
		return bytes.NewReader(s.b), nil
	}
	if _, err := s.file.Seek(0, io.SeekStart); err != nil {
		return nil, spoolError(err)
	}
	return bufio.NewReaderSize(s.file, 64<<10), nil
}

// plain is reader for a content that is not encoded. More of it than allowed may have come, since base64 is longer.
func (s *spool) plain() (io.Reader, error) {
	if s.n > maxContent {
		return nil, bodyError(&http.MaxBytesError{Limit: maxContent})
	}
	return s.reader()
}

func (s *spool) close() {
	if s.file != nil {
		s.file.Close()
	}
	if s.begun {
		s.c.s.endSpool(s.c.who.tenant, s.counted)
	}
}

// maxRest bounds the part of a write request that is not content.
const maxRest = 64 << 10

// readWrite reads a write request: the text of its field content goes to content only. The other
// fields are checked as in every request.
func readWrite(body io.Reader, content io.Writer) (in writeRequest, err error) {
	r := bufio.NewReaderSize(body, 64<<10)
	var rest []byte
	keep := func(b ...byte) error {
		if rest = append(rest, b...); len(rest) > maxRest {
			return bad("body", "it is larger than %d bytes, besides the content", maxRest)
		}
		return nil
	}
	depth, key, taken := 0, []byte(nil), false
	for {
		b, err := r.ReadByte()
		if err == io.EOF {
			break
		} else if err != nil {
			return in, err
		}
		switch b {
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		case ' ', '\t', '\r', '\n': // between a name and its value, too
			if err := keep(b); err != nil {
				return in, err
			}
			continue
		case '"':
			if depth == 1 && !taken && string(key) == `"content":` {
				if err := unquote(r, content); err != nil {
					return in, err
				}
				taken = true
				key = nil
				if err := keep('"', '"'); err != nil {
					return in, err
				}
				continue
			}
			from := len(rest)
			if err := keep('"'); err != nil {
				return in, err
			}
			for escaped := false; ; {
				q, err := r.ReadByte()
				if err != nil {
					return in, bad("body", "it ends within a text")
				}
				if err := keep(q); err != nil {
					return in, err
				}
				if q == '"' && !escaped {
					break
				}
				escaped = q == '\\' && !escaped
			}
			key = slices.Clone(rest[from:])
			continue
		}
		if err := keep(b); err != nil {
			return in, err
		}
		if b == ':' {
			key = append(key, ':')
		} else {
			key = nil
		}
	}
	if err := decodeJSON(rest, &in); err != nil {
		return in, err
	}
	if !taken && in.Content != nil { // its name was written in another way
		if _, err := io.WriteString(content, *in.Content); err != nil {
			return in, err
		}
	}
	return in, nil
}

// unquote reads a JSON string after its first quote, up to the last, and writes its text.
func unquote(r *bufio.Reader, w io.Writer) error {
	out := bufio.NewWriterSize(w, 32<<10)
	pending := rune(-1) // the first half of a character
	put := func(c rune) {
		if pending >= 0 {
			switch {
			case c >= 0xdc00 && c < 0xe000:
				out.WriteRune((pending-0xd800)<<10 | (c - 0xdc00) + 0x10000)
				pending = -1
				return
			default:
				out.WriteRune(utf8.RuneError)
				pending = -1
			}
		}
		switch {
		case c >= 0xd800 && c < 0xdc00:
			pending = c
		default:
			out.WriteRune(c) // of half a character the replacement
		}
	}
	for {
		// Text without escapes goes on in one piece.
		if pending < 0 {
			if _, err := r.Peek(1); err == nil {
				ahead, _ := r.Peek(r.Buffered())
				n := slices.IndexFunc(ahead, func(b byte) bool { return b < ' ' || b == '"' || b == '\\' || b >= utf8.RuneSelf })
				if n < 0 {
					n = len(ahead)
				}
				if _, err := out.Write(ahead[:n]); err != nil {
					return err
				}
				r.Discard(n)
				if n == len(ahead) {
					continue
				}
			}
		}
		c, size, err := r.ReadRune()
		if err == io.EOF {
			return bad("body", "it ends within a text")
		} else if err != nil {
			return err
		}
		switch {
		case c == '"':
			if pending >= 0 {
				out.WriteRune(utf8.RuneError)
			}
			return out.Flush()
		case c == utf8.RuneError && size == 1:
			return bad("content", "it is not UTF-8")
		case c < ' ':
			return bad("content", "a control character in it is not escaped")
		case c != '\\':
			put(c)
			continue
		}
		e, err := r.ReadByte()
		if err != nil {
			return bad("body", "it ends within a text")
		}
		if i := strings.IndexByte(`"\/bfnrt`, e); i >= 0 {
			put(rune("\"\\/\b\f\n\r\t"[i]))
			continue
		}
		if e != 'u' {
			return bad("content", "it has an escape that JSON does not have")
		}
		v := rune(0)
		for range 4 {
			d, err := r.ReadByte()
			if err != nil || !isDigit(d, 16) {
				return bad("content", "it has an escape that JSON does not have")
			}
			v = v<<4 | rune(strings.IndexByte("0123456789abcdef", d|0x20))
		}
		put(v)
	}
}

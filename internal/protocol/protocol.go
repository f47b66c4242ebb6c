// Package protocol is the extension protocol, docs/reference/extension-protocol.md, for both of its sides:
// adapters/process, which is the broker's, and package extension, which serves an adapter
// from a process of its own. Conn is the control connection, Stream one for bytes; the other files define
// the messages.
package protocol

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// Versions are those of the protocol that this package speaks.
var Versions = []int{1}

// Bounds of the protocol.
const (
	MaxLine    = 1 << 20 // bytes of one line of the control connection, with its line feed
	MaxFrame   = 1 << 20 // bytes of the payload of one frame
	HelloTime  = 10 * time.Second
	CancelTime = 2 * time.Second // within which a cancelled request is answered
	TokenTime  = 10 * time.Second
)

// A Hello is the first line of either side.
type Hello struct {
	Protocols []int  `json:"protocols"`
	Program   string `json:"program,omitempty"`

	// Of the broker.
	Extension   string          `json:"extension,omitempty"`
	Owner       string          `json:"owner,omitempty"`
	Dir         string          `json:"dir,omitempty"`
	Hosts       string          `json:"hosts,omitempty"`
	Own         []string        `json:"own,omitempty"`
	Streams     string          `json:"streams,omitempty"` // path of the socket for streams
	Handler     string          `json:"handler,omitempty"`
	Path        []string        `json:"path,omitempty"`
	Concurrency int             `json:"concurrency,omitempty"`
	Config      json.RawMessage `json:"config,omitempty"`    // with secrets
	NotesKey    []byte          `json:"notes_key,omitempty"` // seals the notes in Dir; of this extension alone
	Secrets     []string        `json:"secrets,omitempty"`   // names of the settings in Config that have secrets in them

	// Of the extension: one of the two.
	Description *sandboxer.Description `json:"description,omitempty"`
	Error       *Error                 `json:"error,omitempty"`
}

// line is a line of the control connection in either direction.
type line struct {
	Hello *Hello `json:"hello,omitempty"`

	ID        uint64          `json:"id,omitempty"` // of a request or an answer; a notification has none
	Method    string          `json:"method,omitempty"`
	Params    json.RawMessage `json:"params,omitempty"`
	TimeoutMS int64           `json:"timeout_ms,omitempty"`
	Stream    string          `json:"stream,omitempty"` // token
	Result    json.RawMessage `json:"result,omitempty"`
	Error     *Error          `json:"error,omitempty"`
}

// maxID is the largest number that JSON keeps everywhere.
const maxID = 1 << 53

// parse reads one line, without its line feed.
func parse(data []byte) (l line, err error) {
	if !bytes.HasPrefix(bytes.TrimLeft(data, " \t\r"), []byte("{")) {
		return l, errors.New("it is no JSON object")
	}
	if _, err = strictjson.DecodeStored(data, &l); err != nil {
		return l, err
	}
	answer := l.Result != nil || l.Error != nil
	switch {
	case l.Hello != nil:
		if l.ID != 0 || l.Method != "" || answer {
			err = errors.New("it is a hello and something else")
		}
	case l.ID > maxID:
		err = fmt.Errorf("its id is more than %d", uint64(maxID))
	case answer && (l.Method != "" || l.ID == 0 || l.Result != nil && l.Error != nil):
		err = errors.New("it is an answer and something else")
	case !answer && l.Method == "":
		err = errors.New("it is neither a request nor an answer")
	}
	return l, err
}

// encode writes l with its line feed. It fails if that is too long.
func encode(l line) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(l); err != nil {
		return nil, err
	}
	if b.Len() > MaxLine {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "a message of %d bytes is too long for the extension protocol: at most %d", b.Len(), MaxLine)
	}
	return b.Bytes(), nil
}

// readLine returns the next line without its line feed; it is valid until the next call.
func readLine(r *bufio.Reader) ([]byte, error) {
	part, err := r.ReadSlice('\n')
	if err == nil {
		return part[:len(part)-1], nil
	}
	var all []byte
	for errors.Is(err, bufio.ErrBufferFull) {
		all = append(all, part...)
		if len(all) > MaxLine {
			return nil, fmt.Errorf("a line is longer than %d bytes", MaxLine)
		}
		part, err = r.ReadSlice('\n')
	}
	all = append(all, part...)
	switch {
	case len(all) > MaxLine:
		return nil, fmt.Errorf("a line is longer than %d bytes", MaxLine)
	case errors.Is(err, io.EOF) && len(all) > 0:
		return nil, io.ErrUnexpectedEOF
	case err != nil:
		return nil, err
	}
	return all[:len(all)-1], nil
}

// Agree returns the highest version of ours that the other side speaks too. Kind: Unsupported.
func Agree(theirs []int) (int, error) {
	best := 0
	for _, v := range theirs {
		if slices.Contains(Versions, v) {
			best = max(best, v)
		}
	}
	if best == 0 {
		return 0, sandboxer.E(sandboxer.Unsupported, nil, "no version of the extension protocol is common: this side speaks %s, the other %s", versions(Versions), versions(theirs))
	}
	return best, nil
}

func versions(list []int) string {
	if len(list) == 0 {
		return "none"
	}
	var texts []string
	for _, v := range list[:min(len(list), 16)] {
		texts = append(texts, fmt.Sprint(v))
	}
	return strings.Join(texts, ", ")
}

// An Error is the form in which an error is sent.
type Error struct {
	Kind         sandboxer.Kind `json:"kind"`
	Message      string         `json:"message,omitempty"`
	Hint         string         `json:"hint,omitempty"`
	RetryAfterMS int64          `json:"retry_after_ms,omitempty"`
	Untouched    bool           `json:"untouched,omitempty"`
	Public       string         `json:"public,omitempty"`
	Trace        string         `json:"trace,omitempty"`  // where it came from, for the log alone
	Faults       []ErrorFault   `json:"faults,omitempty"` // of a configuration
}

// An ErrorFault is a fault at one place of an extension's file.
type ErrorFault struct {
	At      string `json:"at"`
	Message string `json:"message"`
}

// Bounds of an error of the other side.
const (
	maxText   = 4 << 10
	maxFaults = 100
)

// ErrorOf returns err in the form in which it is sent, without causes. nil for nil.
func ErrorOf(err error) *Error {
	if err == nil {
		return nil
	}
	e := &Error{Kind: sandboxer.KindOf(err), Message: cut(sandboxer.Message(err)), Hint: cut(sandboxer.HintOf(err)),
		RetryAfterMS: sandboxer.RetryAfterOf(err).Milliseconds(), Untouched: sandboxer.IsUntouched(err)}
	if public := sandboxer.Discreet(err); public != err {
		e.Public = cut(sandboxer.Message(public))
	}
	return e
}

// travels is ErrorOf, or Traced.
func travels(err error, trace bool) *Error {
	if trace {
		return Traced(err)
	}
	return ErrorOf(err)
}

// Traced is ErrorOf with the causes of an internal error as its trace. An extension answers with it: the broker has the log.
func Traced(err error) *Error {
	e := ErrorOf(err)
	if e != nil && e.Kind == sandboxer.Internal {
		e.Trace = cut(err.Error())
	}
	return e
}

// Fault adds a fault at a place of the extension's file, as far as there is room.
func (e *Error) Fault(at, message string) {
	if len(e.Faults) < maxFaults {
		e.Faults = append(e.Faults, ErrorFault{At: cut(at), Message: cut(message)})
	}
}

// Err returns e as an error of this side. Its texts go through hide, unless that is nil, and are cut afterwards: half
// of a secret would not be recognized.
func (e *Error) Err(hide func(string) string) error {
	if e == nil {
		return nil
	}
	cut := hidden(hide)
	kind := e.Kind
	if !slices.Contains(sandboxer.Kinds(), kind) {
		kind = sandboxer.Internal
	}
	out := sandboxer.E(kind, nil, "%s", cut(e.Message))
	if out.Msg == "" {
		out.Msg = "the extension gives no reason"
	}
	out.Hint, out.Public, out.Untouched = cut(e.Hint), cut(e.Public), e.Untouched
	if e.Trace != "" {
		out.Err = errors.New(cut(e.Trace))
	}
	if ms := e.RetryAfterMS; ms > 0 {
		out.RetryAfter = time.Duration(min(ms, int64(24*time.Hour/time.Millisecond))) * time.Millisecond
	}
	var faults []error
	for _, f := range e.Faults[:min(len(e.Faults), maxFaults)] {
		faults = append(faults, sandboxer.E(kind, nil, "%s: %s", cut(f.At), cut(f.Message)))
	}
	if kind == sandboxer.Invalid && len(faults) > 0 {
		return errors.Join(faults...)
	}
	return out
}

// Line returns s as one line for people, of at most most bytes and an ellipsis.
func Line(s string, most int) string {
	s = strings.NewReplacer("\n", " ", "\t", " ").Replace(cut(s))
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// hidden is cut after hide, which may be nil.
func hidden(hide func(string) string) func(string) string {
	if hide == nil {
		return cut
	}
	return func(s string) string { return cut(hide(s)) }
}

// cut returns s as valid UTF-8 without control characters except line feeds and tabs, of at most
// maxText bytes: texts of others go to terminals and logs. It is cut between words. The other side, which knows
// the secrets, would not recognize half of one.
func cut(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 {
			return '\uFFFD'
		}
		return r
	}, s)
	if len(s) > maxText {
		s = s[:max(strings.LastIndexAny(s[:maxText+1], " \n\t"), 0)] + "…"
	}
	return s
}

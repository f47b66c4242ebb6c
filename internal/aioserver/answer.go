package aioserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// call is one request with its answer.
type call struct {
	s        *Server
	w        http.ResponseWriter
	r        *http.Request
	sb       Sandbox
	who      account
	reserved int // bytes of s.memory
	foreseen int // of these, for the answer as it is sent
	outputs  []*output
	lacks    []string // options of the image that are refused by name

	// The operation and the path that a failed operation on a file reports.
	operation, path string
}

func (c *call) ctx() context.Context { return c.r.Context() }

// reserve accounts for n more bytes of the caller's that are kept until the end of the request.
func (c *call) reserve(n int) error {
	if !c.s.memory.grow(c.who, forRequests, n) {
		return errFull()
	}
	c.reserved += n
	return nil
}

// foresee reserves the size of a text in the answer. Code that changes something calls it before.
func (c *call) foresee(s string, times int) error {
	n := times * encodedSize(s)
	if err := c.reserve(n); err != nil {
		return err
	}
	c.foreseen += n
	return nil
}

// encodedSize is how long s is in JSON.
func encodedSize(s string) int {
	n := len(s) + 2 + 3*(strings.Count(s, "\u2028")+strings.Count(s, "\u2029"))
	for i := range len(s) {
		switch b := s[i]; {
		case b == '"' || b == '\\' || b == '\b' || b == '\f' || b == '\n' || b == '\r' || b == '\t':
			n++
		case b < ' ':
			n += 5
		}
	}
	return n
}

func errFull() error {
	return full("too much of your data waits in the server's memory already")
}

func full(why string) error {
	e := sandboxer.E(sandboxer.Exhausted, nil, "%s", why)
	e.RetryAfter = time.Second
	return e
}

func (c *call) release() {
	c.s.memory.shrink(c.who, forRequests, c.reserved)
	for _, o := range c.outputs {
		o.release()
	}
}

// envelope is the outer object of every answer.
type envelope struct {
	Success bool    `json:"success"`
	Message *string `json:"message"`
	Data    any     `json:"data"`
	Hint    *string `json:"hint"`
}

// refusal is the envelope for an invalid request: clients look for detail there.
type refusal struct {
	envelope
	Detail []refusedField `json:"detail"`
}

type refusedField struct {
	Type string   `json:"type"`
	Loc  []string `json:"loc"`
	Msg  string   `json:"msg"`
}

// text is s, or null where that is empty.
func text(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// answer sends data in an envelope.
func (c *call) answer(data any) error { return c.say("", data) }

// say is answer with a message.
func (c *call) say(message string, data any) error {
	return c.send(http.StatusOK, envelope{Success: true, Message: text(message), Data: data})
}

// smallAnswer is up to which size an answer needs no reservation.
const smallAnswer = 64 << 10

// send sends v. A client that does not read it causes no error.
func (c *call) send(status int, v any) error {
	a := &answerWriter{c: c, status: status}
	enc := json.NewEncoder(a)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); a.err != nil {
		return a.err
	} else if err != nil {
		return sandboxer.E(sandboxer.Internal, err, "the answer does not encode")
	}
	return nil
}

// answerWriter sends an answer, which comes in one piece.
type answerWriter struct {
	c      *call
	status int
	err    error
}

func (a *answerWriter) Write(p []byte) (int, error) {
	b := bytes.TrimSuffix(p, []byte("\n"))
	c := a.c
	if more := len(b) - c.foreseen; more > smallAnswer {
		if a.err = c.reserve(more); a.err != nil {
			return 0, a.err
		}
	}
	c.w.Header().Set("Content-Type", "application/json")
	c.w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	c.w.WriteHeader(a.status)
	c.w.Write(b)
	return len(p), nil
}

// badField is an error in one field of a request.
type badField struct{ name, msg string }

func (e badField) Error() string { return e.name + ": " + e.msg }

func bad(name, format string, args ...any) error { return badField{name, fmt.Sprintf(format, args...)} }

// statusError has a status that does not follow from its Kind.
type statusError struct {
	error
	status    int
	errorType string // of an operation on a file
}

func (e *statusError) Unwrap() error { return e.error }

// Ended wraps err, of a method of Sandboxes, when the sandbox has ended: requests fail with the status 410, whatever
// they have found by then. It has none of the kinds for missing or unreadable files.
func Ended(err error) error {
	e := sandboxer.E(sandboxer.Failed, err, "%s", sandboxer.Message(err))
	return &statusError{e.WithHint("%s", sandboxer.HintOf(err)), http.StatusGone, "io_error"}
}

var statuses = map[sandboxer.Kind]int{
	sandboxer.Invalid: http.StatusBadRequest, sandboxer.Unauthenticated: http.StatusUnauthorized, sandboxer.Denied: http.StatusForbidden,
	sandboxer.NotFound: http.StatusNotFound, sandboxer.Conflict: http.StatusConflict, sandboxer.NoCredit: http.StatusPaymentRequired,
	sandboxer.Exhausted: http.StatusTooManyRequests, sandboxer.Unsupported: http.StatusNotImplemented, sandboxer.Unavailable: http.StatusServiceUnavailable,
	sandboxer.Timeout: http.StatusGatewayTimeout, sandboxer.Failed: http.StatusInternalServerError, sandboxer.Canceled: 499,
}

// fileError is how images describe a failed operation on a file.
type fileError struct {
	Path          string  `json:"path"`
	Operation     string  `json:"operation"`
	Message       string  `json:"message"`
	ErrorType     string  `json:"error_type"`
	Retryable     bool    `json:"retryable"`
	Errno         *int    `json:"errno"`
	ErrnoName     *string `json:"errno_name"`
	ExceptionType *string `json:"exception_type"`
}

// fail answers the request with err.
func (c *call) fail(err error) {
	// The reason why the stream ended says more than its end.
	var ended *sandboxer.Error
	if cause := context.Cause(c.ctx()); cause != nil && errors.As(cause, &ended) {
		err = cause
	}
	var field badField
	invalid := errors.As(err, &field)
	if invalid {
		err = sandboxer.E(sandboxer.Invalid, nil, "the request is not valid: %s", field.Error())
	}
	message, hint := sandboxer.Message(err), sandboxer.HintOf(err)
	if f := c.s.opts.Failed; f != nil {
		message, hint = f(c.ctx(), err)
	}
	if invalid {
		c.send(http.StatusUnprocessableEntity, refusal{
			envelope{Message: &message}, []refusedField{{Type: "value_error", Loc: []string{"body", field.name}, Msg: field.msg}},
		})
		return
	}
	kind := sandboxer.KindOf(err)
	status, ok := statuses[kind]
	if !ok {
		status = http.StatusInternalServerError
	}
	retryAfter := sandboxer.RetryAfterOf(err)
	errorType := ""
	ofFile := true // what fails is the operation, not the way to it
	switch {
	case c.operation == "":
	case kind == sandboxer.NotFound:
		errorType = "not_found"
	case kind == sandboxer.Denied:
		errorType = "permission_denied"
	case kind == sandboxer.Exhausted && retryAfter == 0:
		status, errorType = http.StatusInsufficientStorage, "no_space_left"
	case kind == sandboxer.Invalid:
		status, errorType = http.StatusInternalServerError, "invalid_target"
	default:
		errorType, ofFile = "io_error", kind == sandboxer.Failed
	}
	var own *statusError
	if errors.As(err, &own) {
		if own.status != 0 {
			status = own.status
		}
		if own.errorType != "" {
			errorType, ofFile = own.errorType, true
		}
	}
	ofFile = ofFile && status != http.StatusGone && kind != sandboxer.Unavailable && kind != sandboxer.Timeout && (kind != sandboxer.Exhausted || retryAfter == 0)
	if retryAfter > 0 {
		c.w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(retryAfter.Seconds()))))
	}
	e := envelope{Message: &message, Hint: text(hint)}
	if c.operation != "" {
		e.Data = fileError{Path: c.path, Operation: c.operation, Message: message, ErrorType: errorType, Retryable: retryAfter > 0 || kind == sandboxer.Unavailable}
		if c.s.opts.StatusOK && ofFile && c.operation != "download" { // whose answer has no place for "success"
			status = http.StatusOK
		}
	}
	c.send(status, e)
}

// The bounds of requests.
const (
	maxJSON = 4 << 20 // bytes of a body that is kept in memory
	maxPath = 4096
)

// decode reads the body into v. It ignores unknown names, which newer clients may send, except options of the image
// that are not served: those it refuses by name.
func (c *call) decode(v any) error {
	b, err := io.ReadAll(&reservingReader{c: c, r: http.MaxBytesReader(c.w, c.r.Body, maxJSON)})
	if err != nil {
		return bodyError(err)
	}
	if err := decodeJSON(b, v); err != nil || len(c.lacks) == 0 {
		return err
	}
	var given map[string]json.RawMessage
	if err := decodeJSON(b, &given); err != nil {
		return err
	}
	for _, option := range c.lacks {
		switch string(given[option]) {
		case "", "null", "false", "0", `""`, "[]": // not asked for
		default:
			return unservedOption(c.r.URL.Path, option)
		}
	}
	return nil
}

func unservedOption(path, option string) error {
	e := sandboxer.E(sandboxer.Unsupported, nil, "%s is not served with %s by sandboxer", path, option)
	if option == "async_mode" || option == "timeout" {
		return e.WithHint("leave it out: the answer comes when the command has ended, and hard_timeout limits it")
	}
	return e.WithHint("leave it out")
}

func decodeJSON(b []byte, v any) error {
	if _, err := strictjson.DecodeStored(b, v); err != nil {
		var t *json.UnmarshalTypeError
		if errors.As(err, &t) && t.Field != "" {
			return bad(t.Field, "a %s is not accepted here", t.Value)
		}
		return bad("body", "it cannot be read as JSON: %v", err)
	}
	return nil
}

// bodyError says why a body could not be read.
func bodyError(err error) error {
	var tooBig *http.MaxBytesError
	var known *sandboxer.Error
	switch {
	case errors.As(err, &tooBig):
		return &statusError{sandboxer.E(sandboxer.Invalid, nil, "the request body is larger than %d bytes", tooBig.Limit), http.StatusRequestEntityTooLarge, ""}
	case errors.As(err, &known), errors.As(err, new(badField)):
		return err
	}
	return sandboxer.E(sandboxer.Invalid, err, "the request body did not arrive whole")
}

// reservingReader accounts for what is read; the caller keeps all of it.
type reservingReader struct {
	c *call
	r io.Reader
}

func (r *reservingReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if rerr := r.c.reserve(n); rerr != nil {
		return 0, rerr
	}
	return n, err
}

// seconds is a time limit as callers write it. 0, or none, is no limit.
type seconds float64

// maxLimit is longer than any sandbox lives, and short enough to be a time.Duration.
const maxLimit = 366 * 24 * time.Hour

func (s seconds) duration(name string) (time.Duration, error) {
	if s < 0 {
		return 0, bad(name, "want 0 or more seconds")
	}
	if s > seconds(maxLimit/time.Second) {
		return maxLimit, nil
	}
	return time.Duration(float64(s) * float64(time.Second)), nil
}

// cleanPath refuses what is not a path in a sandbox, and cleans the others.
func cleanPath(field, p string) (string, error) {
	switch {
	case p == "":
		return "", bad(field, "it is missing")
	case len(p) > maxPath:
		return "", bad(field, "it is longer than %d bytes", maxPath)
	case strings.ContainsRune(p, 0):
		return "", bad(field, "it has a NUL byte")
	case p[0] != '/':
		return "", bad(field, "want an absolute path, not %q", p)
	}
	return path.Clean(p), nil
}

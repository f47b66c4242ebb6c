package cli

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// kinds is the translation of kinds to exit codes and, for failures that did not
// come from a server, to the problem documents of -o json.
var kinds = map[sandboxer.Kind]struct {
	exit, status int
	title        string
}{
	sandboxer.Internal:        {1, http.StatusInternalServerError, "Internal error"},
	sandboxer.Invalid:         {2, http.StatusBadRequest, "Invalid request"},
	sandboxer.NotFound:        {3, http.StatusNotFound, "Not found"},
	sandboxer.Unauthenticated: {4, http.StatusUnauthorized, "Not authenticated"},
	sandboxer.Denied:          {4, http.StatusForbidden, "Not allowed"},
	sandboxer.Conflict:        {5, http.StatusConflict, "Conflict"},
	sandboxer.NoCredit:        {6, http.StatusPaymentRequired, "Not enough credit"},
	sandboxer.Exhausted:       {6, http.StatusTooManyRequests, "Exhausted"},
	sandboxer.Unsupported:     {7, http.StatusNotImplemented, "Not supported"},
	sandboxer.Unavailable:     {8, http.StatusServiceUnavailable, "Unavailable"},
	sandboxer.Timeout:         {8, http.StatusGatewayTimeout, "Timed out"},
	sandboxer.Failed:          {9, http.StatusUnprocessableEntity, "Sandbox failed"},
	sandboxer.Canceled:        {130, 499, "Canceled"},
}

const (
	exitFindings = 10  // doctor, audit and bench: problems were found
	exitOwn      = 125 // run, exec, shell: sandboxer itself failed, not the command
)

// exitError ends the program with a code of its own. err may be nil: then there is
// nothing more to print.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// exitCode returns the exit code for an error of cmd.
func exitCode(cmd *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	var e *exitError
	if errors.As(err, &e) {
		return e.code
	}
	kind := sandboxer.KindOf(err)
	if cmd != nil && cmd.Annotations[guestCommand] != "" && kind != sandboxer.Canceled {
		return exitOwn
	}
	if k, ok := kinds[kind]; ok {
		return k.exit
	}
	return 1
}

// report shows err to the user and returns the exit code.
func (f *factory) report(cmd *cobra.Command, err error) int {
	err = f.advised(err)
	code := exitCode(cmd, err)
	var e *exitError
	if err == nil || errors.As(err, &e) && e.err == nil {
		return code
	}
	if f.flags.json || f.flags.output == "json" || f.flags.output == "jsonl" || f.resolved != nil && isJSON(f.resolved.get("output")) {
		_ = printJSONLine(f.io.err, problemOf(err))
		return code
	}
	fmt.Fprintln(f.io.err, f.io.paint("31", "error:")+" "+cleanLines(sentence(err)))
	if hint := sandboxer.HintOf(err); hint != "" {
		fmt.Fprintln(f.io.err, f.io.paint("36", "hint:")+" "+cleanLines(hint))
	}
	return code
}

// advised is err with a hint for people who type commands, where the server's is for
// people who write programs.
func (f *factory) advised(err error) error {
	err = ofSystem(err)
	var e *sandboxer.Error
	if !errors.As(err, &e) || e.Kind != sandboxer.Unauthenticated || !errors.As(err, new(*api.Problem)) {
		return err
	}
	hint := "put your key into SANDBOXER_API_KEY, or into a file that SANDBOXER_API_KEY_FILE names; the server's operator makes one with: sandboxer key create NAME"
	if f.getenv("SANDBOXER_API_KEY") != "" {
		hint = "the key is the one in SANDBOXER_API_KEY; the server's operator makes another with: sandboxer key create NAME"
	} else if s, serr := f.settings(); serr == nil && s.get("api_key_file") != "" {
		hint = "the key is the one in " + s.get("api_key_file") + "; the server's operator makes another with: sandboxer key create NAME"
	}
	var p api.Problem
	if from := (*api.Problem)(nil); errors.As(err, &from) {
		p = *from
	}
	p.Hint = hint
	return p.Err()
}

func isJSON(format string) bool { return format == "json" || format == "jsonl" }

// problemOf is the error as one RFC 9457 document: the server's own, or one
// made here.
func problemOf(err error) *api.Problem {
	var p *api.Problem
	if errors.As(err, &p) {
		return p
	}
	kind := sandboxer.KindOf(err)
	k := kinds[kind]
	return &api.Problem{
		Type: "urn:sandboxer:problem:" + string(kind), Title: k.title, Status: k.status, Code: kind,
		Detail: sentence(err), Hint: sandboxer.HintOf(err),
		Retryable:  kind == sandboxer.Unavailable || kind == sandboxer.Timeout || kind == sandboxer.Exhausted,
		RetryAfter: api.Duration(sandboxer.RetryAfterOf(err)),
	}
}

// sentence says what failed and, where the system gave one, the bare reason: the user who
// types commands on this machine is its operator.
func sentence(err error) string {
	var e *sandboxer.Error
	if !errors.As(err, &e) {
		return err.Error()
	}
	msg := e.Msg
	var errno syscall.Errno
	var op *net.OpError
	if errors.As(err, &errno) && !errors.As(err, &op) && !strings.Contains(msg, errno.Error()) {
		msg += " (" + errno.Error() + ")"
	}
	var p *api.Problem
	if e.Kind == sandboxer.Internal && !errors.As(err, &p) && e.Err != nil && !errors.As(err, &errno) {
		msg += ": " + e.Err.Error()
	}
	if d := sandboxer.RetryAfterOf(err); d > 0 {
		msg += fmt.Sprintf(" (try again in %s)", d)
	}
	return msg
}

package edge

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// kinds is the one translation of kinds to HTTP.
var kinds = map[sandboxer.Kind]struct {
	status int
	title  string
	retry  bool
}{
	sandboxer.Invalid:         {http.StatusBadRequest, "Invalid request", false},
	sandboxer.Unauthenticated: {http.StatusUnauthorized, "Not authenticated", false},
	sandboxer.Denied:          {http.StatusForbidden, "Not allowed", false},
	sandboxer.NotFound:        {http.StatusNotFound, "Not found", false},
	sandboxer.Conflict:        {http.StatusConflict, "Conflict", false},
	sandboxer.NoCredit:        {http.StatusPaymentRequired, "Not enough credit", false},
	sandboxer.Exhausted:       {http.StatusTooManyRequests, "Exhausted", true},
	sandboxer.Unsupported:     {http.StatusNotImplemented, "Not supported", false},
	sandboxer.Unavailable:     {http.StatusServiceUnavailable, "Unavailable", true},
	sandboxer.Timeout:         {http.StatusGatewayTimeout, "Timed out", true},
	sandboxer.Failed:          {http.StatusUnprocessableEntity, "Sandbox failed", false},
	sandboxer.Canceled:        {499, "Canceled", false},
	sandboxer.Internal:        {http.StatusInternalServerError, "Internal error", false},
}

// statusError gives an error another HTTP status than its Kind's.
type statusError struct {
	error
	status int
}

func (e *statusError) Unwrap() error { return e.error }

// WithStatus has err answered with another status than that of its kind.
func WithStatus(status int, err error) error { return &statusError{err, status} }

// Problem translates err for the caller of the request that ctx belongs to, and notes it
// for the log. For an internal error it sends only an ID and the Public sentence.
func Problem(ctx context.Context, err error) *api.Problem {
	kind := sandboxer.KindOf(err)
	k, ok := kinds[kind]
	if !ok {
		kind, k = sandboxer.Internal, kinds[sandboxer.Internal]
	}
	c := callOf(ctx)
	p := &api.Problem{
		Type: "urn:sandboxer:problem:" + string(kind), Title: k.title, Status: k.status, Code: kind,
		Detail: sandboxer.Message(err), Hint: sandboxer.HintOf(err), RequestID: c.id,
		Retryable: k.retry, RetryAfter: api.Duration(sandboxer.RetryAfterOf(err)),
	}
	var se *statusError
	if errors.As(err, &se) {
		p.Status = se.status
	}
	if kind == sandboxer.Internal {
		id := rand.Text()[:10]
		c.edge.log.LogAttrs(ctx, slog.LevelError, "internal error", slog.String("error_id", id), slog.String("request_id", c.id),
			slog.String("op", c.route), slog.Any("err", err))
		p.Detail = "internal error " + id
		var public *sandboxer.Error
		if told := sandboxer.Discreet(err); told != err && errors.As(told, &public) {
			p.Detail += ": " + public.Msg
		}
		p.Hint = "report it with this ID; the server's log has the cause under it"
	} else {
		c.err = err
	}
	return p
}

// Fail answers a request with an error, in the form of its door.
func Fail(w http.ResponseWriter, r *http.Request, err error) {
	callOf(r.Context()).door.Fail(w, Problem(r.Context(), err))
}

// ProblemType is the content type of a problem in JSON.
const ProblemType = "application/problem+json"

// ProblemHeaders are the HTTP headers of an answer that repeat parts of a problem.
func ProblemHeaders(p *api.Problem) http.Header {
	h := http.Header{}
	if p.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(time.Duration(p.RetryAfter).Seconds()))))
	}
	if p.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="sandboxer"`)
	}
	return h
}

// writeProblem answers with a problem in the form of RFC 9457.
func writeProblem(w http.ResponseWriter, p *api.Problem) {
	for k, v := range ProblemHeaders(p) {
		w.Header()[k] = v
	}
	w.Header().Set("Content-Type", ProblemType)
	w.WriteHeader(p.Status)
	json.NewEncoder(w).Encode(p)
}

package api

import (
	"fmt"

	"github.com/sand-boxer/sandboxer"
)

// Problem is the JSON form of every failure (RFC 9457, application/problem+json). Code is the
// sandboxer.Kind; Detail says what failed and why, Hint what to do.
type Problem struct {
	Type       string         `json:"type" example:"urn:sandboxer:problem:not_found"`
	Title      string         `json:"title" example:"Not found"`
	Status     int            `json:"status" example:"404" doc:"HTTP status"`
	Code       sandboxer.Kind `json:"code" example:"not_found"`
	Detail     string         `json:"detail" example:"sandbox \"7k2mq0xa\" does not exist"`
	Hint       string         `json:"hint,omitempty"`
	RequestID  string         `json:"request_id,omitempty" example:"01ktzq"`
	Retryable  bool           `json:"retryable" doc:"The same request may succeed later"`
	RetryAfter Duration       `json:"retry_after,omitempty" example:"2s"`
}

// Error returns the status, the code and the request ID. The message for display is in the
// *sandboxer.Error that wraps p.
func (p *Problem) Error() string {
	if p.RequestID == "" {
		return fmt.Sprintf("the server answered %d %s", p.Status, p.Code)
	}
	return fmt.Sprintf("the server answered %d %s to request %s", p.Status, p.Code, p.RequestID)
}

// Err returns p as the server's error: with the same Kind, message, hint and delay. errors.As finds the
// *Problem in it.
func (p *Problem) Err() error {
	kind := p.Code
	if kind == "" {
		kind = sandboxer.Internal
	}
	return &sandboxer.Error{Kind: kind, Msg: p.Detail, Hint: p.Hint, RetryAfter: p.RetryAfter.Std(), Err: p}
}

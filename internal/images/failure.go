package images

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/sand-boxer/sandboxer"
)

// refusal is a reason why an image cannot be used that a retry does not change.
// The detail quotes the answer, which may not come from a registry: it is
// for callers who may know what this machine can reach.
type refusal struct{ why, detail string }

func (r refusal) Error() string { return r.why + tell(r.detail) }

// temporary reports whether asking again may help.
func temporary(err error) bool {
	var r refusal
	var te *transport.Error
	var se *sandboxer.Error
	var dns *net.DNSError
	switch {
	case errors.As(err, &r), errors.As(err, &se), errors.Is(err, context.Canceled), errors.Is(err, errNotPublic):
		return false
	case errors.As(err, &dns):
		return dns.IsTemporary || dns.IsTimeout
	case errors.As(err, &te):
		return te.StatusCode >= 500 || te.StatusCode == http.StatusTooManyRequests
	}
	return true
}

// explain turns a registry's failure into an error for the caller that wants the image. Only the cause,
// which goes to the log, quotes the answer.
func (s *Store) explain(err error, text string, repo name.Repository, access Access) error {
	var r refusal
	var te *transport.Error
	var se *sandboxer.Error
	if errors.As(err, &se) {
		return err
	}
	host := shown(repo.RegistryStr())
	cause := strip(err)
	status := 0
	if errors.As(err, &te) {
		status = te.StatusCode
	}
	switch {
	case errors.As(err, &r) && access == Operator:
		return sandboxer.E(sandboxer.Failed, nil, "image %q cannot be used: %s", text, r)
	case errors.As(err, &r):
		return sandboxer.E(sandboxer.Failed, cause, "image %q cannot be used: %s", text, r.why)
	case status == http.StatusTooManyRequests:
		e := sandboxer.E(sandboxer.Unavailable, cause, "image %q: %s limits how often it can be asked", text, host).
			WithHint("log in for a higher limit: docker login %s", host)
		if access != Operator {
			e = e.WithHint("try again later; an administrator can name the image in a profile")
		}
		e.RetryAfter = time.Minute
		return e
	case access != Operator && (status == http.StatusUnauthorized || status == http.StatusForbidden || status == http.StatusNotFound):
		return sandboxer.E(sandboxer.Failed, cause, "image %q does not exist at %s, or is not public", text, host).
			WithHint("check the name; an administrator can name an image that needs a login in a profile")
	case access != Operator:
		// One text for all: a caller does not learn what this machine reaches, and how.
		return sandboxer.E(sandboxer.Unavailable, cause, "image %q cannot be pulled: %s cannot be reached, or is not a registry on the public internet", text, host).
			WithHint("check the name; an administrator can use other registries, or name the image in a profile")
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return sandboxer.E(sandboxer.Failed, cause, "image %q: %s does not let us read it, or it does not exist", text, host).
			WithHint("log in as the user who runs the server: docker login %s", host)
	case status == http.StatusNotFound:
		return sandboxer.E(sandboxer.Failed, cause, "image %q does not exist at %s", text, host)
	case status != 0 && status < 500:
		return sandboxer.E(sandboxer.Failed, cause, "image %q: %s refuses with status %d", text, host, status)
	case status != 0:
		return sandboxer.E(sandboxer.Unavailable, cause, "image %q: %s answers with status %d", text, host, status)
	}
	return sandboxer.E(sandboxer.Unavailable, cause, "image %q cannot be pulled: %s cannot be reached: %s", text, host, reason(cause)).
		WithHint("check that this machine reaches %s; a registry without HTTPS has to be in images.insecure of the extension", host)
}

// reason is what happened to a connection, without the other side's data: some errors
// contain its first bytes, if they are not HTTP.
func reason(err error) string {
	var op *net.OpError
	var dns *net.DNSError
	var cert *tls.CertificateVerificationError
	var own problem
	switch {
	case errors.As(err, &own), errors.As(err, &dns), errors.As(err, &op), errors.As(err, &cert),
		errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return tell(err.Error())
	case errors.Is(err, http.ErrSchemeMismatch):
		return "it does not speak HTTPS"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "the connection breaks off"
	}
	return "its answer is not that of a registry"
}

// said is what the registry gave as its reason, for the log.
func said(te *transport.Error) string {
	var out []string
	for _, d := range te.Errors[:min(len(te.Errors), 3)] {
		if d.Message != "" {
			out = append(out, tell(d.Message))
		}
	}
	if len(out) == 0 {
		return ""
	}
	return ": " + strings.Join(out, "; ")
}

// tell makes an untrusted text fit to be shown.
func tell(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	if r := []rune(s); len(r) > 200 {
		s = string(r[:200]) + "…"
	}
	return s
}

// strip removes addresses from an error: a redirect's has an access token in it. The rest
// is bounded, and fit for a log.
func strip(err error) error {
	var ue *url.Error
	var te *transport.Error
	switch {
	case errors.As(err, &te):
		return errors.New("status " + strconv.Itoa(te.StatusCode) + said(te))
	case errors.As(err, &ue):
		return told{ue.Err}
	}
	return told{err}
}

// told is an error whose text is fit to be shown.
type told struct{ error }

func (t told) Error() string { return tell(t.error.Error()) }

func (t told) Unwrap() error { return t.error }

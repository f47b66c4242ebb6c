package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// writeFailure sends err on a plain endpoint.
func writeFailure(w http.ResponseWriter, err error) {
	err = fileError(err)
	kind := sandboxer.KindOf(err)
	w.Header().Set(kindHeader, string(kind))
	setHint(w.Header(), err)
	status := http.StatusInternalServerError
	switch kind {
	case sandboxer.Invalid, sandboxer.Conflict:
		status = http.StatusBadRequest
	case sandboxer.Unauthenticated:
		status = http.StatusUnauthorized
	case sandboxer.Denied:
		status = http.StatusForbidden
	case sandboxer.NotFound:
		status = http.StatusNotFound
	case sandboxer.Exhausted:
		status = http.StatusInsufficientStorage
	case sandboxer.Unavailable:
		status = http.StatusBadGateway
	}
	msg := err.Error()
	if se, ok := errors.AsType[*sandboxer.Error](err); ok && strings.HasPrefix(se.Msg, "path '") {
		msg = se.Msg // it already contains the cause's message
	}
	writeError(w, status, "%s", msg)
}

// errNoUser marks errors about users, which the wire calls unauthenticated.
var errNoUser = errors.New("no such user")

// errorInterceptor gives every failure its code on the wire, and its Kind in the
// metadata for our clients.
type errorInterceptor struct{}

func (errorInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		res, err := next(ctx, req)
		return res, wireError(err)
	}
}

func (errorInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (errorInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return wireError(next(ctx, conn))
	}
}

func wireError(err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		return err
	}
	var start *sandboxer.StartError
	if errors.As(err, &start) {
		code := connect.CodeNotFound
		if start.Code != sandboxer.ExitNotFound {
			code = connect.CodePermissionDenied
		}
		ce = connect.NewError(code, start)
		ce.Meta().Set(exitHeader, strconv.Itoa(start.Code))
		return ce
	}
	err = fileError(err)
	kind := sandboxer.KindOf(err)
	code := connect.CodeInternal
	switch kind {
	case sandboxer.Invalid:
		code = connect.CodeInvalidArgument
		if errors.Is(err, errNoUser) {
			code = connect.CodeUnauthenticated
		}
	case sandboxer.Denied:
		code = connect.CodePermissionDenied
	case sandboxer.NotFound:
		code = connect.CodeNotFound
	case sandboxer.Conflict:
		code = connect.CodeFailedPrecondition
		if errors.Is(err, fs.ErrExist) {
			code = connect.CodeAlreadyExists
		}
	case sandboxer.Exhausted:
		code = connect.CodeResourceExhausted
	case sandboxer.Unsupported:
		code = connect.CodeUnimplemented
	case sandboxer.Unavailable:
		code = connect.CodeUnavailable
	case sandboxer.Timeout:
		code = connect.CodeDeadlineExceeded
	case sandboxer.Canceled:
		code = connect.CodeCanceled
	}
	var se *sandboxer.Error
	msg := err.Error()
	if errors.As(err, &se) {
		msg = se.Msg
	}
	ce = connect.NewError(code, errors.New(msg))
	ce.Meta().Set(kindHeader, string(kind))
	setHint(ce.Meta(), err)
	return ce
}

// setHint puts the hint of err into the head or the trailer of an answer.
func setHint(h http.Header, err error) {
	if hint := sandboxer.HintOf(err); hint != "" {
		h.Set(hintHeader, url.PathEscape(cutText(hint, maxHint)))
	}
}

// fileError gives an error of the file system its Kind.
func fileError(err error) error {
	var e *sandboxer.Error
	if errors.As(err, &e) {
		return err
	}
	var pe *fs.PathError
	var le *os.LinkError
	what := err.Error()
	switch {
	case errors.As(err, &pe):
		what = fmt.Sprintf("path '%s': %v", pe.Path, pe.Err)
	case errors.As(err, &le):
		what = fmt.Sprintf("'%s' to '%s': %v", le.Old, le.New, le.Err)
	}
	for _, m := range [...]struct {
		target error
		kind   sandboxer.Kind
	}{
		{fs.ErrNotExist, sandboxer.NotFound},
		{fs.ErrExist, sandboxer.Conflict},
		{fs.ErrPermission, sandboxer.Denied},
		{unix.EROFS, sandboxer.Denied},
		{unix.ENOSPC, sandboxer.Exhausted},
		{unix.EDQUOT, sandboxer.Exhausted},
		{unix.EMFILE, sandboxer.Exhausted},
		{unix.ENOTDIR, sandboxer.Invalid},
		{unix.EISDIR, sandboxer.Invalid},
		{unix.ENAMETOOLONG, sandboxer.Invalid},
		{unix.ELOOP, sandboxer.Invalid},
		{unix.EINVAL, sandboxer.Invalid},
		{unix.EXDEV, sandboxer.Invalid},
		{unix.ETXTBSY, sandboxer.Conflict},
		{unix.EBUSY, sandboxer.Conflict},
		{context.DeadlineExceeded, sandboxer.Timeout},
		{context.Canceled, sandboxer.Canceled},
	} {
		if errors.Is(err, m.target) {
			return sandboxer.E(m.kind, err, "%s", what)
		}
	}
	return sandboxer.E(sandboxer.Internal, err, "%s", what)
}

package edge

import (
	"context"
	"errors"

	"github.com/sand-boxer/sandboxer"
)

// Stream returns a ctx for a long operation: it ends with ctx and, with the reason
// as its cause, when the caller's key is revoked or expires and when the
// server ends. Every answer that is flushed piece by piece, and every connection that is
// taken over, needs one first. Call cancel when it is over; the end of the request, or of
// the function it was detached for, does so too, even if a handler omits it or panics.
func Stream(ctx context.Context) (_ context.Context, cancel context.CancelCauseFunc) {
	c := callOf(ctx)
	c.hasStream.Store(true)
	bound, unbind := c.edge.auth.Bind(ctx, sandboxer.PrincipalFrom(ctx))
	ctx, end := context.WithCancelCause(bound)
	stop := context.AfterFunc(c.edge.closing, func() { end(errClosing) })
	cancel = func(cause error) {
		end(cause)
		stop()
		unbind()
	}
	c.streams = append(c.streams, cancel)
	return ctx, cancel
}

// StreamError returns why a stream ended: the cause of ctx's end unless the caller
// just left, else err.
func StreamError(ctx context.Context, err error) error {
	var e *sandboxer.Error
	if cause := context.Cause(ctx); cause != nil && errors.As(cause, &e) {
		return cause
	}
	return err
}

// Detach has f go on with the request of ctx when its handler has returned. A stream may
// last for days, and until then would hold the request's memory: a stack that has grown,
// and net/http's buffers. f must not use the request or the answer any more. Since
// net/http ends the ctx of the request, f's own is one of Stream for
// context.WithoutCancel(ctx).
func Detach(ctx context.Context, f func()) { callOf(ctx).detached = f }

// Go runs f concurrently with the request of ctx and after it; the server waits for f when
// it ends. The ctx of f does not end with the request, but when the server is to end.
func Go(ctx context.Context, f func(context.Context)) {
	e := callOf(ctx).edge
	e.work.Go(func() {
		ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
		stop := context.AfterFunc(e.closing, func() { cancel(errClosing) })
		defer stop()
		defer cancel(nil)
		f(ctx)
	})
}

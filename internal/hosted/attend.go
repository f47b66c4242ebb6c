package hosted

import (
	"cmp"
	"context"
	"net"
	"net/url"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	askEvery  = 10 * time.Second
	maxSilent = 3 // questions
)

// Attend returns the ctx for one call to the agent of a sandbox. The call may move no data for a long time, so ask asks the
// service about the sandbox meanwhile; about a minute after the sandbox stopped answering, within ends. done stops the
// questions and turns the error of the call into the one for its caller: that of why, or Unavailable, if the sandbox stopped
// answering; Unavailable if the agent refused the token that the service gave. After each of these errors, and after a Timeout,
// forget is called, because the way to the sandbox may have changed.
func Attend(ctx context.Context, ask func(context.Context) error, why func() error, forget func()) (within context.Context, done func(error) error) {
	within, end := context.WithCancelCause(ctx)
	silent := sandboxer.E(sandboxer.Unavailable, nil, "the sandbox does not answer any more").WithHint("try again later")
	go func() {
		for missed := 0; missed < maxSilent; missed++ {
			select {
			case <-within.Done():
				return
			case <-time.After(askEvery):
			}
			short, cancel := context.WithTimeout(within, answerTime)
			if ask(short) == nil {
				missed = -1
			}
			cancel()
		}
		end(silent)
	}()
	return within, func(err error) error {
		end(nil)
		if err != nil && ctx.Err() == nil && context.Cause(within) == silent {
			err = cmp.Or(why(), error(silent))
		}
		switch sandboxer.KindOf(err) {
		case sandboxer.Unauthenticated:
			err = sandboxer.E(sandboxer.Unavailable, err, "the sandbox refuses the token that the service gave: %s", sandboxer.Message(err)).WithHint("try again")
			forget()
		case sandboxer.Unavailable, sandboxer.Timeout:
			forget()
		}
		return err
	}
}

// Dial returns a function that connects to the host of a URL, without TLS.
func Dial(base string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		u, err := url.Parse(base)
		if err != nil {
			return nil, err
		}
		return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), map[string]string{"http": "80"}[u.Scheme], "443")))
	}
}

// Poll calls done, with growing pauses, until it returns true or an error. The error of Poll is that of done, or that of ctx.
func Poll(ctx context.Context, done func() (bool, error)) error {
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

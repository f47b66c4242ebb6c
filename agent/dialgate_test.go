package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestWithoutDials: the function waits for dials in progress, even for one whose caller has left, and
// blocks later ones.
func TestWithoutDials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun, release := 0, make(chan error)
		ours, theirs := net.Pipe()
		c := NewClient(ClientOptions{Dials: 2, DialsWait: true, Dial: func(ctx context.Context) (net.Conn, error) {
			begun++
			select {
			case err := <-release:
				if err == nil {
					return ours, nil
				}
				return nil, err
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}})
		refused := errors.New("refused")
		call := func(limit time.Duration) chan error {
			done := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				_, err := c.Connect(ctx)
				done <- err
			}()
			synctest.Wait()
			return done
		}
		gone := call(time.Second)
		if err := <-gone; sandboxer.KindOf(err) != sandboxer.Timeout || !errors.Is(err, ErrNotReached) {
			t.Fatalf("the call that is given up: %v", err)
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		err := c.WithoutDials(ctx, func(context.Context) error { t.Error("f is called beside a dial"); return nil })
		cancel()
		if sandboxer.KindOf(err) != sandboxer.Timeout {
			t.Errorf("a dial that does not end: %v; want a timeout", err)
		}

		inside, leave, ended := make(chan struct{}), make(chan struct{}), make(chan error, 2)
		hold := func() {
			ended <- c.WithoutDials(t.Context(), func(context.Context) error { inside <- struct{}{}; <-leave; return refused })
		}
		go hold()
		synctest.Wait()
		waiting := call(time.Hour)
		if begun != 1 {
			t.Errorf("%d dials began; the second is to wait", begun)
		}
		release <- nil // of the abandoned call
		<-inside
		if _, err := theirs.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("the connection that nobody waited for: %v; want it closed", err)
		}
		if late := <-call(time.Second); sandboxer.KindOf(late) != sandboxer.Timeout {
			t.Errorf("a call that is held back for longer than it waits: %v", late)
		}
		go hold() // waits for the first
		synctest.Wait()
		if begun != 1 {
			t.Errorf("%d dials began; none may while f runs", begun)
		}
		leave <- struct{}{}
		if err := <-ended; err != refused {
			t.Errorf("f's error came as %v", err)
		}
		synctest.Wait()
		select {
		case <-inside: // before the waiting call, or after it
			leave <- struct{}{}
			synctest.Wait()
			release <- refused
		case release <- refused:
			<-inside
			leave <- struct{}{}
		}
		if err := <-waiting; !errors.Is(err, refused) || !errors.Is(err, ErrNotReached) {
			t.Errorf("the call that waited: %v", err)
		}
		<-ended

		// The maximum number is in progress, and one waits. Closing the client ends abandoned ones.
		calls := []chan error{call(time.Second), call(time.Second), call(time.Second)}
		if begun != 4 {
			t.Errorf("%d dials are under way; 2 may be", begun-2)
		}
		for _, done := range calls {
			<-done
		}
		c.Close()
		if err := c.WithoutDials(t.Context(), func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
	})
}

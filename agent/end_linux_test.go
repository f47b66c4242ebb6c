package agent

import (
	"context"
	"net/http/httptrace"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestEndSparesOthers: net/http gives a connection to the next request before the request that had it has returned, and closes it
// if the context of that one ends in between. So the end of a command must not end the call that closes the command's input.
func TestEndSparesOthers(t *testing.T) {
	c := startAgent(t).client(ClientOptions{Token: testToken, IdleConns: 1})
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{PutIdleConn: func(error) { time.Sleep(200 * time.Millisecond) }})
	ended := make(chan error, 1)
	go func() {
		_, err := c.Exec(ctx, sandboxer.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader("x")})
		ended <- err
	}()
	for {
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			return
		default:
		}
		if err := c.Health(context.WithoutCancel(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
}

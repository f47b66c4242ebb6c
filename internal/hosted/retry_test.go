package hosted

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestTries: what is sent again, after which time, and what the caller gets in the end.
func TestTries(t *testing.T) {
	const (
		unreached = "unreached" // nothing listens
		lost      = "lost"      // the service takes the request, and its answer does not arrive
		busy      = "503 Service Unavailable\r\nRetry-After: 2"
	)
	refusals := map[int]sandboxer.Kind{http.StatusTooManyRequests: sandboxer.Exhausted, http.StatusConflict: sandboxer.Unavailable, http.StatusServiceUnavailable: sandboxer.Unavailable}
	for name, c := range map[string]struct {
		method    string
		answers   []string // the last one for ever
		tries     int
		took      time.Duration // if the pauses are known
		kind      sandboxer.Kind
		untouched bool
		after     time.Duration
	}{
		"a question, when it is busy":              {http.MethodGet, []string{busy, busy, "200 OK"}, 3, 4 * time.Second, "", false, 0},
		"a removal, after a fault":                 {http.MethodDelete, []string{"500 Internal Server Error", "204 No Content"}, 2, 0, "", false, 0},
		"a question, busy for ever":                {http.MethodGet, []string{busy}, 5, 8 * time.Second, sandboxer.Unavailable, true, 2 * time.Second},
		"a question, busy for longer than it may":  {http.MethodGet, []string{"503 Service Unavailable\r\nRetry-After: 20"}, 1, 0, sandboxer.Unavailable, true, 20 * time.Second},
		"a create, when it is busy":                {http.MethodPost, []string{busy, "200 OK"}, 1, 0, sandboxer.Unavailable, true, 2 * time.Second},
		"a create, with a fault":                   {http.MethodPost, []string{"502 Bad Gateway", "200 OK"}, 1, 0, sandboxer.Unavailable, false, 0},
		"a create that is throttled":               {http.MethodPost, []string{"429 Too Many Requests\r\nRetry-After: 7", "200 OK"}, 1, 0, sandboxer.Exhausted, true, 7 * time.Second},
		"a question that is throttled":             {http.MethodGet, []string{"429 Too Many Requests\r\nRetry-After: 7", "200 OK"}, 1, 0, sandboxer.Exhausted, true, 7 * time.Second},
		"another change is under way":              {http.MethodDelete, []string{"409 Conflict", "200 OK"}, 1, 0, sandboxer.Unavailable, true, 0},
		"a create whose answer is lost":            {http.MethodPost, []string{lost, "200 OK"}, 1, 0, sandboxer.Unavailable, false, 0},
		"a create that does not reach the service": {http.MethodPost, []string{unreached, unreached, "200 OK"}, 3, 0, "", false, 0},
		"a create that never reaches it":           {http.MethodPost, []string{unreached}, 5, 0, sandboxer.Unavailable, true, 0},
		"a throttle of a day":                      {http.MethodPost, []string{"429 Too Many Requests\r\nRetry-After: 86400"}, 1, 0, sandboxer.Exhausted, true, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tries := 0
				client := &Client{Base: "http://service", Refusals: refusals, Dial: func(context.Context, string, string) (net.Conn, error) {
					answer := c.answers[min(tries, len(c.answers)-1)]
					if tries++; answer == unreached {
						return nil, &net.OpError{Op: "dial", Err: errors.New("refused")}
					}
					ours, theirs := net.Pipe()
					go func() {
						defer theirs.Close()
						req, err := http.ReadRequest(bufio.NewReader(theirs))
						if err == nil {
							_, err = io.Copy(io.Discard, req.Body)
						}
						if err != nil || answer == lost {
							return
						}
						body := `{"message":"as it says"}`
						if strings.HasPrefix(answer, "204") {
							body = ""
						}
						_, _ = io.WriteString(theirs, "HTTP/1.1 "+answer+"\r\nConnection: close\r\n\r\n"+body)
					}()
					return ours, nil
				}}
				began := time.Now()
				_, err := Call[struct{}](t.Context(), client, c.method, "/", nil)
				took := time.Since(began)
				if tries != c.tries || sandboxer.KindOf(err) != c.kind || sandboxer.IsUntouched(err) != c.untouched || sandboxer.RetryAfterOf(err) != c.after {
					t.Errorf("%d tries, %v (%s, untouched: %t, again in %s)", tries, err, sandboxer.KindOf(err), sandboxer.IsUntouched(err), sandboxer.RetryAfterOf(err))
				}
				if took > answerTime || c.took > 0 && took != c.took || c.tries == 1 && took > 0 {
					t.Errorf("it took %s", took)
				}
			})
		})
	}
}

// A caller that leaves waits for no further try.
func TestTriesEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, leave := context.WithTimeout(t.Context(), time.Second)
		defer leave()
		tries := 0
		client := &Client{Base: "http://service", Dial: func(context.Context, string, string) (net.Conn, error) {
			tries++
			return nil, sandboxer.Untouched(&sandboxer.Error{Kind: sandboxer.Unavailable, RetryAfter: 500 * time.Millisecond})
		}}
		if _, err := Call[struct{}](ctx, client, http.MethodPost, "/", nil); sandboxer.KindOf(err) != sandboxer.Unavailable || tries != 2 {
			t.Errorf("%d tries, %v", tries, err)
		}
	})
}

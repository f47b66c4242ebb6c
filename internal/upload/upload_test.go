package upload

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

// client sends uploads to a handler, over TLS or without.
func client(t *testing.T, secure bool, h http.HandlerFunc) func(ctx context.Context, r io.Reader) (*Body, error) {
	srv := httptest.NewUnstartedServer(h)
	tr := &http.Transport{TLSClientConfig: &tls.Config{}, DialContext: Dial((&net.Dialer{}).DialContext)}
	if secure {
		srv.StartTLS()
		tr.TLSClientConfig.RootCAs = srv.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	} else {
		srv.Start()
	}
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		srv.CloseClientConnections()
		srv.Close()
	})
	return func(ctx context.Context, r io.Reader) (*Body, error) {
		body, ctx := New(ctx, r)
		req, err := http.NewRequestWithContext(ctx, "PUT", srv.URL, body)
		if err != nil {
			return body, err
		}
		resp, err := (&http.Client{Transport: tr}).Do(req)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		return body, err
	}
}

// within fails the test when f takes for ever.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal(what + ": the upload hangs")
	}
}

func TestUpload(t *testing.T) {
	const n = 1 << 20
	for _, secure := range []bool{false, true} {
		var got int64
		send := client(t, secure, func(w http.ResponseWriter, r *http.Request) { got, _ = io.Copy(io.Discard, r.Body) })
		body, err := send(t.Context(), iotest.HalfReader(strings.NewReader(strings.Repeat("x", n))))
		if err != nil || got != n || body.Err() != nil {
			t.Errorf("TLS %v: %v, %d of %d bytes, %v", secure, err, got, n, body.Err())
		}

		broken := errors.New("broken")
		body, err = send(t.Context(), io.MultiReader(strings.NewReader("x"), iotest.ErrReader(broken)))
		if err == nil || body.Err() != broken {
			t.Errorf("TLS %v: a source that fails: %v, %v", secure, err, body.Err())
		}
	}
}

func TestSilentSource(t *testing.T) {
	for _, secure := range []bool{false, true} {
		arrived := make(chan bool, 1)
		wait := func(r *http.Request) {
			_, _ = io.ReadFull(r.Body, make([]byte, 3))
			arrived <- true
		}
		silent := func() io.Reader {
			r, w := io.Pipe()
			t.Cleanup(func() { w.Close() })
			return io.MultiReader(strings.NewReader("abc"), r)
		}

		send := client(t, secure, func(w http.ResponseWriter, r *http.Request) {
			wait(r)
			_, _ = io.Copy(io.Discard, r.Body) // until the client has gone
		})
		within(t, "a context that ends", func() {
			ctx, cancel := context.WithCancel(t.Context())
			go func() { <-arrived; cancel() }()
			if body, err := send(ctx, silent()); err == nil || body.Err() != nil {
				t.Error(err, body.Err())
			}
		})

		send = client(t, secure, func(w http.ResponseWriter, r *http.Request) {
			wait(r)
			<-arrived
			c, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			c.Close()
		})
		within(t, "a server that goes", func() {
			if body, err := send(t.Context(), silent()); err == nil || body.Err() != nil {
				t.Error(err, body.Err())
			}
		})
	}
}

// A source without an end is read no further when a server has answered and wants no more of it.
func TestEarlyAnswer(t *testing.T) {
	send := client(t, false, func(w http.ResponseWriter, r *http.Request) {})
	within(t, "an answer", func() {
		body, _ := send(t.Context(), endless{})
		<-body.done
	})
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// TestAnswerOfWhoTakesNoMore: a peer that answers, and closes the connection with most of the body unread, is heard each time.
func TestAnswerOfWhoTakesNoMore(t *testing.T) {
	const answer = "no space left"
	for _, network := range []string{"tcp", "unix"} {
		addr := "127.0.0.1:0"
		if network == "unix" {
			addr = filepath.Join(t.TempDir(), "s")
		}
		l, err := net.Listen(network, addr)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.ReadFull(c, make([]byte, 300<<10)) // the head, and some of the body
				fmt.Fprintf(c, "HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(answer), answer)
				c.Close()
			}
		}()
		tr := &http.Transport{DialContext: Dial(func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, l.Addr().String())
		})}
		for i := range 300 {
			for _, r := range []io.Reader{endless{}, io.LimitReader(endless{}, 8<<20)} {
				within(t, "an upload", func() {
					body, ctx := New(t.Context(), r)
					req, _ := http.NewRequestWithContext(ctx, "PUT", "http://there/", body)
					res, err := tr.RoundTrip(req)
					if err != nil {
						t.Errorf("%s, upload %d: %v", network, i, err)
						return
					}
					got, err := io.ReadAll(res.Body)
					res.Body.Close()
					if err != nil || string(got) != answer {
						t.Errorf("%s, upload %d: %q, %v", network, i, got, err)
					}
				})
			}
		}
	}
}

package server

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// spring has more than anybody takes, and says when nobody wants more of it.
type spring struct {
	lobby
	shut chan string
}

type endless struct{ closed func() }

func (endless) Read(p []byte) (int, error) { return rand.Read(p) }
func (e endless) Close() error             { e.closed(); return nil }

func (s *spring) ReadFile(context.Context, string, string) (io.ReadCloser, error) {
	return endless{func() { s.shut <- "file" }}, nil
}

func (s *spring) ExportSnapshot(_ context.Context, _ string, w io.Writer) error {
	_, err := io.Copy(w, endless{})
	s.shut <- "export"
	return err
}

func (s *spring) Exec(ctx context.Context, _ string, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	_, err := io.Copy(struct{ io.Writer }{cmd.Stdout}, endless{})
	s.shut <- "exec"
	return sandboxer.Exit{}, err
}

func (s *spring) Dial(context.Context, string, int) (net.Conn, error) {
	near, far := net.Pipe()
	go func() {
		_, _ = io.Copy(far, endless{})
		s.shut <- "port"
	}()
	return near, nil
}

// TestWhoTakesNothing: what is sent to somebody who does not read ends when its time is over,
// and what is behind it is free again, whichever way it came.
func TestWhoTakesNothing(t *testing.T) {
	m := &spring{shut: make(chan string, 1)}
	d := newDoor(t, m, Options{Conns: ConnLimits{Stall: 200 * time.Millisecond, StreamStall: 200 * time.Millisecond}})
	const good = "Authorization: Bearer " + goodKey
	for _, network := range []string{"tcp", "tls", "unix"} {
		for what, path := range map[string]string{"file": "/v1/sandboxes/a/files?path=/x", "export": "/v1/snapshots/a/export"} {
			c := d.dial(network)
			if _, err := io.WriteString(c, request("GET "+path, good)); err != nil {
				t.Fatal(err)
			}
			if got := receive(t, m.shut, "the end of a "+what+" over "+network); got != what {
				t.Errorf("%s ended over %s, and not %s", got, network, what)
			}
			c.Close()
		}
		hc := &http.Client{Transport: &http.Transport{
			DialContext:       func(context.Context, string, string) (net.Conn, error) { return d.try(network) },
			DialTLSContext:    func(context.Context, string, string) (net.Conn, error) { return d.try(network) },
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
			DisableKeepAlives: true,
		}}
		for what, s := range map[string]struct{ path, protocol string }{
			"exec": {"/v1/sandboxes/a/exec", api.ExecProtocol}, "port": {"/v1/sandboxes/a/ports/80/connect", api.PortProtocol},
		} {
			ws, _, err := websocket.Dial(t.Context(), "ws://localhost"+s.path, &websocket.DialOptions{
				HTTPClient: hc, Subprotocols: []string{s.protocol}, HTTPHeader: http.Header{"Authorization": {"Bearer " + goodKey}},
			})
			if err != nil {
				t.Fatal(err)
			}
			if what == "exec" {
				if err := ws.Write(t.Context(), websocket.MessageText, []byte(`{"args":["x"]}`)); err != nil {
					t.Fatal(err)
				}
			}
			if got := receive(t, m.shut, "the end of "+what+" over "+network); got != what {
				t.Errorf("%s ended over %s, and not %s", got, network, what)
			}
			ws.CloseNow()
		}
	}
}

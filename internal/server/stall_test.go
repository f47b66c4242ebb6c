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
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

type endless struct{ closed func() }

func (endless) Read(p []byte) (int, error) { return rand.Read(p) }
func (e endless) Close() error             { e.closed(); return nil }

// endlessStore keeps nothing, and has more of it than anybody takes.
type endlessStore struct {
	manager.SnapshotStore
	shut chan string
}

func (endlessStore) List(context.Context) ([]string, error) { return nil, nil }

func (endlessStore) Save(_ context.Context, _ *sandboxer.SnapshotRecord, r io.Reader) (sandboxer.PortablePayload, error) {
	_, err := io.Copy(io.Discard, r)
	return sandboxer.PortablePayload{Digest: "sha256:00"}, err
}

func (v endlessStore) Export(_ context.Context, _ string, w io.Writer) error {
	_, err := io.Copy(w, endless{})
	v.shut <- "export"
	return err
}

// TestWhoTakesNothing: data for a client that does not read is dropped after its time limit,
// and its resources are free again, whatever the transport.
func TestWhoTakesNothing(t *testing.T) {
	shut := make(chan string, 1)
	x := &scripted{
		read: func() (io.ReadCloser, error) { return endless{func() { shut <- "file" }}, nil },
		exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
			_, err := io.Copy(struct{ io.Writer }{cmd.Stdout}, endless{})
			shut <- "exec"
			return sandboxer.Exit{}, err
		},
		dial: func(context.Context) (net.Conn, error) {
			near, far := net.Pipe()
			go func() {
				_, _ = io.Copy(far, endless{})
				shut <- "port"
			}()
			return near, nil
		},
	}
	r := newRig(t, scripts(x), func(s *setup) {
		s.store = endlessStore{shut: shut}
		s.edge.Conns = edge.ConnLimits{Stall: 200 * time.Millisecond, StreamStall: 200 * time.Millisecond}
	})
	k, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	r.create(c, api.CreateSandbox{Name: "sb"})
	if _, err := c.Snapshot(t.Context(), "sb", api.CreateSnapshot{Name: "snap", Kind: sandboxer.SnapshotPortable}); err != nil {
		t.Fatal(err)
	}
	for _, network := range []string{"tcp", "tls", "unix"} {
		for what, path := range map[string]string{"file": "/v1/sandboxes/sb/files?path=/x", "export": "/v1/snapshots/snap/export"} {
			c := r.Dial(r, network)
			if _, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "+k.Token+"\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			if got := edgetest.Receive(t, shut, "the end of a "+what+" over "+network); got != what {
				t.Errorf("%s ended over %s, and not %s", got, network, what)
			}
			c.Close()
		}
		hc := &http.Client{Transport: &http.Transport{
			DialContext:       func(context.Context, string, string) (net.Conn, error) { return r.Try(r, network) },
			DialTLSContext:    func(context.Context, string, string) (net.Conn, error) { return r.Try(r, network) },
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
			DisableKeepAlives: true,
		}}
		for what, s := range map[string]struct{ path, protocol string }{
			"exec": {"/v1/sandboxes/sb/exec", api.ExecProtocol}, "port": {"/v1/sandboxes/sb/ports/80/connect", api.PortProtocol},
		} {
			ws, _, err := websocket.Dial(t.Context(), "ws://localhost"+s.path, &websocket.DialOptions{
				HTTPClient: hc, Subprotocols: []string{s.protocol}, HTTPHeader: http.Header{"Authorization": {"Bearer " + k.Token}},
			})
			if err != nil {
				t.Fatal(err)
			}
			if what == "exec" {
				if err := ws.Write(t.Context(), websocket.MessageText, []byte(`{"args":["x"]}`)); err != nil {
					t.Fatal(err)
				}
			}
			if got := edgetest.Receive(t, shut, "the end of "+what+" over "+network); got != what {
				t.Errorf("%s ended over %s, and not %s", got, network, what)
			}
			ws.CloseNow()
		}
	}
}

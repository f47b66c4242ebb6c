package agent

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestSilentSource: an upload whose source is silent ends with the agent.
func TestSilentSource(t *testing.T) {
	c := NewClient(ClientOptions{Dial: func(context.Context) (net.Conn, error) {
		here, there := net.Pipe()
		go func() {
			defer there.Close()
			var got []byte
			for b := make([]byte, 1<<10); !bytes.Contains(got, []byte("abc")); {
				n, err := there.Read(b)
				if err != nil {
					return
				}
				got = append(got, b[:n]...)
			}
		}()
		return here, nil
	}})
	defer c.Close()
	r, w := io.Pipe()
	defer w.Close()
	done := make(chan error, 1)
	go func() { done <- c.WriteFile(t.Context(), "/f", 0o644, io.MultiReader(strings.NewReader("abc"), r)) }()
	select {
	case err := <-done:
		if sandboxer.KindOf(err) != sandboxer.Unavailable {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("it waits for its source")
	}
}

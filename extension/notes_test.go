package extension

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/protocol"
)

// TestNotes: an extension in a process of its own has the same notes as in the server, with the key that the hello
// brings. Without a key it has none, and a wrong key is an error in the answer.
func TestNotes(t *testing.T) {
	dir := t.TempDir()
	inside := notes.New(dir, "ext.apart", make([]byte, 32))
	if err := inside.Put(t.Context(), "asked", []byte("which host?")); err != nil {
		t.Fatal(err)
	}
	got := make(chan sandboxer.Notes, 1)
	a := sandboxer.Adapter{Kind: "apart", Open: func(_ context.Context, env sandboxer.Env) (sandboxer.Extension, error) {
		got <- env.Notes
		return failing{}, nil
	}}
	hello := func(key []byte) *protocol.Hello {
		t.Helper()
		ours, theirs := net.Pipe()
		ended := make(chan error, 1)
		go func() { ended <- Serve(t.Context(), a, theirs, theirs); theirs.Close() }()
		if err := protocol.WriteHello(ours, protocol.Hello{Protocols: protocol.Versions, Extension: "ext.apart", Owner: "test", Dir: dir, NotesKey: key}); err != nil {
			t.Fatal(err)
		}
		answer, err := protocol.ReadHello(protocol.NewReader(ours))
		if err != nil {
			t.Fatal(err)
		}
		ours.Close()
		if err := <-ended; answer.Error == nil && err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) {
			t.Error(err)
		}
		return answer
	}
	hello(notes.Key(inside))
	n := <-got
	if asked, err := n.Get(t.Context(), "asked"); err != nil || string(asked.Value) != "which host?" {
		t.Errorf("it reads %q, %v", asked.Value, err)
	}
	if err := n.Put(t.Context(), "answered", []byte("one")); err != nil {
		t.Fatal(err)
	}
	if answered, err := inside.Get(t.Context(), "answered"); err != nil || string(answered.Value) != "one" {
		t.Errorf("the server reads %q, %v", answered.Value, err)
	}
	hello(nil)
	if n := <-got; n != nil {
		t.Errorf("without a key it has %v", n)
	}
	if answer := hello([]byte("short")); answer.Error == nil || answer.Error.Kind != sandboxer.Invalid {
		t.Errorf("a wrong key is answered by %+v", answer.Error)
	}
}

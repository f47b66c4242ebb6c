package halfclose

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

type wrapped struct{ net.Conn }

func (w wrapped) CloseWrite() error { return CloseWrite(w.Conn) }

// The far side of a connection in wrappings reads to its end, and is still heard; what cannot do that refuses.
func TestCloseWrite(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		there, err := l.Accept()
		if err != nil {
			return
		}
		said, _ := io.ReadAll(there)
		there.Write(append(said, " heard"...))
		there.Close()
	}()
	here, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	io.WriteString(here, "hello")
	if err := CloseWrite(wrapped{wrapped{here}}); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(here); err != nil || string(got) != "hello heard" {
		t.Errorf("%q, %v", got, err)
	}

	a, b := net.Pipe() // which has no halves
	defer b.Close()
	defer a.Close()
	if err := CloseWrite(wrapped{wrapped{a}}); sandboxer.KindOf(err) != sandboxer.Unsupported || !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a pipe: %v", err)
	}
}

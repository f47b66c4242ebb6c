package aioserver

import (
	"io"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// maxInput is how much of a command's input waits until the command reads it.
const maxInput = 256 << 10

// input is what a command reads, which is written a piece at a time by requests that do not wait.
type input struct {
	memory *memory
	who    account

	mu     sync.Mutex
	b      []byte
	closed bool
	more   chan struct{} // closed by the next write, or close
}

func newInput(m *memory, who account) *input {
	return &input{memory: m, who: who, more: make(chan struct{})}
}

func (in *input) Read(p []byte) (int, error) {
	for {
		in.mu.Lock()
		n := copy(p, in.b)
		in.memory.shrink(in.who, forTexts, n)
		in.b = in.b[n:]
		if len(in.b) == 0 {
			in.b = nil
		}
		closed, more := in.closed, in.more
		in.mu.Unlock()
		switch {
		case n > 0 || len(p) == 0:
			return n, nil
		case closed:
			return 0, io.EOF
		}
		<-more
	}
}

// write adds all of s, or nothing.
func (in *input) write(s string) error {
	if len(s) > maxInput {
		return bad("input", "it is longer than %d bytes", maxInput)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case in.closed:
		return sandboxer.E(sandboxer.Conflict, nil, "the command does not take the input: it has ended")
	case len(in.b)+len(s) > maxInput:
		return full("the command has not read what was written to it before")
	case !in.memory.grow(in.who, forTexts, len(s)):
		return errFull()
	}
	in.b = append(in.b, s...)
	close(in.more)
	in.more = make(chan struct{})
	return nil
}

// close ends the input. What was not read is gone.
func (in *input) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.closed {
		in.memory.shrink(in.who, forTexts, len(in.b))
		in.closed, in.b = true, nil
		close(in.more)
	}
}

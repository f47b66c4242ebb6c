package checkpoint

import (
	"io"
	"sync"
)

// A handover passes data from a writer to a reader, as io.Pipe
// does, and without a copy if the reader has it written on (io.WriterTo).
type handover struct {
	data chan []byte
	took chan struct{}

	wonce, ronce sync.Once
	wdone, rdone chan struct{} // closed when the writer, the reader has nothing more to say
	werr, rerr   error         // read after these

	rest []byte // of the reader: what it has not taken yet
}

func newHandover() *handover {
	return &handover{data: make(chan []byte), took: make(chan struct{}), wdone: make(chan struct{}), rdone: make(chan struct{})}
}

// Write returns when all of p was taken, so that p may be used again.
func (h *handover) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	select {
	case <-h.wdone: // closed by another
		return 0, h.werr
	default:
	}
	select {
	case h.data <- p:
	case <-h.rdone:
		return 0, h.rerr
	case <-h.wdone:
		return 0, h.werr
	}
	select {
	case <-h.took:
		return len(p), nil
	case <-h.rdone:
		return 0, h.rerr
	}
}

// end signals the end of the data to the reader: io.EOF, or an error.
func (h *handover) end(err error) {
	h.wonce.Do(func() {
		h.werr = err
		close(h.wdone)
	})
}

// stop tells the writer that the reader has stopped.
func (h *handover) stop(err error) {
	h.ronce.Do(func() {
		if h.rerr = err; err == nil {
			h.rerr = io.ErrClosedPipe
		}
		close(h.rdone)
	})
}

// A receiver is the read end of a handover.
type receiver struct{ h *handover }

func (r receiver) Read(p []byte) (int, error) {
	h := r.h
	if len(h.rest) == 0 {
		if err := h.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, h.rest)
	if h.rest = h.rest[n:]; len(h.rest) == 0 {
		h.took <- struct{}{}
	}
	return n, nil
}

// WriteTo has w write the data, a piece for each Write at the other end.
func (r receiver) WriteTo(w io.Writer) (n int64, err error) {
	h := r.h
	for {
		if len(h.rest) == 0 {
			if err := h.next(); err != nil {
				if err == io.EOF {
					err = nil
				}
				return n, err
			}
		}
		m, err := w.Write(h.rest)
		n += int64(m)
		if err != nil {
			return n, err
		}
		h.rest = nil
		h.took <- struct{}{}
	}
}

func (h *handover) next() error {
	select {
	case h.rest = <-h.data:
		return nil
	case <-h.wdone:
		return h.werr
	}
}

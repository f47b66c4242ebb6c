package checkpoint

import (
	"context"
	"crypto/rand"
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"
)

// A streamSink stores what is written to it as one compressed object.
type streamSink struct {
	ctx  context.Context
	stop context.CancelFunc
	enc  *zstd.Encoder
	w    *io.PipeWriter
	put  chan error
	buf  []byte
	n    int64
	out  counter
	name string
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

func (s *Store) newStreamSink(ctx context.Context) (*streamSink, error) {
	r, w := io.Pipe()
	k := &streamSink{w: w, put: make(chan error, 1), buf: make([]byte, copySize), name: streamPrefix + rand.Text(), out: counter{w: w}}
	k.ctx, k.stop = context.WithCancel(ctx)
	var err error
	if k.enc, err = zstd.NewWriter(&k.out, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(2)); err != nil {
		return nil, err
	}
	go func() {
		err := s.blobs.Put(k.ctx, k.name, r)
		_ = r.CloseWithError(err)
		k.put <- err
	}()
	return k, nil
}

func (k *streamSink) Write(p []byte) (int, error) {
	k.n += int64(len(p))
	return k.enc.Write(p)
}

func (k *streamSink) space() ([]byte, error) { return k.buf, nil }

func (k *streamSink) fill(n int) error {
	_, err := k.Write(k.buf[:n])
	return err
}

func (k *streamSink) finish() (part, error) {
	defer k.stop()
	err := k.enc.Close()
	if err != nil {
		_ = k.w.CloseWithError(err)
	} else {
		_ = k.w.Close()
	}
	if err = errors.Join(<-k.put, err); err != nil {
		return part{}, err
	}
	return part{Size: k.n, Stream: k.name}, nil
}

func (k *streamSink) abort() {
	k.stop()
	_ = k.w.CloseWithError(context.Canceled)
	<-k.put
	_ = k.enc.Close()
}

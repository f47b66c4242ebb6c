//go:build linux

package local

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Only its caller waits for the output and the end of a command.
func TestIdleCommandTakesNoGoroutine(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	const n = 20
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	said, in := io.Pipe()
	before := runtime.NumGoroutine()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for range n {
		wg.Go(func() {
			_, _ = e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; exec sleep 1000"}, Stdout: in, Stderr: io.Discard})
		})
	}
	if _, err := io.ReadFull(said, make([]byte, 3*n)); err != nil {
		t.Fatal(err)
	}
	const spare = n / 2 // of the sandbox, which continues meanwhile
	for end := time.Now().Add(2 * time.Minute); runtime.NumGoroutine() > before+n+spare; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d commands take %d goroutines\n%s", n, runtime.NumGoroutine()-before, buf[:runtime.Stack(buf, true)])
		}
	}
}

// A stream's output arrives complete and in order, in pieces or at once, and a failing
// writer ends it.
func TestOutStream(t *testing.T) {
	poll, err := newPoller()
	if err != nil {
		t.Fatal(err)
	}
	defer poll.close()
	go poll.run()
	begin := func(t *testing.T, w io.Writer) (*streams, *os.File) {
		s, err := newStreams(poll, sandboxer.Cmd{Stdout: w})
		if err != nil {
			t.Fatal(err)
		}
		g := s.guest[1]
		delete(s.guest, 1)
		s.closeGuest()
		s.start(sandboxer.Cmd{})
		return s, g
	}
	t.Run("all of it", func(t *testing.T) {
		var got bytes.Buffer
		s, g := begin(t, &got)
		var want bytes.Buffer
		for i := range 300 {
			p := bytes.Repeat([]byte{byte(i)}, 1+i*i%70000)
			want.Write(p)
			if _, err := g.Write(p); err != nil {
				t.Fatal(err)
			}
			if i%50 == 0 {
				runtime.Gosched()
			}
		}
		g.Close()
		if err := s.finish(); err != nil || !bytes.Equal(got.Bytes(), want.Bytes()) {
			t.Errorf("%d bytes arrived of %d, %v", got.Len(), want.Len(), err)
		}
	})
	t.Run("what is there although it stays open", func(t *testing.T) {
		var got bytes.Buffer
		s, g := begin(t, &got)
		defer g.Close()
		if _, err := io.WriteString(g, strings.Repeat("x", 100000)); err != nil {
			t.Fatal(err)
		}
		if err := s.finish(); err != nil || got.Len() != 100000 {
			t.Errorf("%d bytes arrived, %v", got.Len(), err)
		}
	})
	t.Run("nobody reads it", func(t *testing.T) {
		s, g := begin(t, failing{})
		defer g.Close()
		if _, err := io.WriteString(g, "x"); err != nil {
			t.Fatal(err)
		}
		<-s.broken
		if err := s.finish(); !errors.Is(err, sandboxer.Canceled) {
			t.Errorf("it ends with %v", err)
		}
	})
	t.Run("a reader that rests holds no other", func(t *testing.T) {
		r, w := io.Pipe()
		slow, gs := begin(t, w)
		if _, err := io.WriteString(gs, "x"); err != nil {
			t.Fatal(err)
		}
		said, in := io.Pipe()
		other, g := begin(t, in)
		if _, err := io.WriteString(g, "y"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(said, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		g.Close()
		gs.Close()
		if err := other.finish(); err != nil {
			t.Error(err)
		}
		go func() { _, _ = io.Copy(io.Discard, r) }()
		if err := slow.finish(); err != nil {
			t.Error(err)
		}
	})
	t.Run("without a poller", func(t *testing.T) {
		var got bytes.Buffer
		s, g := begin(t, &got)
		s.out[0].close()
		s.abort()
		g.Close()
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		o := &outStream{poll: poll, f: r, w: &got, fail: func() {}}
		if o.raw, err = r.SyscallConn(); err != nil {
			t.Fatal(err)
		}
		flowed := make(chan struct{})
		go func() { defer close(flowed); o.flow() }()
		if _, err := io.WriteString(w, "on"); err != nil {
			t.Fatal(err)
		}
		w.Close()
		<-flowed
		o.rest()
		o.close()
		if got.String() != "on" {
			t.Errorf("%q arrived", got.String())
		}
	})
	poll.mu.Lock()
	defer poll.mu.Unlock()
	if len(poll.waits) != 0 {
		t.Errorf("%d files are waited for yet", len(poll.waits))
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

package agent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
)

// A said is a command that only writes something.
func said(out, errs string, exit sandboxer.Exit, err error) RunFunc {
	return func(_ context.Context, _ []string, _ io.Reader, stdout, stderr io.Writer) (sandboxer.Exit, error) {
		_, _ = io.WriteString(stderr, errs)
		_, _ = io.WriteString(stdout, out)
		return exit, err
	}
}

// echo is a command that repeats its input, after the mark, until its input or its context ends.
func echo(ctx context.Context, _ []string, in io.Reader, out, _ io.Writer) (sandboxer.Exit, error) {
	if _, err := out.Write([]byte{'#', Mark}); err != nil {
		return sandboxer.Exit{}, err
	}
	done := make(chan error, 1)
	go func() { _, err := io.Copy(out, in); done <- err }()
	select {
	case err := <-done:
		return sandboxer.Exit{}, err
	case <-ctx.Done():
		return sandboxer.Exit{}, ctx.Err()
	}
}

// TestDialCommandAnswered: a caller that still writes does not lose the output of a command that ended
// well.
func TestDialCommandAnswered(t *testing.T) {
	c, err := DialCommand(t.Context(), func(_ context.Context, _ []string, _ io.Reader, out, _ io.Writer) (sandboxer.Exit, error) {
		_, err := out.Write([]byte{Mark, 'n', 'o'})
		return sandboxer.Exit{}, err
	}, "attach")
	if err != nil {
		t.Fatal(err)
	}
	said := make(chan string, 1)
	go func() { b, _ := io.ReadAll(c); said <- string(b) }()
	for range 3 {
		if n, err := c.Write(make([]byte, 1<<20)); err != nil || n != 1<<20 {
			t.Fatalf("%d bytes, %v", n, err)
		}
	}
	if got := <-said; got != "no" {
		t.Errorf("it said %q", got)
	}
	c.Close()
	if _, err := c.Write([]byte("x")); err == nil {
		t.Error("a closed one takes more")
	}
}

func TestDialCommand(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	type key struct{}
	ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
	var args []string
	c, err := DialCommand(ctx, func(ctx context.Context, a []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
		if args = a; ctx.Value(key{}) != "value" {
			t.Error("the command has not the values of the context")
		}
		return echo(ctx, a, in, out, errs)
	}, "attach", "--socket=@x")
	if err != nil {
		t.Fatal(err)
	}
	cancel() // bounds the dialing alone
	if strings.Join(args, " ") != "attach --socket=@x" {
		t.Errorf("args %q", args)
	}
	if err := c.SetReadDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline: %v", err)
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	sent := bytes.Repeat([]byte("\x06 some octets\x00"), 20_000)
	go func() {
		_, _ = c.Write(sent)
		_ = c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d octets of %d, %v", len(got), len(sent), err)
	}
	c.Close()
}

func TestDialCommandWriteDeadline(t *testing.T) {
	c, err := DialCommand(t.Context(), func(ctx context.Context, _ []string, _ io.Reader, out, _ io.Writer) (sandboxer.Exit, error) {
		_, _ = out.Write([]byte{Mark})
		<-ctx.Done() // without reading its input
		return sandboxer.Exit{}, ctx.Err()
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetWriteDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(make([]byte, 1<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline: %v", err)
	}
}

// TestDialCommandClose: closing the connection ends the command.
func TestDialCommandClose(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	ended := make(chan struct{})
	c, err := DialCommand(t.Context(), func(ctx context.Context, _ []string, _ io.Reader, out, _ io.Writer) (sandboxer.Exit, error) {
		defer close(ended)
		_, _ = out.Write([]byte{Mark})
		_, err := out.Write(make([]byte, 1<<20)) // without a reader
		<-ctx.Done()
		return sandboxer.Exit{}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	<-ended
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("a closed connection is read from")
	}
}

// TestDialCommandGivenUp: an abandoned dial ends the command.
func TestDialCommandGivenUp(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	_, err := DialCommand(ctx, func(ctx context.Context, _ []string, _ io.Reader, _, _ io.Writer) (sandboxer.Exit, error) {
		defer close(ended)
		cancel()
		<-ctx.Done()
		return sandboxer.Exit{}, ctx.Err()
	})
	if sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("%v; want canceled", err)
	}
	<-ended
}

func TestDialCommandRefused(t *testing.T) {
	code := func(n int) sandboxer.Exit { return sandboxer.Exit{Code: n} }
	for _, test := range []struct {
		name string
		run  RunFunc
		kind sandboxer.Kind
		says string
	}{
		{"not there", said("", "exec: \"/x/sandboxer-agent\": no such file", code(127), nil), sandboxer.Unsupported, "/x/sandboxer-agent"},
		{"may not run", said("", "permission denied", code(126), nil), sandboxer.Unsupported, "permission denied"},
		{"not mounted", said("OCI runtime exec failed: stat /x/sandboxer-agent: no such file or directory: unknown\r\n", "", code(1), nil), sandboxer.Unsupported, "OCI runtime"},
		{"no thread", said("", "runtime: failed to create new OS thread (have 5 already; errno=11)\n", code(2), nil), sandboxer.Exhausted, "limit of processes"},
		{"no process", said("OCI runtime exec failed: unable to start container process: fork: Resource temporarily unavailable\r\n", "", code(126), nil), sandboxer.Exhausted, "limit of processes"},
		{"no thread of the engine's", said("", "Error: runc: exec failed: unable to start container process: read init-p: connection reset by peer: OCI runtime error\n", code(125), nil), sandboxer.Exhausted, "limit of processes"},
		{"no queue", said("", "sandboxer-agent: dial unix @x: connect: resource temporarily unavailable\n", code(1), nil), sandboxer.Unavailable, "connect:"},
		{"of another platform", said("", "exec /x: exec format error\n", code(255), nil), sandboxer.Unsupported, "format"},
		{"its own word", said("", "sandboxer-agent: cannot listen: /none: no such file or directory", code(1), nil), sandboxer.Unavailable, "cannot listen"},
		{"stopped", said("", "Error response from daemon: container x is not running", code(1), nil), sandboxer.Unavailable, "not running"},
		{"without a word", said("hello", "", code(0), nil), sandboxer.Unavailable, "hello"},
		{"killed", said("", "", code(137), nil), sandboxer.Unavailable, "137"},
		{"the host is away", said("", "", code(0), sandboxer.E(sandboxer.Timeout, nil, "host h does not answer")), sandboxer.Timeout, "host h"},
		{"an error without a kind", said("", "said", code(0), io.ErrNoProgress), sandboxer.Unavailable, "said"},
		{"control characters", said("", "\x1b[2J\x00", code(1), nil), sandboxer.Unavailable, "\uFFFD[2J"},
		{"too much", func(ctx context.Context, _ []string, _ io.Reader, out, _ io.Writer) (sandboxer.Exit, error) {
			for ctx.Err() == nil {
				_, _ = io.WriteString(out, strings.Repeat("noise ", 1000))
			}
			return sandboxer.Exit{}, ctx.Err()
		}, sandboxer.Unavailable, "too much"},
		{"too much before the mark", func(ctx context.Context, _ []string, _ io.Reader, out, _ io.Writer) (sandboxer.Exit, error) {
			_, _ = out.Write(append(bytes.Repeat([]byte("n"), maxBeforeMark+1), Mark))
			<-ctx.Done()
			return sandboxer.Exit{}, ctx.Err()
		}, sandboxer.Unavailable, "too much"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := DialCommand(t.Context(), test.run)
			if err == nil {
				c.Close()
			}
			if sandboxer.KindOf(err) != test.kind || !strings.Contains(err.Error(), test.says) || len(err.Error()) > 8<<10 {
				t.Errorf("%v; want %s, %q", err, test.kind, test.says)
			}
		})
	}
}

// TestDialCommandBreaks: a connection whose command failed does not look complete.
func TestDialCommandBreaks(t *testing.T) {
	for _, test := range []struct {
		run  RunFunc
		want error
	}{
		{said("banner\n\x06all", "", sandboxer.Exit{}, nil), nil},
		{said("\x06all", "killed", sandboxer.Exit{Code: 137}, nil), sandboxer.Unavailable},
		{said("\x06all", "", sandboxer.Exit{Code: 127}, nil), sandboxer.Unavailable},
		{said("\x06all", "", sandboxer.Exit{}, io.ErrUnexpectedEOF), sandboxer.Unavailable},
	} {
		c, err := DialCommand(t.Context(), test.run)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		if string(got) != "all" || !errors.Is(err, test.want) {
			t.Errorf("%q, %v; want %v", got, err, test.want)
		}
		c.Close()
	}
}

// TestDialAttached: a command's input goes in frames, and raw to a version without them.
func TestDialAttached(t *testing.T) {
	sent := bytes.Repeat([]byte("\x06 some octets\x00"), 20_000)
	for name, frames := range map[string]bool{"frames": true, "a former version": false} {
		t.Run(name, func(t *testing.T) {
			defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
			var given [][]string
			c, err := DialAttached(t.Context(), func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
				given = append(given, args)
				framed := args[len(args)-1] == "--frames"
				if framed && !frames {
					_, _ = io.WriteString(errs, "flag provided but not defined: -frames")
					return sandboxer.Exit{Code: 2}, nil
				}
				if !framed {
					return echo(ctx, args, in, out, errs)
				}
				r, w := net.Pipe()
				defer w.Close()
				go func() {
					passFrames(halfPipe{w}, in)
					w.Close()
				}()
				return echo(ctx, args, r, out, errs)
			}, "attach", "--socket=@x")
			if err != nil {
				t.Fatal(err)
			}
			if want := map[bool]int{true: 1, false: 2}[frames]; len(given) != want || strings.Join(given[len(given)-1], " ") != map[bool]string{true: "attach --socket=@x --frames", false: "attach --socket=@x"}[frames] {
				t.Errorf("it was run with %q", given)
			}
			go func() {
				_, _ = c.Write(sent)
				_ = c.(interface{ CloseWrite() error }).CloseWrite()
			}()
			if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, sent) {
				t.Errorf("%d octets of %d, %v", len(got), len(sent), err)
			}
			if n, err := c.Write([]byte("more")); n != 0 || err == nil {
				t.Errorf("after the end: %d octets, %v", n, err)
			}
			c.Close()
		})
	}
}

// halfPipe ends when its writing side does.
type halfPipe struct{ net.Conn }

func (p halfPipe) CloseWrite() error { return p.Close() }

// TestFrames: an invalid frame is not forwarded, not even in part, and ends the input.
func TestFrames(t *testing.T) {
	for name, test := range map[string]struct {
		in, want string
		ended    bool
	}{
		"the caller goes":   {"\x00\x00\x00\x02ab\x00\x00\x00\x01c", "abc", false},
		"amid a head":       {"\x00\x00\x00\x02ab\x00\x00", "ab", false},
		"amid a frame":      {"\x00\x00\x00\x02ab\x00\x00\x00\x02c", "ab", false},
		"the input ends":    {"\x00\x00\x00\x02ab\x00\x00\x00\x00", "ab", true},
		"more than its end": {"\x00\x00\x00\x00\x00\x00\x00\x02ab", "", true},
		"a huge one":        {"\xff\xff\xff\xff" + strings.Repeat("x", 1<<20), "", false},
		"nothing":           {"", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			var to frameSink
			if passFrames(&to, strings.NewReader(test.in)); to.String() != test.want || to.ended != test.ended {
				t.Errorf("%q, ended=%t", to.String(), to.ended)
			}
		})
	}
}

type frameSink struct {
	bytes.Buffer
	ended bool
}

func (s *frameSink) CloseWrite() error {
	s.ended = true
	return nil
}

// TestFramesDeadline: a deadline that passes during a frame prevents further frames.
func TestFramesDeadline(t *testing.T) {
	hears, feed := net.Pipe()
	defer hears.Close()
	w := &frameWriter{to: feed}
	if err := feed.SetWriteDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if n, err := w.Write([]byte("none")); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("past the deadline: %d, %v", n, err)
	}
	if err := feed.SetWriteDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	some := make(chan error, 1)
	go func() {
		_, err := io.ReadFull(hears, make([]byte, frameHead+2))
		_ = feed.SetWriteDeadline(time.Now())
		some <- err
	}()
	if n, err := w.Write([]byte("part")); n != 2 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("amid a frame: %d, %v", n, err)
	}
	if err := <-some; err != nil {
		t.Fatal(err)
	}
	if err := feed.SetWriteDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if n, err := w.Write([]byte("more")); n != 0 || err == nil {
		t.Errorf("after a part of a frame: %d, %v", n, err)
	}
	_ = w.end()
	if b, err := io.ReadAll(hears); err != nil || len(b) != 0 {
		t.Errorf("the end of what is broken: %q, %v", b, err)
	}
}

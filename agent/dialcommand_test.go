package agent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
)

// A said is a command that only says something.
func said(out, errs string, exit sandboxer.Exit, err error) RunFunc {
	return func(_ context.Context, _ []string, _ io.Reader, stdout, stderr io.Writer) (sandboxer.Exit, error) {
		_, _ = io.WriteString(stderr, errs)
		_, _ = io.WriteString(stdout, out)
		return exit, err
	}
}

// echo is a command that says what it hears, after the mark, until its input or its context ends.
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
		<-ctx.Done() // without a look at what it is told
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

// TestDialCommandClose: who closes the connection ends the command.
func TestDialCommandClose(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	ended := make(chan struct{})
	c, err := DialCommand(t.Context(), func(ctx context.Context, _ []string, _ io.Reader, out, _ io.Writer) (sandboxer.Exit, error) {
		defer close(ended)
		_, _ = out.Write([]byte{Mark})
		_, err := out.Write(make([]byte, 1<<20)) // which nobody reads
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

// TestDialCommandGivenUp: who dials no longer ends the command.
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

// TestDialCommandBreaks: a connection whose command ended badly does not look whole.
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

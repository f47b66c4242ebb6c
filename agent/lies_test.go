package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/sand-boxer/sandboxer"
	pb "github.com/sand-boxer/sandboxer/agent/proto/process"
)

// A liar is a connection to a process that has taken the agent's place: it answers every
// request with the same bytes, and then with forever, if set, without end.
type liar struct {
	answer  []byte
	forever []byte
	drip    bool // one byte at a time, with a pause
	slow    bool // repeats with a pause
	hold    bool // keeps the connection open after the answer
}

func (l liar) client(t testing.TB, wait time.Duration) *Client {
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	c := NewClient(ClientOptions{Dial: func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go l.serve(ctx, theirs)
		return ours, nil
	}})
	t.Cleanup(func() { c.Close() })
	c.wait = patience{answer: wait, remove: wait, progress: wait, kill: wait}
	return c
}

func (l liar) serve(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	br := bufio.NewReader(conn)
	r, err := http.ReadRequest(br)
	if err != nil {
		return
	}
	go io.Copy(io.Discard, r.Body)
	if l.drip {
		for i := range l.answer {
			if _, err := conn.Write(l.answer[i : i+1]); err != nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	} else if _, err := conn.Write(l.answer); err != nil {
		return
	}
	for len(l.forever) > 0 {
		if l.drip || l.slow {
			time.Sleep(10 * time.Millisecond)
		}
		if _, err := conn.Write(l.forever); err != nil {
			return
		}
	}
	if l.hold {
		<-ctx.Done()
	}
}

// calls are all calls of a client.
var calls = map[string]func(context.Context, *Client) error{
	"Health": func(ctx context.Context, c *Client) error { return c.Health(ctx) },
	"Init":   func(ctx context.Context, c *Client) error { return c.Init(ctx, Settings{}) },
	"Stats": func(ctx context.Context, c *Client) error {
		_, err := c.Stats(ctx)
		return err
	},
	"Dial": func(ctx context.Context, c *Client) error {
		conn, err := c.Dial(ctx, 80)
		if err == nil {
			conn.Close()
		}
		return err
	},
	"ReadFile": func(ctx context.Context, c *Client) error {
		r, err := c.ReadFile(ctx, "/f")
		if err == nil {
			_, err = io.CopyN(io.Discard, r, 1<<20) // the reader decides how much
			r.Close()
		}
		return err
	},
	"WriteFile": func(ctx context.Context, c *Client) error {
		return c.WriteFile(ctx, "/f", 0o644, bytes.NewReader(make([]byte, 1000)))
	},
	"StatFile": func(ctx context.Context, c *Client) error {
		_, err := c.StatFile(ctx, "/f")
		return err
	},
	"ListFiles": func(ctx context.Context, c *Client) error {
		for _, err := range c.ListFiles(ctx, "/d", "") {
			if err != nil {
				return err
			}
		}
		return nil
	},
	"MakeDir":    func(ctx context.Context, c *Client) error { return c.MakeDir(ctx, "/d") },
	"MoveFile":   func(ctx context.Context, c *Client) error { return c.MoveFile(ctx, "/a", "/b") },
	"RemoveFile": func(ctx context.Context, c *Client) error { return c.RemoveFile(ctx, "/a") },
	"Archive": func(ctx context.Context, c *Client) error {
		err := c.Archive(ctx, "/d", &atMost{1 << 20}) // the reader decides how much
		if errors.Is(err, io.ErrShortBuffer) {
			return nil
		}
		return err
	},
	"Unarchive": func(ctx context.Context, c *Client) error {
		return c.Unarchive(ctx, "/d", bytes.NewReader(make([]byte, 1024)))
	},
	"Exec": func(ctx context.Context, c *Client) error {
		ctx, cancel := context.WithTimeout(ctx, c.wait.answer) // as long as its caller wants
		defer cancel()
		_, err := c.Exec(ctx, sandboxer.Cmd{Args: []string{"true"}, Stdout: io.Discard, TTY: &sandboxer.WinSize{}})
		return err
	},
	"Start": func(ctx context.Context, c *Client) error {
		_, err := c.Start(ctx, sandboxer.ProcessSpec{Args: []string{"true"}})
		return err
	},
	"Attach": func(ctx context.Context, c *Client) error {
		ctx, cancel := context.WithTimeout(ctx, c.wait.answer)
		defer cancel()
		_, err := c.Attach(ctx, 7, sandboxer.ProcessStreams{Replay: true, Stdout: io.Discard})
		return err
	},
	"Processes": func(ctx context.Context, c *Client) error {
		_, err := c.Processes(ctx)
		return err
	},
	"Signal": func(ctx context.Context, c *Client) error { return c.Signal(ctx, 7, 9) },
	"Resize": func(ctx context.Context, c *Client) error { return c.Resize(ctx, 7, sandboxer.WinSize{}) },
	"SendInput": func(ctx context.Context, c *Client) error {
		ctx, cancel := context.WithTimeout(ctx, c.wait.answer)
		defer cancel()
		return c.SendInput(ctx, 7, []byte("x"), false)
	},
	"CloseStdin": func(ctx context.Context, c *Client) error { return c.CloseStdin(ctx, 7) },
	"Watch": func(ctx context.Context, c *Client) error {
		ctx, cancel := context.WithTimeout(ctx, c.wait.answer)
		defer cancel()
		w, err := c.Watch(ctx, "/d", false)
		if err != nil {
			return err
		}
		defer w.Close()
		for {
			if _, err := w.Next(); err != nil {
				return err
			}
		}
	},
}

// atMost accepts this many bytes.
type atMost struct{ left int }

func (a *atMost) Write(p []byte) (int, error) {
	if a.left -= len(p); a.left < 0 {
		return 0, io.ErrShortBuffer
	}
	return len(p), nil
}

func envelope(flags byte, size uint32, body string) string {
	var head [5]byte
	head[0] = flags
	binary.BigEndian.PutUint32(head[1:], size)
	return string(head[:]) + body
}

const (
	ok       = "HTTP/1.1 200 OK\r\n"
	okJSON   = ok + "Content-Type: application/json\r\n"
	okProto  = ok + "Content-Type: application/proto\r\n"
	okStream = ok + "Content-Type: application/connect+proto\r\n"
	chunked  = "Transfer-Encoding: chunked\r\n"
)

var lies = map[string]liar{
	"nothing":                 {hold: true},
	"an early close":          {},
	"half a head":             {answer: []byte("HTTP/1.1 20"), hold: true},
	"no HTTP":                 {answer: []byte("SSH-2.0-OpenSSH_9.2\r\n")},
	"an endless header line":  {answer: []byte(ok + "X: "), forever: bytes.Repeat([]byte("a"), 64<<10)},
	"endless headers":         {answer: []byte(ok), forever: bytes.Repeat([]byte("X: y\r\n"), 10_000)},
	"endless early hints":     {forever: bytes.Repeat([]byte("HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"), 1000)},
	"a dripping head":         {answer: []byte(ok), forever: []byte("X: y\r\n"), drip: true},
	"an endless body":         {answer: []byte(okJSON + "\r\n"), forever: bytes.Repeat([]byte(" "), 64<<10)},
	"endless chunks":          {answer: []byte(okProto + chunked + "\r\n"), forever: []byte("400\r\n" + strings.Repeat("a", 1024) + "\r\n")},
	"endless chunk extension": {answer: []byte(okProto + chunked + "\r\n1;"), forever: bytes.Repeat([]byte("a"), 4096)},
	"endless trailers":        {answer: []byte(okProto + chunked + "Trailer: X\r\n\r\n0\r\n"), forever: []byte("X: " + strings.Repeat("a", 1024) + "\r\n")},
	"a dripping body":         {answer: []byte(okJSON + "\r\n"), forever: []byte(" "), drip: true},
	"a length never met":      {answer: []byte(okProto + "Content-Length: 1000000000000\r\n\r\nabc"), hold: true},
	"less than its length":    {answer: []byte(okProto + "Content-Length: 1000\r\n\r\nabc")},
	"a negative length":       {answer: []byte(okProto + "Content-Length: -5\r\n\r\nabc")},
	"two lengths":             {answer: []byte(okProto + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef")},
	"a wrong type":            {answer: []byte(ok + "Content-Type: text/html\r\nContent-Length: 4\r\n\r\n<ok>")},
	"packed":                  {answer: []byte(ok + "Content-Type: application/proto\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd")},
	"an upgrade":              {answer: []byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"), hold: true},
	"elsewhere":               {answer: []byte("HTTP/1.1 307 Temporary Redirect\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n")},
	"a frame of 4 GiB":        {answer: []byte(okStream + "\r\n" + envelope(0, 1<<32-1, "")), forever: bytes.Repeat([]byte("a"), 64<<10)},
	"a frame never sent":      {answer: []byte(okStream + "\r\n" + envelope(0, 1000, "")), hold: true},
	"a frame of nonsense":     {answer: []byte(okStream + "\r\n" + envelope(0, 4, "\xff\xff\xff\xff"))},
	"endless empty frames":    {answer: []byte(okStream + "\r\n"), forever: bytes.Repeat([]byte(envelope(0, 0, "")), 1000)},
	"an endless end":          {answer: []byte(okStream + "\r\n" + envelope(2, 1<<31, "")), forever: bytes.Repeat([]byte(" "), 64<<10)},
	"a failure without end":   {answer: []byte("HTTP/1.1 500 Oh\r\nContent-Type: application/json\r\n\r\n"), forever: bytes.Repeat([]byte(" "), 64<<10)},
	"a failure of the broker": {answer: []byte("HTTP/1.1 500 Oh\r\nSandboxer-Kind: internal\r\nContent-Type: application/json\r\nContent-Length: 31\r\n\r\n" + `{"code":"internal","message":"x"`)},
	"numbers too large":       {answer: []byte(okJSON + "Content-Length: 40\r\n\r\n" + `{"disk_bytes":1e999,"mem":99999999999999}`)},
}

// TestLyingAgent makes every call to agents that lie: each call ends, with an error of a
// fitting Kind, and uses little memory meanwhile.
func TestLyingAgent(t *testing.T) {
	// Answers that are valid for a call that checks only the status, or nothing.
	fine := map[string][]string{
		"Health": {"*"}, "Init": {"*"}, "WriteFile": {"*"}, "Unarchive": {"*"},
		"ReadFile": {"*"}, "Archive": {"*"},
		"Dial": {"an upgrade"},
	}
	for lie, l := range lies {
		t.Run(lie, func(t *testing.T) {
			var all sync.WaitGroup
			defer all.Wait()
			for name, call := range calls {
				c := l.client(t, 150*time.Millisecond)
				all.Go(func() {
					err := call(t.Context(), c)
					switch k := sandboxer.KindOf(err); {
					case k == sandboxer.Failed, k == sandboxer.Timeout, k == sandboxer.Unavailable, err == io.EOF, err == io.ErrUnexpectedEOF:
					case err != nil:
						t.Errorf("%s: %s: %v", name, k, err)
					case !slices.Contains(fine[name], lie) && !slices.Contains(fine[name], "*"):
						t.Errorf("%s believes it", name)
					}
				})
			}
		})
	}
}

// TestLyingAgentTakesNoMemory lets agents answer as much as they can, many at a time.
func TestLyingAgentTakesNoMemory(t *testing.T) {
	for _, lie := range []string{"an endless header line", "an endless body", "a frame of 4 GiB", "endless chunks", "a failure without end"} {
		for _, name := range []string{"Stats", "ListFiles", "StatFile", "Dial", "Exec"} {
			t.Run(fmt.Sprint(lie, " to ", name), func(t *testing.T) {
				c := lies[lie].client(t, time.Minute)
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if name == "Exec" { // its end is its caller's
					ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
					defer cancel()
					c.wait.kill = 100 * time.Millisecond
					_, _ = c.Exec(ctx, sandboxer.Cmd{Args: []string{"true"}})
				} else if err := calls[name](ctx, c); sandboxer.KindOf(err) != sandboxer.Failed && sandboxer.KindOf(err) != sandboxer.Unavailable { // the connection that was cut for it, seen by who writes the request
					t.Errorf("%v; want a failure", err)
				}
				runtime.ReadMemStats(&after)
				if took := int64(after.TotalAlloc - before.TotalAlloc); took > 16<<20 {
					t.Errorf("%d MiB were allocated on the way", took>>20)
				}
			})
		}
	}
}

// TestAgentsWords: what an agent says about a failure is short, printable, and never that
// the caller has no key or the broker a bug.
func TestAgentsWords(t *testing.T) {
	for _, tt := range []struct{ head, body string }{
		{"Sandboxer-Kind: unauthenticated\r\n", `{"message":"log in at \u001b]8;;http://evil\u0007here"}`},
		{"Sandboxer-Kind: no_credit\r\n", `{"message":"pay \u009b31m` + "\x7f" + `\u202e"}`},
		{"Sandboxer-Kind: internal\r\n", `{"message":"` + strings.Repeat("x", 60_000) + `"}`},
		{"Sandboxer-Kind: anything\r\n", `{}`},
	} {
		answer := fmt.Sprintf("HTTP/1.1 500 Oh\r\n%sContent-Length: %d\r\n\r\n%s", tt.head, len(tt.body), tt.body)
		_, err := liar{answer: []byte(answer)}.client(t, time.Minute).Stats(t.Context())
		if sandboxer.KindOf(err) != sandboxer.Failed {
			t.Errorf("%s%.40s: %v", tt.head, tt.body, err)
		}
		msg := sandboxer.Message(err)
		if len(msg) > 2*maxText || strings.ContainsAny(msg, "\x1b\x07\u009b\x7f\u202e") {
			t.Errorf("%q", msg)
		}
	}
}

// FuzzAnswer gives every call the bytes of an answer: none may panic, hang, or be of a
// Kind that is not for a sandbox to give.
func FuzzAnswer(f *testing.F) {
	names := make([]string, 0, len(calls))
	for name := range calls {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, l := range lies {
		for i := range names {
			f.Add(uint8(i), append(slices.Clone(l.answer), l.forever[:min(len(l.forever), 1024)]...))
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, answer []byte) {
		c := liar{answer: answer}.client(t, time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := calls[names[int(which)%len(names)]](ctx, c)
		switch k := sandboxer.KindOf(err); k {
		case sandboxer.NoCredit, sandboxer.Unauthenticated:
			t.Errorf("%s: %v", k, err)
		case sandboxer.Internal:
			if err != io.EOF && err != io.ErrUnexpectedEOF {
				t.Errorf("%s: %v", k, err)
			}
		}
		if strings.ContainsAny(sandboxer.Message(err), "\x1b\u009b\x7f") {
			t.Errorf("%q", sandboxer.Message(err))
		}
	})
}

// TestCommandOutOfReach: a call does not wait for a kill in a sandbox that is known not
// to answer.
func TestCommandOutOfReach(t *testing.T) {
	started, err := proto.Marshal(&pb.StartResponse{Event: &pb.ProcessEvent{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{Pid: 7}}}})
	if err != nil {
		t.Fatal(err)
	}
	data, err := proto.Marshal(&pb.StartResponse{Event: &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: &pb.ProcessEvent_DataEvent{
		Output: &pb.ProcessEvent_DataEvent_Stdout{Stdout: []byte("x")}}}}})
	if err != nil {
		t.Fatal(err)
	}
	c := liar{answer: []byte(okStream + "\r\n" + envelope(0, uint32(len(started)), string(started)) + envelope(0, uint32(len(data)), string(data))), hold: true}.client(t, time.Hour)
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := sandboxer.E(sandboxer.Unavailable, nil, "it does not respond")
	_, err = c.Exec(ctx, sandboxer.Cmd{Args: []string{"sleep"}, Stdout: writerFunc(func([]byte) { cancel(gone) })})
	if err == nil {
		t.Error("it ended")
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) { f(p); return len(p), nil }

// TestDrippingTransfer: a transfer byte by byte counts as stalled, however long it
// continues.
func TestDrippingTransfer(t *testing.T) {
	c := liar{answer: []byte(ok + "Content-Length: 1000000000\r\n\r\n"), forever: []byte("x"), slow: true}.client(t, time.Second)
	r, err := c.ReadFile(t.Context(), "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if n, err := io.Copy(io.Discard, r); sandboxer.KindOf(err) != sandboxer.Timeout {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// A transfer that is slow on our side, or large, continues.
func TestSlowReader(t *testing.T) {
	const size = 20 << 16
	c := liar{answer: []byte(ok + "Content-Length: " + fmt.Sprint(size) + "\r\n\r\n" + strings.Repeat("x", size)), hold: true}.client(t, time.Second)
	r, err := c.ReadFile(t.Context(), "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	read := 0
	for buf := make([]byte, 1<<16); read < size; time.Sleep(60 * time.Millisecond) { // 1.2 s in all, of which the agent uses little
		n, err := r.Read(buf)
		if read += n; err != nil && err != io.EOF {
			t.Fatalf("%d bytes, %v", read, err)
		}
	}
}

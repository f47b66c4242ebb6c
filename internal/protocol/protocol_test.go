package protocol

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A peer is the other side of a Conn, by hand.
type peer struct {
	t    *testing.T
	conn net.Conn
	r    *bufio.Reader
}

// dialed returns a connection that runs, and its other side.
func dialed(t *testing.T, opts Options) (*Conn, *peer) {
	t.Helper()
	a, b := net.Pipe()
	c := New(NewReader(a), a, opts)
	ran := make(chan struct{})
	go func() { c.Run(context.Background()); close(ran) }()
	t.Cleanup(func() {
		c.Close()
		a.Close()
		b.Close()
		<-ran
		c.Wait()
	})
	return c, &peer{t, b, NewReader(b)}
}

func (p *peer) say(format string, args ...any) {
	p.t.Helper()
	p.conn.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := fmt.Fprintf(p.conn, format+"\n", args...); err != nil {
		p.t.Fatalf("saying %.80q: %v", format, err)
	}
}

func (p *peer) hear() (l line) {
	p.t.Helper()
	p.conn.SetDeadline(time.Now().Add(30 * time.Second))
	data, err := readLine(p.r)
	if err == nil {
		err = json.Unmarshal(data, &l)
	}
	if err != nil {
		p.t.Fatalf("hearing: %v", err)
	}
	return l
}

type answer struct {
	V   json.RawMessage `json:"v"`
	err error
}

func (c *Conn) later(ctx context.Context, method string) <-chan answer {
	out := make(chan answer, 1)
	go func() {
		var a answer
		a.err = c.Call(ctx, method, nil, &a, "")
		out <- a
	}()
	return out
}

func ended(t *testing.T, c *Conn) error {
	t.Helper()
	select {
	case <-c.Done():
	case <-time.After(30 * time.Second):
		t.Fatal("the connection goes on")
	}
	return c.Err()
}

func TestAnswers(t *testing.T) {
	c, p := dialed(t, Options{})
	ctx := t.Context()
	one := c.later(ctx, "one")
	id1 := p.hear().ID
	two := c.later(ctx, "two")
	id2 := p.hear().ID
	p.say(`{"id":%d,"result":{"v":99}}`, id2+1000) // nobody's
	p.say(`{"id":%d,"result":{"v":2},"newer":{"a":[1]}}`, id2)
	p.say(`{"id":%d,"result":{"v":3}}`, id2) // a second time
	p.say(`{"method":"shout","params":{"x":1}}`)
	p.say(`{"id":%d,"error":{"kind":"bogus","message":"m\u001b[31m","hint":"h","retry_after_ms":5,"untouched":true}}`, id1)
	if a := <-two; a.err != nil || string(a.V) != "2" {
		t.Errorf("two: %s, %v", a.V, a.err)
	}
	a := <-one
	if sandboxer.KindOf(a.err) != sandboxer.Internal || a.err.Error() != "m\uFFFD[31m" || sandboxer.HintOf(a.err) != "h" || !sandboxer.IsUntouched(a.err) {
		t.Errorf("an error of an unknown kind: %#v", a.err)
	}
	three := c.later(ctx, "three")
	p.say(`{"id":%d,"result":{"v":2e308}}`, p.hear().ID)
	if a := <-three; a.err != nil || string(a.V) != "2e308" {
		t.Errorf("a number that no float holds, as it is: %s, %v", a.V, a.err)
	}
	var h sandboxer.Handle
	four := make(chan error, 1)
	go func() { four <- c.Call(ctx, "four", nil, &h, "") }()
	p.say(`{"id":%d,"result":{"sandbox_id":"x","generation":1e308}}`, p.hear().ID)
	if err := <-four; sandboxer.KindOf(err) != sandboxer.Internal {
		t.Errorf("a generation of 1e308: %v", err)
	}
	five := c.later(ctx, "five")
	p.hear()
	p.conn.Close()
	if a := <-five; sandboxer.KindOf(a.err) != sandboxer.Unavailable {
		t.Errorf("a call when the other side leaves: %v", a.err)
	}
	if err := c.Call(ctx, "six", nil, nil, ""); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("a call after that: %v", err)
	}
}

// What does not belong to the protocol ends it, at once.
func TestBadLines(t *testing.T) {
	deep := strings.Repeat("[", 200) + strings.Repeat("]", 200)
	deeper := strings.Repeat("[", 400_000) + strings.Repeat("]", 400_000)
	for name, text := range map[string]string{
		"no object": `[1]`, "no JSON": `{"id":`, "empty": ``, "number": `7`,
		"twice": `{"id":1,"id":1,"result":{}}`, "twice inside": `{"id":1,"result":{"a":1,"a":2}}`, "another case": `{"ID":1,"result":{}}`,
		"no UTF-8": "{\"id\":1,\"result\":{\"a\":\"\xff\"}}", "deep": `{"id":1,"result":` + deep + `}`, "deeper": `{"id":1,"result":` + deeper + `}`,
		"id 1e308": `{"id":1e308,"result":{}}`, "negative id": `{"id":-1,"result":{}}`, "large id": `{"id":9007199254740993,"method":"m"}`,
		"both": `{"id":1,"result":{},"error":{"kind":"invalid"}}`, "neither": `{"id":1}`, "answer to nobody": `{"result":{}}`,
		"request and answer": `{"id":1,"method":"m","result":{}}`, "second hello": `{"hello":{"protocols":[1]}}`,
		"two documents": `{"id":1,"result":{}}{}`,
		"too long":      `{"id":1,"result":{"a":"` + strings.Repeat("x", MaxLine) + `"}}`,
	} {
		t.Run(name, func(t *testing.T) {
			c, p := dialed(t, Options{})
			call := c.later(t.Context(), "m")
			p.hear()
			go io.WriteString(p.conn, text+"\n") // it may not be read to its end
			if a := <-call; sandboxer.KindOf(a.err) != sandboxer.Unavailable {
				t.Errorf("the call: %v, want unavailable", a.err)
			}
			if err := ended(t, c); err == nil || errors.Is(err, io.EOF) {
				t.Errorf("the connection ended with %v", err)
			}
		})
	}
}

func TestLineLengths(t *testing.T) {
	for size, ok := range map[int]bool{1: true, 65535: true, 65536: true, 65537: true, MaxLine - 1: true, MaxLine: false, 2 * MaxLine: false} {
		got, err := readLine(NewReader(strings.NewReader(strings.Repeat("x", size) + "\nnext")))
		if ok != (err == nil) || ok && len(got) != size {
			t.Errorf("a line of %d bytes: %d, %v", size, len(got), err)
		}
	}
	if _, err := readLine(NewReader(strings.NewReader(`{"id":1`))); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("half a line: %v", err)
	}
	if _, err := readLine(NewReader(strings.NewReader(""))); err != io.EOF {
		t.Errorf("nothing: %v", err)
	}
	if _, err := encode(line{ID: 1, Method: strings.Repeat("x", MaxLine)}); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("sending a line that is too long: %v", err)
	}
}

func TestHello(t *testing.T) {
	var b bytes.Buffer
	if err := WriteHello(&b, Hello{Protocols: Versions, Program: "p", Config: json.RawMessage(`{"a":1}`)}); err != nil {
		t.Fatal(err)
	}
	h, err := ReadHello(NewReader(&b))
	if err != nil || h.Program != "p" || string(h.Config) != `{"a":1}` {
		t.Errorf("hello: %+v, %v", h, err)
	}
	for _, text := range []string{`{"id":1,"method":"m"}`, `hello`, `{"hello":{},"id":1}`, `{"hello":{"protocols":[1],"protocols":[2]}}`, `{"hello":{"protocols":["1"]}}`} {
		if _, err := ReadHello(NewReader(strings.NewReader(text + "\n"))); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("ReadHello(%s): %v", text, err)
		}
	}
	if v, err := Agree([]int{7, 1, 3}); v != 1 || err != nil {
		t.Errorf("Agree: %d, %v", v, err)
	}
	_, err = Agree([]int{2, 3})
	if sandboxer.KindOf(err) != sandboxer.Unsupported || !strings.Contains(err.Error(), "this side speaks 1, the other 2, 3") {
		t.Errorf("no common version: %v", err)
	}
	if _, err = Agree(nil); err == nil || !strings.Contains(err.Error(), "the other none") {
		t.Errorf("no version: %v", err)
	}
}

// Deadlines travel as what is left of them, and a cancelled request is answered or told of.
func TestCancel(t *testing.T) {
	told := make(chan string, 1)
	c, p := dialed(t, Options{Unanswered: func(m string) { told <- m }})
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	call := c.later(ctx, "m")
	l := p.hear()
	if left := time.Duration(l.TimeoutMS) * time.Millisecond; left > time.Hour || left < time.Hour-time.Minute {
		t.Errorf("%v are left, want an hour", left)
	}
	cancel()
	if n := p.hear(); n.Method != "cancel" || n.ID != 0 || string(n.Params) != fmt.Sprintf(`{"id":%d}`, l.ID) {
		t.Errorf("cancel: %+v", n)
	}
	p.say(`{"id":%d,"error":{"kind":"canceled","message":"stopped"}}`, l.ID)
	if a := <-call; sandboxer.KindOf(a.err) != sandboxer.Canceled || sandboxer.Message(a.err) != "stopped" {
		t.Errorf("a cancelled call that is answered: %v", a.err)
	}
	// One past its deadline is a timeout, whatever the other side calls it.
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	call = c.later(ctx, "m")
	l = p.hear()
	p.hear()
	p.say(`{"id":%d,"error":{"kind":"canceled","message":"stopped"}}`, l.ID)
	if a := <-call; sandboxer.KindOf(a.err) != sandboxer.Timeout {
		t.Errorf("a call past its deadline: %v", a.err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	call = c.later(ctx, "deaf")
	l = p.hear()
	began := time.Now()
	cancel()
	p.hear()
	a := <-call
	if d := time.Since(began); !errors.Is(a.err, context.Canceled) || d < CancelTime || d > 5*CancelTime {
		t.Errorf("one that is not: %v after %v", a.err, d)
	}
	if m := <-told; m != "deaf" {
		t.Errorf("told of %s", m)
	}
	p.say(`{"id":%d,"result":{}}`, l.ID) // too late: dropped
	call = c.later(t.Context(), "next")
	p.say(`{"id":%d,"result":{"v":1}}`, p.hear().ID)
	if a := <-call; a.err != nil {
		t.Errorf("the next call: %v", a.err)
	}
}

// A peer that does not read is reported too, also by calls that have less time than CancelTime.
func TestUnread(t *testing.T) {
	told := make(chan string, 8)
	c, _ := dialed(t, Options{Unanswered: func(m string) { told <- m }})
	for range 2 { // the writer takes the first
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		go c.Call(ctx, "m", nil, nil, "")
	}
	select {
	case <-told:
	case <-time.After(10 * CancelTime):
		t.Error("nobody is told that the other side does not read")
	}
}

func TestServe(t *testing.T) {
	logged := make(chan string, 4)
	release := make(chan struct{})
	c, p := dialed(t, Options{MaxServed: 1,
		Log: func(_ slog.Level, msg string, attrs map[string]string) { logged <- msg + attrs["k"] },
		Serve: func(ctx context.Context, r *Request) (any, error) {
			switch r.Method {
			case "wait":
				select {
				case <-ctx.Done():
					return nil, ctx.Err()
				case <-release:
				}
				return nil, nil
			case "large":
				return strings.Repeat("x", MaxLine), nil
			case "progress":
				sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: strings.Repeat("s", 2*MaxLine), Done: 3})
			}
			return map[string]int{"v": 1}, nil
		}})
	_ = c
	p.say(`{"id":1,"method":"wait"}`)
	p.say(`{"id":2,"method":"m"}`)
	if l := p.hear(); l.ID != 2 || l.Error == nil || l.Error.Kind != sandboxer.Exhausted {
		t.Errorf("one too many: %+v", l)
	}
	p.say(`{"method":"cancel","params":{"id":1}}`)
	if l := p.hear(); l.ID != 1 || l.Error == nil || l.Error.Kind != sandboxer.Canceled {
		t.Errorf("cancelled: %+v", l)
	}
	p.say(`{"id":3,"method":"wait","timeout_ms":10}`)
	if l := p.hear(); l.ID != 3 || l.Error == nil || l.Error.Kind != sandboxer.Timeout {
		t.Errorf("past its deadline: %+v", l)
	}
	p.say(`{"id":4,"method":"large"}`)
	if l := p.hear(); l.ID != 4 || l.Error == nil || l.Error.Kind != sandboxer.Internal {
		t.Errorf("an answer that is too long: %+v", l)
	}
	p.say(`{"id":5,"method":"progress"}`)
	if l := p.hear(); l.Method != "progress" || len(l.Params) > 2*maxText {
		t.Errorf("progress: %.200v", l)
	}
	if l := p.hear(); l.ID != 5 || string(l.Result) != `{"v":1}` {
		t.Errorf("answer: %+v", l)
	}
	p.say(`{"method":"log","params":{"level":"nonsense","message":"hel\u0007lo","attrs":{"k":"v"}}}`)
	if m := <-logged; m != "hel\uFFFDlov" {
		t.Errorf("logged %q", m)
	}
	p.say(`{"id":6,"method":"wait"}`)
	p.say(`{"id":6,"method":"wait"}`)
	if err := ended(t, c); err == nil || !strings.Contains(err.Error(), "a second time") {
		t.Errorf("an id twice: %v", err)
	}
}

// Who asks without end and reads no answer is given up; it does not fill the memory.
func TestAskingWithoutReading(t *testing.T) {
	var served atomic.Int64
	c, p := dialed(t, Options{Serve: func(context.Context, *Request) (any, error) { served.Add(1); return nil, nil }})
	go func() {
		for id := 1; ; id++ {
			if _, err := fmt.Fprintf(p.conn, `{"id":%d,"method":"m"}`+"\n", id); err != nil {
				return
			}
		}
	}()
	if err := ended(t, c); err == nil || !strings.Contains(err.Error(), "does not read") {
		t.Errorf("it ended with %v", err)
	}
	if n := served.Load(); n > 100 {
		t.Errorf("%d requests were served", n)
	}
}

// Requests of this side are bounded, and those that last leave room for others.
func TestBoundOfCalls(t *testing.T) {
	c, p := dialed(t, Options{MaxAsked: 4})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	streams := make(chan error, 8)
	for range 8 {
		go func() { streams <- c.Call(ctx, "exec", nil, nil, NewToken()) }()
	}
	for range 3 {
		if l := p.hear(); l.Method != "exec" || l.Stream == "" {
			t.Fatalf("%+v", l)
		}
	}
	call := c.later(ctx, "teardown")
	l := p.hear()
	if l.Method != "teardown" {
		t.Fatalf("a short call does not get through: %+v", l)
	}
	p.say(`{"id":%d,"result":{}}`, l.ID)
	if a := <-call; a.err != nil {
		t.Error(a.err)
	}
	go io.Copy(io.Discard, p.conn)
	cancel()
	p.conn.Close()
	for range 8 {
		if err := <-streams; err == nil {
			t.Error("a call that was cancelled succeeds")
		}
	}
}

func TestProgressOfCall(t *testing.T) {
	c, p := dialed(t, Options{})
	got := make(chan sandboxer.Progress, 4)
	ctx := sandboxer.WithProgress(t.Context(), func(p sandboxer.Progress) { got <- p })
	call := c.later(ctx, "m")
	id := p.hear().ID
	p.say(`{"method":"progress","params":{"id":%d,"step":"other"}}`, id+1)
	p.say(`{"method":"progress","params":{"id":%d,"step":"pull","done":-5,"total":9}}`, id)
	p.say(`{"id":%d,"result":{}}`, id)
	<-call
	p.say(`{"method":"progress","params":{"id":%d,"step":"late"}}`, id)
	p.say(`{"method":"log","params":{"message":"x"}}`)
	if n := len(got); n != 1 {
		t.Fatalf("%d steps", n)
	}
	if s := <-got; s != (sandboxer.Progress{Step: "pull", Total: 9}) {
		t.Errorf("%+v", s)
	}
}

// pair is two ends of a stream over a Unix socket.
func pair(t *testing.T) (a, b *Stream) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var s [2]*Stream
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		s[i] = NewStream(c, NewReader(c))
		t.Cleanup(func() { c.Close() })
	}
	return s[0], s[1]
}

func frame(channel byte, n int, payload string) string {
	var b [5]byte
	b[0] = channel
	binary.BigEndian.PutUint32(b[1:], uint32(n))
	return string(b[:]) + payload
}

func TestFrames(t *testing.T) {
	for name, c := range map[string]struct {
		bytes string
		want  error
	}{
		"too long":  {frame(1, MaxFrame+1, ""), nil},
		"4 GiB":     {frame(1, 1<<32-1, ""), nil},
		"channel":   {frame(9, 0, ""), nil},
		"cut short": {frame(1, 5, "abc"), io.ErrUnexpectedEOF},
		"half head": {frame(1, 5, "")[:3], io.ErrUnexpectedEOF},
		"end":       {"", io.EOF},
	} {
		s := NewStream(nil, bufio.NewReader(strings.NewReader(c.bytes)))
		if _, _, err := s.Receive(); err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	a, b := pair(t)
	if err := a.Send(1, make([]byte, MaxFrame+1)); err == nil {
		t.Error("a frame of more than 1 MiB is sent")
	}
	go a.Send(1, bytes.Repeat([]byte("x"), MaxFrame))
	if ch, p, err := b.Receive(); ch != 1 || len(p) != MaxFrame || err != nil {
		t.Errorf("1 MiB: %d, %d, %v", ch, len(p), err)
	}
}

// A read goes on after a deadline where it was, in the middle of a head or a payload.
func TestReadAcrossDeadlines(t *testing.T) {
	a, b := pair(t)
	conn := b.Conn(ChannelIn, ChannelOut)
	text := frame(ChannelOut, 4, "abcd") + frame(ChannelEnd, 0, "")
	buf := make([]byte, 10)
	for i := range text {
		a.conn.Write([]byte(text[i : i+1]))
		if i == 8 || i == len(text)-1 {
			continue // the last of a frame
		}
		conn.SetReadDeadline(time.Now().Add(2 * time.Millisecond))
		if n, err := conn.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("byte %d: %d, %v", i, n, err)
		}
		if i == 7 {
			a.conn.Write([]byte(text[8:9]))
			conn.SetReadDeadline(time.Time{})
			if n, err := conn.Read(buf); string(buf[:n]) != "abcd" || err != nil {
				t.Fatalf("%q, %v", buf[:n], err)
			}
			a.conn.Write([]byte(text[9:]))
			break
		}
	}
	if _, err := conn.Read(buf); err != io.EOF {
		t.Errorf("the end: %v", err)
	}
}

// After half a frame nothing more is sent: it would be taken for the rest.
func TestWriteDeadline(t *testing.T) {
	a, b := pair(t)
	conn := a.Conn(ChannelIn, ChannelOut)
	conn.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := conn.Write(make([]byte, 8<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("nobody reads: %v", err)
	}
	conn.SetWriteDeadline(time.Time{})
	go io.Copy(io.Discard, b.r)
	if _, err := conn.Write([]byte("x")); err == nil {
		t.Error("something is sent behind half a frame")
	}
}

// Input that the command does not read lets sizes and signals through, and those that it does not heed the input.
func TestCommand(t *testing.T) {
	a, b := pair(t)
	served := make(chan error, 1)
	got := make(chan os.Signal, 1)
	go func() {
		served <- b.ServeCommand(context.Background(), func(ctx context.Context, c Served) (sandboxer.Exit, error) {
			s := <-c.Signals
			got <- s
			if w := <-c.Resize; w.Cols != 99 {
				return sandboxer.Exit{}, fmt.Errorf("the last size is not kept: %+v", w)
			}
			n, err := io.Copy(io.Discard, c.Stdin)
			if err != nil {
				return sandboxer.Exit{}, err
			}
			fmt.Fprint(c.Stdout, n)
			return sandboxer.Exit{Code: 3}, nil
		})
	}()
	signals, sizes := make(chan os.Signal), make(chan sandboxer.WinSize)
	const size = 5 << 20
	var out strings.Builder
	done := make(chan error, 1)
	var x sandboxer.Exit
	go func() {
		var mine, theirs error
		x, mine, theirs = a.CallCommand(Caller{Stdin: io.LimitReader(zeros{}, size), Stdout: &out, Resize: sizes, Signals: signals})
		done <- errors.Join(mine, theirs)
	}()
	for i := range 100 { // more than anything holds
		sizes <- sandboxer.WinSize{Cols: uint16(i), Rows: 1}
	}
	for range 100 {
		signals <- syscall.SIGUSR1
	}
	select {
	case s := <-got:
		if s != syscall.SIGUSR1 {
			t.Errorf("%v", s)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("signals do not get through")
	}
	if err := <-done; err != nil || x.Code != 3 || out.String() != fmt.Sprint(size) {
		t.Errorf("%+v, %q, %v", x, out.String(), err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// An extension that is sent more than it granted gives up; unread output slows down.
func TestWindows(t *testing.T) {
	a, b := pair(t)
	served := make(chan error, 1)
	go func() {
		served <- b.ServeCommand(context.Background(), func(ctx context.Context, c Served) (sandboxer.Exit, error) {
			<-ctx.Done()
			return sandboxer.Exit{}, ctx.Err()
		})
	}()
	for range Window/maxData + 1 {
		a.Send(ChannelIn, make([]byte, maxData))
	}
	if err := <-served; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	a, b = pair(t)
	var sent atomic.Int64
	go func() {
		for b.Send(ChannelOut, make([]byte, maxData)) == nil {
			sent.Add(maxData)
		}
	}()
	for last := int64(-1); ; time.Sleep(100 * time.Millisecond) {
		if n := sent.Load(); n == last && n > 0 {
			break
		} else if last = n; n > 64<<20 {
			t.Fatal("output that nobody reads goes on")
		}
	}
	a.Close()
}

// Errors on streams are not taken over without a look.
func TestHide(t *testing.T) {
	a, b := pair(t)
	a.Hide = func(s string) string { return strings.ReplaceAll(s, "secret", "hidden") }
	for range 2 {
		b.SendError(sandboxer.E(sandboxer.Failed, nil, "secret"))
	}
	if _, err := a.Next(ChannelOut); sandboxer.Message(err) != "hidden" {
		t.Errorf("%v", err)
	}
	if _, _, err := a.CallCommand(Caller{}); sandboxer.Message(err) != "hidden" {
		t.Errorf("%v", err)
	}
}

// What is too long is cut between words, and after what is to be hidden was looked for.
func TestCut(t *testing.T) {
	long := strings.Repeat("word ", maxText/5-1) + "secret-of-"
	if got := cut(long + "the-house and more"); got != strings.TrimSpace(long[:len(long)-len("secret-of-")])+"…" {
		t.Errorf("%q", got[len(got)-40:])
	}
	if got := cut(strings.Repeat("x", maxText+1)); got != "…" {
		t.Errorf("one word: %.40q", got)
	}
	if whole := strings.Repeat("x", maxText); cut(whole) != whole || cut(whole+" y") != whole+"…" {
		t.Error("what is not too long is cut")
	}
	hide := func(s string) string { return strings.ReplaceAll(s, "secret of the house", "[redacted]") }
	long = strings.Repeat("word ", maxText/5-2) + "secret of the house and more words that are too many"
	err := (&Error{Kind: sandboxer.Invalid, Message: long, Hint: long, Public: long, Faults: []ErrorFault{{At: long, Message: long}}}).Err(hide)
	if text := err.Error(); strings.Contains(text, "secret") || strings.Count(text, "…") != 2 {
		t.Errorf("faults: %q", text)
	}
	err = (&Error{Kind: sandboxer.Failed, Message: long, Hint: long, Public: long}).Err(hide)
	for _, text := range []string{sandboxer.Message(err), sandboxer.HintOf(err), sandboxer.Message(sandboxer.Discreet(err))} {
		if strings.Contains(text, "secret") || !strings.HasSuffix(text, "…") {
			t.Errorf("%q", text)
		}
	}
}

func TestHurry(t *testing.T) {
	a, _ := pair(t)
	time.AfterFunc(20*time.Millisecond, func() { a.Hurry(20 * time.Millisecond) })
	if _, _, err := a.Receive(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

// FuzzBytes gives anything to both decoders: neither crashes, nor leaves a call waiting.
func FuzzBytes(f *testing.F) {
	f.Add([]byte(`{"id":1,"result":{}}` + "\n"))
	f.Add([]byte(`{"method":"progress","params":{"id":1,"step":"s"}}` + "\n" + `{"id":1,"error":{"kind":"x"}}`))
	f.Add([]byte(`{"id":5,"method":"m","params":{},"timeout_ms":1}` + "\n" + `{"method":"cancel","params":{"id":5}}` + "\n"))
	f.Add([]byte(frame(ChannelOut, 3, "abc") + frame(ChannelWindow, 4, "\x00\x01\x00\x00") + frame(ChannelResult, 10, `{"code":1}`)))
	f.Add([]byte(frame(ChannelError, 2, "{}")))
	f.Add([]byte(frame(ChannelIn, 1<<20, "a")))
	f.Fuzz(func(t *testing.T, data []byte) { feedAll(t, data) })
}

func feedAll(t *testing.T, data []byte) {
	t.Helper()
	over := time.AfterFunc(time.Minute, func() { panic(fmt.Sprintf("stuck: %q", data)) })
	defer over.Stop()
	c := New(NewReader(bytes.NewReader(data)), io.Discard, Options{Serve: func(context.Context, *Request) (any, error) { return nil, nil }})
	call := c.later(context.Background(), "m")
	for { // it was asked
		c.mu.Lock()
		n := c.last
		c.mu.Unlock()
		if n > 0 {
			break
		}
		time.Sleep(time.Microsecond)
	}
	c.Run(context.Background())
	<-call
	c.Wait()
	s := func() *Stream { return NewStream(closed{}, bufio.NewReader(bytes.NewReader(data))) }
	s().CallCommand(Caller{Stdin: strings.NewReader("x"), Stdout: io.Discard})
	_ = s().ServeCommand(context.Background(), func(ctx context.Context, c Served) (sandboxer.Exit, error) {
		read := make(chan error, 1)
		go func() {
			_, err := io.Copy(io.Discard, c.Stdin)
			read <- err
		}()
		select {
		case err := <-read:
			return sandboxer.Exit{}, err
		case <-ctx.Done():
			return sandboxer.Exit{}, ctx.Err()
		}
	})
	s().CopyTo(io.Discard)
	_, _ = ReadHello(NewReader(bytes.NewReader(data)))
	_, _ = ReadToken(NewReader(bytes.NewReader(data)))
}

type closed struct{}

func (closed) Read([]byte) (int, error)    { return 0, io.EOF }
func (closed) Write(p []byte) (int, error) { return len(p), nil }
func (closed) Close() error                { return nil }

// Ten thousand damaged frames and lines.
func TestTenThousandFrames(t *testing.T) {
	seeds := []string{
		`{"id":1,"result":{"sandbox_id":"x"}}` + "\n", `{"id":1,"error":{"kind":"failed","message":"m"}}` + "\n",
		`{"method":"log","params":{"level":"info","message":"m","attrs":{"a":"b"}}}` + "\n",
		frame(ChannelOut, 3, "abc") + frame(ChannelResult, 10, `{"code":1}`),
		frame(ChannelIn, 3, "abc") + frame(ChannelSignal, 4, "TERM") + frame(ChannelResize, 19, `{"cols":1,"rows":2}`) + frame(ChannelEnd, 0, ""),
	}
	state := uint64(1)
	next := func(n int) int { state = state*6364136223846793005 + 1442695040888963407; return int(state>>33) % n }
	for range 10_000 {
		data := []byte(seeds[next(len(seeds))] + seeds[next(len(seeds))])
		for range 1 + next(4) {
			switch i := next(len(data)); next(3) {
			case 0:
				data[i] = byte(next(256))
			case 1:
				data = append(data[:i:i], data[min(i+next(9), len(data)-1):]...)
			case 2:
				data = append(data[:i:i], append([]byte{byte(next(256))}, data[i:]...)...)
			}
		}
		feedAll(t, data)
	}
}

// A broker that leaves does not end the input: a process that goes on without it would read that as its end.
func TestLeavingIsNoEndOfInput(t *testing.T) {
	here, there := net.Pipe()
	s := NewStream(here, NewReader(here))
	ended := make(chan error, 1)
	go func() {
		ended <- s.ServeCommand(t.Context(), func(ctx context.Context, c Served) (sandboxer.Exit, error) {
			read := make(chan error, 1)
			go func() {
				_, err := io.ReadAll(c.Stdin)
				read <- err
			}()
			<-ctx.Done()
			select {
			case err := <-read:
				return sandboxer.Exit{}, fmt.Errorf("the input has ended: %v", err)
			case <-time.After(50 * time.Millisecond):
				return sandboxer.Exit{}, ctx.Err()
			}
		})
	}()
	there.Close()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

package extensiontest

import (
	"bytes"
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// running is a command that runs while the test does other things.
type running struct {
	cancel context.CancelFunc
	done   chan struct{}
	x      sandboxer.Exit // once done is closed
	err    error

	patience time.Duration
}

// start begins a command, which is canceled at the latest when the test ends.
func (sb *sandbox) start(t *testing.T, cmd sandboxer.Cmd) *running {
	t.Helper()
	c, cancel := context.WithCancel(t.Context())
	r := &running{cancel: cancel, done: make(chan struct{}), patience: sb.s.long()}
	go func() {
		defer close(r.done)
		r.x, r.err = sb.b.Exec(c, sb.h, cmd)
	}()
	t.Cleanup(func() {
		cancel()
		r.wait(t)
	})
	return r
}

// wait waits for the command, which should end now.
func (r *running) wait(t *testing.T) (sandboxer.Exit, error) {
	t.Helper()
	select {
	case <-r.done:
		return r.x, r.err
	case <-time.After(r.patience):
		t.Fatalf("Exec did not return within %s", r.patience)
		return sandboxer.Exit{}, nil
	}
}

// lines is a source of empty lines, some each second.
type lines struct{}

func (lines) Read(p []byte) (int, error) {
	time.Sleep(50 * time.Millisecond)
	return copy(p, "\n"), nil
}

// sleepLength returns a number of seconds that no other command sleeps.
func sleepLength() string { return strconv.Itoa(1_000_000 + rand.IntN(1_000_000_000)) }

// noise returns n bytes in which every value occurs.
func noise(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{1})
	r.Read(b)
	return b
}

// buffer is a bytes.Buffer for concurrent use.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// signalWriter is a buffer that signals when the first byte arrives.
type signalWriter struct {
	buffer
	once  sync.Once
	first chan struct{}
}

func newSignalWriter() (<-chan struct{}, *signalWriter) {
	w := &signalWriter{first: make(chan struct{})}
	return w.first, w
}

func (w *signalWriter) Write(p []byte) (int, error) {
	defer w.once.Do(func() { close(w.first) })
	return w.buffer.Write(p)
}

func await(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(30 * time.Second):
		t.Fatalf("waited 30 s for %s in vain", what)
	}
}

// slowWriter is slow at first, so that the pipes behind it fill up.
type slowWriter struct{ n, calls int }

func (w *slowWriter) Write(p []byte) (int, error) {
	if w.calls++; w.calls < 20 {
		time.Sleep(10 * time.Millisecond)
	}
	w.n += len(p)
	return len(p), nil
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// hiding starts two processes that have left their session, dropped their environment, and one
// of them its parent. It ends once they run what they were started for.
const hiding = `
	setsid env -i sleep $1 >/dev/null 2>&1 </dev/null &
	(setsid env -i sh -c "setsid env -i sleep $1 >/dev/null 2>&1 </dev/null & exit") >/dev/null 2>&1 </dev/null
`

// cancel cancels a command that runs script once n sleeps of length $1 run, of which none may be left.
func (sb *sandbox) cancel(t *testing.T, cmd sandboxer.Cmd, n int, script string) {
	t.Helper()
	seconds := sleepLength()
	cmd.Args = sb.s.script(script, seconds)
	r := sb.start(t, cmd)
	poll(t, "the command to start", sb.s.long(), func() bool { return sb.count(t, seconds) == n })
	r.cancel()
	_, err := r.wait(t)
	wantKind(t, err, "canceled Exec", sandboxer.Canceled)
	if left := sb.count(t, seconds); left != 0 { // now, not soon: Exec promised it
		t.Errorf("%d processes of the canceled command still run inside", left)
	}
	sb.alive(t)
}

// count returns how many processes "sleep seconds" there are inside.
func (sb *sandbox) count(t *testing.T, seconds string) int {
	t.Helper()
	out := sb.sh(t, `
		n=0
		for p in /proc/[0-9]*/cmdline; do
			c=
			read -r c <$p # without the zero bytes between arguments, and without a process for each
			case $c in "sleep$1"|*/"sleep$1") n=$((n+1));; esac
		done 2>/dev/null
		echo $n`, seconds)
	n, err := strconv.Atoi(out)
	if err != nil {
		t.Fatalf("counting processes: %q", out)
	}
	return n
}

package composessh

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// An engine that hangs blocks no caller for long: a waiting call gets an error that names the
// engine; commands in containers go on, and count as unresponsive; other hosts are
// not affected; and once it answers again nothing of it all is left.
func TestEngineHangs(t *testing.T) {
	r := newRig(t, current(t), 1)
	r.addHost(t, "host-2", another(t))
	e := r.opened(t, "hang")
	e.settle, e.every = -time.Second, time.Second
	dir := repo(t, single, nil)
	on := func(id, host string) sandboxer.Spec {
		s := order(id, dir)
		s.Host = host
		return s
	}
	box, _ := provision(t, e, on("box", "host-1"))
	standing, _ := provision(t, e, on("standing", "host-1"))
	beside, _ := provision(t, e, on("beside", "host-2"))
	teardown(t, e, "late")

	out := &signal{begun: make(chan struct{})}
	ended := make(chan error, 1)
	go func() {
		_, err := e.Exec(t.Context(), box, sandboxer.Cmd{Args: []string{"sh", "-c", "echo begun; exec sleep 8736251"}, Stdout: out})
		ended <- err
	}()
	<-out.begun
	resume := engines[0].Hang(t)

	hung := func(what string, err error) {
		t.Helper()
		if sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(err.Error(), "host-1") || !strings.Contains(err.Error(), "engine") || sandboxer.HintOf(err) == "" {
			t.Errorf("%s: %v; want unavailable, the engine and its host, and what to do", what, err)
		}
	}
	var mu sync.Mutex
	var steps []string
	c := sandboxer.WithProgress(t.Context(), func(p sandboxer.Progress) {
		mu.Lock()
		defer mu.Unlock()
		steps = append(steps, p.Step)
	})
	_, err := e.put(c, on("late", "host-1"))
	hung("Provision", err)
	mu.Lock()
	if told := strings.Join(steps, "\n"); !strings.Contains(told, "on host host-1 does not answer") {
		t.Errorf("while it waited it told %q", told)
	}
	mu.Unlock()
	hung("a command under way", <-ended)
	if l, err := e.IsAlive(t.Context(), standing); l != sandboxer.Unresponsive || err != nil {
		t.Errorf("IsAlive = %s, %v; want unresponsive", l, err)
	}
	_, err = e.Teardown(t.Context(), box)
	hung("Teardown", err)
	// Another broker, which knows nothing of it.
	late := r.opened(t, "hang")
	late.every = time.Second
	_, err = late.Exec(t.Context(), standing, sandboxer.Cmd{Args: []string{"true"}})
	hung("Exec of another broker", err)
	if got := run(t, e, beside, "echo works"); got != "works" {
		t.Errorf("on the other host: %q", got)
	}
	if _, err := e.Teardown(t.Context(), beside); err != nil {
		t.Errorf("Teardown on the other host: %v", err)
	}

	resume()
	if n := run(t, e, box, `n=0; for f in /proc/[0-9]*/cmdline; do [ "$(tr '\0' ' ' <$f)" != "sleep 8736251 " ] || n=$((n+1)); done 2>/dev/null; echo $n`); n != "0" {
		t.Errorf("%s processes are left of a command that was given up", n)
	}
	run(t, late, standing, "true")
	for _, h := range []sandboxer.Handle{box, standing, {SandboxID: "late"}} {
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Errorf("Teardown(%s), once it answers again: %v", h.SandboxID, err)
		}
	}
	if left := r.remains(t, "hang"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// signal is an output whose first byte is heard of.
type signal struct {
	once  sync.Once
	begun chan struct{}
}

func (s *signal) Write(p []byte) (int, error) {
	s.once.Do(func() { close(s.begun) })
	return len(p), nil
}

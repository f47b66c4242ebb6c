package extensiontest

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// hang: when the backend of the extension stops answering, every call ends on its own, done
// or Unavailable; nothing is lost by that, and everything goes on once the backend answers again.
func (s *suite) hang(t *testing.T) {
	if s.Hang == nil {
		t.Skip("the harness cannot have the backend hang")
	}
	// The extension itself has to end calls that cannot complete.
	b := backend.New("ext.conformance", s.Open(t), backend.Options{Inputs: s.Inputs, Short: 2 * time.Minute, Close: closeTime})
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	sb := s.upSpec(t, b, s.spec())
	removed := s.upSpec(t, b, s.spec())
	late := s.spec()
	s.owe(t, b, late)
	dir := sb.dir(t)

	resume := sync.OnceFunc(s.Hang(t, sb.h))
	defer resume()
	var mu sync.Mutex
	said := map[string]string{}
	var wg sync.WaitGroup
	try := func(what string, c sandboxer.Capability, f func(context.Context) error) {
		if c != "" && !b.Can(c) {
			return
		}
		wg.Go(func() {
			// No call waits longer than this: Timeout is the answer to a caller whose time is over.
			c, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			err := f(c)
			switch sandboxer.KindOf(err) {
			case "":
			case sandboxer.Unavailable:
				if sandboxer.HintOf(err) == "" {
					t.Errorf("%s: %s: there is no hint what to do", what, describe(err))
				}
			default:
				t.Errorf("%s, with a backend that does not answer: %s; want unavailable, or no error", what, describe(err))
			}
			mu.Lock()
			defer mu.Unlock()
			said[what] = describe(err)
		})
	}
	try("Exec", sandboxer.CanExec, func(c context.Context) error {
		_, err := b.Exec(c, sb.h, sandboxer.Cmd{Args: s.script("true")})
		return err
	})
	try("Exec with a terminal", sandboxer.CanExec, func(c context.Context) error {
		_, err := b.Exec(c, sb.h, sandboxer.Cmd{Args: s.script("true"), TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}})
		return err
	})
	try("WriteFile", sandboxer.CanFiles, func(c context.Context) error {
		return b.WriteFile(c, sb.h, dir+"/written", 0o644, strings.NewReader("x"))
	})
	try("ReadFile", sandboxer.CanFiles, func(c context.Context) error {
		r, err := b.ReadFile(c, sb.h, dir+"/none")
		if err != nil {
			return notFoundIsFine(err)
		}
		_, err = io.Copy(io.Discard, r)
		return notFoundIsFine(errors.Join(err, r.Close()))
	})
	try("StatFile", sandboxer.CanFiles, func(c context.Context) error { return notFoundIsFine(second(b.StatFile(c, sb.h, dir))) })
	try("ListFiles", sandboxer.CanFiles, func(c context.Context) error {
		for _, err := range b.ListFiles(c, sb.h, dir, "") {
			if err != nil {
				return err
			}
		}
		return nil
	})
	try("MakeDir", sandboxer.CanFiles, func(c context.Context) error { return b.MakeDir(c, sb.h, dir+"/made") })
	try("Archive", sandboxer.CanArchive, func(c context.Context) error { return b.Archive(c, sb.h, dir, io.Discard) })
	try("Dial", sandboxer.CanDial, func(c context.Context) error {
		conn, err := b.Dial(c, sb.h, 9)
		if err == nil {
			conn.Close()
		} else if sandboxer.KindOf(err) == sandboxer.Unavailable { // also if nothing listens, which needs no hint
			err = nil
		}
		return err
	})
	try("DialAgent", sandboxer.CanAgent, func(c context.Context) error {
		conn, err := b.DialAgent(c, sb.h)
		if err == nil {
			conn.Close()
		}
		return err
	})
	try("StartProcess", sandboxer.CanProcesses, func(c context.Context) error {
		return second(b.StartProcess(c, sb.h, sandboxer.ProcessSpec{Args: s.script("true")}))
	})
	try("ListProcesses", sandboxer.CanProcesses, func(c context.Context) error { return second(b.ListProcesses(c, sb.h)) })
	try("AttachProcess", sandboxer.CanProcesses, func(c context.Context) error {
		return notFoundIsFine(second(b.AttachProcess(c, sb.h, 1<<22+1, sandboxer.ProcessStreams{})))
	})
	try("WatchFiles", sandboxer.CanWatch, func(c context.Context) error {
		c, end := context.WithCancel(c)
		defer end() // one that began is left
		return second(b.WatchFiles(c, sb.h, dir, false))
	})
	var seen sandboxer.Liveness
	try("IsAlive", sandboxer.CanProbe, func(c context.Context) (err error) {
		seen, err = b.IsAlive(c, sb.h)
		return err
	})
	try("Discover", sandboxer.CanDiscover, func(c context.Context) error { return second(b.Discover(c, sb.spec.ID)) })
	try("ListRunning", sandboxer.CanList, func(c context.Context) error {
		for _, err := range b.ListRunning(c, sb.spec.Owner) {
			if err != nil {
				return err
			}
		}
		return nil
	})
	try("Stats", sandboxer.CanStats, func(c context.Context) error { return second(b.Stats(c, sb.h)) })
	try("Checkpoint", sandboxer.CanCheckpoint, func(c context.Context) error {
		return b.Checkpoint(c, sb.h, func(sandboxer.Contents) io.Writer { return io.Discard })
	})
	try("Pause", sandboxer.CanPause, func(c context.Context) error { return b.Pause(c, removed.h) })
	try("WaitReady", "", func(c context.Context) error { return second(b.WaitReady(c, sb.h)) })
	try("Provision", "", func(c context.Context) error { return second(b.Provision(c, late)) })
	wg.Wait()
	for what, how := range said {
		t.Logf("%s: %s", what, how)
	}
	if seen == sandboxer.Gone || seen == sandboxer.OOMKilled {
		t.Errorf("IsAlive of a sandbox whose backend does not answer: %s", seen)
	}
	try("Teardown", "", func(c context.Context) error { return second(b.Teardown(c, removed.h)) }) // concurrently with a Pause it would be no news
	wg.Wait()
	resume()

	// Nothing of it was lost, and failed requests succeed when they are repeated.
	poll(t, "the sandbox to work again", time.Minute, func() bool {
		if !b.Can(sandboxer.CanExec) {
			return true
		}
		c, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		x, err := b.Exec(c, sb.h, sandboxer.Cmd{Args: s.script("true")})
		if err != nil {
			t.Logf("after it answers again: %s", describe(err))
		}
		return err == nil && x.Code == 0
	})
	sb.alive(t)
	if _, err := b.Teardown(ctx(t), removed.h); err != nil {
		t.Errorf("the teardown that was tried in vain, again: %s", describe(err))
	}
	s.gone(t, b, removed.spec)
}

// notFoundIsFine is for calls on files where only the call matters.
func notFoundIsFine(err error) error {
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil
	}
	return err
}

package extensiontest

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// changes is a watch under way.
type changes struct {
	s    *suite
	mu   sync.Mutex
	got  []sandboxer.FileChange
	err  error
	done chan struct{}
	end  context.CancelFunc
}

func (sb *sandbox) watch(t *testing.T, dir string, recursive bool) *changes {
	t.Helper()
	c, end := context.WithCancel(ctx(t))
	seq, err := sb.b.WatchFiles(c, sb.h, dir, recursive)
	if err != nil {
		end()
		t.Fatalf("WatchFiles(%s): %s", dir, describe(err))
	}
	w := &changes{s: sb.s, done: make(chan struct{}), end: end}
	go func() {
		defer close(w.done)
		for ch, err := range seq {
			w.mu.Lock()
			if err != nil {
				w.err = err
			} else {
				w.got = append(w.got, ch)
			}
			w.mu.Unlock()
		}
	}()
	t.Cleanup(func() { end(); <-w.done })
	return w
}

func (w *changes) has(op sandboxer.FileOp, name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.got, func(c sandboxer.FileChange) bool { return c.Op == op && c.Path == name })
}

func (w *changes) tells(t *testing.T, op sandboxer.FileOp, name string) {
	t.Helper()
	end := time.Now().Add(w.s.Patience)
	for !w.has(op, name) {
		if time.Now().After(end) {
			w.mu.Lock()
			defer w.mu.Unlock()
			t.Fatalf("no %s of %s was reported, only %+v, %v", op, name, w.got, w.err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (s *suite) watching(t *testing.T) {
	sb := s.up(t)
	dir := path.Join(sb.dir(t), "watched")
	other := path.Join(sb.dir(t), "beside")
	sb.sh(t, "mkdir -p $1/deep $2", dir, other)

	s.alone(t, "what happens to a file", func(t *testing.T) {
		w := sb.watch(t, dir, false)
		f := path.Join(dir, "f")
		sb.sh(t, "echo x >$1", f)
		w.tells(t, sandboxer.FileCreate, f)
		w.tells(t, sandboxer.FileWrite, f)
		sb.sh(t, "chmod 600 $1", f)
		w.tells(t, sandboxer.FileChmod, f)
		sb.sh(t, "mv $1 $1.new", f)
		w.tells(t, sandboxer.FileRename, f)
		w.tells(t, sandboxer.FileCreate, f+".new")
		sb.sh(t, "rm $1.new", f)
		w.tells(t, sandboxer.FileRemove, f+".new")
	})

	s.alone(t, "with what the file is", func(t *testing.T) {
		w := sb.watch(t, dir, false)
		f := path.Join(dir, "described")
		sb.sh(t, "printf 12345 >$1; chmod 640 $1", f)
		w.tells(t, sandboxer.FileChmod, f)
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, ch := range w.got {
			if ch.Op == sandboxer.FileChmod && ch.Path == f && (ch.File == nil || ch.File.Size != 5 || ch.File.Mode.Perm() != 0o640 || ch.File.Path != f) {
				t.Errorf("the file of %+v: %+v", ch, ch.File)
			}
		}
	})

	s.alone(t, "every change from the return on", func(t *testing.T) {
		for i := range 20 {
			w := sb.watch(t, dir, false)
			f := path.Join(dir, fmt.Sprint("at-once-", i))
			sb.sh(t, ": >$1", f)
			w.tells(t, sandboxer.FileCreate, f)
			w.end()
		}
	})

	s.alone(t, "below only if asked", func(t *testing.T) {
		flat, deep := sb.watch(t, dir, false), sb.watch(t, dir, true)
		f := path.Join(dir, "deep", "down")
		sb.sh(t, "echo x >$1; mkdir $2/new; echo y >$2/new/g; : >$2/last", f, dir)
		deep.tells(t, sandboxer.FileCreate, f)
		deep.tells(t, sandboxer.FileCreate, path.Join(dir, "new"))
		deep.tells(t, sandboxer.FileCreate, path.Join(dir, "new", "g")) // also of directories that came later
		flat.tells(t, sandboxer.FileCreate, path.Join(dir, "last"))
		if flat.has(sandboxer.FileCreate, f) || flat.has(sandboxer.FileWrite, f) {
			t.Errorf("a watch of one directory reports %s", f)
		}
	})

	s.alone(t, "nothing else", func(t *testing.T) {
		w := sb.watch(t, dir, true)
		sb.sh(t, "echo x >$1/f; : >$2/after", other, dir)
		w.tells(t, sandboxer.FileCreate, path.Join(dir, "after"))
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, ch := range w.got {
			if !strings.HasPrefix(ch.Path, dir+"/") {
				t.Errorf("told of %+v", ch)
			}
		}
	})

	s.alone(t, "names that are no UTF-8", func(t *testing.T) {
		w := sb.watch(t, dir, false)
		sb.sh(t, `cd $1 && : >"$(printf 'caf\351')"`, dir)
		w.tells(t, sandboxer.FileCreate, path.Join(dir, "caf\xe9"))
	})

	s.alone(t, "ends with its context", func(t *testing.T) {
		w := sb.watch(t, dir, false)
		w.end()
		select {
		case <-w.done:
		case <-time.After(s.Patience):
			t.Fatal("the watch does not end")
		}
		wantKind(t, w.err, "the end of a watch that was left", sandboxer.Canceled)
	})

	s.alone(t, "what cannot be watched", func(t *testing.T) {
		_, err := sb.b.WatchFiles(ctx(t), sb.h, path.Join(dir, "no-such"), false)
		wantKind(t, err, "a missing directory", sandboxer.NotFound)
		_, err = sb.b.WatchFiles(ctx(t), sb.h, "/etc/passwd", false)
		wantKind(t, err, "a file", sandboxer.Invalid)
		_, err = sb.b.WatchFiles(ctx(t), sb.h, "relative", false)
		wantKind(t, err, "a relative path", sandboxer.Invalid)
		_, err = sb.b.WatchFiles(ctx(t), sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1}, "/tmp", false)
		wantKind(t, err, "an unknown sandbox", sandboxer.NotFound)
	})

	s.alone(t, "teardown ends it", func(t *testing.T) {
		own := s.up(t)
		w := own.watch(t, own.dir(t), false)
		if _, err := own.b.Teardown(ctx(t), own.h); err != nil {
			t.Fatal(describe(err))
		}
		select {
		case <-w.done:
		case <-time.After(s.Patience):
			t.Fatal("a watch in a sandbox that is gone waits on")
		}
		if w.err == nil {
			t.Error("it ended without an error")
		}
	})
}

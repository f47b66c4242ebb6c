package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// place is a place with a clock of its own, which can be broken.
type broken struct {
	Blobs
	mu     sync.Mutex
	ahead  time.Duration
	put    map[string]time.Duration
	fail   func(n int64, op, name string, after bool) error // may be nil
	ops    atomic.Int64
	change func(name string, data []byte) []byte // what Get returns
}

func newBroken(b Blobs) *broken { return &broken{Blobs: b, put: map[string]time.Duration{}} }

func (b *broken) advance(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ahead += d
}

func (b *broken) step(op, name string, do func() error) error {
	n := b.ops.Add(1)
	if b.fail != nil {
		if err := b.fail(n, op, name, false); err != nil {
			return err
		}
	}
	err := do()
	if b.fail != nil { // also after a step that found nothing
		if e := b.fail(n, op, name, true); e != nil {
			return e
		}
	}
	return err
}

func (b *broken) Put(ctx context.Context, name string, r io.Reader) error {
	return b.step("put", name, func() error {
		err := b.Blobs.Put(ctx, name, r)
		if err == nil {
			b.mu.Lock()
			b.put[name] = b.ahead
			b.mu.Unlock()
		}
		return err
	})
}

func (b *broken) Delete(ctx context.Context, name string) error {
	return b.step("delete", name, func() error { return b.Blobs.Delete(ctx, name) })
}

func (b *broken) Get(ctx context.Context, name string, off, n int64) (r io.ReadCloser, err error) {
	err = b.step("get", name, func() error { r, err = b.Blobs.Get(ctx, name, off, n); return err })
	if err == nil && b.change != nil {
		data, e := io.ReadAll(r)
		_ = r.Close()
		return io.NopCloser(bytes.NewReader(b.change(name, data))), e
	}
	return r, err
}

func (b *broken) later(o Blob) Blob {
	b.mu.Lock()
	defer b.mu.Unlock()
	o.Time = o.Time.Add(b.put[o.Name])
	return o
}

func (b *broken) Stat(ctx context.Context, name string) (o Blob, err error) {
	err = b.step("stat", name, func() error { o, err = b.Blobs.Stat(ctx, name); return err })
	return b.later(o), err
}

func (b *broken) List(ctx context.Context, prefix string) (l []Blob, err error) {
	err = b.step("list", prefix, func() error { l, err = b.Blobs.List(ctx, prefix); return err })
	for i := range l {
		l[i] = b.later(l[i])
	}
	return l, err
}

// noise is an archive of files that do not compress; equal seeds give equal files.
func noise(t testing.TB, seeds ...uint64) []byte {
	var items []item
	for _, s := range seeds {
		data := make([]byte, 300<<10)
		_, _ = rand.NewChaCha8([32]byte{byte(s), byte(s >> 8)}).Read(data)
		items = append(items, item{name: fmt.Sprintf("f%03d", s), body: string(data)})
	}
	return archive(t, items...)
}

func save(t testing.TB, s *Store, id string, in []byte) *Manifest {
	t.Helper()
	m, err := s.Save(t.Context(), id, Meta{}, bytes.NewReader(in), SaveOptions{})
	if err != nil {
		t.Fatalf("Save %s: %v", id, err)
	}
	return m
}

func gc(t testing.TB, s *Store) Collection {
	t.Helper()
	c, err := s.GC(t.Context())
	if err != nil {
		t.Fatalf("GC: %v", err)
	}
	return c
}

func objects(t testing.TB, b Blobs) string {
	t.Helper()
	list, err := b.List(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, o := range list {
		names = append(names, o.Name)
	}
	return strings.Join(names, "\n")
}

const day = 24 * time.Hour

func TestGC(t *testing.T) {
	for _, e := range encodings {
		t.Run(string(e), func(t *testing.T) {
			b := newBroken(newDir(t))
			s := newStore(t, b, Options{Encoding: e, Lease: 48 * time.Hour})
			one, two := noise(t, 1, 2), noise(t, 2, 3)
			save(t, s, "one", one)
			save(t, s, "two", two)
			save(t, s, "three", noise(t, 9))
			for range 4 {
				b.advance(2 * day)
				if c := gc(t, s); c != (Collection{}) {
					t.Fatalf("with nothing dropped, GC did %+v", c)
				}
			}
			// A reader that began before the drop reads to the end.
			_, r, err := s.Open(t.Context(), "one")
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Pin(t.Context(), "three", "restore-7", time.Time{}); err != nil {
				t.Fatal(err)
			}
			b.mu.Lock()
			ahead := b.ahead // the pin of Open is by our own clock: let the place's agree
			b.ahead = 0
			b.mu.Unlock()
			for _, id := range []string{"one", "three"} {
				if err := s.Drop(t.Context(), id); err != nil {
					t.Fatal(err)
				}
			}
			b.advance(day)
			for range 3 {
				if c := gc(t, s); c.Deleted != 0 || c.Kept != 2 {
					t.Fatalf("GC beside a reader did %+v; want both kept", c)
				}
			}
			if data, err := io.ReadAll(r); err != nil || len(data) < len(one) {
				t.Fatalf("reading what was dropped meanwhile: %d bytes, %v", len(data), err)
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			b.advance(ahead)
			var deleted, runs int
			var freed int64
			for range 8 {
				b.advance(day)
				c := gc(t, s)
				deleted, freed, runs = deleted+c.Deleted, freed+c.Bytes, runs+1
			}
			if deleted != 1 || freed < 500<<10 && e == Stream {
				t.Errorf("%d checkpoints and %d bytes deleted; want one", deleted, freed)
			}
			if got := readAll(t, s, "two"); len(got) < len(two) {
				t.Errorf("two has %d bytes left", len(got))
			}
			// A durable pin holds for years, and a broker that comes later takes it back.
			b.advance(365 * day)
			if c := gc(t, s); c.Kept != 1 {
				t.Errorf("GC a year later did %+v; want three kept", c)
			}
			later := newStore(t, b, Options{Encoding: e})
			if err := later.Unpin(t.Context(), "three", "restore-7"); err != nil {
				t.Fatal(err)
			}
			if err := later.Drop(t.Context(), "two"); err != nil {
				t.Fatal(err)
			}
			for range 8 {
				b.advance(day)
				gc(t, later)
			}
			if left := objects(t, b); left != "" {
				t.Errorf("after everything was dropped, there is still\n%s", left)
			}
			// Both stores go on.
			save(t, s, "four", one)
			save(t, later, "five", two)
			if len(readAll(t, later, "four")) == 0 {
				t.Error("four is empty")
			}
		})
	}
}

var errCrash = errors.New("the broker ends here")

// newMemoryDir is newDir without the wait for a disk, where that is possible: only the broker
// dies in these tests, never the machine.
func newMemoryDir(t testing.TB) *Dir {
	t.Helper()
	path, err := os.MkdirTemp("/dev/shm", "sandboxer-checkpoint-")
	if err != nil {
		return newDir(t)
	}
	t.Cleanup(func() { _ = os.RemoveAll(path) })
	d, err := OpenDir(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// TestEndAnywhere ends a broker at every step of saving, dropping and collecting,
// before and after the step took effect, and looks at what the next one finds.
func TestEndAnywhere(t *testing.T) {
	base, next := noise(t, 1, 2), noise(t, 2, 3)
	for _, e := range encodings {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/after=%t", e, after), func(t *testing.T) {
				t.Parallel()
				stride := int64(1)
				if testing.Short() {
					stride = 7
				}
				for at := int64(1); ; at += stride {
					dir := newMemoryDir(t)
					b := newBroken(dir)
					s := newStore(t, b, Options{Encoding: e})
					want := save(t, s, "base", base).Payload.Digest
					save(t, s, "gone", noise(t, 4))
					if err := s.Drop(t.Context(), "gone"); err != nil {
						t.Fatal(err)
					}
					b.advance(2 * day)
					b.ops.Store(0)
					b.fail = func(n int64, _, _ string, done bool) error {
						if n > at || n == at && done == after {
							return errCrash
						}
						return nil
					}
					// The work: a save, and garbage collections around it.
					work := func() error {
						if _, err := s.GC(t.Context()); err != nil {
							return err
						}
						b.advance(day)
						if _, err := s.Save(t.Context(), "next", Meta{}, bytes.NewReader(next), SaveOptions{}); err != nil {
							return err
						}
						if err := s.Drop(t.Context(), "next"); err != nil {
							return err
						}
						b.advance(day)
						_, err := s.GC(t.Context())
						return err
					}
					err := work()
					ended := b.ops.Load() < at
					if err == nil && !ended && !after {
						t.Errorf("at step %d nothing failed", at)
					}
					b.fail = nil
					s2 := newStore(t, b, Options{Encoding: e})
					list, err := s2.List(t.Context())
					if err != nil {
						t.Fatalf("step %d: List: %v", at, err)
					}
					for _, m := range list { // whatever is listed can be read
						readAll(t, s2, m.ID)
					}
					if err := s2.Drop(t.Context(), "next"); err != nil {
						t.Fatal(err)
					}
					for range 9 {
						b.advance(day)
						gc(t, s2)
					}
					if m, err := s2.Get(t.Context(), "base"); err != nil || m.Payload.Digest != want {
						t.Fatalf("step %d: base is lost: %v", at, err)
					}
					readAll(t, s2, "base")
					if err := s2.Drop(t.Context(), "base"); err != nil {
						t.Fatal(err)
					}
					for range 9 {
						b.advance(day)
						gc(t, s2)
					}
					if left := objects(t, b); left != "" {
						t.Fatalf("step %d: in the end there is still\n%s", at, left)
					}
					if ended {
						t.Logf("%d steps", at-1)
						return
					}
				}
			})
		}
	}
}

// A new checkpoint that shares chunks with one that is being deleted is either whole or
// refused, wherever the two meet.
func TestSaveBesideGC(t *testing.T) {
	one := noise(t, 1, 2)
	refused, meetings := 0, 0
	for at := int64(1); ; at++ {
		b := newBroken(newMemoryDir(t))
		saver, collector := newStore(t, b, Options{}), newStore(t, b, Options{})
		save(t, saver, "old", one)
		if err := saver.Drop(t.Context(), "old"); err != nil {
			t.Fatal(err)
		}
		b.advance(2 * day)
		gc(t, collector)
		b.ops.Store(0)
		met := false
		b.fail = func(n int64, _, _ string, after bool) error {
			if n != at || after || met {
				return nil
			}
			met = true
			b.fail = nil
			for range 2 { // in the midst of the save: condemn, and delete
				if _, err := collector.GC(t.Context()); err != nil {
					return err
				}
				b.advance(2 * day)
			}
			_, err := collector.GC(t.Context())
			return err
		}
		m, err := saver.Save(t.Context(), "new", Meta{}, bytes.NewReader(one), SaveOptions{})
		b.fail = nil
		if !met {
			break
		}
		meetings++
		if err != nil {
			refused++
			wantKind(t, err, sandboxer.Unavailable, sandboxer.Failed)
			if m, err = saver.Save(t.Context(), "new", Meta{}, bytes.NewReader(one), SaveOptions{}); err != nil {
				t.Fatalf("step %d: the second try: %v", at, err)
			}
		}
		for range 4 {
			b.advance(day)
			gc(t, collector)
		}
		if got := readAll(t, newStore(t, b, Options{}), "new"); int64(len(got)) != m.Payload.Size {
			t.Fatalf("step %d: new has %d bytes; want %d", at, len(got), m.Payload.Size)
		}
	}
	t.Logf("%d meetings, %d refused the first time", meetings, refused)
}

// What comes back changed is never sealed, and never given out later.
func TestChanged(t *testing.T) {
	for _, e := range encodings {
		for what, change := range map[string]func([]byte) []byte{
			"flipped": func(d []byte) []byte { d[len(d)/2] ^= 1; return d },
			"cut":     func(d []byte) []byte { return d[:len(d)/2] },
			"missing": func(d []byte) []byte { return nil },
			"longer":  func(d []byte) []byte { return append(d, d...) },
		} {
			t.Run(string(e)+"/"+what, func(t *testing.T) {
				b := newBroken(newDir(t))
				s := newStore(t, b, Options{Encoding: e})
				save(t, s, "good", noise(t, 1))
				b.change = func(name string, d []byte) []byte {
					if strings.HasPrefix(name, packPrefix) || strings.HasPrefix(name, streamPrefix) {
						return change(d)
					}
					return d
				}
				_, err := s.Save(t.Context(), "bad", Meta{}, bytes.NewReader(noise(t, 5)), SaveOptions{})
				if what == "longer" && e == Chunks {
					// A pack is read by ranges: what follows is not looked at.
					if err != nil {
						t.Fatal(err)
					}
					return
				}
				wantKind(t, err, sandboxer.Failed)
				_, r, err := s.Open(t.Context(), "good")
				if err == nil {
					_, err = io.Copy(io.Discard, r)
					_ = r.Close()
				}
				wantKind(t, err, sandboxer.Failed)
				b.change = nil
				_, _, err = s.Open(t.Context(), "bad")
				wantKind(t, err, sandboxer.NotFound)
				if list, err := s.List(t.Context()); err != nil || len(list) != 1 {
					t.Errorf("List = %v, %v; want the good one", list, err)
				}
			})
		}
	}
}

// Between its pending record and its seal a checkpoint cannot be opened.
func TestUnsealed(t *testing.T) {
	b := newBroken(newDir(t))
	s := newStore(t, b, Options{})
	b.fail = func(_ int64, op, name string, _ bool) error {
		if name == checkpointPrefix+"one" && op == "put" || op == "delete" && strings.HasPrefix(name, pendingPrefix) {
			return errCrash
		}
		return nil
	}
	_, err := s.Save(t.Context(), "one", Meta{}, bytes.NewReader(noise(t, 1)), SaveOptions{})
	if !errors.Is(err, errCrash) {
		t.Fatalf("Save = %v; want the crash", err)
	}
	_, _, err = s.Open(t.Context(), "one")
	wantKind(t, err, sandboxer.NotFound)
	if !strings.Contains(err.Error(), "not sealed") {
		t.Errorf("Open = %v; want that it is not sealed", err)
	}
	b.fail = nil
	save(t, s, "one", noise(t, 1)) // and it may be saved after all
	readAll(t, s, "one")
}

const killEnv = "CHECKPOINT_TEST_KILL"

// TestKill kills a real process, with its files as they are, in the middle of a save.
func TestKill(t *testing.T) {
	if v := os.Getenv(killEnv); v != "" {
		dir, step, _ := strings.Cut(v, "|")
		at, _ := strconv.ParseInt(step, 10, 64)
		d, err := OpenDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		b := newBroken(d)
		s := newStore(t, b, Options{})
		b.fail = func(n int64, _, _ string, after bool) error {
			if n == at && after {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
			return nil
		}
		save(t, s, "one", noise(t, 1, 2, 3))
		return
	}
	if testing.Short() {
		t.Skip("starts processes")
	}
	kills := 0
	for at := 1; ; at++ {
		dir := t.TempDir()
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKill$")
		cmd.Env = append(os.Environ(), killEnv+"="+dir+"|"+strconv.Itoa(at), "TMPDIR="+t.TempDir()) // which the dead cannot clear
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil {
			ws, ok := syscall.WaitStatus(0), errors.As(err, &exit)
			if ok {
				ws, ok = exit.Sys().(syscall.WaitStatus)
			}
			if !ok || !ws.Signaled() || ws.Signal() != syscall.SIGKILL {
				t.Fatalf("step %d: %v, not killed: %s", at, err, out)
			}
			kills++
		}
		d, e := OpenDir(dir)
		if e != nil {
			t.Fatal(e)
		}
		s := newStore(t, d, Options{})
		list, e := s.List(t.Context())
		if e != nil {
			t.Fatal(e)
		}
		for _, m := range list {
			readAll(t, s, m.ID)
		}
		if len(list) == 0 {
			save(t, s, "one", noise(t, 1, 2, 3))
		}
		readAll(t, s, "one")
		_ = d.Close()
		if err == nil { // it lived to the end
			// Two lists of what is there, the three of the index, two packs or one with
			// their indexes, and the steps of sealing.
			if kills < 12 {
				t.Errorf("killed %d times; want one for every step of a save, 12 at least", kills)
			}
			t.Logf("killed %d times", kills)
			return
		}
	}
}

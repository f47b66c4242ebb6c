package process_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/adapters/process"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/manager"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
)

// breakages are what extensions have come to that worked once: to die at their start, to say nothing at all, and to
// say hello and answer nothing.
var breakages = []string{"die", "silent", "mute"}

// A street is the real manager with a healthy extension and broken ones.
type street struct {
	*manager.Manager
	ctx    context.Context
	broken []string // profiles
	starts []string // files with a line for each start
	close  func() error
}

func newStreet(t testing.TB, broken ...string) *street {
	t.Helper()
	s := &street{ctx: sandboxer.WithPrincipal(context.WithoutCancel(t.Context()), sandboxer.Principal{Tenant: "t", Scopes: sandboxer.Scopes()})}
	w := fake.NewWorld()
	var exts []manager.Extension
	var profiles []sandboxer.Profile
	add := func(name string, ext sandboxer.Extension, isolation []sandboxer.Isolation) string {
		b := backend.New("ext."+name, ext, backend.Options{Close: time.Minute})
		exts = append(exts, manager.Extension{Backend: b, Info: sandboxer.ExtensionInfo{ID: "ext." + name, Isolation: isolation, Capabilities: b.Capabilities()}})
		profiles = append(profiles, sandboxer.Profile{ID: "profile." + name, Extension: "ext." + name, TTL: time.Hour})
		return "profile." + name
	}
	add("healthy", fake.New(w, fake.Config{Owner: "o"}), fake.Adapter.Isolation)
	for _, how := range broken {
		dir := t.TempDir()
		open := func() sandboxer.Extension {
			ext, err := openProgram(t, dir, "o", sandboxer.Program{Command: []string{self(t), "evil"}}, map[string]any{"start": "neighbour"})
			if err != nil {
				t.Fatal(err)
			}
			return ext
		}
		if err := errors.Join(open().(io.Closer).Close(), os.WriteFile(filepath.Join(dir, "now"), []byte(how), 0o600)); err != nil {
			t.Fatal(err)
		}
		s.broken = append(s.broken, add(how, open(), process.Adapter.Isolation))
		s.starts = append(s.starts, filepath.Join(dir, "starts"))
	}
	store, err := sqlstore.OpenSQLite(s.ctx, t.TempDir(), sqlstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	s.Manager, err = manager.New(store, profiles, exts, manager.Options{Owner: "o", Key: bytes.Repeat([]byte{7}, 32), Log: slog.New(slog.DiscardHandler)})
	if err == nil {
		err = s.Start(s.ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.close = sync.OnceValue(func() error {
		err := s.Manager.Close()
		for _, x := range exts {
			err = errors.Join(err, x.Backend.Close())
		}
		w.Close()
		return errors.Join(err, store.Close())
	})
	t.Cleanup(func() { _ = s.close() })
	return s
}

// live has a sandbox of the healthy extension made and destroyed, and returns how long its create took.
func (s *street) live(t testing.TB) time.Duration {
	t.Helper()
	began := time.Now()
	sb, err := s.Create(s.ctx, sandboxer.CreateRequest{Profile: "profile.healthy"})
	took := time.Since(began)
	if err == nil {
		_, err = s.Destroy(s.ctx, sb.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
	return took
}

// want has sandboxes of the broken extensions asked for, one of each a turn, whose callers wait no longer than patience,
// until stop is called, which waits for all of them.
func (s *street) want(patience time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(s.ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			for _, profile := range s.broken {
				id := sandboxer.NewID()
				wg.Go(func() {
					waits, cancel := context.WithTimeout(ctx, patience)
					defer cancel()
					_, _ = s.Create(waits, sandboxer.CreateRequest{Profile: profile, Inputs: map[string]string{"sandbox_id": id}})
					_, _ = s.Destroy(waits, id)
				})
			}
			select {
			case <-time.After(patience):
			case <-ctx.Done():
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}

// Broken extensions do not block the others: creates, the sweep and the end of the server go on.
func TestBrokenNeighbours(t *testing.T) {
	s := newStreet(t, breakages...)
	stop := s.want(50 * time.Millisecond)
	for range 20 {
		s.live(t)
	}
	sb, err := s.Create(s.ctx, sandboxer.CreateRequest{Profile: "profile.healthy", TTL: time.Second})
	if err == nil {
		_, err = s.Wait(s.ctx, sb.ID, sandboxer.Terminated) // the sweep does that
	}
	if err != nil {
		t.Error(err)
	}
	stop()
	for _, file := range s.starts {
		if data, err := os.ReadFile(file); bytes.Count(data, []byte("\n")) < 2 { // the first said what it is
			t.Errorf("nobody asked for a broken one: %q, %v", data, err)
		}
	}
	if err := s.close(); err != nil {
		t.Error(err)
	}
}

// BenchmarkNeighbours reports how long creates of a healthy extension take through the real manager while broken ones are asked for
// a few times a second and started again and again, compared with a server that has no broken ones.
func BenchmarkNeighbours(b *testing.B) {
	took := make([][]float64, 2)
	for range 6 {
		for i, broken := range [][]string{nil, breakages} {
			s := newStreet(b, broken...)
			s.live(b)
			stop := s.want(200 * time.Millisecond)
			for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
				took[i] = append(took[i], float64(s.live(b)))
			}
			stop()
			_ = s.close()
		}
	}
	for i := range took {
		slices.Sort(took[i])
	}
	alone, beside := took[0][len(took[0])/2], took[1][len(took[1])/2]
	b.ReportMetric(beside/alone, "beside/alone")
	b.ReportMetric(alone/1e6, "alone-ms")
	b.ReportMetric(float64(len(took[0])), "creates")
	b.ReportMetric(0, "ns/op")
}

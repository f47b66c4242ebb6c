package s3

import (
	"archive/tar"
	"bytes"
	"crypto/ed25519"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/checkpoint"
)

func bucketServer(t *testing.T) http.Handler {
	t.Helper()
	backend := s3mem.New()
	if err := backend.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	return gofakes3.New(backend).Server()
}

func newBucket(t *testing.T) *Bucket {
	t.Helper()
	srv := httptest.NewServer(bucketServer(t))
	t.Cleanup(srv.Close)
	b, err := Open(t.Context(), Config{Endpoint: srv.URL, Region: "us-east-1", Bucket: "bucket", Prefix: "a/b", AccessKey: "key", SecretKey: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func wantKind(t *testing.T, err error, want sandboxer.Kind) {
	t.Helper()
	if sandboxer.KindOf(err) != want {
		t.Fatalf("error = %v (%s); want %s", err, sandboxer.KindOf(err), want)
	}
}

func TestBlobs(t *testing.T) {
	b := newBucket(t)
	ctx := t.Context()
	large := make([]byte, 2*partSize+12345)
	_, _ = rand.NewChaCha8([32]byte{}).Read(large)
	for name, data := range map[string][]byte{"x/one": []byte("1"), "x/small": []byte("hello"), "y/large": large} {
		if err := b.Put(ctx, name, bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
		wantKind(t, b.Put(ctx, name, strings.NewReader("other")), sandboxer.Conflict)
		wantKind(t, b.Put(ctx, name, bytes.NewReader(large)), sandboxer.Conflict)
		if s, err := b.Stat(ctx, name); err != nil || s.Size != int64(len(data)) || time.Since(s.Time).Abs() > time.Minute {
			t.Errorf("Stat(%s) = %+v, %v", name, s, err)
		}
		for _, r := range [][2]int64{{0, -1}, {0, 3}, {2, 2}, {1, -1}, {0, 0}} {
			if int64(len(data)) < r[0]+max(r[1], 1) {
				continue
			}
			want := data[r[0]:]
			if r[1] >= 0 {
				want = want[:r[1]]
			}
			rd, err := b.Get(ctx, name, r[0], r[1])
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(rd)
			_ = rd.Close()
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("Get(%s, %v) = %d bytes, %v; want %d", name, r, len(got), err, len(want))
			}
		}
	}
	broken := errors.New("broken")
	for _, n := range []int64{10, 2 * partSize} {
		err := b.Put(ctx, "z", io.MultiReader(io.LimitReader(zero{}, n), failing{broken}))
		if !errors.Is(err, broken) {
			t.Errorf("Put of a broken reader = %v", err)
		}
		_, err = b.Stat(ctx, "z")
		wantKind(t, err, sandboxer.NotFound)
	}
	_, err := b.Get(ctx, "none", 0, -1)
	wantKind(t, err, sandboxer.NotFound)
	if list, err := b.List(ctx, "x/"); err != nil || len(list) != 2 {
		t.Errorf("List = %v, %v; want two", list, err)
	}
	for range 2 {
		if err := b.Delete(ctx, "x/small"); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Tidy(ctx, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
}

type zero struct{}

func (zero) Read(p []byte) (int, error) { clear(p); return len(p), nil }

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestStore(t *testing.T) {
	for _, e := range []checkpoint.Encoding{checkpoint.Chunks, checkpoint.Stream} {
		t.Run(string(e), func(t *testing.T) {
			b := newBucket(t)
			key := ed25519.NewKeyFromSeed(make([]byte, 32))
			s, err := checkpoint.New(b, key, checkpoint.Options{Encoding: e, SpoolDir: t.TempDir(), Grace: time.Nanosecond})
			if err != nil {
				t.Fatal(err)
			}
			data := make([]byte, 40<<20) // more than a pack, and a part
			_, _ = rand.NewChaCha8([32]byte{2}).Read(data)
			var in bytes.Buffer
			w := tar.NewWriter(&in)
			_ = w.WriteHeader(&tar.Header{Name: "f", Mode: 0o644, Size: int64(len(data)), Typeflag: tar.TypeReg})
			_, _ = w.Write(data)
			_ = w.Close()
			keep, err := checkpoint.New(b, key, checkpoint.Options{Encoding: e, SpoolDir: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := keep.Save(t.Context(), "one", checkpoint.Meta{}, &in, checkpoint.SaveOptions{}); err != nil {
				t.Fatal(err)
			}
			_, r, err := keep.OpenFile(t.Context(), "one", "f")
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(r)
			if err = errors.Join(err, r.Close()); err != nil || !bytes.Equal(got, data) {
				t.Fatalf("f = %d bytes, %v", len(got), err)
			}
			if err := keep.Drop(t.Context(), "one"); err != nil {
				t.Fatal(err)
			}
			for range 4 { // what is there has a time in whole seconds: wait for the next
				time.Sleep(1100 * time.Millisecond)
				if _, err := s.GC(t.Context()); err != nil && sandboxer.KindOf(err) != sandboxer.Timeout {
					t.Fatal(err)
				}
			}
		})
	}
}

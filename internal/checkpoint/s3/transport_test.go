package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/sand-boxer/sandboxer"
)

func stallAfter(t *testing.T, d time.Duration) {
	was := stall
	stall = d
	t.Cleanup(func() { stall = was })
}

// mute listens, takes connections and what is sent for as long as takes allows, and says nothing.
func mute(t *testing.T, takes int64) (addr string, connections *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	connections = new(atomic.Int64)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			connections.Add(1)
			go func() { _, _ = io.CopyN(io.Discard, c, takes) }()
			t.Cleanup(func() { c.Close() })
		}
	}()
	return l.Addr().String(), connections
}

func at(addr string) Config {
	return Config{Endpoint: "http://" + addr, Region: "us-east-1", Bucket: "bucket", AccessKey: "key", SecretKey: "secret"}
}

// The library waits seconds between its attempts, which these tests need not.
func TestMain(m *testing.M) {
	minio.DefaultRetryUnit, minio.DefaultRetryCap = 2*time.Millisecond, 10*time.Millisecond
	os.Exit(m.Run())
}

// Only our own time limit ends a request to a store that takes connections and does not answer.
func TestNoAnswer(t *testing.T) {
	stallAfter(t, 50*time.Millisecond)
	addr, connections := mute(t, 1<<40)
	_, err := Open(t.Context(), at(addr))
	if !errors.Is(err, sandboxer.Unavailable) || !errors.Is(err, errStalled) || !strings.Contains(sandboxer.Message(err), "nothing moved") {
		t.Errorf("Open = %v", err)
	}
	if n := connections.Load(); n != attempts {
		t.Errorf("%d attempts, want %d", n, attempts)
	}

	// Who has left waits no longer at all.
	stallAfter(t, time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	before := connections.Load()
	go func() {
		for connections.Load() == before {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	if _, err := Open(ctx, at(addr)); !errors.Is(err, context.Canceled) {
		t.Errorf("Open for somebody who left = %v", err)
	}
}

// hold answers as a bucket does until it has a way of its own.
type hold struct {
	bucket http.Handler
	way    atomic.Pointer[func(http.ResponseWriter, *http.Request)]
}

func (h *hold) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if way := h.way.Load(); way != nil {
		(*way)(w, r)
		return
	}
	h.bucket.ServeHTTP(w, r)
}

// A transfer that stalls is cut, whichever way it goes.
func TestStandsStill(t *testing.T) {
	h := &hold{bucket: bucketServer(t)}
	srv := httptest.NewServer(h)
	b, err := Open(t.Context(), at(srv.Listener.Addr().String()))
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	t.Cleanup(func() { close(over); srv.CloseClientConnections(); srv.Close() })
	stallAfter(t, 100*time.Millisecond)
	hang := func(f func(w http.ResponseWriter, r *http.Request)) { h.way.Store(&f) }
	stalled := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, sandboxer.Unavailable) || !errors.Is(err, errStalled) {
			t.Errorf("%s = %v", what, err)
		}
	}

	hang(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		w.Header().Set("ETag", `"x"`)
		w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
		_, _ = w.Write([]byte("some"))
		_ = http.NewResponseController(w).Flush()
		<-over
	})
	r, err := b.Get(t.Context(), "one", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	stalled("reading", err)
	if string(got) != "some" {
		t.Errorf("read %q", got)
	}
	_ = r.Close()

	hang(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `<?xml version="1.0"?><ListBucketResult><Name>bucket</Name>`)
		_ = http.NewResponseController(w).Flush()
		<-over
	})
	_, err = b.List(t.Context(), "")
	stalled("List", err)

	hang(func(http.ResponseWriter, *http.Request) { <-over })
	_, err = b.Stat(t.Context(), "one")
	stalled("Stat", err)
	stalled("Delete", b.Delete(t.Context(), "one"))
	stalled("Tidy", b.Tidy(t.Context(), time.Now()))

	// It takes a piece of what is put, which is more than the buffers in between hold, and no more.
	addr, connections := mute(t, 1<<10)
	c := *b
	if c.c, err = newClient(at(addr)); err != nil {
		t.Fatal(err)
	}
	stalled("Put", c.Put(t.Context(), "large", bytes.NewReader(make([]byte, partSize-1))))
	if n := connections.Load(); n != attempts {
		t.Errorf("%d attempts to put, want %d", n, attempts)
	}
}

// A service that is busy for a moment is asked again, more often than one that says nothing.
func TestBusy(t *testing.T) {
	h := &hold{bucket: bucketServer(t)}
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	b, err := Open(t.Context(), at(srv.Listener.Addr().String()))
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int32
	busy := func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) <= 2*attempts {
			w.Header().Set("Content-Type", "application/xml")
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprint(w, `<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>busy</Message></Error>`)
			return
		}
		h.bucket.ServeHTTP(w, r)
	}
	h.way.Store(&busy)
	if err := b.Put(t.Context(), "patient", strings.NewReader("x")); err != nil {
		t.Errorf("Put to a busy service, asked %d times: %v", asked.Load(), err)
	}
}

// slowly passes one byte of each read after a time.
type slowly struct {
	r io.Reader
	d time.Duration
}

func (s slowly) Read(p []byte) (int, error) {
	time.Sleep(s.d)
	return s.r.Read(p[:min(len(p), 1)])
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A transfer that moves goes on, however long it takes, and a reader may take its time.
func TestSlowTransfersGoOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rt := transport{roundTrip(func(r *http.Request) (*http.Response, error) {
			got, err := io.ReadAll(slowly{r.Body, stall - time.Second})
			if err != nil || r.Context().Err() != nil {
				return nil, errors.Join(err, context.Cause(r.Context()))
			}
			time.Sleep(stall - time.Second) // it thinks about it
			return &http.Response{StatusCode: 200, Body: io.NopCloser(slowly{bytes.NewReader(got), stall - time.Second})}, nil
		})}
		text := strings.Repeat("x", 20)
		req, err := http.NewRequestWithContext(t.Context(), "PUT", "http://x/", strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		res, err := rt.RoundTrip(req)
		if err != nil {
			t.Fatalf("after %s: %v", time.Since(began), err)
		}
		var got []byte
		for range len(text) {
			time.Sleep(10 * stall) // somebody else's matter
			p := make([]byte, 1)
			if _, err := io.ReadFull(res.Body, p); err != nil {
				t.Fatalf("after %s and %q: %v", time.Since(began), got, err)
			}
			got = append(got, p...)
		}
		if err := res.Body.Close(); err != nil || string(got) != text {
			t.Errorf("got %q, %v", got, err)
		}
	})
}

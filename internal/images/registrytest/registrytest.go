// Package registrytest is a real registry on loopback, for tests, that can also
// fail as registries and connections to them do.
package registrytest

import (
	"encoding/base64"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// Server is a registry. Its fields may be changed between requests, under Mu.
type Server struct {
	Host string // host:port

	Mu       sync.Mutex
	Auth     string // "", "basic" or "token"
	User     string
	Password string // also the identity token
	// Reply, if set, is asked before a GET is answered; true means that it did answer.
	Reply func(w http.ResponseWriter, r *http.Request) bool
	// Saw, if set, gets every request before it is handled.
	Saw func(r *http.Request)
	// Cut ends the body of a blob after that many bytes, with the connection; 0 never.
	Cut int64
	// Slow is the time between two pieces of 64 KiB of a blob's body.
	Slow time.Duration
	// NoRange ignores the Range header.
	NoRange bool
	// Spoil flips a bit in every blob's body.
	Spoil bool

	requests []string // "GET /v2/… bytes=…"
	sent     int64    // bytes of blobs

	real http.Handler
}

// New starts a registry that ends with the test.
func New(t testing.TB) *Server {
	s := &Server{real: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	h := httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(func() {
		h.CloseClientConnections()
		h.Close()
	})
	s.Host = strings.TrimPrefix(h.URL, "http://")
	return s
}

// Push stores an image or an index under host/ref and returns that name.
func (s *Server) Push(t testing.TB, ref string, what any) string {
	t.Helper()
	r, err := name.ParseReference(s.Host + "/" + ref)
	if err != nil {
		t.Fatal(err)
	}
	// Not over the network, where the server may be set to fail.
	inside := remote.WithTransport(direct{s.real})
	switch v := what.(type) {
	case v1.Image:
		err = remote.Write(r, v, inside)
	case v1.ImageIndex:
		err = remote.WriteIndex(r, v, inside)
	default:
		t.Fatalf("%T is not pushed", what)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s.Host + "/" + ref
}

type direct struct{ h http.Handler }

func (d direct) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body == nil {
		req.Body = http.NoBody
	}
	rec := httptest.NewRecorder()
	d.h.ServeHTTP(rec, req)
	resp := rec.Result()
	resp.Request = req
	return resp, nil
}

// Requests returns what was asked since the last call: method, path and range.
func (s *Server) Requests() []string {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	out := s.requests
	s.requests = nil
	return out
}

// Sent returns how many bytes of blobs were sent.
func (s *Server) Sent() int64 {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.sent
}

// Set changes the server's fields.
func (s *Server) Set(change func(*Server)) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	change(s)
}

const token = "token-of-the-test"

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	s.Mu.Lock()
	auth, reply := s.Auth, s.Reply
	if s.Saw != nil {
		s.Saw(r)
	}
	s.requests = append(s.requests, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+r.Header.Get("Range")))
	if s.NoRange {
		r.Header.Del("Range")
	}
	s.Mu.Unlock()
	if r.URL.Path == "/token" {
		s.giveToken(w, r)
		return
	}
	want, challenge := "", ""
	switch auth {
	case "basic":
		want, challenge = "Basic "+base64.StdEncoding.EncodeToString([]byte(s.User+":"+s.Password)), `Basic realm="test"`
	case "token":
		want, challenge = "Bearer "+token, fmt.Sprintf(`Bearer realm="http://%s/token",service="test"`, s.Host)
	}
	if want != "" && r.Header.Get("Authorization") != want {
		w.Header().Set("WWW-Authenticate", challenge)
		http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}`, http.StatusUnauthorized)
		return
	}
	if reply != nil && reply(w, r) {
		return
	}
	if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
		w = &line{ResponseWriter: w, s: s}
	}
	s.real.ServeHTTP(w, r)
}

func (s *Server) giveToken(w http.ResponseWriter, r *http.Request) {
	user, pass, _ := r.BasicAuth()
	r.ParseForm()
	refresh := r.Form.Get("refresh_token")
	if (user != s.User || pass != s.Password) && refresh != s.Password {
		http.Error(w, `{"errors":[{"code":"DENIED","message":"wrong user or password"}]}`, http.StatusUnauthorized)
		return
	}
	fmt.Fprintf(w, `{"token":%q,"access_token":%q}`, token, token)
}

// line is a connection that sends a blob.
type line struct {
	http.ResponseWriter
	s *Server
	n int64
}

func (l *line) Write(p []byte) (int, error) {
	l.s.Mu.Lock()
	cut, slow, spoil := l.s.Cut, l.s.Slow, l.s.Spoil
	l.s.Mu.Unlock()
	if spoil && len(p) > 0 {
		p = append([]byte(nil), p...)
		p[len(p)/2] ^= 1
	}
	total := 0
	for len(p) > 0 {
		piece := p[:min(len(p), 64<<10)]
		if cut > 0 && l.n+int64(len(piece)) > cut {
			piece = piece[:cut-l.n]
		}
		n, err := l.ResponseWriter.Write(piece)
		l.n += int64(n)
		total += n
		l.s.Mu.Lock()
		l.s.sent += int64(n)
		l.s.Mu.Unlock()
		if err != nil {
			return total, err
		}
		if cut > 0 && l.n >= cut {
			if f, ok := l.ResponseWriter.(http.Flusher); ok {
				f.Flush()
			}
			panic(http.ErrAbortHandler)
		}
		if slow > 0 {
			if f, ok := l.ResponseWriter.(http.Flusher); ok {
				f.Flush()
			}
			time.Sleep(slow)
		}
		p = p[n:]
	}
	return total, nil
}

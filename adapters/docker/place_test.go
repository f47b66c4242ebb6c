package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
)

// A way is a connection to an engine that can be closed.
type way struct {
	path, to string

	mu    sync.Mutex
	l     net.Listener
	conns map[net.Conn]struct{}
}

func newWay(t *testing.T, address string) *way {
	w := &way{path: filepath.Join(t.TempDir(), "s"), to: strings.TrimPrefix(address, "unix://"), conns: map[net.Conn]struct{}{}}
	w.open(t)
	t.Cleanup(w.close)
	return w
}

func (w *way) open(t *testing.T) {
	l, err := net.Listen("unix", w.path)
	if err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	w.l = l
	w.mu.Unlock()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go w.join(c)
		}
	}()
}

func (w *way) join(c net.Conn) {
	defer c.Close()
	to, err := net.Dial("unix", w.to)
	if err != nil {
		return
	}
	defer to.Close()
	w.mu.Lock()
	w.conns[c] = struct{}{}
	w.mu.Unlock()
	go func() {
		io.Copy(to, c)
		to.(*net.UnixConn).CloseWrite()
	}()
	io.Copy(c, to)
	w.mu.Lock()
	delete(w.conns, c)
	w.mu.Unlock()
}

// close ends all connections of the way.
func (w *way) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.l.Close() // which removes the socket
	for c := range w.conns {
		c.Close()
	}
}

// listens is the address of an engine whose answers come from f.
func listens(t *testing.T, f http.HandlerFunc) string {
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: f}}
	s.Start()
	t.Cleanup(s.Close)
	return "unix://" + at
}

// nothing is the address of an engine without any objects.
func nothing(t *testing.T) string {
	return listens(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			http.Error(w, `{"message":"nothing is here"}`, http.StatusNotFound)
			return
		}
		io.WriteString(w, "[]")
	})
}

// TestTeardownElsewhere: a teardown on one host keeps the network of a sandbox on another.
func TestTeardownElsewhere(t *testing.T) {
	en := testEngine{image: "engine:x"}
	o := en.options(t, "elsewhere")
	o.config["engines"] = map[string]any{"one": map[string]any{"address": nothing(t)}, "two": map[string]any{"address": nothing(t)}}
	e := o.opened(t)
	k := key("elsewhere", 1)
	for _, c := range []struct {
		host string
		has  bool
	}{{"one", true}, {"two", false}, {"", false}} {
		if err := e.remember(t.Context(), k, record{Host: "two"}); err != nil {
			t.Fatal(err)
		}
		e.mu.Lock()
		e.links[k] = &link{}
		e.mu.Unlock()
		if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: "elsewhere", Generation: 1, Host: c.host}); err != nil {
			t.Fatal(err)
		}
		e.mu.Lock()
		has := e.links[k] != nil
		e.mu.Unlock()
		r, err := e.recall(t.Context(), k)
		if err != nil || has != c.has || (r.Host != "") != c.has {
			t.Errorf("after a teardown on %q: it has its network: %t, and the record %+v, %v", c.host, has, r, err)
		}
	}
}

// TestPlace: two engines, one Docker's and one Podman's, are the hosts of one extension.
func TestPlace(t *testing.T) {
	one, two := engines["docker"](t), engines["podman"](t)
	way := newWay(t, two.address)
	o := one.options(t, "place")
	o.config["engines"] = map[string]any{"one": map[string]any{"address": one.address}, "two": map[string]any{"address": "unix://" + way.path}}
	o.config["image"] = two.image
	prepare := o.opened(t)
	if err := prepare.hosts["one"].api.TagImage(t.Context(), enginetest.Image, "localhost/"+strings.Split(enginetest.Image, ":")[0], strings.Split(enginetest.Image, ":")[1]); err != nil {
		t.Fatal(err)
	}
	extensiontest.RunGroups(t, extensiontest.Harness{
		Inputs: Adapter.Inputs,
		Open:   func(t *testing.T) sandboxer.Extension { return o.must(t) },
		Bare: func(t *testing.T) sandboxer.Extension {
			bare := o
			bare.dir = t.TempDir()
			return bare.must(t)
		},
		Spec: sandboxer.Spec{Owner: "place"}, Want: Adapter.Capabilities, Hosts: []string{"one", "two"},
		Away: func(t *testing.T, host string) func() {
			if host != "two" {
				t.Fatalf("%s cannot go away", host)
			}
			way.close()
			return func() { way.open(t) }
		},
		Listen: func(port int) []string { return []string{"/bin/echoer", fmt.Sprintf("127.0.0.1:%d", port)} },
	}, "place")
	nothingLeft(t, o)

	// A snapshot of one engine is restored on the other.
	e := o.opened(t)
	h := up(t, e, order("source", o))
	run(t, e, h, "echo saved >mark")
	s, err := e.Snapshot(t.Context(), h, "moves")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := e.DropSnapshot(t.Context(), s); err != nil {
			t.Error(err)
		}
	}()
	spec := order("copy", o)
	spec.Place = "two"
	copied, err := e.RestoreFromSnapshot(t.Context(), spec, s)
	if err != nil {
		t.Fatalf("%v (%s)", err, sandboxer.HintOf(err))
	}
	if got := run(t, e, copied, "cat mark"); got != "saved" {
		t.Errorf("the copy has %q", got)
	}
	if _, err := e.Teardown(t.Context(), copied); err != nil {
		t.Error(err)
	}
}

// TestNotifyAgain: an engine that was away is listened to again, and one that stays away delays no other.
func TestNotifyAgain(t *testing.T) {
	en := engines["docker"](t)
	o := en.options(t, "again")
	direct := o.opened(t)
	both := []sandboxer.Handle{up(t, direct, order("before", o)), up(t, direct, order("after", o))}
	way, gone := newWay(t, en.address), newWay(t, en.address)
	gone.close()
	o.config["engines"] = map[string]any{"one": map[string]any{"address": "unix://" + way.path}, "gone": map[string]any{"address": "unix://" + gone.path}}
	e := o.opened(t)
	seq, err := e.Notify(t.Context(), o.owner)
	if err != nil {
		t.Fatal(err)
	}
	ids, ended := make(chan string), make(chan error, 1)
	stop := make(chan struct{})
	go func() {
		var last error
		for id, err := range seq {
			if last = err; err != nil {
				break
			}
			select {
			case ids <- id:
			case <-stop:
			}
		}
		ended <- last
	}()
	for i, h := range both {
		if i > 0 {
			way.close()
			way.open(t)
		}
		late := time.After(2 * time.Minute)
		for told := false; !told; {
			if err := errors.Join(direct.Pause(t.Context(), h), direct.Resume(t.Context(), h)); err != nil {
				t.Fatal(err)
			}
			select {
			case id := <-ids:
				told = id == h.SandboxID
			case <-late:
				t.Fatalf("%s is not told", h.SandboxID)
			case <-time.After(100 * time.Millisecond): // once more
			}
		}
	}
	close(stop)
	e.end() // as Close does it
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the end of the notices: %v", err)
	}
}

package manager

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// A portExtension is the fake with all ports of this machine in each sandbox; the fake itself
// opens those of the sandbox's own processes, and it starts none.
type portExtension struct{ *fake.Extension }

func (e portExtension) Dial(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "nothing listens on port %d", port)
	}
	return c, nil
}

// readyRig is a rig whose profile "ready" has the check.
func readyRig(t *testing.T, check sandboxer.ReadyCheck, change func(*setup)) *rig {
	t.Helper()
	return newRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return portExtension{e} }
		s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.ready", Extension: "ext.fake", TTL: time.Hour, Ready: check})
		if change != nil {
			change(s)
		}
	})
}

// answering is a server in the sandbox that answers each request by the next of answers, and by the
// last one from then on.
func answering(t *testing.T, answers ...http.HandlerFunc) (port int, asked *atomic.Int32) {
	t.Helper()
	asked = new(atomic.Int32)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answers[min(int(asked.Add(1)), len(answers))-1](w, r)
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().(*net.TCPAddr).Port, asked
}

func status(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(code) }
}

func toldOf(t *testing.T, r *rig, id string) string {
	t.Helper()
	events, err := r.Events(admin, sandboxer.EventQuery{SandboxID: id})
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, ev := range events {
		fmt.Fprintln(&b, ev.Type, ev.To, ev.Message)
	}
	return b.String()
}

// ways are those by which an HTTP request gets to a port.
var ways = map[string][]sandboxer.Capability{
	"dial":   nil,
	"expose": {sandboxer.CanDial},
	"exec":   {sandboxer.CanDial, sandboxer.CanExpose},
}

// TestReadyHTTP: a sandbox is its user's when the wished status is answered, whichever way there is
// to ask; no other counts, and no redirect is followed.
func TestReadyHTTP(t *testing.T) {
	for name, without := range ways {
		t.Run(name, func(t *testing.T) {
			var path atomic.Value
			redirect := func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) }
			port, asked := answering(t, status(503), redirect, status(200), func(w http.ResponseWriter, r *http.Request) {
				path.Store(r.URL.String())
				w.WriteHeader(http.StatusNoContent)
				io.WriteString(w, "x")
			})
			r := readyRig(t, sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Port: port, Path: "/v1/sandbox?a=b", Status: 204}, Timeout: time.Minute},
				func(s *setup) { s.fake.Drop = without })
			sb := r.create(sandboxer.CreateRequest{Profile: "ready"})
			if sb.State != sandboxer.Running || asked.Load() != 4 || path.Load() != "/v1/sandbox?a=b" {
				t.Errorf("%s after %d requests, the last for %v", sb.State, asked.Load(), path.Load())
			}
			if told := toldOf(t, r, sb.ID); !strings.Contains(told, fmt.Sprintf("ready: GET /v1/sandbox?a=b on port %d answered 204", port)) {
				t.Errorf("events:\n%s", told)
			}
			r.destroy(sb.ID)
			r.sound(0)
		})
	}
}

// TestReadyByExec: a port is reached by a command with any of the programs that can, and where there
// is none that is said at once.
func TestReadyByExec(t *testing.T) {
	for _, tool := range []string{"bash", "nc", "python3", ""} {
		t.Run(tool, func(t *testing.T) {
			bin := t.TempDir()
			for _, name := range []string{"sh", "cat", tool} {
				at, err := exec.LookPath(name)
				if err != nil && name == "nc" {
					at, err = exec.LookPath("busybox")
				}
				if err == nil && name == "python3" { // what is in PATH may be a script that starts it
					var out []byte
					out, err = exec.Command(at, "-c", "import os, sys; print(os.path.realpath(sys.executable))").Output()
					at = strings.TrimSpace(string(out))
				}
				switch {
				case name == "":
				case err != nil && name == tool:
					t.Skipf("there is no %s here", tool)
				case err != nil:
					t.Fatal(err)
				default:
					if err := os.Symlink(at, filepath.Join(bin, name)); err != nil {
						t.Fatal(err)
					}
				}
			}
			port, asked := answering(t, status(503), status(200))
			r := readyRig(t, sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Port: port}, Timeout: time.Minute}, func(s *setup) { s.fake.Drop = ways["exec"] })
			sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "ready", Env: map[string]string{"PATH": bin}})
			if tool == "" {
				wantErr(t, err, sandboxer.Unsupported, "nothing in the sandbox can connect to a port")
				r.sound(0)
				return
			}
			if err != nil || asked.Load() != 2 {
				t.Fatalf("%v after %d requests: %v", sb, asked.Load(), err)
			}
			r.destroy(sb.ID)
			r.sound(0)
		})
	}
}

// TestNotReady: what never answers as it should fails, with the last answer in the error and the
// events, and nothing of it is left.
func TestNotReady(t *testing.T) {
	hangs := func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := closed.Addr().(*net.TCPAddr).Port
	closed.Close()
	speaks := func(text string) int { // and no HTTP
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					for range 1 << 13 { // until the other side has enough
						if _, err := io.WriteString(c, text); err != nil {
							return
						}
					}
					// To close with a request unread would be a reset, which takes away what was sent.
					_, _ = io.Copy(io.Discard, c)
				}()
			}
		}()
		return l.Addr().(*net.TCPAddr).Port
	}
	web := func(answers ...http.HandlerFunc) sandboxer.ReadyCheck {
		port, _ := answering(t, answers...)
		return sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Port: port}}
	}
	at := func(port int) sandboxer.ReadyCheck {
		return sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Port: port}}
	}
	for name, c := range map[string]struct {
		check sandboxer.ReadyCheck
		last  string
	}{
		"another status": {web(status(500), status(503)), "answered 503 instead of 200"},
		"hangs":          {web(hangs), "did not answer in the remaining time"},
		"hangs later":    {web(status(418), hangs), "answered 418 instead of 200"},
		"nobody":         {at(nobody), "did not answer: "},
		"no HTTP":        {at(speaks("\x1b[31mHTTP? \n")), "an answer that is not HTTP"},
		"endless header": {at(speaks("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<10))), "not HTTP, or too long"},
		"endless 1xx":    {at(speaks("HTTP/1.1 103 Early\r\n\r\n")), "not HTTP, or too long"},
		"another HTTP":   {at(speaks("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n")), "answered 101 instead of 200"},
		"command":        {sandboxer.ReadyCheck{Command: []string{"sh", "-c", "head -c 100000 /dev/zero >&2; printf 'not \\033[31myet' >&2; exit 3"}}, "ended with 3: "},
		"no command":     {sandboxer.ReadyCheck{Command: []string{"/no/such/command"}}, "ended with 127: "},
		"command hangs":  {sandboxer.ReadyCheck{Command: []string{"sleep", "1000"}}, "did not end in the remaining time"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.check.Timeout = 2 * time.Second
			r := readyRig(t, c.check, nil)
			req := sandboxer.CreateRequest{Profile: "ready", Inputs: map[string]string{"sandbox_id": "late"}}
			_, err := r.Create(acme, req)
			wantErr(t, err, sandboxer.Failed, "it was not ready within 2s: ")
			wantErr(t, err, sandboxer.Failed, c.last)
			if told := toldOf(t, r, "late"); !strings.Contains(told, c.last) {
				t.Errorf("events:\n%s", told)
			} else if strings.Contains(told, "\x1b") {
				t.Errorf("what comes out of the sandbox is repeated as it is: %q", told)
			}
			r.sound(0)
			r.noHolds()
		})
	}
}

// TestReadyHopeless: what no repetition can change ends the asking at once.
func TestReadyHopeless(t *testing.T) {
	long := sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Path: "/"}, Timeout: sandboxer.MaxReadyTimeout}
	r := readyRig(t, long, nil)
	_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "ready"})
	wantErr(t, err, sandboxer.Unsupported, "no URL")
	r.sound(0)

	long = sandboxer.ReadyCheck{Command: []string{"false"}, Timeout: sandboxer.MaxReadyTimeout}
	r = readyRig(t, long, func(s *setup) {
		s.fake.Faults = []fake.Fault{{Verb: fake.VerbExec, Kind: sandboxer.NotFound}}
	})
	_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "ready"})
	wantErr(t, err, sandboxer.Failed, "could not be created")
	r.sound(0)
}

// TestReadyDestroyed: a destroy does not wait for an answer.
func TestReadyDestroyed(t *testing.T) {
	asked := make(chan struct{}, 100)
	port, _ := answering(t, func(w http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		<-r.Context().Done()
	})
	r := readyRig(t, sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Port: port}, Timeout: sandboxer.MaxReadyTimeout}, nil)
	sb := r.create(sandboxer.CreateRequest{Profile: "ready", NoWaiting: true})
	<-asked
	if got := r.get(sb.ID); got.State != sandboxer.Creating {
		t.Errorf("it is %s before anything was answered", got.State)
	}
	r.destroy(sb.ID)
	r.sound(0)
}

// urlExtension gives its sandboxes a URL of their own.
type urlExtension struct {
	*fake.Extension
	url string
}

func (e urlExtension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	r, err := e.Extension.WaitReady(ctx, h)
	r.URL = e.url
	return r, err
}

// TestReadyURL: without a port the URL of the sandbox is asked.
func TestReadyURL(t *testing.T) {
	var path atomic.Value
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { path.Store(r.URL.Path) }))
	defer s.Close()
	r := readyRig(t, sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Path: "/v1/sandbox"}}, func(set *setup) {
		set.wrap = func(e *fake.Extension) sandboxer.Extension { return urlExtension{e, s.URL + "/base/"} }
	})
	sb := r.create(sandboxer.CreateRequest{Profile: "ready"})
	if path.Load() != "/base/v1/sandbox" || sb.Reachability.URL == "" {
		t.Errorf("asked for %v of %s", path.Load(), sb.Reachability.URL)
	}
}

// TestReadyRefused: a profile is refused whose sandboxes could not be requested, and one whose check makes no
// sense.
func TestReadyRefused(t *testing.T) {
	web, command := sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Port: 80}}, sandboxer.ReadyCheck{Command: []string{"true"}}
	for _, c := range []struct {
		check sandboxer.ReadyCheck
		drop  []sandboxer.Capability
		want  string
	}{
		{web, []sandboxer.Capability{sandboxer.CanDial, sandboxer.CanExpose, sandboxer.CanExec}, "lacks all of dial, expose and exec"},
		{command, []sandboxer.Capability{sandboxer.CanExec}, "lacks exec"},
		{sandboxer.ReadyCheck{HTTP: web.HTTP, Command: command.Command}, nil, "not both"},
		{web, []sandboxer.Capability{sandboxer.CanDial, sandboxer.CanExpose}, ""},
		{web, []sandboxer.Capability{sandboxer.CanExec}, ""},
	} {
		r := newRig(t, func(s *setup) { s.fake.Drop, s.idle = c.drop, true })
		err := r.SetProfiles([]sandboxer.Profile{{ID: "profile.ready", Extension: "ext.fake", Ready: c.check}})
		if c.want == "" && err != nil {
			t.Errorf("%+v without %v: %v", c.check, c.drop, err)
		} else if c.want != "" {
			wantErr(t, err, sandboxer.Invalid, c.want)
		}
	}
}

// TestReadyPooled: one that waits in a pool is not asked, for its main process does not run; once it
// is claimed it is.
func TestReadyPooled(t *testing.T) {
	port, asked := answering(t, status(503), status(200))
	r := readyRig(t, sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Port: port}}, func(s *setup) {
		s.profiles[len(s.profiles)-1].Pool.Size = 1
	})
	eventually(t, "one waits", func() bool {
		p := r.poolOf("profile.ready")
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.ready) == 1
	})
	if n := asked.Load(); n != 0 {
		t.Errorf("one of the pool was asked %d times", n)
	}
	sb := r.create(sandboxer.CreateRequest{Profile: "ready"})
	if sb.Pool == "" || asked.Load() < 2 {
		t.Errorf("from the pool %q, asked %d times", sb.Pool, asked.Load())
	}
}

// TestReadyResumed: a thawed sandbox is not asked; one that is started again is, and runs in any
// case, because its files could not be reached otherwise.
func TestReadyResumed(t *testing.T) {
	gate := filepath.Join(t.TempDir(), "count")
	count := "echo x >>" + gate + "; test $(wc -l <" + gate + ") -eq 1" // only the first time
	r := readyRig(t, sandboxer.ReadyCheck{Command: []string{"sh", "-c", count}, Timeout: 5 * time.Second}, nil)
	sb := r.create(sandboxer.CreateRequest{Profile: "ready"})
	for _, depth := range []sandboxer.PauseDepth{sandboxer.PauseFreeze, sandboxer.PauseFiles} {
		if _, err := r.Pause(acme, sb.ID, PauseRequest{Depth: depth}); err != nil {
			t.Fatal(err)
		}
		if got, err := r.Resume(acme, sb.ID, ResumeRequest{}); err != nil || got.State != sandboxer.Running {
			t.Fatalf("resume from %s: %v, %v", depth, got, err)
		}
		warned := strings.Contains(toldOf(t, r, sb.ID), "warning  it runs, but may not be ready: it was not ready within 5s")
		if warned != (depth == sandboxer.PauseFiles) {
			t.Errorf("after %s:\n%s", depth, toldOf(t, r, sb.ID))
		}
	}
}

// A dialingExtension is the fake with a URL that leads to port, to which it alone connects.
type dialingExtension struct {
	*fake.Extension
	port  int
	dials *atomic.Int32
}

func (e dialingExtension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	reach, err := e.Extension.WaitReady(ctx, h)
	reach.URL = "https://sandbox.invalid"
	return reach, err
}

func (e dialingExtension) DialURL(ctx context.Context, _ sandboxer.Handle) (net.Conn, error) {
	e.dials.Add(1)
	return (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(e.port)))
}

// TestReadyByDialURL: an extension that connects to the URLs of its sandboxes is asked to, and does TLS.
func TestReadyByDialURL(t *testing.T) {
	port, asked := answering(t, status(503), status(200))
	dials := new(atomic.Int32)
	r := readyRig(t, sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Path: "/"}, Timeout: time.Minute}, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return dialingExtension{e, port, dials} }
	})
	r.create(sandboxer.CreateRequest{Profile: "ready"})
	if asked.Load() != 2 || dials.Load() != 2 {
		t.Errorf("asked %d times on %d connections", asked.Load(), dials.Load())
	}
}

// TestReadySteps: it is asked at once, and then after steps that grow to their bound.
func TestReadySteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var at []time.Duration
		ask := func(context.Context) (bool, string, error) {
			at = append(at, time.Since(began))
			return len(at) == 40, "x", nil
		}
		if _, err := askUntil(t.Context(), ask, time.Minute, func(string) {}); err != nil {
			t.Fatal(err)
		}
		for i := range at[1:] {
			pause := at[i+1] - at[i]
			if pause < readyStep || pause > maxReadyStep || pause > readyStep+at[i]/4+time.Microsecond {
				t.Errorf("after %s the pause is %s", at[i], pause)
			}
		}
		if last := at[39] - at[38]; last != maxReadyStep {
			t.Errorf("the last pause is %s, want %s", last, maxReadyStep)
		}
	})
}

package composessh

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// bank is a project with a database: a service that moves an amount from one book to the
// other for ever, and keeps both in a volume that its image knows nothing of. At no
// moment but within a move do they hold other than 1000 together. It says what it found
// when it began.
const bank = `services:
  app:
    image: ` + image + `
    command: [sleep, "86400"]
    volumes: [".:/src", "scratch:/scratch"]
  db:
    image: ` + image + `
    user: "1234:567"
    command:
      - sh
      - -c
      - |
        cat /db/a /db/b >/tmp/found 2>/dev/null
        book() { echo $$2 >/db/t && mv /db/t /db/$$1; }
        [ -s /db/a ] || { book a 1000; book b 0; }
        while read -r x </db/a; do book a $$((x-1)); book b $$((1000-x+1)); [ $$x -gt 2 ] || { book a 1000; book b 0; }; sleep 0.01; done
    volumes: ["data:/db"]
    depends_on: {init: {condition: service_completed_successfully}}
    healthcheck: {test: ["CMD", "test", "-s", "/db/b"], interval: 300ms, retries: 60}
  init:
    image: ` + image + `
    command: [sh, -c, "chown 1234:567 /db && chmod 700 /db"]
    volumes: ["data:/db"]
volumes: {data: {}, scratch: {}}
`

// checkpoint takes what portable snapshots are made of.
func checkpoint(t testing.TB, e *extension, h sandboxer.Handle) (c sandboxer.Contents, tar []byte) {
	t.Helper()
	var out bytes.Buffer
	if err := e.Checkpoint(t.Context(), h, func(said sandboxer.Contents) io.Writer { c = said; return &out }); err != nil {
		t.Fatalf("Checkpoint: %v (%s)", err, sandboxer.HintOf(err))
	}
	return c, out.Bytes()
}

// inService runs a script as the service's own user: root has no capabilities in a service
// of another user that may gain none.
func inService(t testing.TB, e *extension, h sandboxer.Handle, service, script string) string {
	t.Helper()
	var out, errs strings.Builder
	x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Service: service, Stdout: &out, Stderr: &errs})
	if err != nil || x.Code != 0 {
		t.Fatalf("in %s: %+v, %v, %s", service, x, err, &errs)
	}
	return strings.TrimSpace(out.String())
}

// TestVolumes: a project with a database moves to another host, with each kind of
// compose program. Workspace and volume are of one moment, and there before it starts.
func TestVolumes(t *testing.T) {
	for name, compose := range map[string]string{"current": "docker compose", "v1": "docker-compose", "podman": "podman-compose"} {
		t.Run(name, func(t *testing.T) {
			onlyLong(t, compose)
			t.Parallel() // health checks take their time
			r := newRig(t, compose, 1)
			if compose == "docker compose" {
				r.addHost(t, "host-2", another(t))
			} else {
				r.addHost(t, "host-2", r.engines[0]...)
			}
			e := r.opened(t, "checkpoint-"+name) // engines are shared
			s := order("source", repo(t, bank, map[string]string{"w": "before\n"}))
			s.Host, s.Inputs["volumes"] = "host-1", "data"
			h, _ := provision(t, e, s)
			run(t, e, h, "cd /src && echo after >w && echo gone >/scratch/f")
			c, tar := checkpoint(t, e, h)
			if !c.Quiesced || !slices.Equal(c.Volumes, []string{"data"}) {
				t.Errorf("the checkpoint holds %+v", c)
			}
			held := func(name string) string { return member(t, bytes.NewReader(tar), sandboxer.VolumesDir+"/data/"+name) }
			want := held("a") + "\n" + held("b")

			s2 := order("copy", s.Inputs["repo"])
			s2.Host, s2.Inputs["volumes"] = "host-2", "data"
			teardown(t, e, s2.ID)
			h2, err := e.putFrom(t.Context(), s2, c, bytes.NewReader(tar))
			if err == nil {
				_, err = e.WaitReady(t.Context(), h2)
			}
			if err != nil {
				t.Fatalf("ProvisionFrom: %v (%s)", err, sandboxer.HintOf(err))
			}
			if h2.Host != "host-2" {
				t.Errorf("the copy is on %s", h2.Host)
			}
			if got := run(t, e, h2, "cat /src/w; ls -A /src/.sandboxer /scratch 2>&1 || :"); !strings.HasPrefix(got, "after\n") || strings.Contains(got, "gone") {
				t.Errorf("the copy's workspace: %q", got)
			}
			if got := inService(t, e, h2, "db", "cat /tmp/found"); got != want {
				t.Errorf("the database began with %q; want %q", got, want)
			}
			if got := inService(t, e, h2, "db", "stat -c '%a %u %g' /db /db/a"); got != "700 1234 567\n644 1234 567" {
				t.Errorf("the volume is of %q", got)
			}
			// The source goes on, and both leave nothing.
			now := inService(t, e, h, "db", `x=$(cat /db/a); n=0; while [ "$(cat /db/a)" = "$x" ] && [ $n -lt 200 ]; do sleep 0.1; n=$((n+1)); done; echo "$x"; cat /db/a`)
			if a, b, _ := strings.Cut(now, "\n"); a == b {
				t.Errorf("the source's database stands still at %q", a)
			}
			for _, h := range []sandboxer.Handle{h, h2} {
				if _, err := e.Teardown(t.Context(), h); err != nil {
					t.Error(err)
				}
			}
			if left := r.remains(t, "checkpoint-"+name); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// TestKeepRefused: what cannot be kept is said before anything is made.
func TestKeepRefused(t *testing.T) {
	r := newRig(t, "docker compose", 0)
	e := r.opened(t, "test")
	s := order("refused", repo(t, bank, nil))
	s.Inputs["volumes"] = "data,nosuch"
	kind(t, e.Check(t.Context(), s), sandboxer.Invalid, "nosuch", "data, scratch")
	s.Inputs["volumes"], s.Inputs["quiesce"] = "all", "maybe"
	kind(t, e.Check(t.Context(), s), sandboxer.Invalid, "quiesce", "maybe")
	s.Inputs["quiesce"] = "no"
	p, err := e.plan(t.Context(), s)
	if err != nil || p.meta.Quiesce || !slices.Equal(p.meta.Volumes, []string{"data", "scratch"}) {
		t.Errorf("plan = %+v, %v", p, err)
	}
	s.Place = "nowhere" // which is not asked
	_, err = e.ProvisionFrom(t.Context(), s, sandboxer.Contents{Volumes: []string{"other"}}, strings.NewReader(""))
	kind(t, err, sandboxer.Unsupported, "other", "compose.yaml")
}

// TestThaw: services that are paused for a broker that is gone go on by themselves,
// and a snapshot that was being read then is none.
func TestThaw(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 1)
	relay := r.afar(t)
	e := r.opened(t, "thaw")
	e.beat = time.Second
	s := order("frozen", repo(t, single, map[string]string{"large": strings.Repeat("large", 1<<20)}))
	s.Inputs["quiesce"] = "yes"
	h, _ := provision(t, e, s)
	paused := func() string {
		return r.engine(t, r.engines[0], "ps", "-q", "--filter", "label="+engine.LabelName+"="+h.Ref, "--filter", "status=paused")
	}
	wait := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("waited in vain for %s", what)
			}
		}
	}
	// As long as there is a reader, it stays paused, however long that takes.
	c, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	begun, slow := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	read := func(e *extension) {
		done <- e.Checkpoint(c, h, func(sandboxer.Contents) io.Writer {
			return writer(func(p []byte) (int, error) {
				select {
				case begun <- struct{}{}:
				case <-slow:
				}
				<-slow
				return len(p), nil
			})
		})
	}
	go read(e)
	<-begun
	for end := time.Now().Add(7 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if paused() == "" {
			t.Fatal("it went on while it was read")
		}
	}
	close(slow)
	if err := <-done; err != nil {
		t.Errorf("a checkpoint that takes its time: %v", err)
	}
	if paused() != "" {
		t.Error("it stands still when the checkpoint is whole")
	}
	// The connection goes dead, and does not come back until the services went on without it.
	slow = make(chan struct{})
	go read(e)
	<-begun
	relay.Freeze()
	wait("the host to let it go on", func() bool { return paused() == "" })
	close(slow)
	relay.Cut()
	relay.Thaw()
	err := <-done
	kind(t, err, sandboxer.Unavailable)
	// What the broker of then left does not trouble the next.
	e2 := r.opened(t, "thaw")
	if _, tar := checkpoint(t, e2, h); len(tar) < 5<<20 {
		t.Errorf("the next checkpoint has %d bytes", len(tar))
	}
	if paused() != "" {
		t.Error("it stands still after the next checkpoint")
	}
	run(t, e2, h, "true")
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

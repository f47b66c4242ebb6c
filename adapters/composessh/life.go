package composessh

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// statusScript prints whether the directory of $2 below $1 is there and complete, the time, and
// what the engine $3 has of it.
const statusScript = `
cd -- "$1" || exit
name=$2 engine=$3
if [ ! -d "$name" ]; then echo none; elif [ -e "$name/up" ]; then echo up; else echo making; fi
` + engine.ListScript + `
[ ! -e "$name/up" ] || [ -s "$name/up" ] || [ -z "$ids" ] || printf '%s\n' $ids >"$name/up"
` + engine.InspectScript

// A status is what one look at a sandbox showed.
type status struct {
	dir        string // none, making or up
	at         time.Time
	containers []engine.Container           // of services
	links      map[string]*engine.Container // whose network a service has, by its name, where that is filtered
}

// network is the container that a service's addresses and published ports are of.
func (s *status) network(c *engine.Container) *engine.Container {
	if l := s.links[c.Service()]; l != nil {
		return l
	}
	return c
}

// status looks at a sandbox.
func (e *extension) status(ctx context.Context, h *host, name string) (*status, error) {
	out, err := h.engine.Script(ctx, nil, nil, statusScript, h.known.root, name, h.known.engine)
	if err != nil {
		return nil, err
	}
	s := &status{links: map[string]*engine.Container{}}
	var rest string
	s.dir, rest, _ = strings.Cut(out, "\n")
	if s.at, s.containers, err = engine.ParseContainers(rest); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "host %s: what the engine says of sandbox %s cannot be read", h.Name(), name)
	}
	for i := range s.containers {
		if of := s.containers[i].Config.Labels[labelLink]; of != "" {
			s.links[of] = &engine.Container{NetworkSettings: s.containers[i].NetworkSettings}
		}
	}
	s.containers = slices.DeleteFunc(s.containers, func(c engine.Container) bool { return c.Service() == "" })
	return s, nil
}

// settled is how long a service without a health check must have run to count as one
// that runs.
const settled = time.Second

// restarting is how long an engine takes from the end of a service to its next start, or
// at least to saying that it waits for that.
const restarting = 10 * time.Second

// ready says whether a sandbox is ready, and if not whether it can still become so; wait is how
// long that takes at least.
func (m *meta) ready(s *status, settle time.Duration, podman bool) (ready bool, wait time.Duration, err error) {
	ready = true
	for _, want := range m.Services {
		count := 0
		for i := range s.containers {
			c := &s.containers[i]
			if c.Service() != want.Name {
				continue
			}
			count++
			switch health := c.Health(); {
			case c.State.Status == "exited" || c.State.Status == "dead" || c.State.Status == "stopped":
				most := min(want.Restarts, restarts(podman))
				switch {
				case c.State.ExitCode == 0 && (want.OneShot || want.MayEnd && want.Name != m.Service):
					continue
				case c.State.ExitCode == 0 && want.MayEnd:
					return false, 0, sandboxer.E(sandboxer.Failed, nil, "the service %s, which commands would run in, ended with exit status 0", want.Name).
						WithHint("have it stay (command: sleep infinity), or name a service that does: --input service=NAME")
				case c.State.ExitCode != 0 && c.RestartCount < most && s.at.Sub(c.State.FinishedAt) < restarting:
					ready = false // the engine is about to
					continue
				}
				why := fmt.Sprintf("ended with exit status %d", c.State.ExitCode)
				if c.RestartCount > 0 {
					why += fmt.Sprintf(", after it was started again %d times", c.RestartCount)
				}
				if c.State.OOMKilled {
					why = "was killed for the memory it took"
				}
				return false, 0, sandboxer.E(sandboxer.Failed, errors.New(c.State.Error), "the service %s %s", want.Name, why)
			case !c.State.Running || c.State.Paused || c.State.Status == "restarting":
				ready = false
			case want.OneShot:
				ready = false
			case health == "unhealthy":
				why := ""
				if h := c.State.Health; h != nil && len(h.Log) > 0 {
					if said := engine.OneLine(c.Redact(h.Log[len(h.Log)-1].Output)); said != "" {
						why = ": " + said
					}
				}
				return false, 0, sandboxer.E(sandboxer.Failed, nil, "the health check of the service %s fails%s", want.Name, why)
			case health == "starting":
				ready, wait = false, max(wait, c.NextCheck(s.at))
			case health == "healthy":
			default:
				if left := settle - s.at.Sub(c.State.StartedAt); left > 0 {
					ready, wait = false, max(wait, left)
				}
			}
		}
		if count < want.Replicas {
			ready = false
		}
	}
	return ready, wait, nil
}

// same reports whether a and b show the same containers, none started anew.
func same(a, b *status) bool {
	return a != nil && slices.EqualFunc(a.containers, b.containers, func(x, y engine.Container) bool { return x.ID == y.ID && x.State.StartedAt.Equal(y.State.StartedAt) })
}

// WaitReady implements sandboxer.Extension. What compose answered does not count: the
// engine is asked, by label, until every service of the file was seen to run, and to be
// healthy where it has a check, twice.
func (e *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (r sandboxer.Reachability, err error) {
	if err := ctx.Err(); err != nil {
		return r, err
	}
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return r, err
	}
	var last *status
	missing := 0
	checked := map[string]time.Time{}
	for {
		var s *status
		err := e.step(pLook, func() (err error) { s, err = e.status(ctx, ho, m.Name); return err })
		if err != nil {
			return r, err
		}
		if s.dir == "none" || m.Name == "" {
			return r, gone(h)
		}
		if s.dir == "up" && len(s.containers) < len(m.Services) {
			if missing++; missing > 1 {
				return r, sandboxer.E(sandboxer.NotFound, nil, "containers of sandbox %s are gone from host %s", h.SandboxID, ho.Name())
			}
		} else {
			missing = 0
		}
		ready, wait, err := m.ready(s, e.settle, ho.known.engine == "podman")
		if err != nil {
			return r, e.explain(ctx, ho, s, err)
		}
		if ready && same(last, s) {
			return e.reach(ho, m), nil
		}
		if err := e.check(ctx, ho, s, checked); err != nil {
			return r, err
		}
		if ho.known.engine == "podman" {
			wait = 0 // it is this look that has Podman look
		}
		last, wait = nil, min(max(wait, 150*time.Millisecond), time.Second)
		if ready {
			last, wait = s, 50*time.Millisecond
		}
		select {
		case <-ctx.Done():
			return r, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// check has Podman look at the health of the services that are due: it does so by itself
// only where systemd runs its timers. checked is when each was looked at last.
func (e *extension) check(ctx context.Context, h *host, s *status, checked map[string]time.Time) error {
	if h.known.engine != "podman" {
		return nil
	}
	var due []string
	for i := range s.containers {
		c := &s.containers[i]
		if c.State.Running && c.Health() == "starting" && c.Config.Healthcheck != nil && time.Since(checked[c.ID]) >= c.Config.Healthcheck.Interval {
			checked[c.ID] = time.Now()
			due = append(due, c.ID)
		}
	}
	if len(due) == 0 {
		return nil
	}
	_, err := e.script(ctx, h, nil, nil, `[ ! -d /run/systemd/system ] || exit 0; for i; do podman healthcheck run "$i" >/dev/null 2>&1; done; exit 0`, due...)
	return err
}

// explain adds to the failure of a service what it said last, without what its
// environment says.
func (e *extension) explain(ctx context.Context, h *host, s *status, cause error) error {
	for i := range s.containers {
		c := &s.containers[i]
		if !strings.Contains(sandboxer.Message(cause), "service "+c.Service()) {
			continue
		}
		out, err := h.engine.Logs(ctx, c.ID, 5)
		if err != nil || strings.TrimSpace(out) == "" {
			continue
		}
		out = c.Redact(out)
		told := sandboxer.E(sandboxer.KindOf(cause), cause, "%s; it said last: %s", sandboxer.Message(cause), engine.OneLine(out))
		if strings.Contains(strings.ToLower(out), "no new privileges") || strings.Contains(out, "no-new-privileges") {
			return told.WithHint("services have no-new-privileges here; a profile whose inputs say new_privileges: yes lets them use sudo and the like")
		}
		if lacksNetwork(out) {
			return told.WithHint("%s", e.networkHint())
		}
		return told
	}
	return cause
}

func (e *extension) reach(h *host, m *meta) sandboxer.Reachability {
	t := h.Target()
	r := sandboxer.Reachability{
		Host: h.Name(), SSH: t.Addr, RemoteDir: path.Join(h.known.root, m.Name, "repo"), ComposeProject: m.Name,
		Extra: map[string]string{"compose": strings.Join(h.known.compose, " "), "service": m.Service},
	}
	if t.Port > 0 {
		r.SSH += ":" + strconv.Itoa(t.Port)
	}
	if len(m.Notes) > 0 {
		r.Extra[sandboxer.ExtraChanged] = strings.Join(m.Notes, "; ")
	}
	seen := map[int]bool{}
	add := func(port int) {
		if port > 0 && !seen[port] {
			seen[port] = true
			r.Ports = append(r.Ports, sandboxer.Port{Port: port})
		}
	}
	for _, s := range m.Services {
		for _, p := range s.Ports {
			if p.Protocol != "tcp" {
				continue
			}
			if p.Published > 0 {
				add(p.Published)
			} else {
				add(p.Target)
			}
		}
	}
	for _, p := range m.Ports {
		add(p)
	}
	return r
}

// removeObjects removes, with the engine $1, everything of the sandbox $2, by the name of
// the project and by label in turn, until one look after the last removal finds nothing:
// each alone finds all that compose made of the file. With $3, volumes and images stay. It
// prints "built" if there were images; what they are made of stays (images.go).
const removeObjects = `
e=$1 n=$2 keep=$3
case $e in podman) project=io.podman.compose.project;; *) project=com.docker.compose.project;; esac
by=$project=$n
for try in 1 2 3 4 5 6; do
	some=
	ids=$("$e" ps -aq --no-trunc --filter "label=$by") || exit
	[ -z "$ids" ] || { some=1; { [ "$e" = podman ] && podman rm -f -v -t 0 $ids >/dev/null 2>&1; } || "$e" rm -f -v $ids >/dev/null; }
	if [ "$e" = podman ] && podman pod exists "pod_$n" 2>/dev/null; then some=1; podman pod rm -f "pod_$n" >/dev/null; fi
	ids=$("$e" network ls -q --filter "label=$by") || exit
	[ -z "$ids" ] || { some=1; "$e" network rm $ids >/dev/null; }
	ids=
	[ -n "$keep" ] || ids=$("$e" volume ls -q --filter "label=$by") || exit
	[ -z "$ids" ] || { some=1; "$e" volume rm -f $ids >/dev/null; }
	[ -n "$some" ] || [ $try = 1 ] || break
	case $by in $project=*) by=dev.sandboxer.name=$n;; *) by=$project=$n;; esac
	[ $try -lt 4 ] || sleep 0.2 2>/dev/null || sleep 1
done
[ -z "$some" ] || { echo "something of $n would not go" >&2; exit 1; }
[ -z "$keep" ] || exit 0
ids=$({ "$e" images -q --no-trunc --filter "label=dev.sandboxer.name=$n" && "$e" images -q --no-trunc "$n"; } | sort -u) || exit
[ -n "$ids" ] || exit 0
echo built
"$e" rmi -f --no-prune $ids >/dev/null 2>&1 || "$e" rmi -f $ids >/dev/null 2>&1
exit 0`

// removeDir removes the directory of sandbox $2 below $1, after its subnets. What
// containers wrote there may belong to others: the engine $3 is then asked to remove it,
// with an image that has rm. Whose image that is nobody knows: it sees that directory and
// nothing else, may no more than remove others' files, and is none that a sandbox built. What
// hangs there carries the sandbox's label, by which the next try finds it.
const removeDir = `
cd -P -- "$1" || exit
case $2 in sbx-*/*|*..*) exit 1;; sbx-*) ;; *) exit 1;; esac
if [ -e "$2" ]; then
	[ ! -L "$2" ] && [ "$(cd -P -- "$2" && pwd -P)" = "$(pwd -P)/$2" ] || { echo "$2 is not a directory of sandboxes" >&2; exit 1; }
	if ! rm -rf -- "$2/repo" "$2/copies" "$2/files" 2>/dev/null; then
		built=" $({ "$3" images -q --filter label=dev.sandboxer.name; "$3" images -q --filter label=dev.sandboxer.cache; } | tr '\n' ' ')" lim=
		[ "$3" != docker ] || lim="--memory 128m --pids-limit 32"
		for i in $("$3" images -q | head -n 50); do
			case $built in *" $i "*) continue;; esac
			"$3" run --rm --network none -u 0 --read-only --cap-drop ALL --cap-add DAC_OVERRIDE --cap-add FOWNER --security-opt no-new-privileges $lim \
				--label "dev.sandboxer.name=$2" -v "$(pwd -P)/$2:/w" --entrypoint rm "$i" -rf /w/repo /w/copies /w/files >/dev/null 2>&1 && break
		done
		rm -rf -- "$2/repo" "$2/copies" "$2/files" || exit
	fi
fi
for l in .net/*; do [ "$(readlink -- "$l" 2>/dev/null)" != "../$2" ] || rm -f -- "$l"; done
rm -rf -- "$2"`

// Teardown implements sandboxer.Extension.
func (e *extension) Teardown(ctx context.Context, h sandboxer.Handle) (report sandboxer.CleanupReport, err error) {
	if err := ctx.Err(); err != nil {
		return report, err
	}
	var places []place
	var unasked error
	if name, at := e.where(h); at != "" {
		places = []place{{name, at, h.Generation}}
	} else {
		places, unasked = e.search(ctx, h)
		if places, err = e.withFormer(places, h.SandboxID, h.Generation); err != nil {
			return report, err
		}
	}
	for _, p := range places {
		if err := e.remove(ctx, p); err != nil {
			return report, err
		}
		if p.host != untouched {
			report.Removed = append(report.Removed, "compose project "+p.name+" on "+p.host)
		}
	}
	return report, unasked // there may be more of it
}

// withFormer adds to places those where an earlier version noted a sandbox, of any generation
// if that is 0.
func (e *extension) withFormer(places []place, id string, generation int) ([]place, error) {
	files, err := os.ReadDir(filepath.Join(e.env.Dir, formerDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "where sandbox %s was placed cannot be read", id)
	}
	for _, f := range files {
		got, g, ok := e.split(f.Name())
		if !ok || got != id || generation != 0 && g != generation || slices.ContainsFunc(places, func(p place) bool { return p.name == f.Name() }) {
			continue
		}
		at, err := e.former(f.Name())
		if err != nil {
			return nil, err
		}
		if at != "" {
			places = append(places, place{f.Name(), at, g})
		}
	}
	return places, nil
}

func (e *extension) remove(ctx context.Context, p place) error {
	unlock, err := e.lock(ctx, p.name)
	if err != nil {
		return err
	}
	defer unlock()
	if p.host == untouched {
		if at, err := e.former(p.name); err != nil || at != untouched { // somebody else saw to it meanwhile
			return err
		}
		return e.forgetFormer(p.name)
	}
	h, err := e.host(p.host)
	if err == nil {
		err = e.look(ctx, h)
	}
	if err != nil {
		return err
	}
	e.forgetSandbox(p.name)
	// What was cut off may still be at it.
	err = e.step(pProcesses, func() error { return h.Kill(ctx, "SANDBOXER_SANDBOX", p.name) })
	if err != nil && sandboxer.KindOf(err) != sandboxer.Failed && sandboxer.KindOf(err) != sandboxer.Unsupported {
		return err
	}
	err = e.step(pObjects, func() error {
		out, err := h.engine.Script(ctx, nil, nil, `cd -- "$4" || exit;`+removeObjects, h.known.engine, p.name, "", h.known.root)
		if err == nil && strings.Contains(out, "built") {
			// What is kept for others holds up no removal; the next one collects, too.
			if err := e.collect(ctx, h); err != nil && e.env.Log != nil {
				e.env.Log.Warn("layers of built images were not looked through", "extension", e.env.Extension, "host", h.Name(), "err", err)
			}
		}
		return err
	})
	if err == nil {
		err = e.step(pRemove, func() error {
			_, err := h.engine.Script(ctx, nil, nil, removeDir, h.known.root, p.name, h.known.engine)
			return err
		})
	}
	if err != nil {
		return e.notRemoved(h, p, err)
	}
	return e.forgetFormer(p.name)
}

// Forget implements sandboxer.Forgetter.
func (e *extension) Forget(_ context.Context, h sandboxer.Handle) ([]string, error) {
	var places []place
	if name, at := e.where(h); at != "" {
		places = []place{{name, at, h.Generation}}
	}
	places, err := e.withFormer(places, h.SandboxID, h.Generation)
	if err != nil {
		return nil, err
	}
	var remains []string
	for _, p := range places {
		if p.host != untouched {
			remains = append(remains, fmt.Sprintf("on host %s what has the label %s=%s (containers, networks, volumes, images), and the directory %s", p.host, engine.LabelName, p.name, path.Join(e.cfg.Root, p.name)))
		}
		if err := e.forgetFormer(p.name); err != nil {
			return nil, err
		}
	}
	if len(places) == 0 {
		remains = append(remains, fmt.Sprintf("on a host that is not known, what has a label %s=%s", engine.LabelName, e.name(h.SandboxID, h.Generation)))
	}
	return remains, nil
}

// notRemoved makes an error that the sweep repeats of one that says that the spec is at
// fault.
func (e *extension) notRemoved(h *host, p place, err error) error {
	if sandboxer.KindOf(err) != sandboxer.Failed {
		return err
	}
	return sandboxer.E(sandboxer.Unavailable, err, "sandbox %s could not be removed from host %s: %s", p.name, h.Name(), sandboxer.Message(err)).
		WithHint("look at it there; it is tried again")
}

// standing prints "there" if processes of the containers of $2, whose IDs are in its
// directory below $1 since it was up, are on the host: the kernel knows without the engine.
const standing = `
cd -- "$1" && [ -s "$2/up" ] || exit 0
[ -z "$(grep -lsF -f "$2/up" /proc/[0-9]*/cgroup 2>/dev/null | head -n 1)" ] || echo there`

// IsAlive implements sandboxer.Prober.
func (e *extension) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	name, at := e.where(h)
	if at == "" {
		found, err := e.search(ctx, h)
		switch {
		case len(found) > 0:
		case err != nil:
			return sandboxer.Unknown, err
		default:
			return sandboxer.Gone, nil
		}
		name, at = found[0].name, found[0].host
	}
	if at == untouched {
		return sandboxer.Gone, nil
	}
	ho, err := e.host(at)
	if err == nil {
		err = e.look(ctx, ho)
	}
	if err != nil {
		return sandboxer.Unknown, err
	}
	s, err := e.status(ctx, ho, name)
	switch {
	case errors.Is(err, engine.ErrHangs):
		// Containers go on without their engine.
		out, serr := e.script(ctx, ho, nil, nil, standing, ho.known.root, name)
		if serr == nil && strings.TrimSpace(out) == "there" {
			return sandboxer.Unresponsive, nil
		}
		return sandboxer.Unknown, err
	case err != nil:
		return sandboxer.Unknown, err
	case len(s.containers) > 0 || s.dir == "making":
		return sandboxer.Alive, nil
	}
	return sandboxer.Gone, nil
}

// Discover implements sandboxer.Discoverer. It tells no fuse: that is not moved with the
// expiry.
func (e *extension) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	found, err := e.search(ctx, sandboxer.Handle{SandboxID: id})
	if len(found) == 0 && err != nil {
		return sandboxer.Found{}, err
	}
	if len(found) == 0 {
		return sandboxer.Found{}, gone(sandboxer.Handle{SandboxID: id})
	}
	f := sandboxer.Found{Handle: e.handle(found[0].name, found[0].host)}
	ho, err := e.host(found[0].host)
	if err == nil {
		err = e.look(ctx, ho)
	}
	if err != nil {
		return sandboxer.Found{}, err
	}
	m, err := e.meta(ctx, ho, found[0].name)
	if err != nil {
		return sandboxer.Found{}, err
	}
	if m != nil {
		f.Stamp = m.Stamp
	}
	return f, nil
}

func (e *extension) handle(name, host string) sandboxer.Handle {
	id, g, _ := e.split(name)
	return sandboxer.Handle{SandboxID: id, Generation: g, Host: host, Ref: name, Data: json.RawMessage(`{"v":1}`)}
}

// ListRunning implements sandboxer.Lister. A host that cannot be asked is an error of
// the listing, after what the others have.
func (e *extension) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		if owner != e.env.Owner { // nothing of others is known here
			return
		}
		var mu sync.Mutex
		var all []sandboxer.Handle
		var failed []error
		err := e.each(ctx, func(name string, h *host, err error) {
			var names []string
			if err == nil {
				names, err = e.namesOn(ctx, h)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, err)
			}
			for _, n := range names {
				if _, _, ok := e.split(n); ok {
					all = append(all, e.handle(n, name))
				}
			}
		})
		if err != nil && sandboxer.KindOf(err) != sandboxer.Unavailable {
			failed = append(failed, err)
		}
		for _, h := range all {
			if !yield(h, nil) {
				return
			}
		}
		for _, err := range failed {
			if !yield(sandboxer.Handle{}, err) {
				return
			}
		}
	}
}

// Capacity implements sandboxer.CapacityReporter.
func (e *extension) Capacity(ctx context.Context, only string) (sandboxer.HostCapacity, error) {
	names, err := e.candidates(only)
	if err != nil {
		return sandboxer.HostCapacity{}, err
	}
	offers, err := e.capacities(ctx, names, false)
	o := sandboxer.HostCapacity{Attrs: map[string]string{}}
	for _, of := range offers {
		o.Free += of.free
		o.Hosts = append(o.Hosts, of.h.Name())
		k := of.h.known
		o.Attrs[of.h.Name()] = fmt.Sprintf("%s %s, %s %s, %d of %d", k.engine, k.server, strings.Join(k.compose, " "), k.version, of.used, of.h.capacity)
		if of.h.draining {
			o.Attrs[of.h.Name()] += ", draining"
		}
	}
	return o, err
}

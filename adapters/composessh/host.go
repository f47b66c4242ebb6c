package composessh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// A host is one place for sandboxes, as it was when it was looked up.
type host struct {
	*sshrun.Host
	engine   *engine.Engine // once it was looked at
	capacity int
	draining bool
	known    *known
}

// known is what was found out about a host; it is found out again when it has stopped being
// true.
type known struct {
	root    string        // absolute, links resolved
	engine  string        // docker or podman
	compose []string      // the program
	version string        // of it
	server  string        // the engine's version
	socket  string        // of the engine, if it has one that is known
	builder string        // buildkit, which holds a build to no limit of memory or processors; or classic
	data    string        // where the engine keeps images, if it says so
	arch    string        // amd64 or arm64; others are not told
	tun     bool          // there are TAP devices
	swap    string        // no: there is none; bounded: the engine can; yes: nothing bounds it
	slots   chan struct{} // of sandboxes that are being started
	builds  chan struct{} // of images that are being built
	// carrying is held by the call that brings the image of the gateway there.
	carrying chan struct{}
}

// podmanCompose reports whether the compose program is podman-compose, which passes on
// less than the others.
func (k *known) podmanCompose() bool { return path.Base(k.compose[0]) == "podman-compose" }

// detect prints the fields of known for a host. $1: root. $2…: the compose program, if it is
// fixed.
const detect = `
root=$1; shift
case $root in /*) ;; *) root=$HOME/$root;; esac
mkdir -p -- "$root/.net" "$root/.taken" && chmod 700 -- "$root" && cd -P -- "$root" || exit 41
echo "root=$(pwd -P)"
# Programs of an engine that hangs do so, too: 124. A compose program only says its version, but on a busy host some
# take long to load.
limit=60
within() {
	if command -v timeout >/dev/null 2>&1; then
		timeout $limit "$@"; c=$?
		case $c in 137|143) c=124;; esac
		return $c
	fi
	"$@" & p=$! c=0
	while kill -0 $p 2>/dev/null; do
		[ $((c+=1)) -le $limit ] || { kill -KILL $p; return 124; }
		sleep 1
	done
	wait $p
}
try() {
	case $1 in podman*) e=podman;; *) e=docker;; esac
	command -v "$1" >/dev/null 2>&1 && command -v $e >/dev/null 2>&1 || return 1
	v=$(within "$@" version --short 2>/dev/null); c=$?
	[ $c = 0 ] || [ $c = 124 ] || [ $e-$2 = docker-compose ] || { v=$(within "$@" --version 2>/dev/null); c=$?; }
	case $c in 0) ;; 124) exit 44;; *) return 1;; esac
	echo "engine=$e"; echo "compose=$*"; echo "version=$(printf %s "$v" | grep -o '[0-9][0-9.]*' | head -n 1)"
}
if [ $# -gt 0 ]; then try "$@" || exit 42
else try docker compose || try docker-compose || try podman-compose || exit 42; fi
limit=15
swap=no
[ ! -r /proc/swaps ] || [ "$(wc -l </proc/swaps)" -le 1 ] || swap=yes
if [ $e = docker ]; then
	s=$(within docker version --format '{{.Server.Version}}' 2>&1) || { [ $? != 124 ] || exit 44; printf '%s\n' "$s" >&2; exit 43; }
	echo "socket=${DOCKER_HOST:-$(docker context inspect --format '{{.Endpoints.docker.Host}}' 2>/dev/null)}"
	# As the program decides: since version 23 it builds with buildx where that is there.
	b=classic
	case ${DOCKER_BUILDKIT:-} in
	0|f|F|false|False|FALSE) ;;
	'') c=$(within docker version --format '{{.Client.Version}}' 2>/dev/null); c=${c%%.*}
		case $c in *[!0-9]*|'') c=0;; esac
		[ "$c" -lt 23 ] || ! within docker buildx version >/dev/null 2>&1 || b=buildkit;;
	*) b=buildkit;;
	esac
	echo "builder=$b"
	i=$(within docker info --format '{{.SwapLimit}} {{.DockerRootDir}}' 2>/dev/null)
	[ $swap = no ] || [ "${i%% *}" != true ] || swap=bounded
	echo "data=${i#* }"
else
	s=$(within podman info --format '{{.Version.Version}} {{.Store.GraphRoot}}' 2>&1) || { printf '%s\n' "$s" >&2; exit 43; }
	echo "data=${s#* }"; s=${s%% *}
	[ $swap = no ] || ! podman update --help >/dev/null 2>&1 || swap=bounded
fi
echo "swap=$swap"
[ ! -c /dev/net/tun ] || echo tun=yes
case $(uname -s)-$(uname -m) in Linux-x86_64) echo arch=amd64;; Linux-aarch64|Linux-arm64) echo arch=arm64;; esac
echo "server=$s"`

// names lists the hosts to put sandboxes on; there must be at least one. A record that
// cannot be read stops only its own host.
func (e *extension) names() ([]string, error) {
	names, err := e.configured()
	switch {
	case len(names) > 0:
		return names, nil
	case err != nil:
		return nil, err
	}
	return nil, sandboxer.E(sandboxer.Unavailable, nil, "%s has no hosts for sandboxes", e.env.Extension).
		WithHint("add one: sandboxer host add NAME USER@HOST")
}

// configured lists the configured hosts. Hosts that cannot be read are an error, in addition to
// the others: the sandbox may be there.
func (e *extension) configured() ([]string, error) {
	names := slices.Clone(e.cfg.Hosts)
	if e.cfg.Host != "" && !slices.Contains(names, e.cfg.Host) {
		names = append(names, e.cfg.Host)
	}
	if len(names) > 0 {
		return names, nil
	}
	recs, err := e.registry.Hosts()
	for _, r := range recs {
		if r.Only != sshrun.OnlyMachines {
			names = append(names, r.Name)
		}
	}
	return names, err
}

// host returns a host by name, without asking it anything.
func (e *extension) host(name string) (*host, error) {
	t := sshrun.Target{Name: name, Addr: name}
	h := &host{capacity: e.cfg.Capacity}
	rec, err := e.registry.Host(name)
	switch {
	case err == nil:
		t, h.draining = rec.Target(), rec.State == sshrun.Draining
		h.capacity = cmp.Or(rec.Capacity, h.capacity)
	case sandboxer.KindOf(err) != sandboxer.NotFound:
		return nil, err
	case name != e.cfg.Host && !slices.Contains(e.cfg.Hosts, name):
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "host %s no longer belongs to %s", name, e.env.Extension).
			WithHint("add it again: sandboxer host add %s USER@HOST", name)
	}
	e.mu.Lock()
	former := e.at[name]
	e.at[name] = t
	e.mu.Unlock()
	if h.Host, err = e.pool.Host(t); err == nil && former.Name != "" && !reflect.DeepEqual(former, t) {
		e.pool.Forget(former) // an operator changed where the name leads, or with which key
		e.forget(h)
	}
	return h, err
}

// look finds out what is not known about h yet.
func (e *extension) look(ctx context.Context, h *host) error {
	e.mu.Lock()
	k := e.known[h.Name()]
	e.mu.Unlock()
	if k != nil {
		h.known, h.engine = k, e.engineOf(h, k)
		return nil
	}
	w := e.watch(h.Name())
	if err := w.Recheck(ctx); err != nil {
		return err
	}
	said := &capture.Last{Max: engine.MaxSaid}
	out, exit, err := h.Capture(ctx, sshrun.Cmd{Script: detect, Args: append([]string{e.cfg.Root}, e.cfg.compose()...), Env: e.engineEnv(), Stderr: said}, 64<<10)
	if err != nil {
		return err
	}
	why := errors.New(engine.OneLine(said.String()))
	switch exit.Code {
	case 0:
	case 41:
		return sandboxer.E(sandboxer.Unavailable, why, "host %s: the directory %s cannot be used", h.Name(), e.cfg.Root)
	case 42:
		return sandboxer.E(sandboxer.Unavailable, why, "host %s has none of docker compose, docker-compose and podman-compose with its engine", h.Name()).
			WithHint("install one there, or set compose_cmd; to see the programs of the host: sandboxer host probe %s", h.Name())
	case 44:
		return w.Hung()
	default:
		return sandboxer.E(sandboxer.Unavailable, why, "host %s: the engine does not answer (%s)", h.Name(), engine.OneLine(said.String())).
			WithHint("is it running, and may the account use it? try there: docker info")
	}
	k = &known{slots: make(chan struct{}, e.cfg.Parallel), builds: make(chan struct{}, e.cfg.Parallel), carrying: make(chan struct{}, 1)}
	for line := range strings.Lines(string(out)) {
		key, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "root":
			k.root = v
		case "engine":
			k.engine = v
		case "compose":
			k.compose = strings.Fields(v)
		case "version":
			k.version = v
		case "builder":
			k.builder = v
		case "swap":
			k.swap = v
		case "arch":
			k.arch = v
		case "tun":
			k.tun = v == "yes"
		case "data":
			k.data = v
		case "server":
			k.server = v
		case "socket":
			k.socket = strings.TrimPrefix(v, "unix://")
		}
	}
	if !strings.HasPrefix(k.root, "/") || k.engine == "" || len(k.compose) == 0 || strings.ContainsAny(k.root, ":,$\n") {
		return sandboxer.E(sandboxer.Unavailable, nil, "host %s: the directory %q cannot be used for mounts, or the host's answers are incomplete", h.Name(), k.root)
	}
	e.mu.Lock()
	if other := e.known[h.Name()]; other != nil {
		k = other
	}
	e.known[h.Name()] = k
	e.mu.Unlock()
	h.known, h.engine = k, e.engineOf(h, k)
	return nil
}

// engineOf returns the engine of h, the same one as long as its program there is the same.
func (e *extension) engineOf(h *host, k *known) *engine.Engine {
	var w *engine.Watch
	if k.engine == "docker" { // podman has no process that could hang
		w = e.watch(h.Name())
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	en := e.engines[h.Name()]
	if en == nil || en.Program != k.engine || en.Host != engine.Host(h.Host) {
		en = e.newEngine(h)
		en.Program, en.Watch = k.engine, w
		e.engines[h.Name()] = en
	}
	return en
}

// newEngine returns an engine on h whose program is not known.
func (e *extension) newEngine(h *host) *engine.Engine {
	return &engine.Engine{Env: e.engineEnv(), Host: h.Host, Log: e.log(), Failed: func(said string) error { return e.failed(h, "a step", said, nil) }}
}

// log is where this extension logs to, nil for nowhere.
func (e *extension) log() *slog.Logger {
	if e.env.Log == nil {
		return nil
	}
	return e.env.Log.With("extension", e.env.Extension)
}

// watch returns the watch of Docker on a host.
func (e *extension) watch(name string) *engine.Watch {
	e.mu.Lock()
	defer e.mu.Unlock()
	w := e.watches[name]
	if w == nil {
		w = engine.NewWatch(e.ctx, engine.WatchOptions{Program: "docker", Env: e.engineEnv(), Name: name, Every: e.every, Log: e.log(),
			Host: func() (engine.Host, error) { // it may have changed its address since
				h, err := e.host(name)
				if err != nil {
					return nil, err
				}
				return h.Host, nil
			}})
		e.watches[name] = w
	}
	return w
}

// forget drops what is known of a host, so that the next look asks it again.
func (e *extension) forget(h *host) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.known, h.Name())
}

func (e *extension) engineEnv() map[string]string {
	if e.cfg.Engine == "" {
		return nil
	}
	return map[string]string{"DOCKER_HOST": e.cfg.Engine, "CONTAINER_HOST": e.cfg.Engine}
}

// assigned returns the host that p names for the sandbox, after a look at it.
func (e *extension) assigned(ctx context.Context, p *plan) (*host, error) {
	switch at, err := e.former(ctx, p.name); {
	case err != nil:
		return nil, err
	case at == untouched: // which is not going to be true any more
		if err := e.forgetFormer(ctx, p.name); err != nil {
			return nil, err
		}
	case at != "" && at != p.spec.Place:
		return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is placed on host %s, but an earlier version recorded that it is on %s", p.spec.ID, p.spec.Place, at).
			WithHint("destroy it and create it again")
	}
	if p.spec.Place == "" {
		return nil, sandboxer.E(sandboxer.Internal, nil, "the broker chose no host of %s for sandbox %s", e.env.Extension, p.spec.ID)
	}
	h, err := e.use(ctx, p.spec.Place)
	if err == nil {
		err = e.fits(h, p)
	}
	return h, err
}

// use returns a host by name, after a look at it.
func (e *extension) use(ctx context.Context, name string) (*host, error) {
	h, err := e.host(name)
	if err == nil {
		err = e.look(ctx, h)
	}
	return h, err
}

// script runs a script that needs no engine on h, which may not have been looked at yet, and returns
// its output. A non-zero exit is an error with a kind that fits the output.
func (e *extension) script(ctx context.Context, h *host, env map[string]string, stdin io.Reader, script string, args ...string) (string, error) {
	return e.newEngine(h).HostScript(ctx, env, stdin, script, args...)
}

// failed is the error of a program of the host that failed with the output said. The
// values of secret are blanked out of it.
func (e *extension) failed(h *host, what, said string, secret map[string]string) error {
	for _, v := range secret {
		if len(v) > 3 {
			said = strings.ReplaceAll(said, v, "…")
		}
	}
	err := engine.Failure(h.Name(), what, said, reason(said))
	switch {
	case errors.Is(err, engine.ErrAbsent):
		e.forget(h)
	case err.Kind == sandboxer.Failed && err.Hint == "" && lacksNetwork(said):
		return err.WithHint("%s", e.networkHint())
	}
	return err
}

// lacksNetwork reports whether a program's output says that it could not reach another machine.
func lacksNetwork(said string) bool {
	said = strings.ToLower(said)
	return slices.ContainsFunc([]string{
		"could not resolve", "couldn't resolve", "failed to resolve", "temporary failure resolving", "name resolution", "name or service not known",
		"network is unreachable", "network unreachable", "no route to host", "eai_again", "getaddrinfo", "bad address '", "temporary error (try again later)",
		"failed to establish a new connection", "dns error", "failed to lookup address", "unknownhostexception", "server misbehaving",
	}, func(words string) bool { return strings.Contains(said, words) })
}

// networkHint says how to give builds and services a network.
func (e *extension) networkHint() string {
	if e.cfg.BuildNetwork {
		return "services have no network unless the profile says network: public, or network: allow with the destinations"
	}
	return fmt.Sprintf("builds and services have no network unless the profile says network: public, or network: allow with the destinations; build_network: true in the config of %s gives one to builds only", e.env.Extension)
}

// underWay is a line in which compose reports its progress.
var underWay = regexp.MustCompile(`^ *(Container|Network|Volume|Image) \S+ +(Creating|Created|Starting|Started|Waiting|Healthy|Running|Pulling|Pulled|Recreate|Recreated|Stopping|Stopped|Interrupted) *$`)

// podmanEnded is where podman-compose reports how a podman ended.
var podmanEnded = regexp.MustCompile(`(?m)\]' ((?:died with|returned non-zero exit status) [^\n]{1,40}?)\.?$`)

// reason is the relevant part of a compose program's output. For podman-compose, which prints
// at length what it asked of podman and where it was in its own source, that is podman's own message
// of refusal; for others each line that is not about progress, once.
func reason(said string) string {
	podman := strings.Contains(said, "CalledProcessError: Command '['podman', ") || strings.Contains(said, "\nexit code: ")
	var lines []string
	for line := range strings.SplitSeq(sshrun.Plain(said), "\n") {
		line, isError := strings.CutPrefix(strings.TrimRight(line, " \r"), "Error: ")
		last := len(lines) - 1
		switch {
		case line == "", podman && !isError, underWay.MatchString(line), slices.Contains(lines, line):
		case last >= 0 && podman && (strings.HasSuffix(line, " "+lines[last]) || strings.HasPrefix(line, "no container with name or ID")):
			// podman-compose tried to start what podman would not run
		case last >= 0 && strings.HasSuffix(lines[last], " "+line):
			lines[last] = line
		default:
			lines = append(lines, line)
		}
	}
	switch {
	case len(lines) > 0:
		return strings.Join(lines, "\n")
	case podman: // what it was asked has the values of variables
		how := ""
		if m := podmanEnded.FindAllStringSubmatch(said, -1); len(m) > 0 {
			how = ": it " + m[len(m)-1][1]
		}
		return "podman gave no reason" + how
	}
	return said
}

package composessh

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net/netip"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// Check implements sandboxer.Checker.
func (e *extension) Check(ctx context.Context, spec sandboxer.Spec) error {
	_, err := e.plan(ctx, spec)
	return err
}

// Admit implements sandboxer.Admitter.
func (e *extension) Admit(spec sandboxer.Spec, name string) error {
	switch name {
	case sandboxer.RestrictedImage, sandboxer.RestrictedMounts: // refused for what they are (plan)
		return nil
	case sandboxer.RestrictedHost:
		if names, err := e.names(); err == nil && !slices.Contains(names, spec.Host) {
			return sandboxer.E(sandboxer.Denied, nil, "%s has no host %q", e.env.Extension, spec.Host).
				WithHint("leave the host out, or ask an administrator to add it")
		}
		return nil
	}
	if name != "repo" {
		return sandboxer.E(sandboxer.Denied, nil, "the input %q weakens the confinement of containers, which only an administrator may do", name).
			WithHint("ask for a profile that sets it")
	}
	return sandboxer.E(sandboxer.Denied, nil, "the input %q is a path on the broker's machine, which only an administrator may use", name).
		WithHint("ask for a profile that names the directory")
}

// A plan is a parsed spec.
type plan struct {
	spec    sandboxer.Spec
	name    string
	repo    string
	project *composefile.Project
	meta    meta

	buildNetwork  bool // builds have that of the engine
	boundedBuilds bool // the operator set bounds of builds other than the defaults
	filtered      bool // a gateway is between services and the network
	linkedBuilds  bool // and between builds and it; known once the host is
}

// plan parses a spec or refuses it, before anything exists.
func (e *extension) plan(ctx context.Context, spec sandboxer.Spec) (*plan, error) {
	cannot := func(what, hint string) error {
		return sandboxer.E(sandboxer.Unsupported, nil, "%s: %s", e.env.Extension, what).WithHint("%s", hint)
	}
	switch {
	case spec.Image != "":
		return nil, cannot("an image is named in the compose file, not in the request", "leave image out of the request and the profile")
	case len(spec.Command) > 0:
		return nil, cannot("commands are named in the compose file, not in the request", "leave command out of the request and the profile")
	case len(spec.Mounts) > 0:
		return nil, cannot("directories of the broker's machine cannot be mounted on another host", "put the files into the repository")
	case spec.Workspace != "":
		return nil, cannot("the compose file sets where the workspace is mounted", "leave workspace out of the profile")
	case spec.Limits.DiskBytes > 0:
		return nil, cannot("disk space of a compose project cannot be limited", "leave the disk limit out")
	case spec.Limits.GPUs > 0:
		return nil, cannot("sandboxes cannot get GPUs of hosts", "leave the GPUs out")
	}
	repo := spec.Inputs["repo"]
	switch {
	case repo == "":
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the input repo is missing").WithHint("name the directory with the compose file: --input repo=DIR")
	case strings.Contains(repo, "://"):
		return nil, cannot("repo is a directory of the broker's machine, not a URL", "clone it first and name the directory")
	case !filepath.IsAbs(repo):
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the input repo, %q, is not an absolute path", repo)
	}
	if v := spec.Inputs["new_privileges"]; v != "" && v != "yes" && v != "no" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the input new_privileges must be yes or no, not %q", v)
	}
	opts := composefile.Options{File: spec.Inputs["file"], Env: spec.Env, HostGateway: e.cfg.HostGateway && spec.Network.Mode == sandboxer.NetworkPublic && e.cfg.UnfilteredEgress}
	if p := spec.Inputs["profiles"]; p != "" {
		opts.Profiles = strings.Split(p, ",")
	}
	project, err := composefile.Load(ctx, repo, opts)
	if err != nil {
		return nil, err
	}
	p := &plan{spec: spec, name: e.name(spec.ID, spec.Generation), repo: repo, project: project,
		filtered:      e.cfg.filters(spec.Network),
		buildNetwork:  spec.Network.Mode == sandboxer.NetworkPublic && e.cfg.UnfilteredEgress || e.cfg.BuildNetwork,
		boundedBuilds: e.cfg.BuildMemory != defaults.BuildMemory || e.cfg.BuildCPUs != defaults.BuildCPUs}
	notes := project.Notes
	if p.filtered {
		for _, name := range project.OwnResolvers() {
			notes = append(slices.Clone(notes), name+": dns is left out: the network policy decides how names are resolved")
		}
	}
	p.meta = meta{V: 1, Name: p.name, ID: spec.ID, Generation: spec.Generation, Owner: e.env.Owner, User: spec.User,
		Ports: spec.Ports, Services: project.Services, Notes: notes, Places: project.Places(), Service: cmp.Or(spec.Inputs["service"], first(project.Services))}
	if p.meta.service(p.meta.Service) == nil {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%s has no service %q", project.File, p.meta.Service)
	}
	if err := p.keep(spec.Inputs["volumes"], spec.Inputs["quiesce"]); err != nil {
		return nil, err
	}
	// Rendering compares the services' own limits with the sandbox's.
	r := p.rendering("/x", nil, false)
	p.behind(&r, "sandboxer-egress")
	if _, err := p.project.Render(r); err != nil {
		return nil, err
	}
	return p, nil
}

// first is the service that commands run in: the first one that is not meant to end.
func first(services []composefile.Service) string {
	i := slices.IndexFunc(services, func(s composefile.Service) bool { return !s.OneShot })
	return services[max(i, 0)].Name
}

// restarts is how often in a row an engine restarts a failed service, where the
// file lets it: for a minute and a half, if it ends at once. Docker waits longer each time,
// Podman does not.
func restarts(podman bool) int {
	if podman {
		return 90
	}
	return 10
}

func (p *plan) labels() map[string]string {
	l := map[string]string{
		engine.LabelName: p.name, engine.LabelOwner: p.meta.Owner, "dev.sandboxer.id": p.spec.ID,
		"dev.sandboxer.generation": strconv.Itoa(p.spec.Generation), "dev.sandboxer.profile": p.spec.Profile.ID,
	}
	if p.spec.Consumer.ID != "" {
		l["dev.sandboxer.consumer"] = p.spec.Consumer.ID
	}
	if !p.spec.Fuse.IsZero() {
		l["dev.sandboxer.expires"] = p.spec.Fuse.UTC().Format(time.RFC3339)
	}
	for k, v := range p.spec.Labels {
		l["dev.sandboxer.label."+k] = v
	}
	return l
}

// env is in the environment of every process that makes the sandbox, to find it by.
func (p *plan) env() map[string]string { return map[string]string{"SANDBOXER_SANDBOX": p.name} }

// image is the name of the image that is built for a service. The part before the colon belongs to
// this sandbox alone.
func (p *plan) image(service string) string { return strings.ToLower(p.name) + ":" + service }

func (p *plan) rendering(dir string, subnets []netip.Prefix, podman bool) composefile.Rendering {
	nets := map[string]string{}
	for i, n := range p.project.Networks {
		if i < len(subnets) {
			nets[n] = subnets[i].String()
		}
	}
	return composefile.Rendering{
		Dir: dir, Labels: p.labels(), ServiceLabel: engine.LabelService, Env: p.spec.Env, Subnets: nets, Podman: podman,
		Sealed: p.spec.Network.Mode != sandboxer.NetworkPublic, NewPrivileges: p.spec.Inputs["new_privileges"] == "yes", Limits: p.spec.Limits, ImageOf: p.image, StopAfter: 10 * time.Second,
		Restarts: restarts(podman),
	}
}

// fits refuses limits that h cannot enforce, and fields that its compose program would drop.
func (p *plan) fits(h *host) error {
	if p.spec.Limits.MemoryBytes > 0 && h.known.swap == "yes" {
		return sandboxer.E(sandboxer.Unsupported, nil, "a memory limit cannot be enforced on host %s: it has swap space, which its engine cannot limit", h.Name()).
			WithHint("turn swap off there, or let its engine limit it (swapaccount=1, or podman 4.3), or leave the limit out")
	}
	if h.known.builder == "buildkit" && p.boundedBuilds && len(p.project.Builds) > 0 {
		return sandboxer.E(sandboxer.Unsupported, nil, "build_memory and build_cpus of the extension's config cannot be enforced on host %s: BuildKit, which builds there, supports neither", h.Name()).
			WithHint("set DOCKER_BUILDKIT=0 for the account there to build without BuildKit; or leave them out of the config; or use an image that is already built")
	}
	if !h.known.podmanCompose() {
		return nil
	}
	_, err := p.project.Render(p.rendering("/x", nil, true))
	return err
}

// note reports something about the sandbox to its creator, once.
func (p *plan) note(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(p.meta.Notes, text) {
		p.meta.Notes = append(slices.Clone(p.meta.Notes), text)
	}
}

// on sets what depends on the host.
func (p *plan) on(h *host) {
	p.linkedBuilds = p.filtered && !p.buildNetwork && h.known.builder != "buildkit" && len(p.project.Builds) > 0
	if p.filtered && !p.buildNetwork && h.known.builder == "buildkit" && len(p.project.Builds) > 0 {
		p.note("images are built without a network: BuildKit builds on this host, and its network cannot be filtered")
	}
}

// begin makes the directory of sandbox $2 below $1, which is the lock, if at most $3
// are there, and takes $5 of $6 subnets for it, from $4 on. It prints one subnet per line,
// whether the agent $7 is there, and then how far the sandbox has come. Standard input is
// its meta.json.
const begin = `
cd -- "$1" || exit
[ ! -e "$2/up" ] || { echo up; exit 0; }
state=again
if mkdir -- "$2" 2>/dev/null; then
	state=new n=0
	for d in sbx-*; do [ ! -d "$d" ] || n=$((n+1)); done
	[ $n -le "$3" ] || { rmdir -- "$2"; echo full; exit 0; }
elif [ -e "$2/started" ]; then state=started; fi
mkdir -p -- "$2/repo" "$2/files" "$2/copies" && cat >"$2/meta.tmp" && mv -f -- "$2/meta.tmp" "$2/meta.json" || exit
got=0
for l in .net/*; do
	[ $got -lt "$5" ] && [ "$(readlink -- "$l" 2>/dev/null)" = "../$2" ] || continue
	echo "net ${l#.net/}"; got=$((got+1))
done
i=$4 tried=0
while [ $got -lt "$5" ]; do
	if ln -s -- "../$2" ".net/$i" 2>/dev/null; then echo "net $i"; got=$((got+1))
	elif [ -L ".net/$i" ] && [ ! -e ".net/$i" ]; then rm -f -- ".net/$i"; continue; fi
	i=$(((i+1)%$6)) tried=$((tried+1))
	[ $tried -le "$6" ] || { echo "could not find an available address pool" >&2; exit 1; }
done
if [ -n "$7" ]; then mkdir -p .agent || exit; [ ! -f ".agent/$7/sandboxer-agent" ] || echo agent; fi
echo $state`

// Provision implements sandboxer.Extension.
func (e *extension) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	return e.provision(ctx, spec, nil)
}

func (e *extension) provision(ctx context.Context, spec sandboxer.Spec, from *content) (sandboxer.Handle, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Handle{}, err
	}
	p, err := e.plan(ctx, spec)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	if from != nil {
		if err := from.fits(p); err != nil {
			return sandboxer.Handle{}, err
		}
	}
	unlock, err := e.env.Notes.Lock(ctx, p.name)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	defer unlock()
	h, err := e.assigned(ctx, p)
	if err != nil {
		return sandboxer.Handle{}, sandboxer.Untouched(err)
	}
	handle := sandboxer.Handle{SandboxID: spec.ID, Generation: spec.Generation, Host: h.Name(), Ref: p.name, Data: json.RawMessage(`{"v":1}`)}
	for try := 0; ; try++ {
		err := e.start(ctx, h, p, from, try)
		if err == nil {
			return handle, nil
		}
		if cerr := ctx.Err(); cerr != nil {
			return sandboxer.Handle{}, cerr
		}
		if !errors.Is(err, errOverlap) {
			return sandboxer.Handle{}, err
		}
		if try == 5 {
			return sandboxer.Handle{}, sandboxer.E(sandboxer.Exhausted, err, "every subnet of %[2]s that was tried overlaps with another network on host %[1]s", h.Name(), e.cfg.Subnets).
				WithHint("configure other subnets for the extension")
		}
	}
}

var errOverlap = errors.New("a subnet is in use")

// start does the remaining steps on h, from the directory to running containers.
func (e *extension) start(ctx context.Context, h *host, p *plan, from *content, try int) error {
	select {
	case h.known.slots <- struct{}{}:
		defer func() { <-h.known.slots }()
	case <-ctx.Done():
		return ctx.Err()
	}
	env := p.env()
	dir := path.Join(h.known.root, p.name)
	if h.known.podmanCompose() && p.project.Waits() {
		p.note("podman-compose starts services in order, without waiting for the conditions of depends_on")
	}
	if h.known.builder == "buildkit" && len(p.project.Builds) > 0 {
		p.note("images are built with BuildKit, which has a time limit, but no limits of memory and processors")
	}
	p.on(h)
	e.agentFor(h, p)
	data, err := json.Marshal(p.meta)
	if err != nil {
		return err
	}
	pool := netip.MustParsePrefix(e.cfg.Subnets)
	size := 1 << (netBits - pool.Bits())
	sum := fnv.New32a()
	fmt.Fprint(sum, p.name, try)
	out := ""
	err = e.step(pDirectory, func() (err error) {
		out, err = e.script(ctx, h, env, bytes.NewReader(data), begin, h.known.root, p.name, strconv.Itoa(h.capacity),
			strconv.Itoa(int(sum.Sum32()%uint32(size))), strconv.Itoa(len(p.project.Networks)), strconv.Itoa(size), p.meta.Agent)
		return err
	})
	if err != nil {
		return err
	}
	var subnets []netip.Prefix
	var numbers []string
	state, agentThere := "", false
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		if line == "agent" {
			agentThere = true
			continue
		}
		if n, ok := strings.CutPrefix(line, "net "); ok {
			i, err := strconv.Atoi(n)
			if err != nil || i < 0 || i >= size {
				return sandboxer.E(sandboxer.Failed, nil, "host %s: %q is not a subnet", h.Name(), n)
			}
			numbers = append(numbers, n)
			subnets = append(subnets, subnet(pool, i))
			continue
		}
		state = line
	}
	switch state {
	case "up":
		return nil
	case "full":
		return sandboxer.Untouched(sandboxer.E(sandboxer.Exhausted, nil, "host %s has reached its maximum of %d sandboxes", h.Name(), h.capacity).WithHint("destroy some, or raise the capacity"))
	case "started":
		// Earlier containers may have left links where mounts are going to be made, and
		// interrupted commands may still be running.
		if err := h.Kill(ctx, "SANDBOXER_SANDBOX", p.name); err != nil && sandboxer.KindOf(err) == sandboxer.Unavailable {
			return err
		}
		keep := ""
		if from != nil && from.placed {
			keep = "data"
		}
		if _, err := h.engine.Script(ctx, env, nil, removeObjects, h.known.engine, p.name, keep); err != nil {
			return err
		}
	}
	r := p.rendering(dir, subnets, h.known.podmanCompose())
	if err := e.bringAgent(ctx, h, p, &r, agentThere); err != nil {
		return err
	}
	if p.filtered {
		image, err := e.carry(ctx, h)
		if err != nil {
			return err
		}
		p.behind(&r, image)
	}
	if from == nil || !from.placed {
		if err := e.populate(ctx, h, p, r, from); err != nil {
			return err
		}
	} else if err := e.prepare(ctx, h, p, r); err != nil {
		return err
	}
	if p.spec.User != "" {
		if err := e.give(ctx, h, p); err != nil {
			return err
		}
	}
	return e.up(ctx, h, p, env, numbers, try == 0)
}

// populate copies the workspace, makes the images and puts the content of from in place, in
// this order: so images are made from what the policy has checked.
func (e *extension) populate(ctx context.Context, h *host, p *plan, r composefile.Rendering, from *content) error {
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "copying " + filepath.Base(p.repo) + " to " + h.Name()})
	err := e.step(pCopy, func() error {
		_, err := h.Push(ctx, p.repo, path.Join(r.Dir, "repo"), sshrun.SyncOptions{Delete: true})
		return err
	})
	if err != nil {
		if _, said, ok := sshrun.ExitOf(err); ok {
			return e.failed(h, "copying", said, nil)
		}
		return err
	}
	files := append(slices.Clone(p.project.Files), e.dockerfiles(h, p)...)
	if r.Podman {
		files = append(files, p.project.EnvFiles(r)...)
	}
	if err := writeFiles(ctx, h, path.Join(r.Dir, "files"), files); err != nil {
		return err
	}
	if err := e.prepare(ctx, h, p, r); err != nil {
		return err
	}
	end, err := e.linkBuilds(ctx, h, p)
	if err != nil {
		return err
	}
	err = e.step(pBuild, func() error { return e.build(ctx, h, p) })
	end()
	if err != nil || from == nil {
		return err
	}
	if err := e.step(pFill, func() error { return e.fill(ctx, h, p, r.Dir, from) }); err != nil {
		return err
	}
	return e.prepare(ctx, h, p, r)
}

// atOnce is how many files are written at a time: each takes two commands of a connection
// that has room for ten.
const atOnce = 4

func writeFiles(ctx context.Context, h *host, dir string, files []composefile.File) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	slots := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for _, f := range files {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			if ctx.Err() != nil {
				return
			}
			if err := h.WriteFile(ctx, path.Join(dir, f.Name), f.Mode, bytes.NewReader(f.Content)); err != nil {
				cancel(err) // the others are of no use
			}
		})
	}
	all.Wait()
	return context.Cause(ctx)
}

// prepare writes the compose file, and makes the places that it mounts.
func (e *extension) prepare(ctx context.Context, h *host, p *plan, r composefile.Rendering) error {
	text, err := p.project.Render(r)
	if err != nil {
		return err
	}
	if p.filtered {
		cfg, err := e.gatewayConfig(p, r)
		if err != nil {
			return err
		}
		// The gateway, which has no rights to others' files, can read it whatever its owner.
		if err := h.WriteFile(ctx, r.Egress.File, 0o644, bytes.NewReader(cfg)); err != nil {
			return err
		}
	}
	args := []string{r.Dir}
	for _, b := range append(slices.Clone(p.project.Binds), p.project.Copies...) {
		kind := "d"
		if b.File {
			kind = "f"
		}
		args = append(args, kind, b.Source, b.Copy)
	}
	return e.step(pMounts, func() error {
		_, err := e.script(ctx, h, p.env(), bytes.NewReader(text), places, args...)
		return err
	})
}

// places makes, below $1, the places that are mounted: each is given by its kind, its
// name in the workspace and the name of its copy. None may be behind a link. Standard
// input is the compose file.
const places = `
cd -P -- "$1/repo" || exit
umask 077
cat >../compose.tmp && mv -f ../compose.tmp ../compose.yaml || exit
root=$(pwd -P); shift
while [ $# -ge 3 ]; do
	k=$1 s=$2 c=$3; shift 3
	if [ $k = d ]; then
		(umask 022; mkdir -p -- "./$s") || exit
		at=$(cd -P -- "./$s" && pwd -P) || exit
		[ "$s" = . ] && want=$root || want=$root/$s
	else
		[ -f "./$s" ] && [ ! -L "./$s" ] || { echo "$s is no regular file" >&2; exit 1; }
		d=.; case $s in */*) d=${s%/*};; esac
		at=$(cd -P -- "./$d" && pwd -P) || exit
		[ "$d" = . ] && want=$root || want=$root/$d
	fi
	[ "$at" = "$want" ] || { echo "$s is behind a link" >&2; exit 1; }
	if [ -n "$c" ] && [ ! -e "../copies/$c" ]; then
		rm -rf "../copies/$c.tmp" && cp -RPp -- "./$s" "../copies/$c.tmp" && mv -- "../copies/$c.tmp" "../copies/$c" || exit
	fi
done
: >../started`

// numeric is a user for which the image need not be searched.
var numeric = regexp.MustCompile(`^[0-9]{1,9}:[0-9]{1,9}$`)

// giving makes the workspace $1 the property of $2, uid:gid, while nothing runs there. 3:
// the account may not.
const giving = `
u=$(id -u)
[ "$u:$(id -g)" != "$2" ] || exit 0
[ "$u" = 0 ] || exit 3
cd -P -- "$1" && chown -hR "$2" .`

// give makes the workspace the property of the sandbox's user, as the image of the default
// service defines it. Later files get the owner of the workspace.
func (e *extension) give(ctx context.Context, h *host, p *plan) error {
	user := p.spec.User
	if !numeric.MatchString(user) {
		out, err := h.engine.Script(ctx, p.env(), nil, whoIs, h.known.engine, p.name, p.imageOf(p.meta.Service), user)
		if err != nil {
			return err
		}
		uid, gid, _ := strings.Cut(strings.TrimSpace(out), "\n")
		if user = uid + ":" + gid; !numeric.MatchString(user) {
			return sandboxer.E(sandboxer.Invalid, errors.New(engine.OneLine(out)), "the image of service %[2]s has no user %[1]q, or no program id to look it up", p.spec.User, p.meta.Service).
				WithHint("write the user as uid:gid")
		}
	}
	exit, err := h.Run(ctx, sshrun.Cmd{Script: giving, Args: []string{path.Join(h.known.root, p.name, "repo"), user}})
	switch {
	case err != nil:
		return err
	case exit.Code == 3:
		return sandboxer.E(sandboxer.Unsupported, nil, "the workspace cannot be given to the user %s: the account on host %s is not root", p.spec.User, h.Name()).
			WithHint("leave the user out, use a host whose account is root, or set a user with that account's uid:gid")
	case exit.Code != 0:
		return sandboxer.E(sandboxer.Failed, nil, "the workspace on host %s cannot be given to the user %s", h.Name(), p.spec.User)
	}
	return nil
}

// whoIs prints uid and gid of the user $4 in the image $3, or what is wrong with that.
const whoIs = `
ask() { "$e" run --rm --network none --read-only --cap-drop ALL --security-opt no-new-privileges --label "dev.sandboxer.name=$n" -u "$u" --entrypoint id "$i" "$1" 2>&1; }
e=$1 n=$2 i=$3 u=$4
ask -u && ask -g
exit 0`

// imageOf is the image that a service runs.
func (p *plan) imageOf(service string) string {
	if slices.ContainsFunc(p.project.Builds, func(b composefile.Build) bool { return b.Service == service }) {
		return p.image(service)
	}
	return p.project.ImageOf(service)
}

// long runs a long command and reports its output as progress.
func (e *extension) long(ctx context.Context, h *host, p *plan, what string, args []string, env map[string]string) error {
	return e.longer(ctx, h, p, what, args, env, nil)
}

// longer is long for a command whose success is not trusted: check gets its output
// then.
func (e *extension) longer(ctx context.Context, h *host, p *plan, what string, args []string, env map[string]string, check func(said string) error) error {
	said := &capture.Last{Max: engine.MaxSaid}
	w := &progress{ctx: ctx, step: what, to: said}
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: what})
	exit, err := h.engine.Command(ctx, sshrun.Cmd{Script: `unset COMPOSE_FILE COMPOSE_PROJECT_NAME COMPOSE_PROFILES COMPOSE_ENV_FILES COMPOSE_PATH_SEPARATOR; exec "$@" 2>&1`,
		Args: args, Env: env, Dir: path.Join(h.known.root, p.name), Stdout: w})
	if err != nil {
		return err
	}
	if exit.Code != 0 {
		if isOverlap(said.String()) {
			return errOverlap
		}
		return e.failed(h, what, e.asWritten(h, p, engine.Said(said.String(), exit)), p.spec.Env)
	}
	if check != nil {
		return check(said.String())
	}
	return nil
}

// started fails if not everything was started: podman-compose goes on when podman refuses to
// start something, and then reports success. said is its output.
func (e *extension) started(ctx context.Context, h *host, p *plan, said string) error {
	s, err := e.status(ctx, h, p.name)
	if err != nil {
		return err
	}
	for _, want := range p.meta.Services {
		i := slices.IndexFunc(s.containers, func(c engine.Container) bool { return c.Service() == want.Name })
		if i >= 0 && !slices.Contains([]string{"created", "configured", "initialized"}, s.containers[i].State.Status) {
			continue
		}
		if isOverlap(said) {
			return errOverlap
		}
		return e.failed(h, "starting the service "+want.Name, said, p.spec.Env)
	}
	return nil
}

// isOverlap reports whether an engine refused a network because of its subnet: Docker when
// it has assigned it or when it is in use already, Podman.
func isOverlap(said string) bool {
	return strings.Contains(said, "Pool overlaps with") || strings.Contains(said, "networks have overlapping") ||
		strings.Contains(said, "is already used on the host or by another config")
}

type progress struct {
	ctx  context.Context
	step string
	to   io.Writer
	n    int64
}

func (w *progress) Write(p []byte) (int, error) {
	w.n += int64(len(p))
	sandboxer.ReportProgress(w.ctx, sandboxer.Progress{Step: w.step, Done: w.n})
	return w.to.Write(p)
}

// ownNetwork is how long an engine may take to make a network whose caller is gone.
const ownNetwork = time.Second

// up starts the services. errOverlap: one of the subnets with those numbers is taken. With
// first it may be taken by a network of the sandbox itself, which the engine is still making for
// an interrupted call; a further try finds that network.
func (e *extension) up(ctx context.Context, h *host, p *plan, env map[string]string, numbers []string, first bool) error {
	dir := path.Join(h.known.root, p.name)
	args := append(e.compose(h, p), "up", "-d")
	var check func(string) error
	if h.known.podmanCompose() {
		check = func(said string) error { return e.started(ctx, h, p, said) }
	}
	var err error
	if p.filtered {
		err = e.step(pLink, func() error { return e.link(ctx, h, p, p.project.Linked()) })
	}
	if err != nil {
		return e.notUp(ctx, h, env, err, numbers, first)
	}
	err = e.step(pUp, func() error {
		for try := 1; ; try++ {
			err := e.longer(ctx, h, p, "starting "+service(p.project.Services), args, env, check)
			switch {
			case err == nil:
				return nil
			case isAwaited(err):
				if err := e.awaited(ctx, h, p, err); err != nil {
					return err
				}
				try = 0
			case try == starts || !isStumble(err):
				return err
			}
		}
	})
	if err != nil {
		return e.notUp(ctx, h, env, err, numbers, first)
	}
	if h.known.podmanCompose() {
		if _, err := e.script(ctx, h, env, nil, noSwap, p.name); err != nil {
			return err
		}
	}
	return e.step(pMark, func() error { _, err := e.script(ctx, h, env, nil, `: >"$1/up"`, dir); return err })
}

// notUp handles err, with which the services did not start: if a subnet is taken
// it records that.
func (e *extension) notUp(ctx context.Context, h *host, env map[string]string, err error, numbers []string, first bool) error {
	if first && errors.Is(err, errOverlap) {
		select {
		case <-time.After(ownNetwork):
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if errors.Is(err, errOverlap) {
		// There is a network of something else: its number is never assigned again.
		_, terr := e.script(ctx, h, env, nil, `cd -- "$1/.net" || exit; shift; for n; do ln -sfn ../.taken "$n" || exit; done`, append([]string{h.known.root}, numbers...)...)
		return errors.Join(err, terr)
	}
	return err
}

// isAwaited reports whether compose gave up because a service that another waits for is not
// in the awaited state. It does so even if the engine is about to start that one again.
func isAwaited(err error) bool {
	return strings.Contains(err.Error(), "dependency failed to start") || strings.Contains(err.Error(), "didn't complete successfully")
}

// awaited returns why services that others wait for failed, after compose gave up on them
// with cause; nil, after a while, if they did not: the engine starts them again.
func (e *extension) awaited(ctx context.Context, h *host, p *plan, cause error) error {
	s, err := e.status(ctx, h, p.name)
	if err != nil {
		return errors.Join(cause, err)
	}
	if _, _, err = p.meta.ready(s, 0, h.known.engine == "podman"); err != nil {
		return e.explain(ctx, h, s, err)
	}
	if !slices.ContainsFunc(s.containers, func(c engine.Container) bool { return c.State.Status == "restarting" || c.RestartCount > 0 }) {
		return cause
	}
	select {
	case <-time.After(300 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// service returns the service that is being started, if it is one.
func service(all []composefile.Service) string {
	if len(all) == 1 {
		return "the service " + all[0].Name
	}
	return "the services"
}

// starts is how often services are started if podman fails because of concurrent changes.
const starts = 8

// isStumble reports whether podman gave up making a network because another interface of
// the host came or went while it checked which addresses are in use: a list of interfaces
// and one of their addresses did not match. On a busy host
// that is one network in twenty.
func isStumble(err error) bool { return strings.Contains(err.Error(), "no such network interface") }

// noSwap removes the swap from the containers of $1: podman-compose does
// not pass memswap_limit on, and Podman allows as much swap as memory by default.
var noSwap = `
podman update --help >/dev/null 2>&1 || exit 0
for i in $(podman ps -q --no-trunc --filter "label=dev.sandboxer.name=$1" --filter "` + engine.OwnNames("$1") + `"); do
	m=$(podman inspect --format '{{.HostConfig.Memory}}' "$i") || continue
	[ "$m" -gt 0 ] || continue
	podman update --memory "$m" --memory-swap "$m" "$i" >/dev/null && continue
	[ "$(podman inspect --format '{{.State.Running}}' "$i" 2>/dev/null)" != true ] || [ "$(wc -l </proc/swaps)" -le 1 ] || exit 1
done`

func subnet(pool netip.Prefix, i int) netip.Prefix {
	a := pool.Addr().As4()
	n := uint32(a[0])<<24 | uint32(a[1])<<16 | uint32(a[2])<<8 | uint32(a[3])
	n += uint32(i) << (32 - netBits)
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}), netBits)
}

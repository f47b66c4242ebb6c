package composessh

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// Builds leave layers, and the next build reuses those that are still
// right. They outlive the sandbox as images without a name, one for each stage of a
// Dockerfile, and are identified by a label that each stage begins with. That label is a part of
// the key by which a layer is found, so that no layer of another installation or tenant is used: a
// build can make a layer hold what its Dockerfile does not say (with HTTP_PROXY, for one).
//
//	dev.sandboxer.owner=<owner> dev.sandboxer.cache=<tenant>.<build>.<stage>
//
// The image of one sandbox is one more layer, with the label that identifies it, and is removed with the
// sandbox. (Given to the engine, labels would change the last step of all, or be many layers.)
//
// <root>/.cache/<tenant>.<build> says whose that is, and by its time when it was used last.
const labelCache = "dev.sandboxer.cache"

// copies is how many images of one stage are kept: a branch, and the one it is based on.
const copies = 2

// A job is an image that is built once, for one service or several with the same build.
type job struct {
	composefile.Build // of the first of them
	services          []string
}

// jobs are the builds for p.
func (p *plan) jobs() (jobs []job) {
	for _, b := range p.project.Builds {
		same := b
		i := slices.IndexFunc(jobs, func(j job) bool { same.Service = j.Service; return reflect.DeepEqual(same, j.Build) })
		if i < 0 {
			jobs, i = append(jobs, job{Build: b}), len(jobs)
		}
		jobs[i].services = append(jobs[i].services, b.Service)
	}
	return jobs
}

// tenant distinguishes a tenant's layers from others'.
func (p *plan) tenant() string { return short(p.spec.Tenant) }

// cache is the name of the layers of a build. Builds with a network have another one: engines
// ignore the network, and the same steps may lead to other layers.
func (p *plan) cache(j job) string {
	reach := fmt.Sprint(p.buildNetwork)
	if p.linkedBuilds {
		reach = fmt.Sprint(p.spec.Network.Mode, p.spec.Network.Allow)
	}
	return p.tenant() + "." + short(fmt.Sprint(filepath.Base(p.repo), "\x00", j.Service, "\x00", reach))
}

func short(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:6])
}

func (j job) file() string { return "dockerfile-" + j.Service }

// dockerfiles are the files to build from, other than the workspace.
func (e *extension) dockerfiles(h *host, p *plan) (files []composefile.File) {
	for _, j := range p.jobs() {
		labels := composefile.Labels{Target: j.Target, Last: []composefile.Label{{Name: engine.LabelName, Value: p.name}}}
		for _, k := range slices.Backward(slices.Sorted(maps.Keys(j.Labels))) {
			labels.Last = slices.Insert(labels.Last, 0, composefile.Label{Name: k, Value: j.Labels[k]})
		}
		labels.Stage = func(stage int) string {
			lines := fmt.Sprintf("LABEL dev.sandboxer.owner=%s %s=%s.%d\n", e.env.Owner, labelCache, p.cache(j), stage)
			if h.known.builder == "buildkit" { // for which labels change nothing of a layer
				lines += "ARG SANDBOXER_TENANT=" + p.tenant() + "\n"
			}
			return lines
		}
		files = append(files, composefile.File{Name: j.file(), Mode: 0o600, Content: labels.Write(j.Dockerfile)})
		if j.Ignore != nil {
			files = append(files, composefile.File{Name: j.file() + ".dockerignore", Mode: 0o600, Content: j.Ignore})
		}
	}
	return files
}

// build builds the images that the file describes, concurrently.
func (e *extension) build(ctx context.Context, h *host, p *plan) error {
	jobs := p.jobs()
	if len(jobs) == 0 {
		return nil
	}
	args := []string{h.known.root}
	for _, j := range jobs {
		args = append(args, p.cache(j), url.PathEscape(p.spec.Tenant)+"/"+url.PathEscape(filepath.Base(p.repo))+"/"+j.Service)
	}
	if _, err := e.script(ctx, h, p.env(), nil, `cd -- "$1" && mkdir -p .cache || exit; shift
while [ $# -ge 2 ]; do printf '%s\n' "$2" >".cache/$1"; shift 2; done`, args...); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	for _, j := range jobs {
		all.Go(func() {
			select {
			case h.known.builds <- struct{}{}:
				defer func() { <-h.known.builds }()
			case <-ctx.Done():
				return
			}
			if err := e.buildOne(ctx, h, p, j); err != nil {
				cancel(err) // the others are of no use
			}
		})
	}
	all.Wait()
	return context.Cause(ctx)
}

func (e *extension) buildOne(ctx context.Context, h *host, p *plan, b job) error {
	args, vars := e.buildArgs(h, p, b)
	for try := 1; ; try++ {
		err := e.timed(ctx, h, b.Service, func(ctx context.Context) error { return e.long(ctx, h, p, "building "+b.Service, args, vars) })
		if err == nil || try == builds || !isVanished(err) {
			return err
		}
	}
}

// buildArgs is the command that builds an image, and the variables that it needs.
func (e *extension) buildArgs(h *host, p *plan, b job) (args []string, vars map[string]string) {
	dir := path.Join(h.known.root, p.name)
	args = []string{h.known.engine, "build", "--force-rm", "-f", path.Join(dir, "files", b.file())}
	for _, s := range b.services {
		args = append(args, "-t", p.image(s))
	}
	switch {
	case p.linkedBuilds:
		args = append(args, "--network", "container:"+buildLink(p.name))
	case !p.buildNetwork:
		args = append(args, "--network", "none")
	}
	vars = p.env()
	args = append(args, engine.Variables("--build-arg", b.Args, vars)...)
	if b.Target != "" {
		args = append(args, "--target", b.Target)
	}
	if b.Platform != "" {
		args = append(args, "--platform", b.Platform)
	}
	if h.known.builder != "buildkit" { // which reads over them
		args = append(args, "--memory", strconv.FormatInt(e.cfg.BuildMemory, 10), "--memory-swap", strconv.FormatInt(e.cfg.BuildMemory, 10),
			"--cpu-period", "100000", "--cpu-quota", strconv.Itoa(e.cfg.BuildCPUs*100_000))
	}
	if b.NoCache {
		args = append(args, "--no-cache")
	}
	if b.Pull {
		args = append(args, "--pull")
	}
	return append(args, path.Join(dir, "repo", b.Context)), vars
}

// timed ends a build that exceeds its time limit.
func (e *extension) timed(ctx context.Context, h *host, service string, build func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, e.cfg.BuildTimeout, errBuild)
	defer cancel()
	err := build(ctx)
	if err != nil && context.Cause(ctx) == errBuild {
		return sandboxer.E(sandboxer.Failed, err, "building %s on host %s took longer than %s", service, h.Name(), e.cfg.BuildTimeout).
			WithHint("build the image beforehand, or raise build_timeout in the extension's config")
	}
	return err
}

var errBuild = errors.New("a build took too long")

// builds is how often a build is tried whose base layers others keep removing.
const builds = 4

// isVanished reports whether a build failed because an image that it found in the engine's
// cache was gone a moment later: an engine that removes an image removes its unused parents
// with it, even if a build is about to use one.
func isVanished(err error) bool {
	said := strings.ToLower(err.Error())
	return slices.ContainsFunc([]string{
		"no such image: sha256:", "failed to get digest sha256:", "unknown parent image id", "failed to get layer sha256:", "layer does not exist", // Docker
		"layer not known", // Podman
	}, func(s string) bool { return strings.Contains(said, s) })
}

// parseError is where builders name the line of a Dockerfile that they cannot parse.
var parseError = regexp.MustCompile(`(?i)(dockerfile parse error (?:on )?line )(\d+)`)

// asWritten changes the lines of a Dockerfile that a builder names to their numbers in the user's
// file, which lacks the lines that were added to its stages.
func (e *extension) asWritten(h *host, p *plan, said string) string {
	jobs := p.jobs()
	if len(jobs) != 1 { // it is not known which one it is about
		return said
	}
	return parseError.ReplaceAllStringFunc(said, func(s string) string {
		m := parseError.FindStringSubmatch(s)
		said, _ := strconv.Atoi(m[2])
		n := said
		text := e.dockerfiles(h, p)[0].Content
		for i, line := range bytes.Split(text, []byte("\n")) {
			if i+1 < said && (bytes.HasPrefix(line, []byte("LABEL dev.sandboxer.owner=")) || bytes.HasPrefix(line, []byte("ARG SANDBOXER_TENANT="))) {
				n--
			}
		}
		return m[1] + strconv.Itoa(n)
	})
}

// A layer is an image that is kept of a stage.
type layer struct {
	id, label string // <tenant>.<build>.<stage>
	bytes     int64
	made      time.Time
}

func (l layer) build() string { return l.label[:strings.LastIndexByte(l.label, '.')] }

var layerLabel = regexp.MustCompile(`^[0-9a-f]{12}\.[0-9a-f]{12}\.[0-9]{1,4}$`)

// A use is the record of a build whose layers are kept.
type use struct {
	at           time.Time
	tenant, what string // project/service
}

// maxLayers bounds the layers in one listing.
const maxLayers = 2000

// layersScript prints the layers that the engine $2 keeps for the owner $3, $4 at most, and before
// that the records of their builds in the directory $1.
const layersScript = `
cd -- "$1" || exit
for f in .cache/*; do [ ! -f "$f" ] || echo "$(stat -c %Y -- "$f" 2>/dev/null || echo 0) ${f#.cache/} $(head -c 300 -- "$f" | tr '\n' ' ')"; done
echo --
engine=$2 most=$4
set -- --filter dangling=true --filter label=` + labelCache + ` --filter "label=` + engine.LabelOwner + `=$3"
` + engine.ImagesScript + `
`

// kept lists the layers on h, and when those of a build were used last.
func (e *extension) kept(ctx context.Context, h *host) ([]layer, map[string]use, error) {
	out, err := h.engine.Script(ctx, nil, nil, layersScript, h.known.root, h.known.engine, e.env.Owner, strconv.Itoa(maxLayers))
	if err != nil {
		return nil, nil, err
	}
	head, rest, _ := strings.Cut(out, "--\n")
	used := map[string]use{}
	for line := range strings.Lines(head) {
		f := strings.SplitN(strings.TrimSpace(line), " ", 3)
		if len(f) == 3 {
			sec, _ := strconv.ParseInt(f[0], 10, 64)
			tenant, project, service := "", "", ""
			for i, v := range strings.SplitN(f[2], "/", 3) {
				if text, err := url.PathUnescape(v); err == nil {
					*[]*string{&tenant, &project, &service}[i] = sshrun.Plain(text)
				}
			}
			used[f[1]] = use{time.Unix(sec, 0), tenant, project + "/" + service}
		}
	}
	images, err := engine.ParseImages(rest)
	if err != nil {
		return nil, nil, sandboxer.E(sandboxer.Unavailable, err, "host %s: the engine's list of images cannot be read", h.Name())
	}
	var all []layer
	for _, i := range images {
		if label := i.Config.Labels[labelCache]; layerLabel.MatchString(label) && i.Config.Labels[engine.LabelOwner] == e.env.Owner {
			all = append(all, layer{i.ID, label, i.Size, i.Created.UTC()})
		}
	}
	return all, used, nil
}

// surplus are those of all that are not to be kept: all except the newest copies of a stage, and for
// each tenant what exceeds limit bytes, beginning with the builds that were not used for longest.
func surplus(all []layer, used map[string]use, limit int64) (out []layer) {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b layer) int {
		return cmp.Or(used[b.build()].at.Compare(used[a.build()].at), strings.Compare(a.build(), b.build()), b.made.Compare(a.made), strings.Compare(a.id, b.id))
	})
	count, sum := map[string]int{}, map[string]int64{}
	for _, l := range all {
		tenant, _, _ := strings.Cut(l.label, ".")
		if count[l.label]++; count[l.label] > copies || sum[tenant]+l.bytes > limit {
			out = append(out, l)
			continue
		}
		sum[tenant] += l.bytes
	}
	return out
}

// collect removes layers from h that exceed the limit.
func (e *extension) collect(ctx context.Context, h *host) error {
	all, used, err := e.kept(ctx, h)
	if err != nil {
		return err
	}
	return e.discard(ctx, h, surplus(all, used, e.cfg.BuildCache), all, used)
}

// Caches implements sandboxer.Cacher: layers of built images, by build.
func (e *extension) Caches(ctx context.Context, host string) ([]sandboxer.Cache, error) {
	return e.caches(ctx, host, false)
}

// PruneCaches implements sandboxer.Cacher.
func (e *extension) PruneCaches(ctx context.Context, host string) ([]sandboxer.Cache, error) {
	return e.caches(ctx, host, true)
}

// overdue is how long surplus layers may stay: they are collected when a sandbox with
// built images is removed.
const overdue = 24 * time.Hour

func (e *extension) caches(ctx context.Context, only string, prune bool) ([]sandboxer.Cache, error) {
	names, unread := e.configured()
	switch {
	case only != "" && slices.Contains(names, only):
		names, unread = []string{only}, nil
	case only != "":
		if _, err := e.registry.Host(only); err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
			return nil, err
		}
		return nil, nil // it is none of this extension's
	}
	out, silent := hosts.Ask(hosts.Named(names), func(name string) ([]sandboxer.Cache, error) {
		h, err := e.host(name)
		if err != nil {
			return nil, err
		}
		return e.cachesOf(ctx, h, prune)
	})
	slices.SortFunc(out, func(a, b sandboxer.Cache) int {
		return cmp.Or(strings.Compare(a.Host, b.Host), strings.Compare(a.Tenant, b.Tenant), strings.Compare(a.Name, b.Name))
	})
	return out, errors.Join(silent.Err(), unread)
}

// anyKept prints something if images were ever built, or the agent was copied, for sandboxes below $1.
const anyKept = `case $1 in /*) ;; *) cd || exit;; esac; ls -- "$1/.cache" "$1/.agent" 2>/dev/null | head -n 1`

func (e *extension) cachesOf(ctx context.Context, h *host, prune bool) ([]sandboxer.Cache, error) {
	// A host for machines may have no engine, and one that was only added has nothing at all.
	if out, err := e.script(ctx, h, nil, nil, anyKept, e.cfg.Root); err != nil || out == "" {
		return nil, err
	}
	if err := e.look(ctx, h); err != nil {
		return nil, err
	}
	all, used, err := e.kept(ctx, h)
	if err != nil {
		return nil, err
	}
	gone := all
	if prune {
		if err := e.discard(ctx, h, all, all, used); err != nil {
			return nil, err
		}
		left, _, err := e.kept(ctx, h)
		if err != nil {
			return nil, err
		}
		gone = slices.DeleteFunc(slices.Clone(all), func(l layer) bool { return slices.Contains(left, l) })
	}
	over := surplus(all, used, e.cfg.BuildCache)
	byBuild := map[string]*sandboxer.Cache{}
	for _, l := range gone {
		c := byBuild[l.build()]
		if c == nil {
			u := used[l.build()]
			c = &sandboxer.Cache{Host: h.Name(), Name: cmp.Or(u.what, l.build()), Tenant: u.tenant, UsedAt: u.at}
			byBuild[l.build()] = c
		}
		c.Bytes += l.bytes
		if !prune && slices.Contains(over, l) && time.Since(l.made) > overdue {
			c.Problem = fmt.Sprintf("it has exceeded build_cache for more than a day; to remove it: sandboxer cache prune --host %s", h.Name())
		}
	}
	out, err := e.agentCaches(ctx, h, prune)
	for _, c := range byBuild {
		out = append(out, *c)
	}
	return out, err
}

// discard removes layers from h, and the records of builds that have none then. A layer
// that a build or a sandbox began to use meanwhile stays.
func (e *extension) discard(ctx context.Context, h *host, gone, all []layer, used map[string]use) error {
	stays := map[string]bool{}
	for _, l := range all {
		if !slices.Contains(gone, l) {
			stays[l.build()] = true
		}
	}
	args := []string{h.known.root, h.known.engine}
	for b, u := range used {
		if !stays[b] && time.Since(u.at) > e.cfg.BuildTimeout && layerLabel.MatchString(b+".0") { // else it may be of a build that is at it
			args = append(args, ".cache/"+b)
		}
	}
	for _, l := range gone {
		args = append(args, l.id)
	}
	if len(args) == 2 {
		return nil
	}
	_, err := h.engine.Script(ctx, nil, nil, `cd -- "$1" || exit; e=$2; shift 2
for i; do case $i in .cache/*) rm -f -- "$i";; *) "$e" rmi "$i" >/dev/null 2>&1;; esac; done
exit 0`, args...)
	return err
}

package vmpacker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// On a machine, below the directory of the workspaces:
//
//	sbx-<id>/                    the workspace
//	.sandboxer/sbx-<id>.lock     a dangling link: "owner generation"
//	.sandboxer/sbx-<id>/env      environment of commands, readable by the account only
//	.sandboxer/sbx-<id>/meta     data for a broker that finds the sandbox (workspaceMeta)
//	.sandboxer/sbx-<id>/ready    exists while the sandbox may be used
//
// The link and its content are made in one step, so that it is a lock among all users of the
// machine, and always names its owner. It is made first and removed last.

// Exit codes of the scripts below, besides 0.
const (
	exitBase  = 61 // the directory of workspaces cannot be used
	exitTaken = 62 // another owner's sandbox has the ID
	exitNewer = 63 // a newer generation exists
	exitFull  = 64 // the maximum number of sandboxes is reached
	exitTools = 65 // commands are missing: they are named on stderr
	exitRoom  = 66 // too little disk
	exitThere = 67 // it exists and is complete
	exitMount = 68 // something is mounted in the workspace
)

func workspaceName(id string) string { return "sbx-" + id }

// workspaceMeta is the data that a workspace's machine keeps, for a broker that finds it
// there. It holds no secret.
type workspaceMeta struct {
	V     int    `json:"v"`
	User  string `json:"user,omitempty"`
	Ports []int  `json:"ports,omitempty"`
}

// make: base, name, owner, generation, capacity, kilobytes free, environment, uid:gid, meta,
// tools…
const makeScript = `
b=$1 n=$2 o=$3 g=$4 most=$5 free=$6 env=$7 u=$8 meta=$9; shift 9
s=$b/.sandboxer l=$b/.sandboxer/$n.lock r=$b/.sandboxer/$n w=$b/$n
m=
for t in readlink awk grep df tr "$@"; do command -v "$t" >/dev/null 2>&1 || m="$m $t"; done
[ -z "$m" ] || { echo "$m" >&2; exit 65; }
if [ -L "$l" ]; then
	t=$(readlink "$l") || exit 61
	[ "${t%% *}" = "$o" ] || exit 62
	[ "${t##* }" -le "$g" ] || exit 63
	[ "${t##* }" -lt "$g" ] || { [ -e "$r/ready" ] && [ -d "$w" ] && exit 67; }
	exit 60
fi
mkdir -p "$b" && { [ -d "$s" ] || mkdir -m 700 "$s" || [ -d "$s" ]; } || exit 61
k=$(df -Pk "$b" | awk 'NR == 2 { print $4 }')
[ "${k:-0}" -ge "$free" ] || { echo "$k" >&2; exit 66; }
ln -s "$o $g" "$l" || { [ -L "$l" ] && exit 62; exit 61; }
c=0; for f in "$s"/*.lock; do [ -L "$f" ] && c=$((c+1)); done
[ "$c" -le "$most" ] || { rm -f "$l"; echo "$((c-1))" >&2; exit 64; }
[ ! -e "$w" ] && [ ! -L "$w" ] || { rm -f "$l"; exit 62; }
mkdir -m 700 "$r" && (umask 077; printf '%s' "$env" >"$r/env" && printf '%s' "$meta" >"$r/meta") && mkdir -m 755 "$w" || exit 61
[ -z "$u" ] || chown "$u" "$w" || exit 61`

// look: base, name; prints "owner generation ready|made|lost" or nothing.
const lookScript = `
t=$(readlink "$1/.sandboxer/$2.lock") || exit 0
s=made; [ -e "$1/.sandboxer/$2/ready" ] && s=ready
[ -d "$1/$2" ] || { [ $s = ready ] && s=lost; }
echo "$t $s"`

// scan: base; prints "name owner generation ready|made|lost" for each sandbox.
const scanScript = `
for l in "$1"/.sandboxer/*.lock; do
	t=$(readlink "$l") || continue
	n=${l##*/} n=${n%.lock}
	s=made; [ -e "$1/.sandboxer/$n/ready" ] && s=ready
	[ -d "$1/$n" ] || { [ $s = ready ] && s=lost; }
	echo "$n $t $s"
done`

// attach makes the workspace of p, or finds it. The caller holds the lock of p.
func (e *extension) attach(ctx context.Context, p *place, spec sandboxer.Spec) error {
	h, err := e.pool.Host(p.Target)
	if err == nil { // check first whether the machine can be reached at all
		_, err = h.Output(ctx, ":")
	}
	if err != nil {
		return sandboxer.Untouched(err)
	}
	if p.Untouched { // according to an earlier version
		p.Untouched = false
		if err := e.forget(ctx, p); err != nil {
			return err
		}
	}
	meta, err := json.Marshal(workspaceMeta{V: placeVersion, User: p.User, Ports: p.Ports})
	if err != nil {
		return err
	}
	g := e.inside(p, h)
	as := ""
	if p.User != "" {
		if as, err = g.resolve(ctx, p.User); err != nil {
			return err
		}
	}
	n := workspaceName(p.ID)
	make := func() error {
		_, err := h.Output(ctx, makeScript, append([]string{p.Base, n, p.Owner, strconv.Itoa(p.Generation),
			strconv.Itoa(cmp.Or(p.capacity, e.cfg.Capacity)), strconv.FormatInt(e.cfg.MinFree>>10, 10), exports(spec.Env), as, string(meta)}, p.tools...)...)
		return err
	}
	err = make()
	x, said, _ := sshrun.ExitOf(err)
	if x.Code == 60 { // begun by a call that died, or an older generation
		if _, err := e.clear(ctx, p, h); err != nil {
			return err
		}
		err = make()
		x, said, _ = sshrun.ExitOf(err)
	}
	switch x.Code {
	case exitThere:
		return nil
	case exitBase:
		return sandboxer.E(sandboxer.Unavailable, errors.New(said), "the account on %s cannot make workspaces in %s", p.Host, p.Base).
			WithHint("make the directory on the machine and give it to the account: mkdir -p %s && chown USER %s", p.Base, p.Base)
	case exitTaken:
		return sandboxer.E(sandboxer.Conflict, nil, "%s on %s belongs to somebody else", path.Join(p.Base, n), p.Host).
			WithHint("choose another sandbox_id")
	case exitNewer:
		return sandboxer.E(sandboxer.Conflict, nil, "a newer generation of sandbox %s is on %s", p.ID, p.Host)
	case exitFull:
		return sandboxer.E(sandboxer.Exhausted, nil, "machine %s has %s sandboxes, the maximum", p.Host, said).
			WithHint("wait for one to end, use another machine, or raise the capacity in the extension's config")
	case exitTools:
		return sandboxer.E(sandboxer.Unavailable, nil, "machine %s lacks %s", p.Host, strings.Join(strings.Fields(said), ", ")).
			WithHint("install it on the machine")
	case exitRoom:
		return sandboxer.E(sandboxer.Exhausted, nil, "machine %s has %s kB left in %s, less than the %d kB that must be free", p.Host, said, p.Base, e.cfg.MinFree>>10)
	}
	if err != nil {
		return err
	}
	if repo := spec.Inputs["repo"]; repo != "" {
		sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "copying " + repo})
		stats, err := h.Push(ctx, repo, g.dir, sshrun.SyncOptions{})
		if err != nil {
			return err
		}
		sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "copied " + repo, Done: stats.Bytes, Total: stats.Bytes})
	}
	// The last step; until then the next call starts over.
	_, err = h.Output(ctx, `[ -z "$2" ] || chown -hR "$2" "$3" || exit 1; : >"$1/ready"`, g.rec, as, g.dir)
	return err
}

// inside is the guest of p on its machine.
func (e *extension) inside(p *place, h *sshrun.Host) *guest {
	n := workspaceName(p.ID)
	g := &guest{host: h, rec: path.Join(p.Base, ".sandboxer", n), dir: path.Join(p.Base, n), mark: p.mark(), user: p.User}
	g.look = func(ctx context.Context) error { return e.exists(ctx, p) }
	if p.Kind == managed { // also after a restore with another ID
		g.rec, g.dir, g.own = path.Join(p.Base, ".sandboxer", "machine"), path.Join(p.Base, "workspace"), true
		g.look = func(ctx context.Context) error { return e.machineIs(ctx, p) }
	}
	return g
}

func (e *extension) guest(p *place) (*guest, error) {
	h, err := e.pool.Host(p.Target)
	if err != nil {
		return nil, err
	}
	return e.inside(p, h), nil
}

// complete adds the machine's data about p, if p was found there.
func (e *extension) complete(ctx context.Context, p *place) error {
	if !p.partial {
		return nil
	}
	h, err := e.pool.Host(p.Target)
	if err != nil {
		return err
	}
	out, err := h.Output(ctx, `[ ! -e "$1" ] || cat "$1"`, path.Join(p.Base, ".sandboxer", workspaceName(p.ID), "meta"))
	if err != nil {
		return err
	}
	if p.partial = false; len(out) == 0 { // an earlier version made it
		return nil
	}
	m, err := readMeta(out)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "what machine %s keeps of sandbox %s cannot be read", p.Host, p.ID)
	}
	p.User, p.Ports = m.User, m.Ports
	return nil
}

// readMeta reads a machine's data about a sandbox. Any user of the account there can write it.
func readMeta(data []byte) (m workspaceMeta, err error) {
	if _, err := strictjson.DecodeStored(data, &m); err != nil {
		return m, err
	}
	switch {
	case m.V > placeVersion:
		return m, errors.New("a newer sandboxer wrote it")
	case len(m.Ports) > 65535 || slices.ContainsFunc(m.Ports, func(n int) bool { return n < 1 || n > 65535 }):
		return m, errors.New("it has a port that is none")
	}
	return m, checkUser(m.User)
}

// exists asks the machine for the sandbox: nil, NotFound, or why that is unknown.
func (e *extension) exists(ctx context.Context, p *place) error {
	_, err := e.condition(ctx, p)
	return err
}

func (e *extension) condition(ctx context.Context, p *place) (string, error) {
	h, err := e.pool.Host(p.Target)
	if err != nil {
		return "", err
	}
	out, err := h.Output(ctx, lookScript, p.Base, workspaceName(p.ID))
	if err != nil {
		return "", err
	}
	f := strings.Fields(string(out))
	if len(f) != 3 || f[0] != p.Owner || f[1] != strconv.Itoa(p.Generation) || f[2] == "lost" {
		return "", missing(p.ID)
	}
	return f[2], nil
}

// find returns the place of h's sandbox, if the machine confirms that it exists.
func (e *extension) find(ctx context.Context, h sandboxer.Handle) (*place, error) {
	p, err := e.one(ctx, h)
	switch {
	case err != nil:
	case p.Untouched:
		err = missing(h.SandboxID)
	case p.Kind == managed:
		if err = e.machineIs(ctx, p); sandboxer.KindOf(err) == sandboxer.Conflict {
			err = nil // paused, but it exists
		}
	default:
		err = e.exists(ctx, p)
	}
	return p, err
}

// all yields every sandbox of owner: on the configured machines, and on those in records of
// sandboxes. It asks each machine once.
func (e *extension) all(ctx context.Context, owner string) iter.Seq2[*place, error] {
	return func(yield func(*place, error) bool) {
		if err := ctx.Err(); err != nil {
			yield(nil, err)
			return
		}
		noted, err := e.noted(ctx)
		if err != nil && !yield(nil, err) {
			return
		}
		machines, err := e.machines(owner, noted)
		if err != nil && !yield(nil, err) {
			return
		}
		for _, p := range machines {
			if !yield(p, nil) {
				return
			}
		}
		former := map[string]*place{}
		for _, p := range noted {
			if p.Kind == attached && !p.Untouched {
				former[p.key()] = p
			}
		}
		at, err := e.known(ctx, false)
		if err != nil && !yield(nil, err) {
			return
		}
		for a := range e.scan(ctx, at, owner) {
			if a.err != nil && !yield(nil, a.err) {
				return
			}
			for _, p := range a.found {
				if k := former[p.key()]; k != nil {
					if k.Target.Name != p.Target.Name || k.Base != p.Base {
						continue // another one of the same name; the note has the right one
					}
					p = k
				}
				if !yield(p, nil) {
					return
				}
			}
		}
	}
}

// scanned is one machine's list of an owner's sandboxes.
type scanned struct {
	machine *place
	found   []*place
	err     error
}

// scan asks machines for the sandboxes of owner, all at once: one that does not answer
// delays no other.
func (e *extension) scan(ctx context.Context, at []*place, owner string) iter.Seq[scanned] {
	return func(yield func(scanned) bool) {
		ctx, cancel := context.WithCancel(ctx)
		var asking sync.WaitGroup
		defer asking.Wait()
		defer cancel()
		answers := make(chan scanned, len(at))
		for _, w := range at {
			asking.Go(func() {
				h, err := e.pool.Host(w.Target)
				var out []byte
				if err == nil {
					out, err = h.Output(ctx, scanScript, w.Base)
				}
				answers <- scanned{w, found(w, owner, out), err}
			})
		}
		for range at {
			if !yield(<-answers) {
				return
			}
		}
	}
}

// found reads the output of scanScript on a machine.
func found(on *place, owner string, said []byte) (all []*place) {
	for line := range strings.Lines(string(said)) {
		f := strings.Fields(line)
		if len(f) != 4 || f[1] != owner {
			continue
		}
		id, ok := strings.CutPrefix(f[0], "sbx-")
		generation, err := strconv.Atoi(f[2])
		if !ok || err != nil || sandboxer.CheckID(id) != nil {
			continue
		}
		all = append(all, &place{V: placeVersion, ID: id, Generation: generation, Owner: owner, Kind: attached, Host: on.Host, Target: on.Target, Base: on.Base,
			at: on.at, partial: true})
	}
	return all
}

// count returns how many sandboxes, of any owner, a machine has.
func (e *extension) count(ctx context.Context, m machine) (int, error) {
	h, err := e.pool.Host(name(m.target))
	if err != nil {
		return 0, err
	}
	out, err := h.Output(ctx, `n=0; for l in "$1"/.sandboxer/*.lock; do [ -L "$l" ] && n=$((n+1)); done; echo $n`, m.base)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(out)))
}

func (e *extension) attachedCapacity(ctx context.Context, host string) (sandboxer.HostCapacity, error) {
	o := sandboxer.HostCapacity{Free: -1}
	aliases := slices.Sorted(maps.Keys(e.cfg.VMs))
	if host != "" {
		aliases = []string{host}
	}
	o.Attrs = map[string]string{}
	room := 0
	if len(e.cfg.Images) > 0 {
		room = max(0, e.cfg.MaxVMs-e.managedCount(ctx))
		o.Attrs["localhost"] = fmt.Sprintf("%d of %d", e.cfg.MaxVMs-room, e.cfg.MaxVMs)
		if host == "localhost" {
			return sandboxer.HostCapacity{Free: room, Hosts: []string{host}, Attrs: o.Attrs}, ctx.Err()
		}
	}
	if len(aliases) == 0 {
		if room > 0 || len(e.cfg.Images) > 0 {
			o.Free, o.Hosts = room, []string{"localhost"}
		}
		return o, ctx.Err() // callers name the machines to attach to
	}
	o.Free = room
	if host == "" && len(e.cfg.Images) > 0 {
		o.Hosts = append(o.Hosts, "localhost")
	}
	var errs []error
	type answer struct {
		m   machine
		n   int
		err error
	}
	answers := make([]answer, len(aliases))
	var asking sync.WaitGroup
	for i, alias := range aliases {
		asking.Go(func() {
			a := &answers[i]
			if a.m, a.err = e.machine(alias); a.err == nil && !a.m.draining {
				a.n, a.err = e.count(ctx, a.m)
			}
		})
	}
	asking.Wait()
	for i, alias := range aliases {
		m, n, err := answers[i].m, answers[i].n, answers[i].err
		if err == nil && m.draining {
			o.Attrs[alias] = "draining"
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		o.Hosts = append(o.Hosts, alias)
		o.Free += max(0, m.capacity-n)
		o.Attrs[alias] = fmt.Sprintf("%d of %d", n, m.capacity)
	}
	if len(o.Hosts) == 0 && len(errs) > 0 {
		return sandboxer.HostCapacity{}, errors.Join(errs...)
	}
	return o, nil
}

//go:build linux

package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/specutils"
	"gvisor.dev/gvisor/runsc/version"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/usernet"
	"github.com/sand-boxer/sandboxer/internal/users"
)

const gatewayIP = "10.0.2.2" // usernet.Gateway, in the sandbox's resolv.conf

// Provision implements sandboxer.Extension. The sandbox's record is written first and
// marked ready last. If the server dies in between, Teardown finds the remains, or the next
// Provision removes them and makes the sandbox again.
func (e *extension) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	src, err := e.check(spec)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	if spec.Warm {
		src = source{} // the claim brings it
	}
	spec.Limits = e.defaults(spec.Limits)
	return e.provision(ctx, spec, func(name string) (*liveSandbox, error) {
		var img *image
		if spec.Image != "" { // before taking a slot: a pull takes long, and no processor time
			if img, err = e.images.get(ctx, spec.Image, spec.Vouches(sandboxer.RestrictedImage)); err != nil {
				return nil, err
			}
			defer img.release() // the record then keeps it
		}
		b, err := e.create(ctx, name, spec, img, nil)
		if err != nil {
			return nil, err
		}
		return b, e.populateWorkspace(ctx, b, spec, img, src)
	})
}

// populateWorkspace gives a new sandbox its workspace's content and its main command.
func (e *extension) populateWorkspace(ctx context.Context, b *liveSandbox, spec sandboxer.Spec, img *image, src source) error {
	if err := b.fill(ctx, src); err != nil {
		return err
	}
	if err := b.mountTargets(ctx, spec.Mounts); err != nil {
		return err
	}
	args, dir := spec.Command, b.rec.Workspace
	if img != nil {
		args, dir = inside.Image{Entrypoint: img.config.Entrypoint, Cmd: img.config.Cmd, WorkingDir: img.config.WorkingDir}.Main(spec.Command, dir)
	}
	if spec.Warm {
		b.rec.Main, b.rec.MainDir = args, dir
		return b.rehearse(ctx)
	}
	return b.startMain(ctx, args, dir)
}

// rehearse runs a command that does nothing in a warm sandbox. The first command reads the
// shell and the libraries and makes gVisor's caches; it takes half as long again as a second
// one. Errors do not matter: an image may have no shell.
func (b *liveSandbox) rehearse(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err := b.exec(ctx, sandboxer.Cmd{Args: []string{"sh", "-c", ":"}, User: b.rec.User})
	if !b.alive() {
		return sandboxer.E(sandboxer.Failed, err, "the sandbox ended when its first command ran")
	}
	return nil
}

func (b *liveSandbox) startMain(ctx context.Context, args []string, dir string) error {
	return inside.Start(ctx, b.agent, sandboxer.ProcessSpec{Args: args, Env: b.givenEnv(nil), Dir: dir, User: b.rec.User})
}

// provision is the part of provisioning that new and restored sandboxes share, around
// build.
func (e *extension) provision(ctx context.Context, spec sandboxer.Spec, build func(name string) (*liveSandbox, error)) (sandboxer.Handle, error) {
	name := boxName(spec.ID, spec.Generation)
	h := sandboxer.Handle{SandboxID: spec.ID, Generation: spec.Generation, Host: "localhost", Ref: name}
	unlock, err := e.lock(ctx, name)
	if err != nil {
		return h, err
	}
	defer unlock()
	if rec, err := e.record(name); err == nil {
		if _, err := e.hold(name); err == nil && rec.Ready {
			return h, nil
		}
		if _, err := e.remove(name); err != nil {
			return h, err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		if _, err := e.remove(name); err != nil { // a process died while it wrote the record
			return h, err
		}
	}
	b, err := build(name)
	if err == nil {
		b.rec.Ready = true
		err = e.writeRecord(name, b.rec)
	}
	if err != nil {
		_, rerr := e.remove(name)
		return h, errors.Join(err, rerr)
	}
	return h, nil
}

// Check implements sandboxer.Checker.
func (e *extension) Check(_ context.Context, spec sandboxer.Spec) error {
	_, err := e.check(spec)
	return cmp.Or(err, e.checkMounts(spec))
}

// checkMounts refuses mounts as far as that is possible before there is a sandbox; create opens them again.
func (e *extension) checkMounts(spec sandboxer.Spec) error {
	if spec.Workspace == "" && spec.Image == "" { // an image may have a workspace of its own
		if err := sandboxer.CheckMounts(spec.Mounts, workspaceDefault); err != nil {
			return err
		}
	}
	mounts, err := e.openSources(spec)
	closeSources(mounts)
	return err
}

// Admit implements sandboxer.Admitter: a git URL is cloned inside, with the sandbox's
// network, and an image's name reveals nothing of this machine. Paths do.
func (e *extension) Admit(spec sandboxer.Spec, name string) error {
	what := ""
	switch name {
	case "repo":
		if !strings.Contains(spec.Inputs[name], "://") {
			what = "the input \"repo\""
		}
	case sandboxer.RestrictedImage:
		if pathImage.MatchString(spec.Image) {
			what = "the image"
		}
	case sandboxer.RestrictedMounts:
		return e.opener().Admit(spec)
	case sandboxer.RestrictedHost: // there is only one
	default:
		what = "the input \"" + name + "\""
	}
	if what == "" {
		return nil
	}
	return sandboxer.E(sandboxer.Denied, nil, "%s is a path on the broker's machine, which only an administrator may use", what).
		WithHint("use a URL, or ask for a profile that names it")
}

// pathImage matches everything that any form of image name could read as a path.
var pathImage = regexp.MustCompile(`^([/.~]|[A-Za-z-]+:[/.~]|(?i:file):)`)

// source is where a workspace's content comes from.
type source struct {
	dir string // of this machine
	url string // of a git repository
	ref string
}

// check refuses impossible specs before anything exists; mounts are checked elsewhere.
func (e *extension) check(spec sandboxer.Spec) (source, error) {
	var src source
	if err := e.cgroups.check(spec.Limits); err != nil {
		return src, err
	}
	if n := spec.Limits.MemoryBytes; n > 0 && n < minMemory {
		return src, sandboxer.E(sandboxer.Invalid, nil, "a memory limit of %d bytes is too small for gVisor's own needs; the minimum is %d MiB", n, minMemory>>20)
	}
	if err := inside.Check(spec); err != nil {
		return src, err
	}
	if spec.Host != "" && spec.Host != "localhost" {
		return src, sandboxer.E(sandboxer.Invalid, nil, "%s places sandboxes on localhost only, not on %q", e.env.Extension, spec.Host)
	}
	if spec.Image != "" {
		if err := e.images.store.CheckName(spec.Image, spec.Vouches(sandboxer.RestrictedImage)); err != nil {
			return src, err
		}
	}
	return e.checkRepo(spec)
}

const minMemory = 64 << 20

func (e *extension) checkRepo(spec sandboxer.Spec) (source, error) {
	repo, ref := spec.Inputs["repo"], spec.Inputs["ref"]
	src := source{ref: ref}
	isURL := strings.Contains(repo, "://")
	switch {
	case ref != "" && !isURL:
		return src, sandboxer.E(sandboxer.Invalid, nil, "input ref needs a git URL as repo")
	case strings.HasPrefix(ref, "-"):
		return src, sandboxer.E(sandboxer.Invalid, nil, "input ref: %q is not a branch, tag or commit", ref)
	case repo == "":
		return src, nil
	case isURL:
		u, err := url.Parse(repo)
		if err != nil || u.Host == "" || !slices.Contains([]string{"https", "http", "git"}, u.Scheme) {
			return src, sandboxer.E(sandboxer.Invalid, nil, "input repo: %q is not an https, http or git URL", redactURL(repo))
		}
		if u.User != nil {
			return src, sandboxer.E(sandboxer.Invalid, nil, "input repo: the URL contains credentials, which would be stored and shown").
				WithHint("clone the repository yourself and give its directory")
		}
		if !networked(spec.Network) {
			return src, sandboxer.E(sandboxer.Invalid, nil, "input repo: cloning %s needs a network, and the sandbox has none", repo).
				WithHint("ask for network public or for the repository's host, or give a local directory")
		}
		src.url = repo
		return src, nil
	}
	src.dir = repo
	return src, inside.CheckRepo(spec)
}

func redactURL(s string) string {
	if u, err := url.Parse(s); err == nil {
		return u.Redacted()
	}
	scheme, _, _ := strings.Cut(s, "://")
	return scheme + "://…"
}

// create makes and starts the sandbox itself: without its workspace's content, or, if from
// is not nil, as saved.
func (e *extension) create(ctx context.Context, name string, spec sandboxer.Spec, img *image, from *saved) (*liveSandbox, error) {
	rec, skel, err := e.recordOf(spec, img, from)
	if err != nil {
		return nil, err
	}
	if rec.Workspace != spec.Workspace { // it is that of the default, the image or the snapshot
		if err := sandboxer.CheckMounts(rec.Mounts, rec.Workspace); err != nil {
			return nil, err
		}
	}
	mounts, err := e.openSources(spec)
	if err != nil {
		return nil, err
	}
	defer closeSources(mounts)
	var who users.User // the user who owns the mounts
	if len(mounts) > 0 {
		if who, err = identify(rec.User, skel, img); err != nil {
			return nil, err
		}
		for _, m := range mounts {
			m.place = e.ids.place(name)
		}
	}
	if err := e.takeIDs(ctx, name, &rec); err != nil {
		return nil, err
	}
	shown := skel // for this sandbox
	if rec.IDBase != 0 {
		there := *skel
		there.root = e.ids.place(name)
		shown = &there
	}
	conf, oci, err := e.configure(name, spec, rec, shown, img, mounts, from)
	if err != nil {
		return nil, err
	}
	need := int64(leastMemory)
	if from != nil {
		need += savedBytes(from.image())
	}
	if err := e.memory.admit(name, need); err != nil {
		return nil, err
	}
	select {
	case e.slots <- struct{}{}:
		defer func() { <-e.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if err := e.cgroups.make(name, spec.Limits); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the sandbox's control groups cannot be set up")
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if rec.IDBase != 0 {
		defer e.ids.leave(shown.root)
		if err := e.ids.show(skel, shown.root, rec.IDBase, img == nil); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the sandbox's root file system cannot be mounted")
		}
		for _, m := range mounts {
			defer e.ids.leave(m.place)
		}
		if err := e.showSources(mounts, who, rec.IDBase); err != nil {
			return nil, err
		}
	}
	return e.launch(ctx, name, rec, conf, oci, from)
}

// recordOf is the record of a sandbox before it has IDs, and the skeleton that it uses.
func (e *extension) recordOf(spec sandboxer.Spec, img *image, from *saved) (rec record, skel *skeleton, err error) {
	rec = record{
		Owner: spec.Owner, SandboxID: spec.ID, Generation: spec.Generation, Image: spec.Image,
		Network: spec.Network, Limits: spec.Limits, Workspace: spec.Workspace, User: spec.User, Fuse: spec.Fuse, Warm: spec.Warm, Mounts: spec.Mounts,
		AgentMount: from == nil || from.Record.AgentMount, GVisor: version.Version(),
	}
	if rec.Workspace == "" {
		rec.Workspace = workspaceDefault
	}
	if from == nil {
		skel, err = e.skeleton()
	} else {
		skel, err = e.savedSkeleton(from)
	}
	if err != nil {
		return rec, nil, err
	}
	rec.Skeleton = skel.digest
	switch {
	case from != nil:
		was := from.Record
		rec.Image, rec.ImageFile, rec.ImageEnv, rec.About, rec.Ports, rec.StopSignal = was.Image, was.ImageFile, was.ImageEnv, was.About, was.Ports, was.StopSignal
		rec.Workspace, rec.User = was.Workspace, was.User
	case img != nil:
		rec.ImageFile, rec.ImageEnv = filepath.Base(img.path), img.config.Env
		rec.About, rec.Ports, rec.StopSignal = img.about(), images.Ports(img.config.ExposedPorts), img.config.StopSignal
		if spec.User == "" {
			rec.User = img.config.User
		}
		if wd := img.config.WorkingDir; spec.Workspace == "" && wd != "" && wd != "/" {
			rec.Workspace = wd
		}
	}
	return rec, skel, nil
}

// takeIDs takes a range of the host's IDs for a sandbox, if it has one, and writes its record.
func (e *extension) takeIDs(ctx context.Context, name string, rec *record) error {
	if err := os.MkdirAll(e.dir("box", name), 0o700); err != nil {
		return diskError(err, "making the sandbox's directory")
	}
	note := func(base uint32) error {
		rec.IDBase = base
		if err := e.writeRecord(name, *rec); err != nil {
			return diskError(err, "writing the sandbox's record")
		}
		return nil
	}
	if e.ids == nil || e.ids.why != nil {
		return note(0)
	}
	return e.ids.take(ctx, e.dir("box", name), note)
}

// configure writes a sandbox's bundle, and returns gVisor's configuration and specification.
func (e *extension) configure(name string, spec sandboxer.Spec, rec record, skel *skeleton, img *image, mounts []*mountSource, from *saved) (conf *config.Config, oci *specs.Spec, err error) {
	if err := os.MkdirAll(e.layers(), 0o700); err != nil { // it may have been removed
		return nil, nil, diskError(err, "making the directory of writable layers")
	}
	if conf, err = e.conf(spec.Limits); err != nil {
		return nil, nil, sandboxer.E(sandboxer.Internal, err, "configuring gVisor failed")
	}
	dir, err := e.bundle(name, spec, skel, img, rec.AgentMount, mounts, from)
	if _, told := errors.AsType[*sandboxer.Error](err); told {
		return nil, nil, err
	}
	if err != nil {
		return nil, nil, diskError(err, "writing the sandbox's bundle")
	}
	if oci, err = specutils.ReadSpec(dir, conf); err != nil {
		return nil, nil, sandboxer.E(sandboxer.Internal, err, "gVisor does not accept the sandbox's bundle")
	}
	if rec.IDBase != 0 {
		oci.Linux.UIDMappings, oci.Linux.GIDMappings = idMapping(rec.IDBase), idMapping(rec.IDBase)
	}
	return conf, oci, nil
}

// launch starts gVisor's processes and makes them begin the sandbox.
func (e *extension) launch(ctx context.Context, name string, rec record, conf *config.Config, oci *specs.Spec, from *saved) (*liveSandbox, error) {
	defer untilEnded(ctx, func() {
		if pids, err := e.processes(name); err == nil {
			_ = killAll(pids)
		}
	})()
	conf.PanicLog = e.lastWords(name)
	defer os.Remove(conf.PanicLog)
	c, err := container.New(conf, container.Args{ID: name, Spec: oci, BundleDir: e.dir("box", name)})
	if err != nil {
		return nil, cmp.Or(ctx.Err(), error(filtered(e.kernelEnded(name, err, "gVisor could not create the sandbox"))))
	}
	// From here on only this process can wait for gVisor's, as their parent.
	started := false
	defer func() {
		if !started {
			_ = destroy(c) // remove finds what stays
		}
	}()
	var link *usernet.Net
	if networked(rec.Network) {
		if link, err = e.link(name, rec.Network); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the sandbox's network could not be made")
		}
		rec.Link = link.Inode() // it is recorded with Provision's other results
	}
	err = e.begin(ctx, name, c, conf, link, from)
	if link != nil {
		link.CloseGuest()
	}
	if err != nil {
		if link != nil {
			link.Close()
		}
		said := e.kernelEnded(name, err, "gVisor could not start the sandbox")
		if from != nil && len(rec.Mounts) > 0 {
			said.WithHint("files of mounts that its processes had open must still exist")
		}
		return nil, cmp.Or(ctx.Err(), error(said))
	}
	started = true
	b := e.keep(name, rec, c)
	b.mu.Lock()
	b.net = link
	b.mu.Unlock()
	return b, nil
}

// begin begins a sandbox, or continues a saved one, and moves its processes into its control groups.
func (e *extension) begin(ctx context.Context, name string, c *container.Container, conf *config.Config, link *usernet.Net, from *saved) error {
	// Moving processes into control groups is one long wait in the kernel without processor
	// time: it happens while the sandbox starts. A second move then catches processes that
	// started before the first took effect.
	attached := make(chan error, 1)
	pids := []int{c.SandboxPid(), int(c.GoferPid.Load())}
	go func() { attached <- e.cgroups.attach(name, pids) }()
	var guest *os.File
	if link != nil {
		guest = link.Guest()
	}
	var err error
	if from != nil {
		err = restore(c, conf, from.image(), guest)
	} else {
		err = start(ctx, c, conf, guest)
	}
	if aerr := <-attached; err == nil && aerr != nil {
		err = aerr
	}
	if err == nil && e.cgroups.usable() {
		// Moving them again is cheaper than checking whether they are inside.
		var all []int
		if all, err = processTree(pids...); err == nil {
			err = e.cgroups.attach(name, slices.DeleteFunc(all, func(pid int) bool { return slices.Contains(pids, pid) }))
		}
	}
	return err
}

// untilEnded makes waits for processes end with ctx: gVisor's own calls end only with these
// processes. It calls kill again and again until stop, since a process that has just started
// is not yet known by its arguments, and the next may follow.
func untilEnded(ctx context.Context, kill func()) (stop func()) {
	over, idle := make(chan struct{}), make(chan struct{})
	unused := context.AfterFunc(ctx, func() {
		defer close(idle)
		for {
			kill()
			select {
			case <-over:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	return func() {
		close(over)
		if !unused() {
			<-idle // the next sandbox may have the same name
		}
	}
}

// fill brings the workspace's content into the sandbox. It is extracted or cloned
// inside, where a hostile archive or repository can only harm its own sandbox.
func (b *liveSandbox) fill(ctx context.Context, src source) error {
	ws := b.rec.Workspace
	who, err := b.user(ctx, b.rec.User)
	if err != nil {
		return err
	}
	owner := ""
	if who.UID != 0 || who.GID != 0 {
		owner = fmt.Sprintf("%d:%d", who.UID, who.GID)
	}
	if owner != "" || src.dir != "" || src == (source{}) && ws != workspaceDefault { // every root has it, owned by root
		skipped, err := inside.Fill(ctx, b.exec, ws, owner, src.dir)
		if skipped != "" {
			b.rec.About = maps.Clone(b.rec.About)
			if b.rec.About == nil {
				b.rec.About = map[string]string{}
			}
			b.rec.About[sandboxer.ExtraChanged] = strings.ReplaceAll(skipped, ";", "?") // semicolons separate the changes
		}
		if err != nil {
			return err
		}
	}
	if src.url == "" {
		return nil
	}
	args := []string{"git", "-c", "protocol.allow=never", "-c", "protocol.https.allow=always", "-c", "protocol.http.allow=always",
		"-c", "protocol.git.allow=always", "clone", "--quiet", "--", src.url, ws}
	if err := b.git(ctx, "/", args...); err != nil || src.ref == "" {
		return err
	}
	return b.git(ctx, ws, "git", "-c", "advice.detachedHead=false", "checkout", "--quiet", src.ref, "--")
}

func (b *liveSandbox) git(ctx context.Context, dir string, args ...string) error {
	err := inside.Run(ctx, b.exec, "cloning the repository", sandboxer.Cmd{Args: args, Dir: dir, User: b.rec.User, Env: map[string]string{"GIT_TERMINAL_PROMPT": "0"}})
	if sandboxer.KindOf(err) == sandboxer.Failed && sandboxer.HintOf(err) == "" {
		return sandboxer.E(sandboxer.Failed, err, "%s", sandboxer.Message(err)).
			WithHint("check the inputs repo and ref, and that the network policy of the sandbox allows the host of the repository")
	}
	return err
}

// diskError classifies a failure to write state.
func diskError(err error, what string) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return sandboxer.E(sandboxer.Exhausted, err, "%s failed: the disk is full", what)
	}
	return sandboxer.E(sandboxer.Unavailable, err, "%s failed", what)
}

// DefaultLimits implements sandboxer.Limiter.
func (e *extension) DefaultLimits(sandboxer.Spec) sandboxer.Limits {
	return e.defaults(sandboxer.Limits{})
}

// defaults are the limits of a sandbox whose profile sets none, where they can be
// enforced: one sandbox must not take the whole machine.
func (e *extension) defaults(l sandboxer.Limits) sandboxer.Limits {
	if !e.cgroups.usable() {
		return l
	}
	if l.PIDs == 0 {
		l.PIDs = 2048
	}
	if l.MemoryBytes == 0 {
		var si unix.Sysinfo_t
		if unix.Sysinfo(&si) == nil {
			l.MemoryBytes = int64(si.Totalram) * int64(si.Unit) / 2
		}
	}
	return l
}

//go:build linux

package local

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/specutils"
	"gvisor.dev/gvisor/runsc/version"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

const gatewayIP = "10.0.2.2" // usernet.Gateway, in the sandbox's resolv.conf

// Provision implements sandboxer.Extension. The sandbox's record is written first and
// marked ready last; whatever dies in between is found by Teardown, or torn down and
// made anew by the next Provision.
func (e *extension) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	src, err := e.check(spec)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	if spec.Warm {
		src = source{} // it comes with the claim
	}
	spec.Limits = e.defaults(spec.Limits)
	return e.provision(ctx, spec, func(name string) (*liveSandbox, error) {
		var img *image
		if spec.Image != "" { // before taking a slot: a pull takes long, and no processor
			if img, err = e.images.get(ctx, spec.Image, spec.Vouches(sandboxer.RestrictedImage)); err != nil {
				return nil, err
			}
			defer img.release() // the record then says that it is in use
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
		args, dir = img.main(spec.Command, dir)
	}
	if spec.Warm {
		b.rec.Main, b.rec.MainDir = args, dir
		return b.rehearse(ctx)
	}
	return b.startMain(ctx, args, dir)
}

// rehearse runs a command that does nothing in a sandbox that nobody waits for yet. The
// first command reads the shell and the libraries and makes what gVisor keeps for the
// next; it takes half as long again as a second one. What comes of it does not matter:
// an image may have no shell.
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
	if len(args) == 0 {
		return nil
	}
	// A child of the agent: it outlives this broker.
	_, err := b.agent.Start(ctx, sandboxer.ProcessSpec{Args: args, Env: b.givenEnv(nil), Dir: dir, User: b.rec.User, Tag: mainTag})
	if err != nil {
		return sandboxer.E(sandboxer.Failed, err, "the sandbox's command %q could not be started: %s", args[0], sandboxer.Message(err))
	}
	return nil
}

// provision runs the part of making a sandbox that is the same for new ones and for
// restored ones around build.
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
		if _, err := e.remove(name); err != nil { // died while writing it
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

// mainTag is the agent's name for the main process.
const mainTag = "main"

// Check implements sandboxer.Checker.
func (e *extension) Check(_ context.Context, spec sandboxer.Spec) error {
	_, err := e.check(spec)
	return err
}

// Admit implements sandboxer.Admitter: a git URL is cloned inside, by what the sandbox may
// reach, and an image's name says nothing of this machine. Paths do.
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
	case sandboxer.RestrictedHost: // there is but one
	default:
		what = "the input \"" + name + "\""
	}
	if what == "" {
		return nil
	}
	return sandboxer.E(sandboxer.Denied, nil, "%s is a path on the broker's machine, which only an administrator may use", what).
		WithHint("use a URL, or ask for a profile that names it")
}

// pathImage matches what could be read as a path by any form of an image's name.
var pathImage = regexp.MustCompile(`^([/.~]|[A-Za-z-]+:[/.~]|(?i:file):)`)

// source is where a workspace's content comes from.
type source struct {
	dir string // of this machine
	url string // of a git repository
	ref string
}

// check refuses what cannot be done, before anything exists.
func (e *extension) check(spec sandboxer.Spec) (source, error) {
	var src source
	if err := e.cgroups.check(spec.Limits); err != nil {
		return src, err
	}
	if l := spec.Limits; l.MilliCPU < 0 || l.MemoryBytes < 0 || l.DiskBytes < 0 || l.PIDs < 0 {
		return src, sandboxer.E(sandboxer.Invalid, nil, "a limit is negative")
	}
	if n := spec.Limits.MemoryBytes; n > 0 && n < minMemory {
		return src, sandboxer.E(sandboxer.Invalid, nil, "a memory limit of %d bytes is too small for gVisor's own needs; the least is %d MiB", n, minMemory>>20)
	}
	if n := spec.Limits.PIDs; n > 0 && n < minPIDs {
		return src, sandboxer.E(sandboxer.Invalid, nil, "a limit of %d processes is too small for the agent; the least is %d", n, minPIDs)
	}
	if err := spec.Network.Check(); err != nil {
		return src, err
	}
	if spec.Host != "" && spec.Host != "localhost" {
		return src, sandboxer.E(sandboxer.Invalid, nil, "%s places sandboxes on localhost only, not on %q", e.env.Extension, spec.Host)
	}
	for k := range spec.Env {
		if strings.HasPrefix(k, agent.EnvPrefix) {
			return src, sandboxer.E(sandboxer.Invalid, nil, "environment variable %s is the agent's own", k)
		}
	}
	if ws := spec.Workspace; ws != "" && (!path.IsAbs(ws) || path.Clean(ws) != ws || ws == "/" || reserved(ws)) {
		return src, sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the workspace: want a clean absolute path outside /dev, /proc, /sys and %s", ws, agentDir)
	}
	if spec.Image != "" {
		if err := e.images.check(spec.Image, spec.Vouches(sandboxer.RestrictedImage)); err != nil {
			return src, err
		}
	}
	workspace := spec.Workspace
	if spec.Image == "" { // which may have one of its own
		workspace = cmp.Or(workspace, workspaceDefault)
	}
	if err := sandboxer.CheckMounts(spec.Mounts, workspace); err != nil {
		return src, err
	}
	mounts, err := e.openSources(spec)
	if err != nil {
		return src, err
	}
	closeSources(mounts)
	return e.checkRepo(spec)
}

const (
	minMemory = 64 << 20
	minPIDs   = 32
)

func reserved(p string) bool {
	for _, r := range []string{"/dev", "/proc", "/sys", agentDir} {
		if p == r || strings.HasPrefix(p, r+"/") {
			return true
		}
	}
	return false
}

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
	if !filepath.IsAbs(repo) {
		return src, sandboxer.E(sandboxer.Invalid, nil, "input repo: %q is neither an absolute directory nor a git URL", repo).
			WithHint("the command line makes a directory absolute; over HTTP give the full path on the server's machine")
	}
	fi, err := os.Stat(repo)
	if err != nil {
		return src, sandboxer.E(sandboxer.Invalid, err, "input repo: directory %s cannot be read on this machine", repo)
	}
	if !fi.IsDir() {
		return src, sandboxer.E(sandboxer.Invalid, nil, "input repo: %s is not a directory", repo)
	}
	src.dir = repo
	return src, nil
}

func redactURL(s string) string {
	if u, err := url.Parse(s); err == nil {
		return u.Redacted()
	}
	scheme, _, _ := strings.Cut(s, "://")
	return scheme + "://…"
}

// create makes and starts the sandbox itself: without its workspace's content, or, if
// from is not nil, as it was saved.
func (e *extension) create(ctx context.Context, name string, spec sandboxer.Spec, img *image, from *saved) (*liveSandbox, error) {
	rec := record{
		Owner: spec.Owner, SandboxID: spec.ID, Generation: spec.Generation, Image: spec.Image,
		Network: spec.Network, Limits: spec.Limits, Workspace: spec.Workspace, User: spec.User, Fuse: spec.Fuse, Warm: spec.Warm, Stamp: spec.Stamp, Mounts: spec.Mounts,
		AgentMount: from == nil || from.Record.AgentMount, GVisor: version.Version(),
	}
	if rec.Workspace == "" {
		rec.Workspace = workspaceDefault
	}
	var skel *skeleton
	var err error
	if from == nil {
		skel, err = e.skeleton()
	} else {
		skel, err = e.savedSkeleton(from)
	}
	if err != nil {
		return nil, err
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
	if err := sandboxer.CheckMounts(rec.Mounts, rec.Workspace); err != nil {
		return nil, err
	}
	mounts, err := e.openSources(spec)
	if err != nil {
		return nil, err
	}
	defer closeSources(mounts)
	var who identity // the user to whom what is mounted belongs
	if len(mounts) > 0 {
		if who, err = identify(rec.User, skel, img); err != nil {
			return nil, err
		}
		for _, m := range mounts {
			m.place = e.ids.place(name)
		}
	}
	if err := os.MkdirAll(e.dir("box", name), 0o700); err != nil {
		return nil, diskError(err, "making the sandbox's directory")
	}
	note := func(base uint32) error {
		rec.IDBase = base
		if err := e.writeRecord(name, rec); err != nil {
			return diskError(err, "writing the sandbox's record")
		}
		return nil
	}
	if e.ids == nil || e.ids.why != nil {
		err = note(0)
	} else {
		err = e.ids.take(ctx, e.dir("box", name), note)
	}
	if err != nil {
		return nil, err
	}
	shown := skel // as it is for this sandbox
	if rec.IDBase != 0 {
		there := *skel
		there.root = e.ids.place(name)
		shown = &there
	}
	if err := os.MkdirAll(e.layers(), 0o700); err != nil { // somebody may have removed it
		return nil, diskError(err, "making the directory of writable layers")
	}
	conf, err := e.conf(spec.Limits)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "configuring gVisor failed")
	}
	dir, err := e.bundle(name, spec, shown, img, rec.AgentMount, mounts, from)
	if _, told := errors.AsType[*sandboxer.Error](err); told {
		return nil, err
	}
	if err != nil {
		return nil, diskError(err, "writing the sandbox's bundle")
	}
	ociSpec, err := specutils.ReadSpec(dir, conf)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "gVisor does not accept the sandbox's bundle")
	}
	if rec.IDBase != 0 {
		ociSpec.Linux.UIDMappings, ociSpec.Linux.GIDMappings = idMapping(rec.IDBase), idMapping(rec.IDBase)
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
	defer untilEnded(ctx, func() {
		if pids, err := e.processes(name); err == nil {
			_ = killAll(pids)
		}
	})()
	c, err := container.New(conf, container.Args{ID: name, Spec: ociSpec, BundleDir: dir})
	if err != nil {
		return nil, cmp.Or(ctx.Err(), error(sandboxer.E(sandboxer.Unavailable, err, "gVisor could not create the sandbox")))
	}
	// From here on only this process can wait for gVisor's, as their parent.
	started := false
	defer func() {
		if !started {
			_ = destroy(c) // what it leaves, remove finds
		}
	}()
	var link *usernet.Net
	if networked(rec.Network) {
		if link, err = e.link(name, rec.Network); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the sandbox's network could not be made")
		}
		rec.Link = link.Inode() // it is written down with what else Provision did
	}
	// Moving processes into control groups takes one long wait of the kernel, and no
	// processor time: it goes on while the sandbox starts. A second look then catches
	// what started before the first had its effect.
	attached := make(chan error, 1)
	pids := []int{c.SandboxPid(), int(c.GoferPid.Load())}
	go func() { attached <- e.cgroups.attach(name, pids) }()
	var guest *os.File
	if link != nil {
		guest = link.Guest()
	}
	if from != nil {
		err = restore(c, conf, from.image(), guest)
	} else {
		err = start(ctx, c, conf, guest)
	}
	if aerr := <-attached; err == nil && aerr != nil {
		err = aerr
	}
	if err == nil && e.cgroups.usable() {
		// Whether they are inside already is dearer to learn than to make sure of.
		var all []int
		if all, err = processTree(pids...); err == nil {
			err = e.cgroups.attach(name, slices.DeleteFunc(all, func(pid int) bool { return slices.Contains(pids, pid) }))
		}
	}
	if link != nil {
		link.CloseGuest()
	}
	if err != nil {
		if link != nil {
			link.Close()
		}
		said := sandboxer.E(sandboxer.Unavailable, err, "gVisor could not start the sandbox")
		if from != nil && len(mounts) > 0 {
			said.WithHint("what its processes had open in a mount has to be there still")
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

// untilEnded makes what waits for processes end with ctx: gVisor's own calls have no end but
// that of those they wait for. kill is called again and again until stop, since one that has
// just been started is not known by its arguments yet, and the next may follow.
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
			<-idle // what comes next may bear the same name
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
	var owner []string // of the workspace and what is brought into it
	if who.uid != 0 || who.gid != 0 {
		owner = []string{"--owner", fmt.Sprintf("%d:%d", who.uid, who.gid)}
	}
	if owner != nil && src.dir == "" || src == (source{}) && ws != workspaceDefault { // which every root has, as root's
		args := append(append([]string{agentPath, "untar"}, owner...), ws)
		if err := b.must(ctx, bytes.NewReader(make([]byte, 1024)), "making the workspace", "/", "root", args...); err != nil { // an empty archive
			return err
		}
	}
	switch {
	case src.dir != "":
		return b.copyIn(ctx, src.dir, owner)
	case src.url != "":
		args := []string{"git", "-c", "protocol.allow=never", "-c", "protocol.https.allow=always", "-c", "protocol.http.allow=always",
			"-c", "protocol.git.allow=always", "clone", "--quiet", "--", src.url, ws}
		if err := b.git(ctx, "/", args...); err != nil {
			return err
		}
		if src.ref != "" {
			return b.git(ctx, ws, "git", "-c", "advice.detachedHead=false", "checkout", "--quiet", src.ref, "--")
		}
	}
	return nil
}

func (b *liveSandbox) git(ctx context.Context, dir string, args ...string) error {
	return b.must(ctx, nil, "cloning the repository", dir, b.rec.User, args...)
}

// must runs a command of ours inside the sandbox and turns a failure into an error
// with the end of what it printed.
func (b *liveSandbox) must(ctx context.Context, stdin io.Reader, what, dir, user string, args ...string) error {
	var out tail
	x, err := b.exec(ctx, sandboxer.Cmd{Args: args, Dir: dir, User: user, Stdin: stdin, Stdout: &out, Stderr: &out,
		Env: map[string]string{"GIT_TERMINAL_PROMPT": "0"}})
	if err != nil {
		return err
	}
	if x.Code != 0 {
		kind := sandboxer.Failed
		if strings.Contains(out.String(), "No space left on device") {
			kind = sandboxer.Exhausted
		}
		return sandboxer.E(kind, nil, "%s failed inside the sandbox (exit %d): %s", what, x.Code, out.String())
	}
	return nil
}

// tail keeps the last kilobyte written to it.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if len(t.b) > 1024 {
		t.b = append([]byte(nil), t.b[len(t.b)-1024:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	return string(bytes.ToValidUTF8(bytes.TrimSpace(t.b), []byte("?")))
}

// diskError classifies a failure to write state.
func diskError(err error, what string) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return sandboxer.E(sandboxer.Exhausted, err, "%s failed: the disk is full", what)
	}
	return sandboxer.E(sandboxer.Unavailable, err, "%s failed", what)
}

// copyIn copies a directory of this machine into the workspace, as a tar stream that
// the agent's program unpacks inside.
func (b *liveSandbox) copyIn(ctx context.Context, dir string, owner []string) error {
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := agent.Tar(w, dir)
		packed <- err
		w.CloseWithError(err)
	}()
	args := append(append([]string{agentPath, "untar"}, owner...), b.rec.Workspace)
	err := b.must(ctx, r, "copying "+dir+" into the workspace", "/", "root", args...)
	r.Close() // if the command left early, the packer must not wait for a reader
	if perr := <-packed; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		return sandboxer.E(sandboxer.Invalid, perr, "input repo: %s cannot be read whole: %v", dir, perr)
	}
	return err
}

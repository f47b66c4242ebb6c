// Package backend turns an Extension into a Backend, the portable type through
// which the rest of the program, and the conformance suite, use it.
//
// Behaviour that every backend shares is written here once: resolving
// capabilities, checking arguments and answers, deadlines, error kinds and
// measuring. No other package type-asserts an extension, and there are no decorators
// around Extension, so no capability can get lost behind one. Retrying is not done
// here: the manager's sweep repeats failed work, and it alone knows for how long.
package backend

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"maps"
	"net"
	"path"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/execfiles"
	"github.com/sand-boxer/sandboxer/internal/procnet"
)

// Backend is one opened extension.
type Backend struct {
	id   string
	ext  sandboxer.Extension
	opts Options
	caps []sandboxer.Capability

	abandoned atomic.Int64 // calls that go on without a caller

	check      sandboxer.Checker
	placer     sandboxer.Placer
	admitter   sandboxer.Admitter
	noticer    sandboxer.Noticer
	limiter    sandboxer.Limiter
	cacher     sandboxer.Cacher
	ports      sandboxer.PortLister
	services   sandboxer.Serviced
	forgetter  sandboxer.Forgetter
	exec       sandboxer.Execer
	files      sandboxer.Filer
	archive    sandboxer.Archiver
	dial       sandboxer.Dialer
	expose     sandboxer.Exposer
	probe      sandboxer.Prober
	discover   sandboxer.Discoverer
	list       sandboxer.Lister
	snapshot   sandboxer.Snapshotter
	quote      sandboxer.Quoter
	meter      sandboxer.Meter
	pause      sandboxer.Pauser
	renew      sandboxer.Renewer
	capacity   sandboxer.CapacityReporter
	stats      sandboxer.StatsReader
	network    sandboxer.Networker
	pool       sandboxer.Pooler
	checkpoint sandboxer.Checkpointer
	agent      sandboxer.AgentDialer
	processes  sandboxer.ProcessManager
	watch      sandboxer.Watcher
	notify     sandboxer.Notifier
	urls       sandboxer.URLDialer // nil if the broker connects itself
}

// Options tune a Backend; the zero value works.
type Options struct {
	// Deadlines of one call each; 0 takes the default. Exec and open streams have
	// none but the caller's.
	Provision time.Duration // default 10 minutes, from the last progress reported on
	Ready     time.Duration // default 5 minutes
	Teardown  time.Duration // default 5 minutes
	Save      time.Duration // Snapshot, RestoreFromSnapshot, Archive, Unarchive, Checkpoint, ProvisionFrom; default 30 minutes
	Short     time.Duration // everything else; default 30 seconds
	Close     time.Duration // Close; default 2 seconds: ending a server waits for it

	// Inputs are those that the extension's adapter declares. Restricted ones are accepted
	// only as sandboxer.Input says.
	Inputs []sandboxer.Input

	// Log gets the causes that callers do not get (sandboxer.Error, Public); nil discards.
	Log *slog.Logger

	// Linger is how long a call may take to stop when its deadline has passed or its caller
	// has left. After that it is abandoned: its caller gets an error, and its late result is
	// dropped. Default 30 seconds.
	Linger time.Duration
	// MaxAbandoned is how many abandoned calls may exist; while there are more,
	// everything except probes and teardowns is refused as Unavailable, and those with four
	// times as many. Default 64.
	MaxAbandoned int

	// Abandoned, if set, is called when a call is abandoned (1) and when an abandoned one ends
	// (-1).
	Abandoned func(extension, op string, change int)

	// Observe, if set, is called for every finished call: its operation, the Kind of
	// its error ("" for success) and how long it took.
	Observe func(extension, op string, kind sandboxer.Kind, took time.Duration)
}

// New wraps ext, the opened extension named id, resolving its capabilities once. An
// extension with exec but without files or archive gets them by way of exec
// (package execfiles).
func New(id string, ext sandboxer.Extension, opts Options) *Backend {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&opts.Provision, 10*time.Minute)
	def(&opts.Ready, 5*time.Minute)
	def(&opts.Teardown, 5*time.Minute)
	def(&opts.Save, 30*time.Minute)
	def(&opts.Short, 30*time.Second)
	def(&opts.Linger, 30*time.Second)
	if opts.MaxAbandoned <= 0 {
		opts.MaxAbandoned = 64
	}

	b := &Backend{id: id, ext: ext, opts: opts}
	var not []sandboxer.Capability
	if n, ok := ext.(sandboxer.Narrower); ok {
		not = n.Without()
	}
	if d, ok := ext.(sandboxer.Describer); ok { // what it does not say that it has it has not
		says := d.Describe()
		b.opts.Inputs = says.Inputs
		for _, c := range slices.Concat(sandboxer.Capabilities(), sandboxer.Besides()) {
			if !slices.Contains(says.Capabilities, c) {
				not = append(slices.Clip(not), c)
			}
		}
	}
	resolve(b, &b.check, sandboxer.CanCheck, not)
	resolve(b, &b.placer, sandboxer.CanPlace, not)
	resolve(b, &b.admitter, sandboxer.CanAdmit, not)
	resolve(b, &b.limiter, sandboxer.CanLimits, not)
	resolve(b, &b.noticer, sandboxer.CanNotices, not)
	resolve(b, &b.cacher, sandboxer.CanCaches, not)
	resolve(b, &b.ports, sandboxer.CanPorts, not)
	resolve(b, &b.forgetter, sandboxer.CanForget, not)
	resolve(b, &b.services, sandboxer.CanServices, not)
	resolve(b, &b.exec, sandboxer.CanExec, not)
	resolve(b, &b.files, sandboxer.CanFiles, not)
	if b.files == nil && b.exec != nil {
		b.files = execfiles.Files{Exec: b.exec}
		b.caps = append(b.caps, sandboxer.CanFiles)
	}
	resolve(b, &b.archive, sandboxer.CanArchive, not)
	switch {
	case b.exec == nil:
	case b.archive == nil:
		b.archive = execfiles.Archive{Exec: b.exec}
		b.caps = append(b.caps, sandboxer.CanArchive)
	default:
		b.archive = eitherArchive{b.archive, execfiles.Archive{Exec: b.exec}}
	}
	resolve(b, &b.dial, sandboxer.CanDial, not)
	resolve(b, &b.expose, sandboxer.CanExpose, not)
	resolve(b, &b.probe, sandboxer.CanProbe, not)
	resolve(b, &b.discover, sandboxer.CanDiscover, not)
	resolve(b, &b.list, sandboxer.CanList, not)
	resolve(b, &b.snapshot, sandboxer.CanSnapshot, not)
	resolve(b, &b.quote, sandboxer.CanQuote, not)
	resolve(b, &b.meter, sandboxer.CanMeter, not)
	resolve(b, &b.pause, sandboxer.CanPause, not)
	resolve(b, &b.renew, sandboxer.CanRenew, not)
	resolve(b, &b.capacity, sandboxer.CanCapacity, not)
	resolve(b, &b.stats, sandboxer.CanStats, not)
	resolve(b, &b.network, sandboxer.CanNetwork, not)
	resolve(b, &b.pool, sandboxer.CanPool, not)
	resolve(b, &b.checkpoint, sandboxer.CanCheckpoint, not)
	resolve(b, &b.agent, sandboxer.CanAgent, not)
	resolve(b, &b.processes, sandboxer.CanProcesses, not)
	resolve(b, &b.watch, sandboxer.CanWatch, not)
	resolve(b, &b.notify, sandboxer.CanNotify, not)
	b.urls, _ = ext.(sandboxer.URLDialer)
	return b
}

func resolve[T any](b *Backend, dst *T, c sandboxer.Capability, not []sandboxer.Capability) {
	if t, ok := b.ext.(T); ok && !slices.Contains(not, c) {
		*dst = t
		if slices.Contains(sandboxer.Capabilities(), c) {
			b.caps = append(b.caps, c)
		}
	}
}

// ID returns the extension's ID, "ext.<name>".
func (b *Backend) ID() string { return b.id }

// Capabilities lists what the backend can do, in the order of
// sandboxer.Capabilities.
func (b *Backend) Capabilities() []sandboxer.Capability { return slices.Clone(b.caps) }

// Can reports whether the backend has capability c.
func (b *Backend) Can(c sandboxer.Capability) bool { return slices.Contains(b.caps, c) }

// Close closes the extension, which leaves its sandboxes alone. One that does not close
// within Options.Close is left to the end of the process.
func (b *Backend) Close() error {
	c, ok := b.ext.(io.Closer)
	if !ok {
		return nil
	}
	limit := cmp.Or(b.opts.Close, 2*time.Second)
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	select {
	case err := <-closed:
		return err
	case <-time.After(limit):
		return sandboxer.E(sandboxer.Timeout, nil, "%s did not close within %s", b.id, limit)
	}
}

// DefaultLimits are the limits that apply where spec sets none.
func (b *Backend) DefaultLimits(spec sandboxer.Spec) sandboxer.Limits {
	if b.limiter == nil {
		return sandboxer.Limits{}
	}
	return b.limiter.DefaultLimits(spec)
}

// A Checked is a spec that passed Check. Only Check makes one.
type Checked struct {
	by   *Backend
	spec sandboxer.Spec
}

// is reports whether spec is the one that b checked. Its place, its fuse and the version of its key are known later.
func (c *Checked) is(b *Backend, spec sandboxer.Spec) bool {
	if c == nil || c.by != b {
		return false
	}
	spec.Place, spec.Fuse, spec.Credential.Version = c.spec.Place, c.spec.Fuse, c.spec.Credential.Version
	return reflect.DeepEqual(spec, c.spec)
}

// Check reports what Provision would refuse of spec, as far as that is known before
// anything is made.
func (b *Backend) Check(ctx context.Context, spec sandboxer.Spec) (*Checked, error) {
	err := cmp.Or(spec.Check(), b.admit(spec))
	if err == nil && b.check != nil {
		err = do(ctx, b, "check", b.opts.Short, func(ctx context.Context) error { return b.check.Check(ctx, spec) })
	}
	if err != nil {
		return nil, err
	}
	return &Checked{b, spec}, nil
}

// Credential says whose secret is the key for new sandboxes (sandboxer.Credentialed); the zero value if there is none.
func (b *Backend) Credential() sandboxer.Credential {
	c, ok := b.ext.(sandboxer.Credentialed)
	if !ok {
		return sandboxer.Credential{}
	}
	return c.Credential()
}

// Places reports whether the extension has hosts to choose from (sandboxer.Placer).
func (b *Backend) Places() bool { return b.placer != nil }

// Place returns the host on which spec is to be made, none of avoid; "" if the extension has
// none to choose from. It does not check spec.
func (b *Backend) Place(ctx context.Context, spec sandboxer.Spec, avoid []string) (string, error) {
	if b.placer == nil {
		return "", nil
	}
	spec.Place = ""
	return call(ctx, b, "place", b.opts.Short, func(ctx context.Context) (string, error) {
		host, err := b.placer.Place(ctx, spec, slices.Clone(avoid))
		if err != nil {
			return "", err
		}
		if host == "" || checkPlace(host) != nil || slices.Contains(avoid, host) {
			return "", sandboxer.E(sandboxer.Internal, checkPlace(host), "the extension placed %s on an impossible host: %.40q", spec.ID, host)
		}
		return host, nil
	})
}

// placed refuses to make spec without a place.
func (b *Backend) placed(spec sandboxer.Spec) error {
	if b.placer != nil && spec.Place == "" {
		return sandboxer.E(sandboxer.Internal, nil, "the broker gave %s no host to make %s on", b.id, spec.ID)
	}
	return nil
}

// Provision checks spec, provisions it and checks the handle that comes back.
func (b *Backend) Provision(ctx context.Context, spec sandboxer.Spec) (h sandboxer.Handle, err error) {
	return b.ProvisionChecked(ctx, spec, nil)
}

// ProvisionChecked is Provision, which does not check spec again if c says that b checked it.
func (b *Backend) ProvisionChecked(ctx context.Context, spec sandboxer.Spec, c *Checked) (h sandboxer.Handle, err error) {
	if !c.is(b, spec) {
		err = cmp.Or(spec.Check(), b.admit(spec))
	}
	if err = cmp.Or(err, b.placed(spec)); err != nil {
		return h, err
	}
	moving, done := whileItMoves(ctx, b.opts.Provision)
	defer done()
	h, err = call(moving, b, "provision", 0, func(ctx context.Context) (sandboxer.Handle, error) {
		h, err := b.ext.Provision(ctx, spec)
		if err != nil {
			return h, err
		}
		return completed(h, spec)
	})
	if err != nil && context.Cause(moving) == errDeadline {
		err = sandboxer.E(sandboxer.Timeout, err, "%s: provision did not finish within %s", b.id, b.opts.Provision)
	}
	return h, err
}

// WaitReady waits until the sandbox accepts work.
func (b *Backend) WaitReady(ctx context.Context, h sandboxer.Handle) (r sandboxer.Reachability, err error) {
	return call(ctx, b, "wait_ready", b.opts.Ready, func(ctx context.Context) (sandboxer.Reachability, error) { return b.ext.WaitReady(ctx, h) })
}

// Teardown releases everything made for h.
func (b *Backend) Teardown(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
	if err := sandboxer.CheckID(h.SandboxID); err != nil {
		return r, err
	}
	return call(ctx, b, "teardown", b.opts.Teardown, func(ctx context.Context) (sandboxer.CleanupReport, error) { return b.ext.Teardown(ctx, h) })
}

// Exec runs a command inside the sandbox; see sandboxer.Execer.
func (b *Backend) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (x sandboxer.Exit, err error) {
	if b.exec == nil {
		return x, b.cannot(sandboxer.CanExec)
	}
	if err := checkCmd(cmd); err != nil {
		return x, err
	}
	if b.services == nil && cmd.Service != "" {
		return x, Lacks(b.id, sandboxer.CanServices).WithHint("leave --service out")
	}
	g := &gate{}
	defer g.shut()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = g.reader(cmd.Stdin), g.writer(cmd.Stdout), g.writer(cmd.Stderr)
	return call(ctx, b, "exec", 0, func(ctx context.Context) (sandboxer.Exit, error) { return b.exec.Exec(ctx, h, cmd) })
}

// ReadFile opens a file; the caller closes it.
func (b *Backend) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (r io.ReadCloser, err error) {
	return file(ctx, b, "read_file", 0, func(ctx context.Context) (io.ReadCloser, error) { return b.files.ReadFile(ctx, h, name) }, name)
}

// WriteFile creates or replaces a file.
func (b *Backend) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	g := &gate{}
	defer g.shut()
	return doFile(ctx, b, "write_file", 0, func(ctx context.Context) error { return b.files.WriteFile(ctx, h, name, mode, g.reader(r)) }, name)
}

// StatFile describes a file.
func (b *Backend) StatFile(ctx context.Context, h sandboxer.Handle, name string) (fi sandboxer.FileInfo, err error) {
	return file(ctx, b, "stat_file", b.opts.Short, func(ctx context.Context) (sandboxer.FileInfo, error) {
		fi, err := b.files.StatFile(ctx, h, name)
		if err == nil {
			err = checkFile(&fi)
		}
		return fi, err
	}, name)
}

// ListFiles lists a directory, not its subdirectories, in the order of names, from the
// one after after. The answer of a sandbox is not trusted: a name that is not directly in
// dir, or not after the one before, ends it.
func (b *Backend) ListFiles(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	if b.files == nil {
		return failed[sandboxer.FileInfo](b.cannot(sandboxer.CanFiles))
	}
	if err := checkPath(dir); err != nil {
		return failed[sandboxer.FileInfo](err)
	}
	return list(ctx, b, "list_files", 0, func(ctx context.Context) iter.Seq2[sandboxer.FileInfo, error] {
		return func(yield func(sandboxer.FileInfo, error) bool) {
			for fi, err := range b.files.ListFiles(ctx, h, dir, after) {
				if err == nil {
					err = checkFile(&fi)
				}
				if name := path.Base(fi.Path); err == nil && (path.Join(dir, name) != fi.Path || name <= after) {
					err = sandboxer.E(sandboxer.Failed, nil, "the sandbox returned an invalid listing of %q: the entry %q is not a name, or not in order", dir, fi.Path)
				}
				if !yield(fi, err) || err != nil {
					return
				}
				after = path.Base(fi.Path)
			}
		}
	})
}

// MakeDir makes a directory and its parents.
func (b *Backend) MakeDir(ctx context.Context, h sandboxer.Handle, dir string) error {
	return doFile(ctx, b, "make_dir", b.opts.Short, func(ctx context.Context) error { return b.files.MakeDir(ctx, h, dir) }, dir)
}

// MoveFile renames a file or directory.
func (b *Backend) MoveFile(ctx context.Context, h sandboxer.Handle, from, to string) error {
	return doFile(ctx, b, "move_file", b.opts.Short, func(ctx context.Context) error { return b.files.MoveFile(ctx, h, from, to) }, from, to)
}

// RemoveFile removes a file or a tree.
func (b *Backend) RemoveFile(ctx context.Context, h sandboxer.Handle, name string) error {
	return doFile(ctx, b, "remove_file", 0, func(ctx context.Context) error { return b.files.RemoveFile(ctx, h, name) }, name)
}

// Archive writes a directory as a tar to w; an empty dir is the workspace.
func (b *Backend) Archive(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
	g := &gate{}
	defer g.shut()
	return b.archived(ctx, "archive", dir, func(ctx context.Context) error { return b.archive.Archive(ctx, h, dir, g.writer(w)) })
}

// Unarchive replaces the content of a directory by the tar r; an empty dir is the
// workspace.
func (b *Backend) Unarchive(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) error {
	if dir == "/" {
		return sandboxer.E(sandboxer.Invalid, nil, "the sandbox's root cannot be replaced")
	}
	g := &gate{}
	defer g.shut()
	return b.archived(ctx, "unarchive", dir, func(ctx context.Context) error { return b.archive.Unarchive(ctx, h, dir, g.reader(r)) })
}

func (b *Backend) archived(ctx context.Context, op, dir string, f func(context.Context) error) error {
	if b.archive == nil {
		return b.cannot(sandboxer.CanArchive)
	}
	if dir != "" {
		if err := checkPath(dir); err != nil {
			return err
		}
	}
	return do(ctx, b, op, b.opts.Save, f)
}

// Checkpoint writes the portable state of the sandbox to the writer that
// begin returns.
func (b *Backend) Checkpoint(ctx context.Context, h sandboxer.Handle, begin func(sandboxer.Contents) io.Writer) error {
	if b.checkpoint == nil {
		return b.cannot(sandboxer.CanCheckpoint)
	}
	g := &gate{}
	defer g.shut()
	return do(ctx, b, "checkpoint", b.opts.Save, func(ctx context.Context) error {
		begun := false
		err := b.checkpoint.Checkpoint(ctx, h, func(c sandboxer.Contents) io.Writer {
			begun = true
			return g.begin(func() io.Writer { return begin(c) })
		})
		if err == nil && !begun {
			return sandboxer.E(sandboxer.Internal, nil, "%s: the checkpoint of %s was never written", b.id, h.SandboxID)
		}
		return err
	})
}

// ProvisionFrom makes the sandbox spec with the content of a checkpoint.
func (b *Backend) ProvisionFrom(ctx context.Context, spec sandboxer.Spec, c sandboxer.Contents, r io.Reader) (h sandboxer.Handle, err error) {
	if b.checkpoint == nil {
		return h, b.cannot(sandboxer.CanCheckpoint)
	}
	if err := cmp.Or(spec.Check(), b.admit(spec), b.placed(spec)); err != nil {
		return h, err
	}
	g := &gate{}
	defer g.shut()
	return call(ctx, b, "provision_from", b.opts.Save, func(ctx context.Context) (sandboxer.Handle, error) {
		h, err := b.checkpoint.ProvisionFrom(ctx, spec, c, g.reader(r))
		if err != nil {
			return h, err
		}
		return completed(h, spec)
	})
}

// Dial opens a stream to a port inside the sandbox.
func (b *Backend) Dial(ctx context.Context, h sandboxer.Handle, port int) (c net.Conn, err error) {
	if b.dial == nil {
		return nil, b.cannot(sandboxer.CanDial)
	}
	if err := sandboxer.CheckPort(port); err != nil {
		return nil, err
	}
	return call(ctx, b, "dial", b.opts.Short, func(ctx context.Context) (net.Conn, error) { return b.dial.Dial(ctx, h, port) })
}

// DialsURLs reports whether the extension itself connects to the URLs of its sandboxes (DialURL).
func (b *Backend) DialsURLs() bool { return b.urls != nil }

// DialURL connects to the URL of a sandbox; see sandboxer.URLDialer.
func (b *Backend) DialURL(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
	if b.urls == nil {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "%s does not connect to the URLs of its sandboxes", b.id)
	}
	return call(ctx, b, "dial_url", b.opts.Short, func(ctx context.Context) (net.Conn, error) { return b.urls.DialURL(ctx, h) })
}

// Expose names a backend-published URL for a port.
func (b *Backend) Expose(ctx context.Context, h sandboxer.Handle, port int) (e sandboxer.Endpoint, err error) {
	if b.expose == nil {
		return e, b.cannot(sandboxer.CanExpose)
	}
	if err := sandboxer.CheckPort(port); err != nil {
		return e, err
	}
	return call(ctx, b, "expose", b.opts.Short, func(ctx context.Context) (sandboxer.Endpoint, error) { return b.expose.Expose(ctx, h, port) })
}

// IsAlive probes one sandbox. An error always comes with Unknown.
func (b *Backend) IsAlive(ctx context.Context, h sandboxer.Handle) (l sandboxer.Liveness, err error) {
	if b.probe == nil {
		return sandboxer.Unknown, b.cannot(sandboxer.CanProbe)
	}
	l, err = call(ctx, b, "probe", b.opts.Short, func(ctx context.Context) (sandboxer.Liveness, error) { return b.probe.IsAlive(ctx, h) })
	if err != nil {
		return sandboxer.Unknown, err
	}
	return l, nil
}

// Discover finds a sandbox by its ID.
func (b *Backend) Discover(ctx context.Context, id string) (f sandboxer.Found, err error) {
	if b.discover == nil {
		return f, b.cannot(sandboxer.CanDiscover)
	}
	if err := sandboxer.CheckID(id); err != nil {
		return f, err
	}
	return call(ctx, b, "discover", b.opts.Short, func(ctx context.Context) (sandboxer.Found, error) { return b.discover.Discover(ctx, id) })
}

// ListRunning enumerates every object with owner's mark.
func (b *Backend) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	if b.list == nil {
		return failed[sandboxer.Handle](b.cannot(sandboxer.CanList))
	}
	return list(ctx, b, "list", b.opts.Short, func(ctx context.Context) iter.Seq2[sandboxer.Handle, error] { return b.list.ListRunning(ctx, owner) })
}

// Snapshot saves the sandbox under id.
func (b *Backend) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (s sandboxer.Snapshot, err error) {
	if b.snapshot == nil {
		return s, b.cannot(sandboxer.CanSnapshot)
	}
	if err := sandboxer.CheckID(id); err != nil {
		return s, err
	}
	return call(ctx, b, "snapshot", b.opts.Save, func(ctx context.Context) (sandboxer.Snapshot, error) {
		s, err := b.snapshot.Snapshot(ctx, h, id)
		if err != nil {
			return s, err
		}
		s.Credential = h.Credential
		return s, checkReceipt(s, id)
	})
}

// RestoreFromSnapshot provisions a new sandbox from a snapshot.
func (b *Backend) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (h sandboxer.Handle, err error) {
	if b.snapshot == nil {
		return h, LacksRestore(b.id)
	}
	// The inputs are not checked: the saved sandbox goes on, and none of them is used. Mounts
	// are made again.
	if err := cmp.Or(spec.Check(), b.AdmitMounts(spec), b.placed(spec)); err != nil {
		return h, err
	}
	return call(ctx, b, "restore", b.opts.Save, func(ctx context.Context) (sandboxer.Handle, error) {
		h, err := b.snapshot.RestoreFromSnapshot(ctx, spec, s)
		if err != nil {
			return h, err
		}
		return completed(h, spec)
	})
}

// ListSnapshots enumerates the snapshots of owner's sandboxes. An impossible answer of the
// backend is an error, and ends it.
func (b *Backend) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	if b.snapshot == nil {
		return failed[sandboxer.FoundSnapshot](b.cannot(sandboxer.CanSnapshot))
	}
	return list(ctx, b, "list_snapshots", b.opts.Short, func(ctx context.Context) iter.Seq2[sandboxer.FoundSnapshot, error] {
		return func(yield func(sandboxer.FoundSnapshot, error) bool) {
			for f, err := range b.snapshot.ListSnapshots(ctx, owner) {
				if err == nil {
					err = cmp.Or(sandboxer.CheckID(f.Snapshot.SnapshotID), checkReceipt(f.Snapshot, f.Snapshot.SnapshotID))
				}
				if err == nil && f.SandboxID != "" {
					err = sandboxer.CheckID(f.SandboxID)
				}
				if !yield(f, err) || err != nil {
					return
				}
			}
		}
	})
}

// DropSnapshot removes a snapshot.
func (b *Backend) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	if b.snapshot == nil {
		return b.cannot(sandboxer.CanSnapshot)
	}
	return do(ctx, b, "drop_snapshot", b.opts.Teardown, func(ctx context.Context) error { return b.snapshot.DropSnapshot(ctx, s) })
}

// EstimateCost asks the backend's price; nil when it knows none.
func (b *Backend) EstimateCost(ctx context.Context, spec sandboxer.Spec, d time.Duration) (q *sandboxer.MeterQuote, err error) {
	if b.quote == nil {
		return nil, b.cannot(sandboxer.CanQuote)
	}
	return call(ctx, b, "quote", b.opts.Short, func(ctx context.Context) (*sandboxer.MeterQuote, error) {
		q, err := b.quote.EstimateCost(ctx, spec, d)
		if err != nil || q == nil {
			return nil, err
		}
		rated := *q
		if rated.Duration == 0 {
			rated.Duration = d
		}
		rated = rated.Rated()
		return &rated, nil
	})
}

// MeterActual asks what the sandbox has consumed.
func (b *Backend) MeterActual(ctx context.Context, h sandboxer.Handle, d time.Duration) (u sandboxer.Usage, err error) {
	if b.meter == nil {
		return u, b.cannot(sandboxer.CanMeter)
	}
	return call(ctx, b, "meter", b.opts.Short, func(ctx context.Context) (sandboxer.Usage, error) {
		u, err := b.meter.MeterActual(ctx, h, d)
		if time.Since(u.At).Abs() > 24*time.Hour { // what a backend says of the time need not be storable
			u.At = time.Now()
		}
		return u, cmp.Or(err, u.Check())
	})
}

// Pause freezes the sandbox by the backend's own means.
func (b *Backend) Pause(ctx context.Context, h sandboxer.Handle) error {
	if b.pause == nil {
		return b.cannot(sandboxer.CanPause)
	}
	return do(ctx, b, "pause", b.opts.Save, func(ctx context.Context) error { return b.pause.Pause(ctx, h) })
}

// Resume thaws the sandbox.
func (b *Backend) Resume(ctx context.Context, h sandboxer.Handle) error {
	if b.pause == nil {
		return b.cannot(sandboxer.CanPause)
	}
	return do(ctx, b, "resume", b.opts.Save, func(ctx context.Context) error { return b.pause.Resume(ctx, h) })
}

// SetNetwork changes what the sandbox may reach.
func (b *Backend) SetNetwork(ctx context.Context, h sandboxer.Handle, p sandboxer.NetworkPolicy) error {
	if b.network == nil {
		return b.cannot(sandboxer.CanNetwork)
	}
	if err := p.Check(); err != nil {
		return err
	}
	return do(ctx, b, "set_network", b.opts.Short, func(ctx context.Context) error { return b.network.SetNetwork(ctx, h, p) })
}

// Basis identifies the material of a sandbox that would be made for spec now.
func (b *Backend) Basis(ctx context.Context, spec sandboxer.Spec) (basis string, err error) {
	if b.pool == nil {
		return "", b.cannot(sandboxer.CanPool)
	}
	if err := spec.Check(); err != nil {
		return "", err
	}
	return call(ctx, b, "basis", b.opts.Provision, func(ctx context.Context) (string, error) { return b.pool.Basis(ctx, spec) })
}

// Claim gives a warm sandbox to its owner.
func (b *Backend) Claim(ctx context.Context, h sandboxer.Handle, spec sandboxer.Spec) (out sandboxer.Handle, err error) {
	if b.pool == nil {
		return out, b.cannot(sandboxer.CanPool)
	}
	if err := cmp.Or(spec.Check(), b.admit(spec)); err != nil {
		return out, err
	}
	return call(ctx, b, "claim", b.opts.Provision, func(ctx context.Context) (sandboxer.Handle, error) {
		out, err := b.pool.Claim(ctx, h, spec)
		if err != nil {
			return out, err
		}
		return completed(out, spec)
	})
}

// Renew moves the backend's own deadline.
func (b *Backend) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	if b.renew == nil {
		return b.cannot(sandboxer.CanRenew)
	}
	return do(ctx, b, "renew", b.opts.Short, func(ctx context.Context) error { return b.renew.Renew(ctx, h, until) })
}

// Capacity asks what the backend can take now.
func (b *Backend) Capacity(ctx context.Context, host string) (o sandboxer.HostCapacity, err error) {
	if b.capacity == nil {
		return o, b.cannot(sandboxer.CanCapacity)
	}
	return call(ctx, b, "capacity", b.opts.Short, func(ctx context.Context) (sandboxer.HostCapacity, error) { return b.capacity.Capacity(ctx, host) })
}

// Stats measures the sandbox.
func (b *Backend) Stats(ctx context.Context, h sandboxer.Handle) (s sandboxer.Stats, err error) {
	if b.stats == nil {
		return s, b.cannot(sandboxer.CanStats)
	}
	return call(ctx, b, "stats", b.opts.Short, func(ctx context.Context) (sandboxer.Stats, error) { return b.stats.Stats(ctx, h) })
}

func file[T any](ctx context.Context, b *Backend, op string, limit time.Duration, f func(context.Context) (T, error), names ...string) (none T, _ error) {
	if b.files == nil {
		return none, b.cannot(sandboxer.CanFiles)
	}
	for _, n := range names {
		if err := checkPath(n); err != nil {
			return none, err
		}
	}
	return call(ctx, b, op, limit, f)
}

func doFile(ctx context.Context, b *Backend, op string, limit time.Duration, f func(context.Context) error, names ...string) error {
	_, err := file(ctx, b, op, limit, func(ctx context.Context) (struct{}, error) { return struct{}{}, f(ctx) }, names...)
	return err
}

func checkPath(name string) error {
	if !path.IsAbs(name) || path.Clean(name) != name || strings.ContainsRune(name, 0) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q is not a clean absolute path", name).
			WithHint("write it from the root of the sandbox, without . or .. elements: /workspace/file")
	}
	return nil
}

// checkFile refuses impossible files, and brings the others into a form that every edge can
// write: JSON must be able to hold the time.
func checkFile(fi *sandboxer.FileInfo) error {
	if checkPath(fi.Path) != nil || fi.Size < 0 || len(fi.Path) > 1<<15 || len(fi.Target) > 1<<15 || len(fi.Owner) > 256 || len(fi.Group) > 256 {
		return sandboxer.E(sandboxer.Failed, nil, "the sandbox describes an impossible file: name %.100q, size %d", fi.Path, fi.Size)
	}
	if y := fi.ModTime.UTC().Year(); y < 1 || y > 9999 {
		fi.ModTime = time.Time{}
	}
	return nil
}

func (b *Backend) cannot(c sandboxer.Capability) error {
	err := Lacks(b.id, c)
	switch c {
	case sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch:
		if b.urls != nil { // its sandboxes are URLs
			err = err.WithHint("use the URL of the sandbox (sandboxer get ID), or an extension with this capability, such as kind sandboxer of the adapter remote")
		}
	}
	return err
}

// Lacks is the one error for a missing capability: "ext.x does not support snapshots".
// Kind: Unsupported.
func Lacks(extension string, c sandboxer.Capability) *sandboxer.Error {
	what := string(c)
	if c == sandboxer.CanSnapshot {
		what = "snapshots"
	}
	return sandboxer.E(sandboxer.Unsupported, nil, "%s does not support %s", extension, what).
		WithHint("use a profile of an extension that supports it; list profiles with: sandboxer profile ls")
}

// LacksRestore is Lacks for sandboxes that cannot be made from a snapshot.
func LacksRestore(extension string) *sandboxer.Error {
	return sandboxer.E(sandboxer.Unsupported, nil, "%s does not support restore", extension)
}

// discreet keeps the parts of an error that are for administrators (Error.Public) from others. An error
// without a caller, such as in a step of the sweep, ends in records that its tenant reads.
func (b *Backend) discreet(ctx context.Context, op string, err error) error {
	p := sandboxer.PrincipalFrom(ctx)
	if p.Can(sandboxer.ScopeAdmin) {
		return err
	}
	told := sandboxer.Discreet(err)
	if told != err && p.Tenant != "" && b.opts.Log != nil {
		b.opts.Log.WarnContext(ctx, "the cause of an error is hidden from the caller", "extension", b.id, "op", op, "err", err)
	}
	return told
}

// Notices returns what an operator should know of the extension, each as a sentence.
func (b *Backend) Notices(ctx context.Context) []string {
	if b.noticer == nil {
		return nil
	}
	return b.noticer.Notices(ctx)
}

// Forget gives a sandbox up and returns what may remain of it.
func (b *Backend) Forget(ctx context.Context, h sandboxer.Handle) ([]string, error) {
	if b.forgetter == nil {
		return nil, Lacks(b.id, sandboxer.CanForget).
			WithHint("it has no hosts that could be unreachable; destroy the sandbox again, and read the error")
	}
	return call(ctx, b, "forget", b.opts.Short, func(ctx context.Context) ([]string, error) { return b.forgetter.Forget(ctx, h) })
}

// ListPorts returns the TCP ports that have a listener, sorted: from the extension, or
// from the sandbox's own table of sockets, which a command inside prints. The files
// API serves nothing of /proc.
func (b *Backend) ListPorts(ctx context.Context, h sandboxer.Handle) (ports []int, err error) {
	if b.ports == nil {
		ports, err = b.printedPorts(ctx, h)
	} else {
		ports, err = call(ctx, b, "list ports", b.opts.Short, func(ctx context.Context) ([]int, error) { return b.ports.ListPorts(ctx, h) })
	}
	if err != nil {
		return nil, err
	}
	slices.Sort(ports)
	ports = slices.Compact(ports)
	if len(ports) > 0 && (ports[0] < 1 || ports[len(ports)-1] > 65535) {
		return nil, sandboxer.E(sandboxer.Internal, nil, "%s lists impossible ports", b.id)
	}
	return ports, nil
}

// printedPorts returns the ports of the tables of sockets inside. Each has its own bound: sockets that do not listen come
// after those that do, so that many connections hide no listener.
func (b *Backend) printedPorts(ctx context.Context, h sandboxer.Handle) (ports []int, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, b.opts.Short, errDeadline)
	defer cancel()
	ports = []int{}
	for i, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		out := &capture.First{Max: procnet.MaxBytes}
		x, err := b.Exec(ctx, h, sandboxer.Cmd{Args: []string{"cat", file}, Dir: "/", Stdout: out})
		if err != nil {
			return nil, err
		}
		list, known := procnet.Listeners(strings.NewReader(out.String()))
		if !known && i == 0 { // there may be no IPv6
			return nil, sandboxer.E(sandboxer.Unsupported, nil, "the sandbox does not show its table of sockets: cat %s ended with code %d", file, x.Code).
				WithHint("use an image that has cat")
		}
		for _, l := range list {
			ports = append(ports, l.Port)
		}
	}
	return ports, nil
}

// Caches lists what the extension keeps between sandboxes, perhaps of one host; nothing if
// it keeps nothing. With an error it returns what was found, too.
func (b *Backend) Caches(ctx context.Context, host string) ([]sandboxer.Cache, error) {
	if b.cacher == nil {
		return nil, nil
	}
	return b.cached(ctx, "caches", b.opts.Short, host, b.cacher.Caches)
}

// PruneCaches removes what Caches lists, and returns what it removed.
func (b *Backend) PruneCaches(ctx context.Context, host string) ([]sandboxer.Cache, error) {
	if b.cacher == nil {
		return nil, nil
	}
	return b.cached(ctx, "prune caches", b.opts.Teardown, host, b.cacher.PruneCaches)
}

func (b *Backend) cached(ctx context.Context, op string, limit time.Duration, host string, f func(context.Context, string) ([]sandboxer.Cache, error)) ([]sandboxer.Cache, error) {
	type answer struct {
		caches []sandboxer.Cache
		err    error // with which there may be caches all the same
	}
	a, err := call(ctx, b, op, limit, func(ctx context.Context) (answer, error) {
		caches, err := f(ctx, host)
		return answer{caches, err}, nil
	})
	return a.caches, cmp.Or(err, a.err)
}

// admit refuses values in spec that affect more than the sandbox, if the caller that gave them
// may not (Input.Restricted).
func (b *Backend) admit(s sandboxer.Spec) error {
	one := func(name string) error { return b.admitOne(s, name) }
	var names []string // as they are declared, and then those that are not
	for _, in := range b.opts.Inputs {
		names = append(names, in.Name)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Inputs)) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		if in, ok := sandboxer.DeclarationOf(b.opts.Inputs, name); ok && in.Restricted && s.Inputs[name] != in.Default {
			if err := one(name); err != nil {
				return err
			}
		}
	}
	return cmp.Or(one(sandboxer.RestrictedHost), one(sandboxer.RestrictedImage), one(sandboxer.RestrictedMounts))
}

// AdmitMounts refuses, as Denied, mounts of s that no operator vouches for and that the
// extension does not admit.
func (b *Backend) AdmitMounts(s sandboxer.Spec) error {
	return b.admitOne(s, sandboxer.RestrictedMounts)
}

func (b *Backend) admitOne(s sandboxer.Spec, name string) error {
	if s.Vouches(name) {
		return nil
	}
	if b.admitter != nil {
		return b.admitter.Admit(s, name)
	}
	return sandboxer.E(sandboxer.Denied, nil, "%s takes %q only from an administrator, or with the value that its profile gives", b.id, name).
		WithHint("leave it out, or ask an administrator to put it into a profile")
}

// checkPlace refuses a name that no host can have.
func checkPlace(host string) error {
	if len(host) > sandboxer.MaxPlaceBytes {
		return sandboxer.E(sandboxer.Invalid, nil, "the name of a host has at most %d bytes, not %d", sandboxer.MaxPlaceBytes, len(host))
	}
	if strings.ContainsFunc(host, func(r rune) bool { return !unicode.IsGraphic(r) || unicode.IsSpace(r) }) {
		return sandboxer.E(sandboxer.Invalid, nil, "the name of a host cannot contain spaces or invisible characters")
	}
	return nil
}

// completed is the handle that an extension returned for spec, with the key that the broker chose for it.
func completed(h sandboxer.Handle, spec sandboxer.Spec) (sandboxer.Handle, error) {
	h.Credential = spec.Credential
	return h, checkHandle(h, spec)
}

func checkHandle(h sandboxer.Handle, spec sandboxer.Spec) error {
	if spec.Place != "" && h.Host != spec.Place {
		return sandboxer.E(sandboxer.Internal, nil, "the broker placed %s on %q, but the extension made it on %q", spec.ID, spec.Place, h.Host)
	}
	if h.SandboxID != spec.ID || h.Generation != spec.Generation {
		return sandboxer.E(sandboxer.Internal, nil, "the extension returned a handle of %s/%d for %s/%d",
			h.SandboxID, h.Generation, spec.ID, spec.Generation)
	}
	j, err := json.Marshal(h)
	if err != nil {
		return sandboxer.E(sandboxer.Internal, err, "the handle of %s does not encode", spec.ID)
	}
	if len(j) > sandboxer.MaxHandleBytes {
		return sandboxer.E(sandboxer.Internal, nil, "the handle of %s takes %d bytes; at most %d are kept",
			spec.ID, len(j), sandboxer.MaxHandleBytes)
	}
	return nil
}

func checkReceipt(s sandboxer.Snapshot, id string) error {
	if s.SnapshotID != id {
		return sandboxer.E(sandboxer.Internal, nil, "the extension returned the receipt of snapshot %q for %s", s.SnapshotID, id)
	}
	j, err := json.Marshal(s)
	if err != nil {
		return sandboxer.E(sandboxer.Internal, err, "the receipt of snapshot %s does not encode", id)
	}
	if len(j) > sandboxer.MaxHandleBytes {
		return sandboxer.E(sandboxer.Internal, nil, "the receipt of snapshot %s takes %d bytes; at most %d are kept", id, len(j), sandboxer.MaxHandleBytes)
	}
	return nil
}

func checkCmd(c sandboxer.Cmd) error {
	if len(c.Args) == 0 || c.Args[0] == "" {
		return sandboxer.E(sandboxer.Invalid, nil, "no command given")
	}
	for _, a := range c.Args {
		if strings.ContainsRune(a, 0) {
			return sandboxer.E(sandboxer.Invalid, nil, "an argument of the command contains a NUL byte")
		}
	}
	for k, v := range c.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return sandboxer.E(sandboxer.Invalid, nil, "environment variable %q: a name has no '=', and neither name nor value a NUL byte", k)
		}
	}
	if c.Dir != "" && !path.IsAbs(c.Dir) {
		return sandboxer.E(sandboxer.Invalid, nil, "working directory %q is not absolute", c.Dir).WithHint("write it from the root: /workspace/src")
	}
	if c.TTY != nil && (c.TTY.Cols == 0 || c.TTY.Rows == 0) {
		return sandboxer.E(sandboxer.Invalid, nil, "a terminal cannot have %dx%d cells", c.TTY.Cols, c.TTY.Rows)
	}
	return nil
}

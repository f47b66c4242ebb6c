//go:build linux

package local

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/notices"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/usernet"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

type extension struct {
	agent.Capabilities // files, ports, processes and watches; commands and figures are our own

	env     sandboxer.Env
	cfg     Config
	asRoot  bool
	cgroups *cgroups
	memory  *memory
	makes   skeletonMaker
	skel    *skeleton
	ids     *idRanges            // nil for an ordinary user
	former  map[string]time.Time // digests of skeletons that were replaced, since when
	images  *imageStore
	program string        // of the agent, copied into images
	poll    *poller       // waits for what commands say, and for their ends
	slots   chan struct{} // bounds concurrent creates: they are bound by processor time, and wait in between

	resolvers func() []string // this machine's
	unlock    func()

	ctx  context.Context // ends with Close
	end  context.CancelFunc
	work sync.WaitGroup // what goes on beside calls

	newer sync.Map // names of those of whose records it was told that a newer version wrote them

	noticing sync.Mutex
	notices  []string
	noticed  time.Time // when notices were found

	ended notices.Hub // told of sandboxes whose kernel has ended

	mu    sync.Mutex
	boxes map[string]*liveSandbox // by name
	busy  map[string]*keyLock     // by name
}

var _ interface {
	sandboxer.Extension
	sandboxer.Checker
	sandboxer.Admitter
	sandboxer.Limiter
	sandboxer.Noticer
	sandboxer.Execer
	sandboxer.Filer
	sandboxer.Archiver
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher
	sandboxer.Notifier
	sandboxer.Dialer
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Renewer
	sandboxer.Snapshotter
	sandboxer.Pauser
	sandboxer.CapacityReporter
	sandboxer.StatsReader
	sandboxer.Networker
	sandboxer.Pooler
	io.Closer
} = (*extension)(nil)

// open prepares this machine: finds the helper programs, builds the skeleton and
// reconnects the sandboxes of an earlier process to the network.
func open(ctx context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "gVisor does not run on %s", runtime.GOARCH)
	}
	e := &extension{
		env: env, cfg: cfg, asRoot: os.Geteuid() == 0,
		slots: make(chan struct{}, 2*runtime.NumCPU()),
		boxes: map[string]*liveSandbox{}, busy: map[string]*keyLock{}, former: map[string]time.Time{},
		resolvers: usernet.HostResolvers(),
	}
	e.Open = e.openAgent
	e.ctx, e.end = context.WithCancel(context.WithoutCancel(ctx))
	if !e.asRoot {
		if err := checkUserNamespaces(); err != nil {
			return nil, err
		}
	}
	runnerPath, err := helper(cfg.Runner, "sandboxer-runner")
	if err == nil {
		e.program, err = helper(cfg.Agent, "sandboxer-agent")
	}
	for _, p := range []string{runnerPath, e.program} {
		if err == nil {
			err = program.Check(p, runtime.GOARCH)
		}
	}
	if err != nil {
		return nil, err
	}
	for _, d := range []string{env.Dir, e.dir("run"), e.dir("box"), e.layers()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the state directory of %s cannot be made", env.Extension)
		}
	}
	e.removeNamedLayers()
	e.cgroups = findCgroups(env.Owner)
	e.memory = e.newMemory()
	e.makes = skeletonMaker{dir: e.dir("skel"), mounts: e.mounts(), agent: e.program, paths: cfg.Paths, etc: cfg.Etc, asRoot: e.asRoot, checked: map[string]bool{}}
	if _, err := e.skeleton(); err != nil {
		return nil, err
	}
	if err := removeSkeletons(e.dir("skel"), e.mounts(), e.skeletonInUse, noSkeleton); err != nil {
		e.warn("old skeletons stay", err)
	}
	if e.asRoot {
		if err := e.openIDs(ctx); err != nil {
			return nil, err
		}
	}
	if e.images, err = e.newImageStore(e.dir("image")); err != nil {
		return nil, openFailed(err, "the image store cannot be prepared")
	}
	if e.poll, err = newPoller(); err != nil {
		return nil, openFailed(err, "the streams of commands cannot be waited for")
	}
	if e.unlock, err = prepareProcess(runnerPath, e.dir("null")); err != nil {
		e.poll.close()
		return nil, openFailed(err, "this process cannot be prepared for gVisor")
	}
	go e.poll.run()
	for _, n := range e.otherVersions() {
		e.warn(n, nil)
	}
	if err := e.removeStrayState(); err != nil {
		e.warn("files of sandboxes that are gone stay", err)
	}
	if err := e.reconnect(); err != nil {
		e.warn("sandboxes are without their network", err)
	}
	return e, nil
}

// skeleton returns the root of sandboxes without an image, made again if it was
// removed, or if the machine has changed since: a program that was installed needs its
// part of /etc.
func (e *extension) skeleton() (*skeleton, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	whole := e.skel != nil && e.skel.intact()
	if whole && e.skel.current() {
		return e.skel, nil
	}
	s, err := e.makes.make()
	switch {
	case err == nil:
	case whole: // an older one is better than none
		e.warn("the root file system of sandboxes cannot follow changes of this machine", err)
		return e.skel, nil
	default:
		return nil, openFailed(err, "the root file system of sandboxes cannot be prepared")
	}
	if e.skel != nil && s.digest != e.skel.digest {
		e.former[e.skel.digest] = time.Now()
		if err := removeSkeletons(e.dir("skel"), e.mounts(), e.skeletonStays(s.digest), noSkeleton); err != nil {
			e.warn("old skeletons stay", err)
		}
	}
	e.skel = s
	return s, nil
}

// openIDs prepares the ranges of user IDs, and claims those of the sandboxes that are there.
func (e *extension) openIDs(ctx context.Context) error {
	e.ids = newIDRanges(e.cfg, e.mounts(), e.skel)
	if e.ids.why != nil {
		e.warn("all sandboxes have the same user IDs on this machine, which cannot give each its own", e.ids.why)
	}
	names, err := e.recorded()
	if err != nil {
		return openFailed(err, "the sandboxes on this machine cannot be listed")
	}
	for _, n := range names {
		rec, err := e.record(n)
		if err != nil || rec.IDBase == 0 {
			continue
		}
		if err := e.ids.retake(ctx, e.dir("box", n), rec.IDBase); err != nil {
			e.warn("the user IDs of a sandbox are not noted as taken", err)
		}
	}
	return nil
}

func (e *extension) warn(what string, err error) {
	switch {
	case e.env.Log == nil:
	case err == nil:
		e.env.Log.Warn(what, "extension", e.env.Extension)
	default:
		e.env.Log.Warn(what, "extension", e.env.Extension, "err", err)
	}
}

// skeletonStays tells which skeletons must not be removed: the current one, those of
// sandboxes and snapshots, and those that a create may just have been given.
func (e *extension) skeletonStays(current string) func(digest string) bool {
	return func(digest string) bool {
		return digest == current || time.Since(e.former[digest]) < 10*time.Minute || strings.HasPrefix(digest, ".new-") || e.skeletonInUse(digest)
	}
}

// aside does something beside calls, until Close.
func (e *extension) aside(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ctx.Err() == nil {
		e.work.Go(f)
	}
}

func openFailed(err error, format string, args ...any) error {
	var se *sandboxer.Error
	if errors.As(err, &se) {
		return err
	}
	return sandboxer.E(sandboxer.Unavailable, err, format, args...)
}

// Close lets go of this process's hold on the sandboxes, which live on. What only
// a running broker needs is removed: network links and, when no sandbox is left, the
// skeleton's mounts and the parent control groups.
func (e *extension) Close() error {
	e.mu.Lock()
	e.end()
	e.mu.Unlock()
	e.work.Wait()
	e.mu.Lock()
	boxes := e.boxes
	e.boxes = map[string]*liveSandbox{}
	e.mu.Unlock()
	for _, b := range boxes {
		b.close()
	}
	e.poll.close()
	defer e.unlock()
	e.images.store.Close()
	if e.ids != nil {
		defer e.ids.close() // last: what it waits for goes on meanwhile
	}
	names, err := e.names()
	if err != nil || len(names) > 0 {
		return err
	}
	e.cgroups.removeRoots()
	specutils.UnmountNullNetNS(e.dir("run"))
	_ = os.Remove(filepath.Join(e.dir("run"), specutils.NullNetNSFilename))
	// What was saved is restored with the root that it had, and no other. The current one the
	// next server wants, which looks through it first: to remove some thousand files takes a
	// while, and whoever closes has little time.
	e.mu.Lock()
	current := e.skel.digest
	e.mu.Unlock()
	saved, _, err := e.savedRoots()
	return removeSkeletons(e.dir("skel"), e.mounts(), noSkeleton, func(digest string) bool {
		return err != nil || digest == current || slices.Contains(saved, digest)
	})
}

func (e *extension) dir(elem ...string) string {
	return filepath.Join(append([]string{e.env.Dir}, elem...)...)
}

// layers is where gVisor keeps what sandboxes write: files that it removes as soon as
// they are open. The directory is one for all, because gVisor restores a sandbox only
// with the directory it was saved with.
func (e *extension) layers() string { return e.dir("layer") }

// removeNamedLayers removes files that still have a name because their maker died
// before it took that away.
func (e *extension) removeNamedLayers() {
	entries, _ := os.ReadDir(e.layers())
	for _, d := range entries {
		if fi, err := d.Info(); err == nil && time.Since(fi.ModTime()) > time.Minute {
			_ = os.Remove(filepath.Join(e.layers(), d.Name()))
		}
	}
}

// removeStrayState removes gVisor's lock files and sockets of sandboxes of which nothing else
// is there: a server died in the wrong moment.
func (e *extension) removeStrayState() error {
	files, err := os.ReadDir(e.dir("run"))
	if err != nil {
		return err
	}
	stray := map[string]string{} // the names of files, and of whom they are
	for _, f := range files {
		name, _, ok := strings.Cut(f.Name(), "_sandbox:")
		if !ok {
			name = strings.TrimSuffix(strings.TrimPrefix(f.Name(), "runsc-"), ".sock")
		}
		if _, _, ok := parseBoxName(name); ok && stateOf(f.Name(), name) {
			stray[f.Name()] = name
		}
	}
	if len(stray) == 0 {
		return nil
	}
	names, err := e.names() // after them: a sandbox's directory is made first and removed last
	if err != nil {
		return err
	}
	for f, name := range stray {
		if slices.Contains(names, name) {
			continue
		}
		if rerr := os.RemoveAll(e.dir("run", f)); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}
	return err
}

// mounts is the directory of this installation's skeleton mounts. It lies outside the
// state directory, which only its owner may walk through.
func (e *extension) mounts() string {
	sum := sha256.Sum256([]byte(e.env.Dir))
	return filepath.Join("/run/sandboxer-roots", hex.EncodeToString(sum[:])[:12])
}

// skeletonInUse reports whether the skeleton is the current one or a sandbox's.
func (e *extension) skeletonInUse(digest string) bool {
	if digest == e.skel.digest {
		return true
	}
	names, err := e.names()
	if err != nil {
		return true
	}
	for _, n := range names {
		if r, err := e.record(n); err != nil || r.Skeleton == digest {
			return true
		}
	}
	saved, _, err := e.savedRoots()
	return err != nil || slices.Contains(saved, digest)
}

// A program that links this package has its main goroutine on the first thread, where
// no other can be then. gVisor starts programs in another network namespace by moving a
// thread there and back, and takes that of the first thread for the one to go back to:
// with the first thread itself away, others would come back to where it is, and stay
// there, without a network, together with the threads and programs they start
// (docs/adr/0013-first-thread.md).
func init() { runtime.LockOSThread() }

// prepareProcess adjusts what gVisor's library takes from the process as a whole.
// Two engines may be open at a time (tests do), so it counts.
func prepareProcess(runnerPath, nullPath string) (release func(), err error) {
	process.mu.Lock()
	defer process.mu.Unlock()
	runner, err := openHigh(runnerPath)
	if err != nil {
		return nil, err
	}
	// Children become other users before they start the program, who may not be able to
	// walk to it (/root/go/bin); an open file needs no path.
	specutils.ExePath = fmt.Sprintf("/proc/self/fd/%d", runner.Fd())
	log.SetTarget(log.GoogleEmitter{Writer: &log.Writer{Next: io.Discard}})
	log.SetLevel(log.Warning)
	if process.users == 0 {
		null, err := openNull(nullPath)
		if err != nil {
			runner.Close()
			return nil, err
		}
		// gVisor gives a sandbox's first process the globals os.Stdin, os.Stdout and
		// os.Stderr.
		process.stdio = []*os.File{os.Stdin, os.Stdout, os.Stderr}
		os.Stdin, os.Stdout, os.Stderr = null, null, null
	}
	process.runners = append(process.runners, runner)
	process.users++
	return func() {
		process.mu.Lock()
		defer process.mu.Unlock()
		if process.users--; process.users > 0 {
			return
		}
		null := os.Stdin
		os.Stdin, os.Stdout, os.Stderr = process.stdio[0], process.stdio[1], process.stdio[2]
		null.Close()
		for _, f := range process.runners {
			f.Close()
		}
		process.runners = nil
	}, nil
}

// process is state of the process, not of an engine: gVisor's library reads globals.
var process struct {
	mu      sync.Mutex
	users   int
	stdio   []*os.File
	runners []*os.File
}

// openHigh opens a program under a number that stays free while a child's files are
// put in order: below it are those passed on. A descriptor table that is large
// already also spares children growing it while they start.
func openHigh(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const high = 512
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, high)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EMFILE) {
		var may unix.Rlimit
		_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &may)
		return nil, sandboxer.E(sandboxer.Unavailable, err, "this process cannot be prepared for gVisor: it may have %d files open, and needs more than %d", may.Cur, high).
			WithHint("raise the limit where it is started: ulimit -n %d, or LimitNOFILE=%d in its unit", 2*high, 2*high)
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// openNull opens a null device. gVisor changes the owner of what it gives a sandbox
// as its streams, so that this must not be the machine's own /dev/null, where that can
// be avoided.
func openNull(path string) (*os.File, error) {
	err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))
	if err == nil || errors.Is(err, unix.EEXIST) {
		if f, err := os.OpenFile(path, os.O_RDWR, 0); err == nil {
			return f, nil
		}
	}
	return os.OpenFile(os.DevNull, os.O_RDWR, 0)
}

// helper finds a helper program: where the configuration says, beside the running
// program, or that program itself, which knows both roles.
func helper(configured, name string) (string, error) {
	if configured != "" {
		if _, err := os.Stat(configured); err != nil {
			return "", sandboxer.E(sandboxer.Invalid, err, "the helper program %s does not exist", configured)
		}
		return configured, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", sandboxer.E(sandboxer.Unavailable, err, "the path of the running program is unknown")
	}
	beside := filepath.Join(filepath.Dir(self), name)
	if _, err := os.Stat(beside); err == nil {
		return beside, nil
	}
	return self, nil
}

// A record is what the extension remembers about a sandbox besides gVisor's own
// state, written before anything else exists.
type record struct {
	Owner      string                  `json:"owner"`
	SandboxID  string                  `json:"sandbox_id"`
	Generation int                     `json:"generation"`
	Skeleton   string                  `json:"skeleton,omitempty"`
	Image      string                  `json:"image,omitempty"`
	ImageEnv   []string                `json:"image_env,omitempty"`
	ImageFile  string                  `json:"image_file,omitempty"` // in the image store; it stays while this record is there
	About      map[string]string       `json:"about,omitempty"`      // of the image
	Ports      []int                   `json:"ports,omitempty"`      // exposed by the image
	StopSignal string                  `json:"stop_signal,omitempty"`
	Network    sandboxer.NetworkPolicy `json:"network"`
	Limits     sandboxer.Limits        `json:"limits"`
	Workspace  string                  `json:"workspace"`
	User       string                  `json:"user,omitempty"`
	Fuse       time.Time               `json:"fuse,omitzero"`
	Mounts     []sandboxer.Mount       `json:"mounts,omitempty"`
	Plugs      int                     `json:"plugs,omitempty"` // network interfaces added since it started
	Link       uint64                  `json:"link,omitempty"`  // inode number of the socket that is its network card; see takeLink
	Warm       bool                    `json:"warm,omitempty"`  // it waits for its claim, or for the end of that
	Claim      string                  `json:"claim,omitempty"` // digest of the claim, from its beginning
	Main       []string                `json:"main,omitempty"`  // of a warm one: the command that its claim starts
	MainDir    string                  `json:"main_dir,omitempty"`
	Stamp      []byte                  `json:"stamp,omitempty"`
	Ready      bool                    `json:"ready"` // everything Provision owes is done

	// AgentMount says that the agent's programs are a mount of their own. Without it they
	// are files of the sandbox's, as they were in builds before; gVisor restores what was
	// saved so with the same mounts only.
	AgentMount bool `json:"agent_mount,omitempty"`

	// GVisor is the version that runs it. Builds that did not write it down all had firstGVisor.
	GVisor string `json:"gvisor,omitempty"`

	// IDBase is the first of its host user and group IDs; 0 if those are from idShift on, which
	// other such sandboxes have too.
	IDBase uint32 `json:"id_base,omitempty"`
}

const recordFile = "record.json"

// record reads what is written down about the sandbox called name. Kinds: Failed where it is
// damaged, Internal.
func (e *extension) record(name string) (r record, err error) {
	data, err := os.ReadFile(e.dir("box", name, recordFile))
	var newer []string
	if err == nil {
		newer, err = strictjson.DecodeStored(data, &r)
	}
	if err != nil {
		return r, damaged(err, "the record of sandbox "+name+" on this machine")
	}
	if len(newer) > 0 {
		if _, told := e.newer.LoadOrStore(name, true); !told {
			e.warn("what a newer version wrote of a sandbox is not heeded, and lost when it is changed", fmt.Errorf("sandbox %s: %q", name, newer))
		}
	}
	return r, nil
}

// errDamaged is in the chain of errors about a sandbox of which what is written down
// cannot be read.
var errDamaged = errors.New("damaged")

func damaged(cause error, what string) error {
	if errors.Is(cause, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Internal, cause, "%s is missing", what)
	}
	if isShort(cause) {
		return sandboxer.E(sandboxer.Unavailable, cause, "%s cannot be read now", what)
	}
	return sandboxer.E(sandboxer.Failed, errors.Join(errDamaged, cause), "%s is damaged and cannot be read", what).
		WithHint("it can still be destroyed, and expires as ever")
}

// isShort reports whether something could not be read for want of what this process or
// machine has too little of at the moment.
func isShort(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// writeRecord replaces the record atomically. What it describes does not outlive a crash of the
// machine, and a create does not wait for the disk.
func (e *extension) writeRecord(name string, r record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return wholefile.Replace(e.dir("box", name, recordFile), data)
}

// boxName is the name of one generation in gVisor's state, in directories and in
// control groups. The installation is already in the directory above.
func boxName(id string, generation int) string { return fmt.Sprintf("%s-g%d", id, generation) }

var boxPattern = regexp.MustCompile(`^(.+)-g([0-9]+)$`)

func parseBoxName(name string) (id string, generation int, ok bool) {
	m := boxPattern.FindStringSubmatch(name)
	if m == nil {
		return "", 0, false
	}
	g, err := strconv.Atoi(m[2])
	return m[1], g, err == nil && sandboxer.CheckID(m[1]) == nil
}

// names lists every sandbox of which anything exists: a directory, gVisor's state,
// a control group or a process.
func (e *extension) names() ([]string, error) {
	seen := map[string]bool{}
	recorded, err := e.recorded()
	if err != nil {
		return nil, err
	}
	for _, n := range recorded {
		seen[n] = true
	}
	ids, err := container.List(e.dir("run"))
	if err != nil {
		return nil, err
	}
	see := func(name string) {
		if _, _, ok := parseBoxName(name); ok {
			seen[name] = true
		}
	}
	for _, id := range ids {
		see(id.SandboxID)
	}
	groups, err := e.cgroups.names()
	if err != nil {
		return nil, err
	}
	for _, n := range groups {
		see(n)
	}
	running, err := e.running()
	if err != nil {
		return nil, err
	}
	for n := range running {
		see(n)
	}
	return slices.Sorted(maps.Keys(seen)), nil
}

// recorded lists the sandboxes that have a directory: all that can have a record.
func (e *extension) recorded() (names []string, err error) {
	entries, err := os.ReadDir(e.dir("box"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, d := range entries {
		if _, _, ok := parseBoxName(d.Name()); ok {
			names = append(names, d.Name())
		}
	}
	return names, nil
}

// processes finds the gVisor processes of the sandbox called name. It sees also those that
// no state file mentions any more.
func (e *extension) processes(name string) ([]int, error) {
	all, err := e.running()
	return all[name], err
}

// running finds the gVisor processes of this extension by their arguments, by sandbox.
func (e *extension) running() (map[string][]int, error) {
	out := map[string][]int{}
	root, buf := "--root="+e.dir("run"), make([]byte, 4<<10)
	pids, err := procs.All()
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the processes of this machine cannot be listed")
	}
	for _, pid := range pids {
		args, err := procs.Args(pid, buf)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "process %d of this machine cannot be looked at", pid)
		}
		if bytes.HasPrefix(args, []byte("runsc-")) && procs.Has(args, root) {
			argv := bytes.Split(bytes.TrimRight(args, "\x00"), []byte{0})
			name := string(argv[len(argv)-1])
			out[name] = append(out[name], pid)
		}
	}
	return out, nil
}

// keyLock is a lock for one sandbox; the last one to leave removes it.
type keyLock struct {
	slot chan struct{}
	refs int
}

// lock excludes everybody else, also other processes of this installation, from
// changing the sandbox called name. Kinds: that of ctx's end.
func (e *extension) lock(ctx context.Context, name string) (unlock func(), err error) {
	e.mu.Lock()
	l := e.busy[name]
	if l == nil {
		l = &keyLock{slot: make(chan struct{}, 1)}
		e.busy[name] = l
	}
	l.refs++
	e.mu.Unlock()
	leave := func() {
		e.mu.Lock()
		if l.refs--; l.refs == 0 {
			delete(e.busy, name)
		}
		e.mu.Unlock()
	}
	if err := ctx.Err(); err != nil {
		leave()
		return nil, err
	}
	select {
	case l.slot <- struct{}{}:
	case <-ctx.Done():
		leave()
		return nil, sandboxer.E(sandboxer.KindOf(ctx.Err()), context.Cause(ctx), "something else is being done with sandbox %s", name)
	}
	release, err := lockByte(ctx, e.dir("locks"), name)
	if err != nil {
		<-l.slot
		leave()
		if ctx.Err() != nil {
			return nil, sandboxer.E(sandboxer.KindOf(ctx.Err()), context.Cause(ctx), "another process is doing something with sandbox %s", name)
		}
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the lock of sandbox %s cannot be taken", name)
	}
	return func() {
		release()
		<-l.slot
		leave()
	}, nil
}

// lockByte locks the one byte of the file at path that stands for name. The file stays
// empty; one for each name would be made and removed three times in a short life, and file
// systems are slow at that. Package filelock has no such locks: nobody else needs them, and
// only Linux gives them to an open file rather than to a process.
func lockByte(ctx context.Context, path, name string) (release func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	h := fnv.New64a()
	_, _ = io.WriteString(h, name)
	at := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: int64(h.Sum64() >> 2), Len: 1}
	err = filelock.Wait(ctx, func() error {
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &at)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINTR) {
			return filelock.ErrHeld
		}
		return err
	})
	if err != nil {
		f.Close()
		return nil, err
	}
	return func() {
		at.Type = unix.F_UNLCK // a child that has not become its program yet has the file open, too
		_ = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &at)
		f.Close()
	}, nil
}

// conf returns gVisor's configuration for one sandbox.
func (e *extension) conf(l sandboxer.Limits) (*config.Config, error) {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	config.RegisterFlags(fs)
	overlay := "root:dir=" + e.layers()
	if l.DiskBytes > 0 {
		overlay += ",size=" + strconv.FormatInt(l.DiskBytes, 10)
	}
	for _, kv := range [][2]string{
		{"root", e.dir("run")},
		{"platform", "systrap"}, // kvm hangs under nested virtualisation
		{"network", "sandbox"},
		{"ignore-cgroups", "true"}, // see cgroups
		{"overlay2", overlay},
		{"host-settings", "ignore"},
		{"rootless", strconv.FormatBool(!e.asRoot)},
		{"host-uds", "none"},
		{"host-fifo", "none"},
		{"net-raw", "false"},
		{"allow-suid", "false"},
		{"oci-seccomp", "false"},
	} {
		if err := fs.Set(kv[0], kv[1]); err != nil {
			return nil, fmt.Errorf("gVisor option %s=%s: %w", kv[0], kv[1], err)
		}
	}
	return config.NewFromFlags(fs)
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

// DefaultLimits implements sandboxer.Limiter.
func (e *extension) DefaultLimits(sandboxer.Spec) sandboxer.Limits {
	return e.defaults(sandboxer.Limits{})
}

// guestCapabilities is what root inside a sandbox may do: what container engines
// grant, without raw sockets and device nodes. CAP_SYS_ADMIN and CAP_SYS_RESOURCE
// are absent, which makes the process limit hold for root too.
var guestCapabilities = []string{"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL",
	"CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT"}

// ownCapabilities are those of the agent, and of what reaches it: both must get a thread
// where the sandbox's processes are at their limit. The agent hands none of it on.
var ownCapabilities = append(slices.Clone(guestCapabilities), "CAP_SYS_RESOURCE")

// firstProcess is what a sandbox begins with: see package pause. Who may talk to the
// agent is decided by its connections, which are handed to it as open files: it needs
// no token. Its fuse is the one that the sandbox has when it starts.
func firstProcess(fuse time.Time) []string {
	return []string{pausePath, strconv.FormatInt(fuseSeconds(fuse), 10), agentPath, "init",
		"--above-limits", "--listen", "donate:" + agentSocket(true), "--fuse", handedOn}
}

// handedOn stands for the fuse that a sandbox's first process hands on to the agent. In
// sandboxes of older builds the agent begins with the fuse of their create.
const handedOn = "@"

// fuseSeconds is a fuse as the first process knows it: 0 means none.
func fuseSeconds(fuse time.Time) int64 {
	if fuse.IsZero() {
		return 0
	}
	return max(1, fuse.Unix())
}

// bundle writes the OCI bundle that gVisor's children read again, and returns it.
func (e *extension) bundle(name string, spec sandboxer.Spec, skel *skeleton, img *image, agentMount bool, mounts []*mountSource, from *saved) (string, error) {
	env := []string{"PATH=" + e.path(img), "HOME=/root", "SANDBOXER=true", "SANDBOXER_ID=" + spec.ID}
	if img != nil {
		env = mergeEnv(env, img.config.Env)
	}
	given := spec.Env
	if spec.Warm {
		given = nil // it comes with the claim
	}
	for k, v := range given {
		env = mergeEnv(env, []string{k + "=" + v})
	}
	slices.Sort(env)
	s := &specs.Spec{
		Version: "1.0.0",
		Root:    &specs.Root{},
		Process: &specs.Process{
			Args: firstProcess(spec.Fuse),
			Cwd:  "/",
			Env:  env,
			Capabilities: &specs.LinuxCapabilities{
				Bounding: ownCapabilities, Effective: ownCapabilities, Permitted: ownCapabilities,
			},
			NoNewPrivileges: true,
			Rlimits:         rlimits(spec.Limits),
		},
		Hostname: spec.ID,
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{"mode=1777", "size=67108864"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace},
				{Type: specs.UserNamespace},
			},
		},
		Annotations: map[string]string{},
	}
	if e.asRoot {
		// gVisor restores a sandbox only with what stands here; what it really has is given to
		// its processes, see create.
		m := idMapping(idShift)
		s.Linux.UIDMappings, s.Linux.GIDMappings = m, m
	} else {
		s.Linux.UIDMappings = []specs.LinuxIDMapping{{ContainerID: 0, HostID: uint32(os.Geteuid()), Size: 1}}
		s.Linux.GIDMappings = []specs.LinuxIDMapping{{ContainerID: 0, HostID: uint32(os.Getegid()), Size: 1}}
	}
	if img == nil {
		s.Root.Path = skel.root
		for _, d := range skel.binds {
			s.Mounts = append(s.Mounts, specs.Mount{Destination: d, Source: d, Type: "bind", Options: []string{"rbind", "ro"}})
		}
	} else {
		s.Root.Path = e.images.empty()
		s.Annotations["dev.gvisor.spec.rootfs.source"] = img.path
		s.Annotations["dev.gvisor.spec.rootfs.type"] = "erofs"
		s.Annotations["dev.gvisor.spec.rootfs.overlay"] = "dir=" + e.layers()
		if n := spec.Limits.DiskBytes; n > 0 {
			s.Annotations["dev.gvisor.spec.rootfs.options"] = "size=" + strconv.FormatInt(n, 10)
		}
	}
	// Without a gofer, nobody opens the file that the writable layer is in; without any
	// directory of this machine, there is no gofer.
	if agentMount {
		s.Mounts = append(s.Mounts, specs.Mount{Destination: agentDir, Source: skel.agent(), Type: "bind", Options: []string{"bind", "ro"}})
	} else if img != nil {
		s.Mounts = append(s.Mounts, specs.Mount{Destination: layerMount, Source: filepath.Join(skel.root, "mnt"), Type: "bind", Options: []string{"bind", "ro"}})
	}
	for i, m := range mounts {
		options := []string{"bind", "rw"}
		if m.Mount.ReadOnly {
			options[1] = "ro"
		}
		s.Mounts = append(s.Mounts, specs.Mount{Destination: m.at(i), Source: m.place, Type: "bind", Options: options})
	}
	if from != nil {
		if err := from.dress(s, skel); err != nil {
			return "", err
		}
	}
	dir := e.dir("box", name)
	data, err := json.Marshal(s)
	if err != nil {
		return "", err
	}
	return dir, os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600)
}

// idMapping makes the host's IDs from base on those that begin with 0.
func idMapping(base uint32) []specs.LinuxIDMapping {
	return []specs.LinuxIDMapping{{ContainerID: 0, HostID: base, Size: idCount}}
}

// path is where commands are looked up. Without an image these are the machine's
// programs, so the broker's own search path counts as far as sandboxes see it: a tool
// chain in /usr/local, say.
func (e *extension) path(img *image) string {
	out := defaultPath
	if img != nil {
		return out
	}
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		shown := slices.ContainsFunc(append([]string{"/usr"}, e.cfg.Paths...), func(p string) bool {
			return dir == p || strings.HasPrefix(dir, p+"/")
		})
		if shown && filepath.Clean(dir) == dir && !slices.Contains(filepath.SplitList(out), dir) {
			out += ":" + dir
		}
	}
	return out
}

func rlimits(l sandboxer.Limits) []specs.POSIXRlimit {
	out := []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 65_536, Hard: 1 << 20}}
	if l.PIDs > 0 {
		out = append(out, specs.POSIXRlimit{Type: "RLIMIT_NPROC", Soft: uint64(l.PIDs), Hard: uint64(l.PIDs)})
	}
	return out
}

// mergeEnv returns base with add's variables set, add winning.
func mergeEnv(base, add []string) []string {
	for _, kv := range add {
		k, _, _ := strings.Cut(kv, "=")
		i := slices.IndexFunc(base, func(b string) bool { return strings.HasPrefix(b, k+"=") })
		if i >= 0 {
			base[i] = kv
		} else {
			base = append(base, kv)
		}
	}
	return base
}

// checkUserNamespaces says, before anything is made, why an ordinary user cannot run
// sandboxes here.
func checkUserNamespaces() error {
	if data, err := os.ReadFile("/proc/sys/user/max_user_namespaces"); err == nil && strings.TrimSpace(string(data)) == "0" {
		return sandboxer.E(sandboxer.Unavailable, nil, "user namespaces are switched off on this machine (user.max_user_namespaces is 0)").
			WithHint("run sandboxer as root, or: sysctl user.max_user_namespaces=15000")
	}
	for _, knob := range [][2]string{{"kernel/unprivileged_userns_clone", "0"}, {"kernel/apparmor_restrict_unprivileged_userns", "1"}} {
		if data, err := os.ReadFile("/proc/sys/" + knob[0]); err == nil && strings.TrimSpace(string(data)) == knob[1] {
			name := strings.ReplaceAll(knob[0], "/", ".")
			return sandboxer.E(sandboxer.Unavailable, nil, "this machine does not let ordinary users make user namespaces (%s is %s)", name, knob[1]).
				WithHint("run sandboxer as root, or let an administrator change %s", name)
		}
	}
	return nil
}

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
	"github.com/sand-boxer/sandboxer/internal/inside"
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
	former  map[string]time.Time // digests of replaced skeletons, and when they were replaced
	images  *imageStore
	program string        // of the agent, copied into images
	poll    *poller       // waits for the output of commands, and for their ends
	slots   chan struct{} // bounds concurrent creates: they need processor time, and wait in between

	stopGrace time.Duration // for a main process to end after its stop signal

	resolvers func() []string // this machine's
	unlock    func()
	inUse     *filelock.Lock // shared by the extensions that are open in env.Dir: only the last one that closes removes what they share

	ctx  context.Context // ends with Close
	end  context.CancelFunc
	work sync.WaitGroup // background work in addition to calls

	newer sync.Map // names of sandboxes whose records, as was logged, a newer version wrote

	noticing sync.Mutex
	notices  []string
	noticed  time.Time // when notices were found

	ended notices.Hub // reports sandboxes whose kernel has ended

	mu    sync.Mutex
	boxes map[string]*liveSandbox // by name
	busy  map[string]*keyLock     // by name
}

// The compiler checks what the adapter claims, in addition to the methods that only
// agent.Capabilities has.
var _ interface {
	sandboxer.Extension
	sandboxer.Checker
	sandboxer.Admitter
	sandboxer.Limiter
	sandboxer.Noticer
	sandboxer.Execer
	sandboxer.Notifier
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
func open(ctx context.Context, env sandboxer.Env, cfg Config) (_ sandboxer.Extension, err error) {
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "gVisor does not run on %s", runtime.GOARCH)
	}
	e := &extension{
		env: env, cfg: cfg, asRoot: os.Geteuid() == 0,
		slots: make(chan struct{}, 2*runtime.NumCPU()), stopGrace: 3 * time.Second,
		boxes: map[string]*liveSandbox{}, busy: map[string]*keyLock{}, former: map[string]time.Time{},
		resolvers: usernet.HostResolvers(),
	}
	e.Open = e.openAgent
	e.ctx, e.end = context.WithCancel(context.WithoutCancel(ctx))
	if err := checkRights(e.asRoot); err != nil {
		return nil, err
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
	if e.inUse, err = lockDir(ctx, env.Dir, filelock.Shared); err != nil {
		return nil, openFailed(err, "the state directory of %s cannot be locked", env.Extension)
	}
	defer func() {
		if err != nil {
			e.inUse.Release()
		}
	}()
	e.removeNamedLayers()
	e.cgroups = findCgroups(env.Owner)
	e.memory = e.newMemory()
	e.makes = skeletonMaker{dir: e.dir("skel"), mounts: e.mounts(), agent: e.program, paths: cfg.Paths, etc: cfg.Etc, asRoot: e.asRoot, checked: map[string]bool{}}
	if _, err := e.skeleton(); err != nil {
		return nil, err
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
		e.warn("files of removed sandboxes cannot be deleted", err)
	}
	if err := e.reconnect(); err != nil {
		e.warn("some sandboxes have no network", err)
	}
	return e, nil
}

// makingTime is how long another extension in the same directory may take to make its root.
const makingTime = time.Minute

// skeleton returns the root of sandboxes without an image. It makes another one if that was
// removed, or if the machine has changed since: a newly installed program needs its part of
// /etc.
func (e *extension) skeleton() (*skeleton, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	whole := e.skel != nil && e.skel.intact()
	if whole && e.skel.current() {
		return e.skel, nil
	}
	var lock *filelock.Lock
	var s *skeleton
	err := os.MkdirAll(e.dir("skel"), 0o700)
	if err == nil { // another extension may be open in this directory
		ctx, cancel := context.WithTimeout(e.ctx, makingTime)
		lock, err = lockDir(ctx, e.dir("skel"), filelock.Exclusive)
		cancel()
	}
	if err == nil {
		defer lock.Release()
		s, err = e.makes.make()
	}
	switch {
	case err == nil:
	case whole: // an older one is better than none
		e.warn("the root file system of new sandboxes cannot be updated to this machine's files", err)
		return e.skel, nil
	default:
		return nil, openFailed(err, "the root file system of sandboxes cannot be prepared")
	}
	before := e.skel
	e.skel = s
	stays := e.skeletonInUse
	if before != nil {
		if before.digest == s.digest {
			return s, nil
		}
		e.former[before.digest] = time.Now()
		stays = e.skeletonStays(s.digest)
	}
	if err := removeSkeletons(e.dir("skel"), e.mounts(), stays, noSkeleton); err != nil {
		e.warn("old root file systems cannot be removed", err)
	}
	return s, nil
}

// openIDs prepares the ranges of user IDs, and claims those of existing sandboxes.
func (e *extension) openIDs(ctx context.Context) error {
	e.ids = newIDRanges(e.cfg, e.mounts(), e.skel)
	if e.ids.why != nil {
		e.warn("all sandboxes share the same user IDs, because this machine cannot give each its own", e.ids.why)
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
			e.warn("the user IDs of a sandbox cannot be recorded as in use", err)
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

// skeletonStays reports which skeletons must not be removed: the current one, those of
// sandboxes and snapshots, and those that a create may just have received.
func (e *extension) skeletonStays(current string) func(digest string) bool {
	return func(digest string) bool {
		return digest == current || time.Since(e.former[digest]) < 10*time.Minute || strings.HasPrefix(digest, ".new-") || e.skeletonInUse(digest)
	}
}

// aside runs f in the background, until Close.
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

// Close releases this process's hold on the sandboxes, which continue. It removes what
// only a running broker needs: network links and, when no sandbox is left and no other extension
// is open in the directory, the skeleton's mounts and the parent control groups.
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
		defer e.ids.close() // last: the unmounts that it waits for continue meanwhile
	}
	e.inUse.Release()
	names, err := e.names()
	if err != nil || len(names) > 0 {
		return err
	}
	last, err := tryLockDir(e.env.Dir, filelock.Exclusive)
	switch {
	case errors.Is(err, filelock.ErrHeld):
		return nil
	case err == nil:
		defer last.Release()
	case !errors.Is(err, fs.ErrNotExist): // what is outside a removed directory goes, too
		return err
	}
	e.cgroups.removeRoots()
	specutils.UnmountNullNetNS(e.dir("run"))
	_ = os.Remove(filepath.Join(e.dir("run"), specutils.NullNetNSFilename))
	// Keep the skeletons of snapshots, which can be restored with no other root. Keep also the
	// current one: the next server needs it, and only reads it through; removing some thousand
	// files takes a while, and a process that closes has little time.
	e.mu.Lock()
	current := e.skel.digest
	e.mu.Unlock()
	saved, _, err := e.savedRoots()
	return removeSkeletons(e.dir("skel"), e.mounts(), noSkeleton, func(digest string) bool {
		return err != nil || digest == current || slices.Contains(saved, digest)
	})
}

// lockDir locks a directory, as soon as no other holder prevents that.
func lockDir(ctx context.Context, dir string, k filelock.Kind) (l *filelock.Lock, err error) {
	err = filelock.Wait(ctx, func() error {
		l, err = tryLockDir(dir, k)
		return err
	})
	return l, err
}

func tryLockDir(dir string, k filelock.Kind) (*filelock.Lock, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	l, err := filelock.TryFile(f, k)
	if err != nil {
		f.Close()
	}
	return l, err
}

func (e *extension) dir(elem ...string) string {
	return filepath.Join(append([]string{e.env.Dir}, elem...)...)
}

// layers is where gVisor keeps the writes of sandboxes: files that it unlinks as soon as
// they are open. All share one directory, because gVisor restores a sandbox only with the
// directory it was saved with.
func (e *extension) layers() string { return e.dir("layer") }

// removeNamedLayers removes files that still have a name because their maker died
// before it unlinked them.
func (e *extension) removeNamedLayers() {
	entries, _ := os.ReadDir(e.layers())
	for _, d := range entries {
		if fi, err := d.Info(); err == nil && time.Since(fi.ModTime()) > time.Minute {
			_ = os.Remove(filepath.Join(e.layers(), d.Name()))
		}
	}
}

// removeStrayState removes gVisor's lock files and sockets of sandboxes that have nothing else: a
// server died at the wrong moment.
func (e *extension) removeStrayState() error {
	files, err := os.ReadDir(e.dir("run"))
	if err != nil {
		return err
	}
	stray := map[string]string{} // file names, and the sandboxes they belong to
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

// mounts is the directory of this installation's skeleton mounts. It is outside the state
// directory, which only its owner may enter.
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

// A program that links this package has its main goroutine on the first thread, and no other
// goroutine can run there. gVisor starts programs in another network namespace by moving a
// thread there and back, and returns to the namespace of the first thread: if the first
// thread itself had moved, other threads would follow it, and stay without a network,
// together with the threads and programs they start (docs/design/adr/0013-first-thread.md).
func init() { runtime.LockOSThread() }

// prepareProcess adjusts process-wide state that gVisor's library reads. The first open engine sets it and the last one
// resets it: in between, sandboxes that start read it.
func prepareProcess(runner, nullPath string) (release func(), err error) {
	process.mu.Lock()
	defer process.mu.Unlock()
	switch {
	case process.users == 0:
		if err := process.prepare(runner, nullPath); err != nil {
			return nil, err
		}
	case process.runner != runner:
		return nil, sandboxer.E(sandboxer.Invalid, nil, "one process has one runner: another extension has opened %s, and this one wants %s", process.runner, runner).
			WithHint("give both extensions the same runner in their files")
	}
	process.users++
	return func() {
		process.mu.Lock()
		defer process.mu.Unlock()
		if process.users--; process.users == 0 {
			process.reset()
		}
	}, nil
}

// process is state of the process, not of an engine: gVisor's library reads globals.
var process processState

type processState struct {
	mu      sync.Mutex
	users   int
	runner  string // path of the program
	stdio   []*os.File
	runners []*os.File // descriptors of openHigh
}

func (p *processState) prepare(runner, nullPath string) error {
	runners, err := openHigh(runner)
	if err != nil {
		return err
	}
	null, err := openNull(nullPath)
	if err != nil {
		closeFiles(runners)
		return err
	}
	p.runner, p.runners = runner, runners
	// Children change to other users before they start the program. Such a user may not be
	// able to reach its path (/root/go/bin); an open file needs no path.
	specutils.ExePath = fmt.Sprintf("/proc/self/fd/%d", runners[len(runners)-1].Fd())
	log.SetTarget(log.GoogleEmitter{Writer: &log.Writer{Next: io.Discard}})
	log.SetLevel(log.Warning)
	// gVisor gives a sandbox's first process the globals os.Stdin, os.Stdout and os.Stderr.
	p.stdio = []*os.File{os.Stdin, os.Stdout, os.Stderr}
	os.Stdin, os.Stdout, os.Stderr = null, null, null
	return nil
}

func (p *processState) reset() {
	null := os.Stdin
	os.Stdin, os.Stdout, os.Stderr = p.stdio[0], p.stdio[1], p.stdio[2]
	null.Close()
	closeFiles(p.runners)
	p.runners = nil
}

// openHigh opens a program under a descriptor number that os/exec does not use for a child's files:
// os/exec takes the numbers after the highest file it passes on. openHigh holds the numbers before
// the program's, so that no passed file has one of them: either all are lower, or all numbers that
// os/exec takes are higher. A large descriptor table also saves children from growing it at their
// start.
func openHigh(path string) ([]*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const high, room = 512, 128 // more than a child gets
	var files []*os.File
	for from := high; len(files) <= room; {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, from)
		if err != nil {
			closeFiles(files)
			if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EMFILE) {
				return nil, err
			}
			var may unix.Rlimit
			_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &may)
			return nil, sandboxer.E(sandboxer.Unavailable, err, "this process cannot be prepared for gVisor: its limit of open files is %d, and it needs more than %d", may.Cur, high+room).
				WithHint("raise the limit where it is started: ulimit -n %d, or LimitNOFILE=%d in its unit", 2*high, 2*high)
		}
		if fd != from { // another part of this process has the numbers before, and may close them
			closeFiles(files)
			files = nil
		}
		files, from = append(files, os.NewFile(uintptr(fd), path)), fd+1
	}
	return files, nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// openNull opens a null device. gVisor changes the owner of a sandbox's streams, so this is
// not the machine's own /dev/null unless no other can be made.
func openNull(path string) (*os.File, error) {
	err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))
	if err == nil || errors.Is(err, unix.EEXIST) {
		if f, err := os.OpenFile(path, os.O_RDWR, 0); err == nil {
			return f, nil
		}
	}
	return os.OpenFile(os.DevNull, os.O_RDWR, 0)
}

// helper finds a helper program: at the configured path, next to the running program,
// or that program itself, which has both roles.
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

// A record is what the extension stores about a sandbox in addition to gVisor's own
// state. It is written before anything else exists.
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
	Ready      bool                    `json:"ready"` // everything Provision owes is done

	// AgentMount says that the agent's programs are a mount of their own. Without it they are
	// files of the sandbox, as in earlier builds; gVisor restores what was saved that way only
	// with the same mounts.
	AgentMount bool `json:"agent_mount,omitempty"`

	// GVisor is the version that runs it. Builds that did not record it all had firstGVisor.
	GVisor string `json:"gvisor,omitempty"`

	// IDBase is the first of its host user and group IDs; 0 if those start at idShift, which such
	// sandboxes share.
	IDBase uint32 `json:"id_base,omitempty"`
}

const recordFile = "record.json"

// record reads the record of the sandbox called name. Kinds: Failed if it is damaged, Internal.
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
			e.warn("a newer version wrote fields of a sandbox's record that this version ignores, and drops when it writes the record", fmt.Errorf("sandbox %s: %q", name, newer))
		}
	}
	return r, nil
}

// errDamaged is in the chain of errors about a sandbox whose record cannot be read.
var errDamaged = errors.New("damaged")

func damaged(cause error, what string) error {
	if errors.Is(cause, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Internal, cause, "%s is missing", what)
	}
	if isShort(cause) {
		return sandboxer.E(sandboxer.Unavailable, cause, "%s cannot be read now", what)
	}
	return sandboxer.E(sandboxer.Failed, errors.Join(errDamaged, cause), "%s is damaged and cannot be read", what).
		WithHint("it can still be destroyed, and expires as usual")
}

// isShort reports whether a read failed because this process or machine lacks a resource at
// the moment.
func isShort(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// writeRecord replaces the record atomically, without sync: the sandbox does not outlive a crash
// of the machine, and a create does not wait for the disk.
func (e *extension) writeRecord(name string, r record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return wholefile.Replace(e.dir("box", name, recordFile), data)
}

// boxName is the name of one generation in gVisor's state, in directories and in
// control groups. The directory above identifies the installation.
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

// names lists every sandbox that has any remains: a directory, gVisor's state, a control
// group or a process.
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

// recorded lists the sandboxes that have a directory: only these can have a record.
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

// processes finds the gVisor processes of the sandbox called name, including those that no state
// file mentions any more.
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

// keyLock is a lock for one sandbox; its last user removes it.
type keyLock struct {
	slot chan struct{}
	refs int
}

// lock keeps other calls, and other processes of this installation, from changing the
// sandbox called name. Kinds: that of ctx's end.
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
		return nil, sandboxer.E(sandboxer.KindOf(ctx.Err()), context.Cause(ctx), "another operation on sandbox %s is in progress", name)
	}
	release, err := lockByte(ctx, e.dir("locks"), name)
	if err != nil {
		<-l.slot
		leave()
		if ctx.Err() != nil {
			return nil, sandboxer.E(sandboxer.KindOf(ctx.Err()), context.Cause(ctx), "another process is working on sandbox %s", name)
		}
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the lock of sandbox %s cannot be taken", name)
	}
	return func() {
		release()
		<-l.slot
		leave()
	}, nil
}

// lockByte locks the byte for name in the file at path. The file stays empty; a file for each
// name would be made and removed three times in a short life, and file systems are slow at that.
// Package filelock has no such locks: no other package needs them, and only Linux gives them to
// an open file rather than to a process.
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
		at.Type = unix.F_UNLCK // a child that has not started its program yet has the file open, too
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

// guestCapabilities are those of root inside a sandbox.
var guestCapabilities = func() []string {
	all := inside.Capabilities()
	for i := range all {
		all[i] = "CAP_" + all[i]
	}
	return all
}()

// ownCapabilities are those of the agent, and of what connects to it: both must get a thread
// even if the sandbox's processes are at their limit. The agent passes none of it on.
var ownCapabilities = append(slices.Clone(guestCapabilities), "CAP_SYS_RESOURCE")

// firstProcess is the first process of a sandbox: see package pause. The agent needs no
// token, because it accepts only connections that are handed to it as open files. Its fuse
// is the sandbox's at the start.
func firstProcess(fuse time.Time) []string {
	return []string{pausePath, strconv.FormatInt(fuseSeconds(fuse), 10), agentPath, "init",
		"--above-limits", "--listen", "donate:" + agentSocket(true), "--fuse", handedOn}
}

// handedOn stands for the fuse that a sandbox's first process passes to the agent. In
// sandboxes of older builds the agent starts with the fuse of their create.
const handedOn = "@"

// fuseSeconds is a fuse in the form of the first process: 0 means none.
func fuseSeconds(fuse time.Time) int64 {
	if fuse.IsZero() {
		return 0
	}
	return max(1, fuse.Unix())
}

// bundle writes the OCI bundle that gVisor's children read again, and returns it.
func (e *extension) bundle(name string, spec sandboxer.Spec, skel *skeleton, img *image, agentMount bool, mounts []*mountSource, from *saved) (string, error) {
	env := []string{"PATH=" + e.path(img), "HOME=/root", "LANG=C.UTF-8", "SANDBOXER=true", "SANDBOXER_ID=" + spec.ID}
	if img != nil {
		env = mergeEnv(env, img.config.Env)
	}
	given := spec.Env
	if spec.Warm {
		given = nil // the claim brings it
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
			{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{"mode=1777", "size=" + strconv.FormatInt(e.shmSize(spec.Limits), 10)}},
			{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"ro"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace},
				{Type: specs.UserNamespace},
			},
			Resources: shownLimits(spec.Limits),
		},
		Annotations: map[string]string{},
	}
	if e.asRoot {
		// gVisor restores a sandbox only with this mapping; the real one is given to its
		// processes, see create.
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
		if has, err := img.hasEtc(); err != nil {
			return "", err
		} else if !has {
			s.Annotations[linkedEtc] = "true"
		}
		s.Annotations["dev.gvisor.spec.rootfs.overlay"] = "dir=" + e.layers()
		if n := spec.Limits.DiskBytes; n > 0 {
			s.Annotations["dev.gvisor.spec.rootfs.options"] = "size=" + strconv.FormatInt(n, 10)
		}
	}
	// Without a gofer, no process opens the file of the writable layer; without any directory
	// of this machine, there is no gofer.
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

// linkedEtc is the annotation of a sandbox whose /etc is a link: a file for it, in its writable
// layer, would hide the link's target. Package runner reads it.
const linkedEtc = "sandboxer.linked-etc"

// idMapping maps the IDs from 0 on to the host's from base on.
func idMapping(base uint32) []specs.LinuxIDMapping {
	return []specs.LinuxIDMapping{{ContainerID: 0, HostID: base, Size: idCount}}
}

// path is where commands are looked up. Without an image these are the machine's programs,
// so it is the broker's own search path as far as sandboxes see it: it may contain a tool
// chain in /usr/local.
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

// shownLimits are the limits that the sandbox's kernel shows; cgroups enforces them.
func shownLimits(l sandboxer.Limits) *specs.LinuxResources {
	r := &specs.LinuxResources{}
	if n := l.MemoryBytes; n > 0 {
		r.Memory = &specs.LinuxMemory{Limit: &n}
	}
	if l.MilliCPU > 0 {
		quota, period := cpuQuota(l)
		r.CPU = &specs.LinuxCPU{Quota: &quota, Period: &period}
	}
	return r
}

// shmSize is the size of /dev/shm: its content counts as memory.
func (e *extension) shmSize(l sandboxer.Limits) int64 {
	switch {
	case e.cfg.ShmSize > 0:
		return e.cfg.ShmSize
	case l.MemoryBytes > 0:
		return l.MemoryBytes / 2
	}
	return 64 << 20
}

func rlimits(l sandboxer.Limits) []specs.POSIXRlimit {
	out := []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 65_536, Hard: 1 << 20}}
	if l.PIDs > 0 {
		out = append(out, specs.POSIXRlimit{Type: "RLIMIT_NPROC", Soft: uint64(l.PIDs), Hard: uint64(l.PIDs)})
	}
	return out
}

// mergeEnv returns base with add's variables set; add takes precedence.
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

// containerSwitches give a container the rights that sandboxes in it need.
const containerSwitches = "docker run --cap-add SYS_ADMIN --security-opt seccomp=unconfined -v /sys/fs/cgroup:/sys/fs/cgroup"

// checkRights refuses a process without the rights to make sandboxes.
func checkRights(asRoot bool) error {
	if !asRoot {
		return checkUserNamespaces()
	}
	if caps, err := strconv.ParseUint(ownStatus("CapEff"), 16, 64); err == nil && caps>>unix.CAP_SYS_ADMIN&1 == 0 {
		return sandboxer.E(sandboxer.Unavailable, nil, "this process runs as root but may not mount (the capability SYS_ADMIN is missing), as in a container").
			WithHint("run sandboxer outside of the container, or give the container more rights: %s", containerSwitches)
	}
	return nil
}

// filtered adds to err that a seccomp filter, of a container for example, may be its cause.
func filtered(err *sandboxer.Error) *sandboxer.Error {
	if ownStatus("Seccomp") != "2" {
		return err
	}
	err.Msg += "; the server runs under a filter of system calls (seccomp), as in a container, and gVisor needs calls that such filters refuse"
	return err.WithHint("run sandboxer outside of the container, or give the container more rights: %s", containerSwitches)
}

// ownStatus is a field of this process's status, "" if the kernel has no such field.
func ownStatus(field string) string {
	data, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(data)) {
		if name, value, _ := strings.Cut(line, ":"); name == field {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// checkUserNamespaces reports, before anything is made, why an ordinary user cannot run
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

package sandboxer

import (
	"context"
	"encoding/json"
	"io"
	"io/fs"
	"iter"
	"net"
	"net/http"
	"os"
	"time"
)

// Capability names one optional interface, in profiles (`requires:`), in the API
// and in the registry.
type Capability string

// The capabilities, each with the interface that provides it.
const (
	CanExec       Capability = "exec"       // Execer
	CanFiles      Capability = "files"      // Filer
	CanArchive    Capability = "archive"    // Archiver
	CanDial       Capability = "dial"       // Dialer
	CanExpose     Capability = "expose"     // Exposer
	CanProbe      Capability = "probe"      // Prober
	CanDiscover   Capability = "discover"   // Discoverer
	CanList       Capability = "list"       // Lister
	CanSnapshot   Capability = "snapshot"   // Snapshotter
	CanQuote      Capability = "quote"      // Quoter
	CanMeter      Capability = "meter"      // Meter
	CanPause      Capability = "pause"      // Pauser
	CanRenew      Capability = "renew"      // Renewer
	CanCapacity   Capability = "capacity"   // CapacityReporter
	CanStats      Capability = "stats"      // StatsReader
	CanNetwork    Capability = "network"    // Networker
	CanPool       Capability = "pool"       // Pooler
	CanCheckpoint Capability = "checkpoint" // Checkpointer
	CanAgent      Capability = "agent"      // AgentDialer
	CanProcesses  Capability = "processes"  // ProcessManager
	CanWatch      Capability = "watch"      // Watcher
	CanNotify     Capability = "notify"     // Notifier
)

// Capabilities lists every Capability.
func Capabilities() []Capability {
	return []Capability{CanExec, CanFiles, CanArchive, CanDial, CanExpose, CanProbe, CanDiscover, CanList,
		CanSnapshot, CanQuote, CanMeter, CanPause, CanRenew, CanCapacity, CanStats, CanNetwork, CanPool, CanCheckpoint,
		CanAgent, CanProcesses, CanWatch, CanNotify}
}

// What an extension can be besides, which profiles cannot require and nobody asks for by its
// name: only Narrower and Description name it.
const (
	CanCheck    Capability = "check"    // Checker
	CanPlace    Capability = "place"    // Placer
	CanAdmit    Capability = "admit"    // Admitter
	CanLimits   Capability = "limits"   // Limiter
	CanNotices  Capability = "notices"  // Noticer
	CanCaches   Capability = "caches"   // Cacher
	CanPorts    Capability = "ports"    // PortLister
	CanForget   Capability = "forget"   // Forgetter
	CanServices Capability = "services" // Serviced
)

// Besides lists what an extension can be besides its Capabilities.
func Besides() []Capability {
	return []Capability{CanCheck, CanPlace, CanAdmit, CanLimits, CanNotices, CanCaches, CanPorts, CanForget, CanServices}
}

// Execer runs commands inside a ready sandbox.
type Execer interface {
	// Exec runs cmd to its end. A non-zero exit is a result, not an error: the error
	// says only that cmd could not be started or observed to the end. A command that
	// does not exist is Exit{Code: 127}, one that may not be executed Exit{Code: 126},
	// each with the explanation on Stderr; StartErrorOf tells them. Cancelling ctx kills cmd and what it
	// started, inside the sandbox, before Exec returns. Kinds: NotFound when the
	// sandbox is gone, Invalid for an unusable Dir or User.
	Exec(ctx context.Context, h Handle, cmd Cmd) (Exit, error)
}

// Cmd is a command with its streams, in the manner of os/exec.
type Cmd struct {
	Args           []string          // Args[0] is looked up in PATH inside the sandbox
	Env            map[string]string // added to the sandbox's environment
	Dir            string            // empty means the workspace
	User           string            // name or uid[:gid]; empty means the sandbox's default
	Service        string            // which part of a sandbox of several it runs in; empty means the default one. See Serviced
	TTY            *WinSize          // non-nil asks for a terminal; Stderr is then unused
	Stdin          io.Reader         // nil means no input (EOF at once)
	Stdout, Stderr io.Writer         // nil discards
	Resize         <-chan WinSize    // terminal size changes; nil if none
	Signals        <-chan os.Signal  // delivered to the command; nil if none
}

// WinSize is the size of a terminal in character cells.
type WinSize struct {
	Cols uint16 `json:"cols"`
	Rows uint16 `json:"rows"`
}

// Exit is how a command ended. Killed by a signal n, Code is 128+n and Signal its
// name without "SIG" ("KILL").
type Exit struct {
	Code   int    `json:"code"`
	Signal string `json:"signal,omitempty"`
	// OOMKilled says that the memory limit killed the command, something it ran (then
	// Code is 137 all the same), or the sandbox with it.
	OOMKilled bool `json:"oom_killed,omitempty"`
}

// Serviced is what an Execer is besides whose sandboxes have several parts by name, such
// as the services of a compose project. Of others a command with a Service is refused with
// Unsupported before they see it.
type Serviced interface {
	Execer
	// Services lists the names, the default one first. A Cmd with any other name is
	// Invalid.
	Services(ctx context.Context, h Handle) ([]string, error)
}

// Filer works on files inside a ready sandbox. Names are absolute and clean. Kinds:
// NotFound for a missing file or sandbox, Invalid for a directory where a file is
// expected (and the reverse), Exhausted for a full disk. Names are bytes, as they are
// inside: they need not be UTF-8.
type Filer interface {
	ReadFile(ctx context.Context, h Handle, name string) (io.ReadCloser, error)
	// WriteFile creates or replaces the file with r's content, making parent
	// directories. If r or the sandbox fails midway, the former content may be lost
	// but an error is certain. It ends with ctx also while r is silent; a read of r
	// that is on its way then is left behind.
	WriteFile(ctx context.Context, h Handle, name string, mode fs.FileMode, r io.Reader) error
	StatFile(ctx context.Context, h Handle, name string) (FileInfo, error)
	// ListFiles yields what is in dir, without its subdirectories' content, in the byte
	// order of names: those after the name after, or all if that is empty. A directory
	// may have millions of entries: only a bounded number is held at a time. An error is
	// the last value.
	ListFiles(ctx context.Context, h Handle, dir, after string) iter.Seq2[FileInfo, error]
	MakeDir(ctx context.Context, h Handle, dir string) error // with parents; an existing directory is success
	MoveFile(ctx context.Context, h Handle, from, to string) error
	RemoveFile(ctx context.Context, h Handle, name string) error // recursive; absence is success
}

// FileInfo describes one file. Symbolic links are described, not followed.
type FileInfo struct {
	Path    string      `json:"path"` // absolute
	Size    int64       `json:"size"`
	Mode    fs.FileMode `json:"mode"` // type and permission bits
	ModTime time.Time   `json:"mod_time"`
	Owner   string      `json:"owner,omitempty"`
	Group   string      `json:"group,omitempty"`
	Target  string      `json:"target,omitempty"` // of a symbolic link
}

// Archiver moves a directory of a ready sandbox out and in as a stream of tar, for
// snapshots that any extension can restore. An extension with exec alone gets it by
// way of tar inside the sandbox, and so does one whose method says Unsupported of a sandbox
// before it has read or written anything. dir is absolute and clean; empty means the
// workspace, as Cmd.Dir does.
type Archiver interface {
	// Archive writes what is below dir to w: names relative to dir and slash-separated,
	// with types, permission bits, targets of links and times of change to the second;
	// sockets, pipes and devices may be left out. What changes meanwhile is in it as it
	// was at some moment of the reading. An error is certain if anything else is
	// missing. Kinds: NotFound when dir or the sandbox does not exist, Invalid when it
	// is not a directory.
	Archive(ctx context.Context, h Handle, dir string, w io.Writer) error
	// Unarchive makes dir hold what the tar r holds, and nothing else: it makes dir and
	// its parents if need be and removes what was in it before, but for what is mounted
	// there. Files belong to the sandbox's default user, with the permission bits that
	// r says. A name that leads out of dir is refused or passed over. If r or the
	// sandbox fails midway, dir is left half made and an error is certain. It ends
	// with ctx also while r is silent, as WriteFile does. Kinds:
	// NotFound when the sandbox is gone, Invalid when r fails or is no tar, Exhausted
	// for a full disk.
	Unarchive(ctx context.Context, h Handle, dir string, r io.Reader) error
}

// Checkpointer is for extensions whose portable snapshots take more than an Archive of
// the workspace: data beside it, which has to be in place before anything of the new
// sandbox runs, or a sandbox that stands still meanwhile. The broker then uses it
// instead of Archive and Unarchive.
type Checkpointer interface {
	// Checkpoint writes what of a ready sandbox is to be restored anywhere. It calls
	// begin once, with what is going to be written, and writes a tar to what begin
	// returns: the workspace as Archive does, and below VolumesDir one directory for each
	// of Contents.Volumes, named after it, with the numeric owners of its files. Which
	// volumes there are, and whether the sandbox stands still, is said in the order
	// (Spec.Inputs). It goes on afterwards whatever happens to ctx, to the writer or to
	// the broker; one that is paused (Pauser) is saved as well, and stays so. An error is certain if anything is missing, or if the sandbox did not
	// stand still although Contents says so. Kinds: NotFound when the sandbox is gone,
	// Conflict when the workspace has something at VolumesDir and there are volumes.
	Checkpoint(ctx context.Context, h Handle, begin func(Contents) io.Writer) error
	// ProvisionFrom is Provision, with what the tar r holds in place before anything of
	// the sandbox runs: r was written by Checkpoint, and then holds what c says, or by an
	// Archive of a workspace, and c is zero. If the sandbox is there already r need not
	// be read. Kinds: as Provision; Invalid when r fails or is no tar; Unsupported when
	// the sandbox would have none of the volumes that c names, before anything exists.
	ProvisionFrom(ctx context.Context, spec Spec, c Contents, r io.Reader) (Handle, error)
}

// Contents says what a checkpoint holds besides the files of the workspace, and what
// they are worth.
type Contents struct {
	Volumes  []string `json:"volumes,omitempty"`  // in the order of names
	Quiesced bool     `json:"quiesced,omitempty"` // the sandbox stood still; otherwise crash-consistent
}

// VolumesDir is where the tar of a checkpoint has volumes, relative to the workspace.
const VolumesDir = ".sandboxer/volumes"

// Dialer opens byte streams to TCP ports inside a ready sandbox, also to those that
// listen on its loopback only. Kinds: Unavailable when nothing listens there.
type Dialer interface {
	Dial(ctx context.Context, h Handle, port int) (net.Conn, error)
}

// AgentDialer opens connections to the agent inside a ready sandbox (docs/agent.md).
type AgentDialer interface {
	// DialAgent opens a connection on which the agent's wire is spoken: HTTP/1.1, that of
	// E2B's data plane with the additions of docs/agent.md. Whoever has it may do all that
	// the agent can: requests on it need no token, and may name any user. It goes on when
	// ctx ends, and ends with the sandbox. What comes out of it is the guest's word.
	// Kinds: NotFound when the sandbox is gone, Conflict when it is frozen, Unavailable
	// when the agent cannot be reached, Unsupported for a sandbox in which it cannot run.
	DialAgent(ctx context.Context, h Handle) (net.Conn, error)
}

// ProcessManager starts processes that nobody has to wait for, and finds them again, also
// after the broker was started anew. Kinds of all methods: NotFound when there is no such
// process or sandbox, Conflict when the sandbox is frozen.
type ProcessManager interface {
	// StartProcess starts a process and returns its PID inside. It goes on when ctx ends
	// and when the broker does. Kinds: NotFound for a command that does not exist, Denied
	// for one that may not be executed, Invalid for an unusable Dir or User.
	StartProcess(ctx context.Context, h Handle, p ProcessSpec) (pid int, err error)
	// AttachProcess follows a process to its end, also one that ended a while ago, and
	// returns how it ended. When ctx is done it returns and the process goes on. Several
	// may follow one process; a slow one slows the process down.
	AttachProcess(ctx context.Context, h Handle, pid int, s ProcessStreams) (Exit, error)
	// ListProcesses returns the processes that StartProcess started and that have not
	// ended, oldest first; not what those started.
	ListProcesses(ctx context.Context, h Handle) ([]Process, error)
	// SignalProcess sends a signal, by its Linux number, to a process and what it
	// started; 9 also ends what left its session. Kinds: Invalid for a number that is none.
	SignalProcess(ctx context.Context, h Handle, pid, signal int) error
}

// ProcessSpec says what StartProcess starts.
type ProcessSpec struct {
	Args []string          // Args[0] is looked up in PATH inside the sandbox
	Env  map[string]string // added to the sandbox's environment
	Dir  string            // absolute; empty means the workspace
	User string            // name or uid[:gid]; empty means the sandbox's default
	TTY  *WinSize          // non-nil gives it a terminal of that size
	// Input gives a process without a terminal an input that those attached write to;
	// without it, it reads the end of file at once.
	Input bool
	Tag   string // any name, at most MaxProcessTag bytes; of several with one tag the newest is meant
}

// MaxProcessTag bounds ProcessSpec.Tag.
const MaxProcessTag = 256

// Process is one that StartProcess started.
type Process struct {
	PID  int               `json:"pid"` // inside the sandbox
	Tag  string            `json:"tag,omitempty"`
	Args []string          `json:"args"`
	Dir  string            `json:"dir,omitempty"` // as asked for
	Env  map[string]string `json:"-"`             // as asked for; may hold secrets
}

// ProcessStreams connect a caller to a process; nil fields are unused.
type ProcessStreams struct {
	// Replay begins with the output that is still kept (1 MiB for each process, unless
	// the adapter says otherwise), instead of with what comes next.
	Replay bool
	// Stdin is copied to the process's input, or typed at its terminal. Its end closes the
	// input; at a terminal it types the end of file.
	Stdin          io.Reader
	Stdout, Stderr io.Writer // a terminal writes to Stdout only
	Resize         <-chan WinSize
	Signals        <-chan os.Signal
}

// Watcher reports changes of files inside a ready sandbox.
type Watcher interface {
	// WatchFiles reports every change in dir from its return on, with recursive also in
	// the directories below, until ctx is done: the error is then ctx's. Any other error is
	// the last value: Exhausted says that changes came faster than they were taken and some
	// are lost; list the directory and watch it anew. The sequence is for one use. Kinds:
	// NotFound when there is no dir or sandbox, Invalid when dir is no directory.
	WatchFiles(ctx context.Context, h Handle, dir string, recursive bool) (iter.Seq2[FileChange, error], error)
}

// FileChange is one change of a file.
type FileChange struct {
	Path string    `json:"path"` // absolute
	Op   FileOp    `json:"op"`
	File *FileInfo `json:"file,omitempty"` // after a create, write or chmod, if it was still there
}

// FileOp is what happened to a file.
type FileOp string

// What can happen to a file. A file that is moved within what is watched is renamed away
// from its old path and created at its new one.
const (
	FileCreate FileOp = "create"
	FileWrite  FileOp = "write"
	FileRemove FileOp = "remove"
	FileRename FileOp = "rename"
	FileChmod  FileOp = "chmod"
)

// FileOps lists every FileOp.
func FileOps() []FileOp { return []FileOp{FileCreate, FileWrite, FileRemove, FileRename, FileChmod} }

// Notifier tells what becomes of sandboxes without anybody asking for it: that one died, was paused, or was
// removed. Whoever has it need not wait until the next look at all of them.
type Notifier interface {
	// Notify yields the ID of a sandbox of owner whenever something may have happened to it, from its return on,
	// until ctx is done: the error is then ctx's. What happens several times before it is taken may be told
	// once. It says no more than that a look is worth it (Prober, which must know by then), and what was asked
	// for may be among it. Any other error is the last value: what happens after it is not told, and
	// somebody has to ask anew. The sequence is for one use.
	Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error)
}

// Exposer names a backend-published URL for a port, for backends without raw
// streams. The broker's proxy adds Header and never shows it to clients.
type Exposer interface {
	Expose(ctx context.Context, h Handle, port int) (Endpoint, error)
}

// Endpoint is a published port.
type Endpoint struct {
	URL    string
	Header http.Header // credentials for the backend's edge
}

// Liveness is the answer of a probe.
type Liveness string

// The answers. An error from a probe means Unknown.
const (
	Alive   Liveness = "alive"
	Gone    Liveness = "gone"    // proven: the backend answered and does not have it
	Unknown Liveness = "unknown" // the backend could not tell; never a reason to give up
	// Unresponsive is there, proven, but does not answer and cannot be used now. It may come
	// back, and is never a reason to give up either.
	Unresponsive Liveness = "unresponsive"
	// OOMKilled is gone, and more: the sandbox as a whole was killed because it used more
	// memory than its limit. What remains of it may still have to be torn down; after
	// that it is Gone.
	OOMKilled Liveness = "oom_killed"
)

// Prober answers cheaply whether one sandbox still exists. A probe must not change
// what it probes (it must not extend a lifetime). A handle that names no host is answered
// with Gone only if no host has the sandbox; one that cannot be asked makes it Unknown,
// unless another has it.
type Prober interface {
	IsAlive(ctx context.Context, h Handle) (Liveness, error)
}

// Discoverer finds a sandbox made by an earlier process by its deterministic ID, the
// newest generation if there are several. It answers NotFound when there is none, also on
// any doubt about whose it is.
type Discoverer interface {
	Discover(ctx context.Context, id string) (Found, error)
}

// Found is what a backend can tell of a sandbox by itself. The broker asks for it where
// its database does not know the sandbox.
type Found struct {
	Handle Handle
	Stamp  []byte    // the Spec.Stamp that it was last made, restored or claimed with; nil if the backend does not keep it
	Fuse   time.Time // as it is now; zero: there is none, or it is not known
}

// Lister enumerates every object that carries owner's stamp, in whatever condition.
// Only with it can the sweep find orphans. Where a part cannot be asked, one of several
// machines say, the rest comes first and then the error: what is listed is there, and
// nothing is known of what is not.
type Lister interface {
	ListRunning(ctx context.Context, owner string) iter.Seq2[Handle, error]
}

// Snapshotter saves sandboxes and builds new ones from what was saved. The promises
// of Provision and Teardown hold for RestoreFromSnapshot and DropSnapshot.
type Snapshotter interface {
	// Snapshot saves the sandbox under id, which the broker chose, and leaves it
	// running; or paused, if it was (Pauser), in which case the restored one runs. It is idempotent in id: called again it returns the receipt of what was
	// saved first, also when the sandbox has gone on or is gone. If it fails it leaves
	// nothing behind, or something that DropSnapshot(Snapshot{SnapshotID: id}) finds.
	// The receipt is returned once everything is where it will survive the host's
	// restart. Kinds: NotFound when the sandbox is gone.
	Snapshot(ctx context.Context, h Handle, id string) (Snapshot, error)
	// RestoreFromSnapshot makes the new sandbox spec with what s holds: files, and,
	// where s.Memory says so, processes that go on where they were. It is Provision
	// otherwise; WaitReady follows. ID, generation, owner, environment of new commands,
	// host name, addresses and clock are the new sandbox's own, also when it has the ID
	// of the source in a later generation. Kinds: as Provision, and NotFound when the
	// snapshot was dropped, before anything exists.
	RestoreFromSnapshot(ctx context.Context, spec Spec, s Snapshot) (Handle, error)
	// DropSnapshot removes what Snapshot saved, or began to save, under s.SnapshotID,
	// the only field that must be set. It is idempotent, absence is success, and
	// sandboxes restored before are not touched.
	DropSnapshot(ctx context.Context, s Snapshot) error
	// ListSnapshots enumerates what Snapshot saved, or began to save, of owner's sandboxes
	// and DropSnapshot did not remove, in any order, each once. What is ours and not known
	// to the database is found by it.
	ListSnapshots(ctx context.Context, owner string) iter.Seq2[FoundSnapshot, error]
}

// FoundSnapshot is what a backend can tell of a snapshot by itself.
type FoundSnapshot struct {
	Snapshot   Snapshot // the receipt; of what was not saved to the end the ID alone
	Whole      bool     // it was saved to the end
	SandboxID  string   // of the sandbox that was saved; "" if that is not known, and so on
	Generation int
	Stamp      []byte // of that sandbox, as Found.Stamp
}

// Snapshot is an extension's receipt for a saved checkpoint; the promises of Handle
// hold for it.
type Snapshot struct {
	SnapshotID string            `json:"snapshot_id"`
	Bytes      int64             `json:"bytes,omitempty"`
	Memory     bool              `json:"memory,omitempty"`   // processes survive, not only files
	Quiesced   bool              `json:"quiesced,omitempty"` // taken while nothing was written; otherwise crash-consistent
	Meta       map[string]string `json:"meta,omitempty"`
}

// Quoter tells the price before anything is created. A nil quote means: no charge
// known; the profile's own price applies.
type Quoter interface {
	EstimateCost(ctx context.Context, spec Spec, duration time.Duration) (*MeterQuote, error)
}

// Meter tells what a sandbox has consumed since Provision, cumulatively, so that
// reading twice never charges twice.
type Meter interface {
	MeterActual(ctx context.Context, h Handle, duration time.Duration) (Usage, error)
}

// Pauser freezes and thaws a sandbox by the backend's own means, keeping its memory.
// Both are idempotent. A frozen sandbox exists: it is alive to a probe, listed, and
// torn down as any other. Until it is thawed Exec refuses with Conflict at once.
// Kinds: NotFound when the sandbox is gone.
type Pauser interface {
	Pause(ctx context.Context, h Handle) error
	Resume(ctx context.Context, h Handle) error
}

// Renewer moves the backend's own deadline (the fuse) of a sandbox, also of one that is frozen: a pause that is
// made again begins with that.
type Renewer interface {
	Renew(ctx context.Context, h Handle, until time.Time) error
}

// CapacityReporter says what the extension can take now. An error takes it out of routing.
type CapacityReporter interface {
	Capacity(ctx context.Context, host string) (HostCapacity, error)
}

// HostCapacity is room for further sandboxes.
type HostCapacity struct {
	Free  int               `json:"free"`            // further sandboxes; -1 if unknown
	Hosts []string          `json:"hosts,omitempty"` // placement hosts
	Attrs map[string]string `json:"attrs,omitempty"` // for people: version, platform, …
}

// StatsReader measures one sandbox.
type StatsReader interface {
	Stats(ctx context.Context, h Handle) (Stats, error)
}

// Stats are a sandbox's consumption at one moment. A zero limit means none; a
// negative figure means the extension cannot measure it.
type Stats struct {
	At          time.Time     `json:"at"`
	CPU         time.Duration `json:"cpu_ns"` // processor time since start
	MemoryBytes int64         `json:"memory_bytes"`
	MemoryLimit int64         `json:"memory_limit,omitempty"`
	DiskBytes   int64         `json:"disk_bytes"`
	DiskLimit   int64         `json:"disk_limit,omitempty"`
	PIDs        int64         `json:"pids"`
	RxBytes     int64         `json:"rx_bytes"`
	TxBytes     int64         `json:"tx_bytes"`
}

// Networker changes what a running sandbox may reach.
type Networker interface {
	// SetNetwork replaces the sandbox's policy, which is idempotent. When it returns nil
	// the policy is in force, also for connections that were open before: those it does
	// not let through are cut. It stays in force when the broker is started anew. After an
	// error the former policy is in force. Kinds: Invalid for a policy that makes no
	// sense, Unsupported for one that the extension cannot enforce, NotFound when the
	// sandbox is gone; each changes nothing.
	SetNetwork(ctx context.Context, h Handle, p NetworkPolicy) error
}

// Pooler keeps sandboxes ready for whoever asks next (profile.go, Pool). Provision of a
// Spec with Warm set makes one that is nobody's: of its profile, without the inputs, and
// without starting its main command. WaitReady, Teardown, probes and listings treat it
// as any other.
type Pooler interface {
	// Basis names what a sandbox provisioned for spec now would be made of, besides spec
	// itself: the digest of its image, say. Two that are made while it is the same are as
	// good as each other. It changes nothing, is asked in the background, and may take
	// long. Kinds: as Provision; Unsupported for a spec of which nothing can be kept
	// ready.
	Basis(ctx context.Context, spec Spec) (string, error)
	// Claim gives a warm sandbox to its owner. spec is that of the one it was provisioned
	// for with its own Env, Labels, Inputs, Consumer, Fuse and, within the same mode,
	// Network; Warm is not set. When Claim returns, the sandbox is what Provision would have
	// made of spec: new commands have exactly its environment, the inputs are there, and
	// the main command runs. The backend's deadline may be later than spec.Fuse, but not
	// later than it was or spec.Fuse says.
	//
	// It is idempotent: a claim that succeeded is not done again, whatever the sandbox has
	// done since. One that failed or was cut short in the middle need not succeed when it is
	// repeated; then it is Unavailable again, and the caller tears the sandbox down.
	// Kinds: NotFound when the sandbox is gone; Conflict when it is not a warm one, or was
	// claimed with another spec; otherwise as Provision.
	Claim(ctx context.Context, h Handle, spec Spec) (Handle, error)
}

// URLDialer is for extensions whose sandboxes' URLs (Reachability.URL) are somebody else's word, or lead where only
// the extension's settings say how: it looks at the address that is really connected to, and knows the authorities
// whose certificates count. The broker connects by itself to those of all others.
type URLDialer interface {
	// DialURL opens a connection to the host of the URL of a sandbox; for one of https, TLS is done. Kinds: NotFound
	// when the sandbox is gone, Denied for an address that is not to be reached, Unavailable when it is not.
	DialURL(ctx context.Context, h Handle) (net.Conn, error)
}

// Narrower disclaims capabilities that the Go type has but this configuration or
// machine lacks: those of Capabilities, and those of Besides.
type Narrower interface {
	Without() []Capability
}

// Describer tells what it really is where its adapter could not know that: an extension that
// is a process of its own says so itself. What it says takes the place of what the Adapter
// declares.
type Describer interface {
	// Describe returns the description, which does not change while the extension is open.
	Describe() Description
}

// A Description is what an extension says of itself.
type Description struct {
	Title        string         `json:"title,omitempty"` // one line
	Help         string         `json:"help,omitempty"`  // a paragraph
	Isolation    []Isolation    `json:"isolation_levels"`
	Pricing      []PricingModel `json:"pricing_models"`
	Capabilities []Capability   `json:"capabilities"` // of Capabilities and of Besides
	// Inputs are those that its sandboxes take (CheckInputName). One with the name AnyInput stands
	// for every other.
	Inputs []Input `json:"inputs"`
	// Config is the JSON Schema of its configuration; nil if it does not say.
	Config  json.RawMessage `json:"config_schema,omitempty"`
	Runtime string          `json:"runtime,omitempty"` // as Adapter.Runtime
}

// AnyInput is the name of an Input that stands for all that are not declared. Of its declaration only
// Help and Restricted mean anything.
const AnyInput = "*"

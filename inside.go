package sandboxer

import (
	"context"
	"io"
	"io/fs"
	"iter"
	"net"
	"os"
	"time"
)

// Execer runs commands inside a ready sandbox.
type Execer interface {
	// Exec runs cmd to its end. A non-zero exit is a result and not an error. An error means that cmd
	// could not be started, or that its end was not seen. A command that does not exist is Exit{Code:
	// 127}, and one that may not be executed is Exit{Code: 126}; Stderr gets the explanation
	// (StartErrorOf). When ctx ends, Exec kills cmd and its child processes in the sandbox before it
	// returns. Kinds: NotFound when the sandbox is gone, Invalid for an unusable Dir or User.
	Exec(ctx context.Context, h Handle, cmd Cmd) (Exit, error)
}

// Cmd is a command with its streams, in the manner of os/exec.
type Cmd struct {
	Args           []string          // Args[0] is looked up in PATH inside the sandbox
	Env            map[string]string // added to the sandbox's environment
	Dir            string            // empty means the workspace
	User           string            // name or uid[:gid]; empty means the sandbox's default
	Service        string            // part of a sandbox with several parts; empty means the default one (Serviced)
	TTY            *WinSize          // non-nil asks for a terminal; Stderr is then unused
	Stdin          io.Reader         // nil means no input: the command reads the end of file immediately
	Stdout, Stderr io.Writer         // nil discards; both may be written at once, so one writer for both needs a lock
	Resize         <-chan WinSize    // terminal size changes; nil if none
	Signals        <-chan os.Signal  // delivered to the command; nil if none
}

// WinSize is the size of a terminal in character cells.
type WinSize struct {
	Cols uint16 `json:"cols"`
	Rows uint16 `json:"rows"`
}

// Exit is how a command ended. If signal n killed it, Code is 128+n and Signal is the signal's name
// without "SIG" ("KILL").
type Exit struct {
	Code   int    `json:"code"`
	Signal string `json:"signal,omitempty"`
	// OOMKilled says that the memory limit killed the command, a process that it started, or the whole
	// sandbox. Code is 137 if it killed the command.
	OOMKilled bool `json:"oom_killed,omitempty"`
}

// Serviced is an Execer whose sandboxes have several named parts, such as the services of a compose
// project. For any other extension the broker refuses a command with a Service as Unsupported.
type Serviced interface {
	Execer
	// Services lists the names, the default one first. A Cmd with any other name is Invalid.
	Services(ctx context.Context, h Handle) ([]string, error)
}

// Filer works on files inside a ready sandbox. Names are absolute and clean. They are bytes, as inside,
// and need not be UTF-8. Kinds: NotFound for a missing file or sandbox, Invalid for a directory in the
// place of a file (and the reverse), Exhausted for a full disk.
type Filer interface {
	// ReadFile opens a file for reading. The caller closes it. A transfer that breaks off is an error
	// of Read and never an early end of file.
	ReadFile(ctx context.Context, h Handle, name string) (io.ReadCloser, error)
	// WriteFile creates or replaces a file with the content of r and makes its parent directories. It
	// follows a symbolic link. With mode 0 an existing file keeps its permission bits, and a new one
	// gets 0644. An existing file keeps its owner. If r fails midway, the former content stays, or no
	// file exists. If the sandbox fails, the same holds for an unmounted file with a single name in a
	// directory that accepts new files; other files may lose their former content, but the call returns
	// an error. It ends with ctx even while r blocks; a Read of r that is under way is then abandoned.
	WriteFile(ctx context.Context, h Handle, name string, mode fs.FileMode, r io.Reader) error
	// StatFile describes a file. It does not follow a symbolic link.
	StatFile(ctx context.Context, h Handle, name string) (FileInfo, error)
	// ListFiles yields the entries of dir, without those of its subdirectories, in the byte order of
	// names. It starts after the name after, or at the first name if that is empty. A directory may
	// have millions of entries, so an implementation holds a bounded number at a time. An error is the
	// last value.
	ListFiles(ctx context.Context, h Handle, dir, after string) iter.Seq2[FileInfo, error]
	MakeDir(ctx context.Context, h Handle, dir string) error // with parents; an existing directory is success
	// MoveFile renames a file or a directory.
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

// Archiver reads and writes a directory of a ready sandbox as a tar stream, for snapshots that any
// extension can restore. If an extension has only exec, the broker runs tar inside the sandbox. It does
// the same if a method returns Unsupported before it has read or written anything. dir is absolute and
// clean; empty means the workspace, as in Cmd.Dir.
type Archiver interface {
	// Archive writes the content of dir to w. Names are relative to dir and slash-separated. Types,
	// permission bits, targets of links and modification times to the second are kept. Sockets, pipes
	// and devices become pipes in the archive, for the broker to count, or are left out. A file that
	// changes during the call is archived in a state that it had during the call. If anything else is
	// missing, Archive returns an error. Kinds: NotFound when dir or the sandbox does not exist,
	// Invalid when dir is not a directory.
	Archive(ctx context.Context, h Handle, dir string, w io.Writer) error
	// Unarchive replaces the content of dir with that of the tar stream r. It makes dir and its parents
	// if they are missing. It removes the former content of dir, except mounts. Files belong to the
	// sandbox's default user and have the permission bits from r. A name that leads out of dir is
	// refused or skipped. If r or the sandbox fails midway, dir is incomplete and the call returns an
	// error. It ends with ctx even while r blocks, as WriteFile does. Kinds: NotFound when the sandbox
	// is gone, Invalid when r fails or is no tar, Exhausted for a full disk.
	Unarchive(ctx context.Context, h Handle, dir string, r io.Reader) error
}

// Checkpointer is for extensions whose portable snapshots need more than an Archive of the workspace:
// further data that must be in place before anything runs in the new sandbox, or a sandbox that is
// frozen during the copy. The broker then uses it instead of Archive and Unarchive.
type Checkpointer interface {
	// Checkpoint writes the portable state of a ready sandbox. It calls begin once, with the contents
	// to come, and writes a tar to the writer that begin returns. The tar holds the workspace, as
	// written by Archive, and below VolumesDir one directory for each of Contents.Volumes, named after
	// it, with the numeric owners of its files. Spec.Inputs selects the volumes and whether to freeze
	// the sandbox during the copy.
	//
	// A frozen sandbox runs again afterwards, whatever happens to ctx, to the writer or to the broker.
	// A paused one (Pauser) is saved too and stays paused. If anything is missing, or Contents.Quiesced
	// is set and the sandbox was not frozen, Checkpoint returns an error. Kinds: NotFound when the
	// sandbox is gone, Conflict when the workspace has an entry at VolumesDir and there are volumes.
	Checkpoint(ctx context.Context, h Handle, begin func(Contents) io.Writer) error
	// ProvisionFrom is Provision, with the content of the tar stream r in place before anything runs in
	// the sandbox. Checkpoint wrote r with the contents c, or an Archive of a workspace did and c is
	// zero. If the sandbox exists already, r need not be read. Kinds: those of Provision; Invalid when
	// r fails or is no tar; Unsupported, before anything exists, when the sandbox would have none of
	// the volumes in c.
	ProvisionFrom(ctx context.Context, spec Spec, c Contents, r io.Reader) (Handle, error)
}

// Contents describes a checkpoint: the data in it apart from the workspace, and how consistent it is.
type Contents struct {
	Volumes  []string `json:"volumes,omitempty"`  // sorted by name
	Quiesced bool     `json:"quiesced,omitempty"` // the sandbox was frozen during the copy; otherwise crash-consistent
}

// VolumesDir is the directory of volumes in the tar of a checkpoint, relative to the workspace.
const VolumesDir = ".sandboxer/volumes"

// Dialer opens byte streams to TCP ports inside a ready sandbox, including ports that listen on its
// loopback only. Kinds: Unavailable when no program listens there.
type Dialer interface {
	Dial(ctx context.Context, h Handle, port int) (net.Conn, error)
}

// AgentDialer opens connections to the agent inside a ready sandbox (docs/design/agent.md).
type AgentDialer interface {
	// DialAgent opens a connection that speaks the agent's wire protocol: HTTP/1.1, as on E2B's data
	// plane, with the additions in docs/reference/agent.md. Its holder has all rights of the agent:
	// requests need no token and may name any user. The connection outlives ctx and ends with the
	// sandbox. The guest controls the data on it: do not trust it. Kinds: NotFound when the sandbox is
	// gone, Conflict when it is frozen, Unavailable when the agent cannot be reached, Unsupported for a
	// sandbox in which the agent cannot run.
	DialAgent(ctx context.Context, h Handle) (net.Conn, error)
}

// ProcessManager starts background processes and finds them again, also after a restart of the broker.
// Kinds of all methods: NotFound when the process or the sandbox does not exist, Conflict when the
// sandbox is frozen.
type ProcessManager interface {
	// StartProcess starts a process and returns its PID inside the sandbox. The process outlives ctx
	// and the broker. Kinds: NotFound for a command that does not exist, Denied for one that may not be
	// executed, Invalid for an unusable Dir or User.
	StartProcess(ctx context.Context, h Handle, p ProcessSpec) (pid int, err error)
	// AttachProcess follows a process to its end and returns how it ended, also if it ended recently.
	// When ctx is done it returns and the process continues. Several callers may follow one process; a
	// slow one slows the process down.
	AttachProcess(ctx context.Context, h Handle, pid int, s ProcessStreams) (Exit, error)
	// ListProcesses returns the running processes that StartProcess started, oldest first. It leaves
	// out their child processes.
	ListProcesses(ctx context.Context, h Handle) ([]Process, error)
	// SignalProcess sends a signal, by its Linux number, to a process and its child processes; 9 also
	// kills those that left its session. Kinds: Invalid for a number that is no signal.
	SignalProcess(ctx context.Context, h Handle, pid, signal int) error
}

// ProcessSpec is the request of StartProcess.
type ProcessSpec struct {
	Args []string          // Args[0] is looked up in PATH inside the sandbox
	Env  map[string]string // added to the sandbox's environment
	Dir  string            // absolute; empty means the workspace
	User string            // name or uid[:gid]; empty means the sandbox's default
	TTY  *WinSize          // non-nil gives it a terminal of that size
	// Input gives a process without a terminal an input stream, to which attached callers write.
	// Without Input the process reads the end of file immediately.
	Input bool
	Tag   string // any name, at most MaxProcessTag bytes; if several processes share it, it means the newest
}

// MaxProcessTag bounds ProcessSpec.Tag, in bytes.
const MaxProcessTag = 256

// Process is one process that StartProcess started.
type Process struct {
	PID  int               `json:"pid"` // inside the sandbox
	Tag  string            `json:"tag,omitempty"`
	Args []string          `json:"args"`
	Dir  string            `json:"dir,omitempty"` // as asked for
	Env  map[string]string `json:"-"`             // as asked for; may hold secrets
}

// ProcessStreams connects a caller to a process. Nil fields are unused.
type ProcessStreams struct {
	// Replay begins with the kept output (1 MiB for each process, unless the adapter documents another
	// figure) instead of with new output.
	Replay bool
	// Stdin is copied to the process's input or typed at its terminal. Its end closes the input; at a
	// terminal it types the end of file.
	Stdin          io.Reader
	Stdout, Stderr io.Writer // a terminal writes to Stdout only
	Resize         <-chan WinSize
	Signals        <-chan os.Signal
}

// Watcher reports changes of files inside a ready sandbox.
type Watcher interface {
	// WatchFiles reports every change in dir that happens after it returns, and with recursive also in
	// the directories below, until ctx is done: the error is then ctx's. Any other error is the last
	// value. Exhausted means that changes came faster than the caller took them and some are lost: list
	// the directory and watch it again. The sequence is for one use. Kinds: NotFound when dir or the
	// sandbox does not exist, Invalid when dir is no directory.
	WatchFiles(ctx context.Context, h Handle, dir string, recursive bool) (iter.Seq2[FileChange, error], error)
}

// FileChange is one change of a file.
type FileChange struct {
	Path string    `json:"path"` // absolute
	Op   FileOp    `json:"op"`
	File *FileInfo `json:"file,omitempty"` // after a create, write or chmod, if the file still existed
}

// FileOp is what happened to a file.
type FileOp string

// The changes of a file. A file that moves inside the watched tree is renamed away from its old path
// and created at its new one.
const (
	FileCreate FileOp = "create"
	FileWrite  FileOp = "write"
	FileRemove FileOp = "remove"
	FileRename FileOp = "rename"
	FileChmod  FileOp = "chmod"
)

// FileOps lists every FileOp.
func FileOps() []FileOp { return []FileOp{FileCreate, FileWrite, FileRemove, FileRename, FileChmod} }

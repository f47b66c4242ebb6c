package api

import (
	"cmp"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Duration is a time.Duration written as a Go duration string.
type Duration = sandboxer.DurationText

// TTL is a time to live: a Duration, or idle.
type TTL = sandboxer.TTLText

// Credits is an amount of money, written as an exact decimal string of credits; one
// credit is one US dollar.
type Credits = sandboxer.CreditsText

// The requests are those of package sandboxer; in JSON they have durations and money as text.
type (
	CreateSandbox   = sandboxer.CreateRequest
	RestoreSnapshot = sandboxer.RestoreRequest
	ForkSandbox     = sandboxer.ForkRequest
	CreateSnapshot  = sandboxer.SnapshotRequest
	ExtendSandbox   = sandboxer.ExtendRequest
	PauseSandbox    = sandboxer.PauseRequest
	ResumeSandbox   = sandboxer.ResumeRequest
	NewKey          = sandboxer.KeyRequest
)

// List is one page of a list. NextCursor, if not empty, asks for the next page.
type List[T any] struct {
	SchemaVersion int    `json:"schema_version" example:"1"`
	Items         []T    `json:"items" nullable:"false"`
	NextCursor    string `json:"next_cursor,omitempty" doc:"Pass it as cursor to get the next page. Absent on the last one."`
}

// Sandbox is one generation of a sandbox.
type Sandbox struct {
	SchemaVersion int                `json:"schema_version" example:"1"`
	ID            string             `json:"id" example:"7k2mq0xa" doc:"Unique in its tenant"`
	ObjectID      string             `json:"object_id,omitempty" doc:"ID of its outside objects, if it differs: unique in the installation"`
	Generation    int                `json:"generation" example:"1" doc:"Counts the sandboxes that had this ID, from 1"`
	Name          string             `json:"name,omitempty" example:"build"`
	Tenant        string             `json:"tenant" example:"default"`
	Profile       string             `json:"profile" example:"profile.local"`
	Extension     string             `json:"extension" example:"ext.local"`
	Host          string             `json:"host,omitempty"`
	Consumer      sandboxer.Consumer `json:"consumer,omitzero"`
	Thread        sandboxer.Thread   `json:"thread,omitzero" doc:"Thread that it was made for; no other thread gets its ID"`

	State   sandboxer.State  `json:"state" enum:"creating,warm,running,pausing,paused,terminating,terminated" example:"running"`
	Reason  sandboxer.Reason `json:"reason,omitempty" doc:"Why it ends"`
	Message string           `json:"message,omitempty" doc:"The same for people"`
	Fault   sandboxer.Kind   `json:"fault,omitempty" doc:"The code of the problem with which its create failed"`
	Hint    string           `json:"hint,omitempty" doc:"Hint of that problem"`

	Inputs    map[string]string       `json:"inputs,omitempty"`
	Image     string                  `json:"image,omitempty"`
	Command   []string                `json:"command,omitempty"`
	Labels    map[string]string       `json:"labels,omitempty"`
	Limits    sandboxer.Limits        `json:"limits,omitzero"`
	Network   sandboxer.NetworkPolicy `json:"network,omitzero"`
	Mounts    []sandboxer.Mount       `json:"mounts,omitempty"`
	Ports     []int                   `json:"ports,omitempty"`
	Workspace string                  `json:"workspace,omitempty"`
	User      string                  `json:"user,omitempty"`
	Secrets   map[string]SecretUse    `json:"secrets,omitempty" doc:"Its secrets, by environment variable"`

	Idle   Duration               `json:"idle,omitempty" example:"10m0s" doc:"Time without use after which on_idle applies"`
	OnIdle sandboxer.ExpiryAction `json:"on_idle,omitempty" doc:"What happens then: destroy or pause. Absent: destroy"`
	OnTTL  sandboxer.ExpiryAction `json:"on_ttl,omitempty" doc:"What happens when it expires: destroy or pause. Absent: destroy"`

	Ref          string                   `json:"ref,omitempty" doc:"The backend's own name for it, for operators"`
	Reachability sandboxer.Reachability   `json:"reachability,omitzero"`
	Cleanup      *sandboxer.CleanupReport `json:"cleanup,omitempty"`
	Quote        *Quote                   `json:"quote,omitempty"`
	Cost         Credits                  `json:"cost" example:"0.00" doc:"Charged so far; final once terminated, unless billing is pending"`
	MaxCost      Credits                  `json:"max_cost,omitempty" doc:"The most that its request allows to be put on hold"`
	Usage        *Usage                   `json:"usage,omitempty" doc:"What its backend's meter read last"`
	Billing      sandboxer.Billing        `json:"billing,omitempty" doc:"pending: it has ended, and its backend does not know yet what it cost. Its hold stays open until then, an hour at most. estimated: it was settled by the time that it ran, and its backend may still say what it cost, for a day"`

	Route        []RouteChoice          `json:"route,omitempty" doc:"For a profile with several candidates: what became of each when the sandbox was made"`
	Debts        []Debt                 `json:"debts,omitempty" doc:"Objects of it that may exist on extensions that could not make it; they are removed before it ends"`
	RestoredFrom string                 `json:"restored_from,omitempty" doc:"The snapshot it began with"`
	RestoredAs   sandboxer.SnapshotKind `json:"restored_as,omitempty" doc:"In which form: native or portable"`
	Pause        *Pause                 `json:"pause,omitempty" doc:"Its pause; absent while it runs"`
	PausedFor    Duration               `json:"paused_for,omitempty" doc:"Former pauses together; not charged"`

	Version   int64     `json:"version" example:"3"`
	Retries   int       `json:"retries,omitempty" doc:"Attempts of the step that is being retried"`
	LastError string    `json:"last_error,omitempty" doc:"Of the step that is being retried"`
	RetryAt   time.Time `json:"retry_at,omitzero" doc:"When that step is tried again"`
	Damaged   string    `json:"damaged,omitempty" doc:"Why the record could not be read; the other fields have only the readable rest. Destroy the sandbox, or restore a backup"`

	Found bool `json:"found,omitempty" doc:"In the answer to a create: another request made it, or is making it"`

	CreatedAt     time.Time             `json:"created_at" doc:"The request was accepted"`
	ProvisionedAt time.Time             `json:"provisioned_at,omitzero" doc:"The backend had made it; waiting for readiness began"`
	ReadyAt       time.Time             `json:"ready_at,omitzero"`
	Unconfirmed   sandboxer.Unconfirmed `json:"unconfirmed,omitempty" doc:"claimed: it waited in a pool when the database went back, and may belong to a tenant since then; it is kept until an administrator destroys it"`
	Unresponsive  time.Time             `json:"unresponsive_since,omitzero" doc:"It exists, but has not answered since then; calls into it fail as unavailable. It may recover. It can be destroyed, and expires, as usual"`
	UsedAt        time.Time             `json:"used_at,omitzero"`
	ResumedAt     time.Time             `json:"resumed_at,omitzero"`
	ExpiresAt     time.Time             `json:"expires_at,omitzero" doc:"While it is paused: end of the pause. With the time to live idle: when it ends if it is not used until then"`
	EndingAt      time.Time             `json:"ending_at,omitzero"`
	EndedAt       time.Time             `json:"ended_at,omitzero"`
}

// NewSandbox converts a record to its public form.
func NewSandbox(sb *sandboxer.Sandbox) Sandbox {
	s := sb.Spec
	out := Sandbox{
		SchemaVersion: SchemaVersion,
		ID:            sb.Shown(), Generation: sb.Generation, Name: sb.Name, Tenant: sb.Tenant,
		Profile: sb.Profile, Extension: sb.Extension, Host: sb.Host, Consumer: sb.Consumer, Thread: sb.Thread,
		State: sb.State, Reason: sb.Reason, Message: sb.Message, Fault: sb.Fault, Hint: sb.Hint,
		Inputs: s.Inputs, Image: s.Image, Command: s.Command, Labels: s.Labels, Limits: s.Limits,
		Network: s.Network, Mounts: s.Mounts, Ports: s.Ports, Workspace: s.Workspace, User: s.User,
		Idle: Duration(s.Profile.Idle), OnIdle: s.Profile.OnIdle, OnTTL: s.Profile.OnTTL,
		Ref: sb.Handle.Ref, Reachability: sb.Reachability, Cleanup: sb.Cleanup, Cost: Credits(sb.Cost), MaxCost: Credits(sb.MaxCost),
		Version: sb.Version, Retries: sb.Retries, LastError: sb.LastError, RetryAt: sb.RetryAt, Damaged: sb.Damaged, Found: sb.Found,
		CreatedAt: sb.CreatedAt, ProvisionedAt: sb.ProvisionedAt, ReadyAt: sb.ReadyAt, UsedAt: sb.UsedAt, ExpiresAt: sb.EndsAt(),
		EndingAt: sb.EndingAt, EndedAt: sb.EndedAt, Unresponsive: sb.UnresponsiveSince, Unconfirmed: sb.Unconfirmed,
	}
	if sb.ID != out.ID {
		out.ObjectID = sb.ID
	}
	for variable, ref := range sb.Secrets {
		if out.Secrets == nil {
			out.Secrets = map[string]SecretUse{}
		}
		out.Secrets[variable] = SecretUse{Name: ref.Name, Version: ref.Version}
	}
	out.Route = NewRoute(sb.Route)
	for _, d := range sb.Debts {
		out.Debts = append(out.Debts, Debt{Extension: d.Extension, Generation: d.Handle.Generation, Reason: d.Reason, Since: d.Since, Retries: d.Retries, RetryAt: d.RetryAt, LastError: d.LastError})
	}
	out.RestoredFrom, out.RestoredAs = sb.RestoredFrom, sb.RestoredAs
	out.PausedFor, out.ResumedAt = Duration(sb.PausedFor), sb.ResumedAt
	if p := sb.Pause; !p.At.IsZero() {
		out.Pause = &Pause{Depth: p.Depth, Snapshot: p.Snapshot, At: p.At, Left: Duration(p.Left), Cause: p.Cause, Attempts: p.Attempts}
	}
	out.Billing = sb.Billing
	out.Usage = newUsage(sb.Usage)
	if q := sb.Quote; q.Amount != 0 || q.Setup != 0 || q.PerHour != 0 || q.Duration != 0 || q.Detail != "" {
		q := NewQuote(sb.Quote)
		out.Quote = &q
	}
	return out
}

// Addr names s among the sandboxes of all tenants, as administrators may have to: TENANT/ID.
func (s *Sandbox) Addr() string {
	if s.Tenant == "" { // it waits in a pool
		return s.ID
	}
	return s.Tenant + "/" + s.ID
}

// Usage is what the meter of a sandbox's backend read. Integers are decimal text.
type Usage struct {
	At        time.Time `json:"at"`
	Cost      Credits   `json:"cost" example:"0.08" doc:"What the backend says that it cost"`
	CPU       int64     `json:"cpu_ns,string" example:"93000000000" doc:"Processor time in nanoseconds"`
	MiBMillis int64     `json:"mib_ms,string" example:"1228800000" doc:"Memory in MiB times milliseconds"`
	RxBytes   int64     `json:"rx_bytes,string" example:"1048576"`
	TxBytes   int64     `json:"tx_bytes,string" example:"4096"`
	Final     bool      `json:"final" doc:"No later reading differs: the cost counts, as far as it was on hold"`
}

// Quote is the price of a sandbox before it exists.
type Quote struct {
	Amount   Credits  `json:"amount" example:"0.12" doc:"For the whole duration, everything included"`
	Setup    Credits  `json:"setup" example:"0.00" doc:"Part of amount that does not depend on time"`
	PerHour  Credits  `json:"per_hour" example:"0.24"`
	Duration Duration `json:"duration" example:"30m0s"`
	Detail   string   `json:"detail,omitempty" doc:"How it was calculated"`

	ByBackend bool                 `json:"by_backend,omitempty" doc:"The backend gave the price, and not the profile"`
	Rows      []sandboxer.PriceRow `json:"rows,omitempty" doc:"Rows of the price book by which it was calculated"`
}

// NewQuote converts a quote to its public form.
func NewQuote(q sandboxer.MeterQuote) Quote {
	return Quote{Amount: Credits(q.Amount), Setup: Credits(q.Setup), PerHour: Credits(q.PerHour),
		Duration: Duration(q.Duration), Detail: q.Detail, ByBackend: q.ByBackend, Rows: q.Rows}
}

// Plan is the expected result of a create request.
type Plan struct {
	SchemaVersion int                     `json:"schema_version" example:"1"`
	Profile       string                  `json:"profile" example:"profile.local"`
	Extension     string                  `json:"extension" example:"ext.local"`
	Route         []RouteChoice           `json:"route" nullable:"false" doc:"The candidates, in the order in which they were considered"`
	TTL           TTL                     `json:"ttl" example:"30m0s" doc:"Or idle: as long as it is used"`
	Quote         Quote                   `json:"quote"`
	Inputs        map[string]string       `json:"inputs,omitempty"`
	Host          string                  `json:"host,omitempty"`
	Image         string                  `json:"image,omitempty"`
	Command       []string                `json:"command,omitempty"`
	Env           []string                `json:"env,omitempty" doc:"Names of the environment variables"`
	Labels        map[string]string       `json:"labels,omitempty"`
	Limits        sandboxer.Limits        `json:"limits,omitzero"`
	Network       sandboxer.NetworkPolicy `json:"network,omitzero"`
	Mounts        []sandboxer.Mount       `json:"mounts,omitempty"`
	Ports         []int                   `json:"ports,omitempty"`
	Workspace     string                  `json:"workspace,omitempty"`
	User          string                  `json:"user,omitempty"`
	Changed       []string                `json:"changed,omitempty" doc:"Differences between the sandbox and the request"`
}

// Debt describes an object that may exist on an extension that could not make a sandbox.
type Debt struct {
	Extension  string           `json:"extension" example:"ext.local"`
	Generation int              `json:"generation" example:"1"`
	Reason     sandboxer.Reason `json:"reason" enum:"replaced" example:"replaced"`
	Since      time.Time        `json:"since"`
	Retries    int              `json:"retries,omitempty" doc:"Attempts to remove it"`
	RetryAt    time.Time        `json:"retry_at" doc:"When it is removed, or that is tried again"`
	LastError  string           `json:"last_error,omitempty" doc:"Why it could not be removed yet"`
}

// RouteChoice says what became of one candidate of a profile when a request was routed.
type RouteChoice struct {
	Extension string                 `json:"extension" example:"ext.local"`
	Verdict   sandboxer.RouteVerdict `json:"verdict" enum:"chosen,standby,refused" example:"chosen"`
	Reason    sandboxer.RouteReason  `json:"reason" example:"first" doc:"One of a closed list, which the page of profiles has"`
	Detail    string                 `json:"detail,omitempty" example:"it is the first candidate that can serve the request" doc:"The reason as a sentence, and what would change it"`
	Price     *Credits               `json:"price,omitempty" example:"0.06" doc:"For the whole time to live. Absent if it is not known"`
	Words     string                 `json:"words,omitempty" doc:"What the backend said, for administrators"`
}

// NewRoute converts choices to their public form.
func NewRoute(choices []sandboxer.RouteChoice) []RouteChoice {
	var out []RouteChoice
	for _, c := range choices {
		o := RouteChoice{Extension: c.Extension, Verdict: c.Verdict, Reason: c.Reason, Detail: c.Detail, Words: c.Words}
		if c.Price != nil {
			price := Credits(*c.Price)
			o.Price = &price
		}
		out = append(out, o)
	}
	return out
}

// SandboxPort describes one TCP port of a sandbox.
type SandboxPort struct {
	Port      int    `json:"port" example:"8080" doc:"Inside the sandbox"`
	Addr      string `json:"addr,omitempty" doc:"host:port that reaches it from the server, if the backend has one"`
	URL       string `json:"url,omitempty" doc:"URL that the backend publishes, if any"`
	Declared  bool   `json:"declared,omitempty" doc:"By the profile"`
	Open      bool   `json:"open,omitempty" doc:"Served by the port proxy"`
	Listening *bool  `json:"listening,omitempty" doc:"Whether a program listens there. Absent if that cannot be seen"`
	Unseen    string `json:"listening_unknown,omitempty" doc:"Why it cannot be seen whether a program listens there"`
	Proxy     string `json:"proxy,omitempty" doc:"Where the port proxy serves it, to holders of a key"`
}

// SignPort asks for a signed URL.
type SignPort struct {
	TTL Duration `json:"ttl,omitempty" doc:"How long it is good for, at most 168h; default 1h"`
}

// PortURL is a signed URL. Anyone who has it may use the port.
type PortURL struct {
	URL       string    `json:"url"`
	Token     string    `json:"token" doc:"The secret in it; programs may send it as the header X-Sandboxer-Token instead"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Exec is a command to run to its end without a terminal, for callers that cannot stream. Stdin and the
// output in the answer are text; the …Base64 fields carry data that is not UTF-8.
type Exec struct {
	Args        []string          `json:"args" minItems:"1" nullable:"false" example:"[\"uname\",\"-a\"]" doc:"Command and arguments; not interpreted by a shell"`
	Env         map[string]string `json:"env,omitempty"`
	Dir         string            `json:"dir,omitempty" doc:"Absolute; the workspace if empty"`
	User        string            `json:"user,omitempty" doc:"Name or uid[:gid]"`
	Service     string            `json:"service,omitempty" doc:"Which of the sandbox's services to run in, on extensions that have such; its default one if empty"`
	Stdin       string            `json:"stdin,omitempty"`
	StdinBase64 []byte            `json:"stdin_base64,omitempty" doc:"Instead of stdin, for bytes that are not UTF-8"`
	Timeout     Duration          `json:"timeout,omitempty" example:"1m" doc:"The command is killed after this; default 1m, at most 1h"`
	MaxOutput   int64             `json:"max_output,omitempty" doc:"Bytes kept of each of stdout and stderr, the rest is discarded; default 1 MiB, at most 16 MiB"`
}

// ExecResult is how a command ended, with its output.
type ExecResult struct {
	Code            int      `json:"code" example:"0" doc:"Exit code; 128+n when killed by signal n"`
	Signal          string   `json:"signal,omitempty" example:"KILL"`
	OOMKilled       bool     `json:"oom_killed,omitempty" doc:"The memory limit killed the command, something it ran, or the sandbox with it"`
	Stdout          string   `json:"stdout" example:"Linux\n"`
	StdoutBase64    []byte   `json:"stdout_base64,omitempty" doc:"Instead of stdout, when it is not UTF-8"`
	StdoutTruncated bool     `json:"stdout_truncated,omitempty"`
	Stderr          string   `json:"stderr" example:""`
	StderrBase64    []byte   `json:"stderr_base64,omitempty" doc:"Instead of stderr, when it is not UTF-8"`
	StderrTruncated bool     `json:"stderr_truncated,omitempty"`
	TimedOut        bool     `json:"timed_out,omitempty" doc:"Killed because the timeout ran out"`
	Took            Duration `json:"took" example:"12ms"`
}

// ExecStream is the first message of an exec stream; see docs/reference/api.md.
type ExecStream struct {
	Args    []string           `json:"args" minItems:"1" nullable:"false"`
	Env     map[string]string  `json:"env,omitempty"`
	Dir     string             `json:"dir,omitempty"`
	User    string             `json:"user,omitempty"`
	Service string             `json:"service,omitempty"`
	TTY     *sandboxer.WinSize `json:"tty,omitempty"`
}

// The kinds of file.
const (
	TypeFile    = "file"
	TypeDir     = "dir"
	TypeSymlink = "symlink"
	TypeOther   = "other" // device, socket, pipe
)

// FileInfo describes one file. Symbolic links are described, not followed.
type FileInfo struct {
	Path    string    `json:"path" example:"/workspace/go.mod" doc:"Bytes that are not UTF-8 are shown as U+FFFD: see path_base64"`
	Type    string    `json:"type" enum:"file,dir,symlink,other" example:"file"`
	Size    int64     `json:"size" example:"120"`
	Mode    string    `json:"mode" example:"0644" doc:"Permission bits, octal"`
	ModTime time.Time `json:"mod_time"`
	Owner   string    `json:"owner,omitempty"`
	Group   string    `json:"group,omitempty"`
	Target  string    `json:"target,omitempty" doc:"Of a symbolic link"`

	PathBase64   []byte `json:"path_base64,omitempty" doc:"The path, where it is not UTF-8. As a query parameter it is percent-encoded byte by byte"`
	TargetBase64 []byte `json:"target_base64,omitempty" doc:"The target, where it is not UTF-8"`
}

// Name returns the path with its exact bytes, as inside the sandbox.
func (f FileInfo) Name() string {
	return cmp.Or(string(f.PathBase64), f.Path)
}

// NewFileInfo converts fi to its public form.
func NewFileInfo(fi sandboxer.FileInfo) FileInfo {
	out := FileInfo{Type: TypeOther, Size: fi.Size, Mode: FormatMode(fi.Mode),
		ModTime: fi.ModTime.UTC(), Owner: valid(fi.Owner), Group: valid(fi.Group)}
	out.Path, out.PathBase64 = rawPath(fi.Path)
	out.Target, out.TargetBase64 = rawPath(fi.Target)
	switch {
	case fi.Mode.IsRegular():
		out.Type = TypeFile
	case fi.Mode.IsDir():
		out.Type = TypeDir
	case fi.Mode&fs.ModeSymlink != 0:
		out.Type = TypeSymlink
	}
	return out
}

func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// FileMode returns the type and permission bits of f.
func (f FileInfo) FileMode() fs.FileMode {
	m, _ := ParseMode(f.Mode)
	switch f.Type {
	case TypeDir:
		m |= fs.ModeDir
	case TypeSymlink:
		m |= fs.ModeSymlink
	case TypeOther:
		m |= fs.ModeIrregular
	}
	return m
}

const modeBits = fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky

// FormatMode writes the permission bits of m in octal, in the form of chmod.
func FormatMode(m fs.FileMode) string {
	n := uint32(m.Perm())
	if m&fs.ModeSetuid != 0 {
		n |= 0o4000
	}
	if m&fs.ModeSetgid != 0 {
		n |= 0o2000
	}
	if m&fs.ModeSticky != 0 {
		n |= 0o1000
	}
	return fmt.Sprintf("%04o", n)
}

// ParseMode reads permission bits in octal. Kind: Invalid.
func ParseMode(s string) (fs.FileMode, error) {
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o7777 {
		return 0, sandboxer.E(sandboxer.Invalid, nil, "%q is not a file mode", s).WithHint("write permission bits in octal: 0644")
	}
	m := fs.FileMode(n & 0o777)
	for bit, f := range map[uint64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if n&bit != 0 {
			m |= f
		}
	}
	return m & modeBits, nil
}

// MakeDir is the request to make a directory.
type MakeDir struct {
	Path       string `json:"path" example:"/workspace/out"`
	PathBase64 []byte `json:"path_base64,omitempty" doc:"Instead of path: a path that is not UTF-8"`
}

// MoveFile is the request to rename a file or directory.
type MoveFile struct {
	From       string `json:"from" example:"/workspace/a"`
	To         string `json:"to" example:"/workspace/b"`
	FromBase64 []byte `json:"from_base64,omitempty" doc:"Instead of from: a path that is not UTF-8"`
	ToBase64   []byte `json:"to_base64,omitempty" doc:"Instead of to: a path that is not UTF-8"`
}

// rawPath is what a path looks like in JSON: its text and, if that is not all of it, its
// bytes.
func rawPath(p string) (string, []byte) {
	if text := valid(p); text != p {
		return text, []byte(p)
	}
	return p, nil
}

// Name returns the path of the directory with its exact bytes.
func (m MakeDir) Name() string { return cmp.Or(string(m.PathBase64), m.Path) }

// Names returns the two paths with their exact bytes.
func (m MoveFile) Names() (from, to string) {
	return cmp.Or(string(m.FromBase64), m.From), cmp.Or(string(m.ToBase64), m.To)
}

// Stats is a sandbox's consumption at one moment. A missing limit means none. A negative figure means
// that the extension cannot measure it.
type Stats struct {
	At          time.Time `json:"at"`
	CPU         Duration  `json:"cpu" example:"1.5s" doc:"Processor time since start"`
	MemoryBytes int64     `json:"memory_bytes"`
	MemoryLimit int64     `json:"memory_limit,omitempty"`
	DiskBytes   int64     `json:"disk_bytes"`
	DiskLimit   int64     `json:"disk_limit,omitempty"`
	PIDs        int64     `json:"pids"`
	RxBytes     int64     `json:"rx_bytes"`
	TxBytes     int64     `json:"tx_bytes"`
}

// NewStats converts s to its public form.
func NewStats(s sandboxer.Stats) Stats {
	return Stats{At: s.At, CPU: Duration(s.CPU), MemoryBytes: s.MemoryBytes, MemoryLimit: s.MemoryLimit,
		DiskBytes: s.DiskBytes, DiskLimit: s.DiskLimit, PIDs: s.PIDs, RxBytes: s.RxBytes, TxBytes: s.TxBytes}
}

// Event is one line of a sandbox's history.
type Event struct {
	Seq        int64               `json:"seq" example:"42" doc:"Strictly growing; resume after it"`
	At         time.Time           `json:"at"`
	SandboxID  string              `json:"sandbox_id,omitempty"`
	Generation int                 `json:"generation,omitempty"`
	Tenant     string              `json:"tenant"`
	Type       sandboxer.EventType `json:"type" example:"state"`
	From       sandboxer.State     `json:"from,omitempty" enum:"creating,warm,running,pausing,paused,terminating,terminated"`
	To         sandboxer.State     `json:"to,omitempty" enum:"creating,warm,running,pausing,paused,terminating,terminated"`
	Cause      sandboxer.Reason    `json:"cause,omitempty"`
	Actor      string              `json:"actor" example:"key:k1"`
	Message    string              `json:"message,omitempty"`
	Progress   *sandboxer.Progress `json:"progress,omitempty" doc:"How far a long step has come; only in the stream of a sandbox's events, with a seq of 0"`
}

// NewEvent converts e to its public form.
func NewEvent(e sandboxer.Event) Event {
	return Event{Seq: e.Seq, At: e.At, SandboxID: cmp.Or(e.ShownID, e.SandboxID), Generation: e.Generation, Tenant: e.Tenant,
		Type: e.Type, From: e.From, To: e.To, Cause: e.Cause, Actor: e.Actor, Message: e.Message, Progress: e.Progress}
}

// Audit is the result of checking the broker's invariants.
type Audit struct {
	SchemaVersion int         `json:"schema_version" example:"1"`
	Checked       int         `json:"checked" doc:"Invariants checked"`
	Violations    []Violation `json:"violations" nullable:"false" doc:"At most 1,000"`
	LeftOut       int         `json:"left_out,omitempty" doc:"How many more there are"`
}

// Violation is one broken invariant.
type Violation struct {
	Invariant string `json:"invariant"`
	SandboxID string `json:"sandbox_id,omitempty"`
	Detail    string `json:"detail"`
}

// Sweep counts the actions of one pass of the sweep.
type Sweep struct {
	Seen        int `json:"seen"`
	Paused      int `json:"paused" doc:"Paused because their time ran out, or pauses that were half done and are finished"`
	Expired     int `json:"expired"`
	Torndown    int `json:"torndown"`
	Adopted     int `json:"adopted"`
	Lost        int `json:"lost"`
	Orphans     int `json:"orphans"`
	Quarantined int `json:"quarantined" doc:"Objects that the database does not know, and that are kept"`
	Failed      int `json:"failed"`
	Damaged     int `json:"damaged" doc:"Live records that cannot be read and were left alone"`
}

// Quarantined is an object of this installation that its database does not know: the database was
// restored from a backup, or lost its latest writes.
type Quarantined struct {
	ID         string    `json:"id" doc:"ID of the object; destroy it by this ID"`
	Generation int       `json:"generation"`
	Extension  string    `json:"extension"`
	Host       string    `json:"host,omitempty"`
	Since      time.Time `json:"since" doc:"When this server saw it first"`
	Until      time.Time `json:"until,omitzero" doc:"Its fuse, until which it is kept; without one it is kept until an administrator decides"`
	Why        string    `json:"why"`
}

// Status describes the server and the caller's live sandboxes.
type Status struct {
	SchemaVersion int                     `json:"schema_version" example:"1"`
	Version       string                  `json:"version" example:"v0.1.0"`
	Owner         string                  `json:"owner,omitempty" doc:"Name of this installation"`
	PID           int                     `json:"pid"`
	StartedAt     time.Time               `json:"started_at"`
	Uptime        Duration                `json:"uptime" example:"1h0m0s"`
	Data          string                  `json:"data,omitempty" doc:"Data directory; shown to administrators"`
	Tenant        string                  `json:"tenant" doc:"The caller's"`
	Actor         string                  `json:"actor" doc:"The caller's identity"`
	Scopes        []sandboxer.Scope       `json:"scopes" nullable:"false"`
	Sandboxes     map[sandboxer.State]int `json:"sandboxes" doc:"Live sandboxes by state; of every tenant for administrators"`
	Extensions    int                     `json:"extensions" doc:"Configured extensions"`
	Unavailable   []string                `json:"unavailable,omitempty" doc:"Extensions that could not be opened"`
	Notices       []string                `json:"notices,omitempty" doc:"What an operator should know and act upon, such as what this version cannot restore; shown to administrators"`
	Quarantined   int                     `json:"quarantined,omitempty" doc:"Objects that the database does not know, and that are kept; shown to administrators"`
	WentBack      time.Time               `json:"went_back_at,omitzero" doc:"When the database was found to be older than it had been. Until an administrator accepts it, no deadline counts; shown to administrators"`
}

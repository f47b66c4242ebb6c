package sandboxer

import (
	"context"
	"encoding/json"
	"iter"
	"net"
	"net/http"
	"time"
)

// Capability names one optional interface, in profiles (`requires:`), in the API
// and in the registry.
type Capability string

// The capabilities, each with its interface.
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

// Further abilities of an extension. Profiles cannot require them; only Narrower and Description name
// them.
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

// Besides lists the abilities that are not among Capabilities.
func Besides() []Capability {
	return []Capability{CanCheck, CanPlace, CanAdmit, CanLimits, CanNotices, CanCaches, CanPorts, CanForget, CanServices}
}

// Notifier reports events of sandboxes without being asked: that one died, was paused or was removed.
// The broker need not wait for its next pass over all sandboxes then.
type Notifier interface {
	// Notify yields the ID of a sandbox of owner whenever something may have happened to it, from its
	// return on, until ctx is done: the error is then ctx's. Several events of a sandbox may become
	// one. An ID only says that the broker should probe the sandbox (Prober, which must know the new
	// state by then). The broker's own changes may be reported too. Any other error is the last value:
	// later events are not reported until the caller calls Notify again. The sequence is for one use.
	Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error)
}

// Exposer returns a URL that the backend publishes for a port, for backends without raw streams. The
// broker's proxy adds Endpoint.Header and never shows it to clients.
type Exposer interface {
	Expose(ctx context.Context, h Handle, port int) (Endpoint, error)
}

// Endpoint is a published port.
type Endpoint struct {
	URL    string      `json:"url"`
	Header http.Header `json:"header,omitempty"` // credentials for the backend's edge
}

// Liveness is the result of a probe.
type Liveness string

// The results of a probe. An error from a probe means Unknown.
const (
	Alive   Liveness = "alive"
	Gone    Liveness = "gone"    // proven: the backend answered and does not have it
	Unknown Liveness = "unknown" // the backend could not tell; never a reason to give the sandbox up
	// Unresponsive means proven to exist, but without an answer and unusable now. The sandbox may
	// recover, so this too is never a reason to give it up.
	Unresponsive Liveness = "unresponsive"
	// OOMKilled means gone because the whole sandbox was killed for using more memory than its limit. A
	// rest may still need a teardown; after that the result is Gone.
	OOMKilled Liveness = "oom_killed"
)

// Prober checks cheaply whether one sandbox still exists. A probe must change nothing; for example, it
// must not extend a lifetime. For a handle without a host the result is Gone only if no host has the
// sandbox. If a host cannot be asked, the result is Unknown, unless another host has the sandbox.
type Prober interface {
	IsAlive(ctx context.Context, h Handle) (Liveness, error)
}

// Discoverer finds a sandbox of an earlier process by its deterministic ID. It returns the newest
// generation if there are several. Kinds: NotFound when there is none, or when it is not certain that
// the sandbox is this installation's.
type Discoverer interface {
	Discover(ctx context.Context, id string) (Found, error)
}

// Found is what a backend reports about a sandbox that the broker's database does not have.
type Found struct {
	Handle Handle    `json:"handle"`
	Fuse   time.Time `json:"fuse,omitzero"` // present backend deadline; zero if there is none or it is not known
}

// Lister enumerates every object with owner's mark, in whatever state. The sweep needs it to find
// orphans. If one of several machines cannot be asked, the objects of the others come first and the
// error last: listed objects exist, and nothing is known about the rest.
type Lister interface {
	ListRunning(ctx context.Context, owner string) iter.Seq2[Handle, error]
}

// Snapshotter saves sandboxes and makes new ones from what it saved. The promises of Provision and
// Teardown hold for RestoreFromSnapshot and DropSnapshot.
type Snapshotter interface {
	// Snapshot saves the sandbox under id, which the broker chose, and leaves it running. A paused
	// sandbox (Pauser) stays paused, but the restored one runs. Snapshot is idempotent in id: a second
	// call returns the receipt of the first, also if the sandbox has changed or is gone. If it fails,
	// it leaves nothing behind, or something that DropSnapshot(Snapshot{SnapshotID: id}) finds. It
	// returns the receipt when all data would survive a restart of the host. Kinds: NotFound when the
	// sandbox is gone.
	Snapshot(ctx context.Context, h Handle, id string) (Snapshot, error)
	// RestoreFromSnapshot makes the new sandbox spec from s: its files, and, if s.Memory is set, its
	// processes, which continue. Otherwise it is like Provision; WaitReady follows. ID, generation,
	// owner, environment of new commands, host name, addresses and clock are those of the new sandbox,
	// also if it is a later generation of the source. Kinds: those of Provision, and NotFound, before
	// anything exists, when the snapshot was dropped.
	RestoreFromSnapshot(ctx context.Context, spec Spec, s Snapshot) (Handle, error)
	// DropSnapshot removes everything that Snapshot saved, or began to save, under s.SnapshotID, the
	// only field that must be set. It is idempotent, and absence is success. Sandboxes that were
	// restored from the snapshot are not affected.
	DropSnapshot(ctx context.Context, s Snapshot) error
	// ListSnapshots enumerates the saved and the half saved snapshots of owner's sandboxes that were
	// not dropped, each once, in any order. The broker finds snapshots this way that its database does
	// not have.
	ListSnapshots(ctx context.Context, owner string) iter.Seq2[FoundSnapshot, error]
}

// FoundSnapshot is what a backend reports about a snapshot.
type FoundSnapshot struct {
	Snapshot   Snapshot `json:"snapshot"`             // the receipt; only the ID if the snapshot is incomplete
	Whole      bool     `json:"whole,omitempty"`      // it was saved completely
	SandboxID  string   `json:"sandbox_id,omitempty"` // the saved sandbox; empty if not known, as Generation is 0 then
	Generation int      `json:"generation,omitempty"`
}

// Snapshot is an extension's receipt for a saved sandbox. The promises of Handle hold for it.
type Snapshot struct {
	SnapshotID string            `json:"snapshot_id"`
	Bytes      int64             `json:"bytes,omitempty"`
	Memory     bool              `json:"memory,omitempty"`   // processes are saved too, not only files
	Quiesced   bool              `json:"quiesced,omitempty"` // nothing was written during the copy; otherwise crash-consistent
	Meta       map[string]string `json:"meta,omitempty"`
	Credential SecretRef         `json:"credential,omitzero"` // as Handle.Credential
	// ExpiresAt is when the backend drops it of its own accord; zero means never. A snapshot that has no other form expires
	// then.
	ExpiresAt time.Time `json:"expires_at,omitzero"`
}

// Quoter returns the price of a sandbox before it exists. A nil quote means that no charge is known;
// the profile's own price applies.
type Quoter interface {
	EstimateCost(ctx context.Context, spec Spec, duration time.Duration) (*MeterQuote, error)
}

// Meter returns the total consumption of a sandbox since Provision, so that two reads never charge
// twice. The broker asks before Teardown, and again once the sandbox is proven gone: then a Final reading
// is what it cost, and a reading that is not Final, like an error other than NotFound, means that the
// backend does not know yet. Kinds: NotFound when the extension knows nothing of the sandbox (any more).
type Meter interface {
	MeterActual(ctx context.Context, h Handle, duration time.Duration) (Usage, error)
}

// Pauser freezes and thaws a sandbox with the backend's own means and keeps its memory. Both methods
// are idempotent. A frozen sandbox exists: it is alive to a probe, listed, and torn down like any
// other. While it is frozen, Exec immediately fails with Conflict; a backend may also end the calls that
// were under way, which fail as Conflict, too. Kinds: NotFound when the sandbox is gone.
type Pauser interface {
	// Pause freezes the sandbox.
	Pause(ctx context.Context, h Handle) error
	// Resume thaws the sandbox.
	Resume(ctx context.Context, h Handle) error
}

// Renewer moves the backend's own deadline (the fuse) of a sandbox, also of a frozen one: the broker
// renews the deadline before it repeats a pause.
type Renewer interface {
	Renew(ctx context.Context, h Handle, until time.Time) error
}

// CapacityReporter reports how many sandboxes the extension can take now. An error takes the extension
// out of routing. Routes ask at most once a second, with host "".
type CapacityReporter interface {
	Capacity(ctx context.Context, host string) (HostCapacity, error)
}

// HostCapacity is the room for further sandboxes.
type HostCapacity struct {
	Free  int               `json:"free"`            // further sandboxes; -1 if unknown
	Hosts []string          `json:"hosts,omitempty"` // placement hosts
	Attrs map[string]string `json:"attrs,omitempty"` // for display: version, platform, …
}

// StatsReader measures one sandbox.
type StatsReader interface {
	Stats(ctx context.Context, h Handle) (Stats, error)
}

// Stats is a sandbox's consumption at one moment. A zero limit means none. A negative figure means that
// the extension cannot measure it.
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

// Networker changes the network policy of a running sandbox.
type Networker interface {
	// SetNetwork replaces the sandbox's policy and is idempotent. When it returns nil, the policy is in
	// force. That includes open connections: those that the policy forbids are cut. The policy stays in
	// force over a restart of the broker. After an error the former policy is in force. Kinds: Invalid
	// for an invalid policy, Unsupported for a policy that the extension cannot enforce, NotFound when
	// the sandbox is gone; each changes nothing.
	SetNetwork(ctx context.Context, h Handle, p NetworkPolicy) error
}

// Pooler keeps sandboxes ready for later requests (Pool). Provision of a Spec with Warm set makes one
// without an owner: from its profile, without inputs, and without starting the main command. WaitReady,
// Teardown, probes and listings treat it like any other.
type Pooler interface {
	// Basis identifies the material of a sandbox that would be provisioned for spec now, apart from
	// spec itself: the digest of its image, for example. Two sandboxes with the same basis are
	// interchangeable. Basis changes nothing, is called in the background, and may take long. Kinds:
	// those of Provision; Unsupported for a spec whose sandboxes cannot be kept ready.
	Basis(ctx context.Context, spec Spec) (string, error)
	// Claim gives a warm sandbox to its owner. spec is the spec of its Provision, with its own Env,
	// Labels, Inputs, Consumer and Fuse, a Network of the same mode, and without Warm. When Claim
	// returns, the sandbox is like one that Provision made from spec: new commands have exactly its
	// environment, the inputs are there, and the main command runs. The backend's deadline may be later
	// than spec.Fuse, but not later than both spec.Fuse and the former deadline.
	//
	// Claim is idempotent: a claim that succeeded is not repeated, even if the sandbox has changed
	// since. A claim that failed or was interrupted need not succeed when it is repeated. It then fails
	// as Unavailable, and the caller tears the sandbox down. Kinds: NotFound when the sandbox is gone;
	// Conflict when it is not warm, or was claimed with another spec; otherwise those of Provision.
	Claim(ctx context.Context, h Handle, spec Spec) (Handle, error)
}

// URLDialer is for extensions that do not choose the URLs of their sandboxes (Reachability.URL), or
// that reach them by settings of their own. It checks the address of the actual connection and knows
// the accepted certificate authorities. For all other extensions the broker connects to the URL itself.
type URLDialer interface {
	// DialURL opens a connection to the host of a sandbox's URL and completes TLS for https. Kinds:
	// NotFound when the sandbox is gone, Denied for a forbidden address, Unavailable when the address
	// cannot be reached.
	DialURL(ctx context.Context, h Handle) (net.Conn, error)
}

// A Credentialed extension reaches its service with a key that is a secret, perhaps each tenant's own. The broker resolves it for
// every sandbox (Spec.Credential), keeps the reference with the record, and passes it with every Handle and Snapshot.
type Credentialed interface {
	// Credential says whose secret is the key for new sandboxes. It does not change while the extension is open.
	Credential() Credential
}

// Narrower lists capabilities that the Go type has but this configuration or machine lacks: from
// Capabilities and from Besides.
type Narrower interface {
	Without() []Capability
}

// Describer is an extension that describes itself, because its adapter cannot: one that runs as a
// separate process. The description replaces what the Adapter declares.
type Describer interface {
	// Describe returns the description, which does not change while the extension is open.
	Describe() Description
}

// A Description is what an extension declares about itself.
type Description struct {
	Title        string         `json:"title,omitempty"` // one line
	Help         string         `json:"help,omitempty"`  // a paragraph
	Isolation    []Isolation    `json:"isolation_levels"`
	Pricing      []PricingModel `json:"pricing_models"`
	Capabilities []Capability   `json:"capabilities"` // from Capabilities and from Besides
	// Inputs are the inputs that its sandboxes take (CheckInputName). One named AnyInput stands for
	// every other.
	Inputs []Input `json:"inputs"`
	// Config is the JSON Schema of its configuration; nil if the extension does not declare one.
	Config  json.RawMessage `json:"config_schema,omitempty"`
	Runtime string          `json:"runtime,omitempty"` // see Adapter.Runtime
}

// AnyInput is the name of an Input that stands for all undeclared inputs. Only Help and Restricted have
// a meaning in its declaration.
const AnyInput = "*"

package sandboxer

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
)

// An Extension is one configured backend: this machine's gVisor, a container engine, a cluster, an
// account. It makes and removes sandboxes. Further abilities are optional interfaces that it implements
// (capability.go).
//
// Only package internal/backend calls an extension, after checking arguments and setting a deadline.
// Every spec that an extension gets has passed Spec.Check in its own process: package extension calls
// that for a message of another process. An extension checks only what depends on itself.
// Methods must be safe for concurrent use and must return promptly once ctx is done. A call whose ctx
// is already done must change nothing. An extension keeps no state of a sandbox that the next process
// could not find again: such state goes into the Handle.
type Extension interface {
	// Provision makes the sandbox that spec describes, or finds the one that it made before: it is
	// idempotent in (spec.ID, spec.Generation), also under concurrent calls. It may return before the
	// sandbox accepts work.
	//
	// If it fails, it leaves nothing behind, or something that Teardown(ctx, Handle{SandboxID: spec.ID,
	// Generation: spec.Generation}) finds. Kinds: Invalid and Unsupported before anything exists;
	// Unavailable and Exhausted when another backend, or another host of a Placer, may do better;
	// Failed when the request itself is at fault (a missing image, a broken archive). If the call
	// changed nothing at its host, the error should say so (Error.Untouched).
	Provision(ctx context.Context, spec Spec) (Handle, error)

	// WaitReady blocks until the sandbox accepts work. Kinds: Unavailable when another backend may do
	// better, Failed when the sandbox itself is at fault (its main process crashes), NotFound when it
	// is proven gone.
	WaitReady(ctx context.Context, h Handle) (Reachability, error)

	// Teardown releases everything that was made for h. It is idempotent, accepts a handle with only
	// SandboxID and Generation, and treats absence as success. It must not touch a newer generation of
	// the same ID. A nil error promises that nothing remains that holds resources or costs money. If h
	// names a host, Teardown asks that host; otherwise it asks every host that may have the sandbox. If
	// one of them cannot be asked, the error is Unavailable and names the host.
	Teardown(ctx context.Context, h Handle) (CleanupReport, error)
}

// A Checker reports what Provision would refuse as Invalid or Unsupported, before the broker writes
// anything down. A refused request then leaves no trace, and a dry run is accurate. Check must be quick
// and change nothing. It is optional. Provision may run in a later process than Check, so it refuses the
// same and uses of the broker's machine only what it opened itself: a name that Check looked at may mean
// something else by then.
type Checker interface {
	Check(ctx context.Context, spec Spec) error
}

// A Placer is an extension with several hosts that chooses the host of each sandbox. The broker asks it
// before Provision, commits the answer with its record, and passes it to Provision in Spec.Place. The
// location of a sandbox is thus known before anything is made, even if the broker crashes or the
// extension's own directory is lost.
type Placer interface {
	// Place returns the host for spec: spec.Host if it is set, otherwise the most suitable host. It
	// returns none of avoid: making this sandbox failed there. Place changes nothing. The name of a
	// host has at most MaxPlaceBytes visible characters, and later processes know it too: a Handle with
	// it as Host needs only SandboxID and Generation in addition. Place need not check spec: Check comes
	// before it, and Provision after it. Kinds: Unavailable and Exhausted when no host can take the
	// sandbox now; otherwise those of Provision before anything exists.
	Place(ctx context.Context, spec Spec, avoid []string) (host string, err error)
}

// MaxPlaceBytes bounds the name of a host (Placer, Spec.Place), in bytes.
const MaxPlaceBytes = 1 << 10

// A Limiter has default limits for sandboxes whose request and profile set none.
type Limiter interface {
	// DefaultLimits returns the limits that apply where spec sets none; a zero field means no limit. If
	// the profile does not bound a limit either, callers without the admin scope may not ask for more
	// than these.
	DefaultLimits(spec Spec) Limits
}

// A Noticer reports problems that an operator should solve in time, such as snapshots that this version
// can no longer restore.
type Noticer interface {
	// Notices returns one sentence for each problem, with the remedy. The broker calls it often: it
	// must be quick and must not ask other machines.
	Notices(ctx context.Context) []string
}

// A Forgetter gives up sandboxes whose host is gone for good.
type Forgetter interface {
	// Forget removes the extension's own records of a sandbox, as Teardown does at its end, and asks no
	// other machine. It returns a description of what may remain, and where. A remaining object then
	// belongs to no sandbox and appears in listings. Kinds: Unsupported for a sandbox that Teardown can
	// always remove.
	Forget(ctx context.Context, h Handle) (remains []string, err error)
}

// A PortLister reports which ports of a sandbox have a listener, for extensions where the socket table
// seen by commands is incomplete: the containers of a compose project have separate networks.
type PortLister interface {
	// ListPorts returns the ports at which Dialer.Dial would find a listener, in any order. Kinds:
	// those of Dial.
	ListPorts(ctx context.Context, h Handle) ([]int, error)
}

// A Cacher keeps data between sandboxes to make later ones faster, such as image layers that it built
// on its hosts. It keeps the caches of tenants apart, within the bounds of its configuration, and marks
// them as its own.
type Cacher interface {
	// Caches lists the caches on one host or, with "", on all hosts. A host that cannot be asked is an
	// error after the caches of the others. A host that is not this extension's has none.
	Caches(ctx context.Context, host string) ([]Cache, error)
	// PruneCaches removes the caches there and returns those that it removed. Caches in use stay.
	PruneCaches(ctx context.Context, host string) ([]Cache, error)
}

// A Cache is one cached item.
type Cache struct {
	Host    string    `json:"host"`              // where it is
	Name    string    `json:"name"`              // for display: "shop/web"
	Tenant  string    `json:"tenant,omitempty"`  // owner; "" if it belongs to no tenant
	Bytes   int64     `json:"bytes"`             // size, with the layers below it
	UsedAt  time.Time `json:"used_at,omitzero"`  // last use; zero if not known
	Problem string    `json:"problem,omitempty"` // what is wrong with it, such as a failed removal; "" if nothing
}

// An Admitter admits values that no operator vouches for (Spec.Vouches): values of the inputs that its
// Adapter declares as Restricted, and the image and the host of a request ("image", "host"). It should
// admit the values that the extension's own configuration lists, and values that reach, read and run
// nothing outside the sandbox. Other values are refused with Denied before anything exists. If the
// extension is no Admitter, all of them are refused. (Package internal/backend asks.)
type Admitter interface {
	// Admit returns nil if any caller may give the value in spec for name. Otherwise it returns Denied:
	// the message says which callers may give it and how an operator can allow it. Admit asks no other
	// machine, changes nothing, and reveals nothing about existing resources.
	Admit(spec Spec, name string) error
}

// A Handle is an extension's receipt for one sandbox. Only its adapter understands it; the broker
// stores it verbatim and shows it to operators. It must stay small (MaxHandleBytes) and must not
// contain secrets.
type Handle struct {
	SandboxID  string          `json:"sandbox_id"`           // chosen by the broker; always set
	Generation int             `json:"generation,omitempty"` // generation of that ID; 0 means any
	Host       string          `json:"host,omitempty"`       // host of the sandbox; empty if not known
	Ref        string          `json:"ref,omitempty"`        // the backend's own name for it
	Data       json.RawMessage `json:"data,omitempty"`       // private to the adapter, which versions it itself
	// Credential is the secret whose value is the key to the sandbox at a hosted service (Credentialed). The broker sets it; an
	// adapter sets it only in handles that it lists or discovers. In a handle without one it is not known.
	Credential SecretRef `json:"credential,omitzero"`
}

// MaxHandleBytes bounds a handle's JSON form, in bytes.
const MaxHandleBytes = 16 << 10

// Reachability says how a caller reaches a ready sandbox. It is part of the sandbox's status and must
// not contain secrets.
type Reachability struct {
	Host           string            `json:"host,omitempty"`            // placement host
	SSH            string            `json:"ssh,omitempty"`             // destination for ssh: user@host, or ssh://user@host:port
	RemoteDir      string            `json:"remote_dir,omitempty"`      // path of the workspace there
	ComposeProject string            `json:"compose_project,omitempty"` // compose extensions only
	URL            string            `json:"url,omitempty"`             // base URL of a URL-reachable sandbox
	Ports          []Port            `json:"ports,omitempty"`           // published ports
	Extra          map[string]string `json:"extra,omitempty"`           // further facts from the adapter; see ExtraChanged
}

// ExtraChanged is the key of Reachability.Extra for the parts of a request that the adapter left out or
// changed, as one list separated by "; ".
const ExtraChanged = "changed"

// ChangedMounts is the ExtraChanged text for gVisor sandboxes with a writable mount: gVisor does not
// share file locks with the host.
const ChangedMounts = "file locks and change events do not cross a mount: let one side write, and keep no database in it"

// A Port is one reachable port of a sandbox.
type Port struct {
	Port int    `json:"port"`           // inside the sandbox
	Addr string `json:"addr,omitempty"` // host:port that reaches the port from the broker, if any
	URL  string `json:"url,omitempty"`  // backend-published URL, if any
}

// CleanupReport says what a teardown did. Kept lists what it left on purpose (an attached VM stays),
// and Warnings what an operator should check.
type CleanupReport struct {
	Removed  []string `json:"removed,omitempty"`
	Kept     []string `json:"kept,omitempty"`
	Warnings []string `json:"warnings,omitempty"`
	// Forgotten says that nothing was removed: an administrator gave the sandbox up, and Kept lists
	// what may remain (Forgetter).
	Forgotten bool `json:"forgotten,omitempty"`
}

// Spec is the resolved request for one sandbox: profile, inputs and request merged.
// Extensions never modify it.
type Spec struct {
	ID         string            `json:"id"`
	Generation int               `json:"generation"`
	Owner      string            `json:"owner"` // ID of this installation; put it on every outside object
	Profile    Profile           `json:"profile"`
	Inputs     map[string]string `json:"inputs,omitempty"`
	Host       string            `json:"host,omitempty"` // requested host; empty lets the extension choose
	Consumer   Consumer          `json:"consumer,omitzero"`
	// Tenant is the tenant that the broker verified; the caller sets Consumer. It is set for Provision
	// and the calls that replace it, including Claim, and is not stored.
	Tenant    string            `json:"tenant,omitempty"`
	Image     string            `json:"image,omitempty"`   // in the backend's notation; empty means the adapter's default
	Command   []string          `json:"command,omitempty"` // main process; empty means the adapter's default
	Env       map[string]string `json:"-"`                 // may hold secrets: the store encrypts it and keeps it apart from the spec
	Labels    map[string]string `json:"labels,omitempty"`
	Limits    Limits            `json:"limits,omitzero"`
	Network   NetworkPolicy     `json:"network,omitzero"`
	Mounts    []Mount           `json:"mounts,omitempty"`
	Ports     []int             `json:"ports,omitempty"`
	Workspace string            `json:"workspace,omitempty"` // absolute path of the workspace inside; empty means the adapter's default
	User      string            `json:"user,omitempty"`      // default user of commands
	Fuse      time.Time         `json:"fuse,omitzero"`       // time after which the backend may destroy the sandbox itself
	Warm      bool              `json:"warm,omitempty"`      // keep it ready for a Claim (Pooler)
	// Credential is the secret whose value is the key to a hosted service (Credentialed): of the operator, or of Tenant. It
	// does not change while the sandbox lives.
	Credential SecretRef `json:"credential,omitzero"`
	// Vouched lists what an administrator set: names of inputs, "image" and "host". Callers use
	// Vouches, which also considers the profile.
	Vouched []string `json:"vouched,omitempty"`

	// Place is the host that Placer.Place chose: Provision makes the sandbox there and nowhere else.
	// Host is what the caller asked for. Place is set for Provision and the calls that replace it, if
	// the extension is a Placer, and is stored in Sandbox.Host.
	Place string `json:"-"`
}

// Names for Spec.Vouches and Admitter: parts of a request that are no inputs but restricted like them.
const (
	RestrictedImage  = "image"
	RestrictedHost   = "host"
	RestrictedMounts = "mounts"
)

// Vouches reports whether an operator vouches for the value of an input, of "image", of "host" or of
// all "mounts": because an administrator gave it, or because the profile has the same value. Values of
// a built-in profile do not count, because no operator of this installation wrote it. A value that is
// not set needs no voucher.
func (s Spec) Vouches(name string) bool {
	value, of := s.Inputs[name], s.Profile.Inputs[name]
	switch name {
	case RestrictedMounts:
		return !slices.ContainsFunc(s.Mounts, func(m Mount) bool { return !s.VouchesMount(m) })
	case RestrictedImage:
		value, of = s.Image, s.Profile.Image
	case RestrictedHost:
		value, of = s.Host, ""
	}
	return value == "" || slices.Contains(s.Vouched, name) || value == of && !s.Profile.Builtin
}

// VouchesMount is Vouches for one mount. A profile vouches for its own mounts and for paths below them,
// with no more rights.
func (s Spec) VouchesMount(m Mount) bool {
	return slices.Contains(s.Vouched, RestrictedMounts) ||
		!s.Profile.Builtin && slices.ContainsFunc(s.Profile.Mounts, func(o Mount) bool { return m.Within(o.Source, o.ReadOnly) })
}

// CheckPort refuses, as Invalid, a number that is not a TCP port.
func CheckPort(port int) error {
	if port < 1 || port > 65535 {
		return E(Invalid, nil, "%d is not a port (want 1 to 65535)", port)
	}
	return nil
}

// Check refuses, as Invalid, a spec that no sandbox can have, whatever its extension is: of its ID,
// generation, owner, environment, limits, ports, network policy and mounts.
func (s Spec) Check() error {
	if err := CheckID(s.ID); err != nil {
		return err
	}
	switch {
	case s.Generation < 1:
		return E(Invalid, nil, "generation %d of sandbox %s: want 1 or more", s.Generation, s.ID)
	case s.Owner == "":
		return E(Invalid, nil, "sandbox %s has no owner", s.ID)
	}
	for k, v := range s.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return E(Invalid, nil, "environment variable %q: a name has no '=', and neither name nor value a NUL byte", k)
		}
	}
	for _, p := range s.Ports {
		if err := CheckPort(p); err != nil {
			return err
		}
	}
	return cmp.Or(s.Limits.Check(), s.Network.Check(), CheckMounts(s.Mounts, s.Workspace))
}

// ClaimDigest identifies s as the spec of a claim (Pooler), so that an extension can recognize a
// repeated one.
func (s Spec) ClaimDigest() string {
	s.Fuse, s.Warm, s.Tenant = time.Time{}, false, "" // Tenant was not said of claims before
	j, err := json.Marshal(struct {
		Spec Spec
		Env  map[string]string
	}{s, s.Env})
	if err != nil {
		panic(err) // plain data always encodes
	}
	sum := sha256.Sum256(j)
	return hex.EncodeToString(sum[:])
}

// Limits bound a sandbox. A zero field means the adapter's default. An adapter refuses limits that it
// cannot enforce as Unsupported before anything exists.
type Limits struct {
	MilliCPU    int64 `json:"milli_cpu,omitempty"` // thousandths of a CPU
	MemoryBytes int64 `json:"memory_bytes,omitempty"`
	DiskBytes   int64 `json:"disk_bytes,omitempty"` // writable layer and workspace together
	PIDs        int64 `json:"pids,omitempty"`       // processes and threads
	GPUs        int   `json:"gpus,omitempty"`
}

// The largest values of Limits. They exceed any machine, and sums and conversions of them do not
// overflow.
const (
	MaxMilliCPU    = 100_000_000 // 100,000 CPUs
	MaxMemoryBytes = 1 << 50     // a pebibyte
	MaxDiskBytes   = 1 << 55
	MaxPIDs        = 1 << 22 // the most that a Linux kernel has
	MaxGPUs        = 64
)

// A Limit is one field of Limits.
type Limit struct {
	Name       string // its JSON name
	Value, Max int64
}

// Each returns every field with its largest value.
func (l Limits) Each() []Limit {
	return []Limit{
		{"milli_cpu", l.MilliCPU, MaxMilliCPU}, {"memory_bytes", l.MemoryBytes, MaxMemoryBytes},
		{"disk_bytes", l.DiskBytes, MaxDiskBytes}, {"pids", l.PIDs, MaxPIDs}, {"gpus", int64(l.GPUs), MaxGPUs},
	}
}

// Check refuses, as Invalid, negative limits and limits above the maximum. Every reader of limits calls
// it: requests, profiles, the command line, and package backend for every spec.
func (l Limits) Check() error {
	for _, f := range l.Each() {
		switch {
		case f.Value < 0:
			return E(Invalid, nil, "limit %s=%d is negative", f.Name, f.Value).WithHint("give a number above zero, or leave it out for the profile's")
		case f.Value > f.Max:
			return E(Invalid, nil, "limit %s=%d is too large: at most %d is possible", f.Name, f.Value, f.Max)
		}
	}
	return nil
}

// Or returns l with its zero fields taken from other.
func (l Limits) Or(other Limits) Limits {
	return Limits{
		MilliCPU: cmp.Or(l.MilliCPU, other.MilliCPU), MemoryBytes: cmp.Or(l.MemoryBytes, other.MemoryBytes),
		DiskBytes: cmp.Or(l.DiskBytes, other.DiskBytes), PIDs: cmp.Or(l.PIDs, other.PIDs), GPUs: cmp.Or(l.GPUs, other.GPUs),
	}
}

// Within refuses, as Invalid, values above those of most, where 0 means no bound. The message names
// whose as the origin of the bound.
func (l Limits) Within(most Limits, whose string) error {
	bounds := most.Each()
	for i, f := range l.Each() {
		if most := bounds[i].Value; most > 0 && f.Value > most {
			return E(Invalid, nil, "limit %s=%d is more than %s allows (%d)", f.Name, f.Value, whose, most)
		}
	}
	return nil
}

// NetworkMode is the coarse network policy of a sandbox.
type NetworkMode string

// The network modes. An empty mode means NetworkNone.
const (
	NetworkNone   NetworkMode = "none"   // loopback only
	NetworkPublic NetworkMode = "public" // the public internet; never loopback, link-local, metadata services, private ranges or the broker
	NetworkAllow  NetworkMode = "allow"  // only the destinations in NetworkPolicy.Allow
)

// NetworkPolicy says which destinations a sandbox may reach.
type NetworkPolicy struct {
	Mode  NetworkMode `json:"mode,omitempty"`
	Allow []string    `json:"allow,omitempty"` // domain, *.domain, IP, CIDR, each with an optional :port (ParseDestination, Destination.Opens)
}

// A Mount makes a directory or a regular file of the broker's machine visible inside a sandbox. It is
// live: each side sees the writes of the other, unless the mount is read-only. Inside, the default user
// of commands (Spec.User) owns the source.
//
// The mount shows Source as it is when the sandbox is made, without mounts below it, and it follows no
// symbolic link. An extension that runs on another machine or manages no containers refuses mounts with
// Unsupported. Snapshots contain nothing of a mount, and a teardown leaves the source alone.
type Mount struct {
	Source   string `json:"source"` // absolute, clean, existing path
	Target   string `json:"target"` // absolute, clean path inside; made if it is missing
	ReadOnly bool   `json:"read_only,omitempty"`
}

// Within reports whether the mount shows only dir or paths below it, and is read-only if readOnly is
// set.
func (m Mount) Within(dir string, readOnly bool) bool {
	return pathWithin(m.Source, dir) && (m.ReadOnly || !readOnly)
}

// MaxMounts is the largest number of mounts of one sandbox.
const MaxMounts = 16

// noTargets are places where, and below which, nothing may be mounted: those that the kernel fills, and the agent's.
var noTargets = []string{"/proc", "/sys", "/dev", "/.sandboxer"}

// CheckMounts refuses, as Invalid, mounts that no sandbox can have: more than MaxMounts, paths that are
// not clean and absolute, and targets that hide each other, the workspace, or the system's /proc, /sys,
// /dev and /.sandboxer. One target may be below another. No mount may be in the workspace, because
// snapshots hold it and creates fill it. An empty workspace is not checked.
func CheckMounts(mounts []Mount, workspace string) error {
	if len(mounts) > MaxMounts {
		return E(Invalid, nil, "%d mounts are too many: want at most %d", len(mounts), MaxMounts)
	}
	clean := func(p string) bool { return path.IsAbs(p) && path.Clean(p) == p && !strings.ContainsRune(p, 0) }
	for i, m := range mounts {
		refuse := func(format string, args ...any) error {
			return E(Invalid, nil, "mount %s:%s: %s", m.Source, m.Target, fmt.Sprintf(format, args...))
		}
		if !clean(m.Source) || !clean(m.Target) {
			return E(Invalid, nil, "mount %s:%s: want clean absolute paths", m.Source, m.Target).WithHint("write both from the root, without .. and doubled slashes: /srv/data:/data")
		}
		if m.Target == "/" {
			return refuse("a mount cannot replace the root directory")
		}
		for _, p := range noTargets {
			if pathWithin(m.Target, p) || pathWithin(p, m.Target) {
				return refuse("mounts at, below or over %s are not allowed", p)
			}
		}
		switch {
		case workspace == "":
		case pathWithin(workspace, m.Target):
			return refuse("it would hide the workspace, %s", workspace)
		case pathWithin(m.Target, workspace):
			return refuse("mounts in the workspace, %s, are not allowed: snapshots save it", workspace).(*Error).
				WithHint("mount it outside the workspace, and make a link to it")
		}
		if slices.ContainsFunc(mounts[:i], func(o Mount) bool { return o.Target == m.Target }) {
			return refuse("another mount has the target %s already", m.Target)
		}
	}
	return nil
}

func pathWithin(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

// Consumer attributes a sandbox to its requester. It is part of the create request, not of the inputs,
// and does not change the sandbox.
type Consumer struct {
	ID   string            `json:"id,omitempty"`   // person, agent or service
	Kind string            `json:"kind,omitempty"` // "agent", "ci", "user", …
	Meta map[string]string `json:"meta,omitempty"`
}

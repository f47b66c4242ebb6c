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

// An Extension is one configured backend: this machine's gVisor, an engine, a
// cluster, an account. It makes and removes sandboxes; what more it can do it says
// by also implementing capability interfaces (capability.go).
//
// Only package internal/backend calls an extension, after checking arguments and
// setting a deadline. Methods must be safe for concurrent use and must return
// promptly once ctx is done; a call whose ctx is already done must change nothing.
// An extension keeps no per-sandbox state that the next process could not find
// again: what it must remember goes into the Handle.
type Extension interface {
	// Provision makes the sandbox described by spec, or finds the one it made
	// before: it is idempotent in (spec.ID, spec.Generation), also when called
	// concurrently. It may return before the sandbox accepts work.
	//
	// If it fails it leaves nothing behind, or something that
	// Teardown(ctx, Handle{SandboxID: spec.ID, Generation: spec.Generation}) finds.
	// Kinds: Invalid and Unsupported before anything exists; Unavailable and
	// Exhausted when another backend, or another host of a Placer, may do better; Failed
	// when the request itself is at fault (a missing image, a broken archive). Where the call
	// did not come to do anything, its error should say so (Error.Untouched).
	Provision(ctx context.Context, spec Spec) (Handle, error)

	// WaitReady blocks until the sandbox accepts work. Kinds: Unavailable when
	// another backend may do better, Failed when the sandbox itself is at fault
	// (its main process crashes), NotFound when it is proven gone.
	WaitReady(ctx context.Context, h Handle) (Reachability, error)

	// Teardown releases everything made for h. It is idempotent, accepts a handle
	// with nothing but SandboxID and Generation, and treats absence as success. It
	// must not touch a newer generation of the same ID. A nil error promises that
	// nothing remains that holds resources or costs money: where h names a host that one
	// is asked, and where it names none every host on which the sandbox can be. One that
	// cannot be asked makes the answer Unavailable, with the host in its message.
	Teardown(ctx context.Context, h Handle) (CleanupReport, error)
}

// A Checker says, before anything is written down, what Provision would refuse of an
// order as Invalid or Unsupported, so that a refused request leaves no trace and a
// dry run tells the truth. It must be quick and change nothing. It is optional;
// Provision checks again.
type Checker interface {
	Check(ctx context.Context, spec Spec) error
}

// A Placer is an extension of several hosts, and says on which one a sandbox is made. The
// broker asks it before Provision, commits the answer with its record, and hands it to
// Provision in Spec.Place: where a sandbox may be is known before anything is made, and
// whatever becomes of the broker or of the extension's own directory.
type Placer interface {
	// Place returns the host for spec: spec.Host if that is set, and else whichever suits
	// it best. It is none of avoid, where making this very sandbox has failed. Place changes
	// nothing anywhere. A host is named by at most MaxPlaceBytes of visible characters, by
	// which later processes know it, too: with it as its Host, a Handle needs besides it only
	// SandboxID and Generation. Kinds: Unavailable and Exhausted when no host can take the
	// sandbox now; otherwise those of Provision before anything exists.
	Place(ctx context.Context, spec Spec, avoid []string) (host string, err error)
}

// MaxPlaceBytes bounds the name of a host (Placer, Spec.Place).
const MaxPlaceBytes = 1 << 10

// A Limiter bounds sandboxes also where nobody asks for it.
type Limiter interface {
	// DefaultLimits are what holds for the limits that spec leaves out; a zero field
	// means that nothing does. Callers who are no administrators may not ask for more than
	// these where the profile says nothing of a limit.
	DefaultLimits(spec Spec) Limits
}

// A Noticer has something that an operator should know, and do something about before it is
// too late: what this version cannot restore any more.
type Noticer interface {
	// Notices returns a sentence for each, with what to do. It is asked often, must be
	// quick, and asks nobody outside.
	Notices(ctx context.Context) []string
}

// A Forgetter gives up sandboxes whose host is gone for good.
type Forgetter interface {
	// Forget removes what is kept here of a sandbox, as Teardown does at its end, and asks
	// nobody outside. It returns what may remain, for people, and where. What is
	// there after all belongs to no sandbox then, and listings show it. Kinds: Unsupported
	// if the sandbox is of a kind that Teardown can always remove.
	Forget(ctx context.Context, h Handle) (remains []string, err error)
}

// A PortLister says which ports of a sandbox have a listener, where the table of sockets in
// the place that commands run in does not say it all: the containers of a compose project
// have networks of their own.
type PortLister interface {
	// ListPorts returns the ports that Dialer.Dial would find a listener at, in any order.
	// Kinds: those of Dial.
	ListPorts(ctx context.Context, h Handle) ([]int, error)
}

// A Cacher keeps things between sandboxes that make later ones faster, such as layers of
// images that it built on its hosts. It keeps them within bounds of its configuration by
// itself, apart for each tenant, and marks them as its own.
type Cacher interface {
	// Caches lists them, on one host or, with "", everywhere. A host that cannot be asked
	// is an error, after what the others have; one that is none of this extension's has none.
	Caches(ctx context.Context, host string) ([]Cache, error)
	// PruneCaches removes them there, and returns what it removed. What is in use at that
	// moment stays.
	PruneCaches(ctx context.Context, host string) ([]Cache, error)
}

// A Cache is what is kept of one thing.
type Cache struct {
	Host    string    // where it is
	Name    string    // for people: "shop/web"
	Tenant  string    // whose it is, "" if nobody in particular
	Bytes   int64     // of it, with what it is based on
	UsedAt  time.Time // last; zero if that is not known
	Problem string    // "" or what is wrong with it, such as that it should be gone
}

// An Admitter admits values that no operator vouches for (Spec.Vouches): of the inputs
// that its Adapter declares as Restricted, and of a request's image and host ("image",
// "host"). It should admit what the extension's own configuration lists, and what
// reaches, reads and runs nothing but the sandbox itself. What is not admitted is
// refused with Denied before anything exists, and so is all of it where an extension
// is no Admitter. (Package internal/backend asks.)
type Admitter interface {
	// Admit returns nil if anybody may give the value that spec has for name, or else
	// Denied with a message that says who may and what an operator can do about it. It
	// asks nobody outside, changes nothing, and tells nothing of what is there.
	Admit(spec Spec, name string) error
}

// A Handle is an extension's receipt for one sandbox. It is opaque to everybody
// but its adapter, stored verbatim by the broker, and shown to operators. It must
// stay small (MaxHandleBytes) and must not contain secrets.
type Handle struct {
	SandboxID  string          `json:"sandbox_id"`           // chosen by the broker; always set
	Generation int             `json:"generation,omitempty"` // which sandbox of that ID; 0 means any
	Host       string          `json:"host,omitempty"`       // where it was placed; empty if that is not known
	Ref        string          `json:"ref,omitempty"`        // the backend's own name for it
	Data       json.RawMessage `json:"data,omitempty"`       // private to the adapter, which versions it
}

// MaxHandleBytes bounds a handle's JSON form.
const MaxHandleBytes = 16 << 10

// Reachability is what a caller needs to get into a ready sandbox. It is shown on
// the sandbox's status; it must not contain secrets.
type Reachability struct {
	Host           string            `json:"host,omitempty"`            // placement host
	SSH            string            `json:"ssh,omitempty"`             // SSH destination, user@host[:port]
	RemoteDir      string            `json:"remote_dir,omitempty"`      // workspace path there
	ComposeProject string            `json:"compose_project,omitempty"` // compose extensions only
	URL            string            `json:"url,omitempty"`             // base URL of a URL-reachable sandbox
	Ports          []Port            `json:"ports,omitempty"`           // published ports
	Extra          map[string]string `json:"extra,omitempty"`           // what else the adapter has to say; see ExtraChanged
}

// ExtraChanged is the key of Reachability.Extra under which an adapter says what it left
// out of a request or did otherwise, in one list separated by "; ".
const ExtraChanged = "changed"

// A Port is one reachable port of a sandbox.
type Port struct {
	Port int    `json:"port"`           // inside the sandbox
	Addr string `json:"addr,omitempty"` // host:port that reaches it from the broker, if any
	URL  string `json:"url,omitempty"`  // backend-published URL, if any
}

// CleanupReport says what a teardown did. Kept names what was deliberately left
// (an attached VM stays); Warnings what an operator should look at.
type CleanupReport struct {
	Removed  []string `json:"removed,omitempty"`
	Kept     []string `json:"kept,omitempty"`
	Warnings []string `json:"warnings,omitempty"`
	// Forgotten says that nothing was removed: an administrator gave the sandbox up, and
	// Kept is what may remain (Forgetter).
	Forgotten bool `json:"forgotten,omitempty"`
}

// Spec is the resolved request for one sandbox: profile, inputs and request merged.
// Extensions never modify it.
type Spec struct {
	ID         string            `json:"id"`
	Generation int               `json:"generation"`
	Owner      string            `json:"owner"` // this installation; stamp it on every outside object
	Profile    Profile           `json:"profile"`
	Inputs     map[string]string `json:"inputs,omitempty"`
	Host       string            `json:"host,omitempty"` // asked-for placement; empty lets the extension choose
	Consumer   Consumer          `json:"consumer,omitzero"`
	// Tenant is whose sandbox it is, by the broker's word; what a Consumer says is the caller's.
	// It is set for Provision and what stands in its place, a Claim too, and not kept.
	Tenant    string            `json:"tenant,omitempty"`
	Image     string            `json:"image,omitempty"`   // in the backend's terms; empty means the adapter's default
	Command   []string          `json:"command,omitempty"` // main process; empty means the adapter's default
	Env       map[string]string `json:"-"`                 // may hold secrets: the store keeps it sealed, apart from the spec
	Labels    map[string]string `json:"labels,omitempty"`
	Limits    Limits            `json:"limits,omitzero"`
	Network   NetworkPolicy     `json:"network,omitzero"`
	Mounts    []Mount           `json:"mounts,omitempty"`
	Ports     []int             `json:"ports,omitempty"`
	Workspace string            `json:"workspace,omitempty"` // absolute path of the workspace inside; empty means the adapter's default
	User      string            `json:"user,omitempty"`      // default user of commands
	Fuse      time.Time         `json:"fuse,omitzero"`       // the backend may destroy the sandbox by itself after this
	Warm      bool              `json:"warm,omitempty"`      // to be kept ready for a Claim (Pooler)
	// Vouched names what an administrator gave: inputs, and "image" and "host". Ask Vouches,
	// which knows the profile, too.
	Vouched []string `json:"vouched,omitempty"`

	// Place is the host that Placer.Place chose for the sandbox, where Provision makes it and
	// nowhere else; what the caller asked for is Host. It is set for Provision and what stands
	// in its place, of extensions that are Placers, and kept in Sandbox.Host.
	Place string `json:"-"`

	// Stamp is what the broker wants to be told of the sandbox by Discover if its database
	// should ever have lost it: opaque, encrypted, at most MaxStampBytes. An extension that
	// discovers should keep it with the object, outside of the sandbox; one that cannot
	// leaves it.
	Stamp []byte `json:"-"`
}

// The names by which Spec.Vouches and Admitter know what of a request is no input but
// restricted as one.
const (
	RestrictedImage  = "image"
	RestrictedHost   = "host"
	RestrictedMounts = "mounts"
)

// Vouches reports whether an operator stands for the value of an input, of "image", of
// "host" or of all "mounts": because an administrator gave it, or because the profile says the
// same. A built-in profile vouches for nothing: nobody here wrote it. What is not given needs
// nobody to stand for it.
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

// VouchesMount is Vouches for one of the mounts: a profile vouches for what it mounts, and for
// what lies in that, with no more rights.
func (s Spec) VouchesMount(m Mount) bool {
	return slices.Contains(s.Vouched, RestrictedMounts) ||
		!s.Profile.Builtin && slices.ContainsFunc(s.Profile.Mounts, func(o Mount) bool { return m.Within(o.Source, o.ReadOnly) })
}

// MaxStampBytes bounds Spec.Stamp.
const MaxStampBytes = 64 << 10

// ClaimDigest identifies s as the order of a claim (Pooler), so that an extension can
// tell whether one that comes again is the same.
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

// Limits bound a sandbox. A zero field means the adapter's default. What an adapter
// cannot enforce it refuses with Unsupported before anything exists.
type Limits struct {
	MilliCPU    int64 `json:"milli_cpu,omitempty"` // thousandths of a CPU
	MemoryBytes int64 `json:"memory_bytes,omitempty"`
	DiskBytes   int64 `json:"disk_bytes,omitempty"` // writable layer and workspace together
	PIDs        int64 `json:"pids,omitempty"`       // processes and threads
	GPUs        int   `json:"gpus,omitempty"`
}

// The largest limits that can be asked for. They are beyond any machine, and small enough
// for figures to be converted and summed over a sandbox's parts without overflow.
const (
	MaxMilliCPU    = 100_000_000 // a hundred thousand CPUs
	MaxMemoryBytes = 1 << 50     // a pebibyte
	MaxDiskBytes   = 1 << 55
	MaxPIDs        = 1 << 22 // as many as a Linux kernel has
	MaxGPUs        = 64
)

// A Limit is one field of Limits.
type Limit struct {
	Name       string // as in JSON
	Value, Max int64
}

// Each returns every field, with the largest value that it can have.
func (l Limits) Each() []Limit {
	return []Limit{
		{"milli_cpu", l.MilliCPU, MaxMilliCPU}, {"memory_bytes", l.MemoryBytes, MaxMemoryBytes},
		{"disk_bytes", l.DiskBytes, MaxDiskBytes}, {"pids", l.PIDs, MaxPIDs}, {"gpus", int64(l.GPUs), MaxGPUs},
	}
}

// Check refuses, as Invalid, what no sandbox can be held to. Whatever reads limits asks it:
// requests, profiles, the command line, and package backend for every spec.
func (l Limits) Check() error {
	for _, f := range l.Each() {
		switch {
		case f.Value < 0:
			return E(Invalid, nil, "limit %s=%d is negative", f.Name, f.Value)
		case f.Value > f.Max:
			return E(Invalid, nil, "limit %s=%d is beyond every machine: the most is %d", f.Name, f.Value, f.Max)
		}
	}
	return nil
}

// Or returns l with what it leaves out taken from other.
func (l Limits) Or(other Limits) Limits {
	return Limits{
		MilliCPU: cmp.Or(l.MilliCPU, other.MilliCPU), MemoryBytes: cmp.Or(l.MemoryBytes, other.MemoryBytes),
		DiskBytes: cmp.Or(l.DiskBytes, other.DiskBytes), PIDs: cmp.Or(l.PIDs, other.PIDs), GPUs: cmp.Or(l.GPUs, other.GPUs),
	}
}

// Within refuses, as Invalid, what is more than most, in which 0 means no bound; whose
// says in the message who bounds it.
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
	NetworkPublic NetworkMode = "public" // the public internet; never loopback, link-local, metadata, private ranges or the broker
	NetworkAllow  NetworkMode = "allow"  // only what NetworkPolicy.Allow names
)

// NetworkPolicy says what a sandbox may reach.
type NetworkPolicy struct {
	Mode  NetworkMode `json:"mode,omitempty"`
	Allow []string    `json:"allow,omitempty"` // domain, *.domain, IP, CIDR, each with an optional :port (ParseDestination, Destination.Opens)
}

// A Mount makes a directory or a regular file of the broker's machine visible inside, as it is
// and becomes: what one side writes, the other reads, unless it is read-only. Whoever runs
// commands inside (Spec.User) is there the owner of the source.
//
// It is what lies at Source when the sandbox is made, without what is mounted below, and no
// symbolic link leads there. An extension that does not run on the machine with the path, or
// manages no containers, refuses mounts with Unsupported. Nothing of a mount is in a snapshot,
// and a teardown leaves the source alone.
type Mount struct {
	Source   string `json:"source"` // absolute and clean, and there
	Target   string `json:"target"` // absolute and clean path inside; made where it is missing
	ReadOnly bool   `json:"read_only,omitempty"`
}

// Within reports whether the mount shows nothing but what lies in dir, or dir itself, and
// writes to it only if that is not read-only.
func (m Mount) Within(dir string, readOnly bool) bool {
	return pathWithin(m.Source, dir) && (m.ReadOnly || !readOnly)
}

// MaxMounts bounds the mounts of one sandbox.
const MaxMounts = 16

// noTargets are where nothing is mounted, nor below: what the kernel shows there, and the agent.
var noTargets = []string{"/proc", "/sys", "/dev", "/.sandboxer"}

// CheckMounts refuses, as Invalid, mounts that no sandbox can have: too many, with paths that
// are not clean and absolute, and with targets that hide each other, the workspace, or what
// every sandbox has at /proc, /sys, /dev and /.sandboxer. One may lie below another. The
// workspace is what snapshots hold and creates fill, so that no mount lies in it. An empty
// workspace is not looked at.
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
			return refuse("want clean absolute paths")
		}
		if m.Target == "/" {
			return refuse("a mount cannot replace the root directory")
		}
		for _, p := range noTargets {
			if pathWithin(m.Target, p) || pathWithin(p, m.Target) {
				return refuse("nothing is mounted at, below or over %s", p)
			}
		}
		switch {
		case workspace == "":
		case pathWithin(workspace, m.Target):
			return refuse("it would hide the workspace, %s", workspace)
		case pathWithin(m.Target, workspace):
			return refuse("nothing is mounted in the workspace, %s, which snapshots hold", workspace).(*Error).
				WithHint("mount it beside the workspace, and make a link to it")
		}
		if slices.ContainsFunc(mounts[:i], func(o Mount) bool { return o.Target == m.Target }) {
			return refuse("something is mounted on %s already", m.Target)
		}
	}
	return nil
}

func pathWithin(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

// Consumer attributes a sandbox to whoever asked for it. It travels on the create
// request, not in the inputs, and changes nothing about the sandbox.
type Consumer struct {
	ID   string            `json:"id,omitempty"`   // person, agent or service
	Kind string            `json:"kind,omitempty"` // "agent", "ci", "user", …
	Meta map[string]string `json:"meta,omitempty"`
}

package extensiontest

import (
	"net/netip"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Harness says how the suite reaches one backend and what the backend promises. Only Open
// is required.
type Harness struct {
	// Open opens the extension as the owner Spec.Owner. It is called once per group, and
	// wherever a test needs another process of the broker: each call stands for one, so every
	// extension it returns must reach the same backend and find the same sandboxes.
	// The suite closes each that is an io.Closer.
	Open func(t *testing.T) sandboxer.Extension
	// Stranger opens the same backend for another owner; nil where that is
	// impossible.
	Stranger func(t *testing.T) sandboxer.Extension

	// Spec is the template of every sandbox: image, command, network, user. The suite
	// fills in ID, Generation and, where empty, Owner.
	Spec sandboxer.Spec
	// Inputs are the inputs that the adapter declares, not nil if it declares none.
	Inputs []sandboxer.Input
	// Want lists the capabilities the extension must have: a missing one fails,
	// and so does an additional one. Archive comes with exec and need not be
	// listed then.
	Want []sandboxer.Capability
	// Enforces lists what the extension really enforces. A limit that is not in it, and
	// mounts, must be refused with Unsupported before anything exists.
	Enforces []Feature

	// Hosts are the hosts of a sandboxer.Placer for the group place, two at least; without them it is
	// skipped. Spec.Host may name each of them.
	Hosts []string
	// Away makes one of Hosts unreachable, until back is called.
	Away func(t *testing.T, host string) (back func())
	// Bare opens the extension as Open does, as a process whose private directory is
	// empty; nil if it has none.
	Bare func(t *testing.T) sandboxer.Extension

	// MayRefuseEnv says that the extension may refuse a request with variables as Unsupported. Tests that need some
	// skip then.
	MayRefuseEnv bool

	// PauseCuts says that a pause ends the calls that follow a command: they fail as Conflict.
	PauseCuts bool

	// Parallel is how many behaviours of a group run at a time; default one. Each has sandboxes of its own, so that all
	// run concurrently except those that count, use up or stop what the others need.
	Parallel int
	// Settle is how long a listing may lag behind the truth.
	Settle time.Duration
	// Patience is how long the suite waits for an expected event, where nothing else bounds
	// it; default a minute, for a machine with other work.
	Patience time.Duration
	// Kill removes the sandbox behind the extension's back, as an operator or a crash
	// would; nil where that is impossible.
	Kill func(t *testing.T, h sandboxer.Handle)
	// Hang makes the backend of the sandbox stop answering, without loss of data,
	// until resume is called; nil where that is impossible.
	Hang func(t *testing.T, h sandboxer.Handle) (resume func())
	// OutOfMemory has a memory limit kill the sandbox; needed only where Enforces does
	// not list Memory.
	OutOfMemory func(t *testing.T, h sandboxer.Handle)
	// Listen returns a command that runs inside, listens on 127.0.0.1:port, and
	// answers every connection by echoing it, closing when its peer has closed (Echo
	// does that). Without it an extension that can dial fails.
	Listen func(port int) []string

	// Outside starts a TCP server that greets every connection and returns its address,
	// which the mode public reaches; Connect is a command that runs inside and succeeds if
	// the address greets it. Without them the effect of a policy is not tested here.
	Outside func(t *testing.T) netip.AddrPort
	Connect func(to netip.AddrPort) []string
	// Socket is a command that runs inside and succeeds if it could make a socket of an address family. It is needed where Enforces lists Network.
	Socket func(family int) []string

	// MountRoot and ReadOnlyRoot are directories of this machine. The extension's configuration
	// lets every caller mount what MountRoot contains, and mount read-only what ReadOnlyRoot
	// contains. They are needed where Enforces lists Mounts.
	MountRoot, ReadOnlyRoot string

	// Volume is the directory inside, absolute or relative to the workspace, of the one
	// volume that checkpoints of Spec hold; empty where Spec has none.
	Volume string

	Shell        []string // runs the script that follows; default sh -c
	User         string   // a user inside in addition to the default one; default "nobody"
	MissingImage string   // default is a name no backend can have
}

// Feature is something that an extension enforces on a sandbox, as seen from inside.
type Feature string

// The features an extension may enforce.
const (
	CPU      Feature = "cpu"      // Limits.MilliCPU
	Memory   Feature = "memory"   // Limits.MemoryBytes
	Disk     Feature = "disk"     // Limits.DiskBytes
	PIDs     Feature = "pids"     // Limits.PIDs
	GPUs     Feature = "gpus"     // Limits.GPUs; its presence is only provisioned, not used
	Network  Feature = "network"  // network mode none leaves nothing but loopback
	Hostname Feature = "hostname" // the sandbox's host name is its ID
	OwnName  Feature = "own name" // the sandbox's host name leads to itself
	Locale   Feature = "locale"   // text is UTF-8 for programs by default
	Mounts   Feature = "mounts"   // Spec.Mounts shows directories and files of this machine
	Owned    Feature = "owned"    // Spec.User owns the workspace and what is brought into it
)

package fake

import (
	"os"
	"path/filepath"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

type (
	none       struct{}
	faultQuery struct {
		Verb Verb
		ID   string
	}
	// createRequest is what create gets. Env travels apart, because a Spec keeps its own
	// out of JSON.
	createRequest struct {
		Spec     sandboxer.Spec
		Env      map[string]string
		Host     string
		Snapshot string
		From     string // directory with what a checkpoint held
		Capacity int
		Mounts   mounts.Settings
		Own      []string // the broker's own directories
		Late     time.Duration
		Twice    bool
	}
	// query names a sandbox: of any owner if that is empty, and of any generation (the
	// newest, where there must be one) if that is 0. It is looked for on Host, or else on
	// all, and not found for certain only if those of Hosts that count can be reached.
	query struct {
		Owner, ID  string
		Generation int
		Host       string
		Hosts      []string
		Use        bool // make its directory if nobody did so far
	}
	listing struct {
		Owner string
		Lag   time.Duration
	}
	saving struct {
		Of query
		ID string
	}
	dropping struct{ Owner, ID string }
	// newsQuery asks for what happened after the entry After of the log, or for the last entry there is if that
	// is negative.
	newsQuery struct {
		Owner string
		After int
	}
	news struct {
		IDs  []string
		Last int // entry of the log
	}
	pausing struct {
		Of query
		On bool
	}
	rewiring struct {
		Of     query
		Policy sandboxer.NetworkPolicy
	}
	claim struct {
		Of   query
		Spec sandboxer.Spec
		Env  map[string]string
	}
	renewal struct {
		Of    query
		Until time.Time
	}
	spending struct {
		Of  query
		CPU time.Duration
	}
)

// Object is one sandbox as the world knows it.
type Object struct {
	Ref       string            `json:"ref"` // sandboxer.ExternalName, and a suffix for a duplicate
	Spec      sandboxer.Spec    `json:"spec"`
	Env       map[string]string `json:"env,omitempty"`
	Host      string            `json:"host"`
	Dir       string            `json:"dir"` // its root directory; made when first used
	CreatedAt time.Time         `json:"created_at"`
	RemovedAt time.Time         `json:"removed_at,omitzero"`
	Fuse      time.Time         `json:"fuse,omitzero"`
	Paused    bool              `json:"paused,omitempty"`
	Exited    string            `json:"exited,omitempty"` // how the main process ended; empty while it runs
	OOMKilled bool              `json:"oom_killed,omitempty"`
	CPU       time.Duration     `json:"cpu,omitempty"`     // of finished commands
	Claimed   string            `json:"claimed,omitempty"` // by which order; it may have failed midway
	Agent     string            `json:"agent,omitempty"`   // the socket of its agent; empty while none runs
	Mounts    *Namespace        `json:"mounts,omitempty"`  // where what it mounts is seen; nil where it mounts nothing

	used bool
}

// A Namespace is a mount namespace.
type Namespace struct {
	Path  string `json:"path"`  // by which every process of this machine opens it
	Inode uint64 `json:"inode"` // which it has then; else it is another

	file *os.File // by which the world keeps it
}

// key names the object in the world: Ref does on its host.
func (o Object) key() string { return o.Ref + "@" + o.Host }

func (o Object) handle() sandboxer.Handle {
	return sandboxer.Handle{SandboxID: o.Spec.ID, Generation: o.Spec.Generation, Host: o.Host, Ref: o.Ref}
}

// inner is the workspace's path as the sandbox calls it.
func (o Object) inner() string {
	if o.Spec.Workspace != "" {
		return o.Spec.Workspace
	}
	return "/workspace"
}

// workspace is the same on the machine.
func (o Object) workspace() string { return filepath.Join(o.Dir, o.inner()) }

// use makes the directory of o.
func (o *Object) use() error {
	if o.used {
		return nil
	}
	if _, err := os.Stat("/proc/self/environ"); err != nil {
		return sandboxer.E(sandboxer.Unsupported, err, "the fake runs commands on Linux only: it finds its processes in /proc")
	}
	// A command may run as another user: it must be able to pass and to write.
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the fake cannot make a directory")
	}
	for _, dir := range []string{filepath.Dir(o.Dir), o.Dir} {
		if err := os.Chmod(dir, 0o755); err != nil {
			return err
		}
	}
	fresh := false
	if _, err := os.Stat(o.workspace()); err != nil {
		fresh = true
	}
	if err := os.MkdirAll(o.workspace(), 0o755); err != nil {
		return err
	}
	if v := o.Spec.Inputs["volume"]; v != "" {
		if err := os.MkdirAll(filepath.Join(o.Dir, "volumes", v), 0o755); err != nil {
			return err
		}
	}
	o.used = true
	if fresh {
		return os.Chmod(o.workspace(), 0o777)
	}
	return nil
}

// Package latency measures the time to interactive of sandboxes: from just before a create
// is requested until a command in the sandbox has succeeded, as seen by a client.
//
// An iteration is create, probe, command, destroy. The time runs until the command has
// ended; the destroy is timed separately. The probe is a short shell script that leaves a
// marker in the sandbox and fails if it finds one: then the sandbox was used
// before. Nothing is retried: a failure counts as failed.
//
// Iterations follow each other (Sequential), are launched at a steady pace (Staggered),
// or all at once (Burst). Of several targets, sequential iterations take turns, in a new
// order each round; staggered and burst series run one target after the other, because they
// would measure each other.
//
// Two more modes take turns as Sequential does, without the probe. Pause makes a sandbox,
// runs the command once, and pauses it: its time runs from the request to resume until the
// command has ended again. Restore saves one sandbox of each target; its time runs from
// the request for a sandbox of that snapshot until the command has ended in it.
package latency

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/measure"
)

// Broker is what a sandboxer server does for a measurement; *api.Client is one.
type Broker interface {
	Create(ctx context.Context, r api.CreateSandbox) (*api.Sandbox, error)
	Run(ctx context.Context, ref string, e api.Exec) (*api.ExecResult, error)
	Destroy(ctx context.Context, ref string, wait bool) (*api.Sandbox, error)
	List(ctx context.Context, q api.SandboxQuery) (*api.List[api.Sandbox], error)
	Events(ctx context.Context, q api.EventQuery) (*api.List[api.Event], error)

	Pause(ctx context.Context, ref string, p api.PauseSandbox) (*api.Sandbox, error)
	Resume(ctx context.Context, ref string, r api.ResumeSandbox) (*api.Sandbox, error)
	Snapshot(ctx context.Context, ref string, s api.CreateSnapshot) (*api.Snapshot, error)
	Restore(ctx context.Context, ref string, r api.RestoreSnapshot) (*api.Sandbox, error)
	Snapshots(ctx context.Context, q api.SnapshotQuery) (*api.List[api.Snapshot], error)
	DropSnapshot(ctx context.Context, ref string) (*api.Snapshot, error)
}

// Mode is how iterations follow each other.
type Mode string

// The modes.
const (
	Sequential Mode = "sequential" // one after the other, each destroyed before the next
	Staggered  Mode = "staggered"  // a new one every Config.Every, overlapping
	Burst      Mode = "burst"      // all at once
	Pause      Mode = "pause"      // resumed, one after the other
	Restore    Mode = "restore"    // of a snapshot, one after the other
)

// Label is on every sandbox of a run; its value is the run's ID.
const Label = "sandboxer.bench"

// The bounds of a run, and of the steps of an iteration.
const (
	MaxIterations = measure.MaxRounds // of a series that is not a burst
	MaxBurst      = 1000
	MinEvery      = time.Millisecond
	MaxEvery      = time.Minute
	MinTTL        = time.Minute
	MaxTTL        = time.Hour
	DefaultTTL    = 5 * time.Minute // longer than an iteration can take
	DefaultEvery  = 200 * time.Millisecond

	snapshotTTL = time.Hour // of what Restore restores, if the client is killed

	createTimeout  = 120 * time.Second
	commandTimeout = 30 * time.Second
	destroyTimeout = 15 * time.Second
	cleanTimeout   = 2 * time.Minute
)

// Target is one thing to measure.
type Target struct {
	Order api.CreateSandbox // without Key, TTL and Label, which are the run's
	// Shared says that /tmp is not the sandbox's own, because nothing separates it from the
	// machine: the probe then marks the working directory alone.
	Shared bool
}

// Config is what to measure. Counts of 0 leave a mode out.
type Config struct {
	Targets    []Target
	Sequential int
	Staggered  int
	Burst      []int
	Pause      int
	Depth      sandboxer.PauseDepth // of Pause; empty means the profile's
	Restore    int
	Every      time.Duration // between launches of Staggered
	TTL        time.Duration // of every sandbox: what is left of it when the client is killed
	Command    []string      // ends with 0 when the sandbox works
	NoProbe    bool          // leave out the probe, for sandboxes without a shell
	WarmOnly   bool          // a sandbox that was not claimed from the warm pool fails its iteration
}

// Check fills in defaults and refuses what cannot be measured. Kind: Invalid.
func (c *Config) Check() error {
	if c.Nothing() {
		c.Sequential, c.Staggered, c.Burst = 100, 100, []int{100}
	}
	if c.Every == 0 {
		c.Every = DefaultEvery
	}
	if c.TTL == 0 {
		c.TTL = DefaultTTL
	}
	if len(c.Command) == 0 {
		c.Command = []string{"true"}
	}
	if len(c.Targets) == 0 {
		return invalid("there is nothing to measure")
	}
	for _, n := range []int{c.Sequential, c.Staggered, c.Pause, c.Restore} {
		switch {
		case n < 0:
			return invalid("%d iterations cannot be made", n)
		case n > MaxIterations:
			return invalid("%d iterations are too many: percentiles do not get better after %d", n, MaxIterations)
		}
	}
	for _, n := range c.Burst {
		switch {
		case n < 1:
			return invalid("a burst of %d cannot be made", n)
		case n > MaxBurst:
			return invalid("a burst of %d is too much for one client: above about 100 it measures itself, and %d is the most", n, MaxBurst).
				WithHint("start several clients at the same time, each with a part of it")
		}
	}
	if c.Depth != "" && c.Pause == 0 {
		return invalid("the depth %q of a pause is given, but no pause is measured", c.Depth)
	}
	if c.Every < MinEvery || c.Every > MaxEvery {
		return invalid("a launch every %s is out of bounds: want %s to %s", c.Every, MinEvery, MaxEvery)
	}
	if c.TTL < MinTTL || c.TTL > MaxTTL {
		return invalid("a time to live of %s is out of bounds: want %s to %s", c.TTL, MinTTL, MaxTTL).
			WithHint("it must outlast one iteration, and end soon the sandboxes that a killed client leaves")
	}
	return nil
}

// Nothing reports whether no mode has a count.
func (c *Config) Nothing() bool {
	return c.Sequential == 0 && c.Staggered == 0 && len(c.Burst) == 0 && c.Pause == 0 && c.Restore == 0
}

// Sandboxes is how many a run makes.
func (c *Config) Sandboxes() int {
	n := c.Sequential + c.Staggered + c.Pause + c.Restore
	if c.Restore > 0 {
		n++ // the one that is saved
	}
	for _, b := range c.Burst {
		n += b
	}
	return n * len(c.Targets)
}

func invalid(format string, args ...any) *sandboxer.Error {
	return sandboxer.E(sandboxer.Invalid, nil, format, args...)
}

package fake

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Verb names a method of the extension, for faults.
type Verb string

// The verbs. VerbFiles covers all of sandboxer.Filer; VerbAny every method.
const (
	VerbAny           Verb = "*"
	VerbPlace         Verb = "place"
	VerbProvision     Verb = "provision"
	VerbWaitReady     Verb = "wait_ready"
	VerbTeardown      Verb = "teardown"
	VerbExec          Verb = "exec"
	VerbFiles         Verb = "files"
	VerbArchive       Verb = "archive"
	VerbUnarchive     Verb = "unarchive"
	VerbCheckpoint    Verb = "checkpoint"
	VerbProvisionFrom Verb = "provision_from"
	VerbDial          Verb = "dial"
	VerbExpose        Verb = "expose"
	VerbProbe         Verb = "probe"
	VerbDiscover      Verb = "discover"
	VerbList          Verb = "list"
	VerbSnapshot      Verb = "snapshot"
	VerbRestore       Verb = "restore"
	VerbDropSnapshot  Verb = "drop_snapshot"
	VerbListSnapshots Verb = "list_snapshots"
	VerbQuote         Verb = "quote"
	VerbMeter         Verb = "meter"
	VerbPause         Verb = "pause"
	VerbResume        Verb = "resume"
	VerbRenew         Verb = "renew"
	VerbNetwork       Verb = "network"
	VerbBasis         Verb = "basis"
	VerbClaim         Verb = "claim"
	VerbCapacity      Verb = "capacity"
	VerbStats         Verb = "stats"
	VerbNotify        Verb = "notify"
	VerbAgent         Verb = "agent"
)

var verbs = []Verb{VerbAny, VerbPlace, VerbProvision, VerbWaitReady, VerbTeardown, VerbExec, VerbFiles, VerbArchive, VerbUnarchive, VerbCheckpoint, VerbProvisionFrom, VerbDial, VerbExpose,
	VerbProbe, VerbDiscover, VerbList, VerbSnapshot, VerbRestore, VerbDropSnapshot, VerbListSnapshots, VerbQuote, VerbMeter, VerbPause,
	VerbResume, VerbRenew, VerbNetwork, VerbBasis, VerbClaim, VerbCapacity, VerbStats, VerbAgent, VerbNotify}

// A Fault is one thing that goes wrong with calls of a verb. Of several that apply,
// a call meets the first one injected.
type Fault struct {
	Verb Verb   `yaml:"verb" json:"verb"`
	ID   string `yaml:"id" json:"id,omitempty"` // only this sandbox; empty means any
	// Times is how many calls meet the fault, after Skip others passed unharmed; 0
	// means every one.
	Times int `yaml:"times" json:"times,omitempty"`
	Skip  int `yaml:"skip" json:"skip,omitempty"`

	// Delay makes the call slow. Alone it is the verb's latency.
	Delay time.Duration `yaml:"delay" json:"delay,omitempty"`
	// Kind fails the call without doing anything.
	Kind sandboxer.Kind `yaml:"kind" json:"kind,omitempty"`
	// Hang lets the call do nothing until its context ends.
	Hang bool `yaml:"hang" json:"hang,omitempty"`
	// Lost does what was asked, and then fails (with Kind, or Unavailable) or hangs
	// all the same.
	Lost bool `yaml:"lost" json:"lost,omitempty"`
	// Untouched, of provision and restore, with Kind, says that nothing was done.
	Untouched bool `yaml:"untouched" json:"untouched,omitempty"`
	// Late, of provision and restore, fails the call at once (Unavailable); what was
	// asked happens that much later, whoever may still be waiting.
	Late time.Duration `yaml:"late" json:"late,omitempty"`
	// Twice, of provision and restore, makes a second object of the same name; of
	// list, yields everything twice.
	Twice bool `yaml:"twice" json:"twice,omitempty"`
	// Lie answers success and the wrong thing: provision a handle of another sandbox,
	// wait_ready and exec success without looking, teardown, drop_snapshot, pause,
	// resume, renew and network success without doing anything, probe the opposite, discover
	// and list nothing.
	Lie bool `yaml:"lie" json:"lie,omitempty"`
	// OOM, of exec, has the sandbox killed for its use of memory once the command runs.
	OOM bool `yaml:"oom" json:"oom,omitempty"`
	// Silent, of probe, answers that the sandbox is there and does not respond; of every other
	// verb, does nothing, and gives up after a second (Unavailable).
	Silent bool `yaml:"silent" json:"silent,omitempty"`
}

func (f Fault) validate() error {
	if !slices.Contains(verbs, f.Verb) {
		return sandboxer.E(sandboxer.Invalid, nil, "faults: there is no verb %q", f.Verb)
	}
	if f.Kind != "" && !slices.Contains(sandboxer.Kinds(), f.Kind) {
		return sandboxer.E(sandboxer.Invalid, nil, "faults: %s: there is no kind of error %q", f.Verb, f.Kind)
	}
	if f.Times < 0 || f.Skip < 0 || f.Delay < 0 || f.Late < 0 {
		return sandboxer.E(sandboxer.Invalid, nil, "faults: %s: times, skip, delay and late cannot be negative", f.Verb)
	}
	return nil
}

// silence is how long a call waits for an answer that is not going to come.
const silence = time.Second

// around does what was asked as f lets it happen. The zero Fault just does it.
func (f Fault) around(ctx context.Context, verb Verb, do func(Fault) error) error {
	if f.Delay > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(f.Delay):
		}
	}
	if f.Silent && verb != VerbProbe {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(silence):
			return sandboxer.E(sandboxer.Unavailable, nil, "the fake is configured not to answer %s", verb).WithHint("remove the fault")
		}
	}
	if f.Lost || !f.Hang && f.Kind == "" {
		if err := do(f); err != nil || !f.Lost {
			return err
		}
	}
	if f.Hang {
		<-ctx.Done()
		return ctx.Err()
	}
	kind := f.Kind
	if kind == "" {
		kind = sandboxer.Unavailable
	}
	err := sandboxer.E(kind, nil, "the fake is configured to fail %s", verb)
	err.Untouched = f.Untouched && !f.Lost
	return err
}

// faults hands out faults to calls.
type faults struct {
	mu   sync.Mutex
	list []Fault
}

func newFaults(list []Fault) *faults { return &faults{list: slices.Clone(list)} }

func (fs *faults) add(list ...Fault) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.list = append(fs.list, list...)
}

func (fs *faults) clear() {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.list = nil
}

// take returns the fault that a call of verb on sandbox id meets.
func (fs *faults) take(verb Verb, id string) (Fault, bool) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for i := range fs.list {
		f := &fs.list[i]
		if f.Verb != verb && f.Verb != VerbAny || f.ID != "" && f.ID != id {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		taken := *f
		if f.Times > 0 {
			if f.Times--; f.Times == 0 {
				fs.list = slices.Delete(fs.list, i, i+1)
			}
		}
		return taken, true
	}
	return Fault{}, false
}

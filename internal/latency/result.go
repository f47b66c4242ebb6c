package latency

import (
	"cmp"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// Result is one run.
type Result struct {
	SchemaVersion int          `json:"schema_version"`
	ID            string       `json:"id"`
	At            time.Time    `json:"at"`
	Took          api.Duration `json:"took"`
	Client        Machine      `json:"client"`
	Server        string       `json:"server"`          // its version
	Local         bool         `json:"local"`           // client and server share a machine, and its processors
	Command       []string     `json:"command"`         //
	Probe         bool         `json:"probe"`           // with the probe in the times
	TTL           api.Duration `json:"ttl"`             //
	Every         api.Duration `json:"every,omitempty"` // of staggered series
	WarmOnly      bool         `json:"warm_only,omitempty"`
	Series        []Series     `json:"series"`
	Left          []string     `json:"left,omitempty"` // sandboxes that could not be destroyed; they expire
}

// Machine is where the client ran.
type Machine struct {
	Version string `json:"version"` // of sandboxer
	OS      string `json:"os"`
	Arch    string `json:"arch"`
	Cores   int    `json:"cores"`
}

// Series are the iterations of one target in one mode.
type Series struct {
	Profile   string  `json:"profile"`
	Extension string  `json:"extension,omitempty"`
	Mode      Mode    `json:"mode"`
	Count     int     `json:"count"`
	Succeeded int     `json:"succeeded"`
	Success   float64 `json:"success"`          // share, 0 to 1
	Reused    int     `json:"reused,omitempty"` // failed because somebody had used the sandbox before
	Warm      int     `json:"warm"`             // claimed from the warm pool
	Score     float64 `json:"score"`

	TTI     Summary  `json:"tti"`
	TTIWarm *Summary `json:"tti_warm,omitempty"` // where there are both
	TTICold *Summary `json:"tti_cold,omitempty"`
	Spans   Spans    `json:"spans"`

	// From the first launch, where launches overlap. The method calls the wall clock "to the
	// last sandbox ready" and measures it to the last destroyed.
	FirstReady    Millis `json:"first_ready_ms,omitzero"`
	LastReady     Millis `json:"last_ready_ms,omitzero"`
	LastDestroyed Millis `json:"last_destroyed_ms,omitzero"`
	// Ready sandboxes a second until the last was ready, and the same per processor of the
	// client's machine.
	PerSecond float64 `json:"per_second,omitzero"`
	PerCore   float64 `json:"per_second_per_core,omitzero"`

	// Snapshot is what a restore series was restored from.
	Snapshot *Saved `json:"snapshot,omitempty"`

	ClientCPU  *Millis     `json:"client_cpu_ms,omitempty"` // of the measuring process; absent where it cannot be told
	Failures   []Failure   `json:"failures,omitempty"`
	Iterations []Iteration `json:"iterations,omitempty"`
}

// Saved is a snapshot.
type Saved struct {
	Kind   sandboxer.SnapshotKind `json:"kind"`
	Memory bool                   `json:"memory"` // processes too, not only files
	Bytes  int64                  `json:"bytes"`
	Took   Millis                 `json:"took_ms"`
}

// Spans are the parts of the time to interactive. Accept, Provision and Ready make up
// the create: accept is the way to the server and back with its checks before it
// has accepted the request and its answer when it is done; provision lasts until the backend has
// made the sandbox, ready until it takes work. They are by the server's clock alone, and
// left out for sandboxes that were not made for the request, such as warm ones. In a restore
// series, the create is the restore; in a pause series, exec is the command after the
// resume, and only resume and exec are in the time to interactive.
type Spans struct {
	Create    *Summary `json:"create,omitempty"`
	Accept    *Summary `json:"accept,omitempty"`
	Provision *Summary `json:"provision,omitempty"`
	Ready     *Summary `json:"ready,omitempty"`
	Probe     *Summary `json:"probe,omitempty"` // the first exec, if there is a probe
	Pause     *Summary `json:"pause,omitempty"`
	Resume    *Summary `json:"resume,omitempty"`
	Exec      *Summary `json:"exec,omitempty"` // the command
	Destroy   *Summary `json:"destroy,omitempty"`
}

// Failure counts the iterations that failed alike.
type Failure struct {
	Step    string         `json:"step"`
	Kind    sandboxer.Kind `json:"kind"`
	Message string         `json:"message"` // of the first
	Count   int            `json:"count"`
}

// Iteration is one sandbox.
type Iteration struct {
	N       int            `json:"n"`
	Sandbox string         `json:"sandbox,omitempty"`
	OK      bool           `json:"ok"`
	Reused  bool           `json:"reused,omitempty"`
	Warm    bool           `json:"warm,omitempty"`
	Step    string         `json:"step,omitempty"` // that failed: create, probe, exec, pause, resume, snapshot, restore, claim
	Kind    sandboxer.Kind `json:"kind,omitempty"`
	Error   string         `json:"error,omitempty"`

	Launch Millis `json:"launch_ms"` // since the series began
	TTI    Millis `json:"tti_ms,omitzero"`
	Create Millis `json:"create_ms,omitzero"`
	// Split says that the three parts of Create are known.
	Split     bool   `json:"split"`
	Accept    Millis `json:"accept_ms,omitzero"`
	Provision Millis `json:"provision_ms,omitzero"`
	Ready     Millis `json:"ready_ms,omitzero"`
	Probe     Millis `json:"probe_ms,omitzero"`
	Pause     Millis `json:"pause_ms,omitzero"`
	Resume    Millis `json:"resume_ms,omitzero"`
	Exec      Millis `json:"exec_ms,omitzero"`

	Destroy      Millis `json:"destroy_ms,omitzero"`
	DestroyError string `json:"destroy_error,omitempty"` // the last look tries again

	readyAt, goneAt time.Duration // since the series began
}

// fail notes why the iteration failed.
func (it *Iteration) fail(step string, err error) {
	it.OK, it.Step, it.Kind, it.Error = false, step, sandboxer.KindOf(err), sandboxer.Message(err)
}

// split divides the create among its steps by the server's times.
func (it *Iteration) split(sb *api.Sandbox) {
	made := millis(sb.ReadyAt.Sub(sb.CreatedAt))
	if sb.ProvisionedAt.Before(sb.CreatedAt) || sb.ReadyAt.Before(sb.ProvisionedAt) || made > it.Create {
		return // not made for this request
	}
	it.Split = true
	it.Accept = it.Create - made
	it.Provision = millis(sb.ProvisionedAt.Sub(sb.CreatedAt))
	it.Ready = millis(sb.ReadyAt.Sub(sb.ProvisionedAt))
}

// close computes the figures of a series from its iterations.
func (s *Series) close(cores int) {
	pick := func(want func(Iteration) bool, value func(Iteration) Millis) *Summary {
		var out []Millis
		for _, it := range s.Iterations {
			if it.OK && want(it) {
				out = append(out, value(it))
			}
		}
		if len(out) == 0 {
			return nil
		}
		sum := Summarize(out)
		return &sum
	}
	any := func(Iteration) bool { return true }
	split := func(it Iteration) bool { return it.Split }
	probed := func(it Iteration) bool { return it.Probe > 0 }
	paused := func(it Iteration) bool { return it.Pause > 0 }
	destroyed := func(it Iteration) bool { return it.DestroyError == "" }
	tti := func(it Iteration) Millis { return it.TTI }

	s.Count, s.Succeeded, s.Reused, s.Warm, s.Failures = len(s.Iterations), 0, 0, 0, nil
	for _, it := range s.Iterations {
		if it.Warm {
			s.Warm++
		}
		if it.Reused {
			s.Reused++
		}
		if it.OK {
			s.Succeeded++
			continue
		}
		alike := func(f Failure) bool { return f.Step == it.Step && f.Kind == it.Kind }
		if i := slices.IndexFunc(s.Failures, alike); i >= 0 {
			s.Failures[i].Count++
		} else {
			s.Failures = append(s.Failures, Failure{it.Step, it.Kind, it.Error, 1})
		}
	}
	slices.SortStableFunc(s.Failures, func(a, b Failure) int { return cmp.Compare(b.Count, a.Count) })
	if s.Count > 0 {
		s.Success = float64(s.Succeeded) / float64(s.Count)
	}
	s.TTI = Summary{}
	if sum := pick(any, tti); sum != nil {
		s.TTI = *sum
	}
	s.Score = Score(s.Success, s.TTI.Trimmed)
	s.TTIWarm, s.TTICold = nil, nil
	warm := pick(func(it Iteration) bool { return it.Warm }, tti)
	cold := pick(func(it Iteration) bool { return !it.Warm }, tti)
	if warm != nil && cold != nil {
		s.TTIWarm, s.TTICold = warm, cold
	}
	s.Spans = Spans{
		Create:    pick(any, func(it Iteration) Millis { return it.Create }),
		Accept:    pick(split, func(it Iteration) Millis { return it.Accept }),
		Provision: pick(split, func(it Iteration) Millis { return it.Provision }),
		Ready:     pick(split, func(it Iteration) Millis { return it.Ready }),
		Probe:     pick(probed, func(it Iteration) Millis { return it.Probe }),
		Pause:     pick(paused, func(it Iteration) Millis { return it.Pause }),
		Resume:    pick(paused, func(it Iteration) Millis { return it.Resume }),
		Exec:      pick(any, func(it Iteration) Millis { return it.Exec }),
		Destroy:   pick(destroyed, func(it Iteration) Millis { return it.Destroy }),
	}
	s.FirstReady, s.LastReady, s.LastDestroyed, s.PerSecond, s.PerCore = 0, 0, 0, 0, 0
	if s.Mode != Staggered && s.Mode != Burst {
		return
	}
	for _, it := range s.Iterations {
		s.LastDestroyed = max(s.LastDestroyed, millis(it.goneAt))
		if !it.OK {
			continue
		}
		at := millis(it.readyAt)
		if s.FirstReady == 0 || at < s.FirstReady {
			s.FirstReady = at
		}
		s.LastReady = max(s.LastReady, at)
	}
	if s.LastReady > 0 {
		s.PerSecond = float64(s.Succeeded) * 1000 / float64(s.LastReady)
		s.PerCore = s.PerSecond / float64(max(cores, 1))
	}
}

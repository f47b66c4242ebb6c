package sinks

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A Status is a sink and how far it is.
type Status struct {
	sandboxer.Sink // URL and File are empty if no file declares it any more
	sandboxer.SinkState
}

// ID returns the name of the sink.
func (s Status) ID() string { return s.SinkState.Name }

// Declared reports whether sinks.yaml has the sink.
func (s Status) Declared() bool { return s.Sink.Name != "" }

// List returns all sinks, declared or only known, by name.
func (s *Sinks) List(ctx context.Context) ([]Status, error) {
	states, err := s.store.SinkStates(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	declared := slices.Clone(s.sinks)
	s.mu.Unlock()
	var all []Status
	for _, st := range states {
		status := Status{SinkState: st}
		if i := slices.IndexFunc(declared, func(d sandboxer.Sink) bool { return d.Name == st.Name }); i >= 0 {
			status.Sink = declared[i]
			declared = slices.Delete(declared, i, i+1)
		}
		all = append(all, status)
	}
	for _, d := range declared {
		all = append(all, Status{Sink: d, SinkState: sandboxer.SinkState{Name: d.Name}})
	}
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.ID(), b.ID()) })
	return all, nil
}

// Get returns one sink. Kind: NotFound.
func (s *Sinks) Get(ctx context.Context, name string) (Status, error) {
	all, err := s.List(ctx)
	for _, st := range all {
		if st.ID() == name {
			return st, nil
		}
	}
	if err == nil {
		err = sandboxer.E(sandboxer.NotFound, nil, "there is no sink %.64q", name).WithHint("see all with: sandboxer credits sink ls")
	}
	return Status{}, err
}

// Replay delivers rows to a sink once more: its dead letters, or, with since, all rows that are kept from then on. A
// sink that wanted no more gets rows again. Kind: NotFound.
func (s *Sinks) Replay(ctx context.Context, name string, since time.Time) (Status, error) {
	return s.change(ctx, name, func(st Status) (sandboxer.SinkChange, error) {
		c := sandboxer.SinkChange{Name: name, From: st.Seq, To: st.Seq, Again: since.IsZero()}
		if !st.Declared() {
			return c, sandboxer.E(sandboxer.Invalid, nil, "sink %s is not in sinks.yaml: nothing is delivered to it", name).
				WithHint("add it to the file and reload, or forget it: sandboxer credits sink drop %s", name)
		}
		if !since.IsZero() {
			rows, err := s.store.UsageRows(ctx, sandboxer.UsageQuery{Since: since, Limit: 1})
			if err != nil {
				return c, err
			}
			for _, r := range rows {
				c.To = min(c.To, r.Seq-1)
			}
		}
		return c, nil
	})
}

// Drop gives up dead letters of a sink: those of the rows seqs, or all. A sink that no file declares is forgotten.
// Kind: NotFound.
func (s *Sinks) Drop(ctx context.Context, name string, seqs []int64) (Status, error) {
	return s.change(ctx, name, func(st Status) (sandboxer.SinkChange, error) {
		c := sandboxer.SinkChange{Name: name, From: st.Seq, To: st.Seq, Problem: st.Problem, At: st.Since, Stopped: st.Stopped, Forget: !st.Declared()}
		dead, err := s.store.DeadLetters(ctx, sandboxer.DeadLetterQuery{Sink: name, Limit: sandboxer.MaxPage})
		if err != nil {
			return c, err
		}
		for _, d := range dead {
			if len(seqs) == 0 || slices.Contains(seqs, d.Seq) {
				c.Gone = append(c.Gone, d.Seq)
			}
		}
		if len(c.Gone) < len(seqs) {
			return c, sandboxer.E(sandboxer.NotFound, nil, "sink %s does not have all of these dead letters; nothing was dropped", name).
				WithHint("see them with: sandboxer credits sink show %s", name)
		}
		return c, nil
	})
}

// change makes a change of the sink as it is, and asks for a try now.
func (s *Sinks) change(ctx context.Context, name string, of func(Status) (sandboxer.SinkChange, error)) (Status, error) {
	for tries := 0; ; tries++ {
		st, err := s.Get(ctx, name)
		if err != nil {
			return st, err
		}
		c, err := of(st)
		if err == nil {
			err = s.store.Write(ctx, sandboxer.Writes{Sink: &c})
		}
		if errors.Is(err, sandboxer.Conflict) && tries < 100 { // it delivers at the same time
			continue
		}
		if err != nil {
			return st, err
		}
		s.mu.Lock()
		if w := s.workers[name]; w != nil {
			signal(w.asked)
		}
		s.mu.Unlock()
		if c.Forget {
			return Status{SinkState: sandboxer.SinkState{Name: name}}, nil
		}
		return s.Get(ctx, name)
	}
}

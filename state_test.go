package sandboxer

import (
	"slices"
	"testing"
)

// TestTransitionTable holds the table to the diagram above State, written out here a
// second time by hand.
func TestTransitionTable(t *testing.T) {
	want := map[State][]State{
		Creating:    {Warm, Running, Pausing, Terminating},
		Warm:        {Creating, Terminating},
		Running:     {Pausing, Terminating},
		Pausing:     {Paused, Terminating},
		Paused:      {Creating, Terminating},
		Terminating: {Terminated},
	}
	for _, from := range States() {
		for _, to := range States() {
			if got, want := from.CanBecome(to), slices.Contains(want[from], to); got != want {
				t.Errorf("%s.CanBecome(%s) = %v, want %v", from, to, got, want)
			}
		}
	}
	for _, s := range []State{"", "failed", "RUNNING"} {
		if s.Valid() {
			t.Errorf("%q is a valid state", s)
		}
		if s.CanBecome(Terminating) || Running.CanBecome(s) {
			t.Errorf("the unknown state %q takes part in a transition", s)
		}
	}
}

func TestTransitionTableIsComplete(t *testing.T) {
	if len(transitions) != len(States()) {
		t.Errorf("the table has %d states, States lists %d", len(transitions), len(States()))
	}
	for from, next := range transitions {
		if !from.Valid() || !slices.Contains(States(), from) {
			t.Errorf("States does not list %q", from)
		}
		for _, to := range next {
			if _, ok := transitions[to]; !ok {
				t.Errorf("%s may become %q, which is not a state", from, to)
			}
			if from == to {
				t.Errorf("%s may become itself", from)
			}
		}
	}
}

// TestEveryStateEnds: wherever a sandbox is, it can be brought to its end, and in two
// moves at most, because destroy is accepted in every state.
func TestEveryStateEnds(t *testing.T) {
	for _, s := range States() {
		switch {
		case s == Terminated:
			if len(transitions[s]) != 0 {
				t.Errorf("%s may become %v", s, transitions[s])
			}
			if s.Live() {
				t.Errorf("%s is live", s)
			}
			continue
		case s != Terminating && !s.CanBecome(Terminating):
			t.Errorf("%s cannot be destroyed", s)
		}
		if !s.Live() {
			t.Errorf("%s is not live, though something may exist outside", s)
		}
	}
	if !Terminating.CanBecome(Terminated) {
		t.Error("terminating never ends")
	}
}

// TestEveryStateIsReached: no state is only on paper.
func TestEveryStateIsReached(t *testing.T) {
	seen := map[State]bool{Creating: true}
	for todo := []State{Creating}; len(todo) > 0; todo = todo[1:] {
		for _, to := range transitions[todo[0]] {
			if !seen[to] {
				seen[to] = true
				todo = append(todo, to)
			}
		}
	}
	for _, s := range States() {
		if !seen[s] {
			t.Errorf("no life that begins with %s reaches %s", Creating, s)
		}
	}
}

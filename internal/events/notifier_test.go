package events

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// received reports whether something waits in ch, and takes it.
func received(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// A subscriber gets changes of its own sandbox, one of "" those of all, and no subscriber blocks Notify.
func TestNotifier(t *testing.T) {
	n := newNotifier()
	box, endBox := n.Subscribe("box")
	other, endOther := n.Subscribe("other")
	all, endAll := n.Subscribe("")
	for _, c := range []struct {
		id              string
		box, other, all bool
	}{
		{"box", true, false, true},
		{"other", false, true, true},
		{"nobody's", false, false, true},
		{"", false, false, true}, // what belongs to no sandbox
	} {
		n.Notify(c.id)
		n.Notify(c.id) // not taken yet: heard once
		if b, o, a := received(box), received(other), received(all); b != c.box || o != c.other || a != c.all {
			t.Errorf("%q: heard by box %t, other %t, all %t", c.id, b, o, a)
		}
		if received(box) || received(other) || received(all) {
			t.Errorf("%q: heard twice", c.id)
		}
	}
	endBox()
	n.Notify("box")
	if received(box) || !received(all) {
		t.Error("who left hears, or who stays does not")
	}
	for _, end := range []func(){endBox, endOther, endAll} {
		end()
	}
	if len(n.subscribers) != 0 {
		t.Errorf("left: %v", n.subscribers)
	}
}

// Progress is sent when its step changes, at its end, and otherwise now and then; late progress
// is dropped, and nothing is kept.
func TestProgressIsThrottled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNotifier()
		heard, end := n.Subscribe("box")
		defer end()
		report, done := n.TrackProgress(sandboxer.Event{SandboxID: "box", Type: sandboxer.EventProgress})
		if n.LatestProgress("box") != nil {
			t.Error("there is progress before any was reported")
		}
		for i, c := range []struct {
			step        string
			done, total int64
			after       time.Duration
			told        bool
		}{
			{"pull", 0, 10, 0, true},
			{"pull", 1, 10, 0, false},
			{"pull", 2, 10, progressEvery, true},
			{"pull", 3, 10, progressEvery - 1, false},
			{"pull", 10, 10, 0, true},
			{"start", 0, 10, 0, true},
		} {
			time.Sleep(c.after)
			report(sandboxer.Progress{Step: c.step, Done: c.done, Total: c.total})
			if received(heard) != c.told {
				t.Errorf("report %d: told %t; want %t", i, !c.told, c.told)
			}
			if ev := n.LatestProgress("box"); c.told && (ev.Message != c.step || ev.Progress.Done != c.done || ev.At.IsZero() || ev.Type != sandboxer.EventProgress) {
				t.Errorf("report %d is %+v", i, ev)
			}
		}
		done()
		report(sandboxer.Progress{Step: "late"})
		if received(heard) || n.LatestProgress("box") != nil || len(n.progress) != 0 {
			t.Error("what was reported after the end is told, or kept")
		}
	})
}

// Everything at once, for the race detector.
func TestNotifierIsConcurrent(t *testing.T) {
	n := newNotifier()
	report, done := n.TrackProgress(sandboxer.Event{SandboxID: "box"})
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for i := range int64(100) {
				heard, end := n.Subscribe("box")
				report(sandboxer.Progress{Step: "pull", Done: i, Total: i})
				n.Notify("box")
				<-heard
				n.LatestProgress("box")
				end()
			}
		})
	}
	all.Wait()
	done()
	if len(n.subscribers)+len(n.progress) != 0 {
		t.Errorf("left: %v, %v", n.subscribers, n.progress)
	}
}

package events

import (
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// progressEvery is how often subscribers get progress.
const progressEvery = 200 * time.Millisecond

// A notifier wakes the callers that wait for changes of a sandbox. It also keeps the latest progress of each creation, which is
// sent to subscribers and never stored.
//
// mu guards both maps. Nothing blocks while it is held: a channel that is full already reports a change. Neither the store nor
// code of a subscriber is called while it is held.
type notifier struct {
	mu          sync.Mutex
	subscribers map[string]map[chan struct{}]struct{} // by sandbox ID; "" hears of every sandbox
	progress    map[string]*sandboxer.Event           // by sandbox ID; an event never changes
}

func newNotifier() *notifier {
	return &notifier{subscribers: map[string]map[chan struct{}]struct{}{}, progress: map[string]*sandboxer.Event{}}
}

// Subscribe returns a channel that receives a value after every change of the sandbox, or of any sandbox if id is "", and a
// function that ends it. Changes in quick succession may be received as one.
func (n *notifier) Subscribe(id string) (changed <-chan struct{}, unsubscribe func()) {
	ch := make(chan struct{}, 1)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.subscribers[id] == nil {
		n.subscribers[id] = map[chan struct{}]struct{}{}
	}
	n.subscribers[id][ch] = struct{}{}
	return ch, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.subscribers[id], ch)
		if len(n.subscribers[id]) == 0 {
			delete(n.subscribers, id)
		}
	}
}

// Notify wakes the subscribers of the sandbox, and those of all.
func (n *notifier) Notify(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.wake("")
	if id != "" {
		n.wake(id)
	}
}

// wake must be called with mu held.
func (n *notifier) wake(id string) {
	for ch := range n.subscribers[id] {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// TrackProgress returns two functions for the creation of a sandbox: one that takes its progress and sends it to the
// subscribers of the sandbox at most every progressEvery, and one that ends that. blank is the event to send, without time,
// message and progress.
func (n *notifier) TrackProgress(blank sandboxer.Event) (report func(sandboxer.Progress), done func()) {
	id := blank.SandboxID
	var last time.Time // guarded by mu, as is ended
	var ended bool
	report = func(p sandboxer.Progress) {
		n.mu.Lock()
		defer n.mu.Unlock()
		old := n.progress[id]
		repeated := old != nil && old.Progress.Step == p.Step && p.Done != p.Total
		if ended || repeated && time.Since(last) < progressEvery {
			return
		}
		last = time.Now()
		ev := blank
		ev.At, ev.Message, ev.Progress = time.Now().UTC().Truncate(time.Microsecond), p.Step, &p
		n.progress[id] = &ev
		n.wake(id)
	}
	return report, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		ended = true
		delete(n.progress, id)
	}
}

// LatestProgress is the latest progress of the sandbox's creation; nil if there is none.
func (n *notifier) LatestProgress(id string) *sandboxer.Event {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.progress[id]
}

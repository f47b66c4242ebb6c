package manager

import (
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// progressEvery is how often subscribers hear of progress.
const progressEvery = 200 * time.Millisecond

// A notifier wakes those who wait for changes of a sandbox. It also keeps the latest progress
// of each creation, which is told to subscribers and never stored.
//
// mu guards both maps. Nothing blocks under it: a channel that is full already says that there
// is a change. Neither the store nor code of a subscriber is called under it.
type notifier struct {
	mu          sync.Mutex
	subscribers map[string]map[chan struct{}]struct{} // by sandbox ID; "" hears of every sandbox
	progress    map[string]*sandboxer.Event           // by sandbox ID; an event never changes
}

func newNotifier() *notifier {
	return &notifier{subscribers: map[string]map[chan struct{}]struct{}{}, progress: map[string]*sandboxer.Event{}}
}

// subscribe returns a channel that receives after every change of the sandbox, or of any
// if id is "", and the function that ends it. Changes in quick succession may be received as
// one.
func (n *notifier) subscribe(id string) (changed <-chan struct{}, unsubscribe func()) {
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

// notify wakes the subscribers of the sandbox, and those of all.
func (n *notifier) notify(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.wake("")
	if id != "" {
		n.wake(id)
	}
}

// wake needs mu.
func (n *notifier) wake(id string) {
	for ch := range n.subscribers[id] {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// trackProgress returns what takes the progress of one creation and tells it to the
// subscribers of its sandbox, not more often than they need, and the function that ends
// that. blank is the event that is told, without time, message and progress.
func (n *notifier) trackProgress(blank sandboxer.Event) (report func(sandboxer.Progress), done func()) {
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
		ev.At, ev.Message, ev.Progress = now(), p.Step, &p
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

// latestProgress is the latest progress of the sandbox's creation; nil if there is none.
func (n *notifier) latestProgress(id string) *sandboxer.Event {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.progress[id]
}

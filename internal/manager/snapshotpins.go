package manager

import (
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// snapshotPins has the snapshots that this process reads or restores from, so that none of them is dropped meanwhile, and those
// that it saves or drops, which needs exclusive use. Uses that must outlive the process are in the records: see restoringFrom.
//
// mu guards the counts. Nothing else happens while it is held: a caller first pins a snapshot, and then checks whether it
// exists and is sealed.
type snapshotPins struct {
	mu    sync.Mutex
	users map[string]int // by snapshot ID: how many read it; claimed while one saves or drops it
}

// claimed in snapshotPins.users is set while a caller saves or drops the snapshot.
const claimed = -1

func newSnapshotPins() *snapshotPins { return &snapshotPins{users: map[string]int{}} }

func errClaimed(id string) error {
	return sandboxer.E(sandboxer.Conflict, nil, "snapshot %s is being saved or dropped", id).WithHint("try again when that has ended")
}

// claim reserves a snapshot for one caller that saves or drops it. Conflict: it is in use, or another caller saves or drops
// it.
func (p *snapshotPins) claim(id string) (release func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch p.users[id] {
	case 0:
	case claimed:
		return nil, errClaimed(id)
	default:
		return nil, sandboxer.E(sandboxer.Conflict, nil, "snapshot %s is in use", id).
			WithHint("try again when the sandbox that is restored from it runs")
	}
	p.users[id] = claimed
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.users, id)
	}), nil
}

// pin keeps a snapshot from being saved or dropped until unpin; others may do the same
// at the same time. Conflict: it is being saved or dropped.
func (p *snapshotPins) pin(id string) (unpin func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users[id] == claimed {
		return nil, errClaimed(id)
	}
	p.users[id]++
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.users[id]--; p.users[id] == 0 {
			delete(p.users, id)
		}
	}), nil
}

// inUse reports whether a snapshot is claimed or pinned.
func (p *snapshotPins) inUse(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.users[id] != 0
}

package fake

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// Op is what an Entry of the log tells of.
type Op string

// The entries of the log.
const (
	OpStart    Op = "start"    // the world began (its log may be older)
	OpCreate   Op = "create"   // an object came to be
	OpLate     Op = "late"     // the same, by a Late fault
	OpFound    Op = "found"    // a request met what it had made before
	OpRemove   Op = "remove"   // an object was removed by teardown
	OpKill     Op = "kill"     // … by World.Kill
	OpFuse     Op = "fuse"     // … by its fuse
	OpOOMKill  Op = "oom_kill" // its processes were killed, as a memory limit does
	OpClose    Op = "close"    // … by the end of the world
	OpAbsent   Op = "absent"   // a teardown found nothing
	OpList     Op = "list"     // somebody listed an owner's objects
	OpSnapshot Op = "snapshot" // a snapshot was saved
	OpDrop     Op = "drop"     // … and removed
	OpPause    Op = "pause"
	OpResume   Op = "resume"
	OpRenew    Op = "renew"
	OpNetwork  Op = "network"
	OpClaim    Op = "claim" // a warm object was given to its owner
	OpFault    Op = "fault" // a call met a fault
)

// Entry is one line of the world's log.
type Entry struct {
	Seq        int       `json:"seq"`
	At         time.Time `json:"at"`
	Op         Op        `json:"op"`
	Owner      string    `json:"owner,omitempty"`
	SandboxID  string    `json:"sandbox_id,omitempty"`
	Generation int       `json:"generation,omitempty"`
	Ref        string    `json:"ref,omitempty"`
	Host       string    `json:"host,omitempty"`
	// Live is how many objects of that owner, ID and generation there are once it
	// happened; for OpList how many were listed.
	Live int    `json:"live"`
	Note string `json:"note,omitempty"` // the verb of a fault, the ID of a snapshot
}

// Log returns everything that happened so far.
func (w *World) Log() []Entry {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.log)
}

func (w *World) entry(o *Object, op Op) Entry {
	return Entry{
		Op: op, Owner: o.Spec.Owner, SandboxID: o.Spec.ID, Generation: o.Spec.Generation, Ref: o.Ref, Host: o.Host,
		Live: len(w.matching(query{Owner: o.Spec.Owner, ID: o.Spec.ID, Generation: o.Spec.Generation})),
	}
}

// note appends e to the log; with a file it returns once the line is on the disk.
func (w *World) note(e Entry) error {
	e.Seq, e.At = len(w.log)+1, time.Now()
	w.log = append(w.log, e)
	close(w.logged)
	w.logged = make(chan struct{})
	if w.file == nil {
		return nil
	}
	line, err := json.Marshal(e)
	if err == nil {
		_, err = w.file.Write(append(line, '\n'))
	}
	if err == nil {
		err = w.file.Sync()
	}
	return err
}

// Audit reads a log as the judge of a broker and returns what the broker did wrong:
// two objects of one generation at one time, a generation made again on a host after its
// teardown there, and (if it is over) objects and snapshots that were left.
func Audit(log []Entry, over bool) (faults []string) {
	type generation struct {
		owner, id  string
		generation int
	}
	type place struct {
		generation
		host string
	}
	live, ended := map[generation]int{}, map[place]bool{}
	snapshots := map[string]bool{}
	for _, e := range log {
		k := generation{e.Owner, e.SandboxID, e.Generation}
		switch e.Op {
		case OpStart:
			clear(live) // a world does not survive its process
			clear(snapshots)
		case OpSnapshot:
			snapshots[e.Note] = true
		case OpDrop:
			delete(snapshots, e.Note)
		case OpCreate, OpLate:
			if live[k]++; live[k] > 1 {
				faults = append(faults, fmt.Sprintf("line %d: %d objects of %s/%d at one time", e.Seq, live[k], e.SandboxID, e.Generation))
			}
			if ended[place{k, e.Host}] && e.Op == OpCreate {
				faults = append(faults, fmt.Sprintf("line %d: %s/%d was made again after its teardown", e.Seq, e.SandboxID, e.Generation))
			}
		case OpRemove, OpKill, OpFuse, OpClose:
			live[k]--
			ended[place{k, e.Host}] = e.Op == OpRemove
		}
	}
	if over {
		for id := range snapshots {
			faults = append(faults, fmt.Sprintf("the snapshot %s remains", id))
		}
		for k, n := range live {
			if n > 0 {
				faults = append(faults, fmt.Sprintf("%d objects of %s/%d remain", n, k.id, k.generation))
			}
		}
	}
	slices.Sort(faults)
	return faults
}

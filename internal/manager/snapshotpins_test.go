package manager

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// Many may read a snapshot; one saves or drops it, alone; ends count once.
func TestSnapshotPins(t *testing.T) {
	p := newSnapshotPins()
	unpin1, err1 := p.pin("snap-a")
	unpin2, err2 := p.pin("snap-a")
	if err1 != nil || err2 != nil || !p.inUse("snap-a") || p.inUse("snap-b") {
		t.Fatalf("%v, %v; in use: %t, %t", err1, err2, p.inUse("snap-a"), p.inUse("snap-b"))
	}
	_, err := p.claim("snap-a")
	wantErr(t, err, sandboxer.Conflict, "snapshot snap-a is in use")
	unpin1()
	unpin1() // once counts
	_, err = p.claim("snap-a")
	wantErr(t, err, sandboxer.Conflict, "is in use")
	unpin2()
	release, err := p.claim("snap-a")
	if err != nil || !p.inUse("snap-a") {
		t.Fatalf("claim after the last: %v", err)
	}
	_, err = p.pin("snap-a")
	wantErr(t, err, sandboxer.Conflict, "is being saved or dropped")
	_, err = p.claim("snap-a")
	wantErr(t, err, sandboxer.Conflict, "is being saved or dropped")
	if unpin, err := p.pin("snap-b"); err != nil { // another one is another's
		t.Error(err)
	} else {
		unpin()
	}
	release()
	unpin3, err := p.pin("snap-a")
	if err != nil {
		t.Fatal(err)
	}
	release() // once counts: it does not end what came after it
	if !p.inUse("snap-a") {
		t.Error("a second release ended another's pin")
	}
	unpin3()
	if len(p.users) != 0 {
		t.Errorf("left: %v", p.users)
	}
}

// No claim overlaps with a pin or another claim.
func TestSnapshotPinsAreConcurrent(t *testing.T) {
	p := newSnapshotPins()
	var readers, writers atomic.Int64
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for range 500 {
				if i%2 == 0 {
					if release, err := p.claim("snap-a"); err == nil {
						if writers.Add(1) != 1 || readers.Load() != 0 {
							t.Error("a claim is not alone")
						}
						writers.Add(-1)
						release()
					}
					continue
				}
				if unpin, err := p.pin("snap-a"); err == nil {
					readers.Add(1)
					if writers.Load() != 0 {
						t.Error("a pin beside a claim")
					}
					readers.Add(-1)
					unpin()
				}
			}
		})
	}
	all.Wait()
	if len(p.users) != 0 {
		t.Errorf("left: %v", p.users)
	}
}

//go:build linux

package local

import (
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func TestRoomIsMemory(t *testing.T) {
	free := int64(1000 << 20)
	used := map[string]int64{}
	m := &memory{available: func() int64 { return free }, used: func(n string) int64 { return used[n] }, reserve: 100 << 20, coming: map[string]coming{}}
	if got := m.room() >> 20; got != 900 {
		t.Errorf("room for %d MiB", got)
	}
	// Two that start at the same time are both counted before they use any memory.
	for i, want := range []bool{true, true, false} {
		if err := m.admit(fmt.Sprint(i), 400<<20); (err == nil) != want || err != nil && sandboxer.KindOf(err) != sandboxer.Exhausted {
			t.Errorf("sandbox %d of 400 MiB in 900: %v", i, err)
		}
	}
	// Memory that they use is missing from the available memory, and is not counted
	// twice.
	free, used["0"], used["1"] = 300<<20, 400<<20, 300<<20
	if got := m.room() >> 20; got != 100 {
		t.Errorf("room for %d MiB", got)
	}
	m.forget("1")
	if got := m.room() >> 20; got != 200 {
		t.Errorf("room for %d MiB after one did not come", got)
	}
	m.coming["late"] = coming{1 << 40, time.Now().Add(-time.Second)}
	if got := m.room() >> 20; got != 200 {
		t.Errorf("room for %d MiB beside one that came long ago", got)
	}
	if got := m.size([]string{"0", "1", "unknown"}) >> 20; got != 350 {
		t.Errorf("a sandbox is counted with %d MiB", got)
	}
	if got := m.size(nil); got != leastMemory {
		t.Errorf("the first sandbox is counted with %d bytes", got)
	}
	free = -1
	if m.room() != -1 || m.admit("x", 1<<50) != nil {
		t.Error("what cannot be told refuses sandboxes")
	}
}

// TestAdmittedByMemory makes and restores sandboxes on a machine that reports no free
// memory.
func TestAdmittedByMemory(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	o, err := e.Capacity(t.Context(), "")
	if err != nil || o.Free < 1 {
		t.Fatalf("%+v %v", o, err)
	}
	// 300 MiB of memory that is not all zeros.
	sh(t, e, h, "(head -c 300000000 /dev/urandom | tail -c 300000000 | (dd bs=1 count=1; touch /tmp/full; sleep 1000)) >/dev/null 2>&1 & until [ -e /tmp/full ]; do sleep 0.1; done")
	after, err := e.Capacity(t.Context(), "")
	if err != nil || after.Free >= o.Free/4 {
		t.Errorf("room for %d sandboxes of 300 MB, and for %d idle ones: %v", after.Free, o.Free, err)
	}
	s, err := e.Snapshot(t.Context(), h, sandboxer.NewID())
	if err != nil {
		t.Fatal(err)
	}
	defer e.DropSnapshot(t.Context(), s)
	available := e.memory.available
	defer func() { e.memory.available = available }()
	e.memory.available = func() int64 { return e.memory.reserve + 200<<20 }
	e.memory.forget(h.Ref)
	spec := sandboxer.Spec{ID: sandboxer.NewID(), Generation: 1, Owner: e.env.Owner}
	if _, err := e.RestoreFromSnapshot(t.Context(), spec, s); sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("restoring 300 MB where there are 200: %v", err)
	}
	if names, err := e.names(); err != nil || slices.Contains(names, boxName(spec.ID, 1)) {
		t.Errorf("left: %v %v", names, err)
	}
	up(t, e, sandboxer.Spec{}) // a small one fits
	e.memory.available = func() int64 { return e.memory.reserve + leastMemory/2 }
	if _, err := e.Provision(t.Context(), spec); sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("creating where there is no memory: %v", err)
	}
}

// TestManyConnectionsToTheAgentAtOnce opens more connections than one batch has; each
// must work.
func TestManyConnectionsToTheAgentAtOnce(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	b, err := e.hold(h.Ref)
	if err != nil {
		t.Fatal(err)
	}
	const n = 2*32 + 8 // more than two of the largest batches and the first
	conns := make([]net.Conn, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			c, err := b.donations.Dial(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			conns[i] = c
		})
	}
	wg.Wait()
	seen := map[net.Conn]bool{}
	for _, c := range conns {
		if c == nil || seen[c] {
			t.Fatal("a connection was given away twice")
		}
		seen[c] = true
		c.SetDeadline(time.Now().Add(time.Minute))
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		if _, err := c.Read(make([]byte, 8)); err != nil {
			t.Error(err)
		}
		c.Close()
	}
	// More exist before they are needed.
	c, err := b.donations.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		spare, least := b.donations.Waiting()
		if spare >= least {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d connections wait to be used", spare)
		}
	}
}

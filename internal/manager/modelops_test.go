package manager

import (
	"fmt"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/sand-boxer/sandboxer"
)

// doClaim creates a sandbox that may come from a pool.
func (m *model) doClaim(t *rapid.T) {
	if m.hasEnough(t) {
		t.Skip("there are enough")
	}
	m.settle()
	req := sandboxer.CreateRequest{Profile: "pooled", TTL: time.Minute}
	if rapid.Bool().Draw(t, "keyed") {
		req.Key = rapid.SampledFrom([]string{"red", "blue"}).Draw(t, "key")
	}
	open := m.learnKey(t, req.Key)
	sb, err := m.Create(acme, req)
	if m.died(t, "") {
		return
	}
	if open {
		m.learn(t, "")
		return
	}
	switch was, known := m.keys[req.Key]; {
	case err != nil && (m.faulty || isKind(err, sandboxer.NoCredit)):
	case err != nil, known && fmt.Sprint(sb.ID, "/", sb.Generation) != was:
		t.Fatalf("key %q gave %v, %v; before it gave %s", req.Key, sb, err, was)
	case !known:
		m.have(sb)
		if req.Key != "" {
			m.keys[req.Key] = fmt.Sprint(sb.ID, "/", sb.Generation)
		}
	}
}

// hasEnough reports whether enough sandboxes live whose IDs the broker chose. It forgets those that have ended.
func (m *model) hasEnough(t *rapid.T) bool {
	m.made = slices.DeleteFunc(m.made, func(id string) bool {
		sb, err := m.store.Sandbox(admin, id)
		if err != nil {
			t.Fatal(err)
		}
		return sb.State == sandboxer.Terminated
	})
	return len(m.made) >= 3
}

// have takes over a sandbox whose ID the broker chose.
func (m *model) have(sb *sandboxer.Sandbox) {
	m.made = append(m.made, sb.ID)
	m.believe(sb)
}

func (m *model) doRestore(t *rapid.T) {
	if len(m.saved) == 0 {
		m.doSnapshot(t)
		return
	}
	if m.hasEnough(t) {
		t.Skip("there are enough")
	}
	m.settle()
	kind := rapid.SampledFrom([]sandboxer.SnapshotKind{"", sandboxer.SnapshotPortable}).Draw(t, "kind")
	sb, err := m.Restore(acme, rapid.SampledFrom(m.saved).Draw(t, "snapshot"), RestoreRequest{Kind: kind, TTL: time.Minute})
	switch {
	case m.died(t, ""):
	case err == nil:
		m.have(sb)
	case !m.faulty && !isKind(err, sandboxer.NoCredit) && !isKind(err, sandboxer.NotFound) && kind == "": // it has expired
		t.Fatal(err)
	}
}

func (m *model) doDrop(t *rapid.T) {
	if len(m.saved) == 0 {
		t.Skip("there is no snapshot")
	}
	m.settle()
	id := rapid.SampledFrom(m.saved).Draw(t, "snapshot")
	_, err := m.DropSnapshot(acme, id)
	switch {
	case m.died(t, ""):
	case err == nil || isKind(err, sandboxer.NotFound):
		m.saved = slices.DeleteFunc(m.saved, func(s string) bool { return s == id })
	case !m.faulty:
		t.Fatal(err)
	}
}

func (m *model) doNetwork(t *rapid.T) {
	m.settle()
	id := m.someID(t)
	mode := rapid.SampledFrom([]sandboxer.NetworkMode{sandboxer.NetworkPublic, sandboxer.NetworkNone}).Draw(t, "mode")
	_, err := m.SetNetwork(acme, id, sandboxer.NetworkPolicy{Mode: mode})
	if b := m.live[id]; !m.died(t, id) && err != nil && !m.faulty && b != nil && b.state == sandboxer.Running {
		t.Fatalf("network of %s: %v", id, err)
	}
}

// doGrant repeats a grant until it has an answer, and then once more: it counts once.
func (m *model) doGrant(t *rapid.T) {
	m.grants++
	amount := sandboxer.Credits(rapid.IntRange(1, 200_000).Draw(t, "amount"))
	for range 2 {
		err := m.Grant(admin, sandboxer.DefaultTenant, amount, fmt.Sprint("grant-", m.grants), "")
		if m.died(t, "") {
			err = m.Grant(admin, sandboxer.DefaultTenant, amount, fmt.Sprint("grant-", m.grants), "")
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	m.granted += amount
}

package storetest

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sand-boxer/sandboxer"
)

func disk(tenant string, bytes int64, image string) func(*sandboxer.Sandbox) {
	return func(sb *sandboxer.Sandbox) {
		sb.Tenant, sb.Spec.Limits.DiskBytes, sb.Spec.Image = tenant, bytes, image
		sb.Spec.Profile.Image = "base"
	}
}

// used is the store's answer about the use of acme.
func (s *suite) used(tenant string) sandboxer.Amounts {
	s.Helper()
	items, next, err := s.QuotaUse(s.ctx, sandboxer.QuotaUseQuery{Tenant: tenant})
	s.ok(err)
	if len(items) != 1 || items[0].Tenant != tenant || next != "" {
		s.Fatalf("use of %s: %+v, next %q", tenant, items, next)
	}
	return items[0].Used
}

func quotaUse(s *suite) {
	none := sandboxer.Amounts{sandboxer.QuotaSandboxes: 0, sandboxer.QuotaDisk: 0, sandboxer.QuotaImages: 0, sandboxer.QuotaSnapshots: 0, sandboxer.QuotaSnapshotBytes: 0, sandboxer.QuotaSpendMonth: 0, sandboxer.QuotaSpendDay: 0}
	s.same("no sandbox", s.used("acme"), none)
	a := s.create("a", 1, disk("acme", 10, "base"))
	b := s.create("b", 1, disk("acme", 20, "one"))
	s.create("c", 1, disk("acme", 30, "one"))
	s.create("d", 1, disk("acme", 0, "two"))
	s.create("e", 1, disk("rival", 7, ""))
	s.create("f", 1, disk("", 7, "")) // in a pool
	snap := s.put(snapshot("s1", func(r *sandboxer.SnapshotRecord) {
		r.Native.Bytes, r.Portable = 100, sandboxer.PortablePayload{Bytes: 3, Size: 1000}
	}))
	s.put(snapshot("s2", func(r *sandboxer.SnapshotRecord) { r.Purpose = sandboxer.ForPause }))
	s.put(snapshot("s3", func(r *sandboxer.SnapshotRecord) { r.Tenant, r.Native.Bytes = "zoo", 5 }))
	full := sandboxer.Amounts{sandboxer.QuotaSandboxes: 4, sandboxer.QuotaDisk: 60, sandboxer.QuotaImages: 2, sandboxer.QuotaSnapshots: 2, sandboxer.QuotaSnapshotBytes: 1100,
		sandboxer.QuotaSpendMonth: 0, sandboxer.QuotaSpendDay: 0}
	s.same("acme", s.used("acme"), full)

	items, next, err := s.QuotaUse(s.ctx, sandboxer.QuotaUseQuery{Limit: 2})
	s.ok(err)
	if len(items) != 2 || items[0].Tenant != "acme" || items[1].Tenant != "rival" || next != "rival" {
		s.Errorf("the first page is %+v, next %q", items, next)
	}
	s.same("listed", items[0].Used, full)
	items, next, err = s.QuotaUse(s.ctx, sandboxer.QuotaUseQuery{After: next, Limit: 2})
	s.ok(err)
	if len(items) != 1 || items[0].Tenant != "zoo" || items[0].Used[sandboxer.QuotaSnapshotBytes] != 5 || next != "" {
		s.Errorf("the second page is %+v, next %q", items, next)
	}

	// A sandbox that is being torn down counts; one that ended does not.
	s.update(a, func(sb *sandboxer.Sandbox) { sb.State = sandboxer.Terminating })
	if n := s.used("acme")[sandboxer.QuotaSandboxes]; n != 4 {
		s.Errorf("one is being torn down, and %d are there", n)
	}
	s.end(a)
	s.end(b)
	snap.State = sandboxer.SnapshotDropped
	s.put(snap)
	s.same("after the end", s.used("acme"), sandboxer.Amounts{sandboxer.QuotaSandboxes: 2, sandboxer.QuotaDisk: 30, sandboxer.QuotaImages: 2,
		sandboxer.QuotaSnapshots: 1, sandboxer.QuotaSnapshotBytes: 0, sandboxer.QuotaSpendMonth: 0, sandboxer.QuotaSpendDay: 0})
}

func quotaWritesNothing(s *suite) {
	within := func(w sandboxer.Writes, r sandboxer.Resource, most int64) sandboxer.Writes {
		w.Quota = &sandboxer.TenantQuota{Tenant: "acme", Quota: sandboxer.Quota{r: most}}
		return w
	}
	make1 := func(id string, bytes int64, image string) *sandboxer.Sandbox {
		sb := sandbox(id, 1)
		disk("acme", bytes, image)(sb)
		return sb
	}
	s.ok(s.CreateSandbox(s.ctx, make1("a", 10, "one"), within(sandboxer.Writes{}, sandboxer.QuotaSandboxes, 1)))
	for r, most := range map[sandboxer.Resource]int64{sandboxer.QuotaSandboxes: 1, sandboxer.QuotaDisk: 19, sandboxer.QuotaImages: 1} {
		s.fails(s.CreateSandbox(s.ctx, make1("b", 10, "two"), within(everything("b"), r, most)), sandboxer.Exhausted)
		s.wroteNothing("b")
		_, err := s.Sandbox(s.ctx, "b")
		s.fails(err, sandboxer.NotFound)
	}
	// The bounds of another tenant, and of use that does not grow, do not matter.
	s.ok(s.CreateSandbox(s.ctx, make1("b", 10, "one"), within(sandboxer.Writes{}, sandboxer.QuotaImages, 0)))
	w := within(sandboxer.Writes{}, sandboxer.QuotaSandboxes, 0)
	w.Quota.Tenant = "rival"
	s.ok(s.CreateSandbox(s.ctx, make1("c", 10, ""), w))

	one := snapshot("one")
	w = within(everything("x"), sandboxer.QuotaSnapshots, 0)
	w.Snapshots = []*sandboxer.SnapshotRecord{one}
	s.fails(s.Write(s.ctx, w), sandboxer.Exhausted)
	s.wroteNothing("x")
	if one.Version != 0 {
		s.Errorf("a refused write set version %d", one.Version)
	}
	s.put(one)
	one.State, one.Native.Bytes = sandboxer.SnapshotSealed, 101
	w = within(sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{one}}, sandboxer.QuotaSnapshotBytes, 100)
	s.fails(s.Write(s.ctx, w), sandboxer.Exhausted)
	one.Native.Bytes = 100
	s.ok(s.Write(s.ctx, w))
	one.State = sandboxer.SnapshotDropping // use above the quota may shrink
	w.Quota.Quota = sandboxer.Quota{sandboxer.QuotaSnapshotBytes: 1}
	s.ok(s.Write(s.ctx, w))
}

func quotaConcurrent(s *suite) {
	var won atomic.Int32
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			w := sandboxer.Writes{Quota: &sandboxer.TenantQuota{Tenant: "acme", Quota: sandboxer.Quota{sandboxer.QuotaSandboxes: 7}}}
			switch err := s.CreateSandbox(s.ctx, sandbox(fmt.Sprintf("s%d", i), 1), w); {
			case err == nil:
				won.Add(1)
			case sandboxer.KindOf(err) != sandboxer.Exhausted:
				s.Errorf("create: %v", err)
			}
		})
	}
	wg.Wait()
	if n := s.used("acme")[sandboxer.QuotaSandboxes]; won.Load() != 7 || n != 7 {
		s.Errorf("%d creates succeeded and %d sandboxes are there; the quota is 7", won.Load(), n)
	}
}

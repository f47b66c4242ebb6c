package manager

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/access"
)

func quota(q sandboxer.Quota) func(*setup) {
	return func(s *setup) {
		s.opts.Quotas = sandboxer.Quotas{Tenants: map[string]sandboxer.Quota{sandboxer.DefaultTenant: q}}
	}
}

// used checks how much of some resources acme has, as the tenant itself sees it.
func (r *rig) used(want sandboxer.Amounts) {
	r.t.Helper()
	items, _, err := r.Quotas(acme, access.QuotaQuery{})
	if err != nil || len(items) != 1 || items[0].Tenant != sandboxer.DefaultTenant {
		r.t.Fatalf("quotas: %+v, %v", items, err)
	}
	for res, n := range want {
		if items[0].Used[res] != n {
			r.t.Errorf("%d %s are used; want %d", items[0].Used[res], res, n)
		}
	}
}

// over checks that err is the refusal of a quota, in full.
func over(t *testing.T, err error, text string) {
	t.Helper()
	wantErr(t, err, sandboxer.Exhausted, text)
	wantErr(t, err, sandboxer.Exhausted, "quota of tenant default")
	wantErr(t, err, sandboxer.Exhausted, "ask an administrator")
}

func TestQuotaOfSandboxes(t *testing.T) {
	r := newRig(t, func(s *setup) {
		quota(sandboxer.Quota{sandboxer.QuotaSandboxes: 7})(s)
		pooled(2)(s)
		s.opts.Log = nil
	})
	r.full("test", 2) // nobody's, and so nobody's use; some creates are answered from there
	var made atomic.Int32
	errs := make([]error, 50)
	many(50, func(i int) (*sandboxer.Sandbox, error) {
		sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Name: fmt.Sprintf("s%d", i), Key: fmt.Sprintf("k%d", i)})
		if errs[i] = err; err == nil {
			made.Add(1)
		}
		return sb, err
	})
	for _, err := range errs {
		if err != nil {
			over(t, err, "sandboxes is used: 7 of 7, and this takes 1 more")
		}
	}
	if made.Load() != 7 {
		t.Errorf("%d were made; the quota is 7", made.Load())
	}
	r.used(sandboxer.Amounts{sandboxer.QuotaSandboxes: 7})
	more := func() error {
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"})
		return err
	}
	over(t, more(), "7 of 7")
	if _, err := r.Create(rival, sandboxer.CreateRequest{Profile: "test"}); err != nil {
		t.Errorf("another tenant: %v", err)
	}
	items, _, err := r.List(acme, sandboxer.Query{States: liveStates})
	if err != nil || len(items) != 7 {
		t.Fatalf("%d live, %v", len(items), err)
	}

	// A paused sandbox counts; one that is being torn down counts until it is gone.
	if _, err := r.Pause(acme, items[0].ID, PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, ID: items[1].ID, Kind: sandboxer.Unavailable, Times: 1})
	if _, err := r.Destroy(acme, items[1].ID); err == nil {
		t.Fatal("it is gone")
	}
	over(t, more(), "7 of 7")
	r.destroy(items[1].ID)
	if err := more(); err != nil {
		t.Errorf("one is gone: %v", err)
	}

	// A broker that comes back knows it from the records.
	r.restart()
	r.used(sandboxer.Amounts{sandboxer.QuotaSandboxes: 7})
	over(t, more(), "7 of 7")

	// Less than there is refuses only what is new; nothing set bounds nothing.
	r.SetQuotas(sandboxer.Quotas{Default: sandboxer.Quota{sandboxer.QuotaSandboxes: 3}})
	over(t, more(), "7 of 3")
	if sb, err := r.Resume(acme, items[0].ID, ResumeRequest{}); err != nil || sb.State != sandboxer.Running {
		t.Errorf("resume: %v, %v", sb, err)
	}
	if _, err := r.Exec(acme, items[0].ID, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
		t.Error(err)
	}
	r.SetQuotas(sandboxer.Quotas{Default: sandboxer.Quota{sandboxer.QuotaSandboxes: 8}})
	if err := more(); err != nil {
		t.Errorf("raised: %v", err)
	}
	_, err = r.Fork(acme, items[0].ID, ForkRequest{Count: 1})
	over(t, err, "8 of 8")
	r.SetQuotas(sandboxer.Quotas{Tenants: map[string]sandboxer.Quota{"rival": {sandboxer.QuotaSandboxes: 0}}})
	if err := more(); err != nil {
		t.Errorf("unbounded: %v", err)
	}
	_, err = r.Create(rival, sandboxer.CreateRequest{Profile: "test"})
	wantErr(t, err, sandboxer.Exhausted, "1 of 0")
}

// disked is the fake with a disk limit that it claims to enforce.
type disked struct{ *fake.Extension }

func (disked) DefaultLimits(s sandboxer.Spec) sandboxer.Limits {
	if s.Labels["bare"] != "" {
		return sandboxer.Limits{}
	}
	return sandboxer.Limits{DiskBytes: 1 << 30}
}

func (d disked) Provision(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
	s.Limits = sandboxer.Limits{}
	return d.Extension.Provision(ctx, s)
}

func TestQuotaOfDiskAndImages(t *testing.T) {
	r := newRig(t, func(s *setup) {
		quota(sandboxer.Quota{sandboxer.QuotaDisk: 5 << 30, sandboxer.QuotaImages: 1})(s)
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return disked{e} }
	})
	operator := as(sandboxer.DefaultTenant, sandboxer.Scopes()...)
	create := func(gib int64, image string) (*sandboxer.Sandbox, error) {
		return r.Create(operator, sandboxer.CreateRequest{Profile: "test", Image: image, Limits: sandboxer.Limits{DiskBytes: gib << 30}})
	}
	one, err := create(3, "")
	if err != nil {
		t.Fatal(err)
	}
	plain, err := create(0, "") // by default 1 GiB
	if err != nil || plain.Spec.Limits.DiskBytes != 1<<30 {
		t.Fatalf("%+v, %v", plain, err)
	}
	r.used(sandboxer.Amounts{sandboxer.QuotaDisk: 4 << 30})
	_, err = create(2, "")
	over(t, err, "disk is used: 4GiB of 5GiB, and this takes 2GiB more")
	_, err = r.Create(operator, sandboxer.CreateRequest{Profile: "test", Labels: map[string]string{"bare": "1"}})
	wantErr(t, err, sandboxer.Invalid, "would have no disk limit")
	if hint := sandboxer.HintOf(err); !strings.Contains(hint, "quotas.yaml") {
		t.Errorf("the hint %q names no way out where no disk can be limited", hint)
	}
	r.destroy(one.ID)

	img, err := create(1, "one")
	if err == nil {
		_, err = create(1, "one")
	}
	if err != nil {
		t.Fatal(err)
	}
	r.used(sandboxer.Amounts{sandboxer.QuotaDisk: 3 << 30, sandboxer.QuotaImages: 1})
	_, err = create(1, "two")
	over(t, err, "images is used: 1 of 1")
	if _, err = create(1, ""); err != nil {
		t.Errorf("the profile's own: %v", err)
	}
	r.destroy(img.ID)
	_, err = create(1, "two")
	over(t, err, "images is used: 1 of 1") // another uses it still
	r.SetQuotas(sandboxer.Quotas{Default: sandboxer.Quota{sandboxer.QuotaImages: 0}})
	if _, err = create(9, "one"); err != nil {
		t.Errorf("one that is used already, beyond a lowered quota: %v", err)
	}
}

func TestQuotaOfSnapshots(t *testing.T) {
	r := newSnapshotRig(t, quota(sandboxer.Quota{sandboxer.QuotaSnapshots: 2}))
	saves := func() (n int) {
		for _, e := range r.world.Log() {
			if e.Op == fake.OpSnapshot {
				n++
			}
		}
		return n
	}
	sb := r.create(sandboxer.CreateRequest{})
	save := func(kind sandboxer.SnapshotKind) (*sandboxer.SnapshotRecord, error) {
		return r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: kind})
	}
	if err := r.WriteFile(acme, sb.ID, "/workspace/f", 0o644, strings.NewReader(strings.Repeat("x", 10_000))); err != nil {
		t.Fatal(err)
	}
	first, err := save(sandboxer.SnapshotPortable)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
		t.Fatal(err)
	}
	r.used(sandboxer.Amounts{sandboxer.QuotaSnapshots: 2})
	if _, err := r.Resume(acme, sb.ID, ResumeRequest{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what the pause kept is dropped", func() bool {
		_, err := r.Sweep(admin)
		items, _, qerr := r.Quotas(acme, access.QuotaQuery{})
		return err == nil && qerr == nil && items[0].Used[sandboxer.QuotaSnapshots] == 1
	})
	second, err := save("")
	if err != nil {
		t.Fatal(err)
	}
	_, err = save("")
	over(t, err, "snapshots is used: 2 of 2")
	_, err = r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles})
	over(t, err, "snapshots is used: 2 of 2")
	_, err = r.Fork(acme, sb.ID, ForkRequest{Count: 1})
	over(t, err, "snapshots is used: 2 of 2")
	var file bytes.Buffer
	if err := r.ExportSnapshot(acme, first.ID, &file); err != nil {
		t.Fatal(err)
	}
	_, err = r.ImportSnapshot(acme, ImportRequest{}, bytes.NewReader(file.Bytes()))
	over(t, err, "snapshots is used: 2 of 2")
	if got := r.get(sb.ID); got.State != sandboxer.Running {
		t.Errorf("after refusals it is %s", got.State)
	}
	if _, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFreeze}); err != nil {
		t.Errorf("a pause that keeps no snapshot: %v", err)
	}
	if _, err := r.Resume(acme, sb.ID, ResumeRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.DropSnapshot(acme, second.ID); err != nil {
		t.Fatal(err)
	}

	// Bytes are those of the content, known once it is sealed; what is too much is dropped.
	items, _, err := r.Quotas(acme, access.QuotaQuery{})
	if err != nil {
		t.Fatal(err)
	}
	has := items[0].Used[sandboxer.QuotaSnapshotBytes]
	if has != first.Bytes() || has < 10_000 {
		t.Fatalf("%d bytes are used by one snapshot of %d", has, first.Bytes())
	}
	r.SetQuotas(sandboxer.Quotas{Default: sandboxer.Quota{sandboxer.QuotaSnapshotBytes: has + 100}})
	_, err = save(sandboxer.SnapshotPortable)
	over(t, err, "snapshot_bytes is used")
	_, err = r.ImportSnapshot(acme, ImportRequest{}, bytes.NewReader(file.Bytes()))
	over(t, err, "snapshot_bytes is used")
	r.used(sandboxer.Amounts{sandboxer.QuotaSnapshots: 1, sandboxer.QuotaSnapshotBytes: has})
	if ids, err := r.setup.opts.SnapshotStore.List(t.Context()); err != nil || len(ids) != 1 {
		t.Errorf("kept: %v, %v", ids, err)
	}
	r.SetQuotas(sandboxer.Quotas{Default: sandboxer.Quota{sandboxer.QuotaSnapshotBytes: has}})
	saved := saves()
	_, err = save(sandboxer.SnapshotNative) // not even begun
	over(t, err, "snapshot_bytes is used")
	_, err = r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles})
	over(t, err, "snapshot_bytes is used")
	if n := saves(); n != saved {
		t.Errorf("%d were begun", n-saved)
	}
	r.SetQuotas(sandboxer.Quotas{Default: sandboxer.Quota{sandboxer.QuotaSnapshotBytes: 2 * has}})
	if _, err := save(sandboxer.SnapshotPortable); err != nil {
		t.Errorf("there is room: %v", err)
	}
	if got := r.get(sb.ID); got.State != sandboxer.Running {
		t.Errorf("after refusals it is %s", got.State)
	}
}

// TestQuotaNeverStopsAnExpiry: a sandbox whose time is over is paused although its tenant may
// keep no snapshots: refusing it would end what is in there.
func TestQuotaNeverStopsAnExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) {
			ticking(s)
			quota(sandboxer.Quota{sandboxer.QuotaSnapshots: 0, sandboxer.QuotaSnapshotBytes: 0})(s)
			s.profiles[0].OnTTL, s.profiles[0].PauseDepth = sandboxer.ExpiryPause, sandboxer.PauseFiles
		})
		sb := r.create(sandboxer.CreateRequest{TTL: time.Minute})
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Paused {
			t.Errorf("it is %s: %s", got.State, got.Message)
		}
		r.used(sandboxer.Amounts{sandboxer.QuotaSnapshots: 1})
	})
}

func TestQuotaOfExecs(t *testing.T) {
	r := newRig(t, quota(sandboxer.Quota{sandboxer.QuotaExecs: 3}))
	a, b := r.create(sandboxer.CreateRequest{}), r.create(sandboxer.CreateRequest{})
	ctx, stop := context.WithCancel(acme)
	ended := make(chan error, 3)
	for _, id := range []string{a.ID, b.ID, b.ID} {
		go func() {
			_, err := r.Exec(ctx, id, sandboxer.Cmd{Args: []string{"sleep", "1000"}})
			ended <- err
		}()
	}
	eventually(t, "three run", func() bool { return r.Execs.Of(sandboxer.DefaultTenant) == 3 })
	r.used(sandboxer.Amounts{sandboxer.QuotaExecs: 3})
	_, err := r.Exec(acme, a.ID, sandboxer.Cmd{Args: []string{"true"}})
	over(t, err, "execs is used: 3 of 3")
	if sandboxer.RetryAfterOf(err) == 0 {
		t.Error("it says not when to come back")
	}
	stop()
	for range 3 {
		<-ended
	}
	if _, err := r.Exec(acme, a.ID, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
		t.Error(err)
	}
	r.used(sandboxer.Amounts{sandboxer.QuotaExecs: 0})
}

func TestQuotaOfRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, quota(sandboxer.Quota{sandboxer.QuotaRequests: 6}))
		ask := func(ctx context.Context) error { return r.AdmitRequest(sandboxer.PrincipalFrom(ctx)) }
		for range 6 {
			if err := ask(acme); err != nil {
				t.Fatal(err)
			}
		}
		err := ask(acme)
		over(t, err, "requests is used: 6 of 6 a minute")
		if wait := sandboxer.RetryAfterOf(err); wait != 10*time.Second {
			t.Errorf("come back in %s", wait)
		}
		r.used(sandboxer.Amounts{sandboxer.QuotaRequests: 6})
		for range 100 { // being refused costs nothing
			_ = ask(acme)
		}
		if ask(rival) != nil || ask(as(sandboxer.DefaultTenant, sandboxer.ScopeAdmin)) != nil {
			t.Error("others are refused")
		}
		time.Sleep(10 * time.Second)
		r.used(sandboxer.Amounts{sandboxer.QuotaRequests: 5})
		if err := ask(acme); err != nil {
			t.Error(err)
		}
		if ask(acme) == nil {
			t.Error("two came back")
		}
		time.Sleep(2 * time.Minute)
		r.used(sandboxer.Amounts{sandboxer.QuotaRequests: 0})
		r.SetQuotas(sandboxer.Quotas{Default: sandboxer.Quota{sandboxer.QuotaRequests: 0}})
		if err := ask(acme); !errors.Is(err, sandboxer.Exhausted) || sandboxer.RetryAfterOf(err) != 0 {
			t.Errorf("none at all: %v", err)
		}
		r.SetQuotas(sandboxer.Quotas{})
		if err := ask(acme); err != nil || r.Bounds.Metered() != 0 {
			t.Errorf("unbounded: %v, %v", err, r.Bounds.Metered())
		}
	})
}

func TestQuotasAreShown(t *testing.T) {
	r := newRig(t, quota(sandboxer.Quota{sandboxer.QuotaSandboxes: 7}))
	r.create(sandboxer.CreateRequest{})
	if _, err := r.Create(rival, sandboxer.CreateRequest{Profile: "test"}); err != nil {
		t.Fatal(err)
	}
	r.SetQuotas(sandboxer.Quotas{Default: sandboxer.Quota{sandboxer.QuotaDisk: 5}, Tenants: map[string]sandboxer.Quota{
		sandboxer.DefaultTenant: {sandboxer.QuotaSandboxes: 7}, "none": {}, "zoo": {}}})
	_, _, err := r.Quotas(rival, access.QuotaQuery{Tenant: sandboxer.DefaultTenant})
	wantErr(t, err, sandboxer.Denied, "you cannot see")
	_, _, err = r.Quotas(rival, access.QuotaQuery{All: true})
	wantErr(t, err, sandboxer.Denied, "you cannot see")
	_, _, err = r.Quotas(context.Background(), access.QuotaQuery{})
	wantErr(t, err, sandboxer.Unauthenticated, "")
	_, _, err = r.Quotas(admin, access.QuotaQuery{All: true, Tenant: sandboxer.DefaultTenant})
	wantErr(t, err, sandboxer.Invalid, "")
	_, _, err = r.Quotas(admin, access.QuotaQuery{Limit: 1001})
	wantErr(t, err, sandboxer.Invalid, "")
	if items, _, err := r.Quotas(rival, access.QuotaQuery{}); err != nil || len(items) != 1 || items[0].Tenant != "rival" ||
		!maps.Equal(items[0].Quota, sandboxer.Quota{sandboxer.QuotaDisk: 5}) || items[0].Used[sandboxer.QuotaSandboxes] != 1 {
		t.Errorf("the rival sees %+v, %v", items, err)
	}
	var seen []string
	for q := (access.QuotaQuery{All: true, Limit: 1}); ; {
		items, next, err := r.Quotas(admin, q)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range items {
			seen = append(seen, fmt.Sprint(i.Tenant, i.Quota[sandboxer.QuotaSandboxes], i.Used[sandboxer.QuotaSandboxes]))
		}
		if q.After = next; next == "" {
			break
		}
	}
	if got := strings.Join(seen, " "); got != "default7 1 none0 0 rival0 1 zoo0 0" && got != "default71 none00 rival01 zoo00" && got != "default 7 1 none 0 0 rival 0 1 zoo 0 0" {
		t.Errorf("an administrator sees %s", got)
	}
}

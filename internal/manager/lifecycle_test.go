package manager

import (
	"bytes"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestLife(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(sandboxer.CreateRequest{Name: "web", Env: map[string]string{"A": "b"}, Labels: map[string]string{"team": "x"}})
	if sb.State != sandboxer.Running || sb.Generation != 1 || sb.Tenant != sandboxer.DefaultTenant || sb.ReadyAt.IsZero() {
		t.Errorf("created %+v", sb)
	}
	if sb.ProvisionedAt.Before(sb.CreatedAt) || sb.ReadyAt.Before(sb.ProvisionedAt) || !r.get(sb.ID).ProvisionedAt.Equal(sb.ProvisionedAt) {
		t.Errorf("created at %s, provisioned at %s, ready at %s", sb.CreatedAt, sb.ProvisionedAt, sb.ReadyAt)
	}
	if got := sb.ExpiresAt.Sub(sb.CreatedAt); got != r.setup.profiles[0].TTL {
		t.Errorf("it lives for %s", got)
	}
	var out bytes.Buffer
	x, err := r.Exec(acme, "web", sandboxer.Cmd{Args: []string{"sh", "-c", "echo $A $FROM"}, Stdout: &out})
	if err != nil || x.Code != 0 || out.String() != "b profile\n" {
		t.Errorf("exec: %q, %+v, %v", out.String(), x, err)
	}
	for _, ref := range []string{sb.ID, "web", sb.ID[:3]} {
		if got := r.get(ref); got.ID != sb.ID {
			t.Errorf("%q means %s, want %s", ref, got.ID, sb.ID)
		}
	}
	r.sound(1)
	// A sweep that comes between the two steps of destroy would do the second one.
	eventually(t, "the sweep to leave it", func() bool { return r.Manager.sweepLocks.tryLock(sb.ID) })
	gone := r.destroy("web")
	r.Manager.unlockSweep(sb.ID)
	if gone.State != sandboxer.Terminated || gone.Reason != sandboxer.ReasonRequested || gone.Cleanup == nil || len(gone.Cleanup.Removed) != 1 {
		t.Errorf("destroyed %+v", gone)
	}
	if again := r.destroy(sb.ID); again.Version != gone.Version {
		t.Errorf("destroying it again changed it")
	}
	want := "g1 →creating requested user:default; g1 step user:default; g1 creating→running  user:default; " +
		"g1 running→terminating requested user:default; g1 terminating→terminated requested user:default"
	if got := history(t, r.Manager, sb.ID); got != want {
		t.Errorf("history %s\nwant    %s", got, want)
	}
	r.sound(0)
}

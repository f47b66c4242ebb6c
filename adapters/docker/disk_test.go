package docker

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// TestDisk: a limit of the disk is for engines whose storage keeps it; others are refused before anything exists.
func TestDisk(t *testing.T) {
	h := &host{name: "one"}
	on := func(driver, backing string, podman bool) engine.Info {
		return engine.Info{Driver: driver, DriverStatus: [][]string{{"Supports d_type", "true"}, {"Backing Filesystem", backing}}, Podman: podman}
	}
	for _, i := range []engine.Info{on("overlay2", "xfs", false), on("btrfs", "", false), on("zfs", "zfs", false), on("devicemapper", "ext4", false)} {
		if err := h.keepsDisk(i); err != nil {
			t.Errorf("%+v: %v", i, err)
		}
	}
	for _, i := range []engine.Info{on("overlay2", "extfs", false), on("vfs", "xfs", false), on("overlayfs", "xfs", false), on("", "", false), on("btrfs", "btrfs", true)} {
		wantKind(t, h.keepsDisk(i), sandboxer.Unsupported, "disk", "pquota")
	}
	refused := h.noQuota(sandboxer.E(sandboxer.Failed, nil, "making a container: --storage-opt is supported only for overlay over xfs with 'pquota' mount option"))
	wantKind(t, refused, sandboxer.Unsupported, "pquota")
	wantKind(t, h.noQuota(sandboxer.E(sandboxer.Exhausted, nil, "no space left")), sandboxer.Exhausted)
	img := &image{}
	if o, err := img.storage(1 << 30); err != nil || o["size"] != "1073741824" {
		t.Errorf("%v, %v", o, err)
	}
	img.Config.Volumes = map[string]struct{}{"/data": {}}
	_, err := img.storage(1 << 30)
	wantKind(t, err, sandboxer.Unsupported, "/data")

	en := engines["docker"](t)
	o := en.options(t, "disk")
	e := o.opened(t)
	info, err := e.hosts["one"].look(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if e.hosts["one"].keepsDisk(info) == nil {
		return // the engine keeps limits
	}
	s := order("limited", o, func(s *sandboxer.Spec) { s.Limits.DiskBytes = 64 << 20 })
	_, err = e.Provision(t.Context(), s)
	wantKind(t, err, sandboxer.Unsupported, "disk")
	_, err = e.Place(t.Context(), s, nil)
	wantKind(t, err, sandboxer.Unsupported, "disk")
	if l, err := e.IsAlive(t.Context(), sandboxer.Handle{SandboxID: s.ID, Generation: 1}); l != sandboxer.Gone || err != nil {
		t.Errorf("after a refusal it is %s, %v", l, err)
	}
	s.Limits.DiskBytes = 1
	wantKind(t, e.check(s), sandboxer.Invalid, "disk")
}

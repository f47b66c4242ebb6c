package docker

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
)

// TestDisk: a limit of the disk is for engines whose storage enforces it; others are refused before anything exists.
func TestDisk(t *testing.T) {
	h := &host{name: "one"}
	on := func(driver, backing string, podman bool) engine.Info {
		return engine.Info{Driver: driver, DriverStatus: [][]string{{"Supports d_type", "true"}, {"Backing Filesystem", backing}}, Podman: podman}
	}
	contained := engine.Info{Driver: "btrfs", DriverStatus: [][]string{{"driver-type", "io.containerd.snapshotter.v1"}}}
	for _, i := range []engine.Info{on("overlay2", "xfs", false), on("btrfs", "", false), on("zfs", "zfs", false), on("devicemapper", "ext4", false)} {
		if err := h.keepsDisk(i); err != nil {
			t.Errorf("%+v: %v", i, err)
		}
	}
	for _, i := range []engine.Info{on("overlay2", "extfs", false), on("vfs", "xfs", false), on("overlayfs", "xfs", false), on("", "", false), on("btrfs", "btrfs", true), contained} {
		wantKind(t, h.keepsDisk(i), sandboxer.Unsupported, "disk", "pquota", "quotas.yaml")
	}
	refused := h.noQuota(sandboxer.E(sandboxer.Failed, nil, "making a container: --storage-opt is supported only for overlay over xfs with 'pquota' mount option"))
	wantKind(t, refused, sandboxer.Unsupported, "pquota")
	wantKind(t, h.noQuota(sandboxer.E(sandboxer.Exhausted, nil, "no space left")), sandboxer.Exhausted)
	img := &image{}
	if o, err := img.storage(engine.Info{}, 1<<30); err != nil || o["size"] != "1073741824" {
		t.Errorf("%v, %v", o, err)
	}
	img.Config.Volumes = map[string]struct{}{"/data": {}}
	_, err := img.storage(engine.Info{}, 1<<30)
	wantKind(t, err, sandboxer.Unsupported, "/data")
	if m := etcMounts(engine.APIVolume{Mountpoint: "/v/_data"}, []sandboxer.Mount{{Source: "/src", Target: "/etc/hosts"}}); len(m) != 2 || m[0].Source != "/v/_data/etc/hostname" || m[1].Target != "/etc/resolv.conf" || !m[0].ReadOnly || !m[1].ReadOnly {
		t.Errorf("beside a mount of one's own at /etc/hosts: %+v", m)
	}
	img.Config.Volumes, img.Size = nil, 60<<20
	_, err = img.storage(engine.Info{Driver: "btrfs"}, 64<<20)
	wantKind(t, err, sandboxer.Unsupported, "60 MiB", "ask for 77 MiB")
	if _, err := img.storage(engine.Info{Driver: "overlay2"}, 64<<20); err != nil {
		t.Errorf("where an image does not count: %v", err)
	}
	wantKind(t, h.noQuota(sandboxer.E(sandboxer.Failed, nil, "devmapper: Container size cannot be smaller than 10GB")), sandboxer.Unsupported, "10GB")
	wantKind(t, (&extension{cfg: Config{UnfilteredEgress: true}}).check(sandboxer.Spec{Limits: sandboxer.Limits{DiskBytes: 1 << 30}, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}}), sandboxer.Unsupported, "disk", "unfiltered_egress")

	en := engines["docker"](t)
	o := en.options(t, "disk")
	e := o.opened(t)
	info, err := e.hosts["one"].look(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if e.hosts["one"].keepsDisk(info) == nil {
		return // the engine enforces limits
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

// TestDiskLimit: on an engine whose storage enforces limits, no process inside exceeds one, the sandbox continues, and the error
// says that it is full.
func TestDiskLimit(t *testing.T) {
	for _, fs := range []string{"btrfs", "xfs"} {
		t.Run(fs, func(t *testing.T) {
			diskLimit(t, testEngine{enginetest.Limiting(t, fs), "engine:" + enginetest.Image}, fs)
		})
	}
}

func diskLimit(t *testing.T, en testEngine, fs string) {
	o := en.options(t, "limited")
	o.config["grants"] = []string{"NET_RAW"}
	o.config["shm_size"] = 64 << 20 // memory, and less than what the test tries to write
	e := o.opened(t)
	repo := t.TempDir()
	lift, err := os.ReadFile(buildtest.Program(t, "adapters/docker/testdata/lift"))
	if err == nil {
		err = os.WriteFile(filepath.Join(repo, "lift"), lift, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	limited := func(id string, more ...func(*sandboxer.Spec)) sandboxer.Spec {
		return order(id, o, append([]func(*sandboxer.Spec){func(s *sandboxer.Spec) {
			s.Limits.DiskBytes = 64 << 20
			s.Vouched = append(s.Vouched, "grants")
		}}, more...)...)
	}
	h := up(t, e, limited("limited", func(s *sandboxer.Spec) { s.Inputs = map[string]string{"repo": repo} }))
	if got := run(t, e, h, `dd if=/dev/zero of=big bs=1M count=200 2>&1; wc -c <big; rm big`); !strings.Contains(got, "uota exceeded") && !strings.Contains(got, "o space left") {
		t.Errorf("200 MB were written: %q", got)
	}
	if got := run(t, e, h, "./lift"); got != "" {
		t.Errorf("the limit can be got around:\n%s", got)
	}
	here := e.hosts["one"].socket
	e.hosts["one"].socket = "" // as if on another machine, whose engine starts the relay to the agent
	e.agents.Drop(e.name(h.SandboxID, h.Generation))
	if got := run(t, e, h, "./lift connect"); got != "" {
		t.Errorf("what the engine starts can be taken over:\n%s", got)
	}
	e.hosts["one"].socket = here
	e.agents.Drop(e.name(h.SandboxID, h.Generation))
	if got := run(t, e, h, "cat /proc/sys/kernel/hostname; grep -c 127.0.0.1.*localhost /etc/hosts; tr '\\0' ' ' </proc/1/cmdline"); !strings.HasPrefix(got, "limited\n1\n"+agentPath+" init ") {
		t.Errorf("inside: %q", got)
	}
	if got := run(t, e, h, "sed -n 's/^CapBnd:[[:space:]]*//p' /proc/self/status"); got != "00000000a00405fb" { // guestCapabilities
		t.Errorf("CapBnd of a command is %s", got)
	}
	// While full, it is used, saved and ended like any other.
	run(t, e, h, "cat /dev/zero >big 2>/dev/null; true")
	wantKind(t, e.WriteFile(t.Context(), h, "/tmp/more", 0o644, io.LimitReader(zeros{}, 8<<20)), sandboxer.Exhausted, "disk")
	if st, err := e.Stats(t.Context(), h); err != nil || st.DiskLimit != 64<<20 {
		t.Errorf("%+v, %v", st, err)
	}
	snap, err := e.Snapshot(t.Context(), h, "full")
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.RestoreFromSnapshot(t.Context(), limited("restored"), snap)
	if fs == "btrfs" {
		wantKind(t, err, sandboxer.Unsupported, "the image has", "64 MiB", "btrfs", "ask for")
	} else if err != nil {
		t.Error(err)
	}
	for what, s := range map[string]sandboxer.Spec{
		"grants": limited("grants", func(s *sandboxer.Spec) { s.Inputs = map[string]string{"grants": "NET_RAW"} }),
		"least":  limited("least", func(s *sandboxer.Spec) { s.Limits.DiskBytes = 1 }),
	} {
		if _, err := e.Provision(t.Context(), s); err == nil {
			t.Errorf("%s: it was made", what)
		} else if !strings.Contains(sandboxer.Message(err), "disk") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := e.DropSnapshot(t.Context(), snap); err != nil {
		t.Error(err)
	}
	if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: "restored"}); err != nil {
		t.Error(err)
	}
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Error(err)
	}
	nothingLeft(t, o)
}

// zeros has no end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

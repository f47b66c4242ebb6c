package docker

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

// minDisk is the least limit: engines and file systems need this themselves.
const minDisk = 16 << 20

// etcFiles replace the files that engines put into /etc of a sandbox with a limit of its disk: root inside can write an engine's
// files, and no limit counts them. They are in the agent's volume.
var etcFiles = []struct{ name, text string }{
	{"hostname", "sandbox\n"},
	{"hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"},
	{"resolv.conf", "nameserver " + usernet.Gateway.String() + "\n"},
}

// etcDir is their directory in the volume.
const etcDir = "etc"

// etcMounts are the mounts of etcFiles in a container, except where it has a mount of its own.
func etcMounts(volume engine.APIVolume, own []sandboxer.Mount) (all []engine.MountConfig) {
	for _, f := range etcFiles {
		to := "/etc/" + f.name
		if !slices.ContainsFunc(own, func(m sandboxer.Mount) bool { return m.Target == to }) {
			all = append(all, engine.MountConfig{Type: "bind", Source: path.Join(volume.Mountpoint, etcDir, f.name), Target: to, ReadOnly: true})
		}
	}
	return all
}

// keepsDisk refuses a limit of a sandbox's disk that the engine would not enforce: some storage drivers ignore it
// without an error.
func (h *host) keepsDisk(info engine.Info) error {
	switch {
	case info.Podman: // its service's answers do not show it
	case info.Snapshotter(): // of containerd, without limits, although named like drivers
	case info.Driver == "btrfs", info.Driver == "zfs", info.Driver == "devicemapper":
		return nil
	case info.Driver == "overlay2" && info.Backing() == "xfs":
		return nil // it refuses the limit itself if the file system has no quotas
	}
	on := info.Driver
	if b := info.Backing(); b != "" {
		on += " on " + b
	}
	return sandboxer.E(sandboxer.Unsupported, nil, "the engine %s cannot limit the disk of a sandbox: its storage driver is %s", h.name, on).
		WithHint("leave the limit out, or use an engine that keeps containers by overlay2 on XFS with project quotas (pquota), Btrfs or ZFS, or ext.local; if a quota asks for the limit, have the operator leave disk out of it in quotas.yaml")
}

// storage returns the engine's options for a limit. Volumes of the image would not count.
func (i *image) storage(info engine.Info, limit int64) (map[string]string, error) {
	if limit == 0 {
		return nil, nil
	}
	for v := range i.Config.Volumes {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "the image declares the volume %.200q, which a limit of the disk would not hold for", v).
			WithHint("leave the limit out, or use an image without volumes")
	}
	if counts := info.Driver == "btrfs" || info.Driver == "devicemapper"; counts && i.Size > limit-minDisk {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "the image has %d MiB, which count for a limit of the disk of %d MiB where the engine's storage driver is %s", i.Size>>20, limit>>20, info.Driver).
			WithHint("ask for %d MiB at least, or use a smaller image", (i.Size+minDisk)>>20+1)
	}
	return map[string]string{"size": strconv.FormatInt(limit, 10)}, nil
}

// noQuota explains an engine's error when it made no container with a limit of its disk.
func (h *host) noQuota(err error) error {
	if err == nil {
		return nil
	}
	said := strings.ToLower(sandboxer.Message(err))
	switch {
	case strings.Contains(said, "storage-opt"):
		return sandboxer.E(sandboxer.Unsupported, err, "the engine %s cannot limit the disk of a sandbox: %s", h.name, sandboxer.Message(err)).
			WithHint("leave the limit out, or have the engine's files on XFS that is mounted with pquota")
	case strings.Contains(said, "container size cannot be smaller than"): // from device mapper
		return sandboxer.E(sandboxer.Unsupported, err, "the engine %s cannot limit the disk of a sandbox so: %s", h.name, sandboxer.Message(err)).
			WithHint("ask for more, or leave the limit out: every container of that engine has one")
	}
	return err
}

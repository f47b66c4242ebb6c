package docker

import (
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// minDisk is the least limit: what engines and file systems need themselves.
const minDisk = 16 << 20

// keepsDisk refuses a limit of a sandbox's disk that the engine would not keep: some storage drivers leave it out
// without a word.
func (h *host) keepsDisk(info engine.Info) error {
	switch {
	case info.Podman: // of which the service's answers do not say
	case info.Driver == "btrfs", info.Driver == "zfs", info.Driver == "devicemapper":
		return nil
	case info.Driver == "overlay2" && info.Backing() == "xfs":
		return nil // it refuses itself where the file system keeps no quotas
	}
	on := info.Driver
	if b := info.Backing(); b != "" {
		on += " on " + b
	}
	return sandboxer.E(sandboxer.Unsupported, nil, "the engine %s cannot limit the disk of a sandbox: its storage driver is %s", h.name, on).
		WithHint("leave the limit out, or use an engine that keeps containers by overlay2 on XFS with project quotas (pquota), Btrfs or ZFS, or ext.local")
}

// storage is what the engine is told of a limit. Volumes of the image would not count.
func (i *image) storage(limit int64) (map[string]string, error) {
	if limit == 0 {
		return nil, nil
	}
	for v := range i.Config.Volumes {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "the image declares the volume %.200q, which a limit of the disk would not hold for", v).
			WithHint("leave the limit out, or use an image without volumes")
	}
	return map[string]string{"size": strconv.FormatInt(limit, 10)}, nil
}

// noQuota is err, of an engine that made no container with a limit of its disk, as what it means.
func (h *host) noQuota(err error) error {
	if err == nil || !strings.Contains(strings.ToLower(sandboxer.Message(err)), "storage-opt") {
		return err
	}
	return sandboxer.E(sandboxer.Unsupported, err, "the engine %s cannot limit the disk of a sandbox: %s", h.name, sandboxer.Message(err)).
		WithHint("leave the limit out, or have the engine's files on XFS that is mounted with pquota")
}

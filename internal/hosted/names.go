package hosted

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// InAccount returns a cache key for the object ref in the account of ctx.
func InAccount(ctx context.Context, ref string) string {
	a := Account(ctx)
	return fmt.Sprintf("%s %s %d %s", a.Tenant, a.Name, a.Version, ref)
}

// Name is the name of the sandbox of h, at a service that allows one sandbox of a name at a time: there a second create makes
// nothing.
func (s *Sandboxes) Name(h sandboxer.Handle) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%s/%s/%d", s.Env.Owner, s.Env.Extension, h.SandboxID, h.Generation))
	return prefix + hex.EncodeToString(sum[:16])
}

// SnapshotPrefix begins the names of the snapshots of owner, at a service that keeps no tags with snapshots.
func (s *Sandboxes) SnapshotPrefix(owner string) string {
	sum := sha256.Sum256([]byte(owner + "\x00" + s.Env.Extension))
	return prefix + hex.EncodeToString(sum[:8]) + "_"
}

// SnapshotName is the name of a snapshot of h's sandbox at such a service.
func (s *Sandboxes) SnapshotName(id string, h sandboxer.Handle) string {
	return fmt.Sprintf("%s%s_%s_%d", s.SnapshotPrefix(s.Env.Owner), id, h.SandboxID, h.Generation)
}

// ReadSnapshotName returns the parts of such a name; ok is false if it is not the name of a snapshot of owner.
func (s *Sandboxes) ReadSnapshotName(name, owner string) (found sandboxer.FoundSnapshot, ok bool) {
	rest, ours := strings.CutPrefix(name, s.SnapshotPrefix(owner))
	parts := strings.Split(rest, "_")
	if !ours || len(parts) != 3 || sandboxer.CheckID(parts[1]) != nil {
		return found, false
	}
	generation, err := strconv.Atoi(parts[2])
	return sandboxer.FoundSnapshot{Snapshot: sandboxer.Snapshot{SnapshotID: parts[0]}, SandboxID: parts[1], Generation: generation}, err == nil
}

package docker

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"iter"
	"regexp"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/filelock"
)

// A snapshot is an image of the engine, made while the container stands still. It is known by its
// name, which nobody but a user of the engine can give: labels alone an image from anywhere could have. A restored
// sandbox has a name of its own for it, so that the snapshot can be dropped meanwhile.

var snapshotID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// labelStamp is the stamp of the sandbox that was saved.
const labelStamp = "dev.sandboxer.docker.stamp"

func (e *extension) snapshotName(id string) string { return e.repo("snapshot") + ":" + id }

func checkSnapshotID(id string) error {
	if !snapshotID.MatchString(id) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the ID of a snapshot", id)
	}
	return nil
}

// saved returns a snapshot on a host. NotFound: it is not there.
func (e *extension) saved(ctx context.Context, h *host, id string) (engine.APIImage, error) {
	i, err := h.api.InspectImage(ctx, e.snapshotName(id))
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		err = sandboxer.E(sandboxer.NotFound, err, "there is no snapshot %s", id)
	}
	return i, err
}

func receipt(id string, i engine.APIImage) sandboxer.Snapshot {
	return sandboxer.Snapshot{SnapshotID: id, Bytes: i.Size, Quiesced: true}
}

// Snapshot implements sandboxer.Snapshotter.
func (e *extension) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
	var none sandboxer.Snapshot
	if err := checkSnapshotID(id); err != nil {
		return none, err
	}
	l, err := e.lock(ctx, "snapshot-"+id, filelock.Exclusive)
	if err != nil {
		return none, err
	}
	defer l.Remove()
	hosts, err := e.where(h)
	if err != nil {
		return none, err
	}
	for _, ho := range hosts {
		if i, err := e.saved(ctx, ho, id); err == nil {
			return receipt(id, i), nil
		} else if sandboxer.KindOf(err) != sandboxer.NotFound {
			return none, err
		}
	}
	b, err := e.find(ctx, h)
	if err != nil {
		return none, err
	}
	if b.state != "paused" {
		if err := e.runs(ctx, b); err != nil {
			return none, err
		}
	}
	c, err := b.host.api.InspectContainer(ctx, b.container)
	if err != nil {
		return none, err
	}
	for _, m := range c.Mounts {
		if m.Destination != agentDir && m.Type != "bind" { // mounts of this machine are in no snapshot
			return none, sandboxer.E(sandboxer.Unsupported, nil, "what sandbox %s has at %s is a volume of its image, which an image made of it does not hold", b.id, m.Destination).
				WithHint("save it in portable form, which holds the workspace: sandboxer snapshot create --portable %s", b.id)
		}
	}
	r, err := e.recall(b.key())
	if err != nil {
		return none, err
	}
	m, err := readMade(b.labels)
	if err != nil {
		return none, err
	}
	stamp := m.Stamp
	if r.Stamp != nil {
		stamp = r.Stamp
	}
	m.Stamp, m.Mounts = nil, nil // it is in a label of its own, and they are in no snapshot
	// It stands still meanwhile.
	err = e.agentIn(b.host, e.name(b.id, b.generation), b.container).WithoutDials(ctx, func(ctx context.Context) error {
		if err := e.savable(ctx, b, m); err != nil {
			return err
		}
		_, err := b.host.api.Commit(ctx, b.container, e.repo("snapshot"), id, map[string]string{
			labelSnapshot: id, labelStamp: base64.RawURLEncoding.EncodeToString(stamp), labelMade: m.label(),
		})
		return err
	})
	if err != nil {
		return none, err
	}
	i, err := e.saved(ctx, b.host, id)
	if err != nil {
		return none, err
	}
	return receipt(id, i), nil
}

// savable refuses, as Exhausted, to save what would be larger than the limit of the sandbox's disk, or with none than the largest image:
// an engine writes the sparse files of a container out in full.
func (e *extension) savable(ctx context.Context, b *box, m made) error {
	most, what := m.Disk, "limit of the sandbox's disk"
	if most == 0 {
		most, what = e.cfg.Images.MaxDownload, "largest image (images.max_download)"
	}
	size, err := b.host.api.WrittenBytes(ctx, b.container)
	switch {
	case err != nil:
		return err
	case size < 0:
		return sandboxer.E(sandboxer.Unavailable, nil, "the engine %s does not say how large what sandbox %s has written is, and may have no room for it", b.host.name, b.id).
			WithHint("try again; or save the workspace in portable form: sandboxer snapshot create --portable %s", b.id)
	case size > most:
		return sandboxer.E(sandboxer.Exhausted, nil, "the files that sandbox %s has written are %d MiB, the holes of sparse files included, which the engine would write out; the %s is %d MiB", b.id, size>>20, what, most>>20).
			WithHint("remove what is large, or have the limit raised; or save the workspace in portable form: sandboxer snapshot create --portable %s", b.id)
	}
	return nil
}

// RestoreFromSnapshot implements sandboxer.Snapshotter. A snapshot of another engine of the extension is
// brought to the one where the sandbox is placed.
func (e *extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (sandboxer.Handle, error) {
	if err := checkSnapshotID(s.SnapshotID); err != nil {
		return sandboxer.Handle{}, err
	}
	if spec.Image == "" {
		spec.Image = "engine:" + e.snapshotName(s.SnapshotID) // which it is made of
	}
	if err := e.check(spec); err != nil {
		return sandboxer.Handle{}, err
	}
	return e.provision(ctx, spec, func(h *host, info engine.Info) (*image, made, error) {
		i, err := e.saved(ctx, h, s.SnapshotID)
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			if err = e.bring(ctx, h, s.SnapshotID); err == nil {
				i, err = e.saved(ctx, h, s.SnapshotID)
			}
		}
		if err != nil {
			return nil, made{}, err
		}
		was, err := readMade(i.Config.Labels)
		if err != nil {
			return nil, made{}, err
		}
		m := made{Workspace: was.Workspace, User: was.User, Image: was.Image, Main: was.Main, MainDir: was.MainDir, Ports: was.Ports}
		if spec.User != "" {
			m.User = spec.User
		}
		if spec.Workspace != "" {
			m.Workspace = spec.Workspace
		}
		repo, tag := e.repo("restored"), e.restoredTag(spec.ID, spec.Generation)
		if err := h.api.TagImage(ctx, i.ID, repo, tag); err != nil {
			return nil, made{}, err
		}
		img := &image{i, was.Image}
		img.Config.ExposedPorts = nil
		return img, m, img.usable(s.SnapshotID, info)
	})
}

// bring brings a snapshot to h from whichever engine has it.
func (e *extension) bring(ctx context.Context, h *host, id string) error {
	var failed error
	for _, n := range e.names {
		from := e.hosts[n]
		if from == h {
			continue
		}
		_, err := e.saved(ctx, from, id)
		switch {
		case sandboxer.KindOf(err) == sandboxer.NotFound:
			continue
		case err != nil:
			failed = err
			continue
		}
		sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "bringing the snapshot from " + from.name + " to " + h.name})
		return from.api.SaveImage(ctx, e.snapshotName(id), func(r io.Reader) error { return h.api.LoadImage(ctx, r) })
	}
	if failed != nil {
		return failed
	}
	return sandboxer.E(sandboxer.NotFound, nil, "there is no snapshot %s", id)
}

// restoredTag names the image of a restored sandbox.
func (e *extension) restoredTag(id string, generation int) string { return key(id, generation) }

// removeRestored removes the name of a restored sandbox's image, and the image if it was the last one; with
// no tag all of them.
func (e *extension) removeRestored(ctx context.Context, h *host, tag string) error {
	repo := e.repo("restored")
	names := []string{repo + ":" + tag}
	if tag == "" {
		names = nil
		list, err := h.api.ListImages(ctx, repo, nil)
		if err != nil {
			return err
		}
		for _, i := range list {
			for _, t := range i.RepoTags {
				if strings.HasPrefix(t, repo+":") {
					names = append(names, t)
				}
			}
		}
	}
	var errs []error
	for _, n := range names {
		if err := h.api.RemoveImage(ctx, n); err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// DropSnapshot implements sandboxer.Snapshotter: on every engine.
func (e *extension) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	if err := checkSnapshotID(s.SnapshotID); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	l, err := e.lock(ctx, "snapshot-"+s.SnapshotID, filelock.Exclusive)
	if err != nil {
		return err
	}
	defer l.Remove()
	all, err := e.where(sandboxer.Handle{})
	if err != nil {
		return err
	}
	return each(all, func(h *host) error {
		err := h.api.RemoveImage(ctx, e.snapshotName(s.SnapshotID))
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			return nil
		}
		return err
	})
}

// ListSnapshots implements sandboxer.Snapshotter.
func (e *extension) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return func(yield func(sandboxer.FoundSnapshot, error) bool) {
		if owner != e.env.Owner {
			return
		}
		seen := map[string]bool{}
		var failed error
		for _, n := range e.names {
			h := e.hosts[n]
			list, err := h.api.ListImages(ctx, e.repo("snapshot"), nil)
			failed = errors.Join(failed, err)
			for _, s := range list {
				for _, t := range s.RepoTags {
					id, ok := strings.CutPrefix(t, e.repo("snapshot")+":")
					if !ok || seen[id] || checkSnapshotID(id) != nil {
						continue
					}
					i, err := e.saved(ctx, h, id)
					if sandboxer.KindOf(err) == sandboxer.NotFound { // by now
						continue
					}
					if err != nil {
						failed = errors.Join(failed, err)
						continue
					}
					seen[id] = true
					f := sandboxer.FoundSnapshot{Snapshot: receipt(id, i), Whole: true, SandboxID: i.Config.Labels[labelID]}
					f.Generation, _ = strconv.Atoi(i.Config.Labels[labelGeneration])
					f.Stamp, _ = base64.RawURLEncoding.DecodeString(i.Config.Labels[labelStamp])
					if !yield(f, nil) {
						return
					}
				}
			}
		}
		if failed != nil {
			yield(sandboxer.FoundSnapshot{}, failed)
		}
	}
}

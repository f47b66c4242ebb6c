package docker

import (
	"context"
	"errors"
	"io"
	"iter"
	"regexp"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/hosts"
)

// A snapshot is an image of the engine, made while the container is paused. Its name identifies it, because only a user
// of the engine can give one: an image from anywhere could have the labels. A restored sandbox has its own name for the
// image, so that the snapshot can be dropped meanwhile.

var snapshotID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

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
	unlock, err := e.env.Notes.Lock(ctx, "snapshot-"+id)
	if err != nil {
		return none, err
	}
	defer unlock()
	at, err := e.where(h.Host)
	if err != nil {
		return none, err
	}
	for _, name := range at.Names() {
		if i, err := e.saved(ctx, at[name], id); err == nil {
			return receipt(id, i), nil
		} else if sandboxer.KindOf(err) != sandboxer.NotFound {
			return none, err
		}
	}
	b, err := e.find(ctx, h)
	if err != nil {
		return none, err
	}
	if err := e.lives(ctx, b); err != nil {
		return none, err
	}
	c, err := b.host.api.InspectContainer(ctx, b.container)
	if err != nil {
		return none, err
	}
	for _, m := range c.Mounts {
		if m.Destination != agentDir && m.Type != "bind" { // a snapshot contains no mounts of this machine
			return none, sandboxer.E(sandboxer.Unsupported, nil, "what sandbox %s has at %s is a volume of its image, which an image made of it does not hold", b.id, m.Destination).
				WithHint("save it in portable form, which holds the workspace: sandboxer snapshot create --portable %s", b.id)
		}
	}
	m := b.made
	m.Mounts = nil // a snapshot contains none
	// The engine pauses the container meanwhile.
	err = e.agentIn(b).WithoutDials(ctx, func(ctx context.Context) error {
		if err := e.savable(ctx, b); err != nil {
			return err
		}
		_, err := b.host.api.Commit(ctx, b.container, e.repo("snapshot"), id, map[string]string{
			labelSnapshot: id, labelMade: m.label(),
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

// savable refuses, as Exhausted, to save more than the limit of the sandbox's disk, or without one more than the largest image: an
// engine writes the sparse files of a container out in full.
func (e *extension) savable(ctx context.Context, b *box) error {
	most, what := b.made.Disk, "limit of the sandbox's disk"
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

// RestoreFromSnapshot implements sandboxer.Snapshotter. It copies a snapshot from another engine of the
// extension to the one where the sandbox is placed.
func (e *extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (sandboxer.Handle, error) {
	if err := checkSnapshotID(s.SnapshotID); err != nil {
		return sandboxer.Handle{}, err
	}
	if spec.Image == "" {
		spec.Image = "engine:" + e.snapshotName(s.SnapshotID) // the image of the snapshot
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

// bring copies a snapshot to h from any engine that has it.
func (e *extension) bring(ctx context.Context, h *host, id string) error {
	var failed error
	for _, name := range e.hosts.Names() {
		from := e.hosts[name]
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

// removeRestored removes the name of a restored sandbox's image, and the image with its last name; without a tag
// it removes all of them.
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
		errs = append(errs, h.api.RemoveImage(ctx, n))
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
	unlock, err := e.env.Notes.Lock(ctx, "snapshot-"+s.SnapshotID)
	if err != nil {
		return err
	}
	defer unlock()
	_, silent := hosts.Ask(e.hosts, func(h *host) ([]struct{}, error) {
		return nil, h.api.RemoveImage(ctx, e.snapshotName(s.SnapshotID))
	})
	return silent.Err()
}

// ListSnapshots implements sandboxer.Snapshotter.
func (e *extension) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return hosts.List(func() ([]sandboxer.FoundSnapshot, error) {
		if owner != e.env.Owner {
			return nil, nil
		}
		all, silent := hosts.Ask(e.hosts, func(h *host) ([]sandboxer.FoundSnapshot, error) { return e.snapshotsOn(ctx, h) })
		id := func(f sandboxer.FoundSnapshot) string { return f.Snapshot.SnapshotID }
		slices.SortStableFunc(all, func(a, b sandboxer.FoundSnapshot) int { return strings.Compare(id(a), id(b)) })
		return slices.CompactFunc(all, func(a, b sandboxer.FoundSnapshot) bool { return id(a) == id(b) }), silent.Err()
	})
}

// snapshotsOn lists the snapshots that a host has.
func (e *extension) snapshotsOn(ctx context.Context, h *host) (all []sandboxer.FoundSnapshot, failed error) {
	list, failed := h.api.ListImages(ctx, e.repo("snapshot"), nil)
	for _, s := range list {
		for _, t := range s.RepoTags {
			id, ok := strings.CutPrefix(t, e.repo("snapshot")+":")
			if !ok || checkSnapshotID(id) != nil {
				continue
			}
			i, err := e.saved(ctx, h, id)
			switch sandboxer.KindOf(err) {
			case "":
				m, _ := hosts.ReadMark(labelPrefix, i.Config.Labels)
				all = append(all, sandboxer.FoundSnapshot{Snapshot: receipt(id, i), Whole: true, SandboxID: m.ID, Generation: m.Generation})
			case sandboxer.NotFound: // dropped meanwhile
			default:
				failed = errors.Join(failed, err)
			}
		}
	}
	return all, failed
}

package vmpacker

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// savedTag names a machine's memory in its own disk image.
const savedTag = "sandboxer"

// saved is the content of a snapshot's record.
type saved struct {
	Receipt    sandboxer.Snapshot `json:"receipt"`
	Owner      string             `json:"owner"`
	Shape      shape              `json:"shape"`
	SandboxID  string             `json:"sandbox_id,omitempty"` // this and the next: absent in what former builds wrote
	Generation int                `json:"generation,omitempty"`
}

var snapshotID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`)

func checkSnapshotID(id string) error {
	if !snapshotID.MatchString(id) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the ID of a snapshot", id)
	}
	return nil
}

func (e *extension) savedAs(id string) (*saved, error) {
	data, err := os.ReadFile(e.dir("snap", id, "record.json"))
	var s saved
	if err == nil {
		_, err = strictjson.DecodeStored(data, &s)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, sandboxer.E(sandboxer.NotFound, nil, "there is no snapshot %s", id)
	}
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the record of snapshot %s cannot be read", id)
	}
	return &s, nil
}

// Snapshot implements sandboxer.Snapshotter with the snapshots of the image format:
// memory and disk at one moment, in a copy of the machine's image. The machine is paused
// meanwhile.
func (e *extension) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (none sandboxer.Snapshot, err error) {
	if err := checkSnapshotID(id); err != nil {
		return none, err
	}
	unlockSnap, err := e.env.Notes.Lock(ctx, "snap."+id)
	if err != nil {
		return none, err
	}
	defer unlockSnap()
	if s, err := e.savedAs(id); err == nil {
		return s.Receipt, nil
	} else if sandboxer.KindOf(err) != sandboxer.NotFound {
		return none, err
	}
	p, err := e.one(ctx, h)
	if err != nil {
		return none, err
	}
	if p.Kind != managed {
		return none, sandboxer.E(sandboxer.Unsupported, nil, "a machine that sandboxes attach to is not saved").WithHint("take a portable snapshot: of the workspace's files")
	}
	unlock, err := e.env.Notes.Lock(ctx, p.key())
	if err != nil {
		return none, err
	}
	defer unlock()
	if err := e.machineIs(ctx, p); err != nil && sandboxer.KindOf(err) != sandboxer.Conflict {
		return none, err
	}
	dir := e.dir("snap", id)
	p.State.Saving = id
	if err := errors.Join(e.remember(ctx, p), os.RemoveAll(dir), os.MkdirAll(dir, 0o700)); err != nil {
		return none, err
	}
	disk := filepath.Join(dir, "disk.qcow2")
	err = e.monitored(ctx, p, func(m *monitor) error {
		return m.do("stop", nil, nil)
	})
	if err == nil {
		err = e.jobOf(ctx, p, "snapshot-save", map[string]any{"tag": savedTag, "vmstate": "disk", "devices": []string{"disk"}})
	}
	if err == nil {
		err = copyFile(disk, filepath.Join(e.vmDir(p), "disk.qcow2"))
	}
	// The machine continues, whatever happened here and to the caller. After
	// a cancel qemu still saves to the end before it answers.
	c, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveTime)
	defer cancel()
	derr := e.thaw(c, p)
	if err == nil {
		err = derr
	}
	if err == nil {
		// Counts of use that were not written yet leave unused clusters.
		err = e.tool(ctx, "qemu-img", "check", "-q", "-r", "leaks", disk)
	}
	if err != nil {
		os.RemoveAll(dir)
		if p.gone() {
			return none, missing(p.ID)
		}
		if sandboxer.KindOf(err) == sandboxer.Internal {
			err = roomless(sandboxer.E(sandboxer.Failed, err, "the machine of sandbox %s cannot be saved", p.ID))
		}
		return none, err
	}
	s := saved{Owner: p.Owner, Shape: *p.Shape, SandboxID: p.ID, Generation: p.Generation, Receipt: sandboxer.Snapshot{SnapshotID: id, Memory: true, Quiesced: true,
		Meta: map[string]string{"image": p.Shape.Image}}}
	if fi, err := os.Stat(disk); err == nil {
		s.Receipt.Bytes = fi.Size()
	}
	data, err := json.MarshalIndent(s, "", "  ")
	if err == nil {
		err = wholefile.Write(filepath.Join(dir, "record.json"), append(data, '\n'))
	}
	if err != nil {
		os.RemoveAll(dir)
		return none, roomless(sandboxer.E(sandboxer.Unavailable, err, "snapshot %s cannot be written", id))
	}
	return s.Receipt, nil
}

func (e *extension) jobOf(ctx context.Context, p *place, command string, args map[string]any) error {
	return e.monitored(ctx, p, func(m *monitor) error { return m.job(ctx, command, args) })
}

// thaw continues a machine that was paused for a save.
func (e *extension) thaw(ctx context.Context, p *place) error {
	// The memory saved in its disk is in the copy, or not needed.
	_ = e.jobOf(ctx, p, "snapshot-delete", map[string]any{"tag": savedTag, "devices": []string{"disk"}})
	var err error
	if !p.State.Paused {
		err = e.tell(ctx, p, "cont")
	}
	if err == nil {
		p.State.Saving = ""
		err = e.remember(ctx, p)
	}
	return err
}

// thawLeftovers continues the machines that a broker was saving when it died.
func (e *extension) thawLeftovers(ctx context.Context) {
	noted, _ := e.noted(ctx)
	for _, p := range noted {
		if p.Kind != managed || p.State.Saving == "" {
			continue
		}
		c, cancel := context.WithTimeout(ctx, time.Second)
		unlock, err := e.env.Notes.Lock(c, p.key())
		cancel()
		if err != nil {
			continue // another process is saving it
		}
		if p, err := e.recall(ctx, p.ID, p.Generation); err == nil && p.State.Saving != "" {
			if _, err := e.savedAs(p.State.Saving); err != nil && checkSnapshotID(p.State.Saving) == nil {
				os.RemoveAll(e.dir("snap", p.State.Saving))
			}
			c, cancel := context.WithTimeout(ctx, patience)
			if err := e.thaw(c, p); err != nil {
				e.log.Warn("a machine could not be resumed after it was saved", "sandbox", p.ID, "err", err)
			}
			cancel()
		}
		unlock()
	}
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (e *extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, from sandboxer.Snapshot) (sandboxer.Handle, error) {
	if err := checkSnapshotID(from.SnapshotID); err != nil {
		return sandboxer.Handle{}, err
	}
	unlock, err := e.env.Notes.Lock(ctx, "snap."+from.SnapshotID)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	defer unlock()
	s, err := e.savedAs(from.SnapshotID)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	if s.Owner != spec.Owner {
		return sandboxer.Handle{}, sandboxer.E(sandboxer.NotFound, nil, "there is no snapshot %s", from.SnapshotID)
	}
	p, err := e.resolve(spec)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	if p.Kind != managed || p.Shape.Image != s.Shape.Image {
		return sandboxer.Handle{}, sandboxer.E(sandboxer.Invalid, nil, "snapshot %s is of a machine from image %s", from.SnapshotID, s.Shape.Image)
	}
	if l := spec.Limits; l.MemoryBytes != 0 && l.MemoryBytes != s.Shape.Memory || l.MilliCPU != 0 && int(l.MilliCPU/1000) != s.Shape.CPUs {
		return sandboxer.Handle{}, sandboxer.E(sandboxer.Unsupported, nil, "a restored machine has the memory and processors that it was saved with: %d MiB and %d", s.Shape.Memory>>20, s.Shape.CPUs)
	}
	shape := s.Shape
	p.Shape = &shape
	return e.provision(ctx, p, spec, e.dir("snap", from.SnapshotID))
}

// DropSnapshot implements sandboxer.Snapshotter.
func (e *extension) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	if err := checkSnapshotID(s.SnapshotID); err != nil {
		return err
	}
	unlock, err := e.env.Notes.Lock(ctx, "snap."+s.SnapshotID)
	if err != nil {
		return err
	}
	defer unlock()
	// The record first: without it nothing can be restored.
	if err := os.Remove(e.dir("snap", s.SnapshotID, "record.json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Unavailable, err, "snapshot %s cannot be removed", s.SnapshotID)
	}
	if err := os.RemoveAll(e.dir("snap", s.SnapshotID)); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "snapshot %s cannot be removed", s.SnapshotID)
	}
	e.collect(ctx)
	return nil
}

// ListSnapshots implements sandboxer.Snapshotter.
func (e *extension) ListSnapshots(_ context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return func(yield func(sandboxer.FoundSnapshot, error) bool) {
		dirs, err := os.ReadDir(e.dir("snap"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			yield(sandboxer.FoundSnapshot{}, sandboxer.E(sandboxer.Unavailable, err, "the snapshots on this machine cannot be listed"))
			return
		}
		for _, d := range dirs {
			id := d.Name()
			if sandboxer.CheckID(id) != nil { // no broker made it
				continue
			}
			f := sandboxer.FoundSnapshot{Snapshot: sandboxer.Snapshot{SnapshotID: id}}
			s, err := e.savedAs(id)
			switch {
			case err == nil && s.Owner != owner:
				continue
			case err == nil && s.Receipt.SnapshotID == id:
				f = sandboxer.FoundSnapshot{Snapshot: s.Receipt, Whole: true, SandboxID: s.SandboxID, Generation: s.Generation}
			case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE): // this shows nothing about it
				yield(f, err)
				return
			default: // it is incomplete or damaged
				if _, gone := os.Lstat(e.dir("snap", id)); errors.Is(gone, fs.ErrNotExist) {
					continue // dropped meanwhile
				}
			}
			if !yield(f, nil) {
				return
			}
		}
	}
}

// Pause implements sandboxer.Pauser.
func (e *extension) Pause(ctx context.Context, h sandboxer.Handle) error {
	return e.still(ctx, h, true)
}

// Resume implements sandboxer.Pauser.
func (e *extension) Resume(ctx context.Context, h sandboxer.Handle) error {
	return e.still(ctx, h, false)
}

func (e *extension) still(ctx context.Context, h sandboxer.Handle, on bool) error {
	p, err := e.one(ctx, h)
	if err != nil {
		return err
	}
	if p.Kind != managed {
		return sandboxer.E(sandboxer.Unsupported, nil, "a machine that sandboxes attach to is not paused")
	}
	unlock, err := e.env.Notes.Lock(ctx, p.key())
	if err != nil {
		return err
	}
	defer unlock()
	if err := e.machineIs(ctx, p); err != nil && sandboxer.KindOf(err) != sandboxer.Conflict {
		return err
	}
	// While the note says paused no call enters it: set it first, and clear it last.
	if on {
		p.State.Paused = true
		if err := e.remember(ctx, p); err != nil {
			return err
		}
		if err = e.tell(ctx, p, "stop"); err != nil {
			// It may be paused or not. It must not be, so continue it.
			c, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
			defer cancel()
			_ = e.tell(c, p, "cont")
			p.State.Paused = false
			err = errors.Join(err, e.remember(ctx, p))
		}
	} else if err = e.tell(ctx, p, "cont"); err == nil {
		was := p.State.Paused
		p.State.Paused = false
		err = e.remember(ctx, p)
		if g, gerr := e.guest(p); err == nil && was && gerr == nil { // its clock was paused
			_, _ = g.host.Output(ctx, `[ "$(id -u)" != 0 ] || date -s "@$1" >/dev/null`, strconv.FormatInt(time.Now().Unix(), 10))
		}
	}
	if err != nil && sandboxer.KindOf(err) == sandboxer.Internal {
		err = sandboxer.E(sandboxer.Unavailable, err, "the machine of sandbox %s does not answer", p.ID)
	}
	return err
}

// copyFile copies a file to the disk; it shares blocks if the file system can.
func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Sync(), out.Close())
}

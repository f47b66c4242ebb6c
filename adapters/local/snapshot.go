//go:build linux

package local

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/sentry/state/checkpointfiles"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/version"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/mounts"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// Snapshots hold a sandbox's memory and its writable layer, as gVisor saves them, below
// snapshot/<id>:
//
//	saved.json     what restoring takes besides; written first
//	image/         gVisor's files
//	receipt.json   written last: the snapshot is whole
const (
	savedFile   = "saved.json"
	receiptFile = "receipt.json"
)

// saved is what restoring a snapshot takes.
type saved struct {
	dir    string
	Record record   `json:"record"` // of the sandbox that was saved
	Args   []string `json:"args"`   // of its first process; gVisor restores no other
	Shown  []string `json:"shown"`  // the machine's directories in its skeleton

	// Process, Mounts and Annotations are those it ran with: gVisor compares them. They are
	// absent in what builds saved that did not write them down.
	Process     *specs.Process    `json:"process,omitempty"` // without its environment, which may differ
	Mounts      []specs.Mount     `json:"mounts,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// keep notes what gVisor will compare with what the sandbox is restored with.
func (s *saved) keep(ran *specs.Spec) {
	p := *ran.Process
	p.Env = nil
	s.Process, s.Mounts, s.Annotations = &p, ran.Mounts, ran.Annotations
}

// Builds that did not write down what a sandbox ran with had one of two sets of
// capabilities, and the arguments of the first process tell which. These lists are what
// those builds had, whatever today's sandboxes have.
var (
	formerCapabilities = []string{"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL",
		"CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT"}
	formerOwnCapabilities = append(slices.Clone(formerCapabilities), "CAP_SYS_RESOURCE")
)

// aboveLimits reports whether a first process is one whose agent is above the limits: since
// then, too, the program that waits can hand over connections.
func aboveLimits(args []string) bool { return slices.Contains(args, "--above-limits") }

// dress gives the spec of a new sandbox what the saved one ran with, as far as gVisor
// compares it. What the new one has besides stays: its name, its environment, and where
// directories and files of this machine are now.
func (s *saved) dress(spec *specs.Spec, skel *skeleton) error {
	spec.Process.Args = s.Args
	if s.Process == nil {
		had := formerCapabilities
		if aboveLimits(s.Args) {
			had = formerOwnCapabilities
		}
		spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: had, Effective: had, Permitted: had}
		return nil
	}
	env := spec.Process.Env
	p := *s.Process
	p.Args, p.Env = s.Args, env
	spec.Process = &p
	now := map[string]string{}
	for _, m := range spec.Mounts {
		if m.Type == "bind" {
			now[m.Destination] = m.Source
		}
	}
	now[layerMount] = filepath.Join(skel.root, "mnt")
	for _, d := range skel.shown {
		now[d] = d
	}
	mounts := make([]specs.Mount, 0, len(s.Mounts))
	for _, m := range s.Mounts {
		if m.Type == "bind" {
			source, ok := now[m.Destination]
			if !ok {
				return sandboxer.E(sandboxer.Unsupported, nil, "the saved sandbox had a directory of this machine at %q, which this version does not give", m.Destination).
					WithHint("restore it with the version that saved it, or take its files, if it was saved as portable too: sandboxer restore %s --kind portable", filepath.Base(s.dir))
			}
			m.Source = source
		}
		mounts = append(mounts, m)
	}
	spec.Mounts = mounts
	annotations := map[string]string{}
	for k, v := range s.Annotations {
		annotations[k] = v
	}
	for _, k := range []string{"dev.gvisor.spec.rootfs.source", "dev.gvisor.spec.rootfs.overlay"} { // where things are now
		if v, ok := spec.Annotations[k]; ok {
			annotations[k] = v
		}
	}
	spec.Annotations = annotations
	return nil
}

func (s *saved) image() string { return filepath.Join(s.dir, "image") }

// receipt is the broker's receipt of a snapshot, with what proves it unharmed.
type receipt struct {
	Snapshot sandboxer.Snapshot `json:"snapshot"`
	Files    []savedPart        `json:"files"`
}

type savedPart struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

func (e *extension) snapshotDir(id string) (string, error) {
	if err := sandboxer.CheckID(id); err != nil {
		return "", sandboxer.E(sandboxer.Invalid, err, "%q is no ID of a snapshot", id)
	}
	return e.dir("snapshot", id), nil
}

// Snapshot implements sandboxer.Snapshotter. The sandbox stands still while its kernel
// writes itself down; what was begun and not finished has no receipt.
func (e *extension) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (sandboxer.Snapshot, error) {
	dir, err := e.snapshotDir(id)
	if err != nil {
		return sandboxer.Snapshot{}, err
	}
	release, err := e.lock(ctx, "snapshot."+id)
	if err != nil {
		return sandboxer.Snapshot{}, err
	}
	defer release()
	if r, err := readReceipt(dir); err == nil {
		return r.Snapshot, nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return sandboxer.Snapshot{}, sandboxer.E(sandboxer.Unavailable, err, "what an earlier attempt left of snapshot %s cannot be removed", id)
	}
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return sandboxer.Snapshot{}, err
	}
	defer unlock()
	r, err := e.save(ctx, b, dir, id)
	if err != nil {
		err = errors.Join(err, os.RemoveAll(dir))
		if !b.alive() {
			e.drop(b.name)
			return sandboxer.Snapshot{}, errors.Join(e.gone(b.name), err)
		}
		return sandboxer.Snapshot{}, err
	}
	return r.Snapshot, nil
}

func (e *extension) save(ctx context.Context, b *liveSandbox, dir, id string) (*receipt, error) {
	rec, err := e.record(b.name)
	if err != nil {
		return nil, err
	}
	if err := rec.savable(); err != nil {
		return nil, err
	}
	e.mu.Lock()
	current := e.skel
	e.mu.Unlock()
	s := saved{dir: dir, Record: rec, Args: b.c.Spec.Process.Args, Shown: current.shown}
	s.keep(b.c.Spec)
	if rec.Skeleton != current.digest {
		s.Shown = shownIn(b.c.Spec.Mounts, filepath.Join(e.mounts(), rec.Skeleton))
	}
	if err := os.MkdirAll(s.image(), 0o700); err != nil {
		return nil, diskError(err, "making the snapshot's directory")
	}
	if err := e.roomFor(b.name, dir); err != nil {
		return nil, err
	}
	if err := writeDurably(filepath.Join(dir, savedFile), s); err != nil {
		return nil, diskError(err, "writing the snapshot down")
	}
	err = b.checkpoint(ctx, s.image())
	if err != nil {
		if strings.Contains(err.Error(), unix.ENOSPC.Error()) {
			return nil, sandboxer.E(sandboxer.Exhausted, err, "the disk is too full for a snapshot of sandbox %s", rec.SandboxID)
		}
		return nil, b.failed(ctx, err, "saving sandbox "+rec.SandboxID)
	}
	r := &receipt{}
	if r.Files, err = readBack(s.image()); err != nil {
		return nil, diskError(err, "reading the snapshot back")
	}
	sum := sha256.New()
	var bytes int64
	for _, p := range r.Files {
		fmt.Fprintln(sum, p.Name, p.Bytes, p.SHA256)
		bytes += p.Bytes
	}
	r.Snapshot = sandboxer.Snapshot{SnapshotID: id, Bytes: bytes, Memory: true, Quiesced: true,
		Meta: map[string]string{"digest": "sha256:" + hex.EncodeToString(sum.Sum(nil)), "gvisor": version.Version()}}
	if err := writeDurably(filepath.Join(dir, receiptFile), r); err != nil {
		return nil, diskError(err, "sealing the snapshot")
	}
	return r, nil
}

// checkpoint has the sandbox's kernel write itself down in dir, and go on. Meanwhile it
// answers nobody; how long that takes is bounded by ctx alone.
func (b *liveSandbox) checkpoint(ctx context.Context, dir string) error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	for _, name := range []string{checkpointfiles.StateFileName, checkpointfiles.PagesMetadataFileName, checkpointfiles.PagesFileName} {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if err != nil {
			return err
		}
		files = append(files, f)
	}
	if err := b.ask(ctx, b.ctl.ping); err != nil {
		return err
	}
	defer b.pulse.hush()()
	args := &control.SaveOpts{Metadata: statefile.CompressionLevelNone.ToMetadata(), HavePagesFile: true, Resume: true}
	return b.heed(b.ctl.call(ctx, boot.ContMgrCheckpoint, args, nil, files...))
}

// failed gives a call its kind that the kernel inside refused or did not answer.
func (b *liveSandbox) failed(ctx context.Context, err error, what string) error {
	if said, ok := errors.AsType[remoteError](err); ok {
		return sandboxer.E(sandboxer.Unavailable, said, "%s failed", what)
	}
	return b.lost(ctx, err, what)
}

// roomFor refuses a snapshot for which the disk has no room: a full disk harms others.
func (e *extension) roomFor(name, dir string) error {
	_, memory, _ := e.cgroups.usage(name)
	var st unix.Statfs_t
	if memory < 0 || unix.Statfs(dir, &st) != nil {
		return nil
	}
	if free := int64(st.Bavail) * st.Bsize; free < memory {
		return sandboxer.E(sandboxer.Exhausted, nil, "a snapshot may need %d MiB, and %d MiB are free on the disk", memory>>20, free>>20).
			WithHint("remove snapshots you no longer need: sandboxer snapshot ls")
	}
	return nil
}

// shownIn tells from a sandbox's bundle which directories of the machine it sees.
func shownIn(ran []specs.Mount, root string) []string {
	var out []string
	for _, m := range ran {
		if m.Type == "bind" && !inDir(m.Destination, agentDir) {
			out = append(out, m.Destination)
		}
	}
	if len(out) > 0 {
		return out
	}
	below, _ := mounts.Below(root)
	for _, p := range below {
		if rel, err := filepath.Rel(root, p); err == nil && rel != "." {
			out = append(out, "/"+rel)
		}
	}
	return out
}

// readBack brings the files below dir to the disk, reads them, and says what they are.
func readBack(dir string) ([]savedPart, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var parts []savedPart
	for _, d := range entries {
		p, err := readPart(filepath.Join(dir, d.Name()), true)
		if err != nil {
			return nil, err
		}
		parts = append(parts, p)
	}
	return parts, wholefile.SyncDir(dir)
}

func readPart(name string, sync bool) (savedPart, error) {
	f, err := os.Open(name)
	if err != nil {
		return savedPart{}, err
	}
	defer f.Close()
	if sync {
		if err := errors.Join(f.Chmod(0o600), f.Sync()); err != nil {
			return savedPart{}, err
		}
	}
	sum := sha256.New()
	n, err := io.Copy(sum, f)
	return savedPart{Name: filepath.Base(name), Bytes: n, SHA256: hex.EncodeToString(sum.Sum(nil))}, err
}

// verify compares a snapshot's files with its receipt.
func (r *receipt) verify(dir string) error {
	for _, want := range r.Files {
		got, err := readPart(filepath.Join(dir, want.Name), false)
		if err != nil || got != want {
			return sandboxer.E(sandboxer.Failed, err, "snapshot %s is damaged: %s is not what was saved", r.Snapshot.SnapshotID, want.Name).
				WithHint("restore another snapshot; remove this one with: sandboxer snapshot rm %s", r.Snapshot.SnapshotID)
		}
	}
	return nil
}

// ListSnapshots implements sandboxer.Snapshotter.
func (e *extension) ListSnapshots(_ context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return func(yield func(sandboxer.FoundSnapshot, error) bool) {
		dirs, err := os.ReadDir(e.dir("snapshot"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			yield(sandboxer.FoundSnapshot{}, sandboxer.E(sandboxer.Unavailable, err, "the snapshots on this machine cannot be listed"))
			return
		}
		for _, d := range dirs {
			if sandboxer.CheckID(d.Name()) != nil {
				continue
			}
			f, err := e.foundSnapshot(d.Name(), owner)
			if errors.Is(err, fs.ErrNotExist) { // dropped meanwhile, or somebody else's
				continue
			}
			if !yield(f, err) {
				return
			}
		}
	}
}

// foundSnapshot tells what is kept under id. fs.ErrNotExist: nothing of owner's.
func (e *extension) foundSnapshot(id, owner string) (f sandboxer.FoundSnapshot, err error) {
	dir := e.dir("snapshot", id)
	f.Snapshot.SnapshotID = id
	if _, err := os.Lstat(dir); err != nil {
		return f, err
	}
	var s saved
	data, err := os.ReadFile(filepath.Join(dir, savedFile))
	if err == nil {
		_, err = strictjson.DecodeStored(data, &s)
	}
	if err == nil {
		if s.Record.Owner != owner {
			return f, fs.ErrNotExist
		}
		f.SandboxID, f.Generation, f.Stamp = s.Record.SandboxID, s.Record.Generation, s.Record.Stamp
		var r *receipt
		if r, err = readReceipt(dir); err == nil && r.Snapshot.SnapshotID == id {
			f.Snapshot, f.Whole = r.Snapshot, true
		}
	}
	if isShort(err) {
		return f, damaged(err, "snapshot "+id+" on this machine")
	}
	return f, nil // what is torn, or was not saved to the end, is there all the same
}

func readReceipt(dir string) (*receipt, error) {
	var r receipt
	data, err := os.ReadFile(filepath.Join(dir, receiptFile))
	if err != nil {
		return nil, err
	}
	_, err = strictjson.DecodeStored(data, &r)
	return &r, err
}

// writeDurably writes v as JSON so that a power cut leaves it whole or absent.
func writeDurably(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return wholefile.Write(name, data)
}

// savedSkeleton finds the skeleton that a saved sandbox had.
func (e *extension) savedSkeleton(s *saved) (*skeleton, error) {
	current, err := e.skeleton()
	if err != nil {
		return nil, err
	}
	if current.digest == s.Record.Skeleton {
		return current, nil
	}
	old := &skeleton{digest: s.Record.Skeleton, dir: e.dir("skel", s.Record.Skeleton, "root"), shown: s.Shown}
	if _, err := os.Stat(old.dir); err != nil {
		return nil, sandboxer.E(sandboxer.Failed, err, "the root file system of the saved sandbox is gone from this machine")
	}
	if !e.asRoot {
		old.root, old.binds = old.dir, old.shown
		return old, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	old.root = filepath.Join(e.mounts(), old.digest)
	if !old.intact() {
		if err := old.assemble(); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the root file system of the saved sandbox cannot be mounted")
		}
	}
	return old, nil
}

// savedImage finds the image that a saved sandbox runs on; nil if on none.
func (e *extension) savedImage(ctx context.Context, s *saved) (*image, error) {
	if s.Record.ImageFile == "" {
		return nil, nil
	}
	release, err := e.images.store.Hold(ctx)
	if err != nil {
		return nil, err
	}
	img := &image{path: filepath.Join(e.images.dir, s.Record.ImageFile), config: v1.Config{Env: s.Record.ImageEnv}, release: release}
	if _, err := os.Stat(img.path); err != nil {
		release()
		return nil, sandboxer.E(sandboxer.Failed, err, "the image of the saved sandbox, %s, is gone from this machine", s.Record.Image)
	}
	key := strings.TrimSuffix(s.Record.ImageFile, ".erofs")
	if _, err := os.Stat(e.images.sumFile(key)); err == nil && !e.images.isWhole(key) { // builds before had none
		release()
		return nil, sandboxer.E(sandboxer.Failed, nil, "the image of the saved sandbox, %s, is damaged on this machine", s.Record.Image).
			WithHint("create a sandbox with that image: it is made again")
	}
	return img, nil
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (e *extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (sandboxer.Handle, error) {
	dir, err := e.snapshotDir(s.SnapshotID)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	// What comes from the snapshot is not asked for again.
	order := spec
	order.Inputs, order.Image, order.Workspace = nil, "", ""
	if _, err := e.check(order); err != nil {
		return sandboxer.Handle{}, err
	}
	spec.Limits = e.defaults(spec.Limits)
	return e.provision(ctx, spec, func(name string) (*liveSandbox, error) {
		r, err := readReceipt(dir)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, sandboxer.E(sandboxer.NotFound, err, "there is no snapshot %s on this machine", s.SnapshotID)
		}
		from := &saved{dir: dir}
		if err == nil {
			err = readJSON(filepath.Join(dir, savedFile), from)
		}
		if err != nil {
			return nil, sandboxer.E(sandboxer.Failed, err, "snapshot %s is damaged", s.SnapshotID)
		}
		if v := r.Snapshot.Meta["gvisor"]; v != version.Version() {
			return nil, sandboxer.E(sandboxer.Unsupported, nil, "snapshot %s was saved by another version of gVisor (%s; this program has %s), which cannot be restored", s.SnapshotID, v, version.Version()).
				WithHint("its files can, if it was saved as portable too: sandboxer restore %s --kind portable; otherwise start the program that saved it, restore it there, and save its files: sandboxer snapshot create ID --portable", s.SnapshotID)
		}
		// gVisor gives what it restores the limits that it had inside.
		if had, want := from.Record.Limits, spec.Limits; had.DiskBytes != want.DiskBytes || had.PIDs != want.PIDs {
			return nil, sandboxer.E(sandboxer.Unsupported, nil, "a sandbox is restored with the limits on disk and processes that it was saved with").
				WithHint("leave them out; limits on CPU and memory may differ")
		}
		if !sameMounts(from.Record.Mounts, spec.Mounts) {
			return nil, sandboxer.E(sandboxer.Unsupported, nil, "a sandbox is restored with mounts at the targets, and with the rights, that it was saved with").
				WithHint("restore it on the profile that it had, or take its files, if it was saved as portable too: sandboxer restore %s --kind portable", s.SnapshotID)
		}
		img, err := e.savedImage(ctx, from)
		if err != nil {
			return nil, err
		}
		if img != nil {
			defer img.release() // the record then says that it is in use
		}
		sound := make(chan error, 1)
		go func() { sound <- r.verify(from.image()) }()
		b, err := e.create(ctx, name, spec, img, from)
		if verr := <-sound; verr != nil { // also where the damage has stopped gVisor
			return nil, verr
		}
		if err != nil {
			return nil, err
		}
		return b, b.setFuse(ctx, spec.Fuse)
	})
}

func readJSON(name string, v any) error {
	data, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	_, err = strictjson.DecodeStored(data, v)
	return err
}

// DropSnapshot implements sandboxer.Snapshotter. Sandboxes that are being restored hold
// its files open.
func (e *extension) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	dir, err := e.snapshotDir(s.SnapshotID)
	if err != nil {
		return err
	}
	unlock, err := e.lock(ctx, "snapshot."+s.SnapshotID)
	if err != nil {
		return err
	}
	defer unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	// Without its receipt it is not whole any more.
	if err := os.Remove(filepath.Join(dir, receiptFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandboxer.E(sandboxer.Unavailable, err, "snapshot %s cannot be removed", s.SnapshotID)
	}
	if err := os.RemoveAll(dir); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "snapshot %s cannot be removed", s.SnapshotID)
	}
	return nil
}

// savedRoots lists the skeletons and the files of images that snapshots need.
func (e *extension) savedRoots() (skeletons, images []string, err error) {
	entries, err := os.ReadDir(e.dir("snapshot"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	for _, d := range entries {
		var s saved
		if err := readJSON(e.dir("snapshot", d.Name(), savedFile), &s); err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				continue // being made, of a live sandbox, or being dropped
			}
			return nil, nil, err
		}
		skeletons = append(skeletons, s.Record.Skeleton)
		if s.Record.ImageFile != "" {
			images = append(images, s.Record.ImageFile)
		}
	}
	return skeletons, images, nil
}

// Pause implements sandboxer.Pauser: the sandbox's kernel stops all its tasks. gVisor
// counts pauses, so each step is written down: a broker that died in between must not
// make it two.
func (e *extension) Pause(ctx context.Context, h sandboxer.Handle) error {
	return e.freezer(ctx, h, func(b *liveSandbox) error {
		frozen, err := e.isFrozen(ctx, b)
		if err != nil || frozen {
			return err
		}
		if err := b.ask(ctx, b.ctl.ping); err != nil { // before anything is noted
			return b.failed(ctx, err, "freezing the sandbox")
		}
		if err := e.setFrozen(b.name, stepFreezing); err != nil {
			return err
		}
		if err := b.ask(ctx, b.ctl.pause); err != nil {
			return b.failed(ctx, err, "freezing the sandbox")
		}
		return e.setFrozen(b.name, stepFrozen)
	})
}

// Resume implements sandboxer.Pauser.
func (e *extension) Resume(ctx context.Context, h sandboxer.Handle) error {
	return e.freezer(ctx, h, func(b *liveSandbox) error {
		frozen, err := e.isFrozen(ctx, b)
		if err != nil || !frozen {
			return err
		}
		if err := e.setFrozen(b.name, stepThawing); err != nil {
			return err
		}
		if err := b.ask(ctx, b.ctl.resume); err != nil {
			return b.failed(ctx, err, "thawing the sandbox")
		}
		if err := e.setFrozen(b.name, ""); err != nil {
			return err
		}
		rec, err := e.record(b.name)
		if err != nil {
			return err
		}
		return b.setFuse(ctx, rec.Fuse) // which did not burn meanwhile
	})
}

func (e *extension) freezer(ctx context.Context, h sandboxer.Handle, do func(*liveSandbox) error) error {
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return err
	}
	defer unlock()
	return do(b)
}

// The steps of freezing, in the file "frozen" of a sandbox's directory, which is absent
// while it runs.
const (
	stepFreezing = "freezing"
	stepFrozen   = "frozen"
	stepThawing  = "thawing"
)

// frozen returns the step of freezing that the sandbox is in; "" while it runs.
func (e *extension) frozen(name string) string {
	data, err := os.ReadFile(e.dir("box", name, "frozen"))
	if err != nil {
		return ""
	}
	return string(data)
}

func (e *extension) setFrozen(name, step string) error {
	p := e.dir("box", name, "frozen")
	e.mu.Lock()
	b := e.boxes[name]
	e.mu.Unlock()
	if b != nil && step != "" {
		b.setFrozen(true)
	}
	if step == "" {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return diskError(err, "noting that the sandbox runs")
		}
		if b != nil {
			b.setFrozen(false)
		}
		return nil
	}
	if err := wholefile.Replace(p, []byte(step)); err != nil {
		return diskError(err, "noting that the sandbox is frozen")
	}
	return nil
}

// isFrozen tells whether the sandbox is frozen, and if a broker died on the way there or
// back, looks.
func (e *extension) isFrozen(ctx context.Context, b *liveSandbox) (bool, error) {
	switch e.frozen(b.name) {
	case "":
		return false, nil
	case stepFrozen:
		return true, nil
	}
	runs, err := b.runs(ctx)
	if err != nil {
		return false, err
	}
	step := stepFrozen
	if runs {
		step = ""
	}
	return !runs, e.setFrozen(b.name, step)
}

// runs reports whether the sandbox's kernel runs what it is given.
func (b *liveSandbox) runs(ctx context.Context) (bool, error) {
	pid, err := b.executeOwn(ctx, ownCapabilities, nil, pausePath) // ends at once
	if err != nil {
		return false, b.failed(ctx, err, "asking whether the sandbox is frozen")
	}
	wctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	_, err = b.ctl.waitPID(wctx, pid)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return false, nil
	}
	return err == nil, b.lost(ctx, err, "asking whether the sandbox is frozen")
}

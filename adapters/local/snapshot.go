//go:build linux

package local

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
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
//	saved.json     other data for restoring; written first
//	image/         gVisor's files
//	receipt.json   written last: the snapshot is complete
const (
	savedFile   = "saved.json"
	receiptFile = "receipt.json"
)

// saved is the data that restoring a snapshot needs.
type saved struct {
	dir    string
	Record record   `json:"record"` // of the sandbox that was saved
	Args   []string `json:"args"`   // of its first process; gVisor restores no other
	Shown  []string `json:"shown"`  // the machine's directories in its skeleton

	// Process, Mounts and Annotations are those of the saved sandbox: gVisor compares them.
	// They are absent in snapshots of builds that did not record them.
	Process     *specs.Process    `json:"process,omitempty"` // without its environment, which may differ
	Mounts      []specs.Mount     `json:"mounts,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// keep notes the parts of the spec that gVisor will compare at a restore.
func (s *saved) keep(ran *specs.Spec) {
	p := *ran.Process
	p.Env = nil
	s.Process, s.Mounts, s.Annotations = &p, ran.Mounts, ran.Annotations
}

// Builds that did not record a sandbox's spec had one of two sets of capabilities, and the
// arguments of the first process show which. These lists are those of these builds,
// whatever today's sandboxes have.
var (
	formerCapabilities = []string{"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL",
		"CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT"}
	formerOwnCapabilities = append(slices.Clone(formerCapabilities), "CAP_SYS_RESOURCE")
)

// aboveLimits reports whether the agent of a first process is above the limits. Since that
// build, too, the waiting program can hand over connections.
func aboveLimits(args []string) bool { return slices.Contains(args, "--above-limits") }

// dress gives the spec of a new sandbox what gVisor compares with the saved one. The rest
// stays: its name, its environment, and the present places of directories and files of this
// machine.
func (s *saved) dress(spec *specs.Spec, skel *skeleton) error {
	spec.Process.Args = s.Args
	if s.Process == nil {
		had := formerCapabilities
		if aboveLimits(s.Args) {
			had = formerOwnCapabilities
		}
		spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: had, Effective: had, Permitted: had}
		spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m specs.Mount) bool { return m.Type == "cgroup" })
		for i, m := range spec.Mounts {
			if m.Destination == "/dev/shm" {
				spec.Mounts[i].Options = []string{"mode=1777", "size=67108864"}
			}
		}
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
				return sandboxer.E(sandboxer.Unsupported, nil, "the saved sandbox had a directory of this machine at %q, which this version does not provide", m.Destination).
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
	for _, k := range []string{"dev.gvisor.spec.rootfs.source", "dev.gvisor.spec.rootfs.overlay"} { // present places
		if v, ok := spec.Annotations[k]; ok {
			annotations[k] = v
		}
	}
	spec.Annotations = annotations
	return nil
}

func (s *saved) image() string { return filepath.Join(s.dir, "image") }

// receipt is the broker's receipt of a snapshot, with sums that prove it unharmed.
type receipt struct {
	Snapshot sandboxer.Snapshot `json:"snapshot"`
	Files    []savedPart        `json:"files"`           // below image/
	Saved    *savedPart         `json:"saved,omitempty"` // saved.json; builds before had none
}

// digest covers everything that the receipt says about files. The broker's database has it,
// too.
func (r *receipt) digest() string {
	sum := sha256.New()
	files := r.Files
	if r.Saved != nil {
		files = append(slices.Clone(files), *r.Saved)
	}
	for _, p := range files {
		fmt.Fprintln(sum, p.Name, p.Bytes, p.SHA256)
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil))
}

type savedPart struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

func (e *extension) snapshotDir(id string) (string, error) {
	if err := sandboxer.CheckID(id); err != nil {
		return "", sandboxer.E(sandboxer.Invalid, err, "%q is not a snapshot ID", id)
	}
	return e.dir("snapshot", id), nil
}

// Snapshot implements sandboxer.Snapshotter. The sandbox is paused while its kernel saves
// its memory. An unfinished snapshot has no receipt.
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
		return sandboxer.Snapshot{}, sandboxer.E(sandboxer.Unavailable, err, "remains of an earlier attempt to save snapshot %s cannot be removed", id)
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
		return nil, diskError(err, "recording the snapshot")
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
	part, err := readPart(filepath.Join(dir, savedFile), false)
	if err != nil {
		return nil, diskError(err, "reading the snapshot back")
	}
	r.Saved = &part
	var bytes int64
	for _, p := range r.Files {
		bytes += p.Bytes
	}
	r.Snapshot = sandboxer.Snapshot{SnapshotID: id, Bytes: bytes, Memory: true, Quiesced: true,
		Meta: map[string]string{"digest": r.digest(), "gvisor": version.Version()}}
	if err := writeDurably(filepath.Join(dir, receiptFile), r); err != nil {
		return nil, diskError(err, "sealing the snapshot")
	}
	return r, nil
}

// checkpoint makes the sandbox's kernel save itself in dir, and continue. Meanwhile it
// answers no call; only ctx bounds how long that takes.
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

// failed gives a kind to a call that the kernel inside refused or did not answer.
func (b *liveSandbox) failed(ctx context.Context, err error, what string) error {
	if said, ok := errors.AsType[remoteError](err); ok {
		return sandboxer.E(sandboxer.Unavailable, said, "%s failed", what)
	}
	return b.lost(ctx, err, what)
}

// roomFor refuses a snapshot if the disk has no room for it: a full disk harms others.
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

// shownIn returns from a sandbox's bundle the machine's directories that it sees.
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

// readBack syncs the files below dir to the disk, reads them, and returns their sums.
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

// verifySaved compares saved.json with the receipt, and the receipt with the broker's copy of its
// digest.
func (r *receipt) verifySaved(dir string, kept sandboxer.Snapshot) error {
	if digest := kept.Meta["digest"]; digest != "" && digest != r.digest() {
		return errors.New("its receipt differs from the broker's copy")
	}
	if r.Saved == nil {
		return nil
	}
	got, err := readPart(filepath.Join(dir, savedFile), false)
	if err == nil && got != *r.Saved {
		err = errors.New(savedFile + " has changed since it was saved")
	}
	return err
}

// verify compares gVisor's files of a snapshot with its receipt.
func (r *receipt) verify(dir string) error {
	for _, want := range r.Files {
		got, err := readPart(filepath.Join(dir, want.Name), false)
		if err != nil || got != want {
			return sandboxer.E(sandboxer.Failed, err, "snapshot %s is damaged: %s has changed since it was saved", r.Snapshot.SnapshotID, want.Name).
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
			if errors.Is(err, fs.ErrNotExist) { // dropped meanwhile, or another owner's
				continue
			}
			if !yield(f, err) {
				return
			}
		}
	}
}

// foundSnapshot describes the snapshot under id. fs.ErrNotExist: nothing of owner's.
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
		f.SandboxID, f.Generation = s.Record.SandboxID, s.Record.Generation
		var r *receipt
		if r, err = readReceipt(dir); err == nil && r.Snapshot.SnapshotID == id {
			f.Snapshot, f.Whole = r.Snapshot, true
		}
	}
	if isShort(err) {
		return f, damaged(err, "snapshot "+id+" on this machine")
	}
	return f, nil // an incomplete or damaged snapshot still exists
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

// writeDurably writes v as JSON so that after a power failure it is complete or absent.
func writeDurably(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return wholefile.Write(name, data)
}

// savedSkeleton finds the skeleton of a saved sandbox.
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

// savedImage finds the image of a saved sandbox; nil if it has none.
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
	if _, err := os.Stat(e.images.sumFile(key)); err == nil && !e.images.isWhole(key) { // earlier builds had none
		release()
		return nil, sandboxer.E(sandboxer.Failed, nil, "the image of the saved sandbox, %s, is damaged on this machine", s.Record.Image).
			WithHint("create a sandbox with that image: the image is then made again")
	}
	return img, nil
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (e *extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (sandboxer.Handle, error) {
	dir, err := e.snapshotDir(s.SnapshotID)
	if err != nil {
		return sandboxer.Handle{}, err
	}
	// The snapshot provides the inputs, the image and the workspace.
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
			err = r.verifySaved(dir, s)
		}
		if err == nil {
			err = readJSON(filepath.Join(dir, savedFile), from)
		}
		if err != nil {
			return nil, sandboxer.E(sandboxer.Failed, err, "snapshot %s is damaged", s.SnapshotID)
		}
		if v := r.Snapshot.Meta["gvisor"]; v != version.Version() {
			return nil, sandboxer.E(sandboxer.Unsupported, nil, "snapshot %s was saved by another version of gVisor (%s; this program has %s), which cannot be restored", s.SnapshotID, v, version.Version()).
				WithHint("to restore its files, if it was also saved as portable: sandboxer restore %s --kind portable; otherwise start the program that saved it, restore it there, and save its files: sandboxer snapshot create ID --portable", s.SnapshotID)
		}
		// gVisor restores a sandbox with its limits inside unchanged.
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
			defer img.release() // the record then keeps it
		}
		sound := make(chan error, 1)
		go func() { sound <- r.verify(from.image()) }()
		b, err := e.create(ctx, name, spec, img, from)
		if verr := <-sound; verr != nil { // also if the damage has stopped gVisor
			return nil, verr
		}
		if err != nil {
			return nil, err
		}
		if err := b.introduce(ctx, from.Record); err != nil {
			e.warn("a restored sandbox still shows the name and limits that it was saved with", fmt.Errorf("sandbox %s: %w", name, err))
		}
		return b, b.setFuse(ctx, spec.Fuse)
	})
}

// introduce gives a restored sandbox its own name and limits where its kernel still shows
// those of the saved one.
func (b *liveSandbox) introduce(ctx context.Context, was record) error {
	return errors.Join(b.nameItself(ctx, was.SandboxID), b.showLimits(ctx))
}

// nameItself makes the sandbox's own name resolve in its /etc/hosts, in place of its earlier name.
func (b *liveSandbox) nameItself(ctx context.Context, was string) error {
	hosts, err := b.readSmall(ctx, "/etc/hosts")
	line := func(name string) string { return "127.0.1.1\t" + name + "\n" }
	if err != nil || len(hosts) == maxSmall || strings.Contains(hosts, line(b.rec.SandboxID)) {
		return err
	}
	// Remove the old line and append the new one: another line of the guest may come before it.
	hosts = strings.ReplaceAll(hosts, line(was), "")
	if hosts != "" && !strings.HasSuffix(hosts, "\n") {
		hosts += "\n"
	}
	hosts += line(b.rec.SandboxID)
	archive, err := memoryFile("hosts")
	if err != nil {
		return err
	}
	defer archive.Close()
	w := tar.NewWriter(archive)
	err = w.WriteHeader(&tar.Header{Name: "hosts", Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(hosts)), ModTime: time.Now()})
	if err == nil {
		_, err = io.WriteString(w, hosts)
	}
	if err == nil {
		err = w.Close()
	}
	if err == nil {
		_, err = archive.Seek(0, io.SeekStart)
	}
	if err != nil {
		return err
	}
	ws, err := b.run(ctx, ownCapabilities, map[int]*os.File{0: archive}, agentPath, "untar", "--replace", "/etc")
	if err == nil && ws != 0 {
		err = fmt.Errorf("unpacking /etc/hosts ended with %d", ws)
	}
	return err
}

// showLimits updates the limits in the files of control groups inside.
func (b *liveSandbox) showLimits(ctx context.Context) error {
	in, err := b.readSmall(ctx, "/proc/1/cgroup") // 3:memory:/NAME, and so on
	if err != nil {
		return err
	}
	var args control.CgroupsWriteArgs
	set := func(controller, name, value string) {
		for line := range strings.Lines(in) {
			if f := strings.SplitN(strings.TrimSpace(line), ":", 3); len(f) == 3 && f[1] == controller {
				args.Args = append(args.Args, control.CgroupsWriteArg{Value: value,
					File: control.CgroupControlFile{Controller: controller, Path: f[2], Name: name}})
			}
		}
	}
	memory, quota, period := int64(math.MaxInt64), int64(-1), uint64(0)
	if n := b.rec.Limits.MemoryBytes; n > 0 {
		memory = n
	}
	if b.rec.Limits.MilliCPU > 0 {
		quota, period = cpuQuota(b.rec.Limits)
		set("cpu", "cpu.cfs_period_us", strconv.FormatUint(period, 10))
	}
	set("memory", "memory.limit_in_bytes", strconv.FormatInt(memory, 10))
	set("cpu", "cpu.cfs_quota_us", strconv.FormatInt(quota, 10))
	var out control.CgroupsResults
	if err := b.ask(ctx, func(ctx context.Context) error { return b.ctl.call(ctx, boot.CgroupsWriteControlFiles, &args, &out) }); err != nil {
		return err
	}
	var errs []error
	for _, r := range out.Results {
		errs = append(errs, r.AsError())
	}
	return errors.Join(errs...)
}

func readJSON(name string, v any) error {
	data, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	_, err = strictjson.DecodeStored(data, v)
	return err
}

// DropSnapshot implements sandboxer.Snapshotter. A restore in progress holds the files
// open.
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
	// A snapshot without its receipt is incomplete.
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
				continue // in progress, of a live sandbox, or being dropped
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

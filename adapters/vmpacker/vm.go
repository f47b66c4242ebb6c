package vmpacker

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/subprocess"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// managed is the kind of a place on a managed machine.
const managed = "managed"

// managedSilence is how long a managed machine may be silent before connections to it count
// as lost. Its end closes them at once, and a machine that runs out of memory keeps reading
// its programs again until the kernel picks a victim.
const managedSilence = 5 * time.Minute

// An Image is what managed machines are started from.
type Image struct {
	File         string        `yaml:"file" json:"file,omitempty" format:"abspath" help:"A qcow2 image; it must not change while machines or snapshots of it exist."`
	Packer       *Packer       `yaml:"packer" json:"packer,omitempty" help:"What builds the image when it is missing, in place of file."`
	Kernel       string        `yaml:"kernel" json:"kernel,omitempty" format:"abspath" help:"Kernel to start with; empty means that the image has a boot loader."`
	Initrd       string        `yaml:"initrd" json:"initrd,omitempty" format:"abspath" help:"Initial RAM disk to start kernel with."`
	Append       string        `yaml:"append" json:"append,omitempty" format:"line" help:"Command line of the kernel."`
	Memory       int64         `yaml:"memory" json:"memory,omitempty" unit:"bytes" help:"Memory of a machine whose profile names none; 512 MiB if left out."`
	CPUs         int           `yaml:"cpus" json:"cpus,omitempty" min:"1" help:"Processors of a machine whose profile names none; 1 if left out."`
	User         string        `yaml:"user" json:"user,omitempty" format:"user" help:"Account to log in as; root if left out."`
	IdentityFile string        `yaml:"identity_file" json:"identity_file,omitempty" format:"abspath" help:"Private key that the image admits; empty means one of sandboxer's own, which cloud-init puts in place."`
	HostKeys     []string      `yaml:"host_keys" json:"host_keys,omitempty" help:"Public keys that the image has, as authorized_keys lines; empty means one that cloud-init puts in place."`
	BootTimeout  time.Duration `yaml:"boot_timeout" json:"boot_timeout,omitempty" help:"How long a machine may take from its start until it lets sandboxer in; 10m if left out."`
}

// A machine's shape, as recorded with its place and with its snapshots.
type shape struct {
	Image    string   `json:"image"`
	Disk     string   `json:"disk"` // what its own disk is based on
	Kernel   string   `json:"kernel,omitempty"`
	Initrd   string   `json:"initrd,omitempty"`
	Append   string   `json:"append,omitempty"`
	Memory   int64    `json:"memory"`
	CPUs     int      `json:"cpus"`
	User     string   `json:"user"`
	Identity string   `json:"identity,omitempty"`
	HostKeys []string `json:"host_keys,omitempty"`
}

// state is the changing part of a machine.
type state struct {
	Ready  bool   `json:"ready,omitempty"`
	Paused bool   `json:"paused,omitempty"`
	Saving string `json:"saving,omitempty"` // the snapshot that is being taken: it stands still
}

// label is among the arguments of a machine's qemu, and identifies its owner. No part of it
// has a slash.
func (p *place) label() string {
	return fmt.Sprintf("type=1,manufacturer=sandboxer,product=%s/%s/%d", p.Owner, p.ID, p.Generation)
}

var ownerName = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

func (e *extension) vmDir(p *place) string { return e.dir("vm", p.key()) }

// pids are the processes of the machine at p.
func (p *place) pids() ([]int, error) { return procs.WithArg(p.label()) }

// gone reports whether the machine at p is known to have no process.
func (p *place) gone() bool {
	pids, err := p.pids()
	return err == nil && len(pids) == 0
}

// resolveManaged turns a spec for a managed machine into a place.
func (e *extension) resolveManaged(spec sandboxer.Spec) (*place, error) {
	img, ok := e.cfg.Images[spec.Image]
	if !ok {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%s has no image %q", e.env.Extension, spec.Image).
			WithHint("its images are: %s", strings.Join(slices.Sorted(maps.Keys(e.cfg.Images)), ", "))
	}
	l := spec.Limits
	refuse := func(format string, args ...any) *sandboxer.Error {
		return sandboxer.E(sandboxer.Unsupported, nil, format, args...)
	}
	switch {
	case spec.Inputs["vm"] != "" || spec.Inputs["ssh_target"] != "":
		return nil, sandboxer.E(sandboxer.Invalid, nil, "an image and a machine to attach to exclude each other").
			WithHint("leave out the image, or the inputs vm and ssh_target")
	case !ownerName.MatchString(spec.Owner):
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the owner of a machine", spec.Owner)
	case spec.Host != "" && spec.Host != thisMachine:
		return nil, sandboxer.E(sandboxer.Invalid, nil, "machines from images run on localhost, not on %q", spec.Host)
	case l.DiskBytes != 0:
		return nil, refuse("the size of a machine's disk is its image's, and no limit can be set")
	case l.PIDs != 0 || l.GPUs != 0:
		return nil, refuse("processes and GPUs of a machine cannot be limited")
	case l.MilliCPU%1000 != 0:
		return nil, refuse("a machine has whole processors, not %d thousandths", l.MilliCPU)
	case l.MemoryBytes%(1<<20) != 0:
		return nil, refuse("a machine has whole MiB of memory")
	}
	if m := spec.Network.Mode; m != "" && m != sandboxer.NetworkNone {
		return nil, refuse("a machine from an image has no network besides the way in; %s is not offered", m).
			WithHint("put what builds need into the image, with Packer")
	}
	p := &place{V: placeVersion, ID: spec.ID, Generation: spec.Generation, Owner: spec.Owner, Kind: managed, Host: thisMachine, at: thisMachine,
		Base: e.cfg.WorkspaceDir, User: spec.User, Ports: spec.Ports}
	p.Shape = &shape{Image: spec.Image, Kernel: img.Kernel, Initrd: img.Initrd, Append: img.Append,
		Memory: cmp.Or(l.MemoryBytes, img.Memory, 512<<20), CPUs: cmp.Or(int(l.MilliCPU/1000), img.CPUs, 1),
		User: cmp.Or(img.User, "root"), Identity: img.IdentityFile, HostKeys: img.HostKeys}
	return p, nil
}

// DefaultLimits implements sandboxer.Limiter: a machine from an image has the image's size.
func (e *extension) DefaultLimits(spec sandboxer.Spec) sandboxer.Limits {
	img, ok := e.cfg.Images[spec.Image]
	if !ok {
		return sandboxer.Limits{}
	}
	return sandboxer.Limits{MemoryBytes: cmp.Or(img.Memory, 512<<20), MilliCPU: 1000 * int64(cmp.Or(img.CPUs, 1))}
}

// create makes the machine of p, or finds it. The caller holds the lock of p. from, if set,
// is the directory of the snapshot whose disk and memory it starts with.
func (e *extension) create(ctx context.Context, p *place, spec sandboxer.Spec, from string) error {
	if p.State.Ready && !p.gone() {
		return nil
	}
	if err := e.destroy(ctx, p); err != nil { // begun by a call that died
		return err
	}
	if from == "" {
		if err := e.hold(ctx, p); err != nil {
			return err
		}
	}
	limit := cmp.Or(e.cfg.Images[p.Shape.Image].BootTimeout, bootTime)
	boot, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	waited := "qemu"
	err := e.start(boot, p, from)
	var h *sshrun.Host
	if err == nil {
		h, waited, err = e.awaitMachine(boot, p)
	}
	if err != nil && boot.Err() != nil && ctx.Err() == nil {
		err = sandboxer.E(sandboxer.Timeout, err, "the machine of sandbox %s did not start within %s: it was still waited for %s", p.ID, limit, waited).
			WithHint("the server's log has the end of its console; raise boot_timeout of image %s if it only needs longer", p.Shape.Image)
	}
	if err == nil {
		err = e.enterMachine(ctx, p, h, spec, from != "")
	}
	if err != nil {
		return e.abandon(ctx, p, err)
	}
	p.State.Ready = true
	if err := e.remember(ctx, p); err != nil {
		return e.abandon(ctx, p, err)
	}
	return nil
}

// bootTime is how long a machine may take to start if its image does not say.
const bootTime = 10 * time.Minute

// abandon ends a machine that could not be made because of err.
func (e *extension) abandon(ctx context.Context, p *place, err error) error {
	c, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	return errors.Join(err, e.destroy(c, p))
}

// ownKey makes the key for entering machines, once.
func (e *extension) ownKey(ctx context.Context) (file, public string, err error) {
	unlock, err := e.env.Notes.Lock(ctx, "key")
	if err != nil {
		return "", "", err
	}
	defer unlock()
	file = e.dir("key")
	if data, err := os.ReadFile(file + ".pub"); err == nil {
		return file, strings.TrimSpace(string(data)), nil
	}
	private, public, err := sshrun.NewKey()
	if err == nil {
		err = wholefile.Write(file, []byte(private))
	}
	if err == nil {
		err = wholefile.Write(file+".pub", []byte(public+"\n"))
	}
	if err != nil {
		return "", "", sandboxer.E(sandboxer.Unavailable, err, "the key to enter machines by cannot be made")
	}
	return file, public, nil
}

// start starts qemu with a new disk based on the image, or with a saved one.
func (e *extension) start(ctx context.Context, p *place, from string) error {
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "there is no qemu-system-x86_64 on this machine").
			WithHint("install it: apt-get install qemu-system-x86 qemu-utils")
	}
	accel, err := e.accelerator(ctx)
	if err != nil {
		return err
	}
	file, public, err := e.ownKey(ctx)
	if err != nil {
		return err
	}
	s := p.Shape
	if s.Identity == "" {
		s.Identity = file
	}
	dir := e.vmDir(p)
	hostKey := ""
	if len(s.HostKeys) == 0 {
		var line string
		if hostKey, line, err = sshrun.NewKey(); err != nil {
			return err
		}
		s.HostKeys = []string{line}
	}
	if err := e.remember(ctx, p); err != nil { // before anything exists
		return err
	}
	disk := filepath.Join(dir, "disk.qcow2")
	if err = errors.Join(os.MkdirAll(filepath.Join(dir, "seed"), 0o700), writeSeed(filepath.Join(dir, "seed"), p.ID, public, hostKey)); err == nil {
		if from == "" {
			err = e.tool(ctx, "qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", s.Disk, disk)
		} else {
			err = copyFile(disk, filepath.Join(from, "disk.qcow2"))
		}
	}
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return roomless(sandboxer.E(sandboxer.Unavailable, err, "the disk of sandbox %s cannot be made", p.ID))
	}
	node := func(v map[string]any) string {
		j, err := json.Marshal(v)
		if err != nil {
			panic(err) // strings only
		}
		return string(j)
	}
	args := []string{
		"-name", p.mark(), "-smbios", p.label(), "-no-user-config", "-nodefaults", "-display", "none", "-daemonize",
		"-machine", "pc", "-accel", accel, "-cpu", "max", "-m", strconv.FormatInt(s.Memory>>20, 10), "-smp", strconv.Itoa(s.CPUs),
		"-chardev", "ringbuf,id=console,size=65536", "-serial", "chardev:console",
		"-blockdev", node(map[string]any{"driver": "qcow2", "node-name": "disk", "file": map[string]any{"driver": "file", "filename": disk}, "discard": "unmap"}),
		"-device", "virtio-blk-pci,drive=disk",
		"-blockdev", node(map[string]any{"driver": "vvfat", "node-name": "seed", "dir": filepath.Join(dir, "seed"), "label": "CIDATA", "read-only": true}),
		"-device", "virtio-blk-pci,drive=seed",
		// No network goes out; the way in is a port that qemu chooses.
		"-netdev", "user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:0-:22", "-device", "virtio-net-pci,netdev=net,romfile=",
		"-device", "virtio-rng-pci", "-device", "vmgenid,guid=auto",
		"-qmp", "unix:qmp,server=on,wait=off",
		"-sandbox", "on,obsolete=deny,resourcecontrol=deny",
	}
	if s.Kernel != "" {
		args = append(args, "-kernel", s.Kernel, "-append", s.Append)
	}
	if s.Initrd != "" {
		args = append(args, "-initrd", s.Initrd)
	}
	if from != "" {
		args = append(args, "-loadvm", savedTag)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "starting a machine (" + accel + ")"})
	said, err := os.OpenFile(filepath.Join(dir, "qemu.log"), os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer said.Close()
	cmd := subprocess.Command(ctx, subprocess.Tool, qemu, args...) // only a child that waits for the machine; the machine is found by its label
	cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = dir, said, said, apart()
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=" + dir}
	// It returns once the machine runs on its own, saved memory included.
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		text, _ := os.ReadFile(said.Name())
		return sandboxer.E(sandboxer.Unavailable, fmt.Errorf("%w: %s", err, text), "qemu does not start the machine of sandbox %s", p.ID)
	}
	forwarded, err := e.usernet(ctx, p)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the machine of sandbox %s does not answer", p.ID)
	}
	found := forwardedPort.FindStringSubmatch(forwarded)
	if found == nil {
		return sandboxer.E(sandboxer.Unavailable, errors.New(forwarded), "the machine of sandbox %s forwards no port", p.ID)
	}
	port, _ := strconv.Atoi(found[1])
	p.Target = name(sshrun.Target{Addr: s.User + "@127.0.0.1", Port: port, IdentityFile: s.Identity, HostKeys: s.HostKeys, Silence: managedSilence})
	return e.remember(ctx, p)
}

// roomless gives an error its kind if the cause is a full disk.
func roomless(err *sandboxer.Error) *sandboxer.Error {
	said := strings.ToLower(err.Error()) // including messages of programs
	if errors.Is(err, syscall.EDQUOT) || strings.Contains(said, syscall.ENOSPC.Error()) {
		err.Kind = sandboxer.Exhausted
		return err.WithHint("there is no room in the directory that sandboxer keeps machines in: make some, or end machines and drop snapshots")
	}
	return err
}

// usernet returns qemu's description of the machine's connections.
func (e *extension) usernet(ctx context.Context, p *place) (text string, err error) {
	err = e.monitored(ctx, p, func(m *monitor) error {
		return m.do("human-monitor-command", map[string]any{"command-line": "info usernet"}, &text)
	})
	return text, err
}

var forwardedPort = regexp.MustCompile(`TCP\[HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)`)

// writeSeed makes the files that cloud-init reads from a disk called cidata.
func writeSeed(dir, id, public, hostKey string) error {
	var u strings.Builder
	fmt.Fprintf(&u, "#cloud-config\nssh_authorized_keys:\n  - %q\ndisable_root: false\n", public)
	if hostKey != "" {
		fmt.Fprintf(&u, "ssh_deletekeys: true\nssh_keys:\n  ed25519_private: |\n")
		for line := range strings.Lines(hostKey) {
			u.WriteString("    " + line)
		}
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "meta-data"), fmt.Appendf(nil, "instance-id: %s\nlocal-hostname: %s\n", id, id), 0o600),
		os.WriteFile(filepath.Join(dir, "user-data"), []byte(u.String()), 0o600))
}

// tool runs a program of this machine to its end.
func (e *extension) tool(ctx context.Context, program string, args ...string) error {
	cmd := subprocess.Command(ctx, subprocess.Tool, program, args...)
	out, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return sandboxer.E(sandboxer.Unavailable, err, "there is no %s on this machine", program).WithHint("install it: apt-get install qemu-utils")
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", program, err, bytes.TrimSpace(out))
	}
	return nil
}

// awaitMachine waits until the machine accepts our login. On failure waited says for what.
func (e *extension) awaitMachine(ctx context.Context, p *place) (h *sshrun.Host, waited string, err error) {
	began := time.Now()
	progress := func(step string) {
		sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: step, Done: int64(time.Since(began) / time.Second)})
	}
	waited = "its SSH server to speak"
	for !e.greets(ctx, p) {
		if ctx.Err() != nil {
			return nil, waited, fmt.Errorf("waiting for %s: %w; its console: %s", waited, ctx.Err(), e.console(p))
		}
		if p.gone() {
			text, _ := os.ReadFile(filepath.Join(e.vmDir(p), "qemu.log"))
			return nil, waited, sandboxer.E(sandboxer.Failed, errors.New(string(text)), "the machine of sandbox %s ended while it started", p.ID).
				WithHint("check that the image %s boots without user input; it may need a kernel", p.Shape.Image)
		}
		progress("waiting for the machine to start")
	}
	if h, err = e.pool.Host(p.Target); err != nil {
		return nil, waited, err
	}
	// The server greets before the machine has started completely; emulated, it may need more
	// time to agree on keys than others.
	waited = "its SSH server to let us in"
	for {
		progress("waiting for the machine to let us in")
		if err = h.Login(ctx); err == nil {
			_, err = h.Output(ctx, ":")
		}
		if err == nil {
			return h, "", nil
		}
		if ctx.Err() != nil {
			return nil, waited, fmt.Errorf("waiting for %s: %w; its console: %s", waited, err, e.console(p))
		}
		if sandboxer.KindOf(err) != sandboxer.Unavailable || p.gone() || errors.Is(err, sshrun.ErrHostKey) || errors.Is(err, sshrun.ErrAuth) {
			return nil, waited, err
		}
	}
}

// enterMachine sets up the machine, which accepts our login, as the requested sandbox.
func (e *extension) enterMachine(ctx context.Context, p *place, h *sshrun.Host, spec sandboxer.Spec, saved bool) error {
	g := e.inside(p, h)
	as := ""
	if p.User != "" {
		var err error
		if as, err = g.resolve(ctx, p.User); err != nil {
			return err
		}
	}
	// Processes in a copy continue, but the name, the clock and the environment of commands
	// are the copy's own.
	_, err := h.Output(ctx, `
r=$1 w=$2 env=$3 n=$4 t=$5 u=$6
if [ "$(id -u)" = 0 ]; then hostname "$n"; date -s "@$t" >/dev/null; fi
mkdir -p "$r" && chmod 700 "${r%/*}" && (umask 077; printf '%s' "$env" >"$r/env") && mkdir -p "$w" || exit 1
[ -z "$u" ] || chown "$u" "$w"`,
		g.rec, g.dir, exports(spec.Env), p.ID, strconv.FormatInt(time.Now().Unix(), 10), as)
	if err == nil && spec.Inputs["repo"] != "" && !saved {
		sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "copying " + spec.Inputs["repo"]})
		_, err = h.Push(ctx, spec.Inputs["repo"], g.dir, sshrun.SyncOptions{})
		if err == nil && as != "" {
			_, err = h.Output(ctx, `chown -hR "$1" "$2"`, as, g.dir)
		}
	}
	if err == nil {
		_, err = h.Output(ctx, `: >"$1/ready"`, g.rec)
	}
	return err
}

// greets reports whether an SSH server speaks on the machine's port. qemu accepts connections
// in place of a guest that has not started: such a connection may never be answered, and is
// dropped. One that the guest has accepted is answered in the end. Dropping that one and
// trying again would make a slow guest start a server process for every attempt, and be
// slower for each of them, without end.
func (e *extension) greets(ctx context.Context, p *place) bool {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(p.Target.Port)))
	if err != nil {
		wait(ctx, 100*time.Millisecond)
		return false
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	b := make([]byte, 4)
	for end := time.Now().Add(managedSilence); ; {
		c.SetReadDeadline(time.Now().Add(time.Second))
		n, err := io.ReadFull(c, b)
		switch {
		case err == nil:
			return string(b) == "SSH-"
		case n > 0 || !errors.Is(err, os.ErrDeadlineExceeded):
			wait(ctx, 50*time.Millisecond)
			return false
		case time.Now().After(end):
			return false
		}
		if text, err := e.usernet(ctx, p); err != nil || !strings.Contains(text, "TCP[ESTABLISHED]") {
			return false
		}
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// console returns the machine's last output on its serial port.
func (e *extension) console(p *place) string {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	var text string
	_ = e.monitored(ctx, p, func(m *monitor) error {
		return m.do("ringbuf-read", map[string]any{"device": "console", "size": 4096}, &text)
	})
	return text
}

// destroy ends the machine of p and removes what is left of it: first through qemu, then by
// force.
func (e *extension) destroy(ctx context.Context, p *place) error {
	if p.Target.Name != "" {
		e.pool.Forget(p.Target)
	}
	if !p.gone() {
		c, cancel := context.WithTimeout(ctx, 2*time.Second)
		if e.tell(c, p, "quit") == nil {
			for !p.gone() && c.Err() == nil {
				wait(c, 20*time.Millisecond)
			}
		}
		cancel()
	}
	c, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := endAll(c, p.pids); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the machine of sandbox %s does not end", p.ID)
	}
	if err := os.RemoveAll(e.vmDir(p)); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the disk of sandbox %s cannot be removed", p.ID)
	}
	return nil
}

// machineIs returns the state of p's machine: nil, Conflict for one that is paused, NotFound.
func (e *extension) machineIs(ctx context.Context, p *place) error {
	now, err := e.recall(ctx, p.ID, p.Generation)
	if err == nil {
		*p = *now
	} else if sandboxer.KindOf(err) != sandboxer.NotFound {
		return err
	}
	if p.gone() {
		return missing(p.ID)
	}
	if p.State.Paused {
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is paused", p.ID).WithHint("resume it: sandboxer resume %s", p.ID)
	}
	return nil
}

// machines yields the machines of owner: those with a note, and those known only from their
// processes.
func (e *extension) machines(owner string, noted []*place) (all []*place, err error) {
	seen := map[string]bool{}
	for _, p := range noted {
		if p.Kind != managed {
			continue
		}
		seen[p.key()] = true
		if _, err := os.Stat(e.vmDir(p)); p.Owner == owner && (!errors.Is(err, fs.ErrNotExist) || !p.gone()) {
			all = append(all, p)
		}
	}
	found, err := labelled(owner)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the machines on this one cannot be listed")
	}
	for _, p := range found {
		if !seen[p.key()] {
			seen[p.key()] = true
			p.Base = e.cfg.WorkspaceDir
			all = append(all, p)
		}
	}
	return all, nil
}

// labelled finds machines by the arguments of their processes.
func labelled(owner string) (all []*place, err error) {
	prefix := "type=1,manufacturer=sandboxer,product=" + owner + "/"
	buf := make([]byte, procs.Room)
	pids, err := procs.All()
	if err != nil {
		return nil, err
	}
	for _, pid := range pids {
		args, err := procs.Args(pid, buf)
		if err != nil {
			return nil, err
		}
		for w := range bytes.SplitSeq(args, []byte{0}) {
			rest, ok := strings.CutPrefix(string(w), prefix)
			id, gen, ok2 := strings.Cut(rest, "/")
			n, err := strconv.Atoi(gen)
			if ok && ok2 && err == nil && sandboxer.CheckID(id) == nil {
				all = append(all, &place{V: placeVersion, ID: id, Generation: n, Owner: owner, Kind: managed, Host: thisMachine, Shape: &shape{}})
			}
		}
	}
	return all, nil
}

func (e *extension) machineReady(ctx context.Context, p *place) (r sandboxer.Reachability, err error) {
	if err := e.machineIs(ctx, p); err != nil && sandboxer.KindOf(err) != sandboxer.Conflict {
		return r, err
	}
	if !p.State.Ready {
		return r, sandboxer.E(sandboxer.Failed, nil, "the machine of sandbox %s was never completed", p.ID).WithHint("destroy it and create it again")
	}
	r.Host, r.SSH, r.RemoteDir = p.Host, p.Target.Name, path.Join(p.Base, "workspace")
	for _, n := range p.Ports {
		r.Ports = append(r.Ports, sandboxer.Port{Port: n})
	}
	return r, nil
}

// machineStats measures the machine from outside, and its disk and processes from inside.
func (e *extension) machineStats(ctx context.Context, p *place, g *guest) (s sandboxer.Stats, err error) {
	s = sandboxer.Stats{At: now(), DiskBytes: -1, PIDs: -1, RxBytes: -1, TxBytes: -1, MemoryLimit: p.Shape.Memory}
	pids, err := p.pids()
	if err != nil {
		return s, sandboxer.E(sandboxer.Unavailable, err, "the machine of sandbox %s cannot be measured", p.ID)
	}
	if len(pids) == 0 {
		return s, missing(p.ID)
	}
	if s.CPU, s.MemoryBytes, err = used(pids[0]); err != nil {
		return s, sandboxer.E(sandboxer.Unavailable, err, "the machine of sandbox %s cannot be measured", p.ID)
	}
	if p.State.Paused {
		return s, nil
	}
	out, err := g.host.Output(ctx, `df -Pk "$1" | awk 'NR == 2 { print $3, $2 }'; set -- /proc/[0-9]*; echo $#; awk '{ gsub(":", " ") } $1 == "eth0" { print $2, $10 }' /proc/net/dev`, g.dir)
	if err != nil {
		return s, err
	}
	var disk, size int64
	if n, _ := fmt.Sscan(string(out), &disk, &size, &s.PIDs, &s.RxBytes, &s.TxBytes); n >= 3 {
		s.DiskBytes, s.DiskLimit = disk<<10, size<<10
	}
	return s, nil
}

// accelerator is how machines run: "kvm" if a guest really runs with it, else "tcg".
func (e *extension) accelerator(ctx context.Context) (string, error) {
	if e.cfg.Accel != "auto" {
		return e.cfg.Accel, nil
	}
	e.accel.mu.Lock()
	defer e.accel.mu.Unlock()
	if e.accel.found == "" {
		e.accel.found = "tcg"
		if _, err := os.Stat("/dev/kvm"); err == nil {
			if err := e.probe(ctx, "kvm"); err == nil {
				e.accel.found = "kvm"
			} else if ctx.Err() != nil {
				e.accel.found = ""
				return "", ctx.Err()
			} else {
				e.log.Info("KVM is available, but no guest runs with it; machines are emulated", "err", err)
			}
		}
	}
	return e.accel.found, nil
}

// accel is the result of probing this machine.
type accel struct {
	mu    sync.Mutex
	found string
}

// probeTime is how long a guest may take to write one word.
const probeTime = 3 * time.Second

// probe starts a guest that is only a boot sector: it counts to 2^28, writes "ok" to the
// serial port and halts. The existence of /dev/kvm, and of virtual processors, shows nothing:
// under nested virtualisation a guest can hang, or run so much slower than an emulated one
// that it never ends. Counting takes a processor a tenth of a second, and such a guest more
// than it is given.
func (e *extension) probe(ctx context.Context, accel string) error {
	sector := make([]byte, 512)
	copy(sector, []byte{
		0x66, 0xb9, 0, 0, 0, 0x10, 0x66, 0x49, 0x75, 0xfc, // mov ecx,1<<28; dec ecx; jnz back
		0xba, 0xf8, 0x03, 0xb0, 'o', 0xee, 0xb0, 'k', 0xee, 0xfa, 0xf4, 0xeb, 0xfd}) // mov dx,3f8; mov al,'o'; out dx,al; …; cli; hlt; jmp
	sector[510], sector[511] = 0x55, 0xaa
	dir, err := os.MkdirTemp("", "sandboxer-probe")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "boot"), sector, 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	cpu := "max"
	cmd := subprocess.Command(ctx, subprocess.Tool, "qemu-system-x86_64", "-no-user-config", "-nodefaults", "-display", "none", "-machine", "pc", "-accel", accel, "-cpu", cpu,
		"-m", "32", "-serial", "file:serial", "-drive", "file=boot,format=raw,if=ide")
	// It ends with the thread that starts it, and so with the broker.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.Dir, cmd.WaitDelay, cmd.SysProcAttr = dir, time.Second, mortal()
	if err := cmd.Start(); err != nil {
		return err
	}
	defer cmd.Wait()
	defer cancel()
	for {
		said, _ := os.ReadFile(filepath.Join(dir, "serial"))
		if bytes.Contains(said, []byte("ok")) {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("the guest said nothing within %s", probeTime)
		}
	}
}

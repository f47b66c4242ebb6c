//go:build linux

package local

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/local/pause"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/mounts"
	"github.com/sand-boxer/sandboxer/internal/users"
)

// A skeleton is the root of sandboxes without an image: an allow-list, not the machine
// with holes. /usr (and Config.Paths) is the machine's own; /etc is a copied selection
// without accounts of people, passwords or keys; everything else is empty.
type skeleton struct {
	digest string
	dir    string   // of its own files
	root   string   // the root file system for gVisor
	shown  []string // directories of this machine in it
	binds  []string // those of them that the sandbox's spec must bind itself (not root)

	watch   []string // files and directories that it depends on
	stamp   uint64   // of watch, when it was made
	settled bool     // no watched file was changing at that time
}

// intact reports whether the skeleton is still there, with its mounts: another
// process of the same installation may have removed it.
func (s *skeleton) intact() bool {
	if _, err := os.Stat(filepath.Join(s.root, agentPath)); err != nil {
		return false
	}
	if len(s.binds) > 0 {
		return true
	}
	for _, d := range s.shown {
		var here, there unix.Stat_t
		if unix.Stat(d, &here) != nil || unix.Stat(filepath.Join(s.root, d), &there) != nil || here.Dev != there.Dev || here.Ino != there.Ino {
			return false
		}
	}
	return true
}

// etcAllowed are the files and directories of /etc that every ordinary program may read
// and that reveal nothing about the machine's users.
var etcAllowed = []string{
	"alternatives", "ca-certificates.conf", "bash.bashrc", "debian_version", "gai.conf", "inputrc",
	"ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime", "magic", "magic.mime", "mime.types",
	"nsswitch.conf", "os-release", "alpine-release", "redhat-release", "pki/tls/certs", "pki/ca-trust",
	"protocols", "rpc", "services", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
	"python3", "python3.9", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14", "perl", "java-17-openjdk", "java-21-openjdk",
}

// agentPath is the agent's path inside every sandbox, and pausePath that of the program that
// waits until the agent is needed. Their directory is a read-only mount of the skeleton, and
// no part of the sandbox's writable layer: its root cannot replace the programs, nor remove
// the mount.
const (
	agentDir  = inside.AgentDir
	agentPath = inside.AgentPath
	pausePath = agentDir + "/pause"
	// layerMount is an empty directory of this machine in sandboxes on images that were saved
	// when the programs were in their writable layer (record.AgentMount).
	layerMount = agentDir + "/empty"
)

// agent is the directory of the skeleton that is mounted at agentDir.
func (s *skeleton) agent() string { return filepath.Join(s.root, agentDir) }

// tmpKeeper keeps /tmp from being empty.
const tmpKeeper = "/tmp/.sandboxer"

// workspaceDefault is the workspace of a sandbox whose profile names none.
const workspaceDefault = inside.Workspace

// A skeletonMaker makes the skeletons of this machine and agent below dir. Their names are
// digests of their content, so that a changed machine gets a new one and running sandboxes
// keep theirs. As root they are mounted below mounts: the sandbox's file server is an
// ordinary user on this machine and cannot walk through the private dir.
type skeletonMaker struct {
	dir, mounts string
	agent       string
	paths, etc  []string // of the configuration
	asRoot      bool

	checked map[string]bool // digests of skeletons that were read through since the start
}

// make makes, or finds, the skeleton for the machine's present state. An intact existing one
// takes no room on the disk.
func (m *skeletonMaker) make() (*skeleton, error) {
	for tries := 0; ; tries++ {
		s, err := m.attempt()
		if errors.Is(err, errChanging) && tries < 5 {
			continue // a package is being installed
		}
		return s, err
	}
}

func (m *skeletonMaker) attempt() (*skeleton, error) {
	b := &skeletonBuilder{sum: sha256.New(), seen: map[string]bool{}, chown: m.asRoot}
	if m.asRoot {
		b.shift = idShift
	}
	began := time.Now()
	if err := b.plan(m.agent, m.paths, m.etc); err != nil {
		return nil, err
	}
	s := &skeleton{digest: hex.EncodeToString(b.sum.Sum(nil))[:16], shown: b.binds, watch: b.watch}
	slices.Sort(s.watch)
	s.watch = slices.Compact(s.watch)
	var latest time.Time
	s.stamp, latest = stampOf(s.watch)
	// Clocks of file systems are coarse: a file that changed during the read, or shortly
	// before, may be either version. The next look reads it again.
	s.settled = latest.Before(began.Add(-50 * time.Millisecond))
	final := filepath.Join(m.dir, s.digest)
	s.dir = filepath.Join(final, "root")
	s.root, s.binds = s.dir, b.binds
	if m.asRoot {
		s.root, s.binds = filepath.Join(m.mounts, s.digest), nil
	}
	if m.checked[s.digest] {
		if _, err := os.Lstat(filepath.Join(s.dir, agentPath)); err == nil {
			return s, m.mount(s)
		}
	} else if b.matches(s.dir) {
		m.checked[s.digest] = true
		return s, m.mount(s)
	}
	// Missing or damaged: by a crash of the machine, or by its disk.
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return nil, err
	}
	tmp, err := os.MkdirTemp(m.dir, ".new-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	if err := b.build(filepath.Join(tmp, "root")); err != nil {
		return nil, err
	}
	if err := unmountBelow(filepath.Join(m.mounts, s.digest)); err != nil {
		return nil, err
	}
	if err := os.RemoveAll(final); err != nil {
		return nil, err
	}
	if err := os.Rename(tmp, final); err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return nil, err
	}
	m.checked[s.digest] = true
	return s, m.mount(s)
}

func (m *skeletonMaker) mount(s *skeleton) error {
	if !m.asRoot {
		return nil
	}
	return s.assemble()
}

// errChanging says that a file changed between reading and copying.
var errChanging = errors.New("a file of this machine is changing")

// stampOf changes whenever a skeleton made now might differ: it covers the sources of /etc
// (the directories and the files at its top that are copied, the package manager's database)
// by their times, which is fast enough for every create. A write into a file further down
// that does not replace it shows with the next such change, or with the next server. It also
// returns the time of the latest change.
func stampOf(names []string) (stamp uint64, latest time.Time) {
	sum := fnv.New64a()
	for _, name := range names {
		var st unix.Stat_t
		if unix.Lstat(name, &st) != nil {
			st = unix.Stat_t{}
		}
		var b [48]byte
		for i, v := range []uint64{st.Ino, st.Dev, uint64(st.Size), uint64(st.Mode), uint64(st.Ctim.Sec), uint64(st.Ctim.Nsec)} {
			binary.NativeEndian.PutUint64(b[8*i:], v)
		}
		_, _ = sum.Write(b[:])
		if at := time.Unix(st.Ctim.Unix()); at.After(latest) {
			latest = at
		}
	}
	return sum.Sum64(), latest
}

// current reports whether the machine is unchanged since s was made.
func (s *skeleton) current() bool {
	stamp, _ := stampOf(s.watch)
	return s.settled && stamp == s.stamp
}

// assemble binds the machine's directories into the skeleton once, so that every sandbox
// needs a single mount. It makes the skeleton a private mount first: mounts do not
// propagate to other mount namespaces, or back.
func (s *skeleton) assemble() error {
	if err := walkable(s.root); err != nil {
		return err
	}
	mounted, err := mounts.Below(s.root)
	if err != nil {
		return err
	}
	if !slices.Contains(mounted, s.root) {
		if err := unix.Mount(s.dir, s.root, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mounting the skeleton at %s: %w", s.root, err)
		}
		if err := unix.Mount("", s.root, "", unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("making %s a private mount: %w", s.root, err)
		}
	}
	for _, d := range s.shown {
		at := filepath.Join(s.root, d)
		if slices.Contains(mounted, at) {
			continue
		}
		if err := bindShown(d, at); err != nil {
			return err
		}
		if err := unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
			return fmt.Errorf("making %s read-only in the skeleton: %w", d, err)
		}
	}
	return nil
}

// bindShown binds a directory of this machine that sandboxes may see. It mounts exactly the
// directory that it checked, even if names change meanwhile.
func bindShown(dir, at string) error {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("binding %s into the skeleton: %w", dir, err)
	}
	defer unix.Close(fd)
	name := fmt.Sprintf("/proc/self/fd/%d", fd)
	real, err := os.Readlink(name)
	if err == nil {
		err = checkShown(dir, real)
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(name, at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("binding %s into the skeleton: %w", dir, err)
	}
	return nil
}

// walkable makes the mount point at, below the directory of the installation and that of all
// installations, and lets every user enter these three, even with a stricter umask, as in a
// hardened service.
func walkable(at string) error {
	err := os.MkdirAll(at, 0o711)
	for tries := 0; errors.Is(err, fs.ErrNotExist) && tries < 10_000; tries++ {
		err = os.MkdirAll(at, 0o711) // another process that closes has just removed the empty directory above it
	}
	if err != nil {
		return err
	}
	mounts := filepath.Dir(at)
	for _, d := range []string{filepath.Dir(mounts), mounts, at} {
		fi, err := os.Stat(d)
		if err == nil && fi.Mode()&0o111 != 0o111 {
			err = os.Chmod(d, fi.Mode()|0o711)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// noSkeleton selects none.
func noSkeleton(string) bool { return false }

// removeSkeletons unmounts and removes every skeleton in dir and mounts except those in
// keep; of those in rest it removes only the mounts. Sandboxes hold their own reference to
// the mounts, so this does not disturb them.
func removeSkeletons(dir, mounts string, keep, rest func(digest string) bool) error {
	var errs []error
	for _, d := range []string{mounts, dir} {
		entries, err := os.ReadDir(d)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if keep(e.Name()) || d == dir && rest(e.Name()) || d == mounts && e.Name() == boxMounts {
				continue
			}
			p := filepath.Join(d, e.Name())
			if err := unmountBelow(p); err != nil {
				errs = append(errs, err)
				continue // never remove files through a mount that is still there
			}
			errs = append(errs, os.RemoveAll(p))
		}
	}
	_ = os.Remove(mounts)               // if empty
	_ = os.Remove(filepath.Dir(mounts)) // shared with other installations
	return errors.Join(errs...)
}

// unmountBelow detaches every mount at or below dir, innermost first.
func unmountBelow(dir string) error {
	mounted, err := mounts.Below(dir)
	if err != nil {
		return err
	}
	slices.Reverse(mounted)
	var errs []error
	for _, m := range mounted {
		if err := unix.Unmount(m, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("unmounting %s: %w", m, err))
		}
	}
	return errors.Join(errs...)
}

// A skeletonBuilder plans a skeleton, which takes no room, and then builds it.
type skeletonBuilder struct {
	shift   int  // added to every owner: the host ID of the sandbox's ID 0
	chown   bool // only root can give files away
	sum     hash.Hash
	binds   []string
	entries []skeletonEntry
	seen    map[string]bool // names of the entries
	watch   []string        // files and directories of the machine that the plan depends on
}

// A skeletonEntry is one file, directory or link of a skeleton's own.
type skeletonEntry struct {
	kind   string // dir, link or file
	name   string
	mode   fs.FileMode
	id     int
	target string // of a link
	open   func() (io.ReadCloser, error)
	sum    string // of a file's content
}

func (b *skeletonBuilder) plan(agent string, paths, etc []string) error {
	b.watch = append(b.watch, agent, "/etc", "/etc/passwd", "/etc/group", dpkgStatus, ucfHashes, "/lib", "/lib64")
	for _, d := range []struct {
		name string
		mode fs.FileMode
		id   int
	}{
		{"/", 0o755, 0}, {"/dev", 0o755, 0}, {"/etc", 0o755, 0}, {"/home", 0o755, 0}, {"/home/user", 0o755, 1000},
		{"/media", 0o755, 0}, {"/mnt", 0o755, 0}, {"/opt", 0o755, 0}, {"/proc", 0o555, 0}, {"/root", 0o700, 0}, {"/run", 0o755, 0},
		{"/srv", 0o755, 0}, {"/sys", 0o555, 0}, {"/tmp", fs.ModeSticky | 0o777, 0}, {"/var", 0o755, 0}, {"/var/cache", 0o755, 0},
		{"/var/lib", 0o755, 0}, {"/var/log", 0o755, 0}, {"/var/tmp", fs.ModeSticky | 0o777, 0},
		{workspaceDefault, 0o755, 0}, {agentDir, 0o755, 0},
	} {
		if err := b.dir(d.name, d.mode, d.id); err != nil {
			return err
		}
	}
	if err := b.link("/var/run", "/run"); err != nil {
		return err
	}
	// /bin, /lib and similar: links into /usr on a merged system, directories of their
	// own on others.
	for _, d := range []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"} {
		fi, err := os.Lstat(d)
		switch {
		case err != nil:
			continue
		case fi.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(d)
			if err != nil {
				return err
			}
			if err := b.link(d, to); err != nil {
				return err
			}
		case fi.IsDir():
			if err := b.bind(d); err != nil {
				return err
			}
		}
	}
	for _, p := range paths {
		fi, err := os.Stat(p)
		if err != nil || !fi.IsDir() {
			return sandboxer.E(sandboxer.Invalid, err, "paths: %s is not a directory of this machine", p)
		}
		real, err := filepath.EvalSymlinks(p)
		if err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "paths: the links of %s cannot be followed", p)
		}
		if err := checkShown(p, real); err != nil {
			return err
		}
		if err := b.bind(p); err != nil {
			return err
		}
	}
	passwd, group := accounts()
	for _, f := range []struct{ name, content string }{
		{"/etc/passwd", passwd}, {"/etc/group", group},
		{"/etc/hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n"},
		{"/etc/resolv.conf", "nameserver " + gatewayIP + "\n"},
		{"/etc/profile", "export PATH=" + defaultPath + "\n[ -n \"$BASH_VERSION\" ] && [ -r /etc/bash.bashrc ] && . /etc/bash.bashrc\n"},
	} {
		if err := b.file(f.name, 0o644, content([]byte(f.content))); err != nil {
			return err
		}
	}
	for _, e := range slices.Concat(etcAllowed, etc) {
		if err := b.copyTree("/etc/" + e); err != nil {
			return err
		}
	}
	if err := b.packaged(); err != nil {
		return err
	}
	// gVisor covers an empty /tmp with a file system in memory and outside the disk limit.
	if err := b.file(tmpKeeper, 0o444, content(nil)); err != nil {
		return err
	}
	if err := b.file(agentPath, 0o755, func() (io.ReadCloser, error) { return os.Open(agent) }); err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the in-sandbox agent cannot be read")
	}
	for i := range sandboxer.MaxMounts {
		if err := cmp.Or(b.dir(mountAt(i, true), 0o755, 0), b.file(mountAt(i, false), 0o644, content(nil))); err != nil {
			return err
		}
	}
	return b.file(pausePath, 0o755, content(pause.Program))
}

func content(data []byte) func() (io.ReadCloser, error) {
	return func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }
}

// accounts returns passwd and group files with the machine's system accounts and
// one ordinary user.
func accounts() (passwd, group string) {
	keep := func(file string, fields int, user string) string {
		var out bytes.Buffer
		data, _ := os.ReadFile(file)
		for f := range users.Rows(bytes.NewReader(data)) {
			if len(f) != fields {
				continue
			}
			id, err := strconv.Atoi(f[2])
			if err != nil || id >= 1000 && id != 65534 {
				continue
			}
			f[1] = "x"
			if fields == 4 {
				f[3] = "" // members are people
			} else {
				f[4] = ""
			}
			fmt.Fprintln(&out, strings.Join(f, ":"))
		}
		if out.Len() == 0 {
			if fields == 4 {
				out.WriteString("root:x:0:\nnogroup:x:65534:\n")
			} else {
				out.WriteString("root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n")
			}
		}
		return out.String() + user
	}
	return keep("/etc/passwd", 7, "user:x:1000:1000::/home/user:/bin/sh\n"), keep("/etc/group", 4, "user:x:1000:\n")
}

func (b *skeletonBuilder) add(e skeletonEntry, rest string) {
	if b.seen[e.name] {
		return
	}
	b.seen[e.name] = true
	b.entries = append(b.entries, e)
	b.note(e.kind, e.name, e.mode, rest)
}

func (b *skeletonBuilder) note(kind, name string, mode fs.FileMode, rest string) {
	fmt.Fprintf(b.sum, "%s %q %o %q\n", kind, name, mode, rest)
}

func (b *skeletonBuilder) dir(name string, mode fs.FileMode, id int) error {
	b.above(name)
	b.add(skeletonEntry{kind: "dir", name: name, mode: mode, id: id}, strconv.Itoa(id))
	return nil
}

// above plans the parent directories of name.
func (b *skeletonBuilder) above(name string) {
	if up := filepath.Dir(name); up != "/" && !b.seen[up] {
		b.above(up)
		b.add(skeletonEntry{kind: "dir", name: up, mode: 0o755}, "0")
	}
}

func (b *skeletonBuilder) link(name, target string) error {
	b.above(name)
	b.add(skeletonEntry{kind: "link", name: name, target: target}, target)
	return nil
}

func (b *skeletonBuilder) bind(dir string) error {
	if err := b.dir(dir, 0o755, 0); err != nil {
		return err
	}
	b.note("bind", dir, 0, "")
	b.binds = append(b.binds, dir)
	return nil
}

func (b *skeletonBuilder) file(name string, mode fs.FileMode, open func() (io.ReadCloser, error)) error {
	if b.seen[name] {
		return nil
	}
	r, err := open()
	if err != nil {
		return err
	}
	defer r.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, r); err != nil {
		return err
	}
	b.above(name)
	e := skeletonEntry{kind: "file", name: name, mode: mode, open: open, sum: hex.EncodeToString(sum.Sum(nil))}
	b.add(e, e.sum)
	return nil
}

// build makes the plan below root.
func (b *skeletonBuilder) build(root string) error {
	for _, e := range b.entries {
		p := filepath.Join(root, e.name)
		var err error
		switch e.kind {
		case "dir":
			if err = os.MkdirAll(p, 0o755); err == nil {
				err = os.Chmod(p, e.mode)
			}
		case "link":
			err = os.Symlink(e.target, p)
		default:
			err = e.write(p)
		}
		if err == nil && b.chown {
			err = os.Lchown(p, b.shift+e.id, b.shift+e.id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (e *skeletonEntry) write(p string) error {
	r, err := e.open()
	if err != nil {
		return errors.Join(errChanging, err)
	}
	defer r.Close()
	f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, e.mode)
	if err != nil {
		return err
	}
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(f, sum), r)
	if err == nil && hex.EncodeToString(sum.Sum(nil)) != e.sum {
		err = fmt.Errorf("%w: %s", errChanging, e.name)
	}
	return errors.Join(err, f.Chmod(e.mode), f.Close())
}

// matches reports whether the planned tree already exists below root, to the last byte.
func (b *skeletonBuilder) matches(root string) bool {
	for _, e := range b.entries {
		p := filepath.Join(root, e.name)
		fi, err := os.Lstat(p)
		if err != nil {
			return false
		}
		switch e.kind {
		case "dir":
			if !fi.IsDir() {
				return false
			}
		case "link":
			if to, err := os.Readlink(p); err != nil || to != e.target {
				return false
			}
		default:
			f, err := os.Open(p)
			if err != nil {
				return false
			}
			sum := sha256.New()
			_, err = io.Copy(sum, f)
			f.Close()
			if err != nil || hex.EncodeToString(sum.Sum(nil)) != e.sum {
				return false
			}
		}
		if st, ok := fi.Sys().(*syscall.Stat_t); e.kind != "link" && fi.Mode().Perm() != e.mode.Perm() || b.chown && ok && int(st.Uid) != b.shift+e.id {
			return false
		}
	}
	return true
}

// copyTree plans a copy of one allowed entry of /etc: world-readable regular files, links and
// directories. It leaves out everything else, and missing files.
func (b *skeletonBuilder) copyTree(src string) error {
	b.watch = append(b.watch, filepath.Dir(src), src)
	if up, err := filepath.EvalSymlinks(filepath.Dir(src)); err != nil || up != "/etc" && !strings.HasPrefix(up, "/etc/") {
		return nil // missing, or not in /etc
	}
	return filepath.WalkDir(src, func(p string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return nil
		}
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return nil
		}
		switch {
		case fi.IsDir():
			b.watch = append(b.watch, p)
			return b.dir(p, 0o755, 0)
		case fi.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			if err != nil {
				return nil
			}
			return b.link(p, to)
		case fi.Mode().IsRegular() && fi.Mode()&0o004 != 0:
			err := b.file(p, fi.Mode().Perm()&^0o022, func() (io.ReadCloser, error) { return openRegular(p) })
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
				return nil
			}
			return err
		}
		return nil
	})
}

// openRegular opens a file that every user may read, without following links.
func openRegular(p string) (io.ReadCloser, error) {
	f, err := os.OpenFile(p, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() || fi.Mode()&0o004 == 0 {
		f.Close()
		return nil, fs.ErrPermission
	}
	return f, nil
}

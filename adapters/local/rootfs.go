//go:build linux

package local

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/local/pause"
)

// A skeleton is the root of sandboxes without an image: an allow-list, not the
// machine with holes. /usr (and what Config.Paths names) is the machine's own; /etc
// is a copied selection without accounts of people, passwords or keys; everything
// else is empty.
type skeleton struct {
	digest string
	dir    string   // where its own files are
	root   string   // what gVisor gets as the root file system
	shown  []string // directories of this machine in it
	binds  []string // those of them that the sandbox's spec must bind itself (not root)
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

// etcAllowed are the files and directories of /etc that every ordinary program may
// read and that tell nothing about the machine's people.
var etcAllowed = []string{
	"alternatives", "ca-certificates.conf", "bash.bashrc", "debian_version", "gai.conf", "inputrc",
	"ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime", "magic", "magic.mime", "mime.types",
	"nsswitch.conf", "os-release", "alpine-release", "redhat-release", "pki/tls/certs", "pki/ca-trust",
	"protocols", "rpc", "services", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
	"python3", "python3.9", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14", "perl", "java-17-openjdk", "java-21-openjdk",
}

// agentPath is where the agent stands inside every sandbox, and pausePath the program
// that waits until it is needed. Their directory is a read-only mount of the skeleton's,
// not a part of what the sandbox writes: its root cannot put another program in their
// place, nor take the mount away.
const (
	agentDir  = "/.sandboxer"
	agentPath = agentDir + "/sandboxer-agent"
	pausePath = agentDir + "/pause"
	// layerMount is an empty directory of this machine in sandboxes on images that were
	// saved when the programs were part of what they write (record.AgentMount).
	layerMount = agentDir + "/empty"
)

// agent is the directory of the skeleton that is mounted at agentDir.
func (s *skeleton) agent() string { return filepath.Join(s.root, agentDir) }

// tmpKeeper keeps /tmp from being empty.
const tmpKeeper = "/tmp/.sandboxer"

// workspaceDefault is the workspace of a sandbox whose profile names none.
const workspaceDefault = "/workspace"

// buildSkeleton makes, or finds, the skeleton for this machine and agent below dir.
// Its name is a digest of its content, so that a changed machine gets a new one and
// running sandboxes keep theirs.
// As root it is mounted below mounts: the sandbox's file server is an ordinary user to
// this machine and could not walk through the private dir.
func buildSkeleton(dir, mounts, agent string, paths []string, idShift int, asRoot bool) (*skeleton, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	tmp, err := os.MkdirTemp(dir, ".new-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	b := &skeletonBuilder{root: filepath.Join(tmp, "root"), shift: idShift, chown: asRoot}
	sum := sha256.New()
	b.sum = sum
	if err := b.build(agent, paths); err != nil {
		return nil, err
	}
	s := &skeleton{digest: hex.EncodeToString(sum.Sum(nil))[:16]}
	final := filepath.Join(dir, s.digest)
	if err := os.Rename(tmp, final); err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return nil, err
	}
	s.dir, s.shown = filepath.Join(final, "root"), b.binds
	if !asRoot {
		s.root, s.binds = s.dir, b.binds
		return s, nil
	}
	s.root = filepath.Join(mounts, s.digest)
	return s, s.assemble()
}

// assemble binds the machine's directories into the skeleton once, so that every
// sandbox needs a single mount. The skeleton is made a private mount first: nothing
// that happens to it reaches other mount namespaces, or comes back.
func (s *skeleton) assemble() error {
	if err := os.MkdirAll(s.root, 0o711); err != nil {
		return err
	}
	mounted, err := mountsBelow(s.root)
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
		if err := unix.Mount(d, at, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("binding %s into the skeleton: %w", d, err)
		}
		if err := unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
			return fmt.Errorf("making %s read-only in the skeleton: %w", d, err)
		}
	}
	return nil
}

// removeSkeletons unmounts and removes every skeleton in dir and mounts but those in
// keep. Sandboxes hold their own reference to the mounts, so this does not disturb
// them.
func removeSkeletons(dir, mounts string, keep func(digest string) bool) error {
	var errs []error
	for _, d := range []string{mounts, dir} {
		entries, err := os.ReadDir(d)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if keep(e.Name()) {
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
	mounted, err := mountsBelow(dir)
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

// mountsBelow lists the mount points at or below dir, in the order they were made.
func mountsBelow(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	var out []string
	sc := bufio.NewScanner(f)
	sc.Buffer(make([]byte, 64<<10), 1<<20)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		if len(fields) < 5 {
			continue
		}
		at := unescapeMount(fields[4])
		if at == dir || strings.HasPrefix(at, dir+"/") {
			out = append(out, at)
		}
	}
	return out, sc.Err()
}

// unescapeMount undoes the octal escapes of mountinfo (\040 is a space).
func unescapeMount(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

type skeletonBuilder struct {
	root  string
	shift int  // added to every owner: the host ID of the sandbox's ID 0
	chown bool // only root can give files away
	sum   io.Writer
	binds []string
}

func (b *skeletonBuilder) build(agent string, paths []string) error {
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
	// /bin, /lib and friends: links into /usr on a merged system, directories of
	// their own on others.
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
		if fi, err := os.Stat(p); err != nil || !fi.IsDir() {
			return sandboxer.E(sandboxer.Invalid, err, "paths: %s is not a directory of this machine", p)
		}
		if err := b.bind(p); err != nil {
			return err
		}
	}
	for _, e := range etcAllowed {
		if err := b.copyTree("/etc/" + e); err != nil {
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
		if err := b.file(f.name, 0o644, strings.NewReader(f.content)); err != nil {
			return err
		}
	}
	// gVisor covers an empty /tmp with a file system of its own, in memory and outside
	// the disk limit.
	if err := b.file(tmpKeeper, 0o444, strings.NewReader("")); err != nil {
		return err
	}
	f, err := os.Open(agent)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the in-sandbox agent cannot be read")
	}
	defer f.Close()
	if err := b.file(agentPath, 0o755, f); err != nil {
		return err
	}
	return b.file(pausePath, 0o755, bytes.NewReader(pause.Program))
}

// accounts returns passwd and group files with the machine's system accounts and
// one ordinary user.
func accounts() (passwd, group string) {
	keep := func(file string, fields int, user string) string {
		var out bytes.Buffer
		data, _ := os.ReadFile(file)
		for line := range strings.Lines(string(data)) {
			f := strings.Split(strings.TrimSpace(line), ":")
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

func (b *skeletonBuilder) note(kind, name string, mode fs.FileMode, rest string) {
	fmt.Fprintf(b.sum, "%s %q %o %q\n", kind, name, mode, rest)
}

func (b *skeletonBuilder) own(p string, id int) error {
	if !b.chown {
		return nil
	}
	return os.Lchown(p, b.shift+id, b.shift+id)
}

func (b *skeletonBuilder) dir(name string, mode fs.FileMode, id int) error {
	p := filepath.Join(b.root, name)
	if err := os.MkdirAll(p, 0o755); err != nil {
		return err
	}
	if err := os.Chmod(p, mode); err != nil {
		return err
	}
	b.note("dir", name, mode, strconv.Itoa(id))
	return b.own(p, id)
}

func (b *skeletonBuilder) link(name, target string) error {
	p := filepath.Join(b.root, name)
	if err := os.Symlink(target, p); err != nil {
		return err
	}
	b.note("link", name, 0, target)
	return b.own(p, 0)
}

func (b *skeletonBuilder) bind(dir string) error {
	if err := b.dir(dir, 0o755, 0); err != nil {
		return err
	}
	b.note("bind", dir, 0, "")
	b.binds = append(b.binds, dir)
	return nil
}

func (b *skeletonBuilder) file(name string, mode fs.FileMode, r io.Reader) error {
	p := filepath.Join(b.root, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(f, sum), r)
	if err := errors.Join(err, f.Chmod(mode), f.Close()); err != nil {
		return err
	}
	b.note("file", name, mode, hex.EncodeToString(sum.Sum(nil)))
	return b.own(p, 0)
}

// copyTree copies one allowed entry of /etc: world-readable regular files, links and
// directories. Anything else is left out, as is what is missing.
func (b *skeletonBuilder) copyTree(src string) error {
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
			return b.dir(p, 0o755, 0)
		case fi.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			if err != nil {
				return nil
			}
			if err := os.MkdirAll(filepath.Join(b.root, filepath.Dir(p)), 0o755); err != nil {
				return err
			}
			return b.link(p, to)
		case fi.Mode().IsRegular() && fi.Mode()&0o004 != 0:
			f, err := os.Open(p)
			if err != nil {
				return nil
			}
			defer f.Close()
			return b.file(p, fi.Mode().Perm()&^0o022, f)
		}
		return nil
	})
}

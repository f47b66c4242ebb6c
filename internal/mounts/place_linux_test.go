package mounts

import (
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// TestPlace: what is shown is what was opened, whatever becomes of its name; whose it is, is who uses it; and it goes
// without a trace, also in the middle.
func TestPlace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	src, other, place := filepath.Join(dir, "src"), filepath.Join(dir, "other"), filepath.Join(dir, "own/place")
	for _, d := range []string{src, other} {
		if err := errors.Join(os.Mkdir(d, 0o700), os.WriteFile(filepath.Join(d, "f"), []byte(d), 0o600), os.Chown(d, 4711, 4712), os.Chown(filepath.Join(d, "f"), 4711, 4712)); err != nil {
			t.Fatal(err)
		}
	}
	o := Opener{Extension: "ext.test", Own: []string{filepath.Dir(place)}}
	sources, err := o.Open(sandboxer.Spec{Vouched: []string{sandboxer.RestrictedMounts},
		Mounts: []sandboxer.Mount{{Source: src, Target: "/a"}, {Source: filepath.Join(src, "f"), Target: "/f", ReadOnly: true}}})
	if err == nil {
		err = Try(sources)
	}
	if sandboxer.KindOf(err) == sandboxer.Unsupported {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer Close(sources)
	if err := errors.Join(os.Rename(src, src+".was"), os.Symlink(other, src)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = Hide(place) })
	if err := Show(place, sources, 1000, 1001); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{At(place, 0) + "/f", At(place, 1)} {
		data, err := os.ReadFile(name)
		var st unix.Stat_t
		if serr := unix.Stat(name, &st); err != nil || serr != nil || string(data) != src || st.Uid != 1000 || st.Gid != 1001 {
			t.Errorf("%s holds %q of %d:%d (%v, %v)", name, data, st.Uid, st.Gid, err, serr)
		}
	}
	if err := os.WriteFile(At(place, 1), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("the read-only one is written to: %v", err)
	}
	if err := Show(place, sources[:1], 0, 0); err != nil { // over one that somebody who died has left
		t.Fatal(err)
	}
	for range 2 {
		if err := Hide(place); err != nil {
			t.Fatal(err)
		}
	}
	left, err := Below(dir)
	if _, serr := os.Lstat(place); err != nil || len(left) > 0 || !errors.Is(serr, fs.ErrNotExist) {
		t.Errorf("left: %q, %v, %v", left, err, serr)
	}
	if data, err := os.ReadFile(src + ".was/f"); err != nil || string(data) != src {
		t.Errorf("the source: %q, %v", data, err)
	}
}

// TestIn: what a process has at a target is told from anything else, and from the same where owners are others.
func TestIn(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	src, other := filepath.Join(dir, "src"), filepath.Join(dir, "other")
	if err := errors.Join(os.Mkdir(src, 0o700), os.Mkdir(other, 0o700)); err != nil {
		t.Fatal(err)
	}
	pids := map[string]int{"ours": os.Getpid()}
	for name, flags := range map[string]uintptr{"another": 0, "mapped": unix.CLONE_NEWUSER} {
		cmd := exec.Command("cat")
		ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100_000, Size: 65_536}}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
		if flags != 0 {
			cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = ids, ids
		}
		in, err := cmd.StdinPipe()
		if err := errors.Join(err, cmd.Start()); err != nil {
			t.Fatal(err)
		}
		defer func() { in.Close(); _ = cmd.Wait() }()
		pids[name] = cmd.Process.Pid
	}
	o := Opener{Extension: "ext.test"}
	for target, is := range map[string]bool{src: true, other: false, src + "/none": false} {
		sources, err := o.Open(sandboxer.Spec{Vouched: []string{sandboxer.RestrictedMounts}, Mounts: []sandboxer.Mount{{Source: src, Target: target}}})
		if err != nil {
			t.Fatal(err)
		}
		defer Close(sources)
		for name, pid := range pids {
			if in, err := sources[0].In(pid); err != nil || in != (is && name != "mapped") {
				t.Errorf("%s of %s: %t, %v", target, name, in, err)
			}
		}
	}
}

// TestPeer: who listens in another mount namespace does not see our mounts.
func TestPeer(t *testing.T) {
	const variable = "SANDBOXER_TEST_LISTEN"
	if at := os.Getenv(variable); at != "" { // the other side
		l, err := net.Listen("unix", at)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		os.Stdout.WriteString("listens\n")
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for name, flags := range map[string]uintptr{"the same": 0, "another": unix.CLONE_NEWNS} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "peer") // a socket's path is short
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			at := filepath.Join(dir, "s")
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestPeer$")
			cmd.Env = append(os.Environ(), variable+"="+at)
			cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: flags, Pdeathsig: syscall.SIGKILL}
			in, err := cmd.StdinPipe()
			out, oerr := cmd.StdoutPipe()
			if err := errors.Join(err, oerr, cmd.Start()); err != nil {
				t.Fatal(err)
			}
			defer func() { in.Close(); _ = cmd.Wait() }()
			if _, err := io.ReadFull(out, make([]byte, len("listens\n"))); err != nil {
				t.Fatal(err)
			}
			conn, err := net.Dial("unix", at)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			raw, err := conn.(*net.UnixConn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var sees bool
			cerr := raw.Control(func(fd uintptr) { sees, err = Peer(int(fd)) })
			if cerr != nil || err != nil || sees != (flags == 0) {
				t.Errorf("it sees our mounts: %t, %v, %v", sees, cerr, err)
			}
		})
	}
}

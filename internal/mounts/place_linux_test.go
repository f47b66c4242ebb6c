package mounts

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

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
		err = try(sources)
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
	t.Cleanup(func() { _ = Hide(place, nil) })
	if err := Show(place, sources, 1000, 1001, nil); err != nil {
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
	if err := Show(place, sources[:1], 0, 0, nil); err != nil { // over one that somebody who died has left
		t.Fatal(err)
	}
	for range 2 {
		if err := Hide(place, nil); err != nil {
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

// TestIn: a process's mount at a target is distinguished from anything else, and from the same with other owners.
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

// TestPeer: who listens in another mount namespace is shown mounts there.
func TestPeer(t *testing.T) {
	const variable, aside = "SANDBOXER_TEST_LISTEN", "SANDBOXER_TEST_LISTEN_ASIDE"
	if at := os.Getenv(variable); at != "" { // the other side
		l, err := net.Listen("unix", at)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if os.Getenv(aside) != "" {
			moveFirstThread(t)
		}
		os.Stdout.WriteString("listens\n")
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for name, flags := range map[string]uintptr{"the same": 0, "the same, but for the first thread": 0, "another": unix.CLONE_NEWNS} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "peer") // a socket's path is short
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			at := filepath.Join(dir, "s")
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestPeer$")
			cmd.Env = append(os.Environ(), variable+"="+at)
			if strings.Contains(name, "first thread") {
				cmd.Env = append(cmd.Env, aside+"=1")
			}
			cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: flags} // it ends with its input
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
			var space *Space
			cerr := raw.Control(func(fd uintptr) { space, err = Peer(int(fd)) })
			if err := errors.Join(cerr, err); err != nil || (space == nil) != (flags == 0) {
				t.Fatalf("it sees mounts in %v, %v", space, err)
			}
			defer space.Close()
			// What is shown there is seen there, and goes without anybody there again.
			src, err := filepath.EvalSymlinks(t.TempDir())
			place := filepath.Join(dir, "place")
			if err := errors.Join(err, os.WriteFile(filepath.Join(src, "f"), []byte("shown"), 0o600)); err != nil {
				t.Fatal(err)
			}
			sources, err := (&Opener{}).Open(sandboxer.Spec{Vouched: []string{sandboxer.RestrictedMounts}, Mounts: []sandboxer.Mount{{Source: src, Target: "/a"}}})
			if err == nil {
				err = try(sources)
			}
			if sandboxer.KindOf(err) == sandboxer.Unsupported {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			defer Close(sources)
			t.Cleanup(func() { _ = Hide(place, nil) })
			if err := Show(place, sources, 0, 0, space); err != nil {
				t.Fatal(err)
			}
			at = At(place, 0) + "/f"
			if flags != 0 {
				at = fmt.Sprintf("/proc/%d/root%s", cmd.Process.Pid, at)
			}
			if data, err := os.ReadFile(at); err != nil || string(data) != "shown" {
				t.Errorf("it sees %q, %v", data, err)
			}
			if _, err := os.Lstat(At(place, 0)); (err == nil) != (space == nil) {
				t.Errorf("here: %v", err)
			}
			if err := Hide(place, nil); err != nil {
				t.Fatal(err)
			}
			left, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", cmd.Process.Pid))
			if _, serr := os.Lstat(place); err != nil || !errors.Is(serr, fs.ErrNotExist) || strings.Contains(string(left), place) {
				t.Errorf("left: %v, %v, %s", err, serr, left)
			}
			if space == nil {
				return
			}
			// What is mounted there at a place of the same name is somebody else's.
			if err := errors.Join(os.Mkdir(place, 0o700), space.do(func() error {
				return errors.Join(unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""), unix.Mount("theirs", dir, "tmpfs", 0, ""),
					os.Mkdir(place, 0o700), unix.Mount("theirs", place, "tmpfs", 0, ""))
			})); err != nil {
				t.Fatal(err)
			}
			if err := Hide(place, space); !errors.Is(err, ErrApart) {
				t.Errorf("a place that is another one there: %v", err)
			}
			if left, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", cmd.Process.Pid)); err != nil || !strings.Contains(string(left), " "+place+" ") {
				t.Errorf("what somebody else has mounted there is gone: %v", err)
			}
		})
	}
}

// moveFirstThread moves the first thread of this process to another mount namespace, for good.
func moveFirstThread(t *testing.T) {
	moved := make(chan error)
	for range 1_000 {
		go func() {
			runtime.LockOSThread()
			if unix.Gettid() == unix.Getpid() {
				moved <- unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
			}
			select {} // the next one gets another thread
		}()
	}
	if err := <-moved; err != nil {
		t.Fatal(err)
	}
}

// TestService: a server whose mount namespace gets what is mounted on the machine, and has mounts of its own over it, as a service of systemd with
// ProtectSystem has, shows what an engine of the machine sees, and takes it away.
func TestService(t *testing.T) {
	const variable = "SANDBOXER_TEST_SERVICE"
	if dir := os.Getenv(variable); dir != "" {
		serve(t, dir)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	if _, err := exec.LookPath("unshare"); err != nil {
		t.Skip(err)
	}
	dir, err := os.MkdirTemp("", "service")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err := errors.Join(err, os.Mkdir(dir+"/data", 0o700), os.Mkdir(dir+"/src", 0o700), os.WriteFile(dir+"/src/f", []byte("shown"), 0o600)); err != nil {
		t.Fatal(err)
	}
	// The machine, with an engine that ends with its input; and the service in it.
	cmd := exec.Command("unshare", "--mount", "--propagation", "shared", "sh", "-c", `
mkfifo "$2/end"
SANDBOXER_TEST_LISTEN=$2/s "$1" -test.run='^TestPeer$' <"$2/end" >/dev/null &
exec 3>"$2/end"
unshare --mount --propagation slave sh -ec '
	for d in data src; do mount --bind "$2/$d" "$2/$d"; done
	mount -o remount,bind,ro /
	exec env SANDBOXER_TEST_SERVICE="$2" "$1" -test.run="^TestService\$" -test.v 3>&-' sh "$1" "$2"
code=$?
exec 3>&-
wait
exit $code`, "sh", self, dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	} else if strings.Contains(string(out), "--- SKIP") {
		t.Skip(string(out))
	}
	left, err := Below(dir)
	entries, _ := os.ReadDir(dir + "/data")
	if err != nil || len(left) > 0 || len(entries) > 0 {
		t.Errorf("left: %q, %v, %v", left, entries, err)
	}
	if data, err := os.ReadFile(dir + "/src/f"); err != nil || string(data) != "changed" {
		t.Errorf("the source: %q, %v", data, err)
	}
}

// serve is the server of TestService.
func serve(t *testing.T, dir string) {
	var conn net.Conn
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		var err error
		if conn, err = net.Dial("unix", dir+"/s"); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var space *Space
	var engine *unix.Ucred
	cerr := raw.Control(func(fd uintptr) {
		if space, err = Peer(int(fd)); err == nil {
			engine, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		}
	})
	if err := errors.Join(cerr, err); err != nil || space == nil {
		t.Fatalf("it sees mounts in %v, %v", space, err)
	}
	defer space.Close()
	sources, err := (&Opener{}).Open(sandboxer.Spec{Vouched: []string{sandboxer.RestrictedMounts}, Mounts: []sandboxer.Mount{{Source: dir + "/src", Target: "/a"}}})
	if err == nil {
		err = try(sources)
	}
	if sandboxer.KindOf(err) == sandboxer.Unsupported {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer Close(sources)
	// What it has read-only it shows so or not at all.
	for readOnly, kind := range map[bool]sandboxer.Kind{true: "", false: sandboxer.Invalid} {
		sources, err := (&Opener{}).Open(sandboxer.Spec{Vouched: []string{sandboxer.RestrictedMounts}, Mounts: []sandboxer.Mount{{Source: "/etc/passwd", Target: "/a", ReadOnly: readOnly}}})
		Close(sources)
		if sandboxer.KindOf(err) != kind {
			t.Errorf("/etc/passwd, read-only %t: %v", readOnly, err)
		}
	}
	place := dir + "/data/place"
	if err := Show(place, sources, 0, 0, space); err != nil {
		t.Fatal(err)
	}
	there := fmt.Sprintf("/proc/%d/root%s", engine.Pid, At(place, 0)+"/f")
	if data, err := os.ReadFile(there); err != nil || string(data) != "shown" {
		t.Errorf("the engine sees %q, %v", data, err)
	}
	if err := os.WriteFile(there, []byte("changed"), 0o600); err != nil {
		t.Error(err)
	}
	t.Logf("Hide from here: %v", Hide(place, nil)) // which the kernel may refuse
	if err := Hide(place, space); err != nil {
		t.Errorf("Hide: %v", err)
	}
	for _, pid := range []string{"self", fmt.Sprint(engine.Pid)} {
		if data, err := os.ReadFile("/proc/" + pid + "/mountinfo"); err != nil || strings.Contains(string(data), place) {
			t.Errorf("left of %s: %v, %s", pid, err, data)
		}
	}
}

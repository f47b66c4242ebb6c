// Package enginetest has container engines for tests: a private Docker engine, and a store
// of its own for Podman. Both have the image [Image].
package enginetest

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/procs/procstest"
)

// Image is the name of an image with BusyBox, and with a program /bin/echoer that listens on the
// address in its argument and echoes its input.
const Image = "sandboxer-test-busybox:1"

// A Docker is an engine that is started when it is first needed, and ends with this process however
// that ends.
type Docker struct {
	once sync.Once
	kept *exec.Cmd      // scripts/dockerd.sh keep
	end  io.WriteCloser // its input: it ends with it, and so with this process
	dir  string
	host string
	err  error
	kind kind
}

// A kind is a Docker engine with a certain setup.
type kind struct {
	options []string // dockerd's
	before  string   // what its namespaces get, by a shell
	sys     *syscall.SysProcAttr
	env     []string
}

// Start returns the engine's address in the form of the environment, DOCKER_HOST=unix://…, or skips
// the test if no engine can run.
func (d *Docker) Start(t testing.TB) string {
	t.Helper()
	d.once.Do(func() {
		if _, err := exec.LookPath("dockerd"); err != nil || os.Getuid() != 0 {
			d.err = fmt.Errorf("a Docker engine needs root and dockerd (scripts/setup.sh installs it)")
			return
		}
		if d.dir, d.err = os.MkdirTemp("/tmp", "sbd"); d.err != nil {
			return
		}
		if d.err = d.keep(); d.err == nil {
			d.err = d.load(t)
		}
	})
	if d.err != nil {
		t.Skip(d.err)
	}
	return "DOCKER_HOST=" + d.host
}

// load gives the engine the image.
func (d *Docker) load(t testing.TB) error {
	imp := exec.Command("docker", "import", "-", Image)
	imp.Env = append(os.Environ(), "DOCKER_HOST="+d.host)
	imp.Stdin = bytes.NewReader(BusyboxTar(t))
	if out, err := imp.CombinedOutput(); err != nil {
		return fmt.Errorf("docker import: %w: %s", err, out)
	}
	return nil
}

// GVisor makes program the engine's runtime runsc.
func (d *Docker) GVisor(t testing.TB, program string) {
	t.Helper()
	d.Start(t)
	if err := os.Symlink(program, filepath.Join(d.dir, "runsc")); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
}

// keep starts the engine, which ends with this process however that ends.
func (d *Docker) keep() error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	if _, err := os.ReadFile(filepath.Join(root, "scripts/dockerd.sh")); err != nil { // go test's cache depends on it
		return err
	}
	cmd := exec.Command("sh", filepath.Join(root, "scripts/dockerd.sh"), "keep", d.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if k := d.kind; k.sys != nil {
		script, err := os.ReadFile(cmd.Args[1])
		if err != nil {
			return err
		}
		own := filepath.Join(d.dir, "dockerd.sh") // the engine's user may have no access to the module
		if err := os.WriteFile(own, script, 0o644); err != nil {
			return err
		}
		cmd = exec.Command("sh", append([]string{"-c", k.before + `
exec sh "$@"`, "sh", own, "keep", d.dir}, k.options...)...)
		cmd.SysProcAttr, cmd.Env = k.sys, append(os.Environ(), k.env...)
	}
	cmd.SysProcAttr.Setsid = true
	var said bytes.Buffer
	cmd.Stderr = &said
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	d.kept, d.end = cmd, in
	data, err := io.ReadAll(out)
	if d.host = strings.TrimSpace(string(data)); d.host == "" {
		return fmt.Errorf("dockerd: %v, %v: %s", err, cmd.Wait(), said.String())
	}
	return nil
}

// Stop ends the engine, if it was started, and removes its files.
func (d *Docker) Stop() {
	if d.kept != nil {
		d.end.Close()
		_ = d.kept.Wait() // what is left of it is a test's finding
		os.RemoveAll(d.dir)
	}
}

// Remapping starts an engine of Docker's that maps the user IDs of all containers (userns-remap), and returns its address. It
// has no images, and ends with the test.
func Remapping(t testing.TB) string {
	return start(t, func(dir string) kind {
		// The ranges are in a file that only this engine sees.
		return kind{options: []string{"--userns-remap=nobody:nogroup"}, env: []string{"RANGES=" + filepath.Join(dir, "ranges")},
			sys: &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS},
			before: `set -e
mount --make-rprivate /
printf 'nobody:200000:65536\nnogroup:200000:65536\n' >"$RANGES"
for f in /etc/subuid /etc/subgid; do mount --bind "$RANGES" $f; done`}
	}).host
}

// Rootless starts an engine of Docker's that has no rights on this machine, in namespaces as RootlessKit makes them, and returns its
// address. It has no images, and ends with the test.
func Rootless(t testing.TB) string {
	const from = 100_000
	ids := []syscall.SysProcIDMap{{HostID: from, Size: 65_536}}
	return start(t, func(dir string) kind {
		_ = os.Chown(dir, from, from) // else it cannot start
		return kind{options: []string{"--rootless", "--storage-driver=vfs"},
			sys: &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{}},
			env: []string{"HOME=" + dir, "XDG_RUNTIME_DIR=" + dir, "ROOTLESSKIT_STATE_DIR=" + dir, fmt.Sprintf("ROOTLESSKIT_PARENT_EUID=%d", from), fmt.Sprintf("ROOTLESSKIT_PARENT_EGID=%d", from),
				"PATH=" + os.Getenv("PATH") + ":/usr/sbin:/sbin:" + dir},
			before: `set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
printf '#!/bin/sh\n' >"$HOME/rootlesskit-docker-proxy"
chmod +x "$HOME/rootlesskit-docker-proxy"`}
	}).host
}

// Limiting starts an engine of Docker's that keeps containers by the storage driver btrfs, or by overlay2 on XFS with project quotas (xfs),
// and returns its address. It has the image, and ends with the test.
func Limiting(t testing.TB, fs string) string {
	t.Helper()
	options, driver := "loop", fs
	if fs == "xfs" {
		options, driver = "loop,pquota", "overlay2"
	}
	d := start(t, func(dir string) kind {
		disk, data := filepath.Join(dir, "disk"), filepath.Join(dir, "data")
		if err := errors.Join(os.WriteFile(disk, nil, 0o600), os.Truncate(disk, 1<<30), os.Mkdir(data, 0o700)); err != nil { // sparse
			t.Fatal(err)
		}
		if _, err := exec.LookPath("mkfs." + fs); err != nil {
			t.Skipf("there is no mkfs.%s (scripts/setup.sh installs it)", fs)
		}
		if out, err := exec.Command("mkfs."+fs, "-q", disk).CombinedOutput(); err != nil {
			t.Fatalf("mkfs.%s: %v: %s", fs, err, out)
		}
		// No other process sees the mount. It goes, with the loop device, with the last process that does.
		k := kind{options: []string{"--storage-driver=" + driver}, sys: &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS},
			before: "set -e\nmount --make-rprivate /\nmount -o " + options + " '" + disk + "' '" + data + "'"}
		try := exec.Command("sh", "-c", k.before)
		try.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
		if out, err := try.CombinedOutput(); err != nil {
			t.Skipf("this machine mounts no %s with %s: %v: %s", fs, options, err, out)
		}
		k.before += "\nrm '" + disk + "'" // it is there for as long as it is mounted
		return k
	})
	if err := d.load(t); err != nil {
		t.Fatal(err)
	}
	return d.host
}

// start starts an engine for one test.
func start(t testing.TB, kind func(dir string) kind) *Docker {
	t.Helper()
	if _, err := exec.LookPath("dockerd"); err != nil || os.Getuid() != 0 {
		t.Skip("a Docker engine needs root and dockerd (scripts/setup.sh installs it)")
	}
	dir, err := os.MkdirTemp("/tmp", "sbd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })      // also where it did not start
	if err := os.Chmod(dir, 0o711); err != nil { // root of its containers passes
		t.Fatal(err)
	}
	d := &Docker{dir: dir, kind: kind(dir)}
	t.Cleanup(d.Stop)
	if err := d.keep(); err != nil {
		t.Fatal(err)
	}
	return d
}

// RootlessPodman starts Podman's API as the user called "nobody", which has one user ID, and returns its address. It has no images, and ends with the test.
func RootlessPodman(t testing.TB) string {
	t.Helper()
	for _, p := range []string{"podman", "runc"} {
		if _, err := exec.LookPath(p); err != nil || os.Getuid() != 0 {
			t.Skipf("needs root and %s (scripts/setup.sh installs it)", p)
		}
	}
	const nobody = 65534
	dir, err := os.MkdirTemp("/tmp", "sbp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for name, text := range map[string]string{"storage.conf": "[storage]\ndriver = \"vfs\"\n",
		"containers.conf": "[engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	// It ends at the end of the input, so with this process however that ends. Then all processes that it has started have ended: those that
	// ignore the signal are killed.
	cmd := exec.Command("sh", "-c", `podman system service --time=0 "unix://$HOME/api.sock" &
service=$! i=0
cat >/dev/null
trap '' TERM
kill 0
while kill -0 $service 2>/dev/null && [ $i -lt 100 ]; do i=$((i + 1)); sleep 0.1; done
p=$(find "$HOME" -name pause.pid -exec cat {} +) # which holds its namespaces, in a session of its own
[ -z "$p" ] || kill "$p"
kill -KILL 0`)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_RUNTIME_DIR="+dir, "CONTAINERS_CONF="+dir+"/containers.conf", "CONTAINERS_STORAGE_CONF="+dir+"/storage.conf")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	var said bytes.Buffer
	cmd.Stderr = &said
	cmd.WaitDelay = 10 * time.Second // for a process that has its standard error and lives on
	in, err := cmd.StdinPipe()
	if err := errors.Join(err, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	end := sync.OnceFunc(func() {
		in.Close()
		late := time.AfterFunc(time.Minute, func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
		defer late.Stop()
		_ = cmd.Wait()
	})
	t.Cleanup(end)
	socket := filepath.Join(dir, "api.sock")
	for last := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("unix", socket)
		if err == nil {
			c.Close()
			return "unix://" + socket
		}
		if time.Now().After(last) {
			end() // it has said all
			t.Fatalf("podman's service does not listen: %v: %s", err, said.String())
		}
	}
}

// moduleRoot is the directory of go.mod, wherever the test runs.
func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	return filepath.Dir(strings.TrimSpace(string(out))), err
}

// Hang stops the engine's process, as a machine that stalls would, until resume is called.
// Processes of its containers go on.
func (d *Docker) Hang(t testing.TB) (resume func()) {
	t.Helper()
	return procstest.Stop(t, d.pid(t, "pid"))
}

// PID is the engine's process.
func (d *Docker) PID(t testing.TB) int {
	t.Helper()
	return d.pid(t, "pid")
}

const containerdPID = "exec/containerd/containerd.pid"

// pid reads the number of one of the engine's processes.
func (d *Docker) pid(t testing.TB, file string) int {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(d.dir, file))
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// Kill kills the engine's processes, as a machine that fails would, except those that run its containers. Again starts it. If this
// machine has a containerd of its own, the engine uses that one, and it continues to run.
func (d *Docker) Kill(t testing.TB) {
	t.Helper()
	pids := []int{d.pid(t, "pid")}
	if _, err := os.Stat(filepath.Join(d.dir, containerdPID)); err == nil {
		pids = append(pids, d.pid(t, containerdPID)) // it may go with dockerd
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && err != syscall.ESRCH {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); !ended(pid); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("process %d of the engine survives SIGKILL", pid)
			}
		}
	}
}

// ended reports whether a process has ended, even if its parent has not noticed yet.
func ended(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, state, _ := bytes.Cut(stat, []byte(") "))
	return bytes.HasPrefix(state, []byte("Z")) || bytes.HasPrefix(state, []byte("X"))
}

// Again starts the killed engine, on its former data, and returns when it answers.
func (d *Docker) Again(t testing.TB) {
	t.Helper()
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	// If no process reaps ended processes, dockerd takes the one it names for alive.
	if err := os.Remove(filepath.Join(d.dir, containerdPID)); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if out, err := exec.Command("sh", filepath.Join(root, "scripts/dockerd.sh"), "start", d.dir).CombinedOutput(); err != nil {
		t.Fatalf("the engine does not start again: %v: %s", err, out)
	}
}

var (
	podmanDir  string
	podmanOnce sync.Once
)

// Podman returns the environment that gives Podman a store of the tests' own, with the
// test image in it.
func Podman(t testing.TB) []string {
	t.Helper()
	for _, p := range []string{"podman", "runc"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("there is no %s (scripts/setup.sh installs it)", p)
		}
	}
	if os.Getuid() != 0 {
		t.Skip("the tests' Podman needs root")
	}
	var failed error
	podmanOnce.Do(func() {
		dir, err := os.MkdirTemp("/tmp", "sbp")
		if err != nil {
			t.Fatal(err)
		}
		podmanDir = dir
		files := map[string]string{
			"storage.conf": fmt.Sprintf("[storage]\ndriver = \"vfs\"\ngraphroot = \"%[1]s/graph\"\nrunroot = \"%[1]s/run\"\n", dir),
			"containers.conf": fmt.Sprintf(`[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "%[1]s/tmp"
volume_path = "%[1]s/volumes"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[network]
network_config_dir = "%[1]s/net"
`, dir),
		}
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		imp := exec.Command("podman", "import", "-", "localhost/"+Image)
		imp.Env = append(os.Environ(), podmanEnv()...)
		imp.Stdin = bytes.NewReader(BusyboxTar(t))
		if out, err := imp.CombinedOutput(); err != nil {
			failed = fmt.Errorf("podman import: %w: %s", err, out)
		}
	})
	if failed != nil {
		t.Fatal(failed)
	}
	return podmanEnv()
}

func podmanEnv() []string {
	return []string{"CONTAINERS_CONF=" + podmanDir + "/containers.conf", "CONTAINERS_STORAGE_CONF=" + podmanDir + "/storage.conf"}
}

var (
	podmanService *exec.Cmd
	podmanSocket  string
)

// PodmanSocket starts Podman's API with the tests' own store, and returns its address, unix://….
// It ends with StopPodman, and with this process however that ends.
func PodmanSocket(t testing.TB) string {
	t.Helper()
	env := Podman(t)
	if podmanService != nil {
		return "unix://" + podmanSocket
	}
	podmanSocket = filepath.Join(podmanDir, "api.sock")
	cmd := exec.Command("podman", "system", "service", "--time=0", "unix://"+podmanSocket)
	cmd.Dir = podmanDir // where conmon leaves a file when a container runs out of memory
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setsid: true}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good: the service ends with the thread that started it
		started <- cmd.Start()
		select {}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	podmanService = cmd
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("unix", podmanSocket)
		if err == nil {
			c.Close()
			return "unix://" + podmanSocket
		}
		if time.Now().After(end) {
			t.Fatalf("podman's service does not listen: %v", err)
		}
	}
}

// PodmanPID is the process that PodmanSocket has started.
func PodmanPID() int { return podmanService.Process.Pid }

// StopPodman removes the content of Podman's store, and the store, if there was one.
func StopPodman() {
	if podmanDir == "" {
		return
	}
	if podmanService != nil {
		_ = podmanService.Process.Signal(syscall.SIGTERM)
		_ = podmanService.Wait()
	}
	// Remains of a failed test: processes, networks with their bridges, mounts.
	rm := exec.Command("sh", "-c", "podman rm -af -t 0; podman pod rm -af; podman network ls -q | grep -vx podman | xargs -r podman network rm -f; podman volume rm -af")
	rm.Env = append(os.Environ(), podmanEnv()...)
	_ = rm.Run() // what would not go is a test's finding
	_ = exec.Command("sh", "-c", `grep -F " $1/" /proc/self/mounts | cut -d' ' -f2 | sort -r | while read -r m; do umount -l "$m"; done`, "sh", podmanDir).Run()
	os.RemoveAll(podmanDir)
}

// InstallCompose makes the compose plugin that scripts/setup.sh builds the one of a user whose home directory is home. It
// skips the test if there is none.
func InstallCompose(t testing.TB, home string) {
	t.Helper()
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	plugin, dir := filepath.Join(root, "bin/docker-compose"), filepath.Join(home, ".docker/cli-plugins")
	if _, err := os.Stat(plugin); err != nil {
		t.Skip("there is no compose plugin in bin (scripts/setup.sh builds it)")
	}
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.Symlink(plugin, filepath.Join(dir, "docker-compose"))); err != nil {
		t.Fatal(err)
	}
}

// BusyboxTar is the root of an image made of this machine's busybox.
func BusyboxTar(t testing.TB) []byte {
	t.Helper()
	data, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		t.Skip("there is no busybox")
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(h tar.Header, text []byte) {
		h.Size = int64(len(text))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		w.Write(text)
	}
	for _, d := range []string{"bin/", "etc/", "root/", "work/", "proc/", "sys/", "dev/"} {
		put(tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	put(tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}, nil)
	put(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, data)
	echoer := filepath.Join(t.TempDir(), "echoer")
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-trimpath", "-o", echoer, "./internal/engine/enginetest/testdata/echo")
	build.Dir = root
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	program, err := os.ReadFile(echoer)
	if err != nil {
		t.Fatal(err)
	}
	put(tar.Header{Name: "bin/echoer", Typeflag: tar.TypeReg, Mode: 0o755}, program)
	list, err := exec.Command("/usr/bin/busybox", "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(string(list)) {
		if name != "busybox" {
			put(tar.Header{Name: "bin/" + name, Typeflag: tar.TypeSymlink, Linkname: "busybox"}, nil)
		}
	}
	put(tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"))
	put(tar.Header{Name: "etc/group", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:\nnogroup:x:65534:\n"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

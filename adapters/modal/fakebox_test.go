//go:build linux

package modal

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// A box is where the commands of one sandbox of the fake run: in namespaces of their own, with a directory of the test as their root.
type box struct {
	root   string
	holder *exec.Cmd // kills all when it is killed
	pid    int       // of the first process inside
	cgroup string
	env    []string
}

// cgroups are the controllers by which the fake limits a sandbox.
var cgroups = []string{"cpu", "cpuacct", "memory"}

// canBox skips a test on a machine that cannot run commands as the fake does.
func canBox(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("the fake's sandboxes need root")
	}
	for _, c := range cgroups {
		if _, err := os.Stat("/sys/fs/cgroup/" + c + "/tasks"); err != nil {
			t.Skipf("the fake limits sandboxes by control groups of version 1: %v", err)
		}
	}
	for _, p := range []string{"unshare", "nsenter", "ip", "chroot"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skip(err)
		}
	}
}

// skeleton makes the root of an image that has this machine's programs.
func skeleton(root string) error {
	for _, d := range []string{"usr", "proc", "dev", "tmp", "etc", "root", "home", "var", "run", "sys"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	for _, l := range []string{"bin", "lib", "lib64", "sbin"} {
		if err := os.Symlink("usr/"+l, filepath.Join(root, l)); err != nil {
			return err
		}
	}
	for _, f := range []string{"passwd", "group"} {
		data, err := os.ReadFile("/etc/" + f)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(root, "etc", f), data, 0o644); err != nil {
			return err
		}
	}
	return os.Chmod(filepath.Join(root, "tmp"), 0o1777)
}

// hold is the first process of a box: its mounts end with it.
const hold = `set -e
for c in cpu cpuacct memory; do echo $$ >/sys/fs/cgroup/$c/$2/cgroup.procs; done
ip link set lo up
mount --bind /usr "$1/usr"; mount -o remount,ro,bind "$1/usr"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
touch "$1/echoer"; mount --bind "$3" "$1/echoer"
mount -t sysfs -o ro sysfs "$1/sys"
mount -t tmpfs tmpfs "$1/sys/fs/cgroup"
for c in cpu cpuacct memory; do mkdir "$1/sys/fs/cgroup/$c"; mount --bind /sys/fs/cgroup/$c/$2 "$1/sys/fs/cgroup/$c"; done
cat /sys/fs/cgroup/memory/$2/memory.limit_in_bytes >"$1/sys/fs/cgroup/memory.max" # where our agent looks
touch "$1/sys/fs/cgroup/memory.current"; mount --bind /sys/fs/cgroup/memory/$2/memory.usage_in_bytes "$1/sys/fs/cgroup/memory.current"
exec chroot "$1" /bin/sh -c 'echo up; while :; do sleep 1; done'`

func newBox(dir, name, image string, milliCPU, memoryMiB uint32, env map[string]string) (*box, error) {
	b := &box{root: filepath.Join(dir, name), cgroup: "sandboxer-modal-" + strconv.Itoa(os.Getpid()) + "-" + name}
	if out, err := exec.Command("cp", "-a", image, b.root).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	for k, v := range env {
		b.env = append(b.env, k+"="+v)
	}
	for file, value := range map[string]int64{"cpu/%s/cpu.cfs_quota_us": int64(milliCPU) * 2 * 100, "memory/%s/memory.limit_in_bytes": int64(memoryMiB) << 20, "cpuacct/%s/tasks": 0} {
		file = "/sys/fs/cgroup/" + fmt.Sprintf(file, b.cgroup)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return nil, err
		}
		if value > 0 {
			if err := os.WriteFile(file, fmt.Append(nil, value), 0o644); err != nil {
				return nil, err
			}
		}
	}
	self, err := os.Executable() // which can echo
	if err != nil {
		return nil, err
	}
	b.holder = exec.Command("unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child", "sh", "-c", hold, "sh", b.root, b.cgroup, self)
	b.holder.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var errs strings.Builder
	b.holder.Stderr = &errs
	out, err := b.holder.StdoutPipe()
	if err == nil {
		err = b.holder.Start()
	}
	if err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if line != "up\n" {
		_ = b.holder.Process.Kill()
		_ = b.holder.Wait()
		return nil, fmt.Errorf("the box does not start (%v): %s", err, errs.String())
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", b.holder.Process.Pid))
	if err == nil {
		b.pid, err = strconv.Atoi(strings.TrimSpace(string(children)))
	}
	return b, err
}

// end kills all processes of the box.
func (b *box) end() {
	_ = b.holder.Process.Kill()
	_ = b.holder.Wait()
}

// clean removes what remains of a box.
func (b *box) clean(t testing.TB) {
	b.end()
	for _, c := range cgroups {
		_ = poll(func() bool {
			err := os.Remove("/sys/fs/cgroup/" + c + "/" + b.cgroup)
			return err == nil || os.IsNotExist(err)
		})
	}
	if err := os.RemoveAll(b.root); err != nil {
		t.Log(err)
	}
}

// start starts a command in the box.
func (b *box) start(args []string, env []string, in io.Reader, out, errs io.Writer) (*exec.Cmd, error) {
	const enter = `for c in cpu cpuacct memory; do echo $$ >/sys/fs/cgroup/$c/$2/cgroup.procs || exit 125; done; p=$1; shift 2; exec nsenter -t "$p" -m -p -n -i -r -w -- "$@"`
	cmd := exec.Command("/bin/sh", append([]string{"-c", enter, "sh", strconv.Itoa(b.pid), b.cgroup}, args...)...)
	cmd.Env = append(append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}, b.env...), env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, cmd.Start()
}

// An output is one stream of a command, which may be read again from an offset.
type output struct {
	mu    sync.Mutex
	cond  sync.Cond
	data  []byte
	taken int
	ended bool
}

func newOutput() *output { o := &output{}; o.cond.L = &o.mu; return o }

const ahead = 1 << 20 // what a command may write before it is read

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.data)-o.taken > ahead && !o.ended {
		o.cond.Wait()
	}
	if o.ended {
		return 0, io.ErrClosedPipe
	}
	o.data = append(o.data, p...)
	o.cond.Broadcast()
	return len(p), nil
}

func (o *output) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	o.cond.Broadcast()
}

// wake lets readers look whether they are still wanted.
func (o *output) wake() { o.mu.Lock(); defer o.mu.Unlock(); o.cond.Broadcast() }

// next waits for what follows offset; io.EOF at the end.
func (o *output) next(offset int, left func() bool) ([]byte, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.taken = max(o.taken, offset)
	o.cond.Broadcast()
	for len(o.data) <= offset && !o.ended && !left() {
		o.cond.Wait()
	}
	if len(o.data) <= offset {
		return nil, io.EOF
	}
	return o.data[offset:min(len(o.data), offset+64<<10)], nil
}

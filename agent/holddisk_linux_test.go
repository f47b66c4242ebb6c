package agent

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestHoldDiskCapability: the capability goes also where whoever starts it has it inherited.
func TestHoldDiskCapability(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it takes root")
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "hold-disk", "init", "--listen", "unix:"+filepath.Join(dir, "s"), "--", "/bin/sh", "-c", "cat /proc/self/status >"+dir+"/said && mv "+dir+"/said "+dir+"/status")
	cmd.Env = append(os.Environ(), "AGENT_TEST_RUN=always", "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{AmbientCaps: []uintptr{unix.CAP_AUDIT_WRITE}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Signal(unix.SIGTERM); _ = cmd.Wait() }()
	var status []byte
	eventually(t, "the command has not run", func() bool {
		var err error
		status, err = os.ReadFile(filepath.Join(dir, "status"))
		return err == nil
	})
	for line := range strings.Lines(string(status)) {
		name, set, _ := strings.Cut(strings.TrimSpace(line), ":")
		if !strings.HasPrefix(name, "Cap") {
			continue
		}
		if n, err := strconv.ParseUint(strings.TrimSpace(set), 16, 64); err != nil || n&(1<<unix.CAP_AUDIT_WRITE) != 0 {
			t.Errorf("%s has it: %s, %v", name, set, err)
		}
	}
}

// TestDiskFilter: by every way into the kernel what moves a file from one quota to another is refused, and nothing else.
func TestDiskFilter(t *testing.T) {
	program := diskFilter()
	does := func(arch, number, request uint32) (action uint32) {
		t.Helper()
		a := uint32(0)
		for pc := 0; pc < len(program); pc++ {
			switch i := program[pc]; i.Code {
			case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
				a = map[uint32]uint32{0: number, 4: arch, 24: request}[i.K]
			case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
				a &= i.K
			case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
				if a == i.K {
					pc += int(i.Jt)
				} else {
					pc += int(i.Jf)
				}
			case unix.BPF_RET | unix.BPF_K:
				return i.K
			default:
				t.Fatalf("instruction %d is %+v", pc, i)
			}
		}
		t.Fatal("the program has no end")
		return 0
	}
	const refused, allowed = unix.SECCOMP_RET_ERRNO | uint32(unix.EOPNOTSUPP), uint32(unix.SECCOMP_RET_ALLOW)
	for _, ioctl := range []struct{ arch, number uint32 }{
		{unix.AUDIT_ARCH_X86_64, 16}, {unix.AUDIT_ARCH_X86_64, 514 | x32Bit}, {unix.AUDIT_ARCH_I386, 54}, {unix.AUDIT_ARCH_AARCH64, 29}, {unix.AUDIT_ARCH_ARM, 54},
	} {
		for request, want := range map[uint32]uint32{
			0x401c5820: refused,                      // FS_IOC_FSSETXATTR
			0x40086602: refused,                      // FS_IOC_SETFLAGS
			0x40046602: refused,                      // the same, of 32 bits
			0x5000940e: refused, 0x50009418: refused, // BTRFS_IOC_SUBVOL_CREATE, and the second one
			0x50009401: refused, 0x50009417: refused, // BTRFS_IOC_SNAP_CREATE, and the second one
			0x801c581f: allowed, 0x80086601: allowed, // FS_IOC_FSGETXATTR, FS_IOC_GETFLAGS
			0x40049409: allowed, 0x4020940d: allowed, 0xc0189436: allowed, // FICLONE, FICLONERANGE, FIDEDUPERANGE
			0x5401: allowed, 0x5413: allowed, 0x541b: allowed, 0x5421: allowed, // of terminals and sockets
		} {
			if got := does(ioctl.arch, ioctl.number, request); got != want {
				t.Errorf("ioctl %d of %#x with %#x: %#x, want %#x", ioctl.number, ioctl.arch, request, got, want)
			}
		}
		if got := does(ioctl.arch, ioctl.number&x32Bit|sysFileSetattr, 0); got != refused {
			t.Errorf("file_setattr of %#x: %#x", ioctl.arch, got)
		}
		for _, other := range []uint32{0, 1, 2, 60, 231, 468, 470} {
			if got := does(ioctl.arch, other, 0x401c5820); got != allowed {
				t.Errorf("system call %d of %#x: %#x", other, ioctl.arch, got)
			}
		}
	}
	if got := does(1, 16, 0); got != unix.SECCOMP_RET_ERRNO|uint32(unix.ENOSYS) {
		t.Errorf("of another architecture: %#x", got)
	}
}

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

// TestHoldCapability: the capability is also dropped if the parent has it inheritable.
func TestHoldCapability(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it takes root")
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "hold", "init", "--listen", "unix:"+filepath.Join(dir, "s"), "--", "/bin/sh", "-c", "cat /proc/self/status >"+dir+"/said && mv "+dir+"/said "+dir+"/status")
	cmd.Env = append(os.Environ(), "AGENT_TEST_RUN=always", "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{AmbientCaps: []uintptr{markCapability}}
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
		if n, err := strconv.ParseUint(strings.TrimSpace(set), 16, 64); err != nil || n&(1<<markCapability) != 0 {
			t.Errorf("%s has it: %s, %v", name, set, err)
		}
	}
}

// runFilter returns the filter's result for a call.
func runFilter(t *testing.T, program []unix.SockFilter) func(arch, number, first, request uint32) (action uint32) {
	return func(arch, number, first, request uint32) (action uint32) {
		t.Helper()
		a := uint32(0)
		for pc := 0; pc < len(program); pc++ {
			switch i := program[pc]; i.Code {
			case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
				a = map[uint32]uint32{0: number, 4: arch, 16: first, 24: request}[i.K]
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
}

// TestHoldFilter: every way into the kernel refuses sockets of families outside the own network, with a quota or without, and no other call.
func TestHoldFilter(t *testing.T) {
	const refused, allowed = unix.SECCOMP_RET_ERRNO | uint32(unix.EAFNOSUPPORT), uint32(unix.SECCOMP_RET_ALLOW)
	for _, disk := range []bool{false, true} {
		does := runFilter(t, holdFilter(disk))
		for _, c := range []struct {
			arch    uint32
			numbers []uint32
			packed  bool
		}{
			{unix.AUDIT_ARCH_X86_64, []uint32{41, 53, 41 | x32Bit, 53 | x32Bit}, false}, {unix.AUDIT_ARCH_I386, []uint32{359, 360}, true},
			{unix.AUDIT_ARCH_AARCH64, []uint32{198, 199}, false}, {unix.AUDIT_ARCH_ARM, []uint32{281, 288}, true},
		} {
			for _, number := range c.numbers {
				for family := range uint32(64) {
					want := refused
					switch family {
					case unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK, unix.AF_PACKET:
						want = allowed
					}
					if got := does(c.arch, number, family, 0); got != want {
						t.Errorf("family %d by call %d of %#x: %#x, want %#x", family, number, c.arch, got, want)
					}
				}
			}
			if c.packed {
				for call, want := range map[uint32]uint32{1: refused, 2: allowed, 3: allowed, 8: refused, 9: allowed} {
					if got := does(c.arch, 102, call, 0); got != want {
						t.Errorf("socketcall %d of %#x: %#x, want %#x", call, c.arch, got, want)
					}
				}
			}
			if got := does(c.arch, sysIOURing, 0, 0); got != unix.SECCOMP_RET_ERRNO|uint32(unix.ENOSYS) {
				t.Errorf("io_uring_setup of %#x: %#x", c.arch, got)
			}
		}
	}
}

// TestDiskFilter: every way into the kernel refuses calls that move a file from one quota to another, and no other call.
func TestDiskFilter(t *testing.T) {
	filter := runFilter(t, holdFilter(true))
	does := func(arch, number, request uint32) uint32 { return filter(arch, number, 0, request) }
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
			0x5401: allowed, 0x5413: allowed, 0x541b: allowed, 0x5421: allowed, // for terminals and sockets
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

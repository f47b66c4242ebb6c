// Lift tries, from inside, to get around a limit of the disk, and prints how far it came: nothing where it did not.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// much is more than the limit.
const much = 100 << 20

func main() {
	if len(os.Args) > 1 {
		trace(os.Args[1])
		return
	}
	subvolume()
	project()
	for _, dir := range []string{"/tmp", "/root", "/work", "/var/tmp", "/run", "/etc", "/", "/dev", "/dev/shm"} {
		fill(dir, "fill")
	}
	mounted()
}

// fill writes until it cannot.
func fill(dir, name string) {
	if os.MkdirAll(dir, 0o755) != nil {
		return
	}
	file := filepath.Join(dir, name)
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return
	}
	defer f.Close()
	n, chunk := 0, bytes.Repeat([]byte("x"), 1<<20)
	for n < much && err == nil {
		var k int
		k, err = f.Write(chunk)
		n += k
	}
	if n >= much {
		fmt.Printf("%s took %d bytes\n", file, n)
	}
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		fmt.Printf("%s ended with %v\n", file, err)
	}
	if name == "fill" {
		os.Remove(file)
	} else {
		f.Truncate(0)
	}
}

// mounted tries what engines have of their own in a container's /etc.
func mounted() {
	for _, name := range []string{"hosts", "hostname", "resolv.conf"} {
		fill("/etc", name)
	}
}

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// subvolume makes one, of Btrfs, which no limit is for.
func subvolume() {
	dir, err := os.Open("/")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer dir.Close()
	for name, request := range map[string]uintptr{"first": 0x5000940e, "second": 0x50009418, "copy": 0x50009401, "copied": 0x50009417} {
		arg := make([]byte, 4096) // of either kind
		first := request&0xff == 0x0e || request&0xff == 0x01
		at := 8
		if !first {
			at = 56
		}
		copy(arg[at:], name)
		if request&0xff == 0x01 || request&0xff == 0x17 {
			*(*int64)(unsafe.Pointer(&arg[0])) = int64(dir.Fd())
		}
		if ioctl(dir, request, unsafe.Pointer(&arg[0])) == nil {
			fmt.Println("made the subvolume", name)
			fill("/"+name, "fill")
		}
	}
}

// project has a file and a directory count for no project, of XFS.
func project() {
	f, err := os.Create("project")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer f.Close()
	var attr [28]byte // struct fsxattr
	if err := ioctl(f, 0x401c5820, unsafe.Pointer(&attr)); !errors.Is(err, unix.EOPNOTSUPP) {
		fmt.Println("FS_IOC_FSSETXATTR:", err)
	}
	var flags int
	if err := ioctl(f, unix.FS_IOC_SETFLAGS, unsafe.Pointer(&flags)); !errors.Is(err, unix.EOPNOTSUPP) {
		fmt.Println("FS_IOC_SETFLAGS:", err)
	}
}

// trace takes over a process whose command has this in it, and which is no ancestor: what an engine has started.
func trace(what string) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	seen := 0
	for _, file := range all {
		line, err := os.ReadFile(file)
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			fmt.Println(err)
		}
		if pid == os.Getpid() || !bytes.Contains(line, []byte(what)) {
			continue
		}
		seen++
		if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pid), 0, 0, 0, 0); errno != unix.EPERM {
			fmt.Printf("process %d can be traced: %v\n", pid, errno)
		}
		if f, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0); err == nil {
			f.Close()
			fmt.Printf("the memory of process %d can be written\n", pid)
		}
	}
	if seen == 0 {
		fmt.Println("there is no such process")
	}
}

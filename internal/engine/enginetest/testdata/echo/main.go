// Echo listens on its argument and echoes every connection until its peer closes. With two arguments it does other things of which busybox knows nothing.
package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"unsafe"
)

func main() {
	if len(os.Args) == 3 {
		n, err := strconv.Atoi(os.Args[2])
		if err != nil {
			panic(err)
		}
		switch os.Args[1] {
		case "socket": // of that family; success where there is one
			if _, err := syscall.Socket(n, syscall.SOCK_STREAM, 0); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
		case "trace": // the ways into that process that are open
			trace(n)
		}
		return
	}
	l, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		panic(err)
	}
	for {
		c, err := l.Accept()
		if err != nil {
			panic(err)
		}
		go func() {
			defer c.Close()
			io.Copy(c, c)
		}()
	}
}

func trace(pid int) {
	if err := syscall.PtraceAttach(pid); err == nil {
		fmt.Println("ptrace")
	}
	proc := fmt.Sprintf("/proc/%d/", pid)
	for _, name := range []string{"mem", "environ", "maps"} {
		if f, err := os.OpenFile(proc+name, os.O_RDONLY, 0); err == nil {
			if n, _ := f.Read(make([]byte, 1)); n > 0 || name == "mem" {
				fmt.Println(name)
			}
		}
	}
	if _, err := os.Open(proc + "root/etc"); err == nil {
		fmt.Println("root")
	}
	word := make([]byte, 8)
	local := [2]uintptr{uintptr(unsafe.Pointer(&word[0])), 8}
	remote := [2]uintptr{0x400000, 8}
	for name, number := range map[string]uintptr{"process_vm_readv": 310, "process_vm_writev": 311} { // of amd64
		_, _, errno := syscall.Syscall6(number, uintptr(pid), uintptr(unsafe.Pointer(&local)), 1, uintptr(unsafe.Pointer(&remote)), 1, 0)
		if errno != syscall.EPERM && errno != syscall.ENOSYS {
			fmt.Println(name)
		}
	}
	if fd, _, errno := syscall.Syscall(434, uintptr(pid), 0, 0); errno == 0 { // pidfd_open
		if _, _, errno := syscall.Syscall(438, fd, 3, 0); errno != syscall.EPERM && errno != syscall.ENOSYS { // pidfd_getfd
			fmt.Println("pidfd_getfd")
		}
	}
}

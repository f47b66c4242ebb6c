// Command tool is what tests run inside sandboxes: a server that echoes TCP
// connections, and clients.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer/extensiontest"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: tool echo ADDRESS | get URL | reach NET:ADDRESS… | resolve NAME… | hold ADDRESS | map FILE | maprest FILE | many ADDRESS N | threads N | nested (add|leave) | push ADDRESS MB | pull ADDRESS MB | impersonate SOCKET")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[2:]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func run(verb, arg string, args []string) error {
	n := 0
	if len(args) == 2 {
		n, _ = strconv.Atoi(args[1])
	}
	switch verb {
	case "echo":
		return extensiontest.Echo(arg)
	case "map", "maprest":
		return mapped(arg, verb == "map")
	case "nested":
		c := exec.Command("/proc/self/exe", "loopback", arg)
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}}
		return c.Run()
	case "loopback":
		return loopback(arg)
	case "get":
		c := http.Client{Timeout: 20 * time.Second}
		res, err := c.Get(arg)
		if err == nil {
			_, err = io.Copy(os.Stdout, res.Body)
		}
		return err
	case "reach": // one line for each, in order
		lines := make([]string, len(args))
		var wg sync.WaitGroup
		for i, a := range args {
			wg.Go(func() { lines[i] = reach(a) })
		}
		wg.Wait()
		fmt.Println(strings.Join(lines, "\n"))
	case "resolve":
		for _, name := range args {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			list, err := (&net.Resolver{PreferGo: true}).LookupHost(ctx, name)
			cancel()
			fmt.Println(strings.Join(append(list, short(err)), " "))
		}
	case "connect":
		if got := reach("tcp:" + arg); got != "hello" {
			return errors.New(got)
		}
	case "socket": // of the given family
		family, err := strconv.Atoi(arg)
		if err == nil {
			_, err = syscall.Socket(family, syscall.SOCK_STREAM, 0)
		}
		return err
	case "hold": // reports when it is connected, and how that ends
		c, err := net.Dial("tcp", arg)
		if err != nil {
			return err
		}
		fmt.Println("connected")
		_, err = io.Copy(io.Discard, c)
		fmt.Println("ended", short(err))
	case "impersonate":
		return impersonate(arg)
	case "threads": // until it is ended, or can make no more
		n, _ := strconv.Atoi(arg)
		for range n {
			go func() { runtime.LockOSThread(); time.Sleep(time.Hour) }()
		}
		time.Sleep(time.Hour)
	case "many":
		return many(arg, n)
	case "push", "pull":
		return transfer(arg, verb == "pull", int64(n)<<20)
	}
	return nil
}

// transfer sends or receives this many bytes and prints the rate in bytes per second. First it sends the number,
// negative to receive.
func transfer(addr string, pull bool, size int64) error {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	begin := time.Now()
	buf := make([]byte, 256<<10)
	if pull {
		fmt.Fprintf(c, "%d\n", -size)
		var k int64
		for n := 0; err == nil; k += int64(n) {
			n, err = c.Read(buf)
		}
		if err != io.EOF || k != size {
			return fmt.Errorf("%d of %d bytes, %v", k, size, err)
		}
	} else {
		fmt.Fprintf(c, "%d\n", size)
		for left := size; left > 0; left -= int64(len(buf)) {
			if _, err := c.Write(buf); err != nil {
				return err
			}
		}
		if _, err := io.ReadFull(c, buf[:1]); err != nil {
			return err
		}
	}
	fmt.Println(int64(float64(size) / time.Since(begin).Seconds()))
	return nil
}

func reach(a string) string {
	network, addr, _ := strings.Cut(a, ":")
	c, err := net.DialTimeout(network, addr, 20*time.Second)
	if err != nil {
		return short(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(6 * time.Second))
	if network == "udp" {
		fmt.Fprintln(c, "hello")
	}
	buf := make([]byte, 100)
	n, err := c.Read(buf)
	if err != nil {
		return short(err)
	}
	return strings.TrimSpace(string(buf[:n]))
}

func short(err error) string {
	var d *net.DNSError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &d) && d.IsNotFound:
		return "no such host"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, syscall.ECONNRESET):
		return "reset"
	case errors.Is(err, syscall.ENETUNREACH):
		return "unreachable"
	}
	return err.Error()
}

// many tests n connections at a time with an echo each.
func many(addr string, n int) error {
	errs := make([]error, n)
	var wg, open sync.WaitGroup
	open.Add(n)
	for i := range n {
		wg.Go(func() {
			c, err := net.Dial("tcp", addr)
			open.Done()
			if err != nil {
				errs[i] = err
				return
			}
			defer c.Close()
			open.Wait() // all are open at the same time
			data := bytes.Repeat([]byte{byte(i)}, 32<<10)
			go c.Write(data)
			got := make([]byte, len(data))
			if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, data) {
				errs[i] = fmt.Errorf("connection %d: not what was sent: %w", i, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// mapped prints a file through mapped memory, or the rest of its last page after its end.
func mapped(name string, content bool) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	page := int64(os.Getpagesize())
	data, err := syscall.Mmap(int(f.Fd()), 0, int((fi.Size()+page-1)/page*page), syscall.PROT_READ, syscall.MAP_PRIVATE)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	if content {
		_, err = os.Stdout.Write(data[:fi.Size()])
		return err
	}
	rest := data[fi.Size():]
	if len(bytes.Trim(rest, "\x00")) > 0 {
		return fmt.Errorf("%q", rest)
	}
	fmt.Println(len(rest), "zeros")
	return nil
}

// impersonate takes the place of the listener at a Unix socket, again and again, and writes what
// it receives to a file next to the socket.
func impersonate(path string) error {
	mine := path + ".mine"
	var is os.FileInfo
	for said := false; ; time.Sleep(time.Millisecond) {
		if now, err := os.Lstat(path); err == nil && is != nil && os.SameFile(now, is) {
			if !said {
				said = true
				fmt.Println("there")
			}
			continue
		}
		_ = os.Remove(mine)
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: mine, Net: "unix"})
		if err != nil {
			return err
		}
		l.SetUnlinkOnClose(false)
		go func() {
			for {
				c, err := l.AcceptUnix()
				if err != nil {
					return
				}
				go func() {
					if n, oob, _, _, _ := c.ReadMsgUnix(make([]byte, 99), make([]byte, 999)); n > 0 || oob > 0 {
						_ = os.WriteFile(path+".given", []byte("x"), 0o600)
					}
				}()
			}
		}()
		if err := os.Rename(mine, path); err != nil {
			return err
		}
		if is, err = os.Lstat(path); err != nil {
			return err
		}
	}
}

// loopback brings lo up in a network namespace of its own, as bubblewrap does if how is "add",
// and connects to itself.
func loopback(how string) error {
	s, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW, syscall.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		return err
	}
	ask := func(kind uint16, flags uint16, body []byte) error {
		m := binary.NativeEndian.AppendUint32(nil, uint32(16+len(body)))
		m = binary.NativeEndian.AppendUint16(m, kind)
		m = binary.NativeEndian.AppendUint16(m, flags|syscall.NLM_F_REQUEST|syscall.NLM_F_ACK)
		m = append(append(m, make([]byte, 8)...), body...)
		if err := syscall.Sendto(s, m, 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}); err != nil {
			return err
		}
		answer := make([]byte, 4096)
		n, _, err := syscall.Recvfrom(s, answer, 0)
		if err != nil {
			return err
		}
		if n < 20 {
			return fmt.Errorf("an answer of %d bytes", n)
		}
		if e := int32(binary.NativeEndian.Uint32(answer[16:])); e != 0 {
			return fmt.Errorf("message %d: %w", kind, syscall.Errno(-e))
		}
		return nil
	}
	if how == "add" {
		body := []byte{syscall.AF_INET, 8, syscall.IFA_F_PERMANENT, syscall.RT_SCOPE_HOST}
		body = binary.NativeEndian.AppendUint32(body, uint32(lo.Index))
		for _, attr := range []uint16{syscall.IFA_LOCAL, syscall.IFA_ADDRESS} {
			body = binary.NativeEndian.AppendUint16(body, 8)
			body = append(binary.NativeEndian.AppendUint16(body, attr), 127, 0, 0, 1)
		}
		if err := ask(syscall.RTM_NEWADDR, syscall.NLM_F_CREATE|syscall.NLM_F_EXCL, body); err != nil {
			return err
		}
	}
	body := make([]byte, 16) // struct ifinfomsg
	binary.NativeEndian.PutUint32(body[4:], uint32(lo.Index))
	binary.NativeEndian.PutUint32(body[8:], syscall.IFF_UP)
	if err := ask(syscall.RTM_NEWLINK, 0, body); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() {
		if c, err := l.Accept(); err == nil {
			fmt.Fprintf(c, "hello %s", c.RemoteAddr().(*net.TCPAddr).IP)
			c.Close()
		}
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	said, err := io.ReadAll(c)
	fmt.Println(string(said), "from", c.RemoteAddr().(*net.TCPAddr).IP)
	return err
}

package fake

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// cookie is in the environment of every process of the sandbox.
func (o Object) cookie() string { return "SANDBOXER_ROOT=" + o.Dir }

// procs returns the running processes whose environment has the line cookie.
func procs(cookie string) (pids []int) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	buf := make([]byte, 128<<10)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		env := environ(pid, buf)
		if bytes.HasPrefix(env, []byte(cookie+"\x00")) || bytes.Contains(env, []byte("\x00"+cookie+"\x00")) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// environ returns the environment of pid, in one read if it fits into buf: what is read in
// pieces may be that of two programs. In the middle of an execve it shows none, once
// because the file was opened of the memory it has left and then until its new memory
// is set up.
func environ(pid int, buf []byte) []byte {
	const vsize, envEnd = 23 - 3, 51 - 3 // numbered as in proc(5)
	for end, settled := time.Now().Add(time.Second), 0; ; {
		f, err := os.Open(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			return nil
		}
		n, err := f.Read(buf)
		var rest []byte
		if n == len(buf) {
			rest, _ = io.ReadAll(f)
		}
		f.Close()
		if err != nil && err != io.EOF || n > 0 || settled > 1 || time.Now().After(end) {
			return append(buf[:n:n], rest...)
		}
		st := stat(pid)
		switch {
		case len(st) <= envEnd || st[vsize] == "0": // it ended, is a zombie or one of the kernel's
			return nil
		case st[envEnd] == "0":
			settled = 0
			time.Sleep(50 * time.Microsecond)
		default:
			settled++
		}
	}
}

// stat returns the fields of /proc/PID/stat from the third on; none when pid ended.
func stat(pid int) []string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	_, rest, _ := strings.Cut(string(b), ") ") // the name before it may contain anything
	return strings.Fields(rest)
}

// kill ends every process with the cookie. It returns when there is none left: they
// may fork while they are looked for.
func kill(cookie string) error {
	for try := range 400 {
		pids := procs(cookie)
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		if try > 0 {
			time.Sleep(time.Duration(min(try, 20)) * time.Millisecond / 4)
		}
	}
	return errors.New("some survive SIGKILL")
}

// freeze stops every process with the cookie, and those they fork meanwhile.
func freeze(cookie string) {
	stopped := map[int]bool{}
	for fresh := true; fresh; {
		fresh = false
		for _, pid := range procs(cookie) {
			if !stopped[pid] {
				stopped[pid], fresh = true, true
				syscall.Kill(pid, syscall.SIGSTOP)
			}
		}
	}
}

func thaw(cookie string) {
	for _, pid := range procs(cookie) {
		syscall.Kill(pid, syscall.SIGCONT)
	}
}

// dial connects to port if a process of o listens on it.
func dial(ctx context.Context, o Object, port int) (net.Conn, error) {
	closed := sandboxer.E(sandboxer.Unavailable, nil, "nothing listens on port %d of sandbox %s", port, o.Spec.ID)
	sockets := listeners(port)
	if len(sockets) == 0 {
		return nil, closed
	}
	for _, pid := range procs(o.cookie()) {
		dir := fmt.Sprintf("/proc/%d/fd", pid)
		fds, err := os.ReadDir(dir)
		if err != nil {
			continue // it ended
		}
		for _, fd := range fds {
			link, _ := os.Readlink(filepath.Join(dir, fd.Name()))
			addr, ok := sockets[link]
			if !ok {
				continue
			}
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
			if err != nil {
				return nil, sandboxer.E(sandboxer.Unavailable, err, "port %d of sandbox %s does not answer", port, o.Spec.ID)
			}
			return conn, nil
		}
	}
	return nil, closed
}

// listeners returns the address to dial for every socket that listens on port, by
// the name its owner's file descriptors have ("socket:[inode]").
func listeners(port int) map[string]string {
	found := map[string]string{}
	for file, host := range map[string]string{"/proc/net/tcp": "127.0.0.1", "/proc/net/tcp6": "::1"} {
		table, _ := os.ReadFile(file)
		for line := range strings.Lines(string(table)) {
			// sl local_address rem_address st … uid timeout inode
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != "0A" || !strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
				continue
			}
			found["socket:["+f[9]+"]"] = net.JoinHostPort(host, strconv.Itoa(port))
		}
	}
	return found
}

// measure returns what o consumes now.
func measure(o Object) sandboxer.Stats {
	s := sandboxer.Stats{At: time.Now(), CPU: o.CPU, RxBytes: -1, TxBytes: -1}
	const tick = time.Second / 100 // USER_HZ
	for _, pid := range procs(o.cookie()) {
		f := stat(pid)
		if len(f) < 22 {
			continue
		}
		num := func(i int) int64 { n, _ := strconv.ParseInt(f[i-3], 10, 64); return n } // numbered as in proc(5)
		s.PIDs++
		s.CPU += time.Duration(num(14)+num(15)+num(16)+num(17)) * tick
		s.MemoryBytes += num(24) * int64(os.Getpagesize())
	}
	filepath.WalkDir(o.Dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if fi, err := d.Info(); err == nil {
				s.DiskBytes += fi.Size()
			}
		}
		return nil
	})
	return s
}

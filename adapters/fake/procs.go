package fake

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procnet"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// cookie is in the environment of every process of the sandbox.
func (o Object) cookie() string { return "SANDBOXER_ROOT=" + o.Dir }

// tag is what a process with that cookie keeps when it drops its environment: a limit on
// locks, which Linux has long stopped to heed. The soft limit tells of which command it is,
// the hard one of which sandbox.
func tag(cookie string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(cookie))
	n := h.Sum64()>>4 | 1<<60
	if strings.HasPrefix(cookie, "SANDBOXER_ROOT=") {
		n += 1 << 60 // not below any soft one
	}
	return n
}

// tagging is a script that runs "$@" with the tags.
func tagging(soft, hard string) string {
	both := fmt.Sprintf("ulimit -%%[1]s %d && ulimit -S -%%[1]s %d", tag(hard), tag(soft))
	return "{ " + fmt.Sprintf(both, "w") + "; } 2>/dev/null || { " + fmt.Sprintf(both, "x") + `; } 2>/dev/null; exec "$@"`
}

// members lists the processes with the cookie.
func members(cookie string) ([]int, error) {
	pids, err := procs.WithEnv(cookie)
	if err != nil {
		return nil, err
	}
	all, err := procs.All()
	if err != nil {
		return nil, err
	}
	want := tag(cookie)
	for _, pid := range all {
		soft, hard, err := procs.Limit(pid, "Max file locks")
		if err != nil {
			return nil, err
		}
		if (soft == want || hard == want) && !slices.Contains(pids, pid) && !procs.Ended(pid) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// kill ends every process with the cookie. It returns when there is none left: they
// may fork while they are looked for.
func kill(cookie string) error {
	for try := range 400 {
		pids, err := members(cookie)
		if err != nil || len(pids) == 0 {
			return err
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
func freeze(cookie string) error {
	stopped := map[int]bool{}
	for fresh := true; fresh; {
		fresh = false
		pids, err := members(cookie)
		if err != nil {
			return err
		}
		for _, pid := range pids {
			if !stopped[pid] {
				stopped[pid], fresh = true, true
				syscall.Kill(pid, syscall.SIGSTOP)
			}
		}
	}
	return nil
}

func thaw(cookie string) error {
	pids, err := members(cookie)
	for _, pid := range pids {
		syscall.Kill(pid, syscall.SIGCONT)
	}
	return err
}

// dial connects to port if a process of o listens on it.
func dial(ctx context.Context, o Object, port int) (net.Conn, error) {
	closed := sandboxer.E(sandboxer.Unavailable, nil, "nothing listens on port %d of sandbox %s", port, o.Spec.ID)
	sockets := listeners(port)
	if len(sockets) == 0 {
		return nil, closed
	}
	pids, err := members(o.cookie())
	if err != nil {
		return nil, err
	}
	for _, pid := range pids {
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
		table, err := os.Open(file)
		if err != nil {
			continue
		}
		list, _ := procnet.Listeners(table)
		table.Close()
		for _, l := range list {
			if l.Port == port && l.Inode != 0 {
				found[fmt.Sprintf("socket:[%d]", l.Inode)] = net.JoinHostPort(host, strconv.Itoa(port))
			}
		}
	}
	return found
}

// measure returns what o consumes now.
func measure(o Object) (sandboxer.Stats, error) {
	s := sandboxer.Stats{At: time.Now(), CPU: o.CPU, RxBytes: -1, TxBytes: -1}
	const tick = time.Second / 100 // USER_HZ
	pids, err := members(o.cookie())
	if err != nil {
		return s, err
	}
	for _, pid := range pids {
		f, err := procs.Stat(pid)
		if err != nil {
			return s, err
		}
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
	return s, nil
}

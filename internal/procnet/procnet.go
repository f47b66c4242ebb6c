// Package procnet reads the kernel's tables of TCP sockets, /proc/net/tcp and tcp6. Their
// form is that of proc_pid_net(5): a line of titles, then for each socket its number, local
// and remote address and port in hexadecimal, and its state. They may come from inside of a
// sandbox, and so are read within bounds and never trusted further than a list of ports.
package procnet

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// MaxBytes is how much of the tables is read: some 6,500 sockets.
const MaxBytes = 1 << 20

// A Listener is a socket that takes connections.
type Listener struct {
	Port     int
	Loopback bool // it takes those alone that come from where it is
	// Inode is the number in the name that /proc/PID/fd has for the socket, "socket:[inode]", if the
	// table has it.
	Inode uint64
}

const listen = "0A" // TCP_LISTEN

var (
	v6 = strings.Repeat("0", 24) + fmt.Sprintf("%08X", binary.NativeEndian.Uint32([]byte{0, 0, 0, 1}))
	// dockerDNS is 127.0.0.11, where Docker itself answers for names in a container of a
	// user-defined network.
	dockerDNS = fmt.Sprintf("%08X", binary.NativeEndian.Uint32([]byte{127, 0, 0, 11}))
)

// Listeners reads one table or several after each other, and leaves out a container
// engine's own socket. known is false if there was no table.
func Listeners(r io.Reader) (list []Listener, known bool) {
	sc := bufio.NewScanner(io.LimitReader(r, MaxBytes))
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) < 4 {
			continue
		}
		known = known || f[1] == "local_address"
		addr, port, ok := strings.Cut(f[1], ":")
		n, err := strconv.ParseUint(port, 16, 16)
		if !ok || err != nil || n == 0 || f[3] != listen || addr == dockerDNS {
			continue
		}
		l := Listener{Port: int(n), Loopback: isLoopback(addr)}
		if len(f) >= 10 {
			l.Inode, _ = strconv.ParseUint(f[9], 10, 64)
		}
		list = append(list, l)
	}
	return list, known && sc.Err() == nil
}

// isLoopback reports whether addr is of 127.0.0.0/8 or ::1, as the kernel prints them: in
// words of 32 bits in the order of this machine.
func isLoopback(addr string) bool {
	if addr == v6 {
		return true
	}
	n, err := strconv.ParseUint(addr, 16, 32)
	if err != nil || len(addr) != 8 {
		return false
	}
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], uint32(n))
	return b[0] == 127
}

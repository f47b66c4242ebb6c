package mounts

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/namespaces"
)

// A Space is the mount namespace of an engine; nil is that of this process.
type Space struct{ ns *os.File }

// ErrApart says that an engine sees mounts elsewhere, where this process may not make any.
var ErrApart = errors.New("the engine is in another mount namespace, which this process may not enter")

// Peer returns the mount namespace of the process that listens at the other end of a Unix socket. For a socket that a service
// inherited that is the process that gave it, systemd. ErrApart: it is another namespace, and cannot be entered. Close closes the result.
func Peer(fd int) (*Space, error) {
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, os.NewSyscallError("getsockopt", err)
	}
	if cred.Pid == 0 { // in a process namespace that cannot be looked into from here
		return nil, ErrApart
	}
	ns, err := namespaceOf(int(cred.Pid))
	if errors.Is(err, fs.ErrPermission) {
		return nil, ErrApart
	}
	if err != nil {
		return nil, err
	}
	s := &Space{ns}
	// The listening process lives as long as the connection: so the number was not another process's.
	poll := []unix.PollFd{{Fd: int32(fd)}}
	if _, err := unix.Poll(poll, 0); err != nil || poll[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0 {
		s.Close()
		return nil, errors.Join(err, unix.ECONNRESET)
	}
	ours, err := os.Stat("/proc/self/ns/mnt")
	theirs, terr := ns.Stat()
	if err := errors.Join(err, terr); err != nil || os.SameFile(ours, theirs) {
		s.Close()
		return nil, err
	}
	if err := s.do(func() error { return nil }); err != nil {
		s.Close()
		return nil, ErrApart
	}
	return s, nil
}

// namespaceOf opens the mount namespace that most threads of a process are in. Podman has threads in the namespaces of containers
// while it copies files, and if its first thread, the one of /proc/PID/ns, was one of these, it stays there even after the container's end.
func namespaceOf(pid int) (*os.File, error) {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	threads, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	count := map[uint64]int{} // by inode
	var most *os.File
	var mostIn int
	for _, t := range threads {
		ns, terr := os.Open(filepath.Join(dir, t.Name(), "ns/mnt"))
		if terr != nil { // perhaps it has ended
			err = terr
			continue
		}
		var st unix.Stat_t
		if terr := unix.Fstat(int(ns.Fd()), &st); terr != nil {
			ns.Close()
			err = terr
			continue
		}
		if count[st.Ino]++; count[st.Ino] > mostIn {
			most, ns, mostIn = ns, most, count[st.Ino]
		}
		if ns != nil {
			ns.Close()
		}
	}
	if most == nil {
		return nil, cmp.Or(err, fs.ErrNotExist)
	}
	return most, nil
}

// Close closes it.
func (s *Space) Close() {
	if s != nil {
		s.ns.Close()
	}
}

// do calls f in the namespace.
func (s *Space) do(f func() error) error {
	if s == nil {
		return f()
	}
	return namespaces.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := unix.Setns(int(s.ns.Fd()), unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("setns", err)
		}
		return f()
	})
}

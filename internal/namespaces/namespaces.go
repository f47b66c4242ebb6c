//go:build linux

// Package namespaces works in other namespaces of Linux than this process is in: each time on a thread of its own, which
// ends with the work, so that nothing else of this process is ever there.
package namespaces

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread calls f on a thread that ends with it, and with the namespaces that f has put it in.
func OnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread does not end with its goroutine, and stands for the whole
			// process in /proc/self: it is held while another one does this.
			other := make(chan error, 1)
			go func() {
				runtime.LockOSThread()
				other <- f()
			}()
			done <- <-other
			runtime.UnlockOSThread()
			return
		}
		done <- f()
	}()
	return <-done
}

// InNetwork calls f in the network namespace that netns is open on. Sockets that f opens there, such as a listener, stay there;
// goroutines that it starts are not in it. Entering it takes CAP_SYS_ADMIN.
func InNetwork(netns *os.File, f func() error) error {
	return OnThread(func() error {
		if err := unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("setns", err)
		}
		return f()
	})
}

// InNetworkAt is InNetwork for the namespace at a path, such as /run/netns/NAME or /proc/PID/ns/net.
func InNetworkAt(path string, f func() error) error {
	netns, err := os.Open(path)
	if err != nil {
		return err
	}
	defer netns.Close()
	return InNetwork(netns, f)
}

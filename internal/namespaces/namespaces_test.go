//go:build linux

package namespaces

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

const own = "/proc/thread-self/ns/net"

// Work in other namespaces uses threads that do nothing else before or after: none of this process's is
// left there, and the first one, which stands for the process, never goes.
func TestInNetwork(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root makes network namespaces")
	}
	home, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	var there *os.File
	err = OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		there, err = os.Open(own)
		return err
	})
	if err != nil {
		t.Skip("this machine makes no network namespace: ", err)
	}
	defer there.Close()
	want, err := there.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if os.SameFile(want, home) {
		t.Fatal("a new namespace is the old one")
	}
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			err := InNetwork(there, func() error {
				is, err := os.Stat(own)
				switch {
				case err != nil:
					return err
				case !os.SameFile(is, want):
					return errors.New("it is not done there")
				case unix.Gettid() == unix.Getpid():
					return errors.New("the first thread went there")
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			if is, err := os.Stat(own); err != nil || !os.SameFile(is, home) {
				t.Errorf("a thread of others is elsewhere, %v", err)
			}
		})
	}
	all.Wait()

	// A listener stays where it was made: abstract names are those of a network namespace.
	name := fmt.Sprintf("@sandboxer-test-namespaces-%d", os.Getpid())
	var l net.Listener
	err = InNetwork(there, func() (err error) {
		l, err = net.Listen("unix", name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dial := func() error {
		c, err := net.Dial("unix", name)
		if err == nil {
			c.Close()
		}
		return err
	}
	if dial() == nil {
		t.Error("a listener elsewhere is reached from here")
	}
	if err := InNetwork(there, dial); err != nil {
		t.Errorf("and not from there: %v", err)
	}

	wrong := errors.New("wrong")
	if err := InNetworkAt(own, func() error { return wrong }); err != wrong {
		t.Errorf("an error comes back as %v", err)
	}
	if err := InNetworkAt(t.TempDir()+"/none", func() error { return nil }); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a namespace that is not there: %v", err)
	}
}

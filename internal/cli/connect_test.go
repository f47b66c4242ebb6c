package cli

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// What a killed command left in the directory of temporary files goes, and nothing that is another's or in use.
func TestSweepSockets(t *testing.T) {
	tmp, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(tmp) })
	place := func(name string, age time.Duration, live bool) string {
		dir := filepath.Join(tmp, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "api.sock"), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { l.Close() })
		if !live {
			l.Close()
		}
		at := time.Now().Add(-age)
		if err := os.Chtimes(dir, at, at); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	dead := place("sandboxer-dead", time.Hour, false)
	stay := []string{place("sandboxer-live", time.Hour, true), place("sandboxer-new", 0, false), place("other-dead", time.Hour, false)}
	if os.Geteuid() == 0 {
		others := place("sandboxer-others", time.Hour, false)
		if err := os.Chown(others, 12345, 12345); err != nil {
			t.Fatal(err)
		}
		stay = append(stay, others)
	}
	sweepSockets(tmp)
	if _, err := os.Lstat(dead); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", dead, err)
	}
	for _, dir := range stay {
		if _, err := os.Lstat(filepath.Join(dir, "api.sock")); err != nil {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

package edge

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestListenUnix(t *testing.T) {
	dir := t.TempDir()
	sock := filepath.Join(dir, "d", "api.sock")
	l, err := ListenUnix(sock)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(sock); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket %v, %v", fi.Mode(), err)
	}
	if fi, err := os.Stat(filepath.Dir(sock)); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("directory %v, %v", fi.Mode(), err)
	}
	if _, err := ListenUnix(sock); !errors.Is(err, sandboxer.Conflict) || !strings.Contains(err.Error(), "another server answers at") {
		t.Errorf("a second server: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close() // as a killed server leaves it
	if l, err = ListenUnix(sock); err != nil {
		t.Fatalf("after a dead server: %v", err)
	}
	l.Close()
	file := filepath.Join(dir, "file")
	os.WriteFile(file, []byte("x"), 0o600)
	if _, err := ListenUnix(file); !errors.Is(err, sandboxer.Conflict) {
		t.Errorf("over a file: %v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "x" {
		t.Error("the file was touched")
	}
	if _, err := ListenUnix(filepath.Join(dir, strings.Repeat("x", 120))); !errors.Is(err, sandboxer.Invalid) {
		t.Errorf("a long path: %v", err)
	}
}

func TestCheckTCP(t *testing.T) {
	for addr, open := range map[string]bool{"0.0.0.0:80": true, ":80": true, "[::]:80": true, "192.0.2.1:80": true, "127.0.0.1:80": false, "[::1]:80": false, "localhost:80": false} {
		if err := CheckTCP(addr, false); errors.Is(err, sandboxer.Denied) != open || err != nil && sandboxer.HintOf(err) == "" {
			t.Errorf("%s: %v", addr, err)
		}
		if err := CheckTCP(addr, true); err != nil {
			t.Errorf("%s, which may be open: %v", addr, err)
		}
	}
}

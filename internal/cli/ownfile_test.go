package cli

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestConfigFilesAreFiles: what is no ordinary file, or anybody's, is not taken for
// settings, and nothing waits for it.
func TestConfigFilesAreFiles(t *testing.T) {
	for name, put := range map[string]func(string) error{
		"not a regular file": func(p string) error { return syscall.Mkfifo(p, 0o600) },
		"every user can write": func(p string) error {
			if err := os.WriteFile(p, []byte("log_level: debug\n"), 0o600); err != nil {
				return err
			}
			return os.Chmod(p, 0o666)
		},
		"larger than": func(p string) error { return os.WriteFile(p, make([]byte, maxOwnFile+1), 0o600) },
	} {
		dir := t.TempDir()
		if err := put(filepath.Join(dir, configFile)); err != nil {
			t.Fatal(err)
		}
		_, err := readConfigFiles([]configDir{{Path: dir}})
		if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	dir := t.TempDir()
	if err := os.Symlink("/dev/zero", filepath.Join(dir, configFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := readConfigFiles([]configDir{{Path: dir}}); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("/dev/zero: %v", err)
	}
}

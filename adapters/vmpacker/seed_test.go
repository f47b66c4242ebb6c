package vmpacker

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.yaml.in/yaml/v4"
	"golang.org/x/crypto/ssh"

	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// TestSeed: the seed tells cloud-init, in its own terms, the machine's name, who may log in and which host key the
// server shows. TestDebian has the real cloud-init read it, in make test-long.
func TestSeed(t *testing.T) {
	_, public, err := sshrun.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	private, hostPublic, err := sshrun.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	for _, hostKey := range []string{private, ""} {
		dir := t.TempDir()
		if err := writeSeed(dir, "build-1", public, hostKey); err != nil {
			t.Fatal(err)
		}
		read := func(name string, into any) {
			t.Helper()
			data, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if fi, err := os.Stat(filepath.Join(dir, name)); err != nil || fi.Mode().Perm() != 0o600 {
				t.Errorf("%s: %v, %v", name, fi, err)
			}
			d := yaml.NewDecoder(bytes.NewReader(data))
			d.KnownFields(true)
			if err := d.Decode(into); err != nil {
				t.Errorf("%s: %v\n%s", name, err, data)
			}
			if name == "user-data" && !bytes.HasPrefix(data, []byte("#cloud-config\n")) {
				t.Errorf("cloud-init does not take it for a configuration:\n%s", data)
			}
		}
		var meta struct {
			Instance string `yaml:"instance-id"`
			Name     string `yaml:"local-hostname"`
		}
		read("meta-data", &meta)
		if meta.Instance != "build-1" || meta.Name != "build-1" {
			t.Errorf("meta-data: %+v", meta)
		}
		var user struct {
			Admitted    []string          `yaml:"ssh_authorized_keys"`
			DisableRoot *bool             `yaml:"disable_root"`
			Delete      bool              `yaml:"ssh_deletekeys"`
			Keys        map[string]string `yaml:"ssh_keys"`
		}
		read("user-data", &user)
		if !slices.Equal(user.Admitted, []string{public}) || user.DisableRoot == nil || *user.DisableRoot {
			t.Errorf("user-data admits %+v", user)
		}
		if hostKey == "" {
			if user.Delete || user.Keys != nil {
				t.Errorf("without a host key: %+v", user)
			}
			continue
		}
		signer, err := ssh.ParsePrivateKey([]byte(user.Keys["ed25519_private"]))
		if err != nil {
			t.Fatal(err)
		}
		want, _, _, _, err := ssh.ParseAuthorizedKey([]byte(hostPublic))
		if err != nil || !user.Delete || len(user.Keys) != 1 || !bytes.Equal(signer.PublicKey().Marshal(), want.Marshal()) {
			t.Errorf("host keys: %d, the image's are deleted: %t, %v", len(user.Keys), user.Delete, err)
		}
	}
}

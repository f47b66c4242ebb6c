package checkpoint

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// KeyFile is the name of the signing key in a data directory.
const KeyFile = "checkpoint.key"

// LoadKey returns the key in dir with which an installation signs its checkpoints, and
// makes it if there is none. The file is PKCS #8 in PEM, readable by its owner only;
// a key that others can read is refused as Denied.
func LoadKey(dir string) (ed25519.PrivateKey, error) {
	path := filepath.Join(dir, KeyFile)
	key, err := readKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	if _, key, err = ed25519.GenerateKey(rand.Reader); err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(dir, KeyFile+".*") // 0600
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the key that signs checkpoints cannot be written to %s", dir)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	err = pem.Encode(f, &pem.Block{Type: "PRIVATE KEY", Bytes: der})
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		// Linked rather than renamed: if two programs begin at once, only one makes the key.
		if err = os.Link(f.Name(), path); errors.Is(err, fs.ErrExist) {
			return readKey(path)
		}
	}
	if err == nil {
		err = wholefile.SyncDir(dir)
	}
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the key that signs checkpoints cannot be written to %s", dir)
	}
	return key, nil
}

func readKey(path string) (ed25519.PrivateKey, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if fi.Mode().Perm()&0o077 != 0 {
		return nil, sandboxer.E(sandboxer.Denied, nil, "%s can be read or written by others (%v)", path, fi.Mode().Perm()).
			WithHint("if no other user has read it, run: chmod 600 %s", path)
	}
	bad := func(err error) (ed25519.PrivateKey, error) {
		return nil, sandboxer.E(sandboxer.Invalid, err, "%s is not an ed25519 key in PEM", path).
			WithHint("restore it from a backup; without it, exported checkpoints cannot be recognized as yours")
	}
	data := make([]byte, min(fi.Size(), 64<<10))
	if _, err := f.ReadAt(data, 0); err != nil {
		return bad(err)
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return bad(nil)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return bad(errors.New("it does not parse")) // the cause could quote the key
	}
	k, ok := key.(ed25519.PrivateKey)
	if !ok {
		return bad(nil)
	}
	return k, nil
}

// ID returns the name by which others know checkpoints that are signed with key.
func ID(key ed25519.PrivateKey) KeyID { return keyID(key.Public().(ed25519.PublicKey)) }

package manager

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/json"
	"fmt"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// A sealer encrypts what the store keeps, with the installation's key.
type sealer struct{ aead cipher.AEAD }

func newSealer(key []byte) (sealer, error) {
	if len(key) != 32 {
		return sealer{}, sandboxer.E(sandboxer.Invalid, nil, "the key that seals environments has %d bytes; want 32", len(key))
	}
	block, err := aes.NewCipher(key)
	if err == nil {
		var aead cipher.AEAD
		if aead, err = cipher.NewGCM(block); err == nil {
			return sealer{aead}, nil
		}
	}
	return sealer{}, sandboxer.E(sandboxer.Internal, err, "the sealing key cannot be used")
}

// seal encrypts plain, authenticated with the name of what it belongs to.
func (s sealer) seal(name, plain []byte) []byte {
	nonce := make([]byte, s.aead.NonceSize(), s.aead.NonceSize()+len(plain)+s.aead.Overhead())
	rand.Read(nonce)
	return s.aead.Seal(nonce, nonce, plain, name)
}

// open is the reverse of seal.
func (s sealer) open(name, sealed []byte) ([]byte, error) {
	n := s.aead.NonceSize()
	if len(sealed) <= n {
		return nil, fmt.Errorf("%d sealed bytes are too few", len(sealed))
	}
	return s.aead.Open(nil, sealed[:n], sealed[n:], name)
}

// sealEnv encrypts env for the store. The generation is authenticated with it, so
// that one sandbox's environment cannot be moved to another's record.
func (bx box) sealEnv(env map[string]string) ([]byte, error) {
	return bx.m.sealAs(sealName(bx.sb), env)
}

// sealAs encrypts env, authenticated with the name of the record it belongs to.
func (m *Manager) sealAs(name []byte, env map[string]string) ([]byte, error) {
	if len(env) == 0 {
		return nil, nil
	}
	plain, err := json.Marshal(env)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the environment does not encode")
	}
	return m.seal.seal(name, plain), nil
}

// openEnv is the reverse of sealEnv. Failed: the key of the installation is another
// one now, or the record was tampered with.
func (bx box) openEnv() (map[string]string, error) {
	return bx.m.openAs(sealName(bx.sb), "sandbox "+bx.sb.ID, bx.sb.SealedEnv)
}

func (m *Manager) openAs(name []byte, whose string, sealed []byte) (map[string]string, error) {
	if len(sealed) == 0 {
		return nil, nil
	}
	plain, err := m.seal.open(name, sealed)
	var env map[string]string
	if err == nil {
		_, err = strictjson.DecodeStored(plain, &env)
	}
	if err != nil {
		return nil, sandboxer.E(sandboxer.Failed, err, "the stored environment of %s cannot be opened", whose).
			WithHint("the installation's key was replaced; create the sandbox again")
	}
	return env, nil
}

func sealName(sb *sandboxer.Sandbox) []byte {
	return fmt.Appendf(nil, "%s/%d/%s", sb.ID, sb.Generation, sb.Tenant)
}

func snapshotSealName(rec *sandboxer.SnapshotRecord) []byte {
	return fmt.Appendf(nil, "snapshot/%s/%s", rec.ID, rec.Tenant)
}

// secretSealName begins unlike the name of any sandbox or snapshot, and has each part once: no ID has a colon, and
// no name of a secret a slash.
func secretSealName(ref sandboxer.SecretRef) []byte {
	return fmt.Appendf(nil, "secret:%d/%s/%s", ref.Version, ref.Name, ref.Tenant)
}

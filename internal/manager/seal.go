package manager

import (
	"crypto/rand"
	"encoding/json"
	"fmt"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

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
	nonce := make([]byte, m.seal.NonceSize(), m.seal.NonceSize()+len(plain)+m.seal.Overhead())
	rand.Read(nonce)
	return m.seal.Seal(nonce, nonce, plain, name), nil
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
	n := m.seal.NonceSize()
	var plain []byte
	err := fmt.Errorf("sealed environment of %d bytes", len(sealed))
	if len(sealed) > n {
		plain, err = m.seal.Open(nil, sealed[:n], sealed[n:], name)
	}
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

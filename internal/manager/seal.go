package manager

import (
	"crypto/rand"
	"encoding/json"
	"fmt"

	"github.com/sand-boxer/sandboxer"
)

// sealEnv encrypts env for the store. The incarnation is authenticated with it, so
// that one sandbox's environment cannot be moved to another's record.
func (m *Manager) sealEnv(sb *sandboxer.Sandbox, env map[string]string) ([]byte, error) {
	if len(env) == 0 {
		return nil, nil
	}
	plain, err := json.Marshal(env)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the environment does not encode")
	}
	nonce := make([]byte, m.seal.NonceSize(), m.seal.NonceSize()+len(plain)+m.seal.Overhead())
	rand.Read(nonce)
	return m.seal.Seal(nonce, nonce, plain, sealName(sb)), nil
}

// openEnv is the reverse of sealEnv. Failed: the key of the installation is another
// one now, or the record was tampered with.
func (m *Manager) openEnv(sb *sandboxer.Sandbox) (map[string]string, error) {
	if len(sb.SealedEnv) == 0 {
		return nil, nil
	}
	n := m.seal.NonceSize()
	var plain []byte
	err := fmt.Errorf("sealed environment of %d bytes", len(sb.SealedEnv))
	if len(sb.SealedEnv) > n {
		plain, err = m.seal.Open(nil, sb.SealedEnv[:n], sb.SealedEnv[n:], sealName(sb))
	}
	var env map[string]string
	if err == nil {
		err = json.Unmarshal(plain, &env)
	}
	if err != nil {
		return nil, sandboxer.E(sandboxer.Failed, err, "the stored environment of sandbox %s cannot be opened", sb.ID).
			WithHint("the installation's key was replaced; create the sandbox again")
	}
	return env, nil
}

func sealName(sb *sandboxer.Sandbox) []byte {
	return fmt.Appendf(nil, "%s/%d/%s", sb.ID, sb.Generation, sb.Tenant)
}

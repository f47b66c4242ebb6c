package manager

import (
	"crypto/rand"
	"encoding/json"
	"fmt"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// A stamp is the record of a sandbox as it was when its object was made.
type stamp struct {
	V       int                `json:"v"`
	Sandbox *sandboxer.Sandbox `json:"sandbox"`
	Env     []byte             `json:"env,omitempty"` // Sandbox.SealedEnv
}

func stampName(id string, generation int) []byte {
	return fmt.Appendf(nil, "stamp/%s/%d", id, generation)
}

// stampOf seals what Spec.Stamp says of sb, or returns nil for what is too big.
func (m *Manager) stampOf(sb *sandboxer.Sandbox) []byte {
	plain, err := json.Marshal(stamp{1, sb, sb.SealedEnv})
	if err != nil {
		return nil
	}
	nonce := make([]byte, m.seal.NonceSize(), m.seal.NonceSize()+len(plain)+m.seal.Overhead())
	rand.Read(nonce)
	sealed := m.seal.Seal(nonce, nonce, plain, stampName(sb.ID, objectGeneration(sb)))
	if len(sealed) > sandboxer.MaxStampBytes {
		return nil
	}
	return sealed
}

// openStamp returns the record that a stamp of ours holds, or nil: there is none, or it is
// another object's, or another installation's.
func (m *Manager) openStamp(f sandboxer.Found) *sandboxer.Sandbox {
	n := m.seal.NonceSize()
	if len(f.Stamp) <= n {
		return nil
	}
	plain, err := m.seal.Open(nil, f.Stamp[:n], f.Stamp[n:], stampName(f.Handle.SandboxID, f.Handle.Generation))
	if err != nil {
		return nil
	}
	var s stamp
	if _, err := strictjson.DecodeStored(plain, &s); err != nil || s.V != 1 || s.Sandbox == nil || s.Sandbox.ID != f.Handle.SandboxID {
		return nil
	}
	s.Sandbox.SealedEnv = s.Env
	return s.Sandbox
}

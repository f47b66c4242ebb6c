package manager

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// portAccess is the way in to the ports and the agents of sandboxes: it signs and reads the
// tokens of signed URLs, and has the visits under way, to end them when a port is closed or a
// sandbox stops running. Which ports are open stands in the record of a sandbox; see openAt.
//
// mu guards visits. No visit is ended under it, and neither the store nor a backend called.
type portAccess struct {
	key []byte // the installation's; signs tokens

	mu     sync.Mutex
	visits map[string]map[*Visit]struct{} // by sandbox ID
}

func newPortAccess(key []byte) *portAccess {
	return &portAccess{key: key, visits: map[string]map[*Visit]struct{}{}}
}

// enter has v ended with its port and its sandbox, until leave.
func (a *portAccess) enter(v *Visit) (leave func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.visits[v.SandboxID] == nil {
		a.visits[v.SandboxID] = map[*Visit]struct{}{}
	}
	a.visits[v.SandboxID][v] = struct{}{}
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.visits[v.SandboxID], v)
		if len(a.visits[v.SandboxID]) == 0 {
			delete(a.visits, v.SandboxID)
		}
	}
}

// end ends the visits of a port of the sandbox, or of all, and of its agent, if port is 0.
func (a *portAccess) end(id string, port int) {
	a.mu.Lock()
	visits := slices.Collect(maps.Keys(a.visits[id]))
	a.mu.Unlock()
	for _, v := range visits {
		switch {
		case port != 0 && v.Port != port:
		case v.Port == 0: // its agent
			v.cut(sandboxer.E(sandboxer.Denied, nil, "sandbox %s stopped running", id))
		default:
			v.cut(sandboxer.E(sandboxer.Denied, nil, "port %d of sandbox %s was closed", v.Port, id))
		}
	}
}

// PortTokenPrefix begins every token of SignPort, so that leaked ones are recognized.
const PortTokenPrefix = "sbx_port_"

// portClaim is what a token of SignPort says.
type portClaim struct {
	ID         string
	Generation int
	Port       int
	Rev        int64
	Until      time.Time
}

// sign returns the token that says c.
func (a *portAccess) sign(c portClaim) sandboxer.Secret {
	b := []byte{1} // version
	b = binary.BigEndian.AppendUint16(b, uint16(c.Port))
	b = binary.BigEndian.AppendUint32(b, uint32(c.Generation))
	b = binary.BigEndian.AppendUint64(b, uint64(c.Rev))
	b = binary.BigEndian.AppendUint64(b, uint64(c.Until.Unix()))
	b = append(b, c.ID...) // all before it has a fixed length
	return sandboxer.Secret(PortTokenPrefix + base64.RawURLEncoding.EncodeToString(append(b, a.mac(b)...)))
}

func (a *portAccess) mac(b []byte) []byte { return keyedDigest(a.key, "sandboxer port url\x00", b) }

// read returns what a token of sign says, also one that has expired. ok is false for any
// other.
func (a *portAccess) read(token sandboxer.Secret) (c portClaim, ok bool) {
	text, ok := strings.CutPrefix(token.Reveal(), PortTokenPrefix)
	if !ok || len(text) > 256 {
		return c, false
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	const fixed = 1 + 2 + 4 + 8 + 8
	if err != nil || len(b) < fixed+1+sha256.Size {
		return c, false
	}
	b, mac := b[:len(b)-sha256.Size], b[len(b)-sha256.Size:]
	if !hmac.Equal(mac, a.mac(b)) || b[0] != 1 {
		return c, false
	}
	return portClaim{
		Port: int(binary.BigEndian.Uint16(b[1:])), Generation: int(binary.BigEndian.Uint32(b[3:])),
		Rev: int64(binary.BigEndian.Uint64(b[7:])), Until: time.Unix(int64(binary.BigEndian.Uint64(b[15:])), 0).UTC(), ID: string(b[fixed:]),
	}, true
}

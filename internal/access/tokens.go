package access

import (
	"context"
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

// Visits control access to the ports and the agents of sandboxes. They sign and read the tokens of signed URLs and of
// sandboxes. They also know the visits in progress, which end when a port is closed or a sandbox stops running. The record of a
// sandbox says which ports are open.
//
// mu guards visits. While it is held, no visit is ended, and neither the store nor a backend is called.
type Visits struct {
	key []byte // the installation's; signs tokens

	mu     sync.Mutex
	visits map[string]map[*visit]struct{} // by sandbox ID
}

// A visit is a use of one port of a sandbox, or of its agent (port 0), that cut ends.
type visit struct {
	port int
	cut  context.CancelCauseFunc
}

// NewVisits returns Visits whose tokens are signed with key.
func NewVisits(key []byte) *Visits {
	return &Visits{key: key, visits: map[string]map[*visit]struct{}{}}
}

// Enter registers a visit of a port of the sandbox, or of its agent if port is 0. cut ends the visit with the port
// or with the sandbox, until leave.
func (a *Visits) Enter(id string, port int, cut context.CancelCauseFunc) (leave func()) {
	v := &visit{port, cut}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.visits[id] == nil {
		a.visits[id] = map[*visit]struct{}{}
	}
	a.visits[id][v] = struct{}{}
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.visits[id], v)
		if len(a.visits[id]) == 0 {
			delete(a.visits, id)
		}
	}
}

// End ends the visits of a port of the sandbox, or of all, and of its agent, if port is 0.
func (a *Visits) End(id string, port int) {
	a.mu.Lock()
	visits := slices.Collect(maps.Keys(a.visits[id]))
	a.mu.Unlock()
	for _, v := range visits {
		switch {
		case port != 0 && v.port != port:
		case v.port == 0: // its agent
			v.cut(sandboxer.E(sandboxer.Denied, nil, "sandbox %s stopped running", id))
		default:
			v.cut(sandboxer.E(sandboxer.Denied, nil, "port %d of sandbox %s was closed", v.port, id))
		}
	}
}

// PortTokenPrefix begins every token of SignPort, so that leaked ones are recognized.
const PortTokenPrefix = "sbx_port_"

// A PortClaim is the content of a token of SignPort.
type PortClaim struct {
	ID         string
	Generation int
	Port       int
	Rev        int64
	Until      time.Time
}

// SignPort returns the token for c.
func (a *Visits) SignPort(c PortClaim) sandboxer.Secret {
	b := []byte{1} // version
	b = binary.BigEndian.AppendUint16(b, uint16(c.Port))
	b = binary.BigEndian.AppendUint32(b, uint32(c.Generation))
	b = binary.BigEndian.AppendUint64(b, uint64(c.Rev))
	b = binary.BigEndian.AppendUint64(b, uint64(c.Until.Unix()))
	b = append(b, c.ID...) // all before it has a fixed length
	return sandboxer.Secret(PortTokenPrefix + base64.RawURLEncoding.EncodeToString(append(b, a.mac(b)...)))
}

func (a *Visits) mac(b []byte) []byte { return KeyedDigest(a.key, "sandboxer port url\x00", b) }

// ReadPort returns the claim of a token of SignPort, also of one that has expired. ok is false for any
// other.
func (a *Visits) ReadPort(token sandboxer.Secret) (c PortClaim, ok bool) {
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
	return PortClaim{
		Port: int(binary.BigEndian.Uint16(b[1:])), Generation: int(binary.BigEndian.Uint32(b[3:])),
		Rev: int64(binary.BigEndian.Uint64(b[7:])), Until: time.Unix(int64(binary.BigEndian.Uint64(b[15:])), 0).UTC(), ID: string(b[fixed:]),
	}, true
}

// BearerTokenPrefix begins every token of BearerToken, so that leaked ones are recognized.
const BearerTokenPrefix = "sbx_box_"

// SignBearer is the token of the sandbox that has this ID and generation.
func (a *Visits) SignBearer(id string, generation int) sandboxer.Secret {
	b := binary.BigEndian.AppendUint32(nil, uint32(generation))
	return sandboxer.Secret(BearerTokenPrefix + base64.RawURLEncoding.EncodeToString(append(b, a.bearerMAC(id, b)...)))
}

// ReadBearer returns the generation that a token of bearerToken is for. ok is false for any other token.
func (a *Visits) ReadBearer(id string, token sandboxer.Secret) (generation int, ok bool) {
	text, ok := strings.CutPrefix(token.Reveal(), BearerTokenPrefix)
	const size = 4 + sha256.Size
	if !ok || len(text) != base64.RawURLEncoding.EncodedLen(size) || sandboxer.CheckID(id) != nil {
		return 0, false
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(b) != size || !hmac.Equal(b[4:], a.bearerMAC(id, b[:4:4])) {
		return 0, false
	}
	return int(binary.BigEndian.Uint32(b)), true
}

func (a *Visits) bearerMAC(id string, generation []byte) []byte {
	return KeyedDigest(a.key, "sandboxer bearer\x00", append([]byte(id+"\x00"), generation...)) // no ID has a NUL
}

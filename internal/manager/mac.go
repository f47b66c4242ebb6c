package manager

import (
	"crypto/hmac"
	"encoding/hex"
	"strings"

	"github.com/sand-boxer/sandboxer/internal/access"
)

// macPrefix begins a stored digest; older ones have no prefix.
const macPrefix = "hmac-"

// mac is the stored form of a digest. The digest covers the environment of the request, which nobody must be able to guess from
// the database, so the form depends on the installation's key.
func (m *Manager) mac(digest string) string {
	return macPrefix + hex.EncodeToString(access.KeyedDigest(m.opts.Key, "sandboxer idempotency", []byte(digest)))
}

// digestMatches reports whether kept, a stored digest perhaps of an older version, belongs to the request with this digest.
func (m *Manager) digestMatches(kept, digest string) bool {
	if !strings.HasPrefix(kept, macPrefix) {
		kept = m.mac(kept)
	}
	return hmac.Equal([]byte(kept), []byte(digest))
}

package manager

import (
	"crypto/hmac"
	"encoding/hex"
	"strings"

	"github.com/sand-boxer/sandboxer/internal/access"
)

// macPrefix begins a digest that is kept; older ones have none.
const macPrefix = "hmac-"

// mac is the form in which a digest is kept. The digest covers the environment of the request, which
// must not be guessable from the database: so it is made with the installation's key.
func (m *Manager) mac(digest string) string {
	return macPrefix + hex.EncodeToString(access.KeyedDigest(m.opts.Key, "sandboxer idempotency", []byte(digest)))
}

// digestMatches reports whether kept, perhaps from an older version, belongs to the request with
// this digest.
func (m *Manager) digestMatches(kept, digest string) bool {
	if !strings.HasPrefix(kept, macPrefix) {
		kept = m.mac(kept)
	}
	return hmac.Equal([]byte(kept), []byte(digest))
}

package agent

import (
	"crypto/sha256"
	"encoding/base64"
	"strconv"
	"time"
)

// Sign returns the signature of a URL of the agent's /files that is used without the access token. The
// operation is "read" or "write"; path and user are exactly as in the query, with an empty user if
// there is none. A zero time never expires; otherwise the query must carry signature_expiration in
// seconds since 1970.
func Sign(token, operation, path, user string, expires time.Time) string {
	text := path + ":" + operation + ":" + user + ":" + token
	if !expires.IsZero() {
		text += ":" + strconv.FormatInt(expires.Unix(), 10)
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

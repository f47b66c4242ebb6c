// Package access decides who may do what and how much. It has the API keys, the tokens of signed URLs and of sandboxes, the
// visits that end with them, and the limits of tenants, keys and sandboxes. It neither reads nor changes a sandbox.
package access

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// CheckPage refuses pages with more items than the maximum.
func CheckPage(limit int) error {
	if limit < 0 || limit > sandboxer.MaxPage {
		return sandboxer.E(sandboxer.Invalid, nil, "a page of %d items: want 1 to %d", limit, sandboxer.MaxPage).WithHint("request fewer, and continue with the cursor of the answer")
	}
	return nil
}

// KeyedDigest digests data with the installation's key, for one purpose. Without the key nobody can guess data from a digest.
func KeyedDigest(key []byte, purpose string, data []byte) []byte {
	derived := hmac.New(sha256.New, key)
	derived.Write([]byte(purpose))
	mac := hmac.New(sha256.New, derived.Sum(nil))
	mac.Write(data)
	return mac.Sum(nil)
}

// May returns the principal in ctx, or an error if it lacks scope.
func May(ctx context.Context, scope sandboxer.Scope) (sandboxer.Principal, error) {
	p := sandboxer.PrincipalFrom(ctx)
	switch {
	case p.Tenant == "":
		return p, sandboxer.E(sandboxer.Unauthenticated, nil, "you are not logged in").
			WithHint("send an API key")
	case !p.Can(scope):
		return p, sandboxer.E(sandboxer.Denied, nil, "this needs the scope %q, which %s does not have", scope, p.Actor).
			WithHint("ask an administrator for a key with that scope")
	}
	return p, nil
}

// now is the time in the precision that the store keeps.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

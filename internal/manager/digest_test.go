package manager

import (
	"bytes"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// What is kept of a request under an idempotency key cannot be guessed at by who reads the
// database: its environment is in it.
func TestIdempotencyDigestIsKeyed(t *testing.T) {
	kept := func(key byte) string {
		r := newRig(t, func(s *setup) { s.opts.Key = bytes.Repeat([]byte{key}, 32) })
		r.create(sandboxer.CreateRequest{Key: "once", Env: map[string]string{"PASSWORD": "secret"}})
		k, err := r.store.IdempotencyKey(t.Context(), sandboxer.DefaultTenant, "once")
		if err != nil || !strings.HasPrefix(k.Digest, macPrefix) {
			t.Fatalf("kept is %+v, %v", k, err)
		}
		return k.Digest
	}
	if one, same, other := kept(1), kept(1), kept(2); one != same || one == other {
		t.Errorf("of one request there are kept %s and %s, and with another key %s", one, same, other)
	}
}
